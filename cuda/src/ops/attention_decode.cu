// Attention of single queries over the paged KV cache ("decode").
//
//   out[i, h] = sum_j softmax_j(scale * q[i, h] . k[j, h / group]) v[j, h / group],  first <= j <= position of i
//
// An item is one query token: (row, offset of the token in its row). Rows of a few tokens are several items.
//   q, out       [n_tokens, n_heads, HEAD_DIM] of T
//   kv           page p of this layer at p * page_stride elements: [2: K, V][n_kv_heads][PAGE_LEN][HEAD_DIM] of T
//   items        [n_items] of (row, offset); the count is read from device memory
//   partial_acc  [items, n_heads, n_splits, HEAD_DIM] of f32, partial_ml the same without the last dimension
//   arrivals     [items, gridDim.x], zero before and after
// Grid: (n_kv_heads * ceil(group / 8), n_splits, most items), 128 threads. A block has up to eight query heads of one
// KV head, so that K and V are read once for group <= 8, and one contiguous share of the item's pages; its warps take
// the share's pages in turn, each with an online softmax of its own. They are merged in shared memory, and the shares
// by the block that arrives last, in the order of the shares: the result does not depend on which one that is.
// Accumulation: f32; the weights are rounded to T before the product with V, as in the prefill kernel.
// Bytes: 2 * length * n_kv_heads * HEAD_DIM * sizeof(T) an item. This bounds the kernel; the loads of the next step are
// under way while the current one is computed.
// Sources: FlashAttention (arXiv 2205.14135), Flash-Decoding (split KV); fragments: PTX ISA, mma.m16n8k16, movmatrix.

constexpr int HEADS = 8;          // query heads of a block: the columns of an mma
constexpr int STEP_PAGES = HEAD_DIM <= 64 ? 2 : 1; // pages that a warp has in its registers
constexpr int SHARE_QUANTUM = WARPS * STEP_PAGES;  // pages; a smaller share would leave warps idle
constexpr int SPLITS_MAX = 64;

// One block's share of one item.
struct Share {
    const T* keys;    // of this layer and KV head, in page 0
    const int* pages; // the row's page table
    unsigned page_stride;
    unsigned values; // elements from keys to values
    int page_begin, page_end;
    int first, end; // positions that count

    __device__ __forceinline__ int page(int idx) const { return idx < page_end ? pages[idx] : 0; }
    __device__ __forceinline__ bool has(int position) const { return position >= first && position < end; }
};

// What the warps of a block have, to be merged.
struct alignas(16) Merge {
    float acc[WARPS][HEADS][HEAD_DIM]; // not divided by l
    float m[WARPS][HEADS];             // maximum, in units of log2
    float l[WARPS][HEADS];             // sum of weights
};

#if ATTN_IS_F32

// Plain f32: lanes hold 16-byte chunks of the head, the products are summed over the warp. For exactness, not speed.
__device__ __forceinline__ void fold_share(const Share& share, const T* q, int n_heads_here, float scale_log2,
                                           Merge& merge) {
    constexpr int N = (HEAD_CHUNKS + 31) / 32, KEYS = 4;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    float4 query[HEADS][N], acc[HEADS][N];
    float m[HEADS], l[HEADS];
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        m[h] = ATTN_NEG_INF;
        l[h] = 0.f;
#pragma unroll
        for (int n = 0; n < N; n++) {
            const int chunk = n * 32 + lane;
            acc[h][n] = make_float4(0.f, 0.f, 0.f, 0.f);
            query[h][n] = h < n_heads_here && chunk < HEAD_CHUNKS ? load4(q + h * HEAD_DIM + chunk * 4) : acc[h][n];
        }
    }
    for (int page_idx = share.page_begin + warp; page_idx < share.page_end; page_idx += WARPS) {
        const T* keys = head_page(share.keys, share.pages[page_idx], share.page_stride);
        for (int key0 = 0; key0 < PAGE_LEN; key0 += KEYS) {
            float4 k[KEYS][N], v[KEYS][N];
            bool counts[KEYS];
#pragma unroll
            for (int i = 0; i < KEYS; i++) {
                counts[i] = share.has(page_idx * PAGE_LEN + key0 + i);
#pragma unroll
                for (int n = 0; n < N; n++) {
                    const int chunk = n * 32 + lane;
                    k[i][n] = v[i][n] = make_float4(0.f, 0.f, 0.f, 0.f);
                    if (counts[i] && chunk < HEAD_CHUNKS) {
                        k[i][n] = load4(keys + (key0 + i) * HEAD_DIM + chunk * 4);
                        v[i][n] = load4(keys + share.values + (key0 + i) * HEAD_DIM + chunk * 4);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < KEYS; i++) {
                if (!counts[i]) continue;
#pragma unroll
                for (int h = 0; h < HEADS; h++) {
                    if (h >= n_heads_here) break;
                    float dot = 0.f;
#pragma unroll
                    for (int n = 0; n < N; n++)
                        dot += query[h][n].x * k[i][n].x + query[h][n].y * k[i][n].y + query[h][n].z * k[i][n].z +
                               query[h][n].w * k[i][n].w;
                    const float score = warp_sum(dot) * scale_log2;
                    const float m_new = fmaxf(m[h], score);
                    const float decay = exp2f(m[h] - m_new), weight = exp2f(score - m_new);
                    m[h] = m_new;
                    l[h] = l[h] * decay + weight;
#pragma unroll
                    for (int n = 0; n < N; n++) {
                        acc[h][n].x = acc[h][n].x * decay + weight * v[i][n].x;
                        acc[h][n].y = acc[h][n].y * decay + weight * v[i][n].y;
                        acc[h][n].z = acc[h][n].z * decay + weight * v[i][n].z;
                        acc[h][n].w = acc[h][n].w * decay + weight * v[i][n].w;
                    }
                }
            }
        }
    }
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        if (lane == 0) {
            merge.m[warp][h] = m[h];
            merge.l[warp][h] = l[h];
        }
#pragma unroll
        for (int n = 0; n < N; n++)
            if (n * 32 + lane < HEAD_CHUNKS) store4(&merge.acc[warp][h][(n * 32 + lane) * 4], acc[h][n]);
    }
}

#else

__device__ __forceinline__ unsigned transpose_8x8(unsigned rows) {
    unsigned columns;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(columns) : "r"(rows));
    return columns;
}

// Tensor cores, straight from registers. With g = lane / 4 and t = lane % 4:
// - scores of 16 keys: S^T[16 keys, 8 heads] = K Q^T. The order of the dimensions in a dot product is free, so a lane
//   takes the 16-byte chunk t of each 64 bytes of keys g and g + 8, and the same chunk of query head g.
// - weights P^T[8 heads <- 16 keys]: the scores' fragment is that of the product after a transposition of 8 x 8.
// - O^T[16 dimensions, 8 heads] += V^T P^T. The order of the rows is free too: a lane takes chunk g of each 128 bytes of
//   keys 2t, 2t + 1, 2t + 8, 2t + 9, and pairs the keys; product j of a chunk has its dimensions 2j and 2j + 1.
constexpr int K_PIECES = (HEAD_CHUNKS + 3) / 4; // of 32 dimensions
constexpr int V_PIECES = (HEAD_CHUNKS + 7) / 8; // of 64 dimensions

struct Keys {
    uint4 chunk[STEP_PAGES][K_PIECES][2];
};
struct Values {
    uint4 chunk[STEP_PAGES][V_PIECES][4];
};

__device__ __forceinline__ uint4 load_chunk(const T* position, int chunk, bool counts) {
    if (counts && chunk < HEAD_CHUNKS) return load16_once(position + chunk * 8);
    return make_uint4(0u, 0u, 0u, 0u);
}

__device__ __forceinline__ void load_keys(Keys& keys, const Share& share, const int (&page)[STEP_PAGES], int page_idx,
                                          int g, int t) {
#pragma unroll
    for (int p = 0; p < STEP_PAGES; p++) {
        const T* base = head_page(share.keys, page[p], share.page_stride);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int key = g + 8 * half;
            const bool counts = share.has((page_idx + p) * PAGE_LEN + key);
#pragma unroll
            for (int n = 0; n < K_PIECES; n++)
                keys.chunk[p][n][half] = load_chunk(base + key * HEAD_DIM, n * 4 + t, counts);
        }
    }
}

__device__ __forceinline__ void load_values(Values& values, const Share& share, const int (&page)[STEP_PAGES],
                                            int page_idx, int g, int t) {
#pragma unroll
    for (int p = 0; p < STEP_PAGES; p++) {
        const T* base = head_page(share.keys, page[p], share.page_stride) + share.values;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int key = 2 * t + (i & 1) + 8 * (i >> 1);
            // Zeros past the end: a weight of zero would not make a NaN there vanish.
            const bool counts = share.has((page_idx + p) * PAGE_LEN + key);
#pragma unroll
            for (int n = 0; n < V_PIECES; n++)
                values.chunk[p][n][i] = load_chunk(base + key * HEAD_DIM, n * 8 + g, counts);
        }
    }
}

__device__ __forceinline__ unsigned word(const uint4& chunk, int i) {
    return i == 0 ? chunk.x : i == 1 ? chunk.y : i == 2 ? chunk.z : chunk.w;
}

__device__ __forceinline__ void fold_share(const Share& share, const T* q, int n_heads_here, float scale_log2,
                                           Merge& merge) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    uint4 query[K_PIECES];
#pragma unroll
    for (int n = 0; n < K_PIECES; n++) query[n] = load_chunk(q + g * HEAD_DIM, n * 4 + t, g < n_heads_here);

    // Of heads 2t and 2t + 1; l is this lane's part of the sum.
    float m[2] = {ATTN_NEG_INF, ATTN_NEG_INF}, l[2] = {0.f, 0.f};
    float acc[V_PIECES][4][4];
#pragma unroll
    for (int n = 0; n < V_PIECES; n++)
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[n][j][i] = 0.f;

    constexpr int STRIDE = WARPS * STEP_PAGES;
    int page_idx = share.page_begin + warp * STEP_PAGES;
    int page[STEP_PAGES];
    Keys keys;
    Values values;
#pragma unroll
    for (int p = 0; p < STEP_PAGES; p++) page[p] = share.page(page_idx + p);
    load_keys(keys, share, page, page_idx, g, t);
    load_values(values, share, page, page_idx, g, t);
#pragma unroll
    for (int p = 0; p < STEP_PAGES; p++) page[p] = share.page(page_idx + STRIDE + p);

    for (; page_idx < share.page_end; page_idx += STRIDE) {
        float s[STEP_PAGES][4]; // keys g (0, 1) and g + 8 (2, 3), heads 2t (0, 2) and 2t + 1 (1, 3)
#pragma unroll
        for (int p = 0; p < STEP_PAGES; p++) {
#pragma unroll
            for (int i = 0; i < 4; i++) s[p][i] = 0.f;
#pragma unroll
            for (int n = 0; n < K_PIECES; n++) {
                const uint4 k0 = keys.chunk[p][n][0], k1 = keys.chunk[p][n][1];
                mma_16x8x16<T>(s[p], k0.x, k1.x, k0.y, k1.y, query[n].x, query[n].y);
                mma_16x8x16<T>(s[p], k0.z, k1.z, k0.w, k1.w, query[n].z, query[n].w);
            }
        }
        // Past the share nothing counts, and the loads read nothing.
        load_keys(keys, share, page, page_idx + STRIDE, g, t);

        float m_new[2] = {m[0], m[1]};
#pragma unroll
        for (int p = 0; p < STEP_PAGES; p++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const bool counts = share.has((page_idx + p) * PAGE_LEN + g + 8 * (i >> 1));
                s[p][i] = counts ? s[p][i] * scale_log2 : ATTN_NEG_INF;
                m_new[i & 1] = fmaxf(m_new[i & 1], s[p][i]);
            }
        float decay[2];
#pragma unroll
        for (int c = 0; c < 2; c++) {
#pragma unroll
            for (int mask = 4; mask < 32; mask *= 2)
                m_new[c] = fmaxf(m_new[c], __shfl_xor_sync(ALL_LANES, m_new[c], mask));
            decay[c] = exp2_fast(m[c] - m_new[c]); // every page has a key that counts: m_new is finite
            m[c] = m_new[c];
            l[c] *= decay[c];
        }
#pragma unroll
        for (int n = 0; n < V_PIECES; n++)
#pragma unroll
            for (int j = 0; j < 4; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) acc[n][j][i] *= decay[i & 1];
#pragma unroll
        for (int p = 0; p < STEP_PAGES; p++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                s[p][i] = exp2_fast(s[p][i] - m[i & 1]);
                l[i & 1] += s[p][i];
            }
            const unsigned b0 = transpose_8x8(pack2_fast<T>(s[p][0], s[p][1]));
            const unsigned b1 = transpose_8x8(pack2_fast<T>(s[p][2], s[p][3]));
#pragma unroll
            for (int n = 0; n < V_PIECES; n++) {
                const uint4(&v)[4] = values.chunk[p][n];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const unsigned v0 = word(v[0], j), v1 = word(v[1], j), v8 = word(v[2], j), v9 = word(v[3], j);
                    mma_16x8x16<T>(acc[n][j], __byte_perm(v0, v1, 0x5410), __byte_perm(v0, v1, 0x7632),
                                   __byte_perm(v8, v9, 0x5410), __byte_perm(v8, v9, 0x7632), b0, b1);
                }
            }
        }
        load_values(values, share, page, page_idx + STRIDE, g, t);
#pragma unroll
        for (int p = 0; p < STEP_PAGES; p++) page[p] = share.page(page_idx + 2 * STRIDE + p);
    }

#pragma unroll
    for (int c = 0; c < 2; c++) {
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) l[c] += __shfl_xor_sync(ALL_LANES, l[c], mask);
        if (g == 0) {
            merge.m[warp][2 * t + c] = m[c];
            merge.l[warp][2 * t + c] = l[c];
        }
#pragma unroll
        for (int n = 0; n < V_PIECES; n++) {
            const int chunk = n * 8 + g;
            if (chunk >= HEAD_CHUNKS) continue;
            float* to = &merge.acc[warp][2 * t + c][chunk * 8];
            store4(to, make_float4(acc[n][0][c], acc[n][0][2 + c], acc[n][1][c], acc[n][1][2 + c]));
            store4(to + 4, make_float4(acc[n][2][c], acc[n][2][2 + c], acc[n][3][c], acc[n][3][2 + c]));
        }
    }
}

#endif

// Sums the shares of n_heads_here heads, from head 0 of the pointers, in their order.
__device__ __forceinline__ void combine_shares(T* out, const float* partial_acc, const float2* partial_ml,
                                               int n_heads_here, int n_shares, int n_splits,
                                               float (&weight)[HEADS][SPLITS_MAX]) {
    const int lane = threadIdx.x & 31;
    for (int h = threadIdx.x >> 5; h < n_heads_here; h += WARPS) {
        float m = ATTN_NEG_INF, l = 0.f;
        for (int s = lane; s < n_shares; s += 32) m = fmaxf(m, __ldcg(&partial_ml[h * n_splits + s]).x);
        m = warp_max(m);
        for (int s = lane; s < n_shares; s += 32) {
            const float2 ml = __ldcg(&partial_ml[h * n_splits + s]);
            weight[h][s] = exp2_fast(ml.x - m);
            l += weight[h][s] * ml.y;
        }
        l = 1.f / warp_sum(l);
        for (int s = lane; s < n_shares; s += 32) weight[h][s] *= l;
    }
    __syncthreads();
    for (int idx = threadIdx.x; idx < n_heads_here * HEAD_DIM; idx += THREADS) {
        const int h = idx / HEAD_DIM, d = idx % HEAD_DIM;
        const float* acc = partial_acc + (long long)h * n_splits * HEAD_DIM + d;
        float sum = 0.f;
#pragma unroll 8
        for (int s = 0; s < n_shares; s++) sum += weight[h][s] * __ldcg(&acc[s * HEAD_DIM]);
        out[idx] = from_f32<T>(sum);
    }
}

// Registers for this many blocks on a multiprocessor, as far as nothing spills.
constexpr int RESIDENT = HEAD_DIM <= 64 ? 4 : HEAD_DIM <= 128 ? 3 : 1;

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    attention_decode(T* __restrict__ out, const T* __restrict__ q, const T* __restrict__ kv,
                     const int* __restrict__ page_table, const int* __restrict__ row_start,
                     const int* __restrict__ row_pos0, const int2* __restrict__ items, const int* __restrict__ n_items,
                     float* partial_acc, float2* partial_ml, unsigned* arrivals, int n_heads, int n_kv_heads,
                     unsigned page_stride, int page_table_stride, int window, float scale_log2) {
    __shared__ Merge merge;
    __shared__ float weight[HEADS][SPLITS_MAX];
    __shared__ bool is_last;

    const int item = blockIdx.z, split = blockIdx.y, n_splits = gridDim.y;
    const int2 query = items[item]; // row, offset; read before the count is known, which saves a latency
    if (item >= *n_items) return;
    const int length = row_pos0[query.x] + query.y + 1;
    const int first = max(0, length - window);
    const int page_first = first / PAGE_LEN;
    const int n_pages = (length + PAGE_LEN - 1) / PAGE_LEN - page_first;
    const int share_pages =
        ((n_pages + n_splits - 1) / n_splits + SHARE_QUANTUM - 1) / SHARE_QUANTUM * SHARE_QUANTUM;
    const int n_shares = (n_pages + share_pages - 1) / share_pages;
    if (split >= n_shares) return;

    const int group = n_heads / n_kv_heads, group_blocks = (group + HEADS - 1) / HEADS;
    const int kv_head = blockIdx.x / group_blocks, head_in_group = blockIdx.x % group_blocks * HEADS;
    const int head0 = kv_head * group + head_in_group;
    const int n_heads_here = min(HEADS, group - head_in_group);
    const long long head_row = (long long)(row_start[query.x] + query.y) * n_heads + head0;

    Share share;
    share.keys = kv + kv_head * HEAD_PAGE;
    share.pages = page_table + (long long)query.x * page_table_stride;
    share.page_stride = page_stride;
    share.values = n_kv_heads * HEAD_PAGE;
    share.page_begin = page_first + split * share_pages;
    share.page_end = min(share.page_begin + share_pages, page_first + n_pages);
    share.first = first;
    share.end = min(length, share.page_end * PAGE_LEN);

    fold_share(share, q + head_row * HEAD_DIM, n_heads_here, scale_log2, merge);
    __syncthreads();

    const long long partial_row = (long long)item * n_heads + head0;
    for (int idx = threadIdx.x; idx < n_heads_here * HEAD_DIM; idx += THREADS) {
        const int h = idx / HEAD_DIM, d = idx % HEAD_DIM;
        float m = merge.m[0][h];
#pragma unroll
        for (int w = 1; w < WARPS; w++) m = fmaxf(m, merge.m[w][h]);
        float l = 0.f, acc = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float decay = exp2_fast(merge.m[w][h] - m); // 0 for a warp without pages
            l += merge.l[w][h] * decay;
            acc += merge.acc[w][h][d] * decay;
        }
        if (n_shares == 1) {
            out[head_row * HEAD_DIM + idx] = from_f32<T>(acc / l);
        } else {
            const long long partial = (partial_row + h) * n_splits + split;
            partial_acc[partial * HEAD_DIM + d] = acc;
            if (d == 0) partial_ml[partial] = make_float2(m, l);
        }
    }
    if (n_shares == 1) return;

    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence(); // the block's partial results before its arrival
        unsigned* count = &arrivals[item * gridDim.x + blockIdx.x];
        is_last = atomicAdd(count, 1u) == (unsigned)n_shares - 1;
        if (is_last) *count = 0; // for the next launch
        __threadfence(); // the arrivals before the partial results of others
    }
    __syncthreads();
    if (!is_last) return;
    combine_shares(out + head_row * HEAD_DIM, partial_acc + partial_row * n_splits * HEAD_DIM,
                   partial_ml + partial_row * n_splits, n_heads_here, n_shares, n_splits, weight);
}
