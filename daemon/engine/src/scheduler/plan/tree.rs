//! Trees of guesses in a step.
//!
//! The nodes of a tree lie behind their context, one token after the other in the order of the list, and to the backend each is
//! a row of one token with holes before it: it sees the context, the nodes that lead to it, and itself. Its position is its
//! depth behind the context.

use crate::backend::PAGE_LEN;
use crate::batch::{Evicted, Input, OutputRequest, PageId, Requests, Row, SlotId, Stretch, Tokens};
use crate::guess::GuessTree;
use crate::steering::Steered;

/// Keys in front of a node were rotated by their positions, as its query is.
const STRETCHES: &[Stretch] = &[Stretch { first_cell: 0, extra_rotation: 0 }];

/// A tree of a planned step.
#[derive(Clone, Copy, Debug)]
pub(in crate::scheduler) struct PlannedTree {
    pub(super) n_nodes: usize,
    /// Tokens of the context before it.
    n_base: usize,
    /// First word of its nodes' bits.
    bits_start: usize,
}

impl PlannedTree {
    /// Pages whose cells every node sees.
    fn n_whole(self) -> usize {
        self.n_base / PAGE_LEN
    }

    /// Pages behind those that its nodes lie in.
    fn n_words(self) -> usize {
        (self.n_base + self.n_nodes).div_ceil(PAGE_LEN) - self.n_whole()
    }
}

/// Which cells the nodes of a step's trees see.
#[derive(Debug, Default)]
pub(in crate::scheduler) struct TreeCells {
    /// A bit for each cell, for each node over all pages that its tree lies in.
    bits: Vec<u16>,
    n_nodes: usize,
}

impl TreeCells {
    pub(super) fn clear(&mut self) {
        self.bits.clear();
        self.n_nodes = 0;
    }

    /// Nodes of all trees.
    pub(super) fn n_nodes(&self) -> usize {
        self.n_nodes
    }

    /// Takes in a tree behind a context that has `n_tokens` tokens with its nodes.
    pub(super) fn take(&mut self, tree: &GuessTree, n_tokens: usize) -> PlannedTree {
        let n_nodes = tree.n_nodes();
        let planned = PlannedTree { n_nodes, n_base: n_tokens - n_nodes, bits_start: self.bits.len() };
        let (n_words, first) = (planned.n_words(), planned.n_base % PAGE_LEN);
        for node in 0..n_nodes {
            let start = self.bits.len();
            match tree.parent(node) {
                Some(parent) => {
                    let of_parent = planned.bits_start + parent * n_words;
                    self.bits.extend_from_within(of_parent..of_parent + n_words);
                }
                None => {
                    self.bits.resize(start + n_words, 0);
                    self.bits[start] = ((1u32 << first) - 1) as u16;
                }
            }
            let cell = first + node;
            self.bits[start + cell / PAGE_LEN] |= 1 << (cell % PAGE_LEN);
        }
        self.n_nodes += n_nodes;
        planned
    }

    fn of_node(&self, planned: PlannedTree, node: usize) -> &[u16] {
        &self.bits[planned.bits_start + node * planned.n_words()..][..planned.n_words()]
    }
}

/// What the rows of a tree have in common.
pub(super) struct TreeRows<'a> {
    pub(super) slot: SlotId,
    pub(super) steered: Option<Steered<'a>>,
    /// Those of the context and of all nodes.
    pub(super) pages: &'a [PageId],
    pub(super) n_same_pages: usize,
    /// The tokens of the context.
    pub(super) behind: Tokens<'a>,
    pub(super) tree: &'a GuessTree,
    pub(super) planned: PlannedTree,
}

impl<'a> TreeRows<'a> {
    /// The row of the context's last token, then one for each node; each asks for as much of `outputs`, which are in their
    /// order.
    pub(super) fn put(self, cells: &'a TreeCells, outputs: Requests<'a>, rows: &mut Vec<Row<'a>>) {
        let Self { slot, steered, pages, n_same_pages, behind, tree, planned } = self;
        let n_base = planned.n_base;
        let n_asked = outputs.len() / (1 + planned.n_nodes);
        let mut outputs = outputs.into_iter();
        let mut asked = |position| {
            let requests = outputs.by_ref().take(n_asked);
            requests.map(|request| OutputRequest { position, ..request }).collect()
        };
        let first_pages = &pages[..n_base.div_ceil(PAGE_LEN)];
        rows.push(Row {
            slot,
            tokens: behind,
            input: Input::Known,
            start: n_base - 1,
            pages: first_pages,
            n_same_pages: n_same_pages.min(first_pages.len()),
            n_pages_alike: 0,
            outputs: asked(n_base - 1),
            evicted: None,
            steered,
        });
        let mut n_told = first_pages.len();
        for node in 0..planned.n_nodes {
            let (position, cell) = (n_base + tree.depth(node) - 1, n_base + node);
            let pages = &pages[..cell / PAGE_LEN + 1];
            let n_same_pages = std::mem::replace(&mut n_told, pages.len());
            rows.push(Row {
                slot,
                tokens: behind.followed_by(tree.path(node)),
                input: Input::Known,
                start: position,
                pages,
                n_same_pages,
                n_pages_alike: 0,
                outputs: asked(position),
                evicted: Some(Evicted {
                    n_evicted: 0,
                    rotation: position,
                    cell,
                    n_whole: Some(planned.n_whole()),
                    live: cells.of_node(planned, node),
                    open: cell,
                    stretches: STRETCHES,
                    packs: &[],
                }),
                steered,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guess::GuessNode;

    #[test]
    fn a_node_sees_the_context_and_its_own_path() {
        let node = |token, parent| GuessNode { token, parent };
        // 0 and 1 behind the context, 2 behind 0, 3 behind 1, 4 behind 2, and so on.
        let nodes: Vec<GuessNode> = (0..20u32).map(|idx| node(idx, idx.checked_sub(2))).collect();
        let tree = GuessTree::new(&nodes).expect("a tree");
        let mut cells = TreeCells::default();
        for n_base in [1, 15, 16, 17, 37] {
            let planned = cells.take(&tree, n_base + 20);
            for node in 0..20 {
                let evicted = Evicted {
                    n_evicted: 0,
                    rotation: 0,
                    cell: n_base + node,
                    n_whole: Some(planned.n_whole()),
                    live: cells.of_node(planned, node),
                    open: n_base + node,
                    stretches: STRETCHES,
                    packs: &[],
                };
                let seen = (0..n_base + 20).filter(|cell| {
                    evicted.seen_in(cell / PAGE_LEN, n_base + node) >> (cell % PAGE_LEN) & 1 == 1
                });
                let path = (node % 2..=node).step_by(2).map(|node| n_base + node);
                assert!(seen.eq((0..n_base).chain(path)), "node {node} behind {n_base} tokens");
            }
        }
        assert_eq!(cells.n_nodes(), 100);
    }
}
