//! A text as the words that a byte-level vocabulary makes tokens of, one after the other.
//!
//! What comes before the model in the `tokenizers` crate makes a list of all words first. Here the same expressions are looked
//! for in the same text, and each word is done with before the next is looked for, so that long texts are worked on in parts.

use std::borrow::Cow;

use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::utils::SysRegex;
use tokenizers::{
    Model as _, ModelWrapper, NormalizedString, Normalizer as _, NormalizerWrapper, SplitDelimiterBehavior,
};

use super::merges::Merges;
use super::token_bytes::byte_characters;
use super::tokenizer::EncodeError;
use super::yield_point::YieldPoint;
use crate::batch::Token;

/// The words of GPT-2, which are those of `ByteLevel` where it is told to cut.
const GPT_2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// A word of this length takes the model well below a millisecond.
const SHORT_WORD_BYTES: usize = 1 << 10;

/// Bytes that are normalized at once, where the text allows.
const PART_BYTES: usize = 2 << 10;

/// How a byte-level vocabulary cuts texts.
pub(crate) struct Words {
    /// Each is looked for in what the one before it has left.
    patterns: Vec<SysRegex>,
    composes: bool,
    characters: [char; 256], // by byte
    /// For long words, with the token of each byte; none where a byte has no token.
    merges: Option<(Merges, [Token; 256])>,
    /// The longest word that is the model's: longer ones are merged here.
    n_short_bytes: usize,
}

impl Words {
    /// `None` where something else is done to a text before it comes to the model.
    pub(crate) fn of(tokenizer: &tokenizers::Tokenizer) -> Option<Self> {
        let composes = match tokenizer.get_normalizer() {
            None => false,
            Some(NormalizerWrapper::NFC(_)) => true,
            Some(_) => return None,
        };
        let parts = match tokenizer.get_pre_tokenizer()? {
            PreTokenizerWrapper::Sequence(parts) => parts.as_ref(),
            part => std::slice::from_ref(part),
        };
        let (last, splits) = parts.split_last()?;
        let &PreTokenizerWrapper::ByteLevel(ByteLevel { add_prefix_space: false, use_regex, .. }) = last
        else {
            return None;
        };
        let of_bytes = use_regex.then(|| SysRegex::new(GPT_2).ok());
        let patterns = splits.iter().map(pattern).chain(of_bytes).collect::<Option<_>>()?;
        let ModelWrapper::BPE(model) = tokenizer.get_model() else { return None };
        let characters = byte_characters();
        let tokens = characters.map(|character| model.token_to_id(character.encode_utf8(&mut [0; 4])));
        let merges = tokens.iter().all(Option::is_some).then(|| Merges::of(model)).flatten();
        let merges = merges.map(|merges| (merges, tokens.map(Option::unwrap_or_default)));
        // Such a model takes a word that is an entry as it stands.
        let longest = model.ignore_merges.then(|| model.get_vocab().keys().map(String::len).max()).flatten();
        let n_short_bytes = SHORT_WORD_BYTES.max(longest.unwrap_or_default());
        Some(Self { patterns, composes, characters, merges, n_short_bytes })
    }

    /// The text as the normalizer leaves it.
    ///
    /// # Errors
    /// The work was given up.
    pub(crate) fn normalize<'a>(
        &self,
        text: &'a str,
        yields: &YieldPoint,
    ) -> Result<Cow<'a, str>, EncodeError> {
        if !self.composes || text.is_ascii() {
            return Ok(text.into());
        }
        let mut normalized = String::with_capacity(text.len());
        let mut rest = text;
        while !rest.is_empty() {
            yields.reach()?;
            let (part, next) = rest.split_at(end_of_part(rest));
            rest = next;
            if part.is_ascii() {
                normalized.push_str(part);
                continue;
            }
            let mut part = NormalizedString::from(part);
            NFC.normalize(&mut part).map_err(|error| EncodeError::Refused { reason: error.to_string() })?;
            normalized.push_str(part.get());
        }
        Ok(normalized.into())
    }

    /// Adds the tokens of a normalized text.
    ///
    /// # Errors
    /// The model has no token for a character, or the work was given up.
    pub(crate) fn encode(
        &self,
        model: &ModelWrapper,
        text: &str,
        yields: &YieldPoint,
        tokens: &mut Vec<Token>,
    ) -> Result<(), EncodeError> {
        let mut characters = String::new();
        self.each(&self.patterns, text, &mut |word| {
            yields.reach()?;
            if let Some((merges, of_bytes)) = &self.merges
                && word.len() > self.n_short_bytes
            {
                let word = word.bytes().map(|byte| of_bytes[usize::from(byte)]);
                tokens.extend(merges.apply(word, yields)?);
                return Ok(());
            }
            characters.clear();
            characters.extend(word.bytes().map(|byte| self.characters[usize::from(byte)]));
            let pieces = model.tokenize(&characters);
            let pieces = pieces.map_err(|error| EncodeError::Refused { reason: error.to_string() })?;
            tokens.extend(pieces.iter().map(|piece| piece.id));
            Ok(())
        })
    }

    /// Calls with each word of a text, cut by the patterns one after the other.
    fn each(
        &self,
        patterns: &[SysRegex],
        text: &str,
        call: &mut dyn FnMut(&str) -> Result<(), EncodeError>,
    ) -> Result<(), EncodeError> {
        if text.is_empty() {
            return Ok(());
        }
        let Some((pattern, others)) = patterns.split_first() else { return call(text) };
        let mut done = 0;
        for (start, end) in pattern.find_iter(text) {
            self.each(others, &text[done..start], call)?;
            self.each(others, &text[start..end], call)?;
            done = end;
        }
        self.each(others, &text[done..], call)
    }
}

/// What a part of a pre-tokenizer looks for, if each find is a word.
fn pattern(part: &PreTokenizerWrapper) -> Option<SysRegex> {
    let PreTokenizerWrapper::Split(split) = part else { return None };
    let Split { pattern, behavior: SplitDelimiterBehavior::Isolated, invert: false, .. } = split else {
        return None;
    };
    match pattern {
        SplitPattern::Regex(pattern) => SysRegex::new(pattern).ok(),
        SplitPattern::String(_) => None,
    }
}

/// Where a text may be cut so that its parts are composed as the whole is: before a character that starts anew whatever stands
/// before it. Composition never takes such a one into what stands before (UAX #15: `ccc` is 0 and `NFC_QC` is yes).
fn end_of_part(text: &str) -> usize {
    let may_begin = |c: char| matches!(c, '\0'..='\x7f' | 'А'..='я' | 'ぁ'..='ゖ' | 'ァ'..='ヺ' | '一'..='\u{9fff}' | '가'..='힣');
    let from = text.ceil_char_boundary(PART_BYTES);
    let end = text[from..].char_indices().find(|&(_, c)| may_begin(c));
    end.map_or(text.len(), |(idx, _)| from + idx)
}
