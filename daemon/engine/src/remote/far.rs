//! The engine as guests of another process have it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use rustc_hash::FxHashMap;
use tokio::sync::watch;

use super::message::{Answered, Asked, Question};
use super::{ModelFacts, Numbers};
use crate::completion::{CallerId, Completion};
use crate::error::EngineFailure;
use crate::handle::{EngineState, EngineWatch, Inward, Link, Message, Posted};
use crate::mailbox::{Mailbox, Postbox};
use crate::model::Model;
use crate::model_handle::ModelHandle;

/// Stands for an engine of the daemon in a process of guests.
#[derive(Debug)]
pub struct FarEngine {
    link: Arc<Link>,
    state: watch::Sender<EngineState>,
    numbers: Numbers,
    callers: Arc<Callers>,
}

type Callers = Mutex<FxHashMap<CallerId, Arc<Mailbox>>>;

/// Takes what guests ask to the daemon.
pub trait Spokesman: std::fmt::Debug + Send + Sync {
    /// Asks, after all that was asked before. May wait for room, not for an answer.
    fn ask(&self, asked: Asked);
}

/// Has what guests ask asked, and knows who asks.
#[derive(Debug)]
struct Asking {
    spokesman: Arc<dyn Spokesman>,
    callers: Arc<Callers>,
}

/// A model that an engine of the daemon has loaded.
#[derive(Debug)]
pub struct FarModel {
    handle: ModelHandle,
    failure: watch::Sender<Option<EngineFailure>>,
}

fn lock(callers: &Callers) -> MutexGuard<'_, FxHashMap<CallerId, Arc<Mailbox>>> {
    callers.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FarEngine {
    /// One whose guests and contexts have ids of these.
    #[must_use]
    pub fn new(numbers: Numbers, spokesman: Arc<dyn Spokesman>) -> Self {
        let callers = Arc::<Callers>::default();
        let asking = Asking { spokesman, callers: callers.clone() };
        let (link, state) = Link::far(Arc::new(asking), numbers.first());
        Self { link, state, numbers, callers }
    }

    /// Tells whether it works, and when it ends.
    #[must_use]
    pub fn watch(&self) -> EngineWatch {
        EngineWatch::new(self.link.clone())
    }

    /// A model that was loaded there.
    #[must_use]
    pub fn add(&self, facts: ModelFacts, model: Arc<Model>) -> FarModel {
        let (failure, failed) = watch::channel(None);
        let handle = ModelHandle::far(self.link.clone(), facts, model, self.numbers.first(), failed);
        FarModel { handle, failure }
    }

    /// Gives guests what has come back for them; each is woken once.
    pub fn deliver(&self, answers: impl IntoIterator<Item = Answered>) {
        let mut wakers: Vec<Waker> = Vec::new();
        let callers = lock(&self.callers);
        for Answered(Completion { caller, tag, done }) in answers {
            // A guest that has gone is given nothing.
            let waker = callers.get(&caller).and_then(|mailbox| mailbox.deliver(tag, done));
            if let Some(waker) = waker
                && !wakers.last().is_some_and(|last| last.will_wake(&waker))
            {
                wakers.push(waker);
            }
        }
        drop(callers);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// It has come to its end: with a failure, or because it was stopped.
    pub fn end(&self, failure: Option<EngineFailure>) {
        self.state.send_replace(failure.map_or(EngineState::Stopped, EngineState::Failed));
        lock(&self.callers).values().for_each(|mailbox| mailbox.close());
    }
}

impl Inward for Asking {
    fn bring(&self, posted: Posted) {
        let caller = posted.from;
        let question = match posted.message {
            Message::Enter { caller, owner, postbox } => {
                if let Postbox::Here(mailbox) = postbox {
                    lock(&self.callers).insert(caller, mailbox);
                }
                Question::Enter { caller, guest: owner.guest }
            }
            Message::Leave { caller } => {
                lock(&self.callers).remove(&caller);
                Question::Leave { caller }
            }
            Message::Operation(operation) => Question::Operation { caller, operation },
            // Models, memory and archives are the daemon's business.
            Message::Add { .. }
            | Message::SetKvBytes { .. }
            | Message::Relieve { .. }
            | Message::FromArchive { .. }
            | Message::Remove { .. }
            | Message::Shutdown => return,
        };
        self.spokesman.ask(Asked(question));
    }
}

impl FarModel {
    /// The way to it.
    #[must_use]
    pub fn handle(&self) -> &ModelHandle {
        &self.handle
    }

    /// It has failed, and others of its engine have not.
    pub fn fail(&self, failure: EngineFailure) {
        self.failure.send_replace(Some(failure));
    }
}
