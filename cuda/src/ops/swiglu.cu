// SwiGLU: y[t, i] = silu(g) * u, g = gate_up[t, i] + bias[i], u = gate_up[t, n + i] + bias[n + i],
// silu(g) = g / (1 + exp(-g)).
// gate_up: T [n_tokens, 2, n]; bias: T [2, n] or null; y: T [n_tokens, n].
// Grid (n_tokens_max, parts of a row), N_THREADS threads; four values a thread at a time. f32.
// Bytes: 3 * n_tokens * n * sizeof T.
// Source: Shazeer 2020, arXiv:2002.05202; LlamaMLP of transformers.

struct SwiGluParams {
    const T* gate_up;
    const T* bias;
    T* y;
    const int* n_tokens;
    int n;
    int unused;
};
static_assert(sizeof(SwiGluParams) == 40, "as in swiglu.rs");

extern "C" __global__ void __launch_bounds__(N_THREADS) swiglu(const __grid_constant__ SwiGluParams p) {
    const int t = blockIdx.x, n = p.n;
    if (t >= *p.n_tokens) return;
    const T* __restrict__ gate = p.gate_up + (size_t)t * 2 * n;
    const T* __restrict__ up = gate + n;
    const T* __restrict__ bias = p.bias;
    T* __restrict__ out = p.y + (size_t)t * n;
    const int step = 4 * N_THREADS * gridDim.y;
    for (int i = 4 * (blockIdx.y * N_THREADS + threadIdx.x); i < n; i += step) {
        float4 g = load4_of_row(gate, i, n), u = load4_of_row(up, i, n);
        if (bias) {
            const float4 gb = load4_of_row(bias, i, n), ub = load4_of_row(bias + n, i, n);
            g = make_float4(g.x + gb.x, g.y + gb.y, g.z + gb.z, g.w + gb.w);
            u = make_float4(u.x + ub.x, u.y + ub.y, u.z + ub.z, u.w + ub.w);
        }
        store4_of_row(out, i, n,
                      make_float4(silu(g.x) * u.x, silu(g.y) * u.y, silu(g.z) * u.z, silu(g.w) * u.w));
    }
}
