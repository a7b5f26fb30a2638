//! The life of one guest as its session sees it.

use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;
use trellis_engine::account::HostCharge;
use trellis_wire::{
    ErrorBody, Event, GuestUsage, LogLevel, OUTPUT_BYTES_MAX, Outbox, Room, ServerMessage, Value, WireError,
};

use super::call::{Ending, panicked, stopped};
use super::control::{Control, Signal};
use super::service::{
    GuestEnd, Progress, ProgressSink, RunningGuest, Service, StartRequest, StopHandle, StopReason,
};
use super::sessions::Sessions;
use crate::guest::{self, GuestIo, GuestOutput, InboxReceiver, OutputReceiver, output_channel};

/// What a start needs of its connection.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) id: u64,
    pub(crate) outbox: Arc<Outbox>,
    pub(crate) control: Arc<Control>,
    pub(crate) credit_bytes: usize,
    pub(crate) is_followed: bool,
    pub(crate) stop_timeout: Duration,
}

/// Starts a guest and passes on what it sends until it has ended. `charge` is for what waits here until the guest runs and has an
/// account of its own.
pub(crate) async fn run<S: Service>(
    lane: Lane,
    sessions: Arc<Sessions<S>>,
    request: StartRequest,
    charge: HostCharge,
    inbox: InboxReceiver,
) -> Ending {
    let mut counted = sessions.counts.begin();
    let service = sessions.service.clone();
    let (output, receiver) = output_channel(lane.credit_bytes);
    let (sink, mut progress) = ProgressSink::new();
    let io = GuestIo { output, input: inbox };
    let start = tokio::spawn(async move {
        let started = service.start(request, io, sink).await;
        drop(charge);
        started
    });
    let mut start = AbortOnDropHandle::new(start);
    let ending = match lane.wait_for_start(&mut start, &mut progress).await {
        Err(Unstarted::Stopped(reason)) => {
            drop(receiver);
            lane.give_up(reason, start).await
        }
        Ok(running) => {
            counted.note_run();
            let mut output_bytes = 0;
            let ending = lane.follow(running, receiver, progress, &mut output_bytes).await;
            Ending { usage: ending.usage.map(|usage| GuestUsage { output_bytes, ..usage }), ..ending }
        }
        Err(Unstarted::Refused(error)) => Err(error).into(),
    };
    counted.end(ending.error_code());
    ending
}

pub(super) type Starting = AbortOnDropHandle<Result<RunningGuest, ErrorBody>>;

/// Why a guest is not to be followed.
pub(super) enum Unstarted {
    Stopped(StopReason),
    Refused(ErrorBody),
}

/// What the client of a guest is told that was stopped. The service does not know why it was told to stop the guest. One that
/// failed by itself meanwhile has done so; one that ended well has not, for its client, to whom nothing was passed on from the
/// stop on.
fn told(ending: Ending, reason: StopReason) -> Ending {
    let is_over_limit = matches!(reason, StopReason::Overdrawn { .. } | StopReason::LimitExceeded);
    match ending.has_failed() && !is_over_limit {
        true => ending,
        false => Ending { usage: ending.usage, ..Err(stopped(reason)).into() },
    }
}

impl Lane {
    pub(super) async fn wait_for_start(
        &self,
        mut start: &mut Starting,
        progress: &mut watch::Receiver<Option<Progress>>,
    ) -> Result<RunningGuest, Unstarted> {
        let started = loop {
            tokio::select! {
                biased;
                reason = self.control.stopped() => return Err(Unstarted::Stopped(reason)),
                Ok(()) = progress.changed() => self.send_progress(progress),
                started = &mut start => break started,
            }
        };
        if progress.has_changed().is_ok_and(|has_changed| has_changed) {
            self.send_progress(progress);
        }
        started.unwrap_or_else(|_| Err(panicked())).map_err(Unstarted::Refused)
    }

    /// Ends a start whose request is cancelled. The guest may have begun in that moment: then its end is awaited,
    /// since the end of the request says that all is free.
    pub(super) async fn give_up(&self, reason: StopReason, mut start: Starting) -> Ending {
        start.abort();
        let usage = match tokio::time::timeout(self.stop_timeout, &mut start).await {
            Ok(Ok(Ok(RunningGuest { end, stop, .. }))) => {
                let end = AssertUnwindSafe(end).catch_unwind().boxed();
                self.stop(reason, stop, end).await.usage
            }
            Ok(Ok(Err(_)) | Err(_)) | Err(_) => None,
        };
        Ending { usage: Some(usage.unwrap_or_default()), ..Err(stopped(reason)).into() }
    }

    fn send_progress(&self, progress: &mut watch::Receiver<Option<Progress>>) {
        let progress = progress.borrow_and_update().clone();
        // A slow reader skips states instead of collecting them.
        if let Some(Progress { stage, name, done, total }) = progress
            && self.outbox.has_room(Room::Bulk)
        {
            self.send_own(Event::Progress { stage, name, done, total });
        }
    }

    /// Passes on what a guest sends, and counts it in `output_bytes`, until the guest has ended; and tells how far that is for which
    /// it waits.
    async fn follow(
        &self,
        running: RunningGuest,
        mut output: OutputReceiver,
        mut progress: watch::Receiver<Option<Progress>>,
        output_bytes: &mut u64,
    ) -> Ending {
        let RunningGuest { guest_id, end, mut stop } = running;
        let mut end = AssertUnwindSafe(end).catch_unwind().boxed();
        self.send_own(Event::Started { guest_id });
        let (mut is_open, mut is_told) = (true, true);
        let ended = loop {
            tokio::select! {
                biased;
                signal = self.control.changed() => match signal {
                    Signal::Granted(n_bytes) => output.grant(usize::try_from(n_bytes).unwrap_or(usize::MAX)),
                    Signal::Stop(reason) if self.is_followed => {
                        return self.stop_followed(reason, stop, end, output).await;
                    }
                    Signal::Stop(reason) => {
                        // First: a guest that finds its output closed fails by that.
                        stop.stop(reason);
                        drop(output);
                        return self.stop(reason, stop, end).await;
                    }
                },
                // First: it was told before the guest went on.
                changed = progress.changed(), if is_told => match changed {
                    Ok(()) => self.send_progress(&mut progress),
                    Err(_) => is_told = false,
                },
                next = output.recv_together(), if is_open => match next {
                    Some(next) => if let Err(ending) = self.pass_on(next, output_bytes).await {
                        if let Refused::Stopped(reason) = ending {
                            stop.stop(reason);
                        }
                        drop(output);
                        return match ending {
                            Refused::Stopped(reason) => self.stop(reason, stop, end).await,
                            Refused::TooLarge(error) => {
                                let usage = self.stop(StopReason::LimitExceeded, stop, end).await.usage;
                                Ending { usage, ..Err(error).into() }
                            }
                        };
                    },
                    None => is_open = false,
                },
                ended = &mut end => break ended,
            }
        };
        // What the guest sent before its end is all in the queue; outside tokio's budget, nothing there can be missed.
        while let Some(Some(next)) = tokio::task::unconstrained(output.recv_together()).now_or_never() {
            match self.pass_on(next, output_bytes).await {
                Ok(()) => {}
                Err(Refused::Stopped(reason)) => return told(finish(ended), reason),
                Err(Refused::TooLarge(error)) => {
                    return Ending { usage: finish(ended).usage, ..Err(error).into() };
                }
            }
        }
        finish(ended)
    }

    async fn stop(&self, reason: StopReason, stop: StopHandle, end: End) -> Ending {
        stop_and_wait(reason, stop, end, self.stop_timeout).await
    }

    /// As [`Self::stop`], while the rest of the guest's recording or profile goes to the client: it says how far the guest
    /// came.
    async fn stop_followed(
        &self,
        reason: StopReason,
        mut stop: StopHandle,
        end: End,
        mut output: OutputReceiver,
    ) -> Ending {
        // Before it gets credit without end: nothing else of it is passed on any more.
        stop.stop(reason);
        output.grant(usize::MAX);
        let due = tokio::time::Instant::now() + self.stop_timeout;
        let mut ending = pin!(self.stop(reason, stop, end));
        let ending = loop {
            tokio::select! {
                biased;
                Some(next) = output.recv() => self.pass_on_of_host(next, due).await,
                ending = &mut ending => break ending,
            }
        };
        while let Some(Some(next)) = tokio::task::unconstrained(output.recv()).now_or_never() {
            self.pass_on_of_host(next, due).await;
        }
        ending
    }

    async fn pass_on_of_host(&self, output: GuestOutput, due: tokio::time::Instant) {
        if !matches!(output, GuestOutput::Recorded(_) | GuestOutput::Profiled(_)) {
            return;
        }
        for event in events(output) {
            // A client that does not read finds what it asked for cut short.
            if tokio::time::timeout_at(due, self.outbox.room(Room::Bulk)).await.is_err() {
                return;
            }
            self.send_own(event);
        }
    }

    async fn pass_on(&self, output: GuestOutput, output_bytes: &mut u64) -> Result<(), Refused> {
        self.control.spend(output.credit_bytes() as u64);
        for event in events(output) {
            if !self.outbox.has_room(Room::Bulk) {
                tokio::select! {
                    biased;
                    reason = self.control.stopped() => return Err(Refused::Stopped(reason)),
                    () = self.outbox.room(Room::Bulk) => {}
                }
            }
            let n_bytes = event.output_bytes().unwrap_or_default() as u64;
            self.outbox.push(&ServerMessage::Event { id: self.id, event }).map_err(|_: WireError| {
                Refused::TooLarge(ErrorBody::over_limit("output bytes", n_bytes, OUTPUT_BYTES_MAX as u64))
            })?;
            *output_bytes += n_bytes;
        }
        Ok(())
    }

    pub(super) fn send_own(&self, event: Event) {
        let pushed = self.outbox.push(&ServerMessage::Event { id: self.id, event });
        debug_assert!(pushed.is_ok(), "the daemon's own events are small");
    }
}

/// Stops a guest and waits for its own account of that, but not for ever.
pub(super) async fn stop_and_wait(
    reason: StopReason,
    mut stop: StopHandle,
    end: End,
    timeout: Duration,
) -> Ending {
    stop.stop(reason);
    let ending = match tokio::time::timeout(timeout, end).await {
        Ok(ended) => finish(ended),
        Err(_) => Err(stopped(reason)).into(),
    };
    told(ending, reason)
}

pub(super) type End = BoxFuture<'static, Result<GuestEnd, Box<dyn std::any::Any + Send>>>;

enum Refused {
    Stopped(StopReason),
    TooLarge(ErrorBody),
}

pub(super) fn finish(ended: Result<GuestEnd, Box<dyn std::any::Any + Send>>) -> Ending {
    match ended {
        Ok(GuestEnd { result, usage }) => {
            Ending { usage: Some(usage), ..result.map(|()| Value::Done).into() }
        }
        Err(_) => Err(panicked()).into(),
    }
}

/// What a client receives for an output. Text and tokens that are larger than one output may be come in pieces; the
/// credit that they take is the same.
pub(crate) fn events(output: GuestOutput) -> impl Iterator<Item = Event> {
    let mut rest = Some(output);
    // Of what a host says of its guest, which may be long.
    let mut n_given = 0;
    std::iter::from_fn(move || {
        let event = match rest.take()? {
            GuestOutput::Text(mut text) => {
                if text.len() > OUTPUT_BYTES_MAX {
                    let tail = text.split_off(text.floor_char_boundary(OUTPUT_BYTES_MAX));
                    rest = Some(GuestOutput::Text(tail));
                }
                Event::Text { text }
            }
            GuestOutput::Tokens(mut tokens) => {
                let n_tokens_max = OUTPUT_BYTES_MAX / size_of::<u32>();
                if tokens.len() > n_tokens_max {
                    rest = Some(GuestOutput::Tokens(tokens.split_off(n_tokens_max)));
                }
                Event::Tokens { tokens }
            }
            GuestOutput::Json(json) => Event::Json { json },
            GuestOutput::Recorded(bytes) if bytes.len() <= OUTPUT_BYTES_MAX => Event::Recorded { bytes },
            GuestOutput::Profiled(bytes) if bytes.len() <= OUTPUT_BYTES_MAX => Event::Profiled { bytes },
            GuestOutput::Recorded(all) => {
                let bytes = piece_of(&all, &mut n_given);
                rest = (n_given < all.len()).then_some(GuestOutput::Recorded(all));
                Event::Recorded { bytes }
            }
            GuestOutput::Profiled(all) => {
                let bytes = piece_of(&all, &mut n_given);
                rest = (n_given < all.len()).then_some(GuestOutput::Profiled(all));
                Event::Profiled { bytes }
            }
            GuestOutput::Log { level, line } => Event::Log { level: wire_level(level), line },
        };
        Some(event)
    })
}

/// What comes after those that were given. The rest is not moved for each piece.
fn piece_of(all: &[u8], n_given: &mut usize) -> Vec<u8> {
    let rest = &all[*n_given..];
    let piece = &rest[..rest.len().min(OUTPUT_BYTES_MAX)];
    *n_given += piece.len();
    piece.to_vec()
}

fn wire_level(level: guest::LogLevel) -> LogLevel {
    match level {
        guest::LogLevel::Debug => LogLevel::Debug,
        guest::LogLevel::Info => LogLevel::Info,
        guest::LogLevel::Warn => LogLevel::Warn,
        guest::LogLevel::Error => LogLevel::Error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_take_the_credit_of_their_output() {
        let long = OUTPUT_BYTES_MAX + 100;
        let outputs = [
            (GuestOutput::Text(String::new()), 1),
            (GuestOutput::Text("é".repeat(long)), 3),
            (GuestOutput::Tokens(vec![7; long]), 5),
            (GuestOutput::Tokens(Vec::new()), 1),
            (GuestOutput::Json("{}".into()), 1),
            (GuestOutput::Recorded((0..long).map(|n| n as u8).collect()), 2),
            (GuestOutput::Profiled(vec![7; 3 * OUTPUT_BYTES_MAX]), 3),
            (GuestOutput::Log { level: guest::LogLevel::Warn, line: "x".into() }, 1),
        ];
        for (output, n_events) in outputs {
            let n_bytes = output.credit_bytes();
            let recorded = match &output {
                GuestOutput::Recorded(bytes) => bytes.clone(),
                _ => Vec::new(),
            };
            let events: Vec<_> = events(output).collect();
            let pieces = events.iter().flat_map(|event| match event {
                Event::Recorded { bytes } => bytes.clone(),
                _ => Vec::new(),
            });
            assert_eq!(pieces.collect::<Vec<_>>(), recorded);
            assert_eq!(events.len(), n_events);
            assert_eq!(events.iter().map(Event::credit_bytes).sum::<usize>(), n_bytes);
        }
    }
}
