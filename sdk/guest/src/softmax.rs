//! Log-probabilities of a row of a guest's own.

/// The logarithms of the softmax of a row, of the same length: what [`Context::full`](crate::Context::full) gives becomes
/// log-probabilities again once the guest has changed it. The sum is in 64 bits. −∞ stays; a row without a number above it stays
/// as it is.
///
/// ```
/// use trellis_guest::log_softmax;
///
/// let mut row = vec![-0.1, -2.4, -7.0];
/// row[0] = f32::NEG_INFINITY; // the first token is out
/// let logprobs = log_softmax(&row);
/// assert!((logprobs[1].exp() + logprobs[2].exp() - 1.0).abs() < 1e-6);
/// ```
///
/// To draw from it, [`Random::choose`](crate::Random::choose) takes the exponentials, [`Random::draw`](crate::Random::draw)
/// candidates.
pub fn log_softmax(row: &[f32]) -> Vec<f32> {
    let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if largest == f32::NEG_INFINITY {
        return row.to_vec();
    }
    let sum: f64 = row.iter().map(|&x| f64::from(x - largest).exp()).sum();
    row.iter().map(|&x| (f64::from(x - largest) - sum.ln()) as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_sum_to_one_and_keep_their_ratios() {
        for shift in [0.0, 1e4, -1e4] {
            let logprobs = log_softmax(&[shift, shift + 1.0, f32::NEG_INFINITY, shift + 3.0]);
            assert!((logprobs.iter().map(|x| x.exp()).sum::<f32>() - 1.0).abs() < 1e-6, "{logprobs:?}");
            assert!((logprobs[3] - logprobs[1] - 2.0).abs() < 1e-6, "{logprobs:?}");
            assert_eq!(logprobs[2], f32::NEG_INFINITY);
        }
    }

    #[test]
    fn a_row_of_nothing_stays() {
        assert_eq!(log_softmax(&[f32::NEG_INFINITY; 2]), [f32::NEG_INFINITY; 2]);
        assert!(log_softmax(&[]).is_empty());
    }
}
