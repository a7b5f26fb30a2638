//! Masks that come late: one for each draw of a run, made by its caller once the token before it is known.

use std::sync::Arc;

use crate::sampling::TokenMask;

/// Draws in a row that have to sit out before the next ones are planned only once their masks are there.
const N_SAT_OUT_MAX: usize = 2;

/// Draws whose masks were waited for, after which one is planned ahead of its mask again.
const N_WAITED_MAX: usize = 16;

/// The mask of a run's next draw, and whether its caller is in time with them.
///
/// A row is planned before its mask is there, so that the layers run while the caller works the mask out. Where masks take
/// longer than layers that gains nothing, and the row would be computed in two parts.
#[derive(Debug, Default)]
pub(crate) struct LateMasks {
    /// The place that the next token will take, and what it may be.
    next: Option<(usize, Arc<TokenMask>)>,
    /// Whether the next draw has sat out before.
    has_sat_out: bool,
    /// Draws in a row that did.
    n_sat_out: usize,
    /// Draws since then whose masks were waited for.
    n_waited: usize,
}

impl LateMasks {
    /// The mask of the token at a place has come. The first one for it holds.
    pub(crate) fn put(&mut self, position: usize, mask: Arc<TokenMask>) {
        if self.get(position).is_none() {
            self.next = Some((position, mask));
        }
    }

    /// The mask of the token at a place, if it has come.
    pub(crate) fn get(&self, position: usize) -> Option<&Arc<TokenMask>> {
        self.next.as_ref().filter(|(at, _)| *at == position).map(|(_, mask)| mask)
    }

    /// Whether a row may be planned whose mask has not come.
    pub(crate) fn may_be_late(&self) -> bool {
        self.n_sat_out < N_SAT_OUT_MAX
    }

    /// The next draw sits out, and will be made later.
    pub(crate) fn note_sat_out(&mut self) {
        self.has_sat_out = true;
        self.n_sat_out += 1;
    }

    /// A token was drawn.
    pub(crate) fn note_drawn(&mut self) {
        self.next = None;
        if std::mem::take(&mut self.has_sat_out) {
            return;
        }
        if self.n_sat_out < N_SAT_OUT_MAX {
            self.n_sat_out = 0;
            return;
        }
        self.n_waited += 1;
        if self.n_waited == N_WAITED_MAX {
            // One more that sits out is enough.
            (self.n_sat_out, self.n_waited) = (N_SAT_OUT_MAX - 1, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_is_for_one_place_and_the_first_one_holds() {
        let [a, b] = [TokenMask::none(8), TokenMask::all(8)].map(Arc::new);
        let mut masks = LateMasks::default();
        masks.put(5, a.clone());
        masks.put(5, b.clone());
        assert_eq!((masks.get(5), masks.get(6), masks.get(4)), (Some(&a), None, None));
        masks.note_drawn();
        assert_eq!(masks.get(5), None);
        masks.put(6, b.clone());
        assert_eq!(masks.get(6), Some(&b));
    }

    #[test]
    fn who_is_late_twice_in_a_row_is_waited_for_and_then_tried_again() {
        let mut masks = LateMasks::default();
        for _ in 0..3 {
            // Late once, in time once: a mask may still be late.
            masks.note_sat_out();
            masks.note_drawn();
            assert!(masks.may_be_late());
            masks.note_drawn();
        }
        masks.note_sat_out();
        masks.note_drawn();
        masks.note_sat_out();
        assert!(!masks.may_be_late());
        masks.note_drawn();
        for n_waited in 0..N_WAITED_MAX {
            assert!(!masks.may_be_late(), "{n_waited}");
            masks.note_drawn();
        }
        assert!(masks.may_be_late());
        masks.note_sat_out();
        assert!(!masks.may_be_late(), "one time is enough now");
    }
}
