//! What the sources say, in f64 and straight from their formulas.

use std::cmp::Ordering;

use trellis_engine::batch::Token;

use crate::softmax;

/// What a source makes of a row.
pub(crate) struct Reference {
    /// Logits, −∞ for what is left out.
    pub(crate) row: Vec<f64>,
    /// How near a token lies to a cut, in the quantity that is cut.
    pub(crate) margin: f64,
}

impl Reference {
    pub(crate) fn uncut(row: Vec<f64>) -> Self {
        Self { row, margin: f64::INFINITY }
    }

    /// Keeps tokens by `values`, at the bound or above.
    pub(crate) fn at_least(x: &[f64], values: &[f64], bound: f64) -> Self {
        let kept = |(&x, &value): (&f64, &f64)| if value >= bound { x } else { f64::NEG_INFINITY };
        let margin = values.iter().map(|value| (value - bound).abs()).filter(|&margin| margin > 0.0);
        Self { row: x.iter().zip(values).map(kept).collect(), margin: margin.fold(f64::INFINITY, f64::min) }
    }
}

pub(crate) fn log_probabilities(x: &[f64]) -> Vec<f64> {
    softmax(x).iter().map(|p| p.ln()).collect()
}

pub(crate) fn entropy(x: &[f64]) -> f64 {
    softmax(x).iter().map(|p| if *p > 0.0 { -p * p.ln() } else { 0.0 }).sum()
}

pub(crate) fn max(x: &[f64]) -> f64 {
    x.iter().copied().fold(f64::NEG_INFINITY, f64::max)
}

/// Tokens by falling value, ties by lower token.
pub(crate) fn order(values: &[f64]) -> Vec<usize> {
    let mut tokens: Vec<usize> = (0..values.len()).collect();
    tokens.sort_by(|&a, &b| values[b].partial_cmp(&values[a]).unwrap_or(Ordering::Equal).then(a.cmp(&b)));
    tokens
}

pub(crate) fn top_k(x: &[f64], k: usize) -> Reference {
    let sorted = order(x);
    let bound = x[sorted[k - 1]];
    Reference { margin: (bound - x[sorted[k]]).abs(), ..Reference::at_least(x, x, bound) }
}

/// The first tokens by falling `by` whose probabilities reach `p`.
pub(crate) fn first_to_reach(x: &[f64], by: &[f64], p: f64) -> Reference {
    let probabilities = softmax(x);
    let mut row = vec![f64::NEG_INFINITY; x.len()];
    let (mut sum, mut margin) = (0.0, f64::INFINITY);
    for token in order(by) {
        row[token] = x[token];
        sum += probabilities[token];
        margin = margin.min((sum - p).abs());
        if sum >= p {
            break;
        }
    }
    // An order that is told apart by less than rounding is a cut as well.
    let sorted = order(by);
    let n = row.iter().filter(|x| x.is_finite()).count();
    if n < sorted.len() {
        margin = margin.min((by[sorted[n - 1]] - by[sorted[n]]).abs());
    }
    Reference { row, margin }
}

pub(crate) fn typical(x: &[f64], p: f64) -> Reference {
    let entropy = entropy(x);
    let by: Vec<f64> = log_probabilities(x).iter().map(|logprob| -(-logprob - entropy).abs()).collect();
    first_to_reach(x, &by, p)
}

pub(crate) fn dynamic_temperature(x: &[f64], t: f64, delta: f64, exponent: f64) -> Reference {
    let (least, most) = ((t - delta).max(0.01), t + delta);
    let share = (entropy(x) / (x.len() as f64).ln()).powf(exponent);
    let t = least + (most - least) * share;
    Reference::uncut(x.iter().map(|x| x / t).collect())
}

pub(crate) fn top_n_sigma(x: &[f64], n: f64) -> Reference {
    let mean = x.iter().sum::<f64>() / x.len() as f64;
    let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / x.len() as f64;
    Reference::at_least(x, x, max(x) - n * variance.sqrt())
}

/// All tokens of at least `threshold` but the least probable of them are left out.
pub(crate) fn excluded(x: &[f64], threshold: f64) -> Reference {
    let probabilities = softmax(x);
    let sorted = order(x);
    let n = sorted.iter().take_while(|&&token| probabilities[token] >= threshold).count();
    let mut row = x.to_vec();
    sorted.iter().take(n.saturating_sub(1)).for_each(|&token| row[token] = f64::NEG_INFINITY);
    let margin = probabilities.iter().map(|p| (p.ln() - threshold.ln()).abs()).fold(f64::INFINITY, f64::min);
    Reference { row, margin }
}

pub(crate) fn repetition(x: &[f64], history: &[Token], penalty: f64) -> Reference {
    let mut row = x.to_vec();
    for (token, x) in row.iter_mut().enumerate() {
        if history.contains(&(token as Token)) {
            *x = if *x < 0.0 { *x * penalty } else { *x / penalty };
        }
    }
    Reference::uncut(row)
}

pub(crate) fn frequency_presence(x: &[f64], history: &[Token], frequency: f64, presence: f64) -> Reference {
    let mut row = x.to_vec();
    for (token, x) in row.iter_mut().enumerate() {
        let count = history.iter().filter(|&&other| other as usize == token).count();
        *x -= count as f64 * frequency + if count > 0 { presence } else { 0.0 };
    }
    Reference::uncut(row)
}

pub(crate) fn no_repeat_ngram(x: &[f64], history: &[Token], n: usize) -> Reference {
    let mut row = x.to_vec();
    for run in history.windows(n) {
        if run[..n - 1] == history[history.len() - (n - 1)..] {
            row[run[n - 1] as usize] = f64::NEG_INFINITY;
        }
    }
    Reference::uncut(row)
}

/// As text-generation-webui's `DRYLogitsProcessor`: matches are looked for backwards from each earlier occurrence of the
/// last token.
pub(crate) fn dry(
    x: &[f64],
    history: &[Token],
    multiplier: f64,
    base: f64,
    allowed: usize,
    breakers: &[Token],
) -> Reference {
    let mut row = x.to_vec();
    let last = *history.last().expect("there are tokens");
    if breakers.contains(&last) {
        return Reference::uncut(row);
    }
    let mut lengths = std::collections::HashMap::new();
    for idx in (0..history.len() - 1).filter(|&idx| history[idx] == last) {
        let next = history[idx + 1];
        if breakers.contains(&next) {
            continue;
        }
        let mut length = 1;
        while length < 50 {
            let Some(j) = idx.checked_sub(length) else { break };
            let previous = history[history.len() - 1 - length];
            if history[j] != previous || breakers.contains(&previous) {
                break;
            }
            length += 1;
        }
        let known = lengths.entry(next).or_insert(0);
        *known = length.max(*known);
    }
    for (token, length) in lengths {
        if length >= allowed {
            row[token as usize] -= multiplier * base.powi((length - allowed) as i32);
        }
    }
    Reference::uncut(row)
}
