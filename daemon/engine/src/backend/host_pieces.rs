//! Which pages of host memory move so that others come free together.

use std::cmp::Reverse;

use crate::batch::HostPageId;

/// A piece of host memory that has memory, which goes back to the system as a whole.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostPiece {
    /// Pages in which something is.
    pub used: Vec<HostPageId>,
    /// Pages in which nothing is.
    pub free: Vec<HostPageId>,
    /// Bytes that go back with it.
    pub n_bytes: u64,
}

impl HostPiece {
    /// Moves by which pieces come free that have little in them, into those that have most, until that are so many bytes, of the
    /// last piece perhaps more; for [`Backend::gather_host_pages`](super::Backend::gather_host_pages). A piece in which nothing is
    /// has nothing to gain, and stays as it is.
    #[must_use]
    pub fn gather(mut pieces: Vec<Self>, at_most: u64) -> Vec<(HostPageId, HostPageId)> {
        pieces.retain(|piece| !piece.used.is_empty());
        pieces.sort_by_key(|piece| (Reverse(piece.used.len()), piece.used[0]));
        let mut n_room: usize = pieces.iter().map(|piece| piece.free.len()).sum();
        let (mut moves, mut n_bytes, mut to_idx) = (Vec::new(), 0, 0);
        while n_bytes < at_most
            && let Some(piece) = pieces.pop()
        {
            // All that are in front of the one that is being filled are full.
            n_room -= piece.free.len();
            if piece.used.len() > n_room {
                break;
            }
            for from in piece.used {
                let to = loop {
                    match pieces[to_idx].free.pop() {
                        Some(to) => break to,
                        None => to_idx += 1,
                    }
                };
                moves.push((from, to));
                n_room -= 1;
            }
            n_bytes += piece.n_bytes;
        }
        moves
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const N_PAGES: u32 = 4;

    /// One of four pages, with something in these.
    fn piece(number: u32, used: &[u32]) -> HostPiece {
        let pages = number * N_PAGES..(number + 1) * N_PAGES;
        let (used, free) = pages.map(HostPageId).partition(|page| used.contains(&(page.0 % N_PAGES)));
        HostPiece { used, free, n_bytes: 400 }
    }

    /// What pieces are left with something in them.
    fn left(pieces: &[HostPiece], at_most: u64) -> Vec<u32> {
        let mut used: BTreeSet<HostPageId> =
            pieces.iter().flat_map(|piece| piece.used.iter().copied()).collect();
        let mut free: BTreeSet<HostPageId> =
            pieces.iter().flat_map(|piece| piece.free.iter().copied()).collect();
        for (from, to) in HostPiece::gather(pieces.to_vec(), at_most) {
            assert!(used.remove(&from), "something is in {from:?}");
            assert!(free.remove(&to), "nothing is in {to:?}, and nothing moved there");
            used.insert(to);
        }
        let numbers: BTreeSet<u32> = used.iter().map(|page| page.0 / N_PAGES).collect();
        numbers.into_iter().collect()
    }

    #[test]
    fn what_is_in_few_pages_moves_to_where_most_are_in_use() {
        let pieces = [piece(0, &[1]), piece(1, &[0, 1, 2]), piece(2, &[0, 3]), piece(3, &[]), piece(5, &[2])];
        assert_eq!(HostPiece::gather(pieces.to_vec(), 0), []);
        assert_eq!(left(&pieces, 1), [0, 1, 2], "the last of those with least");
        assert_eq!(left(&pieces, 401), [1, 2], "and the next, nothing moving into one in which nothing is");
        assert_eq!(left(&pieces, u64::MAX), [1, 2], "seven pages take two");
    }

    #[test]
    fn nothing_moves_where_no_piece_would_come_free() {
        for pieces in [
            vec![],
            vec![piece(0, &[1])],
            vec![piece(0, &[1]), piece(1, &[])],
            vec![piece(0, &[0, 1, 2]), piece(1, &[0, 1])],
            vec![piece(0, &[0, 1, 2, 3]), piece(1, &[3])],
        ] {
            assert_eq!(HostPiece::gather(pieces, u64::MAX), []);
        }
    }

    #[test]
    fn any_pieces_end_up_in_as_few_as_hold_them() {
        let mut state = 1_u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as u32
        };
        for _ in 0..500 {
            let pieces: Vec<HostPiece> = (0..next() % 12)
                .map(|number| {
                    let bits = next() % 16;
                    piece(number, &(0..N_PAGES).filter(|page| bits >> page & 1 == 1).collect::<Vec<_>>())
                })
                .collect();
            let n_used: usize = pieces.iter().map(|piece| piece.used.len()).sum();
            assert_eq!(left(&pieces, u64::MAX).len(), n_used.div_ceil(N_PAGES as usize), "{pieces:?}");
        }
    }
}
