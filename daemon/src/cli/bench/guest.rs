//! The same work through guest, socket and client.

use std::time::{Duration, Instant};

use bytes::Bytes;
use trellis_client::{Client, Event, Program, StartOptions};

use super::BenchError;
use super::engine::{Stream, TEXT};
use crate::cli::error::CliError;
use crate::profile::{Entry, entries};

/// A running daemon and the guest of this benchmark, compiled already.
#[derive(Debug)]
pub(crate) struct Probe {
    client: Client,
    component: Bytes,
}

/// What one run of the guest was seen to do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Launch {
    /// From the request to the first output, at the client.
    pub(crate) to_output: Duration,
    /// From the guest's start to its end, by the host's clock.
    pub(crate) in_host: Duration,
}

impl Probe {
    /// Uploads the guest and has it compiled, so that it is cached from here on.
    ///
    /// # Errors
    /// It does not run.
    pub(crate) async fn prepare(client: Client, component: Bytes) -> Result<Self, CliError> {
        let probe = Self { client, component };
        probe.launch().await?;
        Ok(probe)
    }

    async fn start(&self, arguments: &[&str]) -> Result<trellis_client::Guest, CliError> {
        let arguments = arguments.iter().map(|&word| word.to_owned()).collect();
        let options = StartOptions { arguments, ..StartOptions::default() };
        Ok(self.client.start(Program::Wasm(self.component.clone()), options).await?)
    }

    /// A greedy stream, seen from the client: time runs from the first piece of text to the guest's last word.
    ///
    /// # Errors
    /// The guest failed, or sent something else.
    pub(crate) async fn stream(&self, n_tokens: usize) -> Result<Stream, CliError> {
        let started = Instant::now();
        let mut guest = self.start(&["stream", &n_tokens.to_string(), TEXT]).await?;
        let (mut first, mut last, mut tokens) = (None, started, Vec::new());
        while let Some(event) = guest.next().await {
            match event? {
                Event::Text { .. } => {
                    last = Instant::now();
                    first.get_or_insert(last);
                }
                Event::Tokens { tokens: all } => tokens.extend(all),
                _ => {}
            }
        }
        if tokens.len() != n_tokens {
            return Err(BenchError::Short { wanted: n_tokens, got: tokens.len() }.into());
        }
        let first = first.unwrap_or(last);
        Ok(Stream { tokens, first: first - started, rest: last - first })
    }

    /// Launches a guest that makes one call to the host.
    ///
    /// # Errors
    /// The guest failed, or sent nothing.
    pub(crate) async fn launch(&self) -> Result<Launch, CliError> {
        let started = Instant::now();
        let mut guest = self.start(&["first"]).await?;
        let mut to_output = None;
        while let Some(event) = guest.next().await {
            if let Event::Text { .. } = event? {
                to_output.get_or_insert_with(|| started.elapsed());
            }
        }
        let in_host = guest.usage().map(|usage| Duration::from_micros(usage.elapsed_us));
        match (to_output, in_host) {
            (Some(to_output), Some(in_host)) => Ok(Launch { to_output, in_host }),
            _ => Err(BenchError::Short { wanted: 1, got: 0 }.into()),
        }
    }

    /// The profile of a run, as it came.
    ///
    /// # Errors
    /// The guest failed.
    pub(crate) async fn profile(&self, arguments: &[&str]) -> Result<Vec<Entry>, CliError> {
        let arguments = arguments.iter().map(|&word| word.to_owned()).collect();
        let options = StartOptions { arguments, is_profiled: true, ..StartOptions::default() };
        let mut guest = self.client.start(Program::Wasm(self.component.clone()), options).await?;
        let mut profile = Vec::new();
        while let Some(event) = guest.next().await {
            if let Event::Profiled { bytes } = event? {
                profile.extend_from_slice(&bytes);
            }
        }
        Ok(entries(&profile))
    }

    /// What one idle host call takes: the difference between runs with few and with many of them.
    ///
    /// # Errors
    /// The guest failed.
    pub(crate) async fn host_call(&self) -> Result<Duration, CliError> {
        const N_FEW: u32 = 1_000;
        const N_MORE: u32 = 200_000;
        let few = self.idle(N_FEW).await?;
        let many = self.idle(N_FEW + N_MORE).await?;
        Ok(many.saturating_sub(few) / N_MORE)
    }

    /// From the guest's start to its end, by the host's clock.
    async fn idle(&self, n_calls: u32) -> Result<Duration, CliError> {
        let mut guest = self.start(&["idle", &n_calls.to_string()]).await?;
        guest.wait().await?;
        let usage = guest.usage().ok_or(BenchError::Short { wanted: 1, got: 0 })?;
        Ok(Duration::from_micros(usage.elapsed_us))
    }
}
