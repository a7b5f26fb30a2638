// Page copies: page pairs[j][1] = page pairs[j][0]. No page is written twice, and none is both read and written.
// kv: pages of page_len 16-byte words; page_tokens: i32 [n_pages, PAGE_LEN], their tokens; pairs: i32 [n_pairs, 2].
// Grid (parts of a page, n_pairs_max), N_THREADS threads; N_WORDS words under way in each thread.
// Bytes: 32 * n_pairs * page_len.

struct CopyPagesParams {
    uint4* kv;
    int* page_tokens;
    const int* pairs;
    const int* n_pairs;
    unsigned long long page_len;
};
static_assert(sizeof(CopyPagesParams) == 40, "as in pages.rs");

extern "C" __global__ void __launch_bounds__(N_THREADS) copy_pages(const __grid_constant__ CopyPagesParams p) {
    const int j = blockIdx.y;
    if (j >= *p.n_pairs) return;
    const size_t source = p.pairs[2 * j], target = p.pairs[2 * j + 1];
    if (blockIdx.x == 0 && threadIdx.x < PAGE_LEN) {
        p.page_tokens[target * PAGE_LEN + threadIdx.x] = p.page_tokens[source * PAGE_LEN + threadIdx.x];
    }
    const uint4* from = p.kv + source * p.page_len;
    uint4* to = p.kv + target * p.page_len;
    const size_t step = (size_t)gridDim.x * N_THREADS * N_WORDS;
    for (size_t start = (size_t)blockIdx.x * N_THREADS * N_WORDS + threadIdx.x; start < p.page_len; start += step) {
        uint4 words[N_WORDS];
#pragma unroll
        for (int k = 0; k < N_WORDS; k++) {
            if (start + N_THREADS * k < p.page_len) words[k] = load16_once(from + start + N_THREADS * k);
        }
#pragma unroll
        for (int k = 0; k < N_WORDS; k++) {
            if (start + N_THREADS * k < p.page_len) to[start + N_THREADS * k] = words[k];
        }
    }
}

// Copies of single cells: their keys and values in every layer and head. No cell is written twice, none both read and
// written. kv: pages of page_len 16-byte words, which are heads of PAGE_LEN cells of cell_len words each.
// moves: pairs of cells, from and to, counted from the first of page 0; they are few, and come with the launch.
// Grid (parts of a cell, n_moves), N_THREADS threads. Bytes: 2 * 16 * page_len / PAGE_LEN a move.

struct MoveCellsParams {
    uint4* kv;
    unsigned long long page_len;
    unsigned cell_len;
    unsigned n_moves;
    unsigned moves[960];
};
static_assert(sizeof(MoveCellsParams) == 3864, "as in pages.rs");

extern "C" __global__ void __launch_bounds__(N_THREADS) move_cells(const __grid_constant__ MoveCellsParams p) {
    if (blockIdx.y >= p.n_moves) return;
    const unsigned from = p.moves[2 * blockIdx.y], to = p.moves[2 * blockIdx.y + 1];
    const uint4* source = p.kv + (size_t)(from / PAGE_LEN) * p.page_len + from % PAGE_LEN * p.cell_len;
    uint4* target = p.kv + (size_t)(to / PAGE_LEN) * p.page_len + to % PAGE_LEN * p.cell_len;
    const unsigned n_words = (unsigned)(p.page_len / PAGE_LEN);
    for (unsigned i = blockIdx.x * N_THREADS + threadIdx.x; i < n_words; i += gridDim.x * N_THREADS) {
        const size_t word = (size_t)(i / p.cell_len) * PAGE_LEN * p.cell_len + i % p.cell_len;
        target[word] = load16_once(source + word);
    }
}
