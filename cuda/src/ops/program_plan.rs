//! How the kernel of logit programs goes about a program: a flat list of steps.
//!
//! Numbers are worked out by one thread, in *stages*; between two stages the row is read once, in a *pass*, which makes what
//! all reductions of its depth need, element by element. What has to be known before is a reduction of its own, a pass
//! earlier: the largest value before a sum of exponentials, the mean before the variance. A selection is found in a pass of
//! its own and comes to a bound, by which its set is told elementwise from then on.
//!
//! An encoded plan is a list of [`Entry`]: the header, which says where everything is, then steps, sources of noise, code.

use trellis_engine::sampling::program::{End, N_OPERATIONS_MAX, Operation, Program};
use trellis_programs::{Kind, Reduction, Source, Unary, Value};

pub use super::program_code::Entry;
use super::program_code::{
    Code, Element, NOTHING, Operand, Root, Taken, binary, comparison, instruction, is_number, is_same, noise,
    unary,
};
use super::program_encode::{Ends, Gather, Parts, Scalar, Selection};
pub use super::program_small::ProgramKind;

#[path = "program_known.rs"]
mod known;

/// Rows of a program's history at once, each with a plane of numbers in scratch memory.
pub const N_PLANES_MAX: usize = 4;
/// Numbers of a program on the device: those that its operations make and what they are made of.
pub(super) const N_NUMBERS: usize = 256;
/// What one reading of the row gathers.
pub(super) const N_GATHERED: usize = 32;
/// Sums among them.
pub(super) const N_SUMS: usize = 4;
/// Entries of the header.
pub(super) const N_HEADER: usize = 4;
/// In the header, a number that the program does not have.
pub(super) const NO_NUMBER: u8 = u8::MAX;
/// For all, where an operation may look at fewer.
pub(super) const ALL: u32 = u32::MAX;

/// Why the device cannot run a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// Too many rows are alive at once.
    #[error(
        "the program has more than {max} rows alive at once, or needs too many of them for one reduction"
    )]
    Registers {
        /// The most.
        max: usize,
    },
    /// Too many rows are made of the history.
    #[error("the program has {n} rows of the history, at most {max}")]
    Planes {
        /// Those of the program.
        n: usize,
        /// The most.
        max: usize,
    },
    /// Too many numbers are worked out.
    #[error("the program works out {n} numbers, at most {max}")]
    Numbers {
        /// Those of the program.
        n: usize,
        /// The most.
        max: usize,
    },
    /// There is noise of too many sources.
    #[error("the program has noise of {n} sources, at most {max}")]
    Sources {
        /// Those of the program.
        n: usize,
        /// The most.
        max: usize,
    },
    /// It ends in a row.
    #[error("the program ends in a row, and a draw is wanted")]
    EndsInRow,
}

/// A program as the device runs it.
#[derive(Clone, Debug)]
pub struct EncodedProgram {
    pub(super) entries: Vec<Entry>,
    pub(super) n_planes: usize,
    pub(super) n_passes: usize,
    pub(super) kind: ProgramKind,
}

impl EncodedProgram {
    /// Plans a program.
    ///
    /// # Errors
    /// See [`PlanError`].
    pub fn new(program: &Program) -> Result<Self, PlanError> {
        let End::Token(end) = program.definition().end else { return Err(PlanError::EndsInRow) };
        let mut planner = Planner::new(program);
        planner.number(1.0);
        planner.number(0.0);
        for idx in 0..planner.operations.len() {
            if planner.is_live[idx] {
                planner.plan(idx as u8)?;
            }
        }
        let (n, max) = (planner.n_numbers, usize::from(NO_NUMBER));
        if n > max {
            return Err(PlanError::Numbers { n, max });
        }
        let (n, max) = (planner.parts.sources.len(), N_OPERATIONS_MAX);
        if n > max {
            return Err(PlanError::Sources { n, max });
        }
        let number = |value: Value| planner.numbers[usize::from(planner.same[usize::from(value.0)])];
        let definition = program.definition();
        let ends = Ends {
            token: number(end),
            reports: definition.reports.iter().map(|&value| number(value)).collect(),
            next_state: definition.next_state.iter().map(|&value| number(value)).collect(),
        };
        planner.parts.encode(&ends)
    }

    /// What is put on the device: entries of 16 bytes.
    #[must_use]
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Rows of the history that it makes.
    #[must_use]
    pub fn n_planes(&self) -> usize {
        self.n_planes
    }

    /// Which kernels can run it.
    #[must_use]
    pub fn kind(&self) -> ProgramKind {
        self.kind
    }

    /// Readings of the row without those of selections.
    #[must_use]
    pub fn n_passes(&self) -> usize {
        self.n_passes
    }
}

/// The numbers 1 and 0: all tokens, and none.
pub(super) const ONE: u8 = 0;
const ZERO: u8 = 1;

/// When a value is there: numbers after the pass of their stage; rows when the numbers in them are, and the planes.
#[derive(Clone, Copy, Debug, Default)]
struct Ready {
    /// The latest number.
    stage: usize,
    /// The pass at whose beginning the latest plane is filled.
    fill: usize,
}

impl Ready {
    fn and(self, other: Self) -> Self {
        Self { stage: self.stage.max(other.stage), fill: self.fill.max(other.fill) }
    }

    /// The first pass that can read it.
    fn pass(self) -> usize {
        (self.stage + 1).max(self.fill)
    }
}

struct Planner {
    operations: Vec<Operation>,
    kinds: Vec<Kind>,
    /// For each value the first that is the same.
    same: Vec<u8>,
    is_live: Vec<bool>,
    ready: Vec<Ready>,
    /// For each row and set, the selection outside of whose set the row is −∞ and the set has nothing.
    within: Vec<Option<u8>>,
    numbers: Vec<u8>,
    n_numbers: usize,
    /// For each row the number of its largest entry and the stage at which it is there, once they were needed.
    largest: Vec<Option<(u8, usize)>>,
    parts: Parts,
}

impl Planner {
    fn new(program: &Program) -> Self {
        let definition = program.definition();
        let n = definition.operations.len();
        let mut operations: Vec<Operation> = Vec::with_capacity(n);
        let mut same: Vec<u8> = Vec::with_capacity(n);
        for (idx, operation) in definition.operations.iter().enumerate() {
            let operation = operation.renamed(|value| Value(same[usize::from(value.0)]));
            let known = operations.iter().position(|known| is_same(known, &operation));
            same.push(known.unwrap_or(idx) as u8);
            operations.push(operation);
        }
        let mut is_live = vec![false; n];
        let ends = definition.next_state.iter().chain(&definition.reports).copied();
        let mut pending: Vec<u8> =
            ends.chain([definition.end.value()]).map(|value| same[usize::from(value.0)]).collect();
        // A draw without a token ends the program, whatever becomes of the token.
        pending.extend((0..n as u8).filter(|&idx| {
            let operation = &operations[usize::from(idx)];
            same[usize::from(idx)] == idx && matches!(operation, Operation::Argmax(_) | Operation::Draw(..))
        }));
        while let Some(value) = pending.pop() {
            if !std::mem::replace(&mut is_live[usize::from(value)], true) {
                pending.extend(operations[usize::from(value)].operands().map(|value| value.0));
            }
        }
        Self {
            kinds: program.kinds().to_vec(),
            same,
            is_live,
            ready: vec![Ready::default(); n],
            within: vec![None; n],
            numbers: vec![0; n],
            operations,
            n_numbers: 0,
            largest: vec![None; n],
            parts: Parts { elements: vec![None; n], ..Parts::default() },
        }
    }

    /// Where there are too many, which is said once all are counted, the last again.
    fn new_number(&mut self) -> u8 {
        let number = self.n_numbers.min(usize::from(NO_NUMBER) - 1);
        self.n_numbers += 1;
        number as u8
    }

    /// Two numbers, one behind the other.
    fn new_pair(&mut self) -> u8 {
        let first = self.new_number();
        self.new_number();
        first
    }

    fn scalar(&mut self, stage: usize, code: Code, operands: [Operand; 3]) -> u8 {
        let result = self.new_number();
        self.parts.scalars.push((stage, Scalar::Instruction(instruction(code, result, operands))));
        result
    }

    /// A number that depends on no other.
    fn given(&mut self, code: Code, word: u32) -> u8 {
        let result = self.new_number();
        let entry = instruction(code, result, [Operand::Immediate(word), NOTHING, NOTHING]);
        self.parts.scalars.push((0, Scalar::Given(entry)));
        result
    }

    fn number(&mut self, x: f32) -> u8 {
        self.given(Code::Constant, x.to_bits())
    }

    fn ready(&self, value: Value) -> Ready {
        self.ready[usize::from(value.0)]
    }

    fn number_of(&self, value: Value) -> u8 {
        debug_assert!(is_number(self.kinds[usize::from(value.0)]));
        self.numbers[usize::from(value.0)]
    }

    /// A value as elementwise code takes it.
    fn taken(&self, value: Value) -> Taken {
        match self.operations[usize::from(value.0)] {
            Operation::All => Taken::Number(ONE),
            Operation::Nothing => Taken::Number(ZERO),
            _ if is_number(self.kinds[usize::from(value.0)]) => Taken::Number(self.number_of(value)),
            _ => Taken::Row(value.0),
        }
    }

    fn source(&mut self, source: Source) -> u32 {
        let known = self.parts.sources.iter().position(|&known| known == source);
        known.unwrap_or_else(|| {
            self.parts.sources.push(source);
            self.parts.sources.len() - 1
        }) as u32
    }

    /// Gathers something from all tokens, once; returns the first of its numbers.
    fn gather(&mut self, pass: usize, code: Code, operands: [Taken; 3]) -> u8 {
        let is_known = |known: &&mut Gather| known.root.operands == operands && covers(known.root.code, code);
        if let Some(known) = self.parts.gathers.iter_mut().find(is_known) {
            if code == Code::Entropy {
                known.root.code = code;
            }
            return known.root.result;
        }
        let result = self.new_pair();
        let within = match code {
            Code::Sum | Code::Squares => None,
            Code::Draw => self.within_of(operands[0]),
            _ => self.within_of(operands[0]).or(self.within_of(operands[1])),
        };
        self.parts.gathers.push(Gather { pass, root: Root { code, result, operands }, within });
        result
    }

    fn within_of(&self, operand: Taken) -> Option<u8> {
        match operand {
            Taken::Row(row) => self.within[usize::from(row)],
            _ => None,
        }
    }

    /// The largest of a row, and behind it the first token that has it.
    fn best(&mut self, ready: Ready, row: Value, set: Taken) -> u8 {
        let row = self.taken(row);
        self.gather(ready.pass(), Code::Best, [row, set, Taken::Immediate(0)])
    }

    /// What needs the largest value first; returns its number, and the stage at which it is there.
    fn exponentials(&mut self, code: Code, ready: Ready, row: Value, set: Taken) -> (u8, usize) {
        let (max, stage) = match set {
            Taken::Number(ONE) => self.largest(row),
            _ => (self.best(ready, row, set), ready.pass()),
        };
        let (row, pass) = (self.taken(row), ready.pass().max(stage + 1));
        (self.gather(pass, code, [row, set, Taken::Number(max)]), pass)
    }

    fn reduce(&mut self, how: Reduction, row: Value, over: Value) -> (u8, usize) {
        let ready = self.ready(row).and(self.ready(over));
        let set = self.taken(over);
        let taken = self.taken(row);
        let pass = ready.pass();
        let none = Taken::Immediate(0);
        match how {
            Reduction::Max => (self.best(ready, row, set), pass),
            Reduction::LogSumExp => self.exponentials(Code::LogSumExp, ready, row, set),
            Reduction::Entropy => {
                let (sum, pass) = self.exponentials(Code::Entropy, ready, row, set);
                (sum + 1, pass)
            }
            Reduction::Sum => (self.gather(pass, Code::Sum, [taken, set, none]), pass),
            Reduction::Mean | Reduction::Variance => {
                let sum = self.gather(pass, Code::Sum, [taken, set, none]);
                let n = self.count(over);
                let share = |sum| [Operand::Number(sum), Operand::Number(n), NOTHING];
                let mean = self.scalar(pass, Code::Div, share(sum));
                if how == Reduction::Mean {
                    return (mean, pass);
                }
                let squares = self.gather(pass + 1, Code::Squares, [taken, set, Taken::Number(mean)]);
                (self.scalar(pass + 1, Code::Div, share(squares)), pass + 1)
            }
        }
    }

    fn count(&mut self, set: Value) -> u8 {
        let (pass, set) = (self.ready(set).pass(), self.taken(set));
        self.gather(pass, Code::Count, [set, Taken::Immediate(0), Taken::Immediate(0)])
    }

    fn select(&mut self, value: u8, code: Code, order: Value, row: Value, argument: Value) -> (u8, usize) {
        let ready = self.ready(order).and(self.ready(row));
        let (largest_order, order_stage) = match self.operations[usize::from(order.0)] {
            Operation::Unary(Unary::Neg, x)
                if matches!(self.operations[usize::from(x.0)], Operation::Unary(Unary::Abs, _)) =>
            {
                (ZERO, 0)
            }
            _ => self.largest(order),
        };
        let (largest_row, row_stage) =
            if row == order { (largest_order, order_stage) } else { self.largest(row) };
        let pass = [order_stage, row_stage, self.ready(argument).stage].into_iter().max().expect("three") + 1;
        let pass = pass.max(ready.pass());
        let (bound, argument) = (self.new_pair(), self.number_of(argument));
        let (order, row) = (self.taken(order), self.taken(row));
        let within = self.within_of(row);
        self.parts.selections.push(Selection {
            pass,
            value,
            code,
            order,
            row,
            largest_order,
            largest_row,
            argument,
            bound,
            within,
        });
        (bound, pass)
    }

    fn plane(&mut self, fill: usize, code: Code, operands: [u32; 3]) -> Element {
        let plane = self.parts.n_planes as u32;
        self.parts.n_planes += 1;
        let [a, b, c] = operands;
        self.parts.fills.push((fill, Entry([code as u32 | plane << 8, a, b, c])));
        element(Code::Plane, [Taken::Immediate(plane), Taken::Immediate(0), Taken::Immediate(0)])
    }

    /// Plans one operation, whose operands are planned.
    fn plan(&mut self, value: u8) -> Result<(), PlanError> {
        let idx = usize::from(value);
        let operation = self.operations[idx];
        let of_operands = operation.operands().fold(Ready::default(), |all, x| all.and(self.ready(x)));
        if is_number(self.kinds[idx]) {
            let (number, stage) = self.plan_number(&operation, of_operands);
            self.numbers[idx] = number;
            self.ready[idx] = Ready { stage, fill: 0 };
            return Ok(());
        }
        self.within[idx] = self.within(value, &operation);
        let (element, ready) = self.plan_row(value, &operation, of_operands);
        self.parts.elements[idx] = element;
        self.ready[idx] = ready;
        match self.parts.n_planes {
            n if n > N_PLANES_MAX => Err(PlanError::Planes { n, max: N_PLANES_MAX }),
            _ => Ok(()),
        }
    }

    fn plan_number(&mut self, operation: &Operation, of_operands: Ready) -> (u8, usize) {
        let stage = of_operands.stage;
        let number = |value: Value| Operand::Number(self.number_of(value));
        match *operation {
            Operation::Reduce(how, row, over) => self.reduce(how, row, over),
            Operation::Count(set) => (self.count(set), of_operands.pass()),
            Operation::Argmax(row) => {
                let (best, stage) = (self.best(of_operands, row, Taken::Number(ONE)), of_operands.pass());
                (self.scalar(stage, Code::Token, [Operand::Number(best), NOTHING, NOTHING]), stage)
            }
            Operation::Draw(row, source) => {
                let (row, source, stage) = (self.taken(row), self.source(source), of_operands.pass());
                let operands = [row, Taken::Immediate(source), Taken::Immediate(0)];
                let best = self.gather(stage, Code::Draw, operands);
                (self.scalar(stage, Code::Token, [Operand::Number(best), NOTHING, NOTHING]), stage)
            }
            Operation::At(row, token) => {
                let stage = of_operands.stage.max(of_operands.fill);
                let (result, token, row) = (self.new_number(), self.number_of(token), self.taken(row));
                self.parts.scalars.push((stage, Scalar::Take { result, row, token }));
                (result, stage)
            }
            Operation::Uniform(source) => {
                let source = self.source(source);
                (self.given(Code::Uniform, source), 0)
            }
            Operation::Unary(how, x) => {
                let operands = [number(x), NOTHING, NOTHING];
                (self.scalar(stage, unary(how), operands), stage)
            }
            Operation::Binary(how, x, y) => {
                let operands = [number(x), number(y), NOTHING];
                (self.scalar(stage, binary(how), operands), stage)
            }
            Operation::Compare(how, x, y) => {
                let operands = [number(x), number(y), NOTHING];
                (self.scalar(stage, comparison(how), operands), stage)
            }
            Operation::Select(condition, yes, no) => {
                let operands = [number(condition), number(yes), number(no)];
                (self.scalar(stage, Code::Select, operands), stage)
            }
            _ => {
                let (code, operand) = match *operation {
                    Operation::Constant(x) => (Code::Constant, x.to_bits()),
                    Operation::Parameter(idx) => (Code::Parameter, u32::from(idx)),
                    Operation::ParameterToken(idx) => (Code::ParameterToken, u32::from(idx)),
                    Operation::State(idx) => (Code::State, u32::from(idx)),
                    Operation::Position => (Code::Position, 0),
                    Operation::Length => (Code::Length, 0),
                    Operation::Drawn => (Code::Drawn, 0),
                    ref other => unreachable!("{} makes no number", other.name()),
                };
                (self.given(code, operand), 0)
            }
        }
    }

    fn plan_row(&mut self, value: u8, operation: &Operation, of_operands: Ready) -> (Option<Element>, Ready) {
        let word = |word: u32| [Taken::Immediate(word), Taken::Immediate(0), Taken::Immediate(0)];
        let none = Taken::Immediate(0);
        let known = |ready: Ready, stage: usize| ready.and(Ready { stage, fill: 0 });
        let filled = |fill: usize| Ready { stage: 0, fill };
        let one = |code, x: Taken| element(code, [x, none, none]);
        let two = |code, x: Taken, y: Taken| element(code, [x, y, none]);
        let made = match *operation {
            Operation::All | Operation::Nothing => return (None, Ready::default()),
            Operation::LogSoftmax(row) => {
                let all = Taken::Number(ONE);
                let (sum, stage) = self.exponentials(Code::LogSumExp, of_operands, row, all);
                let made = two(Code::Sub, self.taken(row), Taken::Number(sum));
                return (Some(made), known(of_operands, stage));
            }
            Operation::Largest { row, k } => {
                let (bound, stage) = self.select(value, Code::Largest, row, row, k);
                let made = two(Code::KeepLargest, self.taken(row), Taken::Number(bound));
                return (Some(made), known(of_operands, stage));
            }
            Operation::Nucleus { order, row, p } => {
                let (bound, stage) = self.select(value, Code::Nucleus, order, row, p);
                let operands = [self.taken(order), self.taken(row), Taken::Number(bound)];
                return (Some(element(Code::KeepNucleus, operands)), known(of_operands, stage));
            }
            Operation::CountLast { n } => {
                return (Some(self.plane(1, Code::CountLast, [n.unwrap_or(ALL), 0, 0])), filled(1));
            }
            Operation::CountSince(position) => {
                let fill = of_operands.stage + 1;
                let number = u32::from(self.number_of(position));
                return (Some(self.plane(fill, Code::CountSince, [number, 0, 0])), filled(fill));
            }
            Operation::Repeats { window, cap, breakers } => {
                let breakers = breakers.map_or(ALL, |id| u32::from(id.0));
                return (Some(self.plane(1, Code::Repeats, [window, cap, breakers])), filled(1));
            }
            Operation::Ngrams { n, window } => {
                let operands = [u32::from(n), window.unwrap_or(ALL), 0];
                return (Some(self.plane(1, Code::Ngrams, operands)), filled(1));
            }
            Operation::Logits => element(Code::Logits, word(0)),
            Operation::Member(idx) => element(Code::Member, word(u32::from(idx))),
            Operation::Bias(id) => element(Code::Bias, word(u32::from(id.0))),
            Operation::Mask(id) => element(Code::Mask, word(u32::from(id.0))),
            Operation::Constraint => element(Code::Constraint, word(0)),
            Operation::NoiseRow { noise: how, source } => element(noise(how), word(self.source(source))),
            Operation::Only(token) => one(Code::Only, self.taken(token)),
            Operation::Unary(how, x) => one(unary(how), self.taken(x)),
            Operation::Not(x) => one(Code::Not, self.taken(x)),
            Operation::Binary(how, x, y) => two(binary(how), self.taken(x), self.taken(y)),
            Operation::Compare(how, x, y) => two(comparison(how), self.taken(x), self.taken(y)),
            Operation::And(x, y) => two(Code::And, self.taken(x), self.taken(y)),
            Operation::Or(x, y) => two(Code::Or, self.taken(x), self.taken(y)),
            Operation::Select(condition, yes, no) => self.kept(condition, yes, no).unwrap_or_else(|| {
                element(Code::Select, [self.taken(condition), self.taken(yes), self.taken(no)])
            }),
            ref other => unreachable!("{} makes no row", other.name()),
        };
        (Some(made), of_operands)
    }
}

/// Whether what is gathered for one root is there with another, or may be.
fn covers(known: Code, code: Code) -> bool {
    let exponentials = [Code::LogSumExp, Code::Entropy];
    known == code || exponentials.contains(&known) && exponentials.contains(&code)
}

fn element(code: Code, operands: [Taken; 3]) -> Element {
    Element { code, operands }
}

#[cfg(test)]
#[path = "program_plan_tests.rs"]
mod tests;
