//! One step's work for a backend, packed: rows of different lengths, never padded.

mod tokens;

use std::sync::Arc;

pub use tokens::Tokens;

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::backend::PAGE_LEN;
use crate::kept::KeptRow;
use crate::sampling::program::{DrawState, Left};
use crate::sampling::{Sampler, TokenMask};
use crate::steering::Steered;

/// A token of the model's vocabulary.
pub type Token = u32;

/// A page of KV memory on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageId(pub u32);

/// A page of host memory that a device page can be moved to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostPageId(pub u32);

/// A small number that a context keeps while it lives, for what a backend stores with each context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotId(pub u32);

/// A whole-page copy on the device, done before any token of the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageCopy {
    /// Where the bytes come from.
    pub src: PageId,
    /// Where they go.
    pub dst: PageId,
}

/// A token of a page: its keys and values in every layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Cell {
    /// The page.
    pub page: PageId,
    /// Its place in the page.
    pub idx: usize, // below PAGE_LEN
}

/// A copy of one token on the device. The tokens beside pages stay behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CellMove {
    /// Where the keys and values come from.
    pub src: Cell,
    /// Where they go.
    pub dst: Cell,
}

/// The work of one step.
#[derive(Debug, Default)]
pub struct Batch<'a> {
    /// Page copies, run first; no page is both a source and a destination.
    pub copies: &'a [PageCopy],
    /// Rows of different contexts. But for trees of guesses: there a row is the last token of the context, and those behind it,
    /// for the same slot, are the nodes, each after the one that it follows. They come with [`Evicted`], so that a node sees
    /// the context and its own path, itself included, and no other node. Nothing that the slot keeps after them is read.
    pub rows: Vec<Row<'a>>,
}

/// Consecutive tokens of one context, or none: then it asks about the last token again, from the state that was kept for
/// the slot when it was asked about before.
#[derive(Debug)]
pub struct Row<'a> {
    /// The context.
    pub slot: SlotId,
    /// Tokens of the context from the first on, as far as they are known and this row goes.
    pub tokens: Tokens<'a>,
    /// Where the row ends.
    pub input: Input,
    /// Position of the first token to compute; the KV of all earlier positions is in `pages`, or will be once the steps
    /// before this one are done.
    pub start: usize,
    /// The context's pages in order; they cover the row. Without tokens to compute, those of the tokens that are there, or
    /// none where some are not on the device.
    pub pages: &'a [PageId],
    /// Pages from the first on that are those of the row before this one for the slot, as far as that one had them. Rows
    /// without pages do not count, and after a step that failed none are said to be the same.
    pub n_same_pages: usize,
    /// Pages from the first on that are those of the row before this one in the batch too, where both are hypotheses of one
    /// beam search, which may be read once for all of them. Elsewhere 0.
    pub n_pages_alike: usize,
    /// What to return for this row.
    pub outputs: Requests<'a>,
    /// For a context from which tokens were evicted, and for a node of a tree of guesses. `tokens`, `start` and the positions of
    /// outputs then count those that are there, and tokens lie and are rotated as this says.
    pub evicted: Option<Evicted<'a>>,
    /// What is added to its tokens between layers, where any token of the context up to the row's end is steered.
    pub steered: Option<Steered<'a>>,
}

/// Where the tokens of a context lie from which some were evicted.
///
/// The tokens before the row lie in the cells whose bits are set, page by page, and in all from `open` to `cell`. The row's
/// own follow from `cell` on. Each token sees those that lie before it, itself included, and no others.
#[derive(Clone, Copy, Debug)]
pub struct Evicted<'a> {
    /// Tokens that were evicted: a draw's position counts them too, so that none is made twice with the same noise.
    pub n_evicted: usize,
    /// Rotary position of the first token to compute; those after it follow.
    pub rotation: usize,
    /// The cell that takes the first token to compute; cells count from the first of the first page.
    pub cell: usize,
    /// Of a node of a tree of guesses, pages from the first on whose cells are all seen. Elsewhere `live` says so of each.
    pub n_whole: Option<usize>,
    /// A bit for each cell of each page behind those, the lowest for the first.
    pub live: &'a [u16],
    /// The first cell that the bits say nothing of.
    pub open: usize,
    /// Ascending, at least one.
    pub stretches: &'a [Stretch],
    /// What is done before all else with the row: its pages and cells are those after it.
    pub packs: &'a [Pack],
}

/// Tokens that are copied together, keys and values in every layer: those of a few pages to the first cells of another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pack {
    /// The pages, in the order of their tokens, and a bit for each cell with one.
    pub from: SmallVec<[(PageId, u16); 4]>,
    /// None of those.
    pub to: PageId,
}

/// Cells whose keys a query sees with a rotation of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// The first, which is before or at the row's first.
    pub first_cell: usize,
    /// How much further than by its rotary position a query is rotated for their keys; 0 for the last stretch.
    pub extra_rotation: i64,
}

impl Evicted<'_> {
    /// Of the cells of a page, those with a token that the token in a cell sees.
    #[must_use]
    pub fn seen_in(&self, page_idx: usize, cell: usize) -> u16 {
        let bits_below = |end: usize| {
            let n = end.saturating_sub(page_idx * PAGE_LEN).min(PAGE_LEN);
            ((1u32 << n) - 1) as u16
        };
        let bits = match page_idx.checked_sub(self.n_whole.unwrap_or(0)) {
            None => u16::MAX,
            Some(idx) => self.live.get(idx).copied().unwrap_or(0),
        };
        let known = bits & bits_below(self.open);
        (known | !bits_below(self.open)) & bits_below(cell + 1)
    }
}

/// What is asked of one row; mostly one thing. A row makes one late draw at most.
pub type Requests<'a> = SmallVec<[OutputRequest<'a>; 1]>;

/// The memory of rows that are no longer needed, for others.
#[must_use]
pub fn reused<'b>(mut rows: Vec<Row<'_>>) -> Vec<Row<'b>> {
    rows.clear();
    // The standard library collects into the memory that it iterates over.
    rows.into_iter().map(|_| unreachable!("there are no rows")).collect()
}

/// What a row computes last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// The last of its tokens.
    Known,
    /// One token more: the one that the step before draws for this slot, which is the row's own or, in a mixture, that of
    /// its first member. It is the only one that the row computes.
    Drawn(SlotId),
}

impl Row<'_> {
    /// Position after the last token that the row computes.
    #[must_use]
    pub fn end(&self) -> usize {
        self.tokens.len() + usize::from(self.input != Input::Known)
    }
}

/// One thing to return for one position.
#[derive(Debug)]
pub struct OutputRequest<'a> {
    /// The position whose next-token distribution is meant, in `start..end()`; the one before `start` if the row has no
    /// tokens.
    pub position: usize,
    /// What to return.
    pub kind: OutputKind<'a>,
}

/// The mask of a late draw.
#[derive(Clone, Copy, Debug)]
pub struct LateMask<'a> {
    /// Which row of the step draws under it.
    pub row_idx: usize,
    /// What may be drawn.
    pub mask: &'a TokenMask,
}

/// What can be asked of a position.
#[derive(Debug)]
#[non_exhaustive]
pub enum OutputKind<'a> {
    /// A token drawn by the sampler. History for the penalties is every token up to `position`, the draw's position
    /// is `position + 1` (the place the token will take).
    Sample(&'a Sampler),
    /// As [`Self::Sample`], under a mask of this draw's own in the place of the sampler's.
    Masked {
        /// How to draw.
        sampler: &'a Arc<Sampler>,
        /// The mask; one that is late comes with [`Backend::supply`](crate::backend::Backend::supply), or not at all.
        mask: Option<&'a Arc<TokenMask>>,
    },
    /// As [`Self::Sample`], by the program of the sampler, which has one.
    Program {
        /// How to draw.
        sampler: &'a Sampler,
        /// Where the program starts.
        start: Start,
        /// What may be drawn, whatever the program says.
        within: Within<'a>,
        /// The other members. A draw with any does not wait for its mask.
        others: Others<'a>,
    },
    /// Nothing: the logits are for the program that draws for the first member of a mixture.
    Mixed,
    /// The `n` most probable tokens and the entropy.
    Top {
        /// How many.
        n: usize,
    },
    /// The `n` most probable tokens after whatever the sampler makes of the row, as [`rank`](crate::sampling::rank) has
    /// them.
    Ranked {
        /// What is made of the row.
        sampler: &'a Arc<Sampler>,
        /// What may come, whatever the sampler says; all tokens when `None`.
        within: Option<&'a Arc<TokenMask>>,
        /// How many.
        n: usize,
    },
    /// The log-probabilities of these tokens.
    Scores(&'a [Token]),
    /// The log-probabilities of the whole vocabulary.
    Full,
    /// The logits of the whole vocabulary.
    Logits,
    /// Nothing: the logits go to this place on the device. Nothing else is asked of the position.
    Keep(&'a KeptRow),
    /// The hidden state after the final norm.
    Embedding,
    /// The hidden state after so many layers: 0 is the embedding of the token, that after the last layer is also after
    /// the final norm, as `output_hidden_states` of Hugging Face has them. Only of tokens that the row computes, and
    /// the slot keeps no state for it.
    Hidden {
        /// How many.
        n_layers: usize,
    },
    /// The attention that the position puts on each token up to itself: the softmax over them, the mean over the query heads of
    /// these layers; 0 outside a layer's window. Only of a token that the row computes, and the slot keeps no state for it.
    Attention {
        /// Layers, counted from 0: at least one, each once.
        layers: &'a [usize],
    },
}

/// The other members of a draw, in the order in which its program names them.
#[derive(Clone, Copy, Debug)]
pub enum Others<'a> {
    /// As many rows behind the draw's own, each of which asks for [`OutputKind::Mixed`] at its end.
    Rows(usize),
    /// Rows that steps before this one have kept.
    Kept(&'a [KeptRow]),
}

impl<'a> Others<'a> {
    /// There are none.
    pub const NONE: Self = Self::Rows(0);

    /// How many there are.
    #[must_use]
    pub fn n(self) -> usize {
        match self {
            Self::Rows(n) => n,
            Self::Kept(rows) => rows.len(),
        }
    }

    /// How many of them are rows of the same step.
    #[must_use]
    pub fn n_rows(self) -> usize {
        if let Self::Rows(n) = self { n } else { 0 }
    }

    /// Those that were kept.
    #[must_use]
    pub fn kept(self) -> &'a [KeptRow] {
        if let Self::Kept(rows) = self { rows } else { &[] }
    }
}

/// What a program may draw, whatever it says.
#[derive(Clone, Copy, Debug)]
pub enum Within<'a> {
    /// Every token.
    All,
    /// What the mask allows.
    Mask(&'a Arc<TokenMask>),
    /// What the mask allows that comes with [`Backend::supply`](crate::backend::Backend::supply), or not at all.
    Late,
}

impl<'a> Within<'a> {
    /// The mask, if there is one.
    #[must_use]
    pub fn mask(self) -> Option<&'a Arc<TokenMask>> {
        match self {
            Self::Mask(mask) => Some(mask),
            Self::All | Self::Late => None,
        }
    }
}

impl<'a> From<Option<&'a Arc<TokenMask>>> for Within<'a> {
    fn from(mask: Option<&'a Arc<TokenMask>>) -> Self {
        mask.map_or(Self::All, Self::Mask)
    }
}

impl OutputKind<'_> {
    /// Whether it draws a token.
    #[must_use]
    pub fn draws(&self) -> bool {
        matches!(self, Self::Sample(_) | Self::Masked { .. } | Self::Program { .. })
    }

    /// What draws, or what the row is ranked by.
    #[must_use]
    pub fn sampler(&self) -> Option<&Sampler> {
        match self {
            Self::Sample(sampler) | Self::Program { sampler, .. } => Some(*sampler),
            Self::Masked { sampler, .. } | Self::Ranked { sampler, .. } => Some(&***sampler),
            _ => None,
        }
    }

    /// Whether it waits for its mask.
    #[must_use]
    pub fn is_late(&self) -> bool {
        matches!(self, Self::Masked { mask: None, .. } | Self::Program { within: Within::Late, .. })
    }

    /// Rows behind its own that it sees: the others of a mixture.
    #[must_use]
    pub fn n_others(&self) -> usize {
        if let Self::Program { others, .. } = self { others.n_rows() } else { 0 }
    }

    /// The token before it is one that the step before draws.
    pub(crate) fn starts_after_a_draw(&mut self) {
        if let Self::Program { start, .. } = self {
            *start = Start::Drawn;
        }
    }
}

/// Where the draw of a program starts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Start {
    /// Here.
    At(DrawState),
    /// Where the request before it in the row ends, which is such a draw too.
    Before,
    /// Where the first request ends of the row that is so many before this one in the step, which is such a draw too: that of
    /// the token before it, in a tree of guesses.
    After {
        /// How many.
        n_rows: usize,
    },
    /// Where the step before ended that drew the token with which the row begins.
    Drawn,
}

/// A token that was drawn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Drawn {
    /// The token.
    pub candidate: Candidate,
    /// What the program that drew it left.
    pub left: Option<Box<Left>>,
    /// What was looked at in its place.
    pub seen: Option<Box<Seen>>,
}

/// What was looked at in the place of a draw, as the sampler's [`Looks`](crate::sampling::Looks) say.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Seen {
    /// The most probable tokens.
    pub top: Option<Top>,
    /// Hidden states of the token before the draw, in the order in which they are asked for.
    pub hidden: Vec<Vec<f32>>, // [n_states, hidden_size]
}

/// What may come at one place.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Top {
    /// Most probable first, ties by lower token.
    pub candidates: Vec<Candidate>,
    /// Of the whole distribution, in nats.
    pub entropy: f32,
}

impl From<Candidate> for Drawn {
    fn from(candidate: Candidate) -> Self {
        Self { candidate, left: None, seen: None }
    }
}

/// A token with its natural-log probability under the model, before any sampler setting.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Candidate {
    /// The token.
    pub token: Token,
    /// Its log-probability, in nats.
    pub logprob: f32,
}

/// What came back for one request.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Output {
    /// For [`OutputKind::Sample`] and [`OutputKind::Masked`].
    Sampled(Candidate),
    /// For [`OutputKind::Program`].
    Programmed(Candidate, Box<Left>),
    /// For [`OutputKind::Mixed`].
    Mixed,
    /// For [`OutputKind::Keep`].
    Kept,
    /// For [`OutputKind::Masked`]: the mask did not come, and nothing was drawn.
    SatOut,
    /// For [`OutputKind::Ranked`]: most probable first, ties by lower token.
    Ranked(Vec<Candidate>),
    /// For [`OutputKind::Top`]: most probable first, ties by lower token.
    Top {
        /// The most probable tokens.
        candidates: Vec<Candidate>,
        /// Entropy of the whole distribution, in nats.
        entropy: f32,
    },
    /// For [`OutputKind::Scores`], in the order asked.
    Scores(Vec<f32>),
    /// For [`OutputKind::Full`] and [`OutputKind::Logits`].
    Full(Vec<f32>), // [vocab_size]
    /// For [`OutputKind::Embedding`] and [`OutputKind::Hidden`].
    Embedding(Vec<f32>), // [hidden_size]
    /// For [`OutputKind::Attention`]; they sum to 1.
    Attention(Vec<f32>), // [position + 1]
    /// The logits held a NaN, or a mask left no token to draw.
    Failed(OutputFault),
}

/// Why one output could not be had; other rows of the batch are unharmed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum OutputFault {
    /// The model produced a NaN.
    #[error("the logits hold a NaN")]
    NotANumber,
    /// Mask and bias leave no token with a finite logit.
    #[error("the mask and bias leave no token to draw")]
    NothingToDraw,
}
