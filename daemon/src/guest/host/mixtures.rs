//! Mixtures: draws of a context whose program is given the logits of others, which get the tokens too.
//!
//! The first context of a mixture has the run; all of them are locked while it is pulled.

use std::sync::Arc;

use futures_util::future::try_join_all;
use tokio::sync::{Mutex, OwnedMutexGuard};
use trellis_engine::sampling::Sampler;
use trellis_engine::sampling::program::N_MEMBERS_MAX;
use trellis_engine::{
    Ahead, Answer, Ask, Context, EngineError, Finish, MaskSource, Pending, Pull, RunKey, RunSettings,
};
use wasmtime::component::Resource;

use super::convert::{candidate, check_same_vocabulary, invalid};
use super::types::{GuestContext, HostError, Other};
use crate::guest::bindings::trellis::host::decoding::StepRequest;
use crate::guest::bindings::trellis::host::types::{Candidate, Error as ApiError};
use crate::guest::store::GuestState;

/// A context, and the others of its mixture, for as long as a call takes.
pub(super) struct Members {
    pub(super) first: OwnedMutexGuard<Context>,
    pub(super) others: Vec<OwnedMutexGuard<Context>>,
}

/// One draw of a call. That of a mixture is a run of one token.
struct Draw {
    members: Members,
    key: RunKey,
    settings: RunSettings,
    /// Tokens of the context and of the others before.
    n_before: Vec<usize>,
}

/// The contexts as the engine takes them.
pub(super) fn borrowed(others: &mut [OwnedMutexGuard<Context>]) -> Vec<&mut Context> {
    others.iter_mut().map(|other| &mut **other).collect()
}

/// Why a mixture that is guessed is refused.
pub(super) fn no_guesses() -> HostError {
    invalid("guesses", "some", "none in a mixture")
}

/// That no context is named twice.
pub(super) fn check_apart<'a>(cells: impl Iterator<Item = &'a Arc<Mutex<Context>>>) -> Result<(), HostError> {
    let cells: Vec<_> = cells.map(Arc::as_ptr).collect();
    match cells.iter().enumerate().find(|&(idx, cell)| cells[..idx].contains(cell)) {
        Some((idx, _)) => {
            let value = format!("number {} of the others", idx - 1);
            Err(invalid("context", value, "each context once in a mixture"))
        }
        None => Ok(()),
    }
}

/// That a sampler can draw for a mixture with so many others.
pub(super) fn check_sampler(sampler: &Sampler, n_others: usize) -> Result<(), HostError> {
    match n_others {
        0 => Ok(()),
        _ if n_others > N_MEMBERS_MAX => {
            Err(EngineError::MixtureTooLarge { n_others, n_others_max: N_MEMBERS_MAX }.into())
        }
        _ if sampler.program.is_none() => Err(EngineError::MixtureWithoutProgram.into()),
        _ => Ok(()),
    }
}

impl GuestState {
    /// The contexts of one call, with the others of those that are mixtures; each may stand there once only.
    pub(super) fn lock_members<'a>(
        &self,
        requests: impl Iterator<Item = (&'a Resource<GuestContext>, &'a Vec<Resource<GuestContext>>)> + Clone,
    ) -> Result<Vec<Members>, HostError> {
        let all = requests.clone().flat_map(|(first, others)| std::iter::once(first).chain(others));
        let mut locked = self.lock_contexts(all)?.into_iter();
        let members = |(_, others): (_, &Vec<_>)| {
            let first = locked.next().expect("each was locked");
            Members { first, others: locked.by_ref().take(others.len()).collect() }
        };
        Ok(requests.map(members).collect())
    }

    /// That these contexts can be mixed by this sampler.
    pub(super) fn check_members(
        &self,
        first: &Context,
        others: &[OwnedMutexGuard<Context>],
        sampler: &Sampler,
    ) -> Result<(), HostError> {
        check_sampler(sampler, others.len())?;
        others.iter().try_for_each(|other| check_same_vocabulary(first.model(), other.model()))
    }

    /// The others of a stream's mixture.
    pub(super) fn check_others(
        &self,
        others: &[Resource<GuestContext>],
        first: &Context,
        sampler: &Sampler,
    ) -> Result<Vec<Other>, HostError> {
        check_sampler(sampler, others.len())?;
        others
            .iter()
            .map(|other| {
                let GuestContext { cell, model } = self.table.get(other)?;
                check_same_vocabulary(first.model(), model)?;
                Ok((cell.clone(), model.clone()))
            })
            .collect()
    }

    /// `step`, where some requests are mixtures.
    pub(super) async fn step_mixed(
        &mut self,
        requests: Vec<StepRequest>,
    ) -> Result<Vec<Candidate>, HostError> {
        let locked = self.lock_members(requests.iter().map(|request| (&request.context, &request.others)))?;
        let mut draws = Vec::with_capacity(locked.len());
        for (mut members, request) in locked.into_iter().zip(&requests) {
            let sampler = self.settings_for(&request.sampler, &members.first)?;
            self.check_members(&members.first, &members.others, &sampler)?;
            members.first.keep_to(self.table.get(&request.sampler)?.given.rule());
            let settings = RunSettings {
                sampler,
                stop_tokens: Arc::new([]),
                n_tokens_max: Some(1),
                ahead: Ahead::Unbounded,
                masks: MaskSource::Sampler,
            };
            let contexts = std::iter::once(&members.first).chain(&members.others);
            let n_before = contexts.map(|context| context.tokens().len()).collect();
            draws.push(Draw { members, key: self.next_run_key(), settings, n_before });
        }
        let drawn = draw_all(&mut draws).await;
        if drawn.is_err() {
            for Draw { members, n_before, .. } in &mut draws {
                let contexts = std::iter::once(&mut members.first).chain(&mut members.others);
                for (context, &n_before) in contexts.zip(n_before.iter()) {
                    // What went wrong first is what the guest is told.
                    let _ = context.truncate(n_before).await;
                }
            }
        }
        drawn
    }
}

/// Makes all draws in one batch.
async fn draw_all(draws: &mut [Draw]) -> Result<Vec<Candidate>, HostError> {
    let ask = |settings: &RunSettings| Ask::Sample(settings.sampler.clone());
    for Draw { members: Members { first, others }, settings, .. } in &mut *draws {
        if others.is_empty() {
            first.foresee(&ask(settings))?;
        }
    }
    let mut asked = Vec::with_capacity(draws.len());
    for Draw { members: Members { first, others }, key, settings, .. } in &mut *draws {
        asked.push(match others.is_empty() {
            true => Some(first.ask(ask(settings)).await?),
            false => {
                first.start_mixed(&mut borrowed(others), *key, || settings.clone()).await?;
                None
            }
        });
    }
    // Those over several models ask for their rows here: all of them before the first is waited for.
    try_join_all(draws.iter_mut().zip(asked).map(|(draw, asked)| draw.take(asked))).await
}

impl Draw {
    /// What was drawn, once it is there.
    async fn take(&mut self, asked: Option<Pending>) -> Result<Candidate, HostError> {
        let Self { members: Members { first, others }, key, settings, .. } = self;
        let Some(pending) = asked else {
            let mut others = borrowed(others);
            return match first.pull_mixed(&mut others, *key, || settings.clone()).await? {
                Pull::Token(drawn) => Ok(candidate(drawn.candidate)),
                Pull::Finished(Finish::Complete) => {
                    Err(ApiError::NoToken("the constraint is complete".to_owned()).into())
                }
                Pull::Finished(_) => Err(full(first, &others)),
            };
        };
        let Answer::Sampled(of_one) = pending.answer().await? else {
            unreachable!("it was asked for a token")
        };
        first.append_drawn(std::slice::from_ref(&of_one), &settings.sampler).await?;
        Ok(candidate(of_one.candidate))
    }
}

/// One of these contexts is full.
fn full(first: &Context, others: &[&mut Context]) -> HostError {
    let longest = others.iter().map(|other| other.tokens().len()).fold(first.tokens().len(), usize::max);
    EngineError::ContextFull { n_tokens: longest + 1, n_positions: first.capacity() }.into()
}
