//! The life of a detached guest: its start, what it sends, its end, and the time for which that is kept.

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use trellis_engine::account::HostCharge;
use trellis_wire::{ErrorBody, Event, GuestUsage, LABEL_BYTES_MAX, OUTPUT_BYTES_MAX, Program, Value};

use super::guest::{About, DetachedGuest};
use super::guests::DetachedGuests;
use super::kept::Kept;
use crate::guest::{GuestIo, GuestOutput, InboxReceiver, InboxSender, OutputReceiver, output_channel};
use crate::metrics::SessionRequest;
use crate::service::over_host_bytes;
use crate::session::actor::{Actor, QuotaPermit};
use crate::session::call::Ending;
use crate::session::limits::SessionLimits;
use crate::session::service::{GuestEnd, ProgressSink, RunningGuest, Service, StartRequest, StopReason};
use crate::session::sessions::Sessions;
use crate::session::start::{End, Lane, Unstarted, events, finish, stop_and_wait};

/// What is to be started.
pub(crate) struct Start {
    pub(crate) request: StartRequest,
    /// For what waits until the guest runs.
    pub(crate) charge: HostCharge,
    pub(crate) inbox: (InboxSender, InboxReceiver),
}

/// A place among the detached guests of a user, and a session of its own: what the guest holds does not go with the connection that
/// started it.
struct Place<S: Service> {
    service: Arc<S>,
    session_id: u64,
    _permit: QuotaPermit,
}

impl<S: Service> Place<S> {
    /// Takes one, and pays for what may be kept there.
    async fn take(
        sessions: &Sessions<S>,
        actor: Actor,
        limits: &SessionLimits,
    ) -> Result<(Self, HostCharge), ErrorBody> {
        let limit_of = |most| sessions.service.limit_of(actor, "sessions.n_detached", most);
        let permit = sessions.detached.place(actor, limit_of)?;
        let (service, session_id) = (sessions.service.clone(), sessions.next_id());
        let account = service.session_began(actor, session_id).await;
        let place = Self { service, session_id, _permit: permit };
        let n_bytes = limits.detached_credit_bytes().saturating_add(limits.detached_kept_bytes);
        let charge = HostCharge::new(&account, n_bytes as u64);
        Ok((place, charge.map_err(|exceeded| over_host_bytes(&exceeded))?))
    }
}

impl<S: Service> Drop for Place<S> {
    fn drop(&mut self) {
        self.service.session_ended(self.session_id);
    }
}

/// Starts a guest that goes on until its own end, or that of the daemon; ends once it runs.
pub(crate) async fn start<S: Service>(
    lane: Lane,
    sessions: Arc<Sessions<S>>,
    start: Start,
    shutdown: CancellationToken,
) -> Ending {
    let mut counted = sessions.counts.begin();
    let limits = sessions.limits();
    let Start { request, charge: waiting, inbox: (inbox, messages) } = start;
    let actor = request.actor;
    let (place, charge) = match Place::take(&sessions, actor, &limits).await {
        Ok(taken) => taken,
        Err(error) => {
            counted.end(Some(error.code.as_str()));
            return Err(error).into();
        }
    };
    let name = name_of(&request);
    let session_id = place.session_id;
    let request = StartRequest { session_id, ..request };
    let (output, receiver) = output_channel(limits.detached_credit_bytes());
    let (sink, mut progress) = ProgressSink::new();
    let io = GuestIo { output, input: messages };
    let service = sessions.service.clone();
    let mut starting = AbortOnDropHandle::new(tokio::spawn(async move {
        let started = service.start(request, io, sink).await;
        drop(waiting);
        started
    }));
    let ending: Ending = match lane.wait_for_start(&mut starting, &mut progress).await {
        Err(Unstarted::Stopped(reason)) => {
            drop(receiver);
            lane.give_up(reason, starting).await
        }
        Err(Unstarted::Refused(error)) => Err(error).into(),
        Ok(running) => {
            counted.note_run();
            let id = running.guest_id;
            let about = About { id, actor, session_id, name, progress };
            let guest = DetachedGuest::new(about, Kept::new(limits.detached_kept_bytes), charge, inbox);
            let detached = sessions.detached.clone();
            detached.insert(guest.clone());
            let keeper = Keeper { guest, detached: detached.clone(), limits, shutdown, counted };
            let keeping = detached.keepers.track_future(keeper.keep(running, receiver, place));
            sessions.work.spawn(keeping);
            lane.send_own(Event::Started { guest_id: id });
            return Ok(Value::Done).into();
        }
    };
    counted.end(ending.error_code());
    ending
}

/// What a client calls its guest, or what it asked for.
fn name_of(request: &StartRequest) -> String {
    let name = match (&request.label, &request.program) {
        (Some(label), _) => label,
        (None, Program::Named { name }) => name,
        (None, Program::Component { .. } | Program::Unknown) => return "component".to_owned(),
    };
    name[..name.floor_char_boundary(LABEL_BYTES_MAX)].to_owned()
}

/// Keeps one guest.
struct Keeper {
    guest: Arc<DetachedGuest>,
    detached: Arc<DetachedGuests>,
    /// Those that held when it started.
    limits: Arc<SessionLimits>,
    shutdown: CancellationToken,
    counted: SessionRequest,
}

/// How a guest comes to its end.
enum Over {
    Ended(Result<GuestEnd, Box<dyn Any + Send>>),
    Stopped(StopReason),
    TooLarge(ErrorBody),
}

impl Keeper {
    /// Keeps what the guest sends until it has ended, and has its end kept for a while.
    async fn keep<S: Service>(self, running: RunningGuest, mut output: OutputReceiver, place: Place<S>) {
        let RunningGuest { end, mut stop, .. } = running;
        let mut end: End = AssertUnwindSafe(end).catch_unwind().boxed();
        let mut output_bytes = 0;
        let mut over = self.follow(&mut end, &mut output, &mut output_bytes).await;
        if let Over::Ended(_) = over {
            // What the guest sent before its end is all in the queue; outside tokio's budget, nothing there can be missed.
            while let Some(Some(next)) = tokio::task::unconstrained(output.recv_together()).now_or_never() {
                if let Err(error) = self.push(next, &mut output_bytes) {
                    over = Over::TooLarge(error);
                    break;
                }
            }
        }
        // Before its output closes: a guest that finds it closed fails by that.
        match &over {
            Over::Ended(_) => {}
            Over::Stopped(reason) => stop.stop(*reason),
            Over::TooLarge(_) => stop.stop(StopReason::LimitExceeded),
        }
        drop(output);
        let timeout = self.limits.stop_time();
        let ending = match over {
            Over::Ended(ended) => finish(ended),
            Over::Stopped(reason) => stop_and_wait(reason, stop, end, timeout).await,
            Over::TooLarge(error) => {
                let usage = stop_and_wait(StopReason::LimitExceeded, stop, end, timeout).await.usage;
                Ending { usage, ..Err(error).into() }
            }
        };
        let usage = ending.usage.map(|usage| GuestUsage { output_bytes, ..usage });
        let ending = Ending { usage, ..ending };
        let Self { guest, detached, limits, shutdown, counted } = self;
        counted.end(ending.error_code());
        guest.finish(ending, detached.next_end());
        drop(place);
        detached.forget_oldest(guest.actor, limits.n_detached_ended);
        tokio::spawn(async move {
            tokio::select! {
                () = guest.settled.notified() => {}
                () = tokio::time::sleep(limits.detached_ended_time()) => {}
                () = shutdown.cancelled() => {}
            }
            detached.forget(guest.id);
        });
    }

    /// Until the guest has ended or is to end.
    async fn follow(&self, end: &mut End, output: &mut OutputReceiver, output_bytes: &mut u64) -> Over {
        let idle_time = self.limits.detached_idle_time();
        let mut is_open = true;
        loop {
            let unread_since = self.guest.unread_since();
            tokio::select! {
                biased;
                () = self.shutdown.cancelled() => return Over::Stopped(StopReason::ShuttingDown),
                () = self.guest.asked() => output.grant(self.guest.take_freed()),
                () = passed(unread_since, idle_time) => {
                    let limit_ms = self.limits.detached_idle_ms;
                    return Over::Stopped(StopReason::Unread { limit_ms });
                }
                next = output.recv_together(), if is_open => match next {
                    Some(next) => if let Err(error) = self.push(next, output_bytes) {
                        return Over::TooLarge(error);
                    },
                    None => is_open = false,
                },
                ended = &mut *end => return Over::Ended(ended),
            }
        }
    }

    fn push(&self, output: GuestOutput, output_bytes: &mut u64) -> Result<(), ErrorBody> {
        for event in events(output) {
            let n_bytes = event.output_bytes().unwrap_or_default();
            if n_bytes > OUTPUT_BYTES_MAX {
                return Err(ErrorBody::over_limit("output bytes", n_bytes as u64, OUTPUT_BYTES_MAX as u64));
            }
            *output_bytes += n_bytes as u64;
            self.guest.push(event);
        }
        Ok(())
    }
}

/// Waits until so much time has passed since then.
async fn passed(since: Option<Instant>, time: Duration) {
    match since.and_then(|since| since.checked_add(time)) {
        Some(until) => tokio::time::sleep_until(until).await,
        None => std::future::pending().await,
    }
}
