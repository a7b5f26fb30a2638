//! What a context may draw next, as somebody guessed it: one token after the other, or a tree of alternatives.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::batch::Token;
use crate::port::shared_list_of;
use crate::sampling::TokenMask;

/// The longest guess. With the token before it, it is a row that devices compute as they compute rows of one token. No node of
/// a tree is deeper.
pub const N_GUESS_MAX: usize = 15;

/// The most nodes of a tree.
pub const N_TREE_NODES_MAX: usize = 64;

/// What a context may draw next.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Guess {
    /// One token after the other.
    Chain(Vec<Token>),
    /// The same, with a mask for each place where a token is drawn, in the place of the sampler's: one more than there are
    /// tokens.
    Masked {
        /// The tokens.
        tokens: Vec<Token>,
        /// What may be drawn in their places, and after the last of them.
        #[serde(with = "shared_list_of")]
        masks: Vec<Arc<TokenMask>>,
    },
    /// Alternatives.
    Tree {
        /// The tokens, each with the one before it.
        tree: GuessTree,
        /// In the place of the sampler's mask: what may be drawn after the context, then after each node. None where the
        /// sampler's counts.
        #[serde(with = "shared_list_of")]
        masks: Vec<Arc<TokenMask>>,
    },
}

/// Words of these masks.
pub(crate) fn n_words(masks: &[Arc<TokenMask>]) -> usize {
    masks.iter().map(|mask| mask.words().len()).sum()
}

impl Guess {
    /// No guess.
    pub(crate) const NOTHING: Self = Self::Chain(Vec::new());

    /// The guessed tokens; of a tree those of its nodes, in their order.
    #[must_use]
    pub fn tokens(&self) -> &[Token] {
        match self {
            Self::Chain(tokens) | Self::Masked { tokens, .. } => tokens,
            Self::Tree { tree, .. } => tree.tokens(),
        }
    }

    /// Words of its masks.
    pub(crate) fn n_words(&self) -> usize {
        match self {
            Self::Chain(_) => 0,
            Self::Masked { masks, .. } | Self::Tree { masks, .. } => n_words(masks),
        }
    }

    /// As much of it as comes to `n_tokens` tokens, one after the other.
    ///
    /// # Panics
    /// It has masks.
    #[must_use]
    pub fn at_most(self, n_tokens: usize) -> Self {
        assert!(!self.has_masks(), "what a context keeps to, it works out itself");
        match self {
            Self::Tree { tree, .. } => tree.keep(|node| tree.depth(node) <= n_tokens).0.into(),
            chain => chain.first(n_tokens),
        }
    }

    /// The tree, if it is one.
    #[must_use]
    pub fn tree(&self) -> Option<&GuessTree> {
        if let Self::Tree { tree, .. } = self { Some(tree) } else { None }
    }

    /// Leaves out what there is no position for, where so many tokens may come before the last draw.
    pub(crate) fn cut(&mut self, n_tokens: usize) {
        assert!(!self.has_masks(), "what a context keeps to, it works out itself");
        match self {
            Self::Chain(tokens) | Self::Masked { tokens, .. } => tokens.truncate(n_tokens),
            // No node stands deeper than so many that stand before it.
            Self::Tree { tree, .. } => *tree = tree.within(n_tokens),
        }
    }

    /// What is left of a guess without masks of which each place has something: what has nothing goes, and what follows it. Of
    /// the places the first is behind the context, then comes one for each guessed token; those that are missing have nothing.
    ///
    /// # Panics
    /// The first place has nothing.
    pub(crate) fn keep_places<T>(self, mut places: Vec<Option<T>>) -> (Self, Vec<T>) {
        let mut take = |place: usize| places.get_mut(place).and_then(Option::take);
        let mut kept = vec![take(0).expect("a draw behind the context")];
        match self {
            Self::Chain(mut tokens) | Self::Masked { mut tokens, .. } => {
                kept.extend((1..=tokens.len()).map_while(take));
                tokens.truncate(kept.len() - 1);
                (Self::Chain(tokens), kept)
            }
            Self::Tree { tree, .. } => {
                let (tree, _) = tree.keep(|node| match take(node + 1) {
                    Some(it) => {
                        kept.push(it);
                        true
                    }
                    None => false,
                });
                (tree.into(), kept)
            }
        }
    }

    /// The same under these masks.
    pub(crate) fn under(self, masks: Vec<Arc<TokenMask>>) -> Self {
        match self {
            Self::Chain(tokens) | Self::Masked { tokens, .. } => Self::Masked { tokens, masks },
            Self::Tree { tree, .. } => Self::Tree { tree, masks },
        }
    }

    fn has_masks(&self) -> bool {
        match self {
            Self::Chain(_) => false,
            Self::Masked { .. } => true,
            Self::Tree { masks, .. } => !masks.is_empty(),
        }
    }

    /// The mask of the draw at a place: 0 is behind the context, then comes one for each guessed token.
    pub(crate) fn mask(&self, place: usize) -> Option<&Arc<TokenMask>> {
        match self {
            Self::Chain(_) => None,
            Self::Masked { masks, .. } => Some(&masks[place]),
            Self::Tree { masks, .. } => masks.get(place),
        }
    }

    /// What there is room for behind a context, for so many tokens.
    #[must_use]
    pub(crate) fn within(self, n_tokens: usize) -> Self {
        let Self::Tree { tree, mut masks } = self else { return self };
        // What a node follows stands before it.
        masks.truncate(n_tokens + 1);
        Self::Tree { tree: tree.within(n_tokens), masks }
    }

    /// Of a chain, the first `n_tokens` tokens.
    #[must_use]
    pub(crate) fn first(mut self, n_tokens: usize) -> Self {
        match &mut self {
            Self::Chain(tokens) => tokens.truncate(n_tokens),
            Self::Masked { tokens, masks } => {
                tokens.truncate(n_tokens);
                masks.truncate(n_tokens + 1);
            }
            Self::Tree { .. } => {}
        }
        self
    }

    /// A chain of a tree: where each node on the way has others beside it, the first one.
    #[must_use]
    pub(crate) fn into_chain(self) -> Self {
        let Self::Tree { tree, masks } = self else { return self };
        let branch = tree.first_branch();
        let tokens = branch.iter().map(|&node| tree.tokens[node]).collect();
        match masks.is_empty() {
            true => Self::Chain(tokens),
            false => {
                let places = std::iter::once(0).chain(branch.iter().map(|node| node + 1));
                Self::Masked { tokens, masks: places.map(|place| masks[place].clone()).collect() }
            }
        }
    }
}

impl From<GuessTree> for Guess {
    fn from(tree: GuessTree) -> Self {
        Self::Tree { tree, masks: Vec::new() }
    }
}

/// A token that may come after the one before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuessNode {
    /// The token.
    pub token: Token,
    /// The node before it, by its place in the list; none behind the context.
    pub parent: Option<u32>,
}

/// Tokens of which each follows the context or one that stands before it in the list; what follows the same token differs
/// (SpecInfer, arXiv 2305.09781, section 4; Medusa, arXiv 2401.10774, section 2.1.2).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<GuessNode>", into = "Vec<GuessNode>")]
pub struct GuessTree {
    tokens: Vec<Token>,          // [n_nodes]
    parents: Vec<Option<usize>>, // [n_nodes]
    /// The tokens from behind the context up to each node, it included, one node behind the other.
    paths: Vec<Token>,
    /// Where that of each node ends.
    path_ends: Vec<usize>, // [n_nodes]
}

/// Why a list of nodes is no tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum GuessTreeError {
    /// Too many nodes.
    #[error("a tree of {n_nodes} guesses: at most {n_nodes_max} can be verified at once")]
    TooLarge {
        /// Nodes.
        n_nodes: usize,
        /// The most there may be.
        n_nodes_max: usize,
    },
    /// A node too far behind the context.
    #[error("guess {node} is {depth} tokens behind the context: at most {depth_max}")]
    TooDeep {
        /// Which.
        node: usize,
        /// Tokens up to it, it included.
        depth: usize,
        /// The most there may be.
        depth_max: usize,
    },
    /// A node behind one that does not stand before it.
    #[error("guess {node} follows guess {parent}: it may follow one before it in the list")]
    NotBefore {
        /// Which.
        node: usize,
        /// The one that it is to follow.
        parent: u32,
    },
    /// Two nodes with the same token behind the same one.
    #[error("guesses {first} and {second} are token {token} in the same place")]
    Twice {
        /// The one.
        first: usize,
        /// The other.
        second: usize,
        /// The token of both.
        token: Token,
    },
}

impl GuessTree {
    /// The tree of these nodes.
    ///
    /// # Errors
    /// It has more than [`N_TREE_NODES_MAX`] nodes, or one deeper than [`N_GUESS_MAX`]; a node follows one that does not stand
    /// before it; two that follow the same one have the same token.
    pub fn new(nodes: &[GuessNode]) -> Result<Self, GuessTreeError> {
        let (n_nodes, n_nodes_max) = (nodes.len(), N_TREE_NODES_MAX);
        if n_nodes > n_nodes_max {
            return Err(GuessTreeError::TooLarge { n_nodes, n_nodes_max });
        }
        let mut tree = Self::default();
        for (node, &GuessNode { token, parent }) in nodes.iter().enumerate() {
            let before = parent.map(|parent| parent as usize);
            if let Some(parent) = parent.filter(|&parent| parent as usize >= node) {
                return Err(GuessTreeError::NotBefore { node, parent });
            }
            let depth = before.map_or(0, |before| tree.depth(before)) + 1;
            if depth > N_GUESS_MAX {
                return Err(GuessTreeError::TooDeep { node, depth, depth_max: N_GUESS_MAX });
            }
            if let Some(first) = tree.child(before, token) {
                return Err(GuessTreeError::Twice { first, second: node, token });
            }
            tree.push(token, before);
        }
        Ok(tree)
    }

    fn push(&mut self, token: Token, parent: Option<usize>) {
        let before = parent.map_or(0..0, |parent| self.path_range(parent));
        self.paths.extend_from_within(before);
        self.paths.push(token);
        self.path_ends.push(self.paths.len());
        self.tokens.push(token);
        self.parents.push(parent);
    }

    /// The tokens of the nodes.
    #[must_use]
    pub fn tokens(&self) -> &[Token] {
        &self.tokens
    }

    /// How many nodes there are.
    #[must_use]
    pub fn n_nodes(&self) -> usize {
        self.tokens.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// The node before a node; none behind the context.
    #[must_use]
    pub fn parent(&self, node: usize) -> Option<usize> {
        self.parents[node]
    }

    fn path_range(&self, node: usize) -> std::ops::Range<usize> {
        node.checked_sub(1).map_or(0, |before| self.path_ends[before])..self.path_ends[node]
    }

    /// The tokens from behind the context up to a node, it included.
    #[must_use]
    pub fn path(&self, node: usize) -> &[Token] {
        &self.paths[self.path_range(node)]
    }

    /// How many they are.
    #[must_use]
    pub fn depth(&self, node: usize) -> usize {
        self.path_range(node).len()
    }

    /// The depth of the deepest node; 0 without nodes.
    #[must_use]
    pub fn depth_most(&self) -> usize {
        (0..self.n_nodes()).map(|node| self.depth(node)).max().unwrap_or(0)
    }

    /// The node with this token behind a node, or behind the context.
    #[must_use]
    pub fn child(&self, parent: Option<usize>, token: Token) -> Option<usize> {
        let first = parent.map_or(0, |parent| parent + 1);
        (first..self.n_nodes()).find(|&node| self.parents[node] == parent && self.tokens[node] == token)
    }

    /// Whether no node has another beside it.
    #[must_use]
    pub fn is_chain(&self) -> bool {
        (0..self.n_nodes()).all(|node| self.parents[node] == node.checked_sub(1))
    }

    /// The first node behind the context, the first one behind that, and so on.
    pub(crate) fn first_branch(&self) -> Vec<usize> {
        let mut branch: Vec<usize> = Vec::new();
        for node in 0..self.n_nodes() {
            if self.parents[node] == branch.last().copied() {
                branch.push(node);
            }
        }
        branch
    }

    /// The nodes that are wanted, without those behind one that is not, of which it is not asked; and their places in this tree.
    pub(crate) fn keep(&self, mut is_wanted: impl FnMut(usize) -> bool) -> (Self, Vec<usize>) {
        let (mut kept, mut places) = (Self::default(), Vec::new());
        let mut place_of: Vec<Option<usize>> = Vec::with_capacity(self.n_nodes());
        for node in 0..self.n_nodes() {
            let parent = self.parents[node].map(|parent| place_of[parent]);
            let is_kept = parent != Some(None) && is_wanted(node);
            place_of.push(is_kept.then_some(kept.n_nodes()));
            if is_kept {
                kept.push(self.tokens[node], parent.flatten());
                places.push(node);
            }
        }
        (kept, places)
    }

    /// Its first `n_tokens` nodes.
    pub(crate) fn within(&self, n_tokens: usize) -> Self {
        match self.n_nodes() <= n_tokens {
            true => self.clone(),
            false => self.keep(|node| node < n_tokens).0,
        }
    }
}

impl TryFrom<Vec<GuessNode>> for GuessTree {
    type Error = GuessTreeError;

    fn try_from(nodes: Vec<GuessNode>) -> Result<Self, GuessTreeError> {
        Self::new(&nodes)
    }
}

impl From<GuessTree> for Vec<GuessNode> {
    fn from(tree: GuessTree) -> Self {
        let parents = tree.parents.iter().map(|parent| parent.map(|parent| parent as u32));
        tree.tokens.iter().zip(parents).map(|(&token, parent)| GuessNode { token, parent }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(list: &[(Token, Option<u32>)]) -> Vec<GuessNode> {
        list.iter().map(|&(token, parent)| GuessNode { token, parent }).collect()
    }

    #[test]
    fn what_is_no_tree_is_refused_with_the_numbers() {
        let refused = |list: &[(Token, Option<u32>)]| GuessTree::new(&nodes(list)).expect_err("no tree");
        assert_eq!(refused(&[(1, Some(0))]), GuessTreeError::NotBefore { node: 0, parent: 0 });
        assert_eq!(
            refused(&[(1, None), (2, Some(2)), (3, None)]),
            GuessTreeError::NotBefore { node: 1, parent: 2 }
        );
        assert_eq!(
            refused(&[(1, None), (2, Some(0)), (3, Some(0)), (2, Some(0))]),
            GuessTreeError::Twice { first: 1, second: 3, token: 2 }
        );
        assert_eq!(
            refused(&[(7, None), (8, None), (7, None)]),
            GuessTreeError::Twice { first: 0, second: 2, token: 7 }
        );
        let chain = |n: u32| (0..n).map(|idx| (1, idx.checked_sub(1))).collect::<Vec<_>>();
        assert!(GuessTree::new(&nodes(&chain(15))).is_ok_and(|tree| tree.is_chain()));
        assert_eq!(refused(&chain(16)), GuessTreeError::TooDeep { node: 15, depth: 16, depth_max: 15 });
        let wide = |n: u32| (0..n).map(|token| (token, None)).collect::<Vec<_>>();
        assert!(GuessTree::new(&nodes(&wide(64))).is_ok());
        assert_eq!(refused(&wide(65)), GuessTreeError::TooLarge { n_nodes: 65, n_nodes_max: 64 });
    }

    #[test]
    fn paths_lead_from_the_context_to_each_node() {
        let list = nodes(&[
            (1, None),
            (2, None),
            (3, Some(0)),
            (4, Some(0)),
            (3, Some(1)),
            (5, Some(3)),
            (6, Some(5)),
        ]);
        let tree = GuessTree::new(&list).expect("a tree");
        let paths: Vec<&[Token]> = (0..7).map(|node| tree.path(node)).collect();
        assert_eq!(paths, [&[1][..], &[2], &[1, 3], &[1, 4], &[2, 3], &[1, 4, 5], &[1, 4, 5, 6]]);
        assert_eq!(
            (tree.child(None, 2), tree.child(Some(0), 4), tree.child(Some(1), 4)),
            (Some(1), Some(3), None)
        );
        assert_eq!(tree.first_branch(), [0, 2]);
        assert_eq!(Guess::from(tree.clone()).into_chain(), Guess::Chain(vec![1, 3]));
        let (cut, kept) =
            Guess::from(tree.clone()).keep_places([Some(9), Some(0), None, Some(2), Some(3)].to_vec());
        assert_eq!((cut.tokens(), &kept[..]), (&[1, 3, 4][..], &[9, 0, 2, 3][..]));
        let (kept, places) = tree.keep(|node| node != 3);
        assert_eq!(places, [0, 1, 2, 4], "what followed it goes too");
        assert_eq!(kept.path(3), [2, 3]);
        assert_eq!(tree.within(4).n_nodes(), 4);
        assert_eq!(Vec::<GuessNode>::from(tree), list);
    }
}
