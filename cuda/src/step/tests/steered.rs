//! Rows whose tokens are steered.

use trellis_engine::{Steered, Steering};

use super::*;

const N_LAYERS: usize = 4;

fn steering(value: f32) -> Steering {
    Steering::new(vec![(2, vec![value; 8])], N_LAYERS, 8).expect("it fits").expect("it is some")
}

/// Where what is added to each token lies, as the device is told; and the lists.
fn places(rows: &[Row<'_>]) -> (StepLists, Vec<u32>) {
    let rows: Vec<StepRow<'_>> = rows.iter().map(StepRow::of).collect();
    let mut given = given();
    let steered = rows.iter().filter_map(|row| row.steered).map(|steered| steered.steering);
    given.place_steerings(steered.collect::<Vec<_>>().into_iter(), N_LAYERS);
    let mut lists = StepLists::new(&[None]);
    lists.fill(&rows, &[], &mut slots(), &mut given, &CUTTINGS, ROOM);
    let layout = Layout::of(lists.dims());
    let mut memory = vec![7; n_words_max(layout.dims)];
    lists.write(&layout, &mut memory);
    let places = memory[layout.steering..][..layout.dims.n_tokens].to_vec();
    (lists, places)
}

#[test]
fn each_token_says_where_what_is_added_to_it_lies() {
    let (one, two) = (steering(1.0), steering(2.0));
    let tokens: Vec<Token> = (0..40).collect();
    let steered = |steering, from, row| Row { steered: Some(Steered { steering, from }), ..row };
    let rows = [
        row(1, &tokens[..3], 0, vec![]),
        // From its second token on, from one before it on, and not yet.
        steered(&one, 5, row(2, &tokens[..7], 4, vec![])),
        steered(&two, 0, row(3, &tokens[..9], 7, vec![])),
        steered(&two, 9, row(4, &tokens[..9], 7, vec![])),
        steered(&one, 20, Row { input: Input::Drawn(SlotId(5)), ..row(5, &tokens[..20], 20, vec![]) }),
        row(6, &tokens[..2], 0, vec![]),
    ];
    let (lists, places) = places(&rows);
    let [a, b] = [places[4], places[6]];
    assert!(a != b && [a, b].iter().all(|&place| place as usize >= GIVEN && place.is_multiple_of(4)));
    let none = NOWHERE;
    assert_eq!(places, [none, none, none, none, a, a, b, b, none, none, a, none, none]);
    assert_eq!(lists.dims().steering, Steers::Some);
}

#[test]
fn a_step_without_steered_tokens_is_what_it_was() {
    let one = steering(1.0);
    let tokens: Vec<Token> = (0..40).collect();
    let not_yet =
        Row { steered: Some(Steered { steering: &one, from: 9 }), ..row(1, &tokens[..9], 0, vec![]) };
    for rows in [[row(1, &tokens[..9], 0, vec![])], [not_yet]] {
        let rows: Vec<StepRow<'_>> = rows.iter().map(StepRow::of).collect();
        let dims = lists(&rows, &[]).dims();
        assert_eq!(dims.steering, Steers::None);
        let layout = Layout::of(dims);
        assert_eq!(layout.steering, layout.holes, "it takes no room");
    }
}
