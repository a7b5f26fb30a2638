//! Each step against numbers worked out by hand from the formula of its source, and the draws against softmax.

use std::sync::Arc;

use super::{Sampler, Scratch, TokenMask, philox4x32, sample};
use crate::batch::{OutputFault, Token};

fn seeded(seed: u64) -> Sampler {
    Sampler { temperature: 1.0, seed, ..Sampler::greedy() }
}

fn token(logits: &[f32], history: &[Token], sampler: &Sampler) -> Result<Token, OutputFault> {
    sampler.validate(logits.len()).expect("valid settings");
    sample(logits, history, 5, sampler, &mut Scratch::default()).map(|c| c.token)
}

/// How often each token comes in `n` draws at different positions.
fn counts(logits: &[f32], history: &[Token], sampler: &Sampler, n: u64) -> Vec<f64> {
    sampler.validate(logits.len()).expect("valid settings");
    let mut scratch = Scratch::default();
    let mut counts = vec![0.0; logits.len()];
    for position in 0..n {
        let drawn = sample(logits, history, position, sampler, &mut scratch).expect("a token");
        counts[drawn.token as usize] += 1.0;
    }
    counts
}

/// Pearson's statistic over the tokens that can come, against the 99.99% quantile of the chi-square
/// distribution (Wilson and Hilferty's approximation). Tokens that cannot come must not.
fn assert_distributed(counts: &[f64], weights: &[f64]) {
    let (n, total) = (counts.iter().sum::<f64>(), weights.iter().sum::<f64>());
    let mut statistic = 0.0;
    let mut n_possible = 0.0;
    for (count, weight) in counts.iter().zip(weights) {
        let expected = n * weight / total;
        if *weight == 0.0 {
            assert_eq!(*count, 0.0, "an impossible token came");
        } else {
            assert!(expected >= 5.0, "too few draws for the test: {expected}");
            statistic += (count - expected).powi(2) / expected;
            n_possible += 1.0;
        }
    }
    let freedom: f64 = n_possible - 1.0;
    if freedom == 0.0 {
        return;
    }
    let spread = 2.0 / (9.0 * freedom);
    let limit = freedom * (1.0 - spread + 3.719 * spread.sqrt()).powi(3);
    assert!(statistic <= limit, "chi-square {statistic} over {limit} at {freedom} degrees of freedom");
}

fn softmax(logits: &[f32]) -> Vec<f64> {
    logits.iter().map(|&l| f64::from(l).exp()).collect()
}

#[test]
fn draws_follow_softmax() {
    let logits: Vec<f32> = (0..50).map(|i| ((i * 29 % 50) as f32 - 25.0) / 10.0).collect();
    assert_distributed(&counts(&logits, &[], &seeded(1), 100_000), &softmax(&logits));
    let hot = Sampler { temperature: 2.5, ..seeded(2) };
    let scaled: Vec<f32> = logits.iter().map(|l| l / 2.5).collect();
    assert_distributed(&counts(&logits, &[], &hot, 100_000), &softmax(&scaled));
}

#[test]
fn seeds_are_independent_at_one_position() {
    let logits = [0.0, 1.0, 0.5, -1.0, 0.2];
    let mut counts = [0.0; 5];
    for seed in 0..50_000 {
        counts[token(&logits, &[], &seeded(seed << 20)).expect("a token") as usize] += 1.0;
    }
    assert_distributed(&counts, &softmax(&logits));
}

/// Pairs of draws at neighbouring positions: the joint distribution is the product.
#[test]
fn positions_are_independent() {
    let logits = [0.0, 1.0, 0.5];
    let (sampler, mut scratch) = (seeded(11), Scratch::default());
    let mut joint = [0.0; 9];
    for pair in 0..40_000 {
        let draw = |p, s: &mut Scratch| sample(&logits, &[], p, &sampler, s).expect("a token").token as usize;
        joint[3 * draw(2 * pair, &mut scratch) + draw(2 * pair + 1, &mut scratch)] += 1.0;
    }
    let p = softmax(&logits);
    let product: Vec<f64> = p.iter().flat_map(|a| p.iter().map(move |b| a * b)).collect();
    assert_distributed(&joint, &product);
}

#[test]
fn greedy_takes_the_lower_of_equals() {
    assert_eq!(token(&[0.0, 2.0, 2.0, 1.0], &[], &Sampler::greedy()), Ok(1));
    let bias = Sampler { bias: vec![(3, 1.0)], ..Sampler::greedy() };
    assert_eq!(token(&[0.0, 2.0, 2.0, 1.0], &[], &bias), Ok(1));
    let bias = Sampler { bias: vec![(3, 1.5)], ..Sampler::greedy() };
    assert_eq!(token(&[0.0, 2.0, 2.0, 1.0], &[], &bias), Ok(3));
}

#[test]
fn logprob_is_before_all_settings() {
    let logits = [1.0f32, 2.0, 3.0];
    let sampler = Sampler { bias: vec![(0, 100.0)], temperature: 0.3, ..Sampler::greedy() };
    let drawn = sample(&logits, &[], 0, &sampler, &mut Scratch::default()).expect("a token");
    let expected = 1.0 - (1f32.exp() + 2f32.exp() + 3f32.exp()).ln();
    assert_eq!(drawn.token, 0);
    assert!((drawn.logprob - expected).abs() <= 1e-6, "{} {expected}", drawn.logprob);
}

#[test]
fn mask_forbids() {
    let mut mask = TokenMask::none(100);
    mask.set(70, true);
    let sampler = Sampler { mask: Some(Arc::new(mask)), ..seeded(1) };
    assert_eq!(token(&[0.0; 100], &[], &sampler), Ok(70));
    let sampler = Sampler { temperature: 0.0, ..sampler };
    assert_eq!(token(&[0.0; 100], &[], &sampler), Ok(70));
    let sampler = Sampler { bias: vec![(70, f32::NEG_INFINITY)], ..sampler };
    assert_eq!(token(&[0.0; 100], &[], &sampler), Err(OutputFault::NothingToDraw));
}

#[test]
fn faults_have_names() {
    for sampler in [Sampler::greedy(), seeded(1)] {
        assert_eq!(token(&[0.0, f32::NAN], &[], &sampler), Err(OutputFault::NotANumber));
        let sampler = Sampler { mask: Some(Arc::new(TokenMask::none(2))), ..sampler };
        assert_eq!(token(&[0.0, 1.0], &[], &sampler), Err(OutputFault::NothingToDraw));
    }
}

/// HF: `score < 0 ? score · r : score / r`, once for each distinct token.
#[test]
fn repetition_penalty() {
    let sampler = Sampler { repetition_penalty: 2.0, ..Sampler::greedy() };
    assert_eq!(token(&[3.0, 1.6, 1.0], &[0, 0, 0], &sampler), Ok(1), "3 / 2 < 1.6");
    assert_eq!(token(&[3.0, 1.4, 1.0], &[0, 0, 0], &sampler), Ok(0), "only once");
    assert_eq!(token(&[-1.0, -1.9], &[0], &sampler), Ok(1), "-1 * 2 < -1.9");
    assert_eq!(token(&[-1.0, -2.1], &[0], &sampler), Ok(0));
}

/// llama.cpp: `logit -= count · frequency + (count > 0) · presence`.
#[test]
fn frequency_and_presence_penalty() {
    let frequency = Sampler { frequency_penalty: 0.5, ..Sampler::greedy() };
    assert_eq!(token(&[2.0, 0.9], &[0, 0], &frequency), Ok(0), "2 - 1 > 0.9");
    assert_eq!(token(&[2.0, 0.9], &[0, 0, 0], &frequency), Ok(1), "2 - 1.5 < 0.9");
    let presence = Sampler { presence_penalty: 0.5, ..Sampler::greedy() };
    assert_eq!(token(&[2.0, 1.4], &[0; 9], &presence), Ok(0), "2 - 0.5 > 1.4");
    assert_eq!(token(&[2.0, 1.6], &[0; 9], &presence), Ok(1), "2 - 0.5 < 1.6");
    let last = Sampler { penalty_last_n: Some(2), ..frequency };
    assert_eq!(token(&[2.0, 1.4], &[0, 0, 1, 1], &last), Ok(0), "only 1 is in the window");
    assert_eq!(token(&[2.0, 1.4], &[1, 0, 0, 0], &last), Ok(1), "2 - 2 * 0.5 < 1.4");
}

/// A scratch that served one draw must not leak its counts into the next.
#[test]
fn scratch_carries_nothing() {
    let sampler = Sampler { frequency_penalty: 10.0, ..seeded(3) };
    let mut used = Scratch::default();
    let logits = [0.3; 40];
    for position in 0..200 {
        let history: Vec<Token> = (0..position as Token % 17).map(|t| t * 7 % 40).collect();
        let fresh = sample(&logits, &history, position, &sampler, &mut Scratch::default());
        assert_eq!(sample(&logits, &history, position, &sampler, &mut used), fresh);
    }
}

#[test]
fn top_k_keeps_the_ties() {
    let logits = [0.0, 1.0, 0.5, 1.0, 0.5, -1.0];
    let weights = |k, kept: &[usize]| {
        let sampler = Sampler { top_k: Some(k), ..seeded(4) };
        let mut weights = vec![0.0; 6];
        kept.iter().for_each(|&t| weights[t] = f64::from(logits[t]).exp());
        assert_distributed(&counts(&logits, &[], &sampler, 20_000), &weights);
    };
    weights(1, &[1, 3]);
    weights(3, &[1, 3, 2, 4]);
    weights(5, &[0, 1, 2, 3, 4]);
    weights(99, &[0, 1, 2, 3, 4, 5]);
}

#[test]
fn top_p_keeps_the_smallest_set_that_reaches_it() {
    // Probabilities 0.5, 0.3, 0.15, 0.05 in another order.
    let p = [0.15f32, 0.5, 0.05, 0.3];
    let logits = p.map(f32::ln);
    for (top_p, kept) in
        [(0.4, &[1][..]), (0.6, &[1, 3]), (0.79, &[1, 3]), (0.81, &[1, 3, 0]), (0.96, &[0, 1, 2, 3])]
    {
        let sampler = Sampler { top_p: Some(top_p), ..seeded(5) };
        let mut weights = vec![0.0; 4];
        kept.iter().for_each(|&t| weights[t] = f64::from(p[t]));
        assert_distributed(&counts(&logits, &[], &sampler, 20_000), &weights);
    }
    // After top-k 2 the probabilities are 0.625 and 0.375.
    let sampler = Sampler { top_k: Some(2), top_p: Some(0.6), ..seeded(5) };
    assert_distributed(&counts(&logits, &[], &sampler, 2_000), &[0.0, 1.0, 0.0, 0.0]);
    let sampler = Sampler { top_k: Some(2), top_p: Some(0.65), ..seeded(5) };
    assert_distributed(&counts(&logits, &[], &sampler, 2_000), &[0.0, 0.5, 0.0, 0.3]);
}

#[test]
fn min_p_is_relative_to_the_best() {
    let p = [0.15f32, 0.5, 0.05, 0.3];
    let logits = p.map(|p| p.ln() + 7.0);
    for (min_p, kept) in
        [(0.05, &[0, 1, 2, 3][..]), (0.2, &[0, 1, 3]), (0.4, &[1, 3]), (0.7, &[1]), (1.0, &[1])]
    {
        let sampler = Sampler { min_p: Some(min_p), ..seeded(6) };
        let mut weights = vec![0.0; 4];
        kept.iter().for_each(|&t| weights[t] = f64::from(p[t]));
        assert_distributed(&counts(&logits, &[], &sampler, 20_000), &weights);
    }
}

/// Settings at the ends of their ranges overflow nothing.
#[test]
fn extreme_settings_draw_the_only_sensible_token() {
    let logits = [5.0, -3.0, 40.0, 39.0];
    let cold = Sampler { temperature: f32::MIN_POSITIVE, ..seeded(7) };
    assert_eq!(token(&logits, &[], &cold), Ok(2));
    let boosted = Sampler { frequency_penalty: f32::MIN, presence_penalty: f32::MIN, ..seeded(7) };
    assert_eq!(token(&logits, &[1, 1, 1], &boosted), Ok(1));
    let barred = Sampler { bias: vec![(2, f32::MIN), (2, f32::MIN), (3, f32::MIN)], ..Sampler::greedy() };
    assert_eq!(token(&logits, &[], &barred), Ok(0));
    let crushed = Sampler { repetition_penalty: f32::MIN_POSITIVE, ..Sampler::greedy() };
    assert_eq!(token(&logits, &[0], &crushed), Ok(0));
}

/// The seeded result is fixed for ever: a change here is a change of the definition.
#[test]
fn draws_are_pinned() {
    let logits: Vec<f32> =
        (0..1000u32).map(|t| (philox4x32([t, 0, 0, 0], [0; 2])[0] % 997) as f32 / 200.0).collect();
    let (sampler, mut scratch) = (seeded(0x1234_5678_9abc_def0), Scratch::default());
    let drawn: Vec<Token> = (0..8)
        .map(|p| sample(&logits, &[], p << 31, &sampler, &mut scratch).expect("a token").token)
        .collect();
    assert_eq!(drawn, PINNED);
}

/// From an implementation of the definition in Python, in f64.
const PINNED: [Token; 8] = [834, 750, 192, 161, 455, 539, 467, 130];
