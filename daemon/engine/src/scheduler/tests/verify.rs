//! Guesses that are verified, and what was computed for a question and is appended after it.

mod beside_jobs;

use crate::batch::Drawn;
use std::sync::Arc;

use super::Random;
use super::context_id;
use super::guest::Guests;
use super::hash_backend::{Chain, HashBackend, VOCAB, drawn, fails, hash};
use super::pull::{expected_seen, looking_sampler};
use crate::account::{Account, ActorId, Budget, GuestId, Owner, Resource, SessionId};
use crate::backend::{AskLimits, Limits, PAGE_LEN, SteeringTimes};
use crate::batch::{Candidate, Output, Token};
use crate::causes::Cause;
use crate::command::{Ahead, Answer, Ask, ContextId, Edit, MaskSource, Operation, RunSettings};
use crate::completion::{CallerId, Done};
use crate::error::EngineError;
use crate::guess::{Guess, GuessNode, GuessTree, N_GUESS_MAX};
use crate::mailbox::Ticket;
use crate::port::Port;
use crate::sampling::{Sampler, TokenMask};
use crate::scheduler::{Plan, Scheduler, SchedulerSettings};

/// The longest guess that a context with room for `n_free` tokens may have verified.
pub(super) fn n_guess_max(scheduler: &Scheduler, n_free: usize) -> usize {
    N_GUESS_MAX.min(scheduler.settings.n_step_tokens - 1).min(n_free.saturating_sub(1))
}

/// What is drawn after a prefix, step by step, up to the first draw that fails.
fn steps(prefix: impl Into<Chain>, seed: u64) -> impl Iterator<Item = Candidate> {
    let mut prefix = prefix.into();
    std::iter::from_fn(move || {
        let candidate = (!fails(prefix.last, seed)).then(|| drawn(prefix.last, seed))?;
        prefix = prefix.extend(candidate.token);
        Some(candidate)
    })
}

/// A guess of any length: right to the end, or wrong at some place and often right again after it.
pub(super) fn guess(random: &mut Random, prefix: Chain, seed: u64, n_max: usize) -> Vec<Token> {
    let n = random.below(n_max + 1);
    let mut guess: Vec<Token> = steps(prefix, seed).map(|drawn| drawn.token).take(n).collect();
    if !guess.is_empty() && random.below(3) > 0 {
        let idx = random.below(guess.len());
        guess[idx] = random.below(VOCAB as usize) as Token;
    }
    guess
}

/// A verification and its answer.
pub(super) fn question(prefix: impl Into<Chain>, seed: u64, guess: Vec<Token>) -> (Ask, Answer) {
    let prefix = prefix.into();
    // The first draw never fails; others may.
    let seed = if fails(prefix.last, seed) { seed & !7 } else { seed };
    let n_right = steps(prefix, seed).zip(&guess).take_while(|(drawn, guess)| drawn.token == **guess).count();
    let mut before = prefix;
    let drawn = steps(prefix, seed).take(n_right + 1).map(|candidate| {
        let seen = expected_seen(before.last, seed);
        before = before.extend(candidate.token);
        Drawn { seen, ..candidate.into() }
    });
    let answer = Answer::Verified(drawn.collect());
    let sampler = Arc::new(looking_sampler(seed));
    (Ask::Verify { sampler, guess: Guess::Chain(guess) }, answer)
}

/// An answer is as expected, or has the beginning of what was to be drawn where there may be no room for the rest of a guess: a
/// budget has an end, or the context, having holes, may take more pages than the device has.
pub(super) fn check_answer(answer: &Answer, expected: &Answer, account: &Account, may_lack_pages: bool) {
    match is_cut(answer, expected) {
        true => assert!(may_lack_pages || is_bounded(account), "{answer:?}, {expected:?}"),
        false => assert_eq!(answer, expected),
    }
}

/// Whether an answer has the beginning of what was to be drawn.
fn is_cut(answer: &Answer, expected: &Answer) -> bool {
    match (answer, expected) {
        (Answer::Verified(drawn), Answer::Verified(all)) => {
            (1..all.len()).contains(&drawn.len()) && all.starts_with(drawn)
        }
        _ => false,
    }
}

/// Whether an account may come to an end of its tokens or pages.
fn is_bounded(account: &Account) -> bool {
    [Resource::Tokens, Resource::Pages].iter().any(|&what| account.limit(what) < u64::MAX)
}

pub(super) struct House {
    pub(super) scheduler: Scheduler,
    pub(super) backend: HashBackend,
    /// The next copies of tokens fail.
    pub(super) lose_next_cells: bool,
    pub(super) guests: Guests,
    pub(super) caller: CallerId,
    pub(super) account: Arc<Account>,
    next_id: u64,
}

impl House {
    pub(super) fn new(n_step_tokens: usize, n_pages: u64) -> Self {
        Self::with_rows(n_step_tokens, n_pages, 8)
    }

    pub(super) fn with_rows(n_step_tokens: usize, n_pages: u64, n_rows_max: usize) -> Self {
        Self::within(Budget { n_pages, ..Budget::UNLIMITED }, n_step_tokens, n_rows_max)
    }

    pub(super) fn within(budget: Budget, n_step_tokens: usize, n_rows_max: usize) -> Self {
        let limits = Limits {
            n_pages: 100,
            n_granule_pages: 1,
            n_host_pages: 0,
            page_bytes: 128,
            n_rows_max,
            n_tokens_max: n_step_tokens,
            n_tile_tokens: 1,
            n_block_tokens: 1,
            n_queries_per_key: 1,
            n_positions_max: 800,
            vocab_size: VOCAB as usize,
            hidden_size: 1,
            n_layers: 6,
            n_steps_under_way: 2,
            n_slots: 1 << 16,
            n_states: 1 << 16,
            n_stretches_max: 8,
            logits_tokens: 1.0,
            steering: SteeringTimes::NONE,
            asks: AskLimits::NONE,
        };
        let settings = SchedulerSettings::alone(n_step_tokens);
        let account = Account::new("guest", budget, None);
        let owner =
            Owner { actor: ActorId(1), session: SessionId(1), guest: GuestId(1), account: account.clone() };
        let mut scheduler = Scheduler::alone(limits, settings);
        let mut guests = Guests::default();
        let caller = guests.enter(&mut scheduler, owner);
        let backend = HashBackend::new(100, 0);
        Self { scheduler, backend, lose_next_cells: false, guests, caller, account, next_id: 0 }
    }

    pub(super) fn create(&mut self) -> ContextId {
        self.next_id += 1;
        let id = context_id(self.next_id);
        self.scheduler.apply(Operation::Create { id, caller: self.caller });
        id
    }

    pub(super) fn fork(&mut self, id: ContextId, n_tokens: usize) -> ContextId {
        self.next_id += 1;
        let child = context_id(self.next_id);
        let edit = Edit { n_kept: n_tokens, ..Edit::default() };
        self.scheduler.apply(Operation::Fork { id, edit, child });
        child
    }

    /// Asks about a context after telling what it holds past its first `n_kept` tokens.
    pub(super) fn ask(&mut self, id: ContextId, n_kept: usize, appended: &[Token], ask: Ask) -> Ticket {
        let place = self.guests.ticket(self.caller);
        let edit = Edit { n_kept, appended: appended.to_vec(), n_pulled: 0 };
        self.scheduler.apply(Operation::Ask { id, edit, ask, tag: place.tag() });
        place
    }

    pub(super) fn try_answer(&self, place: &Ticket) -> Option<Result<Answer, EngineError>> {
        self.guests.deliver(&self.scheduler, Port::Encoded);
        place.try_take().map(|done| match done {
            Done::Answer(answer) => answer,
            other => panic!("{other:?}"),
        })
    }

    pub(super) fn submit(&mut self) -> (Plan, Vec<Output>) {
        let plan = self.scheduler.plan();
        let outputs = self.backend.run(&plan.moves, &self.scheduler.batch(&plan, Vec::new()));
        (plan, outputs)
    }

    /// Steps until there is an answer; returns it with the tokens that were computed for it.
    pub(super) fn answer(&mut self, place: Ticket) -> (Result<Answer, EngineError>, u64) {
        let n_before = self.scheduler.stats().n_tokens;
        loop {
            if let Some(answer) = self.try_answer(&place) {
                return (answer, self.scheduler.stats().n_tokens - n_before);
            }
            let (plan, outputs) = self.submit();
            if plan.has_rows() {
                self.scheduler.complete(plan, outputs, 1_000_000);
                self.move_cells();
            }
        }
    }

    pub(super) fn move_cells(&mut self) {
        let cells = self.scheduler.take_cell_moves();
        match !cells.is_empty() && std::mem::take(&mut self.lose_next_cells) {
            true => {
                self.backend.lose_cells(&cells);
                self.scheduler.lose_cells(&cells);
            }
            false => self.backend.move_cells(&cells),
        }
    }
}

pub(super) fn text(random: &mut Random, n: usize) -> Vec<Token> {
    (0..n).map(|_| random.below(VOCAB as usize) as Token).collect()
}

pub(super) fn tokens(answer: &Answer) -> Vec<Token> {
    let Answer::Verified(drawn) = answer else { panic!("{answer:?}") };
    drawn.iter().map(|drawn| drawn.candidate.token).collect()
}

#[test]
fn a_verification_computes_what_was_guessed_and_one_token_more() {
    let mut random = Random::new(3);
    for n_right in 0..=N_GUESS_MAX {
        let mut house = House::new(64, u64::MAX);
        let id = house.create();
        let mut context = text(&mut random, 2 * PAGE_LEN + 5);
        let seed = random.next() & !7;
        // A prompt is cut into chunks; what was guessed after it is not.
        let prompt = house.ask(id, 0, &context, Ask::Prefill);
        house.answer(prompt).0.expect("it fits");
        let mut n_synced = context.len();
        let mut n_in_vain = 0;
        for _ in 0..6 {
            let mut guess: Vec<Token> =
                steps(hash(&context), seed).map(|drawn| drawn.token).take(15).collect();
            if n_right < guess.len() {
                guess[n_right] = (guess[n_right] + 1) % VOCAB as Token;
                n_in_vain += guess.len() - n_right;
            }
            let (ask, expected) = question(hash(&context), seed, guess);
            let reply = house.ask(id, n_synced, &context[n_synced..], ask);
            let (answer, n_tokens) = house.answer(reply);
            let answer = answer.expect("nothing is wrong");
            assert_eq!(answer, expected);
            // The token that was drawn last time, and the guess: nothing that was accepted is computed again.
            assert_eq!(n_tokens, 16, "{n_right} right");
            n_synced = context.len();
            context.extend(tokens(&answer));
        }
        assert_eq!(house.account.causes()[Cause::TokensGuessedWrong], n_in_vain as u64);
    }
}

#[test]
fn what_was_scored_is_not_computed_again_when_it_is_appended() {
    let mut random = Random::new(4);
    // All of it, its beginning, and something else after its beginning.
    for (n_same, n_other) in [(20, 0), (7, 0), (0, 0), (7, 3), (0, 3), (20, 9)] {
        let mut house = House::new(64, u64::MAX);
        let id = house.create();
        let (prompt, continuation) = (text(&mut random, 21), text(&mut random, 20));
        let reply = house.ask(id, 0, &prompt, Ask::Continuation(continuation.clone()));
        let (scores, n_tokens) = house.answer(reply);
        assert_eq!((scores.is_ok(), n_tokens), (true, 40), "the last token's successor is not asked for");
        let other: Vec<Token> = (0..n_other).map(|_| VOCAB as Token).collect();
        let appended = [&continuation[..n_same], &other].concat();
        let reply = house.ask(id, prompt.len(), &appended, Ask::Top { n: 1 });
        let n_tokens = house.answer(reply).1;
        // The output of a position comes out of computing it.
        let expected = if n_other > 0 { n_other } else { 1 };
        let expected = expected + usize::from(n_same == 20 && n_other > 0);
        assert_eq!(n_tokens, expected as u64, "{n_same} and {n_other} appended");
    }
}

#[test]
fn questions_at_one_place_compute_its_token_once() {
    let mut random = Random::new(7);
    let mut house = House::new(64, u64::MAX);
    let id = house.create();
    let mut context = text(&mut random, 40);
    let mut n_synced = 0;
    for n_expected in [40, 1, 1] {
        let prefix = hash(&context);
        let asks = [
            (Ask::Top { n: 2 }, n_expected),
            (Ask::Scores(vec![1, 2, 3]), 0),
            (Ask::Full, 0),
            (Ask::Embedding, 0),
            (Ask::Sample(Arc::new(Sampler { seed: 16, ..Sampler::greedy() })), 0),
            (Ask::Top { n: 3 }, 0),
        ];
        for (ask, n_expected) in asks {
            let reply = house.ask(id, n_synced, &context[n_synced..], ask.clone());
            n_synced = context.len();
            let (answer, n_tokens) = house.answer(reply);
            assert_eq!(n_tokens, n_expected, "{ask:?}");
            if let Answer::Sampled(candidate) = answer.expect("nothing is wrong") {
                assert_eq!(candidate, drawn(prefix, 16).into());
            }
        }
        context.push(drawn(prefix, 16).token);
    }
    // A place that was left and come back to is another.
    let reply = house.ask(id, 30, &context[30..40], Ask::Full);
    assert_eq!(house.answer(reply).1, 1, "one token, whose KV lies before what stayed");
}

#[test]
fn what_was_left_for_an_append_goes_before_anything_is_refused() {
    let mut random = Random::new(5);
    let mut house = House::new(64, 20);
    let prompt = text(&mut random, 2 * PAGE_LEN);
    let base = house.create();
    let reply = house.ask(base, 0, &prompt, Ask::Prefill);
    house.answer(reply).0.expect("it fits");
    let mut contexts = Vec::new();
    for _ in 0..10 {
        house.next_id += 1;
        let child = context_id(house.next_id);
        house.scheduler.apply(Operation::Fork {
            id: base,
            edit: Edit { n_kept: prompt.len(), ..Edit::default() },
            child,
        });
        contexts.push(child);
    }
    // Each takes four pages past its own, and writes one that it shared; together they would take more than 50.
    for &id in &contexts {
        let reply = house.ask(id, prompt.len(), &[], Ask::Continuation(text(&mut random, 50)));
        house.answer(reply).0.expect("it fits beside what the guest holds itself");
    }
    assert!(house.account.used(Resource::Pages) <= 20);
    for id in contexts.into_iter().chain([base]) {
        house.scheduler.apply(Operation::Release { id, n_pulled: 0 });
    }
    assert_eq!(house.account.used(Resource::Pages), 0);
}

#[test]
fn a_guess_that_no_step_has_room_for_is_refused_with_both_numbers() {
    for (n_step_tokens, n_tokens, n_tokens_max) in [(64, 16, 15), (8, 8, 7), (1, 1, 0)] {
        let mut house = House::new(n_step_tokens, u64::MAX);
        let id = house.create();
        for n in [n_tokens_max, n_tokens] {
            let sampler = Arc::new(Sampler::greedy());
            let ask = Ask::Verify { sampler, guess: Guess::Chain(vec![1; n]) };
            let reply = house.ask(id, 0, &[3; 20], ask);
            match house.answer(reply).0 {
                Ok(Answer::Verified(drawn)) => assert!(n == n_tokens_max && !drawn.is_empty()),
                Err(EngineError::GuessTooLong { n_tokens: found, n_tokens_max: most }) => {
                    assert_eq!((found, most), (n_tokens, n_tokens_max));
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn of_guesses_as_many_are_verified_as_a_budget_has_room_for() {
    let mut random = Random::new(8);
    let context = text(&mut random, 40);
    let right: Vec<Token> = steps(hash(&context), 8).map(|drawn| drawn.token).take(15).collect();
    let tree = |branch: &[Token]| {
        let behind = |idx: usize| (idx > 0).then(|| idx as u32 - 1);
        let mut nodes: Vec<GuessNode> =
            branch.iter().enumerate().map(|(idx, &token)| GuessNode { token, parent: behind(idx) }).collect();
        nodes.push(GuessNode { token: (branch[0] + 1) % VOCAB as Token, parent: None });
        Guess::from(GuessTree::new(&nodes).expect("a tree"))
    };
    let pages = |n_pages| Budget { n_pages, ..Budget::UNLIMITED };
    let tokens_of = |n_tokens| Budget { n_tokens, ..Budget::UNLIMITED };
    for guess in [Guess::Chain(right.clone()), tree(&right)] {
        let n_guessed = guess.tokens().len();
        // Three pages hold 48 tokens, of which the last that is drawn need not be computed.
        for (budget, n_fit, has_room_after) in [
            (Budget::UNLIMITED, n_guessed, true),
            (pages(4), n_guessed, true),
            (pages(3), 8, false),
            (tokens_of(45), 5, false),
            (tokens_of(40), 0, false),
        ] {
            let mut house = House::within(budget, 64, 40);
            let id = house.create();
            let sampler = Arc::new(Sampler { seed: 8, ..Sampler::greedy() });
            let ask = Ask::Verify { sampler: sampler.clone(), guess: guess.clone() };
            let reply = house.ask(id, 0, &context, ask);
            let (answer, n_tokens) = house.answer(reply);
            let drawn = tokens(&answer.expect("without guesses there is room"));
            assert_eq!(drawn.len(), 1 + n_fit.min(right.len()), "{budget:?}");
            assert_eq!(n_tokens, 40 + n_fit as u64, "{budget:?}");
            // What plain decoding has no room for is refused.
            let ask = Ask::Verify { sampler, guess: Guess::Chain(vec![1; 4]) };
            let reply = house.ask(id, context.len(), &drawn, ask);
            let answer = house.answer(reply).0;
            match has_room_after {
                true => assert!(answer.is_ok(), "{budget:?}: {answer:?}"),
                false => assert!(matches!(answer, Err(EngineError::Budget(_))), "{budget:?}: {answer:?}"),
            }
        }
    }
}

#[test]
fn verifications_are_decode_work_and_prompts_go_on_beside_them() {
    let mut random = Random::new(6);
    let mut house = House::new(64, u64::MAX);
    let seed = 8;
    let mut context = text(&mut random, 20);
    let id = house.create();
    let reply = house.ask(id, 0, &context, Ask::Prefill);
    house.answer(reply).0.expect("it fits");
    let long = house.create();
    let prompt = text(&mut random, 700);
    let prompt = house.ask(long, 0, &prompt, Ask::Top { n: 1 });
    let other = house.create();
    let settings = RunSettings {
        sampler: Arc::new(Sampler::greedy()),
        stop_tokens: Arc::new([]),
        n_tokens_max: None,
        ahead: Ahead::Unbounded,
        masks: MaskSource::Sampler,
    };
    let run = house.guests.queue(house.caller);
    let edit = Edit { appended: vec![1], ..Edit::default() };
    house.scheduler.apply(Operation::Run { id: other, edit, settings, tag: run.tag() });
    let mut n_synced = context.len();
    for n_rounds in 0.. {
        let guess: Vec<Token> = steps(hash(&context), seed).map(|drawn| drawn.token).take(4).collect();
        let (ask, expected) = question(hash(&context), seed, guess);
        let reply = house.ask(id, n_synced, &context[n_synced..], ask);
        let (plan, outputs) = house.submit();
        let row = plan.rows.iter().find(|row| row.id == id).expect("it is in the next step, whatever waits");
        assert_eq!(row.end - row.start, 5);
        assert_eq!(plan.work.n_decode_rows, 6, "so many rows as tokens, and the stream's");
        house.scheduler.complete(plan, outputs, 1_000_000);
        let answer = house.try_answer(&reply).expect("answered").expect("nothing is wrong");
        assert_eq!(answer, expected);
        n_synced = context.len();
        context.extend(tokens(&answer));
        if house.try_answer(&prompt).is_some() {
            break;
        }
        assert!(n_rounds < 90, "the prompt starves");
    }
}

#[test]
fn a_guest_pays_for_what_it_has_the_host_do() {
    let mut house = House::new(64, u64::MAX);
    let id = house.create();
    let vtime = |house: &House| house.scheduler.commons.queue.vtimes([1, 1, 1])[2];
    let paid = |house: &mut House, operation: Operation| {
        let before = vtime(house);
        house.scheduler.apply(operation);
        vtime(house) - before
    };
    let edit = Edit { appended: vec![1; 700], ..Edit::default() };
    assert_eq!(paid(&mut house, Operation::Edit { id, edit }), 1_000, "by the token");
    let mask = Arc::new(TokenMask::none(1 << 17));
    let tag = house.guests.ticket(house.caller).tag();
    let mask = Operation::Mask { id, tag, position: 700, turn: 0, mask, expected: None };
    assert_eq!(paid(&mut house, mask), 1_024, "by the byte");
    let question = house.ask(id, 700, &[], Ask::Top { n: 1 });
    house.answer(question).0.expect("it fits");
    let edit = Edit::default();
    assert_eq!(paid(&mut house, Operation::Edit { id, edit }), 300 + 43 * 50, "by the page");
    assert_eq!(paid(&mut house, Operation::Cancel { id, tag }), 300);
}
