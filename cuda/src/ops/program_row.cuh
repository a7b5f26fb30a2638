// Entries of a row at the places that a thread looks at: groups of four tokens that follow each other.
//
// A block keeps its part of the logits in shared memory, which it is copied to while the plan is read, as far as there is
// room; what is not there is read from memory, which is L2 after the first time.

struct Four {
    float v[4];
};

struct Many {
    float v[EACH];
};

// Where a thread looks.
struct Place {
    int first;       // token, a multiple of 4
    int step;        // from one group to the next
    unsigned valid;  // bits of the tokens that count
};

// Whether tokens follow each other, or are those of a list.
__device__ __forceinline__ bool is_dense(const Place& at) { return at.step != 0; }

constexpr unsigned ALL_VALID = (1u << EACH) - 1;

__device__ __forceinline__ int token_of(const Place& at, int i) { return at.first + i / 4 * at.step + i % 4; }

__device__ __forceinline__ Four four(float x) { return Four{{x, x, x, x}}; }

__device__ __forceinline__ Four four(const float4& x) { return Four{{x.x, x.y, x.z, x.w}}; }

__device__ __forceinline__ Many many(float x) {
    Many out;
#pragma unroll
    for (int i = 0; i < EACH; i++) out.v[i] = x;
    return out;
}

// Makes entries group by group: for code that is too long to stand there for each.
template <class F> __device__ __forceinline__ Many by_groups(const Place& at, F f) {
    Many out = many(0.0f);
#pragma unroll 1
    for (int group = 0; group < GROUPS; group++) {
        const Four last = f(at.first + group * at.step);
#pragma unroll
        for (int i = 0; i < EACH - 4; i++) out.v[i] = out.v[i + 4];
#pragma unroll
        for (int i = 0; i < 4; i++) out.v[EACH - 4 + i] = last.v[i];
    }
    return out;
}

// Entries that lie in shared memory, `step` numbers from group to group.
__device__ __forceinline__ Many spread(const float4* from, int step) {
    Many out;
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        const float4 x = from[group * step / 4];
        out.v[4 * group] = x.x, out.v[4 * group + 1] = x.y, out.v[4 * group + 2] = x.z, out.v[4 * group + 3] = x.w;
    }
    return out;
}

__device__ __forceinline__ int piece_of_row(const Run& r) { return (r.n_kept + PIECES * TILE - 1) / (PIECES * TILE) * TILE; }

// Begins to copy the block's part of the logits.
__device__ __forceinline__ void copy_row(const Run& r) {
    if (r.n_kept == 0) return;
    const int piece = piece_of_row(r);
    const int start = (int)threadIdx.x * piece;
    if (threadIdx.x < PIECES && start < r.n_kept)
        copy_async(&r.s.arrivals[threadIdx.x], kept_of(r.s) + start, r.s.logits + r.begin + start,
                   4 * min(piece, r.n_kept - start));
}

// Waits until the first `n` tokens of the block's part are there; all of them where it keeps fewer.
__device__ __forceinline__ void wait_for_row(Run& r, int n) {
    n = min(n, r.n_kept);
    if (r.n_there >= n) return;
    const int piece = piece_of_row(r);
    do {
        copy_wait(&r.s.arrivals[r.n_there / piece]);
        r.n_there = min(r.n_there + piece, r.n_kept);
    } while (r.n_there < n);
}

// Four tokens of a row from `first`, which is a multiple of 4; -inf past the end.
__device__ __forceinline__ Four load4(const float* row, int first, int vocab) {
    Four out = four(minus_infinity());
    if ((vocab & 3) == 0) {
        if (first < vocab) out = four(__ldg((const float4*)(row + first)));
    } else {
        // Rows of such a vocabulary do not start at multiples of 16 bytes.
#pragma unroll
        for (int lane = 0; lane < 4; lane++)
            if (first + lane < vocab) out.v[lane] = __ldg(row + first + lane);
    }
    return out;
}

__device__ __forceinline__ Many kept_at(const Run& r, int idx, int step) {
    return spread((const float4*)(kept_of(r.s) + idx), step);
}

__device__ __forceinline__ Many logits_in_memory(const Run& r, const Place& at) {
    if ((r.vocab & 3) != 0) return by_groups(at, [&](int first) { return load4(r.s.logits, first, r.vocab); });
    // All groups are on their way at once.
    Many out;
    const float* from = r.s.logits + at.first;
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        const bool is_there = at.first + group * at.step < r.vocab;
        const Four x = is_there ? four(__ldg((const float4*)(from + group * at.step))) : four(minus_infinity());
#pragma unroll
        for (int i = 0; i < 4; i++) out.v[4 * group + i] = x.v[i];
    }
    return out;
}

__device__ __forceinline__ Many logits_at(const Run& r, const Place& at) {
    const int idx = at.first - r.begin;
    // A tile is there as a whole or not at all.
    return (unsigned)idx < (unsigned)r.n_kept ? kept_at(r, idx, at.step) : logits_in_memory(r, at);
}

__device__ __forceinline__ Four mask4(const Run& r, unsigned start, int first) {
    if (start == NONE) return four(1.0f);
    if (first >= r.vocab) return four(0.0f);
    const unsigned bits = (unsigned)(__ldg(r.p.masks + start + first / 64) >> (first % 64));
    return Four{{truth(bits & 1), truth(bits & 2), truth(bits & 4), truth(bits & 8)}};
}

__device__ __forceinline__ Four bias4(const Run& r, unsigned id, int first) {
    if (id >= r.row.n_biases) return four(0.0f);
    const ProgramBias place = r.p.bias_places[r.row.biases_start + id];
    if (place.n_pairs == NONE) return load4(r.p.dense_biases + place.start, first, r.vocab);
    const BiasPair* pairs = r.p.bias_pairs + place.start;
    unsigned low = 0, high = place.n_pairs;
    while (low < high) {
        const unsigned middle = (low + high) / 2;
        if (pairs[middle].token < (unsigned)first) low = middle + 1;
        else high = middle;
    }
    Four out = four(0.0f);
#pragma unroll
    for (int lane = 0; lane < 4; lane++)
        if (low < place.n_pairs && pairs[low].token == (unsigned)(first + lane)) out.v[lane] = pairs[low++].value;
    return out;
}

__device__ __forceinline__ Four noise4(const NoiseSource& source, bool is_gumbel, int first) {
    const uint4 words = words_of(source, (unsigned)first / 4);
    Four out;
#pragma unroll
    for (int lane = 0; lane < 4; lane++) {
        const unsigned word = lane_of(words, lane);
        out.v[lane] = is_gumbel ? gumbel(word) : uniform(word);
    }
    return out;
}

// What is read, or made of the place alone.
__device__ __forceinline__ Four leaf4(const Run& r, unsigned code, unsigned operand, int first) {
    switch (code) {
    case MEMBER: {
        const bool is_there = operand < r.row.n_members;
        const unsigned member = is_there ? r.p.members[r.row.members_start + operand] : 0;
        const float* rows = member & KEPT_ROW ? r.p.kept_rows : r.p.logits;
        const float* row = is_there ? rows + (size_t)(member & ~KEPT_ROW) * r.vocab : r.s.logits;
        Four out = load4(row, first, r.vocab);
        // It was not checked whether they are numbers.
#pragma unroll
        for (int lane = 0; lane < 4; lane++) out.v[lane] = in_row(out.v[lane]);
        return out;
    }
    case PLANE:
        // Written by this launch.
        return first < r.vocab ? four(__ldcg((const float4*)(r.planes + (size_t)operand * r.plane_stride + first)))
                               : four(0.0f);
    case BIAS: return bias4(r, operand, first);
    case MASK: return mask4(r, operand < r.row.n_masks ? r.p.mask_starts[r.row.masks_start + operand] : NONE, first);
    case CONSTRAINT: return mask4(r, r.constraint, first);
    case ONLY: {
        const int token = (int)r.s.numbers[operand];
        return Four{{truth(token == first), truth(token == first + 1), truth(token == first + 2),
                     truth(token == first + 3)}};
    }
    default: return noise4(sources_of(r.s)[operand], code == GUMBEL_ROW, first);
    }
}

__device__ __forceinline__ Many leaf(const Run& r, const Place& at, unsigned code, unsigned operand) {
    return by_groups(at, [&](int first) { return leaf4(r, code, operand, first); });
}
