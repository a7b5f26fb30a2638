//! `session`

use std::time::Duration;

use trellis_engine::Cause;
use trellis_engine::account::Resource;

use super::convert::invalid;
use super::types::HostError;
use crate::guest::bindings::trellis::host::session::{
    Causes, Event, Host, Inbox, Limit, LogLevel, Meter, Usage,
};
use crate::guest::bindings::trellis::host::types::{BudgetLimit, Error as ApiError};
use crate::guest::inbox::Received;
use crate::guest::io::{self, GuestOutput, OutputRefused, OutputSender};
use crate::guest::log::pieces;
use crate::guest::store::GuestState;
use crate::limits;

impl From<OutputRefused> for HostError {
    fn from(refused: OutputRefused) -> Self {
        match refused {
            OutputRefused::Closed => ApiError::Cancelled.into(),
            OutputRefused::OverBudget(exceeded) => exceeded.into(),
        }
    }
}

/// Sends a text in pieces that the client's credit has room for.
pub(super) async fn send_text(
    output: &OutputSender,
    text: &str,
    piece_bytes: usize,
) -> Result<(), HostError> {
    if text.is_empty() {
        return Ok(());
    }
    for piece in pieces(text, piece_bytes) {
        output.send(GuestOutput::Text(piece.to_owned())).await?;
    }
    Ok(())
}

impl Host for GuestState {
    fn arguments(&mut self) -> wasmtime::Result<Vec<String>> {
        Ok(self.arguments.clone())
    }

    async fn emit_text(&mut self, text: String) -> Result<(), HostError> {
        let _paid = self.pay_for_call(text.len())?;
        send_text(&self.output, &text, self.limits.output_piece_bytes()).await
    }

    async fn emit_tokens(&mut self, tokens: Vec<u32>) -> Result<(), HostError> {
        let _paid = self.pay_for_call(size_of_val(&*tokens))?;
        for piece in tokens.chunks(self.limits.output_piece_bytes() / size_of::<u32>()) {
            self.output.send(GuestOutput::Tokens(piece.to_vec())).await?;
        }
        Ok(())
    }

    async fn emit_json(&mut self, json: String) -> Result<(), HostError> {
        let _paid = self.pay_for_call(json.len())?;
        let (json, checked) = self.check_json(json).await?;
        if let Err(error) = checked {
            return Err(invalid("json", json, format!("JSON: {error}")));
        }
        let (n_bytes, limit) = (json.len() as u64, self.limits.output_whole_bytes() as u64);
        if n_bytes > limit {
            return Err(ApiError::BudgetExceeded(BudgetLimit {
                what: "bytes of one JSON text".to_owned(),
                used: 0,
                requested: n_bytes,
                limit,
            })
            .into());
        }
        Ok(self.output.send(GuestOutput::Json(json)).await?)
    }

    async fn receive(&mut self, wait_ms: Option<u64>) -> Result<Inbox, HostError> {
        let received = match wait_ms {
            None => self.deadline.idle(self.input.recv()).await,
            Some(0) => {
                return Ok(match self.input.try_recv() {
                    Received::Message(message) => Inbox::Message(message),
                    Received::NothingYet => Inbox::NothingYet,
                    Received::Closed => Inbox::Closed,
                });
            }
            Some(wait_ms) => {
                let message = tokio::time::timeout(Duration::from_millis(wait_ms), self.input.recv());
                match self.deadline.idle(message).await {
                    Ok(received) => received,
                    Err(_) => return Ok(Inbox::NothingYet),
                }
            }
        };
        Ok(received.map_or(Inbox::Closed, Inbox::Message))
    }

    async fn next_event(&mut self, wait_ms: Option<u64>) -> Result<Event, HostError> {
        if let Some(left_ms) = self.drain.left_ms() {
            return Ok(Event::Leaving(left_ms));
        }
        let mut drain = self.drain.clone();
        let received = tokio::select! {
            biased;
            // What is not received yet stays in the inbox.
            () = drain.begun() => None,
            received = self.receive(wait_ms) => Some(received?),
        };
        Ok(match received {
            Some(Inbox::Message(message)) => Event::Message(message),
            Some(Inbox::NothingYet) => Event::NothingYet,
            Some(Inbox::Closed) => Event::Closed,
            None => Event::Leaving(self.drain.left_ms().unwrap_or_default()),
        })
    }

    fn log(&mut self, level: LogLevel, line: String) -> wasmtime::Result<()> {
        let level = match level {
            LogLevel::Debug => io::LogLevel::Debug,
            LogLevel::Info => io::LogLevel::Info,
            LogLevel::Warn => io::LogLevel::Warn,
            LogLevel::Error => io::LogLevel::Error,
        };
        self.log.write(level, &line);
        Ok(())
    }

    fn get_usage(&mut self) -> wasmtime::Result<Usage> {
        let account = &self.owner.account;
        let causes = account.causes();
        let meter = |resource| Meter { used: account.used(resource), limit: account.limit(resource) };
        Ok(Usage {
            tokens: meter(Resource::Tokens),
            pages: meter(Resource::Pages),
            contexts: meter(Resource::Contexts),
            tokens_in_vain: causes.n_tokens_in_vain(),
            tokens_cached: account.n_tokens_cached(),
            tokens_guessed: account.n_tokens_guessed(),
            tokens_accepted: account.n_tokens_guessed_right(),
            tokens_forced: account.n_tokens_forced(),
            causes: Causes {
                rows_given_up: causes[Cause::RowsGivenUp],
                rows_past_end: causes[Cause::RowsPastEnd],
                rows_failed: causes[Cause::RowsFailed],
                rows_sat_out: causes[Cause::RowsSatOut],
                tokens_given_up: causes[Cause::TokensGivenUp],
                tokens_guessed_wrong: causes[Cause::TokensGuessedWrong],
                steps_waited_to_decode: causes[Cause::StepsToDecode],
                steps_waited_with_prompt: causes[Cause::StepsWithPrompt],
                steps_waited_for_pages: causes[Cause::StepsForPages],
                steps_waited_for_masks: causes[Cause::StepsForMasks],
            },
        })
    }

    fn limits(&mut self) -> wasmtime::Result<Vec<Limit>> {
        let account = self.owner.account.clone();
        let (busy, idle) = self.deadline.spent();
        let whole_ms = |time: Duration| time.as_millis() as u64;
        let limits = limits::of_guest(&self.limits).into_iter().map(|(name, limit)| {
            let of_account = |resource| (account.limit(resource), Some(account.used(resource)));
            let (limit, used) = match name {
                "memory_bytes" => (limit, Some(self.memory.n_bytes())),
                "cpu_ms" => (limit, Some(whole_ms(self.cpu.used()))),
                "deadline_ms" => (limit, Some(whole_ms(busy))),
                "idle_ms" => (limit, Some(whole_ms(idle))),
                "n_tokens" => of_account(Resource::Tokens),
                "n_pages" => of_account(Resource::Pages),
                "n_contexts" => of_account(Resource::Contexts),
                "host_bytes" => of_account(Resource::HostBytes),
                _ => (limit, None),
            };
            Limit { name: name.to_owned(), limit, used }
        });
        Ok(limits.collect())
    }

    fn call_bytes(&mut self) -> wasmtime::Result<u64> {
        Ok(self.limits.call_bytes as u64)
    }

    fn deadline_ms(&mut self) -> wasmtime::Result<u64> {
        Ok(self.deadline.left().as_millis() as u64)
    }

    fn leaving_ms(&mut self) -> wasmtime::Result<Option<u64>> {
        Ok(self.drain.left_ms())
    }

    fn seed(&mut self) -> wasmtime::Result<u64> {
        Ok(self.seed)
    }
}
