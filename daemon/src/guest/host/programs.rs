//! `programs`

use std::sync::Arc;

use trellis_engine::account::HostCharge;
use trellis_engine::sampling::program::{Definition, End, Operation, Program, ProgramError, RowShape};
use trellis_engine::sampling::{Bias, SamplerError};
use trellis_programs::{BiasId, Binary, Comparison, MaskId, Noise, Reduction, Source, Unary, Value};
use wasmtime::component::Resource;

use super::convert::invalid;
use super::types::{GuestBias, GuestModel, GuestProgram, HeldBias, HostError};
use crate::guest::bindings::trellis::host::programs as wit;
use crate::guest::bindings::trellis::host::programs::{Host, HostProgram, HostTokenBias};
use crate::guest::store::GuestState;

/// Host memory that a checked program takes, at most: 128 operations with what was found out about them.
const PROGRAM_BYTES: u64 = 8 << 10;

impl GuestState {
    fn give_bias(
        &mut self,
        model: &Resource<GuestModel>,
        make: impl FnOnce(usize) -> Result<Bias, SamplerError>,
    ) -> Result<Resource<GuestBias>, HostError> {
        let model = self.table.get(model)?.model.clone();
        let bias = make(model.limits().vocab_size)?;
        let charge = HostCharge::new(&self.owner.account, bias.n_bytes() as u64)?;
        self.give(GuestBias { held: Arc::new(HeldBias { bias: Arc::new(bias), model, charge }) })
    }
}

impl Host for GuestState {}

impl HostProgram for GuestState {
    fn check(
        &mut self,
        model: Resource<GuestModel>,
        definition: wit::Definition,
    ) -> Result<Resource<GuestProgram>, HostError> {
        let model = self.table.get(&model)?.model.clone();
        let limits = model.limits();
        let shape = RowShape { vocab_size: limits.vocab_size, n_positions: limits.n_positions_max };
        let program = Program::new(unchecked(definition, End::Token), shape)?;
        let charge = Arc::new(HostCharge::new(&self.owner.account, PROGRAM_BYTES)?);
        self.give(GuestProgram { program: Arc::new(program), model, charge })
    }

    fn cost(&mut self, program: Resource<GuestProgram>) -> wasmtime::Result<f32> {
        Ok(self.table.get(&program)?.program.cost())
    }

    fn drop(&mut self, program: Resource<GuestProgram>) -> wasmtime::Result<()> {
        self.table.delete(program)?;
        Ok(())
    }
}

impl HostTokenBias for GuestState {
    fn sparse(
        &mut self,
        model: Resource<GuestModel>,
        entries: Vec<(u32, f32)>,
    ) -> Result<Resource<GuestBias>, HostError> {
        self.give_bias(&model, |vocab_size| Bias::sparse(entries, vocab_size))
    }

    fn dense(
        &mut self,
        model: Resource<GuestModel>,
        values: Vec<f32>,
    ) -> Result<Resource<GuestBias>, HostError> {
        self.give_bias(&model, |vocab_size| Bias::dense(values, vocab_size))
    }

    fn drop(&mut self, bias: Resource<GuestBias>) -> wasmtime::Result<()> {
        self.table.delete(bias)?;
        Ok(())
    }
}

impl From<ProgramError> for HostError {
    fn from(error: ProgramError) -> Self {
        invalid("program", error, "one that keeps to the limits of `programs`")
    }
}

/// A program of a policy's, which ends in a row.
pub(crate) fn row_definition(definition: wit::Definition) -> Definition {
    unchecked(definition, End::Row)
}

fn unchecked(definition: wit::Definition, end: fn(Value) -> End) -> Definition {
    let values = |places: Vec<u8>| places.into_iter().map(Value).collect();
    Definition {
        operations: definition.operations.into_iter().map(operation).collect(),
        end: end(Value(definition.end)),
        first_state: definition.first_state,
        next_state: values(definition.next_state),
        reports: values(definition.reports),
    }
}

fn source(source: wit::Source) -> Source {
    match source {
        wit::Source::Seed(lane) => Source::Seed { lane },
        wit::Source::Key(wit::KeySource { key, n_tokens, lane }) => Source::Key { key, n_tokens, lane },
    }
}

fn operation(operation: wit::Operation) -> Operation {
    match operation {
        wit::Operation::Logits => Operation::Logits,
        wit::Operation::Member(idx) => Operation::Member(idx),
        wit::Operation::LogSoftmax(x) => Operation::LogSoftmax(Value(x)),
        wit::Operation::CountLast(n) => Operation::CountLast { n },
        wit::Operation::CountSince(x) => Operation::CountSince(Value(x)),
        wit::Operation::Repeats(wit::Repeats { window, cap, breakers }) => {
            Operation::Repeats { window, cap, breakers: breakers.map(MaskId) }
        }
        wit::Operation::Bias(id) => Operation::Bias(BiasId(id)),
        wit::Operation::Noise((noise, from)) => {
            let noise = match noise {
                wit::Noise::Uniform => Noise::Uniform,
                wit::Noise::Gumbel => Noise::Gumbel,
            };
            Operation::NoiseRow { noise, source: source(from) }
        }
        wit::Operation::Uniform(from) => Operation::Uniform(source(from)),
        wit::Operation::Unary((how, x)) => {
            let how = match how {
                wit::Unary::Neg => Unary::Neg,
                wit::Unary::Abs => Unary::Abs,
                wit::Unary::Sqrt => Unary::Sqrt,
                wit::Unary::Exp => Unary::Exp,
                wit::Unary::Log => Unary::Log,
            };
            Operation::Unary(how, Value(x))
        }
        wit::Operation::Binary((how, (x, y))) => {
            let how = match how {
                wit::Binary::Add => Binary::Add,
                wit::Binary::Sub => Binary::Sub,
                wit::Binary::Mul => Binary::Mul,
                wit::Binary::Div => Binary::Div,
                wit::Binary::Min => Binary::Min,
                wit::Binary::Max => Binary::Max,
            };
            Operation::Binary(how, Value(x), Value(y))
        }
        wit::Operation::Compare((how, (x, y))) => {
            let how = match how {
                wit::Comparison::Less => Comparison::Less,
                wit::Comparison::LessEqual => Comparison::LessEqual,
                wit::Comparison::Equal => Comparison::Equal,
                wit::Comparison::NotEqual => Comparison::NotEqual,
                wit::Comparison::GreaterEqual => Comparison::GreaterEqual,
                wit::Comparison::Greater => Comparison::Greater,
            };
            Operation::Compare(how, Value(x), Value(y))
        }
        wit::Operation::Both((x, y)) => Operation::And(Value(x), Value(y)),
        wit::Operation::Either((x, y)) => Operation::Or(Value(x), Value(y)),
        wit::Operation::Complement(x) => Operation::Not(Value(x)),
        wit::Operation::Mask(id) => Operation::Mask(MaskId(id)),
        wit::Operation::Constraint => Operation::Constraint,
        wit::Operation::Largest((row, k)) => Operation::Largest { row: Value(row), k: Value(k) },
        wit::Operation::Nucleus(wit::Nucleus { order, row, p }) => {
            Operation::Nucleus { order: Value(order), row: Value(row), p: Value(p) }
        }
        wit::Operation::Ngrams(wit::Ngrams { n, window }) => Operation::Ngrams { n, window },
        wit::Operation::Only(x) => Operation::Only(Value(x)),
        wit::Operation::All => Operation::All,
        wit::Operation::Nothing => Operation::Nothing,
        wit::Operation::Constant(number) => Operation::Constant(number),
        wit::Operation::Parameter(idx) => Operation::Parameter(idx),
        wit::Operation::State(idx) => Operation::State(idx),
        wit::Operation::Position => Operation::Position,
        wit::Operation::Length => Operation::Length,
        wit::Operation::Drawn => Operation::Drawn,
        wit::Operation::Reduce((how, (row, set))) => {
            let how = match how {
                wit::Reduction::Max => Reduction::Max,
                wit::Reduction::Sum => Reduction::Sum,
                wit::Reduction::Mean => Reduction::Mean,
                wit::Reduction::Variance => Reduction::Variance,
                wit::Reduction::LogSumExp => Reduction::LogSumExp,
                wit::Reduction::Entropy => Reduction::Entropy,
            };
            Operation::Reduce(how, Value(row), Value(set))
        }
        wit::Operation::Count(set) => Operation::Count(Value(set)),
        wit::Operation::At((row, token)) => Operation::At(Value(row), Value(token)),
        wit::Operation::Argmax(row) => Operation::Argmax(Value(row)),
        wit::Operation::Draw((row, from)) => Operation::Draw(Value(row), source(from)),
        wit::Operation::ParameterToken(idx) => Operation::ParameterToken(idx),
        wit::Operation::Select(wit::Selection { condition, yes, no }) => {
            Operation::Select(Value(condition), Value(yes), Value(no))
        }
    }
}
