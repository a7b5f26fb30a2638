//! What guests ask of the engine, as data.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::batch::{Candidate, Drawn, Token, Top};
use crate::completion::{CallerId, Tag};
use crate::error::EngineError;
use crate::guess::{Guess, n_words};
use crate::history::History;
use crate::kept::RowName;
use crate::kv::Positions;
use crate::port::{shared, shared_list, shared_list_of, shared_option};
use crate::run::Finish;
use crate::sampling::beams::Search;
use crate::sampling::{Sampler, TokenMask};
use crate::steering::Steering;

/// A model on a device, unique while the engine runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct ModelId {
    /// Among the models that are there with it.
    pub(crate) place: u16,
    /// How many models have had the place before it.
    pub(crate) generation: u32,
}

impl ModelId {
    /// Whether it has the place of another, which is gone.
    pub(crate) fn replaces(self, other: Self) -> bool {
        self.place == other.place && self.generation > other.generation
    }
}

/// A context, unique while the engine runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct ContextId {
    pub(crate) model: ModelId,
    pub(crate) number: u64,
}

impl ContextId {
    pub(crate) const LEAST: Self = Self { model: ModelId { place: 0, generation: 0 }, number: 0 };
}

/// Brings the engine's tokens of a context to the caller's: keep the first `n_kept`, then append.
///
/// What a run decoded ahead lies past `n_kept` and is forgotten by this.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Edit {
    pub(crate) n_kept: usize,
    pub(crate) appended: Vec<Token>,
    /// Tokens that the guest has had of the run that this ends, which may be that of a mixture.
    pub(crate) n_pulled: usize,
}

/// Entries of a whole row of logits that count as one computed token.
pub const N_ENTRIES_PER_TOKEN: usize = 1024;

/// Tokens of the longest context whose attention can be asked for: 1 MiB.
pub const N_ATTENTION_TOKENS_MAX: usize = 1 << 18;

/// Tokens that take as many bytes as a word of a mask.
pub(crate) const N_TOKENS_PER_WORD: usize = size_of::<u64>() / size_of::<Token>();

/// A question about the end of a context.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Ask {
    /// Compute the KV of all tokens.
    Prefill,
    /// Draw the next token.
    Sample(#[serde(with = "shared")] Arc<Sampler>),
    /// The most probable next tokens.
    Top {
        /// How many.
        n: usize,
    },
    /// The log-probabilities of these tokens as the next one.
    Scores(Vec<Token>),
    /// The log-probability of each of these tokens after all before it.
    Continuation(Vec<Token>),
    /// The most probable tokens at the place of each of these, after all before it.
    Tops {
        /// What comes after the context.
        continuation: Vec<Token>,
        /// How many at each place.
        n: usize,
    },
    /// Draw the next tokens as long as each is the one that was guessed, and the first that is not.
    Verify {
        /// How to draw.
        #[serde(with = "shared")]
        sampler: Arc<Sampler>,
        /// What may come next.
        guess: Guess,
    },
    /// The log-probabilities of the whole vocabulary.
    Full,
    /// The logits of the whole vocabulary.
    Logits,
    /// Have the logits stay on the device, under the name of this question.
    Keep,
    /// Draw the next token by a program whose other members are these rows, once they are there.
    Mix {
        /// How to draw.
        #[serde(with = "shared")]
        sampler: Arc<Sampler>,
        /// Of the members, in the order in which the program names them.
        rows: Vec<RowName>,
    },
    /// The hidden state of the last token.
    Embedding,
    /// Hidden states of the context's tokens, pooled.
    Hidden {
        /// After so many layers each; see [`OutputKind::Hidden`](crate::batch::OutputKind::Hidden).
        n_layers: Vec<usize>,
        /// Of which tokens.
        pooling: Pooling,
    },
    /// The attention that the last token puts on each token of the context.
    Attention {
        /// In these layers; see [`OutputKind::Attention`](crate::batch::OutputKind::Attention).
        layers: Vec<usize>,
    },
}

impl Ask {
    /// Tokens that it names one by one; a word of a mask counts as two.
    pub(crate) fn n_tokens(&self) -> usize {
        match self {
            Self::Scores(tokens) | Self::Continuation(tokens) | Self::Tops { continuation: tokens, .. } => {
                tokens.len()
            }
            Self::Verify { guess, .. } => guess.tokens().len() + N_TOKENS_PER_WORD * guess.n_words(),
            _ => 0,
        }
    }
}

/// How the hidden states of tokens become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Pooling {
    /// That of the last token.
    Last,
    /// The mean over the tokens from this one on.
    MeanFrom(usize),
}

/// The answer to an [`Ask`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Answer {
    /// The KV is computed.
    Prefilled,
    /// The drawn token.
    Sampled(Drawn),
    /// The drawn tokens, at least one: those of the guess that were accepted, and the one drawn after them. That one is
    /// missing where it could not be drawn, as drawing it by itself would say.
    Verified(Vec<Drawn>),
    /// The most probable tokens.
    Top {
        /// Most probable first.
        candidates: Vec<Candidate>,
        /// Of the whole distribution, in nats.
        entropy: f32,
    },
    /// The same for each place of a continuation, in order.
    Tops(Vec<Top>),
    /// Log-probabilities, in the order asked.
    Scores(Vec<f32>),
    /// Log-probabilities of the vocabulary, or its logits.
    Full(Vec<f32>), // [vocab_size]
    /// The logits are on the device.
    Kept,
    /// There is no room for a row of logits, or one that is asked for is not there.
    NotKept,
    /// The hidden state.
    Embedding(Vec<f32>), // [hidden_size]
    /// Pooled hidden states, in the order asked.
    Hidden(Vec<Vec<f32>>), // [n_states, hidden_size]
    /// The mean attention on each token, in their order; it sums to 1.
    Attention(Vec<f32>), // [n_tokens]
    /// The tokens that were drawn together, one for each context in the order in which they were named.
    Together(Vec<Candidate>),
    /// A beam search that is over, or has made the steps that it was to make.
    Beams {
        /// What lives and what is finished.
        search: Box<Search>,
        /// For each row of its last step, which of the contexts that it was given has it; then those that have none.
        order: Vec<usize>,
    },
}

/// A stream's settings.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RunSettings {
    /// How to draw.
    #[serde(with = "shared")]
    pub sampler: Arc<Sampler>,
    /// Tokens that end the run; such a token is given.
    #[serde(with = "shared_list")]
    pub stop_tokens: Arc<[Token]>,
    /// The most tokens; as many as fit when `None`.
    pub n_tokens_max: Option<usize>,
    /// How far to decode ahead.
    pub ahead: Ahead,
    /// What may be drawn.
    pub masks: MaskSource,
}

/// Where the masks of a stream's draws come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MaskSource {
    /// The sampler: one for all draws, or none.
    Sampler,
    /// The caller: the rule that its context keeps to, or one mask for each draw with [`Context::supply_mask`](crate::Context::supply_mask), in the place of the
    /// sampler's. Nothing is drawn without.
    Caller,
}

/// How far the engine decodes ahead of the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ahead {
    /// A few tokens, learnt from how far the caller runs.
    Adaptive,
    /// To the end: the caller wants all of it.
    Unbounded,
}

/// What a guest asks of the engine, as data.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Operation {
    Create {
        id: ContextId,
        caller: CallerId,
    },
    Open {
        id: ContextId,
        caller: CallerId,
        name: String,
        tag: Tag,
    },
    Edit {
        id: ContextId,
        edit: Edit,
    },
    /// Tokens are taken out by their indices, all of them before the last.
    Evict {
        id: ContextId,
        edit: Edit,
        start: usize,
        end: usize,
        positions: Positions,
    },
    /// The tokens from this index on are steered, or none.
    Steer {
        id: ContextId,
        edit: Edit,
        #[serde(with = "shared_option")]
        steering: Option<Arc<Steering>>,
        from: usize,
    },
    Fork {
        id: ContextId,
        edit: Edit,
        child: ContextId,
    },
    Ask {
        id: ContextId,
        edit: Edit,
        ask: Ask,
        tag: Tag,
    },
    /// Draw the next token of each of these contexts, in one step if others leave the room.
    DrawTogether {
        members: Vec<(ContextId, Edit)>,
        #[serde(with = "shared")]
        sampler: Arc<Sampler>,
        tag: Tag,
    },
    SearchBeams(Box<SearchBeams>),
    /// Decode the first of these contexts, by a program that is given the logits of the others as well; each of them gets
    /// every token.
    Mix {
        members: Vec<(ContextId, Edit)>,
        settings: RunSettings,
        tag: Tag,
    },
    /// The answer to a question is no longer wanted; of several contexts, the first is named, of a beam search the base.
    Cancel {
        id: ContextId,
        tag: Tag,
    },
    Run {
        id: ContextId,
        edit: Edit,
        settings: RunSettings,
        tag: Tag,
    },
    /// How far a run's guest has come, in tokens, and whether it waits for the next one.
    Pulled {
        id: ContextId,
        tag: Tag,
        n_tokens: usize,
        is_waiting: bool,
    },
    /// The mask of the token that a run draws for this place, and the token that is expected there, if one is. It was made
    /// after so many draws that did not give what was expected.
    Mask {
        id: ContextId,
        tag: Tag,
        position: usize,
        turn: u32,
        #[serde(with = "shared")]
        mask: Arc<TokenMask>,
        expected: Option<Token>,
    },
    /// There is no mask for this place: the run ends before it.
    EndRun {
        id: ContextId,
        tag: Tag,
        position: usize,
        turn: u32,
        end: Result<Finish, EngineError>,
    },
    Save {
        id: ContextId,
        edit: Edit,
        name: String,
        /// All of the context's, for whoever opens it.
        #[serde(with = "shared")]
        tokens: Arc<History>,
        tag: Tag,
    },
    Forget {
        model: ModelId,
        caller: CallerId,
        name: String,
        tag: Tag,
    },
    /// A kept row is no longer needed.
    LetGo {
        row: RowName,
    },
    /// What the model's scheduler has done and holds.
    Stats {
        model: ModelId,
        caller: CallerId,
        tag: Tag,
    },
    /// The context is gone, and a run over it after `n_pulled` tokens.
    Release {
        id: ContextId,
        n_pulled: usize,
    },
}

/// Go on with a beam search.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SearchBeams {
    /// The prompt. It is left as it is.
    pub(crate) base: ContextId,
    pub(crate) edit: Edit,
    /// One for each beam, of the same guest: those of the rows of the last step in their order, then others. What they hold is
    /// the search's alone.
    pub(crate) contexts: Vec<ContextId>,
    pub(crate) search: Search,
    /// To its end when `None`.
    pub(crate) n_steps: Option<usize>,
    /// What is made of each row; nothing when `None`.
    #[serde(with = "shared_option")]
    pub(crate) sampler: Option<Arc<Sampler>>,
    /// What may come in the first of these steps, by row; none where nothing is said.
    #[serde(with = "shared_list_of")]
    pub(crate) masks: Vec<Arc<TokenMask>>,
    pub(crate) tag: Tag,
}

impl Operation {
    /// Tokens that are on their way with it; a word of a mask counts as two.
    pub(crate) fn n_tokens(&self) -> usize {
        match self {
            Self::Ask { edit, ask, .. } => edit.appended.len() + ask.n_tokens(),
            Self::Edit { edit, .. }
            | Self::Evict { edit, .. }
            | Self::Steer { edit, .. }
            | Self::Fork { edit, .. }
            | Self::Run { edit, .. } => edit.appended.len(),
            Self::Save { edit, tokens, .. } => edit.appended.len() + tokens.len(),
            Self::DrawTogether { members, .. } | Self::Mix { members, .. } => {
                members.iter().map(|(_, edit)| edit.appended.len()).sum()
            }
            Self::SearchBeams(asked) => {
                let n_of_masks = N_TOKENS_PER_WORD * n_words(&asked.masks);
                asked.edit.appended.len() + asked.search.n_tokens() + n_of_masks
            }
            Self::Mask { mask, .. } => N_TOKENS_PER_WORD * mask.words().len(),
            Self::Create { .. }
            | Self::Open { .. }
            | Self::Cancel { .. }
            | Self::Pulled { .. }
            | Self::EndRun { .. }
            | Self::Release { .. }
            | Self::Forget { .. }
            | Self::Stats { .. }
            | Self::LetGo { .. } => 0,
        }
    }

    /// How it draws or ranks, if it does.
    pub(crate) fn sampler_mut(&mut self) -> Option<&mut Arc<Sampler>> {
        match self {
            Self::Ask {
                ask: Ask::Sample(sampler) | Ask::Verify { sampler, .. } | Ask::Mix { sampler, .. },
                ..
            } => Some(sampler),
            Self::DrawTogether { sampler, .. } => Some(sampler),
            Self::Mix { settings, .. } | Self::Run { settings, .. } => Some(&mut settings.sampler),
            Self::SearchBeams(asked) => asked.sampler.as_mut(),
            _ => None,
        }
    }

    /// The model that it is about.
    pub(crate) fn model(&self) -> ModelId {
        match self {
            Self::Create { id, .. }
            | Self::Open { id, .. }
            | Self::Edit { id, .. }
            | Self::Evict { id, .. }
            | Self::Steer { id, .. }
            | Self::Fork { id, .. }
            | Self::Ask { id, .. }
            | Self::Cancel { id, .. }
            | Self::Run { id, .. }
            | Self::Pulled { id, .. }
            | Self::Save { id, .. }
            | Self::Mask { id, .. }
            | Self::EndRun { id, .. }
            | Self::Release { id, .. } => id.model,
            Self::DrawTogether { members, .. } | Self::Mix { members, .. } => {
                members.first().map_or(ContextId::LEAST, |(id, _)| *id).model
            }
            Self::SearchBeams(asked) => asked.base.model,
            Self::Forget { model, .. } | Self::Stats { model, .. } => *model,
            // All models of a device know a row.
            Self::LetGo { .. } => ContextId::LEAST.model,
        }
    }
}
