//! What a model lacks of the device's memory, and what it would have to give up for another.
//!
//! One order says whose pages go, over all models of a device: those that are free; those that the prefix cache alone
//! holds; those of idle contexts, of users of the lowest rank first, then of the owner furthest ahead in virtual time, then of
//! the context that was served longest ago (`holders`); those at the ends of lines, of the owner furthest ahead first. What is admitted stays: see
//! [`Scheduler::sacrifice`].

use std::cmp::Ordering;

use smallvec::SmallVec;

use super::holders::{Come, Does, Holder};
use super::resize::Taking;
use super::room::Victim;
use super::{Plan, Scheduler, VirtualTimes};
use crate::command::ContextId;
use crate::kv::Sequence;

/// Where pages may come from that are neither free nor cached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Source {
    /// The model's own victims.
    #[default]
    Own,
    /// Other models are asked first: a context that lacks pages stands in line until they have been.
    Others,
}

/// What the first in line lacks.
#[derive(Clone, Debug)]
pub(crate) struct Want {
    /// Pages, beside those that are free or cached.
    pub(crate) n_pages: usize,
    /// The first in line.
    pub(crate) first: ContextId,
    /// How far its guest has come.
    pub(crate) times: VirtualTimes,
}

/// The most that is given up for some pages: what is missed least comes first.
#[derive(Clone, Debug)]
pub(crate) enum Sacrifice {
    /// Nothing.
    Free,
    /// Of the prefix cache, what was let go of in this step of the device.
    Cached { step: u64 },
    /// Pages of an idle context that was served last in this step of the device, and whose guest has this rank and has come
    /// this far.
    Idle { rank: u8, come: Come, step: u64 },
    /// Pages of work that waits in line, or of a run that has had its term, whose guest has come this far.
    Work(VirtualTimes),
}

impl Sacrifice {
    /// Which of two is missed less.
    pub(crate) fn compare(&self, other: &Self) -> Ordering {
        match (self, other) {
            (Self::Cached { step }, Self::Cached { step: other }) => step.cmp(other),
            // Of one rank, the guest that has had more gives its pages first.
            (
                Self::Idle { rank, come, step },
                Self::Idle { rank: other_rank, come: other, step: other_step },
            ) => rank.cmp(other_rank).then(other.cmp(come)).then(step.cmp(other_step)),
            (Self::Work(times), Self::Work(other)) => other.compare(times),
            _ => self.kind().cmp(&other.kind()),
        }
    }

    pub(super) fn kind(&self) -> u8 {
        match self {
            Self::Free => 0,
            Self::Cached { .. } => 1,
            Self::Idle { .. } => 2,
            Self::Work(_) => 3,
        }
    }
}

impl Scheduler {
    /// From where pages may come in the plans that follow.
    pub(crate) fn set_source(&mut self, source: Source) {
        self.source = source;
    }

    /// Pages that the model can have if others have what they cannot do without. A job that needs more is refused; one
    /// that needs more than the model has waits for them.
    pub(crate) fn set_n_pages_most(&mut self, n_pages: usize) {
        self.n_pages_most = n_pages.max(self.limits.n_pages);
    }

    /// What the first in line lacks, if it lacks anything.
    pub(crate) fn want(&mut self) -> Option<Want> {
        let (n_pages, first) = self.lack_of_first()?;
        let times = self.commons.queue.virtual_times_of(&self.contexts.get(&first)?.seat);
        Some(Want { n_pages, first, times })
    }

    /// What has to be given up for `n_pages` that another model gets, for a guest that has come as far as `times`; `None`
    /// if there are not as many but at the cost of work that is admitted, or that deserves them more.
    pub(crate) fn sacrifice(&mut self, n_pages: usize, times: Option<&VirtualTimes>) -> Option<Sacrifice> {
        // What was promised will be taken.
        let n_missing = (n_pages + self.line.n_promised).saturating_sub(self.pages.n_free());
        if n_missing == 0 {
            return Some(Sacrifice::Free);
        }
        if let Some(step) = self.pages.idle_since(n_missing) {
            return Some(Sacrifice::Cached { step });
        }
        self.sacrifice_of_held(n_missing - self.pages.n_idle(), times, &[])
    }

    /// As [`Self::sacrifice`], for what the model's own first in line lacks.
    pub(crate) fn own_sacrifice(&mut self, want: &Want) -> Option<Sacrifice> {
        // A job does not make room for itself.
        let members = match self.job_of(want.first) {
            Some(job) => self.jobs.members(job),
            None => SmallVec::from_slice(&[want.first]),
        };
        self.sacrifice_of_held(want.n_pages, None, &members)
    }

    /// What has to be given up of what is held. Work of guests that are not ahead of `times` keeps what it holds, and so do
    /// the contexts in `kept`.
    fn sacrifice_of_held(
        &mut self,
        n_pages: usize,
        times: Option<&VirtualTimes>,
        kept: &[ContextId],
    ) -> Option<Sacrifice> {
        // What admitted contexts hold is marked, and so is what has been counted.
        self.line.forget_count();
        let marking = self.count(None).marking;
        self.line.forget_count();
        for &id in kept {
            self.mark_held(&Victim::Context(id), marking);
        }
        let mut n_found = 0;
        self.put_holders_in_order();
        let mut last = self.next_holder(None);
        while let Some(holder) = last {
            if holder.does != Does::Nothing {
                last = holder.end_of_rank().and_then(|end| self.next_holder(Some(&end)));
                continue;
            }
            n_found += self.mark_held(&holder.victim, marking);
            if n_found >= n_pages {
                let Holder { rank, come, last_step: step, .. } = holder;
                return Some(Sacrifice::Idle { rank, come: come.0, step });
            }
            last = self.next_holder(Some(&holder));
        }
        let mut nearest: Option<VirtualTimes> = None;
        let in_line = self.line.last_first().into_iter().map(|id| (id, Giver::InLine));
        let over = self.over().into_iter().map(|id| (id, Giver::Over));
        for (id, giver) in in_line.chain(over).collect::<Vec<_>>() {
            let context = &self.contexts[&id];
            let of = self.commons.queue.virtual_times_of(&context.seat);
            if times.is_some_and(|times| of.compare(times).is_le()) {
                continue;
            }
            n_found += match giver {
                Giver::InLine => self.mark_held(&Victim::Context(id), marking),
                Giver::Over => context.kv.n_alone(&self.pages) + context.n_promised(),
            };
            nearest = nearest.filter(|nearest| nearest.compare(&of).is_le()).or(Some(of));
            if n_found >= n_pages {
                return nearest.map(Sacrifice::Work);
            }
        }
        None
    }

    /// Marks what a victim holds on the device; returns how many pages that no marking had reached.
    fn mark_held(&mut self, victim: &Victim, marking: u64) -> usize {
        let Self { contexts, saved, pages, .. } = self;
        let kv = match victim {
            Victim::Context(id) => contexts.get(id).map(|context| &context.kv),
            Victim::Saved(key) => saved.get(key).map(|saved| &saved.kv),
        };
        let blocks = kv.map(Sequence::blocks).unwrap_or_default();
        blocks.iter().filter(|&&block| pages.mark(block, marking) && pages.page(block).is_some()).count()
    }

    /// Gives up all pages from `n_pages` on, for a guest that has come as far as `times`, at the cost that
    /// [`Self::sacrifice`] tells; `None` if that cannot be any more. No step may be under way.
    pub(crate) fn part_with(&mut self, n_pages: usize, times: Option<&VirtualTimes>) -> Option<Plan> {
        let n_given = self.limits.n_pages - n_pages;
        self.sacrifice(n_given, times)?;
        let mut over = self.over().into_iter();
        while self.n_left() < n_given as isize {
            // It could as well stand at the end of the line by now.
            let id = over.next()?;
            let of = self.commons.queue.virtual_times_of(&self.contexts[&id].seat);
            if times.is_none_or(|times| of.compare(times).is_gt()) {
                self.leave_by_id(id);
            }
        }
        Some(self.vacate(n_pages, Taking::Spare))
    }

    /// Pages that admitted contexts neither hold nor were promised.
    fn n_left(&mut self) -> isize {
        self.line.forget_count();
        self.count(None).n_left
    }
}

/// Work that may have to give its pages up.
#[derive(Clone, Copy, Debug)]
enum Giver {
    InLine,
    /// It is admitted and has had its term.
    Over,
}
