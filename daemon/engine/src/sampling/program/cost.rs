//! What a program costs, known before it runs.
//!
//! The unit is one reading of the row of logits. Each reduction reads the row once, and computes again what it needs entry by
//! entry; a selection reads it once and what is near its bound again, however much that is; by another order than that of
//! the row it reads the row twice, or four times where the order is not in nats and its spread is not known.

use trellis_programs::{Binary, Definition, Kind, Noise, Operation, Reduction, Unary, Value};

use super::check::is_reduction;
use super::{COST_MAX, ProgramError, RowShape};

/// Simple operations for each entry that take as long as reading it.
const N_SIMPLE_A_READING: f32 = 32.0;

/// Entries of a row that are read as fast as fewer.
const SHORT_ROW: usize = 1 << 16;

/// The cost of a token, or why it is too much.
pub(super) fn of(
    definition: &Definition,
    kinds: &[Kind],
    is_needed: &[bool],
    shape: RowShape,
) -> Result<f32, ProgramError> {
    let operations = &definition.operations;
    let in_nats = in_nats(definition, kinds);
    let cost = |idx| match is_needed[idx] {
        true => of_one(definition, kinds, &in_nats, shape, idx),
        false => 0.0,
    };
    let costs: Vec<f32> = (0..operations.len()).map(cost).collect();
    let cost: f32 = costs.iter().sum();
    if cost <= COST_MAX {
        return Ok(cost);
    }
    let (idx, &most) = costs
        .iter()
        .enumerate()
        .max_by(|a, b| a.1.total_cmp(b.1))
        .expect("what costs something has operations");
    Err(ProgramError::TooCostly { cost, max: COST_MAX, idx, operation: operations[idx].name(), most })
}

fn of_one(definition: &Definition, kinds: &[Kind], in_nats: &[bool], shape: RowShape, idx: usize) -> f32 {
    let operation = &definition.operations[idx];
    // A short row is read no faster.
    let vocab_size = shape.vocab_size.max(SHORT_ROW) as f32;
    let readings = match *operation {
        Operation::Repeats { window, cap, .. } => {
            (window as usize).min(shape.n_positions) as f32 * cap as f32 / vocab_size
        }
        Operation::Ngrams { n, window } => {
            let window = window.map_or(shape.n_positions, |window| (window as usize).min(shape.n_positions));
            window as f32 * f32::from(n) / vocab_size
        }
        Operation::Member(_) | Operation::Bias(_) => 1.0,
        Operation::CountLast { .. } | Operation::CountSince(_) => 1.0,
        Operation::Nucleus { order, row, .. } if order != row => {
            if in_nats[usize::from(order.0)] {
                2.0
            } else {
                4.0
            }
        }
        Operation::Largest { .. } | Operation::Nucleus { .. } => 1.38,
        _ if is_reduction(operation) => 1.0,
        _ => 0.0,
    };
    let n_simple = match kinds[idx] {
        _ if is_reduction(operation) => readings * simple(definition, kinds, operation),
        // Each row is made once on the processor, whatever looks at it.
        Kind::Row | Kind::Set => own(operation),
        Kind::Number | Kind::Token => 0.0,
    };
    readings + n_simple / N_SIMPLE_A_READING
}

/// Simple operations that one entry of what a reduction takes is made of.
fn simple(definition: &Definition, kinds: &[Kind], reduction: &Operation) -> f32 {
    let mut is_needed = vec![false; definition.operations.len()];
    let mut pending: Vec<Value> = reduction.operands().collect();
    let mut n = own(reduction);
    while let Some(value) = pending.pop() {
        let idx = usize::from(value.0);
        let operation = &definition.operations[idx];
        if matches!(kinds[idx], Kind::Number | Kind::Token) || std::mem::replace(&mut is_needed[idx], true) {
            continue;
        }
        n += own(operation);
        // What a selection keeps is told by a bound that is a number.
        match operation {
            Operation::Largest { row, .. } => pending.push(*row),
            Operation::Nucleus { order, row, .. } => pending.extend([*order, *row]),
            _ => pending.extend(operation.operands()),
        }
    }
    n
}

/// Simple operations that an operation takes for each entry.
fn own(operation: &Operation) -> f32 {
    match operation {
        Operation::Binary(Binary::Div, ..) | Operation::Unary(Unary::Sqrt, _) => 6.0,
        Operation::Unary(Unary::Exp | Unary::Log, _) => 16.0,
        Operation::Reduce(how, ..) => match how {
            Reduction::LogSumExp | Reduction::Entropy => 20.0,
            _ => 2.0,
        },
        Operation::LogSoftmax(_) => 20.0,
        Operation::NoiseRow { noise: Noise::Uniform, .. } => 24.0,
        Operation::NoiseRow { noise: Noise::Gumbel, .. } | Operation::Draw(..) => 56.0,
        _ => 1.0,
    }
}

/// For each value, whether it is a row whose entries are spread as logits are, or a number.
fn in_nats(definition: &Definition, kinds: &[Kind]) -> Vec<bool> {
    let mut known: Vec<bool> = Vec::with_capacity(kinds.len());
    for (operation, kind) in definition.operations.iter().zip(kinds) {
        let is_one = |value: Value| known[usize::from(value.0)];
        known.push(match *operation {
            _ if *kind == Kind::Number => true,
            Operation::Logits
            | Operation::Member(_)
            | Operation::LogSoftmax(_)
            | Operation::Bias(_)
            | Operation::NoiseRow { .. } => true,
            Operation::Unary(Unary::Neg | Unary::Abs | Unary::Log, x) => is_one(x),
            Operation::Binary(Binary::Add | Binary::Sub | Binary::Min | Binary::Max, x, y) => {
                is_one(x) && is_one(y)
            }
            Operation::Select(_, yes, no) => is_one(yes) && is_one(no),
            _ => false,
        });
    }
    known
}
