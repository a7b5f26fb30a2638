//! Tokens decoded ahead of the guest that pulls them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::batch::{Drawn, Token};
use crate::completion::{Done, Reply, Tag};
use crate::error::EngineError;
use crate::mailbox::{Ticket, Watch};
use crate::run_stats::RunEnd;

/// Tokens decoded ahead of a stream until it is known how far its guest runs.
const N_AHEAD_DEFAULT: usize = 4;

/// The most tokens decoded ahead. Past the time a guest takes to wake up, more hides nothing and only adds to
/// what an interruption wastes.
const N_AHEAD_MAX: usize = 16;

/// How far to decode ahead of one context's guest, learnt from how far it ran before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AheadWindow {
    n: usize,
}

impl Default for AheadWindow {
    fn default() -> Self {
        Self { n: N_AHEAD_DEFAULT }
    }
}

impl AheadWindow {
    /// Tokens to decode ahead of the guest, not counting one that it already waits for.
    pub(crate) fn n(self) -> usize {
        self.n
    }

    /// A run ended early after `n_taken` tokens: a guest that stops after so many gains nothing from more.
    pub(crate) fn note_interrupted(&mut self, n_taken: usize) {
        self.n = self.n.min(n_taken.saturating_sub(1));
    }

    /// A run has gone on for `n_taken` tokens: widen it by one each time it runs four windows deep.
    pub(crate) fn note_taken(&mut self, n_taken: usize) {
        if n_taken > 4 * self.n.max(1) {
            self.n = (self.n + 1).min(N_AHEAD_MAX);
        }
    }
}

/// Why a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Finish {
    /// A stop token was drawn.
    Stop,
    /// As many tokens as asked for.
    MaxTokens,
    /// The context is full.
    ContextFull,
    /// The constraint allows nothing more.
    Complete,
}

/// What a run gives.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum RunEvent {
    /// The next token.
    Token(Drawn),
    /// No more tokens.
    Finished(Finish),
    /// No more tokens, because of an error.
    Failed(EngineError),
}

/// The engine's end of a run: gives tokens, and knows how far the guest has come.
#[derive(Debug)]
pub(crate) struct RunReply {
    reply: Reply,
    n_given: usize,
    /// As the guest said last.
    n_pulled: usize,
    /// Whether the guest waits for the next token, as it does for the first.
    is_waiting: bool,
    /// How far ahead it was decoded last.
    n_ahead: usize,
    /// Tokens of the context where it began.
    n_begun_with: usize,
    has_ended: bool,
    clock: RunClock,
}

/// When a run was taken up and gave tokens, by the turns of the engine.
#[derive(Debug)]
struct RunClock {
    begun: Option<Instant>,
    first: Option<Instant>,
    last: Option<Instant>,
    /// Whether it is decoded to its end however far its guest is.
    is_unbounded: bool,
}

impl RunReply {
    /// A run that is decoded so far ahead at first, behind so many tokens.
    pub(crate) fn new(reply: Reply, n_ahead: usize, n_begun_with: usize) -> Self {
        let begun = reply.outbox().turn_began();
        let clock = RunClock { begun, first: None, last: None, is_unbounded: n_ahead == usize::MAX };
        Self {
            reply,
            n_given: 0,
            n_pulled: 0,
            is_waiting: true,
            n_ahead,
            n_begun_with,
            has_ended: false,
            clock,
        }
    }

    pub(crate) fn tag(&self) -> Tag {
        self.reply.tag()
    }

    /// Gives something to the guest.
    pub(crate) fn push(&mut self, event: RunEvent) {
        match event {
            RunEvent::Token(_) => {
                self.n_given += 1;
                self.is_waiting = false;
                self.note_given();
            }
            RunEvent::Finished(finish) => {
                self.note_finished();
                self.note_end(finish.into());
            }
            RunEvent::Failed(_) => self.note_end(RunEnd::Error),
        }
        self.reply.send(Done::Run { event, n_ahead: self.n_ahead });
    }

    fn note_given(&mut self) {
        let outbox = self.reply.outbox();
        outbox.runs().note_drawn();
        let RunClock { begun, first, last, is_unbounded } = &mut self.clock;
        let before = std::mem::replace(last, outbox.turn_began());
        if let (None, Some(begun), Some(now)) = (*first, *begun, *last) {
            *first = Some(now);
            outbox.runs().note_first(now.saturating_duration_since(begun));
        }
        if let (true, Some(before), Some(now)) = (*is_unbounded, before, *last)
            && before < now
        {
            outbox.runs().note_gap(now - before);
        }
    }

    fn note_finished(&self) {
        if let RunClock { begun: Some(begun), first: Some(first), .. } = self.clock {
            let time = first.saturating_duration_since(begun);
            self.reply.outbox().runs().note_first_of_finished(time);
        }
        if let RunClock { first: Some(first), last: Some(last), is_unbounded: true, .. } = self.clock
            && let Some(n_after) = u32::try_from(self.n_given).ok().filter(|&n| n > 1)
        {
            let time = last.saturating_duration_since(first) / (n_after - 1);
            self.reply.outbox().runs().note_each(time);
        }
    }

    fn note_end(&mut self, end: RunEnd) {
        if std::mem::replace(&mut self.has_ended, true) {
            return;
        }
        let outbox = self.reply.outbox();
        let time = match (self.clock.begun, outbox.turn_began()) {
            (Some(begun), Some(now)) => now.saturating_duration_since(begun),
            _ => Duration::ZERO,
        };
        outbox.runs().note_end(end, time, self.n_begun_with, self.n_given);
    }

    /// The guest has had so many tokens.
    pub(crate) fn note_pulled(&mut self, n_tokens: usize, is_waiting: bool) {
        self.n_pulled = n_tokens.clamp(self.n_pulled, self.n_given);
        // Another token may have been on its way to it.
        self.is_waiting = is_waiting && self.n_pulled == self.n_given;
    }

    /// Whether another token may be decoded now, beside those that are under way.
    pub(crate) fn wants_more(&mut self, n_ahead: usize, n_under_way: usize) -> bool {
        self.n_ahead = n_ahead;
        self.n_unread() + n_under_way < n_ahead + usize::from(self.is_waiting)
    }

    /// Tokens that the guest has not had, as far as is known.
    pub(crate) fn n_unread(&self) -> usize {
        self.n_given - self.n_pulled
    }
}

/// One that goes before it was told its end was given up.
impl Drop for RunReply {
    fn drop(&mut self) {
        self.note_end(RunEnd::Abort);
    }
}

/// The guest's end of a run: takes tokens, and says how far it has come as seldom as keeps the engine going.
#[derive(Debug)]
pub(crate) struct RunQueue {
    place: Ticket,
    n_pulled: usize,
    n_said: usize,
    /// How far ahead the engine decoded when it gave the last token.
    n_ahead: usize,
}

/// What the engine has to be told of a run: tokens pulled, and whether the guest waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PullReport {
    pub(crate) n_tokens: usize,
    pub(crate) is_waiting: bool,
}

impl RunQueue {
    pub(crate) fn new(place: Ticket) -> Self {
        // For the first token the engine knows that the guest waits.
        Self { place, n_pulled: 0, n_said: 0, n_ahead: usize::MAX }
    }

    pub(crate) fn tag(&self) -> Tag {
        self.place.tag()
    }

    /// Has each token told to this as soon as it is there.
    pub(crate) fn watch(&self, watch: Arc<dyn Watch>) {
        self.place.watch(watch);
    }

    /// Tokens taken.
    pub(crate) fn n_pulled(&self) -> usize {
        self.n_pulled
    }

    /// The tokens that are there and were not taken.
    pub(crate) fn ahead(&self) -> Vec<Token> {
        self.place.tokens()
    }

    /// Takes what comes next, if it is there.
    pub(crate) fn try_pull(&mut self) -> Option<RunEvent> {
        self.place.try_take().map(|done| self.take_in(done))
    }

    /// What the engine has to be told of tokens that were taken. Half a window goes unsaid: the engine is not held up by
    /// that, and hears of a run once in a few tokens.
    pub(crate) fn progress(&mut self) -> Option<PullReport> {
        let is_due = self.n_ahead > 0 && self.n_pulled - self.n_said >= self.n_ahead.div_ceil(2);
        is_due.then(|| self.say(false))
    }

    /// What the engine has to be told before the next token is waited for: where nothing is decoded ahead, that it is.
    pub(crate) fn wait(&mut self) -> Option<PullReport> {
        (self.n_ahead == 0).then(|| self.say(true))
    }

    fn say(&mut self, is_waiting: bool) -> PullReport {
        self.n_said = self.n_pulled;
        PullReport { n_tokens: self.n_pulled, is_waiting }
    }

    /// What comes next, once it is there; `None` when the engine has ended.
    pub(crate) async fn pull(&mut self) -> Option<RunEvent> {
        let done = self.place.take().await?;
        Some(self.take_in(done))
    }

    fn take_in(&mut self, done: Done) -> RunEvent {
        match done {
            Done::Run { event, n_ahead } => {
                self.n_pulled += usize::from(matches!(event, RunEvent::Token(_)));
                self.n_ahead = n_ahead;
                event
            }
            other => unreachable!("a run gives tokens and an end, not {other:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::Candidate;
    use crate::completion::{CallerId, Completion, Outbox};
    use crate::mailbox::Mailbox;

    #[test]
    fn the_window_follows_how_far_a_guest_runs() {
        let mut window = AheadWindow::default();
        window.note_interrupted(1);
        assert_eq!(window.n(), 0, "a guest that changes course after every token gets nothing ahead");
        for n_taken in 1..=200 {
            window.note_taken(n_taken);
        }
        assert_eq!(window.n(), N_AHEAD_MAX);
        window.note_interrupted(3);
        assert_eq!(window.n(), 2);
    }

    /// A run between an engine and a guest that hear of each other at once.
    fn ends() -> (RunReply, RunQueue, impl Fn()) {
        let (outbox, mailbox) = (Outbox::default(), Arc::new(Mailbox::default()));
        let queue = RunQueue::new(mailbox.ticket());
        let reply = RunReply::new(outbox.to(CallerId(0), queue.tag()), 0, 1);
        let deliver = move || {
            let mut completions = Vec::new();
            outbox.take(&mut completions);
            for Completion { tag, done, .. } in completions {
                assert!(mailbox.deliver(tag, done).is_none(), "nobody waits in this test");
            }
        };
        (reply, queue, deliver)
    }

    #[test]
    fn an_empty_window_still_serves_who_waits() {
        let (mut reply, mut queue, deliver) = ends();
        let token = || RunEvent::Token(Candidate { token: 1, logprob: 0.0 }.into());
        assert!(reply.wants_more(0, 0), "the first token is waited for");
        reply.push(token());
        assert!(!reply.wants_more(0, 0));
        deliver();
        assert!(matches!(queue.try_pull(), Some(RunEvent::Token(_))));
        assert_eq!(queue.progress(), None);
        assert!(queue.try_pull().is_none());
        assert_eq!(queue.wait(), Some(PullReport { n_tokens: 1, is_waiting: true }));
        reply.note_pulled(1, true);
        assert!(reply.wants_more(0, 0));
    }

    #[test]
    fn an_engine_that_stands_still_is_told_by_a_guest_that_waits() {
        for n_ahead in 0..40 {
            let (mut reply, mut queue, deliver) = ends();
            let (mut n_told, n_tokens) = (0, 1000);
            while queue.n_pulled() < n_tokens {
                while reply.wants_more(n_ahead, 0) {
                    reply.push(RunEvent::Token(Candidate { token: 1, logprob: 0.0 }.into()));
                    assert!(reply.n_unread() <= n_ahead.max(1));
                }
                deliver();
                loop {
                    let event = queue.try_pull();
                    let progress = if event.is_some() { queue.progress() } else { queue.wait() };
                    if let Some(PullReport { n_tokens, is_waiting }) = progress {
                        n_told += 1;
                        reply.note_pulled(n_tokens, is_waiting);
                    }
                    if event.is_none() {
                        break;
                    }
                }
                assert!(reply.wants_more(n_ahead, 0), "both wait for each other, {n_ahead} ahead");
            }
            let n_told_max = n_tokens / n_ahead.div_ceil(2).max(1) + 2;
            assert!(n_told <= n_told_max, "{n_told} times, {n_ahead} ahead");
        }
    }
}
