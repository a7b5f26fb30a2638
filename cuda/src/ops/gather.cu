// Gather: y[r] = x[rows[r]].
// x: rows of row_len words of 16 bytes; rows: i32 [n_rows]; y: [n_rows, row_len].
// Grid n_rows_max, N_THREADS threads. Bytes: 32 * n_rows * row_len.

struct GatherParams {
    const uint4* x;
    const int* rows;
    const int* n_rows;
    uint4* y;
    int row_len;
    int unused;
};
static_assert(sizeof(GatherParams) == 40, "as in gather.rs");

extern "C" __global__ void __launch_bounds__(N_THREADS) gather(const __grid_constant__ GatherParams p) {
    const int r = blockIdx.x;
    if (r >= *p.n_rows) return;
    const int* __restrict__ rows = p.rows;
    const uint4* __restrict__ from = p.x + (size_t)rows[r] * p.row_len;
    uint4* __restrict__ to = p.y + (size_t)r * p.row_len;
    for (int i = threadIdx.x; i < p.row_len; i += N_THREADS) to[i] = from[i];
}
