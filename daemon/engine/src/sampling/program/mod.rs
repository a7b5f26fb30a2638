//! Logit programs: checked once, then run for each token. What the operations mean is written down in
//! [`trellis_programs::Operation`]; the interpreter here is the definition to the bit, and every device gives its results.
//!
//! - **Rounding.** Each operation rounds once, to f32. `exp`, `ln` and what is made of them are those of
//!   `sampling/maths.rs`. `min(x, y)` is `y` where `y < x`, else `x`; `max` likewise.
//! - **Values.** NaN becomes −∞ in a row and 0 as a number; what is above the largest number becomes the largest.
//! - **Sums** of a row run over a binary tree of the tokens: neighbours are added, then neighbours of those; what is outside
//!   of the set and past the end of the vocabulary counts as 0. The variance is the sum of `(x − mean)²`, so summed,
//!   over the count.
//! - **Sums of exponentials** are whole numbers of 2⁻⁴⁵: `w(x) = ⌊e^(x − max) · 2⁴⁵⌋`, in any order. `ln Σ eˣ` is
//!   `max + ln(S · 2⁻⁴⁵)` with S rounded to f32; the entropy is `ln(S · 2⁻⁴⁵) + V / S` with
//!   `V = Σ ⌊(max − x) · e^(x − max) · 2⁴⁵⌋`, and at least 0. `log-softmax` is `x − ln Σ eˣ`.
//! - **Order.** Larger first, ties to the lower token; 0 and −0 are equal. `nucleus` ends with the first token at which the
//!   sum of `w` reaches `⌈p · S⌉`, at least 1 and at most S, the product in f64.
//! - **Noise** is Philox 4x32-10. The word of token t is lane `t % 4` of the block with counter
//!   (t / 4, lane, low, high): of the position under the seed as key, or of the hash of the tokens before under the key that
//!   the operation names. The counter of a single number has 2³² − 1 in the place of t / 4, and its lane 0 counts.
//!   `u = ((word >> 9) + ½) · 2⁻²³`; Gumbel noise is `−ln(−ln u)`.
//! - **Hash** of tokens: h = (0, 0); for each token in its order, h becomes the first two words of the block with counter
//!   (token, number of the token, h) and key 0.
//! - **Draw**: argmax of `x + g`. A program that draws, or takes the argmax, from a row without a token above −∞ fails with
//!   [`NothingToDraw`](crate::batch::OutputFault::NothingToDraw): its only failure.

#[cfg(test)]
mod chain_tests;
mod check;
mod constrained;
#[cfg(test)]
mod constrained_tests;
mod cost;
mod error;
mod history;
mod interpreter;
mod put_on;
mod reduce;
#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};
pub use trellis_programs::{Definition, End, Kind, Operation};

pub use self::error::ProgramError;
pub use self::interpreter::{DrawInputs, Machine, Outcome};
pub use self::put_on::{DrawPlace, DrawState, Left, PutOn};

/// The most operations of a program.
pub const N_OPERATIONS_MAX: usize = 128;
/// The most parameters.
pub const N_PARAMETERS_MAX: usize = 16;
/// The most numbers of state.
pub const N_STATE_MAX: usize = 8;
/// The most numbers that are reported with a token.
pub const N_REPORTS_MAX: usize = 4;
/// The most masks that a program is given, and the most biases.
pub const N_HANDLES_MAX: usize = 16;
/// Contexts beside the first that a mixture may have: members that a program can name.
pub const N_MEMBERS_MAX: usize = 8;
/// Reductions that may depend on one another.
pub const DEPTH_MAX: usize = 8;
/// Operations over the history, whose rows or sets are made apart, and as many over other members.
pub const N_APART_MAX: usize = 4;
/// Rows and sets that may be alive between two operations.
pub const N_ALIVE_MAX: usize = 16;
/// The most readings of the row that a program may cost.
pub const COST_MAX: f32 = 16.0;

/// What a model's rows are like, as far as programs depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowShape {
    /// Entries of the vocabulary.
    pub vocab_size: usize,
    /// The most positions of a context.
    pub n_positions: usize,
}

/// The numbers that a program keeps from token to token.
pub type ProgramState = [f32; N_STATE_MAX];

/// A program that may be run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Unchecked", into = "Unchecked")]
pub struct Program {
    definition: Definition,
    shape: RowShape,
    id: ProgramId,
    kinds: Vec<Kind>,
    /// Which values the program gives, or needs for what it gives; the others are not worked out.
    is_needed: Vec<bool>,
    /// For each value, the operation after which it is not needed any more.
    last_uses: Vec<usize>,
    cost: f32,
    n_history: usize,
    /// Whether it draws within the constraint by itself.
    keeps_to_constraint: bool,
}

impl Program {
    /// Checks a program.
    ///
    /// # Errors
    /// The first thing that is wrong with it, by operation.
    pub fn new(definition: Definition, shape: RowShape) -> Result<Self, ProgramError> {
        let kinds = check::kinds(&definition)?;
        check::depth(&definition, &kinds)?;
        let is_needed = check::needed(&definition);
        let cost = cost::of(&definition, &kinds, &is_needed, shape)?;
        let last_uses = check::last_uses(&definition, &is_needed);
        check::alive(&definition, &kinds, &is_needed, &last_uses)?;
        let n_history = history::n_tokens(&definition, shape.n_positions);
        let id = ProgramId::of(&definition);
        let keeps_to_constraint = false;
        Ok(Self { definition, shape, id, kinds, is_needed, last_uses, cost, n_history, keeps_to_constraint })
    }

    /// Tells it from programs of other operations.
    #[must_use]
    pub fn id(&self) -> ProgramId {
        self.id
    }

    /// The rows that it was checked for.
    #[must_use]
    pub fn shape(&self) -> RowShape {
        self.shape
    }

    /// Whether it says itself what becomes of tokens that the constraint does not allow.
    #[must_use]
    pub fn asks_for_constraint(&self) -> bool {
        self.definition.operations.iter().any(|operation| matches!(operation, Operation::Constraint))
    }

    /// How many numbers it reports with a token.
    #[must_use]
    pub fn n_reports(&self) -> usize {
        self.definition.reports.len()
    }

    /// Whether it draws.
    #[must_use]
    pub fn ends_in_a_token(&self) -> bool {
        matches!(self.definition.end, End::Token(_))
    }

    /// Whether a draw depends on where the one before it ended, besides its token.
    #[must_use]
    pub fn carries_on(&self) -> bool {
        !self.definition.first_state.is_empty() || self.definition.operations.contains(&Operation::Drawn)
    }

    /// What it was made of.
    #[must_use]
    pub fn definition(&self) -> &Definition {
        &self.definition
    }

    /// What each operation makes.
    #[must_use]
    pub fn kinds(&self) -> &[Kind] {
        &self.kinds
    }

    /// What one token costs, in readings of the row of logits.
    #[must_use]
    pub fn cost(&self) -> f32 {
        self.cost
    }

    /// How many of the last of `n_tokens` tokens it looks at.
    #[must_use]
    pub fn n_history(&self, n_tokens: usize) -> usize {
        self.n_history.min(n_tokens)
    }

    /// The state before the first token.
    #[must_use]
    pub fn first_state(&self) -> ProgramState {
        let mut state = ProgramState::default();
        let first = &self.definition.first_state;
        state[..first.len()].copy_from_slice(first);
        state
    }

    /// Where its first draw starts.
    #[must_use]
    pub fn first(&self) -> DrawState {
        DrawState { numbers: self.first_state(), n_drawn: 0 }
    }
}

/// Tells programs apart: equal where all operations are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ProgramId(u128);

impl ProgramId {
    fn of(definition: &Definition) -> Self {
        let bytes = rmp_serde::to_vec(definition).expect("a program is plain data");
        let mut hash = [0; 16];
        hash.copy_from_slice(&blake3::hash(&bytes).as_bytes()[..16]);
        Self(u128::from_le_bytes(hash))
    }
}

/// A program on its way, which is checked again where it arrives.
#[derive(Serialize, Deserialize)]
struct Unchecked {
    definition: Definition,
    shape: RowShape,
}

impl From<Program> for Unchecked {
    fn from(program: Program) -> Self {
        Self { definition: program.definition, shape: program.shape }
    }
}

impl TryFrom<Unchecked> for Program {
    type Error = ProgramError;

    fn try_from(Unchecked { definition, shape }: Unchecked) -> Result<Self, ProgramError> {
        Self::new(definition, shape)
    }
}
