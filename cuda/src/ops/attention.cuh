// What the attention kernels share, after common.cuh. The launchers define MODEL_T, ATTN_HEAD_DIM and ATTN_GROUP, so
// that a source holds the one model shape that it is compiled for, and what launcher and kernel both count with.

constexpr int HEAD_DIM = ATTN_HEAD_DIM; // a multiple of 8
constexpr int GROUP = ATTN_GROUP;       // query heads of a KV head
constexpr int PAGE_LEN = ATTN_PAGE_LEN; // positions
constexpr int SHARES_MAX = ATTN_SHARES_MAX; // of one tile
constexpr int HEAD_CHUNKS = HEAD_DIM * (int)sizeof(T) / 16; // 16-byte pieces of one position of one head
constexpr int HEAD_FOURS = HEAD_DIM / 4;                    // pieces of four values

// The keys of one page for one KV head; its values come n_kv_heads of these later (see attention.rs).
constexpr int HEAD_PAGE = PAGE_LEN * HEAD_DIM;

// Some pages of a context, for the queries of some of its tokens: a part of what one worker does. As in shares.rs.
struct alignas(16) Share {
    unsigned token;      // the first, among the step's
    unsigned position;   // of the first token
    unsigned entries;    // where the context's page table begins
    unsigned page_begin; // pages of the context
    unsigned page_end;
    unsigned next;  // the worker's next share; 0 after its last
    unsigned sizes; // tokens, shares of the tile: 16 bits each
    unsigned place; // which of them this is, the place of the tile's first partial result: 16 bits each

    __device__ __forceinline__ int n_tokens() const { return sizes & 0xffffu; }
    // With one, nothing has to be put together.
    __device__ __forceinline__ int n_shares() const { return sizes >> 16; }
    __device__ __forceinline__ int share_idx() const { return place & 0xffffu; }
    __device__ __forceinline__ int partial() const { return place >> 16; }
};
static_assert(sizeof(Share) == 32, "as in shares.rs");

// A page of a context, as its page table says it.
struct PageEntry {
    unsigned page;
};
static_assert(sizeof(PageEntry) == 4, "as in shares.rs");

__device__ __forceinline__ Share load_share(const Share* shares, unsigned idx) {
    const uint4 low = load16(shares + idx), high = load16((const char*)(shares + idx) + 16);
    return {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
}

// Positions of a share that any of its queries attends to: the first, and the end.
__device__ __forceinline__ int first_position(const Share& share, int window) {
    return max((int)(share.page_begin * PAGE_LEN), (int)share.position - window + 1);
}
__device__ __forceinline__ int end_position(const Share& share) {
    return min((int)(share.page_end * PAGE_LEN), (int)share.position + share.n_tokens());
}

// Query `query` of a tile: head query % GROUP of the group, of token query / GROUP. Where it lies in q and out.
__device__ __forceinline__ long long query_start(unsigned token, int query, int kv_head, int n_kv_heads) {
    return (((long long)token + query / GROUP) * n_kv_heads + kv_head) * (GROUP * HEAD_DIM) + query % GROUP * HEAD_DIM;
}

#define ATTN_NEG_INF __int_as_float(0xff800000)

__device__ __forceinline__ float exp2_fast(float x) { // 2 ulp; 0 for minus infinity
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// What is taken off scores whose maximum is m, so that weights are 0 and not NaN where no position counts.
__device__ __forceinline__ float shift_of(float m) { return m == ATTN_NEG_INF ? 0.f : m; }

// Two f32 to one register of T in one instruction, the first in the low half.
template <typename X> __device__ __forceinline__ unsigned pack2_fast(float low, float high);
template <> __device__ __forceinline__ unsigned pack2_fast<bf16>(float low, float high) {
    unsigned packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
template <> __device__ __forceinline__ unsigned pack2_fast<f16>(float low, float high) {
    unsigned packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

__device__ __forceinline__ const T* head_page(const T* kv_head, unsigned page, unsigned page_stride) {
    return kv_head + (unsigned long long)page * page_stride;
}

__device__ __forceinline__ void add_weighted(float4& sum, float weight, const float4& v) {
    sum.x += weight * v.x;
    sum.y += weight * v.y;
    sum.z += weight * v.z;
    sum.w += weight * v.w;
}
