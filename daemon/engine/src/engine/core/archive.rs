//! Saved contexts on their way to an archive and back.
//!
//! Pages are read and filled in parts between steps, while no step of their model is under way, and after each part the model
//! makes a step if it has one to make. A guest that opens what only the archive has waits for it, and so does one that forgets
//! something, while all others go on.

use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::Core;
use crate::account::{HostCharge, Owner};
use crate::archive::{FromArchive, SavedContext, SavedHead, SavedName};
use crate::backend::{BackendError, Damage, PAGE_LEN};
use crate::command::{ModelId, Operation};
use crate::completion::{CallerId, Done};
use crate::engine::resident::Resident;
use crate::error::{EngineError, EngineFailure};
use crate::scheduler::Restoring;

/// What is read or filled between two steps, at least a page: what is copied in about a millisecond.
const PART_BYTES: usize = 4 << 20;

/// Turns that a model has for a step after each part.
const N_RESTS: usize = 8;

/// What goes to archives and comes from them.
#[derive(Default)]
pub(super) struct Archiving {
    /// The first is next.
    jobs: Vec<Job>,
    parked: Vec<Parked>,
    /// Turns for which no part is done, unless a step is submitted before.
    n_rests: usize,
    /// The place of the model that makes no step before its part is done.
    pub(super) holds: Option<usize>,
}

/// An operation that waits for an archive.
struct Parked {
    model: ModelId,
    name: SavedName,
    operation: Operation,
    /// When it came, as the engine was told.
    since: Option<Instant>,
    /// Of one that forgets: whether the engine had anything under the name.
    was_there: bool,
}

struct Job {
    model: ModelId,
    name: SavedName,
    does: Does,
}

enum Does {
    /// Pages are read.
    Take(Taking),
    /// Pages are filled.
    Restore(Box<Filling>),
}

struct Taking {
    version: u64,
    to: oneshot::Sender<Option<SavedContext>>,
    /// Memory for what is read; none where the user has none for it.
    charge: Option<HostCharge>,
    kv: Vec<u8>,
    n_pages: usize,
}

struct Filling {
    restoring: Restoring,
    kv: Vec<u8>,
    _charge: Option<HostCharge>,
    n_pages: usize,
    /// When the first guest asked for it.
    since: Option<Instant>,
}

impl Archiving {
    /// Whether any pages are to be read or filled.
    pub(super) fn has_jobs(&self) -> bool {
        !self.jobs.is_empty()
    }

    /// A step was submitted.
    pub(super) fn note_step(&mut self) {
        self.n_rests = 0;
    }

    /// Forgets what a guest waits for that has gone. What it forgets is forgotten all the same.
    pub(super) fn leave(&mut self, caller: CallerId) {
        let is_its =
            |parked: &Parked| matches!(parked.operation, Operation::Open { caller: of, .. } if of == caller);
        self.parked.retain(|parked| !is_its(parked));
    }

    /// Whether a guest waits for a name to be forgotten.
    fn is_forgotten(&self, model: ModelId, name: &SavedName) -> bool {
        let forgets = |parked: &Parked| {
            parked.model == model
                && parked.name == *name
                && matches!(parked.operation, Operation::Forget { .. })
        };
        self.parked.iter().any(forgets)
    }

    /// Takes out what waits for a name.
    fn take_parked(&mut self, model: ModelId, name: &SavedName, opens: bool) -> Vec<Parked> {
        let is_meant = |parked: &mut Parked| {
            parked.model == model
                && parked.name == *name
                && opens == matches!(parked.operation, Operation::Open { .. })
        };
        self.parked.extract_if(.., is_meant).collect()
    }
}

impl Core {
    /// Carries out an operation on the model at a place of which its archive is to hear, or may know more; returns what it cost.
    pub(super) fn apply_with_archive(&mut self, place: usize, operation: Operation) -> u64 {
        let saves = matches!(operation, Operation::Save { .. });
        let Some(operation) = self.park(place, operation) else { return 0 };
        let price_ns = self.apply_at(place, operation);
        if saves {
            self.note_saved(place);
        }
        price_ns
    }

    /// Has an operation wait for the archive of its model, if that knows more of it than the engine; else gives it back.
    fn park(&mut self, place: usize, operation: Operation) -> Option<Operation> {
        let (caller, name) = match &operation {
            Operation::Open { caller, name, .. } | Operation::Forget { caller, name, .. } => (*caller, name),
            Operation::Release { id, .. } => {
                // It is wanted no more.
                let is_it = |parked: &Parked| matches!(parked.operation, Operation::Open { id: opened, .. } if opened == *id);
                self.archiving.parked.retain(|parked| !is_it(parked));
                return Some(operation);
            }
            _ => return Some(operation),
        };
        let Self { residents, commons, archiving, .. } = self;
        let resident = residents[place].as_mut().expect("it was found");
        let (Some(archive), Some(owner)) = (&resident.archive, commons.owner_of(caller)) else {
            return Some(operation);
        };
        let (model, name) = (resident.id, SavedName { actor: owner.actor, name: name.clone() });
        let forgets = matches!(operation, Operation::Forget { .. });
        if !resident.health.works() || !forgets && resident.scheduler.has_saved(&name) {
            return Some(operation);
        }
        let is_asked = |parked: &Parked| {
            parked.model == model && parked.name == name && matches!(parked.operation, Operation::Open { .. })
        };
        let mut was_there = false;
        if forgets {
            archive.forget(name.clone());
            was_there = resident.lend(commons).forget_saved(&name);
        } else if !archiving.parked.iter().any(is_asked) {
            archive.fetch(name.clone(), owner.account.user().clone());
        }
        let since = self.outbox.turn_began();
        self.archiving.parked.push(Parked { model, name: name.clone(), operation, since, was_there });
        if forgets {
            self.give_up_restoring(place, &name);
        }
        None
    }

    /// Tells the archive what the last operation on the model has saved.
    fn note_saved(&mut self, place: usize) {
        let Some(resident) = &mut self.residents[place] else { return };
        if let Some(archive) = &resident.archive
            && let Some((name, version)) = resident.scheduler.take_newly_saved()
        {
            archive.note_saved(name, version);
        }
    }

    /// Takes in what comes back from an archive.
    pub(super) fn note_archive(&mut self, model: ModelId, what: FromArchive) {
        let Some(place) = self.place_of(model) else { return };
        match what {
            FromArchive::Take { name, version, to } => self.begin_taking(place, name, version, to),
            FromArchive::Fetched { name, found } => {
                // Whoever forgets it meanwhile is to find it gone.
                if let Some(found) = found
                    && !self.archiving.is_forgotten(model, &name)
                    && !self.resident(place).scheduler.has_saved(&name)
                    && self.begin_filling(place, &name, *found)
                {
                    return;
                }
                self.open_parked(place, &name);
            }
            FromArchive::Forgotten { name, was_there } => {
                self.give_up_restoring(place, &name);
                let first = self.archiving.take_parked(model, &name, false);
                for Parked { operation, was_there: was_here, .. } in first {
                    let Operation::Forget { caller, name, tag, .. } = operation else { continue };
                    let forgotten =
                        if was_there || was_here { Ok(()) } else { Err(EngineError::NotSaved { name }) };
                    self.outbox.to(caller, tag).send(Done::Kept(forgotten));
                }
            }
        }
    }

    fn begin_taking(
        &mut self,
        place: usize,
        name: SavedName,
        version: u64,
        to: oneshot::Sender<Option<SavedContext>>,
    ) {
        let resident = self.resident(place);
        let (model, page_bytes) = (resident.id, resident.page_bytes());
        let Some(n_pages) = resident.scheduler.n_pages_to_keep(&name, version) else { return };
        if !resident.scheduler.may_be_kept(&name, version) {
            // Whoever wanted it may be gone.
            let _ = to.send(None);
            return;
        }
        let account = resident.scheduler.owner_of_saved(&name, version).map(|owner| owner.account.clone());
        let has_format = resident.backend.kv_bytes().is_some();
        let charge = account.filter(|_| has_format);
        let charge = charge.and_then(|account| HostCharge::new(&account, n_pages as u64 * page_bytes).ok());
        let n_pages = if charge.is_some() { n_pages } else { 0 };
        // At once: to grow it would copy what is there, between steps.
        let kv = Vec::with_capacity(n_pages * page_bytes as usize);
        let taking = Taking { version, to, charge, kv, n_pages };
        self.archiving.jobs.push(Job { model, name, does: Does::Take(taking) });
    }

    /// Makes a place for what was fetched; `false` where nothing comes of it, and guests that wait for it are told.
    fn begin_filling(&mut self, place: usize, name: &SavedName, found: SavedContext) -> bool {
        let Some(owner) = self.waiting_for(place, name) else { return true };
        let SavedContext { mut head, kv, charge } = found;
        let Self { residents, commons, archiving, .. } = self;
        let resident = residents[place].as_mut().expect("it was found");
        let page_bytes = resident.page_bytes() as usize;
        let n_needed = head.n_computed().div_ceil(PAGE_LEN).checked_mul(page_bytes);
        if n_needed != Some(kv.len()) || resident.backend.kv_bytes().is_none() {
            head.forget_kv();
        }
        let model = resident.id;
        let begun = resident.lend(commons).begin_restoring(name, head, &owner);
        match begun {
            Ok(restoring) => {
                let is_it = |parked: &&Parked| parked.model == model && parked.name == *name;
                let since = archiving.parked.iter().filter(is_it).filter_map(|parked| parked.since).min();
                let filling = Filling { restoring, kv, _charge: charge, n_pages: 0, since };
                let does = Does::Restore(Box::new(filling));
                archiving.jobs.push(Job { model, name: name.clone(), does });
                true
            }
            Err(EngineError::NotSaved { .. }) => false,
            Err(error) => {
                self.refuse_parked(place, name, &error);
                true
            }
        }
    }

    /// A guest that waits to open what is saved under a name.
    fn waiting_for(&self, place: usize, name: &SavedName) -> Option<Owner> {
        let model = self.residents[place].as_ref()?.id;
        let mut waiting =
            self.archiving.parked.iter().filter(|parked| parked.model == model && parked.name == *name);
        waiting.find_map(|parked| match parked.operation {
            Operation::Open { caller, .. } => self.commons.owner_of(caller).cloned(),
            _ => None,
        })
    }

    /// Lets go of what is coming back under a name.
    fn give_up_restoring(&mut self, place: usize, name: &SavedName) {
        let Self { residents, commons, archiving, .. } = self;
        let Some(resident) = &mut residents[place] else { return };
        let model = resident.id;
        let is_meant =
            |job: &mut Job| job.model == model && job.name == *name && matches!(job.does, Does::Restore(_));
        let given_up: Vec<Job> = archiving.jobs.extract_if(.., is_meant).collect();
        let is_any = !given_up.is_empty();
        for job in given_up {
            if let Does::Restore(filling) = job.does {
                resident.lend(commons).give_up_restoring(filling.restoring);
            }
        }
        if is_any {
            self.open_parked(place, name);
        }
    }

    /// Has guests open what they wait for, whether it is there or not.
    fn open_parked(&mut self, place: usize, name: &SavedName) {
        let Some(resident) = &self.residents[place] else { return };
        for parked in self.archiving.take_parked(resident.id, name, true) {
            self.apply_at(place, parked.operation);
        }
    }

    fn refuse_parked(&mut self, place: usize, name: &SavedName, error: &EngineError) {
        let Some(resident) = &self.residents[place] else { return };
        for parked in self.archiving.take_parked(resident.id, name, true) {
            if let Operation::Open { caller, tag, .. } = parked.operation {
                self.outbox.to(caller, tag).send(Done::Opened(Err(error.clone())));
            }
        }
    }

    /// A model has gone, or has failed: what waits for its archive ends as all that is asked of it does.
    pub(super) fn forget_archive_of(&mut self, model: ModelId) {
        self.archiving.jobs.retain(|job| job.model != model);
        let parked: Vec<Parked> =
            self.archiving.parked.extract_if(.., |parked| parked.model == model).collect();
        for parked in parked {
            self.apply(parked.operation);
        }
    }

    /// Does a part of what is to be read or filled, as far as the steps under way allow.
    pub(super) fn go_on_archiving(&mut self) -> Result<(), EngineFailure> {
        // Also where the job that held a model is gone.
        self.archiving.holds = None;
        let Some(place) = self.archiving.jobs.first().and_then(|job| self.place_of(job.model)) else {
            return Ok(());
        };
        let Self { residents, commons, archiving, .. } = self;
        let resident = residents[place].as_ref().expect("it was found");
        if archiving.n_rests > 0 && resident.may_step() && resident.scheduler.waits_for_plan_among(commons) {
            archiving.n_rests -= 1;
            return Ok(());
        }
        if self.is_under_way(place) {
            self.archiving.holds = Some(place);
            return Ok(());
        }
        let job = self.archiving.jobs.remove(0);
        self.archiving.n_rests = N_RESTS;
        let (model, name) = (job.model, job.name.clone());
        let part = match job.does {
            Does::Take(taking) => take_part(self.resident(place), &name, taking).map(|taking| {
                taking.map(|taking| Job { model, name: name.clone(), does: Does::Take(taking) })
            }),
            Does::Restore(filling) => self.fill_part(place, &name, filling),
        };
        match part {
            // Others have their turn.
            Ok(Some(job)) => self.archiving.jobs.push(job),
            Ok(None) => {}
            Err(error) if error.damage() == Damage::Device => return Err(EngineFailure::Device(error)),
            Err(error) => {
                tracing::warn!(%error, "pages of a saved context were not copied");
                self.open_parked(place, &name);
            }
        }
        Ok(())
    }

    /// Fills some pages of what comes back.
    fn fill_part(
        &mut self,
        place: usize,
        name: &SavedName,
        mut filling: Box<Filling>,
    ) -> Result<Option<Job>, BackendError> {
        let Self { residents, commons, .. } = self;
        let resident = residents[place].as_mut().expect("it was found");
        let page_bytes = resident.page_bytes() as usize;
        let Filling { restoring, kv, n_pages, .. } = &mut *filling;
        let end = restoring.pages.len().min(*n_pages + part_pages(page_bytes));
        let bytes = kv.get(*n_pages * page_bytes..end * page_bytes).unwrap_or_default();
        let filled = match resident.backend.kv_bytes() {
            Some(backend) => backend.write(&restoring.pages[*n_pages..end], bytes),
            None => Ok(()),
        };
        if let Err(error) = filled {
            resident.lend(commons).give_up_restoring(filling.restoring);
            return Err(error);
        }
        *n_pages = end;
        if end < restoring.pages.len() {
            let (model, does) = (resident.id, Does::Restore(filling));
            return Ok(Some(Job { model, name: name.clone(), does }));
        }
        let Filling { restoring, kv, since, .. } = *filling;
        let n_bytes = if restoring.pages.is_empty() { 0 } else { kv.len() as u64 };
        let time = since.zip(self.outbox.turn_began()).map_or(Duration::ZERO, |(since, now)| now - since);
        let ended = resident.lend(commons).end_restoring(name, restoring, (n_bytes, time));
        match ended {
            Ok(Some((restored, n_tokens))) => tracing::info!(
                uid = name.actor.0,
                n_tokens,
                n_restored = restored.n_tokens,
                n_bytes,
                took_ms = restored.time.as_millis() as u64,
                "a saved context was reopened"
            ),
            Ok(None) => {}
            Err(error) => {
                self.refuse_parked(place, name, &error);
                return Ok(None);
            }
        }
        self.open_parked(place, name);
        Ok(None)
    }
}

/// Pages of one part.
fn part_pages(page_bytes: usize) -> usize {
    (PART_BYTES / page_bytes.max(1)).max(1)
}

/// Reads some pages of what is taken; none where it is over.
fn take_part(
    resident: &mut Resident,
    name: &SavedName,
    mut taking: Taking,
) -> Result<Option<Taking>, BackendError> {
    let page_bytes = resident.page_bytes() as usize;
    let Taking { version, kv, n_pages, .. } = &mut taking;
    let n_read = kv.len() / page_bytes.max(1);
    let n = part_pages(page_bytes).min(n_pages.saturating_sub(n_read));
    let Some(pages) = resident.scheduler.pages_to_keep(name, *version, n_read, n) else { return Ok(None) };
    if let Some(backend) = resident.backend.kv_bytes() {
        backend.read(&pages, kv)?;
    }
    // What was given up meanwhile is not there to be read.
    if n > 0 && pages.len() == n && n_read + n < *n_pages {
        return Ok(Some(taking));
    }
    let n_pages = kv.len() / page_bytes.max(1);
    if let Some(head) = resident.scheduler.head_to_keep(name, *version, n_pages) {
        let mut context = SavedContext { head, kv: taking.kv, charge: taking.charge };
        context.cut(page_bytes);
        // Whoever wanted it may be gone.
        let _ = taking.to.send(Some(context));
    }
    Ok(None)
}

impl SavedContext {
    /// Lets go of the pages that it has no tokens for.
    fn cut(&mut self, page_bytes: usize) {
        let SavedHead { n_computed, .. } = self.head;
        self.kv.truncate(n_computed.div_ceil(PAGE_LEN) * page_bytes);
    }
}
