//! Rows that come back whole, and what the host reads out of them.

use super::*;

#[test]
fn rows_come_back_whole_with_a_captured_step_as_far_as_there_is_room() {
    let (tokens, sampler): (Vec<Token>, _) = ((0..60).collect(), Sampler::greedy());
    let drawn = row(0, &tokens, 59, vec![(59, OutputKind::Sample(&sampler))]);
    let full = |slot| row(slot, &tokens[..20], 19, vec![(19, OutputKind::Full)]);
    let rows = [drawn, full(1), full(2), full(3)];
    let rows: Vec<StepRow<'_>> = rows.iter().map(StepRow::of).collect();
    let starts = |lists: &StepLists| -> Vec<Option<usize>> {
        let of = |place: &Place| match place {
            Place::Full { start, .. } | Place::Hidden { start, .. } => Some(*start),
            _ => None,
        };
        lists.outputs.places.iter().filter_map(of).collect()
    };
    let fitting = lists(&rows[..3], &[]);
    assert!(fitting.can_be_captured());
    assert_eq!(starts(&fitting), [Some(0), Some(100)]);
    let whole = |of, row, n_rows, start| WholeRows { of, row, n_rows, start };
    assert_eq!(fitting.outputs.groups[0].wholes, [whole(RowOf::Logits, 1, 2, 0)], "in one copy");
    let too_many = lists(&rows, &[]);
    assert!(!too_many.can_be_captured(), "the host fetches the third");
    assert_eq!(starts(&too_many), [Some(0), Some(100), None]);
    // Hidden states between them.
    let hidden = |slot| row(slot, &tokens[..20], 19, vec![(19, OutputKind::Embedding)]);
    let rows = [hidden(1), hidden(2), full(3), hidden(4)];
    let rows: Vec<StepRow<'_>> = rows.iter().map(StepRow::of).collect();
    let mixed = lists(&rows, &[]);
    assert!(mixed.can_be_captured());
    let wholes =
        [whole(RowOf::Hidden, 0, 2, 0), whole(RowOf::Logits, 2, 1, 16), whole(RowOf::Hidden, 3, 1, 116)];
    assert_eq!(mixed.outputs.groups[0].wholes, wholes);
}

#[test]
fn a_row_that_came_back_whole_is_read_as_what_was_asked() {
    let logprobs: Vec<f32> = [0.5f32, 0.125, 0.25, 0.125].map(f32::ln).into();
    let mut scratch = Scratch::default();
    let Ok(Output::Top { candidates, entropy }) = Reading::Top(2).read(&logprobs, &mut scratch) else {
        panic!("a list")
    };
    assert_eq!(candidates.iter().map(|it| it.token).collect::<Vec<_>>(), [0, 2]);
    assert!((candidates[1].logprob - 0.25f32.ln()).abs() < 1e-6, "{candidates:?}");
    assert!((entropy - 1.75 * 2f32.ln()).abs() < 1e-6, "{entropy}");
    let scores = Reading::Scores([2, 0].into()).read(&logprobs, &mut scratch);
    assert_eq!(scores, Ok(Output::Scores(vec![logprobs[2], logprobs[0]])));

    let halves = [1.5f32, -2.0, 0.25].map(|x| u32::from(half::bf16::from_f32(x).to_bits()));
    let words = [halves[0] | halves[1] << 16, halves[2]];
    assert_eq!(hidden_state(&words, 3, Dtype::Bf16), Ok(vec![1.5, -2.0, 0.25]));
    let nan = [u32::from(half::f16::NAN.to_bits())];
    assert_eq!(hidden_state(&nan, 1, Dtype::F16), Err(OutputFault::NotANumber));
}

#[test]
fn what_a_sampler_ranks_is_listed_and_what_a_program_ranks_comes_back() {
    let tokens: Vec<Token> = (0..20).collect();
    let mask = |allowed: [Token; 2]| {
        let mut mask = TokenMask::none(100);
        allowed.into_iter().for_each(|token| mask.set(token, true));
        Arc::new(mask)
    };
    let (own, within) = (mask([1, 3]), mask([1, 2]));
    let chain = Arc::new(Sampler { mask: Some(own), repetition_penalty: 1.5, ..Sampler::greedy() });
    let shape = RowShape { vocab_size: 100, n_positions: 64 };
    let program = Program::new(Definition::build_row(|b| b.logits() * -1.0), shape).expect("it is in order");
    let put_on = Some(Box::new(PutOn::new(Arc::new(program))));
    let program = Arc::new(Sampler { program: put_on, ..Sampler::greedy() });
    let rows = [
        row(1, &tokens, 19, vec![(19, OutputKind::Ranked { sampler: &chain, within: Some(&within), n: 5 })]),
        row(2, &tokens, 19, vec![(19, OutputKind::Ranked { sampler: &program, within: None, n: 3 })]),
    ];
    let rows: Vec<StepRow<'_>> = rows.iter().map(StepRow::of).collect();
    let mut lists = lists(&rows, &[]);
    assert!(lists.can_be_captured());
    let outputs = &mut lists.outputs;
    assert_eq!(outputs.places, [Place::Ranked { output_idx: 0 }, Place::Raw { start: 0 }]);
    let listed = outputs.rows[0];
    assert_eq!((listed.wants, listed.n_top, listed.drawn_slot), (Wants::RANKED, 5, NOWHERE));
    let tail = outputs.finish(0).to_vec();
    assert_eq!(tail[2 * outputs.rows[0].mask_start as usize], 1 << 1, "what both masks allow");

    let (request_idx, reading) = outputs.readings.remove(0);
    assert_eq!((request_idx, outputs.readings.len()), (1, 0));
    let logits: Vec<f32> = (0..100).map(|idx| idx as f32).collect();
    let Ok(Output::Ranked(found)) = reading.read(&logits, &mut Scratch::default()) else { panic!("a list") };
    assert_eq!(found.iter().map(|it| it.token).collect::<Vec<_>>(), [0, 1, 2]);
}
