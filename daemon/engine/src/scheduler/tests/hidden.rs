//! Questions about hidden states.

use super::hash_backend::score;
use super::{Answer, Ask, Model, Token};
use crate::command::Pooling;

impl Model {
    /// A question about hidden states, of the last token or of many, and its answer.
    pub(super) fn hidden_question(&self, seed: u64) -> (Ask, Answer) {
        let n_tokens = self.tokens.len();
        let n_layers = vec![(seed / 7 % 3) as usize, 5];
        let n_summed = match self.past.evictions.is_empty() {
            true => 1 + (seed / 128) as usize % n_tokens,
            false => 1,
        };
        let pooling = match n_summed {
            1 => Pooling::Last,
            _ => Pooling::MeanFrom(n_tokens - n_summed),
        };
        let state = |n_layers: usize| {
            let chains = (0..n_summed).map(|n| match n_summed {
                1 => self.chain(),
                _ => self.past.chain(&self.tokens[..n_tokens - n]),
            });
            let sum: f64 = chains.map(|chain| f64::from(score(chain.last, n_layers as Token))).sum();
            vec![(sum / n_summed as f64) as f32]
        };
        let states = n_layers.iter().map(|&n_layers| state(n_layers)).collect();
        (Ask::Hidden { n_layers, pooling }, Answer::Hidden(states))
    }
}
