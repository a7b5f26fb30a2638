//! Questions among random operations.

use super::*;

impl World {
    pub(super) fn ask(&mut self, idx: usize) {
        let seed = self.random.next();
        let n_free = self.contexts[idx].1.n_free();
        let n = self.random.below(30).min(n_free);
        let continuation = self.tokens(n);
        let n_guess_max = verify::n_guess_max(&self.scheduler, n_free);
        let chain = self.contexts[idx].1.chain();
        let prefix = chain.last;
        let guess = verify::guess(&mut self.random, chain, seed, n_guess_max);
        let n_tree_nodes = trees::n_nodes_max(&self.scheduler, n_free);
        let tree = trees::tree(&mut self.random, chain, seed, n_tree_nodes);
        let kind = self.random.below(8);
        // Of what was asked about, a guest may append all, some, or something else.
        let n_appended = if n_free > 0 { self.random.below(2 * n_free.min(20)) } else { 0 };
        let (id, model) = &mut self.contexts[idx];
        let (ask, expected) = match kind {
            0 => (Ask::Prefill, Answer::Prefilled),
            1 if n_free > 0 => {
                let seed = seed & !7; // one that never fails
                let sampler = Sampler { seed, ..Sampler::greedy() };
                (Ask::Sample(Arc::new(sampler)), Answer::Sampled(drawn(prefix, seed).into()))
            }
            2 => {
                let (candidates, entropy) = (ranked(prefix, 3), score(prefix, 0));
                (Ask::Top { n: 3 }, Answer::Top { candidates, entropy })
            }
            3 => {
                let scores = continuation.iter().map(|&token| score(prefix, token)).collect();
                (Ask::Scores(continuation), Answer::Scores(scores))
            }
            4 => {
                let mut before = chain;
                let (mut scores, mut tops) = (Vec::new(), Vec::new());
                for &token in &continuation {
                    scores.push(score(before.last, token));
                    tops.push(Top { candidates: ranked(before.last, 2), entropy: score(before.last, 0) });
                    before = before.extend(token);
                }
                if seed & 64 == 0 {
                    (Ask::Continuation(continuation), Answer::Scores(scores))
                } else {
                    (Ask::Tops { continuation, n: 2 }, Answer::Tops(tops))
                }
            }
            // Behind a context with holes a tree is its first branch.
            5 if n_free > 0 && seed & 256 == 0 && self.n_evictions_in_100 == 0 => {
                self.n_trees += 1;
                trees::question(chain, seed, tree)
            }
            5 if n_free > 0 => verify::question(chain, seed, guess),
            7 if seed & 12 == 0 => model.attention_question(seed),
            _ if seed & 96 > 0 => model.hidden_question(seed),
            _ => (Ask::Full, Answer::Full(vec![score(prefix, 7)])),
        };
        let then = match (&ask, &expected) {
            (Ask::Continuation(tokens) | Ask::Tops { continuation: tokens, .. }, _) => {
                tokens.iter().copied().take(n_appended).collect()
            }
            (_, Answer::Verified(drawn)) => {
                drawn.iter().map(|drawn| drawn.candidate.token).take(n_appended).collect()
            }
            _ => Vec::new(),
        };
        let edit = Self::edit(model, &mut self.n_mixed);
        let (id, place) = (*id, self.guests.ticket(model.caller));
        let tag = place.tag();
        // Now and then the caller loses interest before the engine begins.
        let is_wanted = !seed.is_multiple_of(16);
        self.apply(Operation::Ask { id, edit, ask, tag });
        let n_pages = self.n_pages_most(id);
        self.contexts[idx].1.question = is_wanted.then_some(Question { place, expected, then, n_pages });
        if !is_wanted {
            self.apply(Operation::Cancel { id, tag });
        }
    }
}

/// What tokens ask for is part of how long their step lasts.
#[test]
fn tokens_that_each_ask_for_a_row_of_logits_fill_a_step_as_so_many_more_tokens_do() {
    let rows_of_first_step = |n_before: usize, n_asked: usize| {
        let limits = Limits { logits_tokens: 3.0, ..Limits::of_nothing(4, 1000) };
        // Nothing was measured yet: an eighth of a step.
        let mut scheduler = Scheduler::alone(limits, SchedulerSettings::alone(8 * 64));
        let mut guests = Guests::default();
        for idx in 0..2 {
            let account = Account::new("guest", Budget::UNLIMITED, None);
            let owner = Owner { actor: ActorId(0), session: SessionId(idx), guest: GuestId(idx), account };
            let caller = guests.enter(&mut scheduler, owner);
            let id = context_id(idx);
            scheduler.apply(Operation::Create { id, caller });
            let tokens: Vec<Token> = (0..n_before as Token).map(|token| token + 100 * idx as Token).collect();
            let edit = Edit { appended: tokens, ..Edit::default() };
            let ask = Ask::Continuation(vec![5; n_asked]);
            scheduler.apply(Operation::Ask { id, edit, ask, tag: guests.ticket(caller).tag() });
        }
        scheduler.plan().rows.iter().map(|row| row.end - row.start).collect::<Vec<usize>>()
    };
    // Each token is four: itself, and a row that takes as long as three.
    assert_eq!(rows_of_first_step(1, 200), [16]);
    // Tokens before the first that is asked about are no more than tokens.
    assert_eq!(rows_of_first_step(200, 1), [64]);
    assert_eq!(rows_of_first_step(45, 200), [44 + 5]);
    // A row that is short leaves the next one what is left with what it asks.
    assert_eq!(rows_of_first_step(1, 10), [10, 6]);
}
