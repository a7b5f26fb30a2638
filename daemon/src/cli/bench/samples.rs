//! Summing up samples.

/// In order; NaN last.
pub(crate) fn sorted(mut samples: Vec<f64>) -> Vec<f64> {
    samples.sort_by(f64::total_cmp);
    samples
}

/// The value below which this share of sorted samples lies, between two of them where no sample is there.
///
/// # Panics
/// There is no sample.
pub(crate) fn quantile(sorted: &[f64], share: f64) -> f64 {
    assert!(!sorted.is_empty(), "a quantile needs a sample");
    let place = (sorted.len() - 1) as f64 * share;
    let below = place as usize;
    match place - below as f64 {
        // The next one has no part in it, and may be NaN.
        0.0 => sorted[below],
        part => sorted[below] + (sorted[below + 1] - sorted[below]) * part,
    }
}

/// The middle one, or the mean of the two in the middle.
///
/// # Panics
/// There is no sample.
pub(crate) fn median(samples: Vec<f64>) -> f64 {
    quantile(&sorted(samples), 0.5)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_of_an_even_count_is_between_two() {
        assert_eq!(median(vec![3.0, 1.0, 2.0, 9.0]), 2.5);
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![7.0]), 7.0);
        assert_eq!(median(vec![f64::NAN, 2.0, 1.0]), 2.0);
        assert!(median(vec![f64::NAN, 1.0]).is_nan());
        assert_eq!([0.25, 0.75].map(|share| quantile(&[1.0, 2.0, 3.0, 4.0, 5.0], share)), [2.0, 4.0]);
    }
}
