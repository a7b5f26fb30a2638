//! Watermarks: their detectors find them, and marginals stay what they were.

use trellis_engine::batch::Token;
use trellis_engine::sampling::philox4x32;
use trellis_programs::library::{self, KgwKey};
use trellis_programs::{Definition, Source};

use crate::draws::assert_drawn_from;
use crate::{Numbers, Setting, softmax};

const KEY: u64 = 0x1234_5678_9abc_def0;
const VOCAB_SIZE: usize = 400;

/// The uniform number of a token, as a detector that knows the key works it out.
fn uniform(key: u64, before: &[Token], token: Token) -> f64 {
    let mut hash = [0u32; 2];
    for (idx, &token) in before.iter().enumerate() {
        let [low, high, ..] = philox4x32([token, idx as u32, hash[0], hash[1]], [0; 2]);
        hash = [low, high];
    }
    let words = philox4x32([token / 4, 0, hash[0], hash[1]], [key as u32, (key >> 32) as u32]);
    (f64::from(words[token as usize % 4] >> 9) + 0.5) / f64::from(1u32 << 23)
}

/// A text of `n` tokens over random rows.
fn text(definition: &Definition, n: usize, seed: u64) -> Vec<Token> {
    let numbers = &mut Numbers::new(seed);
    let mut history = vec![1, 2, 3, 4];
    for position in 0..n {
        let mut setting = Setting::random(numbers, VOCAB_SIZE, 0);
        setting.history.clone_from(&history);
        setting.seed = seed + position as u64;
        history.push(setting.draw(definition).end);
    }
    history
}

/// Kirchenbauer et al., equation 3: how many deviations the green tokens are above chance.
fn z_of_green(text: &[Token], n_tokens: usize, gamma: f64) -> f64 {
    let n_green = (4..text.len())
        .filter(|&idx| uniform(KEY, &text[idx - n_tokens..idx], text[idx]) < gamma)
        .count() as f64;
    let n = (text.len() - 4) as f64;
    (n_green - gamma * n) / (n * gamma * (1.0 - gamma)).sqrt()
}

#[test]
fn green_lists_are_found_by_the_detector_of_the_paper() {
    for n_tokens in [0, 1, 4] {
        let key = KgwKey { key: KEY, n_tokens };
        let marked = Definition::build(|b| library::kgw(b.logits(), key, 0.25, 2.0).draw(Source::SEED));
        let plain = Definition::build(|b| b.logits().draw(Source::SEED));
        let (z, z_plain) = (
            z_of_green(&text(&marked, 300, 8), usize::from(n_tokens), 0.25),
            z_of_green(&text(&plain, 300, 8), usize::from(n_tokens), 0.25),
        );
        println!("{n_tokens} tokens: z {z:.1}, without the mark {z_plain:.1}");
        assert!(z > 6.0, "{n_tokens} tokens: z {z}");
        assert!(z_plain.abs() < 4.0, "{n_tokens} tokens, without the mark: z {z_plain}");
    }
}

#[test]
fn the_gumbel_watermark_is_found_and_leaves_the_distribution_as_it_is() {
    let marked = Definition::build(|b| library::gumbel_watermark(b.logits(), KEY, 3));
    let plain = Definition::build(|b| b.logits().draw(Source::SEED));
    // Aaronson's score: −ln(1 − u) is 1 on average by chance, with a deviation of 1.
    let score = |text: &[Token]| {
        let n = (text.len() - 4) as f64;
        let sum: f64 = (4..text.len()).map(|i| -(1.0 - uniform(KEY, &text[i - 3..i], text[i])).ln()).sum();
        (sum - n) / n.sqrt()
    };
    let (z, z_plain) = (score(&text(&marked, 200, 9)), score(&text(&plain, 200, 9)));
    println!("z {z:.1}, without the mark {z_plain:.1}");
    assert!(z > 6.0 && z_plain.abs() < 4.0, "{z}, {z_plain}");

    // Over keys the marginal is the softmax.
    let setting = Setting::random(&mut Numbers::new(10), 50, 6);
    let logits: Vec<f64> = setting.logits.iter().map(|&x| f64::from(x)).collect();
    let mut counts = vec![0; 50];
    for key in 0..100_000 {
        let definition = Definition::build(|b| library::gumbel_watermark(b.logits(), key, 3));
        counts[setting.draw(&definition).end as usize] += 1;
    }
    assert_drawn_from(&softmax(&logits), &counts, "the Gumbel watermark over keys");
}
