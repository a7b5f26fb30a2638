// What a logit program is on the device: rows, shared memory, numbers.
//
// Numbers and tokens are floats: a token is below 2^18. Sets are rows of 1 and 0.

constexpr int WARPS = THREADS / 32;
// Tokens that a thread looks at together, in groups of four. A warp's are a tile: a group is 128 tokens of it.
constexpr int EACH = 4 * GROUPS;
constexpr int TILE = 128 * GROUPS;
// As many tiles as a block has warps.
constexpr int SPAN = WARPS * TILE;
constexpr int BINS = 1024;
// Tokens of a list, and those that one block puts there.
constexpr int LIST = 1024;
constexpr int LIST_OF_BLOCK = LIST / CLUSTER;
constexpr int VOCAB_MAX = 1 << TOKEN_BITS;
constexpr int TILES_OF_BLOCK = VOCAB_MAX / TILE / CLUSTER;
constexpr int SPANS = VOCAB_MAX / SPAN;
constexpr int LEVELS_OF_TILE = GROUPS == 2 ? 8 : 9;
constexpr int LEVELS_OF_SPAN = LEVELS_OF_TILE + (WARPS == 4 ? 2 : WARPS == 8 ? 3 : 4);
// Blocks read what others wrote for them while the first of these write it anew.
constexpr int COPIES = CLUSTER > 1 ? 2 : 1;
// A block's part of the row arrives in so many pieces.
constexpr int PIECES = 4;
constexpr u64 TOKEN_MASK = (1ull << TOKEN_BITS) - 1;

static_assert(1 << LEVELS_OF_SPAN == SPAN && VOCAB_MAX % (SPAN * CLUSTER) == 0 && SPANS % 32 == 0 && BINS % THREADS == 0, "whole shares");

// One row, as in program.rs.
struct ProgramRow {
    unsigned program;  // entry of the programs
    unsigned output_row;
    unsigned next;  // of its chain, or NONE
    unsigned planes;
    unsigned members_start, n_members;
    unsigned seed_low, seed_high, position_low, position_high;
    unsigned n_tokens, n_drawn;
    unsigned table_start, n_history;
    unsigned parameters_start, n_parameters;
    unsigned masks_start, n_masks;
    unsigned biases_start, n_biases;
    unsigned state_in, state_out;
};
static_assert(sizeof(ProgramRow) == 88, "as in program.rs");

// As in program.rs.
struct ProgramBias {
    unsigned start;
    unsigned n_pairs;  // NONE for a number for each token
};

// Where the blocks of a row meet that have no cluster, as in program.rs; zeros before and after a launch.
struct Meeting {
    u64 best[N_SINGLE_ROOTS];
    unsigned n_arrived;
    unsigned unused;
};

struct ProgramParams {
    const uint4* programs;
    const ProgramRow* rows;
    const unsigned* chains;
    const unsigned* n_chains;
    const OutputRow* output_rows;
    const float* logits;
    const float* kept_rows;
    const unsigned* members;  // KEPT_ROW is set for one of the kept rows
    const unsigned* tables;
    const int* page_tokens;
    const float* parameters;
    const unsigned* mask_starts;
    const u64* masks;
    const ProgramBias* bias_places;
    const float* dense_biases;
    const BiasPair* bias_pairs;
    float* states;
    float* planes;
    ProgramOutput* outputs;
    Meeting* meetings;
    int vocab;
    int unused;
};
static_assert(sizeof(ProgramParams) == 168, "as in program.rs");

struct NoiseSource {
    uint2 key;
    unsigned lane, low, high;
    unsigned unused[3];
};

// Sums of rows on their way to the root of their tree, at the tile and at the span.
struct Sums {
    float tiles[N_SUMS][TILES_OF_BLOCK];
    float spans[COPIES][N_SUMS][SPANS];
};

// A token of a list, with its weight; where tokens count alike, with itself.
struct Listed {
    u64 rank, amount;
};

// How many tokens were to be listed, and their lowest and highest key.
struct Range {
    unsigned n, least, most;
    unsigned unused;
};

// What selections work with.
struct Selections {
    Listed list[CLUSTER][LIST_OF_BLOCK];
    unsigned low[BINS], high[BINS];
    u64 coarse[COPIES][CLUSTER][32];
    Range ranges[CLUSTER];  // of what each block listed
    Range mine;
    unsigned tokens[LIST];  // of the last selection of the largest
};

// The place that a descent has reached.
struct Digit {
    unsigned bin;
    u64 amount;
    u64 above;  // in the bins before it
};

// A selection under way; see program_select.cuh.
struct Selecting {
    float largest_order, largest_row;
    bool is_nucleus, is_whole, is_listed;
    int bin;    // by distance; below 0 before it is known
    int known;  // the bits of the rank from here on are those of `found`
    u64 found;
    u64 above;  // in the bins before the one by distance
};

struct Shared {
    u64 arrivals[PIECES];
    u64 gathered[N_GATHERED][WARPS];
    u64 exchanged[COPIES][N_GATHERED][CLUSTER];
    uint4 plan[N_PLAN];
    float numbers[N_NUMBERS];
    unsigned leaders[N_GATHERED];  // keys that a token has to reach
    u64 scan[32];
    u64 any_rank;
    unsigned differing[2];
    Digit digit;
    Selecting selecting;
    u64 target;    // of the selection: what is left of its amount, or 0 before that is known
    ProgramRow row;
    // Where things are that are needed now and then: what follows here, by its distance from here, and what is in memory.
    int sources_at, sums_at, selections_at, registers_at, kept_at;
    unsigned rank;
    int n_warps;  // that run elementwise code
    uint4 header;
    uint4 step;         // that is taken
    unsigned step_idx;  // of the one after it
    unsigned is_done, is_within;
    const uint4* program;
    const float* logits;
    float* planes;
    int plane_stride;
    int begin, end;  // the first token of this block, and behind its last
    int n_kept;      // tokens from the first on that are in shared memory
    int copy;        // of what other blocks write that is written next
    int n_levels;  // of the tree of sums
    unsigned constraint;
    unsigned n_tokens;  // of the list
    unsigned is_listed;
    unsigned has_fault;
    unsigned unused;
};
// Behind it are sources of noise, sums, selections and registers of the program, and as much of the row as there is room for.
constexpr int REST_BYTES = SHARED_BYTES - (int)sizeof(Shared);
static_assert(sizeof(Shared) % 16 == 0 && sizeof(Selections) % 16 == 0 && sizeof(Sums) % 16 == 0, "aligned");

// What a thread knows of its row.
struct Run {
    const ProgramParams& p;
    const ProgramRow& row;
    const unsigned& constraint;  // in words of 64 bits, or NONE
    Shared& s;
    float* const& planes;
    const int& plane_stride;
    const unsigned& rank;
    const int& begin;
    const int& n_kept;
    const int& copy;
    int vocab;
    int n_there;  // of the tokens that are kept, those that have arrived
};

// What is in shared memory, read where it is needed rather than held.
template <class T> __device__ __forceinline__ T fresh(const T& x) { return *(volatile const T*)&x; }

template <class T> __device__ __forceinline__ T* behind(Shared& s, int at) { return (T*)((char*)(&s + 1) + at); }

__device__ __forceinline__ NoiseSource* sources_of(Shared& s) { return behind<NoiseSource>(s, s.sources_at); }
__device__ __forceinline__ Sums& sums_of(Shared& s) { return *behind<Sums>(s, s.sums_at); }
__device__ __forceinline__ Selections& selections_of(Shared& s) { return *behind<Selections>(s, s.selections_at); }
// [register][group][lane of the warps that run]
__device__ __forceinline__ float4* registers_of(Shared& s) { return behind<float4>(s, s.registers_at); }
__device__ __forceinline__ float* kept_of(Shared& s) { return behind<float>(s, s.kept_at); }

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }
__device__ __forceinline__ float plus_infinity() { return __uint_as_float(0x7f800000u); }

// NaN becomes -inf, what is above the largest number the largest.
__device__ __forceinline__ float in_row(float x) { return x == x ? fminf(x, FLOAT_MAX) : minus_infinity(); }

// NaN becomes 0, what is above the largest number the largest.
__device__ __forceinline__ float as_number(float x) { return x == x ? fminf(x, FLOAT_MAX) : 0.0f; }

// The bits of a number as an integer that is larger for larger numbers; 0 and -0 are the same.
__device__ __forceinline__ unsigned key_of(float value) {
    const unsigned bits = __float_as_uint(__fadd_rn(value, 0.0f));
    return (bits & 0x80000000u) ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float value_of(unsigned key) {
    return __uint_as_float((key & 0x80000000u) ? key & 0x7fffffffu : ~key);
}

// A total order of (value, token): larger is earlier, ties to the lower token.
__device__ __forceinline__ u64 ranked(float value, unsigned token) {
    return ((u64)key_of(value) << TOKEN_BITS) | (TOKEN_MASK - token);
}

// The sum over a warp of amounts below 2^51.
__device__ __forceinline__ u64 warp_sum(u64 amount) {
    const unsigned low = __reduce_add_sync(LANES_ALL, (unsigned)amount & 0xffffffu);
    const unsigned high = __reduce_add_sync(LANES_ALL, (unsigned)(amount >> 24));
    return ((u64)high << 24) + low;
}

// ---- functions of numbers ----

__device__ __forceinline__ float truth(bool holds) { return holds ? 1.0f : 0.0f; }

// An operation that is the same for numbers and for the entries of rows, before NaN and infinities are seen to.
__device__ __forceinline__ float apply(unsigned code, float x, float y, float z) {
    switch (code) {
    case NEG: return -x;
    case ABS: return fabsf(x);
    case SQRT: return __fsqrt_rn(x);
    case EXP: return exp_exact(x);
    case LOG: return log_exact(x);
    case ADD: return __fadd_rn(x, y);
    case SUB: return __fsub_rn(x, y);
    case MUL: return __fmul_rn(x, y);
    case DIV: return __fdiv_rn(x, y);
    case MIN: return y < x ? y : x;
    case MAX: return y > x ? y : x;
    case LESS: return truth(x < y);
    case LESS_EQUAL: return truth(x <= y);
    case EQUAL: return truth(x == y);
    case NOT_EQUAL: return truth(x != y);
    case GREATER_EQUAL: return truth(x >= y);
    case GREATER: return truth(x > y);
    default: return x != 0.0f ? y : z;  // SELECT
    }
}

// ---- tokens of the context ----

// The last `n` of them, by number: those of a page lie together.
struct Tokens {
    const unsigned* table;
    const int* page_tokens;
    unsigned first;
    int n;

    __device__ __forceinline__ int operator[](int idx) const {
        const unsigned position = first + (unsigned)idx;
        return page_tokens[(size_t)table[position / PAGE_LEN] * PAGE_LEN + position % PAGE_LEN];
    }
};

__device__ __forceinline__ Tokens last_tokens(const Run& r, unsigned n) {
    const unsigned n_taken = min(n, r.row.n_history);
    return Tokens{r.p.tables + r.row.table_start, r.p.page_tokens, r.row.n_tokens - n_taken, (int)n_taken};
}

// ---- noise ----

__device__ __forceinline__ uint4 words_of(const NoiseSource& source, unsigned block_idx) {
    return philox(make_uint4(block_idx, source.lane, source.low, source.high), source.key);
}

// Works out the sources of a program. An entry says (lane, 0) for the seed, or (lane, 1 + tokens that count, key).
__device__ __forceinline__ void make_sources(Run& r, const uint4* entries, unsigned n) {
    for (unsigned i = threadIdx.x; i < n; i += THREADS) {
        const uint4 entry = entries[i];
        NoiseSource source;
        source.lane = entry.x;
        if (entry.y == 0) {
            source.key = make_uint2(r.row.seed_low, r.row.seed_high);
            source.low = r.row.position_low, source.high = r.row.position_high;
        } else {
            const Tokens last = last_tokens(r, entry.y - 1);
            source.key = make_uint2(entry.z, entry.w);
            source.low = source.high = 0;
            for (int idx = 0; idx < last.n; idx++) {
                const uint4 words =
                    philox(make_uint4((unsigned)last[idx], (unsigned)idx, source.low, source.high), make_uint2(0, 0));
                source.low = words.x, source.high = words.y;
            }
        }
        sources_of(r.s)[i] = source;
    }
}
