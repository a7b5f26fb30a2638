//! One session and what it needs to come to a moment.

use std::io;
use std::time::Duration;

use trellis_wire::{Call, Event, ServerMessage, Start};

use crate::attacks::raw::{Raw, start_of};
use crate::attacks::{Component, Ending, Site, clients};

/// The longest that a session stays at its moment.
const STAY_MS_MAX: u64 = 20;

/// A session that is about to be opened.
#[derive(Debug)]
pub(super) struct Visit {
    pub(super) site: Site,
    /// What it does by chance follows from this.
    pub(super) chance: u64,
}

/// A connection and the request of a guest on it, or how that ended instead.
pub(super) type Running = Result<(Raw, u64), Ending>;

impl Visit {
    /// Stays where it is for a while.
    pub(super) async fn stay(&self) {
        tokio::time::sleep(Duration::from_millis((self.chance >> 32) % STAY_MS_MAX)).await;
    }

    /// A number in `0..n`.
    pub(super) fn below(&self, n: usize) -> usize {
        (self.chance % n as u64) as usize
    }

    /// A connection that has said hello.
    pub(super) async fn greet(&self) -> io::Result<Raw> {
        Raw::connect(&self.site.socket).await
    }

    /// A component that nobody has compiled.
    pub(super) fn new_component(&self) -> Component {
        clients::salted(&self.site.hostile, clients::fresh() ^ self.chance)
    }

    /// A connection on which a guest of this mode is asked for.
    pub(super) async fn start(
        &self,
        arguments: &[&str],
        change: impl FnOnce(&mut Start) + Send,
    ) -> io::Result<Running> {
        let mut raw = match clients::prepared(&self.site).await? {
            Ok(raw) => raw,
            Err(ending) => return Ok(Err(ending)),
        };
        let mut start = start_of(&self.site.hostile, arguments);
        change(&mut start);
        let id = raw.request(Call::Start(start)).await?;
        Ok(Ok((raw, id)))
    }

    /// A connection on which a guest of this mode runs.
    pub(super) async fn run(
        &self,
        arguments: &[&str],
        change: impl FnOnce(&mut Start) + Send,
    ) -> io::Result<Running> {
        let (mut raw, id) = match self.start(arguments, change).await? {
            Ok(begun) => begun,
            Err(ending) => return Ok(Err(ending)),
        };
        Ok(raw.started(id).await?.map(|_| (raw, id)))
    }
}

/// Waits for something of a request that is so; how the request ended where it does not come.
pub(super) async fn event_of(
    raw: &mut Raw,
    id: u64,
    is_it: impl Fn(&Event) -> bool + Send,
) -> io::Result<Result<(), Ending>> {
    loop {
        match raw.next().await? {
            Some(ServerMessage::Event { id: of, event }) if of == id && is_it(&event) => return Ok(Ok(())),
            Some(ServerMessage::End { id: of, outcome, .. }) if of == id => return Ok(Err(outcome.into())),
            Some(ServerMessage::Fault { error }) => return Ok(Err(error.into())),
            Some(_) => {}
            None => return Ok(Err(Ending::closed())),
        }
    }
}

/// Whether a guest has sent something.
pub(super) fn is_output(event: &Event) -> bool {
    event.output_bytes().is_some()
}

/// What a step towards a moment has, or back to the caller with what came of it instead.
macro_rules! had {
    ($step:expr) => {
        match $step.await? {
            Ok(had) => had,
            Err(ending) => return Ok(ending),
        }
    };
}
pub(super) use had;
