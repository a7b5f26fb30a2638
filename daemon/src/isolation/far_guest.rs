//! A guest of another process as the daemon knows it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use tokio::sync::{Semaphore, oneshot};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use trellis_engine::account::{
    Account, ActorId, Counted, GuestId, HostCharge, Owner, Resource, SessionId, StepLog, StepNote,
};

use super::message::{ModelNumber, NotUnderstood, Seen, Step, ToGuests};
use crate::guest::{
    GuestActivity, GuestEnd, GuestInfo, GuestLimits, GuestOutput, LoadListener, OutputRefused, OutputSender,
    Used,
};
use crate::on_demand::{Asker, Claim};

/// Messages on their way that are not in the guest's inbox.
pub(crate) const N_MESSAGES_UNDER_WAY: usize = 8;

/// What goes before answers: what engines have counted, so that who has an answer finds it counted.
pub(super) fn before_answers(guests: &[Arc<FarGuest>]) -> Vec<ToGuests> {
    let of_guest = |guest: &Arc<FarGuest>| {
        let id = guest.id;
        let counted = guest.newly_counted();
        let counted = counted.map(|counted| ToGuests::Counted { guest: id, counted: Box::new(counted) });
        let steps = guest.steps();
        let steps = (!steps.is_empty()).then_some(ToGuests::Steps { guest: id, steps });
        counted.into_iter().chain(steps)
    };
    guests.iter().flat_map(of_guest).collect()
}

/// A guest of another process.
#[derive(Debug)]
pub(crate) struct FarGuest {
    pub(crate) id: GuestId,
    pub(crate) name: String,
    pub(crate) hash: blake3::Hash,
    pub(crate) actor: ActorId,
    pub(crate) session: SessionId,
    /// Where engines charge what they compute for it.
    pub(crate) account: Arc<Account>,
    pub(crate) started: Instant,
    pub(crate) stop: CancellationToken,
    /// Cancelled once it has ended.
    pub(crate) ended: CancellationToken,
    pub(crate) output: OutputSender,
    /// Bytes that it may send.
    credit: AtomicUsize,
    /// Of messages on their way.
    pub(crate) room: Arc<Semaphore>,
    is_recorded: bool,
    /// Of its client.
    loads: LoadListener,
    /// The steps with rows of it, if it is profiled.
    steps: Option<Arc<StepLog>>,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    seen: Seen,
    /// What the daemon itself keeps for it.
    charge: Option<HostCharge>,
    end: Option<oneshot::Sender<GuestEnd>>,
    /// How it has ended for the daemon, whatever its process says.
    refused: Option<GuestEnd>,
    /// What its process knows that engines have counted.
    told: Option<Counted>,
    /// The model that it waits for.
    opening: Option<AbortOnDropHandle<()>>,
    /// Whether it waits for that.
    is_opening: bool,
    /// What keeps the models that were loaded for it.
    claims: HashMap<ModelNumber, Box<dyn Claim>>,
}

/// A guest that begins.
pub(crate) struct Beginning {
    pub(crate) id: GuestId,
    pub(crate) name: String,
    pub(crate) hash: blake3::Hash,
    pub(crate) owner: Owner,
    pub(crate) output: OutputSender,
    pub(crate) charge: HostCharge,
    pub(crate) is_recorded: bool,
    pub(crate) is_profiled: bool,
    pub(crate) loads: LoadListener,
    pub(crate) end: oneshot::Sender<GuestEnd>,
}

impl FarGuest {
    pub(crate) fn new(beginning: Beginning) -> Arc<Self> {
        let Beginning { id, name, hash, owner, output, charge, is_recorded, is_profiled, loads, end } =
            beginning;
        let Owner { actor, session, account, .. } = owner;
        let seen = Seen { amounts: Default::default(), is_running: true, models: Vec::new() };
        Arc::new(Self {
            id,
            name,
            hash,
            actor,
            session,
            is_recorded,
            loads,
            steps: is_profiled.then(|| account.watch_steps()),
            account,
            started: Instant::now(),
            stop: CancellationToken::new(),
            ended: CancellationToken::new(),
            output,
            credit: AtomicUsize::new(0),
            room: Arc::new(Semaphore::new(N_MESSAGES_UNDER_WAY)),
            inner: Mutex::new(Inner {
                seen,
                charge: Some(charge),
                end: Some(end),
                refused: None,
                told: None,
                opening: None,
                is_opening: false,
                claims: HashMap::new(),
            }),
        })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// On whose behalf it asks.
    pub(crate) fn owner(&self) -> Owner {
        let Self { id, actor, session, account, .. } = self;
        Owner { actor: *actor, session: *session, guest: *id, account: account.clone() }
    }

    /// Its client takes so many bytes more.
    pub(crate) fn grant(&self, n_bytes: usize) {
        self.credit.fetch_add(n_bytes, Ordering::Relaxed);
    }

    /// Passes on what it sends.
    ///
    /// # Errors
    /// It has no credit for that, or it is what a host says of its guest, and nobody has asked for that: a policy of the
    /// operator's does not look into it.
    pub(crate) fn pass_on(&self, output: GuestOutput) -> Result<(), NotUnderstood> {
        let what = match &output {
            GuestOutput::Recorded(_) if !self.is_recorded => Some("recording"),
            GuestOutput::Profiled(_) if self.steps.is_none() => Some("profile"),
            _ => None,
        };
        if let Some(what) = what {
            return Err(NotUnderstood::NotWanted { guest: self.id.0, what });
        }
        let n_bytes = output.credit_bytes();
        let taken = self
            .credit
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |credit| credit.checked_sub(n_bytes));
        if let Err(credit) = taken {
            return Err(NotUnderstood::Overdrawn { guest: self.id.0, n_bytes: n_bytes - credit });
        }
        // A client that is gone takes nothing; the process hears of it by itself.
        if let Err(OutputRefused::OverBudget(exceeded)) = self.output.send_lent(output) {
            self.lock().refused = Some(GuestEnd::HostBytesExceeded(exceeded));
            self.stop.cancel();
        }
        Ok(())
    }

    /// A message has come into its inbox.
    pub(crate) fn note_taken(&self) {
        // No more than are on their way, whatever the process says.
        if self.room.available_permits() < N_MESSAGES_UNDER_WAY {
            self.room.add_permits(1);
        }
    }

    /// What engines have counted for it, if that has changed since this was asked last.
    pub(crate) fn newly_counted(&self) -> Option<Counted> {
        let counted = self.account.counted();
        let mut inner = self.lock();
        (inner.told.replace(counted) != Some(counted)).then_some(counted)
    }

    /// What its process sees of it.
    pub(crate) fn note_seen(&self, seen: Seen) {
        self.lock().seen = seen;
    }

    /// On whose behalf it asks for models.
    pub(crate) fn asker(&self) -> Asker {
        Asker { guest: self.id, user: self.actor, loads: self.loads.clone() }
    }

    /// It asks for a model.
    ///
    /// # Errors
    /// It waits for one already, as no guest of ours would.
    pub(crate) fn begin_opening(&self) -> Result<(), NotUnderstood> {
        match std::mem::replace(&mut self.lock().is_opening, true) {
            true => Err(NotUnderstood::AskedAgain { guest: self.id.0 }),
            false => Ok(()),
        }
    }

    /// It is about to be answered.
    pub(crate) fn end_opening(&self) {
        self.lock().is_opening = false;
    }

    /// It waits for this one.
    pub(crate) fn note_opening(&self, opening: AbortOnDropHandle<()>) {
        let mut inner = self.lock();
        if !self.ended.is_cancelled() {
            inner.opening = Some(opening);
        }
    }

    /// Keeps a model for it, until it says that it has let go of it.
    pub(crate) fn keep(&self, model: ModelNumber, claim: Box<dyn Claim>) {
        let mut inner = self.lock();
        if !self.ended.is_cancelled() {
            inner.claims.insert(model, claim);
        }
    }

    /// It has nothing more of this model.
    pub(crate) fn note_let_go(&self, model: ModelNumber) {
        let claim = self.lock().claims.remove(&model);
        drop(claim);
    }

    /// It has ended.
    pub(crate) fn end(&self, end: GuestEnd) {
        self.ended.cancel();
        let mut inner = self.lock();
        inner.charge = None;
        inner.opening = None;
        inner.claims.clear();
        let end = inner.refused.take().unwrap_or(end);
        inner.seen.amounts.counted_by(&self.account).log(self.id, &self.name, self.actor, &end);
        if let Some(waiting) = inner.end.take() {
            // Its session may be gone.
            let _ = waiting.send(end);
        }
    }

    /// Steps that its profile does not have yet.
    pub(crate) fn steps(&self) -> Vec<Step> {
        let Some(steps) = &self.steps else { return Vec::new() };
        let (notes, _) = steps.take();
        let step = |StepNote { ended, elapsed, n_rows, n_tokens }: StepNote| Step {
            end_ns: ended.saturating_duration_since(self.started).as_nanos() as u64,
            elapsed_ns: elapsed.as_nanos() as u64,
            n_rows,
            n_tokens,
        };
        notes.into_iter().map(step).collect()
    }

    /// As it is listed.
    pub(crate) fn info(&self, limits: &GuestLimits) -> GuestInfo {
        let Seen { amounts, is_running, models } = self.lock().seen.clone();
        GuestInfo {
            id: self.id,
            name: self.name.clone(),
            hash: self.hash,
            actor: self.actor,
            session: self.session,
            activity: if is_running { GuestActivity::Running } else { GuestActivity::Waiting },
            models,
            elapsed_ms: self.started.elapsed().as_millis() as u64,
            amounts: amounts.counted_by(&self.account),
            n_pages_on_host: self.account.used(Resource::HostPages),
            limits: crate::guest::Amounts::limits(limits, &self.account),
            used: Used::of(&self.account),
            n_prompt_tokens: self.account.prompts().now(),
        }
    }
}

#[cfg(test)]
mod tests {
    use trellis_engine::account::Budget;

    use super::*;
    use crate::guest::output_channel;

    #[test]
    fn what_no_guest_of_ours_says_is_not_taken() {
        for is_wanted in [true, false] {
            let account = Account::new("guest", Budget::UNLIMITED, None);
            let (output, _receiver) = output_channel(1000);
            let (end, _ended) = oneshot::channel();
            let guest = FarGuest::new(Beginning {
                id: GuestId(7),
                name: "chat".to_owned(),
                hash: blake3::hash(b"chat"),
                owner: Owner {
                    actor: ActorId(1),
                    session: SessionId(1),
                    guest: GuestId(7),
                    account: account.clone(),
                },
                output: output.paid_by(account.clone()),
                charge: HostCharge::new(&account, 1).expect("there is no bound"),
                is_recorded: is_wanted,
                is_profiled: is_wanted,
                loads: LoadListener::default(),
                end,
            });
            guest.grant(1000);
            guest.pass_on(GuestOutput::Text("well".to_owned())).expect("it has credit");
            guest.begin_opening().expect("it waits for none");
            assert!(matches!(guest.begin_opening(), Err(NotUnderstood::AskedAgain { guest: 7 })));
            guest.end_opening();
            guest.begin_opening().expect("it was answered");
            for output in [GuestOutput::Recorded(vec![1; 9]), GuestOutput::Profiled(vec![1; 9])] {
                let passed = guest.pass_on(output);
                match passed {
                    Ok(()) => assert!(is_wanted),
                    Err(NotUnderstood::NotWanted { guest: 7, .. }) => assert!(!is_wanted),
                    Err(error) => panic!("{error}"),
                }
            }
        }
    }
}
