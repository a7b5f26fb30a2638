//! Whole generations in one call.

use crate::bindings::trellis::host::streams as raw;
use crate::context::only;
use crate::{Context, Result, Sampler, Token};

pub use raw::Completion;

/// A generation to be run, made by [`Context::generate`]. A stop token of the model ends it unless others are
/// set. The tokens are appended to the context.
///
/// ```no_run
/// # use trellis_guest::{Context, Result, Sampler};
/// # fn f(context: &Context) -> Result<()> {
/// let line = context.generate(&Sampler::greedy()).max_tokens(64).stop_at("\n").run()?.text;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a generation does nothing before `run`"]
pub struct Generate<'a> {
    context: &'a Context,
    sampler: &'a Sampler,
    max_tokens: Option<u32>,
    stop_tokens: Vec<Token>,
    stop_strings: Vec<String>,
    emit: raw::Emit,
}

impl<'a> Generate<'a> {
    pub(crate) fn new(context: &'a Context, sampler: &'a Sampler) -> Self {
        let stop_tokens = context.model().info().stop_tokens.clone();
        let emit = raw::Emit::Nothing;
        Self { context, sampler, max_tokens: None, stop_tokens, stop_strings: Vec::new(), emit }
    }

    /// The most tokens; as many as fit unless set.
    pub fn max_tokens(mut self, n: u32) -> Self {
        self.max_tokens = Some(n);
        self
    }

    /// Ends at this text, and leaves it out of the completion's text. May be given more than once.
    pub fn stop_at(mut self, text: &str) -> Self {
        self.stop_strings.push(text.to_owned());
        self
    }

    /// The tokens that end the generation, in place of the model's.
    pub fn stop_tokens(mut self, tokens: &[Token]) -> Self {
        self.stop_tokens = tokens.to_vec();
        self
    }

    /// Also sends the text to the client while it is made.
    pub fn emit(mut self) -> Self {
        self.emit = raw::Emit::Text;
        self
    }

    /// Runs the generation.
    ///
    /// # Errors
    /// [`EmptyContext`](crate::Error::EmptyContext), [`NoToken`](crate::Error::NoToken),
    /// [`BudgetExceeded`](crate::Error::BudgetExceeded), [`Cancelled`](crate::Error::Cancelled).
    pub fn run(self) -> Result<Completion> {
        generate_all([self]).map(only)
    }
}

/// Runs many generations in one batch; each goes on to its own end. A context may be named once only.
///
/// # Errors
/// Those of [`Generate::run`].
pub fn generate_all<'a>(requests: impl IntoIterator<Item = Generate<'a>>) -> Result<Vec<Completion>> {
    let requests: Vec<_> = requests
        .into_iter()
        .map(|request| raw::GenerateRequest {
            context: request.context.raw(),
            sampler: request.sampler.raw(),
            max_tokens: request.max_tokens,
            stop_tokens: request.stop_tokens,
            stop_strings: request.stop_strings,
            emit: request.emit,
        })
        .collect();
    Ok(raw::generate(&requests)?)
}

impl Completion {
    /// The log-probability of the average token, in nats: how sure the model was, whatever the length.
    pub fn mean_logprob(&self) -> f32 {
        self.logprob / self.tokens.len().max(1) as f32
    }
}
