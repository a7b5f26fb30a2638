//! Streams and generations that guess what comes and have the model verify it, several tokens in a step.
//!
//! - Comes in: a context, how to draw from it, and where guesses come from.
//! - Goes out: its tokens one by one, those that a pull without guesses gives.
//! - Must not happen: guessing where it does not pay, but for a few trials.

mod draft;
mod lookup;
mod pace;

use std::time::{Duration, Instant};

use trellis_engine::account::HostCharge;
use trellis_engine::batch::{Drawn, Token};
use trellis_engine::{Context, EngineError, Finish, Guess, N_GUESS_MAX, Pull, RunKey, RunSettings};
use wasmtime::component::Resource;

use self::draft::Draft;
use self::lookup::Lookup;
use self::pace::{Pace, Round};
use super::convert::{check_same_vocabulary, check_tokens, invalid};
use super::types::{GuestModel, HostError};
use crate::guest::bindings::trellis::host::streams::{GuessSource, Speculation as Options};
use crate::guest::store::GuestState;

/// Tokens of all texts that one lookup is given.
const N_TEXT_TOKENS_MAX: usize = 1 << 16;

/// How the tokens of a stream or a generation are guessed.
pub(crate) struct Speculation {
    source: Source,
    n_max: usize,
    pace: Pace,
    /// For the texts.
    _charge: HostCharge,
}

enum Source {
    Lookup(Lookup),
    Draft(Box<Draft>),
}

impl GuestState {
    /// What a guest asks for.
    ///
    /// # Errors
    /// A model with another tokenizer; more or other tokens than a lookup takes; a guess of no tokens, or of too many.
    pub(super) fn speculation(
        &mut self,
        options: Option<Options>,
        context: &Context,
    ) -> Result<Option<Speculation>, HostError> {
        let Some(Options { source, max_guess }) = options else { return Ok(None) };
        let n_max = max_guess.map_or(N_GUESS_MAX, |n| n as usize);
        if !(1..=N_GUESS_MAX).contains(&n_max) {
            return Err(invalid("max-guess", n_max, format!("1 to {N_GUESS_MAX}")));
        }
        let mut n_bytes = 0;
        let source = match source {
            GuessSource::Lookup(texts) => {
                let n_tokens: usize = texts.iter().map(Vec::len).sum();
                if n_tokens > N_TEXT_TOKENS_MAX {
                    let expected = format!("at most {N_TEXT_TOKENS_MAX} tokens in all");
                    return Err(invalid("lookup", n_tokens, expected));
                }
                texts.iter().try_for_each(|text| check_tokens(context.model(), text))?;
                n_bytes = n_tokens * size_of::<Token>() + texts.len() * size_of::<Vec<Token>>();
                Source::Lookup(Lookup::new(texts))
            }
            GuessSource::Draft(model) => Source::Draft(Box::new(self.draft(&model, context)?)),
        };
        let _charge = HostCharge::new(&self.owner.account, n_bytes as u64)?;
        Ok(Some(Speculation { source, n_max, pace: Pace::new(), _charge }))
    }

    fn draft(&mut self, model: &Resource<GuestModel>, context: &Context) -> Result<Draft, HostError> {
        let draft = self.table.get(model)?.model.clone();
        check_same_vocabulary(context.model(), &draft)?;
        Ok(Draft::new(draft, self.owner.clone()))
    }
}

impl Speculation {
    /// As [`Context::pull`], where a stream has `n_left` tokens to give.
    ///
    /// # Errors
    /// What the engine found wrong.
    pub(super) async fn pull(
        &mut self,
        context: &mut Context,
        key: RunKey,
        n_left: Option<usize>,
        settings: impl FnOnce() -> RunSettings,
    ) -> Result<Pull, EngineError> {
        if let Some(drawn) = context.take_verified(key)? {
            return Ok(Pull::Token(drawn));
        }
        let n_max = room_to_guess(context, n_left).map_or(0, |n_room| n_room.min(self.n_max));
        if n_max > 0 && self.pays() {
            let settings = settings();
            let begun = Instant::now();
            let guess = self.guess(context, &settings, n_max).await?;
            if !guess.is_empty() {
                return self.verify(context, key, &settings, guess, begun.elapsed()).await;
            }
            return self.pull_plain(context, key, || settings).await;
        }
        self.pull_plain(context, key, settings).await
    }

    fn pays(&self) -> bool {
        let promises = match &self.source {
            Source::Lookup(lookup) => lookup.promises(),
            Source::Draft(_) => true,
        };
        promises && self.pace.guesses()
    }

    async fn guess(
        &mut self,
        context: &Context,
        settings: &RunSettings,
        n_max: usize,
    ) -> Result<Vec<Token>, EngineError> {
        match &mut self.source {
            // The longer the match, the more it guesses by itself.
            Source::Lookup(lookup) => Ok(lookup.guess(context.tokens(), n_max)),
            Source::Draft(draft) => {
                let n = self.pace.depth(n_max);
                draft.guess(context, &settings.sampler, n).await
            }
        }
    }

    async fn pull_plain(
        &mut self,
        context: &mut Context,
        key: RunKey,
        settings: impl FnOnce() -> RunSettings,
    ) -> Result<Pull, EngineError> {
        let begun = Instant::now();
        let pulled = context.pull(key, settings).await?;
        self.pace.note_plain(begun.elapsed());
        if let (Pull::Token(drawn), Source::Lookup(lookup)) = (&pulled, &mut self.source) {
            lookup.follow(context.tokens(), drawn.candidate.token);
        }
        Ok(pulled)
    }

    async fn verify(
        &mut self,
        context: &mut Context,
        key: RunKey,
        settings: &RunSettings,
        guess: Vec<Token>,
        guessing: Duration,
    ) -> Result<Pull, EngineError> {
        let (n_wanted, begun) = (guess.len(), Instant::now());
        let (n_guessed, n_drawn) = verify_fitting(context, key, settings, guess).await?;
        if n_guessed < n_wanted {
            self.n_max = n_guessed;
        }
        let Some(n_drawn) = n_drawn else {
            return Ok(Pull::Finished(Finish::Complete));
        };
        let n_right = n_drawn - 1;
        self.pace.note_round(Round { n_guessed, n_right, guessing, verifying: begun.elapsed() });
        if let Source::Lookup(lookup) = &mut self.source {
            lookup.note(n_right);
        }
        Ok(Pull::Token(taken(context, key)?))
    }
}

/// Tokens that may be guessed where a stream has `n_left` to give, the last of which is drawn; none where the context is full.
fn room_to_guess(context: &Context, n_left: Option<usize>) -> Option<usize> {
    let n_free = context.n_free();
    (n_free > 0).then(|| n_left.unwrap_or(usize::MAX).min(n_free).saturating_sub(1))
}

/// Pulls with a guess of the guest's own.
///
/// # Errors
/// What the engine found wrong.
pub(super) async fn pull_guessed(
    context: &mut Context,
    key: RunKey,
    n_left: Option<usize>,
    settings: &RunSettings,
    guess: Guess,
) -> Result<Pull, EngineError> {
    let Some(n_room) = room_to_guess(context, n_left) else {
        return Ok(Pull::Finished(Finish::ContextFull));
    };
    let guess = guess.at_most(n_room);
    match context.verify(key, &settings.sampler, guess).await? {
        Some(_) => Ok(Pull::Token(taken(context, key)?)),
        None => Ok(Pull::Finished(Finish::Complete)),
    }
}

/// Pulls the first token under other settings than those with which the engine decoded ahead: what it drew there is a guess.
///
/// # Errors
/// What the engine found wrong.
pub(super) async fn pull_changed(
    context: &mut Context,
    key: RunKey,
    n_left: Option<usize>,
    settings: &RunSettings,
    mut ahead: Vec<Token>,
) -> Result<Pull, EngineError> {
    let Some(n_room) = room_to_guess(context, n_left) else {
        return Ok(Pull::Finished(Finish::ContextFull));
    };
    ahead.truncate(n_room.min(N_GUESS_MAX));
    match verify_fitting(context, key, settings, ahead).await? {
        (_, Some(_)) => Ok(Pull::Token(taken(context, key)?)),
        (_, None) => Ok(Pull::Finished(Finish::Complete)),
    }
}

/// Has as much of a guess verified as steps take, which is no matter of the guest's. Returns how much that was, and how many
/// tokens were drawn; none where the constraint of the context is complete.
async fn verify_fitting(
    context: &mut Context,
    key: RunKey,
    settings: &RunSettings,
    mut guess: Vec<Token>,
) -> Result<(usize, Option<usize>), EngineError> {
    let verified = context.verify(key, &settings.sampler, Guess::Chain(guess.clone())).await;
    let Err(EngineError::GuessTooLong { n_tokens_max, .. }) = verified else {
        return Ok((guess.len(), verified?));
    };
    guess.truncate(n_tokens_max);
    Ok((guess.len(), context.verify(key, &settings.sampler, Guess::Chain(guess)).await?))
}

fn taken(context: &mut Context, key: RunKey) -> Result<Drawn, EngineError> {
    Ok(context.take_verified(key)?.expect("a verification draws a token"))
}
