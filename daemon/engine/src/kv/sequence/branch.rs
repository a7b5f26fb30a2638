//! The branch of a tree of guesses that a sequence goes on with.

use super::super::PageTable;
use super::Sequence;
use crate::backend::PAGE_LEN;
use crate::batch::{Cell, CellMove, Token};

impl Sequence {
    /// Of the tokens past the first `n_base`, which are the nodes of a tree and were computed beside each other, keeps those of
    /// a branch, and lets go of the pages past them. Has them copied to where they follow the others: what is added to
    /// `moves` is done one after the other, before anything else with these pages.
    ///
    /// # Panics
    /// Tokens were evicted, or those before the tree are not computed.
    pub(crate) fn keep_branch(
        &mut self,
        n_base: usize,
        branch: &[usize], // nodes, each behind the one before it
        pages: &mut PageTable,
        moves: &mut Vec<CellMove>,
    ) {
        assert!(!self.is_holed() && self.n_computed == n_base, "{} tokens are computed", self.n_computed);
        let cell = |number: usize| {
            let page = pages.page(self.blocks[number / PAGE_LEN])?;
            Some(Cell { page, idx: number % PAGE_LEN })
        };
        let moved = branch
            .iter()
            .enumerate()
            .map(|(idx, node)| Some(CellMove { src: cell(n_base + node)?, dst: cell(n_base + idx)? }));
        // What has left the device meanwhile is computed again.
        let moved: Vec<CellMove> = moved.map_while(|it| it).collect();
        let view = self.view(pages);
        let kept = branch.iter().take(moved.len()).filter_map(|node| view.get(n_base + node));
        let kept: Vec<Token> = kept.collect();
        moves.extend(moved.into_iter().filter(|it| it.src != it.dst));
        self.tokens.truncate(n_base, &mut pages.tokens);
        self.note_rewound(n_base);
        self.tokens.extend(&kept, &mut pages.tokens);
        self.advance(n_base + kept.len(), pages);
        self.trim(pages);
    }
}
