// Draws: steps 5 to 9 of the sampling definition (trellis_engine::sampling).
//
//   x[t] = (l[t] - max l) / temperature      kept = top-k, then top-p, then min-p      argmax over kept of x[t] + g[t]
//   g = -ln(-ln u) rounded to f32,  u = ((w >> 9) + 1/2) * 2^-23,  w from Philox 4x32-10
//
// The logarithms of g are f64, as on the CPU, but only for tokens that f32 cannot tell apart from the best one.

// Grid (n_chunks, rows of the bucket), THREADS threads. For rows with top-k or top-p: what the bins of the row
// hold. Reads 4 * vocab bytes a row, and adds to 12 bytes for each bin that the chunk reaches.
// bin_counts unsigned [n_rows, BINS], bin_weights u64 [n_rows, BINS]: zeros from logits_scan.
extern "C" __global__ void __launch_bounds__(THREADS)
sample_bins(const float* __restrict__ logits, const float* __restrict__ adjusted, const Params* __restrict__ params,
            const unsigned* __restrict__ n_rows, const Part* __restrict__ parts, unsigned* __restrict__ bin_counts,
            u64* __restrict__ bin_weights, int vocab) {
    __shared__ Amounts weights;
    __shared__ unsigned counts[BINS];
    int chunk = blockIdx.x, row = blockIdx.y, n_chunks = gridDim.x;
    if (row >= *n_rows) return;
    const Params& p = params[row];
    if (!truncates(p)) return;
    Row whole = warp_row(parts + (size_t)row * n_chunks, n_chunks);
    if (whole.is_bad || whole.adjusted.value == minus_infinity()) return;
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) counts[bin] = weights.low[bin] = weights.high[bin] = 0;
    __syncthreads();

    const float* source = adjusts(p) ? adjusted + (size_t)row * vocab : logits + (size_t)p.logits_row * vocab;
    Values<true> values(source, vocab, whole.adjusted.value, p.temperature);
    bool has_top_p = p.top_p < 1.0f;
    // Far below the largest value everything is in the last bin, where atomics would queue up.
    u64 n_last = 0, weight_last = 0;
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        float logits4[4];
        load4(source, group_start(chunk, g), vocab, logits4);
#pragma unroll
        for (int lane = 0; lane < 4; lane++) {
            float value = values.value(logits4[lane]);
            if (!(value > minus_infinity())) continue;
            int bin = values.bin(value);
            u64 weight = has_top_p ? weight_of(value) : 0;
            if (bin == 0) {
                n_last++;
                weight_last += weight;
            } else {
                atomicAdd(&counts[bin], 1u);
                weights.add(bin, weight);
            }
        }
    }
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) {
        n_last += __shfl_xor_sync(LANES_ALL, n_last, step);
        weight_last += __shfl_xor_sync(LANES_ALL, weight_last, step);
    }
    if (threadIdx.x % 32 == 0) {
        atomicAdd(&counts[0], (unsigned)n_last);
        weights.add(0, weight_last);
    }
    __syncthreads();
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) {
        size_t at = (size_t)row * BINS + bin;
        if (counts[bin] != 0) atomicAdd(&bin_counts[at], counts[bin]);
        u64 weight = weights.get(bin);
        if (weight != 0) atomicAdd(&bin_weights[at], weight);
    }
}

// Grid (rows of the bucket), BINS threads. For rows with top-k or top-p: the last rank that both keep.
// Reads the row, 4 * vocab bytes out of L2, once for either.
// cutoffs u64 [n_rows].
extern "C" __global__ void __launch_bounds__(BINS)
sample_truncate(const float* __restrict__ logits, const float* __restrict__ adjusted,
                const Params* __restrict__ params, const unsigned* __restrict__ n_rows,
                const Part* __restrict__ parts, const unsigned* __restrict__ bin_counts,
                const u64* __restrict__ bin_weights, u64* __restrict__ cutoffs, int vocab, int n_chunks) {
    __shared__ Shared s;
    int row = blockIdx.x;
    if (row >= *n_rows) return;
    const Params& p = params[row];
    if (!truncates(p)) return;
    Row whole = warp_row(parts + (size_t)row * n_chunks, n_chunks);
    if (whole.is_bad || whole.adjusted.value == minus_infinity()) return;

    const float* source = adjusts(p) ? adjusted + (size_t)row * vocab : logits + (size_t)p.logits_row * vocab;
    Values<true> values(source, vocab, whole.adjusted.value, p.temperature);
    unsigned my_count = bin_counts[(size_t)row * BINS + my_bin()];
    u64 my_weight = bin_weights[(size_t)row * BINS + my_bin()];
    u64 n_tokens = block_sum(my_count, s.scan);
    bool has_top_p = p.top_p < 1.0f;
    u64 least = 0;

    if (p.top_k > 0 && p.top_k < n_tokens) {
        Place place = find_place(my_count, p.top_k, s);
        Bucket<true> bucket(values, s, place.bin, from_bin(place.bin, my_count, s));
        least = find_rank<Measure::TOKENS, Ties::KEEP>(bucket, 0, p.top_k - place.above, s);
        if (has_top_p) {
            u64 weight = 0;
            bucket.each([&](u64 rank) {
                if (rank >= least) weight += weight_of(value_of(rank));
            });
            weight = block_sum(weight, s.scan);
            if (my_bin() == place.bin) my_weight = weight;
            if (my_bin() < place.bin) my_weight = 0;
        }
    }
    if (has_top_p) {
        u64 total = block_sum(my_weight, s.scan);
        u64 target = (u64)ceil((double)p.top_p * (double)total);
        target = min(max(target, (u64)1), total);
        Place place = find_place(my_weight, target, s);
        Bucket<true> bucket(values, s, place.bin, from_bin(place.bin, my_count, s));
        least = find_rank<Measure::WEIGHTS, Ties::BREAK>(bucket, least, target - place.above, s);
    }
    if (threadIdx.x == 0) cutoffs[row] = least;
}

// Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011).
__device__ __forceinline__ uint4 philox(uint4 counter, uint2 key) {
#pragma unroll
    for (int round = 0; round < 10; round++) {
        unsigned high0 = __umulhi(0xD2511F53u, counter.x), low0 = 0xD2511F53u * counter.x;
        unsigned high1 = __umulhi(0xCD9E8D57u, counter.z), low1 = 0xCD9E8D57u * counter.z;
        counter = make_uint4(high1 ^ counter.y ^ key.x, low1, high0 ^ counter.w ^ key.y, low0);
        key.x += 0x9E3779B9u;
        key.y += 0xBB67AE85u;
    }
    return counter;
}

__device__ __forceinline__ uint4 words_of(const Params& p, unsigned block_idx) {
    return philox(make_uint4(block_idx, 0, p.position_low, p.position_high), make_uint2(p.seed_low, p.seed_high));
}

__device__ __forceinline__ unsigned lane_of(uint4 words, int lane) {
    return lane == 0 ? words.x : lane == 1 ? words.y : lane == 2 ? words.z : words.w;
}

// Exact in f32, never 0 or 1.
__device__ __forceinline__ float uniform(unsigned word) { return ((float)(word >> 9) + 0.5f) * (1.0f / 8388608.0f); }

__device__ __forceinline__ float gumbel_about(unsigned word) { return -logf(-logf(uniform(word))); }

__device__ __forceinline__ float gumbel(unsigned word) { return (float)-log(-log((double)uniform(word))); }

// Above the largest g there is, which belongs to u = 1 - 2^-24.
constexpr float GUMBEL_MAX = 16.64f;
// Twice the error of x + gumbel_about: logf errs by 1 ulp, so g by under 4e-6 at its largest, and rounding the sum,
// which lies between -3 and 17 for any token that can win, adds 1e-6.
constexpr float SCORE_SLACK = 2e-5f;

// Grid (n_chunks, rows of the bucket), THREADS threads. The best token of each chunk. Reads 4 * vocab bytes a row,
// less the chunks in which no token can win.
// drawn Drawn [n_rows, n_chunks]; -inf where no token of the chunk is in the running.
extern "C" __global__ void __launch_bounds__(THREADS)
sample_draw(const float* __restrict__ logits, const float* __restrict__ adjusted, const Params* __restrict__ params,
            const unsigned* __restrict__ n_rows, const Part* __restrict__ parts, const u64* __restrict__ cutoffs,
            Drawn* __restrict__ drawn, int vocab) {
    __shared__ Best best_shared[THREADS / 32];
    int chunk = blockIdx.x, row = blockIdx.y, n_chunks = gridDim.x;
    if (row >= *n_rows) return;
    const Params& p = params[row];
    if (!draws(p)) return;
    const Part* mine = parts + (size_t)row * n_chunks;
    Row whole = warp_row(mine, n_chunks);
    if (whole.is_bad || whole.adjusted.value == minus_infinity()) return;

    // The most probable token, for which x is 0, is always kept: its score is one to beat.
    unsigned mode = whole.adjusted.token;
    float floor = gumbel_about(lane_of(words_of(p, mode / 4), mode % 4)) - SCORE_SLACK;
    float max = whole.adjusted.value;
    Best best = {minus_infinity(), NONE};
    // The same for the whole block: it depends on the chunk alone.
    if (tempered(mine[chunk].adjusted_max, max, p.temperature) + GUMBEL_MAX >= floor) {
        const float* source = adjusts(p) ? adjusted + (size_t)row * vocab : logits + (size_t)p.logits_row * vocab;
        u64 cutoff = truncates(p) ? cutoffs[row] : 0;
        float scores[VALUES], values[VALUES];
        unsigned noise[VALUES];
        Best about = {minus_infinity(), NONE};
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            int first = group_start(chunk, g);
            float x[4];
            load4(source, first, vocab, x);
            bool in_reach = false;
#pragma unroll
            for (int lane = 0; lane < 4; lane++) {
                x[lane] = tempered(x[lane], max, p.temperature);
                bool kept = x[lane] >= p.min_logit && ranked(x[lane], (unsigned)(first + lane)) >= cutoff;
                if (!kept) x[lane] = minus_infinity();
                in_reach |= x[lane] + GUMBEL_MAX >= floor;
            }
            uint4 words = make_uint4(0, 0, 0, 0);
            if (in_reach) words = words_of(p, (unsigned)first / 4);
#pragma unroll
            for (int lane = 0; lane < 4; lane++) {
                int i = 4 * g + lane;
                values[i] = x[lane];
                noise[i] = lane_of(words, lane);
                scores[i] = in_reach ? x[lane] + gumbel_about(noise[i]) : minus_infinity();
                about = better(about, Best{scores[i], (unsigned)(first + lane)});
            }
        }
        about = block_best(about, best_shared);
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
            if (scores[i] >= about.value - SCORE_SLACK && scores[i] > minus_infinity()) {
                unsigned token = (unsigned)(group_start(chunk, i / 4) + i % 4);
                best = better(best, Best{values[i] + gumbel(noise[i]), token});
            }
        }
        best = block_best(best, best_shared);
    }
    if (threadIdx.x == 0) drawn[(size_t)row * n_chunks + chunk] = Drawn{best.value, best.token};
}
