//! The guest's end of what comes back from an engine: one line for each guest.
//!
//! Whoever asks takes a place on the line, and the tag of the place travels with what is asked. What comes back is put
//! into its place; the guest is woken once all that a step brought is there.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use crate::batch::Token;
use crate::completion::{Done, Tag};
use crate::run::RunEvent;

/// What wants to hear of each token of a run as soon as it is there, whether or not its guest takes it. Told on the engine's
/// thread, which it must not hold up.
pub(crate) trait Watch: std::fmt::Debug + Send + Sync {
    /// The next token was drawn.
    fn note_drawn(self: Arc<Self>, token: Token);
}

/// What has come back for one guest and is not taken.
#[derive(Debug, Default)]
pub(crate) struct Line(Mutex<Places>);

#[derive(Debug, Default)]
struct Places {
    places: Vec<Place>,
    /// Places that nobody has.
    free: Vec<u32>,
    is_closed: bool,
}

#[derive(Debug, Default)]
struct Place {
    /// Counts those who have had it: what comes for one who has left is for nobody.
    turn: u32,
    done: VecDeque<Done>,
    waker: Option<Waker>,
    watch: Option<Arc<dyn Watch>>,
}

impl Places {
    fn get(&mut self, tag: Tag) -> Option<&mut Place> {
        self.places.get_mut(tag.place()).filter(|place| place.turn == tag.turn())
    }
}

impl Line {
    fn lock(&self) -> MutexGuard<'_, Places> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place.
    pub(crate) fn stand(self: &Arc<Self>) -> Standing {
        let mut places = self.lock();
        let idx = places.free.pop().unwrap_or_else(|| {
            places.places.push(Place::default());
            u32::try_from(places.places.len() - 1).expect("a guest asks less than 2³² things at once")
        });
        let tag = Tag::new(idx, places.places[idx as usize].turn);
        Standing { line: self.clone(), tag }
    }

    /// Puts something into a place; returns whom to wake.
    pub(crate) fn deliver(&self, tag: Tag, done: Done) -> Option<Waker> {
        let mut places = self.lock();
        let place = places.get(tag)?;
        let drawn = match &done {
            Done::Run { event: RunEvent::Token(drawn), .. } => Some(drawn.candidate.token),
            _ => None,
        };
        let told = drawn.zip(place.watch.clone());
        place.done.push_back(done);
        let waker = place.waker.take();
        drop(places);
        if let Some((token, watch)) = told {
            watch.note_drawn(token);
        }
        waker
    }

    /// Nothing more will come.
    pub(crate) fn close(&self) {
        let mut places = self.lock();
        places.is_closed = true;
        let wakers: Vec<Waker> = places.places.iter_mut().filter_map(|place| place.waker.take()).collect();
        drop(places);
        wakers.into_iter().for_each(Waker::wake);
    }
}

/// A place on a line, for as long as this is there.
#[derive(Debug)]
pub(crate) struct Standing {
    line: Arc<Line>,
    tag: Tag,
}

impl Standing {
    pub(crate) fn tag(&self) -> Tag {
        self.tag
    }

    /// Has the tokens of a run told to this from now on.
    pub(crate) fn watch(&self, watch: Arc<dyn Watch>) {
        self.line.lock().get(self.tag).expect("the place is taken").watch = Some(watch);
    }

    /// What has come, if anything has.
    pub(crate) fn try_take(&self) -> Option<Done> {
        self.line.lock().get(self.tag)?.done.pop_front()
    }

    /// What comes next; `None` when the engine has ended and nothing will.
    pub(crate) async fn take(&self) -> Option<Done> {
        poll_fn(|cx| {
            let mut places = self.line.lock();
            let is_closed = places.is_closed;
            let place = places.get(self.tag).expect("the place is taken");
            match place.done.pop_front() {
                Some(done) => Poll::Ready(Some(done)),
                None if is_closed => Poll::Ready(None),
                None => {
                    match &mut place.waker {
                        Some(waker) => waker.clone_from(cx.waker()),
                        waker => *waker = Some(cx.waker().clone()),
                    }
                    Poll::Pending
                }
            }
        })
        .await
    }
}

impl Drop for Standing {
    fn drop(&mut self) {
        let mut places = self.line.lock();
        if let Some(place) = places.get(self.tag) {
            place.turn = place.turn.wrapping_add(1);
            place.done.clear();
            place.waker = None;
            place.watch = None;
            places.free.push(self.tag.place() as u32);
        }
    }
}
