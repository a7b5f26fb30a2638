//! The lists of steps with contexts from which tokens were evicted.

use super::*;

/// A context out of which tokens were evicted: its first cells, and where the rest begins.
fn holed<'a>(live: &'a [u16], stretches: &'a [Stretch], cell: usize) -> Evicted<'a> {
    Evicted { n_evicted: 10, rotation: 40, cell, n_whole: None, live, open: 21, stretches, packs: &[] }
}

#[test]
fn a_row_among_holes_says_where_its_cells_lie_and_how_queries_are_turned() {
    let (tokens, others): (Vec<Token>, Vec<Token>) = ((0..33).collect(), (500..533).collect());
    let sampler = Sampler { temperature: 1.0, seed: 8, ..Sampler::greedy() };
    let live = [0x00ff, 0x0001];
    let stretches =
        [Stretch { first_cell: 0, extra_rotation: -10 }, Stretch { first_cell: 16, extra_rotation: 0 }];
    let whole = row(1, &others, 32, vec![(32, OutputKind::Sample(&sampler))]);
    let first = row(2, &tokens, 30, vec![(32, OutputKind::Sample(&sampler))]);
    let first = Row { evicted: Some(holed(&live, &stretches, 22)), ..first };
    let rows = [&whole, &first].map(StepRow::of);
    let mut lists = lists(&rows, &[]);
    let dims = lists.dims();
    assert!(dims.has_holes() && lists.can_be_captured());
    let layout = Layout::of(dims);
    let mut memory = vec![0; n_words_max(dims)];
    lists.write(&layout, &mut memory);
    let words = |start: usize, n: usize| memory[start..start + n].to_vec();
    assert_eq!(words(layout.positions, 4), [32, 40, 41, 42]);
    assert_eq!(words(layout.kv_cells, 4), [102 * 16, 201 * 16 + 6, 201 * 16 + 7, 201 * 16 + 8]);
    let [shares, _] = layout.list(0, Form::Holed);
    let share: &Share = &from_words(&memory, shares, 1)[0];
    assert_eq!((share.token, share.position, share.page_begin, share.page_end), (1, 22, 0, 2));
    // Where the kernel looks, its words count from the first of the slots.
    let holes: Vec<usize> =
        words(layout.holes + 1, 3).into_iter().map(|place| place as usize - N_SLOTS).collect();
    assert!(holes[0] == holes[1] && holes[1] == holes[2]);
    assert_eq!(words(holes[0], 5), [2, 0, 2, 0, 16]);
    assert_eq!(words(holes[0] + 11, 2), [-10i32 as u32, 0]);
    assert_eq!(words(holes[0] + 19, 1), [0xffe1_00ff], "cells from the open one on are seen");
    // The draw's position counts what is gone.
    let outputs: &[OutputRow] = from_words(&memory, layout.output_rows, 2);
    assert_eq!(outputs[1].position[0] - outputs[0].position[0], 10);
}

#[test]
fn what_draws_look_at_among_holes_is_brought_and_the_token_that_only_the_device_knows_is_moved_there() {
    let tokens: Vec<Token> = (100..133).collect();
    let sampler = Sampler { repetition_penalty: 1.5, penalty_last_n: Some(5), ..Sampler::greedy() };
    let stretches = [Stretch { first_cell: 0, extra_rotation: 0 }];
    let live = [0x00ff, 0x0001];
    let asked = |position| vec![(position, OutputKind::Sample(&sampler))];
    let drawn = Row {
        input: Input::Drawn(SlotId(3)),
        evicted: Some(holed(&live, &stretches, 25)),
        ..row(7, &tokens, 33, asked(33))
    };
    let mut slots = slots();
    let told_ahead = told(&mut slots, std::slice::from_ref(&drawn), &[]);
    let table = (Target::MEMORY, TABLES, vec![700, 701]);
    // The last five of 34 tokens begin in the second page of tokens.
    let copied = (Target::PAGE_TOKENS, N_PAGES * PAGE_LEN, (116..133).collect());
    let moved = (Target::PAGE_TOKENS, N_PAGES * PAGE_LEN + 17, vec![7]);
    assert_eq!(told_ahead, [table, copied, moved], "the last one out of the slot");
    let mut lists = StepLists::new(&[None]);
    lists.fill(&[StepRow::of(&drawn)], &[], &mut slots, &mut given(), &CUTTINGS, ROOM);
    let layout = Layout::of(lists.dims());
    let mut memory = vec![0; n_words_max(lists.dims())];
    lists.write(&layout, &mut memory);
    let output: &OutputRow = &from_words(&memory, layout.output_rows, 1)[0];
    assert_eq!((output.n_history, output.history_end), (5, 34));
    // Entry 1 of the row's table is the first of those of the copies.
    assert_eq!(output.table_start as usize, COPIED - 1);
}

#[test]
fn packs_are_moves_and_what_they_fill_has_no_tokens_beside_it() {
    let tokens: Vec<Token> = (0..60).collect();
    let sampler = Sampler { presence_penalty: 0.5, ..Sampler::greedy() };
    let mut slots = slots();
    let prompt = row(0, &tokens, 0, vec![]);
    told(&mut slots, &[prompt], &[]);
    let packs = [Pack { from: smallvec![(PageId(1), 0b11), (PageId(2), 0b100)], to: PageId(50) }];
    let stretches = [Stretch { first_cell: 0, extra_rotation: 0 }];
    let live = [u16::MAX, 0b111, 0xff];
    let pages = [PageId(0), PageId(50), PageId(3)];
    let evicted = Evicted { open: 40, packs: &packs, ..holed(&live, &stretches, 40) };
    let packed =
        Row { pages: &pages, n_same_pages: 1, evicted: Some(evicted), ..row(0, &tokens[..28], 27, vec![]) };
    let mut lists = StepLists::new(&[None]);
    lists.fill(&[StepRow::of(&packed)], &[], &mut slots, &mut given(), &CUTTINGS, ROOM);
    let moves: Vec<_> = lists.moves().iter().map(|cell| (cell.from, cell.to)).collect();
    assert_eq!(moves, [(16, 800), (17, 801), (34, 802)]);
    // Cut back to what comes before the hole, the context is told the tokens of that page.
    let outputs = vec![(18, OutputKind::Sample(&sampler))];
    let cut = Row { pages: &pages[..2], n_same_pages: 2, ..row(0, &tokens[..19], 18, outputs) };
    assert_eq!(told(&mut slots, &[cut], &[]), [(Target::PAGE_TOKENS, 50 * PAGE_LEN, (16..19).collect())]);
}
