// Products of a few rows with a matrix: Y[n, n_out] = X[n, n_in] W[n_out, n_in]^T + bias[n_out], n <= N_MAX.
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

constexpr int STEP = 32; // columns of W
static_assert(STEP_BYTES == TILE * STEP * sizeof(T), "a step of a warp");

// RING steps of 16 rows are under way in a warp. PARTIAL_STRIDE is the number of floats from one token's partial sums to
// the next: 2 t of them apart, four lanes fall into different banks.
// Shared memory: the ring, N_WARPS * RING * STEP_BYTES; partial f32 [1 or 2][N_WARPS][n][PARTIAL_STRIDE];
// scales f32 [N_SCALES]; with NORM, x T [n, x_stride].
template <Mode MODE, bool NORM>
__device__ __forceinline__ void gemv(const GemvParams& p) {
    const T* __restrict__ norm_weight = p.norm_weight;
    const T* __restrict__ w = p.w;
    const T* __restrict__ bias = p.bias;
    const int n = p.n, n_out = p.n_out, n_in = p.n_in;
    constexpr int N_MATRICES = MODE == SWIGLU ? 2 : 1;
    constexpr int DEPTH = RING / N_MATRICES;
    extern __shared__ __align__(16) unsigned char shared[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int g = lane >> 2, t = lane & 3;
    uint4* ring = (uint4*)shared + warp * (RING * STEP_BYTES / 16) + lane; // [DEPTH][N_MATRICES][rows g, g + 8][32 lanes]
    float* partial = (float*)(shared + N_WARPS * RING * STEP_BYTES);
    float* scales = partial + N_MATRICES * N_WARPS * n * PARTIAL_STRIDE;
    T* shared_x = (T*)(scales + N_SCALES);

    const int n_tiles = (n_out + TILE - 1) / TILE;
    // Steps come in twos, so that a warp reads whole lines of 128 bytes; past n_in they are zeros.
    const int n_steps = 2 * ((n_in + 2 * STEP * N_WARPS - 1) / (2 * STEP * N_WARPS));
    const int first_column = warp * 2 * STEP + t * 8;
    auto column = [&](int i) { return (i >> 1) * (2 * STEP * N_WARPS) + (i & 1) * STEP + first_column; };

    int next_tile = blockIdx.x, next_step = 0;
    auto fetch = [&](int stage) {
        if (next_tile < n_tiles) {
            const int k = column(next_step);
#pragma unroll
            for (int m = 0; m < N_MATRICES; m++) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int row = next_tile * TILE + h * 8 + g;
                    const bool is_inside = row < n_out && k < n_in;
                    const T* from = is_inside ? w + wide(m * n_out + row, n_in) + k : w;
                    cp_async16(ring + ((stage * N_MATRICES + m) * 2 + h) * 32, from, is_inside ? 16 : 0);
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
    for (int stage = 0; stage < DEPTH; stage++) fetch(stage);

    const T* rows = (const T*)p.x;
    int row_stride = n_in;
    if (NORM) {
        const float* residual = (const float*)p.x;
        rms_scales(residual, n, n_in, p.eps, partial, scales);
        row_stride = p.x_stride;
        rows = shared_x;
        for (int k = 4 * threadIdx.x; k < n_in; k += 4 * 32 * N_WARPS) {
            const float4 weight = load4(norm_weight + k);
#pragma unroll
            for (int j = 0; j < N_MAX; j++) {
                if (j < n) {
                    const float4 v = load4(residual + wide(j, n_in) + k);
                    const float scale = scales[j];
                    store4(shared_x + j * row_stride + k,
                           make_float4(weight.x * (v.x * scale), weight.y * (v.y * scale),
                                       weight.z * (v.z * scale), weight.w * (v.w * scale)));
                }
            }
        }
        __syncthreads();
    }

    int stage = 0;
    // 16 n <= 128 outputs, a thread for each.
    const int out_token = threadIdx.x / TILE, out_row = threadIdx.x % TILE;
    for (int tile = blockIdx.x; tile < n_tiles; tile += gridDim.x) {
        const int row = tile * TILE + out_row;
        const bool has_output = out_token < n && row < n_out;
        const size_t out_idx = wide(out_token, n_out) + row;
        float out[2] = {0.f, 0.f}; // begun here, so that the loads are long done when the sums are
        if (has_output) {
#pragma unroll
            for (int m = 0; m < N_MATRICES; m++) {
                if (bias) out[m] = to_f32(bias[m * n_out + row]);
            }
            if (MODE == ADD_F32) out[1] = ((const float*)p.y)[out_idx];
        }
        float sums[N_MATRICES][4];
#pragma unroll
        for (int m = 0; m < N_MATRICES; m++)
#pragma unroll
            for (int c = 0; c < 4; c++) sums[m][c] = 0.f;

        for (int i = 0; i < n_steps; i++) {
            const int k = column(i);
            const uint4 b = g < n && k < n_in ? load16(rows + wide(g, row_stride) + k) : make_uint4(0, 0, 0, 0);
            cp_async_wait<DEPTH - 1>();
#pragma unroll
            for (int m = 0; m < N_MATRICES; m++) {
                const uint4 a = ring[((stage * N_MATRICES + m) * 2 + 0) * 32]; // row g
                const uint4 c = ring[((stage * N_MATRICES + m) * 2 + 1) * 32]; // row g + 8
                mma_16x8x16<T>(sums[m], a.x, c.x, a.y, c.y, b.x, b.y);
                mma_16x8x16<T>(sums[m], a.z, c.z, a.w, c.w, b.z, b.w);
            }
            fetch(stage); // the products above have read it
            stage = stage + 1 == DEPTH ? 0 : stage + 1;
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
            write<MODE>(p.y, out_idx, out[0], out[1]);
        }
        __syncthreads(); // before the next tile's partial sums
    }
}

GEMV_FORMS
