//! Decoding token by token, ahead of the guest that pulls.

use super::{LateMasks, Mixture};
use super::{draw, draw_under};
use crate::batch::{Others, OutputRequest, Requests, Start};
use crate::command::{MaskSource, RunSettings};
use crate::run::RunReply;
use crate::sampling::program::DrawState;

#[derive(Debug)]
pub(crate) struct RunWork {
    pub(crate) settings: RunSettings,
    pub(crate) queue: RunReply,
    pub(crate) n_given: usize,
    /// Tokens at the end of the context that are expected to be drawn, while a row is under way that draws at their places.
    pub(crate) n_expected: usize,
    /// Where the next draw of a program starts.
    pub(crate) next: DrawState,
    /// For a run whose masks come from its caller.
    pub(crate) masks: Option<LateMasks>,
    /// For the run of a mixture.
    pub(crate) mixture: Option<Mixture>,
}

impl RunWork {
    /// The run of a context of `n_tokens` tokens.
    pub(crate) fn new(settings: RunSettings, queue: RunReply, n_tokens: usize) -> Self {
        let masks = match settings.masks {
            MaskSource::Sampler => None,
            MaskSource::Caller => Some(LateMasks::new(n_tokens)),
        };
        let next = settings.sampler.start();
        Self { settings, queue, n_given: 0, n_expected: 0, next, masks, mixture: None }
    }

    /// Draws of its next row.
    pub(crate) fn n_draws(&self) -> usize {
        1 + self.n_expected
    }

    /// The draw after a context's last token, of `n_tokens`, and after each before those that are expected; then what is
    /// looked at beside them.
    pub(super) fn outputs(&self, n_tokens: usize) -> Requests<'_> {
        let places = n_tokens - self.n_expected..n_tokens + 1;
        let looks = places.clone().flat_map(|place| self.settings.sampler.looks.requests(place - 1));
        let first = places.start;
        places.map(|place| self.draw(place, place == first)).chain(looks).collect()
    }

    /// The draw of the token at a place.
    fn draw(&self, place: usize, is_first: bool) -> OutputRequest<'_> {
        let sampler = &self.settings.sampler;
        let others = Others::Rows(self.mixture.as_ref().map_or(0, |mixture| mixture.n_others));
        let start = if is_first { Start::At(self.next) } else { Start::Before };
        let kind = match &self.masks {
            None => draw(sampler, start, others),
            Some(masks) => {
                let mask = if is_first { masks.get(place) } else { masks.get_expected(place) };
                draw_under(sampler, mask, start, others)
            }
        };
        OutputRequest { position: place - 1, kind }
    }
}
