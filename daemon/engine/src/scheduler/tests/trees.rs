//! Trees of guesses that are verified.

use std::sync::Arc;

use super::Random;
use super::hash_backend::{Chain, VOCAB, drawn, fails, hash};
use super::pull::{expected_seen, looking_sampler};
use super::verify::{House, text, tokens};
use crate::backend::PAGE_LEN;
use crate::batch::{Drawn, Token};
use crate::causes::Cause;
use crate::command::{Answer, Ask};
use crate::error::EngineError;
use crate::guess::{Guess, GuessNode, GuessTree, N_GUESS_MAX};
use crate::sampling::Sampler;
use crate::scheduler::Scheduler;

/// A tree of about so many nodes, of which some are right and some go on behind what is wrong.
pub(super) fn tree(random: &mut Random, prefix: Chain, seed: u64, n_nodes: usize) -> GuessTree {
    let mut nodes: Vec<GuessNode> = Vec::new();
    let mut chains: Vec<(Chain, usize)> = Vec::new();
    for _ in 0..n_nodes {
        let parent = random.below(nodes.len() + 1).checked_sub(1);
        let (before, depth) = parent.map_or((prefix, 0), |parent| chains[parent]);
        let token = match random.below(3) {
            0 => random.below(VOCAB as usize) as Token,
            _ => drawn(before.last, seed).token,
        };
        let parent = parent.map(|parent| parent as u32);
        let is_new = nodes.iter().all(|node| node.parent != parent || node.token != token);
        if depth < N_GUESS_MAX && is_new {
            nodes.push(GuessNode { token, parent });
            chains.push((before.extend(token), depth + 1));
        }
    }
    GuessTree::new(&nodes).expect("a tree")
}

/// The most nodes that a context with room for `n_free` tokens may have verified.
pub(super) fn n_nodes_max(scheduler: &Scheduler, n_free: usize) -> usize {
    scheduler.guess_limits().n_tree_nodes().min(n_free.saturating_sub(1))
}

/// A verification and its answer.
pub(super) fn question(prefix: impl Into<Chain>, seed: u64, tree: GuessTree) -> (Ask, Answer) {
    let mut before = prefix.into();
    // The first draw never fails; others may.
    let seed = if fails(before.last, seed) { seed & !7 } else { seed };
    let (mut all_drawn, mut node): (Vec<Drawn>, Option<usize>) = (Vec::new(), None);
    while !fails(before.last, seed) {
        let candidate = drawn(before.last, seed);
        all_drawn.push(Drawn { seen: expected_seen(before.last, seed), ..candidate.into() });
        before = before.extend(candidate.token);
        node = tree.child(node, candidate.token);
        if node.is_none() {
            break;
        }
    }
    let sampler = Arc::new(looking_sampler(seed));
    (Ask::Verify { sampler, guess: tree.into() }, Answer::Verified(all_drawn))
}

#[test]
fn a_tree_computes_each_node_once_and_its_branch_is_never_computed_again() {
    let mut random = Random::new(31);
    let (mut n_branches, mut n_moved) = (0, 0);
    for round in 0..60 {
        let mut house = House::with_rows(128, u64::MAX, 80);
        let id = house.create();
        let n_tokens = 1 + random.below(3 * PAGE_LEN);
        let mut context = text(&mut random, n_tokens);
        let seed = random.next() & !7;
        let prompt = house.ask(id, 0, &context, Ask::Prefill);
        house.answer(prompt).0.expect("it fits");
        let (mut n_synced, mut n_in_vain) = (context.len(), 0);
        for _ in 0..6 {
            let tree = tree(&mut random, hash(&context).into(), seed, 1 + round);
            let n_nodes = tree.n_nodes();
            let (ask, expected) = question(hash(&context), seed, tree);
            let reply = house.ask(id, n_synced, &context[n_synced..], ask);
            let (answer, n_tokens) = house.answer(reply);
            let answer = answer.expect("nothing is wrong");
            assert_eq!(answer, expected);
            // The token that was drawn last time, and the nodes.
            assert_eq!(n_tokens, 1 + n_nodes as u64, "computed for {n_nodes} nodes");
            let branch = tokens(&answer);
            n_in_vain += n_nodes - (branch.len() - 1);
            n_branches += branch.len() - 1;
            n_synced = context.len();
            context.extend(branch);
        }
        assert_eq!(house.account.causes()[Cause::TokensGuessedWrong], n_in_vain as u64);
        // Pages of what was not taken are given back.
        let reply = house.ask(id, n_synced, &context[n_synced..], Ask::Top { n: 1 });
        assert_eq!(house.answer(reply).1, 1, "what was taken over stays");
        assert_eq!(
            house.account.used(crate::account::Resource::Pages),
            context.len().div_ceil(PAGE_LEN) as u64
        );
        n_moved += house.backend.n_cells_moved;
    }
    assert!(n_branches > 500 && n_moved > 200, "{n_branches} nodes were right, {n_moved} moved");
}

#[test]
fn a_branch_whose_copy_fails_is_computed_again() {
    let mut random = Random::new(32);
    let mut house = House::with_rows(128, u64::MAX, 80);
    let (id, seed) = (house.create(), 16);
    let mut context = text(&mut random, 21);
    let right: Vec<Token> = (0..4)
        .scan(Chain::from(hash(&context)), |chain, _| {
            let token = drawn(chain.last, seed).token;
            *chain = chain.extend(token);
            Some(token)
        })
        .collect();
    // What is right stands behind something wrong.
    let mut nodes = vec![GuessNode { token: (right[0] + 1) % VOCAB as Token, parent: None }];
    let branch = right
        .iter()
        .enumerate()
        .map(|(idx, &token)| GuessNode { token, parent: (idx > 0).then_some(idx as u32) });
    nodes.extend(branch);
    let (ask, expected) = question(hash(&context), seed, GuessTree::new(&nodes).expect("a tree"));
    let reply = house.ask(id, 0, &context, ask);
    house.lose_next_cells = true;
    let answer = house.answer(reply).0.expect("it was drawn");
    assert_eq!(answer, expected);
    context.extend(tokens(&answer));
    let reply = house.ask(id, 21, &context[21..], Ask::Full);
    let (answer, n_tokens) = house.answer(reply);
    assert_eq!(answer.expect("it fits"), Answer::Full(vec![super::score(hash(&context), 7)]));
    // From the page on that was written to: 16 tokens are left.
    assert_eq!(n_tokens, context.len() as u64 - 16);
}

/// What leads up to a tree is found in the prefix cache while a step is planned: from then on it is as many rows as it has
/// places.
#[test]
fn trees_behind_cached_prompts_leave_steps_their_rows() {
    const N_ROWS: usize = 40;
    let mut house = House::with_rows(256, u64::MAX, N_ROWS);
    let mut random = Random::new(5);
    let prompt = text(&mut random, PAGE_LEN + 1);
    // So many steps of prompts that those that follow are not kept short for what decodes.
    for n in 0..10 {
        let other = text(&mut random, 2 * PAGE_LEN);
        let id = house.create();
        let reply = house.ask(id, 0, if n == 0 { &prompt } else { &other }, Ask::Full);
        assert!(house.answer(reply).0.is_ok());
    }
    let roots: Vec<GuessNode> = (0..30).map(|token| GuessNode { token, parent: None }).collect();
    let asked: Vec<_> = (0..4)
        .map(|seed| {
            let tree = GuessTree::new(&roots).expect("a tree");
            let (ask, expected) = question(hash(&prompt), 8 * seed, tree);
            let id = house.create();
            (house.ask(id, 0, &prompt, ask), expected)
        })
        .collect();
    for _ in 0..20 {
        let (plan, outputs) = house.submit();
        assert!(plan.n_batch_rows() <= N_ROWS, "{} rows", plan.n_batch_rows());
        if plan.has_rows() {
            house.scheduler.complete(plan, outputs, 1_000_000);
            house.move_cells();
        }
    }
    assert_eq!(house.scheduler.stats().n_tokens_cached, 4 * PAGE_LEN as u64);
    for (reply, expected) in asked {
        assert_eq!(house.try_answer(&reply).expect("an answer").expect("it was drawn"), expected);
    }
}

#[test]
fn a_tree_that_no_step_has_room_for_is_refused_with_both_numbers() {
    let node = |token| GuessNode { token, parent: None };
    // One row is for the token before the tree, and some of many are left to prompts.
    for (n_step_tokens, n_rows, n_most) in [(64, 8, 7), (128, 32, 29), (40, 100, 37), (1, 8, 0)] {
        let mut house = House::with_rows(n_step_tokens, u64::MAX, n_rows);
        let id = house.create();
        for n in [n_most, n_most + 1] {
            let nodes: Vec<GuessNode> = (0..n as Token).map(node).collect();
            let guess = GuessTree::new(&nodes).expect("a tree").into();
            let reply =
                house.ask(id, 0, &[3; 20], Ask::Verify { sampler: Arc::new(Sampler::greedy()), guess });
            match house.answer(reply).0 {
                Ok(Answer::Verified(drawn)) => assert!(n == n_most && !drawn.is_empty()),
                Err(EngineError::GuessTooLong { n_tokens, n_tokens_max }) => {
                    assert_eq!((n_tokens, n_tokens_max), (n_most + 1, n_most));
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

/// So many alternatives for one token.
fn roots(n: Token) -> GuessTree {
    let nodes: Vec<GuessNode> = (0..n).map(|token| GuessNode { token, parent: None }).collect();
    GuessTree::new(&nodes).expect("a tree")
}

#[test]
fn of_a_tree_whose_draws_look_far_back_as_much_is_verified_as_a_step_brings_tokens_for() {
    let penalizing =
        |last_n| Arc::new(Sampler { repetition_penalty: 1.5, penalty_last_n: last_n, ..Sampler::greedy() });
    let context = text(&mut Random::new(35), 100);
    let behind = |idx: u32| idx.checked_sub(1).filter(|_| idx < 11);
    let deep: Vec<GuessNode> = (0..12).map(|idx| GuessNode { token: idx, parent: behind(idx) }).collect();
    let deep = GuessTree::new(&deep).expect("a tree");
    for (sampler, tree, n_nodes) in [
        (Arc::new(Sampler::greedy()), roots(20), 20),
        // One page each, or two.
        (penalizing(Some(4)), roots(20), 20),
        // Seven pages each.
        (penalizing(None), roots(20), 5),
        // A branch of eleven tokens, whose draws need nothing, before five nodes.
        (penalizing(None), deep, 11),
    ] {
        let mut house = House::with_rows(128, u64::MAX, 80);
        house.scheduler.limits.asks.n_history_pages = 40;
        let id = house.create();
        let ask = Ask::Verify { sampler, guess: tree.into() };
        let reply = house.ask(id, 0, &context, ask);
        let (answer, n_tokens) = house.answer(reply);
        assert!(!tokens(&answer.expect("it was drawn")).is_empty());
        assert_eq!(n_tokens, context.len() as u64 + n_nodes);
    }
}

#[test]
fn trees_whose_draws_look_far_back_ride_one_after_the_other() {
    let mut random = Random::new(36);
    let mut house = House::with_rows(256, u64::MAX, 200);
    house.scheduler.limits.asks.n_history_pages = 80;
    let sampler = Arc::new(Sampler { repetition_penalty: 1.5, ..Sampler::greedy() });
    let contexts: Vec<_> = (0..3).map(|_| (house.create(), text(&mut random, 100))).collect();
    let mut n_trees_most = 0;
    // It is learnt step by step how many rows a step may have.
    for round in 0..40 {
        let mut replies: Vec<_> = contexts
            .iter()
            .map(|(id, context)| {
                let ask = Ask::Verify { sampler: sampler.clone(), guess: roots(5).into() };
                let n_there = if round == 0 { 0 } else { 99 };
                house.ask(*id, n_there, &context[n_there..], ask)
            })
            .collect();
        while !replies.is_empty() {
            let (plan, outputs) = house.submit();
            // Seven pages for each node.
            let n_trees = plan.rows.iter().filter(|row| row.n_outputs > 0).count();
            assert!(35 * n_trees <= 80, "{n_trees} trees");
            n_trees_most = n_trees_most.max(n_trees);
            house.scheduler.complete(plan, outputs, 1_000_000);
            house.move_cells();
            replies.retain(|reply| match house.try_answer(reply) {
                Some(answer) => answer.map(|_| false).expect("it was drawn"),
                None => true,
            });
        }
    }
    assert_eq!(n_trees_most, 2);
}

#[test]
fn where_attention_has_windows_a_tree_is_its_first_branch() {
    let mut random = Random::new(33);
    let mut house = House::with_rows(128, u64::MAX, 80);
    house.scheduler.limits.n_stretches_max = 0;
    let id = house.create();
    let context = text(&mut random, 21);
    let seed = 8;
    let first = drawn(hash(&context), seed).token;
    let second = drawn(Chain::from(hash(&context)).extend(first).last, seed).token;
    let other = (first + 1) % VOCAB as Token;
    let node = |token, parent| GuessNode { token, parent };
    for (nodes, n_drawn, n_computed) in [
        (vec![node(first, None), node(other, None), node(second, Some(0)), node(other, Some(1))], 3, 23),
        (vec![node(other, None), node(first, None), node(second, Some(1))], 1, 2),
    ] {
        let guess: Guess = GuessTree::new(&nodes).expect("a tree").into();
        let sampler = Arc::new(Sampler { seed, ..Sampler::greedy() });
        let reply = house.ask(id, 0, &context, Ask::Verify { sampler, guess });
        let (answer, n_tokens) = house.answer(reply);
        assert_eq!(tokens(&answer.expect("it fits")).len(), n_drawn);
        assert_eq!(n_tokens, n_computed);
    }
}
