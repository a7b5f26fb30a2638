//! Trees of guesses against the CPU: what their nodes see and draw, and what is left of a branch that was copied together; and
//! draws of programs against the same tokens one after the other.

use trellis_engine::backend::PAGE_LEN;
use trellis_engine::batch::{Cell, Evicted, OutputKind, OutputRequest, Row, Start, Stretch, Token, Tokens};
use trellis_engine::model::{Dtype, ModelConfig};
use trellis_engine::sampling::Sampler;
use trellis_engine::{GuessNode, GuessTree, N_GUESS_MAX, Steered, Steering};

use super::beside_cpu::compare;
use super::program_tests::{N_PROMPT, bits, decoded, draw, samplers};
use super::tests::{bundled, card, cpu, load_on, random_models, row, tokens};
use super::*;
use crate::testing::Random;

const WHOLE: &[Stretch] = &[Stretch { first_cell: 0, extra_rotation: 0 }];

/// Of each node a bit for each cell that it sees, in the pages from the one on in which the first lies.
fn seen(tree: &GuessTree, n_base: usize) -> Vec<Vec<u16>> {
    let n_pages = (n_base + tree.n_nodes()).div_ceil(PAGE_LEN) - n_base / PAGE_LEN;
    let first = n_base % PAGE_LEN;
    let of_node = |node: usize| {
        let mut bits = vec![0u16; n_pages];
        bits[0] = ((1u32 << first) - 1) as u16;
        for node in std::iter::successors(Some(node), |&node| tree.parent(node)) {
            bits[(first + node) / PAGE_LEN] |= 1 << ((first + node) % PAGE_LEN);
        }
        bits
    };
    (0..tree.n_nodes()).map(of_node).collect()
}

/// The rows of a tree behind a context, as the engine has them; `asked` of each place, of which 0 is behind the context.
fn rows<'a>(
    base: &'a [Token],
    tree: &'a GuessTree,
    seen: &'a [Vec<u16>],
    first_page: usize,
    asked: impl Fn(usize) -> Vec<OutputKind<'a>>,
) -> Vec<Row<'a>> {
    let n_base = base.len();
    let requests = |place: usize, position: usize| {
        asked(place).into_iter().map(|kind| (position, kind)).collect::<Vec<_>>()
    };
    let all = row(0, base, n_base - 1, first_page, requests(0, n_base - 1));
    let node = |node: usize| {
        let (position, cell) = (n_base + tree.depth(node) - 1, n_base + node);
        let outputs = requests(node + 1, position);
        let place = row(0, base, n_base - 1, first_page, Vec::new());
        Row {
            tokens: Tokens::from(base).followed_by(tree.path(node)),
            start: position,
            pages: pages(first_page, cell / PAGE_LEN + 1),
            n_same_pages: if node == 0 { place.pages.len() } else { (cell - 1) / PAGE_LEN + 1 },
            outputs: outputs.into_iter().map(|(position, kind)| OutputRequest { position, kind }).collect(),
            evicted: Some(Evicted {
                n_evicted: 0,
                rotation: position,
                cell,
                n_whole: Some(n_base / PAGE_LEN),
                live: &seen[node],
                open: cell,
                stretches: WHOLE,
                packs: &[],
            }),
            ..place
        }
    };
    std::iter::once(all).chain((0..tree.n_nodes()).map(node)).collect()
}

fn pages(first: usize, n: usize) -> &'static [PageId] {
    static PAGES: std::sync::LazyLock<Vec<PageId>> =
        std::sync::LazyLock::new(|| (0..4096).map(PageId).collect());
    &PAGES[first..first + n]
}

/// The same, of a context that is steered.
fn with_steering<'a>(steered: Option<Steered<'a>>, rows: Vec<Row<'a>>) -> Vec<Row<'a>> {
    let of_row = |row: &Row<'a>| steered.filter(|steered| steered.from < row.end());
    rows.into_iter().map(|row| Row { steered: of_row(&row), ..row }).collect()
}

fn random_tree(random: &mut Random, n_nodes: usize, vocab_size: usize) -> GuessTree {
    let mut nodes: Vec<GuessNode> = Vec::new();
    let mut depths: Vec<usize> = Vec::new();
    while nodes.len() < n_nodes {
        let parent = random.below(nodes.len() + 1).checked_sub(1);
        let depth = parent.map_or(0, |parent| depths[parent]);
        let token = random.below(vocab_size) as Token;
        let node = GuessNode { token, parent: parent.map(|parent| parent as u32) };
        if depth < N_GUESS_MAX && !nodes.contains(&node) {
            nodes.push(node);
            depths.push(depth + 1);
        }
    }
    GuessTree::new(&nodes).expect("a tree")
}

#[test]
fn nodes_see_their_paths_and_a_branch_stays_where_it_was_copied() {
    let Some(card) = card() else { return };
    let mut random = Random(19);
    let mut n_other_draws = 0;
    let models = random_models().into_iter().filter(|model| model.config.windows.iter().all(Option::is_none));
    for model in models.chain([bundled("tiny")]) {
        let vocab_size = model.config.vocab_size;
        let (mut device, mut host) = (load_on(&card, &model, Dtype::F32), cpu(&model));
        let plain = Sampler { temperature: 0.8, seed: 5, ..Sampler::greedy() };
        let penalized = Sampler { repetition_penalty: 1.3, frequency_penalty: 0.2, ..plain.clone() };
        let ModelConfig { hidden_size, n_layers, .. } = model.config;
        let vectors = [0, n_layers / 2].map(|after| {
            (after, random.normals(hidden_size).iter().map(|value| 0.3 * value).collect::<Vec<f32>>())
        });
        let added =
            Steering::new(vectors.to_vec(), n_layers, hidden_size).expect("it fits").expect("it is some");
        // The last two lie on five pages each.
        let sizes = [(1, 1), (17, 9), (32, 16), (31, 12), (23, 24), (15, 64), (25, 64)];
        for (round, (n_base, n_nodes)) in sizes.into_iter().enumerate() {
            let first_page = 10 * round;
            // Every second context is steered, from its middle on.
            let steered = round.is_multiple_of(2).then_some(Steered { steering: &added, from: n_base / 2 });
            let base = tokens(&mut random, n_base, vocab_size);
            let tree = random_tree(&mut random, n_nodes, vocab_size);
            let about = format!("{n_nodes} nodes behind {n_base} tokens of {}", model.name);
            if n_base > 1 {
                let rows =
                    with_steering(steered, vec![row(0, &base[..n_base - 1], 0, first_page, Vec::new())]);
                compare(&mut device, &mut host, Batch { copies: &[], rows }, &about);
            }
            let seen = seen(&tree, n_base);
            let asked = |place: usize| match place % 3 {
                0 => vec![OutputKind::Sample(&plain), OutputKind::Full],
                1 => vec![OutputKind::Sample(&penalized)],
                _ => vec![OutputKind::Sample(&penalized), OutputKind::Top { n: 5 }],
            };
            let rows = with_steering(steered, rows(&base, &tree, &seen, first_page, asked));
            n_other_draws += compare(&mut device, &mut host, Batch { copies: &[], rows }, &about);
            // The branch that leads to the last node.
            let mut branch: Vec<usize> =
                std::iter::successors(Some(n_nodes - 1), |&node| tree.parent(node)).collect();
            branch.reverse();
            let cell = |cell: usize| Cell {
                page: PageId((first_page + cell / PAGE_LEN) as u32),
                idx: cell % PAGE_LEN,
            };
            let moves: Vec<CellMove> = branch
                .iter()
                .enumerate()
                .map(|(idx, node)| CellMove { src: cell(n_base + node), dst: cell(n_base + idx) })
                .filter(|it| it.src != it.dst)
                .collect();
            device.move_cells(&moves).expect("they are copied");
            host.move_cells(&moves).expect("they are copied");
            let mut all = [&base, tree.path(n_nodes - 1)].concat();
            all.push(random.below(vocab_size) as Token);
            let last = all.len() - 1;
            let asked = || vec![(last, OutputKind::Full), (last, OutputKind::Sample(&penalized))];
            let rows = with_steering(steered, vec![row(0, &all, last, first_page, asked())]);
            n_other_draws += compare(&mut device, &mut host, Batch { copies: &[], rows }, &about);
        }
    }
    println!("{n_other_draws} draws fell on another token");
    assert!(n_other_draws <= 4, "{n_other_draws} draws fell on another token");
}

/// What comes one after the other stands in a tree behind something else, and is drawn there the same; by the host too.
#[test]
fn draws_of_programs_go_on_along_each_path() {
    let Some(card) = card() else { return };
    let model = &random_models()[0];
    let samplers = samplers(model);
    let mut random = Random(23);
    let prompts: Vec<Vec<Token>> =
        samplers.iter().map(|_| tokens(&mut random, N_PROMPT, model.config.vocab_size.min(40))).collect();
    let mut backend = load_on(&card, model, Dtype::F32);
    card.wait_for_programs();
    let one_by_one = decoded(&mut backend, &samplers, &prompts);
    for is_by_host in [false, true] {
        if is_by_host {
            backend.steps.leave_programs_to_host();
        }
        for (idx, (prompt, sampler)) in prompts.iter().zip(&samplers).enumerate() {
            let expected = bits(&one_by_one.iter().take(4).map(|step| step[idx].clone()).collect::<Vec<_>>());
            let right: Vec<Token> = expected.iter().map(|drawn| drawn.0).collect();
            // A wrong one first; the right ones each after something that stands beside it.
            let mut nodes = vec![GuessNode { token: right[0] ^ 1, parent: None }];
            let mut parent = None;
            for &token in &right[..3] {
                if nodes.len() > 1 {
                    nodes.push(GuessNode { token: token ^ 1, parent });
                }
                nodes.push(GuessNode { token, parent });
                parent = Some(nodes.len() as u32 - 1);
            }
            let tree = GuessTree::new(&nodes).expect("a tree");
            let seen = seen(&tree, N_PROMPT);
            let asked = |place: usize| {
                let before =
                    place.checked_sub(1).map(|node| tree.parent(node).map_or(0, |parent| parent + 1));
                let start = match before {
                    None => Start::At(sampler.start()),
                    Some(before) => Start::After { n_rows: place - before },
                };
                vec![draw(sampler, start)]
            };
            let rows = rows(prompt, &tree, &seen, 6 * idx, asked);
            let outputs = backend.forward(&Batch { copies: &[], rows }).expect("it runs");
            let mut places = vec![0];
            let mut node = None;
            for &token in &right[..3] {
                node = tree.child(node, token);
                places.push(node.expect("it is there") + 1);
            }
            let found = bits(&places.iter().map(|&place| outputs[place].clone()).collect::<Vec<_>>());
            for (found, expected) in found.iter().zip(&expected) {
                assert_eq!((found.0, found.3), (expected.0, expected.3), "sampler {idx}");
            }
        }
        assert_eq!(backend.steps.n_by_host() > 0, is_by_host);
    }
}
