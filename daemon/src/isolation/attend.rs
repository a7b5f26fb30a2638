//! Attends to the guests of a process: starts them, brings them what the daemon says, and tells the daemon what they send and
//! how they end.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval};
use trellis_engine::account::{Account, ActorId, GuestId, HostCharge};

use super::message::{FromGuests, Seen, Start};
use super::teller::{Teller, Up};
use crate::guest::{
    Creditor, GuestActivity, GuestEnd, GuestError, GuestInfo, GuestIo, GuestLimits, GuestOutput, GuestPool,
    GuestStop, InboxSender, Launch, LoadListener, Program, RunningGuest, Sink, Tape, inbox, message_charge,
    output_to,
};

/// How often the daemon is told what guests use.
const LOOK: Duration = Duration::from_millis(100);

/// What the daemon wants of one guest.
pub(crate) enum Order {
    Start(Box<Started>),
    Credit { guest: GuestId, n_bytes: usize },
    ClientGone { guest: GuestId },
    Message { guest: GuestId, text: String },
    InputClosed { guest: GuestId },
    Stop { guest: GuestId },
}

/// A guest that is to start.
pub(crate) struct Started {
    pub(crate) start: Start,
    pub(crate) program: Program,
    pub(crate) account: Arc<Account>,
    /// The account of its session.
    pub(crate) session: Arc<Account>,
}

/// What is kept of a guest that runs.
struct Attended {
    /// None once its client is gone.
    creditor: Option<Creditor>,
    messages: Option<mpsc::UnboundedSender<String>>,
    stop: GuestStop,
    told: Option<Seen>,
}

/// Attends until the daemon orders nothing more.
pub(crate) async fn attend_all(
    pool: Arc<GuestPool>,
    (actor, limits): (ActorId, Arc<GuestLimits>),
    (up, teller): (Arc<Up>, Arc<Teller>),
    mut orders: mpsc::UnboundedReceiver<Order>,
) {
    let mut guests = HashMap::new();
    let (ended, mut ends) = mpsc::unbounded_channel();
    let mut look = interval(LOOK);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            order = orders.recv() => match order {
                Some(Order::Start(started)) => {
                    let id = started.start.guest;
                    match start(&pool, (actor, &limits), &up, *started, ended.clone()) {
                        Ok(attended) => {
                            guests.insert(id, attended);
                        }
                        Err(error) => tell_end(&up, id, refused(error)),
                    }
                }
                Some(order) => carry_out(order, &mut guests),
                None => return,
            },
            Some(guest) = ends.recv() => {
                guests.remove(&guest);
                if guests.is_empty() {
                    teller.give_back_spare();
                }
            }
            _ = look.tick(), if !guests.is_empty() => {
                for info in pool.guests() {
                    let seen = Seen::of(&info);
                    if let Some(attended) = guests.get_mut(&info.id) && attended.told.as_ref() != Some(&seen) {
                        up.say(&FromGuests::Seen { guest: info.id, seen: Box::new(seen.clone()) });
                        attended.told = Some(seen);
                    }
                }
            }
        }
    }
}

fn carry_out(order: Order, guests: &mut HashMap<GuestId, Attended>) {
    // A guest that has ended wants nothing more.
    match order {
        Order::Start(_) => {}
        Order::Credit { guest, n_bytes } => {
            if let Some(creditor) = guests.get(&guest).and_then(|attended| attended.creditor.as_ref()) {
                creditor.grant(n_bytes);
            }
        }
        Order::ClientGone { guest } => {
            if let Some(attended) = guests.get_mut(&guest) {
                attended.creditor = None;
            }
        }
        Order::Message { guest, text } => {
            if let Some(messages) = guests.get(&guest).and_then(|guest| guest.messages.as_ref()) {
                let _ = messages.send(text);
            }
        }
        Order::InputClosed { guest } => {
            if let Some(attended) = guests.get_mut(&guest) {
                attended.messages = None;
            }
        }
        Order::Stop { guest } => {
            if let Some(attended) = guests.get(&guest) {
                attended.stop.stop();
            }
        }
    }
}

fn start(
    pool: &Arc<GuestPool>,
    (actor, limits): (ActorId, &GuestLimits),
    up: &Arc<Up>,
    started: Started,
    ended: mpsc::UnboundedSender<GuestId>,
) -> Result<Attended, GuestError> {
    let Started { start, program, account, session } = started;
    let id = start.guest;
    let (output, creditor) = output_to(Arc::new(ToDaemon { guest: id, up: up.clone() }));
    let (sender, input) = inbox(limits.n_messages, limits.inbox_bytes);
    let record = || Tape::record(program.hash(), limits, &session);
    let tape = start.is_recorded.then(record);
    let launch = Launch {
        program,
        name: start.name,
        actor,
        session: start.session,
        account: session.clone(),
        // Which is what there is room for in the process.
        n_guests_of_user: limits.n_guests,
        arguments: start.arguments,
        model: start.model,
        // The daemon's side tells the client.
        loads: LoadListener::default(),
        seed: start.seed,
        deadline_ms: start.deadline_ms,
        is_recorded: start.is_recorded,
        is_profiled: start.is_profiled,
    };
    let running = pool.start(id, account, launch, GuestIo { output, input }, tape)?;
    let stop = running.stop.clone();
    let (messages, given) = mpsc::unbounded_channel();
    tokio::spawn(pass_in(id, session, given, sender, up.clone()));
    let up = up.clone();
    tokio::spawn(async move {
        let end = see_to_its_end(running).await;
        tell_end(&up, id, end);
        // Nobody attends any more.
        let _ = ended.send(id);
    });
    Ok(Attended { creditor: Some(creditor), messages: Some(messages), stop, told: None })
}

/// Brings a guest its messages. The daemon keeps back those for which there is no room.
async fn pass_in(
    id: GuestId,
    session: Arc<Account>,
    mut given: mpsc::UnboundedReceiver<String>,
    sender: InboxSender,
    up: Arc<Up>,
) {
    while let Some(text) = given.recv().await {
        // The daemon has charged it to the session until now: where nothing is left for it here, that is no reason to lose it,
        // and the inbox is bounded by itself.
        let charge = message_charge(&session, &text).unwrap_or_else(|_| HostCharge::none(&session));
        if sender.send(text, charge).await.is_err() {
            return;
        }
        up.say(&FromGuests::Taken { guest: id });
    }
}

/// Takes what a guest sends to the daemon.
#[derive(Debug)]
struct ToDaemon {
    guest: GuestId,
    up: Arc<Up>,
}

impl Sink for ToDaemon {
    fn take(&self, output: GuestOutput) {
        self.up.say(&FromGuests::Output { guest: self.guest, output });
    }
}

/// Waits until a guest has ended, and stops it once a model is lost that it needs.
async fn see_to_its_end(running: RunningGuest) -> GuestEnd {
    let RunningGuest { mut end, stop, models, .. } = running;
    tokio::select! {
        biased;
        end = &mut end => return end,
        () = models.wait_for_loss() => stop.stop(),
    }
    end.await
}

fn tell_end(up: &Up, guest: GuestId, end: GuestEnd) {
    up.say(&FromGuests::Ended { guest, end });
}

/// The end of a guest that did not begin.
fn refused(error: GuestError) -> GuestEnd {
    match error {
        GuestError::OverBudget(exceeded) => GuestEnd::HostBytesExceeded(exceeded),
        error => GuestEnd::Panicked { message: error.to_string() },
    }
}

impl Seen {
    fn of(info: &GuestInfo) -> Self {
        let is_running = info.activity == GuestActivity::Running;
        Self { amounts: info.amounts, is_running, models: info.models.clone() }
    }
}
