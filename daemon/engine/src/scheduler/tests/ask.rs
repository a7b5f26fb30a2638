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
