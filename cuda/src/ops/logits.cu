// Rows of logits: statistics, adjustments, results. Steps 1 to 4 of the sampling definition
// (trellis_engine::sampling) and what is reported of the unmodified row.
//
//   lse = max + ln sum exp(l - max)      logprob(t) = l[t] - lse
//   entropy = ln S - W / S,  S = sum exp(x),  W = sum x exp(x),  x = l - max
//
// logits f32 [n_rows, vocab]; rows OutputRow [n_rows]; parts Part [n_rows, n_chunks]; n_chunks = ceil(vocab / CHUNK).
// Sums are f32, in a tree that depends on the vocabulary alone; merged by chunk maxima (Milakov and Gimelshein,
// "Online normalizer calculation for softmax", 2018).

// The new value of a logit: -inf stays, and only the mask and a bias of -inf lead there.
__device__ __forceinline__ float saturate(float old, float value) {
    const float LARGEST = 3.40282346638528859812e38f;
    return old == minus_infinity() ? old : fminf(fmaxf(value, -LARGEST), LARGEST);
}

// Steps 3 and 4. The intrinsics keep the compiler from fusing a product and a sum into one rounding.
__device__ __forceinline__ float penalized(float logit, unsigned count, const OutputRow& p) {
    const float LARGEST = 3.40282346638528859812e38f;
    logit = saturate(logit, logit > 0.0f ? __fdiv_rn(logit, p.repetition) : __fmul_rn(logit, p.repetition));
    float penalty = __fadd_rn(__fmul_rn(__uint2float_rn(count), p.frequency), p.presence);
    penalty = fminf(fmaxf(penalty, -LARGEST), LARGEST);
    return saturate(logit, __fsub_rn(logit, penalty));
}

// Step 2 over the tokens base .. base + n. The first pair of a token applies all pairs of that token.
__device__ __forceinline__ void apply_bias(const BiasPair* biases, unsigned n_bias, int base, int n, float* values) {
    unsigned low = 0, high = n_bias;
    while (low < high) {
        unsigned middle = (low + high) / 2;
        if (biases[middle].token < (unsigned)base) low = middle + 1;
        else high = middle;
    }
    for (unsigned i = low + threadIdx.x; i < n_bias; i += blockDim.x) {
        unsigned token = biases[i].token;
        if (token >= (unsigned)(base + n)) break;
        if (i > low && biases[i - 1].token == token) continue;
        float value = values[token - base];
        for (unsigned j = i; j < n_bias && biases[j].token == token; j++) {
            float bias = biases[j].value;
            value = bias == minus_infinity() ? bias : saturate(value, __fadd_rn(value, bias));
        }
        values[token - base] = value;
    }
}

// Counts the tokens base..base + n in a row's history. Four tokens lie in 16 bytes; a thread has several such loads under
// way, since each waits for the page that it looks up.
__device__ __forceinline__ void count_history(const unsigned* __restrict__ table, const int* __restrict__ page_tokens,
                                              const OutputRow& asked, int base, int n, unsigned* counts) {
    const unsigned end = asked.history_end, begin = end - asked.n_history;
    const unsigned last = (end + 3) / 4;
    for (unsigned start = begin / 4 + threadIdx.x; start < last; start += THREADS * HISTORY_LOADS) {
        int4 tokens[HISTORY_LOADS];
#pragma unroll
        for (int k = 0; k < HISTORY_LOADS; k++) {
            const unsigned quad = start + k * THREADS;
            if (quad >= last) continue;
            const size_t page = table[quad / (PAGE_LEN / 4)];
            tokens[k] = *(const int4*)(page_tokens + page * PAGE_LEN + 4 * (quad % (PAGE_LEN / 4)));
        }
#pragma unroll
        for (int k = 0; k < HISTORY_LOADS; k++) {
            const unsigned quad = start + k * THREADS;
            if (quad >= last) continue;
            const int four[4] = {tokens[k].x, tokens[k].y, tokens[k].z, tokens[k].w};
#pragma unroll
            for (int lane = 0; lane < 4; lane++) {
                const unsigned position = 4 * quad + lane, offset = (unsigned)(four[lane] - base);
                if (position >= begin && position < end && offset < (unsigned)n) atomicAdd(&counts[offset], 1u);
            }
        }
    }
}

// What adjusting a chunk reads, and where in shared memory it does so.
struct Adjusting {
    const BiasPair* biases;
    const unsigned* masks;
    const unsigned* tables;
    const int* page_tokens;
    float* values;    // [CHUNK]
    unsigned* counts; // [CHUNK]
};

// Steps 1 to 4 over a chunk of a row, of which each thread has its values and gets what comes of them, which is also written
// to its place in `out`.
__device__ __forceinline__ void adjust(const Adjusting& a, const OutputRow& asked, int chunk, int vocab,
                                       float (&values)[VALUES], float* out) {
    int base = chunk * CHUNK;
    int n = min(CHUNK, vocab - base);
    const unsigned* mask = a.masks + 2 * (size_t)asked.mask_start;
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        int first = group_start(chunk, g);
        // Four tokens never straddle a word.
        unsigned allowed = asked.mask_start == NONE || first >= vocab ? 15u : mask[first / 32] >> (first % 32);
#pragma unroll
        for (int lane = 0; lane < 4; lane++) {
            a.values[first - base + lane] = (allowed >> lane) & 1u ? values[4 * g + lane] : minus_infinity();
            a.counts[first - base + lane] = 0;
        }
    }
    __syncthreads();
    apply_bias(a.biases + asked.bias_start, asked.n_bias, base, n, a.values);
    if (penalizes(asked)) count_history(a.tables + asked.table_start, a.page_tokens, asked, base, n, a.counts);
    __syncthreads();
    // Not unrolled: a division is long.
#pragma unroll 1
    for (int i = 0; i < VALUES; i++) {
        const int offset = group_start(0, i / 4) + i % 4;
        if (base + offset >= vocab) break;
        float value = a.values[offset];
        if (a.counts[offset] > 0) value = a.values[offset] = penalized(value, a.counts[offset], asked);
        out[base + offset] = value;
    }
#pragma unroll
    for (int i = 0; i < VALUES; i++) values[i] = a.values[group_start(0, i / 4) + i % 4];
}

struct LogitsScanParams {
    const float* logits;
    const OutputRow* rows;
    const unsigned* n_rows;
    const unsigned* tables;
    const int* page_tokens;
    const BiasPair* biases;
    const unsigned* masks;
    float* adjusted;
    Part* parts;
    unsigned* hopeful;
    float* spans;
    unsigned* bin_counts;
    u64* bin_weights;
    int vocab;
    int unused;
};
static_assert(sizeof(LogitsScanParams) == 112, "as in logits_params.rs");

// Worked out where it is needed: registers are for values.
__device__ __forceinline__ size_t place_of_chunk() {
    unsigned chunk, row;
    asm volatile("mov.u32 %0, %%ctaid.x; mov.u32 %1, %%ctaid.y;" : "=r"(chunk), "=r"(row));
    return (size_t)row * gridDim.x + chunk;
}

__device__ __forceinline__ Part& part_of(const LogitsScanParams& p) { return p.parts[place_of_chunk()]; }

// Grid (n_chunks, rows of the bucket), THREADS threads. Reads 4 * vocab bytes a row; a row with a mask, a bias or
// penalties also writes them, adjusted, and each of its blocks reads the history once.
//
// The history of a row is the n_history tokens before position history_end of its context; that of position i is
// page_tokens[tables[table_start + i / PAGE_LEN], i % PAGE_LEN]. bias: pairs in order of token, pairs of one token in order
// of application; masks: bit t % 64 of word t / 64 allows token t. hopeful unsigned [n_rows, n_chunks, HOPEFUL_MAX]: tokens
// that could be drawn; spans f32 [n_rows, n_chunks * SPANS]: the largest of each. bin_counts and bin_weights, which
// sample_bins adds to, are cleared.
extern "C" __global__ void __launch_bounds__(THREADS, SCAN_RESIDENT) logits_scan(const __grid_constant__ LogitsScanParams p) {
    const int vocab = p.vocab;
    __shared__ float values_shared[CHUNK];
    __shared__ unsigned counts[CHUNK];
    __shared__ Largest largest_shared;
    __shared__ float sums[2][SPANS];
    __shared__ int tops[SPANS];
    __shared__ unsigned n_hopeful, steps_shared;
    static_assert(SPANS <= 16, "half a warp sums over spans");
    const int chunk = blockIdx.x, row = blockIdx.y;
    const OutputRow& asked = p.rows[row];
    // Read at once, not one after the other.
    const unsigned n_rows = *p.n_rows, wants = asked.wants, logits_row = asked.logits_row;
    if (((unsigned)row >= n_rows) | (wants == 0)) return;
    float values[VALUES];
    const float* source = p.logits + (size_t)logits_row * vocab;
    load_chunk(source, chunk, vocab, values);
    if (threadIdx.x == THREADS - 1) steps_shared = steps_of(asked);
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Tops largest = largest_of_chunk(chunk, values, largest_shared);
    const unsigned steps = steps_shared;

    // e^x as 2^y, and sums of y for those of x.
    float sum = 0.0f, weighted = 0.0f;
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
        values[i] = values[i] - largest.of_chunk;
        const float y = values[i] * LOG2_E, e = exp2_fast(y);
        sum += e;
        weighted = fmaf(y, e, weighted);
    }
    if (weighted != weighted) {
        // Far above -1e4 e^x is 0, and 0 * -inf stays out of the sum; so does the NaN of a row of -inf.
        sum = weighted = 0.0f;
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
            const float y = fmaxf(values[i] * LOG2_E, -1e4f), e = exp2_fast(y);
            sum += e;
            weighted = fmaf(y, e, weighted);
        }
    }
    const float of_warp = warp_sums(sum, weighted);
    if (lane % 16 == 0) sums[lane / 16][warp] = of_warp;
    if (threadIdx.x == 0) n_hopeful = 0;
    if (steps & CHOOSES && lane == 0) p.spans[place_of_chunk() * SPANS + warp] = largest.of_span;
    if (steps & SEARCHES) {
        for (int bin = chunk * THREADS + threadIdx.x; bin < BINS; bin += gridDim.x * THREADS) {
            p.bin_counts[(size_t)row * BINS + bin] = 0;
            p.bin_weights[(size_t)row * BINS + bin] = 0;
        }
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        float of_chunk = lane % 16 < SPANS ? sums[lane / 16][lane % 16] : 0.0f;
#pragma unroll
        for (int step = 8; step > 0; step >>= 1) of_chunk += __shfl_xor_sync(LANES_ALL, of_chunk, step);
        weighted = __shfl_sync(LANES_ALL, of_chunk, 16) * LN_2;
        if (threadIdx.x == 0) {
            const unsigned token = largest_shared.token;
            part_of(p) = Part{largest.of_chunk, of_chunk, weighted, token, largest.of_chunk, token, 0u, 0u};
        }
    }

    if (steps & ADJUSTS) {
        const Adjusting adjusting = {p.biases, p.masks, p.tables, p.page_tokens, values_shared, counts};
        load_chunk(source, chunk, vocab, values);
        adjust(adjusting, asked, chunk, vocab, values, p.adjusted + (size_t)row * vocab);
        largest = largest_of_chunk(chunk, values, largest_shared);
        if (steps & CHOOSES && lane == 0) p.spans[place_of_chunk() * SPANS + warp] = largest.of_span;
        __syncthreads();
        if (threadIdx.x == 0) {
            Part& part = part_of(p);
            part.adjusted_max = largest.of_chunk;
            part.adjusted_argmax = largest_shared.token;
        }
#pragma unroll
        for (int i = 0; i < VALUES; i++) values[i] = values[i] - largest.of_chunk;
    }
    if (steps & LISTS && largest.of_chunk > minus_infinity()) {
        each_hopeful(asked, chunk, __fdividef(LOG2_E, asked.temperature), values, tops, [&](unsigned token) {
            const unsigned place = atomicAdd(&n_hopeful, 1u);
            if (place < HOPEFUL_MAX) p.hopeful[place_of_chunk() * HOPEFUL_MAX + place] = token;
        });
        __syncthreads();
        if (threadIdx.x == 0) part_of(p).n_hopeful = n_hopeful;
    }
}

struct LogitsRankedParams {
    const float* logits;
    const OutputRow* rows;
    const unsigned* n_rows;
    const unsigned* tables;
    const int* page_tokens;
    const BiasPair* biases;
    const unsigned* masks;
    const RowOutput* outputs;
    float* adjusted;
    Part* parts;
    int vocab;
    int unused;
};
static_assert(sizeof(LogitsRankedParams) == 88, "as in logits_params.rs");

// Grid (n_chunks, rows of the bucket), THREADS threads. For rows whose most probable tokens are wanted after what a sampler
// makes of them: steps 1 to 4 over the log-probabilities (trellis_engine::sampling::rank), to the scratch rows. Runs after
// logits_finish; rows of which no number came are passed over. Moves 8 * vocab bytes a row.
extern "C" __global__ void __launch_bounds__(THREADS) logits_ranked(const __grid_constant__ LogitsRankedParams p) {
    const OutputRow* __restrict__ rows = p.rows;
    const int vocab = p.vocab;
    __shared__ float values_shared[CHUNK];
    __shared__ unsigned counts[CHUNK];
    __shared__ Largest largest_shared;
    int chunk = blockIdx.x, row = blockIdx.y;
    if (row >= *p.n_rows) return;
    const OutputRow& asked = rows[row];
    if (!(asked.wants & WANTS_RANKED) || p.outputs[row].fault == FAULT_NOT_A_NUMBER) return;
    const float log_sum_exp = p.outputs[row].log_sum_exp;
    float values[VALUES];
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        int first = group_start(chunk, g);
        load4(p.logits + (size_t)asked.logits_row * vocab, first, vocab, values + 4 * g);
#pragma unroll
        for (int lane = 0; lane < 4; lane++) values[4 * g + lane] = __fsub_rn(values[4 * g + lane], log_sum_exp);
    }
    const Adjusting adjusting = {p.biases, p.masks, p.tables, p.page_tokens, values_shared, counts};
    adjust(adjusting, asked, chunk, vocab, values, p.adjusted + (size_t)row * vocab);
    const float largest = largest_of_chunk(chunk, values, largest_shared).of_chunk;
    __syncthreads();
    if (threadIdx.x == 0) {
        Part& part = p.parts[(size_t)row * gridDim.x + chunk];
        part.adjusted_max = largest;
        part.adjusted_argmax = largest_shared.token;
    }
}

struct LogitsFullParams {
    float* logits;
    const OutputRow* rows;
    const unsigned* n_rows;
    const RowOutput* outputs;
    int vocab;
    int unused;
};
static_assert(sizeof(LogitsFullParams) == 40, "as in logits_params.rs");

// Grid (n_chunks, rows of the bucket), THREADS threads. Turns a row of logits into log-probabilities where it
// lies; runs last, and at most once for a row of logits. Moves 8 * vocab bytes a row.
extern "C" __global__ void __launch_bounds__(THREADS) logits_full(const __grid_constant__ LogitsFullParams p) {
    const OutputRow* __restrict__ rows = p.rows;
    float* __restrict__ logits = p.logits;
    const RowOutput* __restrict__ outputs = p.outputs;
    const int vocab = p.vocab;
    int chunk = blockIdx.x, row = blockIdx.y;
    if (row >= *p.n_rows) return;
    const OutputRow& asked = rows[row];
    if (!(asked.wants & WANTS_FULL) || outputs[row].fault == FAULT_NOT_A_NUMBER) return;
    float log_sum_exp = outputs[row].log_sum_exp;
    float* values = logits + (size_t)asked.logits_row * vocab;
    int end = min(vocab, (chunk + 1) * CHUNK);
#pragma unroll 4
    for (int token = chunk * CHUNK + threadIdx.x; token < end; token += THREADS) values[token] -= log_sum_exp;
}
