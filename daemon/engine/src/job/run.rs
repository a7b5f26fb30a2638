//! Decoding token by token, ahead of the guest that pulls.

use crate::command::RunSettings;
use crate::run::RunSender;

#[derive(Debug)]
pub(crate) struct RunWork {
    pub(crate) settings: RunSettings,
    pub(crate) queue: RunSender,
    pub(crate) n_given: usize,
}
