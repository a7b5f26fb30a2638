//! Contexts out of whose middle tokens were taken: against a plain reimplementation, and the same bits wherever the tokens
//! lie.

use trellis_engine::backend::PAGE_LEN;
use trellis_engine::batch::{Evicted, Output, OutputKind, PageId, Row, Stretch, Token};
use trellis_engine::cpu::CpuBackend;
use trellis_engine::model::ModelConfig;
use trellis_engine::sampling::philox4x32;

use crate::architectures::{backend, base, random_tensors};
use crate::reference::Reference;
use crate::support::{consecutive, forward, full, row};

/// Tokens that are computed before any is taken out, and those of them that are.
pub(crate) const N_BEFORE: usize = 45;
pub(crate) const GONE: std::ops::Range<usize> = 5..23;
pub(crate) const N_TOKENS: usize = 60;

pub(crate) fn tokens(config: &ModelConfig) -> Vec<Token> {
    (0..N_TOKENS).map(|i| philox4x32([i as u32, 0, 0, 0], [3, 0])[0] % config.vocab_size as u32).collect()
}

/// What is asked of each of the last tokens, where the tokens lie from a cell on and are computed in pieces after the hole.
pub(crate) fn after_hole(
    backend: &mut CpuBackend,
    tokens: &[Token],
    first_cell: usize,
    extra_rotation: i64,
    n_piece: usize,
    kind: impl Fn() -> OutputKind<'static>,
) -> Vec<Output> {
    let pages: &[PageId] = consecutive(100, (first_cell + N_TOKENS).div_ceil(PAGE_LEN));
    let none = vec![0; first_cell.div_ceil(PAGE_LEN)];
    let whole = [Stretch { first_cell: 0, extra_rotation: 0 }];
    let before = Evicted {
        n_evicted: 0,
        rotation: 0,
        cell: first_cell,
        n_whole: None,
        live: &none,
        open: first_cell,
        stretches: &whole,
        packs: &[],
    };
    forward(backend, vec![Row { pages, evicted: Some(before), ..row(&tokens[..N_BEFORE], 0, 0, vec![]) }]);

    let is_live =
        |cell: &usize| cell.checked_sub(first_cell).is_some_and(|idx| idx < N_BEFORE && !GONE.contains(&idx));
    let live: Vec<u16> = (0..pages.len())
        .map(|page_idx| {
            let cells = (0..PAGE_LEN).filter(|slot| is_live(&(page_idx * PAGE_LEN + slot)));
            cells.fold(0, |bits, slot| bits | 1 << slot)
        })
        .collect();
    // A page of which nothing is left is no longer there.
    let kept: Vec<usize> = (0..pages.len())
        .filter(|&page_idx| live[page_idx] != 0 || page_idx * PAGE_LEN >= first_cell + N_BEFORE)
        .collect();
    let n_left_out =
        |cell: usize| cell / PAGE_LEN - kept.iter().filter(|&&page| page < cell / PAGE_LEN).count();
    let at = |cell: usize| cell - n_left_out(cell) * PAGE_LEN;
    let pages: Vec<PageId> = kept.iter().map(|&page_idx| pages[page_idx]).collect();
    let live: Vec<u16> = kept.iter().map(|&page_idx| live[page_idx]).collect();
    let stretches = [
        Stretch { first_cell: 0, extra_rotation },
        Stretch { first_cell: at(first_cell + GONE.end), extra_rotation: 0 },
    ];
    let left: Vec<Token> = [&tokens[..GONE.start], &tokens[GONE.end..]].concat();
    let mut rows = Vec::new();
    let mut start = N_BEFORE;
    while start < N_TOKENS {
        let end = (start + n_piece).min(N_TOKENS);
        let evicted = Evicted {
            n_evicted: GONE.len(),
            rotation: start,
            cell: at(first_cell + start),
            n_whole: None,
            live: &live,
            open: at(first_cell + N_BEFORE),
            stretches: &stretches,
            packs: &[],
        };
        let asked = (start - GONE.len()..end - GONE.len()).map(|position| (position, kind()));
        let row = row(&left[..end - GONE.len()], start - GONE.len(), 0, asked.collect());
        let outputs = forward(backend, vec![Row { pages: &pages, evicted: Some(evicted), ..row }]);
        rows.extend(outputs);
        start = end;
    }
    rows
}

fn rows_after_hole(
    backend: &mut CpuBackend,
    tokens: &[Token],
    first_cell: usize,
    extra_rotation: i64,
    n_piece: usize,
) -> Vec<Vec<f32>> {
    let rows = after_hole(backend, tokens, first_cell, extra_rotation, n_piece, || OutputKind::Full);
    rows.into_iter().map(full).collect()
}

/// What a token sees at a distance, with that, where so many tokens were closed up behind the hole.
pub(crate) fn seen_after_hole(position: usize, n_closed: usize) -> Vec<(usize, usize)> {
    let is_after = position >= N_BEFORE;
    let seen = (0..=position).filter(|seen| !is_after || !GONE.contains(seen));
    let n_back = |seen| position - seen - if is_after && seen < GONE.start { n_closed } else { 0 };
    seen.map(|seen| (seen, n_back(seen))).collect()
}

#[test]
fn tokens_that_are_gone_are_not_seen_and_positions_are_kept_or_closed_up() {
    let config = base();
    let weights = random_tensors(&config, 1);
    let mut backend = backend(&config, &weights);
    let tokens = tokens(&config);
    for n_closed in [0, GONE.len()] {
        let expected = Reference { config: &config, tensors: &weights }
            .run_seeing(&tokens, |_, position| seen_after_hole(position, n_closed));
        let found = rows_after_hole(&mut backend, &tokens, 0, -(n_closed as i64), N_TOKENS);
        assert_eq!(found.len(), N_TOKENS - N_BEFORE);
        for (position, (found, (_, expected))) in found.iter().zip(&expected[N_BEFORE..]).enumerate() {
            for (found, expected) in found.iter().zip(expected) {
                let diff = (f64::from(*found) - expected).abs();
                assert!(
                    diff <= 1e-4 * expected.abs().max(1.0),
                    "{n_closed} closed up, {position}: {found} instead of {expected}"
                );
            }
        }
        let elsewhere = [(3, 1), (11, 4), (16, 7), (29, N_TOKENS)];
        for (first_cell, n_piece) in elsewhere {
            let again = rows_after_hole(&mut backend, &tokens, first_cell, -(n_closed as i64), n_piece);
            assert_eq!(again, found, "from cell {first_cell} on, {n_piece} at a time");
        }
    }
}
