//! Programs by chance, for tests: every operation comes up, over values of the right kinds.

use crate::definition::{Definition, End};
use crate::operation::{
    BiasId, Binary, Comparison, Kind, MaskId, Noise, Operation, Reduction, Source, Unary, Value,
};

/// Masks and biases that such a program may name.
pub const N_HANDLES: u8 = 3;
/// Parameters that such a program may name.
pub const N_PARAMETERS: u8 = 4;
/// Members besides the first that such a program may name.
pub const N_MEMBERS: u8 = 2;

/// Reductions in one program, so that most are affordable.
const N_REDUCTIONS: usize = 6;
/// Operations over the history or another member.
const N_APART: usize = 3;

/// A program of this many operations that depends on the seed alone. It has at least four.
#[must_use]
pub fn definition(seed: u64, n_operations: usize) -> Definition {
    let mut state = seed;
    definition_by(n_operations, || {
        // SplitMix64.
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    })
}

/// A program of this many operations, at least four, by numbers that are asked for one after the other. Numbers that are 0 from
/// some place on make a program as well.
#[must_use]
pub fn definition_by(n_operations: usize, numbers: impl FnMut() -> u64) -> Definition {
    let mut writer =
        Writer { numbers, operations: Vec::new(), kinds: Vec::new(), n_reductions: 0, n_apart: 0 };
    let n_state = writer.below(4);
    for operation in [Operation::Logits, Operation::All, Operation::Constant(0.5)] {
        writer.write(operation);
    }
    while writer.operations.len() + 1 < n_operations {
        let operation = writer.any(n_state as u8);
        if let Some(operation) = operation {
            writer.write(operation);
        }
    }
    let row = writer.one(Kind::Row);
    let end = match writer.below(4) {
        0 => Operation::Argmax(row),
        _ => Operation::Draw(row, writer.source()),
    };
    let end = writer.write(end);
    let next_state = (0..n_state).map(|_| writer.one(Kind::Number)).collect();
    let n_reports = writer.below(5);
    let reports = (0..n_reports).map(|_| writer.one(Kind::Number)).collect();
    let first_state = (0..n_state).map(|_| writer.number()).collect();
    Definition { operations: writer.operations, end: End::Token(end), first_state, next_state, reports }
}

struct Writer<N> {
    numbers: N,
    operations: Vec<Operation>,
    kinds: Vec<Kind>,
    n_reductions: usize,
    n_apart: usize,
}

impl<N: FnMut() -> u64> Writer<N> {
    fn next(&mut self) -> u64 {
        (self.numbers)()
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }

    /// A number that means something beside logits, or one at the end of its range.
    fn number(&mut self) -> f32 {
        match self.below(12) {
            0 => self.of(&[0.0, -0.0, 1e38, -1e38, 1e-40, f32::MAX, f32::MIN_POSITIVE]),
            1 => self.below(50) as f32,
            _ => self.below(4001) as f32 / 1000.0 - 2.0,
        }
    }

    fn source(&mut self) -> Source {
        let lane = self.below(3) as u16;
        match self.below(3) {
            0 => Source::Key { key: self.next(), n_tokens: self.below(5) as u8, lane },
            _ => Source::Seed { lane },
        }
    }

    /// A value of this kind, one of the last more often. There is one.
    fn one(&mut self, kind: Kind) -> Value {
        let known: Vec<usize> = (0..self.kinds.len()).filter(|&idx| self.kinds[idx] == kind).collect();
        let n = known.len();
        let idx = match self.below(3) {
            0 => self.below(n),
            _ => n - 1 - self.below(n.min(4)),
        };
        Value(known[idx] as u8)
    }

    fn has(&self, kind: Kind) -> bool {
        self.kinds.contains(&kind)
    }

    fn write(&mut self, operation: Operation) -> Value {
        let kind = self.kind(&operation);
        self.operations.push(operation);
        self.kinds.push(kind);
        Value((self.operations.len() - 1) as u8)
    }

    fn kind_of(&self, value: Value) -> Kind {
        self.kinds[usize::from(value.0)]
    }

    fn kind(&self, operation: &Operation) -> Kind {
        match *operation {
            Operation::Unary(_, x) => self.kind_of(x),
            Operation::Binary(_, x, y) => match (self.kind_of(x), self.kind_of(y)) {
                (Kind::Number, Kind::Number) => Kind::Number,
                _ => Kind::Row,
            },
            Operation::Compare(_, x, y) => match (self.kind_of(x), self.kind_of(y)) {
                (Kind::Number, Kind::Number) => Kind::Number,
                _ => Kind::Set,
            },
            Operation::Select(condition, yes, no) => {
                match (self.kind_of(condition), self.kind_of(yes), self.kind_of(no)) {
                    (_, Kind::Set, _) => Kind::Set,
                    (_, Kind::Token, _) => Kind::Token,
                    (Kind::Number, Kind::Number, Kind::Number) => Kind::Number,
                    _ => Kind::Row,
                }
            }
            Operation::And(..)
            | Operation::Or(..)
            | Operation::Not(_)
            | Operation::Mask(_)
            | Operation::Constraint
            | Operation::Largest { .. }
            | Operation::Nucleus { .. }
            | Operation::Ngrams { .. }
            | Operation::Only(_)
            | Operation::All
            | Operation::Nothing => Kind::Set,
            Operation::Argmax(_) | Operation::Draw(..) | Operation::ParameterToken(_) => Kind::Token,
            Operation::Logits
            | Operation::Member(_)
            | Operation::LogSoftmax(_)
            | Operation::CountLast { .. }
            | Operation::CountSince(_)
            | Operation::Repeats { .. }
            | Operation::Bias(_)
            | Operation::NoiseRow { .. } => Kind::Row,
            _ => Kind::Number,
        }
    }

    /// A row or a number.
    fn numeric(&mut self) -> Value {
        let kind = self.of(&[Kind::Row, Kind::Row, Kind::Number]);
        self.one(kind)
    }

    /// An operation, or none where the limits have no room for it.
    fn any(&mut self, n_state: u8) -> Option<Operation> {
        let (row, set, number) = (self.one(Kind::Row), self.one(Kind::Set), self.one(Kind::Number));
        let choice = self.below(40);
        if (26..34).contains(&choice) {
            if self.n_reductions == N_REDUCTIONS {
                return None;
            }
            self.n_reductions += 1;
        }
        if choice >= 34 {
            if self.n_apart == N_APART {
                return None;
            }
            self.n_apart += 1;
        }
        let handle = self.below(usize::from(N_HANDLES)) as u8;
        Some(match choice {
            0..=5 => {
                let how =
                    self.of(&[Binary::Add, Binary::Sub, Binary::Mul, Binary::Div, Binary::Min, Binary::Max]);
                Operation::Binary(how, self.numeric(), self.numeric())
            }
            6..=8 => {
                let how = self.of(&[Unary::Neg, Unary::Abs, Unary::Sqrt, Unary::Exp, Unary::Log]);
                Operation::Unary(how, self.numeric())
            }
            9..=11 => {
                let how = self.of(&[
                    Comparison::Less,
                    Comparison::LessEqual,
                    Comparison::Equal,
                    Comparison::NotEqual,
                    Comparison::GreaterEqual,
                    Comparison::Greater,
                ]);
                Operation::Compare(how, self.numeric(), self.numeric())
            }
            12 => Operation::And(set, self.one(Kind::Set)),
            13 => Operation::Or(set, self.one(Kind::Set)),
            14 => Operation::Not(set),
            15 => Operation::Mask(MaskId(handle)),
            16 => self.of(&[Operation::Constraint, Operation::All, Operation::Nothing]),
            17 => Operation::Constant(self.number()),
            18 => Operation::Parameter(self.below(usize::from(N_PARAMETERS)) as u8),
            19 => match n_state {
                0 => Operation::Drawn,
                n => Operation::State(self.below(usize::from(n)) as u8),
            },
            20 => self.of(&[Operation::Position, Operation::Length, Operation::Drawn]),
            21 => Operation::Uniform(self.source()),
            22 => Operation::ParameterToken(self.below(usize::from(N_PARAMETERS)) as u8),
            23 if self.has(Kind::Token) => Operation::Only(self.one(Kind::Token)),
            24 if self.has(Kind::Token) => Operation::At(row, self.one(Kind::Token)),
            23..=25 => match self.below(4) {
                0 => Operation::Select(set, self.numeric(), self.numeric()),
                1 => Operation::Select(number, self.numeric(), self.numeric()),
                2 => Operation::Select(self.of(&[set, number]), self.one(Kind::Set), self.one(Kind::Set)),
                _ if self.has(Kind::Token) => {
                    Operation::Select(number, self.one(Kind::Token), self.one(Kind::Token))
                }
                _ => Operation::Select(set, row, number),
            },
            26..=28 => {
                let how = self.of(&[
                    Reduction::Max,
                    Reduction::Sum,
                    Reduction::Mean,
                    Reduction::Variance,
                    Reduction::LogSumExp,
                    Reduction::Entropy,
                ]);
                Operation::Reduce(how, row, set)
            }
            29 => Operation::Count(set),
            30 => Operation::LogSoftmax(row),
            31 => Operation::Largest { row, k: number },
            32 => Operation::Nucleus { order: self.one(Kind::Row), row, p: number },
            33 => self.of(&[Operation::Argmax(row), Operation::Draw(row, Source::Seed { lane: 1 })]),
            34 => {
                let noise = self.of(&[Noise::Uniform, Noise::Gumbel]);
                Operation::NoiseRow { noise, source: self.source() }
            }
            35 => Operation::Bias(BiasId(handle)),
            36 => Operation::CountLast { n: self.of(&[None, Some(5), Some(0)]) },
            37 => Operation::CountSince(number),
            38 => {
                let breakers = self.of(&[None, Some(MaskId(handle))]);
                Operation::Repeats {
                    window: 1 + self.below(40) as u32,
                    cap: 1 + self.below(9) as u32,
                    breakers,
                }
            }
            _ => match self.below(2) {
                0 => Operation::Ngrams { n: 1 + self.below(4) as u8, window: self.of(&[None, Some(30)]) },
                _ => Operation::Member(self.below(usize::from(N_MEMBERS)) as u8),
            },
        })
    }
}
