//! `generate`: whole generations, many at once, without a crossing for each token.

use futures_util::future::try_join_all;
use tokio::sync::OwnedMutexGuard;
use trellis_engine::batch::Token;
use trellis_engine::model::{DecodeStream, SpecialText};
use trellis_engine::{Ahead, Context, MaskSource, Pull, RunKey, RunSettings};

use super::convert::{check_stop_tokens, finish_reason, invalid};
use super::session::send_text;
use super::stop_strings::{Scanned, StopStrings};
use super::types::HostError;
use crate::guest::bindings::trellis::host::streams::{Completion, Emit, FinishReason, GenerateRequest};
use crate::guest::io::OutputSender;
use crate::guest::store::GuestState;

/// Stop strings of one generation. With their length it bounds the search after each token.
const N_STOP_STRINGS_MAX: usize = 16;

/// The longest stop string.
const STOP_STRING_BYTES_MAX: usize = 256;

/// Where text goes while it is made.
struct Client {
    output: OutputSender,
    piece_bytes: usize,
}

/// One generation in progress.
struct Generation {
    context: OwnedMutexGuard<Context>,
    /// Tokens of the context before the generation.
    n_before: usize,
    key: RunKey,
    settings: RunSettings,
    decoder: DecodeStream,
    stops: StopStrings,
    client: Option<Client>,
    tokens: Vec<Token>,
    text: String,
    logprob: f64,
}

impl GuestState {
    /// Runs all requests to their end. After an error the contexts are as they were, though text may have
    /// been sent.
    pub(super) async fn generate_all(
        &mut self,
        requests: Vec<GenerateRequest>,
    ) -> Result<Vec<Completion>, HostError> {
        let contexts = self.lock_contexts(requests.iter().map(|request| &request.context))?;
        let mut generations = requests
            .into_iter()
            .zip(contexts)
            .map(|(request, context)| self.prepare(request, context))
            .collect::<Result<Vec<_>, _>>()?;
        let finishes = try_join_all(generations.iter_mut().map(Generation::run)).await;
        match finishes {
            Ok(finishes) => {
                Ok(generations.into_iter().zip(finishes).map(|(one, finish)| one.complete(finish)).collect())
            }
            Err(error) => {
                for Generation { context, n_before, .. } in &mut generations {
                    context.truncate(*n_before).await?;
                }
                Err(error)
            }
        }
    }

    fn prepare(
        &mut self,
        request: GenerateRequest,
        context: OwnedMutexGuard<Context>,
    ) -> Result<Generation, HostError> {
        let sampler = self.settings_for(&request.sampler, &context)?;
        check_stop_tokens(context.model(), &request.stop_tokens)?;
        check_stop_strings(&request.stop_strings)?;
        let client = match request.emit {
            Emit::Nothing => None,
            Emit::Text => {
                Some(Client { output: self.output.clone(), piece_bytes: self.limits.output_piece_bytes() })
            }
        };
        // Decoding runs free to the end only where nothing but the engine can end or delay it.
        let ahead = if request.stop_strings.is_empty() && client.is_none() {
            Ahead::Unbounded
        } else {
            Ahead::Adaptive
        };
        Ok(Generation {
            n_before: context.tokens().len(),
            context,
            key: self.next_run_key(),
            settings: RunSettings {
                sampler,
                stop_tokens: request.stop_tokens.into(),
                n_tokens_max: request.max_tokens.map(|n| n as usize),
                ahead,
                masks: MaskSource::Sampler,
            },
            decoder: DecodeStream::new(SpecialText::Skip),
            stops: StopStrings::new(request.stop_strings),
            client,
            tokens: Vec::new(),
            text: String::new(),
            logprob: 0.0,
        })
    }
}

fn check_stop_strings(strings: &[String]) -> Result<(), HostError> {
    if strings.len() > N_STOP_STRINGS_MAX {
        return Err(invalid("stop-strings", strings.len(), format!("at most {N_STOP_STRINGS_MAX}")));
    }
    match strings.iter().find(|stop| stop.is_empty() || stop.len() > STOP_STRING_BYTES_MAX) {
        Some(stop) => {
            let expected = format!("1 to {STOP_STRING_BYTES_MAX} bytes each");
            Err(invalid("stop-strings", format!("{stop:?}"), expected))
        }
        None => Ok(()),
    }
}

impl Generation {
    async fn run(&mut self) -> Result<FinishReason, HostError> {
        let finish = loop {
            if self.settings.n_tokens_max == Some(self.tokens.len()) {
                break FinishReason::MaxTokens;
            }
            let settings = || self.settings.clone();
            let token = match self.context.pull(self.key, settings).await? {
                Pull::Token(drawn) => drawn.candidate,
                Pull::Finished(finish) => break finish_reason(finish),
            };
            self.tokens.push(token.token);
            self.logprob += f64::from(token.logprob);
            if self.settings.stop_tokens.contains(&token.token) {
                break FinishReason::Stop;
            }
            let piece = self.decoder.push(&self.context.model().model().tokenizer, token.token);
            if self.scan(&piece).await? {
                // The engine knows nothing of stop strings: this makes it forget what it decoded ahead.
                let n_tokens = self.context.tokens().len();
                self.context.truncate(n_tokens).await?;
                return Ok(FinishReason::Stop);
            }
        };
        let decoder = std::mem::replace(&mut self.decoder, DecodeStream::new(SpecialText::Skip));
        if self.scan(&decoder.finish()).await? {
            return Ok(FinishReason::Stop);
        }
        let held = std::mem::replace(&mut self.stops, StopStrings::new(Vec::new())).finish();
        self.show(&held).await?;
        Ok(finish)
    }

    /// Adds text, and says whether a stop string is complete.
    async fn scan(&mut self, piece: &str) -> Result<bool, HostError> {
        match self.stops.push(piece) {
            Scanned::Text(text) => {
                self.show(&text).await?;
                Ok(false)
            }
            Scanned::Stopped(text) => {
                self.show(&text).await?;
                Ok(true)
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
        Completion { tokens: self.tokens, text: self.text, logprob: self.logprob as f32, finish }
    }
}
