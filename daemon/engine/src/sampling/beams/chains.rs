//! The tokens of hypotheses that begin alike, each held once.

use serde::{Deserialize, Serialize};

use crate::batch::Token;

/// The tokens of one hypothesis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Chain {
    last: Option<u32>,
    pub(super) n_tokens: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Link {
    before: Option<u32>,
    token: Token,
}

impl Chain {
    /// Whether it is one of those whose links end so many tokens each.
    pub(super) fn is_among(self, depths: &[usize]) -> bool {
        match self.last {
            None => self.n_tokens == 0,
            Some(last) => depths.get(last as usize) == Some(&self.n_tokens),
        }
    }
}

/// Bytes of one token of a chain.
pub(super) const LINK_BYTES: usize = size_of::<Link>();

/// A tree of tokens, in which a link comes after the one before it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Chains {
    links: Vec<Link>,
}

impl Chains {
    pub(super) fn len(&self) -> usize {
        self.links.len()
    }

    /// How many tokens end with each link, if all are of the vocabulary and come after links that stand before them.
    pub(super) fn depths(&self, vocab_size: usize) -> Option<Vec<usize>> {
        let mut depths: Vec<usize> = Vec::with_capacity(self.links.len());
        for &Link { before, token } in &self.links {
            let n_before = match before {
                None => 0,
                Some(before) => *depths.get(before as usize)?,
            };
            if token as usize >= vocab_size {
                return None;
            }
            depths.push(n_before + 1);
        }
        Some(depths)
    }

    /// A chain with one more token.
    pub(super) fn push(&mut self, chain: Chain, token: Token) -> Chain {
        let last = u32::try_from(self.links.len()).expect("a search holds less than 2^32 tokens");
        self.links.push(Link { before: chain.last, token });
        Chain { last: Some(last), n_tokens: chain.n_tokens + 1 }
    }

    /// The last token of a chain.
    pub(super) fn last(&self, chain: Chain) -> Option<Token> {
        chain.last.map(|idx| self.links[idx as usize].token)
    }

    /// The tokens of a chain.
    pub(super) fn tokens(&self, chain: Chain) -> Vec<Token> {
        let mut tokens = Vec::with_capacity(chain.n_tokens);
        let mut at = chain.last;
        while let Some(idx) = at {
            let Link { before, token } = self.links[idx as usize];
            tokens.push(token);
            at = before;
        }
        tokens.reverse();
        tokens
    }

    /// What two chains that come from one have in common.
    pub(super) fn common(&self, mut one: Chain, mut other: Chain) -> Chain {
        while one.last != other.last {
            let longer = if one.n_tokens >= other.n_tokens { &mut one } else { &mut other };
            let last = longer.last.expect("chains that differ have a token");
            *longer = Chain { last: self.links[last as usize].before, n_tokens: longer.n_tokens - 1 };
        }
        one
    }

    /// Forgets all tokens but those of these chains.
    pub(super) fn keep<'a>(&mut self, chains: impl Iterator<Item = &'a mut Chain>) {
        let chains: Vec<&mut Chain> = chains.collect();
        let mut is_kept = vec![false; self.links.len()];
        for chain in &chains {
            let mut at = chain.last;
            while let Some(idx) = at.filter(|&idx| !is_kept[idx as usize]) {
                is_kept[idx as usize] = true;
                at = self.links[idx as usize].before;
            }
        }
        let mut places: Vec<u32> = Vec::with_capacity(self.links.len());
        let mut n_kept = 0;
        for &is_kept in &is_kept {
            places.push(n_kept);
            n_kept += u32::from(is_kept);
        }
        let place = |at: Option<u32>| at.map(|idx| places[idx as usize]);
        let mut idx = 0;
        self.links.retain_mut(|link| {
            link.before = place(link.before);
            idx += 1;
            is_kept[idx - 1]
        });
        for chain in chains {
            chain.last = place(chain.last);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(chains: &mut Chains, before: Chain, tokens: &[Token]) -> Chain {
        tokens.iter().fold(before, |chain, &token| chains.push(chain, token))
    }

    #[test]
    fn chains_share_what_they_begin_with_and_lose_what_nobody_keeps() {
        let mut chains = Chains::default();
        let stem = chain(&mut chains, Chain::default(), &[1, 2, 3]);
        let mut left = chain(&mut chains, stem, &[4, 5]);
        let dropped = chain(&mut chains, stem, &[6, 7, 8]);
        let mut right = chain(&mut chains, stem, &[9]);
        assert_eq!(chains.tokens(chains.common(left, dropped)), [1, 2, 3]);
        assert_eq!(chains.common(left, Chain::default()), Chain::default());
        assert_eq!(chains.common(right, right), right);
        chains.keep([&mut left, &mut right].into_iter());
        assert_eq!(chains.len(), 6);
        assert_eq!(chains.tokens(left), [1, 2, 3, 4, 5]);
        assert_eq!(chains.tokens(right), [1, 2, 3, 9]);
        assert_eq!(chains.tokens(chains.common(left, right)), [1, 2, 3]);
    }
}
