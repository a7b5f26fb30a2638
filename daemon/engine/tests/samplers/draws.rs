//! What is drawn: by chi-square tests, and by the seed alone.

use trellis_engine::batch::Token;
use trellis_programs::{Definition, Source, library};

use crate::references::{log_probabilities, max};
use crate::{Numbers, Setting, softmax};

/// How far counts are from these probabilities, against what chance allows: tokens that are expected less than five times
/// count together.
pub(crate) fn assert_drawn_from(probabilities: &[f64], counts: &[u32], what: &str) {
    let n: f64 = counts.iter().map(|&count| f64::from(count)).sum();
    let (mut chi_square, mut n_cells) = (0.0, 0.0);
    let mut rest = (0.0, 0.0);
    for (&p, &count) in probabilities.iter().zip(counts) {
        let (expected, count) = (n * p, f64::from(count));
        if expected >= 5.0 {
            chi_square += (count - expected).powi(2) / expected;
            n_cells += 1.0;
        } else {
            assert!(p > 0.0 || count == 0.0, "{what}: a token that is left out was drawn");
            rest = (rest.0 + expected, rest.1 + count);
        }
    }
    if rest.0 >= 5.0 {
        chi_square += (rest.1 - rest.0).powi(2) / rest.0;
        n_cells += 1.0;
    }
    // Wilson and Hilferty: its cube root is nearly normal. Five deviations are one chance in millions.
    let freedom: f64 = n_cells - 1.0;
    let spread = 2.0 / (9.0 * freedom);
    let z = ((chi_square / freedom).cbrt() - (1.0 - spread)) / spread.sqrt();
    println!("{what}: chi-square {chi_square:.1} over {freedom} degrees, z {z:.2}");
    assert!(z < 5.0, "{what}: chi-square {chi_square} over {freedom} degrees of freedom");
}

#[test]
fn two_hundred_thousand_draws_pass_a_chi_square_test() {
    let definition = Definition::build(|b| {
        let x = library::temperature(b.logits(), 1.3);
        library::typical(library::min_p(x, 0.02), 0.95).draw(Source::SEED)
    });
    let before = Definition::build_row(|b| {
        let x = library::temperature(b.logits(), 1.3);
        library::typical(library::min_p(x, 0.02), 0.95)
    });
    let mut setting = Setting::random(&mut Numbers::new(3), 200, 5);
    let row: Vec<f64> = setting.row(&before).iter().map(|&x| f64::from(x)).collect();
    let mut counts = vec![0; 200];
    for seed in 0..200_000 {
        setting.seed = seed;
        counts[setting.draw(&definition).end as usize] += 1;
    }
    assert_drawn_from(&softmax(&row), &counts, "temperature, min-p, typical");
}

#[test]
fn the_seed_alone_decides() {
    let definition = Definition::build(|b| library::xtc(b.logits(), 0.5, 0.05).draw(Source::SEED));
    let mut setting = Setting::random(&mut Numbers::new(4), 300, 5);
    let drawn: Vec<Token> = (0..50)
        .map(|seed| {
            setting.seed = seed;
            setting.draw(&definition).end
        })
        .collect();
    for (seed, token) in (0..50).zip(&drawn) {
        setting.seed = seed;
        assert_eq!(setting.draw(&definition).end, *token);
    }
    assert!(drawn.iter().any(|token| *token != drawn[0]));
}

#[test]
fn xtc_leaves_tokens_out_as_often_as_it_says() {
    let definition = Definition::build(|b| {
        let x = library::xtc(b.logits(), 0.3, 0.05);
        b.report(x.gt(f32::NEG_INFINITY).count());
        x.draw(Source::SEED)
    });
    let mut setting = Setting::random(&mut Numbers::new(5), 100, 5);
    setting.logits[7] = 9.0;
    setting.logits[8] = 8.5;
    let n = 20_000;
    let cut = (0..n).filter(|&seed| {
        setting.seed = seed;
        setting.draw(&definition).reports[0] < 100.0
    });
    let share = cut.count() as f64 / n as f64;
    // Five deviations of a share.
    assert!((share - 0.3).abs() < 5.0 * (0.3 * 0.7 / n as f64).sqrt(), "{share}");
}

/// Algorithm 2 of the paper, in f64, over the tokens that the program drew.
#[test]
fn mirostat_keeps_the_state_of_its_source_and_the_surprise_it_is_told() {
    let (tau, eta) = (3.0f64, 0.1f64);
    let definition =
        Definition::build(|b| library::mirostat(b.logits(), 3.0, b.parameter(0), b.parameter(1)));
    let program_of = |setting: &Setting, state| {
        setting.with(&definition, |machine, program, place| {
            let place = trellis_engine::sampling::program::DrawInputs { state, ..*place };
            machine.draw(program, &place).expect("a token is left")
        })
    };
    let numbers = &mut Numbers::new(6);
    let mut mu = 2.0 * tau;
    let mut state = [0.0; 8];
    state[0] = mu as f32;
    let (mut sum, n) = (0.0, 3000);
    for seed in 0..n {
        let mut setting = Setting::random(numbers, 500, 3);
        setting.seed = seed;
        setting.parameters = vec![tau as f32, eta as f32];
        let outcome = program_of(&setting, state);
        let logits: Vec<f64> = setting.logits.iter().map(|&x| f64::from(x)).collect();
        let logprobs = log_probabilities(&logits);
        let bound = (-mu * 2f64.ln()).min(max(&logprobs));
        let kept: Vec<f64> =
            logprobs.iter().map(|&x| if x >= bound - 1e-6 { x } else { f64::NEG_INFINITY }).collect();
        let p = softmax(&kept)[outcome.end as usize];
        assert!(p > 0.0, "draw {seed}: a token of surprise above mu was drawn");
        let surprise = -p.log2();
        mu -= eta * (surprise - tau);
        assert!(
            (f64::from(outcome.state[0]) - mu).abs() < 1e-3,
            "draw {seed}: {} for {mu}",
            outcome.state[0]
        );
        // What follows is compared with the program's own state, so that rounding does not add up.
        mu = f64::from(outcome.state[0]);
        state = outcome.state;
        sum += surprise;
    }
    let mean = sum / n as f64;
    assert!((mean - tau).abs() < 0.05, "mean surprise {mean}");
}

/// Tokens come by a power of their probabilities; what the powers sum to is reported, and added up from draw to draw.
#[test]
fn a_power_is_drawn_and_its_normalizers_are_kept() {
    let definition = Definition::build(|b| library::power(b.logits(), b.parameter(0)));
    let mut setting = Setting::random(&mut Numbers::new(7), 60, 5);
    setting.parameters = vec![2.5];
    let logits: Vec<f64> = setting.logits.iter().map(|&x| f64::from(x)).collect();
    let powers: Vec<f64> = log_probabilities(&logits).into_iter().map(|x| 2.5 * x).collect();
    let log_normalizer = powers.iter().map(|x| x.exp()).sum::<f64>().ln();
    let first = setting.draw(&definition);
    let second = setting.with(&definition, |machine, program, place| {
        let place = trellis_engine::sampling::program::DrawInputs { state: first.state, ..*place };
        machine.draw(program, &place).expect("a token is left")
    });
    for (outcome, n) in [(first, 1.0), (second, 2.0)] {
        assert!((f64::from(outcome.reports[0]) - n * log_normalizer).abs() < 1e-4, "{n}: {log_normalizer}");
    }
    let mut counts = vec![0; 60];
    for seed in 0..50_000 {
        setting.seed = seed;
        counts[setting.draw(&definition).end as usize] += 1;
    }
    assert_drawn_from(&softmax(&powers), &counts, "a power");
}
