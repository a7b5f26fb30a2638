//! Half precision on a card against float32 on the processor, over the same weights and the same tokens.

use trellis_engine::model::Dtype;
use trellis_engine::{Answer, Ask, Context, ModelHandle, OneModel};
use trellis_tests::device::card_alone;
use trellis_tests::engines::{Sizes, block_on, cpu_backend, cuda_backend, owner, start};
use trellis_tests::{goldens, models};

/// The bounds of a mean difference, of the 99th percentile, and of what the choice of a token may lose, in nats.
const MEAN_MAX: f64 = 0.06;
const PERCENTILE_99_MAX: f64 = 0.2;
const REGRET_MAX: f64 = 0.2;

/// The log-probabilities of the vocabulary after each prefix of a text.
async fn rows(model: &ModelHandle, tokens: &[u32]) -> Vec<Vec<f32>> {
    let mut context = Context::create(model, owner(1)).await.expect("created");
    let mut rows = Vec::new();
    for &token in tokens {
        context.append(&[token]).await.expect("fits");
        match context.ask(Ask::Full).await.expect("asked").answer().await.expect("computed") {
            Answer::Full(row) => rows.push(row),
            other => panic!("{other:?}"),
        }
    }
    // The same in one pass: other kernels compute it.
    let mut context = Context::create(model, owner(1)).await.expect("created");
    context.append(&tokens[..1]).await.expect("fits");
    let ask = Ask::Continuation(tokens[1..].to_vec());
    match context.ask(ask).await.expect("asked").answer().await.expect("computed") {
        Answer::Scores(scores) => {
            for (idx, score) in scores.into_iter().enumerate() {
                let difference = (score - rows[idx][tokens[idx + 1] as usize]).abs();
                assert!(
                    f64::from(difference) <= PERCENTILE_99_MAX,
                    "{difference} between two ways, position {idx}"
                );
            }
        }
        other => panic!("{other:?}"),
    }
    rows
}

fn best(row: &[f32]) -> usize {
    (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b])).expect("a vocabulary")
}

fn compare(model: &str, cpu: &OneModel, cuda: &OneModel, dtype: Dtype) {
    let (mut differences, mut regret) = (Vec::new(), 0f64);
    for case in &goldens::load(model).cases {
        let tokens = [case.prompt_ids.as_slice(), &case.greedy_ids].concat();
        let expected = block_on(rows(cpu.handle(), &tokens));
        let found = block_on(rows(cuda.handle(), &tokens));
        for (position, (expected, found)) in expected.iter().zip(&found).enumerate() {
            assert!(found.iter().all(|logprob| !logprob.is_nan()), "{model}: NaN at position {position}");
            if let Some(&next) = tokens.get(position + 1) {
                differences.push(f64::from((expected[next as usize] - found[next as usize]).abs()));
            }
            let lost = f64::from(expected[best(expected)] - expected[best(found)]);
            assert!(lost <= REGRET_MAX, "{model}: the token chosen at position {position} loses {lost} nat");
            regret = regret.max(lost);
        }
    }
    differences.sort_by(f64::total_cmp);
    let mean = differences.iter().sum::<f64>() / differences.len() as f64;
    let percentile = differences[differences.len() * 99 / 100];
    println!(
        "{model} in {dtype:?}, {} positions: mean {mean:.4} nat, 99th percentile {percentile:.4}, regret {regret:.4}",
        differences.len()
    );
    assert!(mean <= MEAN_MAX && percentile <= PERCENTILE_99_MAX, "{model} in {dtype:?}");
}

#[test]
fn half_precision_is_near_to_the_processor() {
    let Some(alone) = card_alone() else { return };
    let sizes = Sizes::default();
    for name in trellis::bundled::NAMES {
        let model = models::bundled(name);
        let backend = cpu_backend(&model, sizes);
        let cpu = start(model, Box::new(backend), sizes);
        for dtype in [Dtype::Bf16, Dtype::F16] {
            let model = models::bundled(name);
            let backend = cuda_backend(&alone.card, &model, sizes, dtype).expect("the model loads");
            compare(name, &cpu, &start(model, Box::new(backend), sizes), dtype);
        }
    }
}
