// Steering: x[t, i] += v[i], where v is what is added to token t after n_layers layers; a token without stays as it is.
// x: f32 [n_tokens, n], the residual stream. places: u32 [n_tokens], where the table of what is added to a token begins, in
// words of memory, or NOWHERE. A table: u32 [layers of the model + 1], where the vector after so many layers begins, in words
// of memory from the table on, or 0 for none. A vector: f32 [n], as aligned as memory: 16 bytes.
// Grid (n_tokens_max, parts of a row), N_THREADS threads; four values a thread at a time. f32: one addition.
// Bytes: 12 * n for each token with a vector, and 4 for every token.
// Source: Turner et al., arXiv 2308.10248; Rimsky et al., arXiv 2312.06681.

struct SteerParams {
    float* x;
    const unsigned* places;
    const unsigned* memory;
    const int* n_tokens;
    int n;
    int n_layers;
};
static_assert(sizeof(SteerParams) == 40, "as in steer.rs");

extern "C" __global__ void __launch_bounds__(N_THREADS) steer(const __grid_constant__ SteerParams p) {
    const int t = blockIdx.x;
    if (t >= *p.n_tokens) return;
    const unsigned place = p.places[t];
    if (place == NOWHERE) return;
    const unsigned* table = p.memory + place;
    const unsigned start = table[p.n_layers];
    if (start == 0) return;
    const float* vector = (const float*)(table + start);
    float* row = p.x + (size_t)t * p.n;
    const int step = 4 * N_THREADS * gridDim.y;
    for (int i = 4 * (blockIdx.y * N_THREADS + threadIdx.x); i < p.n; i += step) {
        const float4 a = load4_of_row(row, i, p.n), b = load4_of_row(vector, i, p.n);
        store4_of_row(row, i, p.n, make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w));
    }
}
