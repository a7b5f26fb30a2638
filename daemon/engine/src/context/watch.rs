//! Masks of a run, worked out as far ahead of its draws as it is known, or nearly, what those give.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::keeps::within;
use crate::account::{Account, HostCharge, Owner, Resource};
use crate::batch::Token;
use crate::command::{ContextId, Operation};
use crate::completion::{CallerId, Tag};
use crate::constraint::{Expected, Next, Rule, Walk};
use crate::guess::N_GUESS_MAX;
use crate::mailbox::Watch;
use crate::mask_threads::{Piece, Turn, caught};
use crate::model_handle::ModelHandle;
use crate::run::{Finish, RunQueue};
use crate::sampling::TokenMask;

/// Masks that are there before the first of their tokens is drawn: of a row that is as long as a guess can make it.
const N_MASKS_AHEAD: usize = N_GUESS_MAX + 1;

/// How far masks are worked out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Foresight {
    /// For the next draw alone.
    None,
    /// As far as tokens are expected.
    Expected,
}

/// What the masks of a run follow from.
pub(super) struct MasksOfRun {
    pub(super) rule: Arc<Rule>,
    /// The place of the first token that counts.
    pub(super) first: usize,
    pub(super) walk: Arc<Walk>,
    pub(super) sampler_mask: Option<Arc<TokenMask>>,
    pub(super) n_tokens: usize,
    /// Those from `first` on.
    pub(super) tokens: Vec<Token>,
    pub(super) foresight: Foresight,
    pub(super) owner: Owner,
}

/// Masks of a run are worked out until this is dropped.
#[derive(Debug)]
pub(super) struct Watching(Arc<RunWatch>);

impl Drop for Watching {
    fn drop(&mut self) {
        let mut standing = self.0.standing();
        (standing.is_stopped, standing.charge) = (true, None);
    }
}

impl MasksOfRun {
    /// Has the mask of the first draw of a context's run worked out, and then each once it is known what comes before it.
    pub(super) fn begin(
        mut self,
        model: &ModelHandle,
        caller: CallerId,
        id: ContextId,
        queue: &RunQueue,
    ) -> Watching {
        let path = Mutex::new(std::mem::take(&mut self.tokens));
        let standing = Mutex::new(Standing {
            n_drawn: self.n_tokens,
            expected: VecDeque::new(),
            n_turns: 0,
            news: None,
            unsaid: None,
            work: Work::UnderWay,
            charge: None,
            is_stopped: false,
        });
        let (model, tag) = (model.clone(), queue.tag());
        let watch = Arc::new(RunWatch { model, caller, id, tag, of: self, path, standing });
        queue.watch(watch.clone());
        watch.clone().go_on();
        Watching(watch)
    }
}

/// Works out the mask of each draw of a run on the threads that do so, one at a time: once the token before it is known or
/// expected.
struct RunWatch {
    model: ModelHandle,
    caller: CallerId,
    id: ContextId,
    tag: Tag,
    of: MasksOfRun,
    /// Tokens from the first that counts on, those that are expected included. Held while a mask is worked out.
    path: Mutex<Vec<Token>>,
    standing: Mutex<Standing>,
}

/// How far draws and masks have come.
struct Standing {
    /// Tokens of the context, those that were drawn included.
    n_drawn: usize,
    /// Those that are expected behind them: their masks are made.
    expected: VecDeque<Expected>,
    /// Draws that did not give what was expected.
    n_turns: u32,
    /// The token that was drawn last, where no mask has been made behind it.
    news: Option<Token>,
    /// A token that is nearly forced in the place whose mask was made last, where it was not said to be expected.
    unsaid: Option<Token>,
    work: Work,
    /// For the masks that are there before they are needed.
    charge: Option<HostCharge>,
    /// Whether the run is over.
    is_stopped: bool,
}

/// Whether a mask is being worked out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    UnderWay,
    /// It waits for the draw behind those that are expected.
    WaitsForDraw,
    /// There are enough.
    IsFarAhead,
}

impl std::fmt::Debug for RunWatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RunWatch").field("id", &self.id).finish_non_exhaustive()
    }
}

impl Watch for RunWatch {
    fn note_drawn(self: Arc<Self>, token: Token) {
        if self.standing().take_drawn(token, &self.of.rule) {
            self.go_on();
        }
    }
}

impl Standing {
    /// Whether masks may be held before they are needed. They spare steps, but a guest whose own work takes the memory would
    /// fail: they come one by one where less than half of it would stay free.
    fn has_room(&mut self, mask: &TokenMask, account: &Arc<Account>) -> bool {
        let n_bytes = (N_MASKS_AHEAD * size_of_val(mask.words())) as u64;
        let n_more = if self.charge.is_none() { n_bytes } else { 0 };
        if !account.is_half_free_beside(Resource::HostBytes, n_more) {
            return false;
        }
        if self.charge.is_none() {
            self.charge = HostCharge::new(account, n_bytes).ok();
        }
        self.charge.is_some()
    }

    /// A token is expected behind those that are.
    fn expect(&mut self, expected: Expected) {
        self.expected.push_back(expected);
        self.work = if self.expected.len() < N_MASKS_AHEAD { Work::UnderWay } else { Work::IsFarAhead };
    }

    /// Takes in a draw; whether the next mask is to be worked out now.
    fn take_drawn(&mut self, token: Token, rule: &Rule) -> bool {
        self.n_drawn += 1;
        let goes_on = match self.expected.pop_front() {
            Some(expected) if expected.token == token => {
                if !expected.is_certain {
                    rule.note_nearly_forced(true);
                }
                self.work == Work::IsFarAhead
            }
            Some(_) => {
                rule.note_nearly_forced(false);
                self.expected.clear();
                self.n_turns += 1;
                (self.news, self.unsaid) = (Some(token), None);
                self.work != Work::UnderWay
            }
            None => {
                if let Some(unsaid) = self.unsaid.take() {
                    rule.note_nearly_forced(unsaid == token);
                }
                self.news = Some(token);
                true
            }
        };
        if self.expected.is_empty() {
            self.charge = None;
        }
        if goes_on {
            self.work = Work::UnderWay;
        }
        goes_on
    }
}

impl RunWatch {
    fn standing(&self) -> MutexGuard<'_, Standing> {
        self.standing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the next mask worked out, in its guest's turn.
    fn go_on(self: Arc<Self>) {
        let watch = self.clone();
        self.model.masks().run_in_pieces(&self.of.owner, move |turn| watch.work_out(turn));
    }

    fn work_out(self: &Arc<Self>, time: &mut Turn) -> Piece {
        let MasksOfRun { rule, first, walk, sampler_mask, foresight, owner, .. } = &self.of;
        // Held until the mask is on its way: the engine takes masks in their order.
        let mut path = self.path.lock().unwrap_or_else(PoisonError::into_inner);
        let (position, turn) = {
            let mut standing = self.standing();
            if standing.is_stopped {
                return Piece::Last;
            }
            if let Some(token) = standing.news.take() {
                // Whatever was expected in its place and behind it.
                let place = standing.n_drawn - 1;
                path.truncate(place.saturating_sub(*first));
                path.extend((place >= *first).then_some(token));
            }
            (standing.n_drawn + standing.expected.len(), standing.n_turns)
        };
        let mut is_over = || time.is_over();
        let is_near = caught(|| walk.come_near(rule, *first, position, &path, &mut is_over));
        if is_near == Ok(None) {
            return Piece::GoesOn;
        }
        let next = is_near.and_then(|begun| {
            caught(|| {
                Ok(match walk.next(rule, *first, position, &path, &[], begun)?.remove(0) {
                    Next::Mask(mask) => {
                        let mask = Arc::new(within(mask, sampler_mask.as_deref()));
                        let expected = match foresight {
                            Foresight::None => None,
                            Foresight::Expected => rule.constraint().expected(&mask),
                        };
                        Some((mask, expected))
                    }
                    Next::Complete | Next::Ended => None,
                })
            })
        });
        let mut standing = self.standing();
        if standing.is_stopped {
            return Piece::Last;
        }
        if standing.n_turns != turn {
            // The draws have gone another way meanwhile.
            drop((standing, path));
            self.clone().go_on();
            return Piece::Last;
        }
        let (id, tag) = (self.id, self.tag);
        let end = |end| Operation::EndRun { id, tag, position, turn, end };
        (standing.work, standing.unsaid) = (Work::WaitsForDraw, None);
        let operation = match next {
            Ok(Some((mask, expected))) => {
                let is_said = |expected: &Expected| {
                    (expected.is_certain || rule.trusts()) && standing.has_room(&mask, &owner.account)
                };
                match expected.filter(is_said) {
                    Some(said) => {
                        path.extend((position >= *first).then_some(said.token));
                        standing.expect(said);
                        Operation::Mask { id, tag, position, turn, mask, expected: Some(said.token) }
                    }
                    None => {
                        standing.unsaid = expected.map(|expected| expected.token);
                        Operation::Mask { id, tag, position, turn, mask, expected: None }
                    }
                }
            }
            Ok(None) => end(Ok(Finish::Complete)),
            Err(error) => end(Err(error.into())),
        };
        let goes_on = standing.work == Work::UnderWay;
        // The token may be drawn as soon as the engine has the mask.
        drop(standing);
        // An engine that has ended tells the guest itself.
        let _ = self.model.post_unbounded(self.caller, operation);
        drop(path);
        if goes_on {
            self.clone().go_on();
        }
        Piece::Last
    }
}
