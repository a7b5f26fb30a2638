//! Decoding token by token, ahead of the guest that pulls.

use crate::command::RunSettings;
use crate::run::RunReply;

#[derive(Debug)]
pub(crate) struct RunWork {
    pub(crate) settings: RunSettings,
    pub(crate) queue: RunReply,
    pub(crate) n_given: usize,
}
