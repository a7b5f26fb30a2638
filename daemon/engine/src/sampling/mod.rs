//! The definition of sampling: settings, their order and their sources. Both backends implement this text.
//!
//! A draw takes the logits `l` of one position and the history of the context and does, in this order:
//!
//! 1. **mask**: tokens outside the mask become −∞.
//! 2. **bias**: `l[t] += bias[t]` (transformers `SequenceBiasLogitsProcessor` for single tokens).
//! 3. **repetition penalty** `r` over the distinct tokens of the history: `l > 0 ? l / r : l * r`
//!    (transformers `RepetitionPenaltyLogitsProcessor`).
//! 4. **frequency and presence penalty**: `l[t] -= count[t] * f + (count[t] > 0) * p`
//!    (llama.cpp `llama_sampler_penalties`).
//!    Steps 2 to 4 saturate at the largest finite number: only the mask and a bias of −∞ forbid a token.
//! 5. **temperature**: temperature 0 takes the largest logit and ends here, ties to the lower token. Otherwise
//!    `l = (l − max l) / temperature`: the constant changes nothing after it, and no logit can overflow.
//! 6. **top-k**: keep the `k` largest, and all that tie with the k-th (transformers `TopKLogitsWarper`).
//! 7. **top-p**: keep the smallest set of most probable tokens whose probability reaches `p`, at least one
//!    (transformers `TopPLogitsWarper`). Probabilities are those of the tokens that step 6 kept; among equal
//!    ones the lower token comes first.
//! 8. **min-p**: drop tokens less probable than `min_p` times the most probable (transformers
//!    `MinPLogitsWarper`).
//! 9. **draw**: Gumbel-max, `argmax(l[t] + g[t])` with `g = −ln(−ln u)`, ties to the lower token. `u` comes
//!    from Philox 4x32-10 with key (seed low, seed high) and counter (token / 4, 0, position low, position high)
//!    in words of 32 bits: lane `token % 4` gives `x` and `u = ((x >> 9) + ½) · 2⁻²³`, which f32 holds exactly and
//!    which is never 0 or 1; exponentials and logarithms are those of `maths`, the same on every device. No state: the
//!    result depends on nothing but (seed, position, token, l).
//!
//! It is one of the [programs](mod@program), `trellis_programs::library::chain`, carried out in fewer passes.
//!
//! The log-probability that is reported with a token is the log-softmax of the logits before step 1.
//!
//! The history of steps 3 and 4 is the last `penalty_last_n` tokens of the context, prompt included; all of
//! them when it is `None`.

pub mod beams;
mod bias;
mod distribution;
mod draw;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod gumbel;
mod mask;
mod maths;
mod operator;
pub mod program;
mod rank;
mod select;
mod settings;
#[cfg(test)]
mod tests;

pub use bias::Bias;
pub use distribution::Distribution;
pub use draw::{Before, Scratch, sample, sample_by_program, sample_under};
pub use gumbel::GUMBEL_MAX;
pub use mask::TokenMask;
pub use operator::{
    FRONT_COST_MAX, N_FRONT_OPERATIONS_MAX, N_FRONT_OVER_LOGITS_MAX, Operator, OperatorError,
};
pub(crate) use operator::{OperatorData, Purpose};
pub use rank::rank;
pub use settings::{Looks, Sampler, SamplerError};
pub use trellis_programs::philox4x32;
