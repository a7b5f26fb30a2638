// What the kernels over rows of logits share: the layout of requests, which steps a row takes, reading a chunk, reductions.
// The launcher defines THREADS, GROUPS, BINS (of the histogram of a row, and threads of a block that looks at a whole row),
// TOKEN_BITS, TOP_K_MAX, HOPEFUL_MAX, what a row may want, faults, and NONE, a place that is nowhere.
//
// A row of logits is cut into chunks of CHUNK tokens, one block each. A thread holds VALUES tokens of its chunk
// in groups of 4, so that one 16-byte load and one Philox block serve a group:
// token = chunk * CHUNK + (g * THREADS + thread) * 4 + lane.
// The tokens of a warp are a span of the row; there are SPANS in a chunk.

typedef unsigned long long u64;

constexpr int VALUES = 4 * GROUPS;
constexpr int CHUNK = THREADS * VALUES;
constexpr int SPANS = THREADS / 32;

// What one block knows about its chunk; `weighted` is the sum of (l - max) * exp(l - max). `max` is NaN where some value is.
struct alignas(16) Part {
    float max, sum, weighted;
    unsigned argmax;
    float adjusted_max;
    unsigned adjusted_argmax;
    unsigned n_hopeful;  // tokens that could be drawn, of a row that lists them; those past HOPEFUL_MAX are not listed
    unsigned unused;
};
static_assert(sizeof(Part) == PART_BYTES, "as in logits.rs");

// How a row stands that chooses among few tokens.
enum Stand : unsigned {
    STAND_DRAWN,  // the token is there
    STAND_OPEN,   // they were not few
};

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

// Without branches, so that what is read of the row is read at once.

__device__ __forceinline__ bool penalizes(const OutputRow& p) {
    return (p.n_history > 0) & ((p.repetition != 1.0f) | (p.frequency != 0.0f) | (p.presence != 0.0f));
}

// Whether the row that is drawn from differs from the logits; it then lies in the scratch rows.
__device__ __forceinline__ bool adjusts(const OutputRow& p) {
    return ((p.wants & WANTS_SAMPLE) != 0) & ((p.mask_start != NONE) | (p.n_bias > 0) | penalizes(p));
}

__device__ __forceinline__ bool draws(const OutputRow& p) { return ((p.wants & WANTS_SAMPLE) != 0) & (p.temperature != 0.0f); }

// Whether only a part of the row may be drawn.
__device__ __forceinline__ bool truncates(const OutputRow& p) { return (p.top_k > 0) | (p.top_p < 1.0f); }

// A row is drawn from in one of three ways.
//
// Where nothing is truncated, the scan lists the few tokens of each chunk that could be drawn. Far from the ends of f32
// quotients by the temperature are as exact as f32 has them, which that counts on.
__device__ __forceinline__ bool lists(const OutputRow& p) {
    const bool is_plain = (p.temperature > 1e-30f) & (p.temperature < 1e30f);
    return draws(p) & !truncates(p) & (p.min_logit == minus_infinity()) & is_plain;
}

// With a small top-k, or min-p alone, the tokens that may be kept are chosen by the largest of each span.
__device__ __forceinline__ bool chooses(const OutputRow& p) {
    const bool is_small = (p.top_k > 0) & (p.top_k <= TOP_K_MAX), has_min_p = p.min_logit > minus_infinity();
    return draws(p) & (truncates(p) ? is_small : has_min_p);
}

// Else blocks go through the row again, after the cutoff is found if there is one.
__device__ __forceinline__ bool searches(const OutputRow& p) { return draws(p) & truncates(p) & !chooses(p); }

// All of that in one word, which one thread makes for its block.
constexpr unsigned ADJUSTS = 1, LISTS = 2, CHOOSES = 4, SEARCHES = 8;

__device__ __forceinline__ unsigned steps_of(const OutputRow& p) {
    return (adjusts(p) ? ADJUSTS : 0) | (lists(p) ? LISTS : 0) | (chooses(p) ? CHOOSES : 0) | (searches(p) ? SEARCHES : 0);
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

__device__ __forceinline__ u64 larger(u64 a, u64 b) { return a > b ? a : b; }

// The largest of a warp, in every lane.
__device__ __forceinline__ u64 warp_max(u64 value) {
    const unsigned high = (unsigned)(value >> 32);
    const unsigned highest = __reduce_max_sync(LANES_ALL, high);
    return ((u64)highest << 32) | __reduce_max_sync(LANES_ALL, high == highest ? (unsigned)value : 0u);
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

// A thread's tokens of a chunk.
__device__ __forceinline__ void load_chunk(const float* row, int chunk, int vocab, float (&values)[VALUES]) {
    if ((vocab & 3) == 0 && (chunk + 1) * CHUNK <= vocab) {
        // Nearly all chunks: nothing is asked for each load.
        const float4* mine = (const float4*)(row + group_start(chunk, 0));
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            const float4 v = mine[g * THREADS];
            values[4 * g] = v.x, values[4 * g + 1] = v.y, values[4 * g + 2] = v.z, values[4 * g + 3] = v.w;
        }
    } else {
#pragma unroll
        for (int g = 0; g < GROUPS; g++) load4(row, group_start(chunk, g), vocab, values + 4 * g);
    }
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

// Two sums at once: lanes below 16 get the first, the others the second.
__device__ __forceinline__ float warp_sums(float first, float second) {
    const bool is_upper = threadIdx.x % 32 >= 16;
    float mine = is_upper ? second : first;
    mine += __shfl_xor_sync(LANES_ALL, is_upper ? first : second, 16);
#pragma unroll
    for (int step = 8; step > 0; step >>= 1) mine += __shfl_xor_sync(LANES_ALL, mine, step);
    return mine;
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) value += __shfl_xor_sync(LANES_ALL, value, step);
    return value;
}

// The order of numbers as that of integers; NaN as the hardware makes it is above all. -0 is below 0.
__device__ __forceinline__ int order_key(float value) {
    const int bits = __float_as_int(value);
    return bits >= 0 ? bits : bits ^ 0x7fffffff;
}

__device__ __forceinline__ float of_order_key(int key) { return __int_as_float(key >= 0 ? key : key ^ 0x7fffffff); }

// What a block shares to find its largest value.
struct Largest {
    int keys[SPANS];
    unsigned token;
};

struct Tops {
    float of_chunk, of_span;
};

// The largest values of a block's chunk and of the warp's span, NaN if any is, in every thread; behind the next barrier
// `s.token` is the lowest token that has that of the chunk.
__device__ __forceinline__ Tops largest_of_chunk(int chunk, const float (&values)[VALUES], Largest& s) {
    float top = values[0];
#pragma unroll
    for (int i = 1; i < VALUES; i++) asm("max.NaN.f32 %0, %0, %1;" : "+f"(top) : "f"(values[i]));
    // NaN becomes the one that the hardware makes, -0 becomes 0.
    const int key = order_key(top + 0.0f);
    const int of_span = __reduce_max_sync(LANES_ALL, key);
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (threadIdx.x == 0) s.token = NONE;
    if (lane == 0) s.keys[warp] = of_span;
    __syncthreads();
    const int of_chunk = __reduce_max_sync(LANES_ALL, s.keys[lane % SPANS]);
    const float largest = of_order_key(of_chunk);
    if (of_span == of_chunk) {
        unsigned token = NONE;
#pragma unroll
        for (int i = VALUES - 1; i >= 0; i--)
            if (values[i] == largest) token = (unsigned)(group_start(chunk, i / 4) + i % 4);
        token = __reduce_min_sync(LANES_ALL, token);
        if (lane == 0) atomicMin(&s.token, token);
    }
    return Tops{largest, of_order_key(of_span)};
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
        has_nan |= part.max != part.max;
        raw = better(raw, Best{part.max, part.argmax});
        adjusted = better(adjusted, Best{part.adjusted_max, part.adjusted_argmax});
    }
    raw = warp_best(raw);
    Row row;
    row.max = raw.value;
    row.adjusted = warp_best(adjusted);
    row.is_bad = __any_sync(LANES_ALL, has_nan) || raw.value == plus_infinity() || raw.value == minus_infinity();
    return row;
}

// Where the row that is drawn from lies.
__device__ __forceinline__ const float* drawn_from(const float* logits, const float* adjusted, const OutputRow& p, int row,
                                                   int vocab) {
    return adjusts(p) ? adjusted + (size_t)row * vocab : logits + (size_t)p.logits_row * vocab;
}
