// Products of a few rows with a matrix: Y[n, n_out] = X[n, n_in] W[n_out, n_in]^T + bias[n_out], n <= 8.
//   TO_MODEL: Y of type T. TO_F32: Y of type f32. ADD_F32: Y += the product, f32.
//   SWIGLU: W [2 n_out, n_in], gate rows then up rows; Y = silu(gate) * up, of type T.
// X: T [n, n_in]; or, with NORM, the f32 residual [n, n_in], of which every block takes the RMSNorm with
// norm_weight T [n_in] and eps, rounded to T as the norm kernel does.
// Bytes: W, once. The rest is small and comes from L2.
//
// One block of 16 warps for each multiprocessor walks over tiles of 16 rows of W. The warps share the n_in of a
// tile, in steps of 32 values; their partial sums meet in shared memory, in a fixed order. 16-bit types go through
// tensor cores (f32 accumulation), because at n > 4 conversions and FMAs alone would take longer than the bytes. A
// lane keeps its own ring of asynchronous copies, which needs no barrier, runs on over the end of a tile, and is
// filled before the norm is computed.
//
// A step of a warp is W[16 rows, 32]: lane (g = lane / 4, t = lane % 4) copies the 8 values from column 8 t of rows
// g and g + 8. A dot product does not care for the order of its terms, so the values 0..3 and 4..7 of each lane
// serve as the columns {2t, 2t + 1, 2t + 8, 2t + 9} of two products 16x8x16, with X read in the same order.

constexpr int N_MAX = 8; // rows of X: the columns of an mma
constexpr int N_WARPS = 16;
constexpr int TILE = 16; // rows of W
constexpr int STEP = 32; // columns of W
// Steps of 16 rows under way in a warp, 1 KiB each. `ring_steps` of the launcher says the same.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
constexpr int RING = 8;
#else
constexpr int RING = 4;
#endif
// Floats from one token's partial sums to the next: 2 t of them apart, four lanes fall into different banks.
constexpr int PARTIAL_STRIDE = 20;

enum Mode { TO_MODEL, TO_F32, ADD_F32, SWIGLU };

// Values from one row of the normalised X to the next: an odd multiple of 64 bytes, so that rows g and g + 1 lie
// in different banks.
__device__ __forceinline__ int shared_x_stride(int n_in) { return (n_in + 63) / 64 * 64 + 32; }

// `other`: the up product of SWIGLU, what Y holds for ADD_F32.
template <Mode MODE, typename T>
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
                const float4 v = load4(x + (size_t)j * n_in + k);
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
        if (lane == 0) scales[warp] = rsqrtf(sum / n_in + eps);
    }
    __syncthreads();
}

// Shared memory: the ring, N_WARPS * RING KiB; partial f32 [1 or 2][N_WARPS][n][PARTIAL_STRIDE]; scales f32 [16];
// with NORM, x T [n, shared_x_stride].
template <typename T, Mode MODE, bool NORM>
__device__ __forceinline__ void gemv(const void* x, const T* __restrict__ norm_weight, float eps,
                                     const T* __restrict__ w, const T* __restrict__ bias, void* y, int n, int n_out,
                                     int n_in) {
    constexpr int N_MATRICES = MODE == SWIGLU ? 2 : 1;
    constexpr int DEPTH = RING / N_MATRICES;
    extern __shared__ __align__(16) unsigned char shared[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int g = lane >> 2, t = lane & 3;
    uint4* ring = (uint4*)shared + warp * (RING * 64) + lane; // [DEPTH][N_MATRICES][rows g, g + 8][32 lanes]
    float* partial = (float*)(shared + N_WARPS * RING * 1024);
    float* scales = partial + N_MATRICES * N_WARPS * n * PARTIAL_STRIDE;
    T* shared_x = (T*)(scales + 16);

    const int n_tiles = (n_out + TILE - 1) / TILE;
    // Steps come in twos, so that a warp reads whole lines of 128 bytes; past n_in they are zeros.
    const int n_steps = 2 * ((n_in + 2 * STEP * N_WARPS - 1) / (2 * STEP * N_WARPS));
    const int first_column = warp * 2 * STEP + t * 8;
    auto column = [&](int i) { return (i >> 1) * (2 * STEP * N_WARPS) + (i & 1) * STEP + first_column; };

    int next_tile = blockIdx.x, next_step = 0;
    auto fetch = [&](int slot) {
        if (next_tile < n_tiles) {
            const int k = column(next_step);
#pragma unroll
            for (int m = 0; m < N_MATRICES; m++) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int row = next_tile * TILE + h * 8 + g;
                    const bool is_inside = row < n_out && k < n_in;
                    const T* from = is_inside ? w + (size_t)(m * n_out + row) * n_in + k : w;
                    cp_async16(ring + ((slot * N_MATRICES + m) * 2 + h) * 32, from, is_inside ? 16 : 0);
                }
            }
            if (++next_step == n_steps) {
                next_step = 0;
                next_tile += gridDim.x;
            }
        }
        cp_async_commit(); // a group even when it is empty: the waits count them
    };
#pragma unroll
    for (int slot = 0; slot < DEPTH; slot++) fetch(slot);

    const T* rows = (const T*)x;
    size_t row_stride = n_in;
    if (NORM) {
        const float* residual = (const float*)x;
        rms_scales(residual, n, n_in, eps, partial, scales);
        row_stride = shared_x_stride(n_in);
        rows = shared_x;
        for (int k = 4 * threadIdx.x; k < n_in; k += 4 * 32 * N_WARPS) {
            const float4 weight = load4(norm_weight + k);
#pragma unroll
            for (int j = 0; j < N_MAX; j++) {
                if (j < n) {
                    const float4 v = load4(residual + (size_t)j * n_in + k);
                    const float scale = scales[j];
                    store4(shared_x + j * row_stride + k,
                           make_float4(weight.x * (v.x * scale), weight.y * (v.y * scale),
                                       weight.z * (v.z * scale), weight.w * (v.w * scale)));
                }
            }
        }
        __syncthreads();
    }

    int slot = 0;
    // 16 n <= 128 outputs, a thread for each.
    const int out_token = threadIdx.x / TILE, out_row = threadIdx.x % TILE;
    for (int tile = blockIdx.x; tile < n_tiles; tile += gridDim.x) {
        const int row = tile * TILE + out_row;
        const bool has_output = out_token < n && row < n_out;
        const size_t out_idx = (size_t)out_token * n_out + row;
        float out[2] = {0.f, 0.f}; // begun here, so that the loads are long done when the sums are
        if (has_output) {
#pragma unroll
            for (int m = 0; m < N_MATRICES; m++) {
                if (bias) out[m] = to_f32(bias[m * n_out + row]);
            }
            if (MODE == ADD_F32) out[1] = ((const float*)y)[out_idx];
        }
        float sums[N_MATRICES][4];
#pragma unroll
        for (int m = 0; m < N_MATRICES; m++)
#pragma unroll
            for (int c = 0; c < 4; c++) sums[m][c] = 0.f;

        for (int i = 0; i < n_steps; i++) {
            const int k = column(i);
            const uint4 b = g < n && k < n_in ? load16(rows + g * row_stride + k) : make_uint4(0, 0, 0, 0);
            cp_async_wait<DEPTH - 1>();
#pragma unroll
            for (int m = 0; m < N_MATRICES; m++) {
                const uint4 a = ring[((slot * N_MATRICES + m) * 2 + 0) * 32]; // row g
                const uint4 c = ring[((slot * N_MATRICES + m) * 2 + 1) * 32]; // row g + 8
                mma_16x8x16<T>(sums[m], a.x, c.x, a.y, c.y, b.x, b.y);
                mma_16x8x16<T>(sums[m], a.z, c.z, a.w, c.w, b.z, b.w);
            }
            fetch(slot); // the products above have read it
            slot = slot + 1 == DEPTH ? 0 : slot + 1;
        }

#pragma unroll
        for (int m = 0; m < N_MATRICES; m++)
            for (int c = 0; c < 4; c++) {
                const int token = 2 * t + (c & 1), tile_row = g + 8 * (c >> 1);
                if (token < n) {
                    partial[((m * N_WARPS + warp) * n + token) * PARTIAL_STRIDE + tile_row] = sums[m][c];
                }
            }
        __syncthreads();
        if (has_output) {
#pragma unroll
            for (int m = 0; m < N_MATRICES; m++) {
#pragma unroll
                for (int i = 0; i < N_WARPS; i++) {
                    out[m] += partial[((m * N_WARPS + i) * n + out_token) * PARTIAL_STRIDE + out_row];
                }
            }
            write<MODE, T>(y, out_idx, out[0], out[1]);
        }
        __syncthreads(); // before the next tile's partial sums
    }
}

// The same in f32, without tensor cores, which would round to TF32: a warp for each row of the tile.
// Shared memory: scratch f32 [n][N_WARPS]; scales f32 [16].
template <Mode MODE, bool NORM>
__device__ __forceinline__ void gemv_exact(const float* __restrict__ x, const float* __restrict__ norm_weight,
                                           float eps, const float* __restrict__ w, const float* __restrict__ bias,
                                           void* y, int n, int n_out, int n_in) {
    constexpr int N_MATRICES = MODE == SWIGLU ? 2 : 1;
    extern __shared__ __align__(16) unsigned char shared[];
    float* scratch = (float*)shared;
    float* scales = scratch + n * N_WARPS;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    if (NORM) rms_scales(x, n, n_in, eps, scratch, scales);
    for (int row = blockIdx.x * TILE + warp; row < n_out; row += gridDim.x * TILE) {
        float sums[N_MATRICES][N_MAX];
#pragma unroll
        for (int m = 0; m < N_MATRICES; m++)
#pragma unroll
            for (int j = 0; j < N_MAX; j++) sums[m][j] = 0.f;
#pragma unroll 2
        for (int k = 4 * lane; k < n_in; k += 128) {
            float weights[N_MATRICES][4];
#pragma unroll
            for (int m = 0; m < N_MATRICES; m++) {
                unpack16<f32>(load16_once(w + (size_t)(m * n_out + row) * n_in + k), weights[m]);
            }
            const float4 nw = NORM ? load4(norm_weight + k) : make_float4(1.f, 1.f, 1.f, 1.f);
#pragma unroll
            for (int j = 0; j < N_MAX; j++) {
                if (j < n) {
                    float4 v = load4(x + (size_t)j * n_in + k);
                    if (NORM) {
                        const float scale = scales[j];
                        v = make_float4(nw.x * (v.x * scale), nw.y * (v.y * scale), nw.z * (v.z * scale),
                                        nw.w * (v.w * scale));
                    }
#pragma unroll
                    for (int m = 0; m < N_MATRICES; m++) {
                        sums[m][j] += (weights[m][0] * v.x + weights[m][1] * v.y) +
                                      (weights[m][2] * v.z + weights[m][3] * v.w);
                    }
                }
            }
        }
#pragma unroll
        for (int j = 0; j < N_MAX; j++) {
            if (j < n) {
                float out[2] = {0.f, 0.f};
#pragma unroll
                for (int m = 0; m < N_MATRICES; m++) {
                    out[m] = warp_sum(sums[m][j]);
                    if (bias) out[m] += bias[m * n_out + row];
                }
                const size_t out_idx = (size_t)j * n_out + row;
                if (MODE == ADD_F32) out[1] = ((const float*)y)[out_idx];
                if (lane == 0) write<MODE, f32>(y, out_idx, out[0], out[1]);
            }
        }
    }
}

#define GEMV(NAME, T, MODE, NORM)                                                                                \
    extern "C" __global__ void __launch_bounds__(32 * N_WARPS, 1)                                                \
        NAME##_##T(const void* x, const T* norm_weight, float eps, const T* w, const T* bias, void* y, int n,    \
                   int n_out, int n_in) {                                                                        \
        gemv<T, MODE, NORM>(x, norm_weight, eps, w, bias, y, n, n_out, n_in);                                    \
    }
#define GEMV_EXACT(NAME, MODE, NORM)                                                                             \
    extern "C" __global__ void __launch_bounds__(32 * N_WARPS, 1)                                                \
        NAME##_f32(const float* x, const float* norm_weight, float eps, const float* w, const float* bias,       \
                   void* y, int n, int n_out, int n_in) {                                                        \
        gemv_exact<MODE, NORM>(x, norm_weight, eps, w, bias, y, n, n_out, n_in);                                 \
    }
#define GEMV_TYPES(NAME, MODE, NORM)                                                                             \
    GEMV(NAME, bf16, MODE, NORM)                                                                                 \
    GEMV(NAME, f16, MODE, NORM)                                                                                  \
    GEMV_EXACT(NAME, MODE, NORM)
GEMV_TYPES(gemv_to_model, TO_MODEL, false)
GEMV_TYPES(gemv_to_f32, TO_F32, false)
GEMV_TYPES(gemv_add_f32, ADD_F32, false)
GEMV_TYPES(gemv_swiglu, SWIGLU, false)
GEMV_TYPES(gemv_norm_to_model, TO_MODEL, true)
GEMV_TYPES(gemv_norm_to_f32, TO_F32, true)
GEMV_TYPES(gemv_norm_swiglu, SWIGLU, true)
