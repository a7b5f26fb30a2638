//! Rows that have their first pages in common, which are read once for many of them: cascade attention.
//!
//! Hypotheses of a beam search are such rows. What they share is worked on like a part of a prompt, whose queries are their
//! last tokens; what each has for itself like any decoded token. A launch of its own puts both together.
//!
//! Source: Hydragen (arXiv 2402.05099).

use super::attention::{Cuttings, Form, PAGE_LEN};
use super::shares::{ListSize, RowSpan, Tile};

/// Rows of all tiles together whose results have a place, the places of rows that a tile lacks included.
pub(super) const N_OWN_MAX: usize = 512;

/// Readings of a page that have to be spared: what two launches more in each layer cost.
const N_PAGES_SPARED_MIN: usize = 1024;

/// Rows of a token each.
#[derive(Clone, Copy, Debug)]
pub(super) struct Alike<'a> {
    pub(super) rows: &'a [RowSpan],
    /// Pages that they have in common.
    n_pages: usize,
}

impl<'a> Alike<'a> {
    /// The first of these rows that have so much in common that it is worth to be read once, if there is room for their
    /// tiles behind so many.
    pub(super) fn first_of(
        rows: &'a [RowSpan],
        window: Option<usize>,
        cuttings: &Cuttings,
        n_tiles_before: usize,
    ) -> Option<Self> {
        let (first, others) = rows.split_first()?;
        if window.is_some() || cuttings.tiles.is_none() || first.n_tokens != 1 {
            return None;
        }
        let cutting = cuttings.of(Form::Shared);
        let n_rows_max = (n_tiles_max(cuttings) - n_tiles_before) * cutting.tile_tokens;
        let (mut n_rows, mut n_pages) = (1, first.position / PAGE_LEN);
        // The kernels of what is shared see all cells of a page: a row with holes goes by itself.
        let may_share = |row: &&RowSpan| row.n_tokens == 1 && row.n_pages_alike > 0 && !row.has_holes;
        for row in others.iter().take_while(may_share) {
            if n_rows >= n_rows_max {
                break;
            }
            n_rows += 1;
            n_pages = n_pages.min(row.n_pages_alike).min(row.position / PAGE_LEN);
        }
        // Keys that only some of the queries see would take a mask.
        let n_pages = n_pages / cutting.quantum_pages * cutting.quantum_pages;
        let is_worth_it = (n_rows - 1) * n_pages >= N_PAGES_SPARED_MIN && n_rows <= n_rows_max;
        (is_worth_it && !first.has_holes).then_some(Self { rows: &rows[..n_rows], n_pages })
    }

    /// Adds what they share, in tiles, and what each has for itself, with the place of its result.
    pub(super) fn tiles(self, cuttings: &Cuttings, shared: &mut Vec<Tile>, own: &mut Vec<(Tile, u16)>) {
        let tile_tokens = cuttings.of(Form::Shared).tile_tokens;
        let page_end = self.n_pages as u32;
        for rows in self.rows.chunks(tile_tokens) {
            let first_place = shared.len() * tile_tokens;
            shared.push(Tile {
                token: rows[0].token as u32,
                n_tokens: rows.len() as u16,
                // So far no query is before a key.
                position: page_end * PAGE_LEN as u32 - 1,
                entries: rows[0].entries as u32,
                page_begin: 0,
                page_end,
            });
            for (place, row) in (first_place..).zip(rows) {
                let tile = Tile {
                    token: row.token as u32,
                    n_tokens: 1,
                    position: row.position as u32,
                    entries: row.entries as u32,
                    page_begin: page_end,
                    page_end: (row.position / PAGE_LEN + 1) as u32,
                };
                own.push((tile, place as u16));
            }
        }
    }
}

/// Tiles of what is shared that one step has at most.
fn n_tiles_max(cuttings: &Cuttings) -> usize {
    let cutting = cuttings.of(Form::Shared);
    (N_OWN_MAX / cutting.tile_tokens).min(cutting.n_spans_max())
}

/// The most that comes of what so many tokens share.
pub(super) fn shared_most(n_tokens: usize, cuttings: &Cuttings) -> ListSize {
    let n_tiles = n_tiles_max(cuttings).min(n_tokens);
    // Also tiles that were not cut are listed.
    ListSize { n_cuts: n_tiles, ..ListSize::most(n_tiles, cuttings.of(Form::Shared)) }
}

/// The most that comes of what so many tokens have for themselves.
pub(super) fn own_most(n_tokens: usize) -> ListSize {
    let n = N_OWN_MAX.min(n_tokens);
    ListSize { n_shares: n, n_workers: n, n_cuts: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::attention_plan::{AttentionPlan, PlanSize};
    use crate::ops::shares::Cutting;

    fn cuttings(n_workers: usize) -> Cuttings {
        let cutting = |tile_tokens| Cutting { tile_tokens, n_workers, quantum_pages: 8 };
        let tiles = Some([cutting(16), cutting(32)]);
        Cuttings { single: cutting(2), holed: cutting(2), tiles, n_single_tokens_max: 2, many: None }
    }

    /// Hypotheses after a prompt, then streams, then hypotheses of another search.
    fn rows() -> Vec<RowSpan> {
        let row = |idx: usize, position, n_pages_alike| RowSpan {
            token: idx,
            n_tokens: 1,
            position,
            entries: 1000 * idx,
            n_pages_alike,
            has_holes: false,
        };
        let first = (0..70).map(|idx| row(idx, 1000 + idx, if idx == 0 { 0 } else { 62 }));
        let streams = (70..75).map(|idx| row(idx, 900, 0));
        let second = (75..95).map(|idx| row(idx, 4000, if idx == 75 { 0 } else { 201 + idx % 3 }));
        first.chain(streams).chain(second).collect()
    }

    #[test]
    fn every_position_is_read_once_for_each_row() {
        for n_workers in [7, 33, 1000] {
            let cuttings = cuttings(n_workers);
            let rows = rows();
            let mut plan = AttentionPlan::new(&[None, Some(64)]);
            plan.plan(&rows, &cuttings);
            let mut n_pages = vec![0; rows.len()];
            for form in [Form::Single, Form::Shared, Form::Own] {
                for share in &plan.list(0, form).shares {
                    let tokens = share.token as usize..share.token as usize + usize::from(share.n_tokens);
                    tokens.for_each(|token| n_pages[token] += (share.page_end - share.page_begin) as usize);
                }
            }
            let expected: Vec<usize> = rows.iter().map(|row| row.position / PAGE_LEN + 1).collect();
            assert_eq!(n_pages, expected, "{n_workers} workers");
            let [shared, own] = [Form::Shared, Form::Own].map(|form| plan.list(0, form));
            assert_eq!(own.shares.len(), 90, "the streams are left as they were");
            assert!(shared.shares.iter().all(|share| share.n_shares != 1 && share.page_end % 8 == 0));
            assert!(
                shared.shares.iter().all(|share| share.page_end <= if share.token < 70 { 56 } else { 200 })
            );
            assert!(own.shares.iter().all(|share| share.n_shares == 0), "results are left");

            // Each tile's parts, and the places of its rows, are where the launch that puts them together looks.
            assert_eq!(shared.cuts.iter().map(|cut| cut.token).collect::<Vec<_>>(), [0, 32, 64, 75]);
            let mut is_used = vec![false; shared.n_partials];
            for (idx, cut) in shared.cuts.iter().enumerate() {
                let shares = shared.shares.iter().filter(|share| share.token == cut.token);
                assert_eq!(shares.clone().count(), cut.n_shares as usize);
                for share in shares {
                    let place = usize::from(share.partial + share.share_idx);
                    assert!((cut.partial..cut.partial + cut.n_shares).contains(&(place as u32)));
                    assert!(!std::mem::replace(&mut is_used[place], true), "a place for each");
                }
                for offset in 0..cut.n_tokens {
                    let own = own.shares.iter().find(|share| share.token == cut.token + offset);
                    assert_eq!(usize::from(own.expect("it is there").partial), 32 * idx + offset as usize);
                }
            }
            assert!(shared.n_partials <= cuttings.of(Form::Shared).n_partials_max());
            let (size, most) = (plan.size(), PlanSize::most(rows.len(), &cuttings));
            for (size, most) in size.0.iter().zip(most.0) {
                let is_within = size.n_shares <= most.n_shares && size.n_cuts <= most.n_cuts;
                assert!(is_within && size.n_workers <= most.n_workers, "{size:?} {most:?}");
            }
            for form in [Form::Shared, Form::Own] {
                assert_eq!(plan.list(1, form).n_workers, 0, "under a window all is as it was");
            }
        }
    }

    #[test]
    fn rows_that_have_little_in_common_are_read_one_by_one() {
        let (rows, cuttings) = (rows(), cuttings(33));
        let first_of =
            |rows: &[RowSpan]| Alike::first_of(rows, None, &cuttings, 0).map(|alike| alike.rows.len());
        assert_eq!((first_of(&rows), first_of(&rows[1..])), (Some(70), Some(69)));
        assert_eq!(first_of(&rows[..19]), None, "18 times 56 pages are not enough");
        assert_eq!(first_of(&rows[..20]), Some(20));
        assert_eq!(first_of(&rows[70..]), None, "a stream shares nothing");
        let with_holes_in = |idx: usize| {
            let mut rows = rows.clone();
            rows[idx].has_holes = true;
            first_of(&rows)
        };
        assert_eq!((with_holes_in(0), with_holes_in(30)), (None, Some(30)), "holes are not shared");
        assert!(Alike::first_of(&rows, None, &cuttings, n_tiles_max(&cuttings)).is_none(), "no room");
        let without_tiles = Cuttings { tiles: None, ..cuttings };
        assert!(Alike::first_of(&rows, None, &without_tiles, 0).is_none());
    }
}
