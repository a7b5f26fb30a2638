// A stream that only reads: out[b] = xor of the words that block b reads, all blocks together every word once.
// words: u32 [4 n], read 16 bytes at a time; out: u32 [gridDim.x].
// Grid: as many blocks as are resident at once; N_THREADS threads, eight loads each under way. No accumulation but xor, so
// that the result has the same bits for every grid.
// Bytes: 16 n read, 4 written by a block.
// Source: none; what every kernel that reads weights or KV is measured against.

struct StreamReadParams {
    const uint4* words;
    unsigned* out;
    unsigned long long n;
};
static_assert(sizeof(StreamReadParams) == 24, "as in stream.rs");

constexpr int N_LOADS = 8;

__device__ __forceinline__ void take(unsigned& sum, uint4 v) { sum ^= v.x ^ v.y ^ v.z ^ v.w; }

extern "C" __global__ void __launch_bounds__(N_THREADS) stream_read(const __grid_constant__ StreamReadParams p) {
    const uint4* __restrict__ words = p.words;
    const unsigned long long n = p.n;
    __shared__ unsigned of_warp[N_THREADS / 32];
    const unsigned long long step = (unsigned long long)gridDim.x * N_THREADS;
    unsigned long long i = (unsigned long long)blockIdx.x * N_THREADS + threadIdx.x;
    unsigned sum = 0;
    for (; i + (N_LOADS - 1) * step < n; i += N_LOADS * step) {
        uint4 v[N_LOADS];
#pragma unroll
        for (int j = 0; j < N_LOADS; j++) v[j] = __ldcs(words + i + j * step);
#pragma unroll
        for (int j = 0; j < N_LOADS; j++) take(sum, v[j]);
    }
    for (; i < n; i += step) take(sum, __ldcs(words + i));
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) sum ^= __shfl_xor_sync(~0u, sum, lane);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < N_THREADS / 32; w++) sum ^= of_warp[w];
        p.out[blockIdx.x] = sum;
    }
}
