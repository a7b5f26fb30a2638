//! Token sequences with their KV cache.

use crate::bindings::trellis::host::contexts as raw;
pub use crate::bindings::trellis::host::contexts::Positions;
use crate::bindings::trellis::host::models::SpecialTokens;
use crate::random::fork_seed;
use crate::session::check_call;
use crate::{
    Beams, Candidate, Chat, ChatEnd, Distribution, Generate, GuessTree, Model, Pooling, Result, Sampler,
    Steering, StreamOptions, Token,
};
use crate::{decoding, streams};

/// A token sequence with its KV cache, freed when dropped.
///
/// Methods take `&self`: the sequence lives in the host, and a [`TokenStream`](crate::TokenStream) may be
/// open on it while the guest looks at it, forks it or cuts it.
#[derive(Debug)]
pub struct Context {
    raw: raw::Context,
    model: Model,
}

impl Context {
    pub(crate) fn create(model: &Model) -> Result<Self> {
        Ok(Self { raw: raw::Context::create(model.raw())?, model: model.clone() })
    }

    pub(crate) fn open(model: &Model, name: &str) -> Result<Self> {
        Ok(Self { raw: raw::Context::open(model.raw(), name)?, model: model.clone() })
    }

    pub(crate) fn from_raw(raw: raw::Context, model: &Model) -> Self {
        Self { raw, model: model.clone() }
    }

    pub(crate) fn raw(&self) -> &raw::Context {
        &self.raw
    }

    /// The model that the context belongs to.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Appends tokens. They are computed when something asks for their outcome.
    ///
    /// # Errors
    /// [`TokenOutOfRange`](crate::Error::TokenOutOfRange), [`ContextFull`](crate::Error::ContextFull),
    /// [`BudgetExceeded`](crate::Error::BudgetExceeded).
    pub fn append(&self, tokens: &[Token]) -> Result {
        if tokens.is_empty() {
            return Ok(());
        }
        Ok(self.raw.append(tokens)?)
    }

    /// Appends a text and returns how many tokens it became. What looks like a special token stays text.
    ///
    /// # Errors
    /// As [`append`](Self::append) and [`Model::encode`].
    pub fn append_text(&self, text: &str) -> Result<u32> {
        check_call(text.len())?;
        Ok(self.raw.append_text(text, SpecialTokens::AsText)?)
    }

    /// Appends a text in which names such as `<|end|>` stand for special tokens.
    ///
    /// # Errors
    /// As [`append_text`](Self::append_text).
    pub fn append_markup(&self, text: &str) -> Result<u32> {
        check_call(text.len())?;
        Ok(self.raw.append_text(text, SpecialTokens::Parse)?)
    }

    /// Makes the context hold a conversation that ends with the beginning of the assistant's answer. What it
    /// held already of that conversation is kept and not computed again.
    ///
    /// # Errors
    /// Those of [`Model::encode_chat`] and [`append`](Self::append).
    pub fn set_chat(&self, chat: &Chat) -> Result {
        self.set_tokens(&self.model.encode_chat(chat, ChatEnd::Assistant)?)
    }

    /// Makes the context hold these tokens. The longest common prefix is kept and not computed again.
    ///
    /// # Errors
    /// As [`append`](Self::append).
    pub fn set_tokens(&self, tokens: &[Token]) -> Result {
        let n_common = self.tokens().iter().zip(tokens).take_while(|(held, wanted)| held == wanted).count();
        if n_common < self.length() as usize {
            self.truncate(n_common as u32)?;
        }
        self.append(&tokens[n_common..])
    }

    /// A second context with the same tokens. The KV cache is shared, not copied.
    ///
    /// # Errors
    /// [`BudgetExceeded`](crate::Error::BudgetExceeded).
    pub fn fork(&self) -> Result<Self> {
        Ok(Self::from_raw(self.raw.fork()?, &self.model))
    }

    /// So many forks, each with a sampler: the same settings, and seeds of their own, those of [`fork_seed`]. The first
    /// one draws what this context would draw with `sampler`.
    ///
    /// ```no_run
    /// # use trellis_guest::{Context, Result, Sampler, generate_all};
    /// # fn f(prompt: &Context, sampler: &Sampler) -> Result<()> {
    /// let forks = prompt.forks(4, sampler)?;
    /// let texts = generate_all(forks.iter().map(|(fork, sampler)| fork.generate(sampler)))?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`fork`](Self::fork).
    pub fn forks(&self, n: u64, sampler: &Sampler) -> Result<Vec<(Self, Sampler)>> {
        (0..n).map(|i| Ok((self.fork()?, sampler.with_seed(fork_seed(sampler.seed(), i))))).collect()
    }

    /// Keeps the first `n_tokens` tokens.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Error::InvalidArgument) when there are fewer.
    pub fn truncate(&self, n_tokens: u32) -> Result {
        Ok(self.raw.truncate(n_tokens)?)
    }

    /// Takes the tokens `start..end` out of the context: tokens that are appended from now on do not see them, and pages of
    /// which nothing is left come free. Those that are left, the last one aside, have seen them, computed by then or not. See
    /// [`SlidingWindow`](crate::SlidingWindow) for a context that goes on for ever.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Error::InvalidArgument) for tokens that are not there or that a constraint has, for a model
    /// whose layers see windows of positions, and where closing up would leave more than 8 stretches of tokens between holes;
    /// [`BudgetExceeded`](crate::Error::BudgetExceeded).
    pub fn evict(&self, start: u32, end: u32, positions: Positions) -> Result {
        Ok(self.raw.evict(start, end, positions)?)
    }

    /// Steers the tokens from position `start` on, those included that come later: what a [`Steering`] holds is added to what
    /// layers make of them, in the place of what was added before. Tokens before `start` stay as they are; what was computed
    /// otherwise from there on is computed anew. The next token is drawn from the last one: to steer an answer, `start` is
    /// one less than the length of its prompt.
    ///
    /// ```no_run
    /// # use trellis_guest::{Context, Pooling, Result, Steering, hidden_all};
    /// # fn f(prompt: &Context, joy: &Context, grief: &Context) -> Result<()> {
    /// let states = hidden_all([joy, grief], &[4], Pooling::MeanFrom(1))?;
    /// let brighter = Steering::difference(&[4], &states[0], &states[1]).times(2.0);
    /// prompt.steer(&brighter, prompt.length() - 1)?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Error::InvalidArgument) for a layer that the model does not have, a vector of another length
    /// than its hidden states, a number that is not finite, a `start` past the end, and a context out of which tokens were
    /// evicted; [`BudgetExceeded`](crate::Error::BudgetExceeded) for host memory, for what one call takes, and for what a step
    /// brings to the device.
    pub fn steer(&self, steering: &Steering, start: u32) -> Result {
        check_call(steering.n_bytes())?;
        Ok(self.raw.steer(steering.raw(), start)?)
    }

    /// How many tokens there are.
    pub fn length(&self) -> u32 {
        self.raw.length()
    }

    /// How many tokens the context can hold. After an eviction that keeps positions it holds fewer: what is appended goes on
    /// from the highest position, and positions end here.
    pub fn capacity(&self) -> u32 {
        self.raw.capacity()
    }

    /// All tokens.
    pub fn tokens(&self) -> Vec<Token> {
        self.raw.tokens(0, u32::MAX)
    }

    /// The tokens from this position to the end.
    pub fn tokens_from(&self, start: u32) -> Vec<Token> {
        self.raw.tokens(start, u32::MAX)
    }

    /// The numbers that the program of the last draw reported: at most 4, none where no program drew.
    pub fn reports(&self) -> Vec<f32> {
        self.raw.reports()
    }

    /// Computes the KV cache of all tokens now, so that forks made later share it.
    ///
    /// # Errors
    /// [`BudgetExceeded`](crate::Error::BudgetExceeded).
    pub fn prefill(&self) -> Result {
        Ok(self.raw.prefill()?)
    }

    /// Keeps a copy under this name for all guests of the same user, until [`forget`] is called, or the
    /// daemon stops and does not keep saved contexts on disk. An older one of that name is replaced.
    ///
    /// # Errors
    /// [`BudgetExceeded`](crate::Error::BudgetExceeded).
    pub fn save(&self, name: &str) -> Result {
        Ok(self.raw.save(name)?)
    }

    /// A search for the most probable continuations, over so many hypotheses at once. See [`Beams`].
    pub fn beams(&self, n_beams: u32) -> Beams<'_> {
        Beams::new(self, n_beams)
    }

    /// Declarative decoding: the whole generation in one call. See [`Generate`].
    pub fn generate<'a>(&'a self, sampler: &'a Sampler) -> Generate<'a> {
        Generate::new(self, sampler)
    }

    /// Scripted decoding: one token at a time, decoded ahead of the guest. See [`StreamOptions`].
    pub fn stream<'a>(&'a self, sampler: &'a Sampler) -> StreamOptions<'a> {
        streams::StreamOptions::new(self, sampler)
    }

    /// Draws one token and appends it. For many contexts at once see [`step_all`](crate::step_all).
    ///
    /// # Errors
    /// [`ContextFull`](crate::Error::ContextFull), [`NoToken`](crate::Error::NoToken) and what prefilling
    /// can return.
    pub fn step(&self, sampler: &Sampler) -> Result<Candidate> {
        decoding::step_all([(self, sampler)]).map(only)
    }

    /// Draws tokens and appends them, in one step of the model, as long as each is the one that was guessed: what is
    /// given is what so many calls of [`step`](Self::step) would give, at least one token and at most one more than were
    /// guessed. A wrong guess changes nothing but the cost. For many contexts at once see
    /// [`speculate_all`](crate::speculate_all).
    ///
    /// A draw depends on the seed, the position and what comes before. So a small model guesses best that draws from the
    /// same tokens with the same sampler. Tokens that end an answer are drawn like others: look for them in what is given.
    ///
    /// # Errors
    /// Those of [`step`](Self::step); [`TokenOutOfRange`](crate::Error::TokenOutOfRange), and
    /// [`InvalidArgument`](crate::Error::InvalidArgument) for more than 15 tokens.
    pub fn speculate(&self, sampler: &Sampler, guess: &[Token]) -> Result<Vec<Candidate>> {
        decoding::speculate_all([(self, sampler, guess)]).map(only)
    }

    /// As [`speculate`](Self::speculate), with alternatives: what is drawn goes from guess to guess as long as there is one
    /// with its token. For many contexts at once see [`speculate_tree_all`](crate::speculate_tree_all).
    ///
    /// Each guess is computed as a token of its own, which reads the context for itself: of long contexts a chain that is right
    /// as often costs less.
    ///
    /// # Errors
    /// Those of [`step`](Self::step); [`TokenOutOfRange`](crate::Error::TokenOutOfRange), and
    /// [`InvalidArgument`](crate::Error::InvalidArgument) for more than 64 guesses, and for one that is more than 15 tokens
    /// behind the context.
    pub fn speculate_tree(&self, sampler: &Sampler, tree: &GuessTree) -> Result<Vec<Candidate>> {
        decoding::speculate_tree_all([(self, sampler, tree)]).map(only)
    }

    /// The `n` most probable next tokens, best first. For many contexts at once see
    /// [`top_all`](crate::top_all).
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Error::InvalidArgument) for an `n` that is not 1 to 1,024;
    /// [`EmptyContext`](crate::Error::EmptyContext).
    pub fn top(&self, n: u32) -> Result<Distribution> {
        decoding::top_all([self], n).map(only)
    }

    /// The log-probability of each token of a continuation, given all before it. The context stays as it is; what was
    /// computed is not computed again when it is appended.
    /// For many contexts at once see [`score_all`](crate::score_all).
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Error::InvalidArgument) when the continuation is empty,
    /// [`EmptyContext`](crate::Error::EmptyContext) when the context is, [`ContextFull`](crate::Error::ContextFull).
    pub fn score(&self, continuation: &[Token]) -> Result<Vec<f32>> {
        decoding::score_all([(self, continuation)]).map(only)
    }

    /// The `n` most probable tokens at the place of each token of a continuation, given all before it: what
    /// [`score`](Self::score) leaves out. For many contexts at once see [`tops_all`](crate::tops_all).
    ///
    /// # Errors
    /// Those of [`score`](Self::score) and [`top`](Self::top);
    /// [`InvalidArgument`](crate::Error::InvalidArgument) for more than 65,536 candidates in all.
    pub fn tops(&self, continuation: &[Token], n: u32) -> Result<Vec<Distribution>> {
        decoding::tops_all([(self, continuation)], n).map(only)
    }

    /// The log-probabilities of these tokens as the next one, in their order. For many contexts at once see
    /// [`logprobs_all`](crate::logprobs_all).
    ///
    /// # Errors
    /// [`TokenOutOfRange`](crate::Error::TokenOutOfRange), [`EmptyContext`](crate::Error::EmptyContext);
    /// [`InvalidArgument`](crate::Error::InvalidArgument) for more than 1024 tokens.
    pub fn logprobs(&self, tokens: &[Token]) -> Result<Vec<f32>> {
        decoding::logprobs_all([(self, tokens)]).map(only)
    }

    /// The log-probabilities of the whole vocabulary, `[vocab_size]`. Costs part of the token budget; prefer
    /// [`top`](Self::top). For many contexts at once see [`full_all`](crate::full_all).
    ///
    /// # Errors
    /// [`BudgetExceeded`](crate::Error::BudgetExceeded), [`EmptyContext`](crate::Error::EmptyContext).
    pub fn full(&self) -> Result<Vec<f32>> {
        decoding::full_all([self]).map(only)
    }

    /// The hidden state of the last token after the final norm, `[hidden_size]`. For many contexts at once see
    /// [`embedding_all`](crate::embedding_all).
    ///
    /// # Errors
    /// [`EmptyContext`](crate::Error::EmptyContext).
    pub fn embedding(&self) -> Result<Vec<f32>> {
        decoding::embedding_all([self]).map(only)
    }

    /// Hidden states of these layers, at most 8, each `[hidden_size]`: 0 is the embedding of the tokens, the model's
    /// `n_layers` what is left after the final norm, as `output_hidden_states` of Hugging Face transformers has them.
    /// Of the last token, or the mean over many, which are computed for it. For many contexts at once see
    /// [`hidden_all`](crate::hidden_all).
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Error::InvalidArgument) for more layers or one that the model does not have, for a
    /// mean from the end of the context on, and for one over a context out of which tokens were evicted.
    pub fn hidden(&self, layers: &[u32], pooling: Pooling) -> Result<Vec<Vec<f32>>> {
        decoding::hidden_all([self], layers, pooling).map(only)
    }

    /// The attention that the last token puts on each token of the context, `[length]`: the mean over the query heads of these
    /// layers, counted from 0. The numbers sum to 1. By it H2O, SnapKV and TOVA choose what to [`evict`](Self::evict). The last
    /// token is computed for it. For many contexts at once see [`attention_all`](crate::attention_all).
    ///
    /// # Errors
    /// [`EmptyContext`](crate::Error::EmptyContext); [`InvalidArgument`](crate::Error::InvalidArgument) for no layer, for one
    /// that the model does not have or that is named twice, and for more than 262144 tokens;
    /// [`BudgetExceeded`](crate::Error::BudgetExceeded).
    pub fn attention(&self, layers: &[u32]) -> Result<Vec<f32>> {
        decoding::attention_all([self], layers).map(only)
    }

    /// The log-probability of each token from position `start` on, at least 1, given all before it: of a prompt that is
    /// there. Computes those tokens, in a fork. A prompt that is not there yet is better scored from its first token on
    /// ([`score`](Self::score)), and then appended: that computes it once. Of a context out of which tokens were
    /// [evicted](Self::evict), positions are those of the tokens that are left, and what comes from `start` on is scored as if
    /// none had ever been between them.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Error::InvalidArgument) when no token is left from `start` on, as in an empty context;
    /// [`EmptyContext`](crate::Error::EmptyContext) when `start` is 0: nothing is given before the first token, which has no
    /// log-probability. Those of [`fork`](Self::fork) and [`score`](Self::score).
    pub fn prompt_logprobs(&self, start: u32) -> Result<Vec<f32>> {
        let (beginning, rest) = self.cut_at(start)?;
        beginning.score(&rest)
    }

    /// The `n` most probable tokens in the place of each token from position `start` on, as
    /// [`prompt_logprobs`](Self::prompt_logprobs).
    ///
    /// # Errors
    /// Those of [`prompt_logprobs`](Self::prompt_logprobs) and [`tops`](Self::tops).
    pub fn prompt_tops(&self, start: u32, n: u32) -> Result<Vec<Distribution>> {
        let (beginning, rest) = self.cut_at(start)?;
        beginning.tops(&rest, n)
    }

    /// A fork of what is before a position, and the tokens after it.
    fn cut_at(&self, start: u32) -> Result<(Self, Vec<Token>)> {
        let beginning = self.fork()?;
        beginning.truncate(start)?;
        Ok((beginning, self.tokens_from(start)))
    }
}

/// Forgets the context saved under this name.
///
/// # Errors
/// [`NotFound`](crate::Error::NotFound).
pub fn forget(name: &str) -> Result {
    crate::panics::expect_host();
    Ok(raw::forget(name)?)
}

/// The answer to a batch of one.
pub(crate) fn only<T>(answers: Vec<T>) -> T {
    let [answer] =
        <[T; 1]>::try_from(answers).unwrap_or_else(|_| panic!("the host answers each request once"));
    answer
}
