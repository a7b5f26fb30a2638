//! An honest user beside the attackers: streams the same tokens again and again, checks each, and notes when they come.
//!
//! It is a process of its own, so that nothing of the attackers' work is in its times, and does little for each token. It is told
//! what to do in lines on standard input and answers each with a line of JSON.

use std::io::{self, BufRead, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use trellis_wire::{ClientMessage, Event, ServerMessage};

use super::questions::{self, Seen, Tell, Timed};
use super::raw::{CREDIT_BYTES, Raw};
use super::{Component, Ending};

/// Tokens of a fork, before the next one begins with the same.
pub const N_TOKENS: usize = 400;

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
    /// How often `info` was answered.
    pub n_infos: u64,
    /// The longest time from the request to stop a guest of the neighbour's to that guest's end.
    pub stop_ms: f64,
    /// How many guests have ended so.
    pub n_stops: u64,
    /// The longest time that a guest of the neighbour's took to encode 6 kB and say so.
    pub encode_ms: f64,
    /// How often one did.
    pub n_encodes: u64,
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
        self.n_infos += other.n_infos;
        self.stop_ms = self.stop_ms.max(other.stop_ms);
        self.n_stops += other.n_stops;
        self.encode_ms = self.encode_ms.max(other.encode_ms);
        self.n_encodes += other.n_encodes;
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
        // A silence that goes on is one of the next window too, as long as it is by then.
        window.silence_ms = window.silence_ms.max(ms(now - self.last));
        self.begun = now;
        window
    }

    /// Something is seen of a question beside the stream.
    fn see(&mut self, seen: Seen) {
        let window = &mut self.window;
        match seen {
            Seen::Took { timed, time, is_over } => {
                let (longest, n) = match timed {
                    Timed::Info => (&mut window.info_ms, &mut window.n_infos),
                    Timed::Stop => (&mut window.stop_ms, &mut window.n_stops),
                    Timed::Encode => (&mut window.encode_ms, &mut window.n_encodes),
                };
                *longest = longest.max(ms(time));
                *n += u64::from(is_over);
            }
            Seen::Wrong(what) => window.errors.push(what),
        }
    }

    /// A guest begins, with the first token.
    fn begin(&mut self) {
        if !self.is_known {
            self.expected.clear();
        }
        self.at = 0;
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
    seen: &mut mpsc::UnboundedReceiver<Seen>,
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
            Some(seen) = seen.recv() => eyes.see(seen),
        }
    }
}

/// Asks all that is timed, until it is dropped; what is seen of it is told.
fn ask_all(socket: &Path, hostile: &Component, tell: &Tell) -> JoinSet<io::Result<()>> {
    let with = || (socket.to_owned(), hostile.clone(), tell.clone());
    let mut asking = JoinSet::new();
    let (socket, _, tell) = with();
    asking.spawn(async move { questions::ask_info(&socket, tell).await });
    let (socket, hostile, tell) = with();
    asking.spawn(async move { questions::ask_stop(&socket, &hostile, tell).await });
    let (socket, hostile, tell) = with();
    asking.spawn(async move { questions::ask_encode(&socket, &hostile, tell).await });
    asking
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
        let mut asking = ask_all(socket, &hostile, &sender);
        eyes.mark();
        eyes.last = eyes.begun;
        answer(&Window::default())?;
        let n_tokens = N_TOKENS.to_string();
        let mut id = raw.start(&hostile, &["paced", &n_tokens]).await?;
        eyes.begin();
        let mut n_used = 0;
        loop {
            match stream(&mut raw, id, &mut eyes, &mut told, &mut seen, &mut n_used).await? {
                Over::Told(word) if word == MARK => {
                    while let Some(ended) = asking.try_join_next() {
                        eyes.window.errors.push(format!("a question to the daemon failed: {ended:?}"));
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
        drop((asking, raw));
        answer(&eyes.mark())?;
    }
    Ok(())
}
