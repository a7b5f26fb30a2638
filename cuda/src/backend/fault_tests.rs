//! Each call of the driver that steps make fails once: whatever step it is in ends with a typed error or with the right
//! answers, and what follows is right.

use std::collections::BTreeMap;

use cudarc::driver::sys::CUresult;
use trellis_engine::backend::PAGE_LEN;
use trellis_engine::batch::{Input, OutputKind, OutputRequest, PageCopy, Requests, Row, SlotId, Token};
use trellis_engine::model::Dtype;
use trellis_engine::sampling::Sampler;

use super::tests::{card, load_on, random_models, tokens};
use super::*;
use crate::driver::faults::{self, Lasts};
use crate::testing::Random;

const N_DRAWN: usize = 20;
/// Drawn tokens after which something else happens than the next step of decoding.
const ASKS_MORE_AT: usize = 5;
const COPIES_AT: usize = 7;
const MOVES_AT: usize = 9;
const RESIZES_AT: usize = 11;

/// What makes a captured step; without it the step is launched kernel by kernel.
const OF_GRAPHS: [&str; 4] =
    ["cuStreamBeginCapture", "cuStreamEndCapture", "cuGraphInstantiate", "cuGraphUpload"];

/// A context as an engine would keep it.
struct Talk {
    slot: SlotId,
    tokens: Vec<Token>,
    n_prompt: usize,
    n_computed: usize,
    pages: Vec<PageId>,
    logprobs: Vec<f32>,
    sampler: Sampler,
}

/// What a conversation came to.
#[derive(Debug)]
struct Said {
    tokens: Vec<Vec<Token>>,
    logprobs: Vec<Vec<f32>>,
    n_failed: usize,
}

impl Talk {
    fn new(number: usize, prompt: Vec<Token>) -> Self {
        let first_page = 8 * number as u32;
        Self {
            slot: SlotId(number as u32),
            n_prompt: prompt.len(),
            tokens: prompt,
            n_computed: 0,
            pages: (first_page..first_page + 8).map(PageId).collect(),
            logprobs: Vec::new(),
            sampler: Sampler { temperature: 1.0, seed: number as u64, ..Sampler::greedy() },
        }
    }

    fn n_drawn(&self) -> usize {
        self.tokens.len() - self.n_prompt
    }

    fn row(&self) -> Row<'_> {
        let position = self.tokens.len() - 1;
        let request = |kind| OutputRequest { position, kind };
        let mut outputs: Requests<'_> = Requests::from_iter([request(OutputKind::Sample(&self.sampler))]);
        if self.n_drawn() == ASKS_MORE_AT {
            outputs.extend([request(OutputKind::Full), request(OutputKind::Top { n: 3 })]);
        }
        Row {
            slot: self.slot,
            tokens: (&self.tokens).into(),
            start: self.n_computed,
            pages: &self.pages[..=self.tokens.len() / PAGE_LEN],
            n_same_pages: 0,
            n_pages_alike: 0,
            outputs,
            input: Input::Known,
            evicted: None,
            steered: None,
        }
    }
}

/// Runs a prompt and decoding with all that a step can have in it, as an engine would: what failed is computed again.
///
/// # Errors
/// The device is lost.
fn converse(backend: &mut CudaBackend, prompts: &[Vec<Token>]) -> Result<Said, BackendError> {
    backend.under_way.clear();
    backend.draws.clear();
    backend.steps.forget_graphs();
    let mut talks: Vec<Talk> =
        prompts.iter().enumerate().map(|(number, prompt)| Talk::new(number, prompt.clone())).collect();
    let mut n_failed = 0;
    while talks[0].n_drawn() < N_DRAWN {
        let mut copies = Vec::new();
        if talks[0].n_drawn() == COPIES_AT && talks[0].n_computed + 1 == talks[0].tokens.len() {
            // The last page is shared with another context from here on.
            let page_idx = talks[0].n_computed / PAGE_LEN;
            let dst = PageId(100);
            copies.push(PageCopy { src: std::mem::replace(&mut talks[0].pages[page_idx], dst), dst });
        }
        if talks[0].n_drawn() == MOVES_AT {
            let (from, host, to) = (talks[0].pages[0], HostPageId(3), PageId(101));
            let moved = backend
                .swap_out(&[(from, host)])
                .and_then(|()| backend.swap_in(&[(host, to)]))
                .and_then(|()| backend.move_pages(&[(to, PageId(to.0 + 1))]));
            match moved {
                Ok(()) => talks[0].pages[0] = PageId(to.0 + 1),
                Err(error) if error.damage() == Damage::Call => {
                    n_failed += 1;
                    talks[0].n_computed = 0;
                }
                Err(error) => return Err(error),
            }
        }
        if talks[0].n_drawn() == RESIZES_AT {
            // Memory that nothing lies in goes and comes.
            let (n_pages, n_granule_pages) = (backend.limits.n_pages, backend.limits.n_granule_pages);
            let resized = backend.resize(n_pages - n_granule_pages).and_then(|()| backend.resize(n_pages));
            match resized {
                Ok(()) => {}
                Err(error) if error.damage() == Damage::Call => n_failed += 1,
                Err(error) => return Err(error),
            }
        }
        let rows: Vec<Row<'_>> = talks.iter().map(Talk::row).collect();
        let n_outputs: Vec<usize> = rows.iter().map(|row| row.outputs.len()).collect();
        let stepped = backend.forward(&Batch { copies: &copies, rows });
        match stepped {
            Ok(outputs) => {
                let mut outputs = outputs.into_iter();
                for (talk, n) in talks.iter_mut().zip(n_outputs) {
                    let Some(Output::Sampled(drawn)) = outputs.next() else { panic!("a draw was asked for") };
                    talk.n_computed = talk.tokens.len();
                    talk.tokens.push(drawn.token);
                    talk.logprobs.push(drawn.logprob);
                    if n > 1 {
                        let Some(Output::Full(row)) = outputs.next() else { panic!("a row was asked for") };
                        talk.logprobs.extend(&row[..50]);
                        let Some(Output::Top { candidates, .. }) = outputs.next() else { panic!("a list") };
                        talk.logprobs.extend(candidates.iter().map(|candidate| candidate.logprob));
                    }
                }
            }
            Err(error) if error.damage() == Damage::Call => {
                n_failed += 1;
                // What the step wrote to is not trusted, from the beginning of its first page.
                for talk in &mut talks {
                    talk.n_computed = talk.n_computed / PAGE_LEN * PAGE_LEN;
                }
            }
            Err(error) => return Err(error),
        }
    }
    Ok(Said {
        tokens: talks.iter().map(|talk| talk.tokens.clone()).collect(),
        logprobs: talks.into_iter().map(|talk| talk.logprobs).collect(),
        n_failed,
    })
}

fn assert_same(said: &Said, expected: &Said, what: &str) {
    assert_eq!(said.tokens, expected.tokens, "{what}");
    for (said, expected) in said.logprobs.iter().flatten().zip(expected.logprobs.iter().flatten()) {
        // Prompts that are cut elsewhere are summed in another order; design section 10 for float32.
        assert!((said - expected).abs() <= 1e-3, "{what}: {said} {expected}");
    }
}

fn prompts(vocab_size: usize) -> Vec<Vec<Token>> {
    let mut random = Random(11);
    [40, 21, 7].map(|n| tokens(&mut random, n, vocab_size)).to_vec()
}

/// What is said when nothing fails, and the driver calls that it takes.
fn undisturbed(backend: &mut CudaBackend, prompts: &[Vec<Token>]) -> (Said, Vec<&'static str>) {
    // Kernels are loaded when they are first launched.
    converse(backend, prompts).expect("the card works");
    faults::clear();
    let said = converse(backend, prompts).expect("the card works");
    (said, faults::clear())
}

#[test]
fn any_call_may_fail_and_the_next_step_is_right() {
    let Some(card) = card() else { return };
    let model = random_models().remove(0);
    let mut backend = load_on(&card, &model, Dtype::F32);
    let prompts = prompts(model.config.vocab_size);
    let (expected, calls) = undisturbed(&mut backend, &prompts);
    assert_eq!(expected.n_failed, 0);
    for call in OF_GRAPHS {
        assert!(calls.contains(&call), "no {call} in {} calls", calls.len());
    }
    let mut n_unseen = BTreeMap::new();
    for (n_before, call) in calls.iter().enumerate() {
        for code in [
            CUresult::CUDA_ERROR_OUT_OF_MEMORY,
            CUresult::CUDA_ERROR_INVALID_VALUE,
            CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
        ] {
            let what = format!("call {n_before}, {call}: {code:?}");
            backend.resize(backend.limits.n_pages).expect("memory that a failure before kept away");
            faults::inject(n_before, code, Lasts::Once);
            let said = converse(&mut backend, &prompts).unwrap_or_else(|error| panic!("{what}: {error}"));
            faults::clear();
            assert_same(&said, &expected, &what);
            assert!(said.n_failed <= 1, "{what}: {} steps failed", said.n_failed);
            if OF_GRAPHS.contains(call) {
                assert_eq!(said.n_failed, 0, "{what}: a step runs without its graph");
            }
            if said.n_failed == 0 {
                *n_unseen.entry(*call).or_insert(0) += 1;
            }
        }
    }
    println!("{} calls; failed and hurt nobody: {n_unseen:?}", calls.len());
    // In a capture: the step is launched without it.
    assert!(n_unseen.contains_key("cuLaunchKernelEx"), "{n_unseen:?}");
}

#[test]
fn a_lost_device_is_told_from_a_call_that_failed_at_every_call() {
    let Some(card) = card() else { return };
    let model = random_models().remove(0);
    let mut backend = load_on(&card, &model, Dtype::F32);
    let prompts = prompts(model.config.vocab_size);
    let (expected, calls) = undisturbed(&mut backend, &prompts);
    for (n_before, call) in calls.iter().enumerate() {
        backend.resize(backend.limits.n_pages).expect("memory that a failure before kept away");
        faults::inject(n_before, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, Lasts::ForEver);
        let lost = converse(&mut backend, &prompts);
        faults::clear();
        match lost {
            Err(error) => assert_eq!(error.damage(), Damage::Device, "call {n_before}, {call}: {error}"),
            // The call was made after the last output had been taken.
            Ok(said) => assert_same(&said, &expected, &format!("call {n_before}, {call}")),
        }
        card.stream().synchronize().expect("the card itself works");
    }
    let said = converse(&mut backend, &prompts).expect("the card works");
    assert_same(&said, &expected, "after all that");
}
