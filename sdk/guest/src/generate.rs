//! Whole generations in one call.

use crate::bindings::trellis::host::streams as raw;
use crate::context::only;
use crate::{Context, FinishReason, Guesses, Result, Sampler, Token};

#[doc(inline)]
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
    seed: Option<u64>,
    max_tokens: Option<u32>,
    stop_tokens: Vec<Token>,
    stop_texts: Vec<String>,
    keep: raw::Keep,
    emit: raw::Emit,
    top: u32,
    guesses: Option<Guesses<'a>>,
    others: Vec<&'a Context>,
}

impl<'a> Generate<'a> {
    pub(crate) fn new(context: &'a Context, sampler: &'a Sampler) -> Self {
        let stop_tokens = context.model().info().stop_tokens.clone();
        let (keep, emit) = (raw::Keep::Tokens, raw::Emit::Nothing);
        let (seed, max_tokens, stop_texts) = (None, None, Vec::new());
        let (top, guesses, others) = (0, None, Vec::new());
        Self { context, sampler, seed, max_tokens, stop_tokens, stop_texts, keep, emit, top, guesses, others }
    }

    /// Of a mixture with these others.
    pub(crate) fn mixed_with(mut self, others: Vec<&'a Context>) -> Self {
        self.others = others;
        self
    }

    /// Draws with this seed, in place of the sampler's.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// The most tokens; as many as fit unless set.
    pub fn max_tokens(mut self, n: u32) -> Self {
        self.max_tokens = Some(n);
        self
    }

    /// Ends at this text of 1 to 256 bytes, and leaves it out of the completion's text. May be given more than once, up to 16 times.
    pub fn stop_at(mut self, text: &str) -> Self {
        self.stop_texts.push(text.to_owned());
        self
    }

    /// The tokens that end the generation, at most 256, in place of the model's.
    pub fn stop_tokens(mut self, tokens: &[Token]) -> Self {
        self.stop_tokens = tokens.to_vec();
        self
    }

    /// Leaves in the context only the tokens of the completion's text: not the stop token, nor what belongs to a stop
    /// text. A token that the end of the text cuts in two goes as a whole.
    pub fn keep_text_only(mut self) -> Self {
        self.keep = raw::Keep::Text;
        self
    }

    /// Also sends the text to the client while it is made.
    pub fn emit(mut self) -> Self {
        self.emit = raw::Emit::Text;
        self
    }

    /// Also looks at the `n` most probable tokens in the place of each token, at most 20: [`Completion::tops`]. They
    /// are the model's own, whatever the sampler makes of them, and come with the tokens, without a step more.
    pub fn top(mut self, n: u32) -> Self {
        self.top = n;
        self
    }

    /// Guesses at what comes, which the model verifies several at a time. The tokens stay the same.
    pub fn guess_by(mut self, guesses: Guesses<'a>) -> Self {
        self.guesses = Some(guesses);
        self
    }

    /// Runs the generation. After an error the context is as it was, though text may have been sent.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Error::InvalidArgument) for too many stop tokens, stop texts or tokens to look at,
    /// for a stop text that is too long or empty, for guesses that are not as they may be, and for a context that is
    /// named twice; [`TokenOutOfRange`](crate::Error::TokenOutOfRange) for a stop token or one of the sampler's bias;
    /// [`ModelMismatch`](crate::Error::ModelMismatch) for what the sampler was given of another model, and for a draft
    /// with another tokenizer; [`EmptyContext`](crate::Error::EmptyContext), [`NoToken`](crate::Error::NoToken),
    /// [`BudgetExceeded`](crate::Error::BudgetExceeded), [`Cancelled`](crate::Error::Cancelled),
    /// [`EngineFailed`](crate::Error::EngineFailed).
    pub fn run(self) -> Result<Completion> {
        generate_all([self]).map(only)
    }
}

/// Runs many generations in one batch; each goes on to its own end. A context may be named once only.
///
/// # Errors
/// Those of [`Generate::run`].
pub fn generate_all<'a>(requests: impl IntoIterator<Item = Generate<'a>>) -> Result<Vec<Completion>> {
    Ok(raw::generate(&raw_requests(requests))?)
}

pub(crate) fn raw_requests<'a>(
    requests: impl IntoIterator<Item = Generate<'a>>,
) -> Vec<raw::GenerateRequest<'a>> {
    let raw_request = |request: Generate<'a>| raw::GenerateRequest {
        context: request.context.raw(),
        sampler: request.sampler.raw(),
        seed: request.seed,
        max_tokens: request.max_tokens,
        stop_tokens: request.stop_tokens,
        stop_texts: request.stop_texts,
        keep: request.keep,
        emit: request.emit,
        top: request.top,
        speculation: request.guesses.map(Guesses::into_raw),
        others: request.others.into_iter().map(Context::raw).collect(),
    };
    requests.into_iter().map(raw_request).collect()
}

impl Completion {
    /// The log-probability of all tokens together, in nats.
    pub fn logprob(&self) -> f32 {
        self.logprobs.iter().map(|&logprob| f64::from(logprob)).sum::<f64>() as f32
    }

    /// The log-probability of the average token, in nats: how sure the model was, whatever the length.
    pub fn mean_logprob(&self) -> f32 {
        self.logprob() / self.tokens.len().max(1) as f32
    }

    /// Whether it came to its own end, a stop token, a stop text or that of its constraint, and not to the end of what it might
    /// have.
    pub fn is_finished(&self) -> bool {
        matches!(
            self.finish,
            FinishReason::StopToken(_) | FinishReason::StopText(_) | FinishReason::GrammarComplete
        )
    }
}
