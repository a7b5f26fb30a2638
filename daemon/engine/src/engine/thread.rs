//! The engine's thread: brings in what guests ask, waits for the device, gives back what came of it, and says how it
//! ended.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use tokio::sync::{mpsc, oneshot, watch};

use super::core::{Core, Input, Next};
use crate::backend::Backend;
use crate::command::ModelId;
use crate::completion::{CallerId, Completion, Done};
use crate::error::EngineFailure;
use crate::handle::{DESK, EngineState, Message, Posted, Served};
use crate::line::Line;
use crate::port::Port;

/// A wait for guests that takes longer than this is made of naps.
const SPINS_MAX: Duration = Duration::from_micros(300);
const NAP: Duration = Duration::from_micros(50);

/// The thread's whole life. However it ends, that is said before anything is let go of, so that whoever finds it gone
/// finds out why.
pub(super) fn live(served: Served, port: Port) {
    let Served { messages, state, desk } = served;
    let mut inbox = Inbox::new(messages, desk);
    let mut core = Core::default();
    let ended = catch_unwind(AssertUnwindSafe(|| serve(&mut core, &mut inbox, port)));
    let ended = match ended {
        Ok(Ok(())) => EngineState::Stopped,
        Ok(Err(failure)) => EngineState::Failed(failure),
        Err(panic) => EngineState::Failed(EngineFailure::Panicked { message: message(panic.as_ref()) }),
    };
    if let EngineState::Failed(error) = &ended {
        tracing::error!(%error, "the engine has failed");
    }
    state.send_replace(ended);
    core.dissolve();
    inbox.close();
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic without a message").to_owned()
}

fn serve(core: &mut Core, inbox: &mut Inbox, port: Port) -> Result<(), EngineFailure> {
    let mut post = Post::default();
    loop {
        let next = post.turn(core, inbox, port);
        for (model, backend) in core.take_departed() {
            inbox.see_off(model, backend);
        }
        match next? {
            Next::Turn => {}
            Next::Device => core.wait(),
            Next::InputOrLayers => inbox.wait_unless(|| core.is_held_up()),
            Next::Input => {
                if inbox.wait().is_err() {
                    return Ok(());
                }
            }
            Next::InputBefore(until) => inbox.wait_until(until, || core.is_done()),
            Next::Stop => return Ok(()),
        }
    }
}

/// What is given back after a turn. Its memory is reused.
#[derive(Default)]
pub(super) struct Post {
    completions: Vec<Completion>,
    /// Of guests whose questions were answered, who may be waited for.
    first: Vec<Waker>,
    wakers: Vec<Waker>,
}

impl Post {
    /// Carries out a turn; what it brought is put into its place, and each guest is woken once.
    pub(super) fn turn(
        &mut self,
        core: &mut Core,
        inbox: &mut Inbox,
        port: Port,
    ) -> Result<Next, EngineFailure> {
        let next = core.turn(Instant::now(), inbox.inputs(), &mut self.completions);
        // Before anybody is told an error of it.
        for (model, failure) in core.take_failed() {
            inbox.note_failed(model, failure);
        }
        self.deliver(&inbox.lines, port);
        next
    }

    fn deliver(&mut self, lines: &FxHashMap<CallerId, Arc<Line>>, port: Port) {
        for completion in self.completions.drain(..) {
            let Completion { caller, tag, done } = port.carry(completion);
            let wakers = if matches!(done, Done::Answer(_)) { &mut self.first } else { &mut self.wakers };
            // A guest that has gone is given nothing.
            let waker = lines.get(&caller).and_then(|line| line.deliver(tag, done));
            if let Some(waker) = waker
                && !wakers.last().is_some_and(|last| last.will_wake(&waker))
            {
                wakers.push(waker);
            }
        }
        self.first.drain(..).chain(self.wakers.drain(..)).for_each(Waker::wake);
    }
}

/// Nobody is left to send anything.
struct Forsaken;

/// What has come in, and from whom.
pub(super) struct Inbox {
    messages: mpsc::UnboundedReceiver<Posted>,
    /// One that was waited for.
    awaited: Option<Posted>,
    lines: FxHashMap<CallerId, Arc<Line>>,
    /// Where the backends of models go that are about to leave.
    leavers: FxHashMap<ModelId, oneshot::Sender<Box<dyn Backend>>>,
    /// Where it is said that a model has failed.
    watched: FxHashMap<ModelId, watch::Sender<Option<EngineFailure>>>,
}

impl Inbox {
    /// One for the guests that will enter, and for what is asked in nobody's name.
    pub(super) fn new(messages: mpsc::UnboundedReceiver<Posted>, desk: Arc<Line>) -> Self {
        let lines = FxHashMap::from_iter([(DESK, desk)]);
        let (leavers, watched) = (FxHashMap::default(), FxHashMap::default());
        Self { messages, awaited: None, lines, leavers, watched }
    }

    /// What has come in by now and no more: guests that ask faster than they are answered would keep everybody from
    /// being computed.
    fn inputs(&mut self) -> impl Iterator<Item = Input> {
        let Self { messages, awaited, lines, leavers, watched } = self;
        let n = messages.len();
        let queued = std::iter::from_fn(|| messages.try_recv().ok()).take(n);
        awaited.take().into_iter().chain(queued).map(|posted| match posted.message {
            Message::Enter { caller, owner, line } => {
                lines.insert(caller, line);
                Input::Enter(caller, owner)
            }
            Message::Leave { caller } => {
                lines.remove(&caller);
                Input::Leave(caller)
            }
            Message::Operation(operation) => Input::Operation(operation),
            Message::Add { newcomer, failure } => {
                watched.insert(newcomer.id, failure);
                Input::Add(newcomer)
            }
            Message::Share { kv_bytes, tag } => Input::Share { kv_bytes, tag },
            Message::Remove { model, to } => {
                leavers.insert(model, to);
                Input::Remove(model)
            }
            Message::Shutdown => Input::Shutdown,
        })
    }

    fn note_failed(&mut self, model: ModelId, failure: EngineFailure) {
        tracing::error!(error = %failure, "a model has failed; the engine goes on with the others");
        if let Some(watched) = self.watched.get(&model) {
            watched.send_replace(Some(failure));
        }
    }

    /// Gives a backend to whoever asked for its model to go: letting go of it here would hold up everybody else.
    fn see_off(&mut self, model: ModelId, backend: Box<dyn Backend>) {
        self.watched.remove(&model);
        if let Some(to) = self.leavers.remove(&model) {
            // Who does not want it any more leaves it to this thread.
            let _ = to.send(backend);
        }
    }

    fn wait(&mut self) -> Result<(), Forsaken> {
        self.awaited = Some(self.messages.blocking_recv().ok_or(Forsaken)?);
        Ok(())
    }

    /// Waits until something comes in, the device is done or that moment, at first without going to sleep: most who come,
    /// come at once.
    fn wait_until(&mut self, until: Instant, mut is_done: impl FnMut() -> bool) {
        let begun = Instant::now();
        while self.messages.is_empty() {
            let now = Instant::now();
            match until.saturating_duration_since(now) {
                Duration::ZERO => return,
                _ if now < begun + SPINS_MAX => std::hint::spin_loop(),
                // To ask the device at each turn would keep its driver from others.
                _ if is_done() => return,
                left => std::thread::sleep(left.min(NAP)),
            }
        }
    }

    /// Waits until something comes in or the device is done with what it does, which is in a part of a step: waiting for
    /// the device alone keeps a core busy as well. Others who need the core get it.
    fn wait_unless(&mut self, mut is_done: impl FnMut() -> bool) {
        while self.messages.is_empty() && !is_done() {
            std::thread::yield_now();
        }
    }

    /// Says to all guests that nothing more will come, also to those who have only just entered.
    fn close(mut self) {
        self.messages.close();
        self.inputs().for_each(drop);
        self.lines.values().for_each(|line| line.close());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Context, Poll, Wake};

    use super::*;
    use crate::line::Standing;

    #[derive(Default)]
    struct Alarm(AtomicUsize);

    impl Wake for Alarm {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_guest_is_woken_once_for_all_that_a_turn_brought() {
        let callers = [CallerId(1), CallerId(2)];
        let lines: FxHashMap<_, _> =
            callers.map(|caller| (caller, Arc::<Line>::default())).into_iter().collect();
        let alarms = [Arc::<Alarm>::default(), Arc::<Alarm>::default()];
        let mut places: Vec<(CallerId, Standing)> = Vec::new();
        for (caller, alarm) in callers.iter().zip(&alarms) {
            let waker = Waker::from(alarm.clone());
            for _ in 0..50 {
                let place = lines[caller].stand();
                {
                    let mut waiting = std::pin::pin!(place.take());
                    assert!(waiting.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
                }
                places.push((*caller, place));
            }
        }
        let mut post = Post::default();
        let done = Done::Kept(Ok(()));
        let brought = |(caller, place): &(CallerId, Standing)| Completion {
            caller: *caller,
            tag: place.tag(),
            done: done.clone(),
        };
        post.completions.extend(places.iter().map(brought));
        post.deliver(&lines, Port::Encoded);
        for alarm in &alarms {
            assert_eq!(alarm.0.load(Ordering::Relaxed), 1);
        }
        let waker = Waker::from(alarms[0].clone());
        for (_, place) in &places {
            let taken = std::pin::pin!(place.take()).poll(&mut Context::from_waker(&waker));
            assert!(matches!(taken, Poll::Ready(Some(Done::Kept(Ok(()))))));
        }
    }
}
