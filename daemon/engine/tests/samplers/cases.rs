//! The rows that samplers make, against their sources: total variation of at most 1e-5.

use std::sync::Arc;

use trellis_engine::batch::Token;
use trellis_engine::sampling::{Bias, TokenMask};
use trellis_programs::library::{self, Dry};
use trellis_programs::{BiasId, Definition, MaskId};

use crate::references::{self, Reference, entropy, log_probabilities, max};
use crate::{Numbers, Setting, softmax};

const N_ROWS: usize = 300;
const VOCAB_SIZE: usize = 1500;
const BREAKER: Token = 6;
const ENDS: [Token; 2] = [3, 700];

type Source = fn(&[f64], &Setting) -> Reference;

fn mask(tokens: &[Token]) -> Arc<TokenMask> {
    let mut mask = TokenMask::none(VOCAB_SIZE);
    tokens.iter().for_each(|&token| mask.set(token, true));
    Arc::new(mask)
}

#[test]
fn rows_are_those_of_the_sources() {
    let cases: Vec<(&str, Definition, Source)> = vec![
        ("temperature", Definition::build_row(|b| library::temperature(b.logits(), 0.7)), |x, _| {
            Reference::uncut(x.iter().map(|x| x / f64::from(0.7f32)).collect())
        }),
        (
            "dynamic temperature",
            Definition::build_row(|b| library::dynamic_temperature(b.logits(), 1.2, 0.5, 1.5)),
            |x, _| references::dynamic_temperature(x, f64::from(1.2f32), 0.5, 1.5),
        ),
        ("top-k", Definition::build_row(|b| library::top_k(b.logits(), 40.0)), |x, _| {
            references::top_k(x, 40)
        }),
        ("top-p", Definition::build_row(|b| library::top_p(b.logits(), 0.9)), |x, _| {
            references::first_to_reach(x, x, f64::from(0.9f32))
        }),
        ("min-p", Definition::build_row(|b| library::min_p(b.logits(), 0.05)), |x, _| {
            Reference::at_least(x, x, max(x) + f64::from(0.05f32).ln())
        }),
        ("typical", Definition::build_row(|b| library::typical(b.logits(), 0.9)), |x, _| {
            references::typical(x, f64::from(0.9f32))
        }),
        ("epsilon", Definition::build_row(|b| library::epsilon(b.logits(), 3e-3)), |x, _| {
            let logprobs = log_probabilities(x);
            Reference::at_least(x, &logprobs, f64::from(3e-3f32).ln().min(max(&logprobs)))
        }),
        ("eta", Definition::build_row(|b| library::eta(b.logits(), 2e-2)), |x, _| {
            let (logprobs, epsilon) = (log_probabilities(x), f64::from(2e-2f32));
            let bound = epsilon.min(epsilon.sqrt() * (-entropy(x)).exp());
            Reference::at_least(x, &logprobs, bound.ln().min(max(&logprobs)))
        }),
        ("top-n-sigma", Definition::build_row(|b| library::top_n_sigma(b.logits(), 1.0)), |x, _| {
            references::top_n_sigma(x, 1.0)
        }),
        ("xtc, always", Definition::build_row(|b| library::xtc(b.logits(), 1.0, 0.02)), |x, _| {
            references::excluded(x, f64::from(0.02f32))
        }),
        ("xtc, never", Definition::build_row(|b| library::xtc(b.logits(), 0.0, 0.02)), |x, _| {
            Reference::uncut(x.to_vec())
        }),
        (
            "repetition",
            Definition::build_row(|b| library::repetition(b.logits(), Some(9), 1.3)),
            |x, setting| {
                references::repetition(x, &setting.history[setting.history.len() - 9..], f64::from(1.3f32))
            },
        ),
        (
            "frequency, presence",
            Definition::build_row(|b| library::frequency_presence(b.logits(), None, 0.5, 0.25)),
            |x, setting| references::frequency_presence(x, &setting.history, 0.5, 0.25),
        ),
        (
            "no repeated n-gram",
            Definition::build_row(|b| library::no_repeat_ngram(b.logits(), 3)),
            |x, setting| references::no_repeat_ngram(x, &setting.history, 3),
        ),
        ("dry", Definition::build_row(|b| library::dry(b.logits(), dry_settings(4096))), |x, setting| {
            references::dry(x, &setting.history, 0.5, 1.75, 2, &[BREAKER])
        }),
        (
            "bias over a set",
            Definition::build_row(|b| library::bias_over(b.logits(), b.mask(MaskId(1)), -1.5)),
            |x, _| {
                let biased = x
                    .iter()
                    .enumerate()
                    .map(|(token, x)| if ENDS.contains(&(token as Token)) { x - 1.5 } else { *x });
                Reference::uncut(biased.collect())
            },
        ),
        ("dense bias", Definition::build_row(|b| b.logits() + b.bias(BiasId(0))), |x, setting| {
            let Bias::Dense(bias) = &*setting.biases[0] else { unreachable!("it is dense") };
            Reference::uncut(x.iter().zip(bias).map(|(x, bias)| x + f64::from(*bias)).collect())
        }),
        ("sparse bias", Definition::build_row(|b| b.logits() + b.bias(BiasId(1))), |x, _| {
            let mut row = x.to_vec();
            row[5] += 2.0;
            row[1499] = f64::NEG_INFINITY;
            Reference::uncut(row)
        }),
        (
            "contrastive",
            Definition::build_row(|b| library::contrastive(b.logits(), b.member(0), 0.1, 0.5)),
            |x, setting| {
                let cut = Reference::at_least(x, x, max(x) + f64::from(0.1f32).ln());
                let amateur = setting.amateur.iter().map(|&x| f64::from(x));
                let row = cut.row.iter().zip(amateur).map(|(x, amateur)| x * 1.5 - amateur * 0.5).collect();
                Reference { row, ..cut }
            },
        ),
        (
            "guidance",
            Definition::build_row(|b| library::guidance(b.logits(), b.member(0), 1.5)),
            |x, setting| mixed(x, setting, |x, other| other + 1.5 * (x - other)),
        ),
        (
            "experts",
            // A member that is not there is the first.
            Definition::build_row(|b| library::experts(b.logits(), b.member(0), b.member(1), 0.75)),
            |x, setting| mixed(x, setting, |x, expert| x + 0.75 * (expert - x)),
        ),
        (
            "product of experts",
            Definition::build_row(|b| library::product(b.logits(), b.member(0), 0.25)),
            |x, setting| mixed(x, setting, |x, other| 0.75 * x + 0.25 * other),
        ),
        (
            "ensemble",
            Definition::build_row(|b| library::ensemble(b.logits(), b.member(0), 0.25)),
            |x, setting| {
                let other: Vec<f64> = setting.amateur.iter().map(|&x| f64::from(x)).collect();
                let both = softmax(x).into_iter().zip(softmax(&other));
                Reference::uncut(both.map(|(p, q)| (0.75 * p + 0.25 * q).ln()).collect())
            },
        ),
        ("plausible", Definition::build_row(|b| library::plausible(b.logits(), 0.1)), |x, _| {
            Reference::at_least(x, x, max(x) + f64::from(0.1f32).ln())
        }),
        (
            "minimum length",
            Definition::build_row(|b| library::minimum_length(b.logits(), b.mask(MaskId(1)), 5.0)),
            |x, setting| {
                let forbids = |token: usize| setting.n_drawn < 5 && ENDS.contains(&(token as Token));
                let kept = |(token, x): (usize, &f64)| if forbids(token) { f64::NEG_INFINITY } else { *x };
                Reference::uncut(x.iter().enumerate().map(kept).collect())
            },
        ),
        (
            "maximum length",
            Definition::build_row(|b| library::maximum_length(b.logits(), b.mask(MaskId(1)), 5.0)),
            |x, setting| {
                let allows = |token: usize| setting.n_drawn < 4 || ENDS.contains(&(token as Token));
                let kept = |(token, x): (usize, &f64)| if allows(token) { *x } else { f64::NEG_INFINITY };
                Reference::uncut(x.iter().enumerate().map(kept).collect())
            },
        ),
    ];
    for (name, definition, source) in cases {
        let (mut n_near_a_cut, mut worst) = (0, 0.0f64);
        for row_idx in 0..N_ROWS {
            let numbers = &mut Numbers::new(row_idx as u64);
            let mut setting = Setting::random(numbers, VOCAB_SIZE, 60);
            setting.n_drawn = (row_idx % 9) as u32;
            setting.masks = vec![mask(&[BREAKER]), mask(&ENDS)];
            let dense = Bias::dense(numbers.logits(VOCAB_SIZE, 1.0), VOCAB_SIZE).expect("it is in order");
            let sparse = vec![(1499, 0.0), (5, 2.0), (1499, f32::NEG_INFINITY)];
            let sparse = Bias::sparse(sparse, VOCAB_SIZE).expect("it is in order");
            setting.biases = vec![Arc::new(dense), Arc::new(sparse)];
            let logits: Vec<f64> = setting.logits.iter().map(|&x| f64::from(x)).collect();
            let expected = source(&logits, &setting);
            let row: Vec<f64> = setting.row(&definition).iter().map(|&x| f64::from(x)).collect();
            let distance: f64 =
                softmax(&row).iter().zip(softmax(&expected.row)).map(|(p, q)| (p - q).abs()).sum::<f64>()
                    / 2.0;
            if distance > 1e-5 && expected.margin < 1e-5 {
                n_near_a_cut += 1;
                continue;
            }
            worst = worst.max(distance);
            assert!(distance <= 1e-5, "{name}, row {row_idx}: total variation {distance:e}");
        }
        println!("{name}: total variation {worst:.1e}, {n_near_a_cut} of {N_ROWS} rows differ near a cut");
        assert!(n_near_a_cut * 100 <= N_ROWS, "{name}: {n_near_a_cut} of {N_ROWS} rows differ near a cut");
    }
}

/// Token by token, of the row and that of another.
fn mixed(x: &[f64], setting: &Setting, formula: impl Fn(f64, f64) -> f64) -> Reference {
    let both = x.iter().zip(&setting.amateur);
    Reference::uncut(both.map(|(&x, &other)| formula(x, f64::from(other))).collect())
}

fn dry_settings(window: u32) -> Dry {
    Dry { window, allowed_length: 2.0, multiplier: 0.5, base: 1.75, breakers: Some(MaskId(0)) }
}
