// What the kernels over rows of logits share: the layout of requests, reading a chunk, reductions. The launcher defines
// THREADS, GROUPS, BINS (of the histogram of a row, and threads of a block that looks at a whole row), TOKEN_BITS, what a
// row may want, faults, and NONE, a place that is nowhere.
//
// A row of logits is cut into chunks of CHUNK tokens, one block each. A thread holds VALUES tokens of its chunk
// in groups of 4, so that one 16-byte load and one Philox block serve a group:
// token = chunk * CHUNK + (g * THREADS + thread) * 4 + lane.

typedef unsigned long long u64;

constexpr int VALUES = 4 * GROUPS;
constexpr int CHUNK = THREADS * VALUES;

// What one block knows about its chunk; `weighted` is the sum of (l - max) * exp(l - max).
struct Part {
    float max, sum, weighted;
    unsigned argmax;
    float adjusted_max;
    unsigned adjusted_argmax;
    unsigned has_nan;
    unsigned unused;
};
static_assert(sizeof(Part) == PART_BYTES, "as in logits.rs");

// The best token of one chunk.
struct Drawn {
    float score;
    unsigned token;
};
static_assert(sizeof(Drawn) == DRAWN_BYTES, "as in logits.rs");

// As in logits.rs.
struct RowOutput {
    unsigned token;
    float logprob;
    unsigned fault;
    float log_sum_exp;
    float entropy;
    unsigned n_top;
};
static_assert(sizeof(RowOutput) == 24, "as in logits.rs");

// As in topn.rs.
struct Ranked {
    unsigned token;
    float logprob;
};

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }
__device__ __forceinline__ float plus_infinity() { return __uint_as_float(0x7f800000u); }

// ---- which steps a row takes ----

__device__ __forceinline__ bool penalizes(const OutputRow& p) {
    return p.n_history > 0 && (p.repetition != 1.0f || p.frequency != 0.0f || p.presence != 0.0f);
}

// Whether the row that is drawn from differs from the logits; it then lies in the scratch rows.
__device__ __forceinline__ bool adjusts(const OutputRow& p) {
    return (p.wants & WANTS_SAMPLE) && (p.mask_start != NONE || p.n_bias > 0 || penalizes(p));
}

__device__ __forceinline__ bool draws(const OutputRow& p) {
    return (p.wants & WANTS_SAMPLE) && p.temperature != 0.0f;
}

// Whether a cutoff has to be searched for; min-p alone needs none.
__device__ __forceinline__ bool truncates(const OutputRow& p) {
    return draws(p) && (p.top_k > 0 || p.top_p < 1.0f);
}

// Step 5. Adding zero makes -0 into +0: the two are equal, and their bits have to be.
__device__ __forceinline__ float tempered(float logit, float max, float temperature) {
    return __fadd_rn(__fdiv_rn(__fsub_rn(logit, max), temperature), 0.0f);
}

// ---- a total order of (value, token) as integers: larger is earlier, ties to the lower token ----

constexpr u64 TOKEN_MASK = (1ull << TOKEN_BITS) - 1;

__device__ __forceinline__ u64 ranked(float value, unsigned token) {
    unsigned bits = __float_as_uint(value);
    unsigned key = (bits & 0x80000000u) ? ~bits : bits | 0x80000000u;
    return ((u64)key << TOKEN_BITS) | (TOKEN_MASK - token);
}

__device__ __forceinline__ unsigned token_of(u64 rank) { return (unsigned)(TOKEN_MASK - (rank & TOKEN_MASK)); }

__device__ __forceinline__ float value_of(u64 rank) {
    unsigned key = (unsigned)(rank >> TOKEN_BITS);
    return __uint_as_float((key & 0x80000000u) ? key & 0x7fffffffu : ~key);
}

// ---- reading ----

// Four tokens of a row from `first`, which is a multiple of 4; -inf past the end.
__device__ __forceinline__ void load4(const float* row, int first, int vocab, float out[4]) {
    if ((vocab & 3) == 0) {
        float4 v = make_float4(minus_infinity(), minus_infinity(), minus_infinity(), minus_infinity());
        if (first < vocab) v = *(const float4*)(row + first);
        out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
    } else {
        // Rows of such a vocabulary do not start at multiples of 16 bytes.
#pragma unroll
        for (int lane = 0; lane < 4; lane++) out[lane] = first + lane < vocab ? row[first + lane] : minus_infinity();
    }
}

__device__ __forceinline__ int group_start(int chunk, int group) {
    return chunk * CHUNK + (group * THREADS + (int)threadIdx.x) * 4;
}

// ---- reductions, each in one fixed order ----

struct Best {
    float value;
    unsigned token;
};

__device__ __forceinline__ Best better(Best a, Best b) {
    return b.value > a.value || (b.value == a.value && b.token < a.token) ? b : a;
}

__device__ __forceinline__ Best warp_best(Best best) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) {
        Best other;
        other.value = __shfl_xor_sync(LANES_ALL, best.value, step);
        other.token = __shfl_xor_sync(LANES_ALL, best.token, step);
        best = better(best, other);
    }
    return best;
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) value += __shfl_xor_sync(LANES_ALL, value, step);
    return value;
}

// The best of a block of THREADS threads, in every thread. `shared` holds THREADS / 32 entries.
__device__ __forceinline__ Best block_best(Best best, Best* shared) {
    best = warp_best(best);
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = best;
    __syncthreads();
    unsigned lane = threadIdx.x % 32;
    Best nothing = {minus_infinity(), NONE};
    return warp_best(lane < THREADS / 32 ? shared[lane] : nothing);
}

// What a whole row comes to; made by each warp that calls it, the same in every lane.
struct Row {
    float max;
    bool is_bad;       // NaN, +inf, or nothing but -inf
    Best adjusted;     // -inf when there is nothing to draw
};

__device__ __forceinline__ Row warp_row(const Part* parts, int n_chunks) {
    Best raw = {minus_infinity(), NONE}, adjusted = {minus_infinity(), NONE};
    bool has_nan = false;
    for (int chunk = threadIdx.x % 32; chunk < n_chunks; chunk += 32) {
        Part part = parts[chunk];
        raw = better(raw, Best{part.max, part.argmax});
        adjusted = better(adjusted, Best{part.adjusted_max, part.adjusted_argmax});
        has_nan |= part.has_nan != 0;
    }
    raw = warp_best(raw);
    Row row;
    row.max = raw.value;
    row.adjusted = warp_best(adjusted);
    row.is_bad = __any_sync(LANES_ALL, has_nan) || raw.value == plus_infinity() || raw.value == minus_infinity();
    return row;
}
