//! How much guests may ask at once. The host API refuses more with an error, and customs end a process of guests that asks for
//! more all the same.

/// Biased tokens of one sampler. Each costs the engine an addition in every draw, which is shared work; to allow or forbid many
/// tokens there are masks.
pub const N_BIAS_MAX: usize = 1024;

/// The most candidates of one distribution: a two-pass selection on the device, which keeps whole rows there. More is what whole
/// rows are for, which are metered.
pub const N_TOP_MAX: usize = 1024;

/// The most candidates at all places of a continuation: they are held for the guest until it has them all.
pub const N_TOPS_MAX: usize = 64 << 10;

/// The most tokens in one place whose log-probabilities are asked for, which cost what one token does.
pub const N_LOGPROBS_MAX: usize = 1024;

/// The most hidden states of one call, which are held for the guest until it has them all.
pub const N_STATES_MAX: usize = 1024;

/// The most candidates that are looked at beside a draw: as many as clients of completions are given anywhere.
pub const N_TOP_LOOKED_AT_MAX: usize = 20;

/// The most layers whose hidden states are asked for at once, or looked at beside a draw.
pub const N_LAYERS_LOOKED_AT_MAX: usize = 8;
