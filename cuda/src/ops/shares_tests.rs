//! Random worlds against what must hold of every plan.

use super::*;
use crate::testing::Random;

const PAGE_LEN: usize = 16;

fn tile(idx: usize, page_begin: usize, page_end: usize) -> Tile {
    Tile {
        token: idx as u32,
        n_tokens: 1,
        position: (page_end * PAGE_LEN) as u32 - 1,
        entries: 10_000 * idx as u32,
        page_begin: page_begin as u32,
        page_end: page_end as u32,
    }
}

fn whole(lengths: &[usize]) -> Vec<Tile> {
    lengths.iter().enumerate().map(|(idx, &n_pages)| tile(idx, 0, n_pages)).collect()
}

const CUTTING: Cutting = Cutting { tile_tokens: 1, n_workers: 33, quantum_pages: 8 };

fn plan(tiles: &[Tile], cutting: Cutting) -> ShareList {
    let mut list = ShareList::default();
    list.plan(tiles, cutting);
    check(tiles, cutting, &list);
    list
}

/// The shares of each worker, as a block walks through them.
fn of_workers(list: &ShareList) -> Vec<Vec<Share>> {
    let walk = |worker: usize| {
        let mut shares = vec![list.shares[worker]];
        while let Some(&Share { next, .. }) = shares.last().filter(|share| share.next != 0) {
            shares.push(list.shares[next as usize]);
        }
        shares
    };
    (0..list.n_workers).map(walk).collect()
}

fn cost(shares: &[Share]) -> usize {
    shares.iter().map(|share| (share.page_end - share.page_begin) as usize + SHARE_PAGES).sum()
}

/// Every page of every tile once, the parts of a tile numbered in order, partial results in places of their own, and
/// no more than the list says there are at most.
fn check(tiles: &[Tile], cutting: Cutting, list: &ShareList) {
    let workers = of_workers(list);
    let mut all: Vec<Share> = workers.iter().flatten().copied().collect();
    assert_eq!(all.len(), list.shares.len(), "every share is some worker's");
    assert!(workers.iter().all(|shares| !shares.is_empty()));
    all.sort_by_key(|share| (share.token, share.page_begin));
    let mut all = all.into_iter().peekable();
    let mut places = vec![false; list.n_partials];
    let mut cuts = list.cuts.iter();
    for tile in tiles {
        let mut at = tile.page_begin;
        let mut n_shares = 0;
        let first = *all.peek().expect("a share for the tile");
        while at < tile.page_end {
            let share = all.next().expect("shares up to the last page");
            assert_eq!((share.token, share.page_begin), (tile.token, at), "page by page");
            assert_eq!((share.position, share.n_tokens), (tile.position, tile.n_tokens));
            assert_eq!((share.entries, share.share_idx), (tile.entries, n_shares));
            assert_eq!((share.n_shares, share.partial), (first.n_shares, first.partial));
            assert!(share.page_end > at, "a share has pages");
            if share.page_end < tile.page_end {
                assert!((share.page_end as usize).is_multiple_of(cutting.quantum_pages), "{share:?}");
            }
            if share.n_shares > 1 {
                let place = &mut places[usize::from(share.partial + share.share_idx)];
                assert!(!std::mem::replace(place, true), "a place of its own");
            }
            at = share.page_end;
            n_shares += 1;
        }
        assert_eq!((at, n_shares), (tile.page_end, first.n_shares));
        if n_shares > 1 {
            let cut = cuts.next().expect("it is among those that were cut");
            assert_eq!((cut.token, cut.n_tokens), (tile.token, u32::from(tile.n_tokens)));
            assert_eq!((cut.partial, cut.n_shares), (u32::from(first.partial), u32::from(n_shares)));
        }
    }
    assert!(cuts.next().is_none() && all.next().is_none());
    assert!(places.iter().all(|&is_taken| is_taken));
    let most = ListSize::most(tiles.len(), cutting);
    let size = list.size();
    assert!(size.n_shares <= most.n_shares && size.n_workers <= most.n_workers, "{size:?} of {most:?}");
    assert!(size.n_workers <= size.n_shares, "a worker reads its first share where the list has one");
    assert!(size.n_cuts <= most.n_cuts && list.n_partials <= cutting.n_partials_max(), "{size:?}");
}

#[test]
fn every_page_is_dealt_once_and_workers_end_together() {
    let mut random = Random(11);
    let mut worst = 0.0f64;
    for world in 0..4000 {
        let cutting = Cutting {
            tile_tokens: 1,
            n_workers: 1 + random.below([4, 40, 200][world % 3]),
            quantum_pages: 1 + random.below(20),
        };
        let n_tiles = 1 + random.below([3, 40, 300][world / 3 % 3]);
        let tiles: Vec<Tile> = (0..n_tiles)
            .map(|idx| {
                let longest = [1, 20, 300, 8000][random.below(4)];
                let begin = if world % 2 == 0 { 0 } else { random.below(50) };
                tile(idx, begin, begin + 1 + random.below(longest))
            })
            .collect();
        let list = plan(&tiles, cutting);
        let n_spans = cutting.n_workers.min(N_SHARES_MAX);
        let costs: Vec<usize> = of_workers(&list).iter().map(|shares| cost(shares)).collect();
        let total: usize = costs.iter().sum();
        let longest = costs.iter().copied().max().expect("a worker");
        if costs.len() <= n_spans {
            // Equal parts, but for what is not worth a share at either end, and a share more.
            let part = total.div_ceil(n_spans);
            let most = part + 2 * cutting.quantum_pages.max(part / SPAN_PARTS) + 3 * SHARE_PAGES;
            assert!(longest <= most, "world {world}: {longest}, not {most}, {cutting:?} {costs:?}");
        } else {
            // Whole tiles go to the worker that is free, the longest first.
            let mut ends = vec![0usize; n_spans];
            for cost in costs {
                let end = ends.iter_mut().min().expect("a worker");
                *end += cost;
            }
            let end = ends.into_iter().max().expect("a worker");
            worst = worst.max(end as f64 / (total as f64 / n_spans as f64));
        }
    }
    assert!(worst < 1.5, "whole tiles end {worst:.2} times as late as equal spans");
}

#[test]
fn one_long_context_is_cut_and_short_ones_are_not() {
    let mut lengths = vec![16; 31];
    lengths.insert(5, 8192);
    let list = plan(&whole(&lengths), CUTTING);
    assert_eq!(list.n_workers, 33);
    assert_eq!(list.cuts.len(), 1, "{:?}", list.cuts);
    assert!(list.cuts[0].n_shares >= 31);
    let longest = of_workers(&list).iter().map(|shares| cost(shares)).max().expect("a worker");
    // A thirty-third of the pages, and somewhat more where a cut would not be worth it.
    let part = (8192 + 31 * 20) / 33;
    assert!(longest <= part + part / SPAN_PARTS + 16, "{longest}");
}

#[test]
fn one_context_fills_the_device_and_no_share_is_too_short() {
    for (n_pages, n_workers, n_shares) in [(1, 1, 1), (8, 1, 1), (16, 2, 2), (80, 10, 10), (8192, 33, 33)] {
        let list = plan(&whole(&[n_pages]), CUTTING);
        assert_eq!((list.n_workers, list.shares.len()), (n_workers, n_shares), "{n_pages} pages");
        assert!(list.shares.iter().all(|share| share.page_end - share.page_begin >= 1));
    }
    let few = plan(&whole(&[1, 1, 1]), CUTTING);
    assert_eq!(few.n_workers, 3, "a worker for each");
}

#[test]
fn equal_contexts_stay_whole_where_that_ends_as_early() {
    let list = plan(&whole(&[80; 256]), CUTTING);
    assert_eq!((list.n_workers, list.cuts.len()), (256, 0), "eight rounds of thirty-three workers");
    let list = plan(&whole(&[80; 40]), CUTTING);
    assert_eq!(list.n_workers, 33, "two rounds of whole contexts would take twice as long as one");
    assert!(!list.cuts.is_empty());
    // A prompt: the longest tile takes as long as a worker's part, and short ones fill the gaps.
    let prompt: Vec<usize> = (1..=64).map(|idx| idx * 2).collect();
    assert_eq!(plan(&whole(&prompt), CUTTING).n_workers, 64);
    let order: Vec<u32> = plan(&whole(&prompt), CUTTING).shares.iter().map(|share| share.page_end).collect();
    assert!(order.is_sorted_by(|a, b| a >= b), "the longest begins first: {order:?}");
}

#[test]
fn few_tiles_over_many_keys_fill_the_device() {
    // 200 queries against 16,384 keys, in tiles of 32 tokens.
    let mut tiles = Vec::new();
    let row =
        RowSpan { token: 0, n_tokens: 200, position: 16_184, entries: 3, n_pages_alike: 0, has_holes: false };
    row.tiles(32, None, PAGE_LEN, &mut tiles);
    assert_eq!(tiles.len(), 7);
    let list = plan(&tiles, Cutting { tile_tokens: 32, n_workers: 33, quantum_pages: 4 });
    assert_eq!(list.n_workers, 33);
    let costs: Vec<usize> = of_workers(&list).iter().map(|shares| cost(shares)).collect();
    let (least, most) = (costs.iter().min().expect("some"), costs.iter().max().expect("some"));
    assert!(most - least <= 16, "{costs:?}");
}

#[test]
fn rows_are_cut_into_tiles_of_the_pages_they_attend_to() {
    let row =
        RowSpan { token: 7, n_tokens: 40, position: 100, entries: 30, n_pages_alike: 0, has_holes: false };
    let mut tiles = Vec::new();
    row.tiles(16, None, PAGE_LEN, &mut tiles);
    let listed: Vec<_> =
        tiles.iter().map(|t| (t.token, t.n_tokens, t.position, t.page_begin, t.page_end)).collect();
    assert_eq!(listed, [(7, 16, 100, 0, 8), (23, 16, 116, 0, 9), (39, 8, 132, 0, 9)]);
    tiles.clear();
    row.tiles(16, Some(10), PAGE_LEN, &mut tiles);
    let listed: Vec<_> = tiles.iter().map(|t| (t.page_begin, t.page_end, t.entries)).collect();
    // The first query of the last tile, at 132, attends to 123 and what follows.
    assert_eq!(listed, [(5, 8, 30), (6, 9, 30), (7, 9, 30)]);
}

#[test]
fn lists_are_reused_without_growing() {
    let mut list = ShareList::default();
    let mut lengths = vec![16; 200];
    lengths.push(6000);
    list.plan(&whole(&lengths), CUTTING);
    let room = (list.shares.capacity(), list.spans.capacity(), list.order.capacity(), list.counts.capacity());
    for n_pages in [5000, 300, 1] {
        lengths[200] = n_pages;
        list.plan(&whole(&lengths), CUTTING);
        check(&whole(&lengths), CUTTING, &list);
    }
    let now = (list.shares.capacity(), list.spans.capacity(), list.order.capacity(), list.counts.capacity());
    assert_eq!(room, now);
    list.plan(&[], CUTTING);
    assert_eq!(list.size(), ListSize::NONE);
}
