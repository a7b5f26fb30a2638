//! Steps written out, without a device.

mod holed;
mod steered;
mod whole;

use std::sync::{Arc, LazyLock};

use smallvec::smallvec;
use trellis_engine::backend::PAGE_LEN;
use trellis_engine::batch::{
    Evicted, Input, Output, OutputFault, OutputKind, OutputRequest, Pack, PageCopy, PageId, Row, SlotId,
    Stretch, Token,
};
use trellis_engine::sampling::program::{Definition, Program, PutOn, RowShape};
use trellis_engine::sampling::{Sampler, Scratch, TokenMask};

use super::given::Given;
use super::lists::Written;
use super::taps::Tap;
use super::whole::{Reading, RowOf, RowWords, WholeRows, hidden_state};
use super::words::from_words;
use super::*;
use crate::model::LogitsOf;
use crate::ops::attention::{Cuttings, Form};
use crate::ops::attention_plan::PlanSize;
use crate::ops::common::Dtype;
use crate::ops::edits::{EDIT_WORDS, Edit, Target};
use crate::ops::logits::{NOWHERE, OutputRow, Wants};
use crate::ops::program::ProgramRow;
use crate::ops::shares::{CUT_WORDS, Cutting, ListSize, SHARE_WORDS, Share};

const ROW_WORDS: RowWords = RowWords { logits: 100, hidden: 8 };
pub(super) const ROOM: Room = Room {
    n_group_rows: 4,
    n_outputs: 64,
    n_states: 8,
    n_layers: 4,
    n_whole_words: 2 * ROW_WORDS.logits,
    row_words: ROW_WORDS,
    n_plane_sets: 2,
    program_states: STATES,
};
/// First word of the programs' states, and of what they are given.
pub(super) const STATES: usize = 1 << 22;
const GIVEN: usize = 1 << 23;
/// First word of the page tables, far behind the lists of a step.
const TABLES: usize = 1 << 24;
const N_PAGES: usize = 1 << 20;
/// First word of the table of histories that are copied.
const COPIED: usize = 1 << 26;
const OUTPUT_WORDS: usize = size_of::<OutputRow>() / 4;
const PROGRAM_WORDS: usize = size_of::<ProgramRow>() / 4;

const fn cutting(tile_tokens: usize) -> Cutting {
    Cutting { tile_tokens, n_workers: 4, quantum_pages: 2 }
}

const CUTTINGS: Cuttings = Cuttings {
    single: cutting(1),
    tiles: Some([cutting(16), cutting(64)]),
    n_single_tokens_max: 1,
    holed: cutting(1),
    many: None,
};

/// A page table of consecutive pages.
fn consecutive(first: usize, n: usize) -> &'static [PageId] {
    static PAGES: LazyLock<Vec<PageId>> = LazyLock::new(|| (0..1 << 20).map(PageId).collect());
    &PAGES[first..first + n]
}

pub(super) fn row<'a>(
    slot: u32,
    tokens: &'a [Token],
    start: usize,
    outputs: Vec<(usize, OutputKind<'a>)>,
) -> Row<'a> {
    Row {
        slot: SlotId(slot),
        tokens: tokens.into(),
        start,
        pages: consecutive(100 * slot as usize, tokens.len() / 16 + 1),
        n_same_pages: 0,
        n_pages_alike: 0,
        outputs: outputs.into_iter().map(|(position, kind)| OutputRequest { position, kind }).collect(),
        input: Input::Known,
        evicted: None,
        steered: None,
    }
}

fn lists(rows: &[StepRow<'_>], copies: &[PageCopy]) -> StepLists {
    let mut lists = StepLists::new(&[None]);
    lists.fill(rows, copies, &mut slots(), &mut given(), &CUTTINGS, ROOM);
    lists
}

/// The lists of a step.
pub(super) fn fill(rows: &[StepRow<'_>]) -> StepLists {
    lists(rows, &[])
}

/// The lists of the step after one.
pub(super) fn fill_again(lists: &mut StepLists, rows: &[StepRow<'_>]) {
    fill_in(lists, rows, ROOM);
}

pub(super) fn fill_in(lists: &mut StepLists, rows: &[StepRow<'_>], room: Room) {
    lists.fill(rows, &[], &mut slots(), &mut given(), &CUTTINGS, room);
}

/// For a vocabulary of 100.
fn given() -> Given {
    let mut given = Given::new(GIVEN..TABLES, 100);
    given.begin_step();
    given
}

fn slots() -> Slots {
    Slots::new(TABLES, 1 << 20, 1 << 16, N_PAGES, COPIED)
}

/// What the edits of a step write: where, and what.
fn edits(written: &Written, lists: &StepLists, memory: &[u32]) -> Vec<(Target, usize, Vec<u32>)> {
    let edits: &[Edit] = from_words(memory, written.edits, lists.n_edits());
    // What lies in a slot stands for itself.
    let words = |edit: &Edit| match (edit.from as usize).checked_sub(N_SLOTS) {
        Some(start) => memory[start..start + edit.n_words as usize].to_vec(),
        None => vec![edit.from],
    };
    edits.iter().map(|edit| (edit.into, edit.to as usize, words(edit))).collect()
}

fn n_words_max(dims: Dims) -> usize {
    StepLists::n_words_max(dims, 8, 1000, 1000)
}

#[test]
fn lists_lie_behind_each_other() {
    let size = |n| ListSize { n_shares: 3 * n, n_workers: 2 * n, n_cuts: n };
    let dims = Dims {
        n_tokens: 5,
        n_windows: 2,
        lists: PlanSize([size(1), size(2), ListSize::NONE, size(1), ListSize::NONE, size(1), size(1)]),
        n_logits_rows: 3,
        n_outputs: 4,
        n_programs: 3,
        n_groups: 2,
        steering: Steers::Some,
    };
    let layout = Layout::of(dims);
    let mut ends = vec![(layout.tokens, 5), (layout.positions, 5), (layout.kv_cells, 5), (layout.holes, 5)];
    ends.push((layout.steering, 5));
    for window_idx in 0..2 {
        let of_forms = [1, 2, 0, 1, 0, 1, 1];
        for (form, n) in Form::ALL.into_iter().zip(of_forms) {
            let [shares, cuts] = layout.list(window_idx, form);
            ends.extend([(shares, 3 * n * SHARE_WORDS), (cuts, n * CUT_WORDS)]);
        }
    }
    ends.extend([(layout.gather, 3), (layout.output_rows, 4 * OUTPUT_WORDS)]);
    ends.extend([(layout.program_row(0), 3 * PROGRAM_WORDS), (layout.chains, 3), (layout.tail, 0)]);
    let mut end = layout.word(Count::Chains { group_idx: 1 }) + 1;
    for (start, n) in ends {
        assert!(start >= end && start.is_multiple_of(4), "{start} behind {end}");
        end = start + n;
    }
    let counts: std::collections::BTreeSet<usize> = (0..2)
        .flat_map(|window_idx| {
            Form::ALL
                .into_iter()
                .flat_map(move |form| [Count::Workers { window_idx, form }, Count::Cuts { window_idx, form }])
        })
        .chain([Count::Tokens, Count::Copies, Count::LogitsRows { group_idx: 0 }])
        .map(|count| layout.word(count))
        .collect();
    assert_eq!(counts.len(), 31, "a word for each count");
}

#[test]
fn a_mixed_step_is_written_where_the_kernels_look() {
    let prompt: Vec<Token> = (0..40).collect();
    let other: Vec<Token> = (500..533).collect();
    let wide = [7, 8, 9];
    let sampler = Sampler {
        repetition_penalty: 1.5,
        penalty_last_n: Some(3),
        bias: vec![(9, 1.0), (2, -1.0)],
        ..Sampler::greedy()
    };
    let rows = [
        row(1, &prompt, 20, vec![(39, OutputKind::Scores(&wide)), (39, OutputKind::Top { n: 5 })]),
        row(2, &other, 32, vec![(32, OutputKind::Sample(&sampler))]),
    ];
    let rows: Vec<StepRow<'_>> = rows.iter().map(StepRow::of).collect();
    let copies = [PageCopy { src: PageId(4), dst: PageId(5) }];
    let mut lists = lists(&rows, &copies);
    assert!(!lists.can_be_captured());
    let dims = lists.dims();
    assert_eq!((dims.n_tokens, dims.n_windows), (21, 1));
    assert_eq!(dims.lists.0.map(|list| list.n_workers), [1, 0, 1, 0, 0, 0, 0]);
    assert_eq!((dims.n_logits_rows, dims.n_outputs, dims.n_groups), (2, 3, 1));
    let layout = Layout::of(dims);
    let mut memory = vec![u32::MAX; n_words_max(dims)];
    let written = lists.write(&layout, &mut memory);
    let words = |start: usize, n: usize| memory[start..start + n].to_vec();
    assert_eq!(
        words(0, 10),
        [21, 1, 1, 0, 0, 0, 1, 0, 0, 0],
        "tokens, copies, workers and cut tiles of each form"
    );
    assert_eq!(words(layout.tokens + 19, 2), [39, 532]);
    assert_eq!(words(layout.positions, 2), [20, 21]);
    assert_eq!(words(layout.positions + 20, 1), [32]);
    assert_eq!(words(layout.kv_cells + 11, 2), [101 * 16 + 15, 102 * 16]);
    assert_eq!(words(layout.kv_cells + 20, 1), [202 * 16]);
    assert!(!dims.has_holes());
    let [singles, _] = layout.list(0, Form::Single);
    let single: &Share = &from_words(&memory, singles, 1)[0];
    assert_eq!((single.token, single.position, single.n_shares), (20, 32, 1));
    assert_eq!((single.page_begin, single.page_end), (0, 3));
    let [prompts, _] = layout.list(0, Form::Prompt);
    let prompt: &Share = &from_words(&memory, prompts, 1)[0];
    assert_eq!((prompt.token, prompt.n_tokens, prompt.position), (0, 20, 20));
    assert_eq!(words(layout.gather, 2), [19, 20]);
    assert_eq!(words(layout.keeps, 2), [1, 2], "each slot keeps its last state");
    assert_eq!(words(layout.tail, 3), [7, 8, 9]);
    assert_eq!(words(written.copies, 2), [4, 5]);
    let told = [
        (Target::MEMORY, prompt.entries as usize, vec![100, 101, 102]),
        (Target::MEMORY, single.entries as usize, vec![200, 201, 202]),
        // The penalties look back at positions that were computed before; this step computes the last.
        (Target::PAGE_TOKENS, 201 * 16, (516..532).collect()),
    ];
    assert_eq!(edits(&written, &lists, &memory), told);
    // Three scores, then from the next whole entry on five entries of a list.
    assert_eq!(written.n_extra_words, 2 * (2 + 5));

    let rows: &[OutputRow] = from_words(&memory, layout.output_rows, 3);
    assert_eq!(
        (rows[0].wants, rows[0].logits_row, rows[0].score_start, rows[0].n_scores),
        (Wants::SCORES, 0, 0, 3)
    );
    assert_eq!((rows[1].wants, rows[1].logits_row, rows[1].top_start, rows[1].n_top), (Wants::TOP, 0, 2, 5));
    let draw = rows[2];
    assert_eq!((draw.wants, draw.logits_row, draw.drawn_slot), (Wants::SAMPLE, 1, 2));
    assert_eq!((draw.n_history, draw.n_bias, draw.mask_start, draw.position[0]), (3, 2, NOWHERE, 33));
    assert_eq!((draw.table_start, draw.history_end), (single.entries, 33));
    let bias = 2 * draw.bias_start as usize - N_SLOTS;
    assert_eq!(words(bias, 4), [2, (-1f32).to_bits(), 9, 1f32.to_bits()]);
}

#[test]
fn a_list_beside_a_draw_takes_its_output_row_unless_the_draw_may_sit_out() {
    let tokens: Vec<Token> = (10..27).collect();
    let sampler = Arc::new(Sampler::greedy());
    let beside = |kind| vec![(16, kind), (16, OutputKind::Top { n: 4 })];
    let rows = [
        row(3, &tokens, 16, beside(OutputKind::Sample(&sampler))),
        row(4, &tokens, 16, beside(OutputKind::Masked { sampler: &sampler, mask: None })),
    ];
    let rows: Vec<StepRow<'_>> = rows.iter().map(StepRow::of).collect();
    let mut lists = lists(&rows, &[]);
    assert!(lists.can_be_captured() && lists.outputs.groups[0].stages.top);
    let places =
        [Place::Drawn { output_idx: 0 }, Place::Top { output_idx: 0 }, Place::Late { output_idx: 1 }];
    assert_eq!(lists.outputs.places[..3], places);
    assert_eq!(lists.outputs.places[3], Place::Top { output_idx: 2 });
    assert_eq!((lists.outputs.n_top_entries, lists.dims().n_outputs), (8, 3));
    let [both, late, list] = &lists.outputs.rows[..] else { panic!("three rows") };
    assert_eq!((both.wants, both.top_start, both.n_top), (Wants::SAMPLE.and(Wants::TOP), 0, 4));
    assert_eq!((late.wants, list.wants, list.top_start), (Wants::SAMPLE, Wants::TOP, 4));
    lists.outputs.sit_out();
    assert_eq!((lists.outputs.rows[1].wants, lists.outputs.rows[2].wants), (Wants::NOTHING, Wants::TOP));
}

#[test]
fn hidden_states_between_layers_take_no_logits() {
    let prompt: Vec<Token> = (0..40).collect();
    let sampler = Sampler::greedy();
    let hidden = |n_layers| OutputKind::Hidden { n_layers };
    let asked = (30..33).flat_map(|position| [(position, hidden(2)), (position, hidden(0))]).collect();
    let beside = vec![(39, OutputKind::Sample(&sampler)), (39, hidden(1)), (39, hidden(ROOM.n_layers))];
    let rows = [row(1, &prompt, 20, asked), row(2, &prompt, 39, beside)];
    let rows: Vec<StepRow<'_>> = rows.iter().map(StepRow::of).collect();
    let lists = lists(&rows, &[]);
    assert!(!lists.can_be_captured() && lists.can_be_held());
    // Token by token within a layer, in the order of the layers within a row.
    let tap = |n_layers, token, n_tokens, state| Tap { n_layers, token, n_tokens, state };
    assert_eq!(lists.outputs.taps.taps, [tap(0, 10, 3, 0), tap(2, 10, 3, 3), tap(1, 20, 1, 6)]);
    assert_eq!(lists.outputs.taps.after(2).count(), 1);
    let states = [3, 0, 4, 1, 5, 2].map(|state| Place::Tapped { state });
    assert_eq!(lists.outputs.places[..6], states);
    assert_eq!(lists.outputs.places[6..8], [Place::Drawn { output_idx: 0 }, Place::Tapped { state: 6 }]);
    assert_eq!(lists.outputs.places[8], Place::Hidden { group_idx: 0, logits_row: 0, start: Some(0) });
    assert_eq!((lists.dims().n_logits_rows, lists.outputs.taps.n_states()), (1, 7));
}

#[test]
fn attention_takes_no_logits_and_comes_back_behind_the_lists() {
    let prompt: Vec<Token> = (0..40).collect();
    let attention = |layers| OutputKind::Attention { layers };
    let asked = vec![(39, attention(&[3, 1])), (30, attention(&[0]))];
    let beside = vec![(39, OutputKind::Top { n: 5 }), (39, attention(&[2])), (39, OutputKind::Scores(&[7]))];
    let rows = [row(1, &prompt, 20, asked), row(2, &prompt, 39, beside)];
    let rows: Vec<StepRow<'_>> = rows.iter().map(StepRow::of).collect();
    let lists = lists(&rows, &[]);
    assert!(!lists.can_be_captured() && lists.can_be_held());
    let [first, second, third] = &lists.outputs.masses.queries[..] else { panic!("three of them") };
    assert_eq!((first.0.token, first.0.cell, first.0.place, first.0.n_layers), (19, 39, 0, 2));
    assert_eq!((second.0.token, second.0.cell, second.0.place), (10, 30, 40));
    assert_eq!((third.0.token, third.0.cell, third.0.place), (20, 39, 71));
    assert!(first.0.table == second.0.table && first.0.table != third.0.table && !first.0.has_holes);
    assert_eq!([&first.1[..], &second.1, &third.1], [&[3, 1][..], &[0], &[2]]);
    let places = [(0, 40), (40, 31), (71, 40)].map(|(start, n)| Place::Attention { start, n });
    assert_eq!(lists.outputs.places[..2], places[..2]);
    assert_eq!(lists.outputs.places[3], places[2]);
    assert_eq!(lists.dims().n_logits_rows, 1);
    assert_eq!(lists.outputs.n_extra_words(), lists.outputs.n_list_words() + 111);
}

#[test]
fn a_row_names_the_token_that_only_the_device_knows() {
    let tokens: Vec<Token> = (10..27).collect();
    let sampler = Sampler { presence_penalty: 0.5, ..Sampler::greedy() };
    let asked = vec![(17, OutputKind::Sample(&sampler))];
    let drawn = Row { input: Input::Drawn(SlotId(3)), ..row(3, &tokens, 17, asked) };
    let after = StepRow::of(&drawn);
    assert_eq!((after.start, after.end(), after.n_tokens()), (17, 18, 1));
    assert_eq!(after.words(15, 18).collect::<Vec<_>>(), [25, 26, -4]);
    assert!(after.known_before(18).is_none());
    let mut lists = lists(std::slice::from_ref(&after), &[]);
    assert!(lists.can_be_captured());
    assert_eq!(lists.logits_of(), LogitsOf::EachToken);
    let layout = Layout::of(lists.dims());
    let mut memory = vec![0; n_words_max(lists.dims())];
    lists.write(&layout, &mut memory);
    assert_eq!(memory[layout.tokens] as i32, -4);
    let rows: &[OutputRow] = from_words(&memory, layout.output_rows, 1);
    assert_eq!((rows[0].n_history, rows[0].history_end), (18, 18), "the penalties see it too");
}

/// The words that a step uploads for edits.
fn told(slots: &mut Slots, rows: &[Row<'_>], copies: &[PageCopy]) -> Vec<(Target, usize, Vec<u32>)> {
    let rows: Vec<StepRow<'_>> = rows.iter().map(StepRow::of).collect();
    let mut lists = StepLists::new(&[None]);
    lists.fill(&rows, copies, slots, &mut given(), &CUTTINGS, ROOM);
    let layout = Layout::of(lists.dims());
    let mut memory = vec![0; n_words_max(lists.dims())];
    let written = lists.write(&layout, &mut memory);
    edits(&written, &lists, &memory)
}

#[test]
fn the_device_is_told_only_what_has_changed() {
    let sampler = Sampler { presence_penalty: 0.5, ..Sampler::greedy() };
    let tokens: Vec<Token> = (0..100).collect();
    let after = |n: usize, n_same_pages| {
        let outputs = vec![(n - 1, OutputKind::Sample(&sampler))];
        Row { n_same_pages, ..row(0, &tokens[..n], n - 1, outputs) }
    };
    let mut slots = slots();
    let prompt = row(0, &tokens[..40], 0, vec![(39, OutputKind::Sample(&sampler))]);
    assert_eq!(
        told(&mut slots, &[prompt], &[]),
        [(Target::MEMORY, TABLES, vec![0, 1, 2])],
        "tokens come with it"
    );
    assert_eq!(told(&mut slots, &[after(41, 3)], &[]), []);
    assert_eq!(told(&mut slots, &[after(49, 3)], &[]), [(Target::MEMORY, TABLES + 3, vec![3])]);
    // The second page has moved; its tokens did not come along.
    slots.lose_tokens([PageId(1)].into_iter());
    let back = [(Target::MEMORY, TABLES + 1, vec![1, 2, 3]), (Target::PAGE_TOKENS, 16, (16..32).collect())];
    assert_eq!(told(&mut slots, &[after(50, 1)], &[]), back);
    assert_eq!(told(&mut slots, &[after(51, 4)], &[]), []);
    // Another context in the same slot.
    let all = (Target::MEMORY, TABLES, vec![0, 1, 2, 3]);
    assert_eq!(told(&mut slots, &[after(52, 0)], &[]), std::slice::from_ref(&all));
    // Copies take tokens along, as far as they are there.
    let copies = |src, dst| [PageCopy { src: PageId(src), dst: PageId(dst) }];
    assert_eq!(
        told(&mut slots, &[after(53, 4)], &copies(7, 3)),
        [(Target::PAGE_TOKENS, 48, (48..53).collect())]
    );
    assert_eq!(told(&mut slots, &[after(54, 4)], &copies(2, 3)), []);
    // After a failed step nothing is known.
    slots.forget();
    let tokens = (0..4).map(|page| {
        let start = 16 * page;
        (Target::PAGE_TOKENS, start, (start as u32..(start as u32 + 16).min(55)).collect())
    });
    let expected: Vec<_> = std::iter::once(all).chain(tokens).collect();
    assert_eq!(told(&mut slots, &[after(55, 4)], &[]), expected);
}

#[test]
fn tables_that_fill_their_memory_are_laid_out_anew() {
    let tokens: Vec<Token> = (0..300).collect();
    // Room for the tables of two contexts of 20 pages.
    let mut slots = Slots::new(TABLES, 64, 32, N_PAGES, COPIED);
    let long = |slot| Row { n_same_pages: 20, ..row(slot, &tokens, 299, vec![]) };
    for slot in [0, 1, 0, 1] {
        assert!(told(&mut slots, &[long(slot)], &[]).len() <= 1);
    }
    assert_eq!(told(&mut slots, &[long(0), long(1)], &[]), [], "both are there");
    let third = told(&mut slots, &[long(2)], &[]);
    assert_eq!(third, [(Target::MEMORY, TABLES, (200..219).collect())], "the others have gone");
    let both = told(&mut slots, &[long(2), long(1)], &[]);
    assert_eq!(both, [(Target::MEMORY, TABLES + 32, (100..119).collect())]);
    // Tokens that a row brings are not lost when a row behind it finds no place.
    slots.lose_tokens([PageId(205)].into_iter());
    let sampler = Sampler { presence_penalty: 0.5, ..Sampler::greedy() };
    let outputs = vec![(299, OutputKind::Sample(&sampler))];
    let penalized = Row { n_same_pages: 20, ..row(2, &tokens, 299, outputs) };
    let all = told(&mut slots, &[penalized, long(3)], &[]);
    let tokens = (Target::PAGE_TOKENS, 205 * PAGE_LEN, (80..96).collect());
    assert!(all.contains(&tokens), "{all:?}");
}

#[test]
fn a_row_of_the_head_reads_the_state_that_its_slot_kept() {
    let tokens: Vec<Token> = (0..40).collect();
    let sampler = Sampler { presence_penalty: 0.5, ..Sampler::greedy() };
    let head = row(3, &tokens, 40, vec![(39, OutputKind::Sample(&sampler)), (39, OutputKind::Top { n: 2 })]);
    let other = row(9, &tokens[..20], 19, vec![(19, OutputKind::Full)]);
    let rows = [&head, &other].map(StepRow::of);
    let lists = lists(&rows, &[]);
    let dims = lists.dims();
    assert_eq!((dims.n_tokens, dims.n_logits_rows, dims.n_outputs), (1, 2, 2));
    assert_eq!(lists.outputs.gather, [-4, 0]);
    assert_eq!(lists.outputs.keeps, [-1, -1], "the head's stays, and slot 9 keeps none");
    assert_eq!((lists.outputs.rows[0].n_history, lists.outputs.rows[0].history_end), (40, 40));
    // Without its pages it has no history on the device.
    let away = Row { pages: &[], ..row(3, &tokens, 40, vec![(39, OutputKind::Sample(&sampler))]) };
    let away = self::lists(&[StepRow::of(&away)], &[]);
    assert_eq!(away.outputs.places, [Place::Host { group_idx: 0, logits_row: 0 }]);
}

#[test]
fn what_no_kernel_makes_is_read_out_of_rows_that_come_back_whole() {
    let tokens: Vec<Token> = (0..30).collect();
    let many = vec![1; N_SCORES_MAX];
    let asked = vec![
        (5, OutputKind::Scores(&many)),
        (6, OutputKind::Scores(&tokens)),
        (6, OutputKind::Top { n: 4000 }),
        (7, OutputKind::Embedding),
    ];
    let rows = [row(0, &tokens, 0, asked)];
    let rows: Vec<StepRow<'_>> = rows.iter().map(StepRow::of).collect();
    let lists = lists(&rows, &[]);
    // Both that are asked of one position are read out of one row.
    let full = Place::Full { output_idx: 1, group_idx: 0, logits_row: 1, start: Some(0) };
    let hidden = Place::Hidden { group_idx: 0, logits_row: 2, start: Some(100) };
    let places = [Place::Scores { output_idx: 0 }, full, full, hidden];
    assert_eq!(lists.outputs.places, places);
    let readings = [(1, Reading::Scores(tokens.as_slice().into())), (2, Reading::Top(4000))];
    assert_eq!(lists.outputs.readings, readings);
    let group = &lists.outputs.groups[0];
    assert!(!group.has_host_work && group.keeps_hidden());
}

#[test]
fn positions_are_cut_into_groups() {
    let tokens: Vec<Token> = (0..30).collect();
    let asked = (0..11).map(|position| (position, OutputKind::Scores(&tokens[..2]))).collect();
    let rows = [row(0, &tokens, 0, asked)];
    let rows: Vec<StepRow<'_>> = rows.iter().map(StepRow::of).collect();
    let lists = lists(&rows, &[]);
    let groups: Vec<_> = lists
        .outputs
        .groups
        .iter()
        .map(|group| (group.logits_start, group.n_logits_rows, group.outputs_start))
        .collect();
    assert_eq!(groups, [(0, 4, 0), (4, 4, 4), (8, 3, 8)]);
    // Each group's rows of logits are numbered from its own first.
    assert_eq!(lists.outputs.rows[8].logits_row, 0);
}

#[test]
fn requests_of_a_position_share_its_logits_in_any_order() {
    let tokens: Vec<Token> = (0..30).collect();
    let asked = [9, 3, 9, 5, 3, 9];
    let outputs = asked.map(|position| (position, OutputKind::Scores(&tokens[..1]))).into();
    let rows = [row(0, &tokens, 0, outputs)];
    let rows: Vec<StepRow<'_>> = rows.iter().map(StepRow::of).collect();
    let lists = lists(&rows, &[]);
    // Six output rows do not fit into one group of four: those of 3 and 5 come first, then those of 9.
    assert_eq!(lists.outputs.gather, [3, 5, 9]);
    let output_idx = |place: &Place| match place {
        Place::Scores { output_idx } => *output_idx,
        other => panic!("{other:?}"),
    };
    let outputs: Vec<usize> = lists.outputs.places.iter().map(output_idx).collect();
    assert_eq!(outputs, [3, 0, 4, 2, 1, 5]);
    let logits_rows: Vec<u32> = lists.outputs.rows.iter().map(|row| row.logits_row).collect();
    assert_eq!(logits_rows, [0, 0, 1, 0, 0, 0]);
}

/// As many comparisons as the square of the requests would take minutes; one pass takes a second on a slow machine.
#[test]
fn a_long_continuation_is_grouped_in_one_pass() {
    const N: usize = 200_000;
    let tokens: Vec<Token> = vec![1; N];
    let outputs = (0..N).map(|position| (position, OutputKind::Scores(&tokens[..1]))).collect();
    let rows = [row(0, &tokens, 0, outputs)];
    let rows: Vec<StepRow<'_>> = rows.iter().map(StepRow::of).collect();
    let started = std::time::Instant::now();
    let lists = lists(&rows, &[]);
    assert!(started.elapsed().as_secs() < 60, "{:?}", started.elapsed());
    assert_eq!(lists.outputs.gather.len(), N);
    assert!(lists.outputs.gather.iter().enumerate().all(|(idx, &token)| idx == token as usize));
}

#[test]
fn rows_of_few_tokens_are_captured_like_rows_of_one() {
    let tokens: Vec<Token> = (0..60).collect();
    let sampler = Sampler::greedy();
    let asked = |positions: std::ops::Range<usize>| {
        positions.map(|position| (position, OutputKind::Sample(&sampler))).collect::<Vec<_>>()
    };
    let verified = row(0, &tokens, 51, asked(51..54));
    let decoded = row(1, &tokens[..20], 19, asked(19..20));
    let rows = [&verified, &decoded].map(StepRow::of);
    let few = lists(&rows, &[]);
    assert!(few.can_be_captured());
    assert_eq!(few.logits_of(), LogitsOf::Some, "nobody asks for the last tokens' logits");
    let sizes = few.dims().lists.0;
    assert!(sizes[Form::Single as usize].n_workers > 0 && sizes[Form::Few as usize].n_workers > 0);
    assert_eq!(sizes[Form::Prompt as usize], ListSize::NONE);

    let prompt = row(0, &tokens, 40, asked(59..60));
    assert!(!lists(&[StepRow::of(&prompt)], &[]).can_be_captured(), "20 tokens are a prompt");
}

#[test]
fn what_a_step_uploads_does_not_follow_the_longest_context() {
    let sampler = Sampler::greedy();
    let long: Vec<Token> = vec![1; 16_000];
    let asked = |position| vec![(position, OutputKind::Sample(&sampler))];
    let mut rows = vec![row(0, &long, 15_999, asked(15_999))];
    rows.extend((1..100).map(|slot| row(slot, &long[..20], 19, asked(19))));
    let n_pages: usize = rows.iter().map(|row| row.tokens.len().div_ceil(16)).sum();
    let rows: Vec<StepRow<'_>> = rows.iter().map(StepRow::of).collect();
    let mut lists = StepLists::new(&[None]);
    let room = Room { n_group_rows: 256, n_outputs: 512, n_states: 0, ..ROOM };
    let mut slots = slots();
    lists.fill(&rows, &[], &mut slots, &mut given(), &CUTTINGS, room);
    let layout = Layout::of(lists.dims());
    let mut memory = vec![0; StepLists::n_words_max(lists.dims(), rows.len(), n_pages, 1000)];
    let written = lists.write(&layout, &mut memory);
    let n_words_a_row = 5 + SHARE_WORDS + OUTPUT_WORDS + 1 + EDIT_WORDS;
    assert!(written.n_words <= n_pages + 110 * n_words_a_row, "{} words", written.n_words);
    // The next one does not follow the lengths of its contexts at all.
    let mut rows = rows;
    rows.iter_mut().for_each(|row| row.n_same_pages = row.pages.len());
    lists.fill(&rows, &[], &mut slots, &mut given(), &CUTTINGS, room);
    let written = lists.write(&Layout::of(lists.dims()), &mut memory);
    assert!(written.n_words <= 110 * n_words_a_row, "{} words", written.n_words);
}
