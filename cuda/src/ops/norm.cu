// RMSNorm: y[r, i] = weight[i] * x[r, i] / sqrt(mean(x[r]^2) + eps)
// x: f32 [n_rows, hidden]; weight: T [hidden]; y: T [n_rows, hidden].
// Grid n_rows_max; a block of up to N_THREADS_MAX threads holds a row in registers, N_KEPT groups of four values a
// thread. f32 sums; y is not a number where the sum of the squares overflows.
// Bytes a row: hidden * (4 + sizeof T).
// Source: Zhang and Sennrich 2019, arXiv:1910.07467; LlamaRMSNorm of transformers.

struct RmsNormParams {
    const float* x;
    const T* weight;
    T* y;
    const int* n_rows;
    int hidden;
    float eps;
};
static_assert(sizeof(RmsNormParams) == 40, "as in norm.rs");

extern "C" __global__ void __launch_bounds__(N_THREADS_MAX) rms_norm(const __grid_constant__ RmsNormParams p) {
    __shared__ float scratch[32];
    const int r = blockIdx.x, hidden = p.hidden;
    if (r >= *p.n_rows) return;
    const float* __restrict__ x = p.x + (size_t)r * hidden;
    const T* __restrict__ weight = p.weight;
    T* __restrict__ y = p.y + (size_t)r * hidden;
    float4 v[N_KEPT];
#pragma unroll
    for (int j = 0; j < N_KEPT; j++) {
        v[j] = load4_of_row(x, 4 * (j * (int)blockDim.x + (int)threadIdx.x), hidden);
    }
    float squares = 0.f;
#pragma unroll
    for (int j = 0; j < N_KEPT; j++) {
        squares += (v[j].x * v[j].x + v[j].y * v[j].y) + (v[j].z * v[j].z + v[j].w * v[j].w);
    }
    const float scale = rms_scale(block_sum(squares, scratch), hidden, p.eps);
#pragma unroll
    for (int j = 0; j < N_KEPT; j++) {
        const int i = 4 * (j * (int)blockDim.x + (int)threadIdx.x);
        if (i >= hidden) break;
        const float4 w = load4_of_row(weight, i, hidden);
        store4_of_row(y, i, hidden,
                      make_float4(w.x * (v[j].x * scale), w.y * (v[j].y * scale), w.z * (v[j].z * scale),
                                  w.w * (v[j].w * scale)));
    }
}
