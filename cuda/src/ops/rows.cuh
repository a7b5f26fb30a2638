// What is asked of a row of logits, and what comes of a program: the kernels over logits and the one of logit programs share it.

// One output row, as in logits.rs.
struct OutputRow {
    unsigned wants;
    unsigned logits_row;
    float temperature;
    unsigned top_k;   // 0 for none
    float top_p;      // 1 for none
    float min_logit;  // ln(min_p), -inf for none
    float repetition, frequency, presence;
    unsigned seed_low, seed_high, position_low, position_high;
    unsigned table_start, n_history, drawn_slot;
    unsigned bias_start, n_bias;
    unsigned mask_start;  // in words of 64 bits
    unsigned top_start, n_top;
    unsigned score_start, n_scores;
    unsigned history_end;
    unsigned program_row;
};
static_assert(sizeof(OutputRow) == 100, "as in logits.rs");

struct BiasPair {
    unsigned token;
    float value;
};

// What comes of a program, as in program.rs.
struct ProgramOutput {
    unsigned token;
    unsigned fault;
    float reports[4];
    float state[8];
};
static_assert(sizeof(ProgramOutput) == 56, "as in program.rs");
