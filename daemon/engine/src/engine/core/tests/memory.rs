//! Memory that goes from one model of a device to another, over backends that show every mistake with pages.

mod costs;
mod house;
mod relief;

use std::collections::HashMap;

use self::house::{House, Kind, N_LONGEST, PLAIN, Waits};
use crate::backend::PAGE_LEN;
use crate::command::Answer;
use crate::completion::Tag;
use crate::engine::core::EngineInput;
use crate::error::EngineError;
use crate::scheduler::tests::hash_backend::mix;

/// Tokens of a context that fills so many pages.
fn pages(n: usize) -> usize {
    n * PAGE_LEN
}

#[test]
fn a_model_gets_more_than_its_share_while_another_has_no_use_for_it() {
    for n_under_way in [1, 2] {
        let mut house = House::new(&[PLAIN, PLAIN], n_under_way);
        let busy: Vec<usize> = (0..7).map(|actor| house.create(0, actor)).collect();
        busy.iter().for_each(|&talk| house.run(talk, pages(8), Some(30)));
        house.settle();
        assert_eq!((house.n_pages(0), house.n_pages(1)), (70, 10));
        let stats = house.stats(0);
        assert_eq!((stats.n_pages, stats.n_swaps_out, stats.n_tokens_again), (70, 0, 0), "{stats:?}");
        // Contexts that wait for nothing make room, those that waited longest first, as few as needed.
        for talk in [0, 1, 2] {
            house.ask(talk, 0);
        }
        house.settle();
        let others: Vec<usize> = (0..3).map(|actor| house.create(1, actor)).collect();
        others.iter().for_each(|&talk| house.ask(talk, pages(9)));
        house.settle();
        assert!(house.n_pages(1) >= 27, "{} pages", house.n_pages(1));
        let swaps = house.stats(0).n_swaps_out;
        assert!((17..40).contains(&swaps), "{swaps} pages moved out");
        let kept = house.stats(0).n_swaps_in;
        [0, 1, 2].into_iter().for_each(|talk| house.ask(talk, 0));
        house.settle();
        assert_eq!(house.stats(0).n_swaps_in, kept, "who was served last keeps its pages");
        (0..7).for_each(|talk| house.ask(talk, 0));
        house.settle();
        assert_eq!(house.stats(0).n_tokens_again + house.stats(1).n_tokens_again, 0);
    }
}

#[test]
fn what_is_missed_least_goes_first_whosever_it_is() {
    // Contexts of both models that wait for nothing; the next of the first model's needs pages.
    for is_own_older in [true, false] {
        let mut house = House::new(&[Kind { n_pages: 20, ..PLAIN }; 2], 1);
        let [own, theirs] = [0, 1].map(|place| house.create(place, 1 + place as u32));
        let order = if is_own_older { [own, theirs] } else { [theirs, own] };
        for talk in order {
            house.ask(talk, pages(10));
            house.settle();
        }
        // Another of each fills what is left, and is served later.
        for place in [0, 1] {
            let talk = house.create(place, 3);
            house.ask(talk, pages(10));
            house.settle();
        }
        let talk = house.create(0, 4);
        house.ask(talk, pages(6));
        house.settle();
        let expected = if is_own_older { (20, 20) } else { (26, 14) };
        assert_eq!((house.n_pages(0), house.n_pages(1)), expected, "own older: {is_own_older}");
        let moved = [0, 1].map(|place| house.stats(place).n_swaps_out);
        assert_eq!(moved, if is_own_older { [6, 0] } else { [0, 6] });
    }
    // What the prefix cache alone holds goes before any context.
    let mut house = House::new(&[Kind { n_pages: 20, ..PLAIN }; 2], 1);
    let own = house.create(0, 1);
    house.ask(own, pages(10));
    house.settle();
    for _ in 0..2 {
        let talk = house.create(1, 2);
        house.ask(talk, pages(10));
        house.settle();
        house.release(talk);
        house.settle();
    }
    for actor in [3, 4] {
        let talk = house.create(0, actor);
        house.ask(talk, pages(10));
        house.settle();
    }
    assert_eq!((house.n_pages(0), house.n_pages(1)), (30, 10));
    assert_eq!(house.stats(0).n_swaps_out + house.stats(1).n_swaps_out, 0);
    assert_eq!(house.stats(1).n_pages_cached, 10, "the younger half");
}

#[test]
fn endless_work_of_two_models_moves_a_part_at_most_once_in_32_steps() {
    for n_under_way in [1, 2] {
        let kind = Kind { n_granule_pages: 10, n_pages: 130, n_longest: 100, ..PLAIN };
        let mut house = House::new(&[kind, kind], n_under_way);
        for n in 0..12 {
            let talk = house.create(usize::from(n % 3 == 0), n as u32);
            house.run(talk, pages(20), None);
        }
        let (mut n_before, mut n_quiet) = (0, 0);
        while house.ledger().n_steps < 2000 {
            house.step();
            n_quiet = if house.n_tokens > n_before { 0 } else { n_quiet + 1 };
            n_before = house.n_tokens;
            assert!(n_quiet < 200, "nothing is decoded");
        }
        assert!(house.talks.iter().all(|talk| talk.waits == Waits::ForTokens && talk.tokens.len() > 400));
        let mut gains = std::mem::take(&mut house.ledger().gains);
        // What is free at first is given out at no cost.
        gains.retain(|&(at, _)| at > 100);
        let follows = gains.len() > 5 && [0, 1].iter().all(|place| gains.iter().any(|gain| gain.1 == *place));
        assert!(follows, "memory follows who has had least: {gains:?}");
        let least = gains.windows(2).map(|pair| pair[1].0 - pair[0].0).min();
        assert!(least >= Some(32), "{gains:?}");
    }
}

/// While contexts decode, the next pages move once those have that were asked for before.
#[test]
fn pages_that_move_while_no_step_runs_leave_room_for_one() {
    for decodes in [true, false] {
        let mut house = House::new(&[Kind { page_bytes: 4 << 20, n_longest: 40, ..PLAIN }], 1);
        let idle = house.create(0, 1);
        house.ask(idle, pages(20));
        house.settle();
        if decodes {
            let decoding = house.create(0, 2);
            house.run(decoding, 8, Some(6));
            house.settle();
        }
        assert_eq!((house.n_pauses, house.stats(0).n_swaps_out), (0, 0));
        let asked = house.create(0, 3);
        house.ask(asked, pages(30));
        house.settle();
        assert!(house.stats(0).n_swaps_out >= 10);
        assert_eq!(house.n_pauses > 0, decodes, "{} pauses", house.n_pauses);
    }
}

#[test]
fn contexts_that_have_nothing_on_the_device_are_not_looked_at_for_pages() {
    for n_models in [1, 2] {
        let kind = Kind { n_granule_pages: 10, n_pages: 130, n_longest: 100, n_host_pages: 2000, ..PLAIN };
        let mut house = House::new(&vec![kind; n_models], 2);
        for n in 0..1000 {
            let talk = house.create(n % n_models, 0);
            house.ask(talk, pages(1));
            if n % 10 == 9 {
                house.settle();
            }
        }
        for n in 0..12 {
            let talk = house.create(usize::from(n % 3 == 0) % n_models, n as u32);
            house.run(talk, pages(20), None);
        }
        while house.ledger().n_steps < 1500 {
            house.step();
        }
        let n_holders: Vec<usize> = (0..n_models).map(|place| house.n_holders(place)).collect();
        assert!(n_holders.iter().sum::<usize>() < 50, "{n_holders:?}");
        // They are there all the same.
        house.ask(0, 0);
        let n_answers = house.n_answers;
        while house.n_answers == n_answers {
            house.step();
        }
    }
}

#[test]
fn a_job_that_needs_more_than_its_model_has_waits_for_pages_of_others() {
    for n_under_way in [1, 2] {
        let mut house = House::new(&[PLAIN, PLAIN], n_under_way);
        // The other has taken all that the first can do without, and works all the time.
        for actor in 0..7 {
            let talk = house.create(1, actor);
            house.run(talk, pages(8), Some(30));
        }
        house.settle();
        assert_eq!((house.n_pages(0), house.n_pages(1)), (10, 70));
        for talk in 0..7 {
            house.release(6 - talk);
        }
        for actor in 0..12 {
            let talk = house.create(1, actor);
            house.run(talk, pages(5), Some(75));
        }
        let first = house.create_for_job(20, 7);
        let drawn = house.draw_together(&first, pages(10) - 5);
        let mut n_pages_most = 0;
        while house.step() {
            n_pages_most = n_pages_most.max(house.n_pages(0));
        }
        house.settle();
        assert!(matches!(house.take_drawn(drawn), Ok(Answer::Together(drawn)) if drawn.len() == 7));
        assert!(n_pages_most >= 70);
        // One that needs what the other cannot do without is refused, with what the model could have.
        let first = house.create_for_job(21, 8);
        let drawn = house.draw_together(&first, pages(10) - 5);
        house.settle();
        let refused = house.take_drawn(drawn);
        assert!(matches!(refused, Err(EngineError::NoPages { n_needed: 80, n_pages: 70 })), "{refused:?}");
    }
}

#[test]
fn a_job_does_not_count_on_pages_of_its_own_members() {
    for n_under_way in [1, 2] {
        let mut house = House::new(&[PLAIN, PLAIN], n_under_way);
        let members = house.create_for_job(20, 5);
        let drawn = house.draw_together(&members, pages(7) - 5);
        house.settle();
        assert!(house.take_drawn(drawn).is_ok());
        // The other model is full of contexts that wait for nothing and were served since.
        for actor in 0..4 {
            let talk = house.create(1, actor);
            house.ask(talk, pages(9));
        }
        house.settle();
        assert!(house.n_pages(0) < 5 * 9);
        let drawn = house.draw_grown(&members, pages(7) - 5..pages(9) - 5);
        house.settle();
        assert!(matches!(house.take_drawn(drawn), Ok(Answer::Together(drawn)) if drawn.len() == 5));
        assert!(house.n_pages(0) >= 5 * 9);
    }
}

#[test]
fn models_share_less_and_more_when_the_desk_says_so() {
    let mut house = House::new(&[PLAIN, Kind { page_bytes: 64, ..PLAIN }], 2);
    let before = house.ledger().total();
    for (place, n) in [(0, 4), (1, 2)] {
        for actor in 0..n {
            let talk = house.create(place, actor);
            house.ask(talk, pages(9));
        }
    }
    house.settle();
    // What is free goes first, then what waited longest; a bound below what they need is refused.
    house.share(3700);
    house.settle();
    assert!(matches!(house.shared.pop(), Some(Ok(()))));
    assert!(house.ledger().total() <= 3700);
    let least = (N_LONGEST * (128 + 64)) as u64;
    house.inputs.push(EngineInput::SetKvBytes { kv_bytes: least - 1, tag: Tag::new(0, 0) });
    house.settle();
    let refused = house.shared.pop();
    assert!(
        matches!(&refused, Some(Err(EngineError::KvTooSmall { needed_bytes, kv_bytes }))
            if (*needed_bytes, *kv_bytes) == (least, least - 1)),
        "{refused:?}"
    );
    house.share(least);
    house.settle();
    assert_eq!((house.n_pages(0), house.n_pages(1)), (N_LONGEST, N_LONGEST));
    (0..6).for_each(|talk| house.ask(talk, 0));
    house.settle();
    house.share(before);
    house.settle();
    assert!(house.ledger().total() + 2 * 128 > before, "what nobody has is given out");
    assert!(house.shared.drain(..).all(|shared| shared.is_ok()));
    // Where there is no memory, all go on with what they have.
    house.ledger().is_full = true;
    house.share(2 * before);
    house.settle();
    assert!(matches!(house.shared.pop(), Some(Ok(()))));
    assert!(house.ledger().total() <= before);
    (0..6).for_each(|talk| house.ask(talk, 0));
    house.settle();
}

#[test]
fn a_model_brings_its_pages_and_takes_them_with_it() {
    let mut house = House::new(&[PLAIN], 2);
    let talk = house.create(0, 1);
    house.ask(talk, pages(9));
    house.settle();
    let all = house.ledger().total();
    house.share(all - 20 * 128);
    house.settle();
    assert_eq!(house.n_pages(0), 20);
    house.add(Kind { n_pages: 20, ..PLAIN }, 2);
    assert_eq!((house.n_pages(0), house.n_pages(1)), (20, 20), "nobody gives anything up");
    let other = house.create(1, 1);
    house.ask(other, pages(9));
    house.settle();
    house.remove(1);
    assert_eq!(house.n_pages(0), 20, "it is given out once its backend is gone");
    house.share(all);
    house.settle();
    assert_eq!(house.n_pages(0), 40);
    assert!(house.shared.drain(..).all(|shared| shared.is_ok()));
    house.ask(talk, 1);
    house.settle();
}

#[test]
fn whatever_is_asked_of_two_models_is_answered_within_the_bytes_and_three_times_the_work() {
    let (mut n_answers, mut n_tokens, mut n_gains, mut n_swaps) = (0, 0, 0, 0);
    for seed in 0..60_u64 {
        let mut state = mix(seed + 1);
        let mut below = move |n: usize| {
            state = mix(state.wrapping_add(0x9e37_79b9_7f4a_7c15));
            (state % n as u64) as usize
        };
        let kinds = [(); 2].map(|()| {
            let n_granule_pages = 1 + below(5);
            Kind {
                page_bytes: 64 << below(3),
                n_granule_pages,
                n_pages: N_LONGEST.next_multiple_of(n_granule_pages) + n_granule_pages * below(6),
                n_host_pages: [0, 7, 300][below(3)],
                n_longest: N_LONGEST,
            }
        });
        let mut house = House::new(&kinds, 1 + below(2));
        let mut n_needed = 0;
        let mut busy = 0;
        for n_acts in 0..400 {
            // Now the one is asked more, now the other.
            if n_acts % 60 == 0 {
                busy = below(2);
            }
            let place = if below(8) == 0 { 1 - busy } else { busy };
            let free: Vec<usize> =
                (0..house.talks.len()).filter(|&talk| house.talks[talk].waits == Waits::Nothing).collect();
            let of: Vec<usize> = free
                .iter()
                .copied()
                .filter(|&talk| usize::from(house.talks[talk].id.model.place) == place)
                .collect();
            match below(10) {
                0..2 if house.talks.len() < 14 => {
                    house.create(place, below(3) as u32);
                }
                2 if free.len() > 6 => house.release(free[below(free.len())]),
                3 if !house.talks.is_empty() && below(4) == 0 => house.release(below(house.talks.len())),
                4..10 if !of.is_empty() => {
                    let talk = of[below(of.len())];
                    let n = 1 + below(60);
                    if house.talks[talk].tokens.len() + n + 20 > pages(N_LONGEST) {
                        house.release(talk);
                    } else if below(3) == 0 {
                        n_needed += n + 20;
                        house.run(talk, n, Some(20));
                    } else {
                        n_needed += n;
                        house.ask(talk, n);
                    }
                }
                _ => {}
            }
            if below(3) == 0 {
                house.step();
            }
        }
        house.settle();
        (n_answers, n_tokens) = (n_answers + house.n_answers, n_tokens + house.n_tokens);
        n_gains += house.ledger().gains.len();
        let stats = [house.stats(0), house.stats(1)];
        n_swaps += stats.iter().map(|stats| stats.n_swaps_out).sum::<u64>();
        let n_computed: u64 = stats.iter().map(|stats| stats.n_tokens).sum();
        assert!(n_computed <= 3 * n_needed as u64 + 200, "seed {seed}: {n_computed} for {n_needed}");
        // No page is lost on the way.
        while !house.talks.is_empty() {
            house.release(0);
        }
        house.settle();
        for place in [0, 1] {
            let (n_pages, n_granule_pages) = (house.n_pages(place), house.n_granule_pages(place));
            let stats = house.stats(place);
            assert_eq!((stats.n_pages, n_pages % n_granule_pages), (n_pages, 0));
            assert_eq!(stats.n_pages_free + stats.n_pages_cached, n_pages, "seed {seed}: {stats:?}");
            assert_eq!(stats.n_pages_on_host, 0);
        }
    }
    let seen: HashMap<&str, usize> = HashMap::from([
        ("answers", n_answers),
        ("tokens", n_tokens),
        ("gains", n_gains),
        ("swaps", n_swaps as usize),
    ]);
    println!("{seen:?}");
    assert!(n_answers > 1_500 && n_tokens > 5_000 && n_gains > 100 && n_swaps > 300, "{seen:?}");
}
