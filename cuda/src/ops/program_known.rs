//! What is known of a row from how it is made: its largest entry, where it has nothing, and what one instruction makes of it.

use trellis_engine::sampling::program::Operation;
use trellis_programs::{Binary, Value};

use super::super::program_code::{
    AS_ENTRY, Code, Element, NOTHING, Operand, Taken, instruction, is_number, kept_if,
};
use super::super::program_encode::Scalar;
use super::{ONE, Planner, element};

impl Planner {
    /// The largest of a row but for the sign of 0, and the stage at which it is there. What an operation that never falls
    /// makes of the largest entry is the largest of what it makes.
    pub(super) fn largest(&mut self, row: Value) -> (u8, usize) {
        let idx = usize::from(row.0);
        let largest = self.largest[idx].unwrap_or_else(|| self.work_out_largest(row));
        self.largest[idx] = Some(largest);
        largest
    }

    fn work_out_largest(&mut self, row: Value) -> (u8, usize) {
        let operations = &self.operations;
        let at = |value: Value| &operations[usize::from(value.0)];
        let is_number = |value: Value| is_number(self.kinds[usize::from(value.0)]);
        let is_positive = |value: Value| matches!(at(value), Operation::Constant(x) if *x > 0.0);
        let (code, from, by) = match *at(row) {
            Operation::Binary(Binary::Sub, x, y) if is_number(y) => (Code::Sub, x, y),
            Operation::Binary(Binary::Add, x, y) if is_number(y) => (Code::Add, x, y),
            Operation::Binary(Binary::Add, y, x) if is_number(y) => (Code::Add, x, y),
            Operation::Binary(Binary::Mul, x, y) if is_positive(y) => (Code::Mul, x, y),
            Operation::Binary(Binary::Mul, y, x) if is_positive(y) => (Code::Mul, x, y),
            Operation::Binary(Binary::Div, x, y) if is_positive(y) => (Code::Div, x, y),
            Operation::Select(kept, x, none) if is_nothing(at(none)) => match *at(kept) {
                // The largest is kept, as one token is.
                Operation::Nucleus { order, row, .. } if order == x && row == x => return self.largest(x),
                Operation::Largest { row, k }
                    if row == x && matches!(at(k), Operation::Constant(k) if *k >= 1.0) =>
                {
                    return self.largest(x);
                }
                _ => return self.gathered_largest(row),
            },
            Operation::LogSoftmax(x) => {
                let Some(Element { operands: [_, Taken::Number(sum), _], .. }) =
                    self.parts.elements[usize::from(row.0)]
                else {
                    unreachable!("log-softmax takes a number away")
                };
                let (max, _) = self.largest(x);
                let stage = self.ready(row).stage;
                return (self.entry(stage, Code::Sub, max, sum), stage);
            }
            _ => return self.gathered_largest(row),
        };
        if is_number(from) {
            return self.gathered_largest(row);
        }
        let (max, stage) = self.largest(from);
        let (by, stage) = (self.number_of(by), stage.max(self.ready(by).stage));
        (self.entry(stage, code, max, by), stage)
    }

    fn gathered_largest(&mut self, row: Value) -> (u8, usize) {
        let ready = self.ready(row);
        (self.best(ready, row, Taken::Number(ONE)), ready.pass())
    }

    /// What an operation makes of one entry of a row and a number.
    fn entry(&mut self, stage: usize, code: Code, x: u8, by: u8) -> u8 {
        let result = self.new_number();
        let mut entry = instruction(code, result, [Operand::Number(x), Operand::Number(by), NOTHING]);
        entry.0[0] |= AS_ENTRY;
        self.parts.scalars.push((stage, Scalar::Instruction(entry)));
        result
    }

    /// The selection outside of whose set a row is −∞ and a set has nothing, by its value.
    pub(super) fn within(&self, value: u8, operation: &Operation) -> Option<u8> {
        let of = |value: Value| self.within[usize::from(value.0)];
        let at = |value: Value| &self.operations[usize::from(value.0)];
        let is_number = |value: Value| is_number(self.kinds[usize::from(value.0)]);
        let is_positive = |value: Value| matches!(at(value), Operation::Constant(x) if *x > 0.0);
        match *operation {
            Operation::Largest { .. } => Some(value),
            Operation::Nucleus { row: x, .. } | Operation::LogSoftmax(x) => of(x),
            Operation::And(x, y) => of(x).or(of(y)),
            Operation::Select(kept, x, none) if is_nothing(at(none)) => of(kept).or(of(x)),
            Operation::Binary(Binary::Add | Binary::Sub, x, y) if is_number(y) => of(x),
            Operation::Binary(Binary::Add, y, x) if is_number(y) => of(x),
            Operation::Binary(Binary::Mul | Binary::Div, x, y) if is_positive(y) => of(x),
            Operation::Binary(Binary::Mul, y, x) if is_positive(y) => of(x),
            _ => None,
        }
    }

    /// A row where a comparison of itself with a number holds, else −∞, in one instruction.
    pub(super) fn kept(&self, condition: Value, row: Value, none: Value) -> Option<Element> {
        let Taken::Row(condition) = self.taken(condition) else { return None };
        let Element { code, operands: [x, y, z] } = self.parts.elements[usize::from(condition)]?;
        if !is_nothing(&self.operations[usize::from(none.0)]) || x != self.taken(row) {
            return None;
        }
        match (code, x, y, z) {
            (Code::KeepNucleus, Taken::Row(_), order, bound) if order == x => {
                Some(element(Code::IfNucleus, [x, bound, Taken::Immediate(0)]))
            }
            (_, Taken::Row(_), Taken::Number(_), _) => {
                kept_if(code).map(|code| element(code, [x, y, Taken::Immediate(0)]))
            }
            _ => None,
        }
    }
}

/// Whether it is the number that leaves tokens out.
fn is_nothing(operation: &Operation) -> bool {
    matches!(operation, Operation::Constant(x) if *x == f32::NEG_INFINITY)
}
