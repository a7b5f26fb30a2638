// Plain roots (program_plain.rs): what a few operations in a fixed order make of the logits, and what is gathered from that.
// Nothing but the row and one besides is held, so that a reading costs little more than what it works out.

// The sum over a warp of any amounts.
__device__ __forceinline__ u64 warp_sum_of_any(u64 amount) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) amount += __shfl_xor_sync(LANES_ALL, amount, step);
    return amount;
}

// How a row is made of the logits, with its numbers at hand.
struct Form {
    unsigned flags;
    float first, divisor, by, again, bound, elsewhere;
    int last;  // token of a nucleus that ties with the bound
};

__device__ __forceinline__ Form form_of(const Shared& s, const uint4* entries) {
    const uint4 in = entries[1];
    const float* numbers = s.numbers;
    const unsigned flags = in.x, bound = in.z & 255, elsewhere = in.z >> 8 & 255;
    Form form = {flags, numbers[in.y >> 8 & 255], numbers[in.y & 255], numbers[in.y >> 16 & 255], numbers[in.y >> 24],
                 numbers[bound], 0.0f, 0};
    if (flags & MOVED_FIRST_DOWN) form.first = -form.first;
    if (flags & MOVED_DOWN) form.by = -form.by;
    if (flags & MOVED_AGAIN_DOWN) form.again = -form.again;
    form.elsewhere = elsewhere == NO_NUMBER ? minus_infinity() : numbers[elsewhere];
    form.last = flags & IN_NUCLEUS ? (int)numbers[bound + 1] : 0;
    return form;
}

#define EACH_ENTRY(expression)                                                                                         \
    {                                                                                                                  \
        _Pragma("unroll") for (int i = 0; i < EACH; i++) {                                                                \
            const float a = x.v[i];                                                                                    \
            x.v[i] = expression;                                                                                       \
        }                                                                                                              \
    }

__device__ __forceinline__ void move(Many& x, float by, bool is_finite) {
    if (is_finite || by <= FLOAT_MAX) EACH_ENTRY(fminf(__fadd_rn(a, by), FLOAT_MAX))
    else EACH_ENTRY(in_row(__fadd_rn(a, by)))
}

// The form of a distance from a number, as a typical token's from the entropy. It is common and has many parts: where it is
// known beforehand, nothing has to be looked up for a tile.
constexpr unsigned DISTANCE = MOVED | MARKED | MOVED_AGAIN | POSITIVE | NEGATIVE;
constexpr unsigned DISTANCE_NUCLEUS = DISTANCE | IN_NUCLEUS | OF_LOGITS;

// Whether a form is this one, whose numbers are such that make_row may leave out what they make needless.
__device__ __forceinline__ bool is_form(const Form& form, unsigned flags) {
    return (form.flags & ~(MOVED_DOWN | MOVED_AGAIN_DOWN)) == flags && fabsf(form.by) <= FLOAT_MAX &&
           fabsf(form.again) <= FLOAT_MAX && (!(flags & IN_NUCLEUS) || form.bound > -FLOAT_MAX);
}

// Makes the row. `marked` begins as the logits. KNOWN is a form that was recognized, or 0.
template <unsigned KNOWN>
__device__ __forceinline__ void make_row(const Run& r, const Place& at, const Form& form, Many& x, Many& marked) {
    const unsigned flags = KNOWN != 0 ? KNOWN : form.flags;
    if (flags == 0) return;
    const Many logits = x;
    if (flags & (MOVED_FIRST | DIVIDED)) {
        if (flags & MOVED_FIRST) move(x, form.first, KNOWN != 0);
        if (flags & DIVIDED) divide(x, form.divisor);
    }
    if (flags & (MOVED | MARKED | MOVED_AGAIN | POSITIVE | NEGATIVE)) {
        if (flags & MOVED) move(x, form.by, KNOWN != 0);
        if (flags & MARKED) marked = x;
        if ((KNOWN & DISTANCE) == DISTANCE) {
            // The steps below at once, as it comes to the same: what is above the largest number becomes that by its size.
            EACH_ENTRY(-fminf(fabsf(__fadd_rn(a, form.again)), FLOAT_MAX))
        } else {
            if (flags & MOVED_AGAIN) move(x, form.again, false);
            if (flags & POSITIVE) EACH_ENTRY(fminf(fabsf(a), FLOAT_MAX))
            if (flags & NEGATIVE) EACH_ENTRY(fminf(-a, FLOAT_MAX))
        }
    }
    if (flags < KEPT_FROM) return;
    const float bound = form.bound;
    if (flags & KEPT_FROM) {
        EACH_ENTRY(a >= bound ? a : minus_infinity())
    } else if (flags & KEPT_ABOVE) {
        EACH_ENTRY(a > bound ? a : minus_infinity())
    } else if (flags & IN_SET) {
        EACH_ENTRY(truth(a >= bound && a > minus_infinity()))
    } else if (flags & IN_NUCLEUS) {
        const int last = form.last - at.first;
        if (!(flags & (OF_LOGITS | OF_MARKED))) marked = x;
        const Many value = !(flags & OF_LOGITS) ? marked : KNOWN != 0 ? logits : logits_at(r, at);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const bool is_in = (x.v[i] > bound) | ((x.v[i] == bound) & (i / 4 * at.step + i % 4 <= last));
            // Of -inf the distance is the largest number: a known bound is nearer.
            const bool counts = KNOWN != 0 || marked.v[i] > minus_infinity();
            x.v[i] = is_in & counts ? value.v[i] : form.elsewhere;
        }
    }
}

#undef EACH_ENTRY

// The tokens of the block, a tile of each warp at a time, in the form of a root. There is a loop for each root, with
// registers of its own.
template <unsigned KNOWN = 0, class F> __device__ __forceinline__ void each_tile(Run& r, const Form& form, F f) {
    const int begin = r.begin, n_kept = r.n_kept, n_tokens = r.s.end - begin, step = r.s.n_warps * TILE;
    for (int start = (int)threadIdx.x / 32 * TILE; start < n_tokens; start += step) {
        if (r.n_there < n_kept) wait_for_row(r, start + TILE);
        Place at = {begin + start + 4 * (int)(threadIdx.x % 32), 128, ALL_VALID};
        if (start + TILE > n_tokens) {
            at.valid = 0;
#pragma unroll
            for (int i = 0; i < EACH; i++)
                if (token_of(at, i) < begin + n_tokens) at.valid |= 1u << i;
        }
        // A tile is kept as a whole or not at all.
        Many x = start < n_kept ? kept_at(r, at.first - begin, 128) : logits_in_memory(r, at), marked = x;
        make_row<KNOWN>(r, at, form, x, marked);
        f(at, x, marked);
    }
}

__device__ __forceinline__ unsigned slot_of(const uint4* entries) { return fresh(entries[0].x) >> 8 & (N_GATHERED - 1); }

__device__ __forceinline__ u64* place_of(Shared& s, const uint4* entries) {
    return &s.gathered[slot_of(entries)][threadIdx.x / 32];
}

// Gathers for a selection.
__device__ __forceinline__ void read_ranks(Run& r, const Form& form) {
    const Selecting sel = r.s.selecting;
    const Ranks what = ranks_of(sel);
    if (what == Ranks::Digits || !is_form(form, DISTANCE) || !sel.is_nucleus) {
        each_tile(r, form, [&](const Place& at, Many& x, Many& marked) { gather_ranks(r, at, x, marked); });
    } else if (what == Ranks::Count) {
        Selecting nucleus = sel;
        nucleus.is_nucleus = true;
        each_tile<DISTANCE>(r, form, [&](const Place& at, Many& x, Many& marked) {
            by_eights(x, marked, [&](int start) { count_by_distance(r, nucleus, true, at.valid >> start, x, marked); });
        });
    } else {
        const Reach reach = reach_of(sel);
        each_tile<DISTANCE>(r, form, [&](const Place& at, Many& x, Many& marked) {
            by_eights(x, marked, [&](int start) { list_reached(r, reach, at, start, x, marked); });
        });
    }
}

// Gathers for one root.
__device__ __forceinline__ void read_plain(Run& r, const uint4* entries) {
    Shared& s = r.s;
    if ((int)threadIdx.x / 32 >= s.n_warps) return;
    const unsigned what = entries[0].x & 255;
    const Form form = form_of(s, entries);
    if (what == BEST) {
        // The first tile that has the best of the thread: it is looked at again. What does not count in it comes last.
        float best = minus_infinity();
        int first = -1;
        each_tile(r, form, [&](const Place& at, Many& x, Many&) {
            const float largest = largest_of(counted(x, at.valid));
            if (largest > best) best = largest, first = at.first;
        });
        unsigned low = 0;
        if (first >= 0) {
            const Place at = {first, 128, ALL_VALID};
            Many x = logits_at(r, at), marked = x;
            make_row<0>(r, at, form, x, marked);
#pragma unroll
            for (int i = EACH - 1; i >= 0; i--)
                if (x.v[i] == best) low = low_of(token_of(at, i), __float_as_uint(x.v[i]) == 0x80000000u);
        }
        __syncwarp();
        keep_best(s, slot_of(entries), place_of(s, entries), key_of(best), low);
    } else if (what == LOG_SUM_EXP || what == ENTROPY) {
        const float max = s.numbers[entries[0].w & (N_NUMBERS - 1)];
        u64 sum = 0, weighted = 0;
        each_tile(r, form, [&](const Place& at, Many& x, Many&) {
            add_exponentials(counted(x, at.valid), what == ENTROPY, max, sum, weighted);
        });
        sum = warp_sum_of_any(sum), weighted = warp_sum_of_any(weighted);
        u64* place = place_of(s, entries);
        if (threadIdx.x % 32 == 0) {
            *place += sum;
            if (what == ENTROPY) place[WARPS] += weighted;
        }
    } else if (what == DRAW) {
        const auto draw = [&](const Place& at, Many& x, Many&) {
            gather_draw(r, at, slot_of(entries), place_of(s, entries), x, fresh(entries[0].z));
        };
        if (is_form(form, DISTANCE_NUCLEUS)) each_tile<DISTANCE_NUCLEUS>(r, form, draw);
        else each_tile(r, form, draw);
    } else if (what == RANK) {
        read_ranks(r, form);
    } else if (what == COUNT) {
        unsigned sum = 0;
        each_tile(r, form, [&](const Place& at, Many& x, Many&) { sum += (unsigned)__popc(in_set(at.valid, x)); });
        sum = __reduce_add_sync(LANES_ALL, sum);
        if (threadIdx.x % 32 == 0) *place_of(s, entries) += sum;
    } else {  // SUM, SQUARES
        each_tile(r, form, [&](const Place& at, Many& x, Many&) {
            const float mean = s.numbers[fresh(entries[0].w) & (N_NUMBERS - 1)];
            gather_sum(r, at, slot_of(entries), x, at.valid, what == SQUARES, mean);
        });
    }
}
