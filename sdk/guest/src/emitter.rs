//! Tokens that a guest chooses by itself, as text for the client.

use crate::{Context, Result, TextDecoder, Token, emit};

/// Appends tokens to a context and sends their text to the client, piece by piece and never part of a character. Made by
/// [`Context::emitter`]. For what a sampler draws, [`Generate::emit`](crate::Generate::emit) does it without a call for each
/// token.
///
/// ```no_run
/// # use trellis_guest::{Context, Random, Result};
/// # fn f(context: &Context, random: &mut Random) -> Result<()> {
/// let mut emitter = context.emitter();
/// for _ in 0..64 {
///     let Some(drawn) = random.draw(&context.top(40)?.candidates) else { break };
///     if context.model().is_stop(drawn.token) {
///         break;
///     }
///     emitter.append(&[drawn.token])?;
/// }
/// emitter.finish()
/// # }
/// ```
#[derive(Debug)]
#[must_use = "an emitter sends what `append` is given"]
pub struct Emitter<'a> {
    context: &'a Context,
    decoder: TextDecoder,
}

impl Context {
    /// What is appended through it is also sent to the client as text. See [`Emitter`].
    pub fn emitter(&self) -> Emitter<'_> {
        Emitter { context: self, decoder: self.model().text_decoder() }
    }
}

impl Emitter<'_> {
    /// Appends tokens, and sends the text that they complete. Special tokens have none.
    ///
    /// # Errors
    /// Those of [`Context::append`], where nothing is sent, and of [`emit`](crate::emit()).
    pub fn append(&mut self, tokens: &[Token]) -> Result {
        self.context.append(tokens)?;
        let mut text = String::new();
        for &token in tokens {
            text += &self.decoder.push(token)?;
        }
        emit(&text)
    }

    /// Sends what is left, with U+FFFD for an unfinished character.
    ///
    /// # Errors
    /// Those of [`emit`](crate::emit()).
    pub fn finish(mut self) -> Result {
        emit(&self.decoder.finish())
    }
}
