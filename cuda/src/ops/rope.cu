// Splits a fused projection into heads, turns Q and K by their position, and writes K and V into their pages:
//   h = qkv[t, head] + bias[head]; Q and K heads: h = norm[i] * h / sqrt(mean(h^2) + eps), where there is a norm;
//   out[i] = h[i] cos a_i - h[i + half] sin a_i, out[i + half] = h[i + half] cos a_i + h[i] sin a_i,
//   half = head_dim / 2, a_i = position * inv_freq[i].
// qkv: In (T or f32) [n_tokens, n_heads + 2 n_kv_heads, head_dim]; bias: T, a token's shape, or null;
// q_norm, k_norm: T [head_dim] or null; inv_freq: f32 [half]; positions, kv_page: i32 [n_tokens];
// q: T [n_tokens, n_heads, head_dim]; kv: T, pages of [n_layers][K, V][n_kv_heads][16][head_dim].
// Grid (n_tokens_max, shares of the heads), 256 threads: a warp for each head, two pairs a lane and turn. f32.
// Shared memory: cosines and sines, 8 half bytes. sincosf is the exact one: angles reach 10^5.
// Bytes a token: (n_heads + 2 n_kv_heads) * head_dim * (sizeof In + sizeof T).
// Source: Su et al. 2021, arXiv:2104.09864; apply_rotary_pos_emb of transformers.

constexpr int PAGE_LEN = 16;

// Two values at `i` of a row of `n`, zeros past its end; rows of odd length are not aligned.
template <typename T> __device__ __forceinline__ float2 load2_of_row(const T* row, int i, int n) {
    if ((n & 1) == 0) return unpack2<T>(*(const unsigned*)(row + i));
    return make_float2(to_f32(row[i]), i + 1 < n ? to_f32(row[i + 1]) : 0.f);
}
template <> __device__ __forceinline__ float2 load2_of_row<f32>(const f32* row, int i, int n) {
    if ((n & 1) == 0) return *(const float2*)(row + i);
    return make_float2(row[i], i + 1 < n ? row[i + 1] : 0.f);
}

template <typename T> __device__ __forceinline__ void store2_of_row(T* row, int i, int n, float2 v) {
    if ((n & 1) == 0) {
        *(unsigned*)(row + i) = pack2<T>(v.x, v.y);
        return;
    }
    row[i] = from_f32<T>(v.x);
    if (i + 1 < n) row[i + 1] = from_f32<T>(v.y);
}
template <> __device__ __forceinline__ void store2_of_row<f32>(f32* row, int i, int n, float2 v) {
    row[i] = v.x;
    if (i + 1 < n) row[i + 1] = v.y;
}

// `part` of the head (its lower or upper half, `half` long), with the bias.
template <typename In, typename T>
__device__ __forceinline__ float2 read2(const In* part, const T* bias, int i, int half) {
    float2 v = load2_of_row(part, i, half);
    if (bias) {
        const float2 b = load2_of_row(bias, i, half);
        v.x += b.x;
        v.y += b.y;
    }
    return v;
}

template <typename In, typename T>
__device__ __forceinline__ void rope(const In* __restrict__ qkv, const T* __restrict__ bias,
                                     const T* __restrict__ q_norm, const T* __restrict__ k_norm,
                                     const float* __restrict__ inv_freq, const int* __restrict__ positions,
                                     const int* __restrict__ kv_page, const int* n_tokens, T* __restrict__ q,
                                     T* __restrict__ kv, unsigned long long page_stride, int layer, int n_heads,
                                     int n_kv_heads, int head_dim, float eps) {
    extern __shared__ float2 turns[]; // [half]: cosine and sine
    const int t = blockIdx.x;
    if (t >= *n_tokens) return;
    const int half = head_dim / 2;
    const int position = positions[t];
    for (int i = threadIdx.x; i < half; i += blockDim.x) {
        float sine, cosine;
        sincosf((float)position * inv_freq[i], &sine, &cosine);
        turns[i] = make_float2(cosine, sine);
    }
    __syncthreads();

    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, n_warps = blockDim.x >> 5;
    const int n_all_heads = n_heads + 2 * n_kv_heads;
    const In* token = qkv + (size_t)t * n_all_heads * head_dim;
    T* token_q = q + (size_t)t * n_heads * head_dim;
    // Within a layer of a page, the V heads follow the K heads as they do in the projection.
    T* token_kv = kv + (size_t)kv_page[t] * page_stride +
                  (size_t)layer * 2 * n_kv_heads * PAGE_LEN * head_dim + (size_t)(position % PAGE_LEN) * head_dim;
    for (int head = blockIdx.y * n_warps + warp; head < n_all_heads; head += gridDim.y * n_warps) {
        const In* low = token + (size_t)head * head_dim;
        const In* high = low + half;
        const T* low_bias = bias ? bias + (size_t)head * head_dim : nullptr;
        const T* high_bias = bias ? low_bias + half : nullptr;
        T* out = head < n_heads ? token_q + (size_t)head * head_dim
                                : token_kv + (size_t)(head - n_heads) * PAGE_LEN * head_dim;
        const bool is_v = head >= n_heads + n_kv_heads;
        const T* weight = is_v ? nullptr : head < n_heads ? q_norm : k_norm;

        float scale = 1.f;
        if (weight) {
            float squares = 0.f;
            for (int i = 2 * lane; i < half; i += 64) {
                const float2 a = read2(low, low_bias, i, half), b = read2(high, high_bias, i, half);
                squares += (a.x * a.x + a.y * a.y) + (b.x * b.x + b.y * b.y);
            }
            scale = rsqrtf(warp_sum(squares) / head_dim + eps);
        }
        for (int i = 2 * lane; i < half; i += 64) {
            float2 a = read2(low, low_bias, i, half), b = read2(high, high_bias, i, half);
            if (weight) {
                const float2 wa = load2_of_row(weight, i, half), wb = load2_of_row(weight + half, i, half);
                a = make_float2(wa.x * (a.x * scale), wa.y * (a.y * scale));
                b = make_float2(wb.x * (b.x * scale), wb.y * (b.y * scale));
            }
            if (!is_v) {
                const float2 first = turns[i], second = i + 1 < half ? turns[i + 1] : make_float2(1.f, 0.f);
                const float2 low_in = a;
                a = make_float2(a.x * first.x - b.x * first.y, a.y * second.x - b.y * second.y);
                b = make_float2(b.x * first.x + low_in.x * first.y, b.y * second.x + low_in.y * second.y);
            }
            store2_of_row(out, i, half, a);
            store2_of_row(out + half, i, half, b);
        }
    }
}

#define ROPE(NAME, In, T)                                                                                        \
    extern "C" __global__ void __launch_bounds__(256)                                                            \
        NAME(const In* qkv, const T* bias, const T* q_norm, const T* k_norm, const float* inv_freq,              \
             const int* positions, const int* kv_page, const int* n_tokens, T* q, T* kv,                         \
             unsigned long long page_stride, int layer, int n_heads, int n_kv_heads, int head_dim, float eps) {  \
        rope<In, T>(qkv, bias, q_norm, k_norm, inv_freq, positions, kv_page, n_tokens, q, kv, page_stride,       \
                    layer, n_heads, n_kv_heads, head_dim, eps);                                                  \
    }
ROPE(rope_from_model_bf16, bf16, bf16)
ROPE(rope_from_model_f16, f16, f16)
ROPE(rope_from_model_f32, f32, f32)
ROPE(rope_from_f32_bf16, f32, bf16)
ROPE(rope_from_f32_f16, f32, f16)
ROPE(rope_from_f32_f32, f32, f32)
