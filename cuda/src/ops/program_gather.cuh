// What is gathered from the tokens of a pass, by warps, in shared memory.

// The low word of a place: larger for lower tokens; its last bit tells that the value is -0.
__device__ __forceinline__ unsigned low_of(int token, bool is_negative_zero) {
    return ((unsigned)(TOKEN_MASK - (unsigned)token) << 1) | (is_negative_zero ? 1u : 0u);
}

// Puts the best (key, token) of a warp into its place if it is better than what is there.
__device__ __forceinline__ void keep_best(Shared& s, unsigned slot, u64* place, unsigned key, unsigned low) {
    const unsigned best = __reduce_max_sync(LANES_ALL, key);
    low = __reduce_max_sync(LANES_ALL, key == best ? low : 0u);
    const u64 mine = ((u64)best << 32) | low;
    if (threadIdx.x % 32 == 0 && mine > *place) {
        *place = mine;
        atomicMax(&s.leaders[slot], best);
    }
    __syncwarp();
}

__device__ __forceinline__ float largest_of(const Many& x) {
    float some[4] = {x.v[0], x.v[1], x.v[2], x.v[3]};
#pragma unroll
    for (int i = 4; i < EACH; i++) some[i % 4] = fmaxf(some[i % 4], x.v[i]);
    return fmaxf(fmaxf(some[0], some[1]), fmaxf(some[2], some[3]));
}

// `x` where tokens count, else -inf.
__device__ __forceinline__ Many counted(const Many& x, unsigned valid) {
    Many out = x;
    if (valid != ALL_VALID) {
#pragma unroll
        for (int i = 0; i < EACH; i++) out.v[i] = (valid >> i) & 1 ? x.v[i] : minus_infinity();
    }
    return out;
}

// `is_rising`: a warp sees rising tokens, so that of equal ones the first that it has seen is the lowest.
__device__ __forceinline__ void gather_best(const Run& r, const Place& at, unsigned slot, u64* place, const Many& row,
                                            unsigned valid, bool is_rising) {
    const Many x = counted(row, valid);
    const float best = largest_of(x);
    const float mine = value_of((unsigned)(*place >> 32)), leader = value_of(r.s.leaders[slot]);
    const bool is_better = is_rising ? best > mine && best >= leader : best >= leader;
    if (!__any_sync(LANES_ALL, is_better && best > minus_infinity())) return;
    unsigned low = 0;
#pragma unroll
    for (int i = EACH - 1; i >= 0; i--)
        if (x.v[i] == best) low = low_of(token_of(at, i), __float_as_uint(x.v[i]) == 0x80000000u);
    keep_best(r.s, slot, place, key_of(best), best > minus_infinity() ? low : 0u);
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 - u, in parts of 2^-23 and rounded down, up to which a token that is no more than `largest` may reach `leader`: as
// g <= -ln(1 - u), 1 - u is at most e^-(what it lacks). What it lacks is taken less by what rounding may give, of the sum with
// g and of what is worked out here.
__device__ __forceinline__ unsigned rest_within(float largest, float leader) {
    const float lack = leader - largest - fmaf(fabsf(leader), 2.5e-7f, 1e-3f);
    return __float2uint_rz(exp2_fast(fmaf(lack, -1.44269504f, 23.0f)));
}

// The best of x + g. Noise is made only where a token can still win, and bounds on it where the largest of a thread's tokens
// could win with the best noise among them. Logarithms are worked out where a bound does not tell that a token cannot:
// g <= -ln(1 - u), and the bits of a number, as an integer, are 2^23 times its logarithm to base 2 or less. Sums round upwards
// with their terms, so that what is passed over by a bound loses after rounding too. Of the rest those with the highest bounds
// come first.
__device__ __forceinline__ void gather_draw(const Run& r, const Place& at, unsigned slot, u64* place, Many& row,
                                            unsigned source_idx) {
    float leader = value_of(r.s.leaders[slot]);
    const float largest = largest_of(row);
    if (!__any_sync(LANES_ALL, largest > minus_infinity() && __fadd_rn(largest, GUMBEL_MAX) >= leader)) return;
    const NoiseSource& source = sources_of(r.s)[source_idx];
    unsigned key = key_of(minus_infinity()), low = 0;
    bool has_any = false;
#pragma unroll 1
    for (int start = 0; start < EACH; start += 8, turn<8>(row)) {
        const int first = token_of(at, start);
        const uint4 a = words_of(source, (unsigned)first / 4), b = words_of(source, (unsigned)(first + at.step) / 4);
        const unsigned words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        const unsigned most = max(max(max(a.x, a.y), max(a.z, a.w)), max(max(b.x, b.y), max(b.z, b.w)));
        if (!__any_sync(LANES_ALL, ~most >> 9 <= rest_within(largest, leader))) continue;
        float bounds[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            // 1 - u, from a number in [1, 2) with the same bits.
            const float rest = __fsub_rn(__uint_as_float((~words[i] >> 9) | 0x3f800000u), 0.99999994f);
            bounds[i] = __fadd_rn(row.v[i], __fmaf_rn((float)__float_as_int(rest), -8.2629582e-8f, 88.02969f + 1e-3f));
        }
        if (at.valid != ALL_VALID) {
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (!((at.valid >> (start + i)) & 1)) bounds[i] = minus_infinity();
        }
        while (true) {
            float best = bounds[0];
#pragma unroll
            for (int i = 1; i < 8; i++) best = fmaxf(best, bounds[i]);
            const bool is_open = best >= leader && best > minus_infinity();
            if (!__any_sync(LANES_ALL, is_open)) break;
            has_any = true;
            float value = minus_infinity();
            unsigned word = 0;
            int token = 0;
            bool is_found = false;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                if (bounds[i] == best && !is_found) {
                    value = row.v[i], word = words[i], token = (i < 4 ? first : first + at.step) + i % 4;
                    bounds[i] = minus_infinity(), is_found = true;
                }
            }
            const unsigned mine = is_open ? key_of(__fadd_rn(value, gumbel(word))) : 0u;
            const unsigned mine_low = low_of(token, false);
            if (mine > key || (mine == key && mine_low > low)) key = mine, low = mine_low;
            leader = fmaxf(leader, value_of(__reduce_max_sync(LANES_ALL, key)));
        }
    }
    if (has_any) keep_best(r.s, slot, place, key, low);
}

// The sum of a group's 128 tokens, as many levels of it as the tree has, in the first lane.
__device__ __forceinline__ float group_sum(int n_levels, float a, float b, float c, float d) {
    float sum = a;
    if (n_levels > 0) sum = in_row(__fadd_rn(a, b));
    if (n_levels > 1) sum = in_row(__fadd_rn(sum, in_row(__fadd_rn(c, d))));
#pragma unroll
    for (int level = 2; level < 7; level++) {
        const float other = __shfl_down_sync(LANES_ALL, sum, 1 << (level - 2));
        if (level < n_levels) sum = in_row(__fadd_rn(sum, other));
    }
    return sum;
}

__device__ __forceinline__ void gather_sum(const Run& r, const Place& at, unsigned slot, const Many& x, unsigned valid,
                                           bool is_squares, float mean) {
    const int n_levels = r.s.n_levels;
    float terms[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const float apart = in_row(__fsub_rn(x.v[i], mean));
        const float term = is_squares ? in_row(__fmul_rn(apart, apart)) : x.v[i];
        terms[i] = (valid >> i) & 1 ? term : 0.0f;
    }
    float groups[GROUPS];
#pragma unroll
    for (int i = 0; i < GROUPS; i++)
        groups[i] = group_sum(n_levels, terms[4 * i], terms[4 * i + 1], terms[4 * i + 2], terms[4 * i + 3]);
#pragma unroll
    for (int step = 1, level = 7; step < GROUPS; step <<= 1, level++) {
#pragma unroll
        for (int i = 0; i < GROUPS; i += 2 * step)
            if (level < n_levels) groups[i] = in_row(__fadd_rn(groups[i], groups[i + step]));
    }
    if (threadIdx.x % 32 == 0) sums_of(r.s).tiles[slot][(at.first - r.begin) / TILE] = groups[0];
}

// e^x * 2^45 for x <= 0 as a float that rounds down to the weight in parts: exp_exact without what does not matter for
// weights of at most 1. Far below, where they come to no part, it is less than 1.
constexpr float WEIGHT_REACH = 41.0f;

__device__ __forceinline__ float within_weights(float below) { return fmaxf(below, -WEIGHT_REACH); }

__device__ __forceinline__ float weight_in_parts(float below) {
    float shifted;
    const float y = exp_fraction(within_weights(below), shifted);
    // 2^(n + 45), from the last bits of what was shifted.
    return __fmul_rn(y, __uint_as_float((__float_as_uint(shifted) << 23) + ((45u + 127u) << 23)));
}

// Adds the weights of rows, and each by its distance from the largest. Tokens go side by side, without a branch between them.
__device__ __forceinline__ void add_exponentials(const Many& x, bool has_weighted, float max, u64& sum, u64& weighted) {
    float below[EACH], weights[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        // What is farther weighs nothing, times this distance as well.
        below[i] = within_weights(__fsub_rn(x.v[i], max));
        weights[i] = weight_in_parts(below[i]);
        sum += __float2ull_rz(weights[i]);
    }
    if (!has_weighted) return;
#pragma unroll
    for (int i = 0; i < EACH; i++)
        weighted += __float2ull_rz(__fmul_rn(-below[i], weights[i]));
}

__device__ __forceinline__ void gather_exponentials(const Many& row, unsigned valid, u64* place, bool has_weighted,
                                                    float max) {
    if (max == minus_infinity()) return;
    u64 sum = 0, weighted = 0;
    add_exponentials(counted(row, valid), has_weighted, max, sum, weighted);
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) *place += sum;
    if (has_weighted) {
        weighted = warp_sum(weighted);
        if (threadIdx.x % 32 == 0) place[WARPS] += weighted;
    }
}

// The tokens of a set.
__device__ __forceinline__ unsigned in_set(unsigned valid, const Many& set) {
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (set.v[i] == 0.0f) valid &= ~(1u << i);
    return valid;
}
