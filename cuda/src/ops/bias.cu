// Bias: y[t, i] += bias[i].
// y: f32 [n_rows, n]; bias: T [n].
// Grid (n_rows_max, parts of a row), N_THREADS threads; four values a thread at a time. f32.
// Bytes: 8 * n_rows * n.

struct AddBiasParams {
    float* y;
    const T* bias;
    const int* n_rows;
    int n;
    int unused;
};
static_assert(sizeof(AddBiasParams) == 32, "as in bias.rs");

extern "C" __global__ void __launch_bounds__(N_THREADS) add_bias(const __grid_constant__ AddBiasParams p) {
    const int t = blockIdx.x;
    if (t >= *p.n_rows) return;
    float* __restrict__ row = p.y + (size_t)t * p.n;
    const T* __restrict__ bias = p.bias;
    const int step = 4 * N_THREADS * gridDim.y;
    for (int i = 4 * (blockIdx.y * N_THREADS + threadIdx.x); i < p.n; i += step) {
        const float4 v = load4_of_row(row, i, p.n), b = load4_of_row(bias, i, p.n);
        store4_of_row(row, i, p.n, make_float4(v.x + b.x, v.y + b.y, v.z + b.z, v.w + b.w));
    }
}
