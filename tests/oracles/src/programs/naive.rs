//! Programs as they are written down in `sampling/program/mod.rs` and `trellis_programs::Operation`, read word for word: slow,
//! and without anything of the interpreter but eˣ and ln.

use trellis_engine::batch::Token;
use trellis_engine::fuzzing::{exp, log};
use trellis_engine::sampling::program::DrawInputs;
use trellis_engine::sampling::{Bias, TokenMask, philox4x32};
use trellis_programs::{Binary, Comparison, Noise, Operation, Reduction, Source, Unary, Value};

/// 2⁴⁵, the parts of 1 in sums of exponentials.
const PARTS: f64 = 35_184_372_088_832.0;

/// No token was above −∞ in a row that was drawn from.
pub(super) struct Nothing;

#[derive(Clone, Debug)]
enum Made {
    Row(Vec<f32>),
    Set(Vec<bool>),
    Number(f32),
    Token(Token),
}

/// The values of a program, all of which are kept.
pub(super) struct Naive<'a> {
    inputs: &'a DrawInputs<'a>,
    n: usize,
    values: Vec<Made>,
}

/// NaN becomes −∞ in a row, and what is above the largest number the largest.
fn in_row(x: f32) -> f32 {
    if x.is_nan() { f32::NEG_INFINITY } else { x.min(f32::MAX) }
}

/// NaN becomes 0 as a number, and what is above the largest number the largest.
fn as_number(x: f32) -> f32 {
    if x.is_nan() { 0.0 } else { x.min(f32::MAX) }
}

/// Neighbours are added, then neighbours of those; past the end everything is 0.
fn sum(row: &[f32]) -> f32 {
    let mut row = row.to_vec();
    row.resize(row.len().next_power_of_two(), 0.0);
    while row.len() > 1 {
        row = row.chunks(2).map(|pair| in_row(pair[0] + pair[1])).collect();
    }
    row[0]
}

fn largest_of(row: impl Iterator<Item = f32>) -> f32 {
    row.fold(f32::NEG_INFINITY, |max, x| if x > max { x } else { max })
}

/// ⌊w · 2⁴⁵⌋.
fn parts(weight: f32) -> u64 {
    (f64::from(weight) * PARTS).floor() as u64
}

fn of_parts(sum: u64) -> f32 {
    (f64::from(sum as f32) / PARTS) as f32
}

fn uniform(word: u32) -> f32 {
    ((word >> 9) as f32 + 0.5) * 2.0_f32.powi(-23)
}

fn gumbel(word: u32) -> f32 {
    -log(-log(uniform(word)))
}

fn unary(how: Unary, x: f32) -> f32 {
    match how {
        Unary::Neg => -x,
        Unary::Abs => x.abs(),
        Unary::Sqrt => x.sqrt(),
        Unary::Exp => exp(x),
        Unary::Log => log(x),
    }
}

fn binary(how: Binary, x: f32, y: f32) -> f32 {
    match how {
        Binary::Add => x + y,
        Binary::Sub => x - y,
        Binary::Mul => x * y,
        Binary::Div => x / y,
        Binary::Min => [x, y][usize::from(y < x)],
        Binary::Max => [x, y][usize::from(y > x)],
    }
}

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

impl<'a> Naive<'a> {
    pub(super) fn new(inputs: &'a DrawInputs<'a>) -> Self {
        Self { inputs, n: inputs.logits.len(), values: Vec::new() }
    }

    fn made(&self, value: Value) -> &Made {
        &self.values[usize::from(value.0)]
    }

    /// A row, or a number in the place of one.
    pub(super) fn row(&self, value: Value) -> Vec<f32> {
        match self.made(value) {
            Made::Row(row) => row.clone(),
            Made::Number(number) => vec![*number; self.n],
            other => unreachable!("{other:?} is no row"),
        }
    }

    fn set(&self, value: Value) -> Vec<bool> {
        match self.made(value) {
            Made::Set(set) => set.clone(),
            other => unreachable!("{other:?} is no set"),
        }
    }

    pub(super) fn number(&self, value: Value) -> f32 {
        match self.made(value) {
            Made::Number(number) => *number,
            other => unreachable!("{other:?} is no number"),
        }
    }

    pub(super) fn token(&self, value: Value) -> Token {
        match self.made(value) {
            Made::Token(token) => *token,
            other => unreachable!("{other:?} is no token"),
        }
    }

    fn is_number(&self, value: Value) -> bool {
        matches!(self.made(value), Made::Number(_))
    }

    /// The last so many tokens of the history, or all.
    fn last(&self, n: Option<u32>) -> &'a [Token] {
        let n_all = self.inputs.history.len();
        &self.inputs.history[n_all - n.map_or(n_all, |n| (n as usize).min(n_all))..]
    }

    fn parameter(&self, idx: u8) -> f32 {
        self.inputs.parameters.get(usize::from(idx)).copied().unwrap_or(0.0)
    }

    fn counts(&self, tokens: &[Token]) -> Made {
        let count = |token: usize| tokens.iter().filter(|&&it| it as usize == token).count() as f32;
        Made::Row((0..self.n).map(count).collect())
    }

    /// The words of a block of a source.
    fn block(&self, source: Source, block: u32) -> [u32; 4] {
        let halves = |x: u64| [x as u32, (x >> 32) as u32];
        let (key, [low, high], lane) = match source {
            Source::Seed { lane } => (halves(self.inputs.seed), halves(self.inputs.position), lane),
            Source::Key { key, n_tokens, lane } => {
                let tokens = self.last(Some(u32::from(n_tokens)));
                let hash = tokens.iter().enumerate().fold([0, 0], |hash: [u32; 2], (idx, &token)| {
                    let words = philox4x32([token, idx as u32, hash[0], hash[1]], [0, 0]);
                    [words[0], words[1]]
                });
                (halves(key), hash, lane)
            }
        };
        philox4x32([block, u32::from(lane), low, high], key)
    }

    fn word(&self, source: Source, token: usize) -> u32 {
        self.block(source, token as u32 / 4)[token % 4]
    }

    /// The softmax of what a row has within a set: the largest, and each weight in parts.
    fn weights(&self, row: &[f32], set: &[bool]) -> (f32, Vec<u64>) {
        let max = largest_of((0..self.n).filter(|&token| set[token]).map(|token| row[token]));
        let weight = |token: usize| match set[token] && max > f32::NEG_INFINITY {
            true => parts(exp(row[token] - max)),
            false => 0,
        };
        (max, (0..self.n).map(weight).collect())
    }

    fn log_sum_exp(&self, row: &[f32], set: &[bool]) -> f32 {
        let (max, weights) = self.weights(row, set);
        match max > f32::NEG_INFINITY {
            true => as_number(max + log(of_parts(weights.iter().sum()))),
            false => f32::NEG_INFINITY,
        }
    }

    fn reduce(&self, how: Reduction, row: &[f32], set: &[bool]) -> f32 {
        let within = |f: &dyn Fn(f32) -> f32| -> Vec<f32> {
            row.iter().zip(set).map(|(&x, &is_in)| if is_in { f(x) } else { 0.0 }).collect()
        };
        let count = set.iter().filter(|&&is_in| is_in).count() as f32;
        as_number(match how {
            Reduction::Max => largest_of(row.iter().zip(set).filter(|it| *it.1).map(|it| *it.0)),
            Reduction::Sum => sum(&within(&|x| x)),
            Reduction::Mean => sum(&within(&|x| x)) / count,
            Reduction::Variance => {
                let mean = as_number(sum(&within(&|x| x)) / count);
                let squared = |x: f32| {
                    let apart = in_row(x - mean);
                    in_row(apart * apart)
                };
                sum(&within(&squared)) / count
            }
            Reduction::LogSumExp => self.log_sum_exp(row, set),
            Reduction::Entropy => {
                let (max, weights) = self.weights(row, set);
                let total: u64 = weights.iter().sum();
                if max == f32::NEG_INFINITY {
                    return 0.0;
                }
                let of = |token: usize| match exp(row[token] - max) {
                    weight if set[token] && weight > 0.0 => parts((max - row[token]) * weight),
                    _ => 0,
                };
                let weighted: u64 = (0..self.n).map(of).sum();
                let entropy = log(of_parts(total)) + weighted as f32 / total as f32;
                if entropy > 0.0 { entropy } else { 0.0 }
            }
        })
    }

    /// Tokens by falling value, ties to the lower token.
    fn ranked(&self, values: &[f32]) -> Vec<usize> {
        let mut tokens: Vec<usize> = (0..self.n).collect();
        tokens.sort_by(|&a, &b| values[b].partial_cmp(&values[a]).expect("no NaN").then(a.cmp(&b)));
        tokens
    }

    fn largest(&self, row: &[f32], k: f32) -> Vec<bool> {
        let ranked: Vec<usize> =
            self.ranked(row).into_iter().filter(|&token| row[token] > f32::NEG_INFINITY).collect();
        // A number that is cut to a whole one; less than 1 is none.
        let n = (k as usize).min(ranked.len());
        match n.checked_sub(1) {
            None => vec![false; self.n],
            Some(last) => {
                let floor = row[ranked[last]];
                row.iter().map(|&x| x >= floor && x > f32::NEG_INFINITY).collect()
            }
        }
    }

    fn nucleus(&self, order: &[f32], row: &[f32], p: f32) -> Vec<bool> {
        let is_above: Vec<bool> = row.iter().map(|&x| x > f32::NEG_INFINITY).collect();
        if p >= 1.0 {
            return is_above;
        }
        let (_, weights) = self.weights(row, &vec![true; self.n]);
        let total: u64 = weights.iter().sum();
        let target = ((f64::from(p) * total as f64).ceil() as u64).min(total).max(1);
        let (mut set, mut reached) = (vec![false; self.n], 0);
        for token in self.ranked(order).into_iter().filter(|&token| is_above[token]) {
            set[token] = true;
            reached += weights[token];
            if reached >= target {
                break;
            }
        }
        set
    }

    /// For each token, the longest run at the end that stands before as well, with that token after it.
    fn repeats(&self, tokens: &[Token], cap: usize, breaks: impl Fn(Token) -> bool) -> Vec<f32> {
        let mut row = vec![0.0_f32; self.n];
        for at in 1..tokens.len() {
            if breaks(tokens[at]) {
                continue;
            }
            let is_run = |length: usize| {
                let end = &tokens[tokens.len() - length..];
                tokens[at - length..at] == *end && !end.iter().any(|&token| breaks(token))
            };
            let longest = (1..=at.min(cap)).take_while(|&length| is_run(length)).last().unwrap_or(0);
            let entry = &mut row[tokens[at] as usize];
            *entry = entry.max(longest as f32);
        }
        row
    }

    fn ngrams(&self, tokens: &[Token], n: usize) -> Vec<bool> {
        let mut set = vec![false; self.n];
        if let Some(first) = (tokens.len() + 1).checked_sub(n) {
            let end = &tokens[first..];
            for at in n - 1..tokens.len() {
                set[tokens[at] as usize] |= tokens[at + 1 - n..at] == *end;
            }
        }
        set
    }

    /// The largest above −∞ of what may be drawn, ties to the lower token.
    fn argmax(&self, row: &[f32]) -> Result<Made, Nothing> {
        let may = |token: usize| self.inputs.within.is_none_or(|within| within.allows(token as Token));
        let mut best: Option<usize> = None;
        for token in (0..self.n).filter(|&token| may(token) && row[token] > f32::NEG_INFINITY) {
            if best.is_none_or(|best| row[token] > row[best]) {
                best = Some(token);
            }
        }
        best.map(|token| Made::Token(token as Token)).ok_or(Nothing)
    }

    fn select(&self, condition: Value, yes: Value, no: Value) -> Made {
        let of_token = |token: usize| match self.made(condition) {
            Made::Set(set) => set[token],
            Made::Number(number) => *number != 0.0,
            other => unreachable!("{other:?} is no condition"),
        };
        let taken = || if of_token(0) { yes } else { no };
        match (self.made(yes), self.made(no)) {
            (Made::Token(_), _) => self.made(taken()).clone(),
            (Made::Number(_), Made::Number(_)) if self.is_number(condition) => self.made(taken()).clone(),
            (Made::Set(yes), Made::Set(no)) => Made::Set(
                (0..self.n).map(|token| if of_token(token) { yes[token] } else { no[token] }).collect(),
            ),
            _ => {
                let (yes, no) = (self.row(yes), self.row(no));
                Made::Row(
                    (0..self.n).map(|token| if of_token(token) { yes[token] } else { no[token] }).collect(),
                )
            }
        }
    }

    /// Works out the next value.
    pub(super) fn evaluate(&mut self, operation: &Operation) -> Result<(), Nothing> {
        let mask = |mask: Option<&TokenMask>| {
            Made::Set((0..self.n).map(|token| mask.is_none_or(|it| it.allows(token as Token))).collect())
        };
        let zip = |x: Vec<bool>, y: Vec<bool>, f: fn(bool, bool) -> bool| {
            Made::Set(x.into_iter().zip(y).map(|(x, y)| f(x, y)).collect())
        };
        let made = match *operation {
            Operation::Logits => Made::Row(self.inputs.logits.to_vec()),
            Operation::Member(idx) => match self.inputs.members.get(usize::from(idx)) {
                Some(row) => Made::Row(row.iter().map(|&x| in_row(x)).collect()),
                None => Made::Row(self.inputs.logits.to_vec()),
            },
            Operation::LogSoftmax(x) => {
                let row = self.row(x);
                let log_sum_exp = self.log_sum_exp(&row, &vec![true; self.n]);
                Made::Row(row.iter().map(|x| in_row(x - log_sum_exp)).collect())
            }
            Operation::CountLast { n } => self.counts(self.last(n)),
            Operation::CountSince(position) => {
                let first = self.number(position).max(0.0) as usize;
                let n_before = self.inputs.n_tokens - self.inputs.history.len();
                let since = self.inputs.history.get(first.saturating_sub(n_before)..);
                self.counts(since.unwrap_or_default())
            }
            Operation::Repeats { window, cap, breakers } => {
                let mask = breakers.and_then(|id| self.inputs.masks.get(usize::from(id.0)));
                let breaks = |token| mask.is_some_and(|mask| mask.allows(token));
                Made::Row(self.repeats(self.last(Some(window)), cap as usize, breaks))
            }
            Operation::Bias(id) => {
                let mut row = vec![0.0; self.n];
                match self.inputs.biases.get(usize::from(id.0)).map(AsRef::as_ref) {
                    None => {}
                    Some(Bias::Dense(values)) => row.copy_from_slice(values),
                    Some(Bias::Sparse(entries)) => {
                        entries.iter().for_each(|&(token, value)| row[token as usize] = value);
                    }
                }
                Made::Row(row)
            }
            Operation::NoiseRow { noise, source } => {
                let of = match noise {
                    Noise::Uniform => uniform,
                    Noise::Gumbel => gumbel,
                };
                Made::Row((0..self.n).map(|token| of(self.word(source, token))).collect())
            }
            Operation::Uniform(source) => Made::Number(uniform(self.block(source, u32::MAX)[0])),
            Operation::Unary(how, x) => match self.is_number(x) {
                true => Made::Number(as_number(unary(how, self.number(x)))),
                false => Made::Row(self.row(x).into_iter().map(|x| in_row(unary(how, x))).collect()),
            },
            Operation::Binary(how, x, y) => match self.is_number(x) && self.is_number(y) {
                true => Made::Number(as_number(binary(how, self.number(x), self.number(y)))),
                false => {
                    let pairs = self.row(x).into_iter().zip(self.row(y));
                    Made::Row(pairs.map(|(x, y)| in_row(binary(how, x, y))).collect())
                }
            },
            Operation::Compare(how, x, y) => match self.is_number(x) && self.is_number(y) {
                true => Made::Number(f32::from(u8::from(compare(how, self.number(x), self.number(y))))),
                false => {
                    let pairs = self.row(x).into_iter().zip(self.row(y));
                    Made::Set(pairs.map(|(x, y)| compare(how, x, y)).collect())
                }
            },
            Operation::And(x, y) => zip(self.set(x), self.set(y), |x, y| x && y),
            Operation::Or(x, y) => zip(self.set(x), self.set(y), |x, y| x || y),
            Operation::Not(x) => Made::Set(self.set(x).into_iter().map(|x| !x).collect()),
            Operation::Mask(id) => mask(self.inputs.masks.get(usize::from(id.0)).map(AsRef::as_ref)),
            Operation::Constraint => mask(self.inputs.constraint),
            Operation::Largest { row, k } => Made::Set(self.largest(&self.row(row), self.number(k))),
            Operation::Nucleus { order, row, p } => {
                Made::Set(self.nucleus(&self.row(order), &self.row(row), self.number(p)))
            }
            Operation::Ngrams { n, window } => Made::Set(self.ngrams(self.last(window), usize::from(n))),
            Operation::Only(token) => {
                let only = self.token(token) as usize;
                Made::Set((0..self.n).map(|token| token == only).collect())
            }
            Operation::All => Made::Set(vec![true; self.n]),
            Operation::Nothing => Made::Set(vec![false; self.n]),
            Operation::Constant(number) => Made::Number(number),
            Operation::Parameter(idx) => Made::Number(self.parameter(idx)),
            Operation::State(idx) => Made::Number(self.inputs.state[usize::from(idx)]),
            Operation::Position => Made::Number(self.inputs.position as f32),
            Operation::Length => Made::Number(self.inputs.n_tokens as f32),
            Operation::Drawn => Made::Number(self.inputs.n_drawn as f32),
            Operation::Reduce(how, row, set) => {
                Made::Number(self.reduce(how, &self.row(row), &self.set(set)))
            }
            Operation::Count(set) => {
                Made::Number(self.set(set).iter().filter(|&&is_in| is_in).count() as f32)
            }
            Operation::At(row, token) => Made::Number(as_number(self.row(row)[self.token(token) as usize])),
            Operation::Argmax(row) => self.argmax(&self.row(row))?,
            Operation::Draw(row, source) => {
                let with_noise = self.row(row).into_iter().enumerate();
                let with_noise = with_noise.map(|(token, x)| x + gumbel(self.word(source, token)));
                self.argmax(&with_noise.collect::<Vec<_>>())?
            }
            Operation::ParameterToken(idx) => {
                Made::Token((self.parameter(idx).max(0.0) as usize).min(self.n - 1) as Token)
            }
            Operation::Select(condition, yes, no) => self.select(condition, yes, no),
        };
        self.values.push(made);
        Ok(())
    }
}
