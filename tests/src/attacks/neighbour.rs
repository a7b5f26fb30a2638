//! An honest user beside the attackers: streams the same tokens again and again, checks each, and notes when they come.
//!
//! It is a process of its own, so that nothing of the attackers' work is in its times, and does little for each token. It is told
//! what to do in lines on standard input and answers each with a line of JSON.

use std::io::{self, BufRead, Write};
use std::path::Path;
use std::pin::pin;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use trellis_wire::{Call, ClientMessage, Event, ServerMessage};

use super::raw::{CREDIT_BYTES, Raw};
use super::{Component, Ending};

/// Tokens of a fork, before the next one begins with the same.
pub const N_TOKENS: usize = 400;

/// Time between two questions to the daemon, whose answers are timed.
const PROBE_PERIOD: Duration = Duration::from_millis(50);

/// Bytes of the texts whose encoding is timed.
const ENCODED_BYTES: usize = 6_000;

/// What the neighbour is told.
pub const MARK: &str = "mark";
/// It ends its guest and its connections.
pub const PAUSE: &str = "pause";
/// It begins again.
pub const GO: &str = "go";

/// What the neighbour saw since it was last told to mark.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Window {
    /// Its length.
    pub seconds: f64,
    /// Tokens that came.
    pub n_tokens: u64,
    /// Tokens that were not those that come alone.
    pub n_wrong: u64,
    /// The longest time without a token.
    pub silence_ms: f64,
    /// The longest time that `info` took.
    pub info_ms: f64,
    /// The longest time that `stop` took.
    pub stop_ms: f64,
    /// The longest time that a guest of the neighbour's took to encode 6 kB and say so.
    pub encode_ms: f64,
    /// What went wrong.
    pub errors: Vec<String>,
}

impl Window {
    /// Tokens a second.
    #[must_use]
    pub fn pace(&self) -> f64 {
        self.n_tokens as f64 / self.seconds.max(0.001)
    }

    /// Both, one after the other.
    #[must_use]
    pub fn and(mut self, other: &Self) -> Self {
        self.seconds += other.seconds;
        self.n_tokens += other.n_tokens;
        self.n_wrong += other.n_wrong;
        self.silence_ms = self.silence_ms.max(other.silence_ms);
        self.info_ms = self.info_ms.max(other.info_ms);
        self.stop_ms = self.stop_ms.max(other.stop_ms);
        self.encode_ms = self.encode_ms.max(other.encode_ms);
        self.errors.extend(other.errors.iter().cloned());
        self
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

/// What it has seen, and what it knows.
struct Eyes {
    window: Window,
    begun: Instant,
    last: Instant,
    expected: Vec<u32>,
    at: usize,
    is_known: bool,
}

impl Eyes {
    fn new() -> Self {
        let now = Instant::now();
        Self {
            window: Window::default(),
            begun: now,
            last: now,
            expected: Vec::new(),
            at: 0,
            is_known: false,
        }
    }

    fn tokens(&mut self, tokens: &[u32]) {
        let now = Instant::now();
        self.window.silence_ms = self.window.silence_ms.max(ms(now - self.last));
        self.last = now;
        self.window.n_tokens += tokens.len() as u64;
        for &token in tokens {
            if self.is_known {
                self.window.n_wrong += u64::from(self.expected[self.at] != token);
            } else {
                self.expected.push(token);
            }
            self.at += 1;
            if self.at == N_TOKENS {
                (self.at, self.is_known) = (0, true);
            }
        }
    }

    /// What was seen until now; the next window begins.
    fn mark(&mut self) -> Window {
        let now = Instant::now();
        let mut window = std::mem::take(&mut self.window);
        window.seconds = (now - self.begun).as_secs_f64();
        window.silence_ms = window.silence_ms.max(ms(now - self.last));
        (self.begun, self.last) = (now, now);
        window
    }

    /// A guest begins, with the first token.
    fn begin(&mut self) {
        if !self.is_known {
            self.expected.clear();
        }
        self.at = 0;
        self.last = Instant::now();
    }
}

/// What is timed beside the stream.
#[derive(Clone, Copy, Debug)]
enum Timed {
    Info,
    Stop,
    Encode,
}

/// What was timed, and how long it took.
type Times = mpsc::UnboundedSender<(Timed, Duration)>;

/// Waits for something that is timed, and tells now and then how long that has been: what has no answer counts too.
async fn waiting<T>(timed: Timed, seen: &Times, answer: impl Future<Output = T>) -> T {
    let begun = Instant::now();
    let mut answer = pin!(answer);
    loop {
        let outcome = tokio::time::timeout(PROBE_PERIOD, &mut answer).await;
        // Where nobody listens any more this is about to be aborted.
        let _ = seen.send((timed, begun.elapsed()));
        if let Ok(outcome) = outcome {
            return outcome;
        }
    }
}

/// Times one request after the other on a connection of its own: `info` and `stop` by turns.
async fn probe(socket: &Path, seen: Times) -> io::Result<()> {
    let mut raw = Raw::connect(socket).await?;
    let mut timed = Timed::Info;
    loop {
        tokio::time::sleep(PROBE_PERIOD).await;
        let (call, next) = match timed {
            Timed::Stop => (Call::Stop { guest_id: u64::MAX }, Timed::Info),
            _ => (Call::Info, Timed::Stop),
        };
        waiting(timed, &seen, raw.ask(call)).await?;
        timed = next;
    }
}

/// Has a guest of its own encode one text after the other.
async fn probe_encode(socket: &Path, hostile: &Component, seen: Times) -> io::Result<()> {
    let text = "the quick brown fox ".repeat(ENCODED_BYTES / 20);
    let mut raw = Raw::connect(socket).await?;
    loop {
        let to = raw.start(hostile, &["encode-messages"]).await?;
        if raw.started(to).await?.is_err() {
            tokio::time::sleep(PROBE_PERIOD).await;
            continue;
        }
        loop {
            tokio::time::sleep(2 * PROBE_PERIOD).await;
            raw.request(Call::Message { to, text: text.clone() }).await?;
            let answer = async {
                loop {
                    match raw.next().await? {
                        Some(ServerMessage::Event { id, event: Event::Text { .. } }) if id == to => {
                            return io::Result::Ok(true);
                        }
                        Some(ServerMessage::End { id, .. }) if id == to => return Ok(false),
                        Some(_) => {}
                        None => return Err(io::ErrorKind::UnexpectedEof.into()),
                    }
                }
            };
            let is_there = waiting(Timed::Encode, &seen, answer).await?;
            if !is_there {
                break;
            }
            raw.send(&ClientMessage::Credit { id: to, n_bytes: 64 }).await?;
        }
    }
}

/// Why the stream is over for now.
enum Over {
    Told(String),
    Ended(Ending),
}

/// Streams until it is told something, or the guest has ended.
async fn stream(
    raw: &mut Raw,
    id: u64,
    eyes: &mut Eyes,
    told: &mut mpsc::UnboundedReceiver<String>,
    seen: &mut mpsc::UnboundedReceiver<(Timed, Duration)>,
    n_used: &mut u64,
) -> io::Result<Over> {
    loop {
        tokio::select! {
            biased;
            // However much comes.
            word = told.recv() => return Ok(Over::Told(word.unwrap_or_default())),
            message = raw.next() => match message? {
                Some(ServerMessage::Event { id: of, event }) if of == id => {
                    if let Event::Tokens { tokens } = &event {
                        eyes.tokens(tokens);
                    }
                    *n_used += event.credit_bytes() as u64;
                    if *n_used > CREDIT_BYTES / 2 {
                        raw.send(&ClientMessage::Credit { id, n_bytes: std::mem::take(n_used) }).await?;
                    }
                }
                Some(ServerMessage::End { id: of, outcome, .. }) if of == id => return Ok(Over::Ended(outcome.into())),
                Some(ServerMessage::Fault { error }) => return Ok(Over::Ended(error.into())),
                Some(_) => {}
                None => return Ok(Over::Ended(Ending::closed())),
            },
            Some((timed, time)) = seen.recv() => {
                let longest = match timed {
                    Timed::Info => &mut eyes.window.info_ms,
                    Timed::Stop => &mut eyes.window.stop_ms,
                    Timed::Encode => &mut eyes.window.encode_ms,
                };
                *longest = longest.max(ms(time));
            }
        }
    }
}

fn answer(window: &Window) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{}", serde_json::to_string(window)?)?;
    out.flush()
}

/// Waits to be told to go; whether it is, and not that all is over.
async fn told_to_go(told: &mut mpsc::UnboundedReceiver<String>) -> io::Result<bool> {
    loop {
        match told.recv().await.as_deref() {
            None | Some("") => return Ok(false),
            Some(GO) => return Ok(true),
            Some(_) => answer(&Window::default())?,
        }
    }
}

/// The neighbour's process: streams from [`GO`] to [`PAUSE`], until standard input ends.
///
/// # Errors
/// The daemon cannot be reached.
pub async fn run(socket: &Path, hostile: Component) -> io::Result<()> {
    let (tell, mut told) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for line in io::stdin().lock().lines().map_while(Result::ok) {
            if tell.send(line).is_err() {
                return;
            }
        }
    });
    let mut eyes = Eyes::new();
    while told_to_go(&mut told).await? {
        let (sender, mut seen) = mpsc::unbounded_channel();
        let mut raw = Raw::connect(socket).await?;
        let uploaded = raw.upload(&hostile).await?;
        if !uploaded.is_well() {
            return Err(io::Error::other(uploaded.message));
        }
        let probing = tokio::spawn({
            let (socket, sender) = (socket.to_owned(), sender.clone());
            async move { probe(&socket, sender).await }
        });
        let encoding = tokio::spawn({
            let (socket, hostile) = (socket.to_owned(), hostile.clone());
            async move { probe_encode(&socket, &hostile, sender).await }
        });
        eyes.mark();
        answer(&Window::default())?;
        let n_tokens = N_TOKENS.to_string();
        let mut id = raw.start(&hostile, &["paced", &n_tokens]).await?;
        eyes.begin();
        let mut n_used = 0;
        loop {
            match stream(&mut raw, id, &mut eyes, &mut told, &mut seen, &mut n_used).await? {
                Over::Told(word) if word == MARK => {
                    if probing.is_finished() {
                        eyes.window.errors.push("the daemon hung up on info".to_owned());
                    }
                    answer(&eyes.mark())?;
                }
                Over::Told(_) => break,
                Over::Ended(ending) => {
                    // It may have used up what a guest may use; the next one goes on.
                    if !["cpu_ms", "deadline_ms", "n_tokens"]
                        .iter()
                        .any(|name| ending.name.as_deref() == Some(name))
                    {
                        eyes.window.errors.push(format!("{}: {}", ending.short(), ending.message));
                        if ending.code == "closed" {
                            break;
                        }
                    }
                    id = raw.start(&hostile, &["paced", &n_tokens]).await?;
                    eyes.begin();
                    n_used = 0;
                }
            }
        }
        probing.abort();
        encoding.abort();
        drop(raw);
        answer(&eyes.mark())?;
    }
    Ok(())
}
