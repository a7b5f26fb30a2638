// Contexts from which tokens were evicted, and nodes of trees of guesses, for attention_decode.cu: which cells of their pages
// are seen, and how queries are rotated for the keys in them. Positions of shares count cells there, and no layer has a window.
//   scores of a cell in stretch s: q rotated on by turn[s], as rope.cu rotates; q is rotated by its position already.
// The turned queries of a block lie in shared memory, for each stretch that its share meets: rounded to T as q is. Work:
// HEAD_DIM / 2 sines and cosines a stretch and block, over all threads. Bytes: a half word more for each page.
// Source: StreamingLLM (arXiv 2309.17453), section 3.2, with the query turned instead of the keys.

struct AttentionHolesParams {
    T* out;
    const T* q;
    const T* kv;
    const PageEntry* entries;
    const Share* shares;
    const int* n_workers;
    float* partial_acc;
    float2* partial_ml;
    unsigned* arrivals;
    int n_kv_heads;
    unsigned page_stride;
    int window;
    float scale_log2;
    const unsigned* holes;
    const float* inv_freq;
};
static_assert(sizeof(AttentionHolesParams) == 104, "as in attention_holes.rs");

constexpr int STRETCHES_MAX = ATTN_STRETCHES_MAX;

// As in attention_holes.rs; behind it half words: a bit for each cell of each of the pages from n_whole on.
struct Holes {
    int n_stretches;
    int n_whole;                    // first pages in which every cell is seen
    int n_pages;                    // with bits, behind those; in later ones every cell is seen
    int first_cell[STRETCHES_MAX];  // ascending; the first is 0
    int turn[STRETCHES_MAX];        // by how many positions a query is rotated on

    // The stretch of a cell.
    __device__ __forceinline__ int stretch_of(int cell) const {
        int idx = n_stretches - 1;
        while (idx > 0 && first_cell[idx] > cell) idx--;
        return idx;
    }
    __device__ __forceinline__ unsigned seen_in(int page_idx) const {
        const unsigned short* bits = (const unsigned short*)(this + 1);
        const int idx = page_idx - n_whole;
        return 0 <= idx && idx < n_pages ? bits[idx] : 0xffffu;
    }
};

// Those of a share's context: where they lie stands with each of its tokens.
__device__ __forceinline__ const Holes* holes_of(const AttentionHolesParams& p, const Share& share) {
    return (const Holes*)((const unsigned*)p.entries + p.holes[share.token]);
}

constexpr int HALF = HEAD_DIM / 2;

// What a block keeps of them while it works on a share.
template <int COLUMNS, int THREADS> struct alignas(16) Turned {
    T q[STRETCHES_MAX][COLUMNS][HEAD_DIM];
    Holes holes;

    // Turns the first `n` queries for the stretches that a share meets, by all threads.
    __device__ __forceinline__ void turn(const AttentionHolesParams& p, const Share& share, int kv_head, int first, int n) {
        const Holes* all = holes_of(p, share);
        constexpr int WORDS = sizeof(Holes) / 4;
        for (int i = threadIdx.x; i < WORDS; i += THREADS) ((int*)&holes)[i] = ((const int*)all)[i];
        __syncthreads();
        const int begin = holes.stretch_of(share.page_begin * PAGE_LEN), last = holes.stretch_of(end_position(share) - 1);
        for (int idx = threadIdx.x; idx < (last - begin + 1) * HALF; idx += THREADS) {
            const int stretch = begin + idx / HALF, i = idx % HALF;
            float sine, cosine;
            sincosf((float)holes.turn[stretch] * p.inv_freq[i], &sine, &cosine);
            for (int c = 0; c < n; c++) {
                const T* from = p.q + query_start(share.token, first + c, kv_head, p.n_kv_heads) + i;
                const float low = to_f32(from[0]), high = to_f32(from[HALF]);
                q[stretch][c][i] = from_f32<T>(low * cosine - high * sine);
                q[stretch][c][i + HALF] = from_f32<T>(high * cosine + low * sine);
            }
        }
        __syncthreads();
    }
};
