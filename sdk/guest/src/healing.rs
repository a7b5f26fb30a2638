//! Prompts that end within a word.

use crate::{Beginning, Constraint, Context, Result, Sampler};

impl Context {
    /// Takes back the last tokens of a prompt as far as a longer token may begin with their text, draws tokens whose text begins
    /// with it, and returns what that adds to the prompt's text: often nothing, or the rest of a word. Nothing is taken back
    /// where no token goes on. The special tokens before a text, and the first token, are never.
    ///
    /// A model has seldom seen `http:` before `//` where `://` is a token, nor a space alone before a word that has its space in
    /// front: what follows such a prompt is not what it would have written (S. Lundberg, "The Art of Prompt Design: Prompt
    /// Boundaries and Token Healing", 2023). Here all that may stand across the end of the prompt is drawn anew, each token as
    /// probable as the model says among those that go on so.
    ///
    /// ```no_run
    /// # use trellis_guest::{Context, Result, Sampler, emit};
    /// # fn f(prompt: &Context, sampler: &Sampler) -> Result<()> {
    /// prompt.append_text("The link is http:")?;
    /// let more = prompt.heal(sampler)?;
    /// let rest = prompt.generate(sampler).max_tokens(64).run()?.text;
    /// emit!("{more}{rest}")
    /// # }
    /// ```
    ///
    /// Any sampler will do, one of a program too; a constraint that it has does not hold for these tokens, and begins after them.
    /// Asks for the [vocabulary](crate::Model::vocabulary) and compiles a [`Constraint`]; a token is drawn in one call, mostly one in all.
    ///
    /// # Errors
    /// Those of [`step`](Self::step), [`truncate`](Self::truncate) and [`Constraint::regex`]. The context is as it was then.
    pub fn heal(&self, sampler: &Sampler) -> Result<String> {
        let vocabulary = self.model().vocabulary()?;
        let tokens = self.tokens();
        let texts: Vec<&[u8]> = tokens.iter().map(|&token| &vocabulary[token as usize][..]).collect();
        let Some((n_kept, text)) = open_end(&texts, vocabulary) else { return Ok(String::new()) };

        let pattern = format!("{}(?s:.*)", escaped(&text));
        let constraint = Constraint::regex(self.model(), &pattern)?;
        let healing = sampler.with_seed(sampler.seed());
        healing.set_constraint(Some(&constraint), &Beginning::FirstDraw)?;
        self.truncate(n_kept as u32)?;
        let drawn = self.draw_beyond(&text, &healing, vocabulary);
        if drawn.is_err() {
            self.set_tokens(&tokens)?;
        }
        drawn
    }

    /// Draws until there is more than this text, in whole characters; what there is more.
    fn draw_beyond(&self, text: &str, sampler: &Sampler, vocabulary: &[Vec<u8>]) -> Result<String> {
        let mut bytes = Vec::new();
        loop {
            bytes.extend_from_slice(&vocabulary[self.step(sampler)?.token as usize]);
            if let (Some(more), Ok(_)) = (bytes.get(text.len()..), str::from_utf8(&bytes)) {
                return Ok(String::from_utf8_lossy(more).into_owned());
            }
        }
    }
}

/// How many tokens stand before the longest text at the end with which a longer token begins, and that text. Tokens without text
/// end the search.
fn open_end(texts: &[&[u8]], vocabulary: &[Vec<u8>]) -> Option<(usize, String)> {
    let n_bytes_max = vocabulary.iter().map(Vec::len).max()?;
    let mut end = Vec::new();
    let mut found = None;
    for (idx, text) in texts.iter().enumerate().skip(1).rev() {
        end.splice(..0, text.iter().copied());
        if text.is_empty() || end.len() >= n_bytes_max {
            break;
        }
        let goes_on = |token: &Vec<u8>| token.len() > end.len() && token.starts_with(&end);
        if let (Ok(text), true) = (str::from_utf8(&end), vocabulary.iter().any(goes_on)) {
            found = Some((idx, text.to_owned()));
        }
    }
    found
}

/// A regular expression that matches the text alone.
fn escaped(text: &str) -> String {
    let mut pattern = String::new();
    for c in text.chars() {
        // `\<` and `\>` are the bounds of words.
        if c.is_ascii_punctuation() && !matches!(c, '<' | '>') {
            pattern.push('\\');
        }
        pattern.push(c);
    }
    pattern
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vocabulary() -> Vec<Vec<u8>> {
        let texts = ["", "h", "t", "ht", "tp", ":", "://", " ", " the", "x", "https", "é"];
        let mut all: Vec<Vec<u8>> = texts.iter().map(|text| text.as_bytes().to_vec()).collect();
        all.extend(["é".as_bytes()[..1].to_vec(), "é".as_bytes()[1..].to_vec(), "éa".into()]);
        all
    }

    #[test]
    fn as_much_is_taken_back_as_one_token_may_go_on_from() {
        let end = |texts: &[&str]| {
            let texts: Vec<&[u8]> = texts.iter().map(|text| text.as_bytes()).collect();
            open_end(&texts, &vocabulary())
        };
        assert_eq!(end(&["x", "ht", "tp"]), Some((1, "http".to_owned())));
        assert_eq!(end(&["x", "x", ":"]), Some((2, ":".to_owned())));
        assert_eq!(end(&["x", " "]), Some((1, " ".to_owned())));
        // Nothing is longer; the first token stays; what has no text ends the search.
        assert_eq!(end(&["x", " the"]), None);
        assert_eq!(end(&[" "]), None);
        assert_eq!(end(&["x", "ht", "", "tp"]), None);
        assert_eq!(end(&[]), None);
    }

    #[test]
    fn only_whole_characters_are_taken_back() {
        let [first, second] = [&"é".as_bytes()[..1], &"é".as_bytes()[1..]];
        let end = open_end(&[b"x", first, second], &vocabulary());
        assert_eq!(end, Some((1, "é".to_owned())));
        assert_eq!(open_end(&[b"x", first], &vocabulary()), None);
    }

    #[test]
    fn what_means_something_in_expressions_is_escaped() {
        assert_eq!(escaped("a.b (c)é\n"), "a\\.b \\(c\\)é\n");
        assert_eq!(escaped("a<b>|->"), "a<b>\\|\\->");
    }
}
