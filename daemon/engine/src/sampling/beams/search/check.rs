//! Whether a search that comes from elsewhere is one that [`Search`] makes.

use super::{Ended, Group, Hypothesis, Search, n_links_max};
use crate::sampling::beams::chains::Chain;

impl Search {
    /// Whether it can be gone on with, for settings that are valid and as many contexts as beams: each list is as long as it
    /// may be, and each number is that of something there is.
    pub(crate) fn is_sound(&self, vocab_size: usize) -> bool {
        let Self { settings, chains, live, groups } = self;
        let (n_group_beams, n_tokens_max) = (settings.n_group_beams(), settings.n_tokens_max);
        if groups.len() != settings.n_groups || chains.len() > n_links_max(settings) {
            return false;
        }
        let Some(depths) = chains.depths(vocab_size) else { return false };
        let is_chain =
            |chain: Chain, n_tokens_max: usize| chain.is_among(&depths) && chain.n_tokens <= n_tokens_max;
        let is_finished = |ended: &Ended| ended.chain.n_tokens > 0 && is_chain(ended.chain, n_tokens_max);
        let is_group =
            |group: &Group| group.finished.len() <= n_group_beams && group.finished.iter().all(is_finished);
        let is_live = |hypothesis: &Hypothesis| {
            let row = &hypothesis.row;
            hypothesis.group_idx < settings.n_groups
                && hypothesis.logprob < f32::INFINITY
                && is_chain(hypothesis.chain, n_tokens_max - 1)
                && row.parent.is_none_or(|parent| parent < settings.n_beams)
                && row.appended.len() < n_tokens_max
                && row.appended.iter().all(|&token| (token as usize) < vocab_size)
        };
        live.iter().all(is_live)
            && live.is_sorted_by_key(|hypothesis| hypothesis.group_idx)
            && live.chunk_by(|a, b| a.group_idx == b.group_idx).all(|group| group.len() <= n_group_beams)
            && groups.iter().all(is_group)
    }
}
