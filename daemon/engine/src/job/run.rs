//! Decoding token by token, ahead of the guest that pulls.

use super::LateMasks;
use super::{draw, draw_under};
use crate::batch::{OutputRequest, Requests, Start};
use crate::command::{MaskSource, RunSettings};
use crate::run::RunReply;
use crate::sampling::program::DrawState;

#[derive(Debug)]
pub(crate) struct RunWork {
    pub(crate) settings: RunSettings,
    pub(crate) queue: RunReply,
    pub(crate) n_given: usize,
    /// Where the next draw of a program starts.
    pub(crate) next: DrawState,
    /// For a run whose masks come from its caller.
    pub(crate) masks: Option<LateMasks>,
}

impl RunWork {
    pub(crate) fn new(settings: RunSettings, queue: RunReply) -> Self {
        let masks = match settings.masks {
            MaskSource::Sampler => None,
            MaskSource::Caller => Some(LateMasks::default()),
        };
        let next = settings.sampler.start();
        Self { settings, queue, n_given: 0, next, masks }
    }

    /// The draw after a context's last token, of `n_tokens`, then what is looked at beside it.
    pub(super) fn outputs(&self, n_tokens: usize) -> Requests<'_> {
        let looks = self.settings.sampler.looks.requests(n_tokens - 1);
        std::iter::once(self.draw(n_tokens)).chain(looks).collect()
    }

    fn draw(&self, n_tokens: usize) -> OutputRequest<'_> {
        let sampler = &self.settings.sampler;
        let kind = match &self.masks {
            None => draw(sampler, Start::At(self.next)),
            Some(masks) => draw_under(sampler, masks.get(n_tokens), Start::At(self.next)),
        };
        OutputRequest { position: n_tokens - 1, kind }
    }
}
