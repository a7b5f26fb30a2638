// Splits a fused projection into heads, rotates Q and K by their position, and writes K and V into their pages:
//   h = qkv[t, head] + bias[head]; Q and K heads: h = norm[i] * h / sqrt(mean(h^2) + eps), where there is a norm;
//   out[i] = h[i] cos a_i - h[i + half] sin a_i, out[i + half] = h[i + half] cos a_i + h[i] sin a_i,
//   half = head_dim / 2, a_i = position * inv_freq[i].
// qkv: T [n_tokens, n_heads + 2 n_kv_heads, head_dim]; bias: T, a token's shape, or null;
// q_norm, k_norm: T [head_dim] or null; inv_freq: f32 [half]; positions: i32 [n_tokens]; kv_cells: u32 [n_tokens], the cell
// that takes a token, counted from the first of page 0;
// q: T [n_tokens, n_heads, head_dim]; kv: T, pages of [n_layers][K, V][n_kv_heads][PAGE_LEN][head_dim].
// Grid (n_tokens_max, shares of the heads), N_WARPS warps: one for each head, two pairs a lane at a time. f32.
// Shared memory: cosines and sines, 8 half bytes. sincosf is the exact one: angles reach 10^5.
// Bytes a token: 2 * (n_heads + 2 n_kv_heads) * head_dim * sizeof T.
// Source: Su et al. 2021, arXiv:2104.09864; apply_rotary_pos_emb of transformers.

struct RopeParams {
    const T* qkv;
    const T* bias;
    const T* q_norm;
    const T* k_norm;
    const float* inv_freq;
    const int* positions;
    const unsigned* kv_cells;
    const int* n_tokens;
    T* q;
    T* kv;
    unsigned long long page_stride;
    int layer;
    int n_heads;
    int n_kv_heads;
    int head_dim;
    float eps;
    int unused;
};
static_assert(sizeof(RopeParams) == 112, "as in rope.rs");

// Two values at `i` of a row of `n`, zeros past its end; rows of odd length are not aligned.
template <typename X> __device__ __forceinline__ float2 load2_of_row(const X* row, int i, int n) {
    if ((n & 1) == 0) return unpack2<X>(*(const unsigned*)(row + i));
    return make_float2(to_f32(row[i]), i + 1 < n ? to_f32(row[i + 1]) : 0.f);
}
template <> __device__ __forceinline__ float2 load2_of_row<f32>(const f32* row, int i, int n) {
    if ((n & 1) == 0) return *(const float2*)(row + i);
    return make_float2(row[i], i + 1 < n ? row[i + 1] : 0.f);
}

template <typename X> __device__ __forceinline__ void store2_of_row(X* row, int i, int n, float2 v) {
    if ((n & 1) == 0) {
        *(unsigned*)(row + i) = pack2<X>(v.x, v.y);
        return;
    }
    row[i] = from_f32<X>(v.x);
    if (i + 1 < n) row[i + 1] = from_f32<X>(v.y);
}
template <> __device__ __forceinline__ void store2_of_row<f32>(f32* row, int i, int n, float2 v) {
    row[i] = v.x;
    if (i + 1 < n) row[i + 1] = v.y;
}

// `part` of the head (its lower or upper half, `half` long), with the bias.
__device__ __forceinline__ float2 read2(const T* part, const T* bias, int i, int half) {
    float2 v = load2_of_row(part, i, half);
    if (bias) {
        const float2 b = load2_of_row(bias, i, half);
        v.x += b.x;
        v.y += b.y;
    }
    return v;
}

extern "C" __global__ void __launch_bounds__(32 * N_WARPS) rope(const __grid_constant__ RopeParams p) {
    const T* __restrict__ bias = p.bias;
    const float* __restrict__ inv_freq = p.inv_freq;
    const int n_heads = p.n_heads, n_kv_heads = p.n_kv_heads, head_dim = p.head_dim, half = head_dim / 2;
    extern __shared__ float2 rotations[]; // [half]: cosine and sine
    const int t = blockIdx.x;
    if (t >= *p.n_tokens) return;
    const int position = p.positions[t];
    for (int i = threadIdx.x; i < half; i += 32 * N_WARPS) {
        float sine, cosine;
        sincosf((float)position * inv_freq[i], &sine, &cosine);
        rotations[i] = make_float2(cosine, sine);
    }
    __syncthreads();

    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int n_all_heads = n_heads + 2 * n_kv_heads;
    const T* __restrict__ token = p.qkv + wide(t, n_all_heads * head_dim);
    T* __restrict__ token_q = p.q + wide(t, n_heads * head_dim);
    // Within a layer of a page, the V heads follow the K heads as they do in the projection.
    const unsigned cell = p.kv_cells[t];
    T* __restrict__ token_kv = p.kv + (size_t)(cell / PAGE_LEN) * p.page_stride +
                               (size_t)p.layer * 2 * n_kv_heads * PAGE_LEN * head_dim +
                               (size_t)(cell % PAGE_LEN) * head_dim;
    for (int head = blockIdx.y * N_WARPS + warp; head < n_all_heads; head += gridDim.y * N_WARPS) {
        const T* low = token + head * head_dim;
        const T* high = low + half;
        const T* low_bias = bias ? bias + head * head_dim : nullptr;
        const T* high_bias = bias ? low_bias + half : nullptr;
        T* out = head < n_heads ? token_q + head * head_dim
                                : token_kv + (size_t)(head - n_heads) * PAGE_LEN * head_dim;
        const bool is_v = head >= n_heads + n_kv_heads;
        const T* weight = is_v ? nullptr : head < n_heads ? p.q_norm : p.k_norm;

        float scale = 1.f;
        if (weight) {
            float squares = 0.f;
            for (int i = 2 * lane; i < half; i += 64) {
                const float2 a = read2(low, low_bias, i, half), b = read2(high, high_bias, i, half);
                squares += (a.x * a.x + a.y * a.y) + (b.x * b.x + b.y * b.y);
            }
            scale = rms_scale(warp_sum(squares), head_dim, p.eps);
        }
        for (int i = 2 * lane; i < half; i += 64) {
            float2 a = read2(low, low_bias, i, half), b = read2(high, high_bias, i, half);
            if (weight) {
                const float2 wa = load2_of_row(weight, i, half), wb = load2_of_row(weight + half, i, half);
                a = make_float2(wa.x * (a.x * scale), wa.y * (a.y * scale));
                b = make_float2(wb.x * (b.x * scale), wb.y * (b.y * scale));
            }
            if (!is_v) {
                const float2 first = rotations[i], second = i + 1 < half ? rotations[i + 1] : make_float2(1.f, 0.f);
                const float2 low_in = a;
                a = make_float2(a.x * first.x - b.x * first.y, a.y * second.x - b.y * second.y);
                b = make_float2(b.x * first.x + low_in.x * first.y, b.y * second.x + low_in.y * second.y);
            }
            store2_of_row(out, i, half, a);
            store2_of_row(out + half, i, half, b);
        }
    }
}
