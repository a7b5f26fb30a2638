// Embedding: x[t, i] = table[tokens[t], i].
// table: T [vocab, hidden]; tokens: i32 [n_tokens]; x: f32 [n_tokens, hidden]. A negative token -1 - s stands for
// slots[s]: one that a step before this one drew, and that the host has not seen.
// Grid (n_tokens_max, parts of a row), 256 threads; four values a thread and turn. Nothing is accumulated.
// Bytes: n_tokens * hidden * (sizeof T + 4).

template <typename T>
__device__ __forceinline__ void embed(const int* __restrict__ tokens, const int* n_tokens,
                                      const int* __restrict__ slots, const T* __restrict__ table, float* __restrict__ x, int hidden) {
    const int t = blockIdx.x;
    if (t >= *n_tokens) return;
    const int named = tokens[t];
    const int token = named >= 0 ? named : slots[-1 - named];
    const T* row = table + (size_t)token * hidden;
    float* out = x + (size_t)t * hidden;
    const int step = 4 * blockDim.x * gridDim.y;
    for (int i = 4 * (blockIdx.y * blockDim.x + threadIdx.x); i < hidden; i += step) {
        store4_of_row(out, i, hidden, load4_of_row(row, i, hidden));
    }
}

#define EMBED(T)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(256)                                                            \
        embed_##T(const int* tokens, const int* n_tokens, const int* slots, const T* table, float* x,            \
                  int hidden) {                                                                                  \
        embed<T>(tokens, n_tokens, slots, table, x, hidden);                                                     \
    }

EMBED(bf16)
EMBED(f16)
EMBED(f32)
