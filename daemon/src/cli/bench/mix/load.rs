//! The kinds of load and their parameters.

use std::sync::Arc;

use trellis_engine::Ahead;
use trellis_engine::backend::PAGE_LEN;
use trellis_engine::sampling::Sampler;
use trellis_engine::sampling::beams::N_BEAMS_MAX;
use trellis_engine::sampling::program::{Definition, N_MEMBERS_MAX};

use super::error::MixError;
use super::fields::Fields;
use super::programs;
use crate::nearest::hint;

/// What one kind of user does, several times at once.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Load {
    pub(super) name: String,
    pub(super) count: usize,
    /// Tokens of each prompt.
    pub(super) n_prompt: usize,
    /// The load whose pace alone is the measure of this one's; its own when absent.
    pub(super) against: Option<String>,
    pub(super) kind: Kind,
}

/// What it does.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Kind {
    /// Contexts that decode without end.
    Streams(Streams),
    /// Prompts that no cache knows, one after the other.
    Prompts(Prompts),
    /// A look at the most probable tokens, one of them appended, and again.
    Stepping(Stepping),
    /// Contexts that guess what they draw next and have it verified.
    Speculation(Speculation),
    /// Beam searches, one after the other.
    Beams(Beams),
    /// Guests that send every token to a client of their own, over a socket.
    Clients(Clients),
    /// A second model that is loaded, used and unloaded, again and again.
    Loads(Loads),
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Streams {
    pub(super) user: u32,
    /// Tokens after which a context goes back to its prompt; as many as fit, up to a bound, when absent.
    pub(super) wrap_tokens: Option<usize>,
    pub(super) runs: Runs,
    pub(super) ahead: Ahead,
    pub(super) sampler: Arc<Sampler>,
    /// Draws in the place of the sampler, of which the seed is left: a sampler of the library by its name, or a made-up
    /// program by its numbers of operations and of reductions, the draw among them.
    pub(super) program: Option<Definition>,
    /// The JSON schema that they keep to.
    pub(super) schema: Option<String>,
    /// Contexts of each that guide it: then it draws the most probable token under guidance by the first of them, whatever
    /// the sampler.
    pub(super) n_others: usize,
    /// A second model, by the name that it is loaded by: the contexts that guide are of it, or, where none do, every other
    /// stream.
    pub(super) second: Option<String>,
}

/// How long runs are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Runs {
    /// As long as the context.
    Endless,
    /// So many tokens, all runs beginning together.
    Even(usize),
    /// So many tokens, as many runs ending in each step as in any other.
    Staggered(usize),
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Prompts {
    pub(super) user: u32,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Stepping {
    pub(super) user: u32,
    pub(super) wrap_tokens: Option<usize>,
    /// Candidates that are looked at.
    pub(super) n_top: usize,
}

/// Guesses that are right as often as asked for: a context draws the same whenever it goes back to its prompt.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Speculation {
    pub(super) user: u32,
    pub(super) wrap_tokens: Option<usize>,
    /// Tokens of each guess.
    pub(super) n_guesses: usize,
    /// The share of its tokens that are right.
    pub(super) right: f64,
    pub(super) sampler: Arc<Sampler>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Beams {
    pub(super) user: u32,
    /// Tokens of each hypothesis; then the next search begins.
    pub(super) wrap_tokens: Option<usize>,
    pub(super) n_beams: usize,
    /// Steps one token at a time, and drops what is so many nats behind the best; goes on by itself when absent.
    pub(super) prune_nats: Option<f32>,
    /// What hypotheses are ranked by; the model's own probabilities when absent.
    pub(super) sampler: Option<Arc<Sampler>>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Loads {
    /// A bundled model, a folder, or `shape:NAME`.
    pub(super) model: String,
    /// Tokens that are decoded with it each time.
    pub(super) n_tokens: usize,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Clients {
    pub(super) wrap_tokens: Option<usize>,
    /// Beams of the search that each guest steps and prunes; it pulls a stream when absent.
    pub(super) n_beams: Option<usize>,
    /// How the stream draws; greedily when absent.
    pub(super) draws: Option<Draws>,
}

/// How a guest's stream draws.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Draws {
    /// By a program of 12 operations with two reductions.
    Program,
    /// One of eight tokens, each as often as the others: what followed the last three says nothing of what comes.
    Few,
    /// As [`Self::Few`], with guesses out of the context, which are right as often as chance has it.
    Guessed,
}

impl Draws {
    const ALL: [(&str, Self); 3] =
        [("program", Self::Program), ("few", Self::Few), ("guessed", Self::Guessed)];

    /// What the guest calls it.
    pub(super) fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, draws)| *draws == self).map_or("", |(name, _)| name)
    }

    fn read(fields: &mut Fields<'_>) -> Result<Option<Self>, MixError> {
        let Some(name) = fields.text("draws")? else { return Ok(None) };
        let known = Self::ALL.iter().find(|(known, _)| *known == name);
        let place = || fields.place().to_owned();
        known.map(|&(_, draws)| Some(draws)).ok_or_else(|| MixError::Value {
            place: place(),
            key: "draws",
            expected: "program, few or guessed".to_owned(),
            found: name.to_owned(),
        })
    }
}

const KINDS: [&str; 7] = ["streams", "prompts", "stepping", "speculation", "beams", "clients", "loads"];

/// Where a context goes back to its prompt if the file does not say.
const WRAP_TOKENS: usize = 4096;

impl Load {
    /// Whether a member draws by a logit program.
    pub(super) fn has_program(&self) -> bool {
        match &self.kind {
            Kind::Streams(streams) => streams.draws_by().is_some(),
            Kind::Clients(of) => of.draws.is_some(),
            _ => false,
        }
    }

    pub(super) fn read(mut fields: Fields<'_>) -> Result<Self, MixError> {
        let kind = fields.text("kind")?;
        let kind = fields.required("kind", kind)?;
        let place = fields.place().to_owned();
        let name = fields.text("name")?.unwrap_or(kind).to_owned();
        // One model comes and goes at a time.
        let n_most = if kind == "loads" { 1 } else { 4096 };
        let count = fields.count("count", 1..=n_most)?.unwrap_or(1);
        let n_prompt = fields.count("prompt", 1..=1 << 24)?;
        let n_prompt = fields.required("prompt", n_prompt)?;
        let against = fields.text("against")?.map(str::to_owned);
        let kind = match kind {
            "streams" => Kind::Streams(Streams::read(&mut fields, &name)?),
            "prompts" => Kind::Prompts(Prompts { user: user(&mut fields)? }),
            "stepping" => Kind::Stepping(Stepping {
                user: user(&mut fields)?,
                wrap_tokens: wrap_tokens(&mut fields)?,
                n_top: fields.count("top", 1..=1024)?.unwrap_or(8),
            }),
            "speculation" => Kind::Speculation(Speculation::read(&mut fields, &name)?),
            "beams" => Kind::Beams(Beams::read(&mut fields, &name)?),
            "clients" => Kind::Clients(Clients {
                wrap_tokens: wrap_tokens(&mut fields)?,
                n_beams: fields.count("beams", 1..=N_BEAMS_MAX)?,
                draws: Draws::read(&mut fields)?,
            }),
            "loads" => Kind::Loads(Loads {
                model: fields.text("model")?.unwrap_or("draft").to_owned(),
                n_tokens: fields.count("tokens", 1..=1 << 16)?.unwrap_or(32),
            }),
            other => {
                let hint = hint(other, KINDS);
                return Err(MixError::UnknownKind { place, kind: other.to_owned(), hint });
            }
        };
        fields.finish()?;
        Ok(Self { name, count, n_prompt, against, kind })
    }

    /// Rows that it has in a step at most, prompts aside.
    pub(super) fn n_rows(&self) -> usize {
        if self.is_decoding() { self.n_contexts() } else { 0 }
    }

    /// Contexts that it has at once.
    pub(super) fn n_contexts(&self) -> usize {
        match &self.kind {
            Kind::Streams(streams) => self.count * (1 + streams.n_others),
            _ => self.n_streams(),
        }
    }

    /// The second model that it needs.
    pub(super) fn second(&self) -> Option<&str> {
        if let Kind::Streams(streams) = &self.kind { streams.second.as_deref() } else { None }
    }

    /// What makes a token in each step that it has: members, or their hypotheses.
    pub(super) fn n_streams(&self) -> usize {
        self.count * self.n_beams().unwrap_or(1)
    }

    /// Beams of each search, if they are searches.
    fn n_beams(&self) -> Option<usize> {
        match &self.kind {
            Kind::Beams(beams) => Some(beams.n_beams),
            Kind::Clients(clients) => clients.n_beams,
            _ => None,
        }
    }

    /// Pages that its contexts hold at most, which grow by so many tokens.
    pub(super) fn n_pages(&self, n_growth: usize) -> usize {
        match (&self.kind, self.n_beams()) {
            // Hypotheses share the prompt, all but its last page.
            (_, Some(n_beams)) => {
                let n_beyond = n_beams * (n_growth.div_ceil(PAGE_LEN) + 1);
                self.count * (self.n_prompt.div_ceil(PAGE_LEN) + n_beyond)
            }
            // It has a model of its own.
            (Kind::Loads(_), _) => 0,
            _ => self.n_contexts() * (self.n_prompt + n_growth).div_ceil(PAGE_LEN),
        }
    }

    /// Guests in the daemon.
    pub(super) fn n_guests(&self) -> usize {
        if matches!(self.kind, Kind::Clients(_)) { self.count } else { 0 }
    }

    /// Tokens that each context grows by before it goes back to its prompt, in an engine whose contexts have so many
    /// positions.
    ///
    /// # Errors
    /// It does not fit.
    pub(super) fn n_growth(&self, n_positions: usize) -> Result<usize, MixError> {
        let asked = match &self.kind {
            Kind::Streams(Streams { wrap_tokens, .. })
            | Kind::Stepping(Stepping { wrap_tokens, .. })
            | Kind::Speculation(Speculation { wrap_tokens, .. })
            | Kind::Beams(Beams { wrap_tokens, .. })
            | Kind::Clients(Clients { wrap_tokens, .. }) => *wrap_tokens,
            // The token that shows that the prompt is computed.
            Kind::Prompts(_) => Some(1),
            // It has a model of its own.
            Kind::Loads(_) => return Ok(0),
        };
        let n_left = n_positions.saturating_sub(self.n_prompt);
        let n_tokens = asked.unwrap_or(WRAP_TOKENS.min(n_left).max(1));
        if n_tokens > n_left {
            let (load, n_prompt) = (self.name.clone(), self.n_prompt);
            return Err(MixError::TooLong { load, n_prompt, n_tokens, n_positions });
        }
        Ok(n_tokens)
    }
}

fn user(fields: &mut Fields<'_>) -> Result<u32, MixError> {
    let user = fields.count("user", 0..=u32::MAX as usize)?.unwrap_or(0);
    Ok(u32::try_from(user).expect("the range was checked"))
}

fn wrap_tokens(fields: &mut Fields<'_>) -> Result<Option<usize>, MixError> {
    fields.count("wrap_tokens", 1..=1 << 24)
}

impl Streams {
    fn read(fields: &mut Fields<'_>, load: &str) -> Result<Self, MixError> {
        let place = fields.place().to_owned();
        let wrap_tokens = wrap_tokens(fields)?;
        let run_tokens = fields.count("run_tokens", 1..=1 << 24)?;
        let stagger = fields.flag("stagger")?.unwrap_or(false);
        let runs = match (run_tokens, stagger) {
            (None, false) => Runs::Endless,
            (None, true) => return Err(MixError::StaggerWithoutRuns { place }),
            (Some(n_tokens), false) => Runs::Even(n_tokens),
            (Some(n_tokens), true) => Runs::Staggered(n_tokens),
        };
        if let (Some(run_tokens), Some(wrap_tokens)) = (run_tokens, wrap_tokens)
            && run_tokens > wrap_tokens
        {
            return Err(MixError::RunPastWrap { place, run_tokens, wrap_tokens });
        }
        let ahead = match fields.text("ahead")? {
            None | Some("adaptive") => Ahead::Adaptive,
            Some("unbounded") => Ahead::Unbounded,
            Some(other) => {
                let (expected, found) = ("adaptive or unbounded".to_owned(), other.to_owned());
                return Err(MixError::Value { place, key: "ahead", expected, found });
            }
        };
        let sampler = sampler(fields, load)?;
        let program = programs::read(fields)?;
        let schema = fields.text("schema")?.map(str::to_owned);
        let n_others = fields.count("others", 0..=N_MEMBERS_MAX)?.unwrap_or(0);
        let second = fields.text("second")?.map(str::to_owned);
        if program.is_some() {
            let is_seed_alone = *sampler == Sampler { seed: sampler.seed, ..Sampler::greedy() };
            let twice = [("sampler", !is_seed_alone), ("others", n_others > 0)];
            if let Some(&(field, _)) = twice.iter().find(|(_, is_on)| *is_on) {
                return Err(MixError::DrawsTwice { place, field });
            }
        }
        Ok(Self { user: user(fields)?, wrap_tokens, runs, ahead, sampler, program, schema, n_others, second })
    }

    /// The program that it draws by, if it does not draw by the sampler.
    pub(super) fn draws_by(&self) -> Option<Definition> {
        if self.n_others > 0 { Some(programs::guidance()) } else { self.program.clone() }
    }
}

impl Speculation {
    fn read(fields: &mut Fields<'_>, load: &str) -> Result<Self, MixError> {
        let right = fields.number("right")?.unwrap_or(1.0);
        if !(0.0..=1.0).contains(&right) {
            let (expected, found) = ("a share from 0 to 1".to_owned(), right.to_string());
            return Err(MixError::Value { place: fields.place().to_owned(), key: "right", expected, found });
        }
        Ok(Self {
            user: user(fields)?,
            wrap_tokens: wrap_tokens(fields)?,
            n_guesses: fields.count("guesses", 0..=15)?.unwrap_or(4),
            right,
            sampler: sampler(fields, load)?,
        })
    }
}

impl Beams {
    fn read(fields: &mut Fields<'_>, load: &str) -> Result<Self, MixError> {
        let prune_nats = fields.number("prune_nats")?.map(|nats| nats as f32);
        let sampler = match fields.table("sampler")? {
            Some(fields) => Some(Arc::new(read_sampler(fields)?)),
            None => None,
        };
        if let Some(sampler) = &sampler {
            // The vocabulary is not known yet; nothing here names a token.
            let validated = sampler.validate_for_search(0);
            validated.map_err(|source| MixError::Sampler { load: load.to_owned(), source })?;
        }
        Ok(Self {
            user: user(fields)?,
            wrap_tokens: wrap_tokens(fields)?,
            n_beams: fields.count("beams", 1..=N_BEAMS_MAX)?.unwrap_or(4),
            prune_nats,
            sampler,
        })
    }
}

fn sampler(fields: &mut Fields<'_>, load: &str) -> Result<Arc<Sampler>, MixError> {
    let sampler = match fields.table("sampler")? {
        Some(fields) => read_sampler(fields)?,
        None => Sampler::greedy(),
    };
    // The vocabulary is not known yet; nothing here names a token.
    sampler.validate(0).map_err(|source| MixError::Sampler { load: load.to_owned(), source })?;
    Ok(Arc::new(sampler))
}

fn read_sampler(mut fields: Fields<'_>) -> Result<Sampler, MixError> {
    let usual = Sampler::greedy();
    let number = |fields: &mut Fields<'_>, key, usual: f32| -> Result<f32, MixError> {
        Ok(fields.number(key)?.map_or(usual, |number| number as f32))
    };
    let share = |fields: &mut Fields<'_>, key| -> Result<Option<f32>, MixError> {
        Ok(fields.number(key)?.map(|number| number as f32))
    };
    let count = |fields: &mut Fields<'_>, key| -> Result<Option<u32>, MixError> {
        let count = fields.count(key, 0..=u32::MAX as usize)?;
        Ok(count.map(|count| u32::try_from(count).expect("the range was checked")))
    };
    let sampler = Sampler {
        temperature: number(&mut fields, "temperature", usual.temperature)?,
        top_k: count(&mut fields, "top_k")?,
        top_p: share(&mut fields, "top_p")?,
        min_p: share(&mut fields, "min_p")?,
        repetition_penalty: number(&mut fields, "repetition_penalty", usual.repetition_penalty)?,
        frequency_penalty: number(&mut fields, "frequency_penalty", usual.frequency_penalty)?,
        presence_penalty: number(&mut fields, "presence_penalty", usual.presence_penalty)?,
        penalty_last_n: count(&mut fields, "penalty_last_n")?,
        seed: fields.count("seed", 0..=usize::MAX >> 1)?.unwrap_or(0) as u64,
        ..usual
    };
    fields.finish()?;
    Ok(sampler)
}
