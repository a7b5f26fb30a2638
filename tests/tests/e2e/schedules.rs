//! A seeded result depends on the context and the sampler alone: not on batch neighbours, not on how prompts are
//! cut, not on preemption.

use std::sync::Arc;

use tokio::sync::Barrier;

use trellis_engine::account::Resource;
use trellis_engine::sampling::Sampler;
use trellis_engine::{Ahead, Answer, Ask, Context, MaskSource, ModelHandle, Pull, RunKey, RunSettings};
use trellis_tests::device::Nat;
use trellis_tests::engines::{Sizes, block_on, encode, engine, owner};

/// One guest's work: a prompt, so many forks with seeds of their own, so many tokens each.
#[derive(Clone, Debug)]
struct Job {
    prompt: Vec<u32>,
    n_forks: usize,
    n_tokens: usize,
    seed: u64,
}

/// Tokens and their log-probabilities, for each fork.
type Drawn = Vec<Vec<(u32, Nat)>>;

/// All jobs that run `together` have their pages when one begins its second token.
async fn run(model: &ModelHandle, job: &Job, number: u32, together: &Barrier) -> Drawn {
    let owner = owner(number);
    let account = owner.account.clone();
    let mut root = Context::create(model, owner).await.expect("created");
    root.append(&job.prompt).await.expect("fits");
    let mut forks = Vec::new();
    for _ in 0..job.n_forks {
        forks.push(root.fork().await.expect("forked"));
    }
    let mut drawn = vec![Vec::new(); job.n_forks];
    for step in 0..job.n_tokens {
        if step == 1 {
            together.wait().await;
        }
        for (idx, fork) in forks.iter_mut().enumerate() {
            let sampler = Arc::new(Sampler {
                temperature: 1.0,
                top_p: Some(0.95),
                seed: job.seed + idx as u64,
                ..Sampler::greedy()
            });
            // Half of the forks by streams, half step by step.
            let candidate = if idx % 2 == 0 {
                let settings = || RunSettings {
                    sampler,
                    stop_tokens: Arc::new([]),
                    n_tokens_max: Some(job.n_tokens - step),
                    ahead: Ahead::Adaptive,
                    masks: MaskSource::Sampler,
                };
                match fork.pull(RunKey(0), settings).await.expect("pulled") {
                    Pull::Token(one) => one.candidate,
                    Pull::Finished(finish) => panic!("{finish:?}"),
                }
            } else {
                match fork.ask(Ask::Sample(sampler)).await.expect("asked").answer().await.expect("drawn") {
                    Answer::Sampled(one) => {
                        let candidate = one.candidate;
                        fork.append(&[candidate.token]).await.expect("fits");
                        candidate
                    }
                    other => panic!("{other:?}"),
                }
            };
            drawn[idx].push((candidate.token, Nat(candidate.logprob)));
        }
    }
    drop((root, forks));
    // The engine answers in order: by now it has released what was dropped.
    model.stats().await.expect("the engine lives");
    assert_eq!(account.used(Resource::Contexts), 0);
    drawn
}

fn jobs(model: &ModelHandle, n: usize) -> Vec<Job> {
    let texts = [
        "<|begin_of_text|><|user|>\nTell me a short story.<|end|>\n<|assistant|>\n",
        "<|begin_of_text|>Ownership is a set of rules",
        "<|begin_of_text|>Once upon a time",
    ];
    (0..n)
        .map(|idx| {
            let mut prompt = encode(model, texts[idx % texts.len()]);
            // Prompts of many lengths: some of several pages, some that end on a page's edge.
            let n_more = [0, 3, 11, 30, 90][idx % 5];
            prompt.extend((0..n_more).map(|i| 300 + (i * 7 + idx as u32) % 500));
            Job { prompt, n_forks: 1 + idx % 4, n_tokens: 6 + idx % 9, seed: idx as u64 * 100 }
        })
        .collect()
}

async fn alone(model: &ModelHandle, jobs: &[Job]) -> Vec<Drawn> {
    let mut all = Vec::new();
    for (idx, job) in jobs.iter().enumerate() {
        all.push(run(model, job, idx as u32, &Barrier::new(1)).await);
    }
    all
}

async fn together(model: &ModelHandle, jobs: &[Job]) -> Vec<Drawn> {
    let barrier = Arc::new(Barrier::new(jobs.len()));
    let tasks: Vec<_> = jobs
        .iter()
        .cloned()
        .enumerate()
        .map(|(idx, job)| {
            let (model, barrier) = (model.clone(), barrier.clone());
            tokio::spawn(async move {
                // Arrivals spread over the others' work.
                for _ in 0..idx * 3 {
                    tokio::task::yield_now().await;
                }
                run(&model, &job, 100 + idx as u32, &barrier).await
            })
        })
        .collect();
    let mut all = Vec::new();
    for task in tasks {
        all.push(task.await.expect("no panic"));
    }
    all
}

#[test]
fn neighbours_chunks_and_preemption_change_nothing() {
    let reference = engine("tiny", Sizes::default());
    let jobs = jobs(reference.handle(), 24);
    let expected = block_on(alone(reference.handle(), &jobs));

    let schedules = [
        Sizes::default(),
        // Prompts in chunks of a few tokens, a few rows in a step.
        Sizes { n_step_rows: 5, n_step_tokens: 6, ..Sizes::default() },
        // Everything in one step.
        Sizes { n_step_rows: 256, n_step_tokens: 2048, ..Sizes::default() },
        // So few pages that contexts push each other out to host memory.
        Sizes { n_pages: 72, n_host_pages: 400, n_step_rows: 16, n_step_tokens: 40 },
        // No host memory: the KV of contexts that make room is computed again.
        Sizes { n_pages: 40, n_host_pages: 0, n_step_rows: 16, n_step_tokens: 64 },
    ];
    for (idx, sizes) in schedules.into_iter().enumerate() {
        let engine = engine("tiny", sizes);
        let drawn = block_on(together(engine.handle(), &jobs));
        for (job_idx, (drawn, expected)) in drawn.iter().zip(&expected).enumerate() {
            assert_eq!(drawn, expected, "job {job_idx} under {sizes:?}");
        }
        let stats = block_on(engine.handle().stats()).expect("the engine lives");
        assert_eq!(stats.n_contexts, 0);
        assert_eq!(stats.n_pages_free + stats.n_pages_cached, stats.n_pages, "to the page");
        assert_eq!(stats.n_pages_on_host, 0);
        match idx {
            3 => assert!(stats.n_swaps_out > 0, "the schedule was meant to swap: {stats:?}"),
            4 => assert!(stats.n_tokens_again > 0, "the schedule was meant to recompute: {stats:?}"),
            _ => {}
        }
    }
}
