//! The archives of models, over one store: what engines say is put into a queue for each user, and some threads do what the
//! queues say, one thing of a user at a time and user by user in turn.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use trellis_engine::account::{Account, ActorId};
use trellis_engine::backend::Backend;
use trellis_engine::model::Model;
use trellis_engine::{Archive, Kept, SavedContext, SavedName, Taken, Wanted};

use super::Store;
use super::file::ModelKind;
use crate::bundled;

/// Users that are served at once: one with a slow disk to itself does not keep all others waiting.
const N_THREADS: usize = 4;

/// For how long a thread waits for more to do before it ends.
const IDLE_TIME: Duration = Duration::from_secs(1);

/// What may be asked for one user before it is done, more than its guests have contexts and calls under way: what comes beyond that
/// is not kept, or not there.
const N_JOBS_MAX: usize = 1 << 11;

/// The archives of all models. Its threads end with it, after what they are at.
#[derive(Debug)]
pub(crate) struct Keepers {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    store: Store,
    /// Models that are loaded when a guest asks for them, and those that were loaded at any time: what is kept of them is forgotten
    /// also while they are not.
    known: Mutex<BTreeSet<String>>,
    queues: Mutex<Queues>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Queues {
    by_user: HashMap<ActorId, VecDeque<Job>>,
    /// Users with jobs of whom none is being done, the next first.
    order: VecDeque<ActorId>,
    /// What each is about that is being done, one of a user, and its number.
    busy: Vec<(Option<Arc<OfModel>>, u64)>,
    /// All that were ever asked for.
    n_asked: u64,
    n_threads: usize,
    is_over: bool,
}

/// What is asked of the archive of a model.
#[derive(Debug)]
struct Job {
    /// None where all that are known are meant.
    model: Option<Arc<OfModel>>,
    name: SavedName,
    asked: Asked,
    /// How many were asked for before.
    number: u64,
}

impl Job {
    /// Its number is given as it is taken in.
    fn new(model: Option<Arc<OfModel>>, name: SavedName, asked: Asked) -> Self {
        Self { model, name, asked, number: 0 }
    }

    fn is_replaced_by(&self, job: &Self) -> bool {
        let is_same = match (&self.model, &job.model) {
            (Some(model), Some(other)) => Arc::ptr_eq(model, other),
            _ => false,
        };
        is_same && matches!((&self.asked, &job.asked), (Asked::Save(_), Asked::Save(_)))
    }

    /// The model that it is about; none where that is all: what is forgotten is forgotten of each, whichever engine asks.
    fn about(&self) -> Option<&Arc<OfModel>> {
        match self.asked {
            Asked::Save(_) | Asked::Fetch(..) => self.model.as_ref(),
            Asked::Forget(_) | Asked::ForgetOfNone(_) => None,
        }
    }

    fn is_of(&self, model: &str) -> bool {
        self.about().is_none_or(|of| of.model.name == model)
    }
}

#[derive(Debug)]
enum Asked {
    Save(Kept),
    Fetch(Arc<Account>, Wanted<Box<SavedContext>>),
    Forget(Wanted<()>),
    /// Where no model is loaded that would ask.
    ForgetOfNone(oneshot::Sender<bool>),
}

/// What is to be known of a model.
#[derive(Debug)]
struct OfModel {
    model: Arc<Model>,
    /// How its pages are written; none where they are of no use to another daemon.
    format: String,
    page_bytes: u64,
    kind: OnceLock<ModelKind>,
}

impl OfModel {
    /// The first call may read all weights that are compiled in.
    fn kind(&self) -> &ModelKind {
        self.kind.get_or_init(|| {
            let kind = ModelKind {
                model: self.model.name.clone(),
                tokenizer: self.model.tokenizer.fingerprint().to_owned(),
                identity: self.model.identity(),
                format: self.format.clone(),
                page_bytes: self.page_bytes,
            };
            bundled::let_go();
            kind
        })
    }
}

/// The archive of one model.
#[derive(Debug)]
struct Keeper {
    of: Arc<OfModel>,
    shared: Arc<Shared>,
}

impl Keepers {
    /// Over this store, for all models that come to be loaded, and these.
    pub(crate) fn over(store: Store, on_demand: Vec<String>) -> Self {
        let (queues, changed) = (Mutex::default(), Condvar::new());
        let known = Mutex::new(BTreeSet::from_iter(on_demand));
        Self { shared: Arc::new(Shared { store, known, queues, changed }) }
    }

    /// Keeps nothing under a name any more, of any model that is known; whether anything was kept. For where no engine asks.
    pub(crate) async fn forget(&self, name: SavedName) -> bool {
        let (tell, told) = oneshot::channel();
        self.shared.push(Job::new(None, name, Asked::ForgetOfNone(tell)));
        told.await.unwrap_or(false)
    }

    /// The archive of a model that is computed by a backend.
    pub(crate) fn of(&self, model: &Arc<Model>, backend: &mut dyn Backend) -> Arc<dyn Archive> {
        self.shared.known().insert(model.name.clone());
        let pages = backend.kv_bytes().map_or_else(|| "none".to_owned(), |bytes| bytes.format());
        let format = format!("{pages}; {}", backend.weights().dtype.name());
        let page_bytes = backend.limits().page_bytes as u64;
        let of = OfModel { model: model.clone(), format, page_bytes, kind: OnceLock::new() };
        Arc::new(Keeper { of: Arc::new(of), shared: self.shared.clone() })
    }

    /// Waits until all that was saved until now of the model of a name, or of all, is on disk, for so long at most; returns whether it is.
    /// What is to be done for the model goes before all else. What is forgotten meanwhile is not waited for: there may always be more.
    pub(crate) fn settle(&self, of: Option<&str>, at_most: Duration) -> bool {
        let until = Instant::now() + at_most;
        let mut queues = self.shared.lock();
        if let Some(model) = of {
            queues.bring_forward(model);
        }
        let n_asked = queues.n_asked;
        while queues.has_jobs_of(of, n_asked) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.shared.changed.wait_timeout(queues, left);
            queues = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Bytes of files: of a user, or of all.
    pub(crate) fn n_bytes(&self, actor: Option<ActorId>) -> u64 {
        self.shared.store.n_bytes(actor)
    }
}

impl Queues {
    /// Whether something is to be done for a model, or for any, of the first `n_asked` that was asked for.
    fn has_jobs_of(&self, of: Option<&str>, n_asked: u64) -> bool {
        let is_about = |model: &OfModel| of.is_none_or(|of| of == model.model.name);
        let is_busy = |(model, number): &(Option<Arc<OfModel>>, u64)| {
            *number < n_asked && model.as_deref().is_none_or(is_about)
        };
        let waits = |job: &Job| job.number < n_asked && of.is_none_or(|of| job.is_of(of));
        self.busy.iter().any(is_busy) || self.by_user.values().flatten().any(waits)
    }

    /// What is to be done for a model goes first, in the order in which it was asked for: that of other models is about others, but
    /// for what was asked under a name that is forgotten of all models after it.
    fn bring_forward(&mut self, model: &str) {
        let mut has_none = HashSet::new();
        for (actor, jobs) in &mut self.by_user {
            let mut forgotten = HashSet::new();
            let (mut first, mut others) = (VecDeque::new(), VecDeque::new());
            for job in jobs.drain(..).rev() {
                if job.about().is_none() {
                    forgotten.insert(job.name.clone());
                }
                let goes_first = job.is_of(model) || forgotten.contains(&job.name);
                if goes_first { &mut first } else { &mut others }.push_front(job);
            }
            if first.is_empty() {
                has_none.insert(*actor);
            }
            first.append(&mut others);
            *jobs = first;
        }
        self.order.make_contiguous().sort_by_key(|actor| has_none.contains(actor));
    }
}

impl Drop for Keepers {
    fn drop(&mut self) {
        self.shared.lock().is_over = true;
        self.shared.changed.notify_all();
    }
}

impl Keeper {
    fn push(&self, name: SavedName, asked: Asked) {
        self.shared.push(Job::new(Some(self.of.clone()), name, asked));
    }
}

impl Archive for Keeper {
    fn note_saved(&self, name: SavedName, kept: Kept) {
        self.push(name, Asked::Save(kept));
    }

    fn fetch(&self, name: SavedName, account: Arc<Account>, wanted: Wanted<Box<SavedContext>>) {
        self.push(name, Asked::Fetch(account, wanted));
    }

    fn forget(&self, name: SavedName, wanted: Wanted<()>) {
        self.push(name, Asked::Forget(wanted));
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn known(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether anything was kept under a name, of any model.
    fn forget(&self, name: &SavedName) -> bool {
        let (known, mut was_there) = (self.known().clone(), false);
        for model in known {
            was_there |= self.store.forget(&model, name).unwrap_or_else(|error| {
                tracing::warn!(uid = name.actor.0, model, %error, "a saved context stays on disk");
                false
            });
        }
        was_there
    }

    fn push(self: &Arc<Self>, mut job: Job) {
        let mut queues = self.lock();
        if queues.is_over {
            return;
        }
        job.number = queues.n_asked;
        queues.n_asked += 1;
        let actor = job.name.actor;
        let is_known = queues.by_user.contains_key(&actor);
        let of_user = queues.by_user.entry(actor).or_default();
        let n_jobs = of_user.len();
        match of_user.iter_mut().rev().find(|other| other.name == job.name) {
            // Only the last of what is saved under a name is there to be taken.
            Some(last) if last.is_replaced_by(&job) => *last = Job { number: last.number, ..job },
            _ if n_jobs >= N_JOBS_MAX => {
                // Whoever waits for it is told that there is nothing, as it is dropped.
                drop(queues);
                tracing::debug!(uid = actor.0, ?job.name, "more is asked of saved contexts at once than is done");
                return;
            }
            // Whoever waits goes before all that is only written, and after those who wait already.
            None if !matches!(job.asked, Asked::Save(_)) => {
                let n_waiting = of_user.iter().take_while(|other| !matches!(other.asked, Asked::Save(_)));
                of_user.insert(n_waiting.count(), job);
            }
            _ => of_user.push_back(job),
        }
        if !is_known {
            queues.order.push_back(actor);
        }
        if queues.n_threads < N_THREADS && queues.n_threads < queues.busy.len() + queues.order.len() {
            let shared = self.clone();
            let spawned = std::thread::Builder::new().name("saved".to_owned()).spawn(move || shared.serve());
            match spawned {
                Ok(_) => queues.n_threads += 1,
                Err(error) => tracing::warn!(%error, "no thread for saved contexts"),
            }
        }
        // Nobody would do them: whoever waits is told that there is nothing.
        let undone = (queues.n_threads == 0).then(|| {
            queues.order.clear();
            std::mem::take(&mut queues.by_user)
        });
        drop(queues);
        drop(undone);
        self.changed.notify_all();
    }

    /// Does what is asked, until nobody asks any more.
    fn serve(&self) {
        let mut queues = self.lock();
        loop {
            if queues.is_over && queues.order.is_empty() {
                return;
            }
            let Some(actor) = queues.order.pop_front() else {
                let waited = self.changed.wait_timeout(queues, IDLE_TIME);
                let (now, waited) = waited.unwrap_or_else(PoisonError::into_inner);
                queues = now;
                if waited.timed_out() && queues.order.is_empty() {
                    queues.n_threads -= 1;
                    return;
                }
                continue;
            };
            let job = queues.by_user.get_mut(&actor).and_then(VecDeque::pop_front);
            let number = job.as_ref().map(|job| job.number);
            queues.busy.extend(job.as_ref().map(|job| (job.about().cloned(), job.number)));
            drop(queues);
            if let Some(job) = job {
                let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.carry_out(job)));
                if done.is_err() {
                    tracing::error!(uid = actor.0, "keeping a saved context panicked");
                }
            }
            queues = self.lock();
            queues.busy.retain(|(_, other)| Some(*other) != number);
            match queues.by_user.get(&actor).is_some_and(|jobs| !jobs.is_empty()) {
                true => queues.order.push_back(actor),
                false => drop(queues.by_user.remove(&actor)),
            }
            self.changed.notify_all();
        }
    }

    fn carry_out(&self, Job { model, name, asked, .. }: Job) {
        let uid = name.actor.0;
        match (asked, model) {
            (Asked::Save(kept), Some(model)) => {
                let model_name = &model.model.name;
                let context = match kept.take() {
                    Taken::Context(context) => context,
                    Taken::NotToBeKept => {
                        tracing::debug!(uid, model = model_name, "a context is too long to be kept on disk");
                        if let Err(error) = self.store.forget(model_name, &name) {
                            tracing::warn!(uid, model = model_name, %error, "an outdated context stays on disk");
                        }
                        return;
                    }
                    Taken::Gone => return,
                };
                match self.store.put(model.kind(), &name, &context) {
                    Ok(n_bytes) => tracing::debug!(uid, model = model_name, n_bytes, "a context was saved"),
                    Err(error) => {
                        tracing::warn!(uid, model = model_name, %error, "a saved context is not kept on disk");
                    }
                }
            }
            (Asked::Fetch(account, wanted), Some(model)) => {
                wanted.answer(self.store.get(model.kind(), &name, &account).map(Box::new));
            }
            (Asked::Forget(wanted), _) => wanted.answer(self.forget(&name).then_some(())),
            // Who asked may be gone.
            (Asked::ForgetOfNone(told), _) => drop(told.send(self.forget(&name))),
            (Asked::Save(_) | Asked::Fetch(..), None) => unreachable!("what is saved is of a model"),
        }
    }
}

#[cfg(test)]
mod tests;
