//! Mixtures of contexts of two models on one device, whose rows stay there.

use super::*;
use trellis_tests::engines::engine_of_two;

/// A context of the small model among those of the large one.
async fn members(models: [&ModelHandle; 2], owner_number: u32, prompts: &[Vec<Token>]) -> Vec<Context> {
    let mut members = Vec::new();
    let guest = owner(owner_number);
    for (idx, prompt) in prompts.iter().enumerate() {
        let model = models[idx % 2];
        let mut context = Context::create(model, guest.clone()).await.expect("created");
        context.append(prompt).await.expect("it fits");
        members.push(context);
    }
    members
}

#[test]
fn models_of_one_device_are_mixed() {
    let (engine, small) = engine_of_two(["tiny", "draft"], Sizes::default());
    block_on(async {
        let models = [engine.handle(), &small];
        let mut random = Random(9);
        for seed in 0..6 {
            let n_others = 1 + seed as usize % 3;
            let all = prompts(models[0], &mut random, 1 + n_others);
            let sampler = match n_others {
                1 => guidance(models[0], 1.5, 0.8, seed),
                2 => sampler(models[0], expert, [0.7, 0.8], seed),
                _ => sampler(models[0], product, [0.4, 0.8], seed),
            };
            let expected = by_rows_of(members(models, 99, &all).await, &sampler, N_TOKENS).await;
            let mut mixture = members(models, 1, &all).await;
            let found = mixed(&mut mixture, &sampler, N_TOKENS, Ahead::Adaptive).await;
            check(&found, &expected, &format!("seed {seed}, {n_others} others"));
            for (member, prompt) in mixture.iter().zip(&all) {
                let tokens = member.tokens().copy_of(prompt.len()..member.tokens().len());
                assert_eq!(tokens, found.iter().map(|it| it.0).collect::<Vec<_>>(), "all get them");
            }
            assert_eq!(mixture[0].reports(), [(N_TOKENS - 1) as f32], "the first has the state");
        }
    });
}

/// Of many guests, some of whom stop in the middle.
#[test]
fn mixtures_of_models_are_drawn_beside_each_other() {
    let (engine, small) = engine_of_two(["tiny", "draft"], Sizes::default());
    block_on(async {
        let mut random = Random(11);
        let mut expected = Vec::new();
        for seed in 0..12 {
            let all = prompts(engine.handle(), &mut random, 2);
            let sampler = guidance(engine.handle(), 1.5, 0.8, seed);
            let mut alone = members([engine.handle(), &small], 99, &all).await;
            expected.push((
                all,
                sampler.clone(),
                mixed(&mut alone, &sampler, N_TOKENS, Ahead::Adaptive).await,
            ));
        }
        let tasks = expected.into_iter().zip(1..).map(|((all, sampler, expected), number)| {
            let models = [engine.handle().clone(), small.clone()];
            tokio::spawn(async move {
                let mut mixture = members([&models[0], &models[1]], number, &all).await;
                let n_tokens = if number % 3 == 0 { N_TOKENS / 2 } else { N_TOKENS };
                let found = mixed(&mut mixture, &sampler, n_tokens, Ahead::Adaptive).await;
                check(&found, &expected[..n_tokens], &format!("guest {number}"));
            })
        });
        let tasks: Vec<_> = tasks.collect();
        for task in tasks {
            task.await.expect("it comes to its end");
        }
    });
}
