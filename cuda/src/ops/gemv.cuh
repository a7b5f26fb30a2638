// What the products of a few rows share, after common.cuh. The launcher defines N_MAX (rows of X: the columns of an mma),
// N_WARPS and TILE (rows of W).

struct GemvParams {
    const void* x; // T, or with a norm f32 [n, n_in]
    const T* norm_weight; // [n_in]
    const T* w; // [1 or 2, n_out, n_in]
    const T* bias; // [1 or 2, n_out] or null
    void* y; // [n, n_out]
    int n;
    int n_out;
    int n_in;
    int x_stride; // values from one row of the normalised X in shared memory to the next
    float eps;
    int unused;
};
static_assert(sizeof(GemvParams) == 64, "as in gemv.rs");

enum Mode { TO_MODEL, TO_F32, ADD_F32, SWIGLU };

// `other`: the up product of SWIGLU, what Y holds for ADD_F32.
template <Mode MODE>
__device__ __forceinline__ void write(void* y, size_t idx, float sum, float other) {
    if (MODE == TO_MODEL) ((T*)y)[idx] = from_f32<T>(sum);
    if (MODE == TO_F32) ((float*)y)[idx] = sum;
    if (MODE == ADD_F32) ((float*)y)[idx] = other + sum;
    if (MODE == SWIGLU) ((T*)y)[idx] = from_f32<T>(silu(sum) * other);
}

// scales[j] = 1 / sqrt(mean(x[j]^2) + eps). `scratch`: n * N_WARPS floats.
__device__ __forceinline__ void rms_scales(const float* __restrict__ x, int n, int n_in, float eps, float* scratch,
                                           float* scales) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    float squares[N_MAX];
#pragma unroll
    for (int j = 0; j < N_MAX; j++) squares[j] = 0.f;
    for (int k = 4 * threadIdx.x; k < n_in; k += 4 * 32 * N_WARPS) {
#pragma unroll
        for (int j = 0; j < N_MAX; j++) {
            if (j < n) {
                const float4 v = load4(x + wide(j, n_in) + k);
                squares[j] += (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < N_MAX; j++) {
        if (j < n) {
            const float sum = warp_sum(squares[j]);
            if (lane == 0) scratch[j * N_WARPS + warp] = sum;
        }
    }
    __syncthreads();
    if (warp < n) {
        const float sum = warp_sum(lane < N_WARPS ? scratch[warp * N_WARPS + lane] : 0.f);
        if (lane == 0) scales[warp] = rms_scale(sum, n_in, eps);
    }
    __syncthreads();
}

#define GEMV(NAME, MODE, NORM)                                                                                   \
    extern "C" __global__ void __launch_bounds__(32 * N_WARPS, 1) NAME(const __grid_constant__ GemvParams p) {     \
        gemv<MODE, NORM>(p);                                                                                     \
    }
// The forms are compiled in two halves, side by side: together they would be what a first start waits for longest.
#if WITH_NORM
#define GEMV_FORMS                                                                                               \
    GEMV(gemv_norm_to_model, TO_MODEL, true)                                                                     \
    GEMV(gemv_norm_to_f32, TO_F32, true)                                                                         \
    GEMV(gemv_norm_swiglu, SWIGLU, true)
#else
#define GEMV_FORMS                                                                                               \
    GEMV(gemv_to_model, TO_MODEL, false)                                                                         \
    GEMV(gemv_to_f32, TO_F32, false)                                                                             \
    GEMV(gemv_add_f32, ADD_F32, false)                                                                           \
    GEMV(gemv_swiglu, SWIGLU, false)
#endif
