//! Streams, pulled token by token.

use super::*;
use crate::batch::Drawn;

/// The sampler of this seed, which also says what is looked at: nothing, one token or two, and hidden states of some
/// layers.
pub(super) fn looking_sampler(seed: u64) -> Sampler {
    let looks = Looks { n_top: (seed % 3) as usize, hidden: layers_looked_at(seed) };
    Sampler { seed, looks, ..Sampler::greedy() }
}

fn layers_looked_at(seed: u64) -> Vec<usize> {
    match seed / 3 % 5 {
        0 => vec![2],
        1 => vec![1, 4],
        _ => Vec::new(),
    }
}

/// What is seen where it draws.
pub(super) fn expected_seen(prefix: u64, seed: u64) -> Option<Box<Seen>> {
    let Looks { n_top, hidden } = looking_sampler(seed).looks;
    let top = Top { candidates: ranked(prefix, n_top), entropy: score(prefix, 0) };
    let top = (n_top > 0).then_some(top);
    let hidden: Vec<_> = hidden.iter().map(|&n_layers| vec![score(prefix, n_layers as Token)]).collect();
    (top.is_some() || !hidden.is_empty()).then(|| Box::new(Seen { top, hidden }))
}

impl World {
    /// Pulls one token of a context's stream, which is opened if need be.
    pub(super) fn pull(&mut self, idx: usize) {
        let (seed, n_left) = (self.random.next(), 1 + self.random.below(30));
        let (id, model) = &mut self.contexts[idx];
        let id = *id;
        if model.stream.as_ref().is_none_or(|stream| stream.has_ended) {
            let edit = Self::edit(model, &mut self.n_mixed);
            let queue = self.guests.queue(model.caller);
            let tag = queue.tag();
            let settings = RunSettings {
                sampler: Arc::new(looking_sampler(seed)),
                stop_tokens: Arc::new([3]),
                n_tokens_max: Some(n_left),
                ahead: if seed.is_multiple_of(4) { Ahead::Unbounded } else { Ahead::Adaptive },
                masks: if seed % 32 < 8 && seed % 8 != 1 { MaskSource::Caller } else { MaskSource::Sampler },
            };
            // Those never fail: their seeds are others.
            let (is_masked, masked) = (settings.masks == MaskSource::Caller, VecDeque::new());
            let (has_ended, n_turns) = (false, 0);
            model.stream = Some(Stream { queue, seed, n_left, has_ended, is_masked, masked, n_turns });
            self.apply(Operation::Run { id, edit, settings, tag });
        }
        let n_most = self.n_pages_most(id);
        let model = &mut self.contexts[idx].1;
        let stream = model.stream.as_mut().expect("opened above");
        let event = stream.queue.try_pull();
        let progress = if event.is_some() { stream.queue.progress() } else { stream.queue.wait() };
        let (tag, is_waiting) = (stream.queue.tag(), event.is_none());
        match event {
            Some(RunEvent::Token(Drawn { candidate, seen, .. })) => {
                let prefix = model.past.chain(&model.tokens).last;
                assert_eq!(candidate, stream.expected(prefix), "as if decoded step by step");
                assert_eq!(seen, expected_seen(prefix, stream.seed));
                assert!(stream.n_left > 0);
                stream.n_left -= 1;
                self.n_turns += usize::from(stream.note_drawn(candidate.token));
                model.tokens.push(candidate.token);
                model.n_synced += 1;
                self.n_tokens_pulled += 1;
            }
            Some(RunEvent::Finished(finish)) => {
                stream.has_ended = true;
                let last = model.tokens.last().copied();
                match finish {
                    Finish::Complete => panic!("nothing here is told that it is complete"),
                    Finish::Stop => assert_eq!(last, Some(3)),
                    Finish::MaxTokens => assert_eq!(stream.n_left, 0),
                    Finish::ContextFull => assert_eq!(model.n_free(), 0),
                }
            }
            Some(RunEvent::Failed(EngineError::Budget(_))) => {
                stream.has_ended = true;
                self.n_over_budget += 1;
            }
            Some(RunEvent::Failed(EngineError::Output(_))) => {
                stream.has_ended = true;
                assert!(fails(model.past.chain(&model.tokens).last, stream.seed));
                self.n_faults += 1;
            }
            Some(RunEvent::Failed(EngineError::NoPages { n_needed, n_pages })) => {
                stream.has_ended = true;
                evict::check_refused(n_needed, n_pages, n_most);
            }
            // In the worlds where steps fail.
            Some(RunEvent::Failed(EngineError::Step(_))) => stream.has_ended = true,
            Some(RunEvent::Failed(error)) => panic!("{error}"),
            None => {}
        }
        if let Some(PullReport { n_tokens, is_waiting }) = progress {
            self.apply(Operation::Pulled { id, tag, n_tokens, is_waiting });
        }
        if self.random.below(2) == 0 {
            self.supply_some_masks();
        }
        let model = &self.contexts[idx].1;
        let stream = model.stream.as_ref().expect("opened above");
        let is_held_up = stream.is_masked && stream.masked.is_empty();
        let is_served =
            stream.has_ended || is_held_up || self.scheduler.has_work() || !self.under_way.is_empty();
        assert!(!is_waiting || is_served, "the engine and a guest wait for each other");
    }
}
