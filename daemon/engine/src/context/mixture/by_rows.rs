//! Mixtures of contexts of several models.
//!
//! The steps of two models are not one. On one device the rows of the others stay there, each written in a step of its own
//! model, and the first one's draw reads them in a step behind those. Where models are on several devices, or there is no
//! room for rows, each context is asked for its whole row, all of them at once, and the draw is made of the rows on the
//! threads that work out masks. Nothing is decoded ahead.

use std::sync::Arc;

use tokio::sync::oneshot;

use super::super::{Context, Pull};
use crate::account::{BudgetExceeded, HostCharge, Resource};
use crate::batch::{Drawn, OutputFault, Seen, Top};
use crate::command::{Answer, Ask, N_ENTRIES_PER_TOKEN, Pooling, RunSettings};
use crate::error::EngineError;
use crate::guess::Guess;
use crate::kept::RowHold;
use crate::run::Finish;
use crate::sampling::program::DrawPlace;
use crate::sampling::{Before, Distribution, Looks, Purpose, Sampler, Scratch, sample_by_program};

impl Context {
    /// As [`Self::pull_mixed`] for one token, where the others are of other models.
    pub(super) async fn pull_by_rows(
        &mut self,
        others: &mut [&mut Self],
        settings: RunSettings,
    ) -> Result<Pull, EngineError> {
        let mut sampler = settings.sampler;
        self.check_mixture(others, &sampler)?;
        sampler.validate(self.model.limits().vocab_size)?;
        self.model.check_layers(&sampler.looks.hidden)?;
        if settings.n_tokens_max == Some(0) {
            return Ok(Pull::Finished(Finish::MaxTokens));
        }
        if self.n_free() == 0 || others.iter().any(|other| other.n_free() == 0) {
            return Ok(Pull::Finished(Finish::ContextFull));
        }
        if self.up_to_completion(Guess::NOTHING).await?.is_none() {
            return Ok(Pull::Finished(Finish::Complete));
        }
        self.states.carry_on(&mut sampler);
        let Ask::Sample(sampler) = self.constrained(Ask::Sample(sampler)).await? else {
            unreachable!("a draw under a constraint is a draw")
        };
        let drawn = match self.draw_on_device(others, &sampler).await? {
            Some(drawn) => drawn,
            None => self.draw_on_host(others, &sampler).await?,
        };
        // What a program leaves is the first one's.
        let chain = Arc::new(Sampler::greedy());
        let samplers: Vec<Arc<Sampler>> =
            std::iter::once(sampler).chain(others.iter().map(|_| chain.clone())).collect();
        let of_others = vec![Drawn::from(drawn.candidate)];
        let tokens: Vec<Vec<Drawn>> =
            std::iter::once(vec![drawn.clone()]).chain(others.iter().map(|_| of_others.clone())).collect();
        let mut all: Vec<&mut Self> =
            std::iter::once(self).chain(others.iter_mut().map(|other| &mut **other)).collect();
        Self::append_drawn_to_all(&mut all, &tokens, &samplers).await?;
        Ok(Pull::Token(drawn))
    }

    /// Draws from rows that stay on the device; nothing where it has no room for them, or some are on another.
    async fn draw_on_device(
        &mut self,
        others: &mut [&mut Self],
        sampler: &Arc<Sampler>,
    ) -> Result<Option<Drawn>, EngineError> {
        if others.iter().any(|other| !Arc::ptr_eq(&other.caller, &self.caller)) {
            return Ok(None);
        }
        let _charge = self.charge_rows(others.len())?;
        // Let go of after the questions that write and read them.
        let mut holds = Vec::with_capacity(others.len());
        let mut asked = Vec::with_capacity(others.len());
        for other in &mut *others {
            let pending = other.ask(Ask::Keep).await?;
            holds.push(RowHold::new(pending.row_name(), self.model.clone()));
            asked.push(pending);
        }
        let rows = holds.iter().map(RowHold::name).collect();
        let drawn = self.ask(Ask::Mix { sampler: sampler.clone(), rows }).await?;
        for pending in asked {
            match pending.answer().await? {
                Answer::Kept => {}
                Answer::NotKept => return Ok(None),
                other => unreachable!("asked to keep a row, answered with {other:?}"),
            }
        }
        match drawn.answer().await? {
            Answer::Sampled(drawn) => Ok(Some(drawn)),
            Answer::NotKept => Ok(None),
            other => unreachable!("asked for a draw, answered with {other:?}"),
        }
    }

    /// Draws from whole rows that leave their devices.
    async fn draw_on_host(
        &mut self,
        others: &mut [&mut Self],
        sampler: &Arc<Sampler>,
    ) -> Result<Drawn, EngineError> {
        let n_rows = 1 + others.len();
        let _charge = self.charge_rows(n_rows)?;
        let n_tokens = n_rows * self.model.limits().vocab_size.div_ceil(N_ENTRIES_PER_TOKEN);
        self.caller.owner().account.charge(Resource::Tokens, n_tokens as u64)?;
        let mut asked = vec![self.ask(Ask::Logits).await?];
        for other in &mut *others {
            asked.push(other.ask(Ask::Logits).await?);
        }
        let mut rows = Vec::with_capacity(asked.len());
        for pending in asked {
            match pending.answer().await? {
                Answer::Full(row) => rows.push(row),
                other => unreachable!("asked for a row, answered with {other:?}"),
            }
        }
        let mut drawn = self.draw_from(rows, sampler.clone()).await?;
        if let Some(seen) = &mut drawn.seen
            && !sampler.looks.hidden.is_empty()
        {
            seen.hidden = self.look_at_hidden(sampler.looks.hidden.clone()).await?;
        }
        Ok(drawn)
    }

    /// Charges the memory of so many whole rows, until what is returned is dropped.
    fn charge_rows(&self, n_rows: usize) -> Result<HostCharge, BudgetExceeded> {
        let n_bytes = n_rows * self.model.limits().vocab_size * size_of::<f32>();
        HostCharge::new(&self.caller.owner().account, n_bytes as u64)
    }

    /// The hidden states of the last token after so many layers each.
    async fn look_at_hidden(&mut self, n_layers: Vec<usize>) -> Result<Vec<Vec<f32>>, EngineError> {
        let ask = Ask::Hidden { n_layers, pooling: Pooling::Last };
        match self.ask(ask).await?.answer().await? {
            Answer::Hidden(states) => Ok(states),
            other => unreachable!("asked for hidden states, answered with {other:?}"),
        }
    }

    /// A draw of the sampler's program after this context, from these rows, of which the first is its own.
    async fn draw_from(&self, rows: Vec<Vec<f32>>, sampler: Arc<Sampler>) -> Result<Drawn, EngineError> {
        let sampler = match self.model.operator() {
            Some(operator) => operator.before(&sampler, Purpose::Draws { n_members: rows.len() - 1 }),
            None => sampler,
        };
        let n_tokens = self.tokens.len();
        let history = self.tokens().copy_of(n_tokens - sampler.n_history(n_tokens)..n_tokens);
        let before = Before { n_tokens, n_evicted: self.evictions.n_evicted() };
        let (to, drawn) = oneshot::channel();
        self.model.masks().run(self.caller.owner(), move || {
            // The receiver may be gone.
            if to.is_closed() {
                return;
            }
            let members: Vec<&[f32]> = rows[1..].iter().map(Vec::as_slice).collect();
            let within = sampler.program.as_ref().and_then(|put_on| put_on.within.as_deref());
            let (seed, start) = (sampler.seed, sampler.start());
            let draw = DrawPlace { members: &members, before, seed, start, within };
            let drawn = sample_by_program(&rows[0], &history, &sampler, draw, &mut Scratch::default());
            let drawn = drawn.and_then(|(candidate, left)| {
                let seen = seen(&rows[0], &sampler.looks)?;
                Ok(Drawn { candidate, left: Some(Box::new(left)), seen })
            });
            let _ = to.send(drawn);
        });
        Ok(drawn.await.map_err(|_| EngineError::Stopped)??)
    }
}

/// What a row of logits says of what is looked at, if anything is.
fn seen(logits: &[f32], looks: &Looks) -> Result<Option<Box<Seen>>, OutputFault> {
    if looks.n_asked() == 0 {
        return Ok(None);
    }
    let distribution = Distribution::new(logits)?;
    let top = (looks.n_top > 0)
        .then(|| Top { candidates: distribution.top(looks.n_top), entropy: distribution.entropy() });
    Ok(Some(Box::new(Seen { top, hidden: Vec::new() })))
}
