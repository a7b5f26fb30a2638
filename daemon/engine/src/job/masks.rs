//! Masks that come late: one for each draw of a run, made by its caller once the tokens before it are known, or expected.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::batch::Token;
use crate::error::EngineError;
use crate::guess::N_GUESS_MAX;
use crate::run::Finish;
use crate::sampling::TokenMask;

/// Draws in a row that have to sit out before the next ones are planned only once their masks are there.
const N_SAT_OUT_MAX: usize = 2;

/// Masks that are held: more than a caller makes before the draws that it expects.
const N_COMING_MAX: usize = 2 * (N_GUESS_MAX + 1);

/// Draws whose masks were waited for, after which one is planned ahead of its mask again.
const N_WAITED_MAX: usize = 16;

/// The masks of a run's next draws, and whether its caller is in time with them.
///
/// A row is planned before its mask is there, so that the layers run while the caller works the mask out. Where masks take
/// longer than layers that gains nothing, and the row would be computed in two parts.
///
/// A caller may know which token a draw will give, or expect one: then the masks of the draws behind it come before it is
/// made. They are of use as far as the draws are those that were expected; at the first that is not there is a *turn*, and
/// what was made for the other way counts for nothing, also where it comes later.
#[derive(Debug)]
pub(crate) struct LateMasks {
    /// The place that the next token will take.
    place: usize,
    /// From that place on.
    coming: VecDeque<Coming>,
    /// How the run ends behind those, if it comes there.
    end: Option<Result<Finish, EngineError>>,
    n_turns: u32,
    /// Whether the next draw has sat out before.
    has_sat_out: bool,
    /// Draws in a row that did.
    n_sat_out: usize,
    /// Draws since then whose masks were waited for.
    n_waited: usize,
}

/// What one token may be, and what it is expected to be.
#[derive(Debug)]
struct Coming {
    mask: Arc<TokenMask>,
    expected: Option<Token>,
}

impl LateMasks {
    /// For a run whose first token takes this place.
    pub(crate) fn new(place: usize) -> Self {
        Self {
            place,
            coming: VecDeque::new(),
            end: None,
            n_turns: 0,
            has_sat_out: false,
            n_sat_out: 0,
            n_waited: 0,
        }
    }

    /// Whether what was made after so many turns for this place is what comes next.
    fn is_next(&self, position: usize, turn: u32) -> bool {
        let is_led_to = self.coming.back().is_none_or(|last| last.expected.is_some());
        turn == self.n_turns && position == self.place + self.coming.len() && is_led_to && self.end.is_none()
    }

    /// The mask of the token at a place has come, after so many turns; whether it is that of the next draw. One that does not
    /// follow those that are there does nothing.
    pub(crate) fn put(
        &mut self,
        position: usize,
        turn: u32,
        mask: Arc<TokenMask>,
        expected: Option<Token>,
    ) -> bool {
        if !self.is_next(position, turn) || self.coming.len() == N_COMING_MAX {
            return false;
        }
        self.coming.push_back(Coming { mask, expected });
        position == self.place
    }

    /// There is no mask for this place: the run ends when it comes there. Returns the end if it has.
    pub(crate) fn put_end(
        &mut self,
        position: usize,
        turn: u32,
        end: Result<Finish, EngineError>,
    ) -> Option<Result<Finish, EngineError>> {
        if self.is_next(position, turn) {
            self.end = Some(end);
        }
        self.take_end()
    }

    /// How the run ends, if it has come there.
    pub(crate) fn take_end(&mut self) -> Option<Result<Finish, EngineError>> {
        if self.coming.is_empty() { self.end.take() } else { None }
    }

    /// Whether the run is known to end before the token at a place.
    pub(crate) fn ends_at(&self, place: usize) -> bool {
        self.end.is_some() && place == self.place + self.coming.len()
    }

    /// The mask of the token at a place, if it has come and all tokens before are known. Behind a draw that is under way there
    /// is none: it may give something else than what the next mask was made for.
    pub(crate) fn get(&self, position: usize) -> Option<&Arc<TokenMask>> {
        self.get_expected(position).filter(|_| position == self.place)
    }

    /// The mask of the token at a place, if those that are expected come before it.
    pub(crate) fn get_expected(&self, position: usize) -> Option<&Arc<TokenMask>> {
        self.coming.get(position.checked_sub(self.place)?).map(|coming| &coming.mask)
    }

    /// The tokens that are expected from so many behind the next on, as far as the mask behind each of them is there.
    pub(crate) fn expected_after(&self, n_skipped: usize) -> impl Iterator<Item = Token> {
        let behind = self.coming.iter().skip(n_skipped + 1);
        self.coming.iter().skip(n_skipped).zip(behind).map_while(|(coming, _)| coming.expected)
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

    /// This token was drawn.
    pub(crate) fn note_drawn(&mut self, token: Token) {
        self.place += 1;
        let expected = self.coming.pop_front().and_then(|coming| coming.expected);
        if expected.is_some_and(|expected| expected != token) {
            self.coming.clear();
            self.end = None;
            self.n_turns += 1;
        }
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
        let mut masks = LateMasks::new(5);
        masks.put(6, 0, b.clone(), None);
        masks.put(5, 0, a.clone(), None);
        masks.put(5, 0, b.clone(), None);
        // Nothing leads to it.
        masks.put(6, 0, b.clone(), None);
        assert_eq!((masks.get(5), masks.get(6), masks.get(4)), (Some(&a), None, None));
        masks.note_drawn(1);
        assert_eq!(masks.get(5), None);
        masks.put(6, 0, b.clone(), None);
        assert_eq!(masks.get(6), Some(&b));
    }

    #[test]
    fn what_is_expected_holds_up_to_the_first_draw_that_differs() {
        let mask = Arc::new(TokenMask::all(8));
        let expected = |masks: &LateMasks, n_skipped| masks.expected_after(n_skipped).collect::<Vec<_>>();
        let mut masks = LateMasks::new(5);
        for (position, token) in [(5, 1), (6, 2), (7, 3)] {
            masks.put(position, 0, mask.clone(), Some(token));
        }
        assert_eq!(expected(&masks, 0), [1, 2], "the mask behind the third has not come");
        // The token at 5 may still be another.
        assert!(masks.get(5).is_some() && masks.get(6).is_none() && masks.get_expected(6).is_some());
        assert!(masks.put_end(8, 0, Ok(Finish::Complete)).is_none(), "there are draws before it");
        assert!(masks.ends_at(8) && !masks.ends_at(7));
        masks.put(8, 0, mask.clone(), None);
        assert_eq!((expected(&masks, 0), expected(&masks, 1)), (vec![1, 2], vec![2]), "it ends there");
        masks.note_drawn(1);
        assert_eq!(expected(&masks, 0), [2]);
        // A turn.
        masks.note_drawn(7);
        assert!(expected(&masks, 0).is_empty() && masks.get(7).is_none() && !masks.ends_at(8));
        masks.put(7, 0, mask.clone(), Some(3));
        assert!(masks.get(7).is_none(), "it was made for the other way");
        masks.put(7, 1, mask.clone(), Some(4));
        masks.put(8, 1, mask.clone(), Some(5));
        assert_eq!(expected(&masks, 0), [4]);
        assert!(masks.put_end(9, 1, Ok(Finish::Complete)).is_none());
        masks.note_drawn(4);
        assert!(masks.take_end().is_none());
        masks.note_drawn(5);
        assert!(matches!(masks.take_end(), Some(Ok(Finish::Complete))));
    }

    #[test]
    fn who_is_late_twice_in_a_row_is_waited_for_and_then_tried_again() {
        let mut masks = LateMasks::new(0);
        for _ in 0..3 {
            // Late once, in time once: a mask may still be late.
            masks.note_sat_out();
            masks.note_drawn(1);
            assert!(masks.may_be_late());
            masks.note_drawn(1);
        }
        masks.note_sat_out();
        masks.note_drawn(1);
        masks.note_sat_out();
        assert!(!masks.may_be_late());
        masks.note_drawn(1);
        for n_waited in 0..N_WAITED_MAX {
            assert!(!masks.may_be_late(), "{n_waited}");
            masks.note_drawn(1);
        }
        assert!(masks.may_be_late());
        masks.note_sat_out();
        assert!(!masks.may_be_late(), "one time is enough now");
    }
}
