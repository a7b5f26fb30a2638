use super::house::{House, Kind, PLAIN};
use super::pages;

const PAGE_BYTES: u64 = PLAIN.page_bytes as u64;

fn n_given_up(house: &mut House) -> [u64; 2] {
    [0, 1].map(|place| house.stats(place).n_pages_given_up)
}

#[test]
fn what_is_given_up_of_all_models_is_bounded_and_what_is_free_anyway_goes_before_it() {
    // Neither has more than its longest context needs.
    let kind = Kind { n_pages: PLAIN.n_longest, ..PLAIN };
    let mut house = House::new(&[kind, kind], 1);
    for actor in 0..8 {
        for place in [0, 1] {
            let talk = house.create(place, actor);
            house.ask(talk, pages(9));
        }
        house.settle();
    }
    assert!([0, 1].iter().all(|&place| house.stats(place).n_swaps_out >= 20), "both have KV in host memory");
    house.ledger().gives_nothing_back = true;
    house.ledger().says_it_keeps = true;
    assert_eq!(house.relieve(12 * PAGE_BYTES), 0);
    assert_eq!(n_given_up(&mut house), [0, 0], "nothing is given up for memory that does not go");
    house.ledger().says_it_keeps = false;
    // Whatever goes back to the system, or nothing: contexts lose no more than was asked for.
    assert_eq!(house.relieve(12 * PAGE_BYTES), 0);
    assert_eq!(n_given_up(&mut house), [12, 0]);
    house.ledger().gives_nothing_back = false;
    assert_eq!(house.relieve(12 * PAGE_BYTES), 12 * PAGE_BYTES, "no turn takes longer, however much is free");
    assert_eq!(n_given_up(&mut house), [12, 0], "so much was free anyway");
    while n_given_up(&mut house) == [12, 0] {
        assert_eq!(house.relieve(PAGE_BYTES), PAGE_BYTES);
    }
    assert_eq!(n_given_up(&mut house), [13, 0]);
    assert_eq!(house.relieve(3 * PAGE_BYTES), 3 * PAGE_BYTES, "nothing is free and has memory");
    assert_eq!(n_given_up(&mut house), [16, 0]);
    // What one has not, the other gives up.
    house.relieve(u64::MAX);
    assert!(n_given_up(&mut house).iter().all(|&n| n >= 15));
    for talk in 0..house.talks.len() {
        house.ask(talk, 1);
        house.settle();
    }
}

#[test]
fn what_is_free_between_what_is_not_goes_back_before_anything_is_given_up() {
    const N_PIECE_PAGES: u32 = 8;
    let kind = Kind { n_pages: PLAIN.n_longest, ..PLAIN };
    let mut house = House::new(&[kind], 1);
    house.ledger().n_host_piece_pages = Some(N_PIECE_PAGES);
    let ask = |house: &mut House, talks: &[usize], n_pages: usize| {
        for &talk in talks {
            house.ask(talk, n_pages);
            house.settle();
        }
    };
    // Of six pages each; those that have come back to the device at the end have left holes where they were.
    let talks: Vec<usize> = (0..8).map(|actor| house.create(0, actor)).collect();
    ask(&mut house, &talks, pages(6));
    ask(&mut house, &talks, 1);
    assert_eq!(house.relieve(0), 0, "nothing was asked for");
    // Contexts lose nothing as long as there is a piece that can come free.
    let mut n_freed_bytes = 0;
    loop {
        let n_bytes = house.relieve(PAGE_BYTES);
        if house.stats(0).n_pages_given_up > 0 {
            break;
        }
        assert!(n_bytes > 0, "a turn in which nothing goes gives up KV");
        n_freed_bytes += n_bytes;
    }
    let n_gathered = house.ledger().n_gathered;
    println!("{n_freed_bytes} bytes went of what was free, for which {n_gathered} pages were moved");
    assert!(n_gathered > 0 && n_freed_bytes > 0);
    // The contexts have what they had.
    ask(&mut house, &talks, 1);
    house.relieve(u64::MAX);
    ask(&mut house, &talks, 1);
}

#[test]
fn nothing_waits_for_a_step_behind_which_pages_move() {
    let kind = Kind { n_pages: PLAIN.n_longest, ..PLAIN };
    let mut house = House::new(&[kind], 1);
    let talks: Vec<usize> = (0..4).map(|actor| house.create(0, actor)).collect();
    for &talk in &talks {
        house.ask(talk, pages(6));
        house.settle();
    }
    house.ask(talks[0], 1);
    assert_eq!(house.relieve_beside_step(PAGE_BYTES), [Some(PAGE_BYTES), None], "nothing moves");
    house.settle();
    house.ledger().is_moving = true;
    house.ask(talks[1], 1);
    assert_eq!(house.relieve_beside_step(PAGE_BYTES), [None, Some(PAGE_BYTES)], "put off, and done");
    house.settle();
    assert_eq!(house.relieve(PAGE_BYTES), PAGE_BYTES, "no step is under way");
}
