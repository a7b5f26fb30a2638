// e^x and ln x as trellis_engine::sampling::maths has them: the same operations in the same order, so that a row of logits
// has one answer on every device. e^x is exact to 1 ulp where the result is a normal number, ln x to 2 ulp.

constexpr float FLOAT_MAX = 3.40282346638528859812e38f;

__device__ __forceinline__ float power_of_two(int n) { return __int_as_float((n + 127) << 23); }

constexpr float EXP_ROUNDS = 12582912.0f;  // 1.5 * 2^23

// e^x / 2^n for x in -105 to 89, where the last bits of `shifted`, less those of EXP_ROUNDS, are n.
__device__ __forceinline__ float exp_fraction(float x, float& shifted) {
    shifted = __fmaf_rn(x, __int_as_float(0x3fb8aa3b), EXP_ROUNDS);
    const float n = __fsub_rn(shifted, EXP_ROUNDS);
    float r = __fmaf_rn(n, -__int_as_float(0x3f317200), x);
    r = __fmaf_rn(n, -__int_as_float(0x35bfbe8e), r);
    float q = __int_as_float(0x3ab5121a);
    q = __fmaf_rn(q, r, __int_as_float(0x3c091cf1));
    q = __fmaf_rn(q, r, __int_as_float(0x3d2aac79));
    q = __fmaf_rn(q, r, __int_as_float(0x3e2aaa49));
    q = __fmaf_rn(q, r, __int_as_float(0x3efffffe));
    return __fadd_rn(__fmaf_rn(q, __fmul_rn(r, r), r), 1.0f);
}

// e^x; the largest number where it is above that.
__device__ __forceinline__ float exp_exact(float x) {
    float shifted;
    const float y = exp_fraction(fminf(fmaxf(x, -105.0f), 89.0f), shifted);
    // 2^n may not be a number by itself; its halves are.
    const int whole = __float_as_int(shifted) - __float_as_int(EXP_ROUNDS);
    const int half = whole >> 1;
    return fminf(__fmul_rn(__fmul_rn(y, power_of_two(half)), power_of_two(whole - half)), FLOAT_MAX);
}

// ln x; -inf at 0 and NaN below.
__device__ __forceinline__ float log_exact(float x) {
    const bool is_small = x < 1.17549435082228751e-38f;
    const float scaled = is_small ? __fmul_rn(x, 8388608.0f) : x;
    const float e0 = is_small ? -23.0f : 0.0f;
    const int bits = __float_as_int(scaled);
    const int e = (bits - 0x3f2aaaab) >> 23;  // 2/3: the rest lies in [2/3, 4/3)
    const float f = __fsub_rn(__int_as_float(bits - (int)((unsigned)e << 23)), 1.0f);
    float q = __int_as_float(0xbe049ab3);
    q = __fmaf_rn(q, f, __int_as_float(0x3e0f6a61));
    q = __fmaf_rn(q, f, __int_as_float(0xbdf92e2e));
    q = __fmaf_rn(q, f, __int_as_float(0x3e0f5ee0));
    q = __fmaf_rn(q, f, __int_as_float(0xbe2ad3b0));
    q = __fmaf_rn(q, f, __int_as_float(0x3e4ce8fe));
    q = __fmaf_rn(q, f, __int_as_float(0xbe7fff42));
    q = __fmaf_rn(q, f, __int_as_float(0x3eaaaa81));
    q = __fmaf_rn(q, f, -0.5f);
    const float y = __fmaf_rn(q, __fmul_rn(f, f), f);
    const float result = __fmaf_rn(__fadd_rn((float)e, e0), __int_as_float(0x3f317218), y);
    return x > 0.0f ? result : x == 0.0f ? __int_as_float(0xff800000) : __int_as_float(0x7fc00000);
}

// A weight of at most 1 as a whole number of parts of 2^-45: 2^18 of them stay below 2^63, and sums of them do not depend on
// the order.
constexpr float PARTS = 35184372088832.0f;

__device__ __forceinline__ unsigned long long parts(float weight) { return __float2ull_rz(__fmul_rn(weight, PARTS)); }

// e^x, for x of at most 0, in parts.
__device__ __forceinline__ unsigned long long weight_of(float x) { return parts(exp_exact(x)); }

// A sum of parts as a number.
__device__ __forceinline__ float of_parts(unsigned long long sum) {
    return __fmul_rn(__ull2float_rn(sum), 1.0f / 35184372088832.0f);
}

// The parts that make up a share of a sum that is not 0: at least one, at most all.
__device__ __forceinline__ unsigned long long share_of(float share, unsigned long long sum) {
    const double exact = ceil(__dmul_rn((double)share, __ull2double_rn(sum)));
    const unsigned long long target = exact > 0.0 ? __double2ull_rz(exact) : 0ull;
    return target < 1ull ? 1ull : target > sum ? sum : target;
}
