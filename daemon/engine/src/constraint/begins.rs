//! Where a constraint begins.

use crate::batch::Token;
use crate::model::Tokenizer;

/// From where on the tokens of a context keep to a constraint. What is drawn before that is free.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Begins {
    /// Where the context first draws under the rule.
    FirstDraw,
    /// At this position.
    At(usize),
    /// After the first such token that comes at the first draw or later.
    AfterToken(Token),
    /// After the token that completes the first such text that comes at the first draw or later. What else that token
    /// stands for belongs neither to the text nor to the grammar.
    AfterText(String),
}

impl Begins {
    /// How many of the tokens from the first draw on come before the grammar; `None` while it has not begun.
    pub(super) fn n_before(&self, tokens: &[Token], tokenizer: &Tokenizer) -> Option<usize> {
        match self {
            Self::FirstDraw | Self::At(_) => Some(0),
            Self::AfterToken(token) => Some(tokens.iter().position(|it| it == token)? + 1),
            Self::AfterText(text) => n_up_to(text.as_bytes(), tokens, tokenizer),
        }
    }
}

/// How many tokens there are up to the one with which a text is complete.
fn n_up_to(text: &[u8], tokens: &[Token], tokenizer: &Tokenizer) -> Option<usize> {
    let mut last = Vec::new();
    for (idx, &token) in tokens.iter().enumerate() {
        let n_kept = last.len().min(text.len().saturating_sub(1));
        last.drain(..last.len() - n_kept);
        last.extend_from_slice(tokenizer.token_bytes(token).unwrap_or_default());
        if last.windows(text.len()).any(|window| window == text) {
            return Some(idx + 1);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::model::{Model, ModelSource, SpecialTokens};

    #[test]
    fn it_begins_after_the_token_that_completes_what_it_waits_for() {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models/tiny");
        let model = Model::open("tiny", &ModelSource::Folder(folder)).expect("the bundled model opens");
        let tokenizer = &model.tokenizer;
        let encode = |text: &str| tokenizer.encode(text, SpecialTokens::Parse).expect("it has bytes");
        let thought = encode("so it is <think>aa</thi</think>. And more");
        let begins = Begins::AfterText("</think>".to_owned());
        let n_before = begins.n_before(&thought, tokenizer).expect("it is there");
        let before = tokenizer.decode(&thought[..n_before], crate::model::SpecialText::Keep);
        let without = tokenizer.decode(&thought[..n_before - 1], crate::model::SpecialText::Keep);
        assert!(before.contains("</think>") && !without.contains("</think>"), "{before:?} {without:?}");
        assert_eq!(begins.n_before(&thought[..n_before - 1], tokenizer), None);
        for n in n_before..thought.len() {
            assert_eq!(begins.n_before(&thought[..n], tokenizer), Some(n_before), "the first one counts");
        }
        let after = Begins::AfterToken(thought[2]);
        assert_eq!(after.n_before(&thought[..2], tokenizer), None);
        assert_eq!(after.n_before(&thought, tokenizer), Some(3));
        assert_eq!(
            (Begins::FirstDraw.n_before(&[], tokenizer), Begins::At(9).n_before(&[], tokenizer)),
            (Some(0), Some(0))
        );
    }
}
