// Attention of tiles of queries over the paged KV cache ("prefill"), causal, with an optional sliding window.
//
//   out[i, h] = sum_j softmax_j(scale * q[i, h] . k[j, h / group]) v[j, h / group],
//   j <= position of i, j > position of i - window
//
// A tile is (row, offset): up to TILE_QUERIES queries of a row from `offset` on. The keys of the step itself are in the
// cache already.
//   q, out  [n_tokens, n_heads, HEAD_DIM] of T, bf16 or f16
//   kv      page p of this layer at p * page_stride elements: [2: K, V][n_kv_heads][PAGE_LEN][HEAD_DIM] of T
//   tiles   [n_tiles] of (row, offset), the longest work first; the count is read from device memory
// Grid: (n_heads, most tiles), 128 threads: the heads of a group lie side by side and share K and V in L2.
// A warp has 32 queries and the block passes over tiles of 64 keys (half of both where the head is longer than 128):
// scores (m16n8k16, f32), online softmax in f32 with exp2, weights rounded to T, product with V (f32). While one
// product runs, the copy of the other's tile is under way. Shared rows are padded by 16 bytes, so that the eight rows
// of a matrix load lie in different banks.
// Operations: 4 * HEAD_DIM * n_heads for each pair of a query and a key; they bound the kernel. Bytes: a tile reads its
// keys and values once for each head, mostly from L2: 1 / TILE_QUERIES byte for each operation.
// Sources: FlashAttention-2 (arXiv 2307.08691); fragments: PTX ISA, mma.m16n8k16 and ldmatrix.

constexpr int QUERY_BLOCKS = HEAD_DIM <= 128 ? 2 : 1; // of 16 queries, for each warp
constexpr int WARP_QUERIES = 16 * QUERY_BLOCKS;
constexpr int TILE_QUERIES = WARPS * WARP_QUERIES;
constexpr int TILE_KEYS = HEAD_DIM <= 128 ? 64 : 32;
constexpr int TILE_PAGES = TILE_KEYS / PAGE_LEN;
constexpr int KEY_BLOCKS = TILE_KEYS / 8; // of 8 keys: the columns of an mma
constexpr int DIM_BLOCKS = HEAD_DIM / 8;  // of 8 dimensions
constexpr int PITCH = HEAD_DIM + 8;       // elements of a row in shared memory

struct Shared {
    T q[TILE_QUERIES * PITCH]; // at the end the output
    T k[TILE_KEYS * PITCH];
    T v[TILE_KEYS * PITCH];
    int pages[2][TILE_PAGES]; // of even and odd key tiles
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

// The row's keys that the tile needs.
struct Context {
    const T* keys; // of this layer and KV head, in page 0
    const int* pages;
    unsigned page_stride;
    int first, end; // positions
};

// The page ids of a key tile; page 0, which is not read then, where none of the page counts.
__device__ __forceinline__ void copy_page_ids(Shared& shared, const Context& context, int key_tile) {
    if (threadIdx.x < TILE_PAGES) {
        const int idx = key_tile * TILE_PAGES + threadIdx.x;
        const bool counts = idx * PAGE_LEN < context.end && (idx + 1) * PAGE_LEN > context.first;
        cp_async4(&shared.pages[key_tile & 1][threadIdx.x], context.pages + (counts ? idx : 0), counts ? 4 : 0);
    }
}

// Keys, or values when `start` leads from the ones to the others; a page at a time, eight threads for each position.
// Zeros at positions that do not count: a weight of zero would not make a NaN there vanish.
__device__ __forceinline__ void copy_key_tile(T* to, int start, const Shared& shared, const Context& context,
                                              int key_tile) {
    static_assert(THREADS == 8 * PAGE_LEN, "eight threads for each position of a page");
    const int key = threadIdx.x >> 3, chunk0 = threadIdx.x & 7;
    start += key * HEAD_DIM + chunk0 * 8;
    to += key * PITCH + chunk0 * 8;
#pragma unroll
    for (int p = 0; p < TILE_PAGES; p++) {
        const int position = key_tile * TILE_KEYS + p * PAGE_LEN + key;
        const int n_bytes = position >= context.first && position < context.end ? 16 : 0;
        const T* from = head_page(context.keys, shared.pages[key_tile & 1][p], context.page_stride) + start;
#pragma unroll
        for (int i = 0; i < HEAD_CHUNKS; i += 8)
            if (HEAD_CHUNKS % 8 == 0 || i + chunk0 < HEAD_CHUNKS)
                cp_async16(to + p * PAGE_LEN * PITCH + i * 8, from + i * 8, n_bytes);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    attention_prefill(T* __restrict__ out, const T* __restrict__ q, const T* __restrict__ kv,
                      const int* __restrict__ page_table, const int* __restrict__ row_start,
                      const int* __restrict__ row_pos0, const int2* __restrict__ tiles, const int* __restrict__ n_tiles,
                      int n_heads, int n_kv_heads, unsigned page_stride, int page_table_stride, int window,
                      float scale_log2) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);

    const int head = blockIdx.x;
    const int2 tile = tiles[blockIdx.y]; // row, offset; read before the count is known, which saves a latency
    if (blockIdx.y >= *n_tiles) return;
    const int token0 = row_start[tile.x] + tile.y;
    const int n_queries = min(TILE_QUERIES, row_start[tile.x + 1] - token0);
    const int position0 = row_pos0[tile.x] + tile.y;

    Context context;
    context.keys = kv + head / (n_heads / n_kv_heads) * HEAD_PAGE;
    context.pages = page_table + (long long)tile.x * page_table_stride;
    context.page_stride = page_stride;
    context.first = max(0, position0 - window + 1);
    context.end = position0 + n_queries;
    const int values = n_kv_heads * HEAD_PAGE; // elements from keys to values
    int key_tile = context.first / TILE_KEYS;
    const int key_tile_end = (context.end + TILE_KEYS - 1) / TILE_KEYS;

    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    // Through a shuffle, so that the compiler knows that a warp's branches go one way.
    const int warp = __shfl_sync(ALL_LANES, threadIdx.x >> 5, 0);
    const int warp_query = warp * WARP_QUERIES;
    const int warp_first = position0 + warp_query, warp_last = warp_first + WARP_QUERIES - 1; // positions

    copy_page_ids(shared, context, key_tile);
    cp_async_commit();
    const T* q_tile = q + ((long long)token0 * n_heads + head) * HEAD_DIM;
#pragma unroll
    for (int i = 0; i < TILE_QUERIES * HEAD_CHUNKS / THREADS; i++) {
        const int idx = i * THREADS + threadIdx.x, row = idx / HEAD_CHUNKS, chunk = idx % HEAD_CHUNKS;
        const bool exists = row < n_queries;
        cp_async16(&shared.q[row * PITCH + chunk * 8],
                   q_tile + (exists ? (long long)row * n_heads * HEAD_DIM + chunk * 8 : 0), exists ? 16 : 0);
    }
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    copy_key_tile(shared.k, 0, shared, context, key_tile);
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
        __syncthreads(); // the keys are here, and nobody reads the previous values any more
        copy_key_tile(shared.v, values, shared, context, key_tile);
        copy_page_ids(shared, context, key_tile + 1);
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
        __syncthreads(); // the values and the next page ids are here, and nobody reads the keys any more
        if (key_tile + 1 < key_tile_end) copy_key_tile(shared.k, 0, shared, context, key_tile + 1);
        cp_async_commit();
        if (!has_work) continue;

        if (key0 + TILE_KEYS - 1 > warp_first || key0 <= warp_last - window) { // some pairs do not count
#pragma unroll
            for (int b = 0; b < QUERY_BLOCKS; b++)
#pragma unroll
                for (int n = 0; n < KEY_BLOCKS; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int query = warp_first + b * 16 + g + (i >> 1) * 8;
                        const int key = key0 + n * 8 + t * 2 + (i & 1);
                        if (key > query || key <= query - window) s[b][n][i] = ATTN_NEG_INF;
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
                top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 1));
                top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 2));
                // No pair so far (a window that begins later): the weights have to be 0, not NaN.
                const float shift = top == ATTN_NEG_INF ? 0.f : top * scale_log2;
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

    // Through the warp's own part of the query tile, so that the stores have 16 bytes.
#pragma unroll
    for (int b = 0; b < QUERY_BLOCKS; b++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float sum = l[b][r];
            sum += __shfl_xor_sync(ALL_LANES, sum, 1);
            sum += __shfl_xor_sync(ALL_LANES, sum, 2);
            const float inverse = 1.f / sum;
            T* row = &shared.q[(warp_query + b * 16 + g + r * 8) * PITCH + t * 2];
#pragma unroll
            for (int d = 0; d < DIM_BLOCKS; d++)
                *(unsigned*)(row + d * 8) = pack2_fast<T>(acc[b][d][2 * r] * inverse, acc[b][d][2 * r + 1] * inverse);
        }
    __syncwarp();
    T* out_tile = out + ((long long)token0 * n_heads + head) * HEAD_DIM;
#pragma unroll
    for (int i = 0; i < WARP_QUERIES * HEAD_CHUNKS / 32; i++) {
        const int idx = i * 32 + lane, row = warp_query + idx / HEAD_CHUNKS, chunk = idx % HEAD_CHUNKS;
        if (row < n_queries)
            store16(out_tile + (long long)row * n_heads * HEAD_DIM + chunk * 8,
                    load16(&shared.q[row * PITCH + chunk * 8]));
    }
}
