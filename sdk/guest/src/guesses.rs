//! Guesses at what comes next.

use crate::bindings::trellis::host::decoding::Guess;
use crate::bindings::trellis::host::streams as raw;
use crate::{Candidate, Model, Token};

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

/// Alternatives of what comes next: tokens of which each may come after the context or after another. At most 64, none more than
/// 15 tokens behind the context.
///
/// ```no_run
/// # use trellis_guest::{Context, GuessTree, Result, Sampler};
/// # fn f(context: &Context, sampler: &Sampler, likely: &[u32], other: u32) -> Result<()> {
/// let mut tree = GuessTree::new();
/// tree.add_chain(None, likely);
/// // In the place of the first of them.
/// tree.add(None, other);
/// let drawn = context.speculate_tree(sampler, &tree)?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, Default)]
pub struct GuessTree {
    guesses: Vec<Guess>,
}

/// A guess of a [`GuessTree`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Guessed(u32);

impl GuessTree {
    /// A tree without guesses.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a token behind a guess, or behind the context; where it is there already, it stays. What was added first in its place
    /// counts for more where only one can be looked at.
    pub fn add(&mut self, behind: Option<Guessed>, token: Token) -> Guessed {
        let parent = behind.map(|Guessed(idx)| idx);
        let idx = self.find(parent, token).unwrap_or_else(|| {
            self.guesses.push(Guess { token, parent });
            self.guesses.len() - 1
        });
        Guessed(u32::try_from(idx).expect("as many guesses as 32 bits tell apart"))
    }

    /// Adds tokens, each behind the one before it; returns the last of them.
    pub fn add_chain(&mut self, behind: Option<Guessed>, tokens: &[Token]) -> Option<Guessed> {
        tokens.iter().fold(behind, |behind, &token| Some(self.add(behind, token)))
    }

    /// How many guesses there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.guesses.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.guesses.is_empty()
    }

    /// How many of these tokens, which came after the context, were guessed in their places.
    #[must_use]
    pub fn n_right(&self, drawn: &[Candidate]) -> usize {
        let mut parent = None;
        let found = drawn.iter().map_while(|drawn| {
            let found = self.find(parent, drawn.token)?;
            parent = Some(found as u32);
            parent
        });
        found.count()
    }

    fn find(&self, parent: Option<u32>, token: Token) -> Option<usize> {
        self.guesses.iter().position(|guess| (guess.parent, guess.token) == (parent, token))
    }

    pub(crate) fn raw(&self) -> &[Guess] {
        &self.guesses
    }
}
