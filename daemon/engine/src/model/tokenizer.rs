//! Text to tokens and back.

use std::collections::BTreeSet;

use tokenizers::normalizer::Range as NormalRange;
use tokenizers::{
    Model as _, ModelWrapper, NormalizedString, Normalizer as _, OffsetType, PreTokenizedString,
    PreTokenizer as _, Token as Piece,
};

use super::added_tokens::{AddedTokens, Found};
use super::error::ModelError;
use super::token_bytes::{ByteScheme, Entry, TokenBytes};
use super::words::Words;
use super::yield_point::{GivenUp, YieldPoint};
use crate::batch::Token;

/// Digits of a fingerprint: 128 bits.
const N_FINGERPRINT_DIGITS: usize = 32;

/// What the text of a special token, such as `<|end|>`, means when it stands in a text to encode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecialTokens {
    /// The special token: for text that the caller wrote.
    Parse,
    /// Plain characters: for text that is not the guest's own.
    AsText,
}

/// What decoding does with special tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecialText {
    /// Write them out.
    Keep,
    /// Leave them out.
    Skip,
}

/// Why a text could not be encoded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EncodeError {
    /// The vocabulary has nothing for a part of it.
    #[error("the tokenizer cannot encode this text: {reason}")]
    Refused {
        /// What the tokenizer says.
        reason: String,
    },
    /// Nobody wants its tokens any more.
    #[error(transparent)]
    GivenUp(#[from] GivenUp),
}

impl From<tokenizers::Error> for EncodeError {
    fn from(error: tokenizers::Error) -> Self {
        match error.downcast::<GivenUp>() {
            Ok(given_up) => Self::GivenUp(*given_up),
            Err(error) => Self::Refused { reason: error.to_string() },
        }
    }
}

/// The tokenizer of one model.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    scheme: ByteScheme,
    bytes: TokenBytes,
    specials: BTreeSet<Token>,
    fingerprint: String,
    raw: AddedTokens,        // looked for in the text as it came
    normalized: AddedTokens, // looked for after normalisation
    words: Option<Words>,    // none where the library alone knows what a text is cut into
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("vocab_size", &self.vocab_size()).finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Reads the bytes of a `tokenizer.json` for a model of `vocab_size` embeddings; `file` is its name in errors.
    ///
    /// Its truncation, padding and post-processor are not used: nothing is added to a text.
    ///
    /// # Errors
    ///
    /// [`ModelError::Tokenizer`] when the file is broken or of a kind that cannot be turned back into bytes,
    /// [`ModelError::Vocabulary`] when it has tokens past `vocab_size`.
    pub fn from_json(file: &str, bytes: &[u8], vocab_size: usize) -> Result<Self, ModelError> {
        let fail = |reason: String| ModelError::Tokenizer { file: file.to_owned(), reason };
        // The library panics on some broken files, such as a decoder with half a surrogate pair.
        let mut inner = std::panic::catch_unwind(|| tokenizers::Tokenizer::from_bytes(bytes))
            .map_err(|_| fail("the tokenizers library panicked on this file".into()))?
            .map_err(|error| fail(error.to_string()))?;
        if let ModelWrapper::BPE(model) = inner.get_model()
            && model.dropout.is_some_and(|dropout| dropout != 0.0)
        {
            return Err(fail("model.dropout is set; expected none, since encoding is deterministic".into()));
        }
        if let ModelWrapper::BPE(model) = inner.get_model() {
            // The library would keep 10,000 words on each thread, of any user's text: some tens of megabytes that never come
            // back, and a way to find out by the time it takes what others have encoded. Plain text is a quarter slower.
            let mut model = model.clone();
            model.resize_cache(0);
            inner.with_model(model);
        }
        let decoder = serde_json::to_value(inner.get_decoder()).map_err(|error| fail(error.to_string()))?;
        let scheme = ByteScheme::from_decoder(&decoder).map_err(fail)?;

        let added = inner.get_added_tokens_decoder();
        let highest = inner.get_vocab(false).into_values().chain(added.keys().copied()).max();
        let n_tokens = match highest {
            Some(token) if (token as usize) < vocab_size => token as usize + 1,
            Some(token) => {
                return Err(ModelError::Vocabulary { file: file.to_owned(), token, vocab_size });
            }
            None => return Err(fail("the vocabulary is empty; expected at least one token".into())),
        };
        let bytes = TokenBytes::new(&scheme, n_tokens, |token| match added.get(&token) {
            Some(added) => Some(Entry::Text(added.content.clone())),
            None => inner.get_model().id_to_token(token).map(Entry::Piece),
        });

        let (mut raw, mut normalized) = (AddedTokens::default(), AddedTokens::default());
        let mut specials = BTreeSet::new();
        for (&token, rule) in &added {
            if rule.special {
                specials.insert(token);
            }
            // Special tokens are matched before normalisation, so that none can be spelled in another way.
            match inner.get_normalizer() {
                Some(normalizer) if rule.normalized && !rule.special => {
                    let mut text = NormalizedString::from(rule.content.as_str());
                    normalizer.normalize(&mut text).map_err(|error| fail(error.to_string()))?;
                    normalized.insert(text.get().to_owned(), token, rule.clone());
                }
                _ => raw.insert(rule.content.clone(), token, rule.clone()),
            }
        }
        let fingerprint = fingerprint(&bytes, &specials);
        let words = Words::of(&inner);
        Ok(Self { inner, scheme, bytes, specials, fingerprint, raw, normalized, words })
    }

    /// One more than the highest token; at most the model's `vocab_size`.
    pub fn vocab_size(&self) -> usize {
        self.bytes.len()
    }

    /// The special tokens, in order.
    pub fn special_tokens(&self) -> impl Iterator<Item = Token> {
        self.specials.iter().copied()
    }

    /// Equal where every token stands for the same, in hexadecimal. What a text is cut into may differ.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Whether a token is special.
    pub fn is_special(&self, token: Token) -> bool {
        self.specials.contains(&token)
    }

    /// The token of a vocabulary entry, written as in `tokenizer.json`.
    pub fn token(&self, entry: &str) -> Option<Token> {
        self.inner.token_to_id(entry)
    }

    /// The bytes that a token stands for; `None` for a token that the vocabulary does not know.
    ///
    /// They need not be UTF-8: a character can be spread over tokens.
    pub fn token_bytes(&self, token: Token) -> Option<&[u8]> {
        self.bytes.get(token)
    }

    /// The tokens of a text, without any token before or after it.
    ///
    /// Added tokens that `tokenizer.json` does not call special are ordinary vocabulary and always found.
    ///
    /// # Errors
    ///
    /// [`EncodeError`] when the vocabulary has no token for a character.
    pub fn encode(&self, text: &str, specials: SpecialTokens) -> Result<Vec<Token>, EncodeError> {
        self.encode_in_parts(text, specials, &YieldPoint::NONE)
    }

    /// As [`Self::encode`], in parts. Byte-level vocabularies take milliseconds for a part at most. With others a part may be all
    /// of the text between two added tokens.
    ///
    /// # Errors
    ///
    /// As there, and when the work was given up.
    pub fn encode_in_parts(
        &self,
        text: &str,
        specials: SpecialTokens,
        yields: &YieldPoint,
    ) -> Result<Vec<Token>, EncodeError> {
        self.encode_around(text, &self.raw.find(text, specials, yields)?, yields)
    }

    /// The text of tokens. Unknown tokens have none; what is not UTF-8 becomes U+FFFD.
    ///
    /// The space that SentencePiece puts before a text when encoding is taken away again.
    pub fn decode(&self, tokens: &[Token], specials: SpecialText) -> String {
        let mut bytes = Vec::new();
        for &token in tokens {
            bytes.extend_from_slice(self.visible_bytes(token, specials));
        }
        let strips = matches!(self.scheme, ByteScheme::Pieces { strips_leading_space: true, .. });
        let bytes = bytes.strip_prefix(b" ").filter(|_| strips).unwrap_or(&bytes);
        String::from_utf8_lossy(bytes).into_owned()
    }

    /// Bytes of these tokens as decoding shows them, before what is not UTF-8 becomes U+FFFD.
    #[must_use]
    pub fn n_bytes_shown(&self, tokens: &[Token], specials: SpecialText) -> usize {
        tokens.iter().map(|&token| self.visible_bytes(token, specials).len()).sum()
    }

    /// The bytes of a token as decoding shows them.
    pub(crate) fn visible_bytes(&self, token: Token, specials: SpecialText) -> &[u8] {
        match specials {
            SpecialText::Skip if self.is_special(token) => &[],
            _ => self.token_bytes(token).unwrap_or_default(),
        }
    }

    /// Tokens that are looked for in text as it came.
    pub(crate) fn added_tokens(&self) -> &AddedTokens {
        &self.raw
    }

    /// The text of a special token, as it is matched.
    pub(crate) fn special_texts(&self) -> impl Iterator<Item = &str> {
        self.specials
            .iter()
            .filter_map(|token| self.token_bytes(*token))
            .map(|bytes| std::str::from_utf8(bytes).expect("an added token is stored as its text"))
    }

    /// Encodes a text of which some ranges are known to be tokens. The ranges are ascending and disjoint.
    pub(crate) fn encode_around(
        &self,
        text: &str,
        found: &[Found],
        yields: &YieldPoint,
    ) -> Result<Vec<Token>, EncodeError> {
        let Some(words) = &self.words else { return self.encode_by_library(text, found, yields) };
        let mut tokens = Vec::new();
        between(text, found, &mut tokens, |text, tokens| {
            let text = words.normalize(text, yields)?;
            let found = self.normalized.find(&text, SpecialTokens::AsText, yields)?;
            between(&text, &found, tokens, |text, tokens| {
                words.encode(self.inner.get_model(), text, yields, tokens)
            })
        })?;
        Ok(tokens)
    }

    /// As [`Self::encode_around`], with whatever the library does to a text.
    fn encode_by_library(
        &self,
        text: &str,
        found: &[Found],
        yields: &YieldPoint,
    ) -> Result<Vec<Token>, EncodeError> {
        let mut pieces = PreTokenizedString::from(text);
        pieces.split(|_, text| cut(&text, found))?;
        pieces.split(|_, mut text| {
            yields.reach()?;
            if let Some(normalizer) = self.inner.get_normalizer() {
                normalizer.normalize(&mut text)?;
            }
            let found = self.normalized.find(text.get(), SpecialTokens::AsText, yields)?;
            cut(&text, &found)
        })?;
        if let Some(pre_tokenizer) = self.inner.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut pieces)?;
        }
        pieces.tokenize(|text| {
            yields.reach()?;
            self.inner.get_model().tokenize(text.get())
        })?;
        let encoding = pieces.into_encoding(None, 0, OffsetType::None)?;
        Ok(encoding.get_ids().to_vec())
    }
}

/// Adds the tokens of a text: those that were found in it, and between them what `encode` adds.
fn between(
    text: &str,
    found: &[Found],
    tokens: &mut Vec<Token>,
    mut encode: impl FnMut(&str, &mut Vec<Token>) -> Result<(), EncodeError>,
) -> Result<(), EncodeError> {
    let mut done = 0;
    for Found { range, token, .. } in found {
        encode(&text[done..range.start], tokens)?;
        tokens.push(*token);
        done = range.end;
    }
    encode(&text[done..], tokens)
}

/// A hash over what each token stands for.
fn fingerprint(bytes: &TokenBytes, specials: &BTreeSet<Token>) -> String {
    let mut hasher = blake3::Hasher::new_derive_key("trellis vocabulary");
    for token in 0..bytes.len() as Token {
        let kind = match bytes.get(token) {
            None => 0,
            Some(_) if specials.contains(&token) => 1,
            Some(_) => 2,
        };
        let bytes = bytes.get(token).unwrap_or_default();
        hasher.update(&[kind]).update(&(bytes.len() as u64).to_le_bytes()).update(bytes);
    }
    hasher.finalize().to_hex().as_str()[..N_FINGERPRINT_DIGITS].to_owned()
}

/// Cuts a text at the tokens found in it.
fn cut(
    text: &NormalizedString,
    found: &[Found],
) -> tokenizers::Result<Vec<(NormalizedString, Option<Vec<Piece>>)>> {
    let slice = |start: usize, end: usize| {
        text.slice(NormalRange::Normalized(start..end))
            .ok_or_else(|| tokenizers::Error::from(format!("no text at bytes {start}..{end}")))
    };
    let mut pieces = Vec::with_capacity(2 * found.len() + 1);
    let mut done = 0;
    for Found { range, token, .. } in found {
        if done < range.start {
            pieces.push((slice(done, range.start)?, None));
        }
        let token = Piece::new(*token, String::new(), (0, range.len()));
        pieces.push((slice(range.start, range.end)?, Some(vec![token])));
        done = range.end;
    }
    if done < text.get().len() {
        pieces.push((slice(done, text.get().len())?, None));
    }
    Ok(pieces)
}
