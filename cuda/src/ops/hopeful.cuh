// The few tokens of a chunk that could be drawn, of those that are in the running.
//
//   score s = x + g,  x = (l - max l) / temperature,  g = -ln(-ln u)
//
// As -ln u >= 1 - u, g is at most b = -ln(1 - u): one fast logarithm for each token bounds its score. With the largest bound of
// the chunk comes a score that some token of it reaches, and whose bound is below that is out of the running. What is left,
// mostly one token or two, is worked out as the definition has it. Numbers here are in units of ln 2, and x is taken from the
// chunk's largest value, as the row's is not known yet.

__device__ __forceinline__ uint4 words_of(const OutputRow& p, unsigned block_idx) {
    return philox(make_uint4(block_idx, 0, p.position_low, p.position_high), make_uint2(p.seed_low, p.seed_high));
}

__device__ __forceinline__ float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

constexpr float LOG2_E = 1.44269504088896340736f;
constexpr float LN_2 = 0.693147180559945309417f;

// (1 - u) * 2^32, exactly.
__device__ __forceinline__ float rest_scaled(unsigned word) { return __uint2float_rn((~word & 0xfffffe00u) | 0x100u); }
constexpr float REST_BITS = 32.0f;

// 1 - u, exactly: with ~(w >> 9) in the place of a fraction of 1 it is that less 1 - 2^-24.
__device__ __forceinline__ float rest_of(unsigned word) {
    return __uint_as_float((word >> 9) ^ 0x3fffffffu) - 0.999999940395355224609375f;
}

// More than, between two tokens of a row, what was worked out here may differ from the definition. Only tokens with x above
// -20 can be drawn, as the row's largest has a score above -2.82 and no noise is above 16.64; for those, in nats: a fast
// logarithm errs by 2^-22 of itself, which is at most 32 in units of ln 2, so by 6e-6; x here by 2^-21 of itself, as the scale
// is good to 2 ulp, so by 1e-5, and by 2^-23 of itself in the definition; g by under 8e-6 (maths.cuh), and the sums by 2e-6
// each. That is under 4e-5 for a token, and under 1.2e-4 in units of ln 2 for two.
constexpr float HOPEFUL_SLACK = 2e-4f;

// The least score that goes with the largest bound b = x + b' of a chunk. As x is at most 0, b' is at least b, and what the
// bound is too high by, ln(-ln u / (1 - u)), falls with b': the score is at least the one of u = 1 - e^-b at x = 0. Near u = 1
// it is taken from -ln u <= (1 - u) / sqrt(u), where -ln u would lose its digits. That u is a little less covers what
// b errs by where it is small and all of it noise; where x is far below 0 the true score is far above this one. No u is less
// than 2^-24.
__device__ __forceinline__ float score_of_bound(float bound) {
    const float u = fmaxf(1.0f - exp2_fast(-bound) - 2e-5f, 5.9e-8f);
    const float log = log2_fast(u);
    return u < 0.9f ? -log2_fast(log * -0.6931472f) : fmaf(0.5f, log, bound);
}

// Calls `f(token)` for the tokens of a block's chunk that could have its highest score; of those, that is, whose value is
// above -inf. `values` are logits less the largest of them, and done with; `scale` is log2 e / temperature. By all threads of
// the block; `tops` holds SPANS entries, which are read until the next barrier.
template <class F>
__device__ __forceinline__ void each_hopeful(const OutputRow& p, int chunk, float scale, float (&values)[VALUES], int* tops,
                                             F f) {
    float top = minus_infinity();
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        const uint4 words = words_of(p, (unsigned)group_start(chunk, g) / 4);
#pragma unroll
        for (int lane = 0; lane < 4; lane++) {
            const int i = 4 * g + lane;
            values[i] = fmaf(values[i], scale, -log2_fast(rest_scaled(lane_of(words, lane))));
            top = fmaxf(top, values[i]);
        }
    }
    const int of_warp = __reduce_max_sync(LANES_ALL, order_key(top));
    if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = of_warp;
    __syncthreads();
    const float of_chunk = of_order_key(__reduce_max_sync(LANES_ALL, tops[threadIdx.x % SPANS]));
    const float floor = score_of_bound(of_chunk + REST_BITS) - HOPEFUL_SLACK - REST_BITS;
    if (!(top >= floor)) return;
#pragma unroll
    for (int i = 0; i < VALUES; i++)
        if (values[i] >= floor) f((unsigned)(group_start(chunk, i / 4) + i % 4));
}

// The score of a token of which the definition's x is this, ranked; 0 where it is -inf.
__device__ __forceinline__ u64 score_of(const OutputRow& p, float x, unsigned token) {
    if (x == minus_infinity()) return 0;
    return ranked(__fadd_rn(x, gumbel(lane_of(words_of(p, token / 4), token % 4))), token);
}
