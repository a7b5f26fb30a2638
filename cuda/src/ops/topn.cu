// The most probable tokens of a row, with log-probabilities; most probable first, ties by lower token. Of the row as it is, or
// of what logits_ranked has made of it, which are log-probabilities already.
//
// Grid (rows of the bucket), BINS threads. Each thread finds the largest of its tokens; the n-th of those is a lower bound of the
// n-th of all, since so many are no less. What reaches it is gathered and sorted: mostly little more than is wanted. Where
// more ties with it than there is room for, the n-th rank is found by radix descent. Reads the row, 4 * vocab bytes
// out of L2, twice. Runs after logits_finish and logits_ranked.
// logits f32 [n_rows, vocab]; adjusted f32 [rows of the bucket, vocab]; top Ranked, `n_top` of each row from `top_start`.
// Source: LightSeq (arXiv 2010.13887), which bounds the candidates of beams by the maxima of groups.

struct TopNParams {
    const float* logits;
    const float* adjusted;
    const OutputRow* rows;
    const unsigned* n_rows;
    const Part* parts;
    RowOutput* outputs;
    Ranked* top;
    int vocab;
    int n_chunks;
};
static_assert(sizeof(TopNParams) == 64, "as in logits_params.rs");

// Lists the ranks from the n-th on, of at least n, in no order.
__device__ __forceinline__ void list_largest(const Values<false>& values, unsigned n, Shared& s) {
    unsigned my_count = count_bins(values, s);
    Place place = find_place(my_count, n, s);
    u64 least;
    {
        Bucket<false> bucket(values, s, place.bin, from_bin(place.bin, my_count, s));
        least = find_rank<Measure::TOKENS, Ties::BREAK>(bucket, 0, n - place.above, s);
    }
    if (threadIdx.x == 0) s.n_listed = 0;
    __syncthreads();
    values.each([&](unsigned token, float value) {
        u64 rank = ranked(value, token);
        if (rank >= least) s.list[atomicAdd(&s.n_listed, 1u)] = rank;
    });
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(BINS) top_n(const __grid_constant__ TopNParams p) {
    RowOutput* __restrict__ outputs = p.outputs;
    Ranked* __restrict__ top = p.top;
    const int vocab = p.vocab, n_chunks = p.n_chunks;
    __shared__ Shared s;
    int row = blockIdx.x;
    if (row >= *p.n_rows) return;
    const OutputRow& asked = p.rows[row];
    if (!(asked.wants & (WANTS_TOP | WANTS_RANKED)) || asked.n_top == 0) return;
    Row whole = warp_row(p.parts + (size_t)row * n_chunks, n_chunks);
    const bool is_adjusted = asked.wants & WANTS_RANKED;
    const float max = is_adjusted ? whole.adjusted.value : whole.max;
    // Where nothing can come the list is empty.
    if (whole.is_bad || max == minus_infinity()) return;

    const float* from = is_adjusted ? p.adjusted + (size_t)row * vocab : p.logits + (size_t)asked.logits_row * vocab;
    Values<false> values(from, vocab, max, 1.0f);
    u64 largest = 0; // no rank is
    unsigned n_mine = 0;
    values.each([&](unsigned, float value) {
        u64 rank = ranked(value, (unsigned)TOKEN_MASK); // below those of all tokens of this value
        largest = rank > largest ? rank : largest;
        n_mine++;
    });
    u64 n_tokens = block_sum<BINS>(n_mine, s.scan);
    unsigned n = min(min(asked.n_top, (unsigned)BINS), (unsigned)n_tokens);
    s.list[threadIdx.x] = largest;
    if (threadIdx.x == 0) s.n_listed = 0;
    sort<BINS>(s.list, BINS);
    u64 least = s.list[n - 1];
    __syncthreads();
    values.each([&](unsigned token, float value) {
        u64 rank = ranked(value, token);
        if (rank < least) return;
        unsigned place = atomicAdd(&s.n_listed, 1u);
        if (place < LIST) s.list[place] = rank;
    });
    __syncthreads();
    unsigned n_listed = s.n_listed;
    __syncthreads();
    if (n_listed > LIST) {
        list_largest(values, n, s);
        n_listed = n;
    }
    unsigned size = 2;
    while (size < n_listed) size <<= 1;
    for (unsigned i = n_listed + threadIdx.x; i < size; i += BINS) s.list[i] = 0;
    sort<BINS>(s.list, size);

    float shift = is_adjusted ? 0.0f : outputs[row].log_sum_exp;
    if (threadIdx.x < n) {
        u64 rank = s.list[threadIdx.x];
        top[asked.top_start + threadIdx.x] = Ranked{token_of(rank), value_of(rank) - shift};
    }
    __syncthreads();
    if (threadIdx.x == 0) outputs[row].n_top = n;
}
