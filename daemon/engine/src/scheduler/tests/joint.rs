//! Jobs over two contexts: draws that are made at once.

use std::sync::Arc;

use super::hash_backend::{drawn, hash};
use super::verify::House;
use super::{Model, Plan, World};
use crate::account::Resource;
use crate::backend::PAGE_LEN;
use crate::batch::{Candidate, Token};
use crate::command::{Answer, Ask, ContextId, Edit, Operation};
use crate::completion::Done;
use crate::error::EngineError;
use crate::job::{JobId, Stage, Work};
use crate::mailbox::Ticket;
use crate::sampling::Sampler;
use crate::scheduler::Taking;
use crate::scheduler::plan::PlannedRow;
use crate::steering::Steering;

/// A job that its caller waits for.
pub(super) struct Job {
    members: [ContextId; 2],
    place: Ticket,
    expected: Vec<Candidate>,
    /// Pages that it takes when its members share what they can.
    n_pages: usize,
    /// Whether something was done with a member meanwhile.
    is_disturbed: bool,
}

/// Pages of two contexts that share full pages as far as they are alike, and each write their last token.
fn n_pages_together(models: [&Model; 2]) -> usize {
    let tokens = models.map(|model| model.tokens.as_slice());
    let n_common = tokens[0].iter().zip(tokens[1]).take_while(|(token, other)| token == other).count();
    // Of a token that is steered otherwise all that follows is other KV.
    let n_alike = n_common.min(models[0].past.n_steered_as(&models[1].past));
    let n_full = tokens.iter().map(|tokens| tokens.len() - 1).fold(n_alike, usize::min);
    tokens.iter().map(|tokens| tokens.len().div_ceil(PAGE_LEN)).sum::<usize>() - n_full / PAGE_LEN
}

/// What became of jobs.
#[derive(Debug, Default)]
pub(super) struct Seen {
    n_answered: usize,
    n_disturbed: usize,
    n_too_large: usize,
    n_without_pages: usize,
    n_over_budget: usize,
    pub(super) n_failed: usize,
}

impl Seen {
    pub(super) fn add(&mut self, other: &Self) {
        self.n_answered += other.n_answered;
        self.n_disturbed += other.n_disturbed;
        self.n_too_large += other.n_too_large;
        self.n_without_pages += other.n_without_pages;
        self.n_over_budget += other.n_over_budget;
        self.n_failed += other.n_failed;
    }

    /// Tests are worth nothing if they never come here.
    pub(super) fn check(&self) {
        let Self { n_answered, n_disturbed, n_too_large, n_without_pages, n_over_budget, .. } = *self;
        assert!(n_answered > 400 && n_disturbed > 50 && n_too_large > 50, "{self:?}");
        assert!(n_without_pages > 0 && n_over_budget > 10, "{self:?}");
    }
}

impl Model {
    /// Whether nothing is asked that has to be answered first.
    pub(super) fn is_free(&self) -> bool {
        self.question.is_none() && !self.is_member
    }
}

impl World {
    fn is_room_for_one_more(model: &Model) -> bool {
        !model.tokens.is_empty() && model.n_free() > 0
    }

    /// Draws after this context and another of its guest's, if there is one.
    pub(super) fn draw_together(&mut self, idx: usize) {
        let caller = self.contexts[idx].1.caller;
        let other = (0..self.contexts.len()).find(|&other| {
            let model = &self.contexts[other].1;
            other != idx && model.caller == caller && model.is_free() && Self::is_room_for_one_more(model)
        });
        let Some(other) = other.filter(|_| Self::is_room_for_one_more(&self.contexts[idx].1)) else { return };
        let seed = self.random.next() & !7; // one that never fails
        let sampler = Arc::new(Sampler { seed, ..Sampler::greedy() });
        let place = self.guests.ticket(caller);
        let tag = place.tag();
        let ids = [idx, other].map(|idx| self.contexts[idx].0);
        let mut expected = Vec::new();
        let members = [idx, other].map(|idx| {
            let (id, model) = &mut self.contexts[idx];
            expected.push(drawn(model.chain().last, seed));
            model.is_member = true;
            (*id, Self::edit(model, &mut self.n_mixed))
        });
        let n_pages = n_pages_together([idx, other].map(|idx| &self.contexts[idx].1));
        self.apply(Operation::DrawTogether { members: members.to_vec(), sampler, tag });
        let has_holes = |id: &ContextId| self.scheduler.contexts[id].kv.is_holed();
        let n_blocks = |id: &ContextId| {
            let kv = &self.scheduler.contexts[id].kv;
            kv.n_blocks_until_anew(kv.tokens.len())
        };
        let n_pages = match ids.iter().any(has_holes) {
            // Where there is no room for a page and its copy, what is in it is computed again: with holes, all from the first
            // of them on, which takes more pages on the way than are held in the end.
            true => ids.iter().map(n_blocks).sum(),
            false => n_pages,
        };
        self.jobs.push(Job { members: ids, place, expected, n_pages, is_disturbed: false });
        let spoiled = self.random.below(2);
        match self.random.below(16) {
            // The caller loses interest before the engine begins, or edits one of the contexts.
            0 => {
                self.apply(Operation::Cancel { id: ids[0], tag });
                self.disturb(ids[0]);
            }
            1 => {
                let n_kept = self.contexts[[idx, other][spoiled]].1.tokens.len();
                let edit = Edit { n_kept, ..Edit::default() };
                self.apply(Operation::Edit { id: ids[spoiled], edit });
                self.disturb(ids[spoiled]);
            }
            _ => {}
        }
    }

    /// Something is done with a context: a job over it ends.
    pub(super) fn disturb(&mut self, id: ContextId) {
        for job in self.jobs.iter_mut().filter(|job| job.members.contains(&id)) {
            job.is_disturbed = true;
        }
    }

    /// Each member of a job draws once.
    pub(super) fn check_jobs(&self, plan: &Plan) {
        for row in plan.rows.iter().filter(|row| self.riding(row.id).is_some()) {
            let n_rows = plan.rows.iter().filter(|other| other.id == row.id).count();
            assert_eq!((n_rows, row.end - row.start, row.n_outputs), (1, 1, 1));
            let job = self.riding(row.id).expect("it rides");
            let members = self.scheduler.jobs.members(job);
            let of_member = members.iter().zip(self.scheduler.jobs.have_come(job));
            assert!(of_member.filter(|(id, _)| **id == row.id).all(|(_, has_come)| !has_come));
        }
    }

    fn riding(&self, id: ContextId) -> Option<JobId> {
        match self.scheduler.contexts[&id].work.as_ref()? {
            Work::Joint(work) if work.member.stage == Stage::Rides => Some(work.member.job),
            _ => None,
        }
    }

    /// The places in the list of the jobs that have rows in a step.
    pub(super) fn jobs_in(&self, plan: &Plan) -> Vec<usize> {
        // Rows of what the contexts did before belong to no job.
        let is_of_job = |row: &PlannedRow| {
            let context = self.scheduler.contexts.get(&row.id);
            context.is_some_and(|context| {
                let is_joint = matches!(context.work, Some(Work::Joint(_)));
                context.epoch == row.epoch && is_joint
            })
        };
        let has_row = |id: &ContextId| plan.rows.iter().any(|row| row.id == *id && is_of_job(row));
        (0..self.jobs.len()).filter(|&idx| self.jobs[idx].members.iter().any(has_row)).collect()
    }

    /// Jobs that had rows in a step that failed are told so.
    pub(super) fn take_failed_jobs(&mut self, jobs: &[usize]) {
        for &idx in jobs.iter().rev() {
            let job = self.jobs.swap_remove(idx);
            let Some(Done::Answer(Err(error))) = job.place.try_take() else { panic!("the caller is told") };
            assert!(matches!(error, EngineError::Step(_)), "{error}");
            self.n_jobs.n_failed += 1;
            self.free_members(job.members);
        }
    }

    fn free_members(&mut self, members: [ContextId; 2]) {
        for (id, model) in &mut self.contexts {
            model.is_member &= !members.contains(id);
        }
    }

    pub(super) fn take_drawn(&mut self) {
        let (n_pages, limits) = (self.scheduler.limits.n_pages, self.scheduler.limits.clone());
        for job in std::mem::take(&mut self.jobs) {
            let Some(done) = job.place.try_take() else {
                assert!(!job.is_disturbed, "whoever waits for a job that has ended is told");
                self.jobs.push(job);
                continue;
            };
            let seen = &mut self.n_jobs;
            match done {
                Done::Answer(Ok(answer)) => {
                    assert_eq!(answer, Answer::Together(job.expected));
                    seen.n_answered += 1;
                }
                Done::Answer(Err(EngineError::JobDisturbed)) => {
                    assert!(job.is_disturbed, "nobody did anything with its contexts");
                    seen.n_disturbed += 1;
                }
                Done::Answer(Err(EngineError::JobTooLarge { n_rows, n_rows_max })) => {
                    let n_most = limits.n_rows_max.min(limits.n_tokens_max);
                    assert_eq!((n_rows, n_rows_max, n_most), (2, 1, 1));
                    seen.n_too_large += 1;
                }
                Done::Answer(Err(EngineError::NoPages { n_needed, n_pages: found })) => {
                    assert!(n_needed > n_pages && found == n_pages, "{n_needed} of {n_pages}");
                    assert!(job.n_pages > n_pages, "{} of {n_pages} would do for {n_needed}", job.n_pages);
                    seen.n_without_pages += 1;
                }
                Done::Answer(Err(EngineError::Budget(_))) => seen.n_over_budget += 1,
                other => panic!("{other:?}"),
            }
            self.free_members(job.members);
        }
        let n_draws = self.scheduler.jobs.n_draws();
        assert!(self.is_attacked || self.jobs.len() == n_draws, "no job is forgotten: {n_draws}");
    }
}

/// Two forks of one context write to the page that they share: the first has its copy when the budget refuses the second.
#[test]
fn a_job_that_is_refused_half_way_leaves_nothing_half_written() {
    for (n_pages, fits) in [(3, false), (4, true)] {
        let mut house = House::new(64, n_pages);
        let tokens: Vec<Token> = (0..20).collect();
        let base = house.create();
        let prompt = house.ask(base, 0, &tokens, Ask::Top { n: 1 });
        house.answer(prompt).0.expect("it fits");
        let members = [house.fork(base, 20), house.fork(base, 20)];
        let place = house.guests.ticket(house.caller);
        let sampler = Arc::new(Sampler { seed: 8, ..Sampler::greedy() });
        let edits = members.map(|id| (id, Edit { n_kept: 20, ..Edit::default() }));
        let (members_of_job, tag) = (edits.to_vec(), place.tag());
        house.scheduler.apply(Operation::DrawTogether { members: members_of_job, sampler, tag });
        let (answer, _) = house.answer(place);
        let drawn = drawn(hash(&tokens), 8);
        match answer {
            Ok(answer) => assert_eq!((answer, fits), (Answer::Together(vec![drawn; 2]), true)),
            Err(EngineError::Budget(exceeded)) => assert_eq!((exceeded.limit, fits), (3, false)),
            Err(error) => panic!("{error}"),
        }
        // The backend looks at all that the first one holds.
        let question = house.ask(members[0], 20, &[30, 31], Ask::Top { n: 1 });
        house.answer(question).0.expect("it fits by itself");
        for id in members.into_iter().chain([base]) {
            house.scheduler.apply(Operation::Release { id, n_pulled: 0 });
        }
        assert_eq!(house.account.used(Resource::Pages), 0);
    }
}

/// Two contexts that begin alike, of which one is steered from a later token on, on a device that has room for the pages of one
/// and the end of the other.
#[test]
fn members_that_are_steered_otherwise_later_share_what_comes_before() {
    const N_ALIKE: usize = 10 * PAGE_LEN;
    let mut house = House::new(64, u64::MAX);
    house.scheduler.vacate(13, Taking::Any);
    let tokens: Vec<Token> = (0..11 * PAGE_LEN as Token).map(|token| token % 40).collect();
    let steering = Steering::new(vec![(1, vec![2.0])], 6, 1).expect("it fits the model").map(Arc::new);
    let members = [steering, None].map(|steering| {
        let id = house.create();
        let edit = Edit { appended: tokens.clone(), ..Edit::default() };
        house.scheduler.apply(Operation::Steer { id, edit, steering, from: N_ALIKE });
        (id, Edit { n_kept: tokens.len(), ..Edit::default() })
    });
    let (place, sampler) =
        (house.guests.ticket(house.caller), Arc::new(Sampler { seed: 8, ..Sampler::greedy() }));
    let (members, tag) = (members.to_vec(), place.tag());
    house.scheduler.apply(Operation::DrawTogether { members, sampler, tag });
    let (answer, n_tokens) = house.answer(place);
    let Answer::Together(candidates) = answer.expect("it fits") else { panic!("two draws") };
    assert_eq!(candidates[1], drawn(hash(&tokens), 8));
    assert_eq!(n_tokens, (2 * tokens.len() - N_ALIKE) as u64);
}

/// Two contexts that begin alike, each made by itself, on a device that has room for the pages of one and the end of the
/// other.
#[test]
fn members_that_begin_alike_hold_and_compute_that_once() {
    let mut house = House::new(64, u64::MAX);
    house.scheduler.vacate(13, Taking::Any);
    let tokens: Vec<Token> = (0..11 * PAGE_LEN as Token).map(|token| token % 40).collect();
    let texts = [&tokens[..], &tokens[..10 * PAGE_LEN + 5]];
    let (place, sampler) =
        (house.guests.ticket(house.caller), Arc::new(Sampler { seed: 8, ..Sampler::greedy() }));
    let members = texts.map(|text| (house.create(), Edit { appended: text.to_vec(), ..Edit::default() }));
    let (members, tag) = (members.to_vec(), place.tag());
    house.scheduler.apply(Operation::DrawTogether { members, sampler, tag });
    let (answer, n_tokens) = house.answer(place);
    let expected = texts.map(|text| drawn(hash(text), 8));
    assert_eq!(answer.expect("it fits"), Answer::Together(expected.to_vec()));
    assert_eq!(n_tokens, tokens.len() as u64 + 5);
}
