//! `generate`: whole generations, many at once, without a crossing for each token.

use std::sync::Arc;

use futures_util::future::try_join_all;
use tokio::sync::OwnedMutexGuard;
use trellis_engine::account::HostCharge;
use trellis_engine::batch::{Candidate, Drawn, Token};
use trellis_engine::model::{DecodeStream, SpecialText};
use trellis_engine::{Ahead, Context, EngineError, MaskSource, Pull, RunKey, RunSettings};

use super::convert::{check_stop_tokens, count, finish_reason, invalid};
use super::looks;
use super::mixtures::{Members, borrowed, no_guesses};
use super::session::send_text;
use super::speculation::Speculation;
use super::stop_texts::{Scanned, StopTexts};
use super::types::HostError;
use crate::guest::bindings::trellis::host::decoding::Distribution;
use crate::guest::bindings::trellis::host::streams::{Completion, Emit, FinishReason, GenerateRequest, Keep};
use crate::guest::io::OutputSender;
use crate::guest::store::GuestState;

/// Stop texts of one generation. With their length it bounds the search after each token.
const N_STOP_TEXTS_MAX: usize = 16;

/// The longest stop text.
const STOP_TEXT_BYTES_MAX: usize = 256;

/// Where text goes while it is made.
struct Client {
    output: OutputSender,
    piece_bytes: usize,
}

/// One generation in progress.
struct Generation {
    context: OwnedMutexGuard<Context>,
    /// The others of a mixture.
    others: Vec<OwnedMutexGuard<Context>>,
    /// Tokens of the context and of the others before the generation.
    n_before: Vec<usize>,
    key: RunKey,
    settings: RunSettings,
    speculation: Option<Speculation>,
    decoder: DecodeStream,
    stops: StopTexts,
    client: Option<Client>,
    keep: Keep,
    tokens: Vec<Token>,
    logprobs: Vec<f32>,
    /// What was looked at in their places, and its bytes.
    tops: Vec<Distribution>,
    _charge: Option<HostCharge>,
    /// Bytes of all text that was drawn.
    n_text_bytes: usize,
    /// How many they were after each token; none where it ends within a character.
    ends: Vec<Option<usize>>,
    /// Up to the end.
    text: String,
}

impl GuestState {
    /// Runs all requests to their end. After an error the contexts are as they were, though text may have
    /// been sent.
    pub(super) async fn generate_all(
        &mut self,
        requests: Vec<GenerateRequest>,
    ) -> Result<Vec<Completion>, HostError> {
        let contexts =
            self.lock_members(requests.iter().map(|request| (&request.context, &request.others)))?;
        let mut generations = requests
            .into_iter()
            .zip(contexts)
            .map(|(request, members)| self.prepare(request, members))
            .collect::<Result<Vec<_>, _>>()?;
        let finishes = try_join_all(generations.iter_mut().map(Generation::run)).await;
        match finishes {
            Ok(finishes) => {
                Ok(generations.into_iter().zip(finishes).map(|(one, finish)| one.complete(finish)).collect())
            }
            Err(error) => {
                for generation in &mut generations {
                    // What went wrong first is what the guest is told. The others are as they were all the same.
                    let _ = generation.keep_tokens(0).await;
                }
                Err(error)
            }
        }
    }

    fn prepare(&mut self, request: GenerateRequest, members: Members) -> Result<Generation, HostError> {
        let Members { first: mut context, others } = members;
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
        context.keep_to(self.table.get(&request.sampler)?.given.rule());
        check_stop_texts(&request.stop_texts)?;
        let client = match request.emit {
            Emit::Nothing => None,
            Emit::Text => {
                Some(Client { output: self.output.clone(), piece_bytes: self.limits.output_piece_bytes() })
            }
        };
        // Decoding runs free to the end only where nothing but the engine can end or delay it.
        let speculation = self.speculation(request.speculation, &context)?;
        let is_free = request.stop_texts.is_empty() && client.is_none() && speculation.is_none();
        let n_left = request.max_tokens.map_or(usize::MAX, |n| n as usize).min(context.n_free());
        let charge = looks::charge(&self.owner.account, &sampler.looks, n_left)?;
        let ahead = if is_free { Ahead::Unbounded } else { Ahead::Adaptive };
        Ok(Generation {
            n_before: std::iter::once(&context)
                .chain(&others)
                .map(|context| context.tokens().len())
                .collect(),
            context,
            others,
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
            stops: StopTexts::new(request.stop_texts),
            client,
            keep: request.keep,
            tokens: Vec::new(),
            logprobs: Vec::new(),
            tops: Vec::new(),
            _charge: charge,
            n_text_bytes: 0,
            ends: Vec::new(),
            text: String::new(),
        })
    }
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

impl Generation {
    async fn run(&mut self) -> Result<FinishReason, HostError> {
        let finish = self.decode().await?;
        let n_kept = match self.keep {
            Keep::Tokens => self.tokens.len(),
            Keep::Text => self.n_tokens_of_text(finish),
        };
        // The engine knows nothing of stop texts: this makes it forget what it decoded ahead as well.
        if n_kept < self.tokens.len() || matches!(finish, FinishReason::StopText(_)) {
            self.keep_tokens(n_kept).await?;
        }
        Ok(finish)
    }

    /// Keeps so many of the tokens that were drawn.
    async fn keep_tokens(&mut self, n_kept: usize) -> Result<(), EngineError> {
        let members = std::iter::once(&mut self.context).chain(&mut self.others);
        for (context, n_before) in members.zip(&self.n_before) {
            context.truncate(n_before + n_kept).await?;
        }
        Ok(())
    }

    async fn decode(&mut self) -> Result<FinishReason, HostError> {
        let finish = loop {
            if self.settings.n_tokens_max == Some(self.tokens.len()) {
                break FinishReason::MaxTokens;
            }
            let n_left = self.settings.n_tokens_max.map(|n| n - self.tokens.len());
            let settings = || RunSettings { n_tokens_max: n_left, ..self.settings.clone() };
            let pulled = match &mut self.speculation {
                Some(speculation) => speculation.pull(&mut self.context, self.key, n_left, settings).await?,
                None if self.others.is_empty() => self.context.pull(self.key, settings).await?,
                None => self.context.pull_mixed(&mut borrowed(&mut self.others), self.key, settings).await?,
            };
            let Drawn { candidate: Candidate { token, logprob }, seen, .. } = match pulled {
                Pull::Token(drawn) => drawn,
                Pull::Finished(finish) => break finish_reason(finish),
            };
            self.tokens.push(token);
            self.logprobs.push(logprob);
            self.tops.extend(looks::top_of(seen));
            if self.settings.stop_tokens.contains(&token) {
                break FinishReason::StopToken(token);
            }
            let piece = self.decoder.push(&self.context.model().model().tokenizer, token);
            self.n_text_bytes += piece.len();
            self.ends.push(self.decoder.is_whole().then_some(self.n_text_bytes));
            if let Some(finish) = self.scan(&piece).await? {
                return Ok(finish);
            }
        };
        let decoder = std::mem::replace(&mut self.decoder, DecodeStream::new(SpecialText::Skip));
        if let Some(finish) = self.scan(&decoder.finish()).await? {
            return Ok(finish);
        }
        let held = std::mem::replace(&mut self.stops, StopTexts::new(Vec::new())).finish();
        self.show(&held).await?;
        Ok(finish)
    }

    /// How many of the tokens the text is of.
    fn n_tokens_of_text(&self, finish: FinishReason) -> usize {
        match finish {
            FinishReason::StopText(_) => n_within(&self.ends, self.text.len()),
            FinishReason::StopToken(_) => self.tokens.len() - 1,
            FinishReason::MaxTokens | FinishReason::ContextFull | FinishReason::GrammarComplete => {
                self.tokens.len()
            }
        }
    }

    /// Adds text; the reason to end if a stop text is complete.
    async fn scan(&mut self, piece: &str) -> Result<Option<FinishReason>, HostError> {
        match self.stops.push(piece) {
            Scanned::Text(text) => {
                self.show(&text).await?;
                Ok(None)
            }
            Scanned::Stopped { text_idx, rest } => {
                self.show(&rest).await?;
                Ok(Some(FinishReason::StopText(count(text_idx))))
            }
        }
    }

    async fn show(&mut self, text: &str) -> Result<(), HostError> {
        self.text.push_str(text);
        match &self.client {
            Some(client) => send_text(&client.output, text, client.piece_bytes).await,
            None => Ok(()),
        }
    }

    fn complete(self, finish: FinishReason) -> Completion {
        let Self { tokens, logprobs, tops, text, .. } = self;
        Completion { tokens, logprobs, tops, text, finish }
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
