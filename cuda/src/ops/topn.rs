//! Lists of the most probable tokens.

use super::logits::N_BINS;
use crate::Plain;

/// Most tokens that [`Wants::TOP`](super::logits::Wants::TOP) returns for a row.
pub const N_TOP_MAX: usize = N_BINS;

/// A token of a top list.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct Ranked {
    /// The token.
    pub token: u32,
    /// Its log-probability, in nats.
    pub logprob: f32,
}

// SAFETY: two fields of 4 bytes without padding, which take any bits.
unsafe impl Plain for Ranked {}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use trellis_engine::batch::{OutputFault, Token};
    use trellis_engine::sampling::{Distribution, Sampler, Scratch, TokenMask, rank};

    use super::super::logits_case::{Case, Request, run};
    use super::N_TOP_MAX;
    use crate::testing::{Random, gpu};

    /// Log-sum-exp by f32 exp and logf against the CPU's: a few ulp of numbers up to 50.
    const TOLERANCE: f32 = 2e-5;

    fn compare(case: &Case) {
        let Some(gpu) = gpu() else { return };
        let answers = run(&gpu, case);
        for (request, answer) in case.requests.iter().zip(&answers) {
            let about = format!("vocabulary {} {request:?}", case.vocab_size);
            let distribution = match Distribution::new(&case.logits[request.logits_row]) {
                Ok(distribution) => distribution,
                Err(fault) => {
                    assert_eq!((answer.output.fault(), answer.output.n_top), (Some(fault), 0), "{about}");
                    continue;
                }
            };
            let close = |got: f32, want: f32| got == want || (got - want).abs() <= TOLERANCE;
            assert_eq!(answer.output.fault(), None, "{about}");
            let (got, want) = (answer.output.entropy, distribution.entropy());
            assert!(close(got, want), "entropy {got} {want} {about}");
            let want = distribution.top(request.n_top);
            assert_eq!(answer.output.n_top as usize, want.len(), "{about}");
            for (got, want) in answer.top.iter().zip(&want) {
                assert_eq!(got.token, want.token, "{about}");
                assert!(close(got.logprob, want.logprob), "{got:?} {want:?} {about}");
            }
            for (&token, &got) in request.score_tokens.iter().zip(&answer.scores) {
                let want = distribution.logprob(token);
                assert!(close(got, want), "score of {token}: {got} {want} {about}");
            }
            let is_full = case.requests.iter().any(|r| r.full && r.logits_row == request.logits_row);
            let shift = if is_full { 0.0 } else { answer.output.log_sum_exp };
            for (&got, want) in answer.full.iter().zip(distribution.logprobs()) {
                assert!(close(got - shift, want), "{got} {want} {about}");
            }
        }
    }

    fn scored(random: &mut Random, vocab_size: usize) -> Vec<Token> {
        (0..300).map(|_| random.below(vocab_size) as Token).collect()
    }

    #[test]
    fn lists_scores_and_rows_are_those_of_the_cpu() {
        for (seed, vocab_size) in [1, 31, 33, 4096, 128_256, 151_936].into_iter().enumerate() {
            let mut random = Random(100 + seed as u64);
            let mut logits: Vec<Vec<f32>> = (0..3).map(|_| random.normals(vocab_size)).collect();
            // A narrow row, one far wider than the bins, and one with holes.
            logits[0].iter_mut().for_each(|l| *l = 3.0 * *l - 5.0);
            logits[1].iter_mut().for_each(|l| *l *= 900.0);
            logits[2].iter_mut().skip(1).step_by(3).for_each(|l| *l = f32::NEG_INFINITY);
            let mut requests = Vec::new();
            for (i, n_top) in [0, 1, 2, 20, 100, 1000, N_TOP_MAX].into_iter().enumerate() {
                let score_tokens = if i % 2 == 0 { scored(&mut random, vocab_size) } else { Vec::new() };
                // A request for nothing would not be answered.
                requests.push(Request {
                    logits_row: i % 3,
                    n_top,
                    score_tokens,
                    full: i == 1,
                    ..Request::default()
                });
            }
            compare(&Case { vocab_size, logits, requests });
        }
    }

    /// What a beam search ranks by: penalties, biases and masks over log-probabilities, against the CPU's.
    #[test]
    fn ranked_lists_are_those_of_the_cpu() {
        let Some(gpu) = gpu() else { return };
        for (seed, vocab_size) in [33, 4096, 20_011, 128_256].into_iter().enumerate() {
            let mut random = Random(300 + seed as u64);
            let mut logits: Vec<Vec<f32>> = (0..2).map(|_| random.normals(vocab_size)).collect();
            logits[0].iter_mut().for_each(|l| *l *= 3.0);
            logits.push(vec![0.25; vocab_size]);
            let mut mask = TokenMask::none(vocab_size);
            (0..vocab_size).for_each(|token| mask.set(token as Token, random.below(3) == 0));
            let none = TokenMask::none(vocab_size);
            let penalties = Sampler {
                repetition_penalty: 1.3,
                frequency_penalty: 0.2,
                presence_penalty: 0.1,
                ..Sampler::greedy()
            };
            let bias = (0..9).map(|i| (i * 31 % vocab_size as u32, i as f32 - 4.0)).collect();
            let samplers = [
                Sampler::greedy(),
                penalties.clone(),
                Sampler { bias, mask: Some(Arc::new(mask)), ..penalties },
                Sampler { mask: Some(Arc::new(none)), ..Sampler::greedy() },
            ];
            let sizes = [1, 5, 20, 131, N_TOP_MAX].into_iter();
            let requests =
                sizes.flat_map(|n_top| samplers.iter().map(move |sampler| (n_top, sampler.clone())));
            let requests = requests.enumerate().map(|(idx, (n_top, sampler))| Request {
                logits_row: idx % 3,
                history: (0..90).map(|_| random.below(vocab_size) as Token).collect(),
                sampler: Some(sampler),
                n_top,
                is_ranked: true,
                ..Request::default()
            });
            let case = Case { vocab_size, requests: requests.collect(), logits };
            for (request, answer) in case.requests.iter().zip(run(&gpu, &case)) {
                let about =
                    format!("vocabulary {vocab_size} {} of row {}", request.n_top, request.logits_row);
                let (logits, history) = (&case.logits[request.logits_row], &request.history);
                let sampler = request.sampler.as_ref().expect("it has one");
                let all = |n| {
                    let before = history.len().into();
                    rank(logits, history, before, sampler, None, n, &mut Scratch::default()).expect("numbers")
                };
                let (want, of_token) = (all(request.n_top), all(vocab_size));
                assert_eq!(answer.output.n_top as usize, want.len(), "{about}");
                let mut values = vec![None; vocab_size];
                of_token.iter().for_each(|it| values[it.token as usize] = Some(it.logprob));
                for (got, want) in answer.top.iter().zip(&want) {
                    // Rounding may put two that are nearly alike the other way round.
                    let own = values[got.token as usize]
                        .unwrap_or_else(|| panic!("{} is barred {about}", got.token));
                    assert!((got.logprob - own).abs() <= TOLERANCE, "{got:?} {own} {about}");
                    assert!((got.logprob - want.logprob).abs() <= TOLERANCE, "{got:?} {want:?} {about}");
                    let is_one_value = request.logits_row == 2
                        && sampler.bias.is_empty()
                        && sampler.repetition_penalty == 1.0;
                    assert!(
                        !is_one_value || got.token == want.token,
                        "ties to the lower: {got:?} {want:?} {about}"
                    );
                }
                let is_falling = |pair: &[super::Ranked]| {
                    pair[0].logprob > pair[1].logprob
                        || pair[0].logprob == pair[1].logprob && pair[0].token < pair[1].token
                };
                assert!(answer.top[..want.len()].windows(2).all(is_falling), "{about}");
            }
        }
    }

    /// Few different values, zeros of both signs among them: −0 comes after 0, whatever the tokens.
    #[test]
    fn ties_go_to_the_lower_token() {
        for vocab_size in [33, 5000, 20_011, 128_256] {
            let mut random = Random(3);
            let steps = (0..vocab_size).map(|_| [0.0, -0.0, -1.0, -40.0][random.below(4)]).collect();
            let logits = vec![vec![7.5; vocab_size], steps];
            let requests = [1, 7, 33, 900, N_TOP_MAX].into_iter().flat_map(|n_top| {
                [0, 1].map(|logits_row| Request { logits_row, n_top, ..Request::default() })
            });
            compare(&Case { vocab_size, logits, requests: requests.collect() });
        }
    }

    #[test]
    fn faults_have_no_list() {
        let logits =
            vec![vec![f32::NAN; 40], vec![f32::INFINITY; 40], vec![f32::NEG_INFINITY; 40], vec![1.0; 40]];
        let requests = (0..4).map(|logits_row| Request {
            logits_row,
            n_top: 5,
            score_tokens: vec![3],
            full: true,
            ..Request::default()
        });
        compare(&Case { vocab_size: 40, logits, requests: requests.collect() });
    }

    /// A row that draws and lists at once: what the sampler does to the row does not reach the list, and a draw
    /// that has nothing to draw leaves the list alone.
    #[test]
    fn a_draw_leaves_the_list_alone() {
        let Some(gpu) = gpu() else { return };
        let logits = vec![vec![1.0, 3.0, 2.0, 0.5, -1.0]];
        let barred = Sampler { bias: vec![(1, f32::NEG_INFINITY)], ..Sampler::greedy() };
        let none = Sampler { bias: (0..5).map(|t| (t, f32::NEG_INFINITY)).collect(), ..Sampler::greedy() };
        let requests = [barred, none].map(|sampler| Request {
            sampler: Some(sampler),
            n_top: 2,
            score_tokens: vec![4],
            ..Request::default()
        });
        let answers = run(&gpu, &Case { vocab_size: 5, logits, requests: requests.into() });
        assert_eq!((answers[0].output.token, answers[0].output.fault()), (2, None));
        assert_eq!(answers[1].output.fault(), Some(OutputFault::NothingToDraw));
        for answer in answers {
            let tokens: Vec<u32> = answer.top.iter().map(|ranked| ranked.token).collect();
            assert_eq!(tokens, [1, 2]);
            assert!((answer.scores[0] - (-1.0 - answer.output.log_sum_exp)).abs() <= TOLERANCE);
        }
    }
}
