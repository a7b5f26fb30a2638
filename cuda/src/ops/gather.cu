// Gather: y[r] = x[rows[r]].
// x: rows of row_len words; rows: i32 [n_rows]; y: [n_rows, row_len]. A word is 16 bytes where the rows' length
// allows it, else 2.
// Grid n_rows_max, 256 threads. Bytes: 2 * n_rows * row bytes.

template <typename Word>
__device__ __forceinline__ void gather(const Word* __restrict__ x, const int* __restrict__ rows, const int* n_rows,
                                       Word* __restrict__ y, int row_len) {
    const int r = blockIdx.x;
    if (r >= *n_rows) return;
    const Word* from = x + (size_t)rows[r] * row_len;
    Word* to = y + (size_t)r * row_len;
    for (int i = threadIdx.x; i < row_len; i += blockDim.x) to[i] = from[i];
}

extern "C" __global__ void __launch_bounds__(256)
    gather_16_bytes(const uint4* x, const int* rows, const int* n_rows, uint4* y, int row_len) {
    gather<uint4>(x, rows, n_rows, y, row_len);
}
extern "C" __global__ void __launch_bounds__(256)
    gather_2_bytes(const ushort1* x, const int* rows, const int* n_rows, ushort1* y, int row_len) {
    gather<ushort1>(x, rows, n_rows, y, row_len);
}
