//! Runs a program over one row of logits: what programs mean, to the bit.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use trellis_programs::{Binary, Comparison, End, Noise, Operation, Reduction, Source, Unary, Value};

use super::reduce::{self, as_number, in_row};
use super::{N_REPORTS_MAX, Program, ProgramState, history};
use crate::batch::{OutputFault, Token};
use crate::sampling::distribution::position_of;
use crate::sampling::gumbel::{self, Words, draw_dense};
use crate::sampling::maths::{exp, exp_all, log};
use crate::sampling::select::Entry;
use crate::sampling::{Bias, TokenMask};

/// What a draw is made of, besides the program.
#[derive(Clone, Copy, Debug)]
pub struct DrawInputs<'a> {
    /// The logits: numbers or −∞.
    pub logits: &'a [f32], // [vocab_size]
    /// Those of the other members of the job; a NaN counts as −∞, what is above the largest number as that.
    pub members: &'a [&'a [f32]], // [vocab_size] each
    /// The last tokens of the context, at least as many as the program looks at.
    pub history: &'a [Token],
    /// How many tokens the context has.
    pub n_tokens: usize,
    /// The position that the token will have.
    pub position: u64,
    /// How many tokens the program has drawn in the context.
    pub n_drawn: u32,
    /// Key of the draws.
    pub seed: u64,
    /// Parameters; those that are not there are 0.
    pub parameters: &'a [f32],
    /// What the token before left, or the program's first.
    pub state: ProgramState,
    /// Masks; one that is not there allows all.
    pub masks: &'a [Arc<TokenMask>],
    /// Biases; one that is not there is 0.
    pub biases: &'a [Arc<Bias>],
    /// The constraint's mask; all tokens when `None`.
    pub constraint: Option<&'a TokenMask>,
    /// What argmax and draw keep to; all tokens when `None`.
    pub within: Option<&'a TokenMask>,
}

/// What came of a program.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome<T> {
    /// The token, or the row.
    pub end: T,
    /// What it leaves to the next token.
    pub state: ProgramState,
    /// What it reports; as many as the program says.
    pub reports: [f32; N_REPORTS_MAX],
}

/// A value while it is needed.
#[derive(Debug, Default)]
enum Held<'a> {
    #[default]
    Gone,
    Row(Cow<'a, [f32]>),
    Set(Vec<bool>),
    Number(f32),
    Token(Token),
}

/// A row, or a number that stands for one.
#[derive(Clone, Copy)]
enum Entries<'a> {
    Row(&'a [f32]),
    Number(f32),
}

impl Entries<'_> {
    #[inline(always)]
    fn at(self, idx: usize) -> f32 {
        match self {
            Self::Row(row) => row[idx],
            Self::Number(number) => number,
        }
    }
}

/// Runs programs. Holds memory that the next run uses, and nothing that a result depends on.
#[derive(Debug, Default)]
pub struct Machine {
    rows: Vec<Vec<f32>>,
    sets: Vec<Vec<bool>>,
    kept: Vec<Entry>,
}

impl Machine {
    /// Draws a token.
    ///
    /// # Errors
    /// A row that is drawn from holds no token above −∞.
    ///
    /// # Panics
    /// The program does not end in a token.
    pub fn draw(&mut self, program: &Program, place: &DrawInputs<'_>) -> Result<Outcome<Token>, OutputFault> {
        self.run(program, place, |held| match held {
            Held::Token(token) => *token,
            other => unreachable!("the program ends in {other:?}"),
        })
    }

    /// Computes the row in which a program ends.
    ///
    /// # Errors
    /// As for [`Self::draw`].
    ///
    /// # Panics
    /// The program does not end in a row.
    pub fn row(
        &mut self,
        program: &Program,
        place: &DrawInputs<'_>,
    ) -> Result<Outcome<Vec<f32>>, OutputFault> {
        self.run(program, place, |held| match held {
            Held::Row(row) => row.to_vec(),
            other => unreachable!("the program ends in {other:?}"),
        })
    }

    fn run<T>(
        &mut self,
        program: &Program,
        place: &DrawInputs<'_>,
        end: impl FnOnce(&Held<'_>) -> T,
    ) -> Result<Outcome<T>, OutputFault> {
        let definition = program.definition();
        let mut run = Run { machine: self, place, values: Vec::new() };
        for (idx, operation) in definition.operations.iter().enumerate() {
            if !program.is_needed[idx] {
                run.values.push(Held::Gone);
                continue;
            }
            let value = run.evaluate(operation)?;
            run.values.push(value);
            for operand in operation.operands().chain([Value(idx as u8)]) {
                if program.last_uses[usize::from(operand.0)] == idx {
                    run.let_go(operand);
                }
            }
        }
        let mut state = ProgramState::default();
        for (number, value) in state.iter_mut().zip(&definition.next_state) {
            *number = run.number(*value);
        }
        let mut reports = [0.0; N_REPORTS_MAX];
        for (number, value) in reports.iter_mut().zip(&definition.reports) {
            *number = run.number(*value);
        }
        let value = match definition.end {
            End::Token(value) | End::Row(value) => value,
        };
        let end = end(&run.values[usize::from(value.0)]);
        for idx in 0..run.values.len() {
            run.let_go(Value(idx as u8));
        }
        Ok(Outcome { end, state, reports })
    }
}

/// A run under way.
struct Run<'m, 'a> {
    machine: &'m mut Machine,
    place: &'m DrawInputs<'a>,
    values: Vec<Held<'a>>,
}

impl<'a> Run<'_, 'a> {
    fn let_go(&mut self, value: Value) {
        match std::mem::take(&mut self.values[usize::from(value.0)]) {
            Held::Row(Cow::Owned(row)) => self.machine.rows.push(row),
            Held::Set(set) => self.machine.sets.push(set),
            _ => {}
        }
    }

    fn vocab_size(&self) -> usize {
        self.place.logits.len()
    }

    fn number(&self, value: Value) -> f32 {
        match &self.values[usize::from(value.0)] {
            Held::Number(number) => *number,
            other => unreachable!("a number was checked for, and is {other:?}"),
        }
    }

    fn token(&self, value: Value) -> Token {
        match &self.values[usize::from(value.0)] {
            Held::Token(token) => *token,
            other => unreachable!("a token was checked for, and is {other:?}"),
        }
    }

    fn row(&self, value: Value) -> &[f32] {
        match &self.values[usize::from(value.0)] {
            Held::Row(row) => row,
            other => unreachable!("a row was checked for, and is {other:?}"),
        }
    }

    fn set(&self, value: Value) -> &[bool] {
        match &self.values[usize::from(value.0)] {
            Held::Set(set) => set,
            other => unreachable!("a set was checked for, and is {other:?}"),
        }
    }

    fn entries(&self, value: Value) -> Entries<'_> {
        match &self.values[usize::from(value.0)] {
            Held::Row(row) => Entries::Row(row),
            Held::Number(number) => Entries::Number(*number),
            other => unreachable!("a row or a number was checked for, and is {other:?}"),
        }
    }

    fn are_numbers(&self, values: &[Value]) -> bool {
        values.iter().all(|value| matches!(self.values[usize::from(value.0)], Held::Number(_)))
    }

    /// A row of zeros.
    fn zeros(&mut self) -> Vec<f32> {
        let mut row = self.machine.rows.pop().unwrap_or_default();
        row.clear();
        row.resize(self.vocab_size(), 0.0);
        row
    }

    /// An empty set.
    fn nothing(&mut self) -> Vec<bool> {
        let mut set = self.machine.sets.pop().unwrap_or_default();
        set.clear();
        set.resize(self.vocab_size(), false);
        set
    }

    /// A row made entry by entry.
    fn row_of(&mut self, write: impl FnOnce(&Self, &mut [f32])) -> Held<'a> {
        let mut row = self.zeros();
        write(self, &mut row);
        Held::Row(Cow::Owned(row))
    }

    /// A set made bit by bit.
    fn set_of(&mut self, write: impl FnOnce(&Self, &mut [bool])) -> Held<'a> {
        let mut set = self.nothing();
        write(self, &mut set);
        Held::Set(set)
    }

    /// What is in the set of the row, −∞ elsewhere, to be used up.
    fn within(&mut self, row: Value, set: Value, elsewhere: f32) -> Vec<f32> {
        let mut copy = self.zeros();
        for ((copy, &x), &is_in) in copy.iter_mut().zip(self.row(row)).zip(self.set(set)) {
            *copy = if is_in { x } else { elsewhere };
        }
        copy
    }

    fn words(&self, source: Source) -> Words {
        let place = self.place;
        match source {
            Source::Seed { lane } => Words::new(place.seed, place.position, lane),
            Source::Key { key, n_tokens, lane } => {
                let hash = history::hash(history::last(place.history, usize::from(n_tokens)));
                Words::new(key, u64::from(hash[0]) | u64::from(hash[1]) << 32, lane)
            }
        }
    }

    /// The tokens that an operation looks at.
    fn tokens(&self, n: Option<u32>) -> &'a [Token] {
        history::last(self.place.history, n.map_or(usize::MAX, |n| n as usize))
    }

    fn evaluate(&mut self, operation: &Operation) -> Result<Held<'a>, OutputFault> {
        Ok(match *operation {
            Operation::Logits => Held::Row(Cow::Borrowed(self.place.logits)),
            Operation::Member(idx) => match self.place.members.get(usize::from(idx)) {
                None => Held::Row(Cow::Borrowed(self.place.logits)),
                Some(row) if row.iter().any(|&x| x.is_nan() || x > f32::MAX) => {
                    self.row_of(|_, copy| copy.iter_mut().zip(*row).for_each(|(copy, &x)| *copy = in_row(x)))
                }
                Some(row) => Held::Row(Cow::Borrowed(row)),
            },
            Operation::LogSoftmax(x) => {
                let mut copy = self.zeros();
                copy.copy_from_slice(self.row(x));
                let log_sum_exp = reduce::log_sum_exp(&mut copy);
                for (copy, &x) in copy.iter_mut().zip(self.row(x)) {
                    *copy = in_row(x - log_sum_exp);
                }
                Held::Row(Cow::Owned(copy))
            }
            Operation::CountLast { n } => self.row_of(|run, counts| history::count(run.tokens(n), counts)),
            Operation::CountSince(position) => {
                let first = self.number(position).max(0.0) as usize;
                let n = self.place.n_tokens.saturating_sub(first);
                self.row_of(|run, counts| history::count(history::last(run.place.history, n), counts))
            }
            Operation::Repeats { window, cap, breakers } => {
                let mask = breakers.and_then(|id| self.place.masks.get(usize::from(id.0)));
                let breaks = |token| mask.is_some_and(|mask| mask.allows(token));
                self.row_of(|run, lengths| {
                    history::repeats(run.tokens(Some(window)), cap as usize, breaks, lengths);
                })
            }
            Operation::Bias(id) => {
                let bias = self.place.biases.get(usize::from(id.0));
                self.row_of(|_, row| bias.into_iter().for_each(|bias| bias.write(row)))
            }
            Operation::NoiseRow { noise, source } => {
                let words = self.words(source);
                self.row_of(|_, row| match noise {
                    Noise::Uniform => words.uniform_row(row),
                    Noise::Gumbel => words.gumbel_row(row),
                })
            }
            Operation::Uniform(source) => Held::Number(gumbel::uniform(self.words(source).single())),
            Operation::Unary(how, x) if self.are_numbers(&[x]) => {
                Held::Number(as_number(unary(how, self.number(x))))
            }
            Operation::Unary(how, x) => self.row_of(|run, out| unary_row(how, run.row(x), out)),
            Operation::Binary(how, x, y) if self.are_numbers(&[x, y]) => {
                Held::Number(as_number(binary(how, self.number(x), self.number(y))))
            }
            Operation::Binary(how, x, y) => {
                self.row_of(|run, out| binary_row(how, run.entries(x), run.entries(y), out))
            }
            Operation::Compare(how, x, y) if self.are_numbers(&[x, y]) => {
                Held::Number(f32::from(u8::from(compare(how, self.number(x), self.number(y)))))
            }
            Operation::Compare(how, x, y) => self.set_of(|run, out| {
                let (x, y) = (run.entries(x), run.entries(y));
                (0..out.len()).for_each(|idx| out[idx] = compare(how, x.at(idx), y.at(idx)));
            }),
            Operation::And(x, y) => self.set_of(|run, out| {
                let (x, y) = (run.set(x), run.set(y));
                (0..out.len()).for_each(|idx| out[idx] = x[idx] & y[idx]);
            }),
            Operation::Or(x, y) => self.set_of(|run, out| {
                let (x, y) = (run.set(x), run.set(y));
                (0..out.len()).for_each(|idx| out[idx] = x[idx] | y[idx]);
            }),
            Operation::Not(x) => self.set_of(|run, out| {
                let x = run.set(x);
                (0..out.len()).for_each(|idx| out[idx] = !x[idx]);
            }),
            Operation::Mask(id) => {
                let mask = self.place.masks.get(usize::from(id.0)).map(Arc::as_ref);
                self.set_of(|_, out| allowed(mask, out))
            }
            Operation::Constraint => {
                let mask = self.place.constraint;
                self.set_of(|_, out| allowed(mask, out))
            }
            Operation::Largest { row, k } => {
                let mut kept = std::mem::take(&mut self.machine.kept);
                let set =
                    self.set_of(|run, out| reduce::largest(run.row(row), run.number(k), &mut kept, out));
                self.machine.kept = kept;
                set
            }
            Operation::Nucleus { order, row, p } => {
                self.set_of(|run, out| reduce::nucleus(run.row(order), run.row(row), run.number(p), out))
            }
            Operation::Ngrams { n, window } => {
                self.set_of(|run, out| history::ngrams(run.tokens(window), usize::from(n), out))
            }
            Operation::Only(token) => self.set_of(|run, out| out[run.token(token) as usize] = true),
            Operation::All => self.set_of(|_, out| out.fill(true)),
            Operation::Nothing => self.set_of(|_, _| ()),
            Operation::Constant(number) => Held::Number(number),
            Operation::Parameter(idx) => Held::Number(self.parameter(idx)),
            Operation::State(idx) => Held::Number(self.place.state[usize::from(idx)]),
            Operation::Position => Held::Number(self.place.position as f32),
            Operation::Length => Held::Number(self.place.n_tokens as f32),
            Operation::Drawn => Held::Number(self.place.n_drawn as f32),
            Operation::Reduce(how, row, set) => Held::Number(self.reduce(how, row, set)),
            Operation::Count(set) => {
                Held::Number(self.set(set).iter().filter(|&&is_in| is_in).count() as f32)
            }
            Operation::At(row, token) => Held::Number(as_number(self.row(row)[self.token(token) as usize])),
            Operation::Argmax(row) => {
                let kept = self.kept(row);
                let row = kept.as_deref().unwrap_or_else(|| self.row(row));
                let token = match reduce::max(row) {
                    f32::NEG_INFINITY => return Err(OutputFault::NothingToDraw),
                    max => position_of(row, max),
                };
                self.machine.rows.extend(kept);
                Held::Token(token)
            }
            Operation::Draw(row, source) => Held::Token(self.draw(row, source)?),
            Operation::ParameterToken(idx) => {
                let last = self.vocab_size() - 1;
                Held::Token((self.parameter(idx).max(0.0) as usize).min(last) as Token)
            }
            Operation::Select(condition, yes, no) => self.select(condition, yes, no),
        })
    }

    fn parameter(&self, idx: u8) -> f32 {
        self.place.parameters.get(usize::from(idx)).copied().unwrap_or(0.0)
    }

    fn reduce(&mut self, how: Reduction, row: Value, set: Value) -> f32 {
        let elsewhere = match how {
            Reduction::Sum | Reduction::Mean | Reduction::Variance => 0.0,
            Reduction::Max | Reduction::LogSumExp | Reduction::Entropy => f32::NEG_INFINITY,
        };
        let mut copy = self.within(row, set, elsewhere);
        let n = self.set(set).iter().filter(|&&is_in| is_in).count() as f32;
        let result = match how {
            Reduction::Max => reduce::max(&copy),
            Reduction::Sum => reduce::sum(&mut copy),
            Reduction::Mean => as_number(reduce::sum(&mut copy) / n),
            Reduction::Variance => {
                let mean = as_number(reduce::sum(&mut copy) / n);
                for ((copy, &x), &is_in) in copy.iter_mut().zip(self.row(row)).zip(self.set(set)) {
                    let apart = in_row(x - mean);
                    *copy = if is_in { in_row(apart * apart) } else { 0.0 };
                }
                as_number(reduce::sum(&mut copy) / n)
            }
            Reduction::LogSumExp => reduce::log_sum_exp(&mut copy),
            Reduction::Entropy => reduce::entropy(&mut copy),
        };
        self.machine.rows.push(copy);
        as_number(result)
    }

    fn draw(&mut self, row: Value, source: Source) -> Result<Token, OutputFault> {
        let (kept, words, mut weights) = (self.kept(row), self.words(source), self.zeros());
        let row = kept.as_deref().unwrap_or_else(|| self.row(row));
        let max = reduce::max(row);
        if max == f32::NEG_INFINITY {
            return Err(OutputFault::NothingToDraw);
        }
        for (weight, &x) in weights.iter_mut().zip(row) {
            *weight = x - max;
        }
        exp_all(&mut weights);
        let token = draw_dense(row, &weights, position_of(row, max), max, words);
        self.machine.rows.extend(kept.into_iter().chain([weights]));
        Ok(token)
    }

    /// The row without what may not be drawn, where something may not.
    fn kept(&mut self, row: Value) -> Option<Vec<f32>> {
        let within = self.place.within?;
        let mut kept = self.zeros();
        for (token, (kept, &x)) in kept.iter_mut().zip(self.row(row)).enumerate() {
            *kept = if within.allows(token as Token) { x } else { f32::NEG_INFINITY };
        }
        Some(kept)
    }

    fn select(&mut self, condition: Value, yes: Value, no: Value) -> Held<'a> {
        let holds = match &self.values[usize::from(condition.0)] {
            Held::Number(number) => Some(*number != 0.0),
            _ => None,
        };
        let taken = if holds == Some(false) { no } else { yes };
        match (&self.values[usize::from(yes.0)], &self.values[usize::from(no.0)], holds) {
            (Held::Token(_), _, _) => Held::Token(self.token(taken)),
            (Held::Number(_), Held::Number(_), Some(_)) => Held::Number(self.number(taken)),
            (Held::Set(_), _, Some(_)) => self.set_of(|run, out| out.copy_from_slice(run.set(taken))),
            (Held::Set(_), _, None) => self.set_of(|run, out| {
                let (condition, yes, no) = (run.set(condition), run.set(yes), run.set(no));
                (0..out.len()).for_each(|idx| out[idx] = if condition[idx] { yes[idx] } else { no[idx] });
            }),
            (_, _, Some(_)) => self.row_of(|run, out| {
                let taken = run.entries(taken);
                (0..out.len()).for_each(|idx| out[idx] = taken.at(idx));
            }),
            (_, _, None) => self.row_of(|run, out| {
                let (condition, yes, no) = (run.set(condition), run.entries(yes), run.entries(no));
                for idx in 0..out.len() {
                    out[idx] = if condition[idx] { yes.at(idx) } else { no.at(idx) };
                }
            }),
        }
    }
}

fn allowed(mask: Option<&TokenMask>, out: &mut [bool]) {
    match mask {
        None => out.fill(true),
        Some(mask) => out.iter_mut().enumerate().for_each(|(token, out)| *out = mask.allows(token as Token)),
    }
}

#[inline(always)]
fn unary(how: Unary, x: f32) -> f32 {
    match how {
        Unary::Neg => -x,
        Unary::Abs => x.abs(),
        Unary::Sqrt => x.sqrt(),
        Unary::Exp => exp(x),
        Unary::Log => log(x),
    }
}

fn unary_row(how: Unary, x: &[f32], out: &mut [f32]) {
    let all = |out: &mut [f32], f: fn(f32) -> f32| {
        out.iter_mut().zip(x).for_each(|(out, &x)| *out = in_row(f(x)));
    };
    match how {
        Unary::Neg => all(out, |x| -x),
        Unary::Abs => all(out, f32::abs),
        Unary::Sqrt => all(out, f32::sqrt),
        Unary::Exp => {
            out.copy_from_slice(x);
            exp_all(out);
        }
        Unary::Log => all(out, log),
    }
}

#[inline(always)]
fn binary(how: Binary, x: f32, y: f32) -> f32 {
    match how {
        Binary::Add => x + y,
        Binary::Sub => x - y,
        Binary::Mul => x * y,
        Binary::Div => x / y,
        Binary::Min => {
            if y < x {
                y
            } else {
                x
            }
        }
        Binary::Max => {
            if y > x {
                y
            } else {
                x
            }
        }
    }
}

fn binary_row(how: Binary, x: Entries<'_>, y: Entries<'_>, out: &mut [f32]) {
    #[inline(always)]
    fn each(x: Entries<'_>, y: Entries<'_>, out: &mut [f32], f: impl Fn(f32, f32) -> f32) {
        let idxs: Range<usize> = 0..out.len();
        match (x, y) {
            (Entries::Row(x), Entries::Row(y)) => idxs.for_each(|idx| out[idx] = in_row(f(x[idx], y[idx]))),
            (Entries::Row(x), Entries::Number(y)) => idxs.for_each(|idx| out[idx] = in_row(f(x[idx], y))),
            (x, Entries::Row(y)) => idxs.for_each(|idx| out[idx] = in_row(f(x.at(idx), y[idx]))),
            (x, y) => idxs.for_each(|idx| out[idx] = in_row(f(x.at(idx), y.at(idx)))),
        }
    }
    match how {
        Binary::Add => each(x, y, out, |x, y| binary(Binary::Add, x, y)),
        Binary::Sub => each(x, y, out, |x, y| binary(Binary::Sub, x, y)),
        Binary::Mul => each(x, y, out, |x, y| binary(Binary::Mul, x, y)),
        Binary::Div => each(x, y, out, |x, y| binary(Binary::Div, x, y)),
        Binary::Min => each(x, y, out, |x, y| binary(Binary::Min, x, y)),
        Binary::Max => each(x, y, out, |x, y| binary(Binary::Max, x, y)),
    }
}

#[inline(always)]
fn compare(how: Comparison, x: f32, y: f32) -> bool {
    match how {
        Comparison::Less => x < y,
        Comparison::LessEqual => x <= y,
        Comparison::Equal => x == y,
        Comparison::NotEqual => x != y,
        Comparison::GreaterEqual => x >= y,
        Comparison::Greater => x > y,
    }
}
