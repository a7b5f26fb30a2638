// Embedding: x[t, i] = table[tokens[t], i].
// table: T [vocab, hidden]; tokens: i32 [n_tokens]; x: f32 [n_tokens, hidden]. A negative token -1 - s stands for
// slots[s]: one that a step before this one drew, and that the host has not seen.
// The token is also noted beside its page, where kernels that look back at a context find it:
// page_tokens[cells[t]] = token; page_tokens: i32 [n_pages, PAGE_LEN], the cells of all pages one behind the other.
// Grid (n_tokens_max, parts of a row), N_THREADS threads; four values a thread at a time. Nothing is accumulated.
// Bytes: n_tokens * (hidden * (sizeof T + 4) + 4).

struct EmbedParams {
    const int* tokens;
    const int* n_tokens;
    const int* slots;
    const unsigned* cells;
    int* page_tokens;
    const T* table;
    float* x;
    int hidden;
    int unused;
};
static_assert(sizeof(EmbedParams) == 64, "as in embedding.rs");

extern "C" __global__ void __launch_bounds__(N_THREADS) embed(const __grid_constant__ EmbedParams p) {
    const int t = blockIdx.x;
    if (t >= *p.n_tokens) return;
    const int* __restrict__ tokens = p.tokens;
    const int* __restrict__ slots = p.slots;
    const int named = tokens[t];
    const int token = named >= 0 ? named : slots[-1 - named];
    if (blockIdx.y == 0 && threadIdx.x == 0) {
        p.page_tokens[p.cells[t]] = token;
    }
    const T* __restrict__ row = p.table + (size_t)token * p.hidden;
    float* __restrict__ out = p.x + (size_t)t * p.hidden;
    const int step = 4 * N_THREADS * gridDim.y;
    for (int i = 4 * (blockIdx.y * N_THREADS + threadIdx.x); i < p.hidden; i += step) {
        store4_of_row(out, i, p.hidden, load4_of_row(row, i, p.hidden));
    }
}
