// Numbers of a program, and what they are made of.

// One warp works out numbers: first those that need no others, side by side.
__device__ __forceinline__ void run_numbers(const Run& r, const uint4* code, unsigned n, unsigned n_given) {
    float* numbers = r.s.numbers;
    for (unsigned i = threadIdx.x; i < n_given; i += 32) {
        const uint4 in = code[i];
        float out;
        switch (in.x & 255) {
        case CONSTANT: out = __uint_as_float(in.y); break;
        // The row before may have written it.
        case STATE: out = __ldcg(r.p.states + r.row.state_in + in.y); break;
        case POSITION: out = __ull2float_rn(((u64)r.row.position_high << 32) | r.row.position_low); break;
        case LENGTH: out = __uint2float_rn(r.row.n_tokens); break;
        case DRAWN: out = __uint2float_rn(r.row.n_drawn); break;
        // Where no token has its block.
        case UNIFORM: out = uniform(words_of(sources_of(r.s)[in.y], 0xffffffffu).x); break;
        default: {  // PARAMETER, PARAMETER_TOKEN
            out = in.y < r.row.n_parameters ? r.p.parameters[r.row.parameters_start + in.y] : 0.0f;
            if ((in.x & 255) == PARAMETER_TOKEN) out = truncf(fminf(fmaxf(out, 0.0f), (float)(r.vocab - 1)));
        }
        }
        numbers[(in.x >> 8) & 255] = out;
    }
    __syncwarp();
    for (unsigned i = n_given; i < n && threadIdx.x == 0; i++) {
        const uint4 in = code[i];
        const unsigned what = in.x & 255;
        float out;
        if (what == TOKEN) {
            out = numbers[in.y + 1];
            if (numbers[in.y] == minus_infinity()) r.s.has_fault = 1, out = 0.0f;
        } else {
            out = apply(what, numbers[in.y & (N_NUMBERS - 1)], numbers[in.z & (N_NUMBERS - 1)],
                        numbers[in.w & (N_NUMBERS - 1)]);
            out = in.x & AS_ENTRY ? in_row(out) : as_number(out);
        }
        numbers[(in.x >> 8) & 255] = out;
    }
    __syncwarp();
}

// The numbers of the largest of a row: its value, and behind it the first token that has it.
__device__ __forceinline__ void finish_best(float* numbers, u64 best) {
    const float value = value_of((unsigned)(best >> 32));
    const unsigned low = (unsigned)best;
    numbers[0] = value == 0.0f && (low & 1) ? -0.0f : value;
    numbers[1] = (float)(TOKEN_MASK - (low >> 1));
}

// What a place comes to over the warps of a block, or over the blocks.
__device__ __forceinline__ u64 merged(bool is_best, u64 a, u64 b) { return is_best ? (a > b ? a : b) : a + b; }

__device__ __forceinline__ bool is_best(unsigned code) { return code == BEST || code == DRAW; }

// The numbers of a root, (code | result, slot, number of the largest value), of what all blocks have gathered; `weighted`
// besides for an entropy.
__device__ __forceinline__ void finish_root(float* numbers, uint4 in, u64 all, u64 weighted) {
    const unsigned code = in.x & 255, result = (in.x >> 8) & 255;
    if (is_best(code)) {
        finish_best(numbers + result, all);
    } else if (code == COUNT) {
        numbers[result] = (float)all;
    } else {  // LOG_SUM_EXP, and with it ENTROPY
        const float max = numbers[in.z & (N_NUMBERS - 1)];
        if (max == minus_infinity()) {
            numbers[result] = max;
            if (code == ENTROPY) numbers[result + 1] = 0.0f;
            return;
        }
        const float log = log_exact(of_parts(all));
        numbers[result] = as_number(__fadd_rn(max, log));
        if (code == ENTROPY) {
            const float entropy = __fadd_rn(log, __fdiv_rn(__ull2float_rn(weighted), __ull2float_rn(all)));
            numbers[result + 1] = entropy > 0.0f ? as_number(entropy) : 0.0f;
        }
    }
}

// Writes what comes of a row. The plan says which numbers.
__device__ __forceinline__ void write_output(const Run& r, unsigned row_idx, const uint4* plan) {
    if (threadIdx.x >= 14) return;
    const Shared& s = r.s;
    // Token, fault, four reports, eight numbers of state, as words.
    const bool has_fault = s.has_fault != 0;
    const unsigned* places = (const unsigned*)(plan + 1);
    const unsigned place = threadIdx.x < 2 ? NO_NUMBER : places[threadIdx.x - 2];
    const float number = has_fault || place == NO_NUMBER ? 0.0f : s.numbers[place];
    unsigned word = __float_as_uint(number);
    if (threadIdx.x == 0) word = has_fault ? 0 : (unsigned)s.numbers[s.header.y & 255];
    if (threadIdx.x == 1) word = has_fault ? FAULT_NOTHING_TO_DRAW : FAULT_NONE;
    ((unsigned*)&r.p.outputs[row_idx])[threadIdx.x] = word;
    if (threadIdx.x >= 6 && !has_fault && r.row.state_out != NONE)
        r.p.states[r.row.state_out + threadIdx.x - 6] = number;
}
