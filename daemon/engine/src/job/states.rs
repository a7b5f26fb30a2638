//! Hidden states of tokens on their way to one.

use crate::batch::{Output, OutputFault};

/// Sums of hidden states, in the order of their tokens: however the tokens are cut into rows, the mean is the same to
/// the bit.
#[derive(Debug, Default)]
pub(super) struct PooledStates {
    sums: Vec<f64>, // [n_layers, hidden_size]
    n_summed: usize,
}

impl PooledStates {
    /// Takes in what a row from `start` on brought, with `n_layers` states of each token from position `first` on.
    /// Tokens that were computed again count once.
    pub(super) fn take(
        &mut self,
        first: usize,
        start: usize,
        n_layers: usize,
        outputs: Vec<Output>,
    ) -> Result<(), OutputFault> {
        let n_again = (first + self.n_summed).saturating_sub(start.max(first));
        for (idx, output) in outputs.into_iter().enumerate().skip(n_again * n_layers) {
            let state = match output {
                Output::Embedding(state) => state,
                Output::Failed(fault) => return Err(fault),
                other => unreachable!("asked for hidden states, answered with {other:?}"),
            };
            let start = idx % n_layers * state.len();
            self.sums.resize(n_layers * state.len(), 0.0);
            for (sum, x) in self.sums[start..].iter_mut().zip(state) {
                *sum += f64::from(x);
            }
            self.n_summed += usize::from(idx % n_layers + 1 == n_layers);
        }
        Ok(())
    }

    /// The mean state of each layer.
    pub(super) fn means(&self, n_layers: usize) -> Vec<Vec<f32>> {
        let mean = |sum: &f64| (sum / self.n_summed as f64) as f32;
        self.sums.chunks(self.sums.len() / n_layers).map(|sums| sums.iter().map(mean).collect()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_count_once_however_they_come() {
        // Two layers, two numbers; the state of position p after layer l is (p + 10 l, 1).
        let rows = |positions: std::ops::Range<usize>| -> Vec<Output> {
            let state = |p: usize, l: usize| Output::Embedding(vec![(p + 10 * l) as f32, 1.0]);
            positions.flat_map(|p| [state(p, 0), state(p, 1)]).collect()
        };
        // From position 3 on: the row before that brings nothing, one is computed again.
        for cuts in [&[0..3, 3..9][..], &[0..5, 5..6, 6..9], &[0..3, 3..7, 2..5, 5..9], &[4..4, 0..9]] {
            let mut states = PooledStates::default();
            for row in cuts {
                states.take(3, row.start, 2, rows(row.start.max(3)..row.end.max(3))).expect("no fault");
            }
            assert_eq!(states.means(2), [vec![5.5, 1.0], vec![15.5, 1.0]], "{cuts:?}");
        }
        let fault = vec![Output::Failed(OutputFault::NotANumber)];
        assert_eq!(PooledStates::default().take(0, 0, 1, fault), Err(OutputFault::NotANumber));
    }
}
