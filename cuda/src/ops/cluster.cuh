// Blocks that work on one row together: a cluster of CLUSTER blocks, or of fewer if the launch says so, that reach each other's
// shared memory; or one block.

typedef unsigned long long u64;

extern __shared__ uint4 dynamic_memory[];

__device__ __forceinline__ void* shared_memory() { return dynamic_memory; }

#if CLUSTER > 1

#define CLUSTER_DIMS __cluster_dims__(CLUSTER, 1, 1)

__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ unsigned cluster_size() {
    unsigned n_blocks;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(n_blocks));
    return n_blocks;
}

// Everything that any thread of the cluster wrote before it arrived is there for all that have waited.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// The same where nothing was written that others read.
__device__ __forceinline__ void cluster_arrive_empty() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }

__device__ __forceinline__ void cluster_wait_empty() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// The same place in the shared memory of another block.
template <class T> __device__ __forceinline__ T* in_block(T* mine, unsigned rank) {
    T* other;
    asm("mapa.u64 %0, %1, %2;" : "=l"(other) : "l"(mine), "r"(rank));
    return other;
}

// ---- copies from memory that go on while the block does something else ----

__device__ __forceinline__ bool can_copy() { return true; }

// Makes a place ready that tells of arrivals, by one thread; all others see it after a barrier.
__device__ __forceinline__ void copy_prepare(u64* arrival) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(
                     (unsigned)__cvta_generic_to_shared(arrival))
                 : "memory");
}

// Ends the use of a place after all have waited, by one thread; it can be made ready again.
__device__ __forceinline__ void copy_release(u64* arrival) {
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"((unsigned)__cvta_generic_to_shared(arrival)) : "memory");
}

// Copies bytes, by one thread, after a barrier behind whatever was done with the memory before. All are multiples of 16.
__device__ __forceinline__ void copy_async(u64* arrival, void* to, const void* from, int n_bytes) {
    const unsigned there = (unsigned)__cvta_generic_to_shared(arrival);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(there), "r"(n_bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     (unsigned)__cvta_generic_to_shared(to)),
                 "l"(from), "r"(n_bytes), "r"(there)
                 : "memory");
}

// Asks for bytes that another block will copy: a multiple of 16.
__device__ __forceinline__ void copy_ahead(const void* from, int n_bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(n_bytes) : "memory");
}

// Waits for the copy; one goes to each place.
__device__ __forceinline__ void copy_wait(u64* arrival) {
    const unsigned there = (unsigned)__cvta_generic_to_shared(arrival);
    unsigned is_there;
    do {
        asm volatile("{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\n\t"
                     "selp.u32 %0, 1, 0, p;\n\t}"
                     : "=r"(is_there)
                     : "r"(there)
                     : "memory");
    } while (is_there == 0);
}

#else

#define CLUSTER_DIMS

__device__ __forceinline__ unsigned cluster_rank() { return 0; }
__device__ __forceinline__ unsigned cluster_size() { return 1; }

__device__ __forceinline__ void cluster_arrive() { __syncthreads(); }

__device__ __forceinline__ void cluster_wait() {}
__device__ __forceinline__ void cluster_arrive_empty() { __syncthreads(); }
__device__ __forceinline__ void cluster_wait_empty() {}

__device__ __forceinline__ bool can_copy() { return false; }
__device__ __forceinline__ void copy_prepare(u64*) {}
__device__ __forceinline__ void copy_release(u64*) {}
__device__ __forceinline__ void copy_async(u64*, void*, const void*, int) {}
__device__ __forceinline__ void copy_ahead(const void*, int) {}
__device__ __forceinline__ void copy_wait(u64*) {}

template <class T> __device__ __forceinline__ T* in_block(T* mine, unsigned rank) { return mine; }

#endif

__device__ __forceinline__ void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}
