// Draws from a few tokens: steps 5 to 9 of the sampling definition for rows with a small top-k, with top-p and min-p or without,
// and for rows with min-p alone.
//
// The scan has left the largest value of each span of the row. The k-th largest of those is a lower bound of the k-th of all,
// since so many are no less; what reaches it lies in the few spans whose largest does, and is mostly little more than k tokens.
// Those are sorted; weights are whole numbers, so that their sums have no order.
//
// Where spans hold so many that there is no room, the k-th of those that were met is a better bound, and only what is above it
// is listed from then on; so it is if many spans tie with the bound. If fewer than k tokens are above it, those that tie with it
// are all kept by top-k: the row is read again for the best of them, and once before where top-p has to know their number.
// The blocks of a cluster share these readings out; what comes before, each does for itself, and all come to the same.
//
// Grid (rows of the bucket), or as many clusters of blocks; CHOOSE_THREADS threads. Reads 4 bytes a span, and the spans that
// reach the bound: for top-k 50 of 128256 equally distributed tokens about 55 of 251. Where many tie, 4 * vocab bytes once or
// twice.
// spans f32 [n_rows, n_chunks * SPANS]; stands Stand [n_rows]; drawn u64 [n_rows, n_chunks], of which it writes the first of
// a row.
// Source: LightSeq (arXiv 2010.13887), which bounds the candidates of beams by the maxima of groups.

constexpr int SPAN_LEN = 32 * VALUES;
constexpr int N_SPANS_MAX = (1 << TOKEN_BITS) / SPAN_LEN;
constexpr int N_DEPTHS = (N_SPANS_MAX + CHOOSE_THREADS - 1) / CHOOSE_THREADS;
constexpr int N_LISTED_MAX = 4096;
// As many entries are sorted by counting.
constexpr int N_COUNTED_MAX = 256;
constexpr int N_WARPS = CHOOSE_THREADS / 32;
// Spans that a warp reads at once: 32 values of a thread.
constexpr int AHEAD = 32 / VALUES;
// Tokens that a block reads in one go, one group for each thread, and so many of those at once.
constexpr int STRIP = 4 * CHOOSE_THREADS;
constexpr int STRIPS_AHEAD = 8;  // a bit for each token of a thread
constexpr int N_STRIPS_MAX = (1 << TOKEN_BITS) / STRIP;
static_assert(TOP_K_MAX <= CHOOSE_THREADS && TOP_K_MAX <= N_LISTED_MAX, "a thread for each of the largest");
static_assert(N_COUNTED_MAX <= CHOOSE_THREADS && N_STRIPS_MAX <= CHOOSE_THREADS, "a thread for each");

struct ChooseParams {
    const float* logits;
    const float* adjusted;
    const OutputRow* rows;
    const unsigned* n_rows;
    const Part* parts;
    const float* spans;
    unsigned* stands;
    u64* drawn;
    int vocab;
    int n_chunks;
};
static_assert(sizeof(ChooseParams) == 72, "as in logits_params.rs");

struct ChooseShared {
    u64 list[N_LISTED_MAX];
    u64 scan[32];
    unsigned spans[N_SPANS_MAX];
    unsigned n_spans, n_listed;
    unsigned n_ties[N_STRIPS_MAX];  // of each strip
    float low, high;                // the logits that tie
    unsigned strip, n_left, end;    // the last tie that is kept: its strip, its place there, and the token behind it
    unsigned n_nearest, reach;      // ties that were near the least 1 - u so far, and what is near that of all
    u64 bests[CLUSTER];             // in the first block: what each comes to
};

// How the blocks of a row share out the strips of its ties: so many that follow each other for each in turn.
struct Sharing {
    unsigned rank, n_blocks;

    __device__ __forceinline__ unsigned owner_of(unsigned strip) const { return strip / STRIPS_AHEAD % n_blocks; }
};

// By all threads of the row's blocks.
__device__ __forceinline__ void wait_for_all(const Sharing& sharing) {
    if (sharing.n_blocks > 1) cluster_sync();
    else __syncthreads();
}

// x is at most 0. How far below it is, as a whole number: that of -inf is above all others.
constexpr int DEEPEST = 0x7f7fffff;
__device__ __forceinline__ int depth_of(float x) { return __float_as_int(fabsf(x)); }

struct Reach {
    int depth;       // what lies so deep is listed, or less deep
    bool has_ties;   // tokens that lie one deeper are not listed: with those there are at least k
};

// How many spans have a largest value of at most this depth. By all threads.
__device__ __forceinline__ int count_within(const int (&depths)[N_DEPTHS], int n_spans, int depth) {
    int n = __syncthreads_count(depths[0] <= depth);
#pragma unroll
    for (int i = 1; i < N_DEPTHS; i++)
        if (i * CHOOSE_THREADS < n_spans) n += __syncthreads_count(depths[i] <= depth);
    return n;
}

// From the top bit down, until the spans are few, or the depth is that of the k-th.
__device__ __forceinline__ Reach reach_of(const int (&depths)[N_DEPTHS], int n_spans, int k) {
    const int n_enough = k + k / 8 + 8;
    if (count_within(depths, n_spans, 0) > n_enough) return Reach{-1, true};
    int depth = DEEPEST, base = 0;
    int n = count_within(depths, n_spans, depth);
    for (int bit = 30; bit >= 0 && n > n_enough; bit--) {
        const int trial = base | ((1 << bit) - 1);
        const int n_within = count_within(depths, n_spans, trial);
        if (n_within >= k) depth = trial, n = n_within;
        else base |= 1 << bit;
    }
    return n > n_enough ? Reach{depth - 1, true} : Reach{depth, false};
}

// The first token of a lane in a span.
__device__ __forceinline__ int first_of(unsigned span) {
    return (int)(span / SPANS) * CHUNK + ((int)(span % SPANS) * 32 + (int)threadIdx.x % 32) * 4;
}

// Lists the tokens within reach, ranked, in no order; those past N_LISTED_MAX are not listed. Returns their number.
__device__ __forceinline__ unsigned list_tokens(const OutputRow& asked, const float* source, int vocab, float max,
                                                const int (&depths)[N_DEPTHS], int depth, ChooseShared& s) {
    __syncthreads();
    if (threadIdx.x == 0) s.n_spans = s.n_listed = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N_DEPTHS; i++)
        if (depths[i] <= depth) s.spans[atomicAdd(&s.n_spans, 1u)] = i * CHOOSE_THREADS + threadIdx.x;
    __syncthreads();
    const int n_spans = s.n_spans;
    // Spares most tokens the division. A quotient errs by 2^-24 of itself, or by 2^-150 where that is more.
    // What is infinitely far below is never kept.
    const float farthest = __int_as_float(depth > 0 ? depth : 0) * asked.temperature * 1.000002f;
    const float reach = fminf(farthest + asked.temperature * 3e-45f + 3e-45f, FLOAT_MAX);
    for (int start = threadIdx.x / 32; start < n_spans; start += N_WARPS * AHEAD) {
        float values[AHEAD * VALUES];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int idx = start + i * N_WARPS;
            const int first = idx < n_spans ? first_of(s.spans[idx]) : vocab;
#pragma unroll
            for (int g = 0; g < GROUPS; g++)
                load4(source, first + g * THREADS * 4, vocab, values + i * VALUES + 4 * g);
        }
        unsigned hits = 0;
#pragma unroll
        for (int j = 0; j < AHEAD * VALUES; j++) hits |= max - values[j] <= reach ? 1u << j : 0u;
#pragma unroll 1
        for (; hits != 0; hits &= hits - 1) {
            const int j = __ffs((int)hits) - 1;
            const int first = first_of(s.spans[start + j / VALUES * N_WARPS]);
            const int token = first + j % VALUES / 4 * THREADS * 4 + j % 4;
            const float x = tempered(source[token], max, asked.temperature);
            if (depth_of(x) > depth) continue;
            const unsigned place = atomicAdd(&s.n_listed, 1u);
            if (place < N_LISTED_MAX) s.list[place] = ranked(x, (unsigned)token);
        }
    }
    __syncthreads();
    return s.n_listed;
}

// The largest first. By all threads.
__device__ __forceinline__ void sort_list(ChooseShared& s, unsigned n) {
    if (n <= N_COUNTED_MAX) {
        // No two are equal: each goes behind as many as are larger, which threads side by side count together.
        unsigned share = 8;
        while (share * n > CHOOSE_THREADS) share /= 2;
        const unsigned mine = threadIdx.x / share;
        const u64 rank = mine < n ? s.list[mine] : 0;
        unsigned place = 0;
        if (mine < n)
            for (unsigned i = threadIdx.x % share; i < n; i += share) place += s.list[i] > rank ? 1 : 0;
        for (unsigned step = share / 2; step > 0; step /= 2) place += __shfl_xor_sync(LANES_ALL, place, step);
        __syncthreads();
        if (mine < n) s.list[place] = rank;
        __syncthreads();
        return;
    }
    unsigned size = 2;
    while (size < n) size <<= 1;
    for (unsigned i = n + threadIdx.x; i < size; i += CHOOSE_THREADS) s.list[i] = 0;
    sort<CHOOSE_THREADS>(s.list, size);
}

// Steps 6 to 9 over a sorted list: the best score, ranked, in every thread.
__device__ __forceinline__ u64 draw_listed(const OutputRow& asked, unsigned n, ChooseShared& s) {
    const float least = asked.top_k > 0 && asked.top_k <= n ? value_of(s.list[asked.top_k - 1]) : minus_infinity();
    const unsigned n_each = (n + CHOOSE_THREADS - 1) / CHOOSE_THREADS;
    const unsigned first = threadIdx.x * n_each, end = first + n_each < n ? first + n_each : n;
    const bool has_top_p = asked.top_p < 1.0f;
    u64 before = 0, target = ~0ull;
    if (has_top_p) {
        u64 weight = 0, sum;
        for (unsigned i = first; i < end; i++) {
            const float x = value_of(s.list[i]);
            weight += x >= least ? weight_of(x) : 0;
        }
        before = block_prefix<CHOOSE_THREADS>(weight, s.scan, sum) - weight;
        target = share_of(asked.top_p, sum);
    }
    const float lowest = fmaxf(least, asked.min_logit);
    u64 best = 0;
    for (unsigned i = first; i < end && before < target; i++) {
        const float x = value_of(s.list[i]);
        if (!(x >= lowest)) break;
        best = larger(best, score_of(asked, x, token_of(s.list[i])));
        if (has_top_p) before += weight_of(x);
    }
    return block_max<CHOOSE_THREADS>(best, s.scan);
}

// The least logit of which x lies at most so deep, up to that of key `end`, in whole numbers: x never falls as logits grow.
// By a warp, of which each lane tries a place.
__device__ __forceinline__ int least_within(int depth, float max, float temperature, int end) {
    // Counted from the least of all in unsigned numbers: the whole range is too long for signed ones.
    const unsigned first = (unsigned)order_key(-FLOAT_MAX), lane = threadIdx.x % 32;
    unsigned low = 0, high = (unsigned)end - first;
    while (low < high) {
        const unsigned step = (high - low) / 32 + 1, mine = low + lane * step;
        const float logit = of_order_key((int)(first + (mine < high ? mine : high)));
        const bool is_within = mine >= high || depth_of(tempered(logit, max, temperature)) <= depth;
        const unsigned within = __ballot_sync(LANES_ALL, is_within);
        const unsigned n_before = within == 0 ? 32 : (unsigned)__ffs((int)within) - 1;
        if (n_before < 32 && low + n_before * step < high) high = low + n_before * step;
        if (n_before > 0) low += (n_before - 1) * step + 1;
    }
    return (int)(first + low);
}

constexpr int STRIPS = STRIP * STRIPS_AHEAD;

// Which of a thread's tokens tie, of the strips that its block reads in one go.
struct Ties {
    unsigned bits;
    bool are_known;  // where the block's share is one go that was read
};

// Calls `f(strip, first token, which of its four tie)` for each group of a thread in the block's share.
template <class F>
__device__ __forceinline__ void each_tie(const Sharing& sharing, const float* source, int vocab, const ChooseShared& s,
                                         Ties& known, F f) {
    for (int start = (int)sharing.rank * STRIPS; start < vocab; start += (int)sharing.n_blocks * STRIPS) {
        if (!known.are_known) {
            float values[4 * STRIPS_AHEAD];
#pragma unroll
            for (int i = 0; i < STRIPS_AHEAD; i++)
                load4(source, start + i * STRIP + 4 * (int)threadIdx.x, vocab, values + 4 * i);
            const float low = s.low, high = s.high;
            known.bits = 0;
#pragma unroll
            for (int i = 0; i < 4 * STRIPS_AHEAD; i++) known.bits |= values[i] >= low && values[i] <= high ? 1u << i : 0u;
        }
        unsigned ties = known.bits;
#pragma unroll 1
        for (int i = 0; i < STRIPS_AHEAD; i++, ties >>= 4)
            f(start / STRIP + i, start + i * STRIP + 4 * (int)threadIdx.x, ties & 15);
    }
    known.are_known = (int)sharing.n_blocks * STRIPS >= vocab;
}

// Behind the last of the first n_kept ties, of which the number in each strip is known; for a block that has not read that
// strip, where the strip begins. By all threads.
__device__ __forceinline__ unsigned end_of_kept(const Sharing& sharing, const float* source, int vocab, const Ties& known,
                                                unsigned n_kept, ChooseShared& s) {
    const unsigned n_here = threadIdx.x < N_STRIPS_MAX ? s.n_ties[threadIdx.x] : 0;
    const unsigned through = (unsigned)block_prefix<CHOOSE_THREADS>(n_here, s.scan);
    if (through >= n_kept && through - n_here < n_kept) s.strip = threadIdx.x, s.n_left = n_kept - (through - n_here);
    __syncthreads();
    const unsigned strip = s.strip;
    if (sharing.owner_of(strip) != sharing.rank) return strip * STRIP;
    const int token = (int)strip * STRIP + 4 * (int)threadIdx.x;
    unsigned ties = known.bits >> (4 * (strip % STRIPS_AHEAD)) & 15;
    if (!known.are_known) {
        float values[4];
        load4(source, token, vocab, values);
        ties = 0;
#pragma unroll
        for (int lane = 0; lane < 4; lane++) ties |= values[lane] >= s.low && values[lane] <= s.high ? 1u << lane : 0u;
    }
    const unsigned n_mine = (unsigned)__popc(ties);
    unsigned place = (unsigned)block_prefix<CHOOSE_THREADS>(n_mine, s.scan) - n_mine;
#pragma unroll
    for (int lane = 0; lane < 4; lane++)
        if ((ties >> lane & 1) != 0 && ++place == s.n_left) s.end = token + lane + 1;
    __syncthreads();
    return s.end;
}

constexpr unsigned N_NEAREST_MAX = N_LISTED_MAX - TOP_K_MAX;

// The best of the ties before `end` in the block's share, for each thread its own. Their x is the same, so that noise decides:
// that of the largest u, but for those so near that rounding may have it otherwise. Near u = 1, where g grows least with u, it
// grows as 1 - u falls, by as much in nats as ln(1 - u): it is good to 1e-4, and all that is further from the least 1 - u is
// out of the running. What is near the least that its warp has met goes into a list, which lies behind the tokens above the
// ties; of that is worked out what is near the least of all.
__device__ __forceinline__ u64 best_tie(const Sharing& sharing, const OutputRow& asked, const float* source, int vocab,
                                        float value, unsigned end, Ties& known, ChooseShared& s) {
    u64* nearest = s.list + TOP_K_MAX;
    u64 best = 0;
    unsigned reach = NONE;  // in parts of 2^-23, as ~(w >> 9) has 1 - u
    each_tie(sharing, source, vocab, s, known, [&](int, int first, unsigned ties) {
        if (!__any_sync(LANES_ALL, ties != 0 && (unsigned)first < end)) return;
        const uint4 words = words_of(asked, (unsigned)first / 4);
        unsigned rests[4], least = NONE;
#pragma unroll
        for (int lane = 0; lane < 4; lane++) {
            const bool is_kept = (ties >> lane & 1) != 0 && (unsigned)(first + lane) < end;
            rests[lane] = is_kept ? ~lane_of(words, lane) >> 9 : NONE;
            least = rests[lane] < least ? rests[lane] : least;
        }
        least = __reduce_min_sync(LANES_ALL, least);
        if (least == NONE || least > reach) return;
        const unsigned near = least + least / 8192 + 1;
        reach = near < reach ? near : reach;
#pragma unroll
        for (int lane = 0; lane < 4; lane++) {
            if (rests[lane] > reach) continue;
            const unsigned token = (unsigned)(first + lane), place = atomicAdd(&s.n_nearest, 1u);
            if (place < N_NEAREST_MAX) nearest[place] = (u64)rests[lane] << 32 | token;
            else best = larger(best, score_of(asked, value, token));
        }
    });
    if (threadIdx.x % 32 == 0) atomicMin(&s.reach, reach);
    __syncthreads();
    const unsigned n = s.n_nearest < N_NEAREST_MAX ? s.n_nearest : N_NEAREST_MAX;
    for (unsigned i = threadIdx.x; i < n; i += CHOOSE_THREADS)
        if ((unsigned)(nearest[i] >> 32) <= s.reach) best = larger(best, score_of(asked, value, (unsigned)nearest[i]));
    return best;
}

// Steps 6 to 9 over a row of which the tokens above the ties are listed in order, and all ties are kept by top-k: the best
// score, ranked, in every thread of the row's first block.
__device__ __forceinline__ u64 draw_ties(const Sharing& sharing, const OutputRow& asked, const float* source, int vocab,
                                         float max, Reach reach, unsigned n, ChooseShared& s) {
    const float value = 0.0f - __int_as_float(reach.depth + 1);
    if (threadIdx.x < 64) {
        // One warp finds the least logit that ties, another the least one that is above.
        const int warp = (int)threadIdx.x / 32;
        const int key = least_within(reach.depth + 1 - warp, max, asked.temperature, order_key(max) + warp);
        if (threadIdx.x == 0) s.low = of_order_key(key);
        if (threadIdx.x == 32) s.high = of_order_key(key - 1);
    }
    if (threadIdx.x < N_STRIPS_MAX) s.n_ties[threadIdx.x] = 0;
    if (threadIdx.x == CHOOSE_THREADS - 1) s.n_nearest = 0, s.reach = NONE;
    const float x = threadIdx.x < n ? value_of(s.list[threadIdx.x]) : minus_infinity();
    const u64 weight = threadIdx.x < n ? weight_of(x) : 0;
    u64 above, target = ~0ull;
    const u64 before = block_prefix<CHOOSE_THREADS>(weight, s.scan, above) - weight;
    unsigned end = NONE;
    Ties known = {0, false};
    // The row's largest has a score above -2.82, and no noise is above 16.64.
    bool has_ties = value >= asked.min_logit && value >= -20.0f;
    if (asked.top_p < 1.0f) {
        each_tie(sharing, source, vocab, s, known, [&](int strip, int, unsigned ties) {
            const unsigned n_here = __reduce_add_sync(LANES_ALL, (unsigned)__popc(ties));
            if (n_here > 0 && threadIdx.x % 32 == 0) atomicAdd(&s.n_ties[strip], n_here);
        });
        wait_for_all(sharing);
        unsigned n_here = 0;
        if (threadIdx.x < N_STRIPS_MAX) {
            // A block reads of another what only that one counts, and writes none of its own.
            const unsigned owner = sharing.owner_of(threadIdx.x);
            unsigned& mine = s.n_ties[threadIdx.x];
            if (owner != sharing.rank) mine = *in_block(&mine, owner);
            n_here = mine;
        }
        const u64 each = weight_of(value);
        const unsigned n_ties = (unsigned)block_sum<CHOOSE_THREADS>(n_here, s.scan);
        target = share_of(asked.top_p, above + n_ties * each);
        // As many as reach it; they do, as all of them reach all. Each lane tries a number, and at most 2^19 of 2^45 are tried.
        static_assert(TOKEN_BITS == 18, "19 bits in four rounds");
        unsigned n_kept = 0;
        for (int shift = 14; shift >= -1; shift -= 5) {
            const int bits = shift > 0 ? shift : 0;
            const u64 n = n_kept + ((threadIdx.x % 32) << bits);
            const unsigned n_short = (unsigned)__popc(__ballot_sync(LANES_ALL, above + n * each < target));
            n_kept += n_short > 0 ? (n_short - 1) << bits : 0;
        }
        n_kept += above < target ? 1 : 0;
        has_ties &= n_kept > 0;
        if (has_ties && n_kept < n_ties) end = end_of_kept(sharing, source, vocab, known, n_kept, s);
    }
    const bool is_kept = threadIdx.x < n && before < target && x >= asked.min_logit;
    u64 best = is_kept ? score_of(asked, x, token_of(s.list[threadIdx.x])) : 0;
    if (has_ties) best = larger(best, best_tie(sharing, asked, source, vocab, value, end, known, s));
    best = block_max<CHOOSE_THREADS>(best, s.scan);
    if (sharing.n_blocks == 1) return best;
    if (threadIdx.x == 0) *in_block(&s.bests[sharing.rank], 0) = best;
    cluster_sync();
    for (unsigned rank = 0; rank < sharing.n_blocks; rank++) best = larger(best, s.bests[rank]);
    return best;
}

extern "C" __global__ void __launch_bounds__(CHOOSE_THREADS, CHOOSE_RESIDENT)
sample_choose(const __grid_constant__ ChooseParams p) {
    __shared__ ChooseShared s;
    Sharing sharing = {cluster_rank(), cluster_size()};
    const bool is_first = sharing.rank == 0;
    const int vocab = p.vocab, n_chunks = p.n_chunks, row = blockIdx.x / sharing.n_blocks;
    const OutputRow& asked = p.rows[row];
    const int n_spans = n_chunks * SPANS;
    // What a row needs is read before it is known whether it needs it: one read after the other would take longer.
    float largest[N_DEPTHS];
#pragma unroll
    for (int i = 0; i < N_DEPTHS; i++) {
        const int span = i * CHOOSE_THREADS + (int)threadIdx.x;
        largest[i] = span < n_spans ? p.spans[(size_t)row * n_spans + span] : minus_infinity();
    }
    if (((unsigned)row >= *p.n_rows) | !chooses(asked)) return;
    const Row whole = warp_row(p.parts + (size_t)row * n_chunks, n_chunks);
    unsigned& stand = p.stands[row];
    u64& drawn = p.drawn[(size_t)row * n_chunks];
    const float max = whole.adjusted.value;
    if (whole.is_bad || max == minus_infinity()) {
        if (is_first && threadIdx.x == 0) stand = STAND_DRAWN, drawn = 0;
        return;
    }
    int depths[N_DEPTHS];
#pragma unroll
    for (int i = 0; i < N_DEPTHS; i++) depths[i] = depth_of(tempered(largest[i], max, asked.temperature));
    const float* source = drawn_from(p.logits, p.adjusted, asked, row, vocab);
    Reach reach = asked.top_k > 0 ? reach_of(depths, n_spans, (int)asked.top_k) : Reach{depth_of(asked.min_logit), false};
    // Without ties there is nothing to share.
    if (!is_first && !reach.has_ties) return;
    unsigned n;
    while ((n = list_tokens(asked, source, vocab, max, depths, reach.depth, s)) > N_LISTED_MAX) {
        if (asked.top_k == 0) {
            if (threadIdx.x == 0) stand = STAND_OPEN;
            return;
        }
        // Which ones are listed is not the same in all blocks.
        if (!is_first) return;
        sharing.n_blocks = 1;
        sort_list(s, N_LISTED_MAX);
        reach = Reach{depth_of(value_of(s.list[asked.top_k - 1])) - 1, true};
    }
    const bool has_ties = reach.has_ties && n < asked.top_k;
    if (!is_first && !has_ties) return;
    sort_list(s, n);
    const u64 best = has_ties ? draw_ties(sharing, asked, source, vocab, max, reach, n, s) : draw_listed(asked, n, s);
    if (is_first && threadIdx.x == 0) stand = STAND_DRAWN, drawn = best;
}
