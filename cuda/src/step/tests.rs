//! Steps written out, without a device.

use trellis_engine::batch::{FollowUp, OutputKind, OutputRequest, PageCopy, PageId, Row, SlotId, Token};
use trellis_engine::sampling::Sampler;

use super::*;
use crate::ops::logits::{NOWHERE, OutputRow, Wants};
use crate::words::from_words;

const ROOM: Room = Room { n_group_rows: 4, n_outputs: 64 };
const OUTPUT_WORDS: usize = size_of::<OutputRow>() / 4;

fn row<'a>(slot: u32, tokens: &'a [Token], start: usize, outputs: Vec<(usize, OutputKind<'a>)>) -> Row<'a> {
    Row {
        slot: SlotId(slot),
        tokens,
        start,
        pages: (0..tokens.len() as u32 / 16 + 1).map(|idx| PageId(100 * slot + idx)).collect(),
        outputs: outputs.into_iter().map(|(position, kind)| OutputRequest { position, kind }).collect(),
        follow_up: FollowUp::Unknown,
    }
}

fn plan(rows: &[StepRow<'_>], copies: &[PageCopy]) -> StepPlan {
    let mut plan = StepPlan::default();
    plan.fill(rows, copies, 64, ROOM);
    plan
}

#[test]
fn lists_lie_behind_each_other() {
    let dims = Dims {
        n_tokens: 5,
        n_rows: 3,
        page_table_stride: 8,
        n_items: 2,
        n_tiles: 1,
        n_logits_rows: 3,
        n_outputs: 4,
        n_groups: 2,
    };
    let layout = Layout::of(dims);
    let ends = [
        (layout.tokens, 5),
        (layout.positions, 5),
        (layout.kv_pages, 5),
        (layout.row_start, 4),
        (layout.row_pos0, 3),
        (layout.page_table, 24),
        (layout.items, 4),
        (layout.tiles, 2),
        (layout.gather, 3),
        (layout.output_rows, 4 * OUTPUT_WORDS),
        (layout.tail, 0),
    ];
    let mut end = Count::Outputs { group_idx: 1 }.word() + 1;
    for (start, n) in ends {
        assert!(start >= end && start.is_multiple_of(4), "{start} behind {end}");
        end = start + n;
    }
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
    let mut plan = plan(&rows, &copies);
    assert!(!plan.is_plain_decode());
    let dims = plan.dims();
    assert_eq!((dims.n_tokens, dims.n_rows, dims.n_items, dims.n_tiles), (21, 2, 1, 1));
    assert_eq!((dims.n_logits_rows, dims.n_outputs, dims.n_groups), (2, 3, 1));
    let layout = Layout::of(dims);
    let mut memory = vec![u32::MAX; StepPlan::n_words_max(dims)];
    let written = plan.write(&layout, &mut memory);
    let words = |start: usize, n: usize| memory[start..start + n].to_vec();
    assert_eq!(words(0, 4), [21, 1, 1, 1]);
    assert_eq!(words(layout.tokens + 19, 2), [39, 532]);
    assert_eq!(words(layout.positions, 2), [20, 21]);
    assert_eq!(words(layout.positions + 20, 1), [32]);
    assert_eq!(words(layout.kv_pages + 11, 2), [101, 102]);
    assert_eq!(words(layout.kv_pages + 20, 1), [202]);
    assert_eq!(words(layout.row_start, 3), [0, 20, 21]);
    assert_eq!(words(layout.row_pos0, 2), [20, 32]);
    assert_eq!(words(layout.page_table, 3), [100, 101, 102]);
    assert_eq!(words(layout.page_table + dims.page_table_stride, 3), [200, 201, 202]);
    assert_eq!(words(layout.items, 2), [1, 0]);
    assert_eq!(words(layout.tiles, 2), [0, 0]);
    assert_eq!(words(layout.gather, 2), [19, 20]);
    assert_eq!(words(layout.tail, 3), [7, 8, 9]);
    assert_eq!(words(written.copies, 2), [4, 5]);
    assert_eq!(written.n_words, written.copies + 2);
    // Three scores, then from the next whole entry on five entries of a list.
    assert_eq!(written.n_extra_words, 2 * (2 + 5));

    let rows: &[OutputRow] = from_words(&memory, layout.output_rows, 3);
    assert_eq!(
        (rows[0].wants, rows[0].logits_row, rows[0].score_start, rows[0].n_scores),
        (Wants::SCORES, 0, 0, 3)
    );
    assert_eq!((rows[1].wants, rows[1].logits_row, rows[1].top_start, rows[1].n_top), (Wants::TOP, 0, 2, 5));
    let draw = rows[2];
    assert_eq!((draw.wants, draw.logits_row, draw.history_append), (Wants::SAMPLE, 1, 2));
    assert_eq!((draw.n_history, draw.n_bias, draw.mask_start, draw.position[0]), (3, 2, NOWHERE, 33));
    let history = draw.history_start as usize - N_SLOTS;
    assert_eq!(words(history, 3), [530, 531, 532]);
    let bias = 2 * draw.bias_start as usize - N_SLOTS;
    assert_eq!(words(bias, 4), [2, (-1f32).to_bits(), 9, 1f32.to_bits()]);
}

#[test]
fn a_successor_names_the_token_that_only_the_device_knows() {
    let tokens: Vec<Token> = (10..27).collect();
    let sampler = Sampler { presence_penalty: 0.5, ..Sampler::greedy() };
    let before = row(3, &tokens, 16, vec![(16, OutputKind::Sample(&sampler))]);
    let after = StepRow::successor(&before).expect("it draws, and its last page has room");
    assert_eq!((after.start, after.end(), after.n_tokens()), (17, 18, 1));
    assert_eq!(after.words(15, 18).collect::<Vec<_>>(), [25, 26, -4]);
    assert_eq!(after.known(18), None);
    let mut plan = plan(std::slice::from_ref(&after), &[]);
    assert!(plan.is_plain_decode());
    let layout = Layout::of(plan.dims());
    let mut memory = vec![0; StepPlan::n_words_max(plan.dims())];
    plan.write(&layout, &mut memory);
    assert_eq!(memory[layout.tokens] as i32, -4);
    let rows: &[OutputRow] = from_words(&memory, layout.output_rows, 1);
    let history = rows[0].history_start as usize - N_SLOTS;
    assert_eq!(memory[history + 17] as i32, -4, "the penalties see it too");

    let full: Vec<Token> = (0..32).collect();
    let mut before = row(3, &full, 31, vec![(31, OutputKind::Sample(&sampler))]);
    before.pages.truncate(2);
    assert!(StepRow::successor(&before).is_none(), "there is no page for its token");
    let scores = row(3, &tokens, 16, vec![(16, OutputKind::Top { n: 3 })]);
    assert!(StepRow::successor(&scores).is_none(), "it draws nothing");
}

#[test]
fn what_the_device_has_no_room_for_is_left_to_the_host() {
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
    let plan = plan(&rows, &[]);
    let host = Place::Host { group_idx: 0, logits_row: 1 };
    let hidden = Place::Hidden { group_idx: 0, logits_row: 2 };
    let places = [Place::Scores { output_idx: 0 }, host, host, hidden];
    assert_eq!(plan.outputs.places, places);
    assert!(plan.outputs.groups[0].has_host_work);
}

#[test]
fn positions_are_cut_into_groups() {
    let tokens: Vec<Token> = (0..30).collect();
    let asked = (0..11).map(|position| (position, OutputKind::Scores(&tokens[..2]))).collect();
    let rows = [row(0, &tokens, 0, asked)];
    let rows: Vec<StepRow<'_>> = rows.iter().map(StepRow::of).collect();
    let plan = plan(&rows, &[]);
    let groups: Vec<_> = plan
        .outputs
        .groups
        .iter()
        .map(|group| (group.logits_start, group.n_logits_rows, group.outputs_start))
        .collect();
    assert_eq!(groups, [(0, 4, 0), (4, 4, 4), (8, 3, 8)]);
    // Each group's rows of logits are numbered from its own first.
    assert_eq!(plan.outputs.rows[8].logits_row, 0);
}
