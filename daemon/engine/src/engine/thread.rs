//! The engine's thread: brings in what guests ask, waits for the device, gives back what came of it, and says how it
//! ended.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::task::Waker;
use std::time::Instant;

use rustc_hash::FxHashMap;

use super::core::{Core, Next};
use super::inbox::{Awaited, Inbox};
use crate::backend::OldestStep;
use crate::completion::{CallerId, Completion, Done};
use crate::error::EngineFailure;
use crate::handle::{EngineState, Served};
use crate::mailbox::Postbox;
use crate::port::Port;

/// The thread's whole life. However it ends, the reason is said before anything is let go of, so that callers that find it
/// gone find out why.
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
            Next::Device => match core.oldest_step() {
                // What was held back in this turn, and what comes in meanwhile, is carried out, and what needs no device
                // is answered.
                Some(OldestStep::OnDevice) if inbox.holds_back() => {}
                Some(OldestStep::OnDevice) => match inbox.wait_beside(|| core.is_done()) {
                    Awaited::Device => core.wait(),
                    Awaited::Input => {}
                },
                _ => core.wait(),
            },
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
    /// Of guests whose questions were answered: the next step may wait for them.
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
        // Before any guest is told an error of it.
        for (model, failure) in core.take_failed() {
            inbox.note_failed(model, failure);
        }
        self.deliver(&inbox.postboxes, port);
        next
    }

    fn deliver(&mut self, postboxes: &FxHashMap<CallerId, Postbox>, port: Port) {
        for completion in self.completions.drain(..) {
            let Completion { caller, tag, done } = port.carry(completion);
            let wakers = if matches!(done, Done::Answer(_)) { &mut self.first } else { &mut self.wakers };
            // A guest that has gone is given nothing.
            let waker = postboxes.get(&caller).and_then(|postbox| postbox.deliver(caller, tag, done));
            if let Some(waker) = waker
                && !wakers.last().is_some_and(|last| last.will_wake(&waker))
            {
                wakers.push(waker);
            }
        }
        self.first.drain(..).chain(self.wakers.drain(..)).for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::pin::pin;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::task::{Context as TaskContext, Poll, Wake};
    use std::time::Duration;

    use super::*;
    use crate::account::{Account, ActorId, Budget, GuestId, Owner, SessionId};
    use crate::backend::Limits;
    use crate::command::Ask;
    use crate::context::Context;
    use crate::engine::costs::device::Device;
    use crate::engine::{EngineSettings, OneModel};
    use crate::mailbox::{Mailbox, Ticket};
    use crate::model::{Model, ModelSource};

    #[derive(Default)]
    struct Alarm(AtomicUsize);

    impl Wake for Alarm {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn engine(device: Device) -> OneModel {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models/tiny");
        let model = Model::open("tiny", &ModelSource::Folder(folder)).expect("the bundled model opens");
        OneModel::start(Arc::new(model), Box::new(device), EngineSettings::default())
    }

    /// A guest's context of so many tokens.
    async fn context_of(engine: &OneModel, guest: u64, n_tokens: usize) -> Context {
        let account = Account::new("guest", Budget::UNLIMITED, None);
        let owner = Owner {
            actor: ActorId(u32::try_from(guest).expect("few guests")),
            session: SessionId(guest),
            guest: GuestId(guest),
            account,
        };
        let mut context = Context::create(engine.handle(), owner).await.expect("a context");
        context.append(&vec![1 + guest as u32; n_tokens]).await.expect("they fit");
        context
    }

    #[tokio::test]
    async fn what_needs_no_device_is_answered_while_it_works_and_who_asks_meanwhile_rides_together() {
        let gate = Arc::<AtomicBool>::default();
        let limits = Limits { n_steps_under_way: 2, ..Limits::of_nothing(8, 100) };
        let engine = engine(Device::behind(gate.clone(), limits));
        let mut contexts = Vec::new();
        for guest in 0..4 {
            contexts.push(context_of(&engine, guest, 5).await);
        }
        let all = async {
            let mut asked = Vec::new();
            for context in &mut contexts {
                asked.push(context.ask(Ask::Prefill).await.expect("asked"));
                // The second of them comes when the first context's step is under way for certain.
                for _ in 0..2 {
                    engine.handle().stats().await.expect("the engine works");
                }
            }
            gate.store(true, Ordering::SeqCst);
            for asked in asked {
                asked.answer().await.expect("it fits");
            }
        };
        tokio::time::timeout(Duration::from_secs(20), all)
            .await
            .expect("nothing waits for the device in vain");
        let stats = engine.handle().stats().await.expect("the engine works");
        assert_eq!((stats.n_steps, stats.n_rows), (2, 4));
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_guest_whose_commands_never_end_keeps_no_step_from_its_end() {
        let limits = Limits { n_positions_max: 200_000, ..Limits::of_nothing(8, 500_000) };
        let engine = Arc::new(engine(Device::new(limits, Default::default())));
        let is_over = Arc::<AtomicBool>::default();
        let mut floods = Vec::new();
        for n in 0..16 {
            let (mut context, is_over) = (context_of(&engine, 7, 100_000).await, is_over.clone());
            floods.push(tokio::spawn(async move {
                while !is_over.load(Ordering::SeqCst) {
                    match n % 2 {
                        0 => drop(context.fork().await.expect("a fork")),
                        _ => context.save(&format!("flood {n}")).await.expect("saved"),
                    }
                }
            }));
        }
        let others = async {
            for _ in 0..20 {
                let mut context = context_of(&engine, 1, 4).await;
                let asked = context.ask(Ask::Prefill).await.expect("asked");
                asked.answer().await.expect("it fits");
            }
        };
        let answered = tokio::time::timeout(Duration::from_secs(60), others).await;
        is_over.store(true, Ordering::SeqCst);
        answered.expect("others are answered meanwhile");
        for flood in floods {
            flood.await.expect("no panic");
        }
    }

    #[test]
    fn a_guest_is_woken_once_for_all_that_a_turn_brought() {
        let callers = [CallerId(1), CallerId(2)];
        let mailboxes: FxHashMap<_, _> =
            callers.map(|caller| (caller, Arc::<Mailbox>::default())).into_iter().collect();
        let alarms = [Arc::<Alarm>::default(), Arc::<Alarm>::default()];
        let mut places: Vec<(CallerId, Ticket)> = Vec::new();
        for (caller, alarm) in callers.iter().zip(&alarms) {
            let waker = Waker::from(alarm.clone());
            for _ in 0..50 {
                let place = mailboxes[caller].ticket();
                {
                    let mut waiting = pin!(place.take());
                    assert!(waiting.as_mut().poll(&mut TaskContext::from_waker(&waker)).is_pending());
                }
                places.push((*caller, place));
            }
        }
        let mut post = Post::default();
        let done = Done::Kept(Ok(()));
        let brought = |(caller, place): &(CallerId, Ticket)| Completion {
            caller: *caller,
            tag: place.tag(),
            done: done.clone(),
        };
        post.completions.extend(places.iter().map(brought));
        let postboxes = mailboxes.iter().map(|(caller, mailbox)| (*caller, Postbox::Here(mailbox.clone())));
        post.deliver(&postboxes.collect(), Port::Encoded);
        for alarm in &alarms {
            assert_eq!(alarm.0.load(Ordering::Relaxed), 1);
        }
        let waker = Waker::from(alarms[0].clone());
        for (_, place) in &places {
            let taken = pin!(place.take()).poll(&mut TaskContext::from_waker(&waker));
            assert!(matches!(taken, Poll::Ready(Some(Done::Kept(Ok(()))))));
        }
    }
}
