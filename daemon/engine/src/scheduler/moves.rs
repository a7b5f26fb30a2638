//! How many pages a plan moves between the device and host memory. Copies go before the rows of their step, and whoever
//! decodes waits for them: they are bounded by time, as prompts are. What is half moved stays so, its pages kept for whom
//! they are, and goes on in the next plan.

use super::fair::Class;
use super::{ContextState, Move, Plan, Scheduler};

/// What a link moves: half of what one of PCIe 4 does with 16 lanes.
const BYTES_PER_NS: f64 = 16.0;

/// What is moved between two steps at most, and at least, unless a page is longer.
const MOST_BYTES: usize = 64 << 20;
const LEAST_BYTES: usize = 4 << 20;

/// Of the time that a step may last longer than its decode rows take, moves have one part in so many: prompts, that of
/// whose pages moves among them, have the rest.
const N_PARTS: f64 = 2.0;

/// Pages that are moved since a step was taken in.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Moved {
    /// Steps that had been taken in by then.
    n_steps: u64,
    n_pages: usize,
}

impl Plan {
    /// Whether it may move another page.
    pub(super) fn has_room_for_move(&self) -> bool {
        self.n_moves_max.is_none_or(|n_max| self.moves.len() < n_max)
    }
}

impl Scheduler {
    /// Pages that are moved between two steps, while so much is asked as now.
    pub(super) fn n_moves_per_step(&self) -> usize {
        let multiple = self.settings.latency_multiple;
        let n_rows = match self.n_queued(Class::Decode) {
            0 if self.has_decoded_lately() => self.costs.n_decode_rows(),
            n_rows => n_rows.min(self.limits.n_rows_max),
        };
        let alone_ns = match n_rows {
            0 => self.commons.decode_ns_beside(self.settings.place),
            n_rows => self.costs.target_ns(n_rows, 1.0),
        };
        let of_time = |ns: u64| ns as f64 * (multiple - 1.0) / N_PARTS * BYTES_PER_NS;
        let n_bytes = alone_ns.map_or(MOST_BYTES, |ns| of_time(ns) as usize);
        (n_bytes.clamp(LEAST_BYTES, MOST_BYTES) / self.limits.page_bytes.max(1)).max(1)
    }

    /// Pages that the next plan may move: beside a step that is under way, what plans since the last have left.
    pub(super) fn n_moves_left(&self) -> usize {
        let Moved { n_steps, n_pages } = self.moved;
        let is_same_step = n_steps == self.commons.n_steps && !self.steps_under_way.is_empty();
        self.n_moves_per_step().saturating_sub(if is_same_step { n_pages } else { 0 })
    }

    /// A plan was made.
    pub(super) fn note_moved(&mut self, plan: &Plan) {
        let n_steps = self.commons.n_steps;
        if self.moved.n_steps != n_steps || self.steps_under_way.is_empty() {
            self.moved = Moved { n_steps, n_pages: 0 };
        }
        self.moved.n_pages += plan.moves.len();
    }

    /// How long the moves of a plan take.
    pub(super) fn moves_ns(&self, plan: &Plan) -> f64 {
        (plan.moves.len() * self.limits.page_bytes) as f64 / BYTES_PER_NS
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
