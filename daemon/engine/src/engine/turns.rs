//! An engine's loop, turn by turn. A turn says what the next one waits for, and whoever drives the loop waits: the engine's
//! thread, or a simulation whose time is not the machine's.

use std::time::Instant;

use tokio::sync::watch;

use super::core::{Core, Next};
use super::inbox::Inbox;
use super::post::Post;
use crate::backend::OldestStep;
use crate::error::EngineFailure;
use crate::handle::{EngineState, Served};
use crate::port::Port;

/// What the next turn waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Until {
    /// Nothing.
    Nothing,
    /// [`Core::wait`] has taken in the oldest step.
    Device,
    /// The same, or something has come in: it is carried out beside the step, and what needs no device is answered.
    DeviceOrInput,
    /// Something comes in, or the layers of the last step are done: [`Core::is_held_up`].
    LayersOrInput,
    /// Something comes in.
    Input,
    /// Something comes in, or this moment, or the oldest step is done: [`Core::is_done`].
    InputBefore(Instant),
    /// There is no next turn: the loop has ended.
    Stopped,
}

/// A loop that has not ended.
pub(super) struct Turns {
    pub(super) core: Core,
    pub(super) inbox: Inbox,
    post: Post,
    port: Port,
    state: watch::Sender<EngineState>,
}

impl Turns {
    pub(super) fn new(served: Served, port: Port) -> Self {
        let Served { messages, state, desk } = served;
        let inbox = Inbox::new(messages, desk);
        Self { core: Core::default(), inbox, post: Post::default(), port, state }
    }

    /// Carries out what has come in by now, and gives back what came of it.
    ///
    /// # Errors
    /// The engine has come to its end.
    pub(super) fn turn(&mut self, now: Instant) -> Result<Until, EngineFailure> {
        let Self { core, inbox, post, port, .. } = self;
        let next = post.turn(core, inbox, now, *port);
        for (model, backend) in core.take_departed() {
            inbox.see_off(model, backend);
        }
        Ok(match next? {
            Next::Turn => Until::Nothing,
            Next::Device => match core.oldest_step() {
                // What was held back in this turn is carried out while the device works.
                Some(OldestStep::OnDevice) if inbox.holds_back() => Until::Nothing,
                Some(OldestStep::OnDevice) => Until::DeviceOrInput,
                _ => Until::Device,
            },
            Next::InputOrLayers => Until::LayersOrInput,
            Next::Input => Until::Input,
            Next::InputBefore(moment) => Until::InputBefore(moment),
            Next::Stop => Until::Stopped,
        })
    }

    /// Says how the loop has ended, and then lets go of everything.
    pub(super) fn end(self, ended: EngineState) {
        if let EngineState::Failed(error) = &ended {
            tracing::error!(%error, "the engine has failed");
        }
        self.state.send_replace(ended);
        self.core.dissolve();
        self.inbox.close();
    }
}
