//! Guests in the daemon, each with a client of its own at the other end of a socket.

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use trellis_client::{Client, ErrorCode, Event, Program, StartOptions};
use trellis_engine::ModelHandle;
use trellis_engine::batch::Token;

use super::load::Draws;
use super::member::Seat;
use crate::cli::bench::engine;
use crate::cli::bench::server::Scratch;
use crate::cli::bench::speed::{Tolerance, check_streams};
use crate::cli::error::CliError;
use crate::daemon::{Daemon, DeviceFailure};
use crate::ipc::Listener;

/// How long a connection is tried that the daemon has no room for, and how often.
const PATIENCE: Duration = Duration::from_secs(5);
const TRIES_APART: Duration = Duration::from_millis(10);

/// Tokens that are compared before anything is measured.
const N_VERIFIED: usize = 16;

/// What a guest decodes, with no token to stop at.
#[derive(Clone, Copy, Debug)]
pub(super) struct Does {
    /// Beams of a search that it steps and prunes; it pulls a greedy stream when absent.
    pub(super) n_beams: Option<usize>,
    pub(super) draws: Option<Draws>,
    pub(super) n_tokens: usize,
    pub(super) n_prompt: usize,
}

/// The guest, and the daemon's socket; the daemon stops listening there once this is dropped.
#[derive(Debug)]
pub(super) struct Clients {
    component: Bytes,
    socket: PathBuf,
    serving: JoinHandle<Result<(), DeviceFailure>>,
    shutdown: CancellationToken,
    _scratch: Scratch,
}

impl Drop for Clients {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

impl Clients {
    /// Listens for this daemon and has the guest compiled.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub(super) fn new(daemon: &Arc<Daemon>, component: Bytes) -> Result<Self, CliError> {
        let scratch = Scratch::new()?;
        let socket = scratch.path().join("trellis.sock");
        let listener = Listener::bind(&socket, 0o700)?;
        let (daemon, shutdown) = (daemon.clone(), daemon.shutdown().clone());
        let serving = tokio::spawn(async move { daemon.serve(listener).await });
        Ok(Self { component, socket, serving, shutdown, _scratch: scratch })
    }

    /// Closes the socket, and returns once the daemon has ended all sessions.
    pub(super) async fn end(mut self) {
        self.shutdown.cancel();
        // It ends by itself, or has panicked, which is said already.
        let _ = (&mut self.serving).await;
    }

    /// Compiles the guest, and checks that its stream, or its search with one beam, gives what the engine gives.
    ///
    /// # Errors
    /// It does not run, or gives other tokens.
    pub(super) async fn verify(
        &self,
        handle: &ModelHandle,
        n_prompt: usize,
        is_search: bool,
        tolerance: Tolerance,
    ) -> Result<(), CliError> {
        let does = Does { n_beams: is_search.then_some(1), draws: None, n_tokens: N_VERIFIED, n_prompt };
        let mut guest = Guest::start(&self.socket, &self.component, 0, does).await?;
        let mut found = Vec::new();
        while let Some(event) = guest.next().await? {
            match event {
                Event::Tokens { tokens } => found.extend(tokens),
                Event::Text { .. } => guest.go().await?,
                _ => {}
            }
        }
        let prompt = prompt(handle, 0, n_prompt);
        let expected = engine::stream(handle, &prompt, N_VERIFIED).await?.tokens;
        let place = "through guest, socket and client";
        check_streams(handle, &prompt, &expected, &[found], place, tolerance).await?;
        Ok(())
    }

    /// One member: a guest that decodes after its prompt, and then another one.
    pub(super) fn member(
        &self,
        idx: usize,
        does: Does,
        seat: Seat,
    ) -> impl Future<Output = Result<Infallible, CliError>> + Send + 'static {
        let (socket, component) = (self.socket.clone(), self.component.clone());
        async move { member(&socket, &component, idx, does, seat).await }
    }
}

async fn member(
    socket: &Path,
    component: &Bytes,
    idx: usize,
    does: Does,
    mut seat: Seat,
) -> Result<Infallible, CliError> {
    let mut is_first = true;
    loop {
        let mut guest = Guest::start(socket, component, idx as u64, does).await?;
        while let Some(event) = guest.next().await? {
            match event {
                Event::Tokens { .. } => seat.marks.token(),
                Event::Text { .. } => {
                    if std::mem::take(&mut is_first) {
                        seat.wait_for_all().await;
                    }
                    guest.go().await?;
                }
                _ => {}
            }
        }
        seat.marks.pause();
    }
}

/// What the guest appends before it decodes: see `probe tokens`.
fn prompt(handle: &ModelHandle, seed: u64, n_tokens: usize) -> Vec<Token> {
    let vocab_size = handle.limits().vocab_size as u64;
    let token = |i: u64| ((seed + 1).wrapping_mul(7919).wrapping_add(i.wrapping_mul(104_729))) % vocab_size;
    (0..n_tokens as u64).map(|i| token(i) as Token).collect()
}

/// Connects; for a moment the daemon may still count connections that are gone.
async fn connect(socket: &Path) -> Result<Client, CliError> {
    let begun = Instant::now();
    loop {
        match greet(socket).await {
            Err(error) if is_too_many(&error) && begun.elapsed() < PATIENCE => {
                tokio::time::sleep(TRIES_APART).await;
            }
            greeted => return Ok(greeted?),
        }
    }
}

/// A connection that the daemon answers on: one too many is refused after the handshake.
async fn greet(socket: &Path) -> Result<Client, trellis_client::Error> {
    let client = Client::connect_to(socket).await?;
    client.models().await?;
    Ok(client)
}

/// Whether the daemon has refused one connection more.
fn is_too_many(error: &trellis_client::Error) -> bool {
    error.code() == Some(&ErrorCode::LimitExceeded)
}

/// A guest of a connection of its own.
struct Guest {
    guest: trellis_client::Guest,
    _client: Client,
}

impl Guest {
    async fn start(socket: &Path, component: &Bytes, seed: u64, does: Does) -> Result<Self, CliError> {
        let Does { n_beams, draws, n_tokens, n_prompt } = does;
        let client = connect(socket).await?;
        let mode = if n_beams.is_some() { "search" } else { "tokens" };
        let numbers = [n_tokens, n_prompt].into_iter().chain(n_beams);
        let words =
            numbers.map(|number| number.to_string()).chain(draws.map(|draws| draws.name().to_owned()));
        let arguments = std::iter::once(mode.to_owned()).chain(words).collect();
        let options = StartOptions { arguments, seed: Some(seed), ..StartOptions::default() };
        let guest = client.start(Program::Wasm(component.clone()), options).await?;
        Ok(Self { guest, _client: client })
    }

    async fn next(&mut self) -> Result<Option<Event>, CliError> {
        Ok(self.guest.next().await.transpose()?)
    }

    /// Lets the guest begin to decode.
    async fn go(&self) -> Result<(), CliError> {
        Ok(self.guest.send("go").await?)
    }
}
