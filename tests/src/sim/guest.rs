//! A guest: carries a script out on real contexts, and holds every answer against what the script says.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;

use trellis::guest::{GuestIo, GuestOutput};
use trellis_engine::account::{Owner, Resource};
use trellis_engine::batch::{Drawn, Token};
use trellis_engine::sampling::Sampler;
use trellis_engine::{
    Ahead, Answer, Ask, Context, EngineError, Guess, MaskSource, ModelHandle, Pull, RunKey, RunSettings,
};
use trellis_wire::{ErrorBody, ErrorCode};

use super::draws::Draws;
use super::mutation::Mutation;
use super::notes::{Fault, Notes};
use super::script::{Op, Script, bits, saved_name, saved_tokens};

/// How often something is asked again whose step failed. A model whose steps go on failing ends before.
const N_TRIES: usize = 200;

/// Why a guest ends before its script does.
#[derive(Debug)]
enum Ended {
    Engine(EngineError),
    /// Its client is gone.
    Alone,
    /// It was given something wrong, which is noted.
    Deceived,
}

impl From<EngineError> for Ended {
    fn from(error: EngineError) -> Self {
        Self::Engine(error)
    }
}

/// A guest that runs.
pub(super) struct Guest {
    pub(super) number: u64,
    pub(super) script: Script,
    pub(super) model: ModelHandle,
    pub(super) owner: Owner,
    pub(super) io: GuestIo,
    pub(super) draws: Draws,
    pub(super) notes: Arc<Notes>,
    pub(super) contexts: Vec<Option<Context>>,
}

impl Guest {
    /// Lives.
    ///
    /// # Errors
    /// What its client is told.
    pub(super) async fn run(mut self) -> Result<(), ErrorBody> {
        let script = self.script.clone();
        for (idx, op) in script.ops.iter().enumerate() {
            self.notes.event(format_args!("guest {}: {op:?}", self.number));
            if let Err(ended) = self.carry_out(idx, op).await {
                self.notes.event(format_args!("guest {} ends: {ended:?}", self.number));
                return Err(self.told(&ended));
            }
            self.check(idx);
        }
        if self.notes.makes(Mutation::LeakedContext) && self.draws.happens(100) {
            std::mem::forget(self.contexts.pop());
        }
        Ok(())
    }

    fn told(&self, ended: &Ended) -> ErrorBody {
        let code = match ended {
            Ended::Engine(EngineError::Budget(_)) => {
                self.notes.fault(Fault::Budget);
                ErrorCode::BudgetExceeded
            }
            Ended::Engine(EngineError::Unloaded) => ErrorCode::ModelUnloaded,
            Ended::Engine(EngineError::Failed(_)) if self.model.device_failure().is_some() => {
                ErrorCode::DeviceFailed
            }
            Ended::Engine(EngineError::Failed(_)) => ErrorCode::EngineFailed,
            Ended::Engine(_) | Ended::Deceived => ErrorCode::GuestFailed,
            Ended::Alone => ErrorCode::Cancelled,
        };
        ErrorBody::new(code, format!("{ended:?}"))
    }

    /// Whether the contexts have the tokens of the script, and budgets hold.
    fn check(&self, idx: usize) {
        for (at, (context, tokens)) in self.contexts.iter().zip(&self.script.lengths[idx]).enumerate() {
            let found = context.as_ref().map(|context| context.tokens().to_vec());
            self.notes.expect(found == *tokens, || {
                format!("guest {}: context {at} has {found:?} after op {idx}, not {tokens:?}", self.number)
            });
        }
        let mut account = Some(&self.owner.account);
        while let Some(one) = account {
            for resource in [Resource::Contexts, Resource::HostBytes] {
                let (used, limit) = (one.used(resource), one.limit(resource));
                self.notes.expect(used <= limit, || format!("{used} of {limit} {}", resource.name()));
            }
            account = one.parent();
        }
    }

    fn context(&mut self, at: usize) -> &mut Context {
        self.contexts[at].as_mut().expect("scripts use contexts that are open")
    }

    async fn create(&mut self, tokens: &[Token]) -> Result<Context, Ended> {
        let mut context = Context::create(&self.model, self.owner.clone()).await?;
        context.append(tokens).await?;
        Ok(context)
    }

    /// Asks until there is an answer.
    async fn answer(&mut self, at: usize, ask: Ask) -> Result<Answer, Ended> {
        let mut n_tries = 0;
        loop {
            let asked = self.context(at).ask(ask.clone()).await?;
            match asked.answer().await {
                Err(EngineError::Step(_)) if n_tries < N_TRIES => n_tries += 1,
                answer => return Ok(answer?),
            }
        }
    }

    /// Sends the output of an op, which is the one of this number.
    async fn send(&mut self, idx: usize, n: usize, output: Vec<u32>) -> Result<(), Ended> {
        if self.script.outputs[idx].get(n) != Some(&output) {
            self.notes.violation(format!(
                "guest {}: op {idx}, {:?}, gave {output:?} as its output {n} of {:?}",
                self.number, self.script.ops[idx], self.script.outputs[idx]
            ));
            return Err(Ended::Deceived);
        }
        let n_times = 1 + usize::from(self.notes.makes(Mutation::DoubledOutput) && self.draws.happens(10));
        for _ in 0..n_times {
            let output = match self.script.ops[idx] {
                Op::Text { .. } | Op::Receive => {
                    GuestOutput::Text(output.iter().map(|&byte| char::from(byte as u8)).collect())
                }
                _ => GuestOutput::Tokens(output.clone()),
            };
            self.io.output.send(output).await.map_err(|_| Ended::Alone)?;
        }
        Ok(())
    }

    async fn carry_out(&mut self, idx: usize, op: &Op) -> Result<(), Ended> {
        match op {
            Op::Create { tokens } => {
                let context = self.create(tokens).await?;
                self.contexts.push(Some(context));
            }
            Op::Append { at, tokens } => self.context(*at).append(tokens).await?,
            Op::Fork { at } => {
                let fork = self.context(*at).fork().await?;
                self.contexts.push(Some(fork));
            }
            Op::Truncate { at, n_kept } => self.context(*at).truncate(*n_kept).await?,
            Op::Close { at } => self.contexts[*at] = None,
            Op::Prefill { at } => {
                self.answer(*at, Ask::Prefill).await?;
            }
            Op::Sample { ats, seed } => self.sample(idx, ats, *seed).await?,
            Op::Pull { at, seed, n, is_bounded, ahead_of_all } => {
                let settings = Pulling { seed: *seed, n: *n, is_bounded: *is_bounded, of_all: *ahead_of_all };
                self.pull(idx, *at, settings).await?;
            }
            Op::Scores { at, tokens } => match self.answer(*at, Ask::Scores(tokens.clone())).await? {
                Answer::Scores(scores) => self.send(idx, 0, bits(scores)).await?,
                other => self.wrong(idx, &other)?,
            },
            Op::Continuation { at, tokens } => {
                match self.answer(*at, Ask::Continuation(tokens.clone())).await? {
                    Answer::Scores(scores) => self.send(idx, 0, bits(scores)).await?,
                    other => self.wrong(idx, &other)?,
                }
            }
            Op::Top { at, n } => match self.answer(*at, Ask::Top { n: *n }).await? {
                Answer::Top { candidates, .. } => {
                    let tokens = candidates.iter().map(|candidate| candidate.token).collect();
                    self.send(idx, 0, tokens).await?;
                }
                other => self.wrong(idx, &other)?,
            },
            Op::Verify { at, seed, guess } => {
                let sampler = sampler(*seed);
                let ask = Ask::Verify { sampler: sampler.clone(), guess: Guess::Chain(guess.clone()) };
                match self.answer(*at, ask).await? {
                    Answer::Verified(drawn) => {
                        self.context(*at).append_drawn(&drawn, &sampler).await?;
                        let mut tokens: Vec<Token> =
                            drawn.iter().map(|drawn| drawn.candidate.token).collect();
                        // Of guesses, as many are verified as there is room for: the rest comes one by one.
                        while tokens.len() < self.script.outputs[idx][0].len() {
                            tokens.push(self.draw(idx, *at, &sampler).await?);
                        }
                        self.send(idx, 0, tokens).await?;
                    }
                    other => self.wrong(idx, &other)?,
                }
            }
            Op::Save { name } => {
                let mut context = self.create(&saved_tokens(*name)).await?;
                context.save(&saved_name(*name)).await?;
            }
            Op::Open { name } => {
                let opened = Context::open(&self.model, self.owner.clone(), &saved_name(*name)).await;
                let context = match opened {
                    Err(EngineError::NotSaved { .. }) => self.create(&saved_tokens(*name)).await?,
                    opened => opened?,
                };
                self.contexts.push(Some(context));
            }
            Op::Forsake { at, after } => {
                let asked = self.context(*at).ask(Ask::Top { n: 1 }).await?;
                tokio::time::sleep(*after).await;
                self.notes.fault(Fault::Forsake);
                drop(asked);
            }
            Op::Pause { time } => tokio::time::sleep(*time).await,
            Op::Receive => {
                let text = self.io.input.recv().await.ok_or(Ended::Alone)?;
                self.send(idx, 0, text.bytes().map(u32::from).collect()).await?;
            }
            Op::Text { n_bytes } => self.send(idx, 0, vec![u32::from(b'x'); *n_bytes]).await?,
        }
        Ok(())
    }

    fn wrong(&self, idx: usize, answer: &Answer) -> Result<(), Ended> {
        self.notes.violation(format!("guest {}: op {idx} was answered with {answer:?}", self.number));
        Err(Ended::Deceived)
    }

    /// Draws one token.
    async fn draw(&mut self, idx: usize, at: usize, sampler: &Arc<Sampler>) -> Result<Token, Ended> {
        let answer = self.answer(at, Ask::Sample(sampler.clone())).await?;
        let Answer::Sampled(drawn) = answer else {
            self.wrong(idx, &answer)?;
            return Err(Ended::Deceived);
        };
        self.context(at).append_drawn(std::slice::from_ref(&drawn), sampler).await?;
        Ok(drawn.candidate.token)
    }

    async fn sample(&mut self, idx: usize, ats: &[usize], seed: u64) -> Result<(), Ended> {
        let sampler = sampler(seed);
        let mut asked = Vec::new();
        for &at in ats {
            asked.push(self.context(at).ask(Ask::Sample(sampler.clone())).await?);
        }
        for (n, (&at, asked)) in ats.iter().zip(asked).enumerate() {
            let answer = match asked.answer().await {
                Err(EngineError::Step(_)) => self.answer(at, Ask::Sample(sampler.clone())).await?,
                answer => answer?,
            };
            let Answer::Sampled(drawn) = answer else { return self.wrong(idx, &answer) };
            self.context(at).append_drawn(std::slice::from_ref(&drawn), &sampler).await?;
            self.send(idx, n, vec![drawn.candidate.token]).await?;
        }
        Ok(())
    }

    async fn pull(&mut self, idx: usize, at: usize, pulling: Pulling) -> Result<(), Ended> {
        let (mut n_pulled, mut n_tries) = (0, 0);
        while n_pulled < pulling.n {
            let n_left = pulling.n - n_pulled;
            match self.context(at).pull(RunKey(idx as u64), || pulling.settings(n_left)).await {
                Ok(Pull::Token(Drawn { candidate, .. })) => {
                    self.send(idx, n_pulled, vec![candidate.token]).await?;
                    n_pulled += 1;
                }
                Ok(Pull::Finished(finish)) => {
                    self.notes.violation(format!("{finish:?} after {n_pulled} of {} tokens", pulling.n));
                    return Err(Ended::Deceived);
                }
                Err(EngineError::Step(_)) if n_tries < N_TRIES => n_tries += 1,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// What is pulled.
#[derive(Clone, Copy)]
struct Pulling {
    seed: u64,
    n: usize,
    is_bounded: bool,
    of_all: bool,
}

impl Pulling {
    fn settings(self, n_left: usize) -> RunSettings {
        RunSettings {
            sampler: sampler(self.seed),
            stop_tokens: Arc::new([]),
            n_tokens_max: self.is_bounded.then_some(n_left),
            ahead: if self.of_all { Ahead::Unbounded } else { Ahead::Adaptive },
            masks: MaskSource::Sampler,
        }
    }
}

fn sampler(seed: u64) -> Arc<Sampler> {
    Arc::new(Sampler { seed, ..Sampler::greedy() })
}

/// What comes of a future that is dropped where it waits after so many polls; `None` if it was.
pub(super) async fn until_killed<T>(
    killed_after: Option<usize>,
    future: impl Future<Output = T>,
) -> Option<T> {
    let mut future = Some(Box::pin(future));
    let mut n_left = killed_after;
    poll_fn(move |cx| {
        let polled = future.as_mut().expect("it is not polled after its end").as_mut().poll(cx);
        match (polled, &mut n_left) {
            (Poll::Ready(output), _) => Poll::Ready(Some(output)),
            (Poll::Pending, None) => Poll::Pending,
            (Poll::Pending, Some(0)) => {
                future = None;
                Poll::Ready(None)
            }
            (Poll::Pending, Some(n)) => {
                *n -= 1;
                Poll::Pending
            }
        }
    })
    .await
}
