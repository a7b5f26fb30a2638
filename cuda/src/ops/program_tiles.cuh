// Programs that neither select, nor add up rows, nor look at the history, over the tiles of a block. The code is short on
// purpose: between two steps the layers' weights take the place of a kernel's instructions in every cache.

constexpr int REGISTERS_AT = N_SMALL_SOURCES * (int)sizeof(NoiseSource);
static_assert(REST_BYTES >= REGISTERS_AT + 4 * TILE * N_SMALL_REGISTERS * WARPS, "all warps have registers");

// An operand, by its flags; the logits are at hand.
__device__ __forceinline__ Many operand(const Run& r, const Many& logits, unsigned flags, unsigned word, const Many& acc) {
    switch (flags & 3) {
    case IN_NUMBER: return many(r.s.numbers[word & (N_NUMBERS - 1)]);
    case IN_ACCUMULATOR: return acc;
    case IN_LOGITS: return logits;
    default: return spread(register_of(r, word), 128 * WARPS);
    }
}

// Runs code over the tokens of one tile. `gather` takes a root, the row, and whether there is a set and which.
template <class F>
__device__ __forceinline__ void run_tile(const Run& r, const Place& at, const Many& logits, const uint4* code, F gather) {
    Many acc = logits;
    while (true) {
        const uint4 in = *code++;
        const unsigned what = in.x & 255, result = (in.x >> 8) & 255, flags = in.x >> 16;
        if (what < NEG) {
            acc = leaf(r, at, what, in.y);
            if (result != NO_REGISTER) put(r, result, acc);
            continue;
        }
        const bool has_number = (flags >> 2 & 3) == IN_NUMBER;
        Many other = acc;
        if (!has_number) other = operand(r, logits, flags >> 2, in.z, acc);
        if ((flags & 3) != IN_ACCUMULATOR) acc = operand(r, logits, flags, in.y, acc);
        if (what >= BEST) {
            gather(in, acc, !has_number, other);
            if (in.x & LAST) return;
            continue;
        }
        if (!has_number || !element_with_number(r, at, acc, what, in.z & (N_NUMBERS - 1))) {
            if (has_number) other = many(r.s.numbers[in.z & (N_NUMBERS - 1)]);
            element(r, at, in, what, acc, other, [&] { return operand(r, logits, in.x >> 20, in.w, acc); });
        }
        if (result != NO_REGISTER) put(r, result, acc);
    }
}

// The tokens that count, of a root that takes those of a set, or of a number: all or none.
__device__ __forceinline__ unsigned counted_in(const Run& r, const Place& at, uint4 in, bool has_set, const Many& set) {
    if (has_set) return in_set(at.valid, set);
    return r.s.numbers[in.z & (N_NUMBERS - 1)] == 0.0f ? 0 : at.valid;
}

__device__ __forceinline__ Place place_of_tile(int tile, int vocab) {
    Place at = {tile * TILE + 4 * (int)(threadIdx.x % 32), 128, ALL_VALID};
    if ((tile + 1) * TILE > vocab) {
        at.valid = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (token_of(at, i) < vocab) at.valid |= 1u << i;
    }
    return at;
}

// The logits of a warp's first tile, if it has one.
__device__ __forceinline__ Many first_logits(const Run& r, int begin, int end) {
    const int tile = begin + (int)threadIdx.x / 32;
    return tile < end ? logits_in_memory(r, place_of_tile(tile, r.vocab)) : many(minus_infinity());
}

// Runs the code of a pass over the tiles `begin..end`. The next logits, of which the first are there, are on their way while a
// tile is looked at.
template <class F>
__device__ __forceinline__ void run_tiles(const Run& r, int begin, int end, Many next, const uint4* code, F gather) {
    for (int tile = begin + (int)threadIdx.x / 32; tile < end; tile += WARPS) {
        const Place at = place_of_tile(tile, r.vocab);
        Many logits = next;
#pragma unroll
        for (int i = 0; i < EACH; i++) logits.v[i] = logits.v[i] == logits.v[i] ? logits.v[i] : minus_infinity();
        if (tile + WARPS < end) next = logits_in_memory(r, place_of_tile(tile + WARPS, r.vocab));
        run_tile(r, at, logits, code, [&](uint4 in, Many& row, bool has_set, const Many& set) {
            gather(at, in, row, has_set, set);
        });
    }
}

// Reads what a row is, by all threads; whether it draws, and does not sit out.
__device__ __forceinline__ bool read_what_row_is(const ProgramParams& p, Shared& s, unsigned row_idx) {
    if (threadIdx.x < sizeof(ProgramRow) / 4)
        ((unsigned*)&s.row)[threadIdx.x] = ((const unsigned*)&p.rows[row_idx])[threadIdx.x];
    if (threadIdx.x == 0) {
        s.sources_at = 0, s.registers_at = REGISTERS_AT;
        s.n_warps = WARPS;
        s.has_fault = 0;
    }
    __syncthreads();
    const OutputRow& asked = p.output_rows[s.row.output_row];
    const uint4 header = __ldg(p.programs + s.row.program);
    const unsigned wants = asked.wants, logits_row = asked.logits_row;
    if (threadIdx.x == 0) {
        s.header = header;
        s.constraint = asked.mask_start;
        s.logits = p.logits + (size_t)logits_row * p.vocab;
    }
    __syncthreads();
    return wants & WANTS_PROGRAM;
}

// Reads the plan, and makes its sources of noise; all is there behind a barrier.
__device__ __forceinline__ void read_plan(Run& r) {
    const uint4 header = r.s.header;
    const uint4* program = r.p.programs + r.row.program;
    for (unsigned i = threadIdx.x; i < header.w; i += THREADS) r.s.plan[i] = program[i];
    make_sources(r, program + (header.w - header.z), header.z);
}

// The code of a pass, of which the first of what it comes to says where it begins.
__device__ __forceinline__ const uint4* code_of_pass(const Shared& s, const uint4* finishes) {
    return s.plan + (s.header.w - s.header.z - (s.header.x >> 16) + finishes[0].w);
}

__device__ __forceinline__ unsigned n_steps_of(const Shared& s) { return s.header.x & 0xffffu; }

// The steps from `i` on that are of numbers, by one warp; returns the first that is not.
__device__ __forceinline__ unsigned take_numbers(const Run& r, unsigned i) {
    for (; i < n_steps_of(r.s); i++) {
        const uint4 step = r.s.plan[N_HEADER + i];
        if ((step.x & 255) != NUMBERS) break;
        run_numbers(r, r.s.plan + step.y, step.z, step.w);
    }
    return i;
}
