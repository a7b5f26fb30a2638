//! Rows that come back whole with a step: rows of logits, or of what became of them, and hidden states.

use std::sync::Arc;

use half::{bf16, f16};
use trellis_engine::batch::{Output, OutputFault, OutputKind, Token, Tokens};
use trellis_engine::sampling::{Distribution, Sampler, Scratch, TokenMask, rank};

use super::words::from_words;
use crate::ops::common::Dtype;

/// Bytes of rows that come back whole with one step: eight rows of logits over 128K tokens, or 512 hidden states of 4,096
/// halves. The engine asks for no more.
const WHOLE_BYTES_MAX: usize = 4 << 20;

/// Bytes of rows that come back whole with one step, of a model with such a vocabulary.
pub(crate) fn whole_bytes(vocab_size: usize) -> usize {
    WHOLE_BYTES_MAX.max(4 * vocab_size)
}

/// What one row is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowOf {
    /// A row of logits.
    Logits,
    /// A hidden state after the final norm.
    Hidden,
}

/// Rows one behind the other, on the device as on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WholeRows {
    pub(crate) of: RowOf,
    /// The first one's row of logits.
    pub(crate) row: usize,
    pub(crate) n_rows: usize,
    /// The first one's first word among those that come back.
    pub(crate) start: usize,
}

/// Rows of logits that stay on the device, one behind the other there as in the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KeptRun {
    /// The first one's row of logits.
    pub(crate) row: usize,
    /// And its place.
    pub(crate) idx: u32,
    pub(crate) n_rows: usize,
}

/// Words of one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowWords {
    pub(crate) logits: usize,
    pub(crate) hidden: usize,
}

impl RowWords {
    /// Of rows of so many elements.
    pub(crate) fn new(vocab_size: usize, hidden_size: usize, dtype: Dtype) -> Self {
        Self { logits: vocab_size, hidden: (hidden_size * dtype.n_bytes()).div_ceil(4) }
    }

    pub(crate) fn of(self, of: RowOf) -> usize {
        match of {
            RowOf::Logits => self.logits,
            RowOf::Hidden => self.hidden,
        }
    }
}

/// What the host reads out of a row of log-probabilities.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Reading {
    /// A longer list than the device makes.
    Top(usize),
    /// More scores than the device returns.
    Scores(Box<[Token]>),
    /// The most probable tokens after what a program makes of the row, of which it is the logits.
    Ranked(Box<ByProgram>),
    /// The row itself, if all of it are numbers.
    Logits,
}

/// What a program ranks by.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ByProgram {
    sampler: Arc<Sampler>,
    within: Option<Arc<TokenMask>>,
    /// The last tokens, as many as the program looks at.
    history: Vec<Token>,
    n_tokens: usize,
    n: usize,
}

impl Reading {
    /// Of what was asked of the row that follows `before`; `None` where the row itself was.
    pub(crate) fn of(kind: &OutputKind<'_>, before: Option<Tokens<'_>>) -> Option<Self> {
        match kind {
            OutputKind::Ranked { sampler, within, n } => {
                let before = before.expect("a search knows what it goes on with");
                let n_tokens = before.len();
                let sampler = Arc::clone(sampler);
                let history = before.copy_of(n_tokens - sampler.n_history(n_tokens)..n_tokens);
                let within = within.cloned();
                Some(Self::Ranked(Box::new(ByProgram { sampler, within, history, n_tokens, n: *n })))
            }
            OutputKind::Logits => Some(Self::Logits),
            OutputKind::Top { n } => Some(Self::Top(*n)),
            OutputKind::Scores(tokens) => Some(Self::Scores((*tokens).into())),
            _ => None,
        }
    }

    /// Of log-probabilities, or logits.
    pub(crate) fn read(self, row: &[f32], scratch: &mut Scratch) -> Result<Output, OutputFault> {
        match self {
            Self::Ranked(by) => {
                let ByProgram { sampler, within, history, n_tokens, n } = *by;
                rank(row, &history, n_tokens.into(), &sampler, within.as_deref(), n, scratch)
                    .map(Output::Ranked)
            }
            Self::Logits => Distribution::new(row).map(|_| Output::Full(row.to_vec())),
            Self::Top(n) => {
                let distribution = Distribution::new(row)?;
                Ok(Output::Top { candidates: distribution.top(n), entropy: distribution.entropy() })
            }
            Self::Scores(tokens) => {
                Ok(Output::Scores(tokens.iter().map(|&token| row[token as usize]).collect()))
            }
        }
    }
}

/// A hidden state as the device has it.
pub(crate) fn hidden_state(words: &[u32], n: usize, dtype: Dtype) -> Result<Vec<f32>, OutputFault> {
    let halves = || words.iter().flat_map(|word| [*word as u16, (word >> 16) as u16]).take(n);
    let state: Vec<f32> = match dtype {
        Dtype::F32 => from_words::<f32>(words, 0, n).to_vec(),
        Dtype::F16 => halves().map(|bits| f16::from_bits(bits).to_f32()).collect(),
        Dtype::Bf16 => halves().map(|bits| bf16::from_bits(bits).to_f32()).collect(),
    };
    if state.iter().any(|x| x.is_nan()) { Err(OutputFault::NotANumber) } else { Ok(state) }
}
