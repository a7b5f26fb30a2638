// Draws from a few tokens: steps 5 to 9 of the sampling definition for rows with a small top-k, with top-p and min-p or without,
// and for rows with min-p alone.
//
// The scan has left the largest value of each span of the row. The k-th largest of those is a lower bound of the k-th of all,
// since so many are no less; what reaches it lies in the few spans whose largest does, and is mostly little more than k tokens.
// Those are sorted; weights are whole numbers, so that their sums have no order.
//
// Where spans hold so many that there is no room, the k-th of those that were met is a better bound, and only what is above it
// is listed from then on; so it is if many spans tie with the bound. If fewer than k tokens are above it, those that tie with it
// are all kept by top-k, and sample_draw looks through the row for them, in many blocks.
//
// Grid (rows of the bucket), CHOOSE_THREADS threads. Reads 4 bytes a span, and the spans that reach the bound: for top-k 50
// of 128256 equally distributed tokens about 55 of 501.
// spans f32 [n_rows, n_chunks * SPANS]; chosen Chosen [n_rows]; above Above [n_rows, TOP_K_MAX]; drawn u64
// [n_rows, n_chunks], of which it writes the first of a row.
// Source: LightSeq (arXiv 2010.13887), which bounds the candidates of beams by the maxima of groups.

constexpr int SPAN_LEN = 32 * VALUES;
constexpr int N_SPANS_MAX = (1 << TOKEN_BITS) / SPAN_LEN;
constexpr int N_DEPTHS = (N_SPANS_MAX + CHOOSE_THREADS - 1) / CHOOSE_THREADS;
constexpr int N_LISTED_MAX = 4096;
constexpr int N_WARPS = CHOOSE_THREADS / 32;
// Spans that a warp reads at once: 32 values of a thread.
constexpr int AHEAD = 32 / VALUES;
static_assert(TOP_K_MAX <= CHOOSE_THREADS && TOP_K_MAX <= N_LISTED_MAX, "a thread for each of the largest");

struct ChooseParams {
    const float* logits;
    const float* adjusted;
    const OutputRow* rows;
    const unsigned* n_rows;
    const Part* parts;
    const float* spans;
    Chosen* chosen;
    Above* above;
    u64* drawn;
    int vocab;
    int n_chunks;
};
static_assert(sizeof(ChooseParams) == 80, "as in logits_params.rs");

struct ChooseShared {
    u64 list[N_LISTED_MAX];
    u64 scan[32];
    unsigned spans[N_SPANS_MAX];
    unsigned n_spans, n_listed;
};

// x is at most 0. How far below it is, as a whole number: that of -inf is above all others.
constexpr int DEEPEST = 0x7f7fffff;
__device__ __forceinline__ int depth_of(float x) { return __float_as_int(fabsf(x)); }

struct Reach {
    int depth;       // what lies so deep is listed, or less deep
    bool has_ties;   // tokens that lie one deeper are not listed: with those there are at least k
};

// How many spans have a largest value of at most this depth. By all threads.
__device__ __forceinline__ int count_within(const int (&depths)[N_DEPTHS], int n_spans, int depth) {
    int n = __syncthreads_count(depths[0] <= depth);
#pragma unroll
    for (int i = 1; i < N_DEPTHS; i++)
        if (i * CHOOSE_THREADS < n_spans) n += __syncthreads_count(depths[i] <= depth);
    return n;
}

// From the top bit down, until the spans are few, or the depth is that of the k-th.
__device__ __forceinline__ Reach reach_of(const int (&depths)[N_DEPTHS], int n_spans, int k) {
    int depth = DEEPEST, base = 0;
    int n = count_within(depths, n_spans, depth);
    const int n_enough = k + k / 8 + 8;
    for (int bit = 30; bit >= 0 && n > n_enough; bit--) {
        const int trial = base | ((1 << bit) - 1);
        const int n_within = count_within(depths, n_spans, trial);
        if (n_within >= k) depth = trial, n = n_within;
        else base |= 1 << bit;
    }
    return n > n_enough ? Reach{depth - 1, true} : Reach{depth, false};
}

// Lists the tokens within reach, ranked, in no order; those past N_LISTED_MAX are not listed. Returns their number.
__device__ __forceinline__ unsigned list_tokens(const OutputRow& asked, const float* source, int vocab, float max,
                                                const int (&depths)[N_DEPTHS], int depth, ChooseShared& s) {
    __syncthreads();
    if (threadIdx.x == 0) s.n_spans = s.n_listed = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N_DEPTHS; i++)
        if (depths[i] <= depth) s.spans[atomicAdd(&s.n_spans, 1u)] = i * CHOOSE_THREADS + threadIdx.x;
    __syncthreads();
    const int n_spans = s.n_spans, lane = threadIdx.x % 32;
    // Spares most tokens the division. A quotient errs by 2^-24 of itself, or by 2^-150 where that is more.
    // What is infinitely far below is never kept.
    const float farthest = __int_as_float(depth > 0 ? depth : 0) * asked.temperature * 1.000002f;
    const float reach = fminf(farthest + asked.temperature * 3e-45f + 3e-45f, FLOAT_MAX);
    for (int start = threadIdx.x / 32; start < n_spans; start += N_WARPS * AHEAD) {
        float values[AHEAD * VALUES];
        int firsts[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int idx = start + i * N_WARPS;
            const int span = idx < n_spans ? (int)s.spans[idx] : -1;
            firsts[i] = span / SPANS * CHUNK + (span % SPANS * 32 + lane) * 4;
#pragma unroll
            for (int g = 0; g < GROUPS; g++)
                load4(source, span < 0 ? vocab : firsts[i] + g * THREADS * 4, vocab, values + i * VALUES + 4 * g);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            unsigned hits = 0;
#pragma unroll
            for (int j = 0; j < VALUES; j++) hits |= max - values[i * VALUES + j] <= reach ? 1u << j : 0u;
            for (; hits != 0; hits &= hits - 1) {
                const int j = __ffs((int)hits) - 1;
                const int token = firsts[i] + j / 4 * THREADS * 4 + j % 4;
                const float x = tempered(source[token], max, asked.temperature);
                if (depth_of(x) > depth) continue;
                const unsigned place = atomicAdd(&s.n_listed, 1u);
                if (place < N_LISTED_MAX) s.list[place] = ranked(x, (unsigned)token);
            }
        }
    }
    __syncthreads();
    return s.n_listed;
}

__device__ __forceinline__ void sort_list(ChooseShared& s, unsigned n) {
    unsigned size = 2;
    while (size < n) size <<= 1;
    for (unsigned i = n + threadIdx.x; i < size; i += CHOOSE_THREADS) s.list[i] = 0;
    sort<CHOOSE_THREADS>(s.list, size);
}

// Steps 6 to 9 over a sorted list: the best score, ranked, in every thread.
__device__ __forceinline__ u64 draw_listed(const OutputRow& asked, unsigned n, ChooseShared& s) {
    const float least = asked.top_k > 0 && asked.top_k <= n ? value_of(s.list[asked.top_k - 1]) : minus_infinity();
    const bool has_top_p = asked.top_p < 1.0f;
    u64 target = 0;
    if (has_top_p) {
        u64 weight = 0;
        for (unsigned i = threadIdx.x; i < n; i += CHOOSE_THREADS) {
            const float x = value_of(s.list[i]);
            weight += x >= least ? weight_of(x) : 0;
        }
        target = share_of(asked.top_p, block_sum<CHOOSE_THREADS>(weight, s.scan));
    }
    u64 best = 0, before = 0;
    for (unsigned start = 0; start < n; start += CHOOSE_THREADS) {
        const unsigned i = start + threadIdx.x;
        const u64 rank = i < n ? s.list[i] : 0;
        const float x = i < n ? value_of(rank) : minus_infinity();
        bool is_kept = i < n && x >= least;
        if (has_top_p) {
            const u64 weight = is_kept ? weight_of(x) : 0;
            const u64 through = before + block_prefix<CHOOSE_THREADS>(weight, s.scan);
            is_kept = is_kept && through - weight < target;
            if (start + CHOOSE_THREADS < n) before += block_sum<CHOOSE_THREADS>(weight, s.scan);
        }
        if (is_kept && x >= asked.min_logit) best = larger(best, score_of(asked, x, token_of(rank)));
    }
    return block_max<CHOOSE_THREADS>(best, s.scan);
}

// The least logit of which x lies at most so deep, up to that of key `end`, in whole numbers: x never falls as logits grow.
__device__ __forceinline__ int least_within(int depth, float max, float temperature, int end) {
    // Counted from the least of all in unsigned numbers: the whole range is too long for signed ones.
    const unsigned first = (unsigned)order_key(-FLOAT_MAX);
    unsigned low = 0, high = (unsigned)end - first;
    while (low < high) {
        const unsigned middle = low + (high - low) / 2;
        const float logit = of_order_key((int)(first + middle));
        if (depth_of(tempered(logit, max, temperature)) <= depth) high = middle;
        else low = middle + 1;
    }
    return (int)(first + low);
}

// Leaves a row, of which the tokens above the ties are listed in order, to sample_draw and logits_finish.
__device__ __forceinline__ void leave_ties(const OutputRow& asked, float max, Reach reach, unsigned n, ChooseShared& s,
                                           Chosen& chosen, Above* above) {
    const u64 rank = threadIdx.x < n ? s.list[threadIdx.x] : 0;
    const u64 weight = threadIdx.x < n ? weight_of(value_of(rank)) : 0;
    const u64 through = block_prefix<CHOOSE_THREADS>(weight, s.scan);
    if (threadIdx.x < n) above[threadIdx.x] = Above{rank, through - weight};
    if (threadIdx.x == CHOOSE_THREADS - 1) chosen.weight_above = through;
    if (threadIdx.x >= 32) return;
    // One lane finds the least logit that ties, another the least one that is above.
    const int last = order_key(max);
    const int key = least_within(reach.depth + 1 - (int)threadIdx.x % 2, max, asked.temperature, last + (int)threadIdx.x % 2);
    const int above_ties = __shfl_sync(LANES_ALL, key, 1);
    if (threadIdx.x != 0) return;
    chosen.low = of_order_key(key);
    chosen.high = of_order_key(above_ties - 1);
    chosen.value = 0.0f - __int_as_float(reach.depth + 1);
    chosen.n_above = n;
    chosen.stand = STAND_TIES;
}

extern "C" __global__ void __launch_bounds__(CHOOSE_THREADS, CHOOSE_RESIDENT)
sample_choose(const __grid_constant__ ChooseParams p) {
    __shared__ ChooseShared s;
    const int vocab = p.vocab, n_chunks = p.n_chunks, row = blockIdx.x;
    if (row >= *p.n_rows) return;
    const OutputRow& asked = p.rows[row];
    if (!chooses(asked)) return;
    const int n_spans = n_chunks * SPANS;
    float largest[N_DEPTHS];
#pragma unroll
    for (int i = 0; i < N_DEPTHS; i++) {
        const int span = i * CHOOSE_THREADS + (int)threadIdx.x;
        largest[i] = span < n_spans ? p.spans[(size_t)row * n_spans + span] : minus_infinity();
    }
    const Row whole = warp_row(p.parts + (size_t)row * n_chunks, n_chunks);
    Chosen& chosen = p.chosen[row];
    u64& drawn = p.drawn[(size_t)row * n_chunks];
    const float max = whole.adjusted.value;
    if (whole.is_bad || max == minus_infinity()) {
        if (threadIdx.x == 0) chosen.stand = STAND_DRAWN, drawn = 0;
        return;
    }
    int depths[N_DEPTHS];
#pragma unroll
    for (int i = 0; i < N_DEPTHS; i++) depths[i] = depth_of(tempered(largest[i], max, asked.temperature));
    const float* source = drawn_from(p.logits, p.adjusted, asked, row, vocab);
    Reach reach = asked.top_k > 0 ? reach_of(depths, n_spans, (int)asked.top_k) : Reach{depth_of(asked.min_logit), false};
    unsigned n;
    while ((n = list_tokens(asked, source, vocab, max, depths, reach.depth, s)) > N_LISTED_MAX) {
        if (asked.top_k == 0) {
            if (threadIdx.x == 0) chosen.stand = STAND_OPEN;
            return;
        }
        sort_list(s, N_LISTED_MAX);
        reach = Reach{depth_of(value_of(s.list[asked.top_k - 1])) - 1, true};
    }
    sort_list(s, n);
    if (reach.has_ties && n < asked.top_k) {
        leave_ties(asked, max, reach, n, s, chosen, p.above + (size_t)row * TOP_K_MAX);
        return;
    }
    const u64 best = draw_listed(asked, n, s);
    if (threadIdx.x == 0) chosen.stand = STAND_DRAWN, drawn = best;
}
