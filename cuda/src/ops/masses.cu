// How much attention some tokens put on each token of their contexts, where it is asked for:
//   out[query, j] (+)= weight * sum_h softmax_j(scale * q[h] . k[j, h / GROUP]),
//   over the cells j that the query sees, in the order of their tokens; 0 for those before its window.
// q: T [n_tokens, n_heads, HEAD_DIM], rotated; kv: T, pages of [n_layers][K, V][n_kv_heads][PAGE_LEN][HEAD_DIM], from the layer
// on. stats: for each query, in the row of its token, (maximum, sum) for each part of each head: float2 [n_heads, N_PARTS]; rows
// are as long as q's. out: f32. The first layer of a query writes, the others add: one thread for each cell, the heads in their
// order. Two launches. masses_stats: grid (n_heads, n_queries, N_PARTS), the softmax of one head over a part of the cells; masses:
// grid (cells / N_THREADS, n_queries).
// f32. Bytes: the keys of the context twice for each query head, mostly out of L2; few ask.
// Among holes, see attention_holes.cuh: queries are turned and rounded to T as there.
// Source: H2O (arXiv 2306.14048), which names the sums; the softmax in one pass is that of arXiv 1805.02867.

struct MassesParams {
    const T* q;
    const T* kv;
    const PageEntry* entries;
    const unsigned* holes;
    const float* inv_freq;
    T* stats;
    float* out;
    int n_kv_heads;
    unsigned page_stride;
    int window;
    float scale_log2;
    unsigned tokens[32];
    unsigned cells[32];
    unsigned tables[32];
    unsigned places[32];
    unsigned flags[32];
    float weights[32];
};
static_assert(sizeof(MassesParams) == 840, "as in masses.rs");

constexpr unsigned IS_FIRST = MASSES_IS_FIRST, HAS_HOLES = MASSES_HAS_HOLES; // bits of flags
constexpr int N_PARTS = MASSES_N_PARTS; // of a query's cells, so that a long context has the whole device; at most 32
static_assert(N_PARTS * sizeof(float2) <= HEAD_DIM * sizeof(T), "statistics lie in rows of q's length");

// The query of one head, for each stretch of its context, in shared memory.
struct alignas(16) Query {
    float q[STRETCHES_MAX][HEAD_DIM];
    Holes holes;
};

struct Masses {
    const MassesParams& p;
    const int idx;
    const int cell;          // the query's own
    const int first;         // it sees those from here on
    const Holes* all_holes;  // null where there are none

    __device__ __forceinline__ Masses(const MassesParams& p, int idx)
        : p(p), idx(idx), cell(p.cells[idx]), first(max(0, cell - p.window + 1)),
          all_holes(p.flags[idx] & HAS_HOLES ? (const Holes*)((const unsigned*)p.entries + p.holes[p.tokens[idx]])
                                             : nullptr) {}

    // Of the parts of a head.
    __device__ __forceinline__ float2* stats(int head) const {
        const size_t row_len = (size_t)p.n_kv_heads * (GROUP * HEAD_DIM);
        return (float2*)(p.stats + p.tokens[idx] * row_len) + head * N_PARTS;
    }

    // Maximum and 1 / sum of a head, out of its parts in their order: by each warp for itself. Some part has the query's own
    // cell.
    __device__ __forceinline__ float2 softmax(int head) const {
        const int part = threadIdx.x & 31;
        const float2 own = part < N_PARTS ? stats(head)[part] : make_float2(ATTN_NEG_INF, 0.f);
        const float top = warp_max(own.x);
        return make_float2(top, 1.f / warp_sum(own.y * exp2f(own.x - top)));
    }

    // Brings a head's query, turned for each stretch, by all threads; the last one's is no longer in use.
    __device__ __forceinline__ void load(Query& shared, int head) const {
        const T* from = p.q + query_start(p.tokens[idx], head % GROUP, head / GROUP, p.n_kv_heads);
        __syncthreads();
        if (all_holes == nullptr) {
            for (int i = threadIdx.x; i < HEAD_DIM; i += N_THREADS) shared.q[0][i] = to_f32(from[i]);
            __syncthreads();
            return;
        }
        constexpr int WORDS = sizeof(Holes) / 4;
        for (int i = threadIdx.x; i < WORDS; i += N_THREADS) ((int*)&shared.holes)[i] = ((const int*)all_holes)[i];
        __syncthreads();
        for (int i = threadIdx.x; i < shared.holes.n_stretches * HALF; i += N_THREADS) {
            const int stretch = i / HALF, d = i % HALF;
            float sine, cosine;
            sincosf((float)shared.holes.turn[stretch] * p.inv_freq[d], &sine, &cosine);
            const float low = to_f32(from[d]), high = to_f32(from[d + HALF]);
            shared.q[stretch][d] = to_f32(from_f32<T>(low * cosine - high * sine));
            shared.q[stretch][d + HALF] = to_f32(from_f32<T>(high * cosine + low * sine));
        }
        __syncthreads();
    }

    // Cells of a page with a token, the query's own page cut behind it.
    __device__ __forceinline__ unsigned live_in(int page_idx) const {
        const unsigned live = all_holes == nullptr ? 0xffffu : all_holes->seen_in(page_idx);
        const int n = cell + 1 - page_idx * PAGE_LEN;
        return n >= PAGE_LEN ? live : n <= 0 ? 0u : live & ((1u << n) - 1u);
    }
    __device__ __forceinline__ bool is_live(int c) const { return live_in(c / PAGE_LEN) >> (c % PAGE_LEN) & 1u; }

    // The score of a cell, for exp2.
    __device__ __forceinline__ float score(const Query& shared, int head, int c) const {
        const unsigned page = p.entries[p.tables[idx] + c / PAGE_LEN].page;
        const T* keys = head_page(p.kv + (head / GROUP) * HEAD_PAGE, page, p.page_stride) + c % PAGE_LEN * HEAD_DIM;
        const float* q = shared.q[all_holes == nullptr ? 0 : shared.holes.stretch_of(c)];
        constexpr int N = Lanes<T>::N;
        float sum = 0.f;
#pragma unroll 4
        for (int d = 0; d < HEAD_DIM; d += N) {
            float k[N];
            unpack16<T>(load16(keys + d), k);
#pragma unroll
            for (int i = 0; i < N; i++) sum += q[d + i] * k[i];
        }
        return sum * p.scale_log2;
    }
};

__device__ __forceinline__ float block_max(float x, float* scratch) {
    const int lane = threadIdx.x & 31;
    x = warp_max(x);
    if (lane == 0) scratch[threadIdx.x >> 5] = x;
    __syncthreads();
    x = warp_max(lane < N_THREADS / 32 ? scratch[lane] : ATTN_NEG_INF);
    __syncthreads();
    return x;
}

extern "C" __global__ void __launch_bounds__(N_THREADS) masses_stats(const __grid_constant__ MassesParams p) {
    __shared__ Query shared;
    __shared__ float scratch[32];
    const int head = blockIdx.x, part = blockIdx.z;
    const Masses masses(p, blockIdx.y);
    const int n_cells = masses.cell + 1 - masses.first;
    const int part_len = (n_cells + N_PARTS * N_THREADS - 1) / (N_PARTS * N_THREADS) * N_THREADS;
    const int begin = masses.first + part * part_len, end = min(begin + part_len, masses.cell + 1);
    float top = ATTN_NEG_INF, sum = 0.f;
    if (begin < end) { // the same for all threads
        masses.load(shared, head);
        for (int c = begin + threadIdx.x; c < end; c += N_THREADS) {
            if (!masses.is_live(c)) continue;
            const float score = masses.score(shared, head, c);
            const float higher = fmaxf(top, score);
            sum = sum * exp2f(top - higher) + exp2f(score - higher);
            top = higher;
        }
    }
    const float all_top = block_max(top, scratch);
    const float all_sum = block_sum(sum * exp2f(top - shift_of(all_top)), scratch);
    if (threadIdx.x == 0) masses.stats(head)[part] = make_float2(all_top, all_sum);
}

extern "C" __global__ void __launch_bounds__(N_THREADS) masses(const __grid_constant__ MassesParams p) {
    __shared__ Query shared;
    __shared__ float scratch[32];
    const Masses masses(p, blockIdx.y);
    const int begin = blockIdx.x * N_THREADS, c = begin + threadIdx.x;
    if (begin > masses.cell) return;
    const bool is_live = masses.is_live(c);

    // The token's index: the cells before it that have one.
    int index = c;
    if (masses.all_holes != nullptr) {
        int n_before = 0;
        for (int page = threadIdx.x; page < begin / PAGE_LEN; page += N_THREADS) n_before += __popc(masses.live_in(page));
        // Whole numbers up to 2^18 are exact.
        index = (int)block_sum((float)n_before, scratch);
        for (int page = begin / PAGE_LEN; page < c / PAGE_LEN; page++) index += __popc(masses.live_in(page));
        index += __popc(masses.live_in(c / PAGE_LEN) & ((1u << c % PAGE_LEN) - 1u));
    }

    float sum = 0.f;
    if (begin + N_THREADS > masses.first) { // the same for all threads
        for (int head = 0; head < p.n_kv_heads * GROUP; head++) {
            masses.load(shared, head);
            const float2 softmax = masses.softmax(head);
            if (is_live && c >= masses.first)
                sum += exp2f(masses.score(shared, head, c) - softmax.x) * softmax.y;
        }
    }
    if (is_live) {
        float* out = p.out + p.places[masses.idx] + index;
        const float before = p.flags[masses.idx] & IS_FIRST ? 0.f : *out;
        *out = before + sum * p.weights[masses.idx];
    }
}
