//! Texts of a vocabulary in the manner of SentencePiece: all that stands between two added tokens is one word, of which the merges make
//! tokens. What the `tokenizers` crate works on at once goes in parts here, with the same tokens.

use std::borrow::Cow;

use rustc_hash::FxHashMap;
use serde::Deserialize;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::metaspace::PrependScheme;
use tokenizers::pre_tokenizers::split::SplitPattern;
use tokenizers::{Model as _, ModelWrapper};

use super::merges::Merges;
use super::tokenizer::EncodeError;
use super::yield_point::{GivenUp, YieldPoint};
use crate::batch::Token;

/// Characters between two yield points.
const N_BETWEEN: usize = 1 << 10;

/// How such a vocabulary makes tokens of texts.
pub(crate) struct OneWord {
    /// What the normalizer does, one after the other.
    steps: Vec<Step>,
    /// What is done after that, with a mark for spaces.
    spaces: Option<Spaces>,
    merges: Merges,
    characters: FxHashMap<char, Token>,
    /// For characters that are no entries, by byte.
    bytes: [Token; 256],
}

/// A step of a normalizer, as it writes itself.
#[derive(Deserialize)]
#[serde(tag = "type", deny_unknown_fields)]
enum Step {
    /// Before each text.
    Prepend {
        prepend: String,
    },
    Replace {
        pattern: Literal,
        content: String,
    },
    Sequence {
        normalizers: Vec<Step>,
    },
}

/// A pattern that is no expression.
#[derive(Deserialize)]
enum Literal {
    String(String),
}

/// What is written for a space, and where before a text that does not begin with one.
struct Spaces {
    mark: char,
    before: PrependScheme,
}

impl OneWord {
    /// `None` where the library does anything else to a text, or where a character may have no token.
    pub(crate) fn of(tokenizer: &tokenizers::Tokenizer) -> Option<Self> {
        let ModelWrapper::BPE(model) = tokenizer.get_model() else { return None };
        if !model.byte_fallback || model.ignore_merges {
            return None;
        }
        let steps = match tokenizer.get_normalizer() {
            None => Vec::new(),
            Some(normalizer) => flat(serde_json::from_value(serde_json::to_value(normalizer).ok()?).ok()?),
        };
        // Of an empty pattern the library finds one at each place.
        let is_empty = |step: &Step| matches!(step, Step::Replace { pattern: Literal::String(pattern), .. } if pattern.is_empty());
        if steps.iter().any(is_empty) {
            return None;
        }
        let spaces = match tokenizer.get_pre_tokenizer() {
            None => None,
            // Where it begins with respect to the text as it came is known where nothing else is done to it.
            Some(PreTokenizerWrapper::Metaspace(part)) if !part.split && steps.is_empty() => {
                Some(Spaces { mark: part.get_replacement(), before: part.get_prepend_scheme() })
            }
            Some(PreTokenizerWrapper::Split(split)) if !split.invert => {
                let SplitPattern::String(pattern) = &split.pattern else { return None };
                leave_none(&steps, pattern).then_some(None)?
            }
            Some(_) => return None,
        };
        let mut bytes = [0; 256];
        for (byte, token) in bytes.iter_mut().enumerate() {
            *token = model.token_to_id(&format!("<0x{byte:02X}>"))?;
        }
        let merges = Merges::of(model)?;
        let vocabulary = model.get_vocab();
        let characters = vocabulary.iter().filter_map(|(entry, &token)| {
            let mut characters = entry.chars();
            let character = characters.next()?;
            characters.next().is_none().then_some((character, token))
        });
        let characters = characters.collect();
        Some(Self { steps, spaces, merges, characters, bytes })
    }

    /// The text as the normalizer leaves it.
    ///
    /// # Errors
    /// The work was given up.
    pub(crate) fn normalize<'a>(&self, text: &'a str, yields: &YieldPoint) -> Result<Cow<'a, str>, GivenUp> {
        let mut text = Cow::Borrowed(text);
        for step in &self.steps {
            yields.reach()?;
            match step {
                _ if text.is_empty() => break,
                Step::Prepend { prepend } => text.to_mut().insert_str(0, prepend),
                Step::Replace { pattern: Literal::String(pattern), content } => {
                    text = text.replace(pattern, content).into();
                }
                Step::Sequence { .. } => unreachable!("it is taken apart"),
            }
        }
        Ok(text)
    }

    /// Adds the tokens of a normalized text. `is_first` tells that nothing stands before it.
    ///
    /// # Errors
    /// The work was given up.
    pub(crate) fn encode(
        &self,
        text: &str,
        is_first: bool,
        yields: &YieldPoint,
        tokens: &mut Vec<Token>,
    ) -> Result<(), EncodeError> {
        if text.is_empty() {
            return Ok(());
        }
        let marked = self.spaces.as_ref().map(|spaces| spaces.mark(text, is_first));
        let text = marked.as_deref().unwrap_or(text);
        let mut symbols = Vec::new();
        for (n_done, character) in text.chars().enumerate() {
            if n_done % N_BETWEEN == 0 {
                yields.reach()?;
            }
            match self.characters.get(&character) {
                Some(&token) => symbols.push(token),
                None => {
                    let mut buffer = [0; 4];
                    let bytes = character.encode_utf8(&mut buffer).bytes();
                    symbols.extend(bytes.map(|byte| self.bytes[usize::from(byte)]));
                }
            }
        }
        tokens.extend(self.merges.apply(symbols.into_iter(), yields)?);
        Ok(())
    }
}

impl Spaces {
    fn mark(&self, text: &str, is_first: bool) -> String {
        let mut text = text.replace(' ', self.mark.encode_utf8(&mut [0; 4]));
        let is_wanted = match self.before {
            PrependScheme::Always => true,
            PrependScheme::First => is_first,
            PrependScheme::Never => false,
        };
        if is_wanted && !text.starts_with(self.mark) {
            text.insert(0, self.mark);
        }
        text
    }
}

/// A step as those that it is made of.
fn flat(step: Step) -> Vec<Step> {
    match step {
        Step::Sequence { normalizers } => normalizers.into_iter().flat_map(flat).collect(),
        step => vec![step],
    }
}

/// Whether there is no such character left after these steps, so that a text is never cut there.
fn leave_none(steps: &[Step], pattern: &str) -> bool {
    let replaces = |step: &Step| matches!(step, Step::Replace { pattern: Literal::String(found), .. } if found == pattern);
    let adds = |step: &Step| match step {
        Step::Prepend { prepend: added } | Step::Replace { content: added, .. } => added.contains(pattern),
        Step::Sequence { .. } => true,
    };
    let last = steps.iter().rposition(replaces);
    pattern.chars().count() == 1 && last.is_some_and(|last| !steps[last..].iter().any(adds))
}
