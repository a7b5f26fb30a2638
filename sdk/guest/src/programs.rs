//! Logit programs: samplers of one's own at the speed of the built-in ones.
//!
//! ```no_run
//! # use trellis_guest::{Model, Result, Sampler};
//! use trellis_guest::programs::{Definition, Source, library};
//!
//! # fn f(model: &Model) -> Result<()> {
//! let definition = Definition::build(|b| {
//!     let x = library::temperature(b.logits(), 0.8);
//!     library::typical(x, 0.9).draw(Source::SEED)
//! });
//! let sampler = Sampler::by_program(&model.program(&definition)?, 7);
//! # Ok(()) }
//! ```

use crate::bindings::trellis::host::programs as raw;
use crate::{Model, Result, Token};
#[doc(inline)]
pub use trellis_programs::{
    BiasId, Binary, Builder, Comparison, Definition, End, MaskId, Noise, Number, Operation, Reduction, Row,
    Set, Source, State, Unary, library,
};

/// A program that was checked for a model. [`Sampler::by_program`](crate::Sampler::by_program) puts it on.
#[derive(Debug)]
pub struct Program {
    pub(crate) raw: raw::Program,
}

impl Program {
    /// What a token costs, in readings of the row of logits, at most 16.
    pub fn cost(&self) -> f32 {
        self.raw.cost()
    }
}

/// A number for each token, for programs to add.
#[derive(Debug)]
pub struct TokenBias {
    pub(crate) raw: raw::TokenBias,
}

impl TokenBias {
    /// Numbers for these tokens, 0 for all others; of two for one token the later counts.
    ///
    /// # Errors
    /// [`TokenOutOfRange`](crate::Error::TokenOutOfRange), or
    /// [`InvalidArgument`](crate::Error::InvalidArgument) for a NaN or +∞.
    pub fn sparse(model: &Model, entries: &[(Token, f32)]) -> Result<Self> {
        Ok(Self { raw: raw::TokenBias::sparse(model.raw(), entries)? })
    }

    /// A number for each token of the vocabulary.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Error::InvalidArgument) for a NaN, +∞, or another number of values.
    pub fn dense(model: &Model, values: &[f32]) -> Result<Self> {
        Ok(Self { raw: raw::TokenBias::dense(model.raw(), values)? })
    }
}

impl Model {
    /// Checks a program for this model.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Error::InvalidArgument), with the operation and what is wrong with it.
    pub fn program(&self, definition: &Definition) -> Result<Program> {
        Ok(Program { raw: raw::Program::check(self.raw(), &as_raw(definition))? })
    }
}

pub(crate) fn as_raw(definition: &Definition) -> raw::Definition {
    let places = |values: &[trellis_programs::Value]| values.iter().map(|value| value.0).collect();
    raw::Definition {
        operations: definition.operations.iter().map(operation).collect(),
        end: definition.end.value().0,
        first_state: definition.first_state.clone(),
        next_state: places(&definition.next_state),
        reports: places(&definition.reports),
    }
}

fn source(source: Source) -> raw::Source {
    match source {
        Source::Seed { lane } => raw::Source::Seed(lane),
        Source::Key { key, n_tokens, lane } => raw::Source::Key(raw::KeySource { key, n_tokens, lane }),
    }
}

fn operation(operation: &Operation) -> raw::Operation {
    match *operation {
        Operation::Logits => raw::Operation::Logits,
        Operation::Member(idx) => raw::Operation::Member(idx),
        Operation::LogSoftmax(x) => raw::Operation::LogSoftmax(x.0),
        Operation::CountLast { n } => raw::Operation::CountLast(n),
        Operation::CountSince(x) => raw::Operation::CountSince(x.0),
        Operation::Repeats { window, cap, breakers } => {
            let breakers = breakers.map(|MaskId(id)| id);
            raw::Operation::Repeats(raw::Repeats { window, cap, breakers })
        }
        Operation::Bias(BiasId(id)) => raw::Operation::Bias(id),
        Operation::NoiseRow { noise, source: from } => raw::Operation::Noise((
            match noise {
                Noise::Uniform => raw::Noise::Uniform,
                Noise::Gumbel => raw::Noise::Gumbel,
            },
            source(from),
        )),
        Operation::Uniform(from) => raw::Operation::Uniform(source(from)),
        Operation::Unary(how, x) => raw::Operation::Unary((
            match how {
                Unary::Neg => raw::Unary::Neg,
                Unary::Abs => raw::Unary::Abs,
                Unary::Sqrt => raw::Unary::Sqrt,
                Unary::Exp => raw::Unary::Exp,
                Unary::Log => raw::Unary::Log,
            },
            x.0,
        )),
        Operation::Binary(how, x, y) => raw::Operation::Binary((
            match how {
                Binary::Add => raw::Binary::Add,
                Binary::Sub => raw::Binary::Sub,
                Binary::Mul => raw::Binary::Mul,
                Binary::Div => raw::Binary::Div,
                Binary::Min => raw::Binary::Min,
                Binary::Max => raw::Binary::Max,
            },
            (x.0, y.0),
        )),
        Operation::Compare(how, x, y) => raw::Operation::Compare((
            match how {
                Comparison::Less => raw::Comparison::Less,
                Comparison::LessEqual => raw::Comparison::LessEqual,
                Comparison::Equal => raw::Comparison::Equal,
                Comparison::NotEqual => raw::Comparison::NotEqual,
                Comparison::GreaterEqual => raw::Comparison::GreaterEqual,
                Comparison::Greater => raw::Comparison::Greater,
            },
            (x.0, y.0),
        )),
        Operation::And(x, y) => raw::Operation::Both((x.0, y.0)),
        Operation::Or(x, y) => raw::Operation::Either((x.0, y.0)),
        Operation::Not(x) => raw::Operation::Complement(x.0),
        Operation::Mask(MaskId(id)) => raw::Operation::Mask(id),
        Operation::Constraint => raw::Operation::Constraint,
        Operation::Largest { row, k } => raw::Operation::Largest((row.0, k.0)),
        Operation::Nucleus { order, row, p } => {
            raw::Operation::Nucleus(raw::Nucleus { order: order.0, row: row.0, p: p.0 })
        }
        Operation::Ngrams { n, window } => raw::Operation::Ngrams(raw::Ngrams { n, window }),
        Operation::Only(x) => raw::Operation::Only(x.0),
        Operation::All => raw::Operation::All,
        Operation::Nothing => raw::Operation::Nothing,
        Operation::Constant(number) => raw::Operation::Constant(number),
        Operation::Parameter(idx) => raw::Operation::Parameter(idx),
        Operation::State(idx) => raw::Operation::State(idx),
        Operation::Position => raw::Operation::Position,
        Operation::Length => raw::Operation::Length,
        Operation::Drawn => raw::Operation::Drawn,
        Operation::Reduce(how, row, set) => raw::Operation::Reduce((
            match how {
                Reduction::Max => raw::Reduction::Max,
                Reduction::Sum => raw::Reduction::Sum,
                Reduction::Mean => raw::Reduction::Mean,
                Reduction::Variance => raw::Reduction::Variance,
                Reduction::LogSumExp => raw::Reduction::LogSumExp,
                Reduction::Entropy => raw::Reduction::Entropy,
            },
            (row.0, set.0),
        )),
        Operation::Count(set) => raw::Operation::Count(set.0),
        Operation::At(row, token) => raw::Operation::At((row.0, token.0)),
        Operation::Argmax(row) => raw::Operation::Argmax(row.0),
        Operation::Draw(row, from) => raw::Operation::Draw((row.0, source(from))),
        Operation::ParameterToken(idx) => raw::Operation::ParameterToken(idx),
        Operation::Select(condition, yes, no) => {
            raw::Operation::Select(raw::Selection { condition: condition.0, yes: yes.0, no: no.0 })
        }
    }
}
