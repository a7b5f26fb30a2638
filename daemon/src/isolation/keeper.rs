//! One process of guests, as the daemon has it.

mod borrowed;
mod on_demand;
mod provided;

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::sync::watch;
use trellis_engine::account::{Account, ActorId, GuestId, Owner, Resource};
use trellis_engine::remote::{ModelFacts, NearEngine, Numbers, Registry};
use trellis_engine::{EngineFailure, ModelHandle};

use self::borrowed::Borrowed;
use super::announced::{Announced, News};
use super::budgets::UserBudgets;
use super::channel::{Closer, Receiver, Sender};
use super::far_guest::{FarGuest, before_answers};
use super::message::{
    Begin, EngineNumber, FromGuests, ModelNumber, NotUnderstood, Start, ToGuests, decode_of_guests, encode,
};
use super::outgoing::{Answers, Outgoing, Pen};
use crate::guest::{GuestEnd, GuestLimits, InboxReceiver, NICENESS, REASON_BYTES_MAX, cut, give_way};
use crate::models::{Listing, Models};

/// How long a guest that is stopped may take to end before its process is, and with it all guests of its user. What no epoch
/// interrupts (host calls that encode a text or build a constraint of the largest size, a copy of all of a memory) takes a second
/// or two alone, and its share of a busy machine is a small part of a processor: one that comes to its end by itself is not to
/// take others with it. One that never does holds a thread, and nobody's work, meanwhile.
const STOP_TIME: Duration = Duration::from_secs(20);

/// How long after the last word of a process its end is waited for.
const END_TIME: Duration = Duration::from_millis(500);

/// Guests of a process up to which an engine's thread says by itself what was counted for them.
const N_COUNTED_AT_ONCE: usize = 8;

/// Memory that is kept for what comes and goes next, however much there was once.
const FRAME_BYTES_KEPT: usize = 1 << 20;
const N_MESSAGES_KEPT: usize = 64;

/// A process of one user's guests.
#[derive(Debug)]
pub(crate) struct Keeper {
    actor: ActorId,
    numbers: Numbers,
    limits: Arc<GuestLimits>,
    /// What its guests borrow from.
    user: Arc<Account>,
    models: Models,
    outgoing: Arc<Outgoing>,
    /// Whoever writes to it holds this, from the moment when it takes what waits. None before it serves, and once it is gone.
    pen: Mutex<Option<Sender>>,
    runtime: Handle,
    /// Once it serves.
    closer: OnceLock<Closer>,
    pid: OnceLock<u32>,
    state: Mutex<State>,
    /// Why it is gone, once it is.
    lost: watch::Sender<Option<String>>,
}

#[derive(Debug, Default)]
struct State {
    guests: HashMap<GuestId, Arc<FarGuest>>,
    /// Code that it has, that used last at the end.
    programs: VecDeque<([u8; 32], usize)>,
    announced: Announced,
    borrowed: Borrowed,
}

impl Keeper {
    /// Of a process that is about to begin, for guests of this user, of which `session` is the account of one session. What
    /// it is told until it serves waits.
    pub(crate) fn new(
        actor: ActorId,
        numbers: Numbers,
        limits: Arc<GuestLimits>,
        session: &Arc<Account>,
        models: Models,
        runtime: Handle,
    ) -> Arc<Self> {
        let keeper = Arc::new(Self {
            actor,
            numbers,
            limits: limits.clone(),
            user: session.user().clone(),
            models: models.clone(),
            outgoing: Outgoing::new(),
            pen: Mutex::default(),
            runtime,
            closer: OnceLock::new(),
            pid: OnceLock::new(),
            state: Mutex::default(),
            lost: watch::Sender::new(None),
        });
        // Its guests are those of one user: what is laid out for guests is for no more than that.
        let limits = limits.of_one_user();
        let (budgets, declared) = (UserBudgets::of(session), models.declared().clone());
        let begin = Begin { actor, numbers, limits, budgets, declared };
        keeper.outgoing.put(ToGuests::Begin(Box::new(begin)));
        // Before the first look: what changes from here on is heard of.
        let listings = models.subscribe();
        keeper.announce();
        keeper.runtime.spawn(keeper.clone().follow(listings));
        keeper
    }

    /// What its guests may use.
    pub(crate) fn limits(&self) -> &GuestLimits {
        &self.limits
    }

    /// The process serves: writes to it and reads from it until it is gone.
    ///
    /// # Errors
    /// The system has no threads for that.
    pub(crate) fn serve(
        self: &Arc<Self>,
        pid: Option<u32>,
        sender: Sender,
        receiver: Receiver,
    ) -> io::Result<()> {
        if let Some(pid) = pid {
            let _ = self.pid.set(pid);
        }
        // It begins once.
        let _ = self.closer.set(receiver.closer());
        let (reading, writing) = (self.clone(), self.clone());
        thread::Builder::new().name("guests-read".to_owned()).spawn(move || reading.read(receiver))?;
        thread::Builder::new().name("guests-write".to_owned()).spawn(move || writing.write(sender))?;
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it can take guests.
    pub(crate) fn is_alive(&self) -> bool {
        self.lost.borrow().is_none()
    }

    /// The number of the process, once it serves.
    pub(crate) fn pid(&self) -> Option<u32> {
        self.pid.get().copied()
    }

    /// Whose guests they are.
    pub(crate) fn actor(&self) -> ActorId {
        self.actor
    }

    /// How many guests it has.
    pub(crate) fn n_guests(&self) -> usize {
        self.lock().guests.len()
    }

    /// Its guests.
    pub(crate) fn guests(&self) -> Vec<Arc<FarGuest>> {
        self.lock().guests.values().cloned().collect()
    }

    /// Starts a guest, whose component has this code.
    pub(crate) fn start(
        self: &Arc<Self>,
        guest: Arc<FarGuest>,
        code: &Arc<[u8]>,
        mut start: Start,
        input: InboxReceiver,
    ) {
        let id = guest.id;
        {
            let mut state = self.lock();
            state.provide(start.hash, code, &self.limits, &self.outgoing);
            state.guests.insert(id, guest.clone());
            start.lent = state.borrowed.ahead(&self.user);
            self.outgoing.put(ToGuests::Start(Box::new(start)));
        }
        // One that fell meanwhile did not see this guest.
        let lost = self.lost.borrow().clone();
        if let Some(reason) = lost {
            return self.end_all(&reason);
        }
        self.runtime.spawn(self.clone().give_credit(guest.clone()));
        self.runtime.spawn(self.clone().give_messages(guest.clone(), input));
        self.runtime.spawn(self.clone().stop_when_told(guest));
    }

    async fn give_credit(self: Arc<Self>, guest: Arc<FarGuest>) {
        let id = guest.id;
        loop {
            let lent = tokio::select! {
                lent = guest.output.lend() => lent,
                () = self.gone(id) => return,
            };
            let Some(n_bytes) = lent else { break };
            guest.grant(n_bytes);
            self.outgoing.put(ToGuests::Credit { guest: id, n_bytes });
        }
        self.outgoing.put(ToGuests::ClientGone { guest: id });
    }

    async fn give_messages(self: Arc<Self>, guest: Arc<FarGuest>, mut input: InboxReceiver) {
        let id = guest.id;
        let all = async {
            loop {
                guest.room.acquire().await.expect("never closed").forget();
                let Some(text) = input.recv().await else { break };
                self.outgoing.put(ToGuests::Message { guest: id, text });
            }
            self.outgoing.put(ToGuests::InputClosed { guest: id });
            // What is in the inbox is dropped with the guest, as it would be in the daemon.
            self.gone(id).await;
        };
        tokio::select! {
            () = all => {}
            () = self.gone(id) => {}
        }
    }

    async fn stop_when_told(self: Arc<Self>, guest: Arc<FarGuest>) {
        tokio::select! {
            () = guest.stop.cancelled() => {}
            () = self.gone(guest.id) => return,
        }
        self.outgoing.put(ToGuests::Stop { guest: guest.id });
        if tokio::time::timeout(STOP_TIME, self.gone(guest.id)).await.is_err() {
            self.fall(format!("guest {} did not end within {} s", guest.id.0, STOP_TIME.as_secs()));
        }
    }

    /// Waits until a guest has ended.
    async fn gone(&self, guest: GuestId) {
        let ended = self.lock().guests.get(&guest).map(|guest| guest.ended.clone());
        if let Some(ended) = ended {
            ended.cancelled().await;
        }
    }

    /// Tells the guests how long the daemon goes on.
    pub(crate) fn tell_of_drain(&self, until: Instant) {
        let left = until.saturating_duration_since(Instant::now());
        self.outgoing.put(ToGuests::Drain { left_ms: left.as_millis() as u64 });
    }

    /// Tells what is loaded where.
    fn announce(self: &Arc<Self>) {
        let News { engines, models } = {
            let mut state = self.lock();
            state.announced.announce(&self.models.listing(), &self.outgoing)
        };
        for (engine, watch) in engines {
            let keeper = self.clone();
            self.runtime.spawn(async move {
                tokio::select! {
                    failure = watch.failed() => {
                        keeper.outgoing.put(ToGuests::EngineEnded { engine, failure: Some(failure) });
                    }
                    _ = keeper.lost() => {}
                }
            });
        }
        for (model, handle) in models {
            self.runtime.spawn(self.clone().follow_model(model, handle));
        }
    }

    async fn follow_model(self: Arc<Self>, model: ModelNumber, handle: ModelHandle) {
        let failed = async {
            let failure: EngineFailure = handle.failed().await;
            self.outgoing.put(ToGuests::ModelFailed { model, failure });
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = failed => {}
            () = handle.unloaded() => self.outgoing.put(ToGuests::ModelUnloaded { model }),
            _ = self.lost() => {}
        }
    }

    async fn follow(self: Arc<Self>, mut listings: watch::Receiver<Listing>) {
        loop {
            tokio::select! {
                // The sender is held by `models`.
                _ = listings.changed() => self.announce(),
                _ = self.lost() => return,
            }
        }
    }

    /// Waits until it is gone; says why.
    pub(crate) async fn lost(&self) -> String {
        let mut lost = self.lost.subscribe();
        match lost.wait_for(Option::is_some).await {
            Ok(reason) => reason.clone().unwrap_or_default(),
            Err(_) => String::new(),
        }
    }

    /// It is gone, or is to go: its guests end, and what it borrowed comes back.
    pub(crate) fn fall(&self, reason: String) {
        // There is one for each guest, and it may quote what the process has said.
        let reason = cut(&reason, REASON_BYTES_MAX);
        let is_first = self.lost.send_if_modified(|lost| {
            let is_first = lost.is_none();
            lost.get_or_insert_with(|| reason.clone());
            is_first
        });
        if is_first {
            tracing::info!(uid = self.actor.0, reason, "a process of guests has ended");
        }
        self.shut();
        self.outgoing.close();
        self.end_all(&reason);
    }

    fn end_all(&self, reason: &str) {
        let mut state = self.lock();
        let guests = std::mem::take(&mut state.guests);
        let Borrowed { host_bytes, n_contexts } = std::mem::take(&mut state.borrowed);
        state.announced.clear();
        drop(state);
        self.user.release(Resource::HostBytes, host_bytes);
        self.user.release(Resource::Contexts, n_contexts);
        if !guests.is_empty() {
            let n_guests = guests.len();
            tracing::warn!(uid = self.actor.0, n_guests, reason, "guests are lost with their process");
        }
        for guest in guests.into_values() {
            guest.end(GuestEnd::ProcessLost { reason: reason.to_owned() });
        }
    }

    fn pen(&self) -> MutexGuard<'_, Option<Sender>> {
        self.pen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes what is not written at once, until the end.
    fn write(self: Arc<Self>, sender: Sender) {
        *self.pen() = Some(sender);
        let this: Weak<Self> = Arc::downgrade(&self);
        self.outgoing.attend(this);
        let mut messages = Vec::new();
        let reason = loop {
            match self.outgoing.wait() {
                Ok(true) => {}
                Ok(false) => break None,
                Err(error) => break Some(error.to_string()),
            }
            let mut pen = self.pen();
            let Some(sender) = &mut *pen else { break None };
            self.outgoing.take(&mut messages);
            let violation = messages.iter().find_map(|message| match message {
                ToGuests::Answer { answered, .. } => answered.violation(),
                _ => None,
            });
            if violation.is_some() {
                break violation;
            }
            let guests = if is_answered(&messages) { self.guests() } else { Vec::new() };
            let before = before_answers(&guests);
            let frames = before.iter().chain(&messages).map(encode);
            let sent = sender.send_all(frames.collect::<Vec<_>>().iter().map(Vec::as_slice));
            if sent.is_err() {
                // The thread that reads sees it as well, unless it was shut because too much waits.
                let reason = self.outgoing.check().err().map(|error| error.to_string());
                self.outgoing.close();
                break reason;
            }
            messages.clear();
            messages.shrink_to(N_MESSAGES_KEPT);
        };
        // Without the pen: whoever holds up the other side holds up nobody here.
        if let Some(reason) = reason {
            self.fall(reason);
        }
        self.pen().take();
    }

    fn read(self: Arc<Self>, mut receiver: Receiver) {
        // What guests say is theirs to pay for, as what they compute.
        give_way(NICENESS);
        let mut engines = HashMap::new();
        let mut frame = Vec::new();
        let reason = loop {
            if let Err(error) = receiver.recv(&mut frame) {
                break error.to_string();
            }
            let (n_bytes, message) = (frame.len(), decode_of_guests(&frame));
            // Before it may wait: what has been read out of it is held by then.
            if frame.capacity() > FRAME_BYTES_KEPT {
                frame = Vec::new();
            }
            if let Err(error) = message.and_then(|message| self.take(message, n_bytes, &mut engines)) {
                self.fall(error.to_string());
            }
        };
        // Whoever waits for the process may know more.
        let begun = Instant::now();
        while self.is_alive() && begun.elapsed() < END_TIME {
            thread::sleep(END_TIME / 100);
        }
        self.fall(reason);
        // What its guests held in the engines goes with this.
        drop(engines);
    }

    fn take(
        self: &Arc<Self>,
        message: FromGuests,
        n_bytes: usize,
        engines: &mut HashMap<EngineNumber, NearEngine>,
    ) -> Result<(), NotUnderstood> {
        match message {
            FromGuests::Asked { engine, asked } => {
                if !engines.contains_key(&engine) {
                    let state = self.lock();
                    engines.retain(|&known, _| matches!(state.announced.engine(known), Ok(Some(_))));
                }
                let near = match engines.entry(engine) {
                    Entry::Occupied(known) => known.into_mut(),
                    Entry::Vacant(place) => {
                        let outward = Arc::new(Answers { engine, outgoing: self.outgoing.clone() });
                        // Nothing that was asked of one that is gone is waited for: the process hears that it is.
                        let Some(watch) = self.lock().announced.engine(engine)?.cloned() else {
                            return Ok(());
                        };
                        let limit = |resource| self.user.limit(resource);
                        let (n_contexts_max, host_bytes) =
                            (limit(Resource::Contexts), limit(Resource::HostBytes));
                        place.insert(NearEngine::new(
                            &watch,
                            self.numbers,
                            n_contexts_max,
                            host_bytes,
                            outward,
                        ))
                    }
                };
                let taken = near.take(*asked, n_bytes, &Known { keeper: self, engine });
                if let Err(violation) = taken {
                    // Of one that is gone no models are known, and nothing was posted.
                    if self.lock().announced.engine(engine)?.is_some() {
                        return Err(violation.into());
                    }
                    engines.remove(&engine);
                }
            }
            FromGuests::Borrow { ticket, guest, resource, n } => {
                let lent = self.lend(guest, resource, n)?;
                self.outgoing.put(ToGuests::Lent { ticket, lent });
            }
            FromGuests::GiveBack { resource, n } => {
                let mut state = self.lock();
                let lent = state.borrowed.of(resource).map(|lent| (*lent >= n, lent));
                let Some((true, lent)) = lent else {
                    let lent = state.borrowed.of(resource).copied().unwrap_or(0);
                    return Err(NotUnderstood::NotLent { n, resource: resource.name(), lent });
                };
                *lent -= n;
                self.user.release(resource, n);
            }
            FromGuests::Open { guest, name } => self.open(&self.guest(guest)?, &name)?,
            FromGuests::Forget { guest, name } => self.forget(&self.guest(guest)?, &name)?,
            FromGuests::LetGo { guest, model } => {
                // One that has ended has nothing anyway.
                if let Ok(guest) = self.guest(guest) {
                    guest.note_let_go(model);
                }
            }
            FromGuests::Holds { model, is_held } => self.lock().announced.note_held(model, is_held)?,
            FromGuests::Output { guest, output } => self.guest(guest)?.pass_on(output)?,
            FromGuests::Taken { guest } => self.guest(guest)?.note_taken(),
            FromGuests::Seen { guest, mut seen } => {
                let known = self.lock().announced.names();
                seen.models = known.into_iter().filter(|name| seen.models.contains(name)).collect();
                self.guest(guest)?.note_seen(*seen);
            }
            FromGuests::Ended { guest, end } => {
                let known = self.guest(guest)?;
                self.lock().guests.remove(&guest);
                known.end(end.with_texts_cut());
            }
        }
        Ok(())
    }

    /// The guest of this number.
    pub(crate) fn guest(&self, guest: GuestId) -> Result<Arc<FarGuest>, NotUnderstood> {
        let not_there = NotUnderstood::NotThere { what: "guest", number: guest.0 };
        self.lock().guests.get(&guest).cloned().ok_or(not_there)
    }

    fn lend(
        &self,
        guest: Option<GuestId>,
        resource: Resource,
        n: u64,
    ) -> Result<Result<(), trellis_engine::account::BudgetExceeded>, NotUnderstood> {
        if let Some(guest) = guest {
            // What a guest is charged for by itself is what it computes on its own side, and is never given back.
            let account = &self.guest(guest)?.account;
            return match resource {
                Resource::Tokens => Ok(account.charge(resource, n)),
                _ => Err(NotUnderstood::NotThere { what: resource.name(), number: guest.0 }),
            };
        }
        let mut state = self.lock();
        let not_there = NotUnderstood::NotThere { what: resource.name(), number: 0 };
        let borrowed = state.borrowed.of(resource).ok_or(not_there)?;
        let lent = self.user.charge(resource, n);
        if lent.is_ok() {
            *borrowed += n;
        }
        Ok(lent)
    }
}

impl Pen for Keeper {
    fn write_at_once(&self) -> bool {
        // Who holds it may have taken what waits before this came; the thread that writes looks again.
        let Ok(mut pen) = self.pen.try_lock() else { return false };
        let Some(sender) = &mut *pen else { return false };
        let mut messages = Vec::new();
        if !self.outgoing.take_few(&mut messages) {
            return false;
        }
        if is_answered(&messages) {
            let few = self.state.try_lock().ok().filter(|state| state.guests.len() <= N_COUNTED_AT_ONCE);
            let Some(state) = few else {
                self.outgoing.put_back(messages.into_iter());
                return false;
            };
            let guests: Vec<Arc<FarGuest>> = state.guests.values().cloned().collect();
            drop(state);
            drop(messages.splice(0..0, before_answers(&guests)));
        }
        let mut messages = messages.into_iter();
        while let Some(message) = messages.next() {
            // The thread that writes waits for room, and sees the end.
            if !sender.try_send(&encode(&message)).unwrap_or(false) {
                self.outgoing.put_back(std::iter::once(message).chain(messages));
                return false;
            }
        }
        true
    }

    fn shut(&self) {
        if let Some(closer) = self.closer.get() {
            closer.close();
        }
    }
}

/// Whether there are answers among messages.
fn is_answered(messages: &[ToGuests]) -> bool {
    messages.iter().any(|message| matches!(message, ToGuests::Answer { .. }))
}

/// What an engine's customs ask of the process.
struct Known<'a> {
    keeper: &'a Keeper,
    engine: EngineNumber,
}

impl Registry for Known<'_> {
    fn owner_of(&self, guest: GuestId) -> Option<Owner> {
        self.keeper.lock().guests.get(&guest).map(|guest| guest.owner())
    }

    fn models(&self) -> Vec<ModelFacts> {
        self.keeper.lock().announced.facts_of(self.engine)
    }

    fn is_over(&self) -> bool {
        !self.keeper.is_alive()
    }
}
