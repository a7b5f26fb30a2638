//! Decoding token by token, ahead of the guest that pulls.

use super::LateMasks;
use crate::batch::{OutputKind, OutputRequest};
use crate::command::{MaskSource, RunSettings};
use crate::run::RunReply;

#[derive(Debug)]
pub(crate) struct RunWork {
    pub(crate) settings: RunSettings,
    pub(crate) queue: RunReply,
    pub(crate) n_given: usize,
    /// For a run whose masks come from its caller.
    pub(crate) masks: Option<LateMasks>,
}

impl RunWork {
    pub(crate) fn new(settings: RunSettings, queue: RunReply) -> Self {
        let masks = match settings.masks {
            MaskSource::Sampler => None,
            MaskSource::Caller => Some(LateMasks::default()),
        };
        Self { settings, queue, n_given: 0, masks }
    }

    /// The draw after a context's last token, of `n_tokens`.
    pub(super) fn draw(&self, n_tokens: usize) -> OutputRequest<'_> {
        let sampler = &self.settings.sampler;
        let kind = match &self.masks {
            None => OutputKind::Sample(sampler),
            Some(masks) => OutputKind::Masked { sampler, mask: masks.get(n_tokens) },
        };
        OutputRequest { position: n_tokens - 1, kind }
    }
}
