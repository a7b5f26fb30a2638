//! An engine over the device that computes nothing, and guests that pull tokens from it.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use trellis_engine::account::{Account, ActorId, Budget, GuestId, Owner, SessionId};
use trellis_engine::backend::PAGE_LEN;
use trellis_engine::batch::Token;
use trellis_engine::model::{Dtype, Model, ModelConfig, shape};
use trellis_engine::sampling::Sampler;
use trellis_engine::sampling::beams::BeamSettings;
use trellis_engine::{
    Ahead, Answer, Ask, BeamSearch, Context, EngineError, EngineSettings, Guess, MaskSource, ModelHandle,
    OneModel, PrefixScope, Pull, RunKey, RunSettings,
};

use super::desk::{self, Between, Desk};
use super::null::NullBackend;
use crate::bundled;
use crate::cli::bench::{BenchError, engine};

/// A vocabulary and a length of contexts as models have them; nothing else of it is used.
const SHAPE: &str = "llama-3.2-1b";

/// How often progress is looked at.
const POLL: Duration = Duration::from_millis(20);

/// The shape that the device pretends to run.
pub(super) fn config() -> ModelConfig {
    shape(SHAPE).expect("the engine knows this shape")
}

/// How guests pull.
#[derive(Clone, Copy, Debug)]
pub(super) enum Runs {
    /// One run without end.
    Endless,
    /// Runs of so many tokens, of which as many end in each step as in any other.
    Of(usize),
}

/// The engine, its device, and the guests. Ends them all when dropped.
pub(super) struct Rig {
    pub(super) desk: Arc<Desk>,
    // Before the engine, which waits for its thread.
    guests: JoinSet<Result<Infallible, EngineError>>,
    engine: OneModel,
    user: Arc<Account>,
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.desk.end();
    }
}

impl Rig {
    /// An engine that takes `n_rows` in a step and holds `n_positions` in all.
    ///
    /// # Errors
    /// The bundled tokenizer cannot be read.
    pub(super) fn new(n_rows: usize, n_positions: usize) -> Result<Self, BenchError> {
        Self::with_patience(n_rows, n_positions, desk::PATIENCE)
    }

    /// As [`Rig::new`], over a device that waits so long for guests that do not come.
    ///
    /// # Errors
    /// The bundled tokenizer cannot be read.
    pub(super) fn with_patience(
        n_rows: usize,
        n_positions: usize,
        patience: Duration,
    ) -> Result<Self, BenchError> {
        let config = config();
        let desk = Arc::new(Desk::new(patience));
        let n_pages = n_positions.div_ceil(PAGE_LEN);
        let backend = Box::new(NullBackend::new(&config, n_rows, n_pages, desk.clone()));
        let tokenizer = bundled::tokenizer_json();
        let model = Model::with_random_weights("null", config, Dtype::F32, 0, tokenizer)
            .map_err(|source| BenchError::Tokenizer { source: Box::new(source) })?;
        let settings = EngineSettings {
            prefix_scope: PrefixScope::Actor,
            n_step_tokens: usize::MAX,
            ..EngineSettings::default()
        };
        let user = Account::new("user", Budget::UNLIMITED, None);
        Ok(Self {
            desk,
            guests: JoinSet::new(),
            engine: OneModel::start(Arc::new(model), backend, settings),
            user,
        })
    }

    fn handle(&self) -> &ModelHandle {
        self.engine.handle()
    }

    /// A guest in a session of its own, as the daemon accounts for it.
    fn owner(&self, idx: usize) -> Owner {
        let session = Account::new("session", Budget::UNLIMITED, Some(self.user.clone()));
        let account = Account::new("guest", Budget::UNLIMITED, Some(session));
        Owner { actor: ActorId(0), session: SessionId(idx as u64), guest: GuestId(idx as u64), account }
    }

    /// A context of so many tokens, all computed.
    ///
    /// # Errors
    /// The engine stopped.
    pub(super) async fn context(&self, idx: usize, n_tokens: usize) -> Result<Context, EngineError> {
        let mut context = Context::create(self.handle(), self.owner(idx)).await?;
        context.append(&engine::unseen(self.handle(), n_tokens, idx)).await?;
        context.ask(Ask::Prefill).await?.answer().await?;
        Ok(context)
    }

    /// Guests that pull tokens from these contexts until the end.
    pub(super) fn pull(&mut self, contexts: Vec<Context>, runs: Runs) {
        for (idx, context) in contexts.into_iter().enumerate() {
            self.guests.spawn(pull(context, idx, runs, self.desk.clone()));
        }
    }

    /// A guest that searches what comes after a context, so many tokens far, again and again until the end.
    pub(super) fn search(&mut self, context: Context, n_beams: usize, n_tokens: usize) {
        self.guests.spawn(search(context, n_beams, n_tokens));
    }

    /// Guests that have so many wrong guesses verified after these contexts, which they grow by a token each time until they
    /// are `n_growth` longer.
    pub(super) fn verify(&mut self, contexts: Vec<Context>, n_guesses: usize, n_growth: usize) {
        for context in contexts {
            self.guests.spawn(verify(context, n_guesses, n_growth, self.desk.clone()));
        }
    }

    /// Waits until there are so many steps, or the time is over, and tells `progress` how many there are. Returns the
    /// steps from `first` on.
    ///
    /// # Errors
    /// The engine stopped.
    pub(super) async fn steps(
        &mut self,
        first: usize,
        n_steps: usize,
        patience: Duration,
        progress: impl Fn(usize),
    ) -> Result<Vec<Between>, EngineError> {
        let due = Instant::now() + patience;
        loop {
            let n_seen = self.desk.n_steps().saturating_sub(first);
            progress(n_seen.min(n_steps));
            if n_seen >= n_steps || (n_seen > 0 && Instant::now() >= due) {
                break;
            }
            tokio::select! {
                Some(ended) = self.guests.join_next() => match ended.expect("a guest does not panic") {
                    Err(error) => return Err(error),
                },
                () = tokio::time::sleep(POLL) => {}
            }
        }
        let mut steps = self.desk.steps_from(first);
        steps.truncate(n_steps);
        Ok(steps)
    }
}

async fn search(mut context: Context, n_beams: usize, n_tokens: usize) -> Result<Infallible, EngineError> {
    let settings = BeamSettings::of(n_beams, n_tokens);
    loop {
        BeamSearch::open(&mut context, settings.clone(), None, None).await?.go_on(None).await?;
    }
}

async fn verify(
    mut context: Context,
    n_guesses: usize,
    n_growth: usize,
    desk: Arc<Desk>,
) -> Result<Infallible, EngineError> {
    let sampler = Arc::new(Sampler::greedy());
    let (n_prompt, mut n_drawn) = (context.tokens().len(), 0);
    loop {
        // Tokens that the device is not likely to draw.
        let guess = Guess::Chain((1..=n_guesses as Token).collect());
        let asked = context.ask(Ask::Verify { sampler: sampler.clone(), guess }).await?;
        // Only now, so that the device goes on when all guests have asked again.
        (0..n_drawn).for_each(|_| desk.take());
        let Answer::Verified(drawn) = asked.answer().await? else {
            unreachable!("a verification is answered with what was drawn")
        };
        // What was wrong included.
        n_drawn = 1 + n_guesses;
        let tokens: Vec<Token> = drawn.iter().map(|drawn| drawn.candidate.token).collect();
        if context.tokens().len() >= n_prompt + n_growth {
            context.truncate(n_prompt).await?;
        }
        context.append(&tokens).await?;
    }
}

async fn pull(
    mut context: Context,
    idx: usize,
    runs: Runs,
    desk: Arc<Desk>,
) -> Result<Infallible, EngineError> {
    let sampler = Arc::new(Sampler::greedy());
    // The first run of each ends in another step.
    let mut n_tokens_max = match runs {
        Runs::Endless => None,
        Runs::Of(n_tokens) => Some(1 + idx % n_tokens),
    };
    let mut key = RunKey(0);
    loop {
        let settings = || RunSettings {
            sampler: sampler.clone(),
            stop_tokens: [].into(),
            n_tokens_max,
            ahead: Ahead::Adaptive,
            masks: MaskSource::Sampler,
        };
        match context.pull(key, settings).await? {
            Pull::Token(_) => desk.take(),
            Pull::Finished(_) => {
                key.0 += 1;
                if let Runs::Of(n_tokens) = runs {
                    n_tokens_max = Some(n_tokens);
                }
            }
        }
    }
}
