// Finding a place in the order of a row without sorting the row: radix descent.
//
// A first histogram over the row cuts it into BINS bins of equal width below the largest value: logits crowd in few
// exponents, so that bins of their bits would make most atomics collide. The bin that holds the place is then
// gathered into shared memory, and histograms of 10 bits of (value, token) at a time end at one token. A bin
// too large for shared memory is read from the row instead, to the same result. All of it is the work of one block
// of BINS threads, but for the first histogram of sample.cu, which is spread over the chunks.
//
// What is counted is either tokens or their weights exp(value) in fixed point: integer sums do not depend on
// the order of the atomics.

static_assert(BINS == 1 << 10, "digits of 10 bits");
constexpr int LIST = 4096;
constexpr int LAST_DIGIT = 40;
constexpr float BINS_PER_NAT = 32.0f;

struct Place {
    int bin;
    u64 above;  // in the bins before it
};

// A 64-bit amount for each bin. Shared memory adds no wider words than 32 bits.
struct Amounts {
    unsigned low[BINS], high[BINS];

    __device__ __forceinline__ void add(int bin, u64 amount) {
        unsigned low_part = (unsigned)amount, high_part = (unsigned)(amount >> 32);
        if (low_part != 0) {
            unsigned old = atomicAdd(&low[bin], low_part);
            high_part += old + low_part < old ? 1u : 0u;
        }
        if (high_part != 0) atomicAdd(&high[bin], high_part);
    }

    __device__ __forceinline__ u64 get(int bin) const { return ((u64)high[bin] << 32) | low[bin]; }
};

// Adds to bins for one thread, at once what comes for one bin after the other: where logits are equal atomics would queue up.
struct Adding {
    Amounts& amounts;
    int bin = 0;
    u64 pending = 0;

    __device__ __forceinline__ void add(int to, u64 amount) {
        if (to != bin) flush();
        bin = to;
        pending += amount;
    }

    __device__ __forceinline__ void flush() {
        amounts.add(bin, pending);
        pending = 0;
    }

    // By all lanes of a warp, at the end.
    __device__ __forceinline__ void finish() {
        int is_one_bin;
        __match_all_sync(LANES_ALL, bin, &is_one_bin);
        if (is_one_bin) {
#pragma unroll
            for (int step = 16; step > 0; step >>= 1) pending += __shfl_xor_sync(LANES_ALL, pending, step);
            if (threadIdx.x % 32 != 0) pending = 0;
        }
        flush();
    }
};

struct Shared {
    Amounts amounts;
    u64 list[LIST];
    u64 scan[32];
    unsigned n_listed;
    unsigned n_in_place;
    Place place;
};

// The values that a row is ordered by: its logits, or what step 5 makes of them.
template <bool TEMPERED> struct Values {
    const float* row;
    int vocab;
    float max;
    float temperature;
    float bins_per_unit;

    __device__ Values(const float* row, int vocab, float max, float temperature)
        : row(row), vocab(vocab), max(max), temperature(temperature),
          // Bins keep their width in logits: a low temperature must not push the row into the last one.
          bins_per_unit(TEMPERED ? fminf(fmaxf(BINS_PER_NAT * temperature, 1e-30f), 1e30f) : BINS_PER_NAT) {}

    __device__ __forceinline__ float value(float logit) const {
        return TEMPERED ? tempered(logit, max, temperature) : logit;
    }

    // Larger values have larger bins, equal values the same one.
    __device__ __forceinline__ int bin(float value) const {
        float below = TEMPERED ? -value : max - value;
        return BINS - 1 - (int)fminf(below * bins_per_unit, (float)(BINS - 1));
    }

    // Calls `f(token, value)` for every token above -inf.
    template <class F> __device__ __forceinline__ void each(F f) const {
        each_within(minus_infinity(), plus_infinity(), f);
    }

    // Calls `f(token, value)` for every token of a bin.
    template <class F> __device__ __forceinline__ void each_of(int wanted, F f) const {
        // Spares most tokens the division. Half a bin is far more than rounding can move a token, unless the
        // temperature takes the values to the ends of f32.
        bool is_plain = !TEMPERED || (temperature > 1e-20f && temperature < 1e20f);
        float nearest = is_plain ? (BINS - 1 - wanted - 0.5f) / BINS_PER_NAT : minus_infinity();
        float farthest = is_plain && wanted > 0 ? (BINS - wanted + 0.5f) / BINS_PER_NAT : plus_infinity();
        each_within(nearest, farthest, [&](unsigned token, float value) {
            if (bin(value) == wanted) f(token, value);
        });
    }

  private:
    // Tokens above -inf whose logits lie `nearest` to `farthest` below the largest.
    template <class F> __device__ __forceinline__ void each_within(float nearest, float farthest, F f) const {
        constexpr int AHEAD = 4;
        for (int start = 0; start < vocab; start += 4 * BINS * AHEAD) {
            float logits[4 * AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; i++) load4(row, start + 4 * (i * BINS + (int)threadIdx.x), vocab, logits + 4 * i);
#pragma unroll
            for (int i = 0; i < 4 * AHEAD; i++) {
                float below = max - logits[i];
                if (below >= nearest && below <= farthest) {
                    float v = value(logits[i]);
                    if (v > minus_infinity()) f((unsigned)(start + 4 * (i / 4 * BINS + (int)threadIdx.x) + i % 4), v);
                }
            }
        }
    }
};

// The bin that a thread looks after: the first thread has the largest values.
__device__ __forceinline__ int my_bin() { return BINS - 1 - (int)threadIdx.x; }

// What thread `my_bin() == bin` holds, in every thread.
__device__ __forceinline__ unsigned from_bin(int bin, unsigned mine, Shared& s) {
    if (my_bin() == bin) s.n_in_place = mine;
    __syncthreads();
    unsigned value = s.n_in_place;
    __syncthreads();
    return value;
}

// The bin in which the running sum over falling bins reaches `target`, which is at least 1 and at most the sum of
// all. `amount` is what the thread's bin holds.
__device__ __forceinline__ Place find_place(u64 amount, u64 target, Shared& s) {
    u64 prefix = block_prefix<BINS>(amount, s.scan);
    if (prefix >= target && prefix - amount < target) s.place = Place{my_bin(), prefix - amount};
    __syncthreads();
    Place place = s.place;
    __syncthreads();
    return place;
}

__device__ __forceinline__ void clear_bins(Shared& s) {
    s.amounts.low[threadIdx.x] = 0;
    s.amounts.high[threadIdx.x] = 0;
    __syncthreads();
}

// How many tokens of the row the thread's bin holds.
template <bool TEMPERED> __device__ __forceinline__ unsigned count_bins(const Values<TEMPERED>& values, Shared& s) {
    clear_bins(s);
    // Far below the largest value everything is in the last bin.
    unsigned n_last = 0;
    Adding adding = {s.amounts};
    values.each([&](unsigned token, float value) {
        int bin = values.bin(value);
        if (bin == 0) n_last++;
        else adding.add(bin, 1);
    });
    adding.finish();
    u64 n_in_last = block_sum<BINS>(n_last, s.scan);
    unsigned count = my_bin() == 0 ? (unsigned)n_in_last : s.amounts.low[my_bin()];
    __syncthreads();
    return count;
}

// The tokens of one bin, from shared memory when they fit.
template <bool TEMPERED> struct Bucket {
    const Values<TEMPERED>& values;
    Shared& s;
    int bin;
    bool is_listed;

    __device__ Bucket(const Values<TEMPERED>& values, Shared& s, int bin, unsigned n)
        : values(values), s(s), bin(bin), is_listed(n <= LIST) {
        if (!is_listed) return;
        if (threadIdx.x == 0) s.n_listed = 0;
        __syncthreads();
        values.each_of(bin, [&](unsigned token, float value) {
            s.list[atomicAdd(&s.n_listed, 1u)] = ranked(value, token);
        });
        __syncthreads();
    }

    template <class F> __device__ __forceinline__ void each(F f) const {
        if (is_listed) {
            for (unsigned i = threadIdx.x; i < s.n_listed; i += BINS) f(s.list[i]);
        } else {
            values.each_of(bin, [&](unsigned token, float value) { f(ranked(value, token)); });
        }
    }
};

enum class Measure { TOKENS, WEIGHTS };
enum class Ties { KEEP, BREAK };

// The rank at which the running sum over falling ranks of the bucket, those below `least` left out, reaches
// `target`. With `Ties::KEEP` tokens do not count in ranks: every rank of that value is at or above the answer.
template <Measure MEASURE, Ties TIES, bool TEMPERED>
__device__ __forceinline__ u64 find_rank(const Bucket<TEMPERED>& bucket, u64 least, u64 target, Shared& s) {
    u64 found = 0;
    for (int shift = LAST_DIGIT; shift >= (TIES == Ties::KEEP ? 10 : 0); shift -= 10) {
        clear_bins(s);
        Adding adding = {s.amounts};
        bucket.each([&](u64 rank) {
            if (rank < least) return;
            u64 amount = MEASURE == Measure::WEIGHTS ? weight_of(value_of(rank)) : 1;
            if (TIES == Ties::KEEP) rank &= ~TOKEN_MASK;
            u64 digits = rank >> shift;
            if (digits >> 10 == found) adding.add((int)(digits & (BINS - 1)), amount);
        });
        adding.finish();
        __syncthreads();
        Place place = find_place(s.amounts.get(my_bin()), target, s);
        found = (found << 10) | (u64)place.bin;
        target -= place.above;
    }
    return TIES == Ties::KEEP ? found << 10 : found;
}
