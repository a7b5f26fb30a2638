// A logit program that reads the row once, over each row of logits: trellis_engine::sampling::program, to the bit.
//
// Its plan (program_plan.rs) has numbers, one pass that takes the best of rows or draws, and numbers again. Any number of
// blocks share a row: each works out the numbers before the pass and looks at its tiles; the last to arrive puts together what
// all have found, works out the rest and writes the output.
//
// logits f32 [n_logits_rows, vocab]; meetings [n_chains_max], zeros before and after. Every chain is one row, that of its own
// index. Grid as many blocks as run together, at least two for each chain of the bucket, THREADS threads, SHARED_BYTES dynamic
// shared memory. Reads 4 * vocab bytes of a row, and what the program takes besides.

// Tiles of a block, where a row has so many: with fewer the blocks wait for each other longer than they work.
constexpr int TILES_LEAST = 4;

static_assert(N_SINGLE_ROOTS <= 32 && N_SINGLE_ROOTS <= N_GATHERED, "a lane for each root");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_OF_SM) KERNEL(const __grid_constant__ ProgramParams p) {
    Shared& s = *(Shared*)shared_memory();
    const unsigned n_chains = *p.n_chains, lane = threadIdx.x % 32;
    const int n_tiles = (p.vocab + TILE - 1) / TILE, warp = (int)threadIdx.x / 32;
    const unsigned n_blocks = min(max(gridDim.x / max(n_chains, 1u), 1u), (unsigned)(n_tiles + TILES_LEAST - 1) / TILES_LEAST);
    const unsigned row_idx = blockIdx.x / n_blocks;
    if (row_idx >= n_chains) return;
    // Of all blocks of a row, or of none.
    if (!read_what_row_is(p, s, row_idx)) return;
    // What other kernels have besides is nowhere here.
    float* const no_planes = nullptr;
    const int none = 0;
    const unsigned no_rank = 0;
    Run r = {p, s.row, s.constraint, s, no_planes, none, no_rank, none, none, none, p.vocab, 0};
    read_plan(r);
    const unsigned least = key_of(minus_infinity());
    if (lane < N_SINGLE_ROOTS) s.gathered[lane][warp] = (u64)least << 32;
    if (threadIdx.x < N_SINGLE_ROOTS) s.leaders[threadIdx.x] = least;
    const int share = (n_tiles + (int)n_blocks - 1) / (int)n_blocks, begin = (int)(blockIdx.x % n_blocks) * share;
    const int end = min(begin + share, n_tiles);
    // On their way while numbers are worked out.
    const Many first = first_logits(r, begin, end);
    __syncthreads();
    if (warp == 0) {
        const unsigned pass = take_numbers(r, 0);
        if (lane == 0) s.step_idx = pass;
    }
    __syncthreads();
    const uint4 step = s.plan[N_HEADER + s.step_idx];
    const uint4* finishes = s.plan + step.y + step.w;
    const unsigned n_roots = step.z - step.w;
    run_tiles(r, begin, end, first, code_of_pass(s, finishes),
              [&](const Place& at, uint4 in, Many& row, bool has_set, const Many& set) {
                  const unsigned slot = (in.x >> 8) & (N_SINGLE_ROOTS - 1);
                  u64* place = &s.gathered[slot][warp];
                  if ((in.x & 255) == DRAW) gather_draw(r, at, slot, place, row, in.z);
                  else gather_best(r, at, slot, place, row, counted_in(r, at, in, has_set, set), true);
              });
    __syncthreads();
    if (warp > 0) return;
    u64 best = 0;
    if (lane < n_roots) {
        for (int i = 0; i < WARPS; i++) best = merged(true, best, s.gathered[lane][i]);
    }
    if (n_blocks > 1) {
        Meeting& meeting = p.meetings[row_idx];
        if (lane < n_roots) atomicMax(&meeting.best[lane], best);
        __threadfence();
        __syncwarp();
        unsigned n_before = 0;
        if (lane == 0) n_before = atomicAdd(&meeting.n_arrived, 1u);
        if (__shfl_sync(LANES_ALL, n_before, 0) + 1 < n_blocks) return;
        __threadfence();
        // What all have found; the place is left as it was.
        if (lane < n_roots) best = atomicExch(&meeting.best[lane], 0ull);
        if (lane == 0) meeting.n_arrived = 0;
    }
    if (lane < n_roots) finish_best(s.numbers + (finishes[lane].x >> 8 & 255), best);
    __syncwarp();
    take_numbers(r, s.step_idx + 1);
    write_output(r, row_idx, s.plan);
}
