// Draws: steps 5 to 9 of the sampling definition (trellis_engine::sampling).
//
//   x[t] = (l[t] - max l) / temperature      kept = top-k, then top-p, then min-p      argmax over kept of x[t] + g[t]
//   g = -ln(-ln u),  u = ((w >> 9) + 1/2) * 2^-23,  w from Philox 4x32-10
//
// The logarithms of g are those of the definition, but only for tokens that faster ones cannot tell apart from the best.

__device__ __forceinline__ uint4 words_of(const OutputRow& p, unsigned block_idx) {
    return philox(make_uint4(block_idx, 0, p.position_low, p.position_high), make_uint2(p.seed_low, p.seed_high));
}

__device__ __forceinline__ float gumbel_about(unsigned word) { return -logf(-logf(uniform(word))); }

// Twice the most that x + gumbel_about and x + gumbel lie apart: logf errs by 1 ulp and log_exact by 2, so one g by under
// 4e-6 and the other by under 8e-6 at its largest, and rounding the sums, which lie between -3 and 17 for any token that
// can win, adds 2e-6.
constexpr float SCORE_SLACK = 3e-5f;

struct SampleDrawParams {
    const float* logits;
    const float* adjusted;
    const OutputRow* rows;
    const unsigned* n_rows;
    const Part* parts;
    const u64* cutoffs;
    Drawn* drawn;
    int vocab;
    int unused;
};
static_assert(sizeof(SampleDrawParams) == 64, "as in logits_params.rs");

// Grid (n_chunks, rows of the bucket), THREADS threads. The best token of each chunk. Reads 4 * vocab bytes a row,
// less the chunks in which no token can win.
// drawn Drawn [n_rows, n_chunks]; -inf where no token of the chunk is in the running.
extern "C" __global__ void __launch_bounds__(THREADS) sample_draw(const __grid_constant__ SampleDrawParams p) {
    const OutputRow* __restrict__ rows = p.rows;
    const float* __restrict__ logits = p.logits;
    const float* __restrict__ adjusted = p.adjusted;
    const Part* __restrict__ parts = p.parts;
    const u64* __restrict__ cutoffs = p.cutoffs;
    Drawn* __restrict__ drawn = p.drawn;
    const int vocab = p.vocab;
    __shared__ Best best_shared[THREADS / 32];
    int chunk = blockIdx.x, row = blockIdx.y, n_chunks = gridDim.x;
    if (row >= *p.n_rows) return;
    const OutputRow& asked = rows[row];
    if (!draws(asked)) return;
    const Part* mine = parts + (size_t)row * n_chunks;
    Row whole = warp_row(mine, n_chunks);
    if (whole.is_bad || whole.adjusted.value == minus_infinity()) return;

    // The most probable token, for which x is 0, is always kept: its score is one to beat.
    unsigned mode = whole.adjusted.token;
    float floor = gumbel_about(lane_of(words_of(asked, mode / 4), mode % 4)) - SCORE_SLACK;
    float max = whole.adjusted.value;
    Best best = {minus_infinity(), NONE};
    // The same for the whole block: it depends on the chunk alone.
    if (tempered(mine[chunk].adjusted_max, max, asked.temperature) + GUMBEL_MAX >= floor) {
        const float* source =
            adjusts(asked) ? adjusted + (size_t)row * vocab : logits + (size_t)asked.logits_row * vocab;
        u64 cutoff = truncates(asked) ? cutoffs[row] : 0;
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
                x[lane] = tempered(x[lane], max, asked.temperature);
                bool kept = x[lane] >= asked.min_logit && ranked(x[lane], (unsigned)(first + lane)) >= cutoff;
                if (!kept) x[lane] = minus_infinity();
                in_reach |= x[lane] + GUMBEL_MAX >= floor;
            }
            uint4 words = make_uint4(0, 0, 0, 0);
            if (in_reach) words = words_of(asked, (unsigned)first / 4);
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
