// The most probable tokens of a row, with log-probabilities; most probable first, ties by lower token.
//
// Grid (rows of the bucket), BINS threads. Finds the n-th rank by radix descent, gathers the ranks from it on and
// sorts them. Reads the row, 4 * vocab bytes out of L2, three times.
// logits f32 [n_rows, vocab]; top Ranked, `n_top` of each row from `top_start`. Runs after logits_finish.

struct TopNParams {
    const float* logits;
    const OutputRow* rows;
    const unsigned* n_rows;
    const Part* parts;
    RowOutput* outputs;
    Ranked* top;
    int vocab;
    int n_chunks;
};
static_assert(sizeof(TopNParams) == 56, "as in logits_params.rs");

extern "C" __global__ void __launch_bounds__(BINS) top_n(const __grid_constant__ TopNParams p) {
    const OutputRow* __restrict__ rows = p.rows;
    const float* __restrict__ logits = p.logits;
    const Part* __restrict__ parts = p.parts;
    RowOutput* __restrict__ outputs = p.outputs;
    Ranked* __restrict__ top = p.top;
    const int vocab = p.vocab, n_chunks = p.n_chunks;
    __shared__ Shared s;
    int row = blockIdx.x;
    if (row >= *p.n_rows) return;
    const OutputRow& asked = rows[row];
    if (!(asked.wants & WANTS_TOP) || asked.n_top == 0) return;
    Row whole = warp_row(parts + (size_t)row * n_chunks, n_chunks);
    if (whole.is_bad) return;

    Values<false> values(logits + (size_t)asked.logits_row * vocab, vocab, whole.max, 1.0f);
    unsigned my_count = count_bins(values, s);
    u64 n_tokens = block_sum(my_count, s.scan);
    unsigned n = min(min(asked.n_top, (unsigned)BINS), (unsigned)n_tokens);
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
        top[asked.top_start + threadIdx.x] = Ranked{token_of(rank), value_of(rank) - log_sum_exp};
    }
    __syncthreads();
    if (threadIdx.x == 0) outputs[row].n_top = n;
}
