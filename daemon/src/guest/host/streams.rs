//! `streams`: one token at a time. `generate` is in its own file.

use std::sync::Arc;

use trellis_engine::batch::{Drawn, Token};
use trellis_engine::{Ahead, Guess, MaskSource, N_GUESS_MAX, Pull, RunSettings};
use wasmtime::component::Resource;

use super::contexts::lock;
use super::convert::{candidate, check_stop_tokens, check_tokens, finish_reason, guess_tree, invalid};
use super::looks;
use super::mixtures::{borrowed, check_apart, check_sampler, no_guesses};
use super::speculation::{pull_changed, pull_guessed};
use super::types::{GuestContext, GuestSampler, GuestStream, HostError};
use crate::guest::bindings::trellis::host::decoding::{Distribution, Guess as GuestGuess};
use crate::guest::bindings::trellis::host::streams::{
    Completion, FinishReason, GenerateRequest, Host, HostStream, StreamOptions,
};
use crate::guest::bindings::trellis::host::types::Candidate;
use crate::guest::store::GuestState;

impl Host for GuestState {
    async fn generate(&mut self, requests: Vec<GenerateRequest>) -> Result<Vec<Completion>, HostError> {
        self.generate_all(requests).await
    }
}

fn nothing() -> Guess {
    Guess::Chain(Vec::new())
}

impl GuestStream {
    /// Notes what its guest expects next.
    fn expect(&mut self, guess: Guess) -> Result<(), HostError> {
        if !self.others.is_empty() {
            return Err(no_guesses());
        }
        check_tokens(lock(&self.cell).model(), guess.tokens())?;
        self.guess = guess;
        Ok(())
    }
}

impl HostStream for GuestState {
    fn open(
        &mut self,
        context: Resource<GuestContext>,
        sampler: Resource<GuestSampler>,
        options: StreamOptions,
    ) -> Result<Resource<GuestStream>, HostError> {
        let GuestContext { cell, model } = self.table.get(&context)?;
        let (cell, model) = (cell.clone(), model.clone());
        let context = lock(&cell);
        let mut settings = self.settings_for(&sampler, &context)?;
        looks::put_on(&mut settings, context.model(), options.top, options.hidden)?;
        let given = self.table.get(&sampler)?.given.clone();
        check_stop_tokens(context.model(), &options.stop_tokens)?;
        let others = self.check_others(&options.others, &context, &settings)?;
        check_apart(std::iter::once(&cell).chain(others.iter().map(|(other, _)| other)))?;
        if !others.is_empty() && options.speculation.is_some() {
            return Err(no_guesses());
        }
        let speculation = self.speculation(options.speculation, &context)?;
        let hidden_size = context.model().model().config.hidden_size;
        let charge = looks::charge_ahead(&self.owner.account, &settings.looks, hidden_size)?;
        drop(context);
        let key = self.next_run_key();
        let n_tokens_max = options.max_tokens.map(|n| n as usize);
        self.give(GuestStream {
            cell,
            model,
            settings,
            given,
            key,
            key_before: None,
            changed_at: 0,
            n_tokens_max,
            n_given: 0,
            stop_tokens: options.stop_tokens.into(),
            speculation,
            others,
            guess: nothing(),
            seen: None,
            charge,
            finish: (n_tokens_max == Some(0)).then_some(FinishReason::MaxTokens),
        })
    }

    async fn next(&mut self, stream: Resource<GuestStream>) -> Result<Option<Candidate>, HostError> {
        let stream = self.table.get_mut(&stream)?;
        if stream.finish.is_some() {
            return Ok(None);
        }
        let mut context = lock(&stream.cell);
        // A run that starts after an interruption has only what is left.
        let n_left = stream.n_tokens_max.map(|n| n - stream.n_given);
        context.keep_to(stream.given.rule());
        let settings = || RunSettings {
            sampler: stream.settings.clone(),
            stop_tokens: stream.stop_tokens.clone(),
            n_tokens_max: n_left,
            ahead: Ahead::Adaptive,
            masks: MaskSource::Sampler,
        };
        let guess = std::mem::replace(&mut stream.guess, nothing());
        let ahead = stream.key_before.take().map_or_else(Vec::new, |key| context.ahead(key));
        let mut others: Vec<_> = stream.others.iter().map(|(other, _)| lock(other)).collect();
        let pulled = match &mut stream.speculation {
            _ if !others.is_empty() => {
                context.pull_mixed(&mut borrowed(&mut others), stream.key, settings).await?
            }
            _ if !guess.tokens().is_empty() => {
                pull_guessed(&mut context, stream.key, n_left, &settings(), guess).await?
            }
            _ if !ahead.is_empty() => {
                pull_changed(&mut context, stream.key, n_left, &settings(), ahead).await?
            }
            Some(speculation) => speculation.pull(&mut context, stream.key, n_left, settings).await?,
            None => match context.take_verified(stream.key)? {
                Some(drawn) => Pull::Token(drawn),
                None => context.pull(stream.key, settings).await?,
            },
        };
        match pulled {
            Pull::Token(Drawn { candidate: token, seen, .. }) => {
                stream.seen = seen;
                stream.n_given += 1;
                // Decided here and not by the engine alone: whatever happens to the context from now on, the
                // stream has ended.
                if stream.stop_tokens.contains(&token.token) {
                    stream.finish = Some(FinishReason::StopToken(token.token));
                } else if stream.n_tokens_max == Some(stream.n_given) {
                    stream.finish = Some(FinishReason::MaxTokens);
                }
                Ok(Some(candidate(token)))
            }
            Pull::Finished(finish) => {
                stream.finish = Some(finish_reason(finish));
                Ok(None)
            }
        }
    }

    fn top(&mut self, stream: Resource<GuestStream>) -> wasmtime::Result<Option<Distribution>> {
        Ok(looks::top_of(self.table.get(&stream)?.seen.clone()))
    }

    fn hidden(&mut self, stream: Resource<GuestStream>) -> wasmtime::Result<Vec<Vec<f32>>> {
        Ok(self.table.get(&stream)?.seen.as_ref().map_or_else(Vec::new, |seen| seen.hidden.clone()))
    }

    fn set_sampler(
        &mut self,
        stream: Resource<GuestStream>,
        sampler: Resource<GuestSampler>,
    ) -> Result<(), HostError> {
        let GuestStream { cell, others, .. } = self.table.get(&stream)?;
        let mut settings = self.settings_for(&sampler, &lock(cell))?;
        check_sampler(&settings, others.len())?;
        let given = self.table.get(&sampler)?.given.clone();
        let key = self.next_run_key();
        let stream = self.table.get_mut(&stream)?;
        if settings.looks != stream.settings.looks {
            Arc::make_mut(&mut settings).looks = stream.settings.looks.clone();
        }
        // A new key makes the engine forget what it decoded ahead with the old settings. The next token is pulled with that
        // as a guess, but where a guest changes its settings at each token: of several that agree, one would be taken.
        if stream.n_given - stream.changed_at > 1 {
            stream.key_before = Some(stream.key);
        }
        stream.changed_at = stream.n_given;
        (stream.settings, stream.given, stream.key) = (settings, given, key);
        Ok(())
    }

    fn guess(&mut self, stream: Resource<GuestStream>, tokens: Vec<Token>) -> Result<(), HostError> {
        if tokens.len() > N_GUESS_MAX {
            return Err(invalid("tokens", tokens.len(), format!("at most {N_GUESS_MAX}")));
        }
        self.table.get_mut(&stream)?.expect(Guess::Chain(tokens))
    }

    fn guess_tree(
        &mut self,
        stream: Resource<GuestStream>,
        guesses: Vec<GuestGuess>,
    ) -> Result<(), HostError> {
        self.table.get_mut(&stream)?.expect(guess_tree(&guesses)?)
    }

    fn finish(&mut self, stream: Resource<GuestStream>) -> wasmtime::Result<Option<FinishReason>> {
        Ok(self.table.get(&stream)?.finish)
    }

    fn drop(&mut self, stream: Resource<GuestStream>) -> wasmtime::Result<()> {
        self.table.delete(stream)?;
        Ok(())
    }
}
