//! Decoding token by token, ahead of the guest that pulls.

use super::{LateMasks, Mixture};
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
    /// For the run of a mixture.
    pub(crate) mixture: Option<Mixture>,
}

impl RunWork {
    pub(crate) fn new(settings: RunSettings, queue: RunReply) -> Self {
        let masks = match settings.masks {
            MaskSource::Sampler => None,
            MaskSource::Caller => Some(LateMasks::default()),
        };
        let next = settings.sampler.start();
        Self { settings, queue, n_given: 0, next, masks, mixture: None }
    }

    /// The draw after a context's last token, of `n_tokens`, then what is looked at beside it.
    pub(super) fn outputs(&self, n_tokens: usize) -> Requests<'_> {
        let looks = self.settings.sampler.looks.requests(n_tokens - 1);
        std::iter::once(self.draw(n_tokens)).chain(looks).collect()
    }

    fn draw(&self, n_tokens: usize) -> OutputRequest<'_> {
        let sampler = &self.settings.sampler;
        let n_others = self.mixture.as_ref().map_or(0, |mixture| mixture.n_others);
        let kind = match &self.masks {
            None => draw(sampler, Start::At(self.next), n_others),
            Some(masks) => draw_under(sampler, masks.get(n_tokens), Start::At(self.next), n_others),
        };
        OutputRequest { position: n_tokens - 1, kind }
    }
}
