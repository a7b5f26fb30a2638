// Rows of the history: a plane of one number for each token, zeros but for tokens that stand there.

__device__ __forceinline__ bool breaks(const Run& r, unsigned id, int token) {
    if (id >= r.row.n_masks) return false;
    const u64* mask = r.p.masks + r.p.mask_starts[r.row.masks_start + id];
    return (mask[token / 64] >> (token % 64)) & 1;
}

// The length of the repetition that ends before `idx + 1`, at least 1.
__device__ __forceinline__ int repetition(const Run& r, Tokens t, int idx, int cap, unsigned breakers) {
    int length = 1;
    while (length < cap && length <= idx) {
        const int token = t[idx - length];
        if (token != t[t.n - 1 - length] || breaks(r, breakers, token)) break;
        length++;
    }
    return length;
}

// Fills one plane, by all threads of all blocks.
__device__ __forceinline__ void fill_plane(const Run& r, uint4 in) {
    const unsigned code = in.x & 255;
    float* plane = r.planes + (size_t)((in.x >> 8) & 255) * r.plane_stride;
    const int begin = (int)(r.rank * THREADS + threadIdx.x), step = CLUSTER * THREADS;
    if (code == COUNT_LAST || code == COUNT_SINCE) {
        unsigned n = in.y;
        if (code == COUNT_SINCE) {
            // At most 2^32 - 1, which is more than there are.
            const unsigned first = __float2uint_rz(fmaxf(r.s.numbers[in.y], 0.0f));
            n = first < r.row.n_tokens ? r.row.n_tokens - first : 0;
        }
        const Tokens t = last_tokens(r, n);
        for (int idx = begin; idx < t.n; idx += step) atomicAdd(&plane[t[idx]], 1.0f);
    } else if (code == REPEATS) {
        const Tokens t = last_tokens(r, in.y);
        const int cap = (int)in.z;
        if (t.n == 0) return;
        const int end = t[t.n - 1];
        if (breaks(r, in.w, end)) return;
        for (int idx = begin; idx < t.n - 1; idx += step) {
            const int next = t[idx + 1];
            if (t[idx] != end || breaks(r, in.w, next)) continue;
            const float length = (float)repetition(r, t, idx, cap, in.w);
            // Numbers that are not negative are ordered as their bits are.
            atomicMax((int*)&plane[next], __float_as_int(length));
        }
    } else {
        const Tokens t = last_tokens(r, in.z);
        const int n = (int)in.y;
        for (int idx = begin; idx + n <= t.n; idx += step) {
            bool is_same = true;
            for (int i = 0; i < n - 1; i++) is_same = is_same && t[idx + i] == t[t.n - (n - 1) + i];
            if (is_same) plane[t[idx + n - 1]] = 1.0f;
        }
    }
}

// Makes zeros again of what a program has written.
__device__ __forceinline__ void clear_planes(const Run& r, unsigned n_planes) {
    const Tokens t = last_tokens(r, r.row.n_history);
    for (int idx = (int)(r.rank * THREADS + threadIdx.x); idx < t.n; idx += CLUSTER * THREADS)
        for (unsigned plane = 0; plane < n_planes; plane++) r.planes[(size_t)plane * r.plane_stride + t[idx]] = 0.0f;
}
