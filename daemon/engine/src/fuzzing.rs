//! What fuzzers and simulations run beside the public API. Nothing else uses it, and without the feature `fuzzing` it is not there.

use std::sync::Arc;

use crate::account::Account;
use crate::batch::Token;
use crate::constraint::{
    Begins, Constraint, ConstraintError, ConstraintLimits, Grammar, Next, Rule, Vocabulary, Walk,
};
pub use crate::engine::driven::{Awaited, EngineHolds, EngineLoop};
use crate::model::Model;
use crate::sampling::TokenMask;
pub use crate::sampling::fuzzing::{exp, log};
pub use crate::scheduler::tests::fuzzed::run as run_scheduler;
pub use crate::scheduler::tests::hostile::run as run_operations;

/// A vocabulary for which grammars are compiled, without an engine.
#[derive(Debug)]
pub struct Grammars {
    model: Arc<Model>,
    vocabulary: Arc<Vocabulary>,
}

impl Grammars {
    /// Works out what grammars need of a model's vocabulary.
    ///
    /// # Errors
    /// The vocabulary is too large.
    pub fn new(model: Arc<Model>) -> Result<Self, ConstraintError> {
        let vocabulary = Arc::new(Vocabulary::of(&model)?);
        Ok(Self { model, vocabulary })
    }

    /// As [`Constraint::compile`].
    ///
    /// # Errors
    /// As there.
    pub fn compile(
        &self,
        grammar: &Grammar,
        limits: ConstraintLimits,
        account: &Arc<Account>,
    ) -> Result<Arc<Constraint>, ConstraintError> {
        Constraint::over(grammar, &self.model, self.vocabulary.clone(), limits, account).map(Arc::new)
    }
}

/// What may come after tokens of a grammar.
#[derive(Clone, Debug, PartialEq)]
pub enum Allowed {
    /// These tokens, of which there may be none.
    Mask(TokenMask),
    /// Nothing more but the end.
    Complete,
    /// Nothing: the text has ended.
    Ended,
}

/// A walk through one grammar, as a context has it.
#[derive(Debug)]
pub struct Matcher {
    rule: Rule,
    walk: Walk,
}

impl Matcher {
    /// One that has not been used.
    #[must_use]
    pub fn new(constraint: Arc<Constraint>) -> Self {
        Self { rule: Rule::new(constraint, Begins::FirstDraw), walk: Walk::default() }
    }

    /// What may come after these tokens, whatever it was asked before.
    ///
    /// # Errors
    /// The tokens have left the grammar, or its limits were reached.
    pub fn next(&self, tokens: &[Token]) -> Result<Allowed, ConstraintError> {
        let mut nexts = self.walk.next(&self.rule, 0, tokens.len(), tokens, &[], None)?;
        Ok(match nexts.remove(0) {
            Next::Mask(mask) => Allowed::Mask(mask),
            Next::Complete => Allowed::Complete,
            Next::Ended => Allowed::Ended,
        })
    }
}
