//! The tokens that draws look at apart from the pages of their contexts: behind the nodes of trees of guesses, and where tokens
//! were evicted.
//!
//! Elsewhere a device that keeps tokens beside pages finds them there. These it has to be brought, for each such row anew; a
//! step carries so much of them (`AskLimits::n_history_pages`), and what it does not carry the host would have to draw.

use std::ops::Range;

use super::ContextState;
use crate::backend::n_history_pages;
use crate::guess::GuessTree;
use crate::sampling::Sampler;

/// Pages of tokens that the draws of a row of these tokens look at, or those of the rows of a tree.
pub(super) fn n_history_pages_of(context: &ContextState, tokens: &Range<usize>, n_tokens: usize) -> usize {
    let Some(work) = &context.work else { return 0 };
    if let Some((tree, sampler)) = work.tree().zip(work.verifies_by()) {
        // What leads up to a tree draws nothing.
        let n_base = work.n_base(n_tokens);
        let has_nodes = tokens.end > n_base;
        return if has_nodes { of_nodes(tree, sampler, n_base).sum() } else { 0 };
    }
    if !context.kv.is_holed() {
        return 0;
    }
    // As the device counts: without what was evicted before the row.
    let n_evicted = tokens.start - context.kv.row_index(tokens.start);
    let of_request = |(sampler, position): (&Sampler, usize)| {
        let end = position + 1 - n_evicted;
        n_history_pages(sampler.n_history(end), end, tokens.end - n_evicted)
    };
    // The draws of a row are by one sampler: what the one looks at that looks back furthest is there for all.
    let requests = work.outputs(tokens.start, tokens.end, n_tokens);
    let draws = requests.iter().filter_map(|request| Some((request.kind.sampler()?, request.position)));
    draws.map(of_request).max().unwrap_or(0)
}

/// The first nodes of a tree behind so many tokens whose draws look at so many pages together.
pub(super) fn n_nodes_within(tree: &GuessTree, sampler: &Sampler, n_base: usize, n_pages: usize) -> usize {
    let sums = of_nodes(tree, sampler, n_base).scan(0, |sum, n| {
        *sum += n;
        Some(*sum)
    });
    sums.take_while(|&sum| sum <= n_pages).count()
}

/// The draw behind each node looks at the context and at what leads to the node.
fn of_nodes(tree: &GuessTree, sampler: &Sampler, n_base: usize) -> impl Iterator<Item = usize> {
    (0..tree.n_nodes()).map(move |node| {
        let end = n_base + tree.depth(node);
        n_history_pages(sampler.n_history(end), end, end)
    })
}
