//! The engine's thread: waits for commands, for the device and for moments, and says how it ended.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use tokio::sync::mpsc;

use super::core::{Core, Next};
use crate::command::Command;
use crate::error::EngineFailure;
use crate::handle::{EngineState, Posted, Served};

/// The thread's whole life. However it ends, that is said before anything is let go of, so that whoever finds it gone
/// finds out why.
pub(super) fn live(model: &str, mut core: Core, served: Served) {
    let Served { commands, state } = served;
    let mut inbox = Inbox { commands, awaited: None };
    let ended = catch_unwind(AssertUnwindSafe(|| serve(&mut core, &mut inbox)));
    let ended = match ended {
        Ok(Ok(())) => EngineState::Stopped,
        Ok(Err(failure)) => EngineState::Failed(failure),
        Err(panic) => EngineState::Failed(EngineFailure::Panicked { message: message(panic.as_ref()) }),
    };
    if let EngineState::Failed(error) = &ended {
        tracing::error!(model, device = core.device(), %error, "the engine has failed");
    }
    state.send_replace(ended);
    core.dissolve();
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic without a message").to_owned()
}

fn serve(core: &mut Core, inbox: &mut Inbox) -> Result<(), EngineFailure> {
    loop {
        match core.turn(Instant::now(), inbox.commands())? {
            Next::Turn => {}
            Next::Device => core.wait(),
            Next::Command => {
                if inbox.wait().is_err() {
                    return Ok(());
                }
            }
            Next::CommandBefore(until) => inbox.wait_until(until),
            Next::Stop => return Ok(()),
        }
    }
}

/// Nobody is left to send a command.
struct Forsaken;

/// Commands that have come in.
struct Inbox {
    commands: mpsc::UnboundedReceiver<Posted>,
    /// One that was waited for.
    awaited: Option<Posted>,
}

impl Inbox {
    /// What has come in by now and no more: guests that send commands faster than they are carried out would keep
    /// everybody from being computed.
    fn commands(&mut self) -> impl Iterator<Item = Command> {
        let n = self.commands.len();
        let queued = std::iter::from_fn(|| self.commands.try_recv().ok()).take(n);
        self.awaited.take().into_iter().chain(queued).map(|posted| posted.command)
    }

    fn wait(&mut self) -> Result<(), Forsaken> {
        self.awaited = Some(self.commands.blocking_recv().ok_or(Forsaken)?);
        Ok(())
    }

    /// Waits without going to sleep: the time is too short for that.
    fn wait_until(&mut self, until: Instant) {
        while self.commands.is_empty() && Instant::now() < until {
            std::hint::spin_loop();
        }
    }
}
