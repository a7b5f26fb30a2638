//! A whole program, unchecked.

use crate::builder::{Builder, Row, Token};
use crate::operation::{Operation, Value};

/// What a program gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum End {
    /// A token: the one that is drawn.
    Token(Value),
    /// A row in place of the logits: what beams, distributions and mixtures take.
    Row(Value),
}

impl End {
    /// The value that it names.
    #[must_use]
    pub fn value(self) -> Value {
        match self {
            Self::Token(value) | Self::Row(value) => value,
        }
    }
}

/// A program as its author wrote it. Whether it can be run is found out when it is made.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Definition {
    /// The operations, each over values before its own.
    pub operations: Vec<Operation>,
    /// What it gives.
    pub end: End,
    /// The state at first: as many numbers as there are.
    pub first_state: Vec<f32>,
    /// The state that it leaves to the next token, number for number.
    pub next_state: Vec<Value>,
    /// Numbers that are reported with the token.
    pub reports: Vec<Value>,
}

impl Definition {
    /// Builds a program that ends in a token: the closure writes it and returns the token.
    ///
    /// # Panics
    /// The program has more than 256 operations.
    #[must_use]
    pub fn build(write: impl for<'b> FnOnce(&'b Builder) -> Token<'b>) -> Self {
        let builder = Builder::default();
        let end = End::Token(write(&builder).value());
        builder.finish(end)
    }

    /// Builds a program that ends in a row: the closure writes it and returns the row.
    ///
    /// # Panics
    /// The program has more than 256 operations.
    #[must_use]
    pub fn build_row(write: impl for<'b> FnOnce(&'b Builder) -> Row<'b>) -> Self {
        let builder = Builder::default();
        let end = End::Row(write(&builder).value());
        builder.finish(end)
    }
}
