// Elementwise code over the tokens of a thread. What an instruction makes stays in the accumulator, which is registers of the
// thread, and goes into shared memory only if a later instruction takes it that does not follow at once.

__device__ __forceinline__ float4* register_of(const Run& r, unsigned reg) {
    return registers_of(r.s) + (32 * GROUPS * r.s.n_warps * (int)reg + (int)threadIdx.x);
}

__device__ __forceinline__ void put(const Run& r, unsigned reg, const Many& x) {
    float4* to = register_of(r, reg);
    const int step = 32 * r.s.n_warps;
#pragma unroll
    for (int i = 0; i < GROUPS; i++)
        to[i * step] = make_float4(x.v[4 * i], x.v[4 * i + 1], x.v[4 * i + 2], x.v[4 * i + 3]);
}

// An operand, by its flags.
__device__ __forceinline__ Many fetch(const Run& r, const Place& at, unsigned flags, unsigned word, const Many& acc) {
    switch (flags & 3) {
    case IN_NUMBER: return many(r.s.numbers[word & (N_NUMBERS - 1)]);
    case IN_ACCUMULATOR: return acc;
    case IN_LOGITS: return logits_at(r, at);
    default: return spread(register_of(r, word), 128 * r.s.n_warps);
    }
}

// Moves the entries on: what is done with the first ones is done with all in so many turns.
template <int BY> __device__ __forceinline__ void turn(Many& x) {
    const Many old = x;
#pragma unroll
    for (int i = 0; i < EACH; i++) x.v[i] = old.v[(i + BY) % EACH];
}

// Makes `f` of each entry, AT_ONCE in a turn as it is long.
template <class F> __device__ __forceinline__ void in_turns(Many& x, F f) {
#pragma unroll 1
    for (int i = 0; i < EACH; i += AT_ONCE) {
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) x.v[k] = f(x.v[k]);
        turn<AT_ONCE>(x);
    }
}

constexpr float DIVIDED_LEAST = 8.67361737988403547e-19f;    // 2^-60
constexpr float DIVIDED_MOST = 1.15292150460684697600e18f;  // 2^60

// x / b for one b. Where nothing leaves the range of normal numbers two corrections of x * (1 / b) give the quotient rounded
// once: Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor" (1990), theorem 7, for 1 / b
// rounded to nearest and a quotient that is off by less than one unit.
__device__ __forceinline__ void divide(Many& x, float b) {
    float least = fabsf(x.v[0]), most = least;
#pragma unroll
    for (int i = 1; i < EACH; i++) least = fminf(least, fabsf(x.v[i])), most = fmaxf(most, fabsf(x.v[i]));
    least = fminf(least, fabsf(b)), most = fmaxf(most, fabsf(b));
    if (least >= DIVIDED_LEAST && most <= DIVIDED_MOST) {
        const float inverse = __frcp_rn(b);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            float q = __fmul_rn(x.v[i], inverse);
            q = __fmaf_rn(__fmaf_rn(-b, q, x.v[i]), inverse, q);
            x.v[i] = __fmaf_rn(__fmaf_rn(-b, q, x.v[i]), inverse, q);
        }
    } else {
        in_turns(x, [&](float a) { return in_row(__fdiv_rn(a, b)); });
    }
}

#define EACH(expression)                                                                                               \
    {                                                                                                                  \
        _Pragma("unroll") for (int i = 0; i < EACH; i++) {                                                                \
            const float a = x.v[i];                                                                                    \
            x.v[i] = expression;                                                                                       \
        }                                                                                                              \
        return true;                                                                                                   \
    }

// An operation with one number or none, if it is one of those that have a short form. Entries are never above the largest
// number, nor are numbers: a sum is NaN in no case, and a product or a difference only where the number is 0 or -inf.
__device__ __forceinline__ bool element_with_number(const Run& r, const Place& at, Many& x, unsigned code,
                                                    unsigned operand) {
    const float b = r.s.numbers[operand];
    const bool is_plain = fabsf(b) <= FLOAT_MAX && b != 0.0f;
    switch (code) {
    case NEG: EACH(fminf(-a, FLOAT_MAX))
    case ABS: EACH(fminf(fabsf(a), FLOAT_MAX))
    case SQRT: in_turns(x, [](float a) { return in_row(__fsqrt_rn(a)); }); return true;
    case EXP: in_turns(x, [](float a) { return exp_exact(a); }); return true;
    case LOG: in_turns(x, [](float a) { return in_row(log_exact(a)); }); return true;
    case NOT: EACH(truth(a == 0.0f))
    case ADD: EACH(fminf(__fadd_rn(a, b), FLOAT_MAX))
    case SUB:
        if (b == minus_infinity()) EACH(in_row(__fsub_rn(a, b)))
        EACH(fminf(__fsub_rn(a, b), FLOAT_MAX))
    case MUL:
        if (!is_plain) EACH(in_row(__fmul_rn(a, b)))
        EACH(fminf(__fmul_rn(a, b), FLOAT_MAX))
    case DIV: divide(x, b); return true;
    case MIN: EACH(b < a ? b : a)
    case MAX: EACH(b > a ? b : a)
    case LESS: EACH(truth(a < b))
    case LESS_EQUAL: EACH(truth(a <= b))
    case GREATER_EQUAL: EACH(truth(a >= b))
    case GREATER: EACH(truth(a > b))
    case KEEP_LARGEST: EACH(truth(a >= b && a > minus_infinity()))
    case IF_LESS: EACH(a < b ? a : minus_infinity())
    case IF_LESS_EQUAL: EACH(a <= b ? a : minus_infinity())
    case IF_EQUAL: EACH(a == b ? a : minus_infinity())
    case IF_NOT_EQUAL: EACH(a != b ? a : minus_infinity())
    case IF_GREATER_EQUAL: EACH(a >= b ? a : minus_infinity())
    case IF_GREATER: EACH(a > b ? a : minus_infinity())
    case IF_NUCLEUS: {
        const int last = (int)r.s.numbers[operand + 1];
        EACH(a > b || (a == b && token_of(at, i) <= last) ? a : minus_infinity())
    }
    default: return false;
    }
}

#undef EACH
#define EACH(expression)                                                                                               \
    {                                                                                                                  \
        _Pragma("unroll") for (int i = 0; i < EACH; i++) {                                                                \
            const float a = x.v[i], b = y.v[i];                                                                        \
            x.v[i] = expression;                                                                                       \
        }                                                                                                              \
    }                                                                                                                  \
    break

// An operation over rows. `x` is the first operand and what it makes; `third` fetches the third, where it is a row.
template <class F>
__device__ __forceinline__ void element(const Run& r, const Place& at, uint4 in, unsigned code, Many& x,
                                        const Many& y, F third) {
    switch (code) {
    case ADD: EACH(fminf(__fadd_rn(a, b), FLOAT_MAX));
    case SUB: EACH(in_row(__fsub_rn(a, b)));
    case MUL: EACH(in_row(__fmul_rn(a, b)));
    case DIV: {
        Many by = y;
        constexpr int BY = AT_ONCE < 4 ? AT_ONCE : 4;
#pragma unroll 1
        for (int i = 0; i < EACH; i += BY) {
#pragma unroll
            for (int k = 0; k < BY; k++) x.v[k] = in_row(__fdiv_rn(x.v[k], by.v[k]));
            turn<BY>(x);
            turn<BY>(by);
        }
        break;
    }
    case MIN: EACH(b < a ? b : a);
    case MAX: EACH(b > a ? b : a);
    case LESS: EACH(truth(a < b));
    case LESS_EQUAL: EACH(truth(a <= b));
    case EQUAL: EACH(truth(a == b));
    case NOT_EQUAL: EACH(truth(a != b));
    case GREATER_EQUAL: EACH(truth(a >= b));
    case GREATER: EACH(truth(a > b));
    case AND: EACH(truth(a != 0.0f && b != 0.0f));
    case OR: EACH(truth(a != 0.0f || b != 0.0f));
    case KEEP_NUCLEUS: {
        const float bound = r.s.numbers[in.w & (N_NUMBERS - 1)];
        const int last = (int)r.s.numbers[(in.w + 1) & (N_NUMBERS - 1)];
        EACH(truth(b > minus_infinity() && (a > bound || (a == bound && token_of(at, i) <= last))));
    }
    default:  // SELECT
        if (((in.x >> 20) & 3) == IN_NUMBER) {
            const float z = r.s.numbers[in.w & (N_NUMBERS - 1)];
            EACH(a != 0.0f ? b : z);
        }
        // The third operand is in the accumulator only where it is the first as well.
        const Many z = third();
        EACH(a != 0.0f ? b : z.v[i]);
    }
}

#undef EACH
