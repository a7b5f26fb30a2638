//! The moments of a session at which its client drops the connection, by name.

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;

use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use trellis_wire::{CHUNK_BYTES_MAX, Call, ClientMessage, Event, Hello, Program, Stage, Start};

use super::visit::{Visit, event_of, had, is_output};
use crate::attacks::raw::{Raw, frame, framed};
use crate::attacks::{Component, Ending};

/// Credit that a guest has used up after a few words.
const LITTLE_CREDIT_BYTES: u64 = 500;

/// Messages to a guest that takes none; more than its inbox holds.
const N_MESSAGES: usize = 80;

type Reaching = Pin<Box<dyn Future<Output = io::Result<Ending>> + Send>>;

/// A moment.
#[derive(Clone, Copy)]
pub struct Moment {
    /// Its name, unique.
    pub name: &'static str,
    pub(super) reach: fn(Visit) -> Reaching,
}

impl fmt::Debug for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// A table of moments: each body brings a session there and drops it. It ends well where the moment was reached.
macro_rules! moments {
    ($($name:literal($visit:ident) $body:block)*) => {
        /// All moments.
        pub const MOMENTS: &[Moment] =
            &[$(Moment { name: $name, reach: |$visit| Box::pin(async move { $body }) },)*];
    };
}

moments! {
    "connected"(visit) {
        let _stream = UnixStream::connect(&visit.site.socket).await?;
        visit.stay().await;
        Ok(Ending::well())
    }
    "half a hello"(visit) {
        let mut stream = UnixStream::connect(&visit.site.socket).await?;
        stream.write_all(&Hello::ours().encode()[..5]).await?;
        visit.stay().await;
        Ok(Ending::well())
    }
    "hello said"(visit) {
        let _raw = visit.greet().await?;
        visit.stay().await;
        Ok(Ending::well())
    }
    "answer on its way"(visit) {
        let mut raw = visit.greet().await?;
        raw.request(Call::Info).await?;
        Ok(Ending::well())
    }
    "answered"(visit) {
        visit.greet().await?.ask(Call::Info).await
    }
    "in a frame"(visit) {
        let mut raw = visit.greet().await?;
        let bytes = frame(&ClientMessage::Request { id: 1, call: Call::Models });
        raw.send_bytes(&bytes[..1 + visit.below(bytes.len() - 1)]).await?;
        visit.stay().await;
        Ok(Ending::well())
    }
    "rubbish said"(visit) {
        let mut raw = visit.greet().await?;
        raw.send_bytes(&framed(&[0xc1; 40])).await?;
        let ending = raw.ask(Call::Info).await;
        // The daemon may hang up before it is asked.
        Ok(match ending {
            Ok(ending) if ending.is_well() => Ending::wrong("rubbish is taken for a message"),
            _ => Ending::well(),
        })
    }
    "upload announced"(visit) {
        let mut raw = visit.greet().await?;
        let component = visit.new_component();
        let call = Call::Upload { hash: component.hash, n_bytes: component.wasm.len() as u64 };
        let id = raw.request(call).await?;
        had!(event_of(&mut raw, id, |event| *event == Event::Wanted));
        visit.stay().await;
        Ok(Ending::well())
    }
    "upload half sent"(visit) {
        let mut raw = visit.greet().await?;
        let component = visit.new_component();
        let call = Call::Upload { hash: component.hash, n_bytes: component.wasm.len() as u64 };
        let id = raw.request(call).await?;
        had!(event_of(&mut raw, id, |event| *event == Event::Wanted));
        for bytes in component.wasm[..component.wasm.len() / 2].chunks(CHUNK_BYTES_MAX) {
            raw.send(&ClientMessage::Chunk { id, bytes: bytes.to_vec() }).await?;
        }
        visit.stay().await;
        Ok(Ending::well())
    }
    "compiling"(visit) {
        let component = visit.new_component();
        let mut raw = visit.greet().await?;
        let id = had!(compile(&mut raw, &component));
        let is_compiling = |event: &Event| matches!(event, Event::Progress { stage: Stage::Compile, .. });
        had!(event_of(&mut raw, id, is_compiling));
        visit.stay().await;
        Ok(Ending::well())
    }
    "asked for a guest"(visit) {
        had!(visit.start(&["loop"], |_| {}));
        Ok(Ending::well())
    }
    "guest computes"(visit) {
        let _held = had!(visit.run(&["loop"], |_| {}));
        visit.stay().await;
        Ok(Ending::well())
    }
    "guest sleeps"(visit) {
        let _held = had!(visit.run(&["sleep"], |_| {}));
        visit.stay().await;
        Ok(Ending::well())
    }
    "guest waits in a host call"(visit) {
        let _held = had!(visit.run(&["wait-for-messages"], |_| {}));
        visit.stay().await;
        Ok(Ending::well())
    }
    "guest encodes a long text"(visit) {
        let _held = had!(visit.run(&["encode", "random", "1000000"], |_| {}));
        visit.stay().await;
        Ok(Ending::well())
    }
    "guest makes grammars"(visit) {
        let _held = had!(visit.run(&["grammar", "schema"], |_| {}));
        visit.stay().await;
        Ok(Ending::well())
    }
    "guest streams"(visit) {
        let (mut raw, id) = had!(visit.run(&["endless"], |_| {}));
        for _ in 0..1 + visit.below(8) {
            had!(event_of(&mut raw, id, is_output));
        }
        Ok(Ending::well())
    }
    "guest streams to nobody"(visit) {
        let _held = had!(visit.run(&["endless"], |_| {}));
        visit.stay().await;
        Ok(Ending::well())
    }
    "guest generates"(visit) {
        let _held = had!(visit.run(&["generate", "8"], |_| {}));
        visit.stay().await;
        Ok(Ending::well())
    }
    "guest computes a prompt"(visit) {
        let _held = had!(visit.run(&["prefill"], |_| {}));
        visit.stay().await;
        Ok(Ending::well())
    }
    "guest searches with beams"(visit) {
        let _held = had!(visit.run(&["beams", "8"], |_| {}));
        visit.stay().await;
        Ok(Ending::well())
    }
    "guest forks"(visit) {
        let _held = had!(visit.run(&["fork-and-drop", "20"], |_| {}));
        visit.stay().await;
        Ok(Ending::well())
    }
    "guest holds memory"(visit) {
        let _held = had!(visit.run(&["hog", "16"], |_| {}));
        visit.stay().await;
        Ok(Ending::well())
    }
    "a context was saved and comes to the disk"(visit) {
        let name = format!("visit {}", visit.chance);
        let (mut raw, id) = had!(visit.run(&["save-and-wait", &name], |_| {}));
        had!(event_of(&mut raw, id, is_output));
        drop(raw);
        // It outlives who saved it.
        let (mut raw, id) = had!(visit.start(&["forget-one", &name], |_| {}));
        raw.follow(id).await
    }
    "guest opens what may be on disk"(visit) {
        let (mut raw, id) = had!(visit.run(&["open-in-vain"], |_| {}));
        had!(event_of(&mut raw, id, is_output));
        visit.stay().await;
        Ok(Ending::well())
    }
    "credit used up"(visit) {
        let change = |start: &mut Start| start.credit_bytes = LITTLE_CREDIT_BYTES;
        let (mut raw, id) = had!(visit.run(&["drip"], change));
        had!(event_of(&mut raw, id, is_output));
        visit.stay().await;
        Ok(Ending::well())
    }
    "no credit at all"(visit) {
        let _held = had!(visit.run(&["flood-text"], |start| start.credit_bytes = 0));
        visit.stay().await;
        Ok(Ending::well())
    }
    "in a conversation"(visit) {
        let (mut raw, to) = had!(visit.run(&["echo"], |_| {}));
        for _ in 0..1 + visit.below(4) {
            raw.request(Call::Message { to, text: "and then?".to_owned() }).await?;
            had!(event_of(&mut raw, to, is_output));
        }
        raw.request(Call::Message { to, text: "no answer to this is read".to_owned() }).await?;
        Ok(Ending::well())
    }
    "messages wait"(visit) {
        let (mut raw, to) = had!(visit.run(&["sleep"], |_| {}));
        for _ in 0..N_MESSAGES {
            raw.request(Call::Message { to, text: "x".repeat(2000) }).await?;
        }
        visit.stay().await;
        Ok(Ending::well())
    }
    "no more messages"(visit) {
        let (mut raw, id) = had!(visit.run(&["sleep"], |_| {}));
        raw.send(&ClientMessage::EndMessages { id }).await?;
        visit.stay().await;
        Ok(Ending::well())
    }
    "guest is recorded"(visit) {
        let _held = had!(visit.run(&["endless"], |start| start.is_recorded = true));
        visit.stay().await;
        Ok(Ending::well())
    }
    "recording is read"(visit) {
        let (mut raw, id) = had!(visit.run(&["endless"], |start| start.is_recorded = true));
        had!(event_of(&mut raw, id, |event| matches!(event, Event::Recorded { .. })));
        Ok(Ending::well())
    }
    "profile is on"(visit) {
        let (mut raw, id) = had!(visit.run(&["endless"], |start| start.is_profiled = true));
        had!(event_of(&mut raw, id, is_output));
        visit.stay().await;
        Ok(Ending::well())
    }
    "a frame of a running guest's client is cut"(visit) {
        let (mut raw, id) = had!(visit.run(&["endless"], |_| {}));
        had!(event_of(&mut raw, id, is_output));
        let bytes = frame(&ClientMessage::Credit { id, n_bytes: 1000 });
        raw.send_bytes(&bytes[..1 + visit.below(bytes.len() - 1)]).await?;
        Ok(Ending::well())
    }
    "client says nothing more"(visit) {
        let (mut raw, id) = had!(visit.run(&["endless"], |_| {}));
        had!(event_of(&mut raw, id, is_output));
        raw.finish().await?;
        visit.stay().await;
        Ok(Ending::well())
    }
    "several guests"(visit) {
        let (mut raw, _) = had!(visit.run(&["endless"], |_| {}));
        for mode in ["loop", "sleep", "flood-text"] {
            raw.start(&visit.site.hostile, &[mode]).await?;
        }
        visit.stay().await;
        Ok(Ending::well())
    }
    "cancelled"(visit) {
        let (mut raw, id) = had!(visit.run(&["loop"], |_| {}));
        raw.send(&ClientMessage::Cancel { id }).await?;
        Ok(Ending::well())
    }
    "cancelled to the end"(visit) {
        let (mut raw, id) = had!(visit.run(&["endless"], |_| {}));
        raw.send(&ClientMessage::Cancel { id }).await?;
        let ending = raw.end(id).await?;
        Ok(if ending.code == "cancelled" { Ending::well() } else { ending })
    }
    "guest has trapped"(visit) {
        let (mut raw, id) = had!(visit.start(&["panic"], |_| {}));
        let ending = raw.follow(id).await?;
        Ok(if ending.code == "guest_trapped" { Ending::well() } else { ending })
    }
    "guest has ended"(visit) {
        let (mut raw, id) = had!(visit.start(&["exit-well"], |_| {}));
        raw.follow(id).await
    }
    "closed in good order"(visit) {
        let (mut raw, id) = had!(visit.start(&["exit-well"], |_| {}));
        let ending = raw.follow(id).await?;
        raw.finish().await?;
        while raw.next().await?.is_some() {}
        Ok(ending)
    }
    "refused"(visit) {
        let change = |start: &mut Start| start.program = Program::Named { name: "oracle".to_owned() };
        let (mut raw, id) = had!(visit.start(&["loop"], change));
        let ending = raw.end(id).await?;
        Ok(if ending.code == "unknown_program" { Ending::well() } else { ending })
    }
}

/// Uploads a component and asks for a guest of it.
async fn compile(raw: &mut Raw, component: &Component) -> io::Result<Result<u64, Ending>> {
    let uploaded = raw.upload(component).await?;
    if !uploaded.is_well() {
        return Ok(Err(uploaded));
    }
    Ok(Ok(raw.start(component, &["loop"]).await?))
}
