//! What each member of a load does, at the engine's own interface.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use tokio::sync::{mpsc, watch};
use trellis_engine::account::Owner;
use trellis_engine::batch::Token;
use trellis_engine::constraint::{Begins, Constraint, ConstraintLimits, Grammar, Rule, Whitespace};
use trellis_engine::sampling::Sampler;
use trellis_engine::{
    Ahead, Answer, Ask, Context, Finish, Guess, MaskSource, ModelHandle, Pull, RunKey, RunSettings,
};

use super::load::{Runs, Speculation, Streams};
use super::programs;
use super::tally::Marks;
use crate::cli::bench::{BenchError, engine};

/// Prompts that must not be found in the prefix cache are numbered from here on.
const FRESH_RUN: usize = 1 << 32;

/// Those of contexts that guide others, by their places.
const OTHER_RUN: usize = 1 << 24;

/// A member's place in its phase.
#[derive(Clone, Debug)]
pub(super) struct Seat {
    pub(super) marks: Arc<Marks>,
    pub(super) ready: mpsc::UnboundedSender<()>,
    pub(super) go: watch::Receiver<bool>,
}

impl Seat {
    /// Everything before the first token is done. Returns when that is true of all members.
    pub(super) async fn wait_for_all(&mut self) {
        // A phase that ends meanwhile takes its members with it.
        let _ = self.ready.send(());
        let _ = self.go.wait_for(|go| *go).await;
    }
}

/// One context of the engine.
#[derive(Clone, Debug)]
pub(super) struct Member {
    pub(super) model: ModelHandle,
    pub(super) owner: Owner,
    pub(super) seat: Seat,
    /// Tells its tokens apart from those of all others.
    pub(super) run: usize,
    /// Its number in its load.
    pub(super) idx: usize,
    pub(super) n_prompt: usize,
    /// Tokens past the prompt before it goes back there.
    pub(super) n_growth: usize,
}

impl Member {
    fn prompt(&self) -> Vec<Token> {
        engine::unseen(&self.model, self.n_prompt, self.run)
    }

    /// A context that has its prompt and has computed it.
    pub(super) async fn context(&mut self) -> Result<Context, BenchError> {
        let mut context = Context::create(&self.model, self.owner.clone()).await?;
        context.append(&self.prompt()).await?;
        context.ask(Ask::Prefill).await?.answer().await?;
        self.seat.wait_for_all().await;
        Ok(context)
    }

    /// Goes back to the prompt where the context has grown enough. Returns how many tokens there is room for.
    async fn room(&self, context: &mut Context) -> Result<usize, BenchError> {
        let n_used = context.tokens().len() - self.n_prompt;
        if n_used < self.n_growth {
            return Ok(self.n_growth - n_used);
        }
        context.truncate(self.n_prompt).await?;
        self.seat.marks.pause();
        Ok(self.n_growth)
    }

    /// Decodes without end, run after run.
    pub(super) async fn stream(
        mut self,
        load: Streams,
        second: Option<ModelHandle>,
    ) -> Result<Infallible, BenchError> {
        let mut others = Vec::with_capacity(load.n_others);
        for idx in 0..load.n_others {
            others.push(self.other(second.as_ref().unwrap_or(&self.model), idx).await?);
        }
        let sampler = match load.draws_by() {
            Some(program) => programs::sampler(program, load.sampler.seed, &self.model)
                .expect("each program was tried on the models before"),
            None => load.sampler.clone(),
        };
        let mut context = self.context().await?;
        if let Some(schema) = &load.schema {
            let grammar = Grammar::JsonSchema { schema: schema.clone(), whitespace: Whitespace::Compact };
            let account = &self.owner.account;
            let constraint =
                Constraint::compile(&grammar, &self.model, ConstraintLimits::default(), account)?;
            context.keep_to(Some(&Arc::new(Rule::new(Arc::new(constraint), Begins::FirstDraw))));
        }
        let mut key = RunKey(0);
        loop {
            let n_left = self.room(&mut context).await?;
            for other in &mut others {
                other.truncate(context.tokens().len()).await?;
            }
            let n_run = match load.runs {
                Runs::Endless => n_left,
                Runs::Staggered(n_tokens) if key.0 == 0 => 1 + self.idx % n_tokens,
                Runs::Even(n_tokens) | Runs::Staggered(n_tokens) => n_tokens,
            };
            let settings = || RunSettings {
                sampler: sampler.clone(),
                stop_tokens: [].into(),
                n_tokens_max: Some(n_run.min(n_left)),
                ahead: load.ahead,
                masks: MaskSource::Sampler,
            };
            let mut members: Vec<&mut Context> = others.iter_mut().collect();
            let finish = loop {
                let pulled = match members.is_empty() {
                    true => context.pull(key, settings).await?,
                    false => context.pull_mixed(&mut members, key, settings).await?,
                };
                match pulled {
                    Pull::Token(_) => self.seat.marks.token(),
                    Pull::Finished(finish) => break finish,
                }
            };
            key.0 += 1;
            if finish == Finish::Complete {
                context.truncate(self.n_prompt).await?;
                self.seat.marks.pause();
            }
        }
    }

    /// A context that guides this one, with a prompt of its own.
    async fn other(&self, model: &ModelHandle, idx: usize) -> Result<Context, BenchError> {
        let mut other = Context::create(model, self.owner.clone()).await?;
        let run = self.run + (idx + 1) * OTHER_RUN;
        other.append(&engine::unseen(model, self.n_prompt, run)).await?;
        other.ask(Ask::Prefill).await?.answer().await?;
        Ok(other)
    }

    /// Looks at the most probable tokens, appends the best, and again.
    pub(super) async fn step(mut self, n_top: usize) -> Result<Infallible, BenchError> {
        let mut context = self.context().await?;
        loop {
            self.room(&mut context).await?;
            let answer = context.ask(Ask::Top { n: n_top }).await?.answer().await?;
            let Answer::Top { candidates, .. } = answer else {
                unreachable!("a question for the most probable tokens is answered with them")
            };
            context.append(&[candidates[0].token]).await?;
            self.seat.marks.token();
        }
    }

    /// Guesses what it drew the first time.
    pub(super) async fn speculate(mut self, load: Speculation) -> Result<Infallible, BenchError> {
        let drawn = self.drawn(&load.sampler).await?;
        let mut context = self.context().await?;
        loop {
            let n_left = self.room(&mut context).await?;
            let n_done = self.n_growth - n_left;
            let guess = drawn[n_done..].iter().take(load.n_guesses.min(n_left - 1));
            let guess = (n_done..).zip(guess).map(|(place, &token)| self.guess(place, token, load.right));
            let guess = Guess::Chain(guess.collect());
            let answer =
                context.ask(Ask::Verify { sampler: load.sampler.clone(), guess }).await?.answer().await?;
            let Answer::Verified(candidates) = answer else {
                unreachable!("a verification is answered with what was drawn")
            };
            let tokens: Vec<Token> = candidates.iter().map(|drawn| drawn.candidate.token).collect();
            context.append(&tokens).await?;
            tokens.iter().for_each(|_| self.seat.marks.token());
        }
    }

    /// What is drawn after the prompt.
    async fn drawn(&self, sampler: &Arc<Sampler>) -> Result<Vec<Token>, BenchError> {
        let mut context = Context::create(&self.model, self.owner.clone()).await?;
        context.append(&self.prompt()).await?;
        let settings = || RunSettings {
            sampler: sampler.clone(),
            stop_tokens: [].into(),
            n_tokens_max: Some(self.n_growth),
            ahead: Ahead::Unbounded,
            masks: MaskSource::Sampler,
        };
        let mut tokens = Vec::with_capacity(self.n_growth);
        while let Pull::Token(drawn) = context.pull(RunKey(0), settings).await? {
            tokens.push(drawn.candidate.token);
        }
        Ok(tokens)
    }

    /// The token that is right at a place, or another.
    fn guess(&self, place: usize, token: Token, right: f64) -> Token {
        // A fraction that looks random and is the same each time.
        let mixed = ((self.run << 20 | place) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mixed = (mixed ^ mixed >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93);
        let fraction = (mixed >> 40) as f64 / f64::from(1 << 24);
        let vocab_size = self.model.limits().vocab_size as Token;
        if fraction < right { token } else { (token + 1) % vocab_size }
    }

    /// Sends one prompt after the other, up to the token that follows it.
    pub(super) async fn prompts(mut self, n_sent: Arc<AtomicUsize>) -> Result<Infallible, BenchError> {
        let sampler = Arc::new(Sampler::greedy());
        self.seat.wait_for_all().await;
        loop {
            let run = FRESH_RUN + n_sent.fetch_add(1, Ordering::Relaxed);
            let mut context = Context::create(&self.model, self.owner.clone()).await?;
            context.append(&engine::unseen(&self.model, self.n_prompt, run)).await?;
            let begun = Instant::now();
            context.ask(Ask::Sample(sampler.clone())).await?.answer().await?;
            self.seat.marks.done_since(begun);
        }
    }
}
