// Edits: words of a step's memory go where they stay. edits[e] = (from, to, n, into): words from..from + n of memory go to
// words to..to + n of memory itself where into is 0, and of page_tokens where it is 1. No word is written twice, none both
// read and written.
// memory, page_tokens: 32-bit words; edits: u32 [n_edits, 4].
// Grid n_edits, N_THREADS threads. Bytes: 8 a word.

struct EditParams {
    unsigned* memory;
    unsigned* page_tokens;
    const uint4* edits;
};
static_assert(sizeof(EditParams) == 24, "as in edits.rs");

extern "C" __global__ void __launch_bounds__(N_THREADS) edit(const __grid_constant__ EditParams p) {
    const uint4 asked = p.edits[blockIdx.x];
    const unsigned from = asked.x, to = asked.y, n = asked.z;
    unsigned* into = asked.w == INTO_PAGE_TOKENS ? p.page_tokens : p.memory;
    for (unsigned i = threadIdx.x; i < n; i += N_THREADS) into[to + i] = p.memory[from + i];
}
