// Page copies: page pairs[j][1] = page pairs[j][0]. No page is written twice, and none is both read and written.
// kv: pages of page_len 16-byte words; pairs: i32 [n_pairs, 2].
// Grid (parts of a page, n_pairs_max), 256 threads; four words under way in each thread.
// Bytes: 2 * n_pairs * page bytes.

constexpr int N_WORDS = 4;

extern "C" __global__ void __launch_bounds__(256)
    copy_pages(unsigned char* kv, const int* pairs, const int* n_pairs, unsigned long long page_len) {
    const int j = blockIdx.y;
    if (j >= *n_pairs) return;
    const uint4* from = (const uint4*)kv + (size_t)pairs[2 * j] * page_len;
    uint4* to = (uint4*)kv + (size_t)pairs[2 * j + 1] * page_len;
    const size_t step = (size_t)gridDim.x * 256 * N_WORDS;
    for (size_t start = (size_t)blockIdx.x * 256 * N_WORDS + threadIdx.x; start < page_len; start += step) {
        uint4 words[N_WORDS];
#pragma unroll
        for (int k = 0; k < N_WORDS; k++) {
            if (start + 256 * k < page_len) words[k] = load16_once(from + start + 256 * k);
        }
#pragma unroll
        for (int k = 0; k < N_WORDS; k++) {
            if (start + 256 * k < page_len) to[start + 256 * k] = words[k];
        }
    }
}
