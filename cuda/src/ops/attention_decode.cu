// Attention of few queries of a context over the paged KV cache ("decode").
//
//   out[i, h] = sum_j softmax_j(scale * q[i, h] . k[j, h / GROUP]) v[j, h / GROUP],  first <= j <= position of i
//
// A tile is the tokens of a context whose query heads of one KV head fill up to eight columns: one token, or several
// where the group is small. Shares of tiles are dealt to workers beforehand (shares.rs), about the same bytes to each.
//   q, out       [n_tokens, n_heads, HEAD_DIM] of T
//   kv           page p of this layer at p * page_stride elements: [2: K, V][n_kv_heads][PAGE_LEN][HEAD_DIM] of T
//   entries      page tables
//   shares       worker w begins with share w, and goes on as the shares say; n_workers is read from device memory
//   partial_acc  [partial results, gridDim.x, 8, HEAD_DIM] of f32, partial_ml the same without the last dimension
//   arrivals     [partial results, gridDim.x], zero before and after
// Grid: (n_kv_heads * ceil(GROUP / 8), most workers), WARPS warps. K and V are read once for GROUP <= 8. A share's pages
// go round among the warps, each with an online softmax of its own; they are merged in shared memory, and the shares of
// a tile by the block that arrives last, in the order of the shares: the result does not depend on which one that is.
// Each warp has keys and values of one step in shared memory and, as soon as it has read the one, asks for the next
// step's, also past the end of a share: only the first share of a worker waits for its first bytes.
// Accumulation: f32; the weights are rounded to T before the product with V, as in the kernel for tiles.
// Bytes: 2 * length * n_kv_heads * HEAD_DIM * sizeof(T) a context. This bounds the kernel. A cut share adds
// 2 * 8 * HEAD_DIM * 4 a KV head, there are at most two for each worker.
// Sources: FlashAttention (arXiv 2205.14135), Flash-Decoding (split KV), stream-K (arXiv 2301.03598); fragments: PTX
// ISA, mma.m16n8k16, movmatrix.

// The place of a partial result of this block's columns.
__device__ __forceinline__ size_t partial_place(const Share& share, int share_idx) {
    return ((size_t)(share.partial() + share_idx) * gridDim.x + blockIdx.x) * COLUMNS;
}

// Merges what the warps have: the output, or one partial result of several.
__device__ __forceinline__ void merge_warps(const Params& p, const Merge& merge, const Share& share,
                                            int kv_head, const Queries& queries) {
    const size_t partial = partial_place(share, share.share_idx());
    for (int idx = threadIdx.x; idx < queries.n * HEAD_FOURS; idx += THREADS) {
        const int c = idx / HEAD_FOURS, d = idx % HEAD_FOURS * 4;
        float m = merge.m[0][c];
#pragma unroll
        for (int w = 1; w < WARPS; w++) m = fmaxf(m, merge.m[w][c]);
        const float shift = shift_of(m);
        float l = 0.f;
        float4 acc = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float decay = exp2_fast(merge.m[w][c] - shift); // 0 for a warp without positions
            l += merge.l[w][c] * decay;
            add_weighted(acc, decay, load4(&merge.acc[w][c][d]));
        }
        if (share.n_shares() == 1) {
            const float inverse = 1.f / l;
            T* out = p.out + query_start(share.token, queries.first + c, kv_head, p.n_kv_heads) + d;
            store4(out, make_float4(acc.x * inverse, acc.y * inverse, acc.z * inverse, acc.w * inverse));
        } else {
            store4(p.partial_acc + (partial + c) * HEAD_DIM + d, acc);
            if (d == 0) p.partial_ml[partial + c] = make_float2(m, l);
        }
    }
}

// Adds 1 and returns what was there, after all that came before and before all that comes after.
__device__ __forceinline__ unsigned arrive(unsigned* count) {
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(count) : "memory");
    return before;
}

// Whether this block's share is the last of its tile to be there. By all threads: the barriers carry what the others
// wrote to the arrival, and what the arrival saw to the others.
__device__ __forceinline__ bool arrives_last(const Params& p, Shared& shared, const Share& share) {
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned* count = &p.arrivals[(size_t)share.partial() * gridDim.x + blockIdx.x];
        const bool is_last = arrive(count) == (unsigned)share.n_shares() - 1;
        if (is_last) *count = 0; // for the next launch
        shared.is_last = is_last;
    }
    __syncthreads();
    return shared.is_last;
}

// Sums the shares of a tile in their order: four values a thread, where there are threads enough in as many parts as
// there are threads for, and several shares' loads under way at once.
__device__ __forceinline__ void combine_shares(const Params& p, Combine& combine, const Share& share,
                                               int kv_head, const Queries& queries) {
    constexpr int UNDER_WAY = 8;
    const int lane = threadIdx.x & 31, n_shares = share.n_shares(), n_fours = queries.n * HEAD_FOURS;
    const int n_parts = max(1, THREADS / n_fours), part = n_parts > 1 ? threadIdx.x / n_fours : 0;
    const size_t first = partial_place(share, 0), stride = (size_t)gridDim.x * COLUMNS;
    float4 v[UNDER_WAY];
    auto load = [&](int idx, int share_idx) {
        const float4* from = (const float4*)p.partial_acc + first * HEAD_FOURS + idx;
#pragma unroll
        for (int i = 0; i < UNDER_WAY; i++) {
            const int s = share_idx + i * n_parts;
            v[i] = s < n_shares ? __ldcg(from + s * stride * HEAD_FOURS) : make_float4(0.f, 0.f, 0.f, 0.f);
        }
    };
    int idx = n_parts > 1 ? threadIdx.x % n_fours : threadIdx.x;
    if (part < n_parts && idx < n_fours) load(idx, part); // before their weights are known

    for (int c = threadIdx.x >> 5; c < queries.n; c += WARPS) {
        float2 ml[SHARES_MAX / 32];
        float m = ATTN_NEG_INF, l = 0.f;
#pragma unroll
        for (int i = 0; i < SHARES_MAX / 32; i++) {
            const int s = i * 32 + lane;
            ml[i] = s < n_shares ? __ldcg(&p.partial_ml[first + s * stride + c]) : make_float2(ATTN_NEG_INF, 0.f);
            m = fmaxf(m, ml[i].x);
        }
        m = warp_max(m);
#pragma unroll
        for (int i = 0; i < SHARES_MAX / 32; i++) {
            ml[i].x = exp2_fast(ml[i].x - m); // some share has the query's own position: m is finite
            l += ml[i].x * ml[i].y;
        }
        const float inverse = 1.f / warp_sum(l);
#pragma unroll
        for (int i = 0; i < SHARES_MAX / 32; i++) combine.weight[c][i * 32 + lane] = ml[i].x * inverse;
    }
    __syncthreads();

    for (; part < n_parts && idx < n_fours; idx += THREADS) {
        float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
        const int c = idx / HEAD_FOURS, d = idx % HEAD_FOURS * 4;
        for (int s0 = part; s0 < n_shares; s0 += UNDER_WAY * n_parts) {
            float weight[UNDER_WAY];
#pragma unroll
            for (int i = 0; i < UNDER_WAY; i++) {
                const int s = s0 + i * n_parts;
                weight[i] = s < n_shares ? combine.weight[c][s] : 0.f;
            }
#pragma unroll
            for (int i = 0; i < UNDER_WAY; i++) add_weighted(sum, weight[i], v[i]);
            const int s = s0 + UNDER_WAY * n_parts;
            if (s < n_shares) load(idx, s);
        }
        if (n_parts > 1) {
            combine.sums[threadIdx.x] = sum;
        } else {
            store4(p.out + query_start(share.token, queries.first + c, kv_head, p.n_kv_heads) + d, sum);
            if (idx + THREADS < n_fours) load(idx + THREADS, 0);
        }
    }
    if (n_parts == 1) return;
    __syncthreads();
    if (threadIdx.x < n_fours) {
        const int c = threadIdx.x / HEAD_FOURS, d = threadIdx.x % HEAD_FOURS * 4;
        float4 sum = combine.sums[threadIdx.x];
        for (int i = 1; i < n_parts; i++) add_weighted(sum, 1.f, combine.sums[i * n_fours + threadIdx.x]);
        store4(p.out + query_start(share.token, queries.first + c, kv_head, p.n_kv_heads) + d, sum);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, ATTN_RESIDENT) KERNEL(const Params p) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
    // Read before the count is known, which saves a latency: there is memory for as many as there are blocks.
    Share share = load_share(p.shares, blockIdx.y);
    if ((int)blockIdx.y >= *p.n_workers) return;

    const int kv_head = blockIdx.x / COLUMN_BLOCKS;
    const T* kv_head_keys = p.kv + kv_head * HEAD_PAGE;
    Pipeline pipeline(p, shared, share, kv_head_keys);
    while (true) {
        Share next = share;
        if (share.next != 0) next = load_share(p.shares, share.next);
        Queries queries;
        queries.first = blockIdx.x % COLUMN_BLOCKS * COLUMNS;
        queries.n = min(COLUMNS, share.n_tokens() * GROUP - queries.first);
#if ATTN_HOLES
        shared.turned.turn(p, share, kv_head, queries.first, queries.n);
#endif
        fold_share(pipeline, p, shared, share, kv_head_keys, kv_head, queries);
        __syncthreads();
        merge_warps(p, shared.merge, share, kv_head, queries);
        if (share.n_shares() > 1 && arrives_last(p, shared, share))
            combine_shares(p, shared.combine, share, kv_head, queries);
        if (share.next == 0) return;
        __syncthreads(); // all warps have read what the next share's warps write
        share = next;
    }
}
