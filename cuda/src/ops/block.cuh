// What a block makes of numbers that its N_THREADS threads have each.

// Sums over the threads before and including this one, and over all. `shared` holds an entry for each warp.
template <int N_THREADS> __device__ __forceinline__ u64 block_prefix(u64 value, u64* shared, u64& sum) {
    unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        u64 other = __shfl_up_sync(LANES_ALL, value, step);
        if (lane >= step) value += other;
    }
    __syncthreads();
    if (lane == 31) shared[warp] = value;
    __syncthreads();
    u64 total = lane < N_THREADS / 32 ? shared[lane] : 0;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        u64 other = __shfl_up_sync(LANES_ALL, total, step);
        if (lane >= step) total += other;
    }
    sum = __shfl_sync(LANES_ALL, total, 31);
    u64 before = __shfl_sync(LANES_ALL, total, (warp + 31) % 32);
    return value + (warp > 0 ? before : 0);
}

template <int N_THREADS> __device__ __forceinline__ u64 block_prefix(u64 value, u64* shared) {
    u64 sum;
    return block_prefix<N_THREADS>(value, shared, sum);
}

// The sum, in every thread.
template <int N_THREADS> __device__ __forceinline__ u64 block_sum(u64 value, u64* shared) {
    u64 sum;
    block_prefix<N_THREADS>(value, shared, sum);
    return sum;
}

// The largest, in every thread.
template <int N_THREADS> __device__ __forceinline__ u64 block_max(u64 value, u64* shared) {
    value = warp_max(value);
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
    __syncthreads();
    return warp_max(threadIdx.x % 32 < N_THREADS / 32 ? shared[threadIdx.x % 32] : 0);
}

// Sorts so many entries, a power of two, the largest first, in a bitonic network (Batcher, "Sorting networks and their
// applications", 1968). By all of a block's N_THREADS threads.
template <int N_THREADS> __device__ __forceinline__ void sort(u64* list, unsigned size) {
    __syncthreads();
    for (unsigned length = 2; length <= size; length <<= 1) {
        for (unsigned stride = length / 2; stride > 0; stride >>= 1) {
            // Entries that are less than 64 apart in both steps are those of one warp.
            if (stride >= 32) __syncthreads();
            else __syncwarp();
            for (unsigned pair = threadIdx.x; pair < size / 2; pair += N_THREADS) {
                unsigned i = 2 * pair - pair % stride, j = i + stride;
                u64 a = list[i], b = list[j];
                bool falling = (i & length) == 0;
                if ((a < b) == falling) {
                    list[i] = b;
                    list[j] = a;
                }
            }
        }
    }
    __syncthreads();
}
