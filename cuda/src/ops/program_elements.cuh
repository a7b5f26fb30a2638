// Elementwise code over four consecutive tokens a thread, with operands in shared memory, and what is gathered from it.

struct Four {
    float v[4];
};

__device__ __forceinline__ Four four(float x) { return Four{{x, x, x, x}}; }

__device__ __forceinline__ Four get(const Run& r, unsigned column, unsigned word, bool is_number) {
    if (is_number) return four(r.s.numbers[word & (N_NUMBERS - 1)]);
    const float4 x = r.s.registers[word][column];
    return Four{{x.x, x.y, x.z, x.w}};
}

__device__ __forceinline__ void put(const Run& r, unsigned column, unsigned reg, const Four& x) {
    r.s.registers[reg][column] = make_float4(x.v[0], x.v[1], x.v[2], x.v[3]);
}

// Four tokens of a row from `first`, which is a multiple of 4; -inf past the end.
__device__ __forceinline__ Four load4(const float* row, int first, int vocab) {
    Four out = four(minus_infinity());
    if ((vocab & 3) == 0) {
        if (first < vocab) {
            const float4 x = __ldg((const float4*)(row + first));
            out = Four{{x.x, x.y, x.z, x.w}};
        }
    } else {
        // Rows of such a vocabulary do not start at multiples of 16 bytes.
#pragma unroll
        for (int lane = 0; lane < 4; lane++)
            if (first + lane < vocab) out.v[lane] = __ldg(row + first + lane);
    }
    return out;
}

__device__ __forceinline__ Four mask4(const Run& r, unsigned start, int first) {
    if (start == NONE) return four(1.0f);
    if (first >= r.vocab) return four(0.0f);
    const unsigned bits = (unsigned)(__ldg(r.p.masks + start + first / 64) >> (first % 64));
    return Four{{truth(bits & 1), truth(bits & 2), truth(bits & 4), truth(bits & 8)}};
}

__device__ __forceinline__ Four bias4(const Run& r, unsigned id, int first) {
    if (id >= r.row.n_biases) return four(0.0f);
    const ProgramBias place = r.p.bias_places[r.row.biases_start + id];
    if (place.n_pairs == NONE) return load4(r.p.dense_biases + place.start, first, r.vocab);
    const BiasPair* pairs = r.p.bias_pairs + place.start;
    unsigned low = 0, high = place.n_pairs;
    while (low < high) {
        const unsigned middle = (low + high) / 2;
        if (pairs[middle].token < (unsigned)first) low = middle + 1;
        else high = middle;
    }
    Four out = four(0.0f);
#pragma unroll
    for (int lane = 0; lane < 4; lane++)
        if (low < place.n_pairs && pairs[low].token == (unsigned)(first + lane)) out.v[lane] = pairs[low++].value;
    return out;
}

// What is read, or made of the place alone.
__device__ __forceinline__ Four leaf(const Run& r, unsigned code, unsigned operand, int first) {
    switch (code) {
    case LOGITS: return load4(r.logits, first, r.vocab);
    case MEMBER: {
        const bool is_there = operand < r.row.n_members;
        const float* row =
            is_there ? r.p.logits + (size_t)r.p.members[r.row.members_start + operand] * r.vocab : r.logits;
        return load4(row, first, r.vocab);
    }
    case PLANE: {
        Four out = four(0.0f);
        if (first < r.vocab) {
            // Written by this launch.
            const float4 x = __ldcg((const float4*)(r.planes + (size_t)operand * r.plane_stride + first));
            out = Four{{x.x, x.y, x.z, x.w}};
        }
        return out;
    }
    case BIAS: return bias4(r, operand, first);
    case MASK: return mask4(r, operand < r.row.n_masks ? r.p.mask_starts[r.row.masks_start + operand] : NONE, first);
    case CONSTRAINT: return mask4(r, r.constraint, first);
    case ONLY: {
        const int token = (int)r.s.numbers[operand];
        return Four{{truth(token == first), truth(token == first + 1), truth(token == first + 2),
                     truth(token == first + 3)}};
    }
    default: {  // noise
        const uint4 words = words_of(r.s.sources[operand], (unsigned)first / 4);
        Four out;
#pragma unroll
        for (int lane = 0; lane < 4; lane++) {
            const unsigned word = lane_of(words, lane);
            out.v[lane] = code == GUMBEL_ROW ? gumbel(word) : uniform(word);
        }
        return out;
    }
    }
}

#define EACH(expression)                                                                                               \
    _Pragma("unroll") for (int i = 0; i < 4; i++) {                                                                    \
        const float a = x.v[i], b = y.v[i];                                                                            \
        out.v[i] = expression;                                                                                         \
    }                                                                                                                  \
    break

// An instruction over rows. What takes a third operand reads it itself.
__device__ __forceinline__ Four element(const Run& r, uint4 in, unsigned code, unsigned column, int first) {
    const unsigned flags = in.x >> 16;
    const Four x = get(r, column, in.y, flags & 1), y = get(r, column, in.z, flags & 2);
    Four out;
    switch (code) {
    case NEG: EACH(fminf(-a, FLOAT_MAX));
    case ABS: EACH(fminf(fabsf(a), FLOAT_MAX));
    case SQRT: EACH(in_row(__fsqrt_rn(a)));
    case EXP: EACH(exp_exact(a));
    case LOG: EACH(in_row(log_exact(a)));
    case ADD: EACH(in_row(__fadd_rn(a, b)));
    case SUB: EACH(in_row(__fsub_rn(a, b)));
    case MUL: EACH(in_row(__fmul_rn(a, b)));
    case DIV: EACH(in_row(__fdiv_rn(a, b)));
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
    case NOT: EACH(truth(a == 0.0f));
    case KEEP_LARGEST: EACH(truth(a >= b && a > minus_infinity()));
    case KEEP_NUCLEUS: {
        const float bound = r.s.numbers[in.w & (N_NUMBERS - 1)];
        const int last = (int)r.s.numbers[(in.w + 1) & (N_NUMBERS - 1)];
        EACH(truth(b > minus_infinity() && (a > bound || (a == bound && first + i <= last))));
    }
    default: {  // SELECT
        const Four z = get(r, column, in.w, flags & 4);
        EACH(a != 0.0f ? b : z.v[i]);
    }
    }
    return out;
}

#undef EACH

// Runs code without roots over four tokens from `first`, in one column of the registers.
__device__ __forceinline__ void run_elements(const Run& r, const uint4* code, unsigned n, unsigned column, int first) {
    for (unsigned i = 0; i < n; i++) {
        const uint4 in = code[i];
        const unsigned what = in.x & 255, result = (in.x >> 8) & 255;
        put(r, column, result, what < NEG ? leaf(r, what, in.y, first) : element(r, in, what, column, first));
    }
}

// ---- what is gathered ----

// Puts the best (key, token) of a warp into its place if it is better than what is there. A warp sees rising tokens, so that
// of equal ones the one there is the lower.
__device__ __forceinline__ void keep_best(u64* place, unsigned key, unsigned low) {
    const unsigned best = __reduce_max_sync(LANES_ALL, key);
    if (best <= (unsigned)(*place >> 32)) return;
    low = __reduce_max_sync(LANES_ALL, key == best ? low : 0u);
    if (threadIdx.x % 32 == 0) *place = ((u64)best << 32) | low;
    __syncwarp();
}

// The low word of a place: larger for lower tokens; its last bit tells that the value is -0.
__device__ __forceinline__ unsigned low_of(int token, bool is_negative_zero) {
    return ((unsigned)(TOKEN_MASK - (unsigned)token) << 1) | (is_negative_zero ? 1u : 0u);
}

__device__ __forceinline__ void gather_best(const Run& r, u64* place, const Four& x, const Four& set, int first) {
    unsigned key = key_of(minus_infinity()), low = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (first + i >= r.vocab || set.v[i] == 0.0f) continue;
        const unsigned mine = key_of(x.v[i]);
        if (mine > key) key = mine, low = low_of(first + i, __float_as_uint(x.v[i]) == 0x80000000u);
    }
    keep_best(place, key, low);
}

// The best of x + g. Noise is made only where a token can still win, and its logarithms where a bound on them does not tell
// that it cannot: g <= -ln(1 - u), whose whole powers of two are the exponent of 1 - u. Sums round upwards with their terms,
// so that what is passed over by a bound loses after rounding too.
__device__ __forceinline__ void gather_draw(const Run& r, u64* place, const Four& x, unsigned source, int first) {
    const float leader = value_of((unsigned)(*place >> 32));
    unsigned key = key_of(minus_infinity()), low = 0;
    bool in_reach = false;
#pragma unroll
    for (int i = 0; i < 4; i++)
        in_reach |= first + i < r.vocab && x.v[i] > minus_infinity() && __fadd_rn(x.v[i], GUMBEL_MAX) >= leader;
    if (in_reach) {
        const uint4 words = words_of(r.s.sources[source], (unsigned)first / 4);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (first + i >= r.vocab || !(x.v[i] > minus_infinity())) continue;
            const unsigned word = lane_of(words, i);
            const float rest = __fadd_rn((float)(~word >> 9), 0.5f);  // (1 - u) * 2^23
            const int exponent = (__float_as_int(rest) >> 23) - 127;
            const float bound = __fadd_rn(__fmul_rn((float)(23 - exponent), 0.69314718f), 1e-3f);
            if (!(__fadd_rn(x.v[i], bound) >= leader)) continue;
            const unsigned mine = key_of(__fadd_rn(x.v[i], gumbel(word)));
            if (mine > key) key = mine, low = low_of(first + i, false);
        }
    }
    keep_best(place, key, low);
}

// The sum of a warp's 128 tokens, as many levels of it as the tree has, in the first lane.
__device__ __forceinline__ float leaf_sum(const Run& r, const Four& x) {
    float sum = x.v[0];
    if (r.n_levels > 0) sum = in_row(__fadd_rn(x.v[0], x.v[1]));
    if (r.n_levels > 1) sum = in_row(__fadd_rn(sum, in_row(__fadd_rn(x.v[2], x.v[3]))));
#pragma unroll
    for (int level = 2; level < 7; level++) {
        const float other = __shfl_down_sync(LANES_ALL, sum, 1 << (level - 2));
        if (level < r.n_levels) sum = in_row(__fadd_rn(sum, other));
    }
    return sum;
}

// A root: takes rows, changes places of the warp. `leaf_idx` is the warp's leaf in this block.
__device__ __forceinline__ void gather(const Run& r, uint4 in, unsigned code, int first, int leaf_idx) {
    const unsigned flags = in.x >> 16, slot = (in.x >> 8) & 255, warp = threadIdx.x / 32;
    const bool is_first = threadIdx.x % 32 == 0;
    const Four x = get(r, threadIdx.x, in.y, flags & 1), y = get(r, threadIdx.x, in.z, flags & 2);
    const float number = r.s.numbers[in.w & (N_NUMBERS - 1)];
    u64* place = &r.s.gathered[slot][warp];
    switch (code) {
    case BEST: gather_best(r, place, x, y, first); break;
    case DRAW: gather_draw(r, place, x, in.z, first); break;
    case SUM:
    case SQUARES: {
        Four terms = four(0.0f);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (first + i >= r.vocab || y.v[i] == 0.0f) continue;
            const float apart = in_row(__fsub_rn(x.v[i], number));
            terms.v[i] = code == SUM ? x.v[i] : in_row(__fmul_rn(apart, apart));
        }
        const float sum = leaf_sum(r, terms);
        if (is_first) r.s.leaves[r.copy][slot][leaf_idx] = sum;
        break;
    }
    case COUNT: {
        unsigned n = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) n += first + i < r.vocab && x.v[i] != 0.0f;
        n = __reduce_add_sync(LANES_ALL, n);
        if (is_first) *place += n;
        break;
    }
    default: {  // LOG_SUM_EXP, ENTROPY
        if (number == minus_infinity()) break;
        u64 sum = 0, weighted = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (first + i >= r.vocab || y.v[i] == 0.0f) continue;
            const float weight = exp_exact(__fsub_rn(x.v[i], number));
            sum += parts(weight);
            if (code == ENTROPY && weight > 0.0f) weighted += parts(__fmul_rn(__fsub_rn(number, x.v[i]), weight));
        }
        sum = warp_sum(sum);
        if (is_first) *place += sum;
        if (code == ENTROPY) {
            weighted = warp_sum(weighted);
            if (is_first) place[WARPS] += weighted;
        }
    }
    }
}
