// A logit program over each row of logits: trellis_engine::sampling::program, to the bit.
//
// A plan (program_plan.rs) is a list of steps, all of which every block of the row's cluster takes: numbers, worked out by one
// warp; passes, each of which looks at the row once and gathers from it; selections; planes of the history. A block has a
// part of the row, whose ends are whole spans, and tells the others what it gathered there: all have all numbers.
//
// - max, argmax, draw: the largest (value, token), by warps, blocks, cluster.
// - sum, squares: the definition's tree over tokens, with +0 past the end up to a power of two. Two groups of 128 tokens are
//   a tile of a warp; tiles are added as the tree has them when the pass is over. A level that the tree does not have is
//   left out, so that a row of one token gives the token's own bits.
// - log-sum-exp, entropy: 64-bit sums of 2^-45, in any order.
//
// logits f32 [n_logits_rows, vocab]; planes f32 [n_sets, N_PLANES, vocab up to a multiple of 4], zeros before and after. A
// chain of rows is worked out by one cluster, row after row: rows of one context, of which each takes the state on that the
// one before left, and rows that share a set of planes. Grid CLUSTER * chains of the bucket, THREADS threads, SHARED_BYTES
// dynamic shared memory. Reads 4 * vocab bytes of a row once, and what shared memory does not hold of them again out of L2
// for each pass and two or more times for a selection.

static_assert(REST_BYTES - (int)(N_OPERATIONS * sizeof(NoiseSource) + sizeof(Sums) + sizeof(Selections)) >= 4 * TILE * N_REGISTERS,
              "a warp runs, whatever the program needs");

__device__ __forceinline__ bool is_sum(unsigned code) { return code == SUM || code == SQUARES; }

// Tells all blocks what this one has gathered. Where all have gathered the same, of a list, it stays here: nobody waits for
// others then, who may be at what comes before.
__device__ __forceinline__ void share_gathered(const Run& r, const uint4* finishes, unsigned n_finishes, bool is_within) {
    Shared& s = r.s;
    for (unsigned i = threadIdx.x; i < 2 * n_finishes * CLUSTER; i += THREADS) {
        const unsigned block = i % CLUSTER, second = i / CLUSTER & 1;
        const uint4 in = finishes[i / CLUSTER / 2];
        const unsigned code = in.x & 255, slot = in.y + second;
        if (is_sum(code) || (second && code != ENTROPY) || (is_within && block > 0)) continue;
        const bool takes_best = is_best(code);
        u64 all = s.gathered[slot][0];
#pragma unroll
        for (int warp = 1; warp < WARPS; warp++) all = merged(takes_best, all, s.gathered[slot][warp]);
        if (is_within) s.gathered[slot][0] = all;
        else in_block(&s, block)->exchanged[r.copy][slot][r.rank] = all;
    }
    const unsigned lane = threadIdx.x % 32;
    const int n_tiles = (r.s.end - r.begin + TILE - 1) / TILE;
    for (unsigned i = threadIdx.x / 32; i < n_finishes; i += WARPS) {
        if (!is_sum(finishes[i].x & 255)) continue;
        const unsigned slot = finishes[i].y;
        for (int start = 0; start < n_tiles; start += 32) {
            const int tile = start + (int)lane;
            float sum = tile < n_tiles ? sums_of(r.s).tiles[slot][tile] : 0.0f;
#pragma unroll
            for (int step = 1, level = LEVELS_OF_TILE; step < WARPS; step <<= 1, level++) {
                const float other = __shfl_down_sync(LANES_ALL, sum, step);
                if (level < r.s.n_levels) sum = in_row(__fadd_rn(sum, other));
            }
            if (tile % WARPS != 0 || tile >= n_tiles) continue;
            const int span = r.begin / SPAN + tile / WARPS;
            for (unsigned block = 0; block < CLUSTER; block++) in_block(&sums_of(r.s), block)->spans[r.copy][slot][span] = sum;
        }
    }
}

// The root of the tree over the spans of all blocks, in the first lane of a warp.
__device__ __forceinline__ float tree_sum(const Run& r, unsigned slot) {
    constexpr int SHARE_OF_SPANS = SPANS / 32;
    float spans[SHARE_OF_SPANS];
#pragma unroll
    for (int i = 0; i < SHARE_OF_SPANS; i++) {
        const int span = (int)(threadIdx.x % 32) * SHARE_OF_SPANS + i;
        spans[i] = span * SPAN < r.vocab ? sums_of(r.s).spans[r.copy][slot][span] : 0.0f;
    }
    int level = LEVELS_OF_SPAN;
#pragma unroll
    for (int step = 1; step < SHARE_OF_SPANS; step <<= 1, level++) {
#pragma unroll
        for (int i = 0; i < SHARE_OF_SPANS; i += 2 * step)
            if (level < r.s.n_levels) spans[i] = in_row(__fadd_rn(spans[i], spans[i + step]));
    }
    float sum = spans[0];
#pragma unroll
    for (int step = 1; step < 32; step <<= 1, level++) {
        const float other = __shfl_down_sync(LANES_ALL, sum, step);
        if (level < r.s.n_levels) sum = in_row(__fadd_rn(sum, other));
    }
    return sum;
}

__device__ __forceinline__ u64 of_blocks(const Run& r, bool is_within, bool takes_best, unsigned slot) {
    if (is_within) return r.s.gathered[slot][0];
    u64 all = r.s.exchanged[r.copy][slot][0];
#pragma unroll
    for (int block = 1; block < CLUSTER; block++) all = merged(takes_best, all, r.s.exchanged[r.copy][slot][block]);
    return all;
}

// The numbers of one root: (code | result, slot, number of the largest value).
__device__ __forceinline__ void finish(const Run& r, bool is_within, uint4 in) {
    const unsigned code = in.x & 255;
    const u64 all = of_blocks(r, is_within, is_best(code), in.y);
    finish_root(r.s.numbers, in, all, code == ENTROPY ? of_blocks(r, is_within, false, in.y + 1) : 0);
}

// Makes places ready for what the roots of a pass gather: (code | result, slot, ..) each.
__device__ __forceinline__ void begin_pass(const Run& r, const uint4* finishes, unsigned n_finishes) {
    Shared& s = r.s;
    for (unsigned i = threadIdx.x; i < 2 * n_finishes * WARPS; i += THREADS) {
        const uint4 in = finishes[i / (2 * WARPS)];
        const unsigned code = in.x & 255, second = i / WARPS & 1;
        if (is_sum(code) || (second && code != ENTROPY)) continue;
        const unsigned least = is_best(code) ? key_of(minus_infinity()) : 0;
        s.gathered[in.y + second][i % WARPS] = (u64)least << 32;
        s.leaders[in.y + second] = least;
    }
    __syncthreads();
}

__device__ __forceinline__ void end_pass(Run& r, const uint4* finishes, unsigned n_finishes, bool is_within) {
    __syncthreads();
    share_gathered(r, finishes, n_finishes, is_within);
    if (is_within) __syncthreads();
    else cluster_sync();
    if (threadIdx.x < 32) {
        for (unsigned i = threadIdx.x; i < n_finishes; i += 32)
            if (!is_sum(finishes[i].x & 255)) finish(r, is_within, finishes[i]);
        for (unsigned i = 0; i < n_finishes; i++) {
            if (!is_sum(finishes[i].x & 255)) continue;
            const float sum = tree_sum(r, finishes[i].y);
            if (threadIdx.x == 0) r.s.numbers[(finishes[i].x >> 8) & 255] = as_number(sum);
        }
        __syncwarp();
    }
    // A block that has passed the next such wait knows that all have read what is written after it.
    if (threadIdx.x == 0 && !is_within) r.s.copy = (r.s.copy + 1) % COPIES;
    __syncthreads();
}

// A root: takes rows, changes places of the warp. `other` is the second operand if it is a row; a number is a set of all or
// none, or what the code says.
__device__ __forceinline__ void gather(const Run& r, const Place& at, uint4 in, Many& row,
                                       bool has_other, Many& other) {
    Shared& s = r.s;
    const unsigned code = in.x & 255, slot = (in.x >> 8) & 255;
    u64* place = &s.gathered[slot % N_GATHERED][threadIdx.x / 32];
    const float number = s.numbers[in.w & (N_NUMBERS - 1)];
    if (code == TAKE) {
        const int token = (int)number % 4;
        const float x = token == 0 ? row.v[0] : token == 1 ? row.v[1] : token == 2 ? row.v[2] : row.v[3];
        if (threadIdx.x == 0) s.numbers[slot] = as_number(x);
        return;
    }
    if (code == RANK) {
        gather_ranks(r, at, row, other);
        return;
    }
    if (code == DRAW) {
        gather_draw(r, at, slot, place, row, in.z);
        return;
    }
    unsigned valid = at.valid;
    if (code == COUNT) valid = in_set(valid, row);
    else if (has_other) valid = in_set(valid, other);
    else if (s.numbers[in.z & (N_NUMBERS - 1)] == 0.0f) valid = 0;
    switch (code) {
    case BEST: gather_best(r, at, slot, place, row, valid, is_dense(at)); break;
    case SUM:
    case SQUARES: gather_sum(r, at, slot, row, valid, code == SQUARES, number); break;
    case COUNT: {
        const unsigned n = __reduce_add_sync(LANES_ALL, (unsigned)__popc(valid));
        if (threadIdx.x % 32 == 0) *place += n;
        break;
    }
    default:  // LOG_SUM_EXP, ENTROPY
        gather_exponentials(row, valid, place, code == ENTROPY, number);
    }
}

// Runs code over the tokens of one place.
__device__ __forceinline__ void run_code(const Run& r, const Place& at, const uint4* code) {
    Many acc = many(0.0f);
    while (true) {
        const uint4 in = *code++;
        const unsigned what = in.x & 255, result = (in.x >> 8) & 255, flags = in.x >> 16;
        if (what < NEG) {
            acc = leaf(r, at, what, in.y);
            if (result != NO_REGISTER) put(r, result, acc);
            continue;
        }
        const bool has_number = (flags >> 2 & 3) == IN_NUMBER;
        Many other;
        if (!has_number) other = fetch(r, at, flags >> 2, in.z, acc);
        if ((flags & 3) != IN_ACCUMULATOR) acc = fetch(r, at, flags, in.y, acc);
        if (what >= BEST) {
            gather(r, at, in, acc, !has_number, other);
            if (in.x & LAST) break;
            continue;
        }
        if (!has_number || !element_with_number(r, at, acc, what, in.z & (N_NUMBERS - 1))) {
            if (has_number) other = many(r.s.numbers[in.z & (N_NUMBERS - 1)]);
            element(r, at, in, what, acc, other, [&] { return fetch(r, at, in.x >> 20, in.w, acc); });
        }
        if (result != NO_REGISTER) put(r, result, acc);
    }
}

// The code of the step that is taken.
__device__ __forceinline__ const uint4* code_of(const Shared& s) { return s.plan + *(volatile const unsigned*)&s.step.y; }

// Runs code over all tokens of the block, those of the list, or the group of one token.
__device__ __forceinline__ void read_code(Run& r, const uint4* code, bool is_one, bool is_within) {
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    if (warp >= r.s.n_warps) return;
    const bool is_dense = !is_within && !is_one;
    const int n = is_dense ? r.s.end - r.begin : is_within ? (int)r.s.n_tokens : 1;
    // What is looked at out of order may be anywhere.
    if (!is_dense) wait_for_row(r, r.n_kept);
    const int step = is_dense ? TILE : 32;
    for (int start = warp * step; start < n; start += r.s.n_warps * step) {
        Place at;
        if (is_dense) {
            if (r.n_there < r.n_kept) wait_for_row(r, start + TILE);
            at.first = r.begin + start + 4 * lane;
            at.step = 128;
            at.valid = ALL_VALID;
            if (start + TILE > n) {
                at.valid = 0;
#pragma unroll
                for (int i = 0; i < EACH; i++)
                    if (token_of(at, i) < r.s.end) at.valid |= 1u << i;
            }
        } else {
            // One group is looked at for the sake of one token, with the other groups in the same place.
            const int idx = start + lane;
            const bool is_there = is_within && idx < n;
            const int token = is_there ? (int)selections_of(r.s).tokens[idx]
                              : is_within ? 0
                                          : (int)r.s.numbers[code_of(r.s)[r.s.step.w - 1].w & (N_NUMBERS - 1)];
            at.first = token & ~3;
            at.step = 0;
            at.valid = is_there ? 1u << (token % 4) : 0;
        }
        run_code(r, at, code);
    }
}

// One reading: plain roots, each by itself, then the code of all others; of a list, where the plan has one, its code alone.
__device__ __forceinline__ void read_row(Run& r, bool is_one, bool is_within) {
    const uint4* code = code_of(r.s);
    const unsigned n_code = r.s.step.w;
    const unsigned n_plain = r.s.step.x >> N_PLAIN_SHIFT;
    if (!is_within) {
        for (unsigned i = 0; i < n_plain; i += N_PLAIN_ENTRIES) read_plain(r, code + i);
        if (n_plain > 0 && (r.s.step.x & WITHIN_LIST)) return;
    }
    if (n_plain < n_code) read_code(r, code + n_plain, is_one, is_within);
}

// Goes on to the next step of the plan, if there is one, with its entries in shared memory, where the whole plan is if it is
// short. Numbers are worked out on the way.
__device__ __forceinline__ bool take_step(const Run& r) {
    Shared& s = r.s;
    const bool is_short = s.header.w <= N_PLAN;
    if (threadIdx.x < 32) {
        unsigned i = s.step_idx;
        uint4 step = {0, 0, 0, 0};
        bool is_done = false;
        while (true) {
            is_done = i >= (s.header.x & 0xffffu);
            if (is_done) break;
            step = is_short ? s.plan[N_HEADER + i] : s.program[N_HEADER + i];
            i++;
            if (!is_short || (step.x & 255) != NUMBERS) break;
            run_numbers(r, s.plan + step.y, step.z, step.w);
        }
        __syncwarp();
        if (threadIdx.x == 0) s.step_idx = i, s.step = step, s.is_done = is_done;
    }
    __syncthreads();
    if (s.is_done) return false;
    if (!is_short) {
        const uint4 step = s.step;
        for (unsigned k = threadIdx.x; k < step.z; k += THREADS) s.plan[k] = s.program[step.y + k];
        __syncthreads();
        if (threadIdx.x == 0) s.step.y = 0;
        __syncthreads();
    }
    return true;
}

// What comes of the step that is taken: the first reading for it, if there is one.
__device__ __forceinline__ Reading begin_step(Run& r) {
    Shared& s = r.s;
    const uint4 step = s.step;
    const unsigned what = step.x & 255;
    const uint4* entries = s.plan + step.y;
    const uint4* rest = entries + step.w;
    const bool is_within = (step.x & WITHIN_LIST) && s.is_listed;
    if (threadIdx.x == 0) s.is_within = is_within;
    switch (what) {
    case NUMBERS:
        if (threadIdx.x < 32) run_numbers(r, entries, step.z, step.w);
        __syncthreads();
        return Reading::Done;
    case FILL:
        for (unsigned plane = 0; plane < step.z; plane++) fill_plane(r, entries[plane]);
        cluster_sync();
        return Reading::Done;
    case PASS: begin_pass(r, rest, step.z - step.w); return Reading::Gather;
    case TAKE: return Reading::Take;
    default: return begin_selection(r, rest[0], what == NUCLEUS, is_within);
    }
}

// After a reading: the next one for the step.
__device__ __forceinline__ Reading end_reading(Run& r, Reading reading) {
    const uint4 step = r.s.step;
    const uint4* rest = r.s.plan + step.y + step.w;
    switch (reading) {
    case Reading::Gather: end_pass(r, rest, step.z - step.w, r.s.is_within); return Reading::Done;
    case Reading::Count: return after_count(r, rest[0]);
    case Reading::List: return after_list(r, rest[0], r.s.is_within);
    default:
        __syncthreads();
        return Reading::Done;
    }
}

// Works out one row, by all blocks of the cluster, which do not look at each other's memory any more when they are done.
// `later` is a row that comes when others are done, in one thread, or NONE.
__device__ __forceinline__ void run_row(const ProgramParams& p, Shared& s, unsigned row_idx, unsigned& later, bool& has_arrived) {
    if (threadIdx.x < sizeof(ProgramRow) / 4)
        ((unsigned*)&s.row)[threadIdx.x] = ((const unsigned*)&p.rows[row_idx])[threadIdx.x];
    if (later != NONE) later = p.rows[later].output_row;
    __syncthreads();
    const ProgramRow& row = s.row;
    const OutputRow& asked = p.output_rows[row.output_row];
    const unsigned wants = asked.wants, logits_row = asked.logits_row, constraint = asked.mask_start;
    // On its way with what is asked for, which may be nothing.
    const uint4* program = p.programs + row.program;
    const uint4 header = __ldg(program);
    if (later != NONE) later = p.output_rows[later].logits_row;
    // It sits out.
    if (!(wants & WANTS_PROGRAM)) {
        if (has_arrived) cluster_wait_empty();
        has_arrived = false;
        later = NONE;
        return;
    }
    if (threadIdx.x < PIECES) copy_prepare(&s.arrivals[threadIdx.x]);
    const int plane_stride = (p.vocab + 3) & ~3;
    Run r = {p, row, s.constraint, s, s.planes, s.plane_stride, s.rank, s.begin, s.n_kept, s.copy, p.vocab, 0};
    {
        const unsigned n_sources = header.z, n_entries = header.w;
        const int n_registers = (int)(header.y >> 16) & 255;
        const int share = ((p.vocab + CLUSTER - 1) / CLUSTER + SPAN - 1) / SPAN * SPAN;
        const int begin = min((int)cluster_rank() * share, p.vocab);
        const int n_tokens = min(share, p.vocab - begin);
        // What lies behind the shared memory that all programs need, in the order of need.
        const int sums_at = (int)n_sources * (int)sizeof(NoiseSource);
        const int selections_at = sums_at + (header.y & HAS_SUMS ? (int)sizeof(Sums) : 0);
        const int registers_at = selections_at + (header.y & HAS_SELECTIONS ? (int)sizeof(Selections) : 0);
        // Where many rows are alive at once, few warps run.
        const int of_warp = 4 * TILE * n_registers;
        const int n_warps = n_registers == 0 ? WARPS : min(WARPS, (REST_BYTES - registers_at) / of_warp);
        const int kept_at = registers_at + of_warp * n_warps;
        if (threadIdx.x == 0) {
            s.sources_at = 0, s.sums_at = sums_at, s.selections_at = selections_at;
            s.registers_at = registers_at, s.kept_at = kept_at;
            s.rank = cluster_rank();
            s.n_warps = n_warps;
            s.header = header;
            s.program = program;
            s.logits = p.logits + (size_t)logits_row * p.vocab;
            s.planes = p.planes + (size_t)row.planes * N_PLANES * plane_stride;
            s.constraint = constraint;
            s.plane_stride = plane_stride;
            s.begin = begin, s.end = begin + n_tokens;
            s.n_kept = can_copy() && (p.vocab & 3) == 0 ? min((REST_BYTES - kept_at) / (4 * TILE) * TILE, n_tokens) : 0;
            s.n_levels = p.vocab > 1 ? 32 - __clz(p.vocab - 1) : 0;
            s.copy = s.has_fault = s.is_listed = s.step_idx = 0;
        }
        __syncthreads();
        copy_row(r);
        if (later != NONE && (p.vocab & 3) == 0 && n_tokens > 0)
            copy_ahead(p.logits + (size_t)later * p.vocab + begin, 4 * n_tokens);
        later = NONE;
        for (unsigned i = threadIdx.x; i < n_entries && n_entries <= N_PLAN; i += THREADS) s.plan[i] = program[i];
        make_sources(r, program + (n_entries - n_sources), n_sources);
    }
    __syncthreads();
    // All blocks run: their shared memory may be written.
    if (has_arrived) cluster_wait_empty();
    has_arrived = false;
    while (take_step(r)) {
        Reading reading = begin_step(r);
        while (reading != Reading::Done) {
            read_row(r, reading == Reading::Take, reading != Reading::Take && s.is_within);
            reading = end_reading(r, reading);
        }
    }
    if (s.rank == 0) write_output(r, row_idx, s.header.w <= N_PLAN ? s.plan : s.program);
    // Copies end in this block.
    wait_for_row(r, r.n_kept);
    const unsigned n_planes = (s.header.y >> 8) & 255;
    if (n_planes > 0) {
        // Until all blocks have read the planes.
        cluster_sync();
        clear_planes(r, n_planes);
    }
    __syncthreads();
    if (threadIdx.x < PIECES) copy_release(&s.arrivals[threadIdx.x]);
}

extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, BLOCKS_OF_SM)
    KERNEL(const __grid_constant__ ProgramParams p) {
    const unsigned chain_idx = blockIdx.x / CLUSTER, later_idx = chain_idx + CHAINS_AT_ONCE;
    const unsigned n_chains = *p.n_chains;
    // Chains that do not count are there to be read, and take no time of their own.
    unsigned row_idx = p.chains[chain_idx];
    if (chain_idx >= n_chains) return;
    unsigned later = threadIdx.x == THREADS - 1 && later_idx < n_chains ? p.chains[later_idx] : NONE;
    Shared& s = *(Shared*)shared_memory();
    cluster_arrive_empty();
    bool has_arrived = true;
    while (true) {
        run_row(p, s, row_idx, later, has_arrived);
        row_idx = s.row.next;
        if (row_idx == NONE) break;
        // What the row left is there for the next, and all blocks are done with its shared memory.
        cluster_sync();
    }
}
