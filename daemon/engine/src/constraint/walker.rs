//! A matcher of one grammar, and the tokens that it has taken in.

use std::convert::Infallible;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use llguidance::TokenParser;
use llguidance::api::StopReason;
use toktrie::SimpleVob;

use super::ConstraintError;
use super::extent::{Chart, Extent};
use super::grammar::{Constraint, reason_of};
use crate::account::{BudgetExceeded, HostCharge};
use crate::batch::Token;
use crate::sampling::TokenMask;

/// Memory of a matcher in a grammar of many rules, some hundred tokens into it: what each is charged for, whatever it holds.
pub(super) const WALK_BYTES: u64 = 16 << 10;

/// A matcher's charge grows by so much at once.
const CHARGE_STEP_BYTES: u64 = 4 << 10;

/// Items of a parse, at most. An ordinary grammar has some tens for a token, which is enough for the longest contexts; one that
/// has thousands takes a millisecond or two for each token, and comes to its end here after half a minute.
const N_ITEMS_MAX: usize = 1 << 25;

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
/// common.
pub(super) struct Walker {
    constraint: Arc<Constraint>,
    parser: TokenParser,
    /// What it has taken in, an end included.
    tokens: Vec<Token>,
    /// Whether the last of them ends a text; the parser has not been told of that one.
    has_ended: bool,
    extent: Extent,
    /// For what it holds beyond [`WALK_BYTES`]; none where nobody pays.
    charge: Option<HostCharge>,
}

/// Where tokens leave the grammar: the number of the first that it does not have.
pub(super) struct Left(pub(super) usize);

impl Walker {
    /// One at the beginning, with a charge that has nothing on it yet.
    pub(super) fn new(constraint: Arc<Constraint>, charge: Option<HostCharge>) -> Self {
        let parser = constraint.parser();
        let extent = Extent::of_new(&parser);
        Self { constraint, parser, tokens: Vec::new(), has_ended: false, extent, charge }
    }

    /// One that stands where this one does. It is paid for before it is there.
    ///
    /// # Errors
    /// There is no host memory left for it.
    pub(super) fn fork(&self, mut charge: Option<HostCharge>) -> Result<Self, BudgetExceeded> {
        if let Some(charge) = &mut charge {
            charge.resize(to_charge(self.extent.n_bytes_known()))?;
        }
        Ok(Self {
            constraint: self.constraint.clone(),
            parser: self.parser.clone(),
            tokens: self.tokens.clone(),
            has_ended: self.has_ended,
            extent: self.extent.clone(),
            charge,
        })
    }

    /// Forgets what it has taken in: after an error it would go on with that.
    pub(super) fn begin_anew(&mut self) {
        let charge = self.charge.take();
        *self = Self::new(self.constraint.clone(), charge);
    }

    /// Takes in just these tokens; stops before the first that the grammar does not have.
    ///
    /// # Errors
    /// The limits of the grammar were reached, or there is no host memory left for it. The walker is of no use then.
    pub(super) fn seek(&mut self, tokens: &[Token]) -> Result<Result<(), Left>, ConstraintError> {
        let n_same = self.go_back_to(tokens)?;
        for (idx, &token) in tokens.iter().enumerate().skip(n_same) {
            if !self.take(token)? {
                return Ok(Err(Left(idx)));
            }
        }
        Ok(Ok(()))
    }

    /// Takes in at least one of these tokens, and more until its time is over; whether nothing is left to be taken in.
    ///
    /// # Errors
    /// As for [`Self::seek`].
    pub(super) fn come_near(
        &mut self,
        tokens: &[Token],
        is_over: &mut dyn FnMut() -> bool,
    ) -> Result<bool, ConstraintError> {
        let n_same = self.go_back_to(tokens)?;
        for (idx, &token) in tokens.iter().enumerate().skip(n_same) {
            // Where they leave the grammar, whoever seeks them is told.
            if !self.take(token)? {
                break;
            }
            if is_over() {
                return Ok(idx + 1 == tokens.len());
            }
        }
        Ok(true)
    }

    /// Goes back to what it has in common with these tokens; how many that are.
    fn go_back_to(&mut self, tokens: &[Token]) -> Result<usize, ConstraintError> {
        let n_same = self.tokens.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        self.go_back(n_same)?;
        Ok(n_same)
    }

    fn go_back(&mut self, n_tokens: usize) -> Result<(), ConstraintError> {
        let n_back = self.tokens.len() - n_tokens;
        if n_back == 0 {
            return Ok(());
        }
        let n_back = n_back - usize::from(std::mem::take(&mut self.has_ended));
        self.tokens.truncate(n_tokens);
        self.extent.go_back(n_tokens);
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
            let before = Chart::made_by(&self.parser);
            let n_backtracked = self.guarded(|parser| parser.consume_token(token))?;
            self.extent.take(before, &self.parser);
            assert_eq!(n_backtracked, 0, "nothing is ever taken back by itself");
            // Where nothing more can come, the parser finds that out here.
            self.guarded(TokenParser::check_stop)?;
            self.tokens.push(token);
        }
        self.pay()?;
        Ok(is_taken)
    }

    /// Charges what it holds by now.
    fn pay(&mut self) -> Result<(), ConstraintError> {
        if self.extent.n_items() > N_ITEMS_MAX {
            let reason = format!("its rules go on in more than {N_ITEMS_MAX} ways, over all tokens");
            return Err(ConstraintError::TooComplex { reason });
        }
        let n_bytes = self.extent.n_bytes(&self.parser, self.constraint.vocab_size());
        if let Some(charge) = &mut self.charge {
            charge.resize(to_charge(n_bytes))?;
        }
        Ok(())
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
        self.pay()?;
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
        let before = Chart::made_by(&self.parser);
        let parser = &mut self.parser;
        let acted = catch_unwind(AssertUnwindSafe(|| act(parser)));
        self.extent.note(before, &self.parser);
        match acted {
            Ok(Ok(result)) => Ok(result),
            Ok(Err(error)) => Err(ConstraintError::TooComplex { reason: reason_of(&error) }),
            Err(_) => Err(ConstraintError::TooComplex { reason: "the library panicked".to_owned() }),
        }
    }
}

/// What is charged for a matcher of so many bytes, beyond what each is charged for.
fn to_charge(n_bytes: u64) -> u64 {
    n_bytes.saturating_sub(WALK_BYTES).next_multiple_of(CHARGE_STEP_BYTES)
}

/// The set as a mask.
fn mask_of(set: &SimpleVob, vocab_size: usize) -> TokenMask {
    let halves = set.as_slice().chunks(2);
    let word = |halves: &[u32]| u64::from(halves[0]) | u64::from(halves.get(1).copied().unwrap_or(0)) << 32;
    let mut words: Vec<u64> = halves.map(word).collect();
    words.resize(vocab_size.div_ceil(64), 0);
    TokenMask::from_words(words, vocab_size).expect("as many words as the vocabulary fills")
}
