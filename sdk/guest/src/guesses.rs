//! Guesses at what comes next.

use crate::bindings::trellis::host::streams as raw;
use crate::{Model, Token};

/// Where a stream or a generation takes guesses at its next tokens from. The model verifies several of them in one step; what
/// is drawn is the same as without, token for token, at any temperature. The host guesses where it pays.
///
/// ```no_run
/// # use trellis_guest::{Context, Guesses, Model, Result, Sampler};
/// # fn f(context: &Context, draft: &Model) -> Result<()> {
/// let sampler = Sampler::seeded(7).temperature(0.7).build()?;
/// let answer = context.generate(&sampler).guess_by(Guesses::draft(draft)).run()?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Guesses<'a> {
    source: Source<'a>,
    max_guess: Option<u32>,
}

#[derive(Clone, Debug)]
enum Source<'a> {
    Lookup(Vec<Vec<Token>>),
    Draft(&'a Model),
}

impl<'a> Guesses<'a> {
    /// What followed the last three tokens where they stood before in the context (A. Saxena, "Prompt Lookup Decoding",
    /// 2023): for answers that repeat parts of their question.
    #[must_use]
    pub fn lookup() -> Self {
        Self::lookup_in(Vec::new())
    }

    /// As [`lookup`](Self::lookup); where they do not stand in the context, in one of these texts, of 65,536 tokens in all.
    #[must_use]
    pub fn lookup_in(texts: Vec<Vec<Token>>) -> Self {
        Self { source: Source::Lookup(texts), max_guess: None }
    }

    /// What a smaller model with the same tokenizer draws (Y. Leviathan and others, "Fast Inference from Transformers via
    /// Speculative Decoding", 2023).
    #[must_use]
    pub fn draft(model: &'a Model) -> Self {
        Self { source: Source::Draft(model), max_guess: None }
    }

    /// The most tokens of one guess, 1 to 15.
    #[must_use]
    pub fn at_most(mut self, n: u32) -> Self {
        self.max_guess = Some(n);
        self
    }

    pub(crate) fn into_raw(self) -> raw::Speculation<'a> {
        let source = match self.source {
            Source::Lookup(texts) => raw::GuessSource::Lookup(texts),
            Source::Draft(model) => raw::GuessSource::Draft(model.raw()),
        };
        raw::Speculation { source, max_guess: self.max_guess }
    }
}
