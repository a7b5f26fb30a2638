//! How many decode rows a step takes, so that those of some do not starve those of others.
//!
//! A guest is due one part of the device in so many: users have theirs by their shares, and alike then the sessions of a user, then the guests of a
//! session. A step's decode rows last no longer than gives each guest at least its part of the pace that it would have
//! alone: a guest whose rows alone would last `t` and that is due one part in `n` may wait `n · t` for its next tokens.
//! Rows beyond that are left for the next step, those furthest ahead in virtual time first; so where rows ride with
//! others for next to nothing none are left out, and where each costs its time, a guest with many has the rest of the
//! device.
//!
//! That leaves each its part: where a step of `r` rows lasts `f + c · r`, the most that a guest with any number of rows
//! could have of one part in `n` is `1 / (n · c)` rows in a time, and that is what a step of this length has room for.
//!
//! Prompts that ride with decode rows make a step longer, by a part of what those last. Where some wait, the bound leaves
//! them that part of what the guest may wait.
//!
//! A guest that is away for a moment comes back to a step that is under way. So while several users decode, none lasts longer than a
//! moment, whoever has rows in it: a search of some hundred rows could otherwise be silence for others.
//!
//! How long rows last was seen. What decides and was not seen lately is looked at in a step of its own, without prompts:
//! of as many rows as the guest has that keeps steps short, or of more than steps have. What has more rows than that and is
//! planned whole, such as the beams of a search, is left out of it.

use super::super::cost::{Grain, Look};
use super::super::{Plan, Scheduler};
use super::N_STEPS_RECENT;
use crate::fair::{Class, DuePart};

/// A guest that gets so many parts in a hundred of what it is due, whatever rows cost, keeps no step short: how many wait
/// changes from step to step.
const PARTS_IN_HUNDRED: usize = 80;

/// How long decode rows last at most while several users decode, and in steps of one row, if that is longer.
const STEP_NS_MOST: f64 = 12_000_000.0;
const N_STEPS_MOST: f64 = 2.0;

/// Of what a step may last, the part that a later one may be longer at most because this one was shorter.
const N_PARTS_GIVEN: f64 = 4.0;

/// Steps of the length that they are to have by which earlier ones may have been too long at most, in what later ones make
/// up for.
const N_STEPS_OVER: f64 = 64.0;

/// Decode rows that one step takes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(in crate::scheduler) enum DecodeBound {
    /// All that there are.
    #[default]
    None,
    /// As many as last so long.
    Within { n_rows: usize, ns: f64 },
    /// So many, and no prompts, to see how long they last.
    Look { n_rows: usize, ns: Option<f64> },
}

/// What keeps steps short.
#[derive(Debug, Default)]
pub(in crate::scheduler) struct Pace {
    /// The guests that did in the last steps, and the numbers of those. One that is a moment late still decodes.
    recent: [Option<(DuePart, u64)>; N_STEPS_RECENT as usize],
    /// By how much steps were longer than they were to be: what is planned whole may be many rows. Below 0 by how much they
    /// were shorter: that may be worth a row more.
    over_ns: f64,
    /// How finely numbers of rows were told apart for that.
    grain: Grain,
}

impl DecodeBound {
    /// The most rows, but for those that are planned whole.
    pub(in crate::scheduler) fn n_rows(self) -> usize {
        match self {
            Self::None => usize::MAX,
            Self::Within { n_rows, .. } | Self::Look { n_rows, .. } => n_rows,
        }
    }

    /// The same for a step that is not to show how long decode rows last.
    pub(in crate::scheduler) fn without_look(self) -> Self {
        match self {
            Self::Look { n_rows, ns: Some(ns) } => Self::Within { n_rows, ns },
            Self::Look { ns: None, .. } => Self::None,
            Self::None | Self::Within { .. } => self,
        }
    }

    /// Whether the step is to show how long decode rows last.
    pub(in crate::scheduler) fn is_look(self) -> bool {
        matches!(self, Self::Look { .. })
    }

    /// How long they are to last, where that is known and matters.
    fn ns(self) -> Option<f64> {
        match self {
            Self::None => None,
            Self::Within { ns, .. } => Some(ns),
            Self::Look { ns, .. } => ns,
        }
    }
}

impl Scheduler {
    /// How many decode rows the step takes that is planned now.
    pub(in crate::scheduler) fn decode_bound(&mut self) -> DecodeBound {
        let lane = self.lane(Class::Decode);
        let n_all = self.commons.queue.n_rows(lane) + self.jobs.n_rows_waiting();
        let Some((n_rows, ns)) = self.most_beside_others().filter(|&(n_rows, _)| n_rows < n_all) else {
            return self.bound_by_patience(n_all);
        };
        match self.bound_by_patience(n_rows) {
            bound if bound.n_rows() <= n_rows => bound,
            bound => DecodeBound::Within { n_rows, ns: bound.ns().unwrap_or(ns) },
        }
    }

    /// The most rows of a step while several users decode, and how long they last.
    fn most_beside_others(&mut self) -> Option<(usize, f64)> {
        let ns = self.ns_most_beside_others()?;
        Some((self.costs.decode(Grain::Coarse).n_rows_within(ns).max(1), ns))
    }

    /// How long what is asked beside the tokens of decode rows may last in a step with this bound: half of what it is to last, as the
    /// tokens themselves may.
    pub(in crate::scheduler) fn beside_ns_most(&mut self, bound: DecodeBound) -> Option<f64> {
        let most = self.ns_most_beside_others()?;
        Some(bound.ns().unwrap_or(most).min(most) / 2.0)
    }

    /// How long the decode rows of a step last at most while several users decode.
    fn ns_most_beside_others(&mut self) -> Option<f64> {
        if !self.commons.arrears.do_several_decode() {
            return None;
        }
        let one_ns = self.costs.decode(Grain::Coarse).ns(1)?;
        Some(STEP_NS_MOST.max(N_STEPS_MOST * one_ns))
    }

    /// How many of so many decode rows a step takes, for the guest that least may wait for it.
    fn bound_by_patience(&mut self, n_all: usize) -> DecodeBound {
        let Some(share) = self.least_patient(n_all) else { return DecodeBound::None };
        let over_ns = self.pace.over_ns;
        let n_parts = self.parts_for_decode_rows(share.n_parts);
        let grain = if n_parts > 1.0 && n_parts < 2.0 { Grain::Fine } else { Grain::Coarse };
        self.pace.grain = grain;
        let times = self.costs.decode(grain);
        let Some(alone_ns) = times.ns(share.n_rows).filter(|_| times.is_known(share.n_rows)) else {
            return match times.takes_look(share.n_rows, Look::Often) {
                true => DecodeBound::Look { n_rows: share.n_rows, ns: None },
                false => DecodeBound::None,
            };
        };
        let ns = alone_ns * n_parts;
        let n_rows = times.n_rows_within(ns - over_ns).max(share.n_rows);
        let n_more = grain.next_told_apart(n_rows).min(n_all);
        let look = if n_rows < n_all { Look::Often } else { Look::Rarely };
        if times.takes_look(share.n_rows, look) {
            DecodeBound::Look { n_rows: share.n_rows, ns: Some(ns) }
        } else if n_rows >= n_all {
            // Jobs that ride beside those that were counted keep none of them out.
            DecodeBound::Within { n_rows: usize::MAX, ns }
        } else if times.takes_look(n_more, Look::Often) {
            DecodeBound::Look { n_rows: n_more, ns: Some(ns) }
        } else {
            DecodeBound::Within { n_rows, ns }
        }
    }

    /// Of the parts of its own time that a guest may wait, those that decode rows may take: prompts that wait have some too.
    fn parts_for_decode_rows(&self, n_parts: f64) -> f64 {
        match self.n_queued(Class::Prompt) {
            0 => n_parts,
            _ => (n_parts / self.settings.latency_multiple).max(1.0),
        }
    }

    /// The guest that least may wait for a step of all rows, if that could be too long for any.
    fn least_patient(&mut self, n_all: usize) -> Option<DuePart> {
        let lane = self.lane(Class::Decode);
        if n_all <= 1 {
            return None;
        }
        let step = self.step;
        let queue = &self.commons.queue;
        let times = self.costs.decode(Grain::Coarse);
        // A step of twice the rows lasts twice as long at most, whatever they cost.
        let n_least = (PARTS_IN_HUNDRED * n_all) as f64;
        let may_wait = |share: &DuePart| n_least <= 100.0 * share.n_parts * share.n_rows as f64;
        let patience = |share: &DuePart| match times.is_known(share.n_rows) {
            true => times.ns(share.n_rows).unwrap_or(0.0) * share.n_parts,
            false => 0.0,
        };
        let least = |shares: &mut dyn Iterator<Item = DuePart>| {
            shares
                .map(|mut share| {
                    share.n_rows = share.n_rows.min(n_all);
                    share
                })
                .filter(|share| !may_wait(share))
                .map(|share| (patience(&share), share))
                .min_by(|(a, _), (b, _)| a.total_cmp(b))
        };
        let of_waiting = least(&mut queue.shares(lane));
        let recent = self.pace.recent.iter().flatten();
        let recent = recent.filter(|&&(_, of_step)| step - of_step <= N_STEPS_RECENT);
        let of_recent = least(&mut recent.filter_map(|&(share, _)| queue.share_if_back(share, lane)));
        self.pace.recent[(step % N_STEPS_RECENT) as usize] = of_waiting.map(|(_, share)| (share, step));
        let (_, share) = of_waiting.into_iter().chain(of_recent).min_by(|(a, _), (b, _)| a.total_cmp(b))?;
        Some(share)
    }

    /// The decode rows of a step are planned: what they last too long is taken off the next ones, and a little of what they
    /// do not last is given to them.
    pub(in crate::scheduler) fn note_decode_rows(&mut self, plan: &Plan) {
        let n_rows = plan.work.n_decode_rows;
        self.pace.over_ns = match plan.decode_bound.ns() {
            Some(ns) if n_rows > 0 => {
                let over_ns = self.costs.decode(self.pace.grain).ns(n_rows).unwrap_or(ns) - ns;
                (self.pace.over_ns + over_ns).clamp(-ns / N_PARTS_GIVEN, N_STEPS_OVER * ns)
            }
            Some(_) => self.pace.over_ns,
            None => 0.0,
        };
    }
}
