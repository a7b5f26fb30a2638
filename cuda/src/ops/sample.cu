// Draws: steps 5 to 9 of the sampling definition (trellis_engine::sampling).
//
//   x[t] = (l[t] - max l) / temperature      kept = top-k, then top-p, then min-p      argmax over kept of x[t] + g[t]
//   g = -ln(-ln u),  u = ((w >> 9) + 1/2) * 2^-23,  w from Philox 4x32-10
//
// For rows that neither the scan lists tokens of nor choosing has drawn from. As -ln u >= 1 - u, g is at most -ln(1 - u): one
// fast logarithm for each token tells which few can be the best, and only those are worked out as the definition has it.

// -ln(1 - u), about: at least g.
__device__ __forceinline__ float gumbel_bound(unsigned word) { return log2_fast(rest_of(word)) * -0.693147180559945309f; }

// More than a score may lie above the bound that was worked out for it: the fast logarithm errs by 2^-22 of itself, at most
// 4e-6; x by 3 ulp, as it is multiplied by what 1 / temperature is about, for x above -20, without which no token can win;
// g by under 8e-6 (maths.cuh); and the sums by 2e-6 each.
constexpr float SCORE_SLACK = 3e-5f;

struct SampleDrawParams {
    const float* logits;
    const float* adjusted;
    const OutputRow* rows;
    const unsigned* n_rows;
    const Part* parts;
    const u64* cutoffs;
    const unsigned* stands;
    u64* drawn;
    int vocab;
    int n_chunks;
};
static_assert(sizeof(SampleDrawParams) == 72, "as in logits_params.rs");

// What all threads of a block need to know of their row, and what they find.
struct DrawShared {
    float max;    // -inf where nothing is drawn
    float floor;  // some token has this score
    float least;  // no token is kept of which x, about, is less
    u64 cutoff;   // the last rank that top-k and top-p keep
    u64 best;     // (score, token), ranked; 0 where there is none
};

// By one warp.
__device__ __forceinline__ void describe_row(const SampleDrawParams& p, const OutputRow& asked, DrawShared& s) {
    const Row whole = warp_row(p.parts + (size_t)blockIdx.y * p.n_chunks, p.n_chunks);
    const unsigned mode = whole.adjusted.token;
    const float floor = gumbel(lane_of(words_of(asked, mode / 4), mode % 4));
    if (threadIdx.x != 0) return;
    s.max = whole.is_bad ? minus_infinity() : whole.adjusted.value;
    s.cutoff = searches(asked) && s.max > minus_infinity() ? p.cutoffs[blockIdx.y] : 0;
    const float least = fmaxf(s.cutoff > 0 ? value_of(s.cutoff) : minus_infinity(), asked.min_logit);
    // What x is about errs by less, also where both are denormal.
    s.least = least - (fabsf(least) * 1e-6f + 1e-36f);
    // The score of the most probable token, for which x is 0, is one to beat, unless top-p leaves it out: at the largest
    // temperatures x is 0 for others too.
    s.floor = ranked(0.0f, mode) >= s.cutoff ? floor : minus_infinity();
    s.best = 0;
}

// The score of a token by the definition, ranked; 0 if it is not kept.
__device__ __forceinline__ u64 score_of_kept(const OutputRow& asked, const float* source, const DrawShared& s, unsigned token) {
    const float x = tempered(source[token], s.max, asked.temperature);
    return x >= asked.min_logit && ranked(x, token) >= s.cutoff ? score_of(asked, x, token) : 0;
}

// Grid (blocks that share a row, rows of the bucket), THREADS threads; a block takes chunks one after the other. The best
// token of its chunks, of rows of which the scan lists none and that are not drawn from yet. Reads 4 * vocab bytes a row.
// stands Stand [n_rows], of rows that choose; drawn u64 [n_rows, n_chunks], of which it writes those of its blocks:
// (score, token), ranked, 0 where no token of theirs is in the running.
extern "C" __global__ void __launch_bounds__(THREADS, DRAW_RESIDENT) sample_draw(const __grid_constant__ SampleDrawParams p) {
    const int vocab = p.vocab, row = blockIdx.y;
    __shared__ DrawShared s;
    if (row >= *p.n_rows) return;
    const OutputRow& asked = p.rows[row];
    if (!draws(asked) || lists(asked) || (chooses(asked) && p.stands[row] != STAND_OPEN)) return;
    const float* __restrict__ source = drawn_from(p.logits, p.adjusted, asked, row, vocab);
    int chunk = blockIdx.x;
    float values[VALUES];
    auto load = [&] {
#pragma unroll
        for (int g = 0; g < GROUPS; g++) load4(source, group_start(chunk, g), vocab, values + 4 * g);
    };
    load();
    if (threadIdx.x < 32) describe_row(p, asked, s);
    __syncthreads();
    if (s.max == minus_infinity()) chunk = p.n_chunks;
    const float scale = fminf(1.0f / asked.temperature, 3.40282346638528859812e38f);
    float floor = s.floor - SCORE_SLACK;
    while (chunk < p.n_chunks) {
        // Read anew for each chunk: registers are for values.
        const float max = s.max, least = s.least;
        float highest_x = minus_infinity();
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
            const float x = (values[i] - max) * scale;
            values[i] = x >= least ? x : minus_infinity();
            highest_x = fmaxf(highest_x, values[i]);
        }
        if (__any_sync(LANES_ALL, highest_x + GUMBEL_MAX >= floor)) {
            float top = minus_infinity();
            int top_idx = 0;
#pragma unroll
            for (int g = 0; g < GROUPS; g++) {
                const uint4 words = words_of(asked, (unsigned)group_start(chunk, g) / 4);
#pragma unroll
                for (int lane = 0; lane < 4; lane++) {
                    const int i = 4 * g + lane;
                    values[i] += gumbel_bound(lane_of(words, lane));
                    if (values[i] > top) top = values[i], top_idx = i;
                }
            }
            if (__any_sync(LANES_ALL, top >= floor)) {
                auto token = [&](int i) { return (unsigned)(group_start(chunk, i / 4) + i % 4); };
                // First the most hopeful token of each thread, for a higher score to beat; most others fall short of it.
                u64 best = top >= floor && top > minus_infinity() ? score_of_kept(asked, source, s, token(top_idx)) : 0;
                const unsigned highest = __reduce_max_sync(LANES_ALL, (unsigned)(best >> TOKEN_BITS));
                if (highest != 0) floor = fmaxf(floor, value_of((u64)highest << TOKEN_BITS) - SCORE_SLACK);
                unsigned hopeful = 0;
#pragma unroll
                for (int i = 0; i < VALUES; i++)
                    if (values[i] >= floor && values[i] > minus_infinity() && i != top_idx) hopeful |= 1u << i;
                for (; hopeful != 0; hopeful &= hopeful - 1) {
                    const u64 other = score_of_kept(asked, source, s, token(__ffs(hopeful) - 1));
                    best = other > best ? other : best;
                }
                if (best != 0) atomicMax(&s.best, best);
            }
        }
        chunk += gridDim.x;
        if (chunk >= p.n_chunks) break;
        load();
        // What other warps have found.
        const u64 found = *(volatile u64*)&s.best;
        if (found != 0) floor = fmaxf(floor, value_of(found) - SCORE_SLACK);
    }
    __syncthreads();
    if (threadIdx.x == 0) p.drawn[(size_t)row * p.n_chunks + blockIdx.x] = s.best;
}
