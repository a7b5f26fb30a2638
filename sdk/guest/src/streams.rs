//! Tokens one at a time, decoded ahead of the guest.

use crate::bindings::trellis::host::streams as raw;
use crate::{Candidate, Context, Distribution, GuessTree, Guesses, Result, Sampler, TextDecoder, Token};

#[doc(inline)]
pub use raw::FinishReason;

/// Settings of a stream, made by [`Context::stream`]. A stop token of the model ends it unless others are set.
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing before `open` or `text`"]
pub struct StreamOptions<'a> {
    context: &'a Context,
    sampler: &'a Sampler,
    max_tokens: Option<u32>,
    stop_tokens: Vec<Token>,
    top: u32,
    hidden: Vec<u32>,
    guesses: Option<Guesses<'a>>,
    others: Vec<&'a Context>,
}

impl<'a> StreamOptions<'a> {
    pub(crate) fn new(context: &'a Context, sampler: &'a Sampler) -> Self {
        let stop_tokens = context.model().info().stop_tokens.clone();
        let (max_tokens, top, hidden, guesses, others) = (None, 0, Vec::new(), None, Vec::new());
        Self { context, sampler, max_tokens, stop_tokens, top, hidden, guesses, others }
    }

    /// Of a mixture with these others.
    pub(crate) fn mixed_with(mut self, others: Vec<&'a Context>) -> Self {
        self.others = others;
        self
    }

    /// The most tokens that the stream gives; as many as fit unless set.
    pub fn max_tokens(mut self, n: u32) -> Self {
        self.max_tokens = Some(n);
        self
    }

    /// The tokens that end the stream, at most 256, in place of the model's.
    pub fn stop_tokens(mut self, tokens: &[Token]) -> Self {
        self.stop_tokens = tokens.to_vec();
        self
    }

    /// Also looks at the `n` most probable tokens in the place of each token, at most 20: [`TokenStream::top`]. They
    /// are the model's own, whatever the sampler makes of them, and are decoded ahead with the tokens.
    pub fn top(mut self, n: u32) -> Self {
        self.top = n;
        self
    }

    /// Also looks at the hidden states of these layers before each token, at most 8 of them: [`TokenStream::hidden`]. 0
    /// is the embedding of the token, the model's `n_layers` what is left after the final norm.
    pub fn hidden(mut self, layers: &[u32]) -> Self {
        self.hidden = layers.to_vec();
        self
    }

    /// Guesses at what comes, which the model verifies several at a time. The tokens stay the same.
    pub fn guess_by(mut self, guesses: Guesses<'a>) -> Self {
        self.guesses = Some(guesses);
        self
    }

    /// The stream, token by token.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Error::InvalidArgument) for stop tokens, tokens to look at or guesses that are not as
    /// they may be, [`TokenOutOfRange`](crate::Error::TokenOutOfRange), [`ModelMismatch`](crate::Error::ModelMismatch),
    /// [`BudgetExceeded`](crate::Error::BudgetExceeded).
    pub fn open(self) -> Result<TokenStream> {
        let options = raw::StreamOptions {
            max_tokens: self.max_tokens,
            stop_tokens: self.stop_tokens.clone(),
            top: self.top,
            hidden: self.hidden,
            speculation: self.guesses.map(Guesses::into_raw),
            others: self.others.into_iter().map(Context::raw).collect(),
        };
        let raw = raw::Stream::open(self.context.raw(), self.sampler.raw(), &options)?;
        Ok(TokenStream { raw, stop_tokens: self.stop_tokens, has_failed: false })
    }

    /// The stream as pieces of text.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn text(self) -> Result<TextStream> {
        let decoder = self.context.model().text_decoder();
        Ok(TextStream { tokens: self.open()?, decoder: Some(decoder) })
    }
}

/// Draws tokens and appends them to its context, one for each `next`.
///
/// The engine decodes a few tokens ahead while the guest thinks. Whatever the guest does with the context
/// meanwhile, the stream gives what [`Context::step`] would give in its place. A stop token is given, and
/// then the stream ends; [`finish`](Self::finish) says why it did. An error ends the iteration too; a new
/// stream goes on where it stopped.
#[derive(Debug)]
pub struct TokenStream {
    raw: raw::Stream,
    stop_tokens: Vec<Token>,
    has_failed: bool,
}

impl TokenStream {
    /// What else the last token could have been, where the stream was opened with [`StreamOptions::top`]: the most
    /// probable tokens in its place, and the entropy. None before the first token.
    pub fn top(&self) -> Option<Distribution> {
        self.raw.top()
    }

    /// The hidden states from which the last token was drawn, where the stream was opened with
    /// [`StreamOptions::hidden`]: of each layer one, `[hidden_size]`. Empty before the first token.
    pub fn hidden(&self) -> Vec<Vec<f32>> {
        self.raw.hidden()
    }

    /// Changes how all further tokens are drawn.
    ///
    /// # Errors
    /// [`ModelMismatch`](crate::Error::ModelMismatch) when the sampler's mask is another model's.
    pub fn set_sampler(&mut self, sampler: &Sampler) -> Result {
        Ok(self.raw.set_sampler(sampler.raw())?)
    }

    /// Says what the next tokens will be, as far as the guest can tell: at most 15, for the next token only. The model
    /// verifies them in one step; what the stream gives stays the same.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Error::InvalidArgument) for more tokens, [`TokenOutOfRange`](crate::Error::TokenOutOfRange).
    pub fn guess(&mut self, tokens: &[Token]) -> Result {
        Ok(self.raw.guess(tokens)?)
    }

    /// The same with alternatives, in the place of a [`guess`](Self::guess).
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Error::InvalidArgument) for more than 64 guesses, and for one that is more than 15 tokens
    /// behind the context; [`TokenOutOfRange`](crate::Error::TokenOutOfRange).
    pub fn guess_tree(&mut self, tree: &GuessTree) -> Result {
        Ok(self.raw.guess_tree(tree.raw())?)
    }

    /// Why the stream ended; none while it has not.
    pub fn finish(&self) -> Option<FinishReason> {
        self.raw.finish()
    }
}

impl Iterator for TokenStream {
    type Item = Result<Candidate>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.has_failed {
            return None;
        }
        let drawn = self.raw.next();
        self.has_failed = drawn.is_err();
        drawn.map_err(Into::into).transpose()
    }
}

/// The text of a [`TokenStream`] in pieces that never split a character. Stop tokens have no text.
#[derive(Debug)]
pub struct TextStream {
    tokens: TokenStream,
    /// None once the last piece is out.
    decoder: Option<TextDecoder>,
}

impl TextStream {
    /// The stream below, to change its sampler or to ask why it ended.
    pub fn tokens(&mut self) -> &mut TokenStream {
        &mut self.tokens
    }
}

impl Iterator for TextStream {
    type Item = Result<String>;

    fn next(&mut self) -> Option<Self::Item> {
        while let Some(decoder) = &mut self.decoder {
            let piece = match self.tokens.next() {
                Some(Ok(drawn)) if self.tokens.stop_tokens.contains(&drawn.token) => continue,
                Some(Ok(drawn)) => decoder.push(drawn.token),
                Some(Err(error)) => Err(error),
                None => {
                    let rest = decoder.finish();
                    self.decoder = None;
                    Ok(rest)
                }
            };
            if piece.as_ref().map_or(true, |text| !text.is_empty()) {
                return Some(piece);
            }
        }
        None
    }
}
