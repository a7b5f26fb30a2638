// As gemv.cu, for a model of type f32: without tensor cores, which would round to TF32. A warp for each row of a tile.
// Grid as there. Bytes: W, once. Shared memory: scratch f32 [n][N_WARPS]; scales f32 [N_SCALES].

template <Mode MODE, bool NORM>
__device__ __forceinline__ void gemv(const GemvParams& p) {
    const float* __restrict__ x = (const float*)p.x;
    const float* __restrict__ norm_weight = p.norm_weight;
    const float* __restrict__ w = p.w;
    const float* __restrict__ bias = p.bias;
    const int n = p.n, n_out = p.n_out, n_in = p.n_in;
    constexpr int N_MATRICES = MODE == SWIGLU ? 2 : 1;
    extern __shared__ __align__(16) unsigned char shared[];
    float* scratch = (float*)shared;
    float* scales = scratch + n * N_WARPS;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    if (NORM) rms_scales(x, n, n_in, p.eps, scratch, scales);
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
                unpack16<f32>(load16_once(w + wide(m * n_out + row, n_in) + k), weights[m]);
            }
            const float4 nw = NORM ? load4(norm_weight + k) : make_float4(1.f, 1.f, 1.f, 1.f);
#pragma unroll
            for (int j = 0; j < N_MAX; j++) {
                if (j < n) {
                    float4 v = load4(x + wide(j, n_in) + k);
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
                const size_t out_idx = wide(j, n_out) + row;
                if (MODE == ADD_F32) out[1] = ((const float*)p.y)[out_idx];
                if (lane == 0) write<MODE>(p.y, out_idx, out[0], out[1]);
            }
        }
    }
}

GEMV_FORMS
