//! Questions to the daemon whose answers are timed: `info`, the stop of a guest, and the encoding of a text.

use std::io;
use std::path::Path;
use std::pin::pin;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use trellis_wire::{Call, ClientMessage, Event, ServerMessage};

use super::raw::Raw;
use super::{Component, Ending};

/// Time between two looks at a question that has no answer yet.
const LOOK_PERIOD: Duration = Duration::from_millis(50);

/// Time between an answer and the next question of its kind.
const PAUSE: Duration = Duration::from_millis(100);

/// Bytes of the texts whose encoding is timed.
const ENCODED_BYTES: usize = 6_000;

/// A guest that waits and costs nothing: the one that is stopped.
const WAITING: &[&str] = &["wait-for-messages"];

/// What is timed.
#[derive(Clone, Copy, Debug)]
pub(super) enum Timed {
    Info,
    /// From the request to the end of the guest.
    Stop,
    Encode,
}

/// What is seen of a question.
#[derive(Debug)]
pub(super) enum Seen {
    /// How long it took, or, where there is no answer yet, how long it takes until now.
    Took { timed: Timed, time: Duration, is_over: bool },
    /// The answer is not what it should be.
    Wrong(String),
}

/// Where that is told. Who asks is aborted once nobody listens.
pub(super) type Tell = mpsc::UnboundedSender<Seen>;

/// Waits for something that is timed, and tells now and then how long that has been: what has no answer counts too.
async fn waiting<T>(timed: Timed, tell: &Tell, answer: impl Future<Output = T>) -> T {
    let begun = Instant::now();
    let mut answer = pin!(answer);
    loop {
        let outcome = tokio::time::timeout(LOOK_PERIOD, &mut answer).await;
        let _ = tell.send(Seen::Took { timed, time: begun.elapsed(), is_over: outcome.is_ok() });
        if let Ok(outcome) = outcome {
            return outcome;
        }
    }
}

/// Times one `info` after the other.
pub(super) async fn ask_info(socket: &Path, tell: Tell) -> io::Result<()> {
    let mut raw = Raw::connect(socket).await?;
    loop {
        tokio::time::sleep(PAUSE).await;
        let ending = waiting(Timed::Info, &tell, raw.ask(Call::Info)).await?;
        if !ending.is_well() {
            let _ = tell.send(Seen::Wrong(format!("info: {}: {}", ending.short(), ending.message)));
        }
    }
}

/// Times how long guests take to end that wait and are stopped, one after the other. Their starts are not timed.
pub(super) async fn ask_stop(socket: &Path, hostile: &Component, tell: Tell) -> io::Result<()> {
    let mut raw = Raw::connect(socket).await?;
    loop {
        tokio::time::sleep(PAUSE).await;
        let id = raw.start(hostile, WAITING).await?;
        let Ok(guest_id) = raw.started(id).await? else { continue };
        let ending = waiting(Timed::Stop, &tell, stop(&mut raw, id, guest_id)).await?;
        if !super::ends::STOPPED.iter().any(|end| end.fits(&ending)) {
            let (end, message) = (ending.short(), ending.message);
            let _ = tell.send(Seen::Wrong(format!("a guest that was stopped ended with {end}: {message}")));
        }
    }
}

/// Stops the guest of this request; how it has ended, once that is said and the stop is answered, or how the stop was refused.
async fn stop(raw: &mut Raw, id: u64, guest_id: u64) -> io::Result<Ending> {
    let stop = raw.request(Call::Stop { guest_id }).await?;
    let (mut ended, mut is_answered) = (None, false);
    loop {
        match raw.next().await? {
            Some(ServerMessage::End { id: of, outcome, .. }) if of == id => {
                ended = Some(Ending::from(outcome));
            }
            Some(ServerMessage::End { id: of, outcome, .. }) if of == stop => {
                let answer = Ending::from(outcome);
                if !answer.is_well() {
                    return Ok(answer);
                }
                is_answered = true;
            }
            Some(ServerMessage::Fault { error }) => return Ok(error.into()),
            Some(_) => {}
            None => return Ok(Ending::closed()),
        }
        if let (Some(ending), true) = (&ended, is_answered) {
            return Ok(ending.clone());
        }
    }
}

/// Has a guest encode one text after the other, and times each.
pub(super) async fn ask_encode(socket: &Path, hostile: &Component, tell: Tell) -> io::Result<()> {
    let text = "the quick brown fox ".repeat(ENCODED_BYTES / 20);
    let mut raw = Raw::connect(socket).await?;
    loop {
        let to = raw.start(hostile, &["encode-messages"]).await?;
        if raw.started(to).await?.is_err() {
            tokio::time::sleep(PAUSE).await;
            continue;
        }
        loop {
            tokio::time::sleep(PAUSE).await;
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
            let is_there = waiting(Timed::Encode, &tell, answer).await?;
            if !is_there {
                break;
            }
            raw.send(&ClientMessage::Credit { id: to, n_bytes: 64 }).await?;
        }
    }
}
