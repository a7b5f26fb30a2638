//! How many pages a plan moves between the device and host memory. Copies go before the rows of their step, and the step's
//! decode rows wait for them: so they are bounded by time, as prompts are. A partial move keeps its pages reserved for its
//! context and continues in the next plan.

use super::{Commons, ContextState, Move, Plan, Scheduler};
use crate::fair::Class;

/// What a link is taken to move before anything was seen: half of what one of PCIe 4 does with 16 lanes. What was seen
/// is believed within a few times that: the host may be late to notice that a step is done.
const BYTES_PER_NS: f64 = 16.0;
const TIMES_BELIEVED: f64 = 4.0;

/// The share of a new measurement in a running mean.
const WEIGHT: f64 = 0.125;

/// What is moved between two steps at most, and at least, unless a page is longer.
const MOST_BYTES: usize = 64 << 20;
const LEAST_BYTES: usize = 4 << 20;

/// Of the time that a step may last longer than its decode rows take, moves have one part in so many: prompts, that of
/// whose pages moves among them, have the rest.
const N_PARTS: f64 = 2.0;

/// What is moved between a device and host memory, by all models of the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Link {
    ns_per_byte: f64,
    /// Steps that had been taken in when this was moved.
    n_steps: u64,
    n_bytes: usize,
    /// Whether it still moves what was asked of it while no step is under way.
    is_busy: bool,
}

impl Default for Link {
    fn default() -> Self {
        Self { ns_per_byte: 1.0 / BYTES_PER_NS, n_steps: 0, n_bytes: 0, is_busy: false }
    }
}

impl Link {
    /// So many bytes took so long.
    fn learn(&mut self, n_bytes: usize, ns: u64) {
        let (least, most) = (1.0 / BYTES_PER_NS / TIMES_BELIEVED, TIMES_BELIEVED / BYTES_PER_NS);
        let seen = (ns as f64 / n_bytes as f64).clamp(least, most);
        self.ns_per_byte += WEIGHT * (seen - self.ns_per_byte);
    }
}

impl Commons {
    /// Whether the link still moves what was asked of it while no step is under way.
    pub(crate) fn set_link_busy(&mut self, is_busy: bool) {
        self.link.is_busy = is_busy;
    }
}

impl Plan {
    /// Whether it may move another page.
    pub(super) fn has_room_for_move(&self) -> bool {
        self.n_moves_max.is_none_or(|n_max| self.moves.len() < n_max)
    }
}

impl Scheduler {
    /// How long the decode rows that would wait for moves take, if there are any on the device.
    fn decoding_ns(&self) -> Option<u64> {
        let n_rows = match self.n_queued(Class::Decode) {
            0 if self.has_decoded_lately() => self.costs.n_decode_rows(),
            n_rows => n_rows.min(self.limits.n_rows_max),
        };
        let own = if n_rows > 0 { self.costs.target_ns(n_rows, 1.0) } else { None };
        own.into_iter().chain(self.commons.decode_ns_beside(self.settings.place)).min()
    }

    /// Bytes that are moved between two steps, while so much is asked as now.
    pub(crate) fn n_move_bytes_per_step(&self) -> usize {
        let n_parts_of_time = (self.settings.latency_multiple - 1.0) / N_PARTS;
        let of_time = |ns: u64| (ns as f64 * n_parts_of_time / self.commons.link.ns_per_byte) as usize;
        self.decoding_ns().map_or(MOST_BYTES, of_time).clamp(LEAST_BYTES, MOST_BYTES)
    }

    /// Pages that are moved between two steps.
    pub(super) fn n_moves_per_step(&self) -> usize {
        (self.n_move_bytes_per_step() / self.limits.page_bytes.max(1)).max(1)
    }

    /// Pages that the next plan may move: beside a step that is under way, what plans since the last have left.
    pub(super) fn n_moves_left(&self) -> usize {
        let Link { n_steps, n_bytes, is_busy, .. } = self.commons.link;
        let is_same_step = n_steps == self.commons.n_steps && self.commons.n_under_way > 0;
        match is_busy {
            true => 0,
            false if is_same_step => {
                self.n_moves_per_step().saturating_sub(n_bytes.div_ceil(self.limits.page_bytes.max(1)))
            }
            false => self.n_moves_per_step(),
        }
    }

    /// A plan was made.
    pub(super) fn note_moved(&mut self, plan: &Plan) {
        let (n_steps, n_under_way) = (self.commons.n_steps, self.commons.n_under_way);
        let link = &mut self.commons.link;
        if link.n_steps != n_steps || n_under_way == 0 {
            (link.n_steps, link.n_bytes) = (n_steps, 0);
        }
        link.n_bytes += plan.moves.len() * self.limits.page_bytes;
    }

    /// How long the moves of a plan take.
    pub(super) fn moves_ns(&self, plan: &Plan) -> f64 {
        (plan.moves.len() * self.limits.page_bytes) as f64 * self.commons.link.ns_per_byte
    }

    /// How long the next moves are to wait for those of this plan, which has no rows: a decode row that is asked for
    /// meanwhile waits for one plan's moves at most. None where no context decodes.
    pub(crate) fn pause_after_ns(&self, plan: &Plan) -> Option<u64> {
        self.decoding_ns().map(|_| self.moves_ns(plan) as u64)
    }

    /// The device took so long longer for a step and what moved before it than it took for the step.
    pub(crate) fn learn_of_moves(&mut self, plan: &Plan, ns: u64) {
        let n_bytes = plan.moves.len() * self.limits.page_bytes;
        let is_within = plan.moves.iter().any(|planned| matches!(planned, Move::Within(..)));
        if n_bytes >= LEAST_BYTES && !is_within {
            self.commons.link.learn(n_bytes, ns);
        }
    }

    /// Brings what an admitted context has in host memory to the device, for which there are pages, as far as the plan may
    /// move any; returns whether that was all.
    pub(super) fn bring_back(&mut self, context: &mut ContextState, plan: &mut Plan) -> bool {
        let mut n_back = 0;
        let mut is_all = true;
        for &block in context.kv.blocks() {
            if self.pages.page(block).is_some() {
                continue;
            }
            if !plan.has_room_for_move() {
                is_all = false;
                break;
            }
            let (from, to) = self.pages.move_in(block).expect("room was made");
            plan.moves.push(Move::In(from, to));
            n_back += 1;
        }
        if n_back > 0 {
            self.stats.n_swaps_in += n_back as u64;
            if context.kv.n_alone(&self.pages) < context.kv.blocks().len() {
                self.holders.note_shared_are_back();
            }
            self.note_back(context, n_back);
        }
        is_all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_of_a_link_follows_what_was_seen() {
        let rate = |n_bytes, ns| {
            let mut link = Link::default();
            (0..60).for_each(|_| link.learn(n_bytes, ns));
            1.0 / link.ns_per_byte
        };
        assert!((1.0 / Link::default().ns_per_byte - BYTES_PER_NS).abs() < 1e-9);
        assert!((rate(64 << 20, (64 << 20) / 50) - 50.0).abs() < 1.0);
        assert!((rate(64 << 20, (64 << 20) / 8) - 8.0).abs() < 1.0);
        // A host that was late says nothing of the link.
        assert!((63.0..65.0).contains(&rate(64 << 20, 0)) && (3.9..4.1).contains(&rate(4 << 20, 1 << 40)));
    }
}
