//! What the kernel of logit programs interprets: instructions, and how values get registers.

use trellis_engine::sampling::program::Operation;
use trellis_programs::{Binary, Comparison, Kind, Noise, Source, Unary};

use crate::Plain;

/// Registers of elementwise code: values that may be alive at once, each one number for each token of a tile.
pub(super) const N_REGISTERS: usize = 20;
/// Instructions of one piece of elementwise code.
pub(super) const N_CODE_MAX: usize = 192;

/// 16 bytes of a plan: an instruction, a step, or four numbers of either.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Entry(pub(super) [u32; 4]);

// SAFETY: four words without padding, which take any bits.
unsafe impl Plain for Entry {}

/// Defines the codes on both sides: as an enum here, and by name for the source.
macro_rules! codes {
    ($($name:ident $text:literal)*) => {
        /// What an entry of a plan says.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub(super) enum Code { $($name,)* }

        /// The codes by their names in the source.
        pub(super) const CODES: &[(&str, u8)] = &[$(($text, Code::$name as u8),)*];
    };
}

codes! {
    // Elementwise, of nothing but the place.
    Logits "LOGITS"
    Member "MEMBER"
    Plane "PLANE"
    Bias "BIAS"
    Mask "MASK"
    Constraint "CONSTRAINT"
    UniformRow "UNIFORM_ROW"
    GumbelRow "GUMBEL_ROW"
    Only "ONLY"
    // Elementwise and of numbers.
    Neg "NEG"
    Abs "ABS"
    Sqrt "SQRT"
    Exp "EXP"
    Log "LOG"
    Add "ADD"
    Sub "SUB"
    Mul "MUL"
    Div "DIV"
    Min "MIN"
    Max "MAX"
    Less "LESS"
    LessEqual "LESS_EQUAL"
    Equal "EQUAL"
    NotEqual "NOT_EQUAL"
    GreaterEqual "GREATER_EQUAL"
    Greater "GREATER"
    Select "SELECT"
    // Elementwise, of sets and bounds.
    And "AND"
    Or "OR"
    Not "NOT"
    KeepLargest "KEEP_LARGEST"
    KeepNucleus "KEEP_NUCLEUS"
    // A row where it is so, else −∞.
    IfLess "IF_LESS"
    IfLessEqual "IF_LESS_EQUAL"
    IfEqual "IF_EQUAL"
    IfNotEqual "IF_NOT_EQUAL"
    IfGreaterEqual "IF_GREATER_EQUAL"
    IfGreater "IF_GREATER"
    IfNucleus "IF_NUCLEUS"
    // What is gathered from all tokens.
    Best "BEST"
    Draw "DRAW"
    Sum "SUM"
    Squares "SQUARES"
    Count "COUNT"
    LogSumExp "LOG_SUM_EXP"
    Entropy "ENTROPY"
    // What is done with the row at one token, or in a selection.
    Take "TAKE"
    Rank "RANK"
    // Of numbers alone.
    Constant "CONSTANT"
    Parameter "PARAMETER"
    ParameterToken "PARAMETER_TOKEN"
    State "STATE"
    Position "POSITION"
    Length "LENGTH"
    Drawn "DRAWN"
    Uniform "UNIFORM"
    Token "TOKEN"
    // Of the history.
    CountLast "COUNT_LAST"
    CountSince "COUNT_SINCE"
    Repeats "REPEATS"
    Ngrams "NGRAMS"
    // Steps.
    Numbers "NUMBERS"
    Fill "FILL"
    Pass "PASS"
    Largest "LARGEST"
    Nucleus "NUCLEUS"
}

pub(super) fn unary(how: Unary) -> Code {
    match how {
        Unary::Neg => Code::Neg,
        Unary::Abs => Code::Abs,
        Unary::Sqrt => Code::Sqrt,
        Unary::Exp => Code::Exp,
        Unary::Log => Code::Log,
    }
}

pub(super) fn binary(how: Binary) -> Code {
    match how {
        Binary::Add => Code::Add,
        Binary::Sub => Code::Sub,
        Binary::Mul => Code::Mul,
        Binary::Div => Code::Div,
        Binary::Min => Code::Min,
        Binary::Max => Code::Max,
    }
}

pub(super) fn comparison(how: Comparison) -> Code {
    match how {
        Comparison::Less => Code::Less,
        Comparison::LessEqual => Code::LessEqual,
        Comparison::Equal => Code::Equal,
        Comparison::NotEqual => Code::NotEqual,
        Comparison::GreaterEqual => Code::GreaterEqual,
        Comparison::Greater => Code::Greater,
    }
}

/// What keeps the entries of a row for which this tells yes, by the same number.
pub(super) fn kept_if(code: Code) -> Option<Code> {
    Some(match code {
        Code::Less => Code::IfLess,
        Code::LessEqual => Code::IfLessEqual,
        Code::Equal => Code::IfEqual,
        Code::NotEqual => Code::IfNotEqual,
        Code::GreaterEqual | Code::KeepLargest => Code::IfGreaterEqual,
        Code::Greater => Code::IfGreater,
        _ => return None,
    })
}

/// Where an instruction finds an operand, as its flags say it.
const IN_REGISTER: u32 = 0;
const IN_NUMBER: u32 = 1;
const IN_ACCUMULATOR: u32 = 2;
const IN_LOGITS: u32 = 3;

/// In an instruction, a result that is nowhere but in the accumulator.
const NO_REGISTER: u8 = u8::MAX;

/// In an instruction over numbers, that what it makes is held to what an entry of a row may be.
pub(super) const AS_ENTRY: u32 = 1 << 24;

/// In the last instruction of a piece of code.
const LAST: u32 = 1 << 22;

/// What the kernel's source is told of instructions.
pub(super) const PLACES: [(&str, u32); 7] = [
    ("LAST", LAST),
    ("AS_ENTRY", AS_ENTRY),
    ("IN_REGISTER", IN_REGISTER),
    ("IN_NUMBER", IN_NUMBER),
    ("IN_ACCUMULATOR", IN_ACCUMULATOR),
    ("IN_LOGITS", IN_LOGITS),
    ("NO_REGISTER", NO_REGISTER as u32),
];

/// An instruction: a code with where its result goes, and three operands, each with two flags that say what it is: a
/// register, a number or what the code says, the accumulator, or the logits.
pub(super) fn instruction(code: Code, result: u8, operands: [Operand; 3]) -> Entry {
    let flags = operands.iter().enumerate().fold(0, |flags, (idx, operand)| {
        let place = match operand {
            Operand::Register(_) => IN_REGISTER,
            Operand::Number(_) | Operand::Immediate(_) => IN_NUMBER,
            Operand::Accumulator => IN_ACCUMULATOR,
            Operand::Logits => IN_LOGITS,
        };
        flags | place << (2 * idx)
    });
    let word = |operand: Operand| match operand {
        Operand::Register(idx) | Operand::Number(idx) => u32::from(idx),
        Operand::Immediate(word) => word,
        Operand::Accumulator | Operand::Logits => 0,
    };
    let [a, b, c] = operands.map(word);
    Entry([code as u32 | u32::from(result) << 8 | flags << 16, a, b, c])
}

/// Where an instruction finds what it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operand {
    Register(u8),
    Number(u8),
    Immediate(u32),
    /// What the instruction before made, or took first if it made no row.
    Accumulator,
    /// The logits at this place.
    Logits,
}

/// No operand.
pub(super) const NOTHING: Operand = Operand::Immediate(0);

/// An operand before registers are given out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Taken {
    /// A row or set, by its value.
    Row(u8),
    Number(u8),
    Immediate(u32),
}

/// How a row or set is made, elementwise.
#[derive(Clone, Copy, Debug)]
pub(super) struct Element {
    pub(super) code: Code,
    pub(super) operands: [Taken; 3],
}

impl Element {
    /// Whether it is read, and may be read again instead of being kept.
    fn is_leaf(self) -> bool {
        self.operands.iter().all(|operand| !matches!(operand, Taken::Row(_)))
            && !matches!(self.code, Code::UniformRow | Code::GumbelRow)
    }
}

/// What is done with rows once they are there.
#[derive(Clone, Copy, Debug)]
pub(super) struct Root {
    pub(super) code: Code,
    pub(super) result: u8,
    pub(super) operands: [Taken; 3],
}

/// Registers that were lacking, or instructions that were too many.
#[derive(Clone, Copy, Debug)]
pub(super) struct TooLarge;

/// Code that makes what the roots take, and the roots; with how many registers it needs.
pub(super) fn code(elements: &[Option<Element>], roots: &[Root]) -> Result<(Vec<Entry>, usize), TooLarge> {
    [Leaves::Kept, Leaves::ReadAgain]
        .into_iter()
        .find_map(|leaves| Writer::new(elements, leaves).write(roots))
        .ok_or(TooLarge)
}

/// What becomes of rows that are read, between their uses.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Leaves {
    Kept,
    ReadAgain,
}

/// A row that an instruction takes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RowOperand {
    Logits,
    /// What the instruction with this index makes.
    Made(usize),
}

/// One instruction in order, with what it takes.
struct Instruction {
    makes: Makes,
    code: Code,
    /// Operands; a row by what it is when the instruction runs.
    operands: [Taken; 3],
    inputs: [Option<RowOperand>; 3],
}

/// What comes of an instruction.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Makes {
    /// A row.
    Row,
    /// What goes to this place, which the instruction knows.
    Result(u8),
}

struct Writer<'a> {
    elements: &'a [Option<Element>],
    leaves: Leaves,
    needs: Vec<usize>,
    made: Vec<Option<usize>>,
    instructions: Vec<Instruction>,
}

impl<'a> Writer<'a> {
    fn new(elements: &'a [Option<Element>], leaves: Leaves) -> Self {
        let mut needs: Vec<usize> = Vec::with_capacity(elements.len());
        for element in elements {
            let mut of_operands: Vec<usize> = rows(element.as_ref().map(|e| &e.operands), &needs).collect();
            of_operands.sort_unstable_by(|a, b| b.cmp(a));
            // Sethi and Ullman: what needs most is made first.
            let need = of_operands.iter().enumerate().map(|(idx, need)| need + idx).max().unwrap_or(0);
            // The logits are read where they are needed.
            let least = usize::from(!element.is_some_and(|element| element.code == Code::Logits));
            needs.push(need.max(least));
        }
        Self { elements, leaves, needs, made: vec![None; elements.len()], instructions: Vec::new() }
    }

    fn write_instruction(&mut self, makes: Makes, code: Code, mut operands: [Taken; 3]) -> usize {
        // What is made last is at hand as the first operand.
        let is_symmetric = matches!(code, Code::Add | Code::Mul | Code::And | Code::Or);
        let need = |needs: &[usize], operand: Taken| match operand {
            Taken::Row(row) => needs[usize::from(row)],
            _ => 0,
        };
        if is_symmetric && need(&self.needs, operands[0]) < need(&self.needs, operands[1]) {
            operands.swap(0, 1);
        }
        let mut order: Vec<usize> = (0..3).collect();
        order.sort_by_key(|&idx| std::cmp::Reverse(need(&self.needs, operands[idx])));
        let mut inputs = [None; 3];
        for idx in order {
            if let Taken::Row(row) = operands[idx] {
                inputs[idx] = Some(self.make(row));
            }
        }
        self.instructions.push(Instruction { makes, code, operands, inputs });
        self.instructions.len() - 1
    }

    /// The instruction that makes a row, written where it is not there yet.
    fn make(&mut self, row: u8) -> RowOperand {
        let idx = usize::from(row);
        if let Some(written) = self.made[idx] {
            return RowOperand::Made(written);
        }
        let element = self.elements[idx].expect("a row is made of something");
        if element.code == Code::Logits {
            return RowOperand::Logits;
        }
        let written = self.write_instruction(Makes::Row, element.code, element.operands);
        if self.leaves == Leaves::Kept || !element.is_leaf() {
            self.made[idx] = Some(written);
        }
        RowOperand::Made(written)
    }

    fn write(mut self, roots: &[Root]) -> Option<(Vec<Entry>, usize)> {
        for root in roots {
            self.write_instruction(Makes::Result(root.result), root.code, root.operands);
        }
        if self.instructions.len() > N_CODE_MAX {
            return None;
        }
        // Which operands are in the accumulator when they are taken; the last use of each instruction that is in a register.
        let mut at_hand = Vec::with_capacity(self.instructions.len());
        let mut last_uses: Vec<Option<usize>> = vec![None; self.instructions.len()];
        let mut accumulator = None;
        for (idx, written) in self.instructions.iter().enumerate() {
            let mut is_there = written.inputs.map(|input| input.is_some() && input == accumulator);
            // The accumulator takes the first operand before the third is fetched, or before any other of a root.
            is_there[1] &= is_there[0] || written.makes == Makes::Row;
            is_there[2] &= is_there[0];
            at_hand.push(is_there);
            for (input, is_there) in written.inputs.into_iter().zip(is_there) {
                if let (Some(RowOperand::Made(made)), false) = (input, is_there) {
                    last_uses[made] = Some(idx);
                }
            }
            accumulator = match written.makes {
                Makes::Row => Some(RowOperand::Made(idx)),
                Makes::Result(_) => written.inputs[0],
            };
        }
        let mut registers = vec![NO_REGISTER; self.instructions.len()];
        let mut free: Vec<u8> = (0..N_REGISTERS as u8).rev().collect();
        let mut n_registers = 0;
        let mut entries = Vec::with_capacity(self.instructions.len());
        for (idx, written) in self.instructions.iter().enumerate() {
            let operands = [0, 1, 2].map(|i| match (written.operands[i], written.inputs[i]) {
                (Taken::Row(_), Some(_)) if at_hand[idx][i] => Operand::Accumulator,
                (Taken::Row(_), Some(RowOperand::Logits)) => Operand::Logits,
                (Taken::Row(_), Some(RowOperand::Made(made))) => Operand::Register(registers[made]),
                (Taken::Row(row), None) => unreachable!("row {row} is made before"),
                (Taken::Number(number), _) => Operand::Number(number),
                (Taken::Immediate(word), _) => Operand::Immediate(word),
            });
            for made in 0..idx {
                if last_uses[made] == Some(idx) {
                    free.push(registers[made]);
                }
            }
            // An instruction reads before it writes: its result may take the place of an operand.
            let result = match written.makes {
                Makes::Result(result) => result,
                Makes::Row if last_uses[idx].is_some() => {
                    registers[idx] = free.pop()?;
                    n_registers = n_registers.max(usize::from(registers[idx]) + 1);
                    registers[idx]
                }
                Makes::Row => NO_REGISTER,
            };
            entries.push(instruction(written.code, result, operands));
        }
        entries.last_mut()?.0[0] |= LAST;
        Some((entries, n_registers))
    }
}

fn rows<'a>(operands: Option<&'a [Taken; 3]>, needs: &'a [usize]) -> impl Iterator<Item = usize> + 'a {
    operands.into_iter().flatten().filter_map(|operand| match operand {
        Taken::Row(row) => Some(needs[usize::from(*row)]),
        _ => None,
    })
}

/// Whether two operations over the same values make the same bits.
pub(super) fn is_same(a: &Operation, b: &Operation) -> bool {
    match (a, b) {
        (Operation::Constant(a), Operation::Constant(b)) => a.to_bits() == b.to_bits(),
        _ => a == b,
    }
}

pub(super) fn noise(noise: Noise) -> Code {
    match noise {
        Noise::Uniform => Code::UniformRow,
        Noise::Gumbel => Code::GumbelRow,
    }
}

/// A source as the kernel reads it: a seed's lane, or a key with how many tokens count.
pub(super) fn source_entry(source: Source) -> Entry {
    match source {
        Source::Seed { lane } => Entry([u32::from(lane), 0, 0, 0]),
        Source::Key { key, n_tokens, lane } => {
            Entry([u32::from(lane), 1 + u32::from(n_tokens), key as u32, (key >> 32) as u32])
        }
    }
}

pub(super) fn is_number(kind: Kind) -> bool {
    matches!(kind, Kind::Number | Kind::Token)
}
