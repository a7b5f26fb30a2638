//! The engine's thread: turns its loop, waits for guests and for the device in between, and says how it ended.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use super::inbox::Awaited;
use super::turns::{Turns, Until};
use crate::error::EngineFailure;
use crate::handle::{EngineState, Served};
use crate::port::Port;

/// The thread's whole life. However it ends, the reason is said before anything is let go of, so that callers that find it
/// gone find out why.
pub(super) fn live(served: Served, port: Port) {
    let mut turns = Turns::new(served, port);
    turns.inbox.times_commands = true;
    let ended = catch_unwind(AssertUnwindSafe(|| serve(&mut turns)));
    let ended = match ended {
        Ok(Ok(())) => EngineState::Stopped,
        Ok(Err(failure)) => EngineState::Failed(failure),
        Err(panic) => EngineState::Failed(EngineFailure::Panicked { message: message(panic.as_ref()) }),
    };
    turns.end(ended);
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic without a message").to_owned()
}

fn serve(turns: &mut Turns) -> Result<(), EngineFailure> {
    loop {
        let until = turns.turn(Instant::now())?;
        let Turns { core, inbox, .. } = turns;
        match until {
            Until::Nothing => {}
            Until::Device => core.wait(),
            Until::DeviceOrInput => match inbox.wait_beside(|| core.is_done()) {
                Awaited::Device => core.wait(),
                Awaited::Input => {}
            },
            Until::LayersOrInput => inbox.wait_unless(|| core.is_held_up()),
            Until::Input => {
                if inbox.wait().is_err() {
                    return Ok(());
                }
            }
            Until::InputBefore(moment) => inbox.wait_until(moment, || core.is_done()),
            Until::Stopped => return Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use crate::account::{Account, ActorId, Budget, GuestId, Owner, SessionId};
    use crate::backend::Limits;
    use crate::command::Ask;
    use crate::context::Context;
    use crate::engine::costs::device::Device;
    use crate::engine::{EngineSettings, OneModel};
    use crate::model::{Model, ModelSource};

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
}
