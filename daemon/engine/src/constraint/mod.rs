//! Constraints: grammars that what a context draws keeps to.
//!
//! In comes a [`Grammar`], a text that a stranger may have written; out of it comes a [`Constraint`], or an error that says
//! what is wrong and where. A constraint and where it begins are a [`Rule`]. What may come at a position is a function of the
//! rule and of the tokens before: whatever else is kept is kept to find it sooner, and a fork, a truncation or an edit leaves
//! nothing wrong behind.
//!
//! Grammars are worked on by [llguidance](https://github.com/guidance-ai/llguidance): an Earley parser over lexemes whose
//! regular expressions are matched by derivatives, walked over a trie of the vocabulary.
//!
//! What must not happen: a token drawn that the grammar refuses; a part of a grammar that is not understood and left out; a
//! grammar that takes longer, or more memory, than its limits say. Nothing here reads a clock: work is bounded by counts, so
//! that a grammar that is refused on one machine is refused on all.

mod begins;
mod error;
mod expected;
mod extent;
mod formats;
mod grammar;
mod keywords;
mod regexes;
mod rule;
#[cfg(test)]
mod tests;
mod trial;
mod vocabulary;
mod walker;

pub use self::begins::Begins;
pub use self::error::ConstraintError;
pub(crate) use self::expected::Expected;
pub use self::grammar::{Constraint, ConstraintLimits, Grammar, STACK_BYTES, Whitespace};
pub use self::rule::Rule;
pub(crate) use self::rule::{Begun, Walk};
pub use self::trial::Trial;
pub(crate) use self::vocabulary::Vocabulary;
pub(crate) use self::walker::Next;
pub use self::walker::Reading;
