//! Why a program is refused.

use serde::{Deserialize, Serialize};
use trellis_programs::Kind;

use crate::port::{Name, names};

/// What is wrong with a program. Operations are counted from 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, thiserror::Error)]
pub enum ProgramError {
    /// There is more of something than a program may have.
    #[error("the program has {n} {what}, at most {max} are allowed")]
    TooMany {
        /// Of what.
        #[serde(with = "names")]
        what: Name,
        /// How many there are.
        n: usize,
        /// How many there may be.
        max: usize,
    },
    /// An operation takes a value that is not made before it.
    #[error("operation {idx}, {operation}, takes value {operand}, which is not made before it")]
    NotMadeBefore {
        /// The operation.
        idx: usize,
        /// Its name.
        #[serde(with = "names")]
        operation: Name,
        /// The value.
        operand: usize,
    },
    /// An operation takes a value of another kind.
    #[error("operation {idx}, {operation}, takes {expected}, and value {operand} is {}", found.name())]
    WrongKind {
        /// The operation.
        idx: usize,
        /// Its name.
        #[serde(with = "names")]
        operation: Name,
        /// The value.
        operand: usize,
        /// What it should be.
        #[serde(with = "names")]
        expected: Name,
        /// What it is.
        found: Kind,
    },
    /// A number in an operation is out of its range.
    #[error("operation {idx}, {operation}: {argument} is {value}, expected {expected}")]
    OutOfRange {
        /// The operation.
        idx: usize,
        /// Its name.
        #[serde(with = "names")]
        operation: Name,
        /// Which number.
        #[serde(with = "names")]
        argument: Name,
        /// What it is.
        value: f64,
        /// What it may be.
        #[serde(with = "names")]
        expected: Name,
    },
    /// What the program ends in, leaves or reports is not made or of another kind.
    #[error("the program's {what} is value {operand}, which is not {expected} that it makes")]
    WrongEnd {
        /// The end, a number of state, or a report.
        #[serde(with = "names")]
        what: Name,
        /// The value.
        operand: usize,
        /// What it should be.
        #[serde(with = "names")]
        expected: Name,
    },
    /// The program leaves more or fewer numbers of state than it has.
    #[error("the program has {n_first} numbers of state and leaves {n_next}")]
    StateLength {
        /// Numbers at first.
        n_first: usize,
        /// Numbers that it leaves.
        n_next: usize,
    },
    /// Reductions depend on one another in too long a line.
    #[error("operation {idx}, {operation}, is {depth} reductions deep, at most {max} are allowed")]
    TooDeep {
        /// The operation.
        idx: usize,
        /// Its name.
        #[serde(with = "names")]
        operation: Name,
        /// How deep.
        depth: usize,
        /// How deep it may be.
        max: usize,
    },
    /// The program costs too much.
    #[error(
        "the program costs {cost:.1} readings of the row, at most {max} are allowed; operation {idx}, {operation}, costs most, {most:.1}"
    )]
    TooCostly {
        /// Readings of the row of logits.
        cost: f32,
        /// At most so many.
        max: f32,
        /// The operation that costs most.
        idx: usize,
        /// Its name.
        #[serde(with = "names")]
        operation: Name,
        /// What it costs.
        most: f32,
    },
}
