//! `beams`

use trellis_engine::sampling::beams::{BeamSettings, EarlyStopping, Finished, Kept, Live};
use trellis_engine::{BeamSearch, Context};
use wasmtime::component::Resource;

use super::convert::{count, invalid};
use super::types::{Given, GuestBeamSearch, GuestContext, GuestSampler, HostError};
use crate::guest::bindings::trellis::host::beams as wit;
use crate::guest::bindings::trellis::host::beams::{Host, HostBeamSearch};
use crate::guest::store::GuestState;

impl Host for GuestState {}

impl HostBeamSearch for GuestState {
    async fn open(
        &mut self,
        context: Resource<GuestContext>,
        settings: wit::BeamSettings,
        sampler: Option<Resource<GuestSampler>>,
    ) -> Result<Resource<GuestBeamSearch>, HostError> {
        let model = self.table.get(&context)?.model.clone();
        let mut context = self.lock_context(&context)?;
        let (sampler, given) = match &sampler {
            Some(sampler) => {
                let sampler = self.table.get(sampler)?;
                sampler.check_models(&model)?;
                (Some(sampler.settings.clone()), sampler.given.clone())
            }
            None => (None, Given::default()),
        };
        let settings = self::settings(settings);
        let search = BeamSearch::open(&mut context, settings, sampler, given.rule()).await?;
        drop(context);
        self.give(GuestBeamSearch { search, model, given })
    }

    async fn run(&mut self, search: Resource<GuestBeamSearch>) -> Result<(), HostError> {
        Ok(self.table.get_mut(&search)?.search.go_on(None).await?)
    }

    async fn step(
        &mut self,
        search: Resource<GuestBeamSearch>,
    ) -> Result<Vec<wit::LiveHypothesis>, HostError> {
        let search = &mut self.table.get_mut(&search)?.search;
        search.go_on(Some(1)).await?;
        Ok(search.live().map(live).collect())
    }

    fn live(&mut self, search: Resource<GuestBeamSearch>) -> wasmtime::Result<Vec<wit::LiveHypothesis>> {
        Ok(self.table.get(&search)?.search.live().map(live).collect())
    }

    fn tokens(&mut self, search: Resource<GuestBeamSearch>, idx: u32) -> Result<Vec<u32>, HostError> {
        let search = &self.table.get(&search)?.search;
        let n_live = search.live().len();
        search
            .tokens(idx as usize)
            .ok_or_else(|| invalid("idx", idx, format!("less than {n_live}, which live")))
    }

    fn keep(
        &mut self,
        search: Resource<GuestBeamSearch>,
        hypotheses: Vec<wit::KeptHypothesis>,
    ) -> Result<(), HostError> {
        let kept: Vec<Kept> = hypotheses.into_iter().map(kept).collect();
        Ok(self.table.get_mut(&search)?.search.keep(&kept)?)
    }

    fn settled(&mut self, search: Resource<GuestBeamSearch>) -> wasmtime::Result<Vec<u32>> {
        Ok(self.table.get(&search)?.search.settled())
    }

    fn best(
        &mut self,
        search: Resource<GuestBeamSearch>,
        n: u32,
    ) -> wasmtime::Result<Vec<wit::FinishedHypothesis>> {
        Ok(self.table.get(&search)?.search.best(n as usize).into_iter().map(finished).collect())
    }

    async fn take(
        &mut self,
        search: Resource<GuestBeamSearch>,
        idx: u32,
    ) -> Result<Resource<GuestContext>, HostError> {
        let GuestBeamSearch { search, model, .. } = self.table.get_mut(&search)?;
        let model = model.clone();
        let mut best = search.best(idx as usize + 1);
        let n_finished = best.len();
        let Some(taken) = best.pop().filter(|_| n_finished > idx as usize) else {
            return Err(invalid("idx", idx, format!("less than {n_finished}, which are finished")));
        };
        let context: Context = search.context(&taken.tokens).await?;
        self.give(GuestContext::new(context, model))
    }

    fn drop(&mut self, search: Resource<GuestBeamSearch>) -> wasmtime::Result<()> {
        self.table.delete(search)?;
        Ok(())
    }
}

fn settings(settings: wit::BeamSettings) -> BeamSettings {
    BeamSettings {
        n_beams: settings.n_beams as usize,
        n_groups: settings.n_groups as usize,
        diversity_penalty: settings.diversity_penalty,
        length_penalty: settings.length_penalty.into(),
        early_stopping: match settings.early_stopping {
            wit::EarlyStopping::Heuristic => EarlyStopping::Heuristic,
            wit::EarlyStopping::AtOnce => EarlyStopping::AtOnce,
            wit::EarlyStopping::Never => EarlyStopping::Never,
        },
        n_tokens_max: settings.max_tokens as usize,
        stop_tokens: settings.stop_tokens,
    }
}

fn live(live: Live) -> wit::LiveHypothesis {
    wit::LiveHypothesis {
        parent: live.parent_idx.map(count),
        token: live.token,
        n_tokens: count(live.n_tokens),
        logprob: live.logprob,
        group: count(live.group_idx),
    }
}

fn kept(kept: wit::KeptHypothesis) -> Kept {
    let wit::KeptHypothesis { continues, tokens, logprob } = kept;
    Kept { from: continues.map(|idx| idx as usize), tokens, logprob }
}

fn finished(Finished { tokens, score }: Finished) -> wit::FinishedHypothesis {
    wit::FinishedHypothesis { tokens, score }
}
