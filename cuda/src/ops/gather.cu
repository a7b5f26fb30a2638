// Gather: y[r] = x[r] of those that are asked, and states[keeps[r]] = the same where keeps[r] >= 0.
// x[r] is tokens[rows[r]], or states[-1 - rows[r]] where rows[r] is negative: what an earlier launch has kept. No state is
// both read and written. y may be null, where only states are kept.
// tokens, states: rows of row_len words of 16 bytes; rows, keeps: i32 [n_rows]; y: [n_rows, row_len].
// Grid n_rows_max, N_THREADS threads. Bytes: 32 * n_rows * row_len, and 16 more a word that is kept.

struct GatherParams {
    const uint4* tokens;
    const int* rows;
    const int* keeps;
    const int* n_rows;
    uint4* y;
    uint4* states;
    int row_len;
    int unused;
};
static_assert(sizeof(GatherParams) == 56, "as in gather.rs");

extern "C" __global__ void __launch_bounds__(N_THREADS) gather(const __grid_constant__ GatherParams p) {
    const int r = blockIdx.x;
    if (r >= *p.n_rows) return;
    const int row = p.rows[r], keep = p.keeps[r];
    if (p.y == nullptr && keep < 0) return;
    const uint4* from = row >= 0 ? p.tokens + (size_t)row * p.row_len : p.states + (size_t)(-1 - row) * p.row_len;
    uint4* to = p.y + (size_t)r * p.row_len;
    uint4* state = p.states + (size_t)keep * p.row_len;
    for (int i = threadIdx.x; i < p.row_len; i += N_THREADS) {
        const uint4 word = from[i];
        if (p.y != nullptr) to[i] = word;
        if (keep >= 0) state[i] = word;
    }
}
