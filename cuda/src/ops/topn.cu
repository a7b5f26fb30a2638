// The most probable tokens of a row, with log-probabilities; most probable first, ties by lower token.
//
// Grid (rows of the bucket), BINS threads. Finds the n-th rank by radix descent, gathers the ranks from it on and
// sorts them. Reads the row, 4 * vocab bytes out of L2, three times.
// logits f32 [n_rows, vocab]; top Candidate, `n_top` of each row from `top_start`. Runs after logits_finish.
extern "C" __global__ void __launch_bounds__(BINS)
top_n(const float* __restrict__ logits, const Params* __restrict__ params, const unsigned* __restrict__ n_rows,
      const Part* __restrict__ parts, Output* __restrict__ outputs, Candidate* __restrict__ top, int vocab,
      int n_chunks) {
    __shared__ Shared s;
    int row = blockIdx.x;
    if (row >= *n_rows) return;
    const Params& p = params[row];
    if (!(p.wants & WANTS_TOP) || p.n_top == 0) return;
    Row whole = warp_row(parts + (size_t)row * n_chunks, n_chunks);
    if (whole.is_bad) return;

    Values<false> values(logits + (size_t)p.logits_row * vocab, vocab, whole.max, 1.0f);
    unsigned my_count = count_bins(values, s);
    u64 n_tokens = block_sum(my_count, s.scan);
    unsigned n = min(min(p.n_top, (unsigned)BINS), (unsigned)n_tokens);
    Place place = find_place(my_count, n, s);
    u64 least;
    {
        Bucket<false> bucket(values, s, place.bin, from_bin(place.bin, my_count, s));
        least = find_rank<Measure::TOKENS, Ties::BREAK>(bucket, 0, n - place.above, s);
    }
    if (threadIdx.x == 0) s.n_listed = 0;
    s.list[threadIdx.x] = 0;
    __syncthreads();
    values.each([&](unsigned token, float value) {
        u64 rank = ranked(value, token);
        if (rank >= least) s.list[atomicAdd(&s.n_listed, 1u)] = rank;
    });
    __syncthreads();

    // A bitonic network, largest first; no rank is 0, so that the padding ends up last.
    for (unsigned size = 2; size <= BINS; size <<= 1) {
        for (unsigned stride = size / 2; stride > 0; stride >>= 1) {
            unsigned i = threadIdx.x, j = i ^ stride;
            if (j > i) {
                u64 a = s.list[i], b = s.list[j];
                bool falling = (i & size) == 0;
                if ((a < b) == falling) {
                    s.list[i] = b;
                    s.list[j] = a;
                }
            }
            __syncthreads();
        }
    }
    float log_sum_exp = outputs[row].log_sum_exp;
    if (threadIdx.x < n) {
        u64 rank = s.list[threadIdx.x];
        top[p.top_start + threadIdx.x] = Candidate{token_of(rank), value_of(rank) - log_sum_exp};
    }
    __syncthreads();
    if (threadIdx.x == 0) outputs[row].n_top = n;
}
