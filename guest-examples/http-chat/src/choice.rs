//! One of the answers that are drawn side by side.

use trellis_guest::{Candidate, Context, FinishReason, Model, Result, Sampler, TextDecoder, TokenStream};

use crate::reply::{Other, Reason, Refusal, Reply, Token};
use crate::request::Settings;
use crate::stops::Stops;
use crate::tools;

/// What the text of a choice may be.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum May {
    BeText,
    /// The call of a tool as well.
    BeCall,
}

pub(crate) struct Choice<'a> {
    idx: usize,
    model: &'a Model,
    stream: TokenStream,
    decoder: TextDecoder,
    stops: Stops<'a>,
    has_logprobs: bool,
    /// Tokens that are not told, each with the place of its text.
    tokens: Vec<(usize, Token)>,
    n_bytes_drawn: usize,
    n_bytes_told: usize,
    may: May,
    /// Text that may be a call, and is not told.
    kept: String,
    /// Tokens drawn.
    pub(crate) n_tokens: u32,
    pub(crate) is_over: bool,
}

impl<'a> Choice<'a> {
    pub(crate) fn begin(
        (idx, model): (usize, &'a Model),
        (context, sampler): (&Context, &Sampler),
        settings: &'a Settings,
        (max_tokens, may): (Option<u32>, May),
    ) -> Result<Self, Refusal> {
        let mut stream = context.stream(sampler).top(settings.logprobs.unwrap_or(0));
        if let Some(n) = max_tokens {
            stream = stream.max_tokens(n);
        }
        Ok(Self {
            idx,
            model,
            stream: stream.open()?,
            decoder: model.text_decoder(),
            stops: Stops::at(&settings.stop),
            has_logprobs: settings.logprobs.is_some(),
            tokens: Vec::new(),
            n_bytes_drawn: 0,
            n_bytes_told: 0,
            may,
            kept: String::new(),
            n_tokens: 0,
            is_over: false,
        })
    }

    /// Draws a token, if the choice is not over.
    pub(crate) fn advance(&mut self) -> Result<(), Refusal> {
        if self.is_over {
            return Ok(());
        }
        let Some(drawn) = self.stream.next().transpose()? else { return self.end() };
        self.n_tokens += 1;
        if self.model.is_stop(drawn.token) {
            return Ok(());
        }
        if self.has_logprobs {
            let token = self.token(&drawn)?;
            self.tokens.push((self.n_bytes_drawn, token));
        }
        let text = self.decoder.push(drawn.token)?;
        self.n_bytes_drawn += text.len();
        let (told, met) = self.stops.push(&text);
        self.say(&told)?;
        match met {
            Some(stop) => {
                let n_told = self.n_bytes_told + self.kept.len();
                self.tokens.retain(|(at, _)| *at < n_told);
                self.finish(Reason::Stop, Some(stop))
            }
            None => Ok(()),
        }
    }

    /// The stream is at its end.
    fn end(&mut self) -> Result<(), Refusal> {
        let rest = self.decoder.finish();
        let (told, met) = self.stops.push(&rest);
        self.say(&told)?;
        if met.is_none() {
            let held = self.stops.rest();
            self.say(&held)?;
        }
        let reason = match self.stream.finish() {
            Some(FinishReason::MaxTokens | FinishReason::ContextFull) => Reason::Length,
            _ => Reason::Stop,
        };
        self.finish(reason, met)
    }

    /// Tells a text, unless it may be a call.
    fn say(&mut self, text: &str) -> Result<(), Refusal> {
        self.kept += text;
        if self.may == May::BeCall {
            match tools::is_call(&self.kept) {
                Some(false) => self.may = May::BeText,
                None | Some(true) => return Ok(()),
            }
        }
        self.tell_kept()
    }

    fn tell_kept(&mut self) -> Result<(), Refusal> {
        let text = std::mem::take(&mut self.kept);
        self.n_bytes_told += text.len();
        let n_ready = self.tokens.iter().take_while(|(at, _)| *at < self.n_bytes_told).count();
        let tokens = self.tokens.drain(..n_ready).map(|(_, token)| token).collect::<Vec<_>>();
        if text.is_empty() && tokens.is_empty() {
            return Ok(());
        }
        Ok(Reply::Piece { choice: self.idx, text: &text, tokens }.send()?)
    }

    fn finish(&mut self, reason: Reason, stop: Option<&str>) -> Result<(), Refusal> {
        self.is_over = true;
        let mut reason = reason;
        match tools::read(&self.kept).filter(|_| self.may == May::BeCall) {
            Some((name, arguments)) => {
                Reply::Call { choice: self.idx, name: &name, arguments: &arguments }.send()?;
                reason = Reason::Calls;
            }
            None => {
                // What is left has no text of its own.
                self.n_bytes_told += 1;
                self.tell_kept()?;
            }
        }
        Ok(Reply::Finished { choice: self.idx, reason, stop }.send()?)
    }

    fn token(&self, drawn: &Candidate) -> Result<Token> {
        let others = self.stream.top().map(|top| top.candidates).unwrap_or_default();
        let other = |one: &Candidate| {
            Ok(Other { id: one.token, bytes: self.model.token_bytes(one.token)?, logprob: one.logprob })
        };
        Ok(Token {
            id: drawn.token,
            bytes: self.model.token_bytes(drawn.token)?,
            logprob: drawn.logprob,
            top: others.iter().map(other).collect::<Result<_>>()?,
        })
    }
}
