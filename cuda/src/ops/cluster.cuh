// Blocks that work on one row together: a cluster of CLUSTER blocks that reach each other's shared memory, or one block.

extern __shared__ uint4 dynamic_memory[];

__device__ __forceinline__ void* shared_memory() { return dynamic_memory; }

#if CLUSTER > 1

#define CLUSTER_DIMS __cluster_dims__(CLUSTER, 1, 1)

__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Everything that any thread of the cluster wrote before is there for all after.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The same place in the shared memory of another block.
template <class T> __device__ __forceinline__ T* in_block(T* mine, unsigned rank) {
    T* other;
    asm("mapa.u64 %0, %1, %2;" : "=l"(other) : "l"(mine), "r"(rank));
    return other;
}

#else

#define CLUSTER_DIMS

__device__ __forceinline__ unsigned cluster_rank() { return 0; }

__device__ __forceinline__ void cluster_sync() { __syncthreads(); }

template <class T> __device__ __forceinline__ T* in_block(T* mine, unsigned rank) { return mine; }

#endif
