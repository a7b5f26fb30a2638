//! Logit programs: whatever is taken runs, and gives what its definition says, to the bit.

mod naive;

use std::sync::Arc;

use arbitrary::{Result, Unstructured};
use trellis_engine::batch::{OutputFault, Token};
use trellis_engine::sampling::program::{
    Definition, DrawInputs, End, Kind, Machine, N_REPORTS_MAX, Outcome, Program, ProgramState, RowShape,
};
use trellis_engine::sampling::{Bias, TokenMask};
use trellis_programs::{Operation, Value, random};

use self::naive::Naive;

/// Sizes of vocabularies: single tokens, ends of words and vectors, and more than a selection sorts at once.
const VOCAB_SIZES: [usize; 8] = [1, 2, 3, 31, 33, 64, 300, 1000];
const N_POSITIONS: usize = 512;
/// The longest history.
const N_TOKENS_MAX: usize = 90;

/// Makes a program and a row of the bytes. The first byte says whether the program is one that is right mostly, one in which
/// an operation is exchanged, or one as it comes off the wire.
///
/// # Panics
/// The interpreter gives another token, row, state or report than a reading of the definition that shares nothing with it but
/// eˣ and ln; what it gives depends on what it ran before, or on tokens that the program says it does not look at.
pub fn check(input: &[u8]) {
    let _ = run(input);
}

/// Gives the program and the row that these bytes make, if they make a program, to something else that runs programs.
pub fn given<T>(input: &[u8], run: impl FnOnce(&Program, &DrawInputs<'_>) -> T) -> Option<T> {
    let (case, program) = made(input)?;
    let program = if case.is_constrained { program.constrained() } else { program };
    let members: Vec<&[f32]> = case.members.iter().map(Vec::as_slice).collect();
    Some(run(&program, &case.inputs(&members, N_TOKENS_MAX)))
}

/// What the bytes make, if it is a program that may be run.
fn made(input: &[u8]) -> Option<(Case, Program)> {
    let mut bytes = Unstructured::new(input);
    let case = Case::new(&mut bytes).expect("zeros make a case");
    let definition = case.definition(&mut bytes).expect("zeros make a program")?;
    let program = Program::new(definition, case.shape).ok()?;
    Some((case, program))
}

/// What came of the program, if it is one that may be run.
fn run(input: &[u8]) -> Option<Found> {
    let (case, program) = made(input)?;
    let sent = rmp_serde::to_vec(&program).expect("a program is plain data");
    let received: Program = rmp_serde::from_slice(&sent).expect("what was checked is right");
    assert!(received == program && received.id() == program.id());

    let program = if case.is_constrained { program.constrained() } else { program };
    let expected = case.expected(&program);
    let mut machine = Machine::default();
    is_alike(&case.run(&program, &mut machine, N_TOKENS_MAX), &expected, &program);
    // With memory of a run before, and no more of the history than the program says that it looks at.
    let n_history = program.n_history(case.history.len());
    is_alike(&case.run(&program, &mut machine, n_history), &expected, &program);
    Some(expected)
}

/// What a program ends in.
#[derive(Debug, PartialEq)]
enum Ended {
    Token(Token),
    /// The bits of a row.
    Row(Vec<u32>),
}

/// What comes of a run, or that nothing could be drawn.
type Found = std::result::Result<Outcome<Ended>, OutputFault>;

fn row_bits(row: &[f32]) -> Ended {
    Ended::Row(row.iter().map(|x| x.to_bits()).collect())
}

fn is_alike(found: &Found, expected: &Found, program: &Program) {
    let is_same = match (found, expected) {
        (Ok(found), Ok(expected)) => {
            let bits = |numbers: &[f32]| -> Vec<u32> { numbers.iter().map(|x| x.to_bits()).collect() };
            found.end == expected.end
                && bits(&found.state) == bits(&expected.state)
                && bits(&found.reports) == bits(&expected.reports)
        }
        (Err(found), Err(expected)) => found == expected,
        _ => false,
    };
    assert!(is_same, "{found:?} instead of {expected:?} of {:?}", program.definition());
}

/// Where a program is run.
struct Case {
    kind: u8,
    shape: RowShape,
    is_constrained: bool,
    logits: Vec<f32>,
    members: Vec<Vec<f32>>,
    history: Vec<Token>,
    parameters: Vec<f32>,
    state: ProgramState,
    masks: Vec<Arc<TokenMask>>,
    biases: Vec<Arc<Bias>>,
    constraint: Option<TokenMask>,
    seed: u64,
    n_drawn: u32,
}

impl Case {
    fn new(bytes: &mut Unstructured<'_>) -> Result<Self> {
        let kind = bytes.arbitrary()?;
        let vocab_size = *bytes.choose(&VOCAB_SIZES)?;
        let seed = bytes.arbitrary()?;
        // What is as long as a row is of a seed: bytes that say each entry would leave few for the program.
        let mut row = Row { state: bytes.arbitrary::<u16>()?.into(), spread: bytes.arbitrary()? };
        let mut mask = |n_of_8: u64| {
            let words = (0..vocab_size.div_ceil(64)).map(|_| row.bits(n_of_8)).collect();
            TokenMask::from_words(words, vocab_size).expect("as many words as the vocabulary fills")
        };
        let masks =
            (0..bytes.int_in_range(0..=random::N_HANDLES)?).map(|n| Arc::new(mask(2 + 2 * u64::from(n))));
        let masks = masks.collect();
        let constraint = bytes.arbitrary::<bool>()?.then(|| mask(3));
        let n_biases = bytes.int_in_range(0..=random::N_HANDLES)?;
        let biases = (0..n_biases).map(|n| {
            let bias = match n {
                0 => Bias::dense(row.numbers(vocab_size), vocab_size),
                _ => Bias::sparse(
                    (0..vocab_size as Token).step_by(3).zip(row.numbers(vocab_size)).collect(),
                    vocab_size,
                ),
            };
            Arc::new(bias.expect("numbers and −∞"))
        });
        let biases = biases.collect();
        let logits = row.numbers(vocab_size);
        let n_members = bytes.int_in_range(0..=random::N_MEMBERS)?;
        let members = (0..n_members).map(|_| row.numbers_or_nan(vocab_size)).collect();
        let n_tokens = bytes.int_in_range(0..=N_TOKENS_MAX)?;
        // Few tokens, so that runs of them repeat.
        let history = (0..n_tokens).map(|_| row.below(vocab_size.min(6) as u64) as Token).collect();
        let finite = |x: f32| if x.is_finite() { x } else { 0.5 };
        let parameters = (0..bytes.int_in_range(0..=random::N_PARAMETERS)?)
            .map(|_| bytes.arbitrary().map(finite))
            .collect::<Result<_>>()?;
        let mut state = ProgramState::default();
        for number in &mut state[..3] {
            *number = finite(f32::from(bytes.arbitrary::<i8>()?) / 8.0);
        }
        let (is_constrained, n_drawn) = (bytes.ratio(1, 4)?, bytes.arbitrary::<u8>()?.into());
        let shape = RowShape { vocab_size, n_positions: N_POSITIONS };
        Ok(Self {
            kind,
            shape,
            is_constrained,
            logits,
            members,
            history,
            parameters,
            state,
            masks,
            biases,
            constraint,
            seed,
            n_drawn,
        })
    }

    /// The program that the rest of the bytes makes; none where they come off the wire and are none.
    fn definition(&self, bytes: &mut Unstructured<'_>) -> Result<Option<Definition>> {
        if self.kind % 8 == 7 {
            return Ok(rmp_serde::from_slice(bytes.bytes(bytes.len())?).ok());
        }
        let n_operations = bytes.int_in_range(4..=128)?;
        let exchanged = (self.kind % 8 == 6).then(|| bytes.arbitrary::<(u8, u8)>()).transpose()?;
        let ends_in_a_row = bytes.ratio(1, 4)?;
        let mut definition = random::definition_by(n_operations, || {
            // Wide enough for all that it asks for but keys.
            bytes.arbitrary::<u16>().map_or(0, u64::from)
        });
        if let Some((place, by)) = exchanged {
            let n = definition.operations.len();
            definition.operations[usize::from(place) % n] =
                definition.operations[usize::from(by) % n].renamed(|value| Value(value.0 ^ (by & 3)));
        }
        if ends_in_a_row && let Some(value) = last_row(&definition, self.shape) {
            definition.end = End::Row(value);
        }
        Ok(Some(definition))
    }

    fn inputs<'a>(&'a self, members: &'a [&'a [f32]], n_history: usize) -> DrawInputs<'a> {
        let first = self.history.len().saturating_sub(n_history);
        DrawInputs {
            logits: &self.logits,
            members,
            history: &self.history[first..],
            n_tokens: self.history.len(),
            position: self.history.len() as u64,
            n_drawn: self.n_drawn,
            seed: self.seed,
            parameters: &self.parameters,
            state: self.state,
            masks: &self.masks,
            biases: &self.biases,
            constraint: self.constraint.as_ref(),
            within: self.constraint.as_ref(),
        }
    }

    fn run(&self, program: &Program, machine: &mut Machine, n_history: usize) -> Found {
        let members: Vec<&[f32]> = self.members.iter().map(Vec::as_slice).collect();
        let inputs = self.inputs(&members, n_history);
        match program.ends_in_a_token() {
            true => machine.draw(program, &inputs).map(|Outcome { end, state, reports }| Outcome {
                end: Ended::Token(end),
                state,
                reports,
            }),
            false => machine.row(program, &inputs).map(|Outcome { end, state, reports }| Outcome {
                end: row_bits(&end),
                state,
                reports,
            }),
        }
    }

    fn expected(&self, program: &Program) -> Found {
        let members: Vec<&[f32]> = self.members.iter().map(Vec::as_slice).collect();
        let inputs = self.inputs(&members, N_TOKENS_MAX);
        let Definition { operations, end, next_state, reports, .. } = program.definition();
        let mut naive = Naive::new(&inputs);
        for operation in operations {
            naive.evaluate(operation).map_err(|naive::Nothing| OutputFault::NothingToDraw)?;
        }
        let end = match *end {
            End::Token(value) => Ended::Token(naive.token(value)),
            End::Row(value) => row_bits(&naive.row(value)),
        };
        let mut outcome = Outcome { end, state: ProgramState::default(), reports: [0.0; N_REPORTS_MAX] };
        outcome.state.iter_mut().zip(next_state).for_each(|(number, value)| *number = naive.number(*value));
        outcome.reports.iter_mut().zip(reports).for_each(|(number, value)| *number = naive.number(*value));
        Ok(outcome)
    }
}

/// The last row of a program that is right, if it has one.
fn last_row(definition: &Definition, shape: RowShape) -> Option<Value> {
    let program = Program::new(definition.clone(), shape).ok()?;
    let idx = program.kinds().iter().rposition(|kind| *kind == Kind::Row)?;
    let is_made = !matches!(program.definition().operations[idx], Operation::Logits);
    is_made.then_some(Value(idx as u8))
}

/// Numbers of a seed.
struct Row {
    state: u64,
    /// How they are spread.
    spread: u8,
}

impl Row {
    fn next(&mut self) -> u64 {
        // SplitMix64.
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (self.state ^ (self.state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// A word of bits of which so many of 8 are set.
    fn bits(&mut self, n_of_8: u64) -> u64 {
        (0..64).fold(0, |word, bit| word | u64::from(self.below(8) < n_of_8) << bit)
    }

    /// Numbers and −∞: as logits are, with many ties, or at the ends of their range.
    fn numbers(&mut self, n: usize) -> Vec<f32> {
        let number = |row: &mut Self| match row.spread % 4 {
            0 => (row.below(8001) as f32 - 4000.0) / 400.0,
            1 => row.below(5) as f32,
            2 => match row.below(6) {
                0 => f32::NEG_INFINITY,
                _ => (row.below(2001) as f32 - 1000.0) / 20.0,
            },
            _ => {
                let ends = [f32::NEG_INFINITY, f32::MAX, -f32::MAX, 0.0, -0.0, 1e-40, 88.0, -104.0];
                ends[row.below(ends.len() as u64) as usize]
            }
        };
        (0..n).map(|_| number(self)).collect()
    }

    /// As a model may give them.
    fn numbers_or_nan(&mut self, n: usize) -> Vec<f32> {
        let mut numbers = self.numbers(n);
        for number in &mut numbers {
            match self.below(40) {
                0 => *number = f32::NAN,
                1 => *number = f32::INFINITY,
                _ => {}
            }
        }
        numbers
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random_input;

    #[test]
    fn most_inputs_are_programs_and_most_of_those_draw() {
        let found: Vec<Found> = (0..400).filter_map(|seed| run(&random_input(seed, 600))).collect();
        let n_drawn = found.iter().filter(|found| found.is_ok()).count();
        let n_rows = found.iter().flatten().filter(|found| matches!(found.end, Ended::Row(_))).count();
        assert!(found.len() > 200 && n_drawn > 100 && n_rows > 20, "{} {n_drawn} {n_rows}", found.len());
    }
}
