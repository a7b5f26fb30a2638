// RMSNorm:   y[r, i] = weight[i] * x[r, i] / sqrt(mean(x[r]^2) + eps)
// LayerNorm: y[r, i] = weight[i] * (x[r, i] - mean(x[r])) / sqrt(var(x[r]) + eps) + bias[i], biased variance
// The forms with a residual add first do x[r, i] += delta[r, i] + delta_bias[i].
// x: f32 [n_rows, hidden]; weight, bias, delta_bias: T [hidden], the biases may be null; y: T [n_rows, hidden];
// delta: T or f32 [n_rows, hidden].
// Grid n_rows_max; a block holds a row in registers: hidden <= 16 * threads. f32 sums; the variance is taken about
// the mean in a second pass over the registers, so that a large mean costs no digits.
// Bytes a row: hidden * (4 + sizeof T), with the add hidden * (8 + sizeof delta + sizeof T).
// Source: Zhang and Sennrich 2019, arXiv:1910.07467; Ba et al. 2016, arXiv:1607.06450; LlamaRMSNorm of
// transformers.

constexpr int N_KEPT = 4; // groups of four values that a thread holds

enum NormKind { RMS, LAYER };
enum DeltaKind { NO_DELTA, DELTA };

__device__ __forceinline__ void add_to(float4& a, float4 b) {
    a.x += b.x;
    a.y += b.y;
    a.z += b.z;
    a.w += b.w;
}

template <NormKind KIND, DeltaKind ADD, typename T, typename D>
__device__ __forceinline__ void norm(float* __restrict__ x, const D* __restrict__ delta,
                                     const T* __restrict__ delta_bias, const T* __restrict__ weight,
                                     const T* __restrict__ bias, T* __restrict__ y, const int* n_rows, int hidden,
                                     float eps) {
    __shared__ float scratch[32];
    const int r = blockIdx.x;
    if (r >= *n_rows) return;
    const size_t start = (size_t)r * hidden;
    float4 v[N_KEPT];
#pragma unroll
    for (int j = 0; j < N_KEPT; j++) {
        v[j] = load4_of_row(x + start, 4 * (j * (int)blockDim.x + (int)threadIdx.x), hidden);
    }
    if (ADD == DELTA) {
#pragma unroll
        for (int j = 0; j < N_KEPT; j++) {
            const int i = 4 * (j * (int)blockDim.x + (int)threadIdx.x);
            add_to(v[j], load4_of_row(delta + start, i, hidden));
            if (delta_bias) add_to(v[j], load4_of_row(delta_bias, i, hidden));
        }
#pragma unroll
        for (int j = 0; j < N_KEPT; j++) {
            store4_of_row(x + start, 4 * (j * (int)blockDim.x + (int)threadIdx.x), hidden, v[j]);
        }
    }

    float mean = 0.f;
    if (KIND == LAYER) {
        float sum = 0.f;
#pragma unroll
        for (int j = 0; j < N_KEPT; j++) sum += (v[j].x + v[j].y) + (v[j].z + v[j].w);
        mean = block_sum(sum, scratch) / hidden;
#pragma unroll
        for (int j = 0; j < N_KEPT; j++) {
            const int i = 4 * (j * (int)blockDim.x + (int)threadIdx.x);
            // What lies past the row stays zero, and out of the variance.
            v[j].x = i + 0 < hidden ? v[j].x - mean : 0.f;
            v[j].y = i + 1 < hidden ? v[j].y - mean : 0.f;
            v[j].z = i + 2 < hidden ? v[j].z - mean : 0.f;
            v[j].w = i + 3 < hidden ? v[j].w - mean : 0.f;
        }
    }
    float squares = 0.f;
#pragma unroll
    for (int j = 0; j < N_KEPT; j++) {
        squares += (v[j].x * v[j].x + v[j].y * v[j].y) + (v[j].z * v[j].z + v[j].w * v[j].w);
    }
    const float scale = rsqrtf(block_sum(squares, scratch) / hidden + eps);

#pragma unroll
    for (int j = 0; j < N_KEPT; j++) {
        const int i = 4 * (j * (int)blockDim.x + (int)threadIdx.x);
        if (i >= hidden) break;
        const float4 w = load4_of_row(weight, i, hidden);
        float4 out = make_float4(w.x * (v[j].x * scale), w.y * (v[j].y * scale), w.z * (v[j].z * scale),
                                 w.w * (v[j].w * scale));
        if (KIND == LAYER && bias) add_to(out, load4_of_row(bias, i, hidden));
        store4_of_row(y + start, i, hidden, out);
    }
}

#define NORM(NAME, KIND, ADD, T, D)                                                                              \
    extern "C" __global__ void __launch_bounds__(1024)                                                           \
        NAME(float* x, const D* delta, const T* delta_bias, const T* weight, const T* bias, T* y,                \
             const int* n_rows, int hidden, float eps) {                                                         \
        norm<KIND, ADD, T, D>(x, delta, delta_bias, weight, bias, y, n_rows, hidden, eps);                       \
    }
#define NORMS(T)                                                                                                 \
    NORM(rms_norm_##T, RMS, NO_DELTA, T, T)                                                                      \
    NORM(rms_norm_add_model_##T, RMS, DELTA, T, T)                                                               \
    NORM(rms_norm_add_f32_##T, RMS, DELTA, T, f32)                                                               \
    NORM(layer_norm_##T, LAYER, NO_DELTA, T, T)                                                                  \
    NORM(layer_norm_add_model_##T, LAYER, DELTA, T, T)                                                           \
    NORM(layer_norm_add_f32_##T, LAYER, DELTA, T, f32)
NORMS(bf16)
NORMS(f16)
NORMS(f32)
