//! Guesses change no draw, whatever draws: trees of alternatives against the same contexts token by token.

use std::path::PathBuf;
use std::sync::Arc;

use trellis_engine::account::{Account, ActorId, Budget, GuestId, Owner, SessionId};
use trellis_engine::backend::PAGE_LEN;
use trellis_engine::batch::{Drawn, Token};
use trellis_engine::constraint::{Begins, Constraint, ConstraintLimits, Grammar, Rule, Whitespace};
use trellis_engine::cpu::{CpuBackend, CpuOptions};
use trellis_engine::model::{Model, ModelSource, SpecialTokens};
use trellis_engine::sampling::program::{Definition, Program, PutOn, RowShape};
use trellis_engine::sampling::{Looks, Sampler, philox4x32};
use trellis_engine::{
    Answer, Ask, Context, EngineSettings, GuessNode, GuessTree, ModelHandle, N_GUESS_MAX, N_TREE_NODES_MAX,
    OneModel,
};
use trellis_programs::library::{self, Dry, KgwKey};
use trellis_programs::{Builder, Source, Token as Drawing};

const N_TOKENS: usize = 40;

fn engine(n_pages: usize, n_host_pages: usize) -> OneModel {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models/tiny");
    let model = Arc::new(Model::open("tiny", &ModelSource::Folder(folder)).expect("the bundled model opens"));
    let options = CpuOptions { n_pages, n_host_pages, n_threads: None, n_rows_max: 256, n_tokens_max: 512 };
    let backend = CpuBackend::new(&model, &options).expect("the bundled model loads");
    OneModel::start(model, Box::new(backend), EngineSettings::default())
}

fn owner(account: &Arc<Account>) -> Owner {
    Owner { actor: ActorId(1), session: SessionId(1), guest: GuestId(1), account: account.clone() }
}

fn random(a: usize, b: usize) -> usize {
    philox4x32([a as u32, b as u32, 0, 0], [31, 0])[0] as usize
}

/// How a context draws.
struct Draws {
    sampler: Arc<Sampler>,
    rule: Option<Arc<Rule>>,
}

fn all_draws(model: &ModelHandle, account: &Arc<Account>) -> Vec<Draws> {
    let shape =
        RowShape { vocab_size: model.limits().vocab_size, n_positions: model.limits().n_positions_max };
    let by = |seed: u64, build: &dyn Fn(&Builder) -> Drawing<'_>| {
        let program = Program::new(Definition::build(|b| build(b)), shape).expect("a program");
        let put_on = PutOn::new(Arc::new(program));
        Sampler { seed, program: Some(Box::new(put_on)), ..Sampler::greedy() }
    };
    let chain = |seed: u64| Sampler { seed, temperature: 0.9, ..Sampler::greedy() };
    let dry = Dry { window: 64, allowed_length: 2.0, multiplier: 0.8, base: 1.75, breakers: None };
    let key = KgwKey { key: 17, n_tokens: 2 };
    let samplers = [
        Sampler::greedy(),
        chain(1),
        Sampler { temperature: 1.5, top_k: Some(40), ..chain(2) },
        Sampler { top_p: Some(0.8), ..chain(3) },
        Sampler { min_p: Some(0.05), temperature: 1.2, ..chain(4) },
        Sampler { repetition_penalty: 1.3, ..chain(5) },
        Sampler { repetition_penalty: 1.2, penalty_last_n: Some(9), ..Sampler::greedy() },
        Sampler { frequency_penalty: 0.7, presence_penalty: 0.4, ..chain(7) },
        Sampler { bias: vec![(3, 2.0), (40, -5.0)], ..chain(8) },
        Sampler { looks: Looks { n_top: 3, hidden: vec![1] }, ..chain(9) },
        by(10, &|b| library::mirostat(b.logits(), 4.0, 4.0, 0.3)),
        by(11, &|b| library::mirostat(library::repetition(b.logits(), Some(32), 1.2), 3.0, 3.0, 0.5)),
        by(12, &|b| library::dry(b.logits(), dry).draw(Source::SEED)),
        by(13, &|b| library::no_repeat_ngram(b.logits(), 2).draw(Source::SEED)),
        by(14, &|b| library::typical(b.logits(), 0.9).draw(Source::SEED)),
        by(15, &|b| library::kgw(b.logits(), key, 0.5, 2.0).draw(Source::SEED)),
        by(16, &|b| library::gumbel_watermark(b.logits(), 99, 2)),
        by(17, &|b| library::frequency_presence(b.logits(), None, 0.5, 0.5).draw(Source::SEED)),
    ];
    let free = samplers.into_iter().map(|sampler| Draws { sampler: Arc::new(sampler), rule: None });
    let rule = |grammar: Grammar| {
        let constraint =
            Constraint::compile(&grammar, model, ConstraintLimits::default(), account).expect("a grammar");
        Some(Arc::new(Rule::new(Arc::new(constraint), Begins::FirstDraw)))
    };
    let schema =
        r#"{"type": "array", "items": {"type": "integer"}, "minItems": 30, "maxItems": 60}"#.to_owned();
    let list = Grammar::JsonSchema { schema, whitespace: Whitespace::Compact };
    let kept = [
        Draws { sampler: Arc::new(chain(18)), rule: rule(list.clone()) },
        Draws {
            sampler: Arc::new(by(19, &|b| library::mirostat(b.logits(), 4.0, 4.0, 0.3))),
            rule: rule(list),
        },
        Draws {
            sampler: Arc::new(Sampler { repetition_penalty: 1.3, ..chain(20) }),
            rule: rule(Grammar::Regex("([a-c]{1,3} )*[0-9]".to_owned())),
        },
    ];
    free.chain(kept).collect()
}

/// A vector that moves what is drawn, and leaves it a text.
fn noise(model: &ModelHandle, seed: usize) -> Vec<f32> {
    let number = |idx: usize| random(idx, 1_000 + seed) as f32 / u32::MAX as f32;
    (0..model.limits().hidden_size).map(|idx| 0.2 * (number(idx) - 0.5)).collect()
}

async fn context(
    model: &ModelHandle,
    account: &Arc<Account>,
    idx: usize,
    rule: Option<&Arc<Rule>>,
) -> Context {
    let mut context = Context::create(model, owner(account)).await.expect("a context");
    let text = "Once upon a time there was a little girl who liked to count: one, two, three. ";
    let text = text.repeat(1 + idx % 3);
    let text = &text[..text.len() - idx % 7];
    let tokens = model.model().tokenizer.encode(text, SpecialTokens::Parse).expect("the text encodes");
    context.append(&tokens).await.expect("it fits");
    context.keep_to(rule);
    if idx % 3 == 1 {
        // From the middle of the text on, or from what is drawn on.
        let from = if idx.is_multiple_of(2) { tokens.len() / 2 } else { tokens.len() };
        context.steer(vec![(0, noise(model, 1)), (3, noise(model, 2))], from).await.expect("the model can");
    }
    context
}

/// What comes token by token; less than was asked where there is nothing more to draw.
async fn step_by_step(context: &mut Context, sampler: &Arc<Sampler>) -> Vec<Drawn> {
    let mut all_drawn = Vec::new();
    while all_drawn.len() < N_TOKENS + N_GUESS_MAX {
        let pending = context.ask(Ask::Sample(sampler.clone())).await.expect("a question");
        let Ok(Answer::Sampled(drawn)) = pending.answer().await else { break };
        context.append_drawn(std::slice::from_ref(&drawn), sampler).await.expect("it fits");
        all_drawn.push(drawn);
    }
    all_drawn
}

/// A tree in which what comes stands among what does not; behind both there is more.
fn tree(comes: &[Token], vocab_size: usize, round: usize) -> GuessTree {
    let mut nodes: Vec<GuessNode> = Vec::new();
    let mut depths: Vec<usize> = Vec::new();
    for n in 0..1 + random(round, 0) % N_TREE_NODES_MAX {
        let parent = (random(round, 2 * n + 1) % (nodes.len() + 1)).checked_sub(1);
        // Mostly behind the newest, so that branches grow long.
        let parent =
            if !random(round, 5 * n).is_multiple_of(3) { nodes.len().checked_sub(1) } else { parent };
        let depth = parent.map_or(0, |parent| depths[parent]);
        let wrong = (random(round, 2 * n + 2) % vocab_size) as Token;
        let token = match random(round, 3 * n) % 3 {
            0 => wrong,
            _ => comes.get(depth).copied().unwrap_or(wrong),
        };
        let node = GuessNode { token, parent: parent.map(|parent| parent as u32) };
        if depth < N_GUESS_MAX && !nodes.contains(&node) {
            nodes.push(node);
            depths.push(depth + 1);
        }
    }
    GuessTree::new(&nodes).expect("a tree")
}

/// Token, its log-probability and what its program reported, to the bit; what it left, if its next draw goes on from there; and
/// what else the token could have been.
fn bits(drawn: &Drawn, sampler: &Sampler, seen: bool) -> String {
    let goes_on = sampler.program.as_ref().is_some_and(|put_on| put_on.program.carries_on());
    let left = drawn.left.as_ref().map(|left| (goes_on.then_some(left.next), left.reports));
    format!("{:?} {left:?} {:?}", drawn.candidate, drawn.seen.as_ref().filter(|_| seen))
}

async fn guesses_change_nothing(n_pages: usize, n_host_pages: usize) {
    let quiet = engine(1024, 0);
    let account = Account::new("guest", Budget::UNLIMITED, None);
    let (model, vocab_size) = (quiet.handle(), quiet.handle().limits().vocab_size);
    let draws = all_draws(model, &account);
    assert!(draws.len() > 20);
    let mut expected = Vec::new();
    for (idx, Draws { sampler, rule }) in draws.iter().enumerate() {
        let mut context = context(model, &account, idx, rule.as_ref()).await;
        expected.push(step_by_step(&mut context, sampler).await);
    }
    // All at once, on another device that has as many pages as it is told.
    let busy = engine(n_pages, n_host_pages);
    let model = busy.handle();
    let draws = all_draws(model, &account);
    let mut contexts = Vec::new();
    for (idx, Draws { rule, .. }) in draws.iter().enumerate() {
        contexts.push((context(model, &account, idx, rule.as_ref()).await, 0));
    }
    let (mut n_rounds, mut n_right, mut n_deep) = (0, 0, 0);
    while contexts
        .iter()
        .zip(&expected)
        .any(|((_, n_drawn), expected)| *n_drawn < expected.len().min(N_TOKENS))
    {
        n_rounds += 1;
        let mut pending = Vec::new();
        for (idx, (context, n_drawn)) in contexts.iter_mut().enumerate() {
            if *n_drawn >= expected[idx].len().min(N_TOKENS) {
                continue;
            }
            let comes: Vec<Token> =
                expected[idx][*n_drawn..].iter().map(|drawn| drawn.candidate.token).collect();
            let sampler = draws[idx].sampler.clone();
            // Some of them draw one token meanwhile, or verify a chain.
            let ask = match random(idx, n_rounds) % 8 {
                0 => Ask::Sample(sampler),
                1 => Ask::Verify {
                    sampler,
                    guess: trellis_engine::Guess::Chain(comes[..comes.len().min(3)].to_vec()),
                },
                _ => {
                    let guess = tree(&comes, vocab_size, 100 * idx + n_rounds).into();
                    Ask::Verify { sampler, guess }
                }
            };
            pending.push((idx, context.ask(ask).await.expect("a question")));
        }
        for (idx, pending) in pending {
            let drawn = match pending.answer().await.expect("nothing is wrong") {
                Answer::Sampled(drawn) => vec![drawn],
                Answer::Verified(drawn) => drawn,
                other => panic!("{other:?}"),
            };
            let (context, n_drawn) = &mut contexts[idx];
            for (found, expected) in drawn.iter().zip(&expected[idx][*n_drawn..]) {
                // A single draw looks at nothing beside it.
                let seen = expected.seen.is_some();
                let [found, expected] = [found, expected].map(|it| bits(it, &draws[idx].sampler, seen));
                assert_eq!(found, expected, "behind draw {n_drawn} of setting {idx}");
            }
            context.append_drawn(&drawn, &draws[idx].sampler).await.expect("it fits");
            *n_drawn += drawn.len();
            n_right += drawn.len() - 1;
            n_deep += usize::from(drawn.len() > 4);
        }
    }
    assert!(n_right > 200 && n_deep > 20, "{n_right} guesses were right, {n_deep} times several in a row");
    let stats = model.stats().await.expect("the engine works");
    assert_eq!(stats.n_swaps_out + stats.n_tokens_again > 0, n_pages < 1024, "{stats:?}");
}

fn block_on(future: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_multi_thread().build().expect("a runtime").block_on(future);
}

#[test]
fn trees_change_no_draw_of_any_sampler_program_or_constraint() {
    block_on(guesses_change_nothing(1024, 0));
}

#[test]
fn nor_where_pages_are_so_few_that_contexts_push_each_other_out() {
    block_on(guesses_change_nothing(48, 24));
}

/// So many alternatives in each of 15 places, and others where there is room for more nodes: what comes stands last in its place,
/// so that its nodes lie on all pages of the tree.
fn full_tree(comes: &[Token], vocab_size: usize) -> GuessTree {
    const N_BESIDE: usize = 3;
    let mut nodes: Vec<GuessNode> = Vec::new();
    let mut behind = None;
    let mut add = |token: Token, parent: Option<u32>| {
        nodes.push(GuessNode { token, parent });
        Some(nodes.len() as u32 - 1)
    };
    let beside = |token: Token, n: usize| (token + 1 + n as Token) % vocab_size as Token;
    for (depth, &token) in comes[..N_GUESS_MAX].iter().enumerate() {
        // Of 64 nodes 15 are the branch.
        let n_beside = if depth < 4 { N_BESIDE + 1 } else { N_BESIDE };
        for n in 0..n_beside {
            add(beside(token, n), behind);
        }
        behind = add(token, behind);
    }
    GuessTree::new(&nodes).expect("a tree")
}

/// Wherever it begins on a page, beside others, of contexts that are steered and such that are not.
#[test]
fn trees_of_64_nodes_over_five_pages_change_no_draw() {
    block_on(async {
        let engine = engine(1024, 0);
        let model = engine.handle();
        let vocab_size = model.limits().vocab_size;
        let account = Account::new("guest", Budget::UNLIMITED, None);
        let shape = RowShape { vocab_size, n_positions: model.limits().n_positions_max };
        let program = Definition::build(|b| library::mirostat(b.logits(), 4.0, 4.0, 0.3));
        let put_on = PutOn::new(Arc::new(Program::new(program, shape).expect("a program")));
        let samplers = [
            Sampler::greedy(),
            Sampler { seed: 3, temperature: 0.9, repetition_penalty: 1.3, ..Sampler::greedy() },
            Sampler { seed: 4, program: Some(Box::new(put_on)), ..Sampler::greedy() },
        ]
        .map(Arc::new);
        let mut contexts = Vec::new();
        for offset in 1..PAGE_LEN {
            let sampler = samplers[offset % 3].clone();
            let mut twins = Vec::new();
            for _ in 0..2 {
                let mut context = context(model, &account, offset, None).await;
                let n_tokens = context.tokens().len() / PAGE_LEN * PAGE_LEN - PAGE_LEN + offset;
                context.truncate(n_tokens).await.expect("it has as many");
                twins.push(context);
            }
            let (mut context, mut plain) = (twins.remove(0), twins.remove(0));
            let expected = step_by_step(&mut plain, &sampler).await;
            let comes: Vec<Token> = expected.iter().map(|drawn| drawn.candidate.token).collect();
            let tree = full_tree(&comes, vocab_size);
            assert_eq!(tree.n_nodes(), N_TREE_NODES_MAX);
            let n_first = context.tokens().len();
            assert_eq!((n_first + N_TREE_NODES_MAX).div_ceil(PAGE_LEN) - n_first / PAGE_LEN, 5);
            let ask = Ask::Verify { sampler: sampler.clone(), guess: tree.into() };
            let pending = context.ask(ask).await.expect("a question");
            contexts.push((context, sampler, expected, pending));
        }
        for (mut context, sampler, expected, pending) in contexts {
            let Answer::Verified(drawn) = pending.answer().await.expect("nothing is wrong") else {
                panic!("it verifies");
            };
            let all = |drawn: &[Drawn]| drawn.iter().map(|it| bits(it, &sampler, false)).collect::<Vec<_>>();
            assert_eq!(all(&drawn), all(&expected[..N_GUESS_MAX + 1]), "all of the branch is right");
            context.append_drawn(&drawn, &sampler).await.expect("it fits");
            // What was copied together is what would be there.
            let rest = step_by_step(&mut context, &sampler).await;
            let (rest, expected) = (all(&rest), all(&expected[drawn.len()..]));
            assert_eq!(rest[..expected.len()], expected);
        }
    });
}
