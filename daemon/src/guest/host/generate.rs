//! `generate`: whole generations, many at once, without a crossing for each token.

use std::sync::Arc;

use futures_util::future::try_join_all;
use tokio::sync::OwnedMutexGuard;
use trellis_engine::account::HostCharge;
use trellis_engine::batch::{Candidate, Drawn, Token};
use trellis_engine::model::{DecodeStream, SpecialText, Tokenizer};
use trellis_engine::sampling::Sampler;
use trellis_engine::{Ahead, Context, EngineError, MaskSource, Pull, RunKey, RunSettings};

use super::contexts::lock;
use super::convert::{check_stop_tokens, count, finish_reason, invalid};
use super::looks;
use super::mixtures::{Members, borrowed, no_guesses};
use super::paid::Paid;
use super::speculation::Speculation;
use super::stop_texts::{Scanned, StopTexts};
use super::types::{Given, GuestContext, HostError, Other};
use crate::guest::bindings::trellis::host::decoding::Distribution;
use crate::guest::bindings::trellis::host::streams::{Completion, Emit, FinishReason, GenerateRequest, Keep};
use crate::guest::io::{GuestOutput, OutputSender};
use crate::guest::log::pieces;
use crate::guest::store::GuestState;

/// Stop texts of one generation. With their length it bounds the search after each token.
const N_STOP_TEXTS_MAX: usize = 16;

/// The longest stop text.
const STOP_TEXT_BYTES_MAX: usize = 256;

/// Where text goes while it is made.
struct Client {
    output: OutputSender,
    piece_bytes: usize,
    /// What has not been sent yet.
    unsent: String,
}

/// What a context was when it was looked at last: another says that something else has changed it since.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Edition {
    n_tokens: usize,
    n_truncations: u64,
}

impl Edition {
    fn of(context: &Context) -> Self {
        Self { n_tokens: context.tokens().len(), n_truncations: context.n_truncations() }
    }
}

/// One generation in progress. What waits for it may be given up and be begun again: it goes on where it was.
pub(crate) struct Generation {
    /// The context, and the others of a mixture, with their models: the generation may be all that its guest has of them.
    members: Vec<Other>,
    /// What they were when it left off.
    editions: Vec<Edition>,
    /// Tokens of each before the generation.
    n_before: Vec<usize>,
    writing: Writing,
    /// It may be all that draws with it.
    given: Given,
}

/// The contexts of a generation while it runs.
struct Held<'a> {
    contexts: Vec<OwnedMutexGuard<Context>>,
    editions: &'a mut [Edition],
}

/// What a generation has drawn, and how it goes on.
struct Writing {
    key: RunKey,
    settings: RunSettings,
    speculation: Option<Speculation>,
    decoder: DecodeStream,
    stops: StopTexts,
    client: Option<Client>,
    keep: Keep,
    tokens: Vec<Token>,
    logprobs: Vec<f32>,
    /// Of all of them together.
    logprob: f64,
    /// What was looked at in their places.
    tops: Vec<Distribution>,
    /// Of all that, and of what the generation has been given.
    paid: Paid,
    /// Bytes of all text that was drawn.
    n_text_bytes: usize,
    /// Whether tokens may be cut off with a stop text.
    is_cut: bool,
    /// How many they were after each token, where that is; none where it ends within a character.
    ends: Vec<Option<usize>>,
    /// Up to the end.
    text: String,
    finish: Option<FinishReason>,
}

impl GuestState {
    /// Runs all requests to their end. After an error the contexts are as they were, though text may have
    /// been sent.
    pub(super) async fn generate_all(
        &mut self,
        requests: Vec<GenerateRequest>,
    ) -> Result<Vec<Completion>, HostError> {
        let mut generations = self.prepare_all(requests)?;
        match try_join_all(generations.iter_mut().map(Generation::run)).await {
            Ok(finishes) => {
                let completions = generations.into_iter().zip(finishes).map(|(one, finish)| {
                    let (completion, charge) = one.complete(finish);
                    self.answer.push(charge);
                    completion
                });
                Ok(completions.collect())
            }
            Err(error) => {
                for generation in &mut generations {
                    // What went wrong first is what the guest is told. The others are as they were all the same.
                    let _ = generation.undo().await;
                }
                Err(error)
            }
        }
    }

    /// Checks all requests; nothing is drawn yet.
    pub(super) fn prepare_all(
        &mut self,
        requests: Vec<GenerateRequest>,
    ) -> Result<Vec<Generation>, HostError> {
        let contexts =
            self.lock_members(requests.iter().map(|request| (&request.context, &request.others)))?;
        requests.into_iter().zip(contexts).map(|(request, members)| self.prepare(request, members)).collect()
    }

    fn prepare(&mut self, request: GenerateRequest, members: Members) -> Result<Generation, HostError> {
        let Members { first: context, others } = members;
        let mut sampler = self.settings_for(&request.sampler, &context)?;
        if let Some(seed) = request.seed {
            Arc::make_mut(&mut sampler).seed = seed;
        }
        self.check_members(&context, &others, &sampler)?;
        if !others.is_empty() && request.speculation.is_some() {
            return Err(no_guesses());
        }
        looks::put_on(&mut sampler, context.model(), request.top, Vec::new())?;
        check_stop_tokens(context.model(), &request.stop_tokens)?;
        let given = self.table.get(&request.sampler)?.given.clone();
        check_stop_texts(&request.stop_texts)?;
        let client = match request.emit {
            Emit::Nothing => None,
            Emit::Text => Some(Client {
                output: self.output.clone(),
                piece_bytes: self.limits.output_piece_bytes(),
                unsent: String::new(),
            }),
        };
        // Decoding runs free to the end only where nothing but the engine can end or delay it.
        let own_bytes = own_bytes(&request, &sampler);
        let speculation = self.speculation(request.speculation, &context)?;
        let is_free = request.stop_texts.is_empty() && client.is_none() && speculation.is_none();
        let n_left = request.max_tokens.map_or(usize::MAX, |n| n as usize).min(context.n_free());
        let n_bytes = own_bytes + looks::n_bytes(&sampler.looks, n_left);
        let paid = Paid::new(&self.owner.account, n_bytes)?;
        let ahead = if is_free { Ahead::Unbounded } else { Ahead::Adaptive };
        let editions: Vec<_> =
            std::iter::once(&context).chain(&others).map(|context| Edition::of(context)).collect();
        let members = std::iter::once(&request.context).chain(&request.others).map(|member| {
            let GuestContext { cell, model } = self.table.get(member)?;
            Ok((cell.clone(), model.clone()))
        });
        Ok(Generation {
            members: members.collect::<Result<_, HostError>>()?,
            n_before: editions.iter().map(|edition| edition.n_tokens).collect(),
            editions,
            writing: Writing {
                key: self.next_run_key(),
                settings: RunSettings {
                    sampler,
                    stop_tokens: request.stop_tokens.into(),
                    n_tokens_max: request.max_tokens.map(|n| n as usize),
                    ahead,
                    masks: MaskSource::Sampler,
                },
                speculation,
                decoder: DecodeStream::new(SpecialText::Skip),
                is_cut: matches!(request.keep, Keep::Text) && !request.stop_texts.is_empty(),
                stops: StopTexts::new(request.stop_texts),
                client,
                keep: request.keep,
                tokens: Vec::new(),
                logprobs: Vec::new(),
                logprob: 0.0,
                tops: Vec::new(),
                paid,
                n_text_bytes: 0,
                ends: Vec::new(),
                text: String::new(),
                finish: (request.max_tokens == Some(0)).then_some(FinishReason::MaxTokens),
            },
            given,
        })
    }
}

/// The host memory of a generation that has drawn nothing. Any number of them may lie behind one handle, each with settings of its
/// own.
fn own_bytes(request: &GenerateRequest, sampler: &Sampler) -> usize {
    let of_member = size_of::<Other>() + size_of::<Edition>() + size_of::<usize>();
    let stop_texts = request.stop_texts.iter().map(|text| size_of::<String>() + text.len());
    size_of::<Generation>()
        + sampler.n_bytes()
        + (1 + request.others.len()) * of_member
        + size_of_val(&*request.stop_tokens)
        + stop_texts.sum::<usize>()
}

fn check_stop_texts(texts: &[String]) -> Result<(), HostError> {
    if texts.len() > N_STOP_TEXTS_MAX {
        return Err(invalid("stop-texts", texts.len(), format!("at most {N_STOP_TEXTS_MAX}")));
    }
    match texts.iter().find(|stop| stop.is_empty() || stop.len() > STOP_TEXT_BYTES_MAX) {
        Some(stop) => {
            let expected = format!("1 to {STOP_TEXT_BYTES_MAX} bytes each");
            Err(invalid("stop-texts", format!("{stop:?}"), expected))
        }
        None => Ok(()),
    }
}

impl<'a> Held<'a> {
    /// Locks the contexts, which have to be what they were.
    fn lock(members: &[Other], editions: &'a mut [Edition]) -> Result<Self, HostError> {
        let contexts: Vec<_> = members.iter().map(|(cell, _)| lock(cell)).collect();
        match contexts.iter().zip(editions.iter()).all(|(context, edition)| Edition::of(context) == *edition)
        {
            true => Ok(Self { contexts, editions }),
            false => {
                let expected = "one that nothing else changes while its generation is under way";
                Err(invalid("context", "one that was changed", expected))
            }
        }
    }

    /// Keeps of what was drawn so many tokens.
    async fn keep(&mut self, n_before: &[usize], n_kept: usize) -> Result<(), EngineError> {
        for (context, n_before) in self.contexts.iter_mut().zip(n_before) {
            context.truncate(n_before + n_kept).await?;
        }
        Ok(())
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        for (context, edition) in self.contexts.iter().zip(&mut *self.editions) {
            *edition = Edition::of(context);
        }
    }
}

impl Generation {
    /// Has the engine decode, where it can without being asked for each token.
    pub(super) async fn start(&mut self) -> Result<(), HostError> {
        let writing = &self.writing;
        if writing.speculation.is_some() || self.members.len() > 1 || writing.finish.is_some() {
            return Ok(());
        }
        let mut held = Held::lock(&self.members, &mut self.editions)?;
        held.contexts[0].keep_to(self.given.rule());
        Ok(held.contexts[0].start(writing.key, || writing.settings.clone()).await?)
    }

    /// Goes on to the end.
    pub(super) async fn run(&mut self) -> Result<FinishReason, HostError> {
        Ok(self.run_to(usize::MAX).await?.expect("there are never so many tokens"))
    }

    /// Goes on until there are so many tokens; why it ended, if it did.
    pub(super) async fn run_to(&mut self, n_tokens: usize) -> Result<Option<FinishReason>, HostError> {
        let mut held = Held::lock(&self.members, &mut self.editions)?;
        // Something else may have drawn nothing under another rule since.
        held.contexts[0].keep_to(self.given.rule());
        let Some(finish) = self.writing.go_on(&mut held.contexts, n_tokens).await? else { return Ok(None) };
        let n_kept = self.writing.n_tokens_kept(finish);
        // The engine knows nothing of stop texts: this makes it forget what it decoded ahead as well.
        if n_kept < self.writing.tokens.len() || matches!(finish, FinishReason::StopText(_)) {
            held.keep(&self.n_before, n_kept).await?;
        }
        Ok(Some(finish))
    }

    /// Ends it where it is.
    pub(super) async fn cancel(&mut self) -> Result<FinishReason, HostError> {
        let finish = self.writing.end(FinishReason::Cancelled);
        let mut held = Held::lock(&self.members, &mut self.editions)?;
        // The engine forgets what it decoded ahead.
        held.keep(&self.n_before, self.writing.n_tokens_kept(finish)).await?;
        self.writing.flush().await?;
        Ok(finish)
    }

    /// Has the engine decode no further.
    pub(super) async fn give_up(&mut self) {
        let n_drawn = self
            .writing
            .finish
            .map_or(self.writing.tokens.len(), |finish| self.writing.n_tokens_kept(finish));
        if let Ok(mut held) = Held::lock(&self.members, &mut self.editions) {
            // What fails here fails whoever asks the context next.
            let _ = held.keep(&self.n_before, n_drawn).await;
        }
    }

    /// Leaves the contexts as they were before.
    ///
    /// # Errors
    /// They were changed meanwhile, or the engine has failed or stopped.
    pub(super) async fn undo(&mut self) -> Result<(), HostError> {
        Ok(Held::lock(&self.members, &mut self.editions)?.keep(&self.n_before, 0).await?)
    }

    /// Tokens that were drawn, and the log-probability of all of them.
    pub(super) fn progress(&self) -> (usize, f64) {
        (self.writing.tokens.len(), self.writing.logprob)
    }

    /// What it has come to, which is paid for until the guest has it.
    pub(super) fn complete(self, finish: FinishReason) -> (Completion, HostCharge) {
        let Writing { tokens, logprobs, tops, text, paid, .. } = self.writing;
        (Completion { tokens, logprobs, tops, text, finish }, paid.into_charge())
    }
}

impl Writing {
    async fn go_on(
        &mut self,
        contexts: &mut [OwnedMutexGuard<Context>],
        n_tokens: usize,
    ) -> Result<Option<FinishReason>, HostError> {
        let (context, others) = contexts.split_first_mut().expect("a generation has a context");
        loop {
            // First: whoever gave up may have done so before the last text was sent.
            self.flush().await?;
            if self.finish.is_some() || self.tokens.len() >= n_tokens {
                return Ok(self.finish);
            }
            let n_left = self.settings.n_tokens_max.map(|n| n - self.tokens.len());
            let settings = || RunSettings { n_tokens_max: n_left, ..self.settings.clone() };
            let pulled = match &mut self.speculation {
                Some(speculation) => speculation.pull(context, self.key, n_left, settings).await?,
                None if others.is_empty() => context.pull(self.key, settings).await?,
                None => context.pull_mixed(&mut borrowed(others), self.key, settings).await?,
            };
            match pulled {
                Pull::Token(drawn) => self.take(drawn, &context.model().model().tokenizer),
                Pull::Finished(finish) => {
                    self.end(finish_reason(finish));
                }
            }
            let drawn_bytes = self.drawn_bytes();
            self.paid.cover(drawn_bytes)?;
        }
    }

    /// The host memory of what was drawn, but for what was looked at, which is paid for from the beginning.
    fn drawn_bytes(&self) -> usize {
        self.tokens.capacity() * size_of::<Token>()
            + self.logprobs.capacity() * size_of::<f32>()
            + self.ends.capacity() * size_of::<Option<usize>>()
            + self.text.capacity()
            + self.client.as_ref().map_or(0, |client| client.unsent.capacity())
    }

    fn take(&mut self, drawn: Drawn, tokenizer: &Tokenizer) {
        let Drawn { candidate: Candidate { token, logprob }, seen, .. } = drawn;
        self.tokens.push(token);
        self.logprobs.push(logprob);
        self.logprob += f64::from(logprob);
        self.tops.extend(looks::top_of(seen));
        if self.settings.stop_tokens.contains(&token) {
            self.end(FinishReason::StopToken(token));
            return;
        }
        let piece = self.decoder.push(tokenizer, token);
        self.n_text_bytes += piece.len();
        if self.is_cut {
            self.ends.push(self.decoder.is_whole().then_some(self.n_text_bytes));
        }
        self.scan(&piece);
        if self.finish.is_none() && self.settings.n_tokens_max == Some(self.tokens.len()) {
            self.end(FinishReason::MaxTokens);
        }
    }

    /// Ends for a reason, unless what is left of the text has another: which one it is.
    fn end(&mut self, finish: FinishReason) -> FinishReason {
        if let Some(finish) = self.finish {
            return finish;
        }
        let decoder = std::mem::replace(&mut self.decoder, DecodeStream::new(SpecialText::Skip));
        self.scan(&decoder.finish());
        if let Some(finish) = self.finish {
            return finish;
        }
        let held = std::mem::replace(&mut self.stops, StopTexts::new(Vec::new())).finish();
        self.show(&held);
        *self.finish.insert(finish)
    }

    /// How many of the tokens the context keeps.
    fn n_tokens_kept(&self, finish: FinishReason) -> usize {
        match (self.keep, finish) {
            (Keep::Text, FinishReason::StopText(_)) => n_within(&self.ends, self.text.len()),
            (Keep::Text, FinishReason::StopToken(_)) => self.tokens.len() - 1,
            _ => self.tokens.len(),
        }
    }

    /// Adds text; ends where a stop text is complete.
    fn scan(&mut self, piece: &str) {
        match self.stops.push(piece) {
            Scanned::Text(text) => self.show(&text),
            Scanned::Stopped { text_idx, rest } => {
                self.show(&rest);
                self.finish = Some(FinishReason::StopText(count(text_idx)));
            }
        }
    }

    fn show(&mut self, text: &str) {
        self.text.push_str(text);
        if let Some(client) = &mut self.client {
            client.unsent.push_str(text);
        }
    }

    /// Sends what the client has not got yet.
    async fn flush(&mut self) -> Result<(), HostError> {
        let Some(Client { output, piece_bytes, unsent }) = &mut self.client else { return Ok(()) };
        while !unsent.is_empty() {
            let piece = pieces(unsent, *piece_bytes).next().unwrap_or_default().to_owned();
            let n_bytes = piece.len();
            output.send(GuestOutput::Text(piece)).await?;
            unsent.drain(..n_bytes);
        }
        Ok(())
    }
}

/// How many tokens it takes for as many of the first `n_bytes` bytes of a text as whole tokens have, given where the text
/// of each of its tokens ends.
fn n_within(ends: &[Option<usize>], n_bytes: usize) -> usize {
    let mut within = (0, 0);
    for (idx, end) in ends.iter().enumerate() {
        if let Some(end) = *end
            && (within.1 + 1..=n_bytes).contains(&end)
        {
            within = (idx + 1, end);
        }
    }
    within.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_keeps_whole_tokens_and_none_without_text_at_its_end() {
        // Three letters, nothing, a character in two tokens, a letter.
        let ends = [Some(3), Some(3), None, Some(5), Some(6)];
        let cuts = [0, 2, 3, 4, 5, 6, 9].map(|n_bytes| n_within(&ends, n_bytes));
        assert_eq!(cuts, [0, 0, 1, 1, 4, 5, 5]);
        assert_eq!(n_within(&[], 0), 0);
    }
}
