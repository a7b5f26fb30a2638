// A logit program of several passes without selections, sums or rows of the history, over each row of logits:
// trellis_engine::sampling::program, to the bit.
//
// Its plan (program_plan.rs) has numbers and passes that take the best of rows, draw, count, or add up exponentials. A cluster
// shares a row: after each pass every block tells the others what it has gathered, and all have all numbers.
//
// logits f32 [n_logits_rows, vocab]. Every chain is one row, that of its own index. Grid a cluster of up to CLUSTER blocks, as
// the launch says, for each chain of the bucket, THREADS threads, SHARED_BYTES dynamic shared memory. Reads 4 * vocab bytes of a
// row for each pass, out of L2 after the first, and what the program takes besides.

// Makes places ready for what the roots of a pass gather: (code | result, slot, ..) each.
__device__ __forceinline__ void begin_pass(Shared& s, const uint4* finishes, unsigned n_finishes) {
    for (unsigned i = threadIdx.x; i < 2 * n_finishes * WARPS; i += THREADS) {
        const uint4 in = finishes[i / (2 * WARPS)];
        const unsigned code = in.x & 255, second = i / WARPS & 1;
        if (second && code != ENTROPY) continue;
        const unsigned least = is_best(code) ? key_of(minus_infinity()) : 0;
        s.gathered[in.y + second][i % WARPS] = (u64)least << 32;
        s.leaders[in.y + second] = least;
    }
    __syncthreads();
}

// Tells all blocks what this one has gathered, and makes numbers of what all have.
__device__ __forceinline__ void end_pass(Shared& s, unsigned n_blocks, unsigned rank, const uint4* finishes, unsigned n_finishes) {
    __syncthreads();
    for (unsigned i = threadIdx.x; i < 2 * n_finishes; i += THREADS) {
        const uint4 in = finishes[i / 2];
        const unsigned code = in.x & 255, slot = in.y + (i & 1);
        if ((i & 1) && code != ENTROPY) continue;
        u64 all = s.gathered[slot][0];
        for (int warp = 1; warp < WARPS; warp++) all = merged(is_best(code), all, s.gathered[slot][warp]);
        for (unsigned block = 0; block < n_blocks; block++) in_block(&s, block)->exchanged[s.copy][slot][rank] = all;
    }
    cluster_sync();
    for (unsigned i = threadIdx.x; i < n_finishes; i += THREADS) {
        const uint4 in = finishes[i];
        const unsigned code = in.x & 255;
        u64 all = s.exchanged[s.copy][in.y][0], weighted = 0;
        for (unsigned block = 1; block < n_blocks; block++) all = merged(is_best(code), all, s.exchanged[s.copy][in.y][block]);
        if (code == ENTROPY) {
            for (unsigned block = 0; block < n_blocks; block++) weighted += s.exchanged[s.copy][in.y + 1][block];
        }
        finish_root(s.numbers, in, all, weighted);
    }
    __syncthreads();
    // A block that has passed the next such wait knows that all have read what is written after it.
    if (threadIdx.x == 0) s.copy ^= 1;
}

// A root: takes rows, changes places of the warp.
__device__ __forceinline__ void gather(const Run& r, const Place& at, uint4 in, Many& row, bool has_set, const Many& set) {
    Shared& s = r.s;
    const unsigned code = in.x & 255, slot = (in.x >> 8) & (N_GATHERED - 1);
    u64* place = &s.gathered[slot][threadIdx.x / 32];
    if (code == DRAW) {
        gather_draw(r, at, slot, place, row, in.z);
    } else if (code == COUNT) {
        const unsigned n = __reduce_add_sync(LANES_ALL, (unsigned)__popc(in_set(at.valid, row)));
        if (threadIdx.x % 32 == 0) *place += n;
    } else {
        const unsigned valid = counted_in(r, at, in, has_set, set);
        if (code == BEST) gather_best(r, at, slot, place, row, valid, true);
        else gather_exponentials(row, valid, place, code == ENTROPY, s.numbers[in.w & (N_NUMBERS - 1)]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_OF_SM) KERNEL(const __grid_constant__ ProgramParams p) {
    Shared& s = *(Shared*)shared_memory();
    const unsigned n_blocks = cluster_size(), rank = cluster_rank(), row_idx = blockIdx.x / n_blocks;
    if (row_idx >= *p.n_chains) return;
    cluster_arrive_empty();
    const bool draws = read_what_row_is(p, s, row_idx);
    if (!draws) {
        cluster_wait_empty();
        return;
    }
    // What other kernels have besides is nowhere here.
    float* const no_planes = nullptr;
    const int none = 0;
    Run r = {p, s.row, s.constraint, s, no_planes, none, rank, none, none, none, p.vocab, 0};
    read_plan(r);
    if (threadIdx.x == 0) s.copy = 0, s.step_idx = 0;
    const int n_tiles = (p.vocab + TILE - 1) / TILE, share = (n_tiles + (int)n_blocks - 1) / (int)n_blocks;
    const int begin = (int)rank * share, end = min(begin + share, n_tiles);
    __syncthreads();
    // All blocks run: their shared memory may be written.
    cluster_wait_empty();
    while (true) {
        // On their way while numbers are worked out.
        const Many first = first_logits(r, begin, end);
        if (threadIdx.x < 32) {
            const unsigned pass = take_numbers(r, s.step_idx);
            if (threadIdx.x == 0) s.step_idx = pass;
        }
        __syncthreads();
        if (s.step_idx >= n_steps_of(s)) break;
        const uint4 step = s.plan[N_HEADER + s.step_idx];
        const uint4* finishes = s.plan + step.y + step.w;
        const unsigned n_finishes = step.z - step.w;
        begin_pass(s, finishes, n_finishes);
        run_tiles(r, begin, end, first, code_of_pass(s, finishes),
                  [&](const Place& at, uint4 in, Many& row, bool has_set, const Many& set) {
                      gather(r, at, in, row, has_set, set);
                  });
        end_pass(s, n_blocks, rank, finishes, n_finishes);
        if (threadIdx.x == 0) s.step_idx++;
        __syncthreads();
    }
    if (rank == 0) write_output(r, row_idx, s.plan);
}
