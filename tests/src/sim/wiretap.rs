//! What went over a connection, read again by one who is neither client nor daemon: each request ends once, nothing is said of
//! it after that, and no guest sends more than it has credit for.

use std::collections::BTreeMap;

use futures_util::FutureExt;
use trellis_wire::{Call, ClientMessage, FRAME_BYTES_MAX, FrameReader, Hello, ServerMessage, WireError};

#[derive(Default)]
struct Heard {
    credit_bytes: u64,
    sent_bytes: u64,
    n_ends: usize,
}

/// The messages of a tape, as far as they are whole.
fn messages<T: serde::de::DeserializeOwned>(mut tape: &[u8]) -> Result<Vec<T>, WireError> {
    let read = async {
        let mut messages = Vec::new();
        if Hello::read(&mut tape).await.is_err() {
            return Ok(messages);
        }
        let mut frames = FrameReader::new(tape, FRAME_BYTES_MAX);
        loop {
            match frames.next().await {
                Ok(Some(message)) => messages.push(message),
                Ok(None) | Err(WireError::Truncated { .. } | WireError::Io(_)) => return Ok(messages),
                Err(error) => return Err(error),
            }
        }
    };
    read.now_or_never().expect("a tape is there as a whole")
}

/// Reads what the client and the daemon sent.
///
/// # Errors
/// What must not be.
pub(super) fn check([client, daemon]: &[Vec<u8>; 2]) -> Result<(), String> {
    let said: Vec<ClientMessage> = messages(client).map_err(|error| format!("a client sent {error}"))?;
    let told: Vec<ServerMessage> = messages(daemon).map_err(|error| format!("the daemon sent {error}"))?;
    let mut requests: BTreeMap<u64, Heard> = BTreeMap::new();
    for message in said {
        match message {
            ClientMessage::Request { id, call } => {
                let credit_bytes = match call {
                    Call::Start(start) => start.credit_bytes,
                    Call::Attach(attach) => attach.credit_bytes,
                    _ => 0,
                };
                requests.entry(id).or_insert(Heard { credit_bytes, ..Heard::default() });
            }
            ClientMessage::Credit { id, n_bytes } => {
                requests.entry(id).or_default().credit_bytes += n_bytes;
            }
            _ => {}
        }
    }
    for message in told {
        match message {
            ServerMessage::Event { id, event } => {
                let heard = requests.get_mut(&id).ok_or(format!("{event:?} of {id}, which nobody asked"))?;
                if heard.n_ends > 0 {
                    return Err(format!("{event:?} of request {id} after its end"));
                }
                heard.sent_bytes += event.credit_bytes() as u64;
                if heard.sent_bytes > heard.credit_bytes {
                    let Heard { sent_bytes, credit_bytes, .. } = heard;
                    return Err(format!(
                        "request {id} sent {sent_bytes} bytes for a credit of {credit_bytes}"
                    ));
                }
            }
            ServerMessage::End { id, .. } => {
                let heard = requests.get_mut(&id).ok_or(format!("the end of {id}, which nobody asked"))?;
                heard.n_ends += 1;
                if heard.n_ends > 1 {
                    return Err(format!("request {id} ended twice"));
                }
            }
            ServerMessage::Fault { .. } | ServerMessage::Unknown => {}
        }
    }
    Ok(())
}
