//! Attends to the guests of a process: starts them, brings them what the daemon says, and tells the daemon what they send and
//! how they end.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use trellis_engine::account::{Account, ActorId, GuestId};

use super::message::{FromGuests, Seen, Start};
use super::teller::Up;
use crate::guest::{
    Granter, GuestActivity, GuestEnd, GuestError, GuestInfo, GuestIo, GuestLimits, GuestPool, GuestStop,
    InboxSender, Launch, OutputReceiver, Program, RunningGuest, Tape, inbox, message_charge, output_channel,
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
    granter: Granter,
    client_gone: CancellationToken,
    messages: Option<mpsc::UnboundedSender<String>>,
    stop: GuestStop,
    told: Option<Seen>,
}

/// Attends until the daemon orders nothing more.
pub(crate) async fn attend_all(
    pool: Arc<GuestPool>,
    (actor, limits): (ActorId, Arc<GuestLimits>),
    up: Arc<Up>,
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
            if let Some(attended) = guests.get(&guest) {
                attended.granter.grant(n_bytes);
            }
        }
        Order::ClientGone { guest } => {
            if let Some(attended) = guests.get(&guest) {
                attended.client_gone.cancel();
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
    let (output, receiver) = output_channel(0);
    let (sender, input) = inbox(limits.n_messages, limits.inbox_bytes);
    let tape = start.is_recorded.then(|| Tape::record(program.hash(), limits));
    let launch = Launch {
        program,
        name: start.name,
        actor,
        session: start.session,
        account: session.clone(),
        arguments: start.arguments,
        model: start.model,
        seed: start.seed,
        deadline_ms: start.deadline_ms,
        is_recorded: start.is_recorded,
        is_profiled: start.is_profiled,
    };
    let running = pool.start(id, account, launch, GuestIo { output, input }, tape)?;
    let stop = running.stop.clone();
    let (granter, client_gone) = (receiver.granter(), CancellationToken::new());
    let gone = client_gone.clone();
    let (messages, given) = mpsc::unbounded_channel();
    tokio::spawn(pass_in(id, session, given, sender, up.clone()));
    let up = up.clone();
    tokio::spawn(async move {
        let end = pass_out(id, &up, running, receiver, gone).await;
        tell_end(&up, id, end);
        // Nobody attends any more.
        let _ = ended.send(id);
    });
    Ok(Attended { granter, client_gone, messages: Some(messages), stop, told: None })
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
        // The daemon has charged it to the session until now.
        if let Ok(charge) = message_charge(&session, &text)
            && sender.send(text, charge).await.is_err()
        {
            return;
        }
        up.say(&FromGuests::Taken { guest: id });
    }
}

/// Brings the daemon what a guest sends, until it has ended.
async fn pass_out(
    id: GuestId,
    up: &Up,
    running: RunningGuest,
    receiver: OutputReceiver,
    client_gone: CancellationToken,
) -> GuestEnd {
    let RunningGuest { mut end, stop, models, .. } = running;
    let mut receiver = Some(receiver);
    let mut lost = Some(Box::pin(async move { models.wait_for_loss().await }));
    let end = loop {
        let receiver_is_there = receiver.is_some();
        let output = async {
            match &mut receiver {
                Some(receiver) => receiver.recv().await,
                None => std::future::pending().await,
            }
        };
        let is_lost = async {
            match &mut lost {
                Some(lost) => lost.await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            end = &mut end => break end,
            output = output => match output {
                Some(output) => up.say(&FromGuests::Output { guest: id, output }),
                None => receiver = None,
            },
            () = client_gone.cancelled(), if receiver_is_there => receiver = None,
            () = is_lost => {
                lost = None;
                stop.stop();
            }
        }
    };
    while let Some(output) = receiver.as_mut().and_then(OutputReceiver::try_recv) {
        up.say(&FromGuests::Output { guest: id, output });
    }
    end
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
