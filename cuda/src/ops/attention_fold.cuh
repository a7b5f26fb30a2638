// What a warp does with the keys and values of a share: scores, weights, sums. Part of attention_decode.cu, which says how
// all of it goes together.

constexpr int COLUMNS = ATTN_COLUMNS; // queries of a block: the columns of an mma
constexpr int COLUMN_BLOCKS = (GROUP + COLUMNS - 1) / COLUMNS;
constexpr int WARPS = ATTN_WARPS;
constexpr int THREADS = 32 * WARPS;
constexpr int STEP_PAGES = ATTN_STEP_PAGES; // pages of a warp's step
constexpr int STRIDE = WARPS * STEP_PAGES;

struct AttentionDecodeParams {
    T* out;
    const T* q;
    const T* kv;
    const PageEntry* entries;
    const Share* shares;
    const int* n_workers;
    float* partial_acc;
    float2* partial_ml;
    unsigned* arrivals;
    int n_kv_heads;
    unsigned page_stride;
    int window;
    float scale_log2;
};
static_assert(sizeof(AttentionDecodeParams) == 88, "as in attention_decode.rs");

// The kernel for contexts with holes is of the same text; nothing of what it does besides is in the other.
#if ATTN_HOLES
typedef AttentionHolesParams Params;
typedef Turned<COLUMNS, THREADS> TurnedQueries;
#define KERNEL attention_holes
#else
typedef AttentionDecodeParams Params;
#define KERNEL attention_decode
#endif

// What the warps of a block have, to be merged.
struct Merge {
    float acc[WARPS][COLUMNS][HEAD_DIM]; // not divided by l
    float m[WARPS][COLUMNS];             // maximum, in units of log2
    float l[WARPS][COLUMNS];             // sum of weights
};

// For the shares of a tile.
struct Combine {
    float weight[COLUMNS][SHARES_MAX];
    float4 sums[THREADS];
};

struct alignas(16) Shared {
#if !ATTN_IS_F32
    T keys[WARPS][STEP_PAGES * HEAD_PAGE];
    T values[WARPS][STEP_PAGES * HEAD_PAGE];
#endif
#if ATTN_HOLES
    TurnedQueries turned;
#endif
    union {
        Merge merge;
        Combine combine;
    };
    int is_last;
};
static_assert(sizeof(Shared) <= ATTN_SHARED_BYTES, "as in attention_decode.rs");

// The columns of a block in a share.
struct Queries {
    int first; // query of column 0
    int n;     // columns in use
};

#if ATTN_IS_F32

// Plain f32: lanes hold 16-byte chunks of the head, the products are summed over the warp. For exactness, not speed.
struct Pipeline {
    __device__ __forceinline__ Pipeline(const Params&, Shared&, const Share&, const T*) {}
};

__device__ __forceinline__ void fold_share(Pipeline&, const Params& p, Shared& shared, const Share& share,
                                           const T* kv_head_keys, int kv_head, const Queries& queries) {
    constexpr int N = (HEAD_CHUNKS + 31) / 32, KEYS = 4;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const unsigned values = p.n_kv_heads * HEAD_PAGE; // elements from keys to values
    const int first = first_position(share, p.window), end = end_position(share);
    float4 query[COLUMNS][N], acc[COLUMNS][N];
    float m[COLUMNS], l[COLUMNS];
    int last[COLUMNS]; // position of each column's token
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
        m[c] = ATTN_NEG_INF;
        l[c] = 0.f;
        last[c] = share.position + (queries.first + c) / GROUP;
        const T* q = p.q + query_start(share.token, queries.first + c, kv_head, p.n_kv_heads);
#pragma unroll
        for (int n = 0; n < N; n++) {
            const int chunk = n * 32 + lane;
            acc[c][n] = make_float4(0.f, 0.f, 0.f, 0.f);
            query[c][n] = c < queries.n && chunk < HEAD_CHUNKS ? load4(q + chunk * 4) : acc[c][n];
        }
    }
#if ATTN_HOLES
    const Holes* holes = holes_of(p, share);
    int stretch = -1; // that the queries are turned for
#endif
    for (int page_idx = share.page_begin + warp; page_idx < (int)share.page_end; page_idx += WARPS) {
        const T* keys = head_page(kv_head_keys, p.entries[share.entries + page_idx].page, p.page_stride);
#if ATTN_HOLES
        const unsigned seen = holes->seen_in(page_idx);
#endif
        for (int key0 = 0; key0 < PAGE_LEN; key0 += KEYS) {
            float4 k[KEYS][N], v[KEYS][N];
            bool counts[KEYS];
#pragma unroll
            for (int i = 0; i < KEYS; i++) {
                const int position = page_idx * PAGE_LEN + key0 + i;
                counts[i] = position >= first && position < end;
#if ATTN_HOLES
                counts[i] = counts[i] && (seen >> (key0 + i) & 1);
#endif
#pragma unroll
                for (int n = 0; n < N; n++) {
                    const int chunk = n * 32 + lane;
                    k[i][n] = v[i][n] = make_float4(0.f, 0.f, 0.f, 0.f);
                    if (counts[i] && chunk < HEAD_CHUNKS) {
                        k[i][n] = load4(keys + (key0 + i) * HEAD_DIM + chunk * 4);
                        v[i][n] = load4(keys + values + (key0 + i) * HEAD_DIM + chunk * 4);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < KEYS; i++) {
                if (!counts[i]) continue;
                const int position = page_idx * PAGE_LEN + key0 + i;
#if ATTN_HOLES
                if (const int met = shared.turned.holes.stretch_of(position); met != stretch) {
                    stretch = met;
#pragma unroll
                    for (int c = 0; c < COLUMNS; c++)
#pragma unroll
                        for (int n = 0; n < N; n++)
                            if (c < queries.n && n * 32 + lane < HEAD_CHUNKS)
                                query[c][n] = load4(&shared.turned.q[stretch][c][(n * 32 + lane) * 4]);
                }
#endif
#pragma unroll
                for (int c = 0; c < COLUMNS; c++) {
                    if (c >= queries.n) break;
                    if (position > last[c] || position <= last[c] - p.window) continue;
                    float dot = 0.f;
#pragma unroll
                    for (int n = 0; n < N; n++)
                        dot += query[c][n].x * k[i][n].x + query[c][n].y * k[i][n].y + query[c][n].z * k[i][n].z +
                               query[c][n].w * k[i][n].w;
                    const float score = warp_sum(dot) * p.scale_log2;
                    const float m_new = fmaxf(m[c], score);
                    const float decay = exp2f(m[c] - m_new), weight = exp2f(score - m_new);
                    m[c] = m_new;
                    l[c] = l[c] * decay + weight;
#pragma unroll
                    for (int n = 0; n < N; n++) {
                        acc[c][n].x *= decay;
                        acc[c][n].y *= decay;
                        acc[c][n].z *= decay;
                        acc[c][n].w *= decay;
                        add_weighted(acc[c][n], weight, v[i][n]);
                    }
                }
            }
        }
    }
    Merge& merge = shared.merge;
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
        if (lane == 0) {
            merge.m[warp][c] = m[c];
            merge.l[warp][c] = l[c];
        }
#pragma unroll
        for (int n = 0; n < N; n++)
            if (n * 32 + lane < HEAD_CHUNKS) store4(&merge.acc[warp][c][(n * 32 + lane) * 4], acc[c][n]);
    }
}

#else

__device__ __forceinline__ unsigned transpose_8x8(unsigned rows) {
    unsigned columns;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(columns) : "r"(rows));
    return columns;
}

// Tensor cores. With g = lane / 4 and t = lane % 4:
// - scores of 16 keys: S^T[16 keys, 8 queries] = K Q^T. The order of the dimensions in a dot product is free, so a lane
//   takes the 16-byte chunk t of each 64 bytes of keys g and g + 8, and the same chunk of query g.
// - weights P^T[8 queries <- 16 keys]: the scores' fragment is that of the product after a transposition of 8 x 8.
// - O^T[16 dimensions, 8 queries] += V^T P^T. The order of the rows is free too: a lane takes chunk g of each 128 bytes
//   of keys 2t, 2t + 1, 2t + 8, 2t + 9, and pairs the keys; product j of a chunk has its dimensions 2j and 2j + 1.
constexpr int K_PIECES = (HEAD_CHUNKS + 3) / 4; // of 32 dimensions
constexpr int V_PIECES = (HEAD_CHUNKS + 7) / 8; // of 64 dimensions

// Where a chunk of a key lies in shared memory: exchanged among eight, so that the eight lanes of one access, which
// take four chunks of two keys, or two chunks of four, meet different banks.
__device__ __forceinline__ int chunk_place(int key, int chunk) {
    if (HEAD_CHUNKS % 8 != 0) return key * HEAD_CHUNKS + chunk;
    return key * HEAD_CHUNKS + (chunk ^ ((key >> 1 & 3) << 1) ^ ((key & 1) << 2));
}

__device__ __forceinline__ uint4 load_chunk(const T* step, int key, int chunk) {
    if (HEAD_CHUNKS % 8 != 0 && chunk >= HEAD_CHUNKS) return make_uint4(0u, 0u, 0u, 0u);
    return load16(step + chunk_place(key, chunk) * 8);
}

__device__ __forceinline__ unsigned word(const uint4& chunk, int i) {
    return i == 0 ? chunk.x : i == 1 ? chunk.y : i == 2 ? chunk.z : chunk.w;
}

// Pages that a warp copies together.
struct Step {
    unsigned page[STEP_PAGES];
    int position;   // of the first key
    int first, end; // positions that count; none when end is 0
#if ATTN_HOLES
    unsigned seen[STEP_PAGES]; // cells of each page
#endif
};

// The steps of a warp over all shares of its worker, ahead of what is computed.
struct Pipeline {
    const Params& p;
    T* keys;
    T* values;
    const T* kv_head_keys; // of this layer and KV head, in page 0
    Share share;
    int page_idx;
    Step step; // the one to be copied next

    __device__ __forceinline__ Pipeline(const Params& params, Shared& shared, const Share& first,
                                        const T* kv_head_keys)
        : p(params), keys(shared.keys[threadIdx.x >> 5]), values(shared.values[threadIdx.x >> 5]),
          kv_head_keys(kv_head_keys), share(first), page_idx(first_page(first)) {
        advance();
        copy_keys();
        copy_values();
        advance();
    }

    static __device__ __forceinline__ int first_page(const Share& share) {
        return share.page_begin + (threadIdx.x >> 5) * STEP_PAGES;
    }

    // Asks for the page ids of the step after this one.
    __device__ __forceinline__ void advance() {
        while (page_idx >= (int)share.page_end) {
            if (share.next == 0) {
                step.end = 0;
                return;
            }
            share = load_share(p.shares, share.next);
            page_idx = first_page(share);
        }
        step.position = page_idx * PAGE_LEN;
        step.first = first_position(share, p.window);
        step.end = end_position(share);
#pragma unroll
        for (int i = 0; i < STEP_PAGES; i++)
            step.page[i] = page_idx + i < (int)share.page_end ? p.entries[share.entries + page_idx + i].page : 0u;
#if ATTN_HOLES
#pragma unroll
        for (int i = 0; i < STEP_PAGES; i++) step.seen[i] = holes_of(p, share)->seen_in(page_idx + i);
#endif
        page_idx += STRIDE;
    }

    // Zeros at positions that do not count: a weight of zero would not make a NaN there vanish.
    __device__ __forceinline__ void copy(T* to, const T* from) {
        constexpr int N = PAGE_LEN * HEAD_CHUNKS; // chunks of a page
        const int lane = threadIdx.x & 31;
        if (step.end > 0) {
#pragma unroll
            for (int i = 0; i < STEP_PAGES; i++) {
                const T* page = head_page(from, step.page[i], p.page_stride);
#pragma unroll
                for (int j = 0; j < (N + 31) / 32; j++) {
                    const int idx = j * 32 + lane, key = i * PAGE_LEN + idx / HEAD_CHUNKS;
                    const int position = step.position + key;
                    int n_bytes = position >= step.first && position < step.end ? 16 : 0;
#if ATTN_HOLES
                    if (!(step.seen[i] >> (idx / HEAD_CHUNKS) & 1)) n_bytes = 0;
#endif
                    if (N % 32 == 0 || idx < N)
                        cp_async16(to + chunk_place(key, idx % HEAD_CHUNKS) * 8, page + idx * 8, n_bytes);
                }
            }
        }
        cp_async_commit(); // also where there is nothing: groups are counted
    }
    __device__ __forceinline__ void copy_keys() { copy(keys, kv_head_keys); }
    __device__ __forceinline__ void copy_values() { copy(values, kv_head_keys + (size_t)p.n_kv_heads * HEAD_PAGE); }
};

__device__ __forceinline__ void fold_share(Pipeline& pipeline, const Params& p, Shared& shared,
                                           const Share& share, const T*, int kv_head, const Queries& queries) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    uint4 query[K_PIECES];
    auto load_query = [&](const T* q) {
#pragma unroll
        for (int n = 0; n < K_PIECES; n++) {
            const bool exists = g < queries.n && n * 4 + t < HEAD_CHUNKS;
            query[n] = exists ? load16(q + (n * 4 + t) * 8) : make_uint4(0u, 0u, 0u, 0u);
        }
    };
#if ATTN_HOLES
    const Holes* all_holes = holes_of(p, share);
    const Holes& holes = shared.turned.holes;
    int stretch = -1; // that the queries are turned for
#else
    load_query(p.q + query_start(share.token, queries.first + g, kv_head, p.n_kv_heads));
#endif
    // Of columns 2t and 2t + 1: positions that count, the maximum, and this lane's part of the sum.
    int first[2], last[2];
    float m[2] = {ATTN_NEG_INF, ATTN_NEG_INF}, l[2] = {0.f, 0.f};
#pragma unroll
    for (int c = 0; c < 2; c++) {
        const int position = share.position + (queries.first + 2 * t + c) / GROUP;
        first[c] = position - p.window + 1;
        last[c] = min(position, end_position(share) - 1);
    }
    float acc[V_PIECES][4][4];
#pragma unroll
    for (int n = 0; n < V_PIECES; n++)
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[n][j][i] = 0.f;

    for (int page_idx = Pipeline::first_page(share); page_idx < (int)share.page_end; page_idx += STRIDE) {
        cp_async_wait<1>(); // the keys are here, the values may be under way
        __syncwarp();
        float s[STEP_PAGES][4]; // keys g (0, 1) and g + 8 (2, 3), columns 2t (0, 2) and 2t + 1 (1, 3)
        auto score = [&](float(&s)[STEP_PAGES][4]) {
#pragma unroll
            for (int i = 0; i < STEP_PAGES; i++) {
#pragma unroll
                for (int x = 0; x < 4; x++) s[i][x] = 0.f;
#pragma unroll
                for (int n = 0; n < K_PIECES; n++) {
                    const uint4 k0 = load_chunk(pipeline.keys, i * PAGE_LEN + g, n * 4 + t);
                    const uint4 k1 = load_chunk(pipeline.keys, i * PAGE_LEN + g + 8, n * 4 + t);
                    mma_16x8x16<T>(s[i], k0.x, k1.x, k0.y, k1.y, query[n].x, query[n].y);
                    mma_16x8x16<T>(s[i], k0.z, k1.z, k0.w, k1.w, query[n].z, query[n].w);
                }
            }
        };
#if ATTN_HOLES
        // Where stretches meet within these pages, the keys are scored once for each.
        const int cell0 = page_idx * PAGE_LEN, cell_last = min(cell0 + STEP_PAGES * PAGE_LEN, end_position(share)) - 1;
        const int met_first = holes.stretch_of(cell0), met_last = holes.stretch_of(cell_last);
        for (int met = met_first; met <= met_last; met++) {
            if (met != stretch) {
                stretch = met;
                load_query(shared.turned.q[stretch][g]);
            }
            float of_stretch[STEP_PAGES][4];
            score(of_stretch);
            const int first_cell = met == met_first ? cell0 : holes.first_cell[met];
#pragma unroll
            for (int i = 0; i < STEP_PAGES; i++)
#pragma unroll
                for (int x = 0; x < 4; x++)
                    if (cell0 + i * PAGE_LEN + g + 8 * (x >> 1) >= first_cell) s[i][x] = of_stretch[i][x];
        }
#else
        score(s);
#endif
        __syncwarp(); // every lane has read the keys
        pipeline.copy_keys();

        float m_new[2] = {m[0], m[1]};
#pragma unroll
        for (int i = 0; i < STEP_PAGES; i++)
#pragma unroll
            for (int x = 0; x < 4; x++) {
                const int position = (page_idx + i) * PAGE_LEN + g + 8 * (x >> 1);
                bool counts = position >= first[x & 1] && position <= last[x & 1];
#if ATTN_HOLES
                counts = counts && (all_holes->seen_in(page_idx + i) >> (position % PAGE_LEN) & 1);
#endif
                s[i][x] = counts ? s[i][x] * p.scale_log2 : ATTN_NEG_INF;
                m_new[x & 1] = fmaxf(m_new[x & 1], s[i][x]);
            }
        float decay[2], shift[2];
#pragma unroll
        for (int c = 0; c < 2; c++) {
#pragma unroll
            for (int mask = 4; mask < 32; mask *= 2)
                m_new[c] = fmaxf(m_new[c], __shfl_xor_sync(LANES_ALL, m_new[c], mask));
            shift[c] = shift_of(m_new[c]);
            decay[c] = exp2_fast(m[c] - shift[c]);
            m[c] = m_new[c];
            l[c] *= decay[c];
        }
#pragma unroll
        for (int n = 0; n < V_PIECES; n++)
#pragma unroll
            for (int j = 0; j < 4; j++)
#pragma unroll
                for (int x = 0; x < 4; x++) acc[n][j][x] *= decay[x & 1];

        cp_async_wait<1>(); // the values are here, the next keys may be under way
        __syncwarp();
#pragma unroll
        for (int i = 0; i < STEP_PAGES; i++) {
#pragma unroll
            for (int x = 0; x < 4; x++) {
                s[i][x] = exp2_fast(s[i][x] - shift[x & 1]);
                l[x & 1] += s[i][x];
            }
            const unsigned b0 = transpose_8x8(pack2_fast<T>(s[i][0], s[i][1]));
            const unsigned b1 = transpose_8x8(pack2_fast<T>(s[i][2], s[i][3]));
#pragma unroll
            for (int n = 0; n < V_PIECES; n++) {
                uint4 v[4];
#pragma unroll
                for (int x = 0; x < 4; x++)
                    v[x] = load_chunk(pipeline.values, i * PAGE_LEN + 2 * t + (x & 1) + 8 * (x >> 1), n * 8 + g);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const unsigned v0 = word(v[0], j), v1 = word(v[1], j), v8 = word(v[2], j), v9 = word(v[3], j);
                    mma_16x8x16<T>(acc[n][j], __byte_perm(v0, v1, 0x5410), __byte_perm(v0, v1, 0x7632),
                                   __byte_perm(v8, v9, 0x5410), __byte_perm(v8, v9, 0x7632), b0, b1);
                }
            }
        }
        __syncwarp(); // every lane has read the values
        pipeline.copy_values();
        pipeline.advance();
    }

    Merge& merge = shared.merge;
#pragma unroll
    for (int c = 0; c < 2; c++) {
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) l[c] += __shfl_xor_sync(LANES_ALL, l[c], mask);
        const int column = 2 * t + c;
        if (column >= queries.n) continue;
        if (g == 0) {
            merge.m[warp][column] = m[c];
            merge.l[warp][column] = l[c];
        }
#pragma unroll
        for (int n = 0; n < V_PIECES; n++) {
            const int chunk = n * 8 + g;
            if (chunk >= HEAD_CHUNKS) continue;
            float* to = &merge.acc[warp][column][chunk * 8];
            store4(to, make_float4(acc[n][0][c], acc[n][0][2 + c], acc[n][1][c], acc[n][1][2 + c]));
            store4(to + 4, make_float4(acc[n][2][c], acc[n][2][2 + c], acc[n][3][c], acc[n][3][2 + c]));
        }
    }
}

#endif

