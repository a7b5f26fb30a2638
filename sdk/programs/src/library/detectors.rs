//! The tests that find the watermarks, by the tokens of a text and the key alone.

use std::collections::HashSet;

use super::KgwKey;
use crate::philox4x32;

/// By how many standard deviations a text has more green tokens than one without the mark of [`kgw`](super::kgw) or, where the
/// key is of no tokens, of [`unigram`](super::unigram): above 4 is no chance. None where no token has as many before it as the
/// key asks for.
///
/// Kirchenbauer et al., "A Watermark for Large Language Models" (ICML 2023), equation 3. What repeats counts once, as there: a
/// token after the same tokens is green again, and says nothing new.
#[must_use]
pub fn z_of_green(tokens: &[u32], key: KgwKey, gamma: f64) -> Option<f64> {
    let greens = uniforms(tokens, key).into_iter().map(|u| f64::from(u8::from(u < gamma)));
    z(greens.collect(), gamma, gamma * (1.0 - gamma))
}

/// The same for [`gumbel_watermark`](super::gumbel_watermark) of this key over so many tokens: whether the uniform numbers of
/// the tokens are nearer to 1 than chance has them.
///
/// Aaronson, "My AI Safety Lecture" (2022): the sum of −ln(1 − u), of which each is 1 on average and has a variance of 1.
#[must_use]
pub fn z_of_gumbel(tokens: &[u32], key: u64, n_tokens: u8) -> Option<f64> {
    let scores = uniforms(tokens, KgwKey { key, n_tokens }).into_iter().map(|u| -(1.0 - u).ln());
    z(scores.collect(), 1.0, 1.0)
}

/// How far a sum is above that of numbers with this mean and variance.
fn z(numbers: Vec<f64>, mean: f64, variance: f64) -> Option<f64> {
    let n = numbers.len() as f64;
    (n > 0.0).then(|| (numbers.iter().sum::<f64>() - mean * n) / (variance * n).sqrt())
}

/// The uniform noise in the place of each token that has enough tokens before it, once for each run of these and itself.
fn uniforms(tokens: &[u32], key: KgwKey) -> Vec<f64> {
    let mut seen = HashSet::new();
    let runs = tokens.windows(usize::from(key.n_tokens) + 1).filter(|run| seen.insert(*run));
    runs.map(|run| uniform(key.key, run)).collect()
}

/// What [`Noise::Uniform`](crate::Noise::Uniform) of [`Source::Key`](crate::Source::Key) is for the last of these tokens after the
/// others.
fn uniform(key: u64, run: &[u32]) -> f64 {
    let (&token, before) = run.split_last().expect("a run holds its own token");
    let mut hash = [0; 2];
    for (idx, &token) in (0..).zip(before) {
        let [low, high, ..] = philox4x32([token, idx, hash[0], hash[1]], [0; 2]);
        hash = [low, high];
    }
    let words = philox4x32([token / 4, 0, hash[0], hash[1]], [key as u32, (key >> 32) as u32]);
    (f64::from(words[token as usize % 4] >> 9) + 0.5) / f64::from(1u32 << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: KgwKey = KgwKey { key: 7, n_tokens: 1 };

    /// A text that goes on with the first token after these for which the noise is as wanted.
    fn walk(key: KgwKey, n: u32, wanted: impl Fn(f64) -> bool) -> Vec<u32> {
        let mut tokens: Vec<u32> = (0..u32::from(key.n_tokens)).collect();
        for i in 0..n {
            let before = &tokens[tokens.len() - usize::from(key.n_tokens)..];
            let is_wanted = |token: &u32| wanted(uniform(key.key, &[before, &[*token]].concat()));
            let next = (20 * i..).find(is_wanted).expect("half of them are wanted");
            tokens.push(next);
        }
        tokens
    }

    #[test]
    fn z_is_that_of_the_paper() {
        // Along green tokens only: z = (T - T/4) / sqrt(3T/16) = sqrt(3T).
        let green = walk(KEY, 12, |u| u < 0.25);
        assert!((z_of_green(&green, KEY, 0.25).unwrap() - 6.0).abs() <= 1e-9);
        // Again it says nothing new, but for the one token in between.
        let again = z_of_green(&[&green[..], &green].concat(), KEY, 0.25).unwrap();
        assert!((5.0..6.3).contains(&again), "{again}");
        assert_eq!(z_of_green(&green[..1], KEY, 0.25), None);
        assert_eq!(z_of_gumbel(&green[..3], 7, 3), None);
    }

    #[test]
    fn another_key_sees_nothing() {
        let unigram = KgwKey { key: 7, n_tokens: 0 };
        for key in [KEY, unigram] {
            let marked = walk(key, 200, |u| u < 0.25);
            assert!(z_of_green(&marked, key, 0.25).unwrap() > 20.0);
            assert!(z_of_green(&marked, KgwKey { key: 8, ..key }, 0.25).unwrap().abs() < 5.0);
        }
        let marked = walk(KgwKey { key: 7, n_tokens: 4 }, 200, |u| u > 0.75);
        assert!(z_of_gumbel(&marked, 7, 4).unwrap() > 15.0);
        assert!(z_of_gumbel(&marked, 8, 4).unwrap().abs() < 5.0);
        assert!(z_of_gumbel(&marked, 7, 3).unwrap().abs() < 5.0);
    }
}
