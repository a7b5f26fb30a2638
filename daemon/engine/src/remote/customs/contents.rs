//! What an operation holds, whoever sends it: every value is one that the guest's side of this crate lets through.

use super::ModelFacts;
use crate::asked::{
    N_BIAS_MAX, N_LAYERS_LOOKED_AT_MAX, N_LOGPROBS_MAX, N_STATES_MAX, N_TOP_LOOKED_AT_MAX, N_TOP_MAX,
    N_TOPS_MAX,
};
use crate::batch::Token;
use crate::command::{Ask, Edit, Operation, Pooling, RunSettings, SearchBeams};
use crate::error::EngineError;
use crate::guess::{Guess, N_GUESS_MAX};
use crate::sampling::program::N_MEMBERS_MAX;
use crate::sampling::{Sampler, SamplerError, TokenMask};
use crate::steering::{Steering, SteeringError};
use crate::violation::Violation;

/// The longest name of a saved context, in bytes.
pub(crate) const NAME_BYTES_MAX: usize = 256;
/// The longest text of an error with which a run ends, in bytes.
const ERROR_BYTES_MAX: usize = 1 << 12;
/// The most stop tokens of a run.
const N_STOP_TOKENS_MAX: usize = 1024;
/// Places past the last position for which masks are made: those of tokens that are expected, and may not come.
const N_PLACES_PAST_END_MAX: usize = 2 * (N_GUESS_MAX + 1);

/// Checks what an operation says about a model that is like this.
pub(super) fn check(operation: &Operation, facts: &ModelFacts) -> Result<(), Violation> {
    match operation {
        Operation::Create { .. }
        | Operation::Cancel { .. }
        | Operation::Pulled { .. }
        | Operation::LetGo { .. }
        | Operation::Stats { .. }
        | Operation::Release { .. } => Ok(()),
        Operation::Open { name, .. } | Operation::Forget { name, .. } => check_name(name),
        Operation::Edit { edit, .. } | Operation::Fork { edit, .. } => facts.check_edit(edit),
        Operation::Evict { edit, start, end, .. } => {
            facts.check_edit(edit)?;
            facts.check_eviction(*start, *end)
        }
        Operation::Steer { edit, steering, from, .. } => {
            facts.check_edit(edit)?;
            at_most("tokens before the first that is steered", *from, facts.n_positions_max)?;
            steering.as_ref().map_or(Ok(()), |steering| facts.check_steering(steering))
        }
        Operation::Ask { edit, ask, .. } => {
            facts.check_edit(edit)?;
            facts.check_ask(ask)
        }
        Operation::DrawTogether { members, sampler, .. } => {
            members.iter().try_for_each(|(_, edit)| facts.check_edit(edit))?;
            facts.check_sampler(sampler)
        }
        Operation::Mix { members, settings, .. } => {
            members.iter().try_for_each(|(_, edit)| facts.check_edit(edit))?;
            if members.len() > 1 + N_MEMBERS_MAX {
                let (n_others, n_others_max) = (members.len() - 1, N_MEMBERS_MAX);
                return Err(EngineError::MixtureTooLarge { n_others, n_others_max }.into());
            }
            if settings.sampler.program.is_none() {
                return Err(EngineError::MixtureWithoutProgram.into());
            }
            facts.check_run(settings)
        }
        Operation::Run { edit, settings, .. } => {
            facts.check_edit(edit)?;
            facts.check_run(settings)
        }
        Operation::SearchBeams(asked) => facts.check_search(asked),
        Operation::Mask { position, mask, expected, .. } => {
            facts.check_place(*position)?;
            facts.check_mask(mask)?;
            facts.check_tokens(expected.as_slice())
        }
        Operation::EndRun { position, end, .. } => {
            facts.check_place(*position)?;
            let n_bytes = end.as_ref().err().map_or(0, EngineError::n_text_bytes);
            at_most("bytes of an error", n_bytes, ERROR_BYTES_MAX)
        }
        Operation::Save { edit, name, tokens, .. } => {
            facts.check_edit(edit)?;
            at_most("tokens of a context", tokens.len(), facts.n_positions_max)?;
            check_name(name)
        }
    }
}

fn check_name(name: &str) -> Result<(), Violation> {
    at_most("bytes of a name", name.len(), NAME_BYTES_MAX)
}

fn at_most(what: &'static str, n: usize, n_max: usize) -> Result<(), Violation> {
    if n > n_max { Err(Violation::Count { what, n, expected: format!("at most {n_max}") }) } else { Ok(()) }
}

fn exactly(what: &'static str, n: usize, wanted: usize) -> Result<(), Violation> {
    if n == wanted { Ok(()) } else { Err(Violation::Count { what, n, expected: format!("{wanted}") }) }
}

impl ModelFacts {
    fn check_tokens(&self, tokens: &[Token]) -> Result<(), Violation> {
        let vocab_size = self.vocab_size;
        match tokens.iter().find(|&&token| token as usize >= vocab_size) {
            Some(&token) => Err(EngineError::TokenOutOfRange { token, vocab_size }.into()),
            None => Ok(()),
        }
    }

    fn check_edit(&self, edit: &Edit) -> Result<(), Violation> {
        let (n_tokens, n_positions) = (edit.n_kept.saturating_add(edit.appended.len()), self.n_positions_max);
        if n_tokens > n_positions {
            return Err(EngineError::ContextFull { n_tokens, n_positions }.into());
        }
        self.check_tokens(&edit.appended)
    }

    fn check_place(&self, position: usize) -> Result<(), Violation> {
        at_most("tokens before a mask", position, self.n_positions_max + N_PLACES_PAST_END_MAX)
    }

    fn check_eviction(&self, start: usize, end: usize) -> Result<(), Violation> {
        if self.n_stretches_max == 0 {
            return Err(EngineError::CannotEvict.into());
        }
        if start >= end {
            return Err(Violation::Malformed { what: "the end of an eviction" });
        }
        at_most("tokens up to the end of an eviction", end, self.n_positions_max)
    }

    fn check_steering(&self, steering: &Steering) -> Result<(), Violation> {
        let given = steering.vectors().map(|(n_layers, vector)| (n_layers, vector.to_vec())).collect();
        let n_vectors = steering.vectors().len();
        let made = Steering::new(given, self.n_layers, self.hidden_size)?;
        if made.is_none_or(|made| made.vectors().len() != n_vectors || made != *steering) {
            return Err(Violation::Malformed { what: "a steering by zeros" });
        }
        let (n_bytes, n_bytes_max) = (steering.n_bytes(), self.given_bytes);
        if n_bytes > n_bytes_max {
            return Err(SteeringError::TooLarge { n_bytes, n_bytes_max }.into());
        }
        Ok(())
    }

    fn check_layers(&self, n_layers: &[usize]) -> Result<(), Violation> {
        let n_layers_max = self.n_layers;
        match n_layers.iter().find(|&&n_layers| n_layers > n_layers_max) {
            Some(&n_layers) => Err(EngineError::NoSuchLayer { n_layers, n_layers_max }.into()),
            None => Ok(()),
        }
    }

    fn check_mask(&self, mask: &TokenMask) -> Result<(), Violation> {
        let (n_tokens, vocab_size) = (mask.vocab_size(), self.vocab_size);
        if n_tokens == vocab_size {
            Ok(())
        } else {
            Err(SamplerError::MaskSize { n_tokens, vocab_size }.into())
        }
    }

    /// A sampler that draws.
    fn check_sampler(&self, sampler: &Sampler) -> Result<(), Violation> {
        sampler.validate(self.vocab_size)?;
        self.check_sampler_lists(sampler)
    }

    /// What is bounded of a sampler that draws, and of one that ranks.
    fn check_sampler_lists(&self, sampler: &Sampler) -> Result<(), Violation> {
        at_most("biases", sampler.bias.len(), N_BIAS_MAX)?;
        at_most("tokens looked at", sampler.looks.n_top, N_TOP_LOOKED_AT_MAX)?;
        at_most("states looked at", sampler.looks.hidden.len(), N_LAYERS_LOOKED_AT_MAX)?;
        self.check_layers(&sampler.looks.hidden)?;
        let Some(put_on) = &sampler.program else { return Ok(()) };
        // What it costs and how far it looks back was worked out for these.
        exactly("positions of a program", put_on.program.shape().n_positions, self.n_positions_max)?;
        match put_on.start.numbers.iter().all(|&number| number < f32::INFINITY) {
            true => Ok(()),
            false => Err(Violation::Malformed { what: "the state of a program" }),
        }
    }

    fn check_run(&self, settings: &RunSettings) -> Result<(), Violation> {
        at_most("stop tokens", settings.stop_tokens.len(), N_STOP_TOKENS_MAX)?;
        self.check_sampler(&settings.sampler)
    }

    fn check_guess(&self, guess: &Guess) -> Result<(), Violation> {
        self.check_tokens(guess.tokens())?;
        let n_tokens = guess.tokens().len();
        if guess.tree().is_none() && n_tokens > N_GUESS_MAX {
            return Err(EngineError::GuessTooLong { n_tokens, n_tokens_max: N_GUESS_MAX }.into());
        }
        let masks = match guess {
            Guess::Chain(_) => return Ok(()),
            Guess::Tree { masks, .. } if masks.is_empty() => return Ok(()),
            Guess::Masked { masks, .. } | Guess::Tree { masks, .. } => masks,
        };
        exactly("masks of a guess", masks.len(), n_tokens + 1)?;
        masks.iter().try_for_each(|mask| self.check_mask(mask))
    }

    fn check_ask(&self, ask: &Ask) -> Result<(), Violation> {
        match ask {
            Ask::Prefill | Ask::Full | Ask::Logits | Ask::Keep | Ask::Embedding => Ok(()),
            Ask::Sample(sampler) => self.check_sampler(sampler),
            Ask::Top { n } => at_most("candidates", *n, N_TOP_MAX),
            Ask::Scores(tokens) => {
                at_most("tokens to score", tokens.len(), N_LOGPROBS_MAX)?;
                self.check_tokens(tokens)
            }
            Ask::Continuation(tokens) => self.check_continuation(tokens),
            Ask::Tops { continuation, n } => {
                at_most("candidates", *n, N_TOP_MAX)?;
                at_most("candidates in all", n.saturating_mul(continuation.len()), N_TOPS_MAX)?;
                self.check_continuation(continuation)
            }
            Ask::Verify { sampler, guess } => {
                self.check_sampler(sampler)?;
                self.check_guess(guess)
            }
            Ask::Mix { sampler, rows } => {
                at_most("rows of others", rows.len(), N_MEMBERS_MAX)?;
                if sampler.program.is_none() {
                    return Err(EngineError::MixtureWithoutProgram.into());
                }
                self.check_sampler(sampler)
            }
            Ask::Hidden { n_layers, pooling } => {
                at_most("hidden states", n_layers.len(), N_STATES_MAX)?;
                if let Pooling::MeanFrom(first) = pooling {
                    at_most("tokens before a mean", *first, self.n_positions_max)?;
                }
                self.check_layers(n_layers)
            }
            Ask::Attention { layers } => self.check_attention(layers),
        }
    }

    fn check_continuation(&self, tokens: &[Token]) -> Result<(), Violation> {
        at_most("tokens of a continuation", tokens.len(), self.n_positions_max)?;
        self.check_tokens(tokens)
    }

    fn check_attention(&self, layers: &[usize]) -> Result<(), Violation> {
        if layers.is_empty() {
            return Err(EngineError::NoLayers.into());
        }
        at_most("layers", layers.len(), self.n_layers)?;
        let mut seen = vec![false; self.n_layers];
        for &layer in layers {
            match seen.get_mut(layer) {
                None => return Err(EngineError::NoAttentionIn { layer, n_layers: self.n_layers }.into()),
                Some(true) => return Err(EngineError::LayerTwice { layer }.into()),
                Some(is_seen) => *is_seen = true,
            }
        }
        Ok(())
    }

    fn check_search(&self, asked: &SearchBeams) -> Result<(), Violation> {
        self.check_edit(&asked.edit)?;
        let settings = asked.search.settings();
        settings.validate(self.vocab_size)?;
        at_most("tokens of a hypothesis", settings.n_tokens_max, self.n_positions_max)?;
        exactly("contexts of a search", asked.contexts.len(), settings.n_beams)?;
        if !asked.search.is_sound(self.vocab_size) {
            return Err(Violation::Malformed { what: "a search" });
        }
        at_most("masks of a search", asked.masks.len(), settings.n_beams)?;
        asked.masks.iter().try_for_each(|mask| self.check_mask(mask))?;
        let Some(sampler) = &asked.sampler else { return Ok(()) };
        sampler.validate_for_search(self.vocab_size)?;
        self.check_sampler_lists(sampler)
    }
}
