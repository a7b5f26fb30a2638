//! Beam searches, each a member of its load.

use std::convert::Infallible;

use trellis_engine::BeamSearch;
use trellis_engine::sampling::beams::{BeamSettings, Kept};

use super::load::Beams;
use super::member::Member;
use crate::cli::bench::BenchError;

impl Member {
    /// Searches without end, one search after the other. Nothing ends a hypothesis but its length, so that all beams live
    /// in every step save the first of a search.
    pub(super) async fn search(mut self, load: Beams) -> Result<Infallible, BenchError> {
        let mut context = self.context().await?;
        let settings = BeamSettings::of(load.n_beams, self.n_growth);
        loop {
            let mut search =
                BeamSearch::open(&mut context, settings.clone(), load.sampler.clone(), None).await?;
            match load.prune_nats {
                None => search.go_on(None).await?,
                Some(nats) => self.step_and_prune(&mut search, nats).await?,
            }
        }
    }

    /// Goes on token by token without what is so many nats behind the best.
    async fn step_and_prune(&self, search: &mut BeamSearch, nats: f32) -> Result<(), BenchError> {
        self.seat.marks.pause();
        while !search.is_over() {
            search.go_on(Some(1)).await?;
            self.seat.marks.token();
            let best = search.live().map(|live| live.logprob).fold(f32::NEG_INFINITY, f32::max);
            let near = search.live().enumerate().filter(|(_, live)| live.logprob >= best - nats);
            let kept =
                near.map(|(idx, live)| Kept { from: Some(idx), tokens: Vec::new(), logprob: live.logprob });
            let kept: Vec<Kept> = kept.collect();
            search.keep(&kept)?;
        }
        Ok(())
    }
}
