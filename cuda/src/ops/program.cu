// A logit program over each row of logits: trellis_engine::sampling::program, to the bit.
//
// A plan (program_plan.rs) is a list of steps, all of which every block of the row's cluster takes: numbers, worked out by one
// thread; passes, each of which reads the row once and gathers from it; selections; planes of the history.
//
// - max, argmax, draw: the largest (value, token), by warps, blocks, cluster.
// - sum, squares: the definition's tree over tokens, with +0 past the end up to a power of two. Four consecutive tokens a
//   thread and 32 threads are 128 tokens, a leaf; the leaves are added as the tree has them when the pass is over. A level
//   that the tree does not have is left out, so that a row of one token gives the token's own bits.
// - log-sum-exp, entropy: 64-bit sums of 2^-45, in any order.
//
// logits f32 [n_logits_rows, vocab]; planes f32 [n_sets, N_PLANES, vocab up to a multiple of 4], zeros before and after. A
// chain of rows is worked out by one cluster, row after row: rows of one context, of which each takes the state on that the
// one before left, and rows that share a set of planes. Grid CLUSTER * chains of the bucket, THREADS threads, SHARED_BYTES dynamic shared memory. Reads 4 * vocab bytes for
// each pass, the first time from memory and then from L2; two to seven times for a selection.

// One thread works out numbers.
__device__ __forceinline__ void run_numbers(const Run& r, const uint4* code, unsigned n) {
    for (unsigned i = 0; i < n; i++) {
        const uint4 in = code[i];
        const unsigned what = in.x & 255, result = (in.x >> 8) & 255;
        float* numbers = r.s.numbers;
        float out;
        switch (what) {
        case CONSTANT: out = __uint_as_float(in.y); break;
        case PARAMETER: out = in.y < r.row.n_parameters ? r.p.parameters[r.row.parameters_start + in.y] : 0.0f; break;
        case PARAMETER_TOKEN: {
            const float x = in.y < r.row.n_parameters ? r.p.parameters[r.row.parameters_start + in.y] : 0.0f;
            out = truncf(fminf(fmaxf(x, 0.0f), (float)(r.vocab - 1)));
            break;
        }
        case STATE: out = r.p.states[(size_t)r.row.state_in + in.y]; break;
        case POSITION: out = __ull2float_rn(((u64)r.row.position_high << 32) | r.row.position_low); break;
        case LENGTH: out = __uint2float_rn(r.row.n_tokens); break;
        case DRAWN: out = __uint2float_rn(r.row.n_drawn); break;
        // Where no token has its block.
        case UNIFORM: out = uniform(words_of(r.s.sources[in.y], 0xffffffffu).x); break;
        case TOKEN:
            out = numbers[in.y + 1];
            if (numbers[in.y] == minus_infinity()) r.s.has_fault = 1, out = 0.0f;
            break;
        case AT: {
            const int token = (int)numbers[in.w & (N_NUMBERS - 1)];
            run_elements(r, r.program + in.y, in.z & 255, 0, token & ~3);
            const float4 x = r.s.registers[in.z >> 8][0];
            const int lane = token & 3;
            out = as_number(lane == 0 ? x.x : lane == 1 ? x.y : lane == 2 ? x.z : x.w);
            break;
        }
        default:
            out = as_number(apply(what, numbers[in.y & (N_NUMBERS - 1)], numbers[in.z & (N_NUMBERS - 1)],
                                  numbers[in.w & (N_NUMBERS - 1)]));
        }
        numbers[result] = out;
    }
}

// The root of the tree over the leaves of all blocks, in thread 0.
__device__ __forceinline__ float tree_sum(const Run& r, unsigned slot) {
    constexpr int SHARE_OF_LEAVES = LEAVES / THREADS;
    float leaves[SHARE_OF_LEAVES];
#pragma unroll
    for (int i = 0; i < SHARE_OF_LEAVES; i++) {
        const int leaf = (int)threadIdx.x * SHARE_OF_LEAVES + i, tile = leaf / WARPS;
        leaves[i] = 0.0f;
        if (128 * leaf < r.vocab) {
            const Shared* other = in_block(&r.s, (unsigned)tile % CLUSTER);
            leaves[i] = other->leaves[r.copy][slot][tile / CLUSTER * WARPS + leaf % WARPS];
        }
    }
    int level = 7;
#pragma unroll
    for (int step = 1; step < SHARE_OF_LEAVES; step <<= 1, level++) {
#pragma unroll
        for (int i = 0; i < SHARE_OF_LEAVES; i += 2 * step)
            if (level < r.n_levels) leaves[i] = in_row(__fadd_rn(leaves[i], leaves[i + step]));
    }
    float sum = leaves[0];
#pragma unroll
    for (int step = 1; step < 32; step <<= 1, level++) {
        const float other = __shfl_down_sync(LANES_ALL, sum, step);
        if (level < r.n_levels) sum = in_row(__fadd_rn(sum, other));
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) r.s.warp_sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int n = WARPS / 2; n > 0; n /= 2, level++)
            for (int i = 0; i < n; i++)
                if (level < r.n_levels)
                    r.s.warp_sums[i] = in_row(__fadd_rn(r.s.warp_sums[2 * i], r.s.warp_sums[2 * i + 1]));
    }
    return r.s.warp_sums[0];
}

// What a place comes to over the warps of a block, or over the blocks.
__device__ __forceinline__ u64 merged(unsigned code, u64 a, u64 b) {
    return code == BEST || code == DRAW ? (a > b ? a : b) : a + b;
}

__device__ __forceinline__ u64 of_blocks(const Run& r, unsigned code, unsigned slot) {
    u64 all = 0;
    for (unsigned block = 0; block < CLUSTER; block++) all = merged(code, all, in_block(&r.s, block)->merged[r.copy][slot]);
    return all;
}

// The numbers of one root: (code | result, slot, number of the largest value).
__device__ __forceinline__ void finish(const Run& r, uint4 in) {
    const unsigned code = in.x & 255, result = (in.x >> 8) & 255;
    const u64 all = of_blocks(r, code, in.y);
    const float max = r.s.numbers[in.z & (N_NUMBERS - 1)];
    float* numbers = r.s.numbers;
    switch (code) {
    case BEST:
    case DRAW: {
        const float value = value_of((unsigned)(all >> 32));
        const unsigned low = (unsigned)all;
        numbers[result] = value == 0.0f && (low & 1) ? -0.0f : value;
        numbers[result + 1] = (float)(TOKEN_MASK - (low >> 1));
        break;
    }
    case COUNT: numbers[result] = (float)all; break;
    case LOG_SUM_EXP:
        numbers[result] = max == minus_infinity() ? max : as_number(__fadd_rn(max, log_exact(of_parts(all))));
        break;
    default: {  // ENTROPY
        float entropy = 0.0f;
        if (max > minus_infinity()) {
            const float mean = __fdiv_rn(__ull2float_rn(of_blocks(r, code, in.y + 1)), __ull2float_rn(all));
            entropy = __fadd_rn(log_exact(of_parts(all)), mean);
        }
        numbers[result] = entropy > 0.0f ? as_number(entropy) : 0.0f;
    }
    }
}

__device__ __forceinline__ bool is_sum(unsigned code) { return code == SUM || code == SQUARES; }

// Reads the row once. Entries: `n_code` of code with its roots, then one for each root.
__device__ __forceinline__ void run_pass(Run& r, const uint4* entries, unsigned n, unsigned n_code) {
    Shared& s = r.s;
    const uint4* finishes = entries + n_code;
    const unsigned n_finishes = n - n_code;
    for (unsigned i = threadIdx.x; i < n_code; i += THREADS) s.code[i] = entries[i];
    for (unsigned i = threadIdx.x; i < N_GATHERED * WARPS; i += THREADS) (&s.gathered[0][0])[i] = 0;
    __syncthreads();
    for (unsigned i = threadIdx.x; i < n_finishes * WARPS; i += THREADS) {
        const uint4 in = finishes[i / WARPS];
        const unsigned code = in.x & 255;
        if (code == BEST || code == DRAW) s.gathered[in.y][i % WARPS] = (u64)key_of(minus_infinity()) << 32;
    }
    __syncthreads();

    int leaf_idx = (int)threadIdx.x / 32;
    for (int start = (int)r.rank * TILE; start < r.vocab; start += CLUSTER * TILE, leaf_idx += WARPS) {
        const int first = start + 4 * (int)threadIdx.x;
        for (unsigned i = 0; i < n_code; i++) {
            const uint4 in = s.code[i];
            const unsigned what = in.x & 255;
            if (what >= BEST) {
                gather(r, in, what, first, leaf_idx);
            } else {
                const Four out = what < NEG ? leaf(r, what, in.y, first) : element(r, in, what, threadIdx.x, first);
                put(r, threadIdx.x, (in.x >> 8) & 255, out);
            }
        }
    }
    __syncthreads();
    for (unsigned i = threadIdx.x; i < n_finishes; i += THREADS) {
        const uint4 in = finishes[i];
        const unsigned code = in.x & 255;
        if (is_sum(code)) continue;
        for (unsigned slot = in.y; slot < in.y + (code == ENTROPY ? 2 : 1); slot++) {
            u64 all = 0;
            for (int warp = 0; warp < WARPS; warp++) all = merged(code, all, s.gathered[slot][warp]);
            s.merged[r.copy][slot] = all;
        }
    }
    cluster_sync();
    for (unsigned i = threadIdx.x; i < n_finishes; i += THREADS)
        if (!is_sum(finishes[i].x & 255)) finish(r, finishes[i]);
    for (unsigned i = 0; i < n_finishes; i++) {
        const uint4 in = finishes[i];
        if (!is_sum(in.x & 255)) continue;
        const float sum = tree_sum(r, in.y);
        if (threadIdx.x == 0) s.numbers[(in.x >> 8) & 255] = as_number(sum);
    }
    __syncthreads();
    // A block that has passed the next such wait knows that all have read what is written after it.
    r.copy = (r.copy + 1) % COPIES;
}

// Works out one row, by all blocks of the cluster. What they write for the next row of its chain they have all seen.
__device__ __forceinline__ void run_row(const ProgramParams& p, Shared& s, unsigned row_idx) {
    const ProgramRow& row = p.rows[row_idx];
    const OutputRow& asked = p.output_rows[row.output_row];
    // It sits out.
    if (!(asked.wants & WANTS_PROGRAM)) return;
    const int plane_stride = (p.vocab + 3) & ~3;
    Run r = {p,
             row,
             asked.mask_start,
             s,
             p.programs + row.program,
             p.logits + (size_t)asked.logits_row * p.vocab,
             p.planes + (size_t)row.planes * N_PLANES * plane_stride,
             p.vocab,
             plane_stride,
             p.vocab > 1 ? 32 - __clz(p.vocab - 1) : 0,
             cluster_rank(),
             0};
    const uint4 header = r.program[0];
    const unsigned n_steps = header.x, end = header.y & 255, n_planes = header.y >> 8;
    make_sources(r, r.program + header.w, header.z);
    if (threadIdx.x == 0) s.has_fault = 0;
    // All blocks run: their shared memory may be read.
    cluster_sync();
    for (unsigned i = 0; i < n_steps; i++) {
        const uint4 step = r.program[N_HEADER + i];
        const uint4* entries = r.program + step.y;
        switch (step.x) {
        case NUMBERS:
            if (threadIdx.x == 0) run_numbers(r, entries, step.z);
            __syncthreads();
            break;
        case FILL:
            for (unsigned plane = 0; plane < step.z; plane++) fill_plane(r, entries[plane]);
            cluster_sync();
            break;
        case PASS: run_pass(r, entries, step.z, step.w); break;
        default: select(r, entries, step.w, step.x == NUCLEUS);
        }
    }
    if (r.rank == 0 && threadIdx.x == 0) {
        ProgramOutput& out = p.outputs[row_idx];
        const bool has_fault = s.has_fault != 0;
        const unsigned* places = (const unsigned*)(r.program + 1);
        const auto number = [&](unsigned i) {
            return has_fault || places[i] == NO_NUMBER ? 0.0f : s.numbers[places[i]];
        };
        out.token = has_fault ? 0 : (unsigned)s.numbers[end];
        out.fault = has_fault ? FAULT_NOTHING_TO_DRAW : FAULT_NONE;
        for (unsigned i = 0; i < 4; i++) out.reports[i] = number(i);
        for (unsigned i = 0; i < 8; i++) {
            out.state[i] = number(4 + i);
            if (!has_fault && row.state_out != NONE) p.states[(size_t)row.state_out + i] = number(4 + i);
        }
    }
    // Nobody reads the planes or another block's memory any more.
    cluster_sync();
    clear_planes(r, n_planes);
}

extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, 1)
    logit_programs(const __grid_constant__ ProgramParams p) {
    const unsigned chain_idx = blockIdx.x / CLUSTER;
    if (chain_idx >= *p.n_chains) return;
    Shared& s = *(Shared*)shared_memory();
    for (unsigned row_idx = p.chains[chain_idx]; row_idx != NONE; row_idx = p.rows[row_idx].next) run_row(p, s, row_idx);
}
