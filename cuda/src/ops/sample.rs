//! Sampler settings as the kernels read them.

use trellis_engine::batch::Token;
use trellis_engine::sampling::Sampler;

use super::logits::{BiasPair, OutputRow, Wants};

impl OutputRow {
    /// A row that draws the token for `position` with a validated sampler. Where its history, biases and mask lie
    /// is still to be said.
    #[must_use]
    pub fn draw(sampler: &Sampler, position: u64) -> Self {
        Self {
            wants: Wants::SAMPLE,
            temperature: sampler.temperature,
            top_k: sampler.top_k.unwrap_or(0),
            top_p: sampler.top_p.unwrap_or(1.0),
            min_logit: sampler.min_p.map_or(f32::NEG_INFINITY, f32::ln),
            repetition_penalty: sampler.repetition_penalty,
            frequency_penalty: sampler.frequency_penalty,
            presence_penalty: sampler.presence_penalty,
            seed: halves(sampler.seed),
            position: halves(position),
            ..Self::default()
        }
    }
}

/// `[low, high]`.
fn halves(word: u64) -> [u32; 2] {
    [word as u32, (word >> 32) as u32]
}

/// Biases in the order that the kernels need: by token, those of one token as they came.
#[must_use]
pub fn ordered_biases(biases: &[(Token, f32)]) -> Vec<BiasPair> {
    let mut pairs: Vec<BiasPair> = biases.iter().map(|&(token, value)| BiasPair { token, value }).collect();
    pairs.sort_by_key(|pair| pair.token);
    pairs
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use trellis_engine::batch::{Candidate, OutputFault};
    use trellis_engine::sampling::{Scratch, TokenMask, sample};

    use super::super::logits_case::{Case, Request, median_us, run};
    use super::super::logits_sources::N_CHOOSE_FEW;
    use super::*;
    use crate::testing::{Random, gpu};

    const VOCAB_SIZES: [usize; 6] = [1, 31, 33, 4096, 128_256, 151_936];

    fn expected(case: &Case, request: &Request) -> Result<Candidate, OutputFault> {
        let sampler = request.sampler.as_ref().expect("a draw");
        sampler.validate(case.vocab_size).expect("valid settings");
        let logits = &case.logits[request.logits_row];
        sample(logits, &request.history, request.position, sampler, &mut Scratch::default())
    }

    /// Runs the requests and compares every draw with the CPU's: the same token, the same fault.
    fn compare(case: &Case) {
        let Some(gpu) = gpu() else { return };
        let results = run(&gpu, case);
        for (request, result) in case.requests.iter().zip(&results) {
            let got = match result.output.fault() {
                Some(fault) => Err(fault),
                None => Ok(result.output),
            };
            match (got, expected(case, request)) {
                (Ok(got), Ok(want)) => {
                    assert_eq!(got.token, want.token, "vocabulary {} {request:?}", case.vocab_size);
                    // Two log-sum-exp in f32 with their own exp, tree and logarithm: a few ulp of numbers up to 50.
                    let diff = (got.logprob - want.logprob).abs();
                    assert!(diff <= 2e-5, "{} {} {request:?}", got.logprob, want.logprob);
                    assert_eq!(result.drawn, Some(want.token as i32));
                }
                (got, want) => {
                    assert_eq!(got.map(|o| o.token), want.map(|c| c.token), "{request:?}");
                    assert_eq!(result.drawn, Some(0));
                }
            }
        }
    }

    /// As [`compare`], and once more few rows at a time, of which each has several blocks.
    fn compare_also_few(case: &Case) {
        compare(case);
        // The bucket has three more.
        for requests in case.requests.chunks(N_CHOOSE_FEW - 3) {
            let requests = requests.to_vec();
            compare(&Case { vocab_size: case.vocab_size, logits: case.logits.clone(), requests });
        }
    }

    /// Logits like a model's: about normal, a few stand out.
    fn logits(random: &mut Random, vocab_size: usize) -> Vec<f32> {
        let mut row: Vec<f32> = random.normals(vocab_size).iter().map(|x| x * 2.5 - 3.0).collect();
        for _ in 0..8 {
            let token = random.below(vocab_size);
            row[token] = 4.0 + 3.0 * random.normal();
        }
        row
    }

    fn seeded(seed: u64) -> Sampler {
        Sampler { temperature: 1.0, seed, ..Sampler::greedy() }
    }

    fn mask(random: &mut Random, vocab_size: usize) -> Arc<TokenMask> {
        let mut mask = TokenMask::none(vocab_size);
        (0..vocab_size).for_each(|token| mask.set(token as Token, random.below(3) == 0));
        mask.set(random.below(vocab_size) as Token, true);
        Arc::new(mask)
    }

    /// Every setting alone and together, with one seed.
    fn samplers(random: &mut Random, vocab_size: usize) -> Vec<Sampler> {
        let base = seeded(random.next());
        let bias = (0..20).map(|_| (random.below(vocab_size) as Token, 3.0 * random.normal()));
        let bias: Vec<_> = bias.chain([(0, 1.0), (0, f32::NEG_INFINITY)]).collect();
        let penalties = Sampler {
            repetition_penalty: 1.3,
            frequency_penalty: 0.25,
            presence_penalty: -0.5,
            ..base.clone()
        };
        let mask = Some(mask(random, vocab_size));
        vec![
            Sampler { temperature: 0.0, ..base.clone() },
            base.clone(),
            Sampler { temperature: 0.05, ..base.clone() },
            Sampler { temperature: 8.0, ..base.clone() },
            Sampler { top_k: Some(1), ..base.clone() },
            Sampler { top_k: Some(40), temperature: 0.7, ..base.clone() },
            Sampler { top_k: Some(40), temperature: 0.01, ..base.clone() },
            Sampler { top_k: Some(5000), ..base.clone() },
            Sampler { top_k: Some(u32::MAX), ..base.clone() },
            Sampler { top_p: Some(0.9), ..base.clone() },
            Sampler { top_p: Some(0.999), temperature: 3.0, ..base.clone() },
            Sampler { top_p: Some(1e-9), ..base.clone() },
            Sampler { min_p: Some(0.05), ..base.clone() },
            Sampler { min_p: Some(1.0), ..base.clone() },
            Sampler { top_k: Some(100), top_p: Some(0.8), min_p: Some(0.01), ..base.clone() },
            Sampler { mask: mask.clone(), ..base.clone() },
            Sampler { mask: mask.clone(), temperature: 0.0, ..base.clone() },
            Sampler { bias: bias.clone(), ..base.clone() },
            Sampler { bias: bias.clone(), temperature: 0.0, ..base.clone() },
            penalties.clone(),
            Sampler { temperature: 0.0, penalty_last_n: Some(7), ..penalties.clone() },
            Sampler {
                repetition_penalty: f32::MIN_POSITIVE,
                frequency_penalty: f32::MIN,
                ..penalties.clone()
            },
            Sampler { top_k: Some(50), top_p: Some(0.95), min_p: Some(0.02), mask, bias, ..penalties },
        ]
    }

    fn requests(random: &mut Random, vocab_size: usize, n_logits_rows: usize) -> Vec<Request> {
        let samplers = samplers(random, vocab_size);
        samplers
            .into_iter()
            .enumerate()
            .map(|(i, sampler)| {
                let history =
                    (0..[0, 1, 700, 5000][i % 4]).map(|_| random.below(vocab_size.min(900)) as Token);
                let history = history.collect();
                Request {
                    logits_row: i % n_logits_rows,
                    sampler: Some(sampler),
                    // Both halves of a position count.
                    position: random.next() >> (random.below(64)),
                    history,
                    ..Request::default()
                }
            })
            .collect()
    }

    #[test]
    fn draws_are_those_of_the_cpu() {
        for (seed, vocab_size) in VOCAB_SIZES.into_iter().enumerate() {
            let mut random = Random(seed as u64);
            let logits = (0..3).map(|_| logits(&mut random, vocab_size)).collect();
            let requests = requests(&mut random, vocab_size, 3);
            compare(&Case { vocab_size, logits, requests });
        }
    }

    /// More rows than have a block for each chunk: blocks go on from one chunk to the next.
    #[test]
    fn draws_of_many_rows_are_those_of_the_cpu() {
        for (vocab_size, n_rows) in [(20_011, 1024), (128_256, 256)] {
            let mut random = Random(11 + n_rows as u64);
            let mut rows: Vec<_> = (0..4).map(|_| logits(&mut random, vocab_size)).collect();
            // The largest that a model may have, once and twice.
            for n_largest in [1, 2] {
                let mut row = logits(&mut random, vocab_size);
                (0..n_largest).for_each(|_| row[random.below(vocab_size)] = 1e38);
                row[random.below(vocab_size)] = -1e38;
                rows.push(row);
            }
            let mut one = TokenMask::none(vocab_size);
            one.set(vocab_size as Token - 3, true);
            let mut settings = samplers(&mut random, vocab_size);
            settings.push(Sampler { mask: Some(Arc::new(one)), ..seeded(8) });
            settings.push(Sampler { temperature: f32::MIN_POSITIVE / 4.0, ..seeded(9) });
            let requests = (0..n_rows)
                .map(|i| Request {
                    logits_row: i % rows.len(),
                    sampler: Some(settings[i / rows.len() % settings.len()].clone()),
                    position: random.next(),
                    ..Request::default()
                })
                .collect();
            compare(&Case { vocab_size, logits: rows, requests });
        }
    }

    /// Many draws over a small vocabulary: near ties of scores, and every token comes at some time.
    #[test]
    fn many_draws_are_those_of_the_cpu() {
        let vocab_size = 1000;
        let mut random = Random(77);
        let logits = vec![logits(&mut random, vocab_size), vec![0.25; vocab_size]];
        let settings = [
            seeded(3),
            Sampler { top_k: Some(20), ..seeded(4) },
            Sampler { top_p: Some(0.7), temperature: 1.5, ..seeded(5) },
            Sampler { min_p: Some(0.1), ..seeded(6) },
        ];
        let requests = (0..400)
            .map(|i| Request {
                logits_row: i / 4 % 2,
                sampler: Some(settings[i % 4].clone()),
                position: i as u64,
                ..Request::default()
            })
            .collect();
        compare(&Case { vocab_size, logits, requests });
    }

    /// Equal logits by the thousand: more than shared memory holds, cut between equals by top-p, not by top-k.
    #[test]
    fn ties_go_to_the_lower_token() {
        for vocab_size in [33, 4096, 20_011, 128_256] {
            let mut random = Random(9);
            let mut steps = vec![1.5; vocab_size];
            steps.iter_mut().for_each(|logit| *logit -= random.below(3) as f32);
            let logits = vec![vec![-2.0; vocab_size], steps];
            let settings = [
                Sampler::greedy(),
                seeded(1),
                Sampler { top_k: Some(5), ..seeded(2) },
                Sampler { top_p: Some(0.3), ..seeded(3) },
                Sampler { top_p: Some(1e-6), ..seeded(4) },
                Sampler { top_k: Some(20_000), top_p: Some(0.77), temperature: 0.5, ..seeded(5) },
            ];
            let requests = (0..48)
                .map(|i| Request {
                    logits_row: i % 2,
                    sampler: Some(settings[i / 2 % 6].clone()),
                    position: i as u64,
                    ..Request::default()
                })
                .collect();
            compare_also_few(&Case { vocab_size, logits, requests });
        }
    }

    /// Rows that bounds by the largest of parts of a row say little of: the largest side by side, or more equal ones than there
    /// is room for, above or below the k-th; and rows at the ends of f32.
    #[test]
    fn rows_of_any_shape_are_drawn_from_as_by_the_cpu() {
        for vocab_size in [33, 4096, 20_011, 128_256] {
            let mut random = Random(21);
            let mut rows: Vec<Vec<f32>> = vec![
                (0..vocab_size).map(|i| if i < 3000 { 5.0 } else { -5.0 } + random.normal()).collect(),
                (0..vocab_size).map(|i| 10.0 - i as f32 * (20.0 / vocab_size as f32)).collect(),
                (0..vocab_size).map(|i| if i < 6000 { 4.0 } else { 3.0 + 0.01 * random.normal() }).collect(),
                (0..vocab_size).map(|_| if random.below(100) == 0 { -0.0 } else { 0.0 }).collect(),
                (0..vocab_size).map(|_| 1e-40 * random.below(50) as f32).collect(),
                (0..vocab_size).map(|_| 1000.0 * random.normal()).collect(),
                vec![f32::MAX; vocab_size],
                vec![f32::MIN; vocab_size],
            ];
            for (below, above, n_above) in
                [(-20.0, 2.0, 30), (-2.0, 0.5, 200), (0.0, 25.0, 1), (2.5, 3.0, 30)]
            {
                let mut row = vec![below; vocab_size];
                (0..n_above).for_each(|_| row[random.below(vocab_size)] = above);
                rows.push(row);
            }
            let at = |temperature, seed| Sampler { temperature, ..seeded(seed) };
            let settings = [
                at(1.0, 1),
                at(1e-38, 2),
                at(1e-20, 3),
                at(1e25, 4),
                at(f32::MAX, 5),
                Sampler { top_k: Some(50), top_p: Some(0.95), ..at(0.8, 6) },
                Sampler { top_k: Some(40), ..at(0.01, 16) },
                Sampler { top_k: Some(256), ..seeded(7) },
                Sampler { top_k: Some(256), top_p: Some(1e-6), ..seeded(8) },
                Sampler { top_k: Some(257), top_p: Some(0.9), ..seeded(9) },
                Sampler { top_k: Some(64), top_p: Some(0.3), min_p: Some(0.1), ..at(3.0, 10) },
                Sampler { top_k: Some(20), top_p: Some(0.9), ..at(1e-28, 11) },
                Sampler { top_k: Some(50), top_p: Some(0.5), ..at(f32::MAX, 12) },
                Sampler { top_p: Some(0.5), ..at(f32::MAX, 17) },
                Sampler { min_p: Some(0.5), ..at(20.0, 13) },
                Sampler { min_p: Some(1e-30), ..at(1e-3, 14) },
                Sampler { top_k: Some(30), mask: Some(mask(&mut random, vocab_size)), ..seeded(15) },
            ];
            let requests = (0..rows.len() * settings.len())
                .map(|i| Request {
                    logits_row: i % rows.len(),
                    sampler: Some(settings[i / rows.len()].clone()),
                    position: random.next(),
                    ..Request::default()
                })
                .collect();
            compare_also_few(&Case { vocab_size, logits: rows, requests });
        }
    }

    #[test]
    fn faults_are_those_of_the_cpu() {
        for vocab_size in [1, 33, 4097, 9000] {
            let rows = |f: fn(&mut Vec<f32>)| {
                let mut row = vec![0.5; vocab_size];
                f(&mut row);
                row
            };
            let logits = vec![
                rows(|row| *row.last_mut().expect("a token") = f32::NAN),
                rows(|row| row[0] = f32::INFINITY),
                rows(|row| row.fill(f32::NEG_INFINITY)),
                rows(|row| row.iter_mut().skip(1).for_each(|logit| *logit = f32::NEG_INFINITY)),
                rows(|_| {}),
            ];
            let nothing = Some(Arc::new(TokenMask::none(vocab_size)));
            let mut settings = Vec::new();
            for sampler in [Sampler::greedy(), seeded(1), Sampler { top_k: Some(3), ..seeded(1) }] {
                settings.push(Sampler { mask: nothing.clone(), ..sampler.clone() });
                settings.push(Sampler { bias: vec![(0, f32::NEG_INFINITY)], ..sampler.clone() });
                settings.push(sampler);
            }
            let requests = (0..5 * settings.len())
                .map(|i| Request {
                    logits_row: i % 5,
                    sampler: Some(settings[i / 5].clone()),
                    ..Request::default()
                })
                .collect();
            compare(&Case { vocab_size, logits, requests });
        }
    }

    /// The ends of the settings' ranges, as in the engine's own tests.
    #[test]
    fn extreme_settings_draw_the_token_of_the_cpu() {
        let settings = [
            Sampler { temperature: f32::MIN_POSITIVE, ..seeded(7) },
            Sampler { temperature: f32::MAX, top_p: Some(0.5), ..seeded(7) },
            Sampler { temperature: f32::MIN_POSITIVE, top_k: Some(3), top_p: Some(0.5), ..seeded(7) },
            Sampler { frequency_penalty: f32::MIN, presence_penalty: f32::MIN, ..seeded(7) },
            Sampler { bias: vec![(2, f32::MIN), (2, f32::MIN), (3, f32::MIN)], ..Sampler::greedy() },
            Sampler { repetition_penalty: f32::MIN_POSITIVE, ..Sampler::greedy() },
        ];
        let requests = settings.into_iter().map(|sampler| Request {
            sampler: Some(sampler),
            history: vec![1, 1, 0, 1],
            position: u64::MAX,
            ..Request::default()
        });
        let logits = vec![vec![5.0, -3.0, 40.0, 39.0, -0.0]];
        compare(&Case { vocab_size: 5, logits, requests: requests.collect() });
    }

    #[test]
    fn settings_become_words() {
        let sampler = Sampler { min_p: Some(0.5), penalty_last_n: Some(3), seed: 7 << 32 | 9, ..seeded(0) };
        let row = OutputRow::draw(&Sampler { seed: 7 << 32 | 9, ..sampler.clone() }, 5 << 32 | 6);
        assert_eq!((row.seed, row.position), ([9, 7], [6, 5]));
        assert_eq!(row.min_logit, 0.5f32.ln());
        let pairs = ordered_biases(&[(3, 1.0), (1, 2.0), (3, 0.5)]);
        assert_eq!(
            pairs.iter().map(|p| (p.token, p.value)).collect::<Vec<_>>(),
            [(1, 2.0), (3, 1.0), (3, 0.5)]
        );
    }

    /// How long draws take, in captured graphs: medians.
    #[test]
    #[ignore = "a table of times: --ignored --nocapture on a machine with a GPU"]
    fn speed() {
        const VOCAB_SIZE: usize = 128_256;
        let Some(gpu) = gpu() else { return };
        let at_0_8 = Sampler { temperature: 0.8, ..seeded(1) };
        let samplers = [
            ("greedy", Sampler::greedy()),
            ("temperature", at_0_8.clone()),
            ("top-k 50, top-p 0.95", Sampler { top_k: Some(50), top_p: Some(0.95), ..at_0_8 }),
        ];
        let mut random = Random(1);
        let normal: Vec<f32> = random.normals(VOCAB_SIZE).iter().map(|x| x * 2.5).collect();
        println!("{:<30} {:>14} {:>14} {:>14} {:>14}", "us", "1", "1, equal", "256", "256, equal");
        for (name, sampler) in samplers {
            let mut line = format!("{name:<30}");
            for n_rows in [1, 256] {
                for logits in [&normal, &vec![0.5; VOCAB_SIZE]] {
                    let request = |row| Request {
                        logits_row: row,
                        sampler: Some(sampler.clone()),
                        position: row as u64,
                        ..Request::default()
                    };
                    let requests = (0..n_rows).map(request).collect();
                    let case =
                        Case { vocab_size: VOCAB_SIZE, logits: vec![logits.clone(); n_rows], requests };
                    line += &format!(" {:>14.1}", median_us(&gpu, &case));
                }
            }
            println!("{line}");
        }
    }
}
