//! Models and their tokenizers.

use std::cell::OnceCell;
use std::rc::Rc;

use crate::bindings::trellis::host::models as raw;
use crate::panics::expect_host;
use crate::session::check_call;
use crate::{Chat, Context, Error, Pooling, Result, Token, hidden_all};

#[doc(inline)]
pub use raw::{ChatEnd, ModelInfo};

/// A loaded model: its description, tokenizer and chat template. A clone is another handle to it.
#[derive(Clone, Debug)]
pub struct Model {
    inner: Rc<Inner>,
}

#[derive(Debug)]
struct Inner {
    raw: raw::Model,
    info: ModelInfo,
    vocabulary: OnceCell<Vec<Vec<u8>>>,
}

impl Model {
    /// The names of the loaded models; the first is the default.
    pub fn names() -> Vec<String> {
        expect_host();
        raw::names()
    }

    /// The default model.
    ///
    /// # Errors
    /// [`Error::BudgetExceeded`] when the guest holds too many handles.
    pub fn open_default() -> Result<Self> {
        expect_host();
        Self::new(raw::Model::open(None)?)
    }

    /// The model of that name.
    ///
    /// # Errors
    /// [`Error::UnknownModel`] with the names that are known; [`Error::ModelLeaving`]; [`Error::EngineFailed`] where it is loaded on
    /// demand, and cannot be, or there is no room now.
    pub fn open(name: &str) -> Result<Self> {
        expect_host();
        Self::new(raw::Model::open(Some(name))?)
    }

    fn new(raw: raw::Model) -> Result<Self> {
        let info = raw.info();
        Ok(Self { inner: Rc::new(Inner { raw, info, vocabulary: OnceCell::new() }) })
    }

    /// What the model is: name, vocabulary size, context length, special tokens, device.
    pub fn info(&self) -> &ModelInfo {
        &self.inner.info
    }

    /// Whether this token ends an answer.
    pub fn is_stop(&self, token: Token) -> bool {
        self.info().stop_tokens.contains(&token)
    }

    /// An empty context.
    ///
    /// # Errors
    /// [`Error::BudgetExceeded`] when the guest holds too many contexts; [`Error::ModelLeaving`].
    pub fn context(&self) -> Result<Context> {
        Context::create(self)
    }

    /// Hidden states of texts after the final norm, each `[hidden_size]`: of the last token, or the mean over all from
    /// a position on, of which the first is the token that begins a text, where the model has one. Each text takes a
    /// context while it is computed, all in one batch.
    ///
    /// # Errors
    /// Those of [`context`](Self::context), [`Context::append_text`] and [`Context::hidden`];
    /// [`Error::EmptyContext`] for a text without tokens.
    pub fn embed<'a>(
        &self,
        texts: impl IntoIterator<Item = &'a str>,
        pooling: Pooling,
    ) -> Result<Vec<Vec<f32>>> {
        let contexts = texts.into_iter().map(|text| {
            let context = self.context()?;
            context.append(self.info().bos_token.as_slice())?;
            context.append_text(text)?;
            Ok(context)
        });
        let contexts = contexts.collect::<Result<Vec<_>>>()?;
        let states = hidden_all(&contexts, &[self.info().n_layers], pooling)?;
        Ok(states.into_iter().flatten().collect())
    }

    /// A copy of the context that a guest of the same user saved under this name.
    ///
    /// # Errors
    /// [`Error::NotFound`], also when another model's context was saved.
    pub fn saved_context(&self, name: &str) -> Result<Context> {
        Context::open(self, name)
    }

    /// The tokens of a text. What looks like a special token stays text, so this is safe for user input.
    ///
    /// # Errors
    /// [`Error::BudgetExceeded`] when the text is longer than the host takes in one call
    /// ([`call_bytes`](crate::call_bytes)).
    pub fn encode(&self, text: &str) -> Result<Vec<Token>> {
        check_call(text.len())?;
        Ok(self.raw().encode(text, raw::SpecialTokens::AsText)?)
    }

    /// The tokens of a text in which names such as `<|end|>` stand for special tokens.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn encode_markup(&self, text: &str) -> Result<Vec<Token>> {
        check_call(text.len())?;
        Ok(self.raw().encode(text, raw::SpecialTokens::Parse)?)
    }

    /// The tokens of a conversation in the model's chat template.
    ///
    /// # Errors
    /// [`Error::NoChatTemplate`], or [`Error::ChatTemplate`] with the template's reason; as [`encode`](Self::encode).
    pub fn encode_chat(&self, chat: &Chat, end: ChatEnd) -> Result<Vec<Token>> {
        check_call(chat.messages().iter().map(|message| message.role.len() + message.content.len()).sum())?;
        Ok(self.raw().encode_chat(chat.messages(), end)?)
    }

    /// The text of tokens, without special tokens. Bytes that are not UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// [`Error::TokenOutOfRange`].
    pub fn decode(&self, tokens: &[Token]) -> Result<String> {
        Ok(self.raw().decode(tokens)?)
    }

    /// The bytes of one token; a special token's are those of its name.
    ///
    /// # Errors
    /// [`Error::TokenOutOfRange`].
    pub fn token_bytes(&self, token: Token) -> Result<Vec<u8>> {
        Ok(self.raw().token_bytes(token)?)
    }

    /// The bytes of every token of the vocabulary, `[vocab_size]`; those of special tokens are empty, as are those of
    /// tokens that stand for no text. Asks the host once.
    ///
    /// # Errors
    /// None but those of the host itself.
    pub fn vocabulary(&self) -> Result<&[Vec<u8>]> {
        if let Some(vocabulary) = self.inner.vocabulary.get() {
            return Ok(vocabulary);
        }
        let vocabulary = self.raw().vocabulary()?;
        Ok(self.inner.vocabulary.get_or_init(|| vocabulary))
    }

    /// A decoder that turns tokens into text one at a time.
    pub fn text_decoder(&self) -> TextDecoder {
        TextDecoder { raw: raw::TextDecoder::new(self.raw()) }
    }

    pub(crate) fn raw(&self) -> &raw::Model {
        &self.inner.raw
    }
}

/// Turns tokens into text one at a time and never splits a character.
#[derive(Debug)]
pub struct TextDecoder {
    raw: raw::TextDecoder,
}

impl TextDecoder {
    /// The text that this token completes; empty while a character is unfinished.
    ///
    /// # Errors
    /// [`Error::TokenOutOfRange`].
    pub fn push(&mut self, token: Token) -> Result<String> {
        self.raw.push(token).map_err(Error::from)
    }

    /// What is left, with U+FFFD for an unfinished character.
    pub fn finish(&mut self) -> String {
        self.raw.finish()
    }
}
