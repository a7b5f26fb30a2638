//! A matcher of one grammar, and the tokens that it has taken in.

use std::convert::Infallible;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use llguidance::TokenParser;
use llguidance::api::StopReason;
use toktrie::SimpleVob;

use super::ConstraintError;
use super::grammar::{Constraint, reason_of};
use crate::batch::Token;
use crate::sampling::TokenMask;

/// What may come after some tokens of a grammar.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Next {
    /// These. Tokens that end a text are among them where the grammar may end; there may be none at all.
    Mask(TokenMask),
    /// Nothing more but the end.
    Complete,
    /// Nothing: a token that ends a text has come.
    Ended,
}

/// How far a grammar has some tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reading {
    /// Tokens from the first on that it has.
    pub n_tokens: usize,
    /// Whether a text of the grammar may end after them.
    pub may_end: bool,
}

/// A cache of what follows from tokens alone: where it is asked about other tokens, it goes back to what both have in
/// common. Cheap to clone.
#[derive(Clone)]
pub(super) struct Walker {
    constraint: Arc<Constraint>,
    parser: TokenParser,
    /// What it has taken in, an end included.
    tokens: Vec<Token>,
    /// Whether the last of them ends a text; the parser has not been told of that one.
    has_ended: bool,
}

/// Where tokens leave the grammar: the number of the first that it does not have.
pub(super) struct Left(pub(super) usize);

impl Walker {
    pub(super) fn new(constraint: Arc<Constraint>) -> Self {
        let parser = constraint.parser();
        Self { constraint, parser, tokens: Vec::new(), has_ended: false }
    }

    /// Forgets what it has taken in: after an error it would go on with that.
    pub(super) fn begin_anew(&mut self) {
        *self = Self::new(self.constraint.clone());
    }

    /// Takes in just these tokens; stops before the first that the grammar does not have.
    ///
    /// # Errors
    /// The limits of the grammar were reached. The walker is of no use then.
    pub(super) fn seek(&mut self, tokens: &[Token]) -> Result<Result<(), Left>, ConstraintError> {
        let n_same = self.tokens.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        self.go_back(n_same)?;
        for (idx, &token) in tokens.iter().enumerate().skip(n_same) {
            if !self.take(token)? {
                return Ok(Err(Left(idx)));
            }
        }
        Ok(Ok(()))
    }

    fn go_back(&mut self, n_tokens: usize) -> Result<(), ConstraintError> {
        let n_back = self.tokens.len() - n_tokens;
        if n_back == 0 {
            return Ok(());
        }
        let n_back = n_back - usize::from(std::mem::take(&mut self.has_ended));
        self.tokens.truncate(n_tokens);
        self.guarded(|parser| parser.rollback(n_back))
    }

    /// Takes in one token more; `false` if the grammar does not have it here.
    pub(super) fn take(&mut self, token: Token) -> Result<bool, ConstraintError> {
        if self.has_ended {
            return Ok(false);
        }
        if self.constraint.is_end(token) {
            self.has_ended = self.guarded(|parser| Ok::<_, Infallible>(parser.is_accepting()))?;
            self.tokens.extend(self.has_ended.then_some(token));
            return Ok(self.has_ended);
        }
        let is_taken = self.guarded(|parser| parser.validate_token(token))?;
        if is_taken {
            let n_backtracked = self.guarded(|parser| parser.consume_token(token))?;
            assert_eq!(n_backtracked, 0, "nothing is ever taken back by itself");
            // Where nothing more can come, the parser finds that out here.
            self.guarded(TokenParser::check_stop)?;
            self.tokens.push(token);
        }
        Ok(is_taken)
    }

    /// What may come now.
    ///
    /// # Errors
    /// As for [`Self::seek`].
    pub(super) fn next(&mut self) -> Result<Next, ConstraintError> {
        if self.has_ended {
            return Ok(Next::Ended);
        }
        if self.parser.stop_reason() == StopReason::NoExtension {
            return Ok(Next::Complete);
        }
        let vocab_size = self.constraint.vocab_size();
        let set = self.guarded(|parser| match parser.compute_mask() {
            Ok(set) => Ok(Some(set)),
            // No token of the vocabulary goes on from here, and the grammar is not at an end.
            Err(_) if parser.stop_reason() == StopReason::NoExtensionBias => Ok(None),
            Err(error) => Err(error),
        })?;
        self.constraint.note_work(&self.parser)?;
        let Some(set) = set else { return Ok(Next::Mask(TokenMask::none(vocab_size))) };
        let mask = mask_of(&set, vocab_size);
        let n_ends = self.constraint.ends().iter().filter(|&&token| mask.allows(token)).count();
        let is_at_end = mask.n_allowed() == n_ends && n_ends > 0;
        Ok(if is_at_end { Next::Complete } else { Next::Mask(mask) })
    }

    /// Takes in tokens as long as the grammar has them.
    pub(super) fn read(&mut self, tokens: &[Token]) -> Result<Reading, ConstraintError> {
        let mut n_tokens = 0;
        for &token in tokens {
            let is_allowed = match self.next()? {
                Next::Mask(mask) => mask.allows(token),
                Next::Complete => self.constraint.is_end(token),
                Next::Ended => false,
            };
            assert_eq!(is_allowed, self.take(token)?, "the mask says what is taken");
            if !is_allowed {
                break;
            }
            n_tokens += 1;
        }
        let may_end = match self.next()? {
            Next::Mask(_) => self.guarded(|parser| Ok::<_, Infallible>(parser.is_accepting()))?,
            Next::Complete | Next::Ended => true,
        };
        Ok(Reading { n_tokens, may_end })
    }

    /// Runs the library, whose panics end no more than this grammar.
    fn guarded<T, E: Display>(
        &mut self,
        act: impl FnOnce(&mut TokenParser) -> Result<T, E>,
    ) -> Result<T, ConstraintError> {
        let parser = &mut self.parser;
        match catch_unwind(AssertUnwindSafe(|| act(parser))) {
            Ok(Ok(result)) => Ok(result),
            Ok(Err(error)) => Err(ConstraintError::TooComplex { reason: reason_of(&error) }),
            Err(_) => Err(ConstraintError::TooComplex { reason: "the library panicked".to_owned() }),
        }
    }
}

/// The set as a mask.
fn mask_of(set: &SimpleVob, vocab_size: usize) -> TokenMask {
    let halves = set.as_slice().chunks(2);
    let word = |halves: &[u32]| u64::from(halves[0]) | u64::from(halves.get(1).copied().unwrap_or(0)) << 32;
    let mut words: Vec<u64> = halves.map(word).collect();
    words.resize(vocab_size.div_ceil(64), 0);
    TokenMask::from_words(words, vocab_size).expect("as many words as the vocabulary fills")
}
