// Noise as trellis_engine::sampling::program defines it: Philox 4x32-10 by block of four tokens, and what is made of a word.
// The launcher defines GUMBEL_MAX, a bound above the largest Gumbel noise.

// Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011).
__device__ __forceinline__ uint4 philox(uint4 counter, uint2 key) {
#pragma unroll
    for (int round = 0; round < 10; round++) {
        unsigned high0 = __umulhi(0xD2511F53u, counter.x), low0 = 0xD2511F53u * counter.x;
        unsigned high1 = __umulhi(0xCD9E8D57u, counter.z), low1 = 0xCD9E8D57u * counter.z;
        counter = make_uint4(high1 ^ counter.y ^ key.x, low1, high0 ^ counter.w ^ key.y, low0);
        key.x += 0x9E3779B9u;
        key.y += 0xBB67AE85u;
    }
    return counter;
}

__device__ __forceinline__ unsigned lane_of(uint4 words, int lane) {
    return lane == 0 ? words.x : lane == 1 ? words.y : lane == 2 ? words.z : words.w;
}

// Exact in f32, never 0 or 1.
__device__ __forceinline__ float uniform(unsigned word) { return ((float)(word >> 9) + 0.5f) * (1.0f / 8388608.0f); }

__device__ __forceinline__ float gumbel(unsigned word) { return -log_exact(-log_exact(uniform(word))); }
