// What the attention kernels share, after common.cuh. The launcher defines ATTN_HEAD_DIM and ATTN_T in front, so
// that a source holds the one model shape that it is compiled for.

typedef ATTN_T T;

constexpr int HEAD_DIM = ATTN_HEAD_DIM; // a multiple of 8
constexpr int PAGE_LEN = 16;            // positions
constexpr int HEAD_CHUNKS = HEAD_DIM * (int)sizeof(T) / 16; // 16-byte pieces of one position of one head
constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;

// The keys of one page for one KV head; its values come n_kv_heads of these later (see attention.rs).
constexpr int HEAD_PAGE = PAGE_LEN * HEAD_DIM;

#define ATTN_NEG_INF __int_as_float(0xff800000)

__device__ __forceinline__ float exp2_fast(float x) { // 2 ulp; 0 for minus infinity
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

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

__device__ __forceinline__ const T* head_page(const T* kv_head, int page, unsigned page_stride) {
    return kv_head + (unsigned long long)(unsigned)page * page_stride;
}
