// Attention of tiles of queries over the paged KV cache: prompts, and the few tokens of a context that are verified
// together. Causal, with an optional sliding window.
//
//   out[i, h] = sum_j softmax_j(scale * q[i, h] . k[j, h / GROUP]) v[j, h / GROUP],
//   j <= position of i, j > position of i - window
//
// A tile is some tokens of a context with all query heads of one KV head: its queries are (token, head) pairs, the
// heads of a token side by side. The keys of the step itself are in the cache already. Tiles are cut along their keys
// where there are too few of them to fill the device; shares are dealt to workers beforehand (shares.rs).
//   q, out       [n_tokens, n_heads, HEAD_DIM] of T, bf16 or f16
//   kv           page p of this layer at p * page_stride elements: [2: K, V][n_kv_heads][PAGE_LEN][HEAD_DIM] of T
//   entries      page tables
//   shares       worker w begins with share w, and goes on as the shares say; n_workers is read from device memory
//   partial_acc  [partial results, n_kv_heads, queries of a tile, HEAD_DIM] of f32, not divided by the sum of weights
//   partial_ml   the same without the last dimension: maximum in units of log2, sum of weights
// Grid: (n_kv_heads, most workers), THREADS threads. A warp has 32 queries of a prompt's tile, 16 of few tokens', and the
// block passes over 64 keys at a time (half of both where the head is longer than 128): scores (m16n8k16, f32), online
// softmax in f32 with exp2, weights rounded to T, product with V (f32). While one product runs, the copy of the other's
// tile is under way. Shared rows are padded by 16 bytes, so that the eight rows of a matrix load lie in different banks.
// Operations: 4 * HEAD_DIM for each pair of a query and a key; they bound the kernel for prompts. Bytes: a tile reads its
// keys and values once, 4 * HEAD_DIM for each key of a KV head; for few tokens they bound it, and come from memory.
// attention_combine sums the shares of the tiles that were cut, in their order. Grid: (n_kv_heads, queries of a tile / 8,
// most cut tiles), a warp for each query. Bytes: 4 * HEAD_DIM for each query and share, most of them from L2.
// attention_join does so for tiles of rows that have their first pages in common, and puts to it what each row has for
// itself.
// Sources: FlashAttention-2 (arXiv 2307.08691), stream-K (arXiv 2301.03598), Hydragen (arXiv 2402.05099); fragments:
// PTX ISA, mma.m16n8k16 and ldmatrix.

constexpr int WARPS = ATTN_TILE_WARPS;
constexpr int THREADS = 32 * WARPS;
constexpr int TILE_KEYS = ATTN_TILE_KEYS;
constexpr int TILE_PAGES = TILE_KEYS / PAGE_LEN;
constexpr int KEY_BLOCKS = TILE_KEYS / 8; // of 8 keys: the columns of an mma
constexpr int DIM_BLOCKS = HEAD_DIM / 8;  // of 8 dimensions
constexpr int PITCH = ATTN_TILE_PITCH;    // elements of a row in shared memory

struct AttentionTilesParams {
    T* out;
    const T* q;
    const T* kv;
    const PageEntry* entries;
    const Share* shares;
    const int* n_workers;
    float* partial_acc;
    float2* partial_ml;
    int n_kv_heads;
    unsigned page_stride;
    int window;
    float scale_log2;
};
static_assert(sizeof(AttentionTilesParams) == 80, "as in attention_tiles.rs");

template <int QUERY_BLOCKS> struct Shared {
    T q[WARPS * 16 * QUERY_BLOCKS * PITCH]; // at the end the output
    T k[TILE_KEYS * PITCH];
    T v[TILE_KEYS * PITCH];
    unsigned pages[2][TILE_PAGES]; // of even and odd key tiles
};

static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM <= 256, "a step of mma has 16 dimensions");

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return (unsigned)__cvta_generic_to_shared(pointer);
}

__device__ __forceinline__ void load_matrices(unsigned (&m)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address));
}

__device__ __forceinline__ void load_matrices_transposed(unsigned (&m)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address));
}

// 4 bytes, or zeros when n_bytes is 0.
__device__ __forceinline__ void cp_async4(void* shared, const void* global, int n_bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(n_bytes)
                 : "memory");
}

// threadIdx.x, read where it is needed: what follows from it is worked out for each share, and not kept in registers
// from one to the next.
__device__ __forceinline__ int thread_idx() {
    int idx;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(idx));
    return idx;
}

// The keys that a share needs.
struct Keys {
    const T* keys; // of this layer and KV head, in page 0
    const PageEntry* entries;
    unsigned page_stride;
    int first, end; // positions
};

// The page ids of a key tile; page 0, which is not read then, where none of the page counts.
template <int QUERY_BLOCKS>
__device__ __forceinline__ void copy_page_ids(Shared<QUERY_BLOCKS>& shared, const Keys& keys, int key_tile, int thread) {
    if (thread < TILE_PAGES) {
        const int idx = key_tile * TILE_PAGES + thread;
        const bool counts = idx * PAGE_LEN < keys.end && (idx + 1) * PAGE_LEN > keys.first;
        cp_async4(&shared.pages[key_tile & 1][thread], keys.entries + (counts ? idx : 0), counts ? 4 : 0);
    }
}

// Keys, or values when `start` leads from the ones to the others; a page at a time, eight threads for each position.
// Zeros at positions that do not count: a weight of zero would not make a NaN there vanish.
template <int QUERY_BLOCKS>
__device__ __forceinline__ void copy_key_tile(T* to, int start, const Shared<QUERY_BLOCKS>& shared, const Keys& keys,
                                              int key_tile, int thread) {
    static_assert(THREADS == 8 * PAGE_LEN, "eight threads for each position of a page");
    const int key = thread >> 3, chunk0 = thread & 7;
    start += key * HEAD_DIM + chunk0 * 8;
    to += key * PITCH + chunk0 * 8;
#pragma unroll
    for (int p = 0; p < TILE_PAGES; p++) {
        const int position = key_tile * TILE_KEYS + p * PAGE_LEN + key;
        const int n_bytes = position >= keys.first && position < keys.end ? 16 : 0;
        const T* from = head_page(keys.keys, shared.pages[key_tile & 1][p], keys.page_stride) + start;
#pragma unroll
        for (int i = 0; i < HEAD_CHUNKS; i += 8)
            if (HEAD_CHUNKS % 8 == 0 || i + chunk0 < HEAD_CHUNKS)
                cp_async16(to + p * PAGE_LEN * PITCH + i * 8, from + i * 8, n_bytes);
    }
}

// One share, for one KV head.
template <int QUERY_BLOCKS>
__device__ __forceinline__ void attend(const AttentionTilesParams& p, Shared<QUERY_BLOCKS>& shared, const Share& share,
                                       int kv_head) {
    constexpr int WARP_QUERIES = 16 * QUERY_BLOCKS, TILE_QUERIES = WARPS * WARP_QUERIES;
    const int n_queries = share.n_tokens() * GROUP, window = p.window;
    const float scale_log2 = p.scale_log2;

    // Shares are cut between key tiles.
    Keys keys;
    keys.keys = p.kv + kv_head * HEAD_PAGE;
    keys.entries = p.entries + share.entries;
    keys.page_stride = p.page_stride;
    keys.first = first_position(share, window);
    keys.end = end_position(share);
    const int values = p.n_kv_heads * HEAD_PAGE; // elements from keys to values
    int key_tile = keys.first / TILE_KEYS;
    const int key_tile_end = (keys.end + TILE_KEYS - 1) / TILE_KEYS;

    const int thread = thread_idx(), lane = thread & 31, g = lane >> 2, t = lane & 3;
    // Through a shuffle, so that the compiler knows that a warp's branches go one way.
    const int warp = __shfl_sync(LANES_ALL, thread >> 5, 0);
    const int warp_query = warp * WARP_QUERIES;
    // Positions of the warp's first and last query.
    const int warp_first = share.position + warp_query / GROUP;
    const int warp_last = share.position + (warp_query + WARP_QUERIES - 1) / GROUP;

    copy_page_ids(shared, keys, key_tile, thread);
    cp_async_commit();
#pragma unroll
    for (int i = 0; i < TILE_QUERIES * HEAD_CHUNKS / THREADS; i++) {
        const int idx = i * THREADS + thread, row = idx / HEAD_CHUNKS, chunk = idx % HEAD_CHUNKS;
        const bool exists = row < n_queries;
        const T* from = p.q + query_start(share.token, exists ? row : 0, kv_head, p.n_kv_heads) + chunk * 8;
        cp_async16(&shared.q[row * PITCH + chunk * 8], from, exists ? 16 : 0);
    }
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    copy_key_tile(shared.k, 0, shared, keys, key_tile, thread);
    cp_async_commit();

    // Rows of the eight by eight matrices that this lane addresses: of 16 rows by 16 columns in the order of a's
    // registers for the queries (and, transposed, b's for the values), in the order of b's for the keys.
    const int row_of_16 = lane & 15, column_of_16 = (lane >> 4) * 8;
    const unsigned q_address = shared_address(&shared.q[(warp_query + row_of_16) * PITCH + column_of_16]);
    const unsigned k_address = shared_address(&shared.k[((lane & 7) + (lane >> 4) * 8) * PITCH + (lane & 8)]);
    const unsigned v_address = shared_address(&shared.v[row_of_16 * PITCH + column_of_16]);

    float acc[QUERY_BLOCKS][DIM_BLOCKS][4];
    float m[QUERY_BLOCKS][2], l[QUERY_BLOCKS][2]; // of queries g and g + 8; l is this lane's part of the sum
#pragma unroll
    for (int b = 0; b < QUERY_BLOCKS; b++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            m[b][r] = ATTN_NEG_INF;
            l[b][r] = 0.f;
        }
#pragma unroll
        for (int d = 0; d < DIM_BLOCKS; d++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[b][d][i] = 0.f;
    }

    for (; key_tile < key_tile_end; key_tile++) {
        const int key0 = key_tile * TILE_KEYS;
        // A warp without a pair in this tile only helps to copy.
        const bool has_work =
            warp_query < n_queries && key0 <= warp_last && key0 + TILE_KEYS > warp_first - window + 1;

        cp_async_wait<0>();
        __syncthreads(); // the keys are here, and all warps have read the previous values
        copy_key_tile(shared.v, values, shared, keys, key_tile, thread);
        copy_page_ids(shared, keys, key_tile + 1, thread);
        cp_async_commit();

        float s[QUERY_BLOCKS][KEY_BLOCKS][4];
        if (has_work) {
#pragma unroll
            for (int b = 0; b < QUERY_BLOCKS; b++)
#pragma unroll
                for (int n = 0; n < KEY_BLOCKS; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) s[b][n][i] = 0.f;
#pragma unroll
            for (int d = 0; d < HEAD_DIM / 16; d++) {
                unsigned a[QUERY_BLOCKS][4];
#pragma unroll
                for (int b = 0; b < QUERY_BLOCKS; b++)
                    load_matrices(a[b], q_address + (b * 16 * PITCH + d * 16) * 2);
#pragma unroll
                for (int n = 0; n < KEY_BLOCKS; n += 2) {
                    unsigned k[4];
                    load_matrices(k, k_address + (n * 8 * PITCH + d * 16) * 2);
#pragma unroll
                    for (int b = 0; b < QUERY_BLOCKS; b++) {
                        mma_16x8x16<T>(s[b][n], a[b][0], a[b][1], a[b][2], a[b][3], k[0], k[1]);
                        mma_16x8x16<T>(s[b][n + 1], a[b][0], a[b][1], a[b][2], a[b][3], k[2], k[3]);
                    }
                }
            }
        }

        cp_async_wait<0>();
        __syncthreads(); // the values and the next page ids are here, and all warps have read the keys
        if (key_tile + 1 < key_tile_end) copy_key_tile(shared.k, 0, shared, keys, key_tile + 1, thread);
        cp_async_commit();
        if (!has_work) continue;

        if (key0 + TILE_KEYS - 1 > warp_first || key0 <= warp_last - window) { // some pairs do not count
#pragma unroll
            for (int b = 0; b < QUERY_BLOCKS; b++)
#pragma unroll
                for (int n = 0; n < KEY_BLOCKS; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int position = share.position + (warp_query + b * 16 + g + (i >> 1) * 8) / GROUP;
                        const int key = key0 + n * 8 + t * 2 + (i & 1);
                        if (key > position || key <= position - window) s[b][n][i] = ATTN_NEG_INF;
                    }
        }
        unsigned weights[QUERY_BLOCKS][KEY_BLOCKS][2]; // the scores' fragment is also that of the product's a
#pragma unroll
        for (int b = 0; b < QUERY_BLOCKS; b++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float top = m[b][r];
#pragma unroll
                for (int n = 0; n < KEY_BLOCKS; n++) top = fmaxf(top, fmaxf(s[b][n][2 * r], s[b][n][2 * r + 1]));
                top = fmaxf(top, __shfl_xor_sync(LANES_ALL, top, 1));
                top = fmaxf(top, __shfl_xor_sync(LANES_ALL, top, 2));
                // No pair so far (a window that begins later): the weights have to be 0, not NaN.
                const float shift = shift_of(top * scale_log2);
                const float decay = exp2_fast(m[b][r] * scale_log2 - shift);
                m[b][r] = top;
                float sum = 0.f;
#pragma unroll
                for (int n = 0; n < KEY_BLOCKS; n++) {
                    const float low = exp2_fast(s[b][n][2 * r] * scale_log2 - shift);
                    const float high = exp2_fast(s[b][n][2 * r + 1] * scale_log2 - shift);
                    sum += low + high;
                    weights[b][n][r] = pack2_fast<T>(low, high);
                }
                l[b][r] = l[b][r] * decay + sum;
#pragma unroll
                for (int d = 0; d < DIM_BLOCKS; d++) {
                    acc[b][d][2 * r] *= decay;
                    acc[b][d][2 * r + 1] *= decay;
                }
            }
#pragma unroll
        for (int n = 0; n < KEY_BLOCKS; n += 2) {
#pragma unroll
            for (int d = 0; d < DIM_BLOCKS; d += 2) {
                unsigned v[4];
                load_matrices_transposed(v, v_address + (n * 8 * PITCH + d * 8) * 2);
#pragma unroll
                for (int b = 0; b < QUERY_BLOCKS; b++) {
                    const unsigned(&a)[2] = weights[b][n], (&a8)[2] = weights[b][n + 1];
                    mma_16x8x16<T>(acc[b][d], a[0], a[1], a8[0], a8[1], v[0], v[1]);
                    mma_16x8x16<T>(acc[b][d + 1], a[0], a[1], a8[0], a8[1], v[2], v[3]);
                }
            }
        }
    }

    const bool is_whole = share.n_shares() == 1;
    const size_t partial = ((size_t)(share.partial() + share.share_idx()) * gridDim.x + kv_head) * TILE_QUERIES;
#pragma unroll
    for (int b = 0; b < QUERY_BLOCKS; b++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float sum = l[b][r];
            sum += __shfl_xor_sync(LANES_ALL, sum, 1);
            sum += __shfl_xor_sync(LANES_ALL, sum, 2);
            const int query = warp_query + b * 16 + g + r * 8;
            if (is_whole) {
                // Through the warp's own part of the query tile, so that the stores have 16 bytes.
                const float inverse = 1.f / sum;
                T* row = &shared.q[query * PITCH + t * 2];
#pragma unroll
                for (int d = 0; d < DIM_BLOCKS; d++)
                    *(unsigned*)(row + d * 8) =
                        pack2_fast<T>(acc[b][d][2 * r] * inverse, acc[b][d][2 * r + 1] * inverse);
            } else if (query < n_queries) {
                if (t == 0) p.partial_ml[partial + query] = make_float2(m[b][r] * scale_log2, sum);
                float* row = p.partial_acc + (partial + query) * HEAD_DIM + t * 2;
#pragma unroll
                for (int d = 0; d < DIM_BLOCKS; d++)
                    *(float2*)(row + d * 8) = make_float2(acc[b][d][2 * r], acc[b][d][2 * r + 1]);
            }
        }
    if (!is_whole) return;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < WARP_QUERIES * HEAD_CHUNKS / 32; i++) {
        const int idx = i * 32 + lane, query = warp_query + idx / HEAD_CHUNKS, chunk = idx % HEAD_CHUNKS;
        if (query < n_queries)
            store16(p.out + query_start(share.token, query, kv_head, p.n_kv_heads) + chunk * 8,
                    load16(&shared.q[query * PITCH + chunk * 8]));
    }
}

template <int QUERY_BLOCKS> __device__ __forceinline__ void work(const AttentionTilesParams& p) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    Shared<QUERY_BLOCKS>& shared = *reinterpret_cast<Shared<QUERY_BLOCKS>*>(shared_bytes);
    // Read before the count is known, which saves a latency: there is memory for as many as there are blocks.
    Share share = load_share(p.shares, blockIdx.y);
    if ((int)blockIdx.y >= *p.n_workers) return;
    while (true) {
        attend(p, shared, share, blockIdx.x);
        if (share.next == 0) return;
        __syncthreads(); // all warps have read what the next share is copied to
        share = load_share(p.shares, share.next);
    }
}

// Tiles of prompts are compiled beside all else: together they would be what a first start waits for longest.
#if ATTN_PROMPT
static_assert(sizeof(Shared<ATTN_PROMPT_BLOCKS>) == ATTN_PROMPT_SHARED_BYTES, "as in attention_tiles.rs");
extern "C" __global__ void __launch_bounds__(THREADS, ATTN_PROMPT_RESIDENT) attention_prompt(const AttentionTilesParams p) {
    work<ATTN_PROMPT_BLOCKS>(p);
}

#else
static_assert(sizeof(Shared<ATTN_FEW_BLOCKS>) == ATTN_FEW_SHARED_BYTES, "as in attention_tiles.rs");
extern "C" __global__ void __launch_bounds__(THREADS, ATTN_FEW_RESIDENT) attention_few(const AttentionTilesParams p) {
    work<ATTN_FEW_BLOCKS>(p);
}

// A tile that was cut. As in shares.rs.
struct Cut {
    unsigned token;
    unsigned partial;
    unsigned n_tokens;
    unsigned n_shares;
};

struct AttentionCombineParams {
    T* out;
    const Cut* cuts;
    const int* n_cuts;
    const float* partial_acc;
    const float2* partial_ml;
    int n_kv_heads;
    int tile_queries;
};
static_assert(sizeof(AttentionCombineParams) == 48, "as in attention_tiles.rs");

constexpr int COMBINE_WARPS = ATTN_COMBINE_WARPS; // a query each
constexpr int OWN_BLOCKS = (GROUP + ATTN_OWN_COLUMNS - 1) / ATTN_OWN_COLUMNS; // of a KV head, in attention_decode
constexpr int UNDER_WAY = 8;     // shares whose loads are under way together

// A result of each row of a tile for itself, as attention_decode leaves it; the rows' places are those of the tiles, in
// their order.
struct Own {
    const float* acc;
    const float2* ml;
};

template <bool HAS_OWN> __device__ __forceinline__ void sum_shares(const AttentionCombineParams& p, const Own& own) {
    const uint4 words = load16(p.cuts + blockIdx.z); // there is memory for as many as there are blocks
    if ((int)blockIdx.z >= *p.n_cuts) return;
    const Cut cut = {words.x, words.y, words.z, words.w};
    const int lane = threadIdx.x & 31, kv_head = blockIdx.x, n_shares = cut.n_shares;
    const int query = blockIdx.y * COMBINE_WARPS + (threadIdx.x >> 5);
    if (query >= (int)cut.n_tokens * GROUP) return;

    const size_t first = ((size_t)cut.partial * p.n_kv_heads + kv_head) * p.tile_queries + query;
    const size_t stride = (size_t)p.n_kv_heads * p.tile_queries; // from one share to the next
    float weight[SHARES_MAX / 32], sums[SHARES_MAX / 32];
    float m = ATTN_NEG_INF, l = 0.f;
#pragma unroll
    for (int i = 0; i < SHARES_MAX / 32; i++) {
        const int s = i * 32 + lane;
        const float2 ml = s < n_shares ? p.partial_ml[first + s * stride] : make_float2(ATTN_NEG_INF, 0.f);
        weight[i] = ml.x;
        sums[i] = ml.y;
        m = fmaxf(m, ml.x);
    }
    m = warp_max(m);
    size_t own_place = 0;
    float2 own_ml = make_float2(ATTN_NEG_INF, 0.f);
    if (HAS_OWN) {
        const int head = query % GROUP, tile_tokens = p.tile_queries / GROUP;
        const size_t row = (size_t)blockIdx.z * tile_tokens + query / GROUP;
        own_place = ((row * p.n_kv_heads + kv_head) * OWN_BLOCKS + head / ATTN_OWN_COLUMNS) * ATTN_OWN_COLUMNS +
                    head % ATTN_OWN_COLUMNS;
        own_ml = own.ml[own_place];
        m = fmaxf(m, own_ml.x);
    }
    const float own_weight = HAS_OWN ? exp2_fast(own_ml.x - m) : 0.f;
#pragma unroll
    for (int i = 0; i < SHARES_MAX / 32; i++) {
        weight[i] = exp2_fast(weight[i] - m); // some share has the query's own position: m is finite
        l += weight[i] * sums[i];
    }
    const float inverse = 1.f / (warp_sum(l) + own_weight * own_ml.y);

    T* out = p.out + query_start(cut.token, query, kv_head, p.n_kv_heads);
#pragma unroll
    for (int d0 = 0; d0 < HEAD_DIM; d0 += 128) {
        const int d = d0 + lane * 4;
        const bool exists = d < HEAD_DIM;
        const float* acc = p.partial_acc + first * HEAD_DIM + (exists ? d : 0);
        float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
        if (HAS_OWN && exists) add_weighted(sum, own_weight, load4(own.acc + own_place * HEAD_DIM + d));
#pragma unroll
        for (int i = 0; i < SHARES_MAX / 32; i++) {
            for (int j = 0; j < 32 && i * 32 + j < n_shares; j += UNDER_WAY) {
                float4 v[UNDER_WAY];
#pragma unroll
                for (int x = 0; x < UNDER_WAY; x++) {
                    const int s = i * 32 + j + x;
                    v[x] = s < n_shares ? load4(acc + s * stride * HEAD_DIM) : make_float4(0.f, 0.f, 0.f, 0.f);
                }
#pragma unroll
                for (int x = 0; x < UNDER_WAY; x++)
                    add_weighted(sum, __shfl_sync(LANES_ALL, weight[i], j + x), v[x]);
            }
        }
        if (exists) store4(out + d, make_float4(sum.x * inverse, sum.y * inverse, sum.z * inverse, sum.w * inverse));
    }
}

extern "C" __global__ void __launch_bounds__(32 * COMBINE_WARPS, 4) attention_combine(const AttentionCombineParams p) {
    sum_shares<false>(p, Own{});
}

struct AttentionJoinParams {
    T* out;
    const Cut* cuts;
    const int* n_cuts;
    const float* partial_acc;
    const float2* partial_ml;
    const float* own_acc;
    const float2* own_ml;
    int n_kv_heads;
    int tile_queries;
};
static_assert(sizeof(AttentionJoinParams) == 64, "as in attention_tiles.rs");

extern "C" __global__ void __launch_bounds__(32 * COMBINE_WARPS, 4) attention_join(const AttentionJoinParams p) {
    const AttentionCombineParams shares = {p.out,        p.cuts,       p.n_cuts,      p.partial_acc,
                                           p.partial_ml, p.n_kv_heads, p.tile_queries};
    sum_shares<true>(shares, Own{p.own_acc, p.own_ml});
}
#endif
