// The cutoff of top-k and top-p: steps 6 and 7 of the sampling definition (trellis_engine::sampling), by radix descent over
// x[t] = (l[t] - max l) / temperature.

struct SampleBinsParams {
    const float* logits;
    const float* adjusted;
    const OutputRow* rows;
    const unsigned* n_rows;
    const Part* parts;
    unsigned* bin_counts;
    u64* bin_weights;
    int vocab;
    int unused;
};
static_assert(sizeof(SampleBinsParams) == 64, "as in logits_params.rs");

// Grid (n_chunks, rows of the bucket), THREADS threads. For rows that search a cutoff: what the bins of the row
// hold. Reads 4 * vocab bytes a row, and adds to 12 bytes for each bin that the chunk reaches.
// bin_counts unsigned [n_rows, BINS], bin_weights u64 [n_rows, BINS]: zeros from logits_scan.
extern "C" __global__ void __launch_bounds__(THREADS) sample_bins(const __grid_constant__ SampleBinsParams p) {
    const OutputRow* __restrict__ rows = p.rows;
    const float* __restrict__ logits = p.logits;
    const float* __restrict__ adjusted = p.adjusted;
    const Part* __restrict__ parts = p.parts;
    unsigned* __restrict__ bin_counts = p.bin_counts;
    u64* __restrict__ bin_weights = p.bin_weights;
    const int vocab = p.vocab;
    __shared__ Amounts counts, weights;
    int chunk = blockIdx.x, row = blockIdx.y, n_chunks = gridDim.x;
    if (row >= *p.n_rows) return;
    const OutputRow& asked = rows[row];
    if (!searches(asked)) return;
    Row whole = warp_row(parts + (size_t)row * n_chunks, n_chunks);
    if (whole.is_bad || whole.adjusted.value == minus_infinity()) return;
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) {
        counts.low[bin] = counts.high[bin] = 0;
        weights.low[bin] = weights.high[bin] = 0;
    }
    __syncthreads();

    const float* source =
        adjusts(asked) ? adjusted + (size_t)row * vocab : logits + (size_t)asked.logits_row * vocab;
    Values<true> values(source, vocab, whole.adjusted.value, asked.temperature);
    bool has_top_p = asked.top_p < 1.0f;
    Adding tokens = {counts}, adding = {weights};
    // Far below the largest value everything is in the last bin.
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
                tokens.add(bin, 1);
                adding.add(bin, weight);
            }
        }
    }
    tokens.finish();
    adding.finish();
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) {
        n_last += __shfl_xor_sync(LANES_ALL, n_last, step);
        weight_last += __shfl_xor_sync(LANES_ALL, weight_last, step);
    }
    if (threadIdx.x % 32 == 0) {
        counts.add(0, n_last);
        weights.add(0, weight_last);
    }
    __syncthreads();
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) {
        size_t at = (size_t)row * BINS + bin;
        if (counts.low[bin] != 0) atomicAdd(&bin_counts[at], counts.low[bin]);
        u64 weight = weights.get(bin);
        if (weight != 0) atomicAdd(&bin_weights[at], weight);
    }
}

struct SampleTruncateParams {
    const float* logits;
    const float* adjusted;
    const OutputRow* rows;
    const unsigned* n_rows;
    const Part* parts;
    const unsigned* bin_counts;
    const u64* bin_weights;
    u64* cutoffs;
    int vocab;
    int n_chunks;
};
static_assert(sizeof(SampleTruncateParams) == 72, "as in logits_params.rs");

// Grid (rows of the bucket), BINS threads. For rows that search a cutoff: the last rank that both keep.
// Reads the row, 4 * vocab bytes out of L2, once for either.
// cutoffs u64 [n_rows].
extern "C" __global__ void __launch_bounds__(BINS) sample_truncate(const __grid_constant__ SampleTruncateParams p) {
    const OutputRow* __restrict__ rows = p.rows;
    const float* __restrict__ logits = p.logits;
    const float* __restrict__ adjusted = p.adjusted;
    const Part* __restrict__ parts = p.parts;
    const unsigned* __restrict__ bin_counts = p.bin_counts;
    const u64* __restrict__ bin_weights = p.bin_weights;
    u64* __restrict__ cutoffs = p.cutoffs;
    const int vocab = p.vocab, n_chunks = p.n_chunks;
    __shared__ Shared s;
    int row = blockIdx.x;
    if (row >= *p.n_rows) return;
    const OutputRow& asked = rows[row];
    if (!searches(asked)) return;
    Row whole = warp_row(parts + (size_t)row * n_chunks, n_chunks);
    if (whole.is_bad || whole.adjusted.value == minus_infinity()) return;

    const float* source =
        adjusts(asked) ? adjusted + (size_t)row * vocab : logits + (size_t)asked.logits_row * vocab;
    Values<true> values(source, vocab, whole.adjusted.value, asked.temperature);
    unsigned my_count = bin_counts[(size_t)row * BINS + my_bin()];
    u64 my_weight = bin_weights[(size_t)row * BINS + my_bin()];
    u64 n_tokens = block_sum<BINS>(my_count, s.scan);
    bool has_top_p = asked.top_p < 1.0f;
    u64 least = 0;

    if (asked.top_k > 0 && asked.top_k < n_tokens) {
        Place place = find_place(my_count, asked.top_k, s);
        Bucket<true> bucket(values, s, place.bin, from_bin(place.bin, my_count, s));
        least = find_rank<Measure::TOKENS, Ties::KEEP>(bucket, 0, asked.top_k - place.above, s);
        if (has_top_p) {
            u64 weight = 0;
            bucket.each([&](u64 rank) {
                if (rank >= least) weight += weight_of(value_of(rank));
            });
            weight = block_sum<BINS>(weight, s.scan);
            if (my_bin() == place.bin) my_weight = weight;
            if (my_bin() < place.bin) my_weight = 0;
        }
    }
    if (has_top_p) {
        u64 total = block_sum<BINS>(my_weight, s.scan);
        u64 target = share_of(asked.top_p, total);
        Place place = find_place(my_weight, target, s);
        Bucket<true> bucket(values, s, place.bin, from_bin(place.bin, my_count, s));
        least = find_rank<Measure::WEIGHTS, Ties::BREAK>(bucket, least, target - place.above, s);
    }
    if (threadIdx.x == 0) cutoffs[row] = least;
}
