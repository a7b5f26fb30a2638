//! What a guest sees of a stream is what it would see decoding step by step, whatever interrupts the stream.

use std::sync::Arc;

use trellis_engine::sampling::Sampler;
use trellis_engine::{
    Ahead, Answer, Ask, Context, EngineError, MaskSource, ModelHandle, Pull, RunKey, RunSettings,
};
use trellis_tests::device::Nat;
use trellis_tests::engines::{Sizes, block_on, encode, engine, owner};

/// How the next token is had.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mode {
    /// Pulled from a stream that runs ahead.
    Stream(Ahead),
    /// Drawn and appended.
    Steps,
}

const MODES: [Mode; 3] = [Mode::Steps, Mode::Stream(Ahead::Adaptive), Mode::Stream(Ahead::Unbounded)];

/// What a guest does with its contexts, one of which is the current one.
#[derive(Clone, Debug)]
enum Op {
    Next(usize),
    Append(Vec<u32>),
    TruncateBy(usize),
    ForkToChild,
    ForkAndStay,
    DropCurrent,
    Switch,
    Sampler(Sampler),
    SecondStream(u64),
    Top,
    Score(Vec<u32>),
    Prefill,
    SaveAndOpen,
}

#[derive(Debug, PartialEq)]
enum Seen {
    Token(u32, Nat),
    Full,
    Top(Vec<(u32, Nat)>, Nat),
    Scores(Vec<Nat>),
    Tokens(Vec<u32>),
}

struct Guest {
    mode: Mode,
    contexts: Vec<Context>,
    current: usize,
    sampler: Sampler,
    key: u64,
    seen: Vec<Seen>,
}

impl Guest {
    async fn run(model: &ModelHandle, mode: Mode, prompt: &[u32], ops: &[Op]) -> Vec<Seen> {
        let mut context = Context::create(model, owner(1)).await.expect("created");
        context.append(prompt).await.expect("fits");
        let sampler = Sampler { temperature: 1.0, seed: 7, ..Sampler::greedy() };
        let mut guest = Self { mode, contexts: vec![context], current: 0, sampler, key: 0, seen: Vec::new() };
        for op in ops {
            guest.act(op).await.expect("every operation is valid");
        }
        for context in &guest.contexts {
            guest.seen.push(Seen::Tokens(context.tokens().to_vec()));
        }
        guest.seen
    }

    async fn act(&mut self, op: &Op) -> Result<(), EngineError> {
        let n_contexts = self.contexts.len();
        let context = &mut self.contexts[self.current];
        match op {
            Op::Next(n) => {
                let (sampler, key) = (self.sampler.clone(), self.key);
                for _ in 0..*n {
                    self.next(&sampler, key).await?;
                }
            }
            Op::SecondStream(seed) => {
                let sampler = Sampler { seed: *seed, ..self.sampler.clone() };
                let key = (1 + seed) * 1000 + self.key;
                self.next(&sampler, key).await?;
            }
            Op::Append(tokens) => {
                let n = tokens.len().min(context.capacity() - context.tokens().len());
                context.append(&tokens[..n]).await?;
            }
            Op::TruncateBy(n) => {
                let n_tokens = context.tokens().len().saturating_sub(*n).max(1);
                context.truncate(n_tokens).await?;
            }
            Op::ForkToChild | Op::ForkAndStay if n_contexts < 4 => {
                let child = context.fork().await?;
                self.contexts.push(child);
                if matches!(op, Op::ForkToChild) {
                    self.current = n_contexts;
                }
            }
            Op::DropCurrent if n_contexts > 1 => {
                self.contexts.remove(self.current);
                self.current = 0;
            }
            Op::ForkToChild | Op::ForkAndStay | Op::DropCurrent => {}
            Op::Switch => self.current = (self.current + 1) % n_contexts,
            Op::Sampler(sampler) => {
                self.sampler = sampler.clone();
                self.key += 1;
            }
            Op::Top => match context.ask(Ask::Top { n: 5 }).await?.answer().await? {
                Answer::Top { candidates, entropy } => {
                    let candidates = candidates.iter().map(|c| (c.token, Nat(c.logprob))).collect();
                    self.seen.push(Seen::Top(candidates, Nat(entropy)));
                }
                other => panic!("{other:?}"),
            },
            Op::Score(tokens) => {
                let n = tokens.len().min(context.capacity() - context.tokens().len());
                let ask = Ask::Continuation(tokens[..n].to_vec());
                match context.ask(ask).await?.answer().await? {
                    Answer::Scores(scores) => {
                        self.seen.push(Seen::Scores(scores.into_iter().map(Nat).collect()));
                    }
                    other => panic!("{other:?}"),
                }
            }
            Op::Prefill => assert_eq!(context.ask(Ask::Prefill).await?.answer().await?, Answer::Prefilled),
            Op::SaveAndOpen => {
                context.save("kept").await?;
                let opened = Context::open(&context.model().clone(), owner(1), "kept").await?;
                self.contexts[self.current] = opened;
            }
        }
        Ok(())
    }

    async fn next(&mut self, sampler: &Sampler, key: u64) -> Result<(), EngineError> {
        let context = &mut self.contexts[self.current];
        let seen = match self.mode {
            Mode::Steps if context.tokens().len() == context.capacity() => Seen::Full,
            Mode::Steps => {
                let ask = Ask::Sample(Arc::new(sampler.clone()));
                match context.ask(ask).await?.answer().await? {
                    Answer::Sampled(trellis_engine::batch::Drawn { candidate, .. }) => {
                        context.append(&[candidate.token]).await?;
                        Seen::Token(candidate.token, Nat(candidate.logprob))
                    }
                    other => panic!("{other:?}"),
                }
            }
            Mode::Stream(ahead) => {
                let settings = || RunSettings {
                    sampler: Arc::new(sampler.clone()),
                    stop_tokens: Arc::new([]),
                    n_tokens_max: None,
                    ahead,
                    masks: MaskSource::Sampler,
                };
                match context.pull(RunKey(key), settings).await? {
                    Pull::Token(trellis_engine::batch::Drawn { candidate, .. }) => {
                        Seen::Token(candidate.token, Nat(candidate.logprob))
                    }
                    Pull::Finished(_) => Seen::Full,
                }
            }
        };
        self.seen.push(seen);
        Ok(())
    }
}

/// Runs the operations in every mode and compares what is seen.
async fn compare(model: &ModelHandle, prompt: &[u32], ops: &[Op]) {
    let mut expected = None;
    for mode in MODES {
        let seen = Guest::run(model, mode, prompt, ops).await;
        match &expected {
            None => expected = Some(seen),
            Some(expected) => assert_eq!(&seen, expected, "{mode:?} of {ops:?}"),
        }
    }
}

fn story(model: &ModelHandle) -> Vec<u32> {
    encode(model, "<|begin_of_text|><|user|>\nTell me a short story.<|end|>\n<|assistant|>\n")
}

#[test]
fn each_operation_that_interrupts_a_stream() {
    let engine = engine("tiny", Sizes::default());
    let model = engine.handle();
    let base = Sampler { temperature: 0.9, top_p: Some(0.9), seed: 3, ..Sampler::greedy() };
    let penalised = Sampler { repetition_penalty: 1.3, frequency_penalty: 0.2, ..base.clone() };
    let interruptions = [
        Op::Append(vec![19, 265]),
        Op::TruncateBy(1),
        Op::TruncateBy(17),
        Op::ForkToChild,
        Op::ForkAndStay,
        Op::Sampler(base),
        Op::Sampler(penalised),
        Op::SecondStream(99),
        Op::Top,
        Op::Score(vec![265, 19, 300, 22]),
        Op::Prefill,
        Op::SaveAndOpen,
    ];
    block_on(async {
        let prompt = story(model);
        for op in interruptions {
            // After a token, after many, at a page's edge (13 + 3 = 16), and twice in a row.
            for n in [1, 3, 20] {
                let ops = [Op::Next(n), op.clone(), Op::Next(5), op.clone(), op.clone(), Op::Next(3)];
                compare(model, &prompt, &ops).await;
            }
        }
        let ops = [Op::Next(6), Op::ForkToChild, Op::Next(4), Op::DropCurrent, Op::Next(5)];
        compare(model, &prompt, &ops).await;
    });
}

#[test]
fn random_operations() {
    let ample = engine("draft", Sizes::default());
    // So few pages that contexts are moved to host memory, and prompts cut into chunks of 7.
    let tight = engine("draft", Sizes { n_pages: 80, n_host_pages: 40, n_step_rows: 3, n_step_tokens: 7 });
    let mut state = 1u64;
    let mut below = |n: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % n
    };
    for round in 0..40 {
        let engine = if round % 2 == 0 { &ample } else { &tight };
        let ops: Vec<Op> = (0..25)
            .map(|_| match below(16) {
                0..5 => Op::Next(1 + below(12) as usize),
                5 => Op::Append((0..1 + below(40)).map(|_| 20 + below(400) as u32).collect()),
                6 => Op::TruncateBy(below(40) as usize),
                7 => Op::ForkToChild,
                8 => Op::ForkAndStay,
                9 => Op::DropCurrent,
                10 => Op::Switch,
                11 => Op::Sampler(Sampler {
                    temperature: below(3) as f32 * 0.7,
                    top_k: (below(2) == 0).then_some(20),
                    min_p: (below(2) == 0).then_some(0.05),
                    presence_penalty: below(2) as f32 * 0.5,
                    seed: below(1000),
                    ..Sampler::greedy()
                }),
                12 => Op::SecondStream(below(1000)),
                13 => Op::Top,
                14 => Op::Score((0..below(20)).map(|_| below(4096) as u32).collect()),
                _ => {
                    if below(2) == 0 {
                        Op::Prefill
                    } else {
                        Op::SaveAndOpen
                    }
                }
            })
            .collect();
        block_on(compare(engine.handle(), &story(engine.handle()), &ops));
    }
}

#[test]
fn a_full_context_ends_the_stream_where_it_ends_the_steps() {
    let engine = engine("draft", Sizes::default());
    let model = engine.handle();
    block_on(async {
        let prompt: Vec<u32> = (0..1015).map(|i| 20 + i % 300).collect();
        compare(model, &prompt, &[Op::Next(12), Op::TruncateBy(4), Op::Next(8)]).await;
    });
}
