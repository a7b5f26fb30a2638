//! Which answer a text comes to, and which answer most texts come to.

/// What follows the last "Answer:" of a text; none when the text never came to one.
pub(crate) fn answer(text: &str) -> Option<&str> {
    let (_, after) = text.rsplit_once("Answer:")?;
    let answer = after.lines().next()?.trim();
    (!answer.is_empty()).then_some(answer)
}

/// Each answer with its votes, most first; a draw goes to the answer that came first.
pub(crate) fn count<'a>(answers: impl Iterator<Item = &'a str>) -> Vec<(String, usize)> {
    let mut votes: Vec<(String, usize)> = Vec::new();
    for answer in answers {
        match votes.iter_mut().find(|(counted, _)| counted == answer) {
            Some((_, n_votes)) => *n_votes += 1,
            None => votes.push((answer.to_owned(), 1)),
        }
    }
    votes.sort_by_key(|&(_, n_votes)| std::cmp::Reverse(n_votes));
    votes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_answer_counts() {
        assert_eq!(answer("ones: 8 + 5 = 13, write 3 carry 1\nAnswer: 743"), Some("743"));
        assert_eq!(answer("Answer: 7\nNo. Answer: 743 \nthanks"), Some("743"));
        assert_eq!(answer("ones: 8 + 5 = 13"), None);
        assert_eq!(answer("Answer: "), None);
        assert_eq!(answer("Answer:"), None);
    }

    #[test]
    fn most_votes_first_and_draws_in_order_of_arrival() {
        let votes = count(["733", "743", "743", "8", "733"].into_iter());
        assert_eq!(votes, [("733".to_owned(), 2), ("743".to_owned(), 2), ("8".to_owned(), 1)]);
        assert!(count(std::iter::empty()).is_empty());
    }
}
