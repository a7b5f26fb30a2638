//! The backend on a card against the CPU's on the same weights.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::Instant;

use trellis_engine::backend::PAGE_LEN;
use trellis_engine::batch::{Candidate, Input, OutputKind, OutputRequest, PageCopy, Row, SlotId, Token};
use trellis_engine::cpu::{CpuBackend, CpuOptions};
use trellis_engine::model::{
    Architecture, Dtype, Model, ModelConfig, ModelSource, RopeConfig, RopeScaling, shape,
};
use trellis_engine::sampling::{Sampler, TokenMask};

use super::*;
use crate::testing::{Random, gpu, gpu_alone};

const N_PAGES: usize = 640;
const N_TOKENS_MAX: usize = 512;
const N_ROWS_MAX: usize = 80;

/// The checkout, also when the tests run on another machine from its root.
pub(super) fn root() -> PathBuf {
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    if built.join("daemon/models").is_dir() { built } else { PathBuf::from(".") }
}

pub(super) fn bundled(name: &str) -> Model {
    let folder = root().join("daemon/models").join(name);
    Model::open(name, &ModelSource::Folder(folder)).expect("the bundled model opens")
}

/// A card with what earlier runs compiled; `None`, with a line that says so, without one.
pub(super) fn card() -> Option<Card> {
    gpu()?;
    Some(open_card())
}

/// As [`card`], while no other test has it.
pub(super) fn card_alone() -> Option<Card> {
    gpu_alone()?;
    Some(open_card())
}

fn open_card() -> Card {
    Card::open(0, Some(&std::env::temp_dir().join("trellis-cuda-tests"))).expect("a card")
}

pub(super) fn load_on(card: &Card, model: &Model, dtype: Dtype) -> CudaBackend {
    let page_bytes = CudaBackend::page_bytes(&model.config, dtype);
    let options = CudaOptions {
        dtype: Some(dtype),
        kv_bytes: N_PAGES as u64 * page_bytes,
        kv_bytes_max: N_PAGES as u64 * page_bytes,
        kv_host_bytes: 16 * page_bytes,
        n_rows_max: N_ROWS_MAX,
        n_tokens_max: N_TOKENS_MAX,
    };
    CudaBackend::load(card, model, &options, &|_, _| {}).expect("the model loads")
}

pub(super) fn cpu(model: &Model) -> CpuBackend {
    let options = CpuOptions {
        n_pages: N_PAGES,
        n_host_pages: 16,
        n_threads: None,
        n_rows_max: N_ROWS_MAX,
        n_tokens_max: N_TOKENS_MAX,
    };
    CpuBackend::new(model, &options).expect("the model loads")
}

/// Small decoders of every family with random weights: heads that share keys, biases, windows, norms over heads.
pub(super) fn random_models() -> Vec<Model> {
    let base = ModelConfig {
        architecture: Architecture::Llama,
        vocab_size: 5000,
        hidden_size: 256,
        intermediate_size: 704,
        n_layers: 3,
        n_heads: 8,
        n_kv_heads: 2,
        head_dim: 64,
        n_positions: 1024,
        rms_norm_eps: 1e-5,
        rope: RopeConfig { theta: 10_000.0, scaling: RopeScaling::Default },
        tied_embeddings: true,
        qkv_bias: false,
        attention_output_bias: false,
        mlp_bias: false,
        qk_norm: false,
        windows: vec![None; 3],
    };
    let short = base.clone();
    let configs = [
        ("llama", ModelConfig { mlp_bias: true, attention_output_bias: true, ..base.clone() }),
        (
            "mistral",
            ModelConfig {
                architecture: Architecture::Mistral,
                windows: vec![Some(40); 3],
                tied_embeddings: false,
                ..base.clone()
            },
        ),
        (
            "qwen2",
            ModelConfig {
                architecture: Architecture::Qwen2,
                qkv_bias: true,
                n_heads: 7,
                n_kv_heads: 1,
                head_dim: 80,
                windows: vec![None, Some(64), None],
                ..base.clone()
            },
        ),
        (
            "qwen3",
            ModelConfig {
                architecture: Architecture::Qwen3,
                qk_norm: true,
                n_kv_heads: 8,
                head_dim: 128,
                hidden_size: 192,
                ..base
            },
        ),
        // Contexts shorter than the smallest page table.
        ("short", ModelConfig { n_positions: 48, head_dim: 128, n_heads: 2, n_kv_heads: 1, ..short }),
    ];
    let tokenizer = std::fs::read(root().join("daemon/models/tiny/tokenizer.json")).expect("a tokenizer");
    configs
        .into_iter()
        .map(|(name, config)| {
            Model::with_random_weights(name, config, Dtype::F32, 5, &tokenizer).expect("a model")
        })
        .collect()
}

pub(super) fn tokens(random: &mut Random, n: usize, vocab_size: usize) -> Vec<Token> {
    (0..n).map(|_| random.below(vocab_size) as Token).collect()
}

/// A page table of consecutive pages.
fn consecutive(first: usize, n: usize) -> &'static [PageId] {
    static PAGES: LazyLock<Vec<PageId>> = LazyLock::new(|| (0..1 << 20).map(PageId).collect());
    &PAGES[first..first + n]
}

/// A row over `tokens[start..]` whose pages are numbered from `first_page`, one more than needed.
pub(super) fn row<'a>(
    slot: u32,
    tokens: &'a [Token],
    start: usize,
    first_page: usize,
    outputs: Vec<(usize, OutputKind<'a>)>,
) -> Row<'a> {
    let n_pages = tokens.len() / PAGE_LEN + 1;
    Row {
        slot: SlotId(slot),
        tokens: tokens.into(),
        start,
        pages: consecutive(first_page, n_pages),
        n_same_pages: 0,
        n_pages_alike: 0,
        outputs: outputs.into_iter().map(|(position, kind)| OutputRequest { position, kind }).collect(),
        input: Input::Known,
        evicted: None,
        steered: None,
    }
}

fn forward(backend: &mut impl Backend, rows: Vec<Row<'_>>) -> Vec<Output> {
    backend.forward(&Batch { copies: &[], rows }).expect("the backend runs")
}

fn full(output: &Output) -> &[f32] {
    match output {
        Output::Full(logprobs) => logprobs,
        other => panic!("expected a full row, got {other:?}"),
    }
}

/// Log-probabilities of every position of a prompt, cut into chunks.
fn all_positions(backend: &mut impl Backend, tokens: &[Token], chunks: &[usize]) -> Vec<Vec<f32>> {
    let (mut rows, mut start) = (Vec::new(), 0);
    for &n in chunks.iter().cycle() {
        let end = (start + n).min(tokens.len());
        let asked = (start..end).map(|position| (position, OutputKind::Full)).collect();
        let outputs = forward(backend, vec![row(0, &tokens[..end], start, 3, asked)]);
        rows.extend(outputs.iter().map(|output| full(output).to_vec()));
        start = end;
        if start == tokens.len() {
            break;
        }
    }
    rows
}

fn largest_difference(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    let mut worst = 0f32;
    for (a, b) in a.iter().flatten().zip(b.iter().flatten()) {
        let diff = (a - b).abs();
        assert!(!diff.is_nan(), "{a} {b}");
        worst = worst.max(diff);
    }
    worst
}

/// Design section 10: 1e-3 in float32.
#[test]
fn float32_agrees_with_the_cpu() {
    let Some(card) = card() else { return };
    let mut random = Random(1);
    for model in random_models().into_iter().chain([bundled("tiny"), bundled("draft")]) {
        let mut device = load_on(&card, &model, Dtype::F32);
        let mut host = cpu(&model);
        let n_tokens = 200.min(model.config.n_positions);
        let prompt = tokens(&mut random, n_tokens, model.config.vocab_size);
        let expected = all_positions(&mut host, &prompt, &[200]);
        for chunks in [&[200][..], &[1], &[16, 1, 33, 15], &[2, 100]] {
            let worst = largest_difference(&all_positions(&mut device, &prompt, chunks), &expected);
            println!("{} in chunks of {chunks:?}: {worst:.2e}", model.name);
            assert!(worst <= 1e-3, "{} in chunks of {chunks:?}: {worst}", model.name);
        }
    }
}

/// Texts for teacher forcing: what the goldens asked of a model, and what it answered.
fn texts(name: &str) -> Vec<Vec<Token>> {
    let path = root().join("tests/golden").join(format!("{name}.json"));
    let golden: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(path).expect("the goldens")).expect("JSON");
    let ids = |value: &serde_json::Value| -> Vec<Token> {
        value.as_array().expect("a list").iter().map(|id| id.as_u64().expect("a token") as Token).collect()
    };
    let cases = golden["cases"].as_array().expect("a list");
    cases.iter().map(|case| [ids(&case["prompt_ids"]), ids(&case["greedy_ids"])].concat()).collect()
}

/// Design section 10, on trained models: log-probabilities of the tokens of texts, teacher-forced.
#[test]
fn sixteen_bits_agree_with_the_cpu() {
    let Some(card) = card() else { return };
    for name in ["tiny", "draft"] {
        let model = bundled(name);
        let mut host = cpu(&model);
        let texts = texts(name);
        let expected: Vec<_> =
            texts.iter().map(|text| all_positions(&mut host, text, &[text.len()])).collect();
        for dtype in [Dtype::Bf16, Dtype::F16] {
            let mut device = load_on(&card, &model, dtype);
            for is_decoded in [false, true] {
                let (mut diffs, mut regret) = (Vec::new(), 0f32);
                for (text, expected) in texts.iter().zip(&expected) {
                    let n = if is_decoded { 1 } else { text.len() };
                    let found = all_positions(&mut device, text, &[n]);
                    for (position, (found, expected)) in found.iter().zip(expected).enumerate() {
                        if let Some(&token) = text.get(position + 1) {
                            diffs.push((found[token as usize] - expected[token as usize]).abs());
                        }
                        // What the choice of the device's best token costs under the reference.
                        let best = |row: &[f32]| {
                            (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b])).expect("a row")
                        };
                        regret = regret.max(expected[best(expected)] - expected[best(found)]);
                    }
                }
                diffs.sort_by(f32::total_cmp);
                let mean = diffs.iter().sum::<f32>() / diffs.len() as f32;
                let p99 = diffs[(diffs.len() * 99).div_ceil(100) - 1];
                println!(
                    "{name} {dtype:?}, {} positions, one by one: {is_decoded}: mean {mean:.4}, p99 {p99:.4}, regret {regret:.4}",
                    diffs.len()
                );
                assert!(
                    mean <= 0.06 && p99 <= 0.2 && regret <= 0.2,
                    "{name} {dtype:?}: {mean} {p99} {regret}"
                );
            }
        }
    }
}

pub(super) fn assert_same(found: &Output, expected: &Output, about: &str) {
    let close = |a: f32, b: f32| (a - b).abs() <= 1e-3 || a == b;
    let same = |a: &Candidate, b: &Candidate| a.token == b.token && close(a.logprob, b.logprob);
    let is_same = match (found, expected) {
        (Output::Sampled(a), Output::Sampled(b)) => same(a, b),
        (Output::Top { candidates: a, entropy: e }, Output::Top { candidates: b, entropy: f }) => {
            a.len() == b.len() && close(*e, *f) && a.iter().zip(b).all(|(a, b)| close(a.logprob, b.logprob))
        }
        (Output::Scores(a), Output::Scores(b)) | (Output::Full(a), Output::Full(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| close(*a, *b))
        }
        (Output::Embedding(a), Output::Embedding(b)) | (Output::Attention(a), Output::Attention(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| close(*a, *b))
        }
        (a, b) => a == b,
    };
    assert!(is_same, "{about}: {found:?} for {expected:?}");
}

/// Prompts, decode rows and questions of every kind in one step, with page copies before it.
#[test]
fn mixed_steps_agree_with_the_cpu() {
    let Some(card) = card() else { return };
    let model = bundled("tiny");
    let vocab_size = model.config.vocab_size;
    let (mut device, mut host) = (load_on(&card, &model, Dtype::F32), cpu(&model));
    let mut random = Random(9);
    let prompts: Vec<Vec<Token>> =
        [40, 1, 17, 64, 100, 3].iter().map(|&n| tokens(&mut random, n, vocab_size)).collect();
    let mut mask = TokenMask::none(vocab_size);
    (0..vocab_size).filter(|_| random.below(3) == 0).for_each(|token| mask.set(token as Token, true));
    let sampler = |seed| Sampler { temperature: 1.0, top_p: Some(0.9), seed, ..Sampler::greedy() };
    let samplers = [
        sampler(1),
        Sampler { repetition_penalty: 1.3, frequency_penalty: 0.2, ..sampler(2) },
        Sampler { mask: Some(mask.into()), top_k: Some(40), top_p: None, ..sampler(3) },
        Sampler { bias: vec![(5, 3.0), (900, f32::NEG_INFINITY)], ..Sampler::greedy() },
    ];
    let wide: Vec<Token> = tokens(&mut random, 300, vocab_size);
    for round in 0..3 {
        let rows = || {
            let each = prompts.iter().enumerate().map(|(idx, prompt)| {
                // The beginning is there from the round before, or is computed now.
                let start =
                    if round == 0 { 0 } else { prompt.len() - 1 - (idx * round) % prompt.len().min(5) };
                let last = prompt.len() - 1;
                let mut outputs = vec![(last, OutputKind::Sample(&samplers[(idx + round) % 4]))];
                if idx % 2 == round % 2 {
                    outputs.extend([(last, OutputKind::Top { n: 7 }), (last, OutputKind::Scores(&wide))]);
                }
                if idx == 2 {
                    outputs.extend([(last, OutputKind::Full), (last, OutputKind::Embedding)]);
                }
                if idx == 3 {
                    // More than the kernel lists: the host answers.
                    outputs.push((last, OutputKind::Top { n: 2000 }));
                }
                if idx == 5 {
                    let last_layer = model.config.n_layers;
                    let layers = [0, 1, last_layer - 1, last_layer];
                    outputs.extend(layers.map(|n_layers| (last, OutputKind::Hidden { n_layers })));
                    let hidden = |position| (position, OutputKind::Hidden { n_layers: 2 });
                    outputs.extend((start..last).map(hidden));
                }
                if idx == 4 {
                    outputs.extend((start..last).map(|position| (position, OutputKind::Scores(&wide[..3]))));
                }
                row(idx as u32, prompt, start, idx * 20, outputs)
            });
            each.collect::<Vec<_>>()
        };
        // Copies of pages that hold something go where nothing is.
        let n_copies: u32 = if round == 0 { 0 } else { 6 };
        let copy = |i: u32| PageCopy { src: PageId(i * 20), dst: PageId(200 + i) };
        let copies: Vec<PageCopy> = (0..n_copies).map(copy).collect();
        let run = |backend: &mut dyn Backend| {
            backend.forward(&Batch { copies: &copies, rows: rows() }).expect("the backend runs")
        };
        let (found, expected) = (run(&mut device), run(&mut host));
        assert_eq!(found.len(), expected.len());
        for (idx, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert_same(found, expected, &format!("round {round}, output {idx}"));
        }
    }
    // What was copied is a beginning to go on from: page 0 of context 4, at 80, lies at 204.
    let run = |backend: &mut dyn Backend| {
        let mut row = row(9, &prompts[4][..20], 16, 204, vec![(19, OutputKind::Full)]);
        row.pages = &[PageId(204), PageId(300)];
        backend.forward(&Batch { copies: &[], rows: vec![row] }).expect("the backend runs")
    };
    assert_same(&run(&mut device)[0], &run(&mut host)[0], "behind a copied page");
}

/// Contexts that decode together: some end, some are cut back, some get another sampler, new ones come.
struct Decoding {
    contexts: Vec<(Vec<Token>, usize, Sampler)>, // tokens, computed, sampler
}

impl Decoding {
    fn new(random: &mut Random, n: usize, vocab_size: usize) -> Self {
        let context = |idx: usize| {
            let n_tokens = 1 + random.below(40);
            let penalty = if idx.is_multiple_of(3) { 1.2 } else { 1.0 };
            let temperature = if idx.is_multiple_of(2) { 0.8 } else { 0.0 };
            let sampler =
                Sampler { temperature, repetition_penalty: penalty, seed: idx as u64, ..Sampler::greedy() };
            (tokens(random, n_tokens, vocab_size), 0, sampler)
        };
        Self { contexts: (0..n).map(context).collect() }
    }

    /// Submits a step of these contexts; for those `under_way` the step before has not been collected.
    fn submit(&self, backend: &mut impl Backend, who: &[usize], under_way: &[usize]) {
        let rows = who.iter().map(|&idx| {
            let (tokens, n_computed, sampler) = &self.contexts[idx];
            let asked = |position| {
                vec![(position, OutputKind::Sample(sampler)), (position, OutputKind::Top { n: 5 })]
            };
            if under_way.contains(&idx) {
                let row = row(idx as u32, tokens, tokens.len(), idx * 10, asked(tokens.len()));
                Row { input: Input::Drawn(row.slot), ..row }
            } else {
                row(idx as u32, tokens, *n_computed, idx * 10, asked(tokens.len() - 1))
            }
        });
        let batch = Batch { copies: &[], rows: rows.collect() };
        backend.submit(&batch).expect("the backend runs");
    }

    fn collect(&mut self, backend: &mut impl Backend, who: &[usize]) -> Vec<(Token, f32)> {
        let outputs = backend.collect().expect("the backend runs").outputs;
        let mut drawn = Vec::new();
        for (&idx, outputs) in who.iter().zip(outputs.chunks_exact(2)) {
            let [Output::Sampled(candidate), Output::Top { candidates, .. }] = outputs else {
                panic!("{outputs:?}")
            };
            // What is looked at beside a draw is of the same row.
            let seen = candidates.iter().find(|seen| seen.token == candidate.token);
            assert!(seen.is_none_or(|seen| (seen.logprob - candidate.logprob).abs() <= 1e-3), "{outputs:?}");
            let (tokens, n_computed, _) = &mut self.contexts[idx];
            *n_computed = tokens.len();
            tokens.push(candidate.token);
            drawn.push((candidate.token, candidate.logprob));
        }
        drawn
    }

    /// What happens to contexts before a step; whether it needs tokens that the step before draws.
    fn edit(&mut self, step: usize, vocab_size: usize) {
        match step % 15 {
            // A sampler changes, a context is cut back, a token is replaced by another.
            5 => self.contexts[7].2.seed += 1,
            6 => {
                let (tokens, n_computed, _) = &mut self.contexts[8];
                let n_tokens = tokens.len().saturating_sub(3).max(1);
                tokens.truncate(n_tokens);
                *n_computed = (*n_computed).min(n_tokens - 1);
            }
            9 => {
                let last = self.contexts[9].0.last_mut().expect("a token");
                *last = (*last + 1) % vocab_size as Token;
            }
            _ => {}
        }
    }
}

/// Submitting a step before the one in front of it is collected changes nothing: the same script with and without, rows
/// that go on beside rows that come and go.
#[test]
fn submitting_ahead_changes_nothing() {
    let Some(card) = card() else { return };
    let model = bundled("tiny");
    let vocab_size = model.config.vocab_size;
    let mut seen: Vec<Vec<Vec<(Token, f32)>>> = Vec::new();
    for is_ahead in [false, true] {
        let mut backend = load_on(&card, &model, Dtype::F32);
        let mut random = Random(33);
        let mut decoding = Decoding::new(&mut random, 40, vocab_size);
        let mut drawn = Vec::new();
        let mut n_ahead = 0;
        let mut before: Option<Vec<usize>> = None;
        for step in 0..120 {
            let who: Vec<usize> = match step % 10 {
                // Some leave, some come; most steps have the same contexts as those before.
                3 => (0..12).collect(),
                4 => (6..24).collect(),
                7 => (0..40).filter(|_| random.below(2) == 0).collect(),
                8 => vec![5],
                _ => (2..20).collect(),
            };
            // What cuts a context back has to see what was drawn for it.
            if (!is_ahead || [6, 9].contains(&(step % 15)))
                && let Some(before) = before.take()
            {
                drawn.push(decoding.collect(&mut backend, &before));
            }
            decoding.edit(step, vocab_size);
            n_ahead += usize::from(before.is_some());
            decoding.submit(&mut backend, &who, before.as_deref().unwrap_or(&[]));
            if let Some(before) = before.replace(who) {
                drawn.push(decoding.collect(&mut backend, &before));
            }
        }
        drawn.push(decoding.collect(&mut backend, &before.expect("the last step")));
        assert_eq!(n_ahead > 90, is_ahead, "{n_ahead} steps ahead");
        seen.push(drawn);
    }
    assert_eq!(seen[0].len(), seen[1].len());
    for (step, (plain, ahead)) in seen[0].iter().zip(&seen[1]).enumerate() {
        assert_eq!(plain.len(), ahead.len());
        for (a, b) in plain.iter().zip(ahead) {
            // Other batch sizes take other kernels.
            assert!(a.0 == b.0 && (a.1 - b.1).abs() <= 1e-3, "step {step}: {a:?} {b:?}");
        }
    }
}

/// Prints milliseconds a step of decoding for the shapes of the peers' table.
#[test]
#[ignore = "measures"]
fn speed() {
    let Some(card) = card() else { return };
    let tokenizer = std::fs::read(root().join("daemon/models/tiny/tokenizer.json")).expect("a tokenizer");
    for name in ["llama-3.2-1b", "llama-3.1-8b"] {
        let config = shape(name).expect("a shape");
        let model = Model::with_random_weights(name, config, Dtype::Bf16, 1, &tokenizer).expect("a model");
        let mut options = CudaOptions {
            dtype: None,
            kv_bytes: 0,
            kv_bytes_max: 0,
            kv_host_bytes: 0,
            n_rows_max: 256,
            n_tokens_max: 2048,
        };
        let needs = CudaBackend::needs(&card, &model, &options).expect("its needs");
        let free_bytes = card.gpu().free_bytes().expect("the driver answers") as u64;
        let taken = needs.weight_bytes + needs.step_bytes + needs.activation_bytes + (4 << 30);
        options.kv_bytes = free_bytes - taken;
        let started = Instant::now();
        let mut backend = CudaBackend::load(&card, &model, &options, &|_, _| {}).expect("it loads");
        println!("{name}: loaded in {:.2} s, {} pages", started.elapsed().as_secs_f64(), backend.n_pages());
        let mut random = Random(4);
        for (n_rows, n_prompt) in [(1, 128), (8, 128), (16, 128), (32, 128), (64, 128), (256, 1280)] {
            if n_rows * (n_prompt / PAGE_LEN + 8) > backend.n_pages() {
                println!("{name}, {n_rows} rows of {n_prompt}: no room");
                continue;
            }
            // Pages with whatever is in them: the time does not depend on it.
            let greedy = Sampler::greedy();
            let mut contexts: Vec<Vec<Token>> =
                (0..n_rows).map(|_| tokens(&mut random, n_prompt, 128_000)).collect();
            for is_ahead in [true, false] {
                let submit =
                    |backend: &mut CudaBackend, contexts: &[Vec<Token>], input: fn(SlotId) -> Input| {
                        let rows = contexts.iter().enumerate().map(|(idx, tokens)| {
                            let input = input(SlotId(idx as u32));
                            let last = tokens.len() - usize::from(input == Input::Known);
                            let asked = vec![(last, OutputKind::Sample(&greedy))];
                            let row = row(idx as u32, tokens, last, idx * (n_prompt / PAGE_LEN + 12), asked);
                            Row { input, ..row }
                        });
                        let batch = Batch { copies: &[], rows: rows.collect() };
                        backend.submit(&batch).expect("it runs");
                    };
                let mut started = Instant::now();
                let (n_warm, n_timed) = (20, 60);
                let mut busy = backend.steps.busy();
                submit(&mut backend, &contexts, |_| Input::Known);
                for step in 0..n_warm + n_timed {
                    if step == n_warm {
                        started = Instant::now();
                        busy = backend.steps.busy();
                    }
                    if is_ahead {
                        submit(&mut backend, &contexts, Input::Drawn);
                    }
                    let outputs = backend.collect().expect("it runs").outputs;
                    for (tokens, output) in contexts.iter_mut().zip(outputs) {
                        let Output::Sampled(drawn) = output else { panic!("{output:?}") };
                        tokens.push(drawn.token);
                    }
                    if !is_ahead {
                        submit(&mut backend, &contexts, |_| Input::Known);
                    }
                }
                let seconds = started.elapsed().as_secs_f64();
                let busy = (backend.steps.busy() - busy).as_secs_f64();
                backend.collect().expect("the last one");
                let idle = (1.0 - busy / seconds) * 100.0;
                println!(
                    "{name}, {n_rows} rows of {n_prompt}, ahead {is_ahead}: {:.3} ms a step, device idle {idle:.2} %",
                    seconds * 1e3 / n_timed as f64,
                );
                if is_ahead {
                    assert!(idle < 3.0, "the host stands between two steps");
                }
            }
        }
        for n in [2048, 8192] {
            for run in 0..3 {
                let prompt = tokens(&mut random, n, 128_000);
                let started = Instant::now();
                let greedy = Sampler::greedy();
                for end in (2048..=n).step_by(2048) {
                    let asked =
                        if end == n { vec![(n - 1, OutputKind::Sample(&greedy))] } else { Vec::new() };
                    let row = row(0, &prompt[..end], end - 2048, 0, asked);
                    forward(&mut backend, vec![row]);
                }
                println!("{name}, prompt of {n}, run {run}: {:.2} ms", started.elapsed().as_secs_f64() * 1e3);
            }
        }
    }
}
