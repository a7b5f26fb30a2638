//! Thinking within a budget.

use crate::streams::FinishReason;
use crate::{Context, Result, Sampler, Token};

/// Lets a model think between two marks for so many tokens at most. From a soft budget on the thought ends with the sentence that
/// it is in, at a hard budget it is cut off; either way a message is put in before the closing mark, so that the model knows why
/// it answers. The answer is then drawn like any other text.
///
/// Ending a thought early is half of the "budget forcing" of N. Muennighoff and others, "s1: Simple test-time scaling" (2025); the
/// message is what Qwen3 has at the end of its thinking budget (A. Yang and others, "Qwen3 Technical Report", 2025). The other half,
/// to have a model that comes to an end think on, is not here.
///
/// ```no_run
/// # use trellis_guest::{Context, Result, Sampler, Thinking};
/// # fn f(context: &Context, sampler: &Sampler) -> Result<String> {
/// let thought = Thinking::between("<think>\n", "</think>\n\n")
///     .soft_budget(200)
///     .hard_budget(256)
///     .message("\nThe time is over: I answer from what I have.\n")
///     .run(context, sampler)?;
/// let answer = context.generate(sampler).max_tokens(128).run()?.text;
/// # Ok(answer) }
/// ```
#[derive(Clone, Debug)]
#[must_use = "nothing is thought before `run`"]
pub struct Thinking {
    open: String,
    close: String,
    soft_budget: u32,
    hard_budget: u32,
    message: String,
}

/// How a thought ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThoughtEnd {
    /// The model closed it, or ended its turn.
    Closed,
    /// At the end of a sentence, past the soft budget.
    Sentence,
    /// At the hard budget.
    Cut,
}

/// What was thought.
#[derive(Clone, Debug, PartialEq)]
pub struct Thought {
    /// Its text, without marks and message.
    pub text: String,
    /// Its tokens that the context holds, without those of marks and message.
    pub n_tokens: u32,
    /// How it ended.
    pub end: ThoughtEnd,
}

impl Thinking {
    /// Between these marks, in which names such as `<|end|>` stand for special tokens. An opening mark that the prompt ends with
    /// already is given as an empty text here. Without budgets the thought goes on until the model closes it. The closing mark is
    /// 1 to 256 bytes long; one that has a special token closes a thought with the first of them, whatever follows it.
    pub fn between(open: &str, close: &str) -> Self {
        let (soft_budget, hard_budget) = (u32::MAX, u32::MAX);
        Self {
            open: open.to_owned(),
            close: close.to_owned(),
            soft_budget,
            hard_budget,
            message: String::new(),
        }
    }

    /// The tokens from which on the end of a sentence ends the thought: a line's end, or `.`, `!` or `?` before white space.
    pub fn soft_budget(mut self, n_tokens: u32) -> Self {
        self.soft_budget = n_tokens;
        self
    }

    /// The most tokens of the thought.
    pub fn hard_budget(mut self, n_tokens: u32) -> Self {
        self.hard_budget = n_tokens;
        self
    }

    /// Put in before the closing mark where a budget ended the thought.
    pub fn message(mut self, text: &str) -> Self {
        text.clone_into(&mut self.message);
        self
    }

    /// Thinks: the context holds the opening mark, the thought, the message if a budget ended it, and the closing mark. Up to the
    /// soft budget it is one generation, from there on a stream.
    ///
    /// # Errors
    /// Those of [`Generate::run`](crate::Generate::run) and [`Context::append`];
    /// [`ContextFull`](crate::Error::ContextFull) where the closing mark does not fit any more. The context is as it was then.
    pub fn run(&self, context: &Context, sampler: &Sampler) -> Result<Thought> {
        let n_before = context.length();
        let thought = self.think(context, sampler);
        if thought.is_err() {
            context.truncate(n_before)?;
        }
        thought
    }

    fn think(&self, context: &Context, sampler: &Sampler) -> Result<Thought> {
        context.append_markup(&self.open)?;
        let (start, model) = (context.length(), context.model());
        let mut ends = model.info().stop_tokens.clone();
        ends.extend(closing_token(&model.encode_markup(&self.close)?, &model.info().special_tokens));
        let soft_budget = self.soft_budget.min(self.hard_budget);
        let draw = context.generate(sampler).stop_tokens(&ends).stop_at(&self.close).keep_text_only();
        let begun = draw.max_tokens(soft_budget).run()?;
        let (text, end) = match begun.finish {
            FinishReason::MaxTokens => self.end_sentence(context, sampler, start, &ends)?,
            _ => (begun.text, ThoughtEnd::Closed),
        };
        let n_tokens = context.length() - start;
        if end != ThoughtEnd::Closed {
            context.append_text(&self.message)?;
        }
        context.append_markup(&self.close)?;
        Ok(Thought { text, n_tokens, end })
    }

    /// Goes on from the soft budget to the end of a sentence, the closing mark or the hard budget.
    fn end_sentence(
        &self,
        context: &Context,
        sampler: &Sampler,
        start: u32,
        ends: &[Token],
    ) -> Result<(String, ThoughtEnd)> {
        let mut decoder = context.model().text_decoder();
        let mut text = String::new();
        // The bytes of the text after each token: what a mark that is cut off leaves.
        let mut lengths = Vec::new();
        for token in context.tokens_from(start) {
            text += &decoder.push(token)?;
            lengths.push(text.len());
        }
        let n_left = self.hard_budget - lengths.len() as u32;
        let mut stream = context.stream(sampler).stop_tokens(ends).max_tokens(n_left).open()?;
        let n_kept = |n: usize| context.truncate(start + n as u32);
        while !ends_sentence(&text, "") {
            let Some(drawn) = stream.next().transpose()? else {
                text += &decoder.finish();
                return Ok((text, ThoughtEnd::Cut));
            };
            if ends.contains(&drawn.token) {
                n_kept(lengths.len())?;
                return Ok((text, ThoughtEnd::Closed));
            }
            let piece = decoder.push(drawn.token)?;
            if ends_sentence(&text, &piece) {
                n_kept(lengths.len())?;
                break;
            }
            text += &piece;
            lengths.push(text.len());
            if let Some(at) = text.find(&self.close) {
                text.truncate(at);
                n_kept(lengths.iter().take_while(|&&length| length <= at).count())?;
                return Ok((text, ThoughtEnd::Closed));
            }
        }
        Ok((text, ThoughtEnd::Sentence))
    }
}

/// The token of a closing mark that alone shows that a thought is closed. The text of a special token does not show in what is
/// drawn, so it has to be known by its number.
fn closing_token(mark: &[Token], special: &[Token]) -> Option<Token> {
    match mark {
        [token] => Some(*token),
        _ => mark.iter().find(|token| special.contains(token)).copied(),
    }
}

/// Whether a text stands at the end of a sentence, given what comes next, which may be nothing yet.
fn ends_sentence(text: &str, next: &str) -> bool {
    let sentence = text.trim_end_matches(['"', '\'', ')', ']', '”', '’', '»']);
    text.ends_with('\n')
        || sentence.ends_with(['。', '！', '？'])
        || sentence.ends_with(['.', '!', '?', '…']) && next.starts_with(char::is_whitespace)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_special_token_closes_a_thought_whatever_follows_it() {
        let special = [7, 9];
        // Such as "</think>", "</think>\n\n", "\n</think>\n" and "Answer:".
        assert_eq!(closing_token(&[9], &special), Some(9));
        assert_eq!(closing_token(&[9, 1], &special), Some(9));
        assert_eq!(closing_token(&[1, 7, 9], &special), Some(7));
        assert_eq!(closing_token(&[1, 2], &special), None);
        assert_eq!(closing_token(&[1], &special), Some(1));
        assert_eq!(closing_token(&[], &special), None);
    }

    #[test]
    fn sentences_end_at_lines_and_at_marks_before_white_space() {
        for (text, next, ends) in [
            ("carry 1\n", "", true),
            ("It is so.", " And", true),
            ("It is so.", "\n", true),
            ("(It is so!)", " And", true),
            ("そうです。", "", true),
            ("It is 3.", "14", false),
            ("It is so.", "", false),
            ("It is", " so", false),
            ("", " so", false),
        ] {
            assert_eq!(ends_sentence(text, next), ends, "{text:?} {next:?}");
        }
    }
}
