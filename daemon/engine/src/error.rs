//! What can go wrong between a caller and the engine.

use serde::{Deserialize, Serialize};

use crate::account::BudgetExceeded;
use crate::backend::BackendError;
use crate::batch::{OutputFault, Token};
use crate::constraint::ConstraintError;
use crate::guess::GuessTreeError;
use crate::sampling::SamplerError;
use crate::steering::SteeringError;

/// Why the engine did not do what it was asked.
#[derive(Clone, Debug, Serialize, Deserialize, thiserror::Error)]
pub enum EngineError {
    /// A token that the model does not have.
    #[error("token {token} is out of range: the vocabulary has {vocab_size} entries")]
    TokenOutOfRange {
        /// The token.
        token: Token,
        /// Entries of the vocabulary.
        vocab_size: usize,
    },
    /// The tokens do not fit in the context.
    #[error("{n_tokens} tokens do not fit: the context holds {n_positions}")]
    ContextFull {
        /// Tokens that the context would have to hold.
        n_tokens: usize,
        /// The most it can.
        n_positions: usize,
    },
    /// A guess that is too long.
    #[error("a guess of {n_tokens} tokens: at most {n_tokens_max} can be verified at once")]
    GuessTooLong {
        /// Tokens that were guessed.
        n_tokens: usize,
        /// The most that one step verifies.
        n_tokens_max: usize,
    },
    /// Guesses that make no tree.
    #[error(transparent)]
    GuessTree(#[from] GuessTreeError),
    /// A job whose rows have to ride together and are more than a step takes.
    #[error("{n_rows} rows that ride together: a step takes {n_rows_max}")]
    JobTooLarge {
        /// Rows of the job.
        n_rows: usize,
        /// The most of one job in a step.
        n_rows_max: usize,
    },
    /// A beam search whose beams are more than a step takes.
    #[error("a search of {n_beams} beams, which ride together: a step takes {n_beams_max}")]
    TooManyBeams {
        /// Its beams.
        n_beams: usize,
        /// The most of one search in a step.
        n_beams_max: usize,
    },
    /// A job over contexts of different guests or models, or a mixture of different vocabularies.
    #[error(
        "the contexts of one job belong to one guest and one model, those of a mixture to one vocabulary"
    )]
    JobMixed,
    /// A mixture whose sampler has no program: nothing else sees the logits of the others.
    #[error("a mixture draws by a logit program, and the sampler has none")]
    MixtureWithoutProgram,
    /// A mixture of more contexts than a program can name.
    #[error("a mixture of {n_others} contexts beside the first: a program names {n_others_max}")]
    MixtureTooLarge {
        /// Contexts beside the first.
        n_others: usize,
        /// The most there may be.
        n_others_max: usize,
    },
    /// A job one of whose contexts was changed or dropped meanwhile.
    #[error("a context of the job was changed before the job was done")]
    JobDisturbed,
    /// A length past the end.
    #[error("cannot keep {n_tokens} tokens of a context of {length}")]
    TooLong {
        /// Tokens to keep.
        n_tokens: usize,
        /// Tokens there are.
        length: usize,
    },
    /// Tokens to be taken out that are not there.
    #[error("no tokens from {start} to {end} in a context of {length}")]
    NotThere {
        /// The first of them.
        start: usize,
        /// The one after the last.
        end: usize,
        /// Tokens there are.
        length: usize,
    },
    /// The model computes no contexts from which tokens were evicted.
    #[error("this model cannot evict tokens: its layers see windows of positions")]
    CannotEvict,
    /// Closing up the hole would cut the context into too many stretches, which queries see with rotations of their own.
    #[error("closing up the hole would leave {n_stretches} stretches of tokens: at most {n_stretches_max}")]
    TooManyStretches {
        /// Stretches that there would be.
        n_stretches: usize,
        /// The most of one context.
        n_stretches_max: usize,
    },
    /// A mean of hidden states is of contexts of which nothing was taken out: what was seen by their tokens is gone.
    #[error("no mean of hidden states in a context out of which {n_evicted} tokens were evicted")]
    LooksAtEvicted {
        /// Those that were taken out.
        n_evicted: usize,
    },
    /// A hidden state behind the last layer.
    #[error("no hidden state after {n_layers} layers: the model has {n_layers_max}")]
    NoSuchLayer {
        /// Layers before it.
        n_layers: usize,
        /// Layers of the model.
        n_layers_max: usize,
    },
    /// Attention is asked for in no layer.
    #[error("attention is asked for in no layer: at least one")]
    NoLayers,
    /// Attention in a layer that is not there.
    #[error("no attention in layer {layer}: the model has {n_layers}, counted from 0")]
    NoAttentionIn {
        /// The layer.
        layer: usize,
        /// Layers of the model.
        n_layers: usize,
    },
    /// A layer counts once into a mean.
    #[error("layer {layer} is named twice")]
    LayerTwice {
        /// The layer.
        layer: usize,
    },
    /// Attention over more tokens than are brought back.
    #[error("no attention over {n_tokens} tokens: at most {n_tokens_max}")]
    AttentionTooLong {
        /// Tokens of the context.
        n_tokens: usize,
        /// The most.
        n_tokens_max: usize,
    },
    /// The tokens to be taken out are what a constraint is kept to.
    #[error("tokens from {start} to {end} cannot be evicted: the constraint has those from {first} on")]
    EvictsConstrained {
        /// The first to be taken out.
        start: usize,
        /// The one after the last.
        end: usize,
        /// From where on the context keeps to its constraint.
        first: usize,
    },
    /// There is no token to look at.
    #[error("the context is empty: append a token first")]
    EmptyContext,
    /// A budget is used up.
    #[error(transparent)]
    Budget(#[from] BudgetExceeded),
    /// A beam search for which a budget has no room.
    #[error("a search of {n_beams} beams: {exceeded}")]
    BeamsOverBudget {
        /// Its beams.
        n_beams: usize,
        /// The budget.
        exceeded: BudgetExceeded,
    },
    /// One context alone needs more pages than the device has.
    #[error("{n_needed} KV pages needed, the device has {n_pages}")]
    NoPages {
        /// Pages needed.
        n_needed: usize,
        /// Pages of the device.
        n_pages: usize,
    },
    /// A sampler setting out of range.
    #[error(transparent)]
    Sampler(#[from] SamplerError),
    /// A context is not steered so.
    #[error(transparent)]
    Steering(#[from] SteeringError),
    /// The tokens of a context and its constraint do not go together.
    #[error(transparent)]
    Constraint(#[from] ConstraintError),
    /// One output could not be had.
    #[error(transparent)]
    Output(#[from] OutputFault),
    /// Nothing is saved under the name.
    #[error("nothing is saved under the name {name:?}")]
    NotSaved {
        /// The name.
        name: String,
    },
    /// The step that computed this failed, and the engine goes on: the context keeps its tokens, and what was asked
    /// may be asked again.
    #[error("the step failed, it may be tried again: {0}")]
    Step(BackendError),
    /// There is no memory for as many pages as a model was to have.
    #[error("no memory for KV pages: {0}")]
    Memory(BackendError),
    /// Less KV memory for all models of a device than they need.
    #[error("{kv_bytes} bytes of KV memory: the models need {needed_bytes}")]
    KvTooSmall {
        /// Bytes for the longest context of each.
        needed_bytes: u64,
        /// Bytes that they were to have.
        kv_bytes: u64,
    },
    /// The model was unloaded. Once it is loaded again, what was asked may be asked of it.
    #[error("the model was unloaded")]
    Unloaded,
    /// The engine has failed and does nothing more. With another engine it may be tried again.
    #[error(transparent)]
    Failed(#[from] EngineFailure),
    /// The engine was stopped.
    #[error("the engine has stopped")]
    Stopped,
}

impl EngineError {
    /// Whether the same may work another time: what was asked is not what went wrong.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Step(_) | Self::Unloaded | Self::Failed(_))
    }

    /// Bytes of the texts in it, and of what it says around them.
    pub(crate) fn n_text_bytes(&self) -> usize {
        match self {
            // It says only the beginning.
            Self::NotSaved { name } => name.len(),
            _ => self.to_string().len(),
        }
    }
}

/// Why an engine has come to its end before it was stopped.
#[derive(Clone, Debug, Serialize, Deserialize, thiserror::Error)]
pub enum EngineFailure {
    /// The device is lost.
    #[error("the device failed: {0}")]
    Device(BackendError),
    /// So many steps failed and none succeeded in between that no other outcome is to be expected.
    #[error("{n_steps} steps failed in a row, the last with: {last}")]
    Steps {
        /// How many.
        n_steps: usize,
        /// What the last one reported.
        last: BackendError,
    },
    /// The engine's thread panicked: a mistake of ours.
    #[error("the engine panicked: {message}")]
    Panicked {
        /// The panic's message.
        message: String,
    },
}
