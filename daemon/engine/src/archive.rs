//! Saved contexts beyond the life of an engine: an [`Archive`] keeps what guests save, and gives it back to engines that do not
//! have it any more.
//!
//! - An engine says what was saved and asks for what it does not have, on its thread; the archive answers when it can, through
//!   the [`Wanted`] that it was given.
//! - What is kept comes out of the engine with a [`Kept`] that whoever keeps it takes, when it has the room: so there is
//!   one image for each that is being written, however many were saved.
//! - The archive does the reading and writing. An engine moves bytes between pages and images, in parts between its steps.

use std::sync::{Arc, Weak};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use crate::account::{Account, ActorId, HostCharge};
use crate::batch::Token;
use crate::command::ModelId;
use crate::handle::{Link, Message};
use crate::kv::Evictions;
use crate::steering::Steering;

/// What came back from an archive of a saved context, and what that cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Restored {
    /// Tokens whose KV came back.
    pub(crate) n_tokens: usize,
    /// Bytes of that KV.
    pub(crate) n_bytes: u64,
    /// From when the first guest asked for it.
    pub(crate) time: Duration,
}

/// Whose a saved context is, and its name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SavedName {
    /// The user: all its guests find it.
    pub actor: ActorId,
    /// Its name among that user's.
    pub name: String,
}

/// Keeps the saved contexts of one model. Called on the engine's thread, which it must not hold up.
pub trait Archive: std::fmt::Debug + Send + Sync {
    /// A context was saved: it takes the place of what is kept under the name.
    fn note_saved(&self, name: SavedName, kept: Kept);

    /// A guest opens what the engine does not have. Memory for it is its user's, whose account this is.
    fn fetch(&self, name: SavedName, account: Arc<Account>, wanted: Wanted<Box<SavedContext>>);

    /// Nothing is to be kept under the name any more. It is answered when that is so, and whether anything was.
    fn forget(&self, name: SavedName, wanted: Wanted<()>);
}

/// A saved context outside of an engine.
#[derive(Debug)]
pub struct SavedContext {
    /// All but its KV.
    pub head: SavedHead,
    /// What is in its pages, one after the other; empty where it is to be computed again.
    pub kv: Vec<u8>,
    /// The memory of that, on the account of its user.
    pub charge: Option<HostCharge>,
}

/// All of a saved context but its KV, as data. From anywhere: an engine checks it before it is used.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SavedHead {
    /// Those that are gone included.
    pub(crate) tokens: Vec<Token>,
    /// Tokens from the first on that the KV is of.
    pub(crate) n_computed: usize,
    pub(crate) evictions: Option<Evictions>,
    /// What is added to its tokens, and from which one on.
    pub(crate) steering: Option<(Steering, usize)>,
}

impl SavedHead {
    /// Tokens that it has, those that were evicted left out.
    #[must_use]
    pub fn n_tokens(&self) -> usize {
        let n_evicted = self.evictions.as_ref().map_or(0, Evictions::n_evicted);
        self.tokens.len().saturating_sub(n_evicted)
    }

    /// Tokens from the first on whose KV is kept.
    #[must_use]
    pub fn n_computed(&self) -> usize {
        self.n_computed
    }

    /// Leaves its KV away.
    pub fn forget_kv(&mut self) {
        self.n_computed = 0;
    }
}

/// What the archive of a model and its engine say to each other through.
#[derive(Clone, Debug)]
pub(crate) struct ArchiveOf {
    archive: Arc<dyn Archive>,
    engine: Weak<Link>,
    model: ModelId,
}

/// What comes back from an archive.
#[derive(Debug)]
pub(crate) enum FromArchive {
    /// Somebody takes what is saved under a name.
    Take { name: SavedName, version: u64, to: oneshot::Sender<Option<SavedContext>> },
    /// What was kept under a name that a guest opens.
    Fetched { name: SavedName, found: Option<Box<SavedContext>> },
    /// Nothing is kept any more under a name that a guest forgets.
    Forgotten { name: SavedName, was_there: bool },
}

impl ArchiveOf {
    pub(crate) fn new(archive: Arc<dyn Archive>, engine: Weak<Link>, model: ModelId) -> Self {
        Self { archive, engine, model }
    }

    fn back(&self) -> Back {
        Back { engine: self.engine.clone(), model: self.model }
    }

    pub(crate) fn note_saved(&self, name: SavedName, version: u64) {
        self.archive.note_saved(name.clone(), Kept { back: self.back(), name, version });
    }

    pub(crate) fn fetch(&self, name: SavedName, account: Arc<Account>) {
        let back = self.back();
        let answer = move |name, found| back.say(FromArchive::Fetched { name, found });
        self.archive.fetch(name.clone(), account, Wanted::new(name, answer));
    }

    pub(crate) fn forget(&self, name: SavedName) {
        let back = self.back();
        let answer = move |name, was_there: Option<()>| {
            back.say(FromArchive::Forgotten { name, was_there: was_there.is_some() });
        };
        self.archive.forget(name.clone(), Wanted::new(name, answer));
    }
}

/// The way back to an engine, which may be gone.
#[derive(Clone, Debug)]
struct Back {
    engine: Weak<Link>,
    model: ModelId,
}

impl Back {
    fn say(&self, what: FromArchive) {
        if let Some(engine) = self.engine.upgrade() {
            // Where the engine has ended nobody waits for it.
            let _ = engine.post_message(Message::FromArchive { model: self.model, what });
        }
    }
}

/// What comes of taking what was saved.
#[derive(Debug)]
pub enum Taken {
    /// It.
    Context(Box<SavedContext>),
    /// It has more tokens or evictions behind it than are kept: what was kept under its name is outdated.
    NotToBeKept,
    /// Something else was saved under the name, or it was forgotten, or the engine has ended.
    Gone,
}

/// A context that was saved, for whoever keeps it.
#[derive(Debug)]
pub struct Kept {
    back: Back,
    name: SavedName,
    version: u64,
}

impl Kept {
    /// What was saved, as long as the engine has it and nothing else was saved under the name; waits until its pages are read.
    /// Its KV is left out where the user has no host memory left for it.
    #[must_use]
    pub fn take(self) -> Taken {
        let (to, taken) = oneshot::channel();
        let Self { back, name, version } = self;
        back.say(FromArchive::Take { name, version, to });
        match taken.blocking_recv() {
            Ok(Some(context)) => Taken::Context(Box::new(context)),
            Ok(None) => Taken::NotToBeKept,
            Err(_) => Taken::Gone,
        }
    }
}

type AnswerFn<T> = Box<dyn FnOnce(SavedName, Option<T>) + Send>;

/// What an engine waits for. It is told that there is nothing when this is dropped.
pub struct Wanted<T> {
    name: SavedName,
    answer: Option<AnswerFn<T>>,
}

impl<T> Wanted<T> {
    fn new(name: SavedName, answer: impl FnOnce(SavedName, Option<T>) + Send + 'static) -> Self {
        Self { name, answer: Some(Box::new(answer)) }
    }

    /// Says what was found.
    pub fn answer(mut self, found: Option<T>) {
        if let Some(answer) = self.answer.take() {
            answer(self.name.clone(), found);
        }
    }
}

impl<T> Drop for Wanted<T> {
    fn drop(&mut self) {
        if let Some(answer) = self.answer.take() {
            answer(self.name.clone(), None);
        }
    }
}

impl<T> std::fmt::Debug for Wanted<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Wanted").field("name", &self.name).finish_non_exhaustive()
    }
}
