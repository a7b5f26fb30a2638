// The bound of a selection: the first tokens by falling order up to the one at which an amount is reached, by radix descent.
//
// A first histogram cuts the row into BINS bins of equal width below its largest value, as logits crowd in few exponents;
// the tokens of the bin that holds the place go into a list, which every block has and ends with for itself. Where they are
// too many for it, further histograms go by 10 bits of (value, token). What is counted is tokens or their weights in fixed
// point, whose sums do not depend on the order of atomics. Blocks tell each other sums over 32 bins at once, and read the
// bins of one such sum from each other: all take the same way.
//
// Of the largest, those of the bins above are listed as well if all together are few: later passes over rows that have
// nothing else need to look at no other tokens.

constexpr float BINS_PER_NAT = 64.0f;
constexpr int RANK_BITS = 32 + TOKEN_BITS;
static_assert(RANK_BITS == 50 && BINS == 1 << 10, "five digits of 10 bits");

// What a reading of the row is for.
enum class Reading { Gather, Take, Count, List, Done };

// Larger values have larger bins, equal ones the same.
__device__ __forceinline__ int bin_of(float largest, float order) {
    const float below = __fmul_rn(__fsub_rn(largest, order), BINS_PER_NAT);
    // NaN, where both are -inf, goes with the nearest.
    return BINS - 1 - (int)fminf(fmaxf(below, 0.0f), (float)(BINS - 1));
}

// Adds in shared memory where it is so, without a branch; what was there before, or 0.
__device__ __forceinline__ unsigned add_if(bool is_so, unsigned* to, unsigned amount) {
    unsigned before = 0;
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %2, 0;\n\t@p atom.shared.add.u32 %0, [%1], %3;\n\t}"
                 : "+r"(before)
                 : "r"((unsigned)__cvta_generic_to_shared(to)), "r"((unsigned)is_so), "r"(amount)
                 : "memory");
    return before;
}

// Adds to a 64-bit amount. Shared memory adds no wider words than 32 bits.
__device__ __forceinline__ void add_amount(Selections& all, int bin, u64 amount) {
    const unsigned low = (unsigned)amount;
    unsigned high = (unsigned)(amount >> 32);
    if (low != 0) high += atomicAdd(&all.low[bin], low) + low < low ? 1u : 0u;
    if (high != 0) atomicAdd(&all.high[bin], high);
}

// The bits of a rank that tell ties apart count for a nucleus alone: of the largest, ties with the last one are kept.
__device__ __forceinline__ u64 rank_of(const Selecting& sel, float order, int token) {
    return ranked(order, (unsigned)token) & ~(sel.is_nucleus ? 0ull : TOKEN_MASK);
}

__device__ __forceinline__ u64 amount_of(const Selecting& sel, float value) {
    return sel.is_nucleus ? __float2ull_rz(weight_in_parts(__fsub_rn(value, sel.largest_row))) : 1ull;
}

// Bits of the next digit.
__device__ __forceinline__ int digit_bits(const Selecting& sel) {
    return min(10, sel.known - (sel.is_nucleus ? 0 : TOKEN_BITS));
}

// Puts tokens on the list: those of a block go to every block, those of a list stay here.
__device__ __forceinline__ void list_tokens(const Run& r, const Place& at, int start, unsigned in, const Many& order,
                                            const Many& row) {
    Selections& all = selections_of(r.s);
    const Selecting& sel = r.s.selecting;
    const bool is_within = !is_dense(at);
    const unsigned n_most = is_within ? LIST : LIST_OF_BLOCK;
    unsigned least = 0xffffffffu, most = 0;
#pragma unroll
    for (int i = 0; i < 8; i++)
        if ((in >> i) & 1) least = min(least, key_of(order.v[i])), most = max(most, key_of(order.v[i]));
    least = __reduce_min_sync(LANES_ALL, least), most = __reduce_max_sync(LANES_ALL, most);
    if (threadIdx.x % 32 == 0) atomicMin(&all.mine.least, least), atomicMax(&all.mine.most, most);
    // Too many are not listed, whatever their number is.
    if (*(volatile unsigned*)&all.mine.n > n_most) return;
    while (in != 0) {
        const int idx = __ffs((int)in) - 1;
        in &= in - 1;
        float by = 0.0f, value = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (i == idx) by = order.v[i], value = row.v[i];
        const int token = token_of(at, start + idx);
        const unsigned place = atomicAdd(&all.mine.n, 1u);
        if (place >= n_most) continue;
        const Listed one = {rank_of(sel, by, token), sel.is_nucleus ? amount_of(sel, value) : (u64)token};
        if (is_within) {
            (&all.list[0][0])[place] = one;
        } else {
            for (unsigned block = 0; block < CLUSTER; block++) *in_block(&all.list[r.rank][place], block) = one;
        }
    }
}

// Adds eight amounts of a thread to bins. Where most tokens count (`is_full`), amounts of 0 are added as well, as a branch takes
// longer; many of them would queue up.
__device__ __forceinline__ void add_to_bins(Selections& all, bool is_nucleus, bool is_full, const int (&bins)[8],
                                            const u64 (&amounts)[8]) {
    // Where all tokens of a thread are in one bin, in all threads of the warp, atomics would queue up.
    int differing = 0;
#pragma unroll
    for (int i = 1; i < 8; i++) differing |= bins[0] ^ bins[i];
    if (__all_sync(LANES_ALL, differing == 0)) {
        u64 sum = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) sum += amounts[i];
        const int common = (int)__reduce_max_sync(LANES_ALL, (unsigned)bins[0]);
        const u64 of_common = warp_sum(bins[0] == common ? sum : 0);
        if (threadIdx.x % 32 == 0) add_amount(all, common, of_common);
        if (bins[0] != common && sum != 0) add_amount(all, bins[0], sum);
        return;
    }
    if (!is_nucleus) {
#pragma unroll
        for (int i = 0; i < 8; i++) add_if(amounts[i] != 0, &all.low[bins[i]], 1u);
        return;
    }
    // All at once, as each takes its time.
    unsigned before[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const unsigned low = (unsigned)amounts[i];
        before[i] = is_full ? atomicAdd(&all.low[bins[i]], low) : add_if(amounts[i] != 0, &all.low[bins[i]], low);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const unsigned low = (unsigned)amounts[i];
        const unsigned high = (unsigned)(amounts[i] >> 32) + (before[i] + low < low ? 1u : 0u);
        if (is_full) atomicAdd(&all.high[bins[i]], high);
        else add_if(high != 0, &all.high[bins[i]], high);
    }
}

// The amounts of eight tokens, of which those of `in` count. Worked out side by side, before anything is added: behind an atomic
// all that is in shared memory is read again.
__device__ __forceinline__ void amounts_of(bool is_nucleus, float largest_row, unsigned in, const Many& row, u64 (&amounts)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        // Of -inf it is 0.
        if (is_nucleus) amounts[i] = __float2ull_rz(weight_in_parts(__fsub_rn(row.v[i], largest_row)));
        else amounts[i] = row.v[i] > minus_infinity() ? 1 : 0;
    }
    if ((in & 255) == 255) return;
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (!((in >> i) & 1)) amounts[i] = 0;
}

// The distances from the largest of what is listed: those of a bin, of all that are not farther, or all where none is known.
struct Reach {
    float largest, nearest, farthest;
};

__device__ __forceinline__ Reach reach_of(const Selecting& sel) {
    const int depth = BINS - 1 - sel.bin;
    Reach reach = {sel.largest_order, minus_infinity(), plus_infinity()};
    if (depth > 0 && depth < BINS && !sel.is_whole) reach.nearest = (float)depth / BINS_PER_NAT;
    // The number before the next bin's nearest.
    if (depth < BINS - 1) reach.farthest = __uint_as_float(__float_as_uint((float)(depth + 1) / BINS_PER_NAT) - 1);
    return reach;
}

// Those of eight tokens that are within reach. No distance is a number where all are -inf, which are in one bin.
__device__ __forceinline__ unsigned within_reach(const Reach& reach, unsigned valid, const Many& order, const Many& row) {
    bool is_in[8], has_any = false;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float below = __fsub_rn(reach.largest, order.v[i]);
        is_in[i] = !(below < reach.nearest) & !(below > reach.farthest);
        has_any |= is_in[i];
    }
    if (!__any_sync(LANES_ALL, has_any)) return 0;
    unsigned in = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) in |= is_in[i] & (row.v[i] > minus_infinity()) ? 1u << i : 0u;
    return in & valid;
}

// What follows is done with the first eight of a thread's tokens, `start` of which are done.

// Counts by the distance from the largest.
__device__ __forceinline__ void count_by_distance(const Run& r, const Selecting& sel, bool is_full, unsigned valid,
                                                  const Many& order, const Many& row) {
    int bins[8];
#pragma unroll
    for (int i = 0; i < 8; i++) bins[i] = bin_of(sel.largest_order, order.v[i]);
    u64 amounts[8];
    amounts_of(sel.is_nucleus, sel.largest_row, valid, row, amounts);
    add_to_bins(selections_of(r.s), sel.is_nucleus, is_full, bins, amounts);
}

// Counts by the next digit of the rank, or lists by what is known of it.
__device__ __forceinline__ void gather_digits(const Run& r, const Selecting& sel, const Place& at, int start,
                                              const Many& order, const Many& row) {
    unsigned in = within_reach(reach_of(sel), at.valid >> start, order, row);
    if (!__any_sync(LANES_ALL, in != 0)) return;
    int bins[8];
    const int known = sel.known, shift = known - digit_bits(sel);
    const u64 found = sel.found;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const u64 rank = rank_of(sel, order.v[i], token_of(at, start + i));
        if (rank >> known != found) in &= ~(1u << i);
        bins[i] = (int)((rank >> shift) - (found << (known - shift))) & (BINS - 1);
    }
    if (!__any_sync(LANES_ALL, in != 0)) return;
    if (sel.is_listed) {
        list_tokens(r, at, start, in, order, row);
        return;
    }
    u64 amounts[8];
    amounts_of(sel.is_nucleus, sel.largest_row, in, row, amounts);
    add_to_bins(selections_of(r.s), sel.is_nucleus, false, bins, amounts);
}

// Lists what is within reach.
__device__ __forceinline__ void list_reached(const Run& r, const Reach& reach, const Place& at, int start, const Many& order,
                                             const Many& row) {
    const unsigned in = within_reach(reach, at.valid >> start, order, row);
    if (__any_sync(LANES_ALL, in != 0)) list_tokens(r, at, start, in, order, row);
}

// What a selection does with tokens.
enum class Ranks { Count, List, Digits };

__device__ __forceinline__ Ranks ranks_of(const Selecting& sel) {
    if (sel.is_listed && (sel.is_whole || sel.known == RANK_BITS)) return Ranks::List;
    return sel.bin < 0 ? Ranks::Count : Ranks::Digits;
}

// Calls `f` for eight tokens of a thread at a time.
template <class F> __device__ __forceinline__ void by_eights(Many& order, Many& row, F f) {
#pragma unroll 1
    for (int start = 0; start < EACH; start += 8, turn<8>(order), turn<8>(row)) f(start);
}

// A root: counts tokens by bins, or lists those of one.
__device__ __forceinline__ void gather_ranks(const Run& r, const Place& at, Many& order, Many& row) {
    const Selecting& sel = r.s.selecting;
    const Ranks what = ranks_of(sel);
    by_eights(order, row, [&](int start) {
        if (what == Ranks::Count) count_by_distance(r, sel, false, at.valid >> start, order, row);
        else if (what == Ranks::List) list_reached(r, reach_of(sel), at, start, order, row);
        else gather_digits(r, sel, at, start, order, row);
    });
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
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
        const u64 sum = s.scan[i];
        if (i < (int)warp) before += sum;
        total += sum;
    }
    return before + prefix - value;
}

__device__ __forceinline__ u64 amount_in(const Selections& all, int bin) {
    return ((u64)all.high[bin] << 32) + all.low[bin];
}

// Bins of a thread, the first thread's being the highest.
constexpr int SHARE = BINS / THREADS;

__device__ __forceinline__ void clear_bins(Selections& all) {
#pragma unroll
    for (int i = 0; i < SHARE; i++) all.low[i * THREADS + threadIdx.x] = all.high[i * THREADS + threadIdx.x] = 0;
}

// In the bins of this block: the one at which the sum over falling bins reaches `target`, which is at least 1 and at most the
// sum of all. A target of 0 stands for the share `p` of that sum.
__device__ __forceinline__ Digit find_digit(Shared& s, const Selections& all, u64& target, float p) {
    u64 amounts[SHARE], sum = 0, total;
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
        amounts[i] = amount_in(all, BINS - 1 - ((int)threadIdx.x * SHARE + i));
        sum += amounts[i];
    }
    u64 above = prefix_before(sum, s, total);
    if (target == 0) target = share_of(p, total);
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
        if (above < target && above + amounts[i] >= target)
            s.digit = Digit{(unsigned)(BINS - 1 - ((int)threadIdx.x * SHARE + i)), amounts[i], above};
        above += amounts[i];
    }
    __syncthreads();
    const Digit digit = s.digit;
    __syncthreads();
    return digit;
}

// Tells all blocks what this one has in each 32 bins, the highest bins first.
__device__ __forceinline__ void share_bins(const Run& r) {
    Selections& all = selections_of(r.s);
    for (unsigned i = threadIdx.x / 32; i < 32; i += WARPS) {
        u64 sum = amount_in(all, BINS - 1 - (int)(32 * i + threadIdx.x % 32));
        // The bins of a block hold less than 2^60 together.
        const u64 low = warp_sum(sum & 0x3fffffffull), high = warp_sum(sum >> 30);
        sum = (high << 30) + low;
        if (threadIdx.x % 32 < CLUSTER) in_block(&all, threadIdx.x % 32)->coarse[r.copy][r.rank][i] = sum;
    }
}

// The sum over the lanes before this one.
__device__ __forceinline__ u64 before_in_warp(u64 value) {
    u64 prefix = value;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        const u64 other = __shfl_up_sync(LANES_ALL, prefix, step);
        if (threadIdx.x % 32 >= (unsigned)step) prefix += other;
    }
    return prefix - value;
}

// The bin of all blocks together at which `target` is reached. A target of 0 stands for the `argument` of the selection.
// Where there is not so much, nothing but the sum of all is told.
__device__ __forceinline__ Digit find_shared_digit(const Run& r, u64& target, float argument, u64& total) {
    Shared& s = r.s;
    Selections& all = selections_of(r.s);
    const unsigned lane = threadIdx.x % 32;
    if (threadIdx.x < 32) {
        u64 sum = 0;
#pragma unroll
        for (int block = 0; block < CLUSTER; block++) sum += all.coarse[r.copy][block][lane];
        u64 above = before_in_warp(sum);
        total = __shfl_sync(LANES_ALL, above + sum, 31);
        if (target == 0) target = s.selecting.is_nucleus ? share_of(argument, total) : (u64)fminf(argument, (float)VOCAB_MAX);
        if (lane == 0) s.scan[0] = target, s.scan[1] = total;
        const unsigned parts = __ballot_sync(LANES_ALL, above < target && above + sum >= target);
        if (parts != 0) {
            const int part = __ffs((int)parts) - 1;
            above = __shfl_sync(LANES_ALL, above, part);
            const int bin = BINS - 1 - (int)(32 * part + lane);
            sum = 0;
#pragma unroll
            for (int block = 0; block < CLUSTER; block++) sum += amount_in(*in_block(&all, block), bin);
            above += before_in_warp(sum);
            if (above < target && above + sum >= target) s.digit = Digit{(unsigned)bin, sum, above};
        }
    }
    __syncthreads();
    target = s.scan[0], total = s.scan[1];
    return s.digit;
}

// Ends a descent over the list: the rank at which `target` is reached, or the share `p` of all if it is 0. Listed are at most
// LIST tokens, in as many parts as blocks wrote them.
__device__ __forceinline__ u64 descend_list(const Run& r, u64 target, float p) {
    constexpr int MINE = (LIST + THREADS - 1) / THREADS;
    Shared& s = r.s;
    Selections& all = selections_of(r.s);
    const bool is_nucleus = s.selecting.is_nucleus;
    const int last = is_nucleus ? 0 : TOKEN_BITS;
    u64 ranks[MINE], amounts[MINE];
    unsigned in = 0;
    if (threadIdx.x < 2) s.differing[threadIdx.x] = 0;
#pragma unroll
    for (int i = 0; i < MINE; i++) {
        const unsigned place = threadIdx.x + i * THREADS;
        ranks[i] = amounts[i] = 0;
        if (place < LIST && place % LIST_OF_BLOCK < all.ranges[place / LIST_OF_BLOCK].n) {
            const Listed one = all.list[place / LIST_OF_BLOCK][place % LIST_OF_BLOCK];
            ranks[i] = one.rank, amounts[i] = is_nucleus ? one.amount : 1;
            in |= 1u << i;
            s.any_rank = one.rank;
        }
    }
    __syncthreads();
    const u64 any = s.any_rank;
    u64 differing = 0;
#pragma unroll
    for (int i = 0; i < MINE; i++)
        if ((in >> i) & 1) differing |= ranks[i] ^ any;
    const unsigned low = __reduce_or_sync(LANES_ALL, (unsigned)differing);
    const unsigned high = __reduce_or_sync(LANES_ALL, (unsigned)(differing >> 32));
    if (threadIdx.x % 32 == 0) {
        if (low != 0) atomicOr(&s.differing[0], low);
        if (high != 0) atomicOr(&s.differing[1], high);
    }
    __syncthreads();
    // Bits from here on are the same in all.
    int known = s.differing[1] != 0 ? 64 - __clz((int)s.differing[1]) : 32 - __clz((int)s.differing[0]);
    if (known < last) known = last;
    u64 found = any >> known;
    while (known > last) {
        const int n_bits = min(10, known - last), shift = known - n_bits;
        clear_bins(all);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < MINE; i++)
            if ((in >> i) & 1) add_amount(all, (int)(ranks[i] >> shift) & ((1 << n_bits) - 1), amounts[i]);
        __syncthreads();
        const Digit digit = find_digit(s, all, target, p);
        target -= digit.above;
        found = (found << n_bits) | digit.bin;
        known = shift;
        unsigned n_left = 0;
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            if (ranks[i] >> shift != found) in &= ~(1u << i);
            else if ((in >> i) & 1) n_left++, s.any_rank = ranks[i];
        }
        n_left = (unsigned)__syncthreads_count(n_left == 1) + 2 * (unsigned)__syncthreads_count(n_left > 1);
        if (n_left == 1) return s.any_rank;
    }
    return found << known;
}

// What stands in the entry after the code: where the results and the argument are, and the largest values.
__device__ __forceinline__ void set_bound(const Run& r, uint4 places, float bound, float last) {
    if (threadIdx.x == 0) r.s.numbers[places.x] = bound, r.s.numbers[places.x + 1] = last;
    __syncthreads();
}

__device__ __forceinline__ Reading begin_selection(const Run& r, uint4 places, bool is_nucleus, bool is_within) {
    Shared& s = r.s;
    const float largest_row = s.numbers[places.w], argument = s.numbers[places.y];
    __syncthreads();
    if (!is_nucleus && threadIdx.x == 0) s.is_listed = 0;
    if (!(largest_row > minus_infinity()) || (!is_nucleus && !(argument >= 1.0f))) {
        set_bound(r, places, plus_infinity(), 0.0f);
        return Reading::Done;
    }
    if (is_nucleus && argument >= 1.0f) {
        set_bound(r, places, minus_infinity(), (float)VOCAB_MAX);
        return Reading::Done;
    }
    clear_bins(selections_of(r.s));
    if (threadIdx.x == 0) {
        s.selecting = Selecting{s.numbers[places.z], largest_row, is_nucleus, false, is_within, -1, RANK_BITS, 0, 0};
        s.target = 0;
        selections_of(r.s).mine = Range{0, 0xffffffffu, 0, 0};
    }
    __syncthreads();
    return is_within ? Reading::List : Reading::Count;
}

__device__ __forceinline__ Reading end_selection(const Run& r, uint4 places, u64 rank) {
    set_bound(r, places, value_of((unsigned)(rank >> TOKEN_BITS)), (float)(TOKEN_MASK - (rank & TOKEN_MASK)));
    return Reading::Done;
}

// After the row was counted by bins.
__device__ __forceinline__ Reading after_count(Run& r, uint4 places) {
    Shared& s = r.s;
    __syncthreads();
    share_bins(r);
    cluster_sync();
    u64 total, target = s.target;
    const Digit digit = find_shared_digit(r, target, s.numbers[places.y], total);
    if (threadIdx.x == 0) s.copy = (s.copy + 1) % COPIES;
    Selecting next = s.selecting;
    const int n_bits = digit_bits(next);
    const bool is_first = next.bin < 0;
    // A block that has its bound may clear its bins, or be gone, while another still reads them: all wait for each other.
    if (is_first && !next.is_nucleus && target >= total) {
        cluster_sync();
        set_bound(r, places, minus_infinity(), 0.0f);
        return Reading::Done;
    }
    __syncthreads();
    target -= digit.above;
    if (is_first) {
        next.bin = (int)digit.bin;
        next.above = digit.above;
        next.is_whole = !next.is_nucleus && digit.above + digit.amount <= LIST / 2;
        if (next.is_whole) target += digit.above;
    } else {
        next.found = (next.found << n_bits) + digit.bin;
        next.known -= n_bits;
        if (digit_bits(next) == 0) {
            cluster_sync();
            return end_selection(r, places, next.found << next.known);
        }
    }
    next.is_listed = true;
    if (threadIdx.x == 0) s.selecting = next, s.target = target, selections_of(r.s).mine = Range{0, 0xffffffffu, 0, 0};
    __syncthreads();
    return Reading::List;
}

// After tokens were listed: ends with the list, or goes on by further digits if they were too many.
__device__ __forceinline__ Reading after_list(const Run& r, uint4 places, bool is_within) {
    Shared& s = r.s;
    Selections& all = selections_of(r.s);
    Selecting next = s.selecting;
    u64 target = s.target;
    __syncthreads();
    if (is_within) {
        const unsigned n = all.mine.n;
        if (threadIdx.x < CLUSTER) {
            const unsigned first = threadIdx.x * LIST_OF_BLOCK;
            all.ranges[threadIdx.x].n = n > first ? min(n - first, (unsigned)LIST_OF_BLOCK) : 0;
        }
        __syncthreads();
        if (!next.is_nucleus) target = (u64)fminf(s.numbers[places.y], (float)VOCAB_MAX);
    } else {
        if (threadIdx.x < CLUSTER) in_block(&all, threadIdx.x)->ranges[r.rank] = all.mine;
        cluster_sync();
    }
    unsigned n_most = 0, n = 0, least = 0xffffffffu, most = 0;
    for (int block = 0; block < CLUSTER; block++) {
        const Range range = all.ranges[block];
        n += range.n, n_most = max(n_most, range.n);
        least = min(least, range.least), most = max(most, range.most);
    }
    if (n_most > LIST_OF_BLOCK) {
        if (next.is_whole) {
            target -= next.above;
            next.is_whole = false;
        } else if (next.known == RANK_BITS) {
            next.known = TOKEN_BITS + (least == most ? 0 : 32 - __clz((int)(least ^ most)));
            next.found = ((u64)most << TOKEN_BITS) >> next.known;
            if (digit_bits(next) == 0) return end_selection(r, places, next.found << next.known);
        }
        clear_bins(all);
        next.is_listed = false;
        if (threadIdx.x == 0) s.selecting = next, s.target = target, all.mine = Range{0, 0xffffffffu, 0, 0};
        __syncthreads();
        return Reading::Count;
    }
    const bool is_all = is_within && !next.is_nucleus && target >= n;
    const u64 rank = is_all ? 0 : descend_list(r, target, s.numbers[places.y]);
    if (is_within ? !next.is_nucleus : next.is_whole) {
        if (threadIdx.x == 0) s.n_tokens = 0, s.is_listed = 1;
        __syncthreads();
        for (unsigned place = threadIdx.x; place < LIST; place += THREADS) {
            if (place % LIST_OF_BLOCK >= all.ranges[place / LIST_OF_BLOCK].n) continue;
            const Listed one = all.list[place / LIST_OF_BLOCK][place % LIST_OF_BLOCK];
            if (one.rank >= rank) all.tokens[atomicAdd(&s.n_tokens, 1u)] = (unsigned)one.amount;
        }
    }
    if (!is_all) return end_selection(r, places, rank);
    set_bound(r, places, minus_infinity(), 0.0f);
    return Reading::Done;
}
