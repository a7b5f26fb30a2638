//! Votes for answers, and how certain their majority is.

use std::cmp::Reverse;
use std::iter::successors;

/// Counts what follows the last "Answer:" of a text; nothing where the text never came to one. Most votes stay first.
pub(crate) fn count(votes: &mut Vec<(String, u64)>, text: &str) {
    let after = text.rsplit_once("Answer:").and_then(|(_, after)| after.lines().next());
    let Some(answer) = after.map(str::trim).filter(|answer| !answer.is_empty()) else { return };
    match votes.iter_mut().find(|(counted, _)| counted == answer) {
        Some((_, n)) => *n += 1,
        None => votes.push((answer.to_owned(), 1)),
    }
    votes.sort_by_key(|&(_, n)| Reverse(n));
}

/// How probable it is that the first answer is more frequent than the second, by their votes: the part above 1/2 of
/// Beta(first + 1, second + 1), which is a sum of binomial terms. 1 where so many votes that are left cannot change it.
pub(crate) fn certainty(votes: &[(String, u64)], n_left: u64) -> f64 {
    let [first, second] = [0, 1].map(|idx| votes.get(idx).map_or(0, |(_, n)| *n));
    if first > second + n_left {
        return 1.0;
    }
    let n = first + second + 1;
    let next = |&(term, j): &(f64, u64)| Some((term * (n - j) as f64 / (j + 1) as f64, j + 1));
    successors(Some((0.5f64.powf(n as f64), 0)), next).take(first as usize + 1).map(|(term, _)| term).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn votes(counts: &[(&str, u64)]) -> Vec<(String, u64)> {
        let mut votes = Vec::new();
        for (answer, n) in counts {
            (0..*n).for_each(|_| count(&mut votes, &format!("steps\nAnswer: {answer}\n")));
        }
        votes
    }

    #[test]
    fn certainty_is_the_upper_half_of_the_beta_distribution() {
        let certainty = |counts: &[(&str, u64)]| certainty(&votes(counts), 100);
        // Of Beta(v + 1, 1) it is 1 − 2^−(v + 1); of equal votes a half.
        assert_eq!(certainty(&[]), 0.5);
        for v in 1..8 {
            assert!((certainty(&[("7", v)]) - (1.0 - 0.5f64.powf(v as f64 + 1.0))).abs() < 1e-12);
            assert!((certainty(&[("7", v), ("8", v)]) - 0.5).abs() < 1e-12);
        }
        // Beta(3, 2): 1 − (4 · 1/8 − 3 · 1/16).
        assert!((certainty(&[("8", 1), ("7", 2)]) - 0.6875).abs() < 1e-12);
    }

    #[test]
    fn a_majority_is_settled_when_the_rest_could_not_change_it() {
        let votes = votes(&[("8", 2), ("7", 6)]);
        assert_eq!(votes[0], ("7".to_owned(), 6));
        assert!(certainty(&votes, 3) == 1.0 && certainty(&votes, 4) < 1.0);
    }

    #[test]
    fn what_has_no_answer_is_not_counted() {
        let mut votes = Vec::new();
        for text in ["ones: 8 + 5", "Answer: ", "Answer:"] {
            count(&mut votes, text);
        }
        assert!(votes.is_empty());
    }
}
