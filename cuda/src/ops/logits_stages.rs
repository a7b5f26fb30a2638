//! Which kernels rows of logits need.

use super::logits::{OutputRow, Wants};
use super::logits_sources::TOP_K_MAX;

/// The kernels that the rows of a step need; a launch that no row needs only costs time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Stages {
    /// Some row is drawn from by choosing among few tokens.
    pub choose: bool,
    /// Some row has a top-k or top-p for which a cutoff is searched.
    pub search: bool,
    /// Some row may have to be looked through for its draw, after the first reading.
    pub draw: bool,
    /// Some row wants [`Wants::TOP`].
    pub top: bool,
    /// Some row wants [`Wants::RANKED`].
    pub ranked: bool,
    /// Some row wants [`Wants::FULL`].
    pub full: bool,
}

impl Stages {
    /// What these rows need.
    #[must_use]
    pub fn of(rows: &[OutputRow]) -> Self {
        Self {
            choose: rows.iter().any(|row| row.way() == Some(Way::Choose)),
            search: rows.iter().any(|row| row.way() == Some(Way::Search)),
            draw: rows.iter().any(|row| match row.way() {
                None | Some(Way::List) => false,
                // Those within reach of min-p may not be few.
                Some(Way::Choose) => row.top_k == 0,
                Some(Way::Search | Way::Read) => true,
            }),
            top: rows.iter().any(|row| row.wants.include(Wants::TOP) || row.wants.include(Wants::RANKED)),
            ranked: rows.iter().any(|row| row.wants.include(Wants::RANKED)),
            full: rows.iter().any(|row| row.wants.include(Wants::FULL)),
        }
    }

    /// What either needs.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            choose: self.choose || other.choose,
            search: self.search || other.search,
            draw: self.draw || other.draw,
            top: self.top || other.top,
            ranked: self.ranked || other.ranked,
            full: self.full || other.full,
        }
    }

    /// Everything, for a graph that has to serve any rows.
    #[must_use]
    pub fn all() -> Self {
        Self { choose: true, search: true, draw: true, top: true, ranked: true, full: true }
    }
}

/// How a row is drawn from, as `logits.cuh` has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// The first reading lists the tokens that could be drawn.
    List,
    /// Among the few tokens that may be kept.
    Choose,
    /// By a cutoff that is searched.
    Search,
    /// By another reading.
    Read,
}

impl OutputRow {
    /// `None` where no noise decides.
    fn way(&self) -> Option<Way> {
        let &Self { wants, temperature, top_k, top_p, min_logit, .. } = self;
        if !wants.include(Wants::SAMPLE) || temperature == 0.0 {
            return None;
        }
        Some(match (top_k, top_p < 1.0) {
            (0, false) if min_logit > f32::NEG_INFINITY => Way::Choose,
            (0, false) if temperature > 1e-30 && temperature < 1e30 => Way::List,
            (0, false) => Way::Read,
            (0, true) => Way::Search,
            (top_k, _) if top_k as usize <= TOP_K_MAX => Way::Choose,
            _ => Way::Search,
        })
    }
}
