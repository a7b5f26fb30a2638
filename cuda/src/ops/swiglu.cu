// SwiGLU: y[t, i] = silu(g) * u, g = gate_up[t, i] + bias[i], u = gate_up[t, n + i] + bias[n + i],
// silu(g) = g / (1 + exp(-g)).
// gate_up: In (T or f32) [n_tokens, 2, n]; bias: T [2, n] or null; y: T [n_tokens, n].
// Grid (n_tokens_max, parts of a row), 256 threads; four values a thread and turn. f32.
// Bytes: n_tokens * n * (2 sizeof In + sizeof T).
// Source: Shazeer 2020, arXiv:2002.05202; LlamaMLP of transformers.

template <typename In, typename T>
__device__ __forceinline__ void swiglu(const In* __restrict__ gate_up, const T* __restrict__ bias,
                                       T* __restrict__ y, const int* n_tokens, int n) {
    const int t = blockIdx.x;
    if (t >= *n_tokens) return;
    const In* gate = gate_up + (size_t)t * 2 * n;
    const In* up = gate + n;
    T* out = y + (size_t)t * n;
    const int step = 4 * blockDim.x * gridDim.y;
    for (int i = 4 * (blockIdx.y * blockDim.x + threadIdx.x); i < n; i += step) {
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

#define SWIGLU(NAME, In, T)                                                                                      \
    extern "C" __global__ void __launch_bounds__(256)                                                            \
        NAME(const In* gate_up, const T* bias, T* y, const int* n_tokens, int n) {                               \
        swiglu<In, T>(gate_up, bias, y, n_tokens, n);                                                            \
    }
SWIGLU(swiglu_from_model_bf16, bf16, bf16)
SWIGLU(swiglu_from_model_f16, f16, f16)
SWIGLU(swiglu_from_model_f32, f32, f32)
SWIGLU(swiglu_from_f32_bf16, f32, bf16)
SWIGLU(swiglu_from_f32_f16, f32, f16)
SWIGLU(swiglu_from_f32_f32, f32, f32)
