// Bias: y[t, i] += bias[i].
// y: T or f32 [n_tokens, n]; bias: T [n].
// Grid (n_tokens_max, parts of a row), 256 threads; four values a thread and turn. f32.
// Bytes: 2 * n_tokens * n * sizeof y.

template <typename Y, typename T>
__device__ __forceinline__ void add_bias(Y* __restrict__ y, const T* __restrict__ bias, const int* n_tokens,
                                         int n) {
    const int t = blockIdx.x;
    if (t >= *n_tokens) return;
    Y* row = y + (size_t)t * n;
    const int step = 4 * blockDim.x * gridDim.y;
    for (int i = 4 * (blockIdx.y * blockDim.x + threadIdx.x); i < n; i += step) {
        const float4 v = load4_of_row(row, i, n), b = load4_of_row(bias, i, n);
        store4_of_row(row, i, n, make_float4(v.x + b.x, v.y + b.y, v.z + b.z, v.w + b.w));
    }
}

#define ADD_BIAS(NAME, Y, T)                                                                                     \
    extern "C" __global__ void __launch_bounds__(256) NAME(Y* y, const T* bias, const int* n_tokens, int n) {    \
        add_bias<Y, T>(y, bias, n_tokens, n);                                                                    \
    }
ADD_BIAS(add_bias_to_model_bf16, bf16, bf16)
ADD_BIAS(add_bias_to_model_f16, f16, f16)
ADD_BIAS(add_bias_to_model_f32, f32, f32)
ADD_BIAS(add_bias_to_f32_bf16, f32, bf16)
ADD_BIAS(add_bias_to_f32_f16, f32, f16)
ADD_BIAS(add_bias_to_f32_f32, f32, f32)
