// The bound of a selection: the first tokens by falling order up to the one at which an amount is reached, by radix descent.
//
// A first histogram cuts the row into BINS bins of equal width below the largest value, as logits crowd in few exponents;
// the next ones go by 10 bits of (value, token). As soon as the bin that holds the place has few enough tokens they go into
// a list in the first block, which ends alone. What is counted is tokens or their weights in fixed point, whose sums do not
// depend on the order of atomics. All blocks look at the same merged histogram, so that they take the same way.

constexpr float BINS_PER_NAT = 32.0f;
constexpr int RANK_BITS = 32 + TOKEN_BITS;
static_assert(RANK_BITS == 50 && BINS == 1 << 10, "five digits of 10 bits");

struct Selection {
    bool is_nucleus;
    const uint4* code;
    unsigned n_code;
    unsigned order_register, row_register;
    float largest_order, largest_row;
};

// A token in the running.
struct Candidate {
    bool is_in;
    float order;
    u64 rank;
    u64 amount;
};

// Larger values have larger bins, equal ones the same.
__device__ __forceinline__ int bin_of(const Selection& sel, float order) {
    const float below = __fmul_rn(__fsub_rn(sel.largest_order, order), BINS_PER_NAT);
    // NaN, where both are -inf, goes with the farthest.
    return BINS - 1 - (int)fminf(below, (float)(BINS - 1));
}

// Calls `f` with each token of the block, by all lanes of a warp together.
template <class F> __device__ __forceinline__ void each_candidate(const Run& r, const Selection& sel, F f) {
    for (int start = (int)r.rank * TILE; start < r.vocab; start += CLUSTER * TILE) {
        const int first = start + 4 * (int)threadIdx.x;
        run_elements(r, r.s.code, sel.n_code, threadIdx.x, first);
        const Four order = get(r, threadIdx.x, sel.order_register, false);
        const Four row = get(r, threadIdx.x, sel.row_register, false);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            Candidate one;
            one.is_in = first + i < r.vocab && row.v[i] > minus_infinity();
            one.order = __fadd_rn(order.v[i], 0.0f);
            // Ties with the last of the largest are kept: tokens do not count.
            one.rank = ranked(one.order, (unsigned)(first + i)) & ~(sel.is_nucleus ? 0ull : TOKEN_MASK);
            one.amount = !one.is_in         ? 0
                         : sel.is_nucleus ? parts(exp_exact(__fsub_rn(row.v[i], sel.largest_row)))
                                          : 1;
            f(one);
        }
    }
}

// Adds to a 64-bit amount. Shared memory adds no wider words than 32 bits.
__device__ __forceinline__ void add_amount(Shared& s, int bin, u64 amount, unsigned n) {
    const unsigned low = (unsigned)amount;
    unsigned high = (unsigned)(amount >> 32);
    if (low != 0) high += atomicAdd(&s.low[bin], low) + low < low ? 1u : 0u;
    if (high != 0) atomicAdd(&s.high[bin], high);
    atomicAdd(&s.counts[bin], n);
}

// Adds the tokens of a warp to their bins, those of the bin of one of them together: where many are in one bin, atomics
// would queue up.
__device__ __forceinline__ void add_warp(Shared& s, bool is_in, int bin, u64 amount) {
    const unsigned all = __ballot_sync(LANES_ALL, is_in);
    if (all == 0) return;
    const int leader = __ffs((int)all) - 1;
    const int common = __shfl_sync(LANES_ALL, bin, leader);
    const bool is_common = is_in && bin == common;
    const unsigned n = (unsigned)__popc(__ballot_sync(LANES_ALL, is_common));
    if (n >= 8) {
        const u64 sum = warp_sum(is_common ? amount : 0);
        if ((int)(threadIdx.x % 32) == leader) add_amount(s, common, sum, n);
        is_in = is_in && !is_common;
    }
    if (is_in) add_amount(s, bin, amount, 1);
}

__device__ __forceinline__ void clear_bins(Shared& s) {
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) s.low[bin] = s.high[bin] = s.counts[bin] = 0;
    __syncthreads();
}

// Sums over the threads before this one, and over all, in every thread.
__device__ __forceinline__ u64 prefix_before(u64 value, Shared& s, u64& total) {
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u64 prefix = value;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        const u64 other = __shfl_up_sync(LANES_ALL, prefix, step);
        if (lane >= step) prefix += other;
    }
    __syncthreads();
    if (lane == 31) s.scan[warp] = prefix;
    __syncthreads();
    u64 before = 0;
    total = 0;
    for (int i = 0; i < WARPS; i++) {
        if (i < (int)warp) before += s.scan[i];
        total += s.scan[i];
    }
    return before + prefix - value;
}

// Bins of a thread, the first thread's being the highest.
constexpr int SHARE = BINS / THREADS;

// What the bins of a thread hold, in this block or in all, and the sum over all bins.
struct Amounts {
    u64 amounts[SHARE];
    unsigned counts[SHARE];
    u64 before, total;
};

__device__ __forceinline__ Amounts read_bins(Shared& s, unsigned n_blocks) {
    Amounts a;
    u64 sum = 0;
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
        const int bin = BINS - 1 - ((int)threadIdx.x * SHARE + i);
        a.amounts[i] = 0, a.counts[i] = 0;
        for (unsigned block = 0; block < n_blocks; block++) {
            // One block is this one.
            const Shared* other = n_blocks == 1 ? &s : in_block(&s, block);
            a.amounts[i] += ((u64)other->high[bin] << 32) + other->low[bin];
            a.counts[i] += other->counts[bin];
        }
        sum += a.amounts[i];
    }
    a.before = prefix_before(sum, s, a.total);
    return a;
}

// The bin at which the sum over falling bins reaches `target`, which is at least 1 and at most the sum of all.
__device__ __forceinline__ Digit find_digit(Shared& s, const Amounts& a, u64 target) {
    u64 above = a.before;
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
        if (above < target && above + a.amounts[i] >= target)
            s.digit = Digit{(unsigned)(BINS - 1 - ((int)threadIdx.x * SHARE + i)), a.counts[i], above};
        above += a.amounts[i];
    }
    __syncthreads();
    const Digit digit = s.digit;
    __syncthreads();
    return digit;
}

// Ends a descent over the list of this block: the rest of the rank from `shift` down to `last_shift`.
__device__ __forceinline__ u64 descend_list(Shared& s, u64 found, u64 target, int shift, int last_shift) {
    for (; shift >= last_shift; shift -= 10) {
        clear_bins(s);
        for (unsigned i = threadIdx.x; i < s.n_listed; i += THREADS) {
            const u64 digits = s.list.ranks[i] >> shift;
            if (digits >> 10 == found) add_amount(s, (int)(digits & (BINS - 1)), s.list.amounts[i], 1);
        }
        __syncthreads();
        const Digit digit = find_digit(s, read_bins(s, 1), target);
        found = (found << 10) | digit.bin;
        target -= digit.above;
    }
    return found;
}

// Finds the bound of one selection and puts it into two numbers of every block: the value, and for a nucleus the last token
// of that value. Entries of the step: the code, where the results and the argument are, where the largest values are.
__device__ __forceinline__ void select(Run& r, const uint4* entries, unsigned n_code, bool is_nucleus) {
    Shared& s = r.s;
    const uint4 places = entries[n_code], largest = entries[n_code + 1];
    for (unsigned i = threadIdx.x; i < n_code; i += THREADS) s.code[i] = entries[i];
    const Selection sel = {is_nucleus, s.code, n_code, places.x, places.y, s.numbers[largest.x], s.numbers[largest.y]};
    const float argument = s.numbers[places.w];
    float bound = plus_infinity(), last = 0.0f;
    // The same in all blocks, as numbers are.
    bool is_open = sel.largest_row > minus_infinity();
    if (is_open && !is_nucleus) is_open = argument >= 1.0f;
    if (is_open && is_nucleus && argument >= 1.0f) {
        bound = minus_infinity(), last = (float)(1 << TOKEN_BITS);
        is_open = false;
    }
    if (is_open) {
        const int last_shift = is_nucleus ? 0 : 10;
        u64 found = 0, target = 0;
        int wide_bin = 0;
        // Above all digits: the bins by distance from the largest value come first.
        int shift = RANK_BITS;
        bool is_all = false;
        while (true) {
            clear_bins(s);
            if (threadIdx.x == 0) s.n_listed = 0;
            each_candidate(r, sel, [&](const Candidate& one) {
                const int wide = bin_of(sel, one.order);
                const u64 digits = one.rank >> (shift == RANK_BITS ? 0 : shift);
                const bool is_here = shift == RANK_BITS || (wide == wide_bin && digits >> 10 == found);
                const int bin = shift == RANK_BITS ? wide : (int)(digits & (BINS - 1));
                add_warp(s, one.is_in && is_here, bin, one.amount);
            });
            cluster_sync();
            const Amounts amounts = read_bins(s, CLUSTER);
            // Others have read the bins before they are cleared.
            cluster_sync();
            if (shift == RANK_BITS) {
                const float k = fminf(argument, (float)(1 << TOKEN_BITS));
                if (!is_nucleus && (u64)k >= amounts.total) {
                    is_all = true;
                    break;
                }
                target = is_nucleus ? share_of(argument, amounts.total) : (u64)k;
            }
            const Digit digit = find_digit(s, amounts, target);
            target -= digit.above;
            if (shift == RANK_BITS) wide_bin = (int)digit.bin;
            else found = (found << 10) | digit.bin;
            const int known = shift;  // bits from here on are known
            shift -= 10;
            if (shift < last_shift) break;
            if (digit.count > LIST) continue;
            Shared* first = in_block(&s, 0);
            each_candidate(r, sel, [&](const Candidate& one) {
                const bool is_here =
                    bin_of(sel, one.order) == wide_bin && (known == RANK_BITS || one.rank >> known == found);
                if (!one.is_in || !is_here) return;
                const unsigned at = atomicAdd(&first->n_listed, 1u);
                first->list.ranks[at] = one.rank;
                first->list.amounts[at] = one.amount;
            });
            cluster_sync();
            if (r.rank == 0) {
                found = descend_list(s, found, target, shift, last_shift);
                if (threadIdx.x == 0) {
                    s.scan[0] = found;
                }
            }
            cluster_sync();
            found = in_block(&s, 0)->scan[0];
            cluster_sync();
            break;
        }
        if (is_all) {
            bound = minus_infinity();
        } else {
            const u64 rank = found << last_shift;
            bound = value_of((unsigned)(rank >> TOKEN_BITS));
            last = (float)(TOKEN_MASK - (rank & TOKEN_MASK));
        }
    }
    if (threadIdx.x == 0) s.numbers[places.z] = bound, s.numbers[places.z + 1] = last;
    __syncthreads();
}
