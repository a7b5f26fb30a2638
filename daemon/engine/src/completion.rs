//! What the engine gives back, as data.

use std::cell::{Cell, RefCell, RefMut};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::batch::Token;
use crate::command::Answer;
use crate::error::EngineError;
use crate::history::History;
use crate::kv::Evictions;
use crate::port::shared;
use crate::run::RunEvent;
use crate::run_stats::RunStats;
use crate::stats::EngineStats;
use crate::violation::Violation;

/// A guest that asks, unique while the engine runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct CallerId(pub(crate) u64);

/// Tells what a guest asked apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Tag(u64);

impl Tag {
    pub(crate) const fn new(place: u32, generation: u32) -> Self {
        Self((generation as u64) << 32 | place as u64)
    }

    /// What it travels as.
    pub(crate) const fn number(self) -> u64 {
        self.0
    }

    /// The one that travels as this.
    pub(crate) const fn of_number(number: u64) -> Self {
        Self(number)
    }

    pub(crate) fn place(self) -> usize {
        self.0 as u32 as usize
    }

    pub(crate) fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// What came of an operation.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Completion {
    pub(crate) caller: CallerId,
    pub(crate) tag: Tag,
    pub(crate) done: Done,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Done {
    /// A question was answered.
    Answer(Result<Answer, EngineError>),
    /// A saved context was opened.
    Opened(Result<Opened, EngineError>),
    /// A context was saved, or forgotten.
    Kept(Result<(), EngineError>),
    Stats(Result<Box<EngineStats>, EngineError>),
    /// Models have the KV memory that they were to have.
    Shared(Result<(), EngineError>),
    /// So many bytes of host memory went back to the system.
    Relieved(u64),
    /// An operation of the caller was none that a guest of ours posts: nothing that it asks is answered any more.
    Expelled(Violation),
    /// A run gave something, while it was decoded up to `n_ahead` tokens ahead.
    Run {
        event: RunEvent,
        n_ahead: usize,
    },
}

impl Done {
    /// The token of a run, if it is one.
    pub(crate) fn token(&self) -> Option<Token> {
        match self {
            Self::Run { event: RunEvent::Token(drawn), .. } => Some(drawn.candidate.token),
            _ => None,
        }
    }
}

/// What its guest has to know of a context that was saved.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Opened {
    #[serde(with = "shared")]
    pub(crate) tokens: Arc<History>,
    pub(crate) evictions: Option<Evictions>,
    /// Bytes of what is added to its tokens.
    pub(crate) steering_bytes: u64,
}

/// What is to be given back after this turn, in the order in which it came about. Its memory is reused. All that the
/// scheduler works on holds it; it does not leave the engine's side.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outbox {
    completions: Rc<RefCell<Vec<Completion>>>,
    /// When this turn began, as the engine was told; nothing before its first turn.
    turn_began: Rc<Cell<Option<Instant>>>,
    /// Of the runs of one model.
    runs: Rc<RefCell<RunStats>>,
}

impl Outbox {
    /// The same for one more model, whose runs are counted by themselves.
    pub(crate) fn of_model(&self) -> Self {
        Self { runs: Rc::default(), ..self.clone() }
    }

    /// A turn begins.
    pub(crate) fn begin_turn(&self, now: Instant) {
        self.turn_began.set(Some(now));
    }

    /// When this turn began.
    pub(crate) fn turn_began(&self) -> Option<Instant> {
        self.turn_began.get()
    }

    /// What became of the runs of the model.
    pub(crate) fn runs(&self) -> RefMut<'_, RunStats> {
        self.runs.borrow_mut()
    }

    pub(crate) fn push(&self, completion: Completion) {
        self.completions.borrow_mut().push(completion);
    }

    /// Takes all of it into an empty list, and keeps the memory of that.
    pub(crate) fn take(&self, into: &mut Vec<Completion>) {
        debug_assert!(into.is_empty(), "what is in the list would be given back twice");
        std::mem::swap(&mut *self.completions.borrow_mut(), into);
    }

    /// Where the answer to this operation goes.
    pub(crate) fn to(&self, caller: CallerId, tag: Tag) -> Reply {
        Reply { caller, tag, outbox: self.clone() }
    }
}

/// The engine's end of one operation.
#[derive(Debug)]
pub(crate) struct Reply {
    caller: CallerId,
    tag: Tag,
    outbox: Outbox,
}

impl Reply {
    pub(crate) fn tag(&self) -> Tag {
        self.tag
    }

    pub(crate) fn outbox(&self) -> &Outbox {
        &self.outbox
    }

    pub(crate) fn send(&self, done: Done) {
        self.outbox.push(Completion { caller: self.caller, tag: self.tag, done });
    }
}
