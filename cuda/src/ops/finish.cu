// Results of rows of logits: what is reported of the unmodified row, and the token that comes of all that was drawn from it;
// formulas are those of logits.cu and sample.cu.

// The score of a token that may be drawn is more than this below what is worked out for it by fast logarithms nowhere; see
// HOPEFUL_SLACK.
constexpr float BOUND_SLACK = 1e-4f;

// The best of a chunk's tokens, ranked; `x_of(logit)` makes x of a logit, -inf for what may not be drawn. By all threads, which
// have a token each at a time.
template <class F>
__device__ __forceinline__ u64 best_of_chunk(const OutputRow& asked, const float* source, int vocab, int chunk, u64 best,
                                             F x_of) {
    for (int start = 0; start < CHUNK; start += FINISH_THREADS) {
        const int token = chunk * CHUNK + start + (int)threadIdx.x;
        const float x = x_of(token < vocab ? source[token] : minus_infinity());
        if (x == minus_infinity()) continue;
        const unsigned word = lane_of(words_of(asked, (unsigned)token / 4), token % 4);
        const float bound = fmaf(log2_fast(rest_of(word)), -0.6931472f, x);
        if (best == 0 || bound >= value_of(best) - BOUND_SLACK) best = larger(best, score_of(asked, x, (unsigned)token));
    }
    return best;
}

constexpr int N_HOPEFUL_MAX = ((1 << TOKEN_BITS) + CHUNK - 1) / CHUNK * HOPEFUL_MAX;
static_assert(HOPEFUL_MAX % 4 == 0, "lists are read four tokens at a time");

// The best of the tokens that the scan has listed, for each thread its own; where they were too many, of the whole chunk.
// Chunks list few tokens each, so that they are first brought together: a warp has work for all lanes or for none.
__device__ __forceinline__ u64 best_listed(const OutputRow& asked, const float* source, int vocab, const Part* parts,
                                           const unsigned* hopeful, int n_chunks, float max) {
    __shared__ unsigned listed[N_HOPEFUL_MAX];
    __shared__ unsigned n_listed;
    if (threadIdx.x == 0) n_listed = 0;
    __syncthreads();
    bool is_crowded = false;
    for (int chunk = threadIdx.x; chunk < n_chunks; chunk += FINISH_THREADS) {
        const uint4* list = (const uint4*)(hopeful + chunk * HOPEFUL_MAX);
        uint4 four = list[0];
        unsigned n = parts[chunk].n_hopeful;
        if (n > HOPEFUL_MAX) is_crowded = true, n = 0;
        unsigned place = atomicAdd(&n_listed, n);
        for (unsigned i = 0; i < n; i++, place++) {
            if (i > 0 && i % 4 == 0) four = list[i / 4];
            listed[place] = lane_of(four, i % 4);
        }
    }
    is_crowded = __syncthreads_or(is_crowded);
    u64 best = 0;
    for (unsigned i = threadIdx.x; i < n_listed; i += FINISH_THREADS)
        best = larger(best, score_of(asked, tempered(source[listed[i]], max, asked.temperature), listed[i]));
    if (!is_crowded) return best;
    best = warp_max(best);
    for (int chunk = 0; chunk < n_chunks; chunk++) {
        if (parts[chunk].n_hopeful <= HOPEFUL_MAX) continue;
        best = best_of_chunk(asked, source, vocab, chunk, best,
                             [&](float logit) { return tempered(logit, max, asked.temperature); });
    }
    return best;
}

struct LogitsFinishParams {
    const float* logits;
    const float* adjusted;
    const OutputRow* rows;
    const unsigned* n_rows;
    const Part* parts;
    const unsigned* hopeful;
    const unsigned* stands;
    const u64* drawn;
    const int* score_tokens;
    int* slots;
    RowOutput* outputs;
    float* scores;
    const ProgramOutput* program_outputs;
    int vocab;
    int n_chunks;
    int n_drawn;
    int unused;
};
static_assert(sizeof(LogitsFinishParams) == 120, "as in logits_params.rs");

// Grid (rows of the bucket), FINISH_THREADS threads. Gathers the parts and the draws of a row, or takes what a program has
// drawn, and writes its result and the scores that were asked for. Moves 40 bytes a chunk, and 32 for each token that could be
// drawn.
extern "C" __global__ void __launch_bounds__(FINISH_THREADS)
logits_finish(const __grid_constant__ LogitsFinishParams p) {
    __shared__ u64 bests[FINISH_THREADS / 32];
    const int vocab = p.vocab, n_chunks = p.n_chunks;
    const int row = blockIdx.x;
    const OutputRow& asked = p.rows[row];
    if (((unsigned)row >= *p.n_rows) | (asked.wants == 0)) return;
    const float* values = p.logits + (size_t)asked.logits_row * vocab;
    const Part* mine = p.parts + (size_t)row * n_chunks;

    // Every warp does the same, so that no barrier is needed.
    const Row whole = warp_row(mine, n_chunks);
    float sum = 0.0f, weighted = 0.0f;
    for (int chunk = threadIdx.x % 32; chunk < n_chunks; chunk += 32) {
        Part part = mine[chunk];
        float shift = part.max - whole.max;
        if (shift > -1e4f) {
            float scale = expf(shift);
            sum += part.sum * scale;
            weighted += (part.weighted + shift * part.sum) * scale;
        }
    }
    const float both = warp_sums(sum, weighted);
    sum = __shfl_sync(LANES_ALL, both, 0);
    weighted = __shfl_sync(LANES_ALL, both, 16);

    unsigned token = whole.adjusted.token;
    if (draws(asked) && !whole.is_bad && whole.adjusted.value > minus_infinity()) {
        const float* source = drawn_from(p.logits, p.adjusted, asked, row, vocab);
        const u64* drawn = p.drawn + (size_t)row * n_chunks;
        const unsigned stand = chooses(asked) ? p.stands[row] : STAND_OPEN;
        if (stand == STAND_DRAWN) {
            token = token_of(drawn[0]);
        } else {
            u64 best = 0;
            if (lists(asked)) {
                const unsigned* hopeful = p.hopeful + (size_t)row * n_chunks * HOPEFUL_MAX;
                best = best_listed(asked, source, vocab, mine, hopeful, n_chunks, whole.adjusted.value);
            } else {
                for (int block = threadIdx.x; block < p.n_drawn; block += FINISH_THREADS) best = larger(best, drawn[block]);
            }
            best = block_max<FINISH_THREADS>(best, bests);
            if (best != 0) token = token_of(best);
        }
    }

    float log_sum = logf(sum);
    float log_sum_exp = whole.max + log_sum;
    unsigned fault = whole.is_bad ? FAULT_NOT_A_NUMBER : FAULT_NONE;
    bool has_token = (asked.wants & (WANTS_SAMPLE | WANTS_PROGRAM)) && fault == FAULT_NONE;
    if (has_token && (asked.wants & WANTS_PROGRAM)) {
        const ProgramOutput& by_program = p.program_outputs[asked.program_row];
        fault = by_program.fault;
        has_token = fault == FAULT_NONE;
        token = by_program.token;
    } else if (has_token && whole.adjusted.value == minus_infinity()) {
        fault = FAULT_NOTHING_TO_DRAW;
        has_token = false;
    }
    if (threadIdx.x == 0) {
        RowOutput out = {0u, 0.0f, fault, 0.0f, 0.0f, 0u};
        if (has_token) {
            out.token = token;
            out.logprob = values[token] - log_sum_exp;
        }
        if (!whole.is_bad) {
            out.log_sum_exp = log_sum_exp;
            out.entropy = fmaxf(log_sum - weighted / sum, 0.0f);
        }
        p.outputs[row] = out;
        // After a fault token 0: the step that reads it computes nothing of use, but stays inside the vocabulary.
        const bool is_drawn = (asked.wants & (WANTS_SAMPLE | WANTS_PROGRAM)) != 0;
        if (is_drawn && asked.drawn_slot != NONE) p.slots[asked.drawn_slot] = (int)out.token;
    }
    if ((asked.wants & WANTS_SCORES) && !whole.is_bad) {
        for (unsigned i = threadIdx.x; i < asked.n_scores; i += FINISH_THREADS) {
            p.scores[asked.score_start + i] = values[p.score_tokens[asked.score_start + i]] - log_sum_exp;
        }
    }
}
