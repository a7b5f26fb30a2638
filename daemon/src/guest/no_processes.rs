//! Processes of guests where the system has nothing to confine them with.

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use trellis_engine::account::{ActorId, GuestId};

use super::error::GuestError;
use super::io::GuestIo;
use super::limits::GuestLimits;
use super::pool::{GuestInfo, Launch, RunningGuest};
use crate::models::Models;

/// There are none.
#[derive(Debug)]
pub(crate) struct GuestProcesses(Infallible);

impl GuestProcesses {
    pub(crate) fn new(_: PathBuf, _: Arc<GuestLimits>, _: Models) -> Result<Arc<Self>, GuestError> {
        Self::try_out(Path::new("")).map(|never| match never {})
    }

    /// How far processes are confined.
    ///
    /// # Errors
    /// They are not.
    pub(crate) fn try_out(_: &Path) -> Result<Infallible, GuestError> {
        Err(GuestError::NotConfined { reason: "that needs Linux".to_owned() })
    }

    pub(crate) fn file_rules(&self) -> Option<&'static str> {
        match self.0 {}
    }

    pub(crate) fn start(
        self: &Arc<Self>,
        _: GuestId,
        _: Launch,
        _: GuestIo,
    ) -> Result<RunningGuest, GuestError> {
        match self.0 {}
    }

    pub(crate) fn guests(&self) -> Vec<GuestInfo> {
        match self.0 {}
    }

    pub(crate) fn n_guests(&self, _: ActorId) -> (u64, u64) {
        match self.0 {}
    }

    pub(crate) fn pid_of(&self, _: ActorId) -> Option<u32> {
        match self.0 {}
    }

    pub(crate) fn drain(&self, _: Instant) {
        match self.0 {}
    }

    pub(crate) fn end(&self) {
        match self.0 {}
    }

    pub(crate) fn stop(&self, _: GuestId, _: Option<ActorId>) -> bool {
        match self.0 {}
    }
}
