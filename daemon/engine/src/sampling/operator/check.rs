//! What may stand in front.

use trellis_programs::{Definition, Operation};

use super::{FRONT_COST_MAX, N_FRONT_OPERATIONS_MAX, N_FRONT_OVER_LOGITS_MAX};
use crate::batch::Token;
use crate::sampling::program::{Program, ProgramError, RowShape};

/// Why something may not stand in front of everybody's samplers. Operations are counted from 0.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum OperatorError {
    /// It is no program.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// It ends in a token.
    #[error("the operator's program ends in a token, and what stands in front of samplers ends in a row")]
    EndsInAToken,
    /// It keeps or reports numbers.
    #[error(
        "the operator's program keeps {n_state} numbers and reports {n_reports}, and may neither keep nor report any"
    )]
    KeepsNumbers {
        /// Numbers of state.
        n_state: usize,
        /// Numbers that it reports.
        n_reports: usize,
    },
    /// It is too long.
    #[error("the operator's program has {n} {what}, at most {max} are allowed")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many.
        n: usize,
        /// The most.
        max: usize,
    },
    /// It costs too much.
    #[error("the operator's program costs {cost:.1} readings of the row, at most {max} are allowed")]
    TooCostly {
        /// Readings of the row.
        cost: f32,
        /// The most.
        max: f32,
    },
    /// An operation over what only a sampler is given, or that draws.
    #[error(
        "operation {idx} of the operator's program is {operation}, which may not stand in front of samplers"
    )]
    NotInFront {
        /// The operation.
        idx: usize,
        /// Its name.
        operation: &'static str,
    },
    /// A forbidden token that the model does not have.
    #[error("the operator forbids token {token}, and the vocabulary has {vocab_size} entries")]
    TokenOutOfRange {
        /// The token.
        token: Token,
        /// Entries of the vocabulary.
        vocab_size: usize,
    },
    /// All tokens are forbidden.
    #[error("the operator forbids all {n_forbidden} tokens of the vocabulary")]
    NothingLeft {
        /// How many.
        n_forbidden: usize,
    },
}

/// Checks a program.
pub(super) fn front(definition: Definition, shape: RowShape) -> Result<Program, OperatorError> {
    let too_many = |what, n, max| if n > max { Err(OperatorError::TooMany { what, n, max }) } else { Ok(()) };
    too_many("operations", definition.operations.len(), N_FRONT_OPERATIONS_MAX)?;
    let program = Program::new(definition, shape)?;
    let definition = program.definition();
    let (n_state, n_reports) = (definition.first_state.len(), definition.reports.len());
    if n_state > 0 || n_reports > 0 {
        return Err(OperatorError::KeepsNumbers { n_state, n_reports });
    }
    if let Some(idx) = definition.operations.iter().position(is_of_a_sampler) {
        return Err(OperatorError::NotInFront { idx, operation: definition.operations[idx].name() });
    }
    if program.ends_in_a_token() {
        return Err(OperatorError::EndsInAToken);
    }
    too_many("operations that depend on the logits", n_over_logits(definition), N_FRONT_OVER_LOGITS_MAX)?;
    match program.cost() {
        cost if cost > FRONT_COST_MAX => Err(OperatorError::TooCostly { cost, max: FRONT_COST_MAX }),
        _ => Ok(program),
    }
}

/// Whether it is over what a sampler is given, of which there are only so many, or what draws.
fn is_of_a_sampler(operation: &Operation) -> bool {
    matches!(
        operation,
        Operation::Member(_)
            | Operation::CountLast { .. }
            | Operation::CountSince(_)
            | Operation::Repeats { .. }
            | Operation::Ngrams { .. }
            | Operation::Bias(_)
            | Operation::Mask(_)
            | Operation::Constraint
            | Operation::Parameter(_)
            | Operation::ParameterToken(_)
            | Operation::State(_)
            | Operation::Drawn
            | Operation::Argmax(_)
            | Operation::Draw(..)
    )
}

fn n_over_logits(definition: &Definition) -> usize {
    let mut depends = Vec::with_capacity(definition.operations.len());
    for operation in &definition.operations {
        let depends_on_one = operation.operands().any(|value| depends[usize::from(value.0)]);
        depends.push(*operation == Operation::Logits || depends_on_one);
    }
    let is_more = |(operation, depends): &(&Operation, bool)| *depends && **operation != Operation::Logits;
    definition.operations.iter().zip(depends).filter(is_more).count()
}
