//! Where a text is cut.

/// How likely a text is cut before each of its tokens, given the entropies in whose places they were drawn: as the rise of the
/// entropy there to the power of `sharpness`. Anywhere alike where it never rises.
///
/// The entropy in a place depends on what is before it. So a rise is the same for all texts that begin alike up to the cut, and
/// only the sum differs.
pub(crate) fn probabilities(entropies: &[f32], sharpness: f64) -> Vec<f64> {
    let before = std::iter::once(&0.0).chain(entropies);
    let rises: Vec<f64> =
        entropies.iter().zip(before).map(|(entropy, before)| f64::from(entropy - before).max(0.0)).collect();
    let highest = rises.iter().copied().fold(0.0, f64::max);
    if highest == 0.0 {
        return vec![1.0 / entropies.len() as f64; entropies.len()];
    }
    // As shares of the highest, so that no power of them is beyond all numbers.
    let weights: Vec<f64> = rises.iter().map(|rise| (rise / highest).powf(sharpness)).collect();
    let sum: f64 = weights.iter().sum();
    weights.iter().map(|weight| weight / sum).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_are_where_the_entropy_rises() {
        assert_eq!(probabilities(&[1.0, 0.5, 2.5, 2.5], 1.0), [1.0 / 3.0, 0.0, 2.0 / 3.0, 0.0]);
        assert_eq!(probabilities(&[1.0, 0.5, 2.5, 2.5], 4.0), [1.0 / 17.0, 0.0, 16.0 / 17.0, 0.0]);
        assert_eq!(probabilities(&[3.0, 0.5, 9.5], 1e6), [0.0, 0.0, 1.0]);
        assert_eq!(probabilities(&[0.0, 0.0], 4.0), [0.5, 0.5]);
        assert!(probabilities(&[], 4.0).is_empty());
    }
}
