// What kernels share: number types, 16-byte accesses, reductions, asynchronous copies, one tensor core shape.
// The launchers put this text in front of a kernel's own; NVRTC sees one file.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef __nv_bfloat16 bf16;
typedef __half f16;
typedef float f32;

// ---- number types: everything is computed in f32 ----

__device__ __forceinline__ float to_f32(float x) { return x; }
__device__ __forceinline__ float to_f32(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_f32(f16 x) { return __half2float(x); }

template <typename T> __device__ __forceinline__ T from_f32(float x);
template <> __device__ __forceinline__ float from_f32<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 from_f32<bf16>(float x) { return __float2bfloat16_rn(x); }
template <> __device__ __forceinline__ f16 from_f32<f16>(float x) { return __float2half_rn(x); }

// Two values of T in one register, the first in the low half.
template <typename T> __device__ __forceinline__ float2 unpack2(unsigned raw);
template <> __device__ __forceinline__ float2 unpack2<bf16>(unsigned raw) {
    return make_float2(__uint_as_float(raw << 16), __uint_as_float(raw & 0xffff0000u));
}
template <> __device__ __forceinline__ float2 unpack2<f16>(unsigned raw) {
    return make_float2(__half2float(__ushort_as_half((unsigned short)(raw & 0xffffu))),
                       __half2float(__ushort_as_half((unsigned short)(raw >> 16))));
}

template <typename T> __device__ __forceinline__ unsigned pack2(float low, float high);
template <> __device__ __forceinline__ unsigned pack2<bf16>(float low, float high) {
    return (unsigned)__bfloat16_as_ushort(__float2bfloat16_rn(low)) |
           ((unsigned)__bfloat16_as_ushort(__float2bfloat16_rn(high)) << 16);
}
template <> __device__ __forceinline__ unsigned pack2<f16>(float low, float high) {
    return (unsigned)__half_as_ushort(__float2half_rn(low)) |
           ((unsigned)__half_as_ushort(__float2half_rn(high)) << 16);
}

// ---- places in rows ----

// a * b in 64 bits. Written as an instruction of its own: lengths out of a kernel's parameters are widened early by the
// compiler, and a product of 64-bit numbers takes four.
__device__ __forceinline__ size_t wide(int a, int b) {
    size_t product;
    asm("mul.wide.s32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
    return product;
}

// ---- vectors: addresses are aligned to the width of the access ----

__device__ __forceinline__ uint4 load16(const void* address) { return *(const uint4*)address; }
__device__ __forceinline__ void store16(void* address, uint4 value) { *(uint4*)address = value; }

// For data read once: it does not displace what L1 holds.
__device__ __forceinline__ uint4 load16_once(const void* address) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address));
    return v;
}

// Values of T in 16 bytes.
template <typename T> struct Lanes {
    static constexpr int N = 16 / sizeof(T);
};

template <typename T> __device__ __forceinline__ void unpack16(uint4 raw, float* out) { // out[Lanes<T>::N]
    const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 pair = unpack2<T>(words[i]);
        out[2 * i] = pair.x;
        out[2 * i + 1] = pair.y;
    }
}
template <> __device__ __forceinline__ void unpack16<float>(uint4 raw, float* out) {
    out[0] = __uint_as_float(raw.x);
    out[1] = __uint_as_float(raw.y);
    out[2] = __uint_as_float(raw.z);
    out[3] = __uint_as_float(raw.w);
}

template <typename T> __device__ __forceinline__ uint4 pack16(const float* in) { // in[Lanes<T>::N]
    return make_uint4(pack2<T>(in[0], in[1]), pack2<T>(in[2], in[3]), pack2<T>(in[4], in[5]),
                      pack2<T>(in[6], in[7]));
}
template <> __device__ __forceinline__ uint4 pack16<float>(const float* in) {
    return make_uint4(__float_as_uint(in[0]), __float_as_uint(in[1]), __float_as_uint(in[2]),
                      __float_as_uint(in[3]));
}

// Four values of T, as f32: 16 bytes of float, 8 of the others.
template <typename T> __device__ __forceinline__ float4 load4(const T* address) {
    const uint2 raw = *(const uint2*)address;
    const float2 low = unpack2<T>(raw.x), high = unpack2<T>(raw.y);
    return make_float4(low.x, low.y, high.x, high.y);
}
template <> __device__ __forceinline__ float4 load4<float>(const float* address) {
    return *(const float4*)address;
}

template <typename T> __device__ __forceinline__ void store4(T* address, float4 v) {
    *(uint2*)address = make_uint2(pack2<T>(v.x, v.y), pack2<T>(v.z, v.w));
}
template <> __device__ __forceinline__ void store4<float>(float* address, float4 v) { *(float4*)address = v; }

// Four values at `start` of a row of `n`, zeros past its end. Rows of a length that four does not divide are not
// aligned, and are read one by one.
template <typename T> __device__ __forceinline__ float4 load4_of_row(const T* row, int start, int n) {
    if ((n & 3) == 0) return start < n ? load4(row + start) : make_float4(0.f, 0.f, 0.f, 0.f);
    float4 v;
    v.x = start + 0 < n ? to_f32(row[start + 0]) : 0.f;
    v.y = start + 1 < n ? to_f32(row[start + 1]) : 0.f;
    v.z = start + 2 < n ? to_f32(row[start + 2]) : 0.f;
    v.w = start + 3 < n ? to_f32(row[start + 3]) : 0.f;
    return v;
}

template <typename T> __device__ __forceinline__ void store4_of_row(T* row, int start, int n, float4 v) {
    if ((n & 3) == 0) {
        if (start < n) store4(row + start, v);
        return;
    }
    if (start + 0 < n) row[start + 0] = from_f32<T>(v.x);
    if (start + 1 < n) row[start + 1] = from_f32<T>(v.y);
    if (start + 2 < n) row[start + 2] = from_f32<T>(v.z);
    if (start + 3 < n) row[start + 3] = from_f32<T>(v.w);
}

// ---- reductions: the same bits in every thread, in a fixed order ----

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(LANES_ALL, x, offset);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) x = fmaxf(x, __shfl_xor_sync(LANES_ALL, x, offset));
    return x;
}

// `scratch` is 32 floats of shared memory; blockDim.x is a multiple of 32, and every thread takes part.
__device__ __forceinline__ float block_sum(float x, float* scratch) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, n_warps = blockDim.x >> 5;
    x = warp_sum(x);
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    x = warp_sum(lane < n_warps ? scratch[lane] : 0.f);
    __syncthreads(); // before the next use of scratch
    return x;
}

// ---- functions ----

// What a norm scales a row of n numbers by, from the sum of their squares. Not a number where that overflows: scaled by 0,
// such a row would look like one that says nothing about any token.
__device__ __forceinline__ float rms_scale(float squares, int n, float eps) {
    return squares - squares == 0.f ? rsqrtf(squares / n + eps) : squares - squares;
}

__device__ __forceinline__ float silu(float x) { return x / (1.f + expf(-x)); }

// ---- asynchronous copies to shared memory (sm_80) ----

// 16 bytes; zeros instead when `n_bytes` is 0, which reads nothing (the address still has to be one).
__device__ __forceinline__ void cp_async16(void* shared, const void* global, int n_bytes) {
    const unsigned address = (unsigned)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(n_bytes)
                 : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most N of this thread's latest groups are under way.
template <int N> __device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// ---- tensor cores (sm_80): d[16, 8] += a[16, 16] b[16, 8], f32 accumulation ----
// With g = lane / 4 and t = lane % 4: a = {rows g and g + 8 of columns 2t, 2t + 1; the same of columns 2t + 8,
// 2t + 9}, b = {rows 2t, 2t + 1; rows 2t + 8, 2t + 9} of column g, d = {row g, columns 2t, 2t + 1; row g + 8}.
// Source: PTX ISA, "Matrix fragments for mma.m16n8k16".

template <typename T>
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                            unsigned b0, unsigned b1);
template <>
__device__ __forceinline__ void mma_16x8x16<bf16>(float (&d)[4], unsigned a0, unsigned a1, unsigned a2,
                                                  unsigned a3, unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                 "{%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_16x8x16<f16>(float (&d)[4], unsigned a0, unsigned a1, unsigned a2,
                                                 unsigned a3, unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                 "{%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// ---- the type of the model that the source is compiled for ----

#ifdef MODEL_T
typedef MODEL_T T;
#endif
