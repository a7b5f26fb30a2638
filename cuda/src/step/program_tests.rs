//! Draws of programs written out, without a device.

use std::sync::Arc;

use trellis_engine::KeptRow;
use trellis_engine::batch::{Evicted, Input, Others, OutputKind, Row, SlotId, Start, Stretch, Token, Within};
use trellis_engine::sampling::program::{Definition, DrawState, Program, PutOn, RowShape};
use trellis_engine::sampling::{Bias, Sampler, TokenMask};
use trellis_programs::{Source, library};

use super::tests::{ROOM, STATES, fill, fill_again, fill_in, row};
use super::whole::KeptRun;
use super::words::from_words;
use super::*;
use crate::kept::FreeRows;
use crate::ops::logits::{NOWHERE, Wants};
use crate::ops::program::{KEPT_ROW, ProgramBias, ProgramRow};
use crate::ops::program_plan::ProgramKind;

const VOCAB_SIZE: usize = 100;

fn sampler(definition: Definition) -> Sampler {
    let shape = RowShape { vocab_size: VOCAB_SIZE, n_positions: 1 << 14 };
    let put_on = PutOn::new(Arc::new(Program::new(definition, shape).expect("it is in order")));
    Sampler { program: Some(Box::new(put_on)), seed: 5 << 32 | 6, ..Sampler::greedy() }
}

fn plain() -> Sampler {
    sampler(Definition::build(|b| b.logits().draw(Source::SEED)))
}

/// With a state, and rows of the history.
fn mirostat() -> Sampler {
    sampler(Definition::build(|b| library::mirostat(b.logits(), 5.0, 5.0, 0.1)))
}

fn penalties() -> Sampler {
    sampler(Definition::build(|b| library::repetition(b.logits(), Some(40), 1.2).draw(Source::SEED)))
}

fn at(numbers: [f32; 8], n_drawn: u32) -> Start {
    Start::At(DrawState { numbers, n_drawn })
}

fn asks<'a>(sampler: &'a Sampler, from: usize, starts: &[Start]) -> Vec<(usize, OutputKind<'a>)> {
    let kind = |(idx, &start): (usize, &Start)| {
        (from + idx, OutputKind::Program { sampler, start, within: Within::All, others: Others::NONE })
    };
    starts.iter().enumerate().map(kind).collect()
}

/// The rows of programs as the device reads them, with the chains of the first group.
fn written(lists: &mut StepLists) -> (Vec<ProgramRow>, Vec<u32>, Vec<u32>) {
    let layout = Layout::of(lists.dims());
    let mut memory = vec![0; StepLists::n_words_max(lists.dims(), 8, 1000, 100_000)];
    lists.write(&layout, &mut memory);
    let n = lists.dims().n_programs;
    let rows: &[ProgramRow] = from_words(&memory, layout.program_row(0), n);
    let n_chains = memory[layout.word(Count::Chains { group_idx: 0 })] as usize;
    let chains = memory[layout.chains..][..n_chains].to_vec();
    (rows.to_vec(), chains, memory)
}

#[test]
fn a_draw_says_where_all_that_it_takes_lies() {
    let mut sampler = penalties();
    let put_on = sampler.program.as_mut().expect("a program");
    put_on.parameters = vec![0.5, 2.0, 8.0];
    put_on.masks = vec![Arc::new(TokenMask::all(VOCAB_SIZE))];
    put_on.biases =
        vec![Arc::new(Bias::Sparse(vec![(7, 1.0)])), Arc::new(Bias::Dense(vec![1.0; VOCAB_SIZE]))];
    let tokens: Vec<Token> = (0..60).collect();
    let batch = [row(3, &tokens, 59, asks(&sampler, 59, &[at([4.0; 8], 9)]))];
    let rows: Vec<StepRow<'_>> = batch.iter().map(StepRow::of).collect();
    let mut lists = fill(&rows);
    assert!(lists.can_be_captured());
    assert_eq!(lists.outputs.places, [Place::Programmed { output_idx: 0, program_idx: 0, n_drawn: 9 }]);
    let output = &lists.outputs.rows[0];
    assert_eq!((output.wants, output.drawn_slot, output.program_row), (Wants::PROGRAM, 3, 0));
    let (rows, chains, memory) = written(&mut lists);
    assert_eq!(chains, [0]);
    let row = rows[0];
    assert_eq!((row.seed, row.position, row.n_tokens, row.n_drawn), ([6, 5], [60, 0], 60, 9));
    assert_eq!((row.n_history, row.next, row.output_row), (40, NOWHERE, 0));
    let word = |place: u32| memory[place as usize - N_SLOTS];
    let numbers =
        |start: u32, n: u32| (start..start + n).map(|it| f32::from_bits(word(it))).collect::<Vec<_>>();
    assert_eq!(numbers(row.parameters_start, row.n_parameters), [0.5, 2.0, 8.0]);
    assert_eq!(numbers(row.state_in, 8), [4.0; 8]);
    assert_eq!(row.state_out as usize, STATES + 8 * 3);
    let bias: &[ProgramBias] = from_words(&memory, 2 * row.biases_start as usize - N_SLOTS, 2);
    assert_eq!((bias[0].n_pairs, bias[1].n_pairs, row.n_biases), (1, NOWHERE, 2));
    assert_eq!((row.n_masks, lists.n_edits() >= 4), (1, true), "plan, mask and biases are brought");
}

#[test]
fn a_draw_after_one_of_the_device_takes_its_state_from_the_slot() {
    let sampler = mirostat();
    let tokens: Vec<Token> = (0..20).collect();
    let first = [row(1, &tokens, 19, asks(&sampler, 19, &[at([1.0; 8], 4)]))];
    let mut lists = fill(&[StepRow::of(&first[0])]);
    let mut next = row(1, &tokens, 20, asks(&sampler, 20, &[Start::Drawn]));
    next.input = Input::Drawn(next.slot);
    fill_again(&mut lists, &[StepRow::of(&next)]);
    let (rows, ..) = written(&mut lists);
    assert_eq!((rows[0].state_in, rows[0].state_out), (STATES as u32 + 8, STATES as u32 + 8));
    assert_eq!(rows[0].n_drawn, 5);
    // What the host knows better goes with the step.
    lists.outputs.programs.note_left(SlotId(1), DrawState { numbers: [2.0; 8], n_drawn: 7 });
    fill_again(&mut lists, &[StepRow::of(&next)]);
    let (rows, _, memory) = written(&mut lists);
    assert_eq!(f32::from_bits(memory[rows[0].state_in as usize - N_SLOTS]), 2.0);
    assert_eq!(rows[0].n_drawn, 7);
}

#[test]
fn guesses_of_a_program_with_a_state_are_a_chain_and_others_are_not() {
    let (with_state, without) = (mirostat(), plain());
    let tokens: Vec<Token> = (0..24).collect();
    let starts = [at([0.0; 8], 1), Start::Before, Start::Before];
    let batch = [
        row(0, &tokens, 21, asks(&with_state, 21, &starts)),
        row(1, &tokens, 22, asks(&without, 22, &starts[..2])),
    ];
    let rows: Vec<StepRow<'_>> = batch.iter().map(StepRow::of).collect();
    let room = Room { n_group_rows: 8, ..ROOM };
    let mut lists = StepLists::new(&[None]);
    fill_in(&mut lists, &rows, room);
    let (rows, chains, _) = written(&mut lists);
    assert_eq!(rows.iter().map(|row| row.n_drawn).collect::<Vec<_>>(), [1, 2, 3, 1, 2]);
    assert_eq!(chains, [0, 3, 4]);
    assert_eq!(rows.iter().map(|row| row.next).collect::<Vec<_>>(), [1, 2, NOWHERE, NOWHERE, NOWHERE]);
    assert_eq!((rows[1].state_in, rows[1].state_out), (STATES as u32, STATES as u32));
}

#[test]
fn a_group_takes_the_kernel_that_all_its_programs_fit() {
    let stateful = sampler(Definition::build(|b| {
        let state = b.state(0.0);
        state.set(state.get() + 1.0);
        (b.logits() + state.get()).draw(Source::SEED)
    }));
    let bounded = sampler(Definition::build(|b| library::min_p(b.logits(), 0.1).draw(Source::SEED)));
    let (plain, truncated) =
        (plain(), sampler(Definition::build(|b| library::top_k(b.logits(), 5.0).draw(Source::SEED))));
    let tokens: Vec<Token> = (0..24).collect();
    let starts = [at([0.0; 8], 1), Start::Before];
    let kinds = |asked: &[(&Sampler, usize)]| {
        let asked = asked.iter().zip(0..);
        let batch: Vec<_> = asked
            .map(|(&(sampler, n), slot)| row(slot, &tokens, 24 - n, asks(sampler, 24 - n, &starts[..n])))
            .collect();
        let rows: Vec<StepRow<'_>> = batch.iter().map(StepRow::of).collect();
        let lists = fill(&rows);
        lists.outputs.groups.iter().map(|group| group.program_kind).collect::<Vec<_>>()
    };
    assert_eq!(kinds(&[(&plain, 1), (&stateful, 1)]), [ProgramKind::SinglePass]);
    assert_eq!(
        kinds(&[(&plain, 2)]),
        [ProgramKind::SinglePass],
        "guesses without a state do not wait for one another"
    );
    assert_eq!(kinds(&[(&stateful, 2)]), [ProgramKind::Any], "those with one do");
    assert_eq!(kinds(&[(&plain, 1), (&bounded, 1)]), [ProgramKind::Passes]);
    assert_eq!(kinds(&[(&plain, 1), (&truncated, 1), (&bounded, 1)]), [ProgramKind::Any]);
    // Of another group nothing matters.
    let two_groups = kinds(&[(&truncated, 1), (&plain, 1), (&plain, 1), (&plain, 1), (&plain, 2)]);
    assert_eq!(two_groups, [ProgramKind::Any, ProgramKind::SinglePass]);
}

#[test]
fn draws_of_a_tree_start_where_the_ones_before_them_ended() {
    let sampler = mirostat();
    let tokens: Vec<Token> = (0..24).collect();
    // Behind 21 tokens one guess and another beside it, then one behind the first.
    let places: [(usize, usize, [u16; 1], usize); 3] =
        [(21, 22, [0b11_1111], 1), (22, 22, [0b101_1111], 2), (23, 23, [0b1011_1111], 2)];
    let stretches = [Stretch { first_cell: 0, extra_rotation: 0 }];
    let mut batch = vec![row(0, &tokens[..21], 20, asks(&sampler, 20, &[at([0.5; 8], 1)]))];
    for &(cell, end, ref live, n_rows) in &places {
        let evicted = Evicted {
            n_evicted: 0,
            rotation: end - 1,
            cell,
            n_whole: Some(1),
            live,
            open: cell,
            stretches: &stretches,
            packs: &[],
        };
        let node = row(0, &tokens[..end], end - 1, asks(&sampler, end - 1, &[Start::After { n_rows }]));
        batch.push(Row { evicted: Some(evicted), ..node });
    }
    let rows: Vec<StepRow<'_>> = batch.iter().map(StepRow::of).collect();
    let mut lists = fill(&rows);
    let drawn_slots: Vec<u32> = lists.outputs.rows.iter().map(|row| row.drawn_slot).collect();
    assert_eq!(drawn_slots, [0, NOWHERE, NOWHERE, NOWHERE], "the slot keeps nothing of the nodes");
    let (rows, chains, memory) = written(&mut lists);
    assert_eq!(rows.iter().map(|row| row.n_drawn).collect::<Vec<_>>(), [1, 2, 2, 3]);
    assert_eq!(chains, [0], "one after the other");
    assert_eq!(rows.iter().map(|row| row.next).collect::<Vec<_>>(), [1, 2, 3, NOWHERE]);
    assert_eq!(f32::from_bits(memory[rows[0].state_in as usize - N_SLOTS]), 0.5);
    assert_eq!([rows[1].state_in, rows[2].state_in], [rows[0].state_out; 2]);
    assert_eq!(rows[3].state_in, rows[1].state_out);
    let mut states: Vec<u32> = rows.iter().map(|row| row.state_out).collect();
    states.sort_unstable();
    assert!(states.windows(2).all(|pair| pair[0] + 8 <= pair[1]), "each has a place of its own: {states:?}");
}

#[test]
fn a_chain_that_a_group_ends_goes_on_from_the_slot() {
    let (with_state, without) = (mirostat(), plain());
    let tokens: Vec<Token> = (0..24).collect();
    let starts = [at([0.0; 8], 1), Start::Before, Start::Before];
    let batch = [
        row(1, &tokens, 22, asks(&without, 22, &[at([0.0; 8], 0), at([0.0; 8], 0)])),
        row(0, &tokens, 21, asks(&with_state, 21, &starts)),
    ];
    let rows: Vec<StepRow<'_>> = batch.iter().map(StepRow::of).collect();
    let mut lists = StepLists::new(&[None]);
    // In groups of four.
    fill_in(&mut lists, &rows, ROOM);
    assert_eq!(lists.outputs.groups.len(), 2);
    assert_eq!(lists.outputs.programs.chains, [0, 1, 2, 0]);
    let (rows, ..) = written(&mut lists);
    assert_eq!(rows.iter().map(|row| row.n_drawn).collect::<Vec<_>>(), [0, 0, 1, 2, 3]);
    assert_eq!(rows.iter().map(|row| row.next).collect::<Vec<_>>(), [NOWHERE, NOWHERE, 3, NOWHERE, NOWHERE]);
    assert_eq!(rows[4].state_in, rows[3].state_out);
}

#[test]
fn draws_that_find_no_planes_wait_for_others_on_the_device() {
    let sampler = penalties();
    let tokens: Vec<Token> = (0..20).collect();
    let batch: Vec<_> =
        (0..7).map(|slot| row(slot, &tokens, 19, asks(&sampler, 19, &[at([0.0; 8], 0)]))).collect();
    let rows: Vec<StepRow<'_>> = batch.iter().map(StepRow::of).collect();
    let room = Room { n_group_rows: 8, ..ROOM };
    let mut lists = StepLists::new(&[None]);
    fill_in(&mut lists, &rows, room);
    let (rows, chains, _) = written(&mut lists);
    assert_eq!(chains, [0, 1], "there are two sets");
    assert_eq!(rows.iter().map(|row| row.planes).collect::<Vec<_>>(), [0, 1, 0, 1, 0, 1, 0]);
    assert_eq!(rows.iter().map(|row| row.next).collect::<Vec<_>>(), [2, 3, 4, 5, 6, NOWHERE, NOWHERE]);
    // In groups of four, rows count anew.
    fill_in(&mut lists, &batch.iter().map(StepRow::of).collect::<Vec<_>>(), ROOM);
    let group = lists.outputs.groups[1].clone();
    assert_eq!((group.programs_start, group.n_programs, group.chains_start, group.n_chains), (4, 3, 2, 2));
    assert_eq!(lists.outputs.programs.chains[2..], [0, 1]);
    assert_eq!(lists.outputs.programs.rows[4].next, 2);
}

#[test]
fn without_the_kernel_the_host_draws_from_where_the_context_stands() {
    let sampler = mirostat();
    let tokens: Vec<Token> = (0..20).collect();
    let state = DrawState { numbers: [3.0; 8], n_drawn: 2 };
    let batch = [row(0, &tokens, 18, asks(&sampler, 18, &[Start::At(state), Start::Before]))];
    let rows: Vec<StepRow<'_>> = batch.iter().map(StepRow::of).collect();
    let room = Room { n_plane_sets: 0, ..ROOM };
    let mut lists = StepLists::new(&[None]);
    fill_in(&mut lists, &rows, room);
    assert!(lists.outputs.places.iter().all(|place| matches!(place, Place::Host { .. })));
    assert_eq!(lists.outputs.host_starts, [(0, state)]);
    assert!(!lists.can_be_captured());
}

/// A draw that takes the rows of others into account.
fn mixed() -> Sampler {
    sampler(Definition::build(|b| library::experts(b.logits(), b.member(0), b.member(1), 0.5).argmax()))
}

#[test]
fn a_mixture_names_the_rows_of_logits_behind_its_own_and_stays_in_one_group() {
    let (mixed, alone) = (mixed(), plain());
    let tokens: Vec<Token> = (0..20).collect();
    let draw = |sampler, n_others| OutputKind::Program {
        sampler,
        start: at([0.0; 8], 0),
        within: Within::All,
        others: Others::Rows(n_others),
    };
    // Groups are of four rows of logits.
    let kinds = [draw(&alone, 0), draw(&alone, 0), draw(&mixed, 2), OutputKind::Mixed, OutputKind::Mixed];
    let batch: Vec<_> =
        kinds.into_iter().zip(0..).map(|(kind, slot)| row(slot, &tokens, 19, vec![(19, kind)])).collect();
    let rows: Vec<StepRow<'_>> = batch.iter().map(StepRow::of).collect();
    let mut lists = StepLists::new(&[None]);
    fill_in(&mut lists, &rows, ROOM);
    let groups: Vec<_> = lists.outputs.groups.iter().map(|it| (it.n_logits_rows, it.n_outputs)).collect();
    assert_eq!(groups, [(2, 2), (3, 1)]);
    assert_eq!(lists.outputs.places[3..], [Place::Mixed; 2]);
    let (rows, _, memory) = written(&mut lists);
    assert_eq!((rows[1].n_members, rows[2].n_members), (0, 2));
    let first = rows[2].members_start as usize - N_SLOTS;
    assert_eq!(memory[first..first + 2], [1, 2]);

    // What the host draws needs the others' rows too.
    let rows: Vec<StepRow<'_>> = batch.iter().map(StepRow::of).collect();
    fill_in(&mut lists, &rows, Room { n_plane_sets: 0, ..ROOM });
    let by_host = |logits_row| Place::MixedByHost { group_idx: 1, logits_row };
    assert_eq!(lists.outputs.places[3..], [1, 2].map(by_host));
    assert!(lists.outputs.groups[1].has_host_work);
}

#[test]
fn a_mixture_stays_in_one_group_where_others_take_several_output_rows() {
    let (mixed, plain) = (mixed(), Sampler::greedy());
    let tokens: Vec<Token> = (0..20).collect();
    let asked = |kind| vec![(19, kind)];
    // Three output rows of two rows of logits, in a group of four.
    let lists_of_top = vec![(19, OutputKind::Top { n: 2 }), (19, OutputKind::Scores(&tokens[..2]))];
    let draw = OutputKind::Program {
        sampler: &mixed,
        start: Start::At(mixed.start()),
        within: Within::All,
        others: Others::Rows(1),
    };
    let rows = [
        row(0, &tokens, 19, lists_of_top),
        row(1, &tokens, 19, asked(OutputKind::Sample(&plain))),
        row(2, &tokens, 19, asked(draw)),
        row(3, &tokens, 19, asked(OutputKind::Mixed)),
    ];
    let rows: Vec<StepRow<'_>> = rows.iter().map(StepRow::of).collect();
    let mut lists = StepLists::new(&[None]);
    fill_in(&mut lists, &rows, ROOM);
    let n_logits_rows: Vec<usize> = lists.outputs.groups.iter().map(|group| group.n_logits_rows).collect();
    assert_eq!(n_logits_rows, [2, 2]);
}

#[test]
fn a_draw_names_the_rows_that_steps_before_have_kept() {
    let (mixed, free) = (mixed(), FreeRows::new(5));
    let places: Vec<KeptRow> = (0..5).map(|_| free.take().expect("one is free")).collect();
    let tokens: Vec<Token> = (0..20).collect();
    let draw = OutputKind::Program {
        sampler: &mixed,
        start: at([0.0; 8], 0),
        within: Within::All,
        others: Others::Kept(&places[3..]),
    };
    let kinds =
        [draw, OutputKind::Keep(&places[0]), OutputKind::Keep(&places[1]), OutputKind::Keep(&places[0])];
    let batch: Vec<_> =
        kinds.into_iter().zip(0..).map(|(kind, slot)| row(slot, &tokens, 19, vec![(19, kind)])).collect();
    let rows: Vec<StepRow<'_>> = batch.iter().map(StepRow::of).collect();
    let mut lists = fill(&rows);
    assert!(lists.can_be_captured(), "nothing leaves the device");
    assert_eq!(lists.outputs.places[1..], [1, 2, 3].map(|output_idx| Place::Kept { output_idx }));
    let kept = [KeptRun { row: 1, idx: 0, n_rows: 2 }, KeptRun { row: 3, idx: 0, n_rows: 1 }];
    assert_eq!(lists.outputs.groups[0].kept, kept);
    let (rows, _, memory) = written(&mut lists);
    assert_eq!((rows.len(), rows[0].n_members), (1, 2));
    let first = rows[0].members_start as usize - N_SLOTS;
    assert_eq!(memory[first..first + 2], [3, 4].map(|idx| KEPT_ROW | idx));
}

#[test]
fn the_rows_of_a_mixture_begin_with_what_its_first_member_draws() {
    let sampler = mixed();
    let tokens: Vec<Token> = (0..20).collect();
    let mut first = row(6, &tokens, 20, asks(&sampler, 20, &[Start::Drawn]));
    let mut other = row(7, &tokens[..9], 9, vec![(9, OutputKind::Mixed)]);
    (first.input, other.input) = (Input::Drawn(SlotId(6)), Input::Drawn(SlotId(6)));
    let words = [&first, &other].map(|row| StepRow::of(row).words(row.start, row.end()).collect::<Vec<_>>());
    assert_eq!(words, [[-7], [-7]]);
}
