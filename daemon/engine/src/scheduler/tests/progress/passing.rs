//! Streams and short questions beside others that ask for more than there is.

use super::{House, Question, Random, text};
use crate::backend::PAGE_LEN;
use crate::command::{Ahead, ContextId, Edit, Operation};
use crate::run::{Finish, PullReport, RunEvent, RunQueue};

/// A stream whose guest takes each token as soon as it is there, and how many steps it has gone without one.
struct Heard {
    id: ContextId,
    queue: RunQueue,
    n_tokens: usize,
    n_steps_silent: usize,
}

impl Heard {
    fn new(id: ContextId, queue: RunQueue) -> Self {
        Self { id, queue, n_tokens: 0, n_steps_silent: 0 }
    }

    /// Takes what came in a step.
    fn listen(&mut self, house: &mut House) {
        self.n_steps_silent += 1;
        loop {
            let event = self.queue.try_pull();
            let said = if event.is_some() { self.queue.progress() } else { self.queue.wait() };
            if let Some(PullReport { n_tokens, is_waiting }) = said {
                let (id, tag) = (self.id, self.queue.tag());
                house.scheduler.apply(Operation::Pulled { id, tag, n_tokens, is_waiting });
            }
            match event {
                Some(RunEvent::Token(_)) => (self.n_tokens, self.n_steps_silent) = (self.n_tokens + 1, 0),
                Some(RunEvent::Finished(Finish::ContextFull)) => {}
                Some(other) => panic!("{other:?}"),
                None => return,
            }
        }
    }
}

#[test]
fn a_stream_goes_on_beside_questions_of_others_that_fill_the_pool() {
    // Of another user, session and guest; of one guest, or of as many as there are questions. Their contexts stay or go.
    let owners = [[2, 2, 2], [1, 2, 2], [1, 1, 2]];
    let kinds = owners.into_iter().flat_map(|owner| {
        let kinds = [(1, true), (1, false), (20, true), (20, false)];
        kinds.into_iter().flat_map(move |(n_guests, is_kept)| {
            [Ahead::Unbounded, Ahead::Adaptive].map(|ahead| (owner, n_guests, is_kept, ahead))
        })
    });
    for (owner, n_guests, is_kept, ahead) in kinds {
        let mut random = Random::new(11);
        let mut house = House::new(200, 400, 64);
        let id = house.create_of([1, 1, 1]);
        let edit = Edit { appended: text(&mut random, 20), ..Edit::default() };
        let mut stream = Heard::new(id, house.stream_after(id, edit, ahead));
        let mut questions: Vec<(ContextId, Question)> = Vec::new();
        let mut n_answered = 0;
        // As long as the stream has less than half of the pages, or no more than each of the guests beside it.
        let n_steps = if owner[1] == 1 && n_guests > 1 { 220 } else { 1500 };
        for step in 0..n_steps {
            while questions.len() < 20 {
                let [actor, session, guest] = owner;
                let id = house.create_of([actor, session, guest + house.next_id % n_guests]);
                questions.push((id, house.ask(id, text(&mut random, 240))));
            }
            house.step();
            stream.listen(&mut house);
            let answered = questions.extract_if(.., |(_, question)| question.is_answered());
            for (id, _) in answered.collect::<Vec<_>>() {
                n_answered += 1;
                if !is_kept {
                    house.release(id);
                }
            }
            let silent = stream.n_steps_silent;
            // One among as many guests of its session as there are questions is due a small part.
            let n_most = if owner[1] == 1 && n_guests > 1 { 2 * n_guests as usize } else { 15 };
            assert!(silent <= n_most, "{owner:?}, {n_guests} guests, {is_kept}, {ahead:?}: {silent}, {step}");
        }
        let n_tokens = stream.n_tokens;
        assert!(10 * n_tokens > 8 * n_steps && 5 * n_answered > n_steps, "{n_tokens}, {n_answered}");
    }
}

#[test]
fn whoever_waits_for_pages_gets_them_though_others_hold_less() {
    // What each holds of 200 pages, beside the same user's other stream or another's.
    for lengths in [[100, 150], [150, 100], [30, 180], [60, 180], [199, 199]] {
        for n_host_pages in [0, 400] {
            let mut random = Random::new(13);
            let mut house = House::new(200, n_host_pages, 512);
            let mut streams: Vec<Heard> = Vec::new();
            // The first of the second user keeps pages that come free by no end of their own.
            for (owner, n_pages) in [([1, 1, 1], lengths[0]), ([2, 2, 2], 40), ([2, 3, 3], lengths[1])] {
                let id = house.create_of(owner);
                let queue = house.run(id, text(&mut random, (n_pages - 20) * PAGE_LEN));
                streams.push(Heard::new(id, queue));
                for _ in 0..20 {
                    house.step();
                }
            }
            for _ in 0..3000 {
                house.step();
                streams.iter_mut().for_each(|stream| stream.listen(&mut house));
                if streams.iter().all(|stream| stream.n_tokens > 100) {
                    break;
                }
            }
            let counts: Vec<usize> = streams.iter().map(|stream| stream.n_tokens).collect();
            assert!(counts.iter().all(|&n| n > 100), "{lengths:?}, {n_host_pages}: {counts:?}");
        }
    }
}

#[test]
fn prompts_that_cost_nothing_run_up_no_claim_on_later_steps() {
    let mut random = Random::new(17);
    let mut house = House::new(1000, 0, 64);
    let id = house.create_of([1, 1, 1]);
    let mut stream = Heard::new(id, house.run(id, text(&mut random, 20)));
    let mut questions: Vec<(ContextId, Question)> = Vec::new();
    for step in 0..6000 {
        while questions.len() < 4 {
            let id = house.create_of([2, 2, 2]);
            questions.push((id, house.ask(id, text(&mut random, 240))));
        }
        // From then on a full step of prompts takes more than seven times as long as one without.
        house.prompt_token_ns = if step < 4000 { 0 } else { 100_000 };
        house.step();
        stream.listen(&mut house);
        for (id, _) in questions.extract_if(.., |(_, question)| question.is_answered()).collect::<Vec<_>>() {
            house.release(id);
        }
        assert!(stream.n_steps_silent < 16, "{} steps before {step}", stream.n_steps_silent);
    }
}

#[test]
fn short_questions_pass_one_that_waits_for_most_of_the_pool_and_it_is_answered_all_the_same() {
    let mut random = Random::new(19);
    let mut house = House::new(200, 400, 64);
    let mut asked: Vec<([u64; 3], ContextId, Question, usize)> = Vec::new();
    let mut n_answered = [0; 4];
    for step in 0..3000 {
        // How many of each at all times, and their tokens.
        for (owner, n_questions, n_tokens) in [([1, 1, 1], 1, 20), ([2, 2, 2], 1, 2880), ([3, 3, 3], 20, 240)]
        {
            while asked.iter().filter(|asked| asked.0 == owner).count() < n_questions {
                let id = house.create_of(owner);
                asked.push((owner, id, house.ask(id, text(&mut random, n_tokens)), step));
            }
        }
        house.step();
        for (owner, id, _, since) in asked.extract_if(.., |asked| asked.2.is_answered()).collect::<Vec<_>>() {
            assert!(owner[0] != 1 || step - since < 16, "{} steps before {step}", step - since);
            n_answered[owner[0] as usize] += 1;
            house.release(id);
        }
    }
    assert!(n_answered[1] > 400 && n_answered[2] >= 8 && n_answered[3] > 100, "{n_answered:?}");
}
