//! What a row gets is the same bits whatever the batch around it, however its prompt was cut, wherever its pages
//! lie.

use trellis_engine::backend::{Backend, PAGE_LEN};
use trellis_engine::batch::{
    Batch, HostPageId, Input, Output, OutputFault, OutputKind, OutputRequest, PageCopy, PageId, Requests,
    Row, SlotId, Token, Tokens,
};
use trellis_engine::cpu::{CpuBackend, CpuOptions};
use trellis_engine::model::{Architecture, ModelConfig, RopeConfig, RopeScaling};
use trellis_engine::sampling::{Sampler, philox4x32};

use crate::architectures::{backend, random_tensors};
use crate::support::{bundled, forward, full, n_pages, options, row};

fn random(a: u32, b: u32) -> usize {
    philox4x32([a, b, 0, 0], [99, 0])[0] as usize
}

fn tokens(n: usize, seed: u32, vocab_size: usize) -> Vec<Token> {
    (0..n).map(|i| (random(i as u32, seed) % vocab_size) as Token).collect()
}

/// A small model with a window, odd sizes and more than one depth block.
fn windowed() -> CpuBackend {
    let config = ModelConfig {
        architecture: Architecture::Mistral,
        vocab_size: 203,
        hidden_size: 300,
        intermediate_size: 531,
        n_layers: 2,
        n_heads: 6,
        n_kv_heads: 2,
        head_dim: 22,
        n_positions: 512,
        rms_norm_eps: 1e-6,
        rope: RopeConfig { theta: 1e4, scaling: RopeScaling::Default },
        tied_embeddings: false,
        qkv_bias: true,
        attention_output_bias: false,
        mlp_bias: false,
        qk_norm: true,
        windows: vec![Some(21), None],
    };
    backend(&config, &random_tensors(&config, 5))
}

/// The last position's distribution when the context runs alone, in one piece.
fn alone(backend: &mut impl Backend, tokens: &[Token]) -> Vec<f32> {
    let outputs = forward(backend, vec![row(tokens, 0, 0, vec![(tokens.len() - 1, OutputKind::Full)])]);
    full(outputs.into_iter().next().expect("one output"))
}

/// Contexts of different lengths, cut at random, many at once, on pages in random order.
fn check(mut backend: CpuBackend, n_contexts: usize) {
    let vocab_size = backend.limits().vocab_size;
    let contexts: Vec<Vec<Token>> =
        (0..n_contexts).map(|c| tokens(1 + random(c as u32, 7) % 90, c as u32, vocab_size)).collect();
    let expected: Vec<_> = contexts.iter().map(|tokens| alone(&mut backend, tokens)).collect();

    let mut free: Vec<u32> = (0..backend.n_pages() as u32).collect();
    free.sort_by_key(|&page| random(page, 8));
    let pages: Vec<Vec<PageId>> =
        contexts.iter().map(|tokens| free.drain(..n_pages(tokens.len())).map(PageId).collect()).collect();
    let mut done = vec![0; n_contexts];
    let mut step = 0;
    while contexts.iter().zip(&done).any(|(tokens, &done)| done < tokens.len()) {
        step += 1;
        let ends: Vec<usize> = contexts
            .iter()
            .zip(&done)
            .enumerate()
            .map(|(c, (tokens, done))| {
                let n = match random(step, c as u32) % 4 {
                    0 => 0,
                    1 => 1,
                    _ => 1 + random(step, c as u32 + 1000) % 40,
                };
                tokens.len().min(done + n)
            })
            .collect();
        let moving: Vec<usize> = (0..n_contexts).filter(|&c| ends[c] > done[c]).collect();
        let rows = moving.iter().map(|&c| Row {
            slot: SlotId(c as u32),
            tokens: Tokens::from(&contexts[c][..ends[c]]),
            start: done[c],
            pages: &pages[c],
            n_same_pages: 0,
            n_pages_alike: 0,
            outputs: Requests::from_iter([OutputRequest { position: ends[c] - 1, kind: OutputKind::Full }]),
            input: Input::Known,
            evicted: None,
            steered: None,
        });
        let outputs = forward(&mut backend, rows.collect());
        for (&c, output) in moving.iter().zip(outputs) {
            done[c] = ends[c];
            if done[c] == contexts[c].len() {
                assert_eq!(full(output), expected[c], "context {c} of {} tokens", contexts[c].len());
            }
        }
    }
}

#[test]
fn bundled_model() {
    check(bundled("tiny"), 70);
}

#[test]
fn window_and_odd_sizes() {
    check(windowed(), 90);
}

#[test]
fn number_of_threads() {
    let mut expected = None;
    for n_threads in [1, 2, 3, 5] {
        let options = CpuOptions { n_threads: std::num::NonZeroUsize::new(n_threads), ..options() };
        let model = crate::support::bundled_model("tiny");
        let mut backend = CpuBackend::new(&model, &options).expect("the bundled model loads");
        let tokens = tokens(100, 1, 4096);
        let asked = (0..100).map(|position| (position, OutputKind::Full)).collect();
        let outputs = forward(&mut backend, vec![row(&tokens, 0, 0, asked)]);
        assert_eq!(*expected.get_or_insert_with(|| outputs.clone()), outputs, "{n_threads} threads");
    }
}

/// A fork shares full pages and copies the last one; its parent goes on undisturbed in the same step.
#[test]
fn fork_by_page_copy() {
    let mut backend = bundled("draft");
    let prefix = tokens(40, 1, 4096);
    let (left, right) = ([&prefix[..], &[5, 6]].concat(), [&prefix[..], &[7, 8, 9]].concat());
    let expected = [alone(&mut backend, &left), alone(&mut backend, &right)];
    forward(&mut backend, vec![row(&prefix, 0, 100, vec![])]);
    let tables = [200, 102].map(|last| [PageId(100), PageId(101), PageId(last)]);
    let fork = |tokens, pages| Row {
        slot: SlotId(0),
        tokens,
        start: prefix.len(),
        pages,
        n_same_pages: 0,
        n_pages_alike: 0,
        outputs: Requests::from_iter([OutputRequest { position: tokens.len() - 1, kind: OutputKind::Full }]),
        input: Input::Known,
        evicted: None,
        steered: None,
    };
    let copies = [PageCopy { src: PageId(102), dst: PageId(200) }];
    let batch = Batch {
        copies: &copies,
        rows: vec![fork(Tokens::from(&left), &tables[0]), fork(Tokens::from(&right), &tables[1])],
    };
    let outputs = backend.forward(&batch).expect("the backend runs");
    assert_eq!(outputs.into_iter().map(full).collect::<Vec<_>>(), expected);
}

#[test]
fn swap_out_and_in_elsewhere() {
    let mut backend = bundled("draft");
    let tokens = tokens(3 * PAGE_LEN, 1, 4096);
    let expected = alone(&mut backend, &tokens);
    let n = tokens.len() - 1;
    forward(&mut backend, vec![row(&tokens[..n], 0, 10, vec![])]);
    let host = |i| HostPageId(15 - i);
    let out: Vec<_> = (0..3).map(|i| (PageId(10 + i), host(i))).collect();
    backend.swap_out(&out).expect("swapping is a copy");
    // Another context takes the pages meanwhile.
    forward(&mut backend, vec![row(&tokens[1..], 0, 10, vec![])]);
    let back: Vec<_> = (0..3).map(|i| (host(i), PageId(50 + i))).collect();
    backend.swap_in(&back).expect("swapping is a copy");
    let outputs = forward(&mut backend, vec![row(&tokens, n, 50, vec![(n, OutputKind::Full)])]);
    assert_eq!(full(outputs.into_iter().next().expect("one output")), expected);
}

/// Outputs come in the order of the requests, and one position answers all its requests alike.
#[test]
fn outputs_keep_their_order() {
    let mut backend = bundled("draft");
    let context = tokens(20, 3, 4096);
    let sampler = Sampler { temperature: 1.0, seed: 4, ..Sampler::greedy() };
    let scored: [Token; 3] = [9, 4000, 17];
    let asked = vec![
        (19, OutputKind::Sample(&sampler)),
        (3, OutputKind::Top { n: 5 }),
        (19, OutputKind::Full),
        (3, OutputKind::Scores(&scored)),
        (3, OutputKind::Full),
        (19, OutputKind::Embedding),
        (7, OutputKind::Embedding),
    ];
    let other = row(&context[..9], 0, 30, vec![(8, OutputKind::Top { n: 1 })]);
    let outputs = forward(&mut backend, vec![row(&context, 0, 0, asked), other]);
    let [
        Output::Sampled(drawn),
        Output::Top { candidates, entropy },
        Output::Full(last),
        Output::Scores(scores),
        Output::Full(third),
        Output::Embedding(_),
        Output::Embedding(_),
        Output::Top { candidates: single, .. },
    ] = &outputs[..]
    else {
        panic!("{outputs:?}")
    };
    assert_eq!(drawn.logprob, last[drawn.token as usize]);
    assert_eq!(*scores, scored.map(|token| third[token as usize]));
    assert_eq!((candidates.len(), single.len()), (5, 1));
    let best = third.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    assert_eq!(candidates[0].logprob, best);
    assert!(candidates.iter().all(|c| c.logprob == third[c.token as usize]));
    let sum: f64 = third.iter().map(|&l| f64::from(l) * f64::from(l).exp()).sum();
    assert!((f64::from(*entropy) + sum).abs() <= 1e-4, "{entropy} {sum}");
}

/// A NaN stays in its own row.
#[test]
fn nan_harms_nobody_else() {
    let config = ModelConfig {
        architecture: Architecture::Llama,
        vocab_size: 50,
        hidden_size: 32,
        intermediate_size: 48,
        n_layers: 2,
        n_heads: 2,
        n_kv_heads: 1,
        head_dim: 16,
        n_positions: 64,
        rms_norm_eps: 1e-6,
        rope: RopeConfig { theta: 1e4, scaling: RopeScaling::Default },
        tied_embeddings: false,
        qkv_bias: false,
        attention_output_bias: false,
        mlp_bias: false,
        qk_norm: false,
        windows: vec![Some(8), None],
    };
    let mut tensors = random_tensors(&config, 6);
    let embedding = tensors.get_mut("model.embed_tokens.weight").expect("every model has one");
    embedding[49 * 32] = f32::NAN;
    let mut backend = backend(&config, &tensors);
    let (good, bad) = (tokens(30, 1, 49), [&tokens(10, 2, 49)[..], &[49], &tokens(10, 3, 49)].concat());
    let expected = alone(&mut backend, &good);
    let asked = |n| vec![(n, OutputKind::Full), (n, OutputKind::Embedding)];
    let rows = vec![row(&bad, 0, 10, asked(20)), row(&good, 0, 20, asked(29)), row(&bad, 0, 30, asked(9))];
    let outputs = forward(&mut backend, rows);
    let fault = Output::Failed(OutputFault::NotANumber);
    assert_eq!(outputs[..2], [fault.clone(), fault.clone()]);
    assert_eq!(full(outputs[2].clone()), expected);
    assert!(matches!(outputs[4], Output::Full(_)), "before the bad token");
    // The pages that held the NaN are as good as new for the next context.
    let outputs = forward(&mut backend, vec![row(&good, 0, 10, asked(29))]);
    assert_eq!(full(outputs[0].clone()), expected);
}

/// Asks about the last token again, from what the backend kept, by itself and beside rows with tokens.
#[test]
fn a_state_that_was_kept_gives_the_bits_that_it_gave() {
    let mut backend = bundled("tiny");
    let texts: Vec<Vec<Token>> = (0..3).map(|i| (0..40).map(|j| 20 + 31 * i + j).collect()).collect();
    let in_slot = |idx: usize, start: usize, kinds: Vec<OutputKind<'static>>| {
        let tokens = &texts[idx];
        let outputs = kinds.into_iter().map(|kind| (tokens.len() - 1, kind)).collect();
        Row { slot: SlotId(idx as u32), ..row(tokens, start, 10 * idx, outputs) }
    };
    let kinds = || vec![OutputKind::Full, OutputKind::Embedding, OutputKind::Top { n: 5 }];
    let asked = (0..2).map(|idx| in_slot(idx, 0, kinds())).collect();
    let first = forward(&mut backend, asked);
    let again = forward(&mut backend, vec![in_slot(1, 40, kinds()), in_slot(0, 40, kinds())]);
    assert_eq!([&again[3..], &again[..3]].concat(), first);
    let beside =
        forward(&mut backend, vec![in_slot(0, 40, kinds()), in_slot(2, 0, kinds()), in_slot(1, 40, kinds())]);
    assert_eq!([&beside[..3], &beside[6..]].concat(), first);
    assert_eq!(forward(&mut backend, vec![in_slot(2, 40, kinds())]), beside[3..6]);
}
