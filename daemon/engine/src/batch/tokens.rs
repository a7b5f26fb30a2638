//! Tokens as they are read: a view over pieces of memory that contexts with a common beginning share.

use std::ops::Range;
use std::sync::Arc;

use super::Token;
use crate::kv::{SegmentId, TokenStore};

/// The tokens of a context, or of its beginning. A view, as a slice is one; they lie in pieces.
#[derive(Clone, Copy)]
pub struct Tokens<'a> {
    backing: Backing<'a>,
    /// Those that lie there.
    n_there: usize,
    /// What comes after them.
    behind: &'a [Token],
}

/// Where they lie.
#[derive(Clone, Copy)]
enum Backing<'a> {
    /// In one piece.
    Slice(&'a [Token]),
    /// In the segments of an engine.
    Store { store: &'a TokenStore, segments: &'a [SegmentId] },
    /// In segments that contexts of a guest share, and a tail of the context's own.
    Shared { segments: &'a [Arc<[Token]>], tail: &'a [Token], n_segment_tokens: usize },
}

impl<'a> Tokens<'a> {
    pub(crate) fn stored(store: &'a TokenStore, segments: &'a [SegmentId], n_tokens: usize) -> Self {
        Self { backing: Backing::Store { store, segments }, n_there: n_tokens, behind: &[] }
    }

    /// Segments of so many tokens each, and what follows them.
    pub(crate) fn shared(segments: &'a [Arc<[Token]>], tail: &'a [Token], n_segment_tokens: usize) -> Self {
        let n_there = segments.len() * n_segment_tokens + tail.len();
        Self { backing: Backing::Shared { segments, tail, n_segment_tokens }, n_there, behind: &[] }
    }

    /// With others behind them.
    ///
    /// # Panics
    /// There are some already.
    #[must_use]
    pub fn followed_by(self, behind: &'a [Token]) -> Self {
        assert!(self.behind.is_empty(), "{} tokens behind others", self.behind.len());
        Self { behind, ..self }
    }

    /// How many there are.
    #[must_use]
    pub fn len(self) -> usize {
        self.n_there + self.behind.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// The token at a position.
    #[must_use]
    pub fn get(self, idx: usize) -> Option<Token> {
        (idx < self.len()).then(|| self.piece(idx)[0])
    }

    /// The first `n_tokens` of them.
    ///
    /// # Panics
    /// There are fewer.
    #[must_use]
    pub fn first(self, n_tokens: usize) -> Self {
        assert!(n_tokens <= self.len(), "{n_tokens} of {} tokens", self.len());
        let n_there = self.n_there.min(n_tokens);
        Self { n_there, behind: &self.behind[..n_tokens - n_there], ..self }
    }

    /// The tokens of a range, piece by piece; no piece is empty.
    ///
    /// # Panics
    /// The range goes past the last token.
    pub fn pieces(self, range: Range<usize>) -> impl Iterator<Item = &'a [Token]> + Clone {
        let is_within = range.start <= range.end && range.end <= self.len();
        assert!(is_within, "{range:?} of {} tokens", self.len());
        let Range { mut start, end } = range;
        std::iter::from_fn(move || {
            let n_left = end.checked_sub(start).filter(|&n| n > 0)?;
            let piece = self.piece(start);
            let piece = &piece[..piece.len().min(n_left)];
            start += piece.len();
            Some(piece)
        })
    }

    /// The tokens of a range, one by one.
    ///
    /// # Panics
    /// The range goes past the last token.
    pub fn iter_range(self, range: Range<usize>) -> impl Iterator<Item = Token> + Clone + use<'a> {
        self.pieces(range).flatten().copied()
    }

    /// All of them, one by one.
    pub fn iter(self) -> impl Iterator<Item = Token> + Clone + use<'a> {
        self.iter_range(0..self.len())
    }

    /// How many from the first on are the same as those of another view.
    #[must_use]
    pub fn n_common(self, other: Tokens<'_>) -> usize {
        let n_most = self.len().min(other.len());
        let mut n = 0;
        while n < n_most {
            let (own, others) = (self.piece(n), other.piece(n));
            let n_piece = own.len().min(others.len()).min(n_most - n);
            let (own, others) = (&own[..n_piece], &others[..n_piece]);
            // What contexts share lies at one place.
            if !std::ptr::eq(own, others) && own != others {
                return n + own.iter().zip(others).take_while(|(own, other)| own == other).count();
            }
            n += n_piece;
        }
        n_most
    }

    /// A copy of a range.
    ///
    /// # Panics
    /// The range goes past the last token.
    #[must_use]
    pub fn copy_of(self, range: Range<usize>) -> Vec<Token> {
        let mut copy = Vec::with_capacity(range.len());
        self.pieces(range).for_each(|piece| copy.extend_from_slice(piece));
        copy
    }

    /// A copy of all.
    #[must_use]
    pub fn to_vec(self) -> Vec<Token> {
        self.copy_of(0..self.len())
    }

    /// What lies in one piece from a position on.
    fn piece(self, start: usize) -> &'a [Token] {
        if start >= self.n_there {
            return &self.behind[start - self.n_there..];
        }
        let piece = self.piece_there(start);
        // What lies past them there is not what comes behind them.
        &piece[..piece.len().min(self.n_there - start)]
    }

    fn piece_there(self, start: usize) -> &'a [Token] {
        match self.backing {
            Backing::Slice(tokens) => &tokens[start..],
            Backing::Store { store, segments } => store.piece(segments, start),
            Backing::Shared { segments, tail, n_segment_tokens } => {
                let (idx, offset) = (start / n_segment_tokens, start % n_segment_tokens);
                match segments.get(idx) {
                    Some(segment) => &segment[offset..],
                    None => &tail[start - segments.len() * n_segment_tokens..],
                }
            }
        }
    }
}

impl<'a> From<&'a [Token]> for Tokens<'a> {
    fn from(tokens: &'a [Token]) -> Self {
        Self { backing: Backing::Slice(tokens), n_there: tokens.len(), behind: &[] }
    }
}

impl<'a> From<&'a Vec<Token>> for Tokens<'a> {
    fn from(tokens: &'a Vec<Token>) -> Self {
        tokens.as_slice().into()
    }
}

impl std::fmt::Debug for Tokens<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl PartialEq for Tokens<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len() && self.iter().eq(other.iter())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_over_pieces_is_the_range_of_the_whole() {
        let all: Vec<Token> = (0..23).collect();
        let segments: Vec<Arc<[Token]>> = all[..20].chunks(5).map(Arc::from).collect();
        let views = [
            Tokens::from(&all),
            Tokens::shared(&segments, &all[20..], 5),
            Tokens::shared(&segments, &[], 5).first(13).followed_by(&all[13..]),
        ];
        for n_same in 0..=all.len() {
            let mut other = all.clone();
            other[n_same..].iter_mut().for_each(|token| *token += 100);
            for view in views {
                assert_eq!(view.n_common(Tokens::from(&other)), n_same);
                assert_eq!(Tokens::from(&other).n_common(view), n_same);
                assert_eq!(view.n_common(view.first(n_same)), n_same);
            }
        }
        for view in views {
            assert_eq!(view.to_vec(), all);
            for start in 0..=all.len() {
                assert_eq!(view.get(start), all.get(start).copied());
                for end in start..=all.len() {
                    assert_eq!(view.copy_of(start..end), all[start..end]);
                    assert_eq!(view.first(end).copy_of(start..end), all[start..end]);
                    assert!(view.pieces(start..end).all(|piece| !piece.is_empty()));
                    assert!(view.iter_range(start..end).eq(all[start..end].iter().copied()));
                }
            }
        }
    }
}
