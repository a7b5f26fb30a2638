//! Clients that speak frames by hand: with little credit that comes late, and with messages that no library sends.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::io::{ReadHalf, WriteHalf};
use tokio::time::Instant;
use trellis_wire::{
    Call, ClientMessage, ErrorCode, Event, FRAME_BYTES_MAX, FrameBuffer, FrameReader, Hello, Outcome,
    Program, ServerMessage, Start, WireError,
};

use super::clients::{Seat, far};
use super::network::End;
use super::notes::Fault;
use super::scene::{GiveUp, GuestScene, MODELS, RequestScene};
use super::script::{Script, message};

/// Credit that a guest has at first, and gets again and again.
const CREDIT_BYTES: u64 = 300;
const CREDIT_EVERY: Duration = Duration::from_millis(15);

struct Asked {
    /// Of a guest: what it is to send, and how much of it has come.
    script: Option<(Script, usize)>,
    give_up: Option<(Instant, bool)>,
    is_given_up: bool,
    has_started: bool,
    /// Of a message: the guest that waits for it, and which of its messages it is.
    message: Option<(u64, usize)>,
}

struct Raw {
    seat: Seat,
    writer: WriteHalf<End>,
    asked: BTreeMap<u64, Asked>,
    last_id: u64,
}

/// Lives.
pub(super) async fn run(seat: Seat, end: End) {
    tokio::time::sleep(seat.scene.comes).await;
    let (number, leaves) = (seat.number, seat.scene.leaves);
    let notes = seat.service.notes.clone();
    let live = live(seat, end);
    match leaves {
        None => live.await,
        Some(time) => {
            if tokio::time::timeout(time, live).await.is_err() {
                notes.fault(Fault::Leave);
            }
        }
    }
    notes.event(format_args!("client {number} leaves"));
}

async fn live(seat: Seat, end: End) {
    let (mut reader, mut writer) = tokio::io::split(end);
    let hello = async {
        Hello::ours().write(&mut writer).await?;
        Hello::read(&mut reader).await
    };
    if let Err(error) = hello.await {
        return lost(&seat, &error);
    }
    let mut frames = FrameReader::new(reader, FRAME_BYTES_MAX);
    let mut raw = Raw { seat, writer, asked: BTreeMap::new(), last_id: 0 };
    let result = raw.talk(&mut frames).await;
    if let Err(error) = result {
        lost(&raw.seat, &error);
    }
}

fn lost(seat: &Seat, error: &WireError) {
    seat.notes().event(format_args!("client {}: {error}", seat.number));
    seat.notes()
        .expect(seat.may_be_lost(), || format!("client {} lost its connection: {error}", seat.number));
}

impl Raw {
    async fn send(&mut self, message: &ClientMessage) -> Result<(), WireError> {
        let mut frames = FrameBuffer::new(FRAME_BYTES_MAX);
        frames.push(message)?;
        frames.write(&mut self.writer).await
    }

    async fn request(&mut self, call: Call) -> Result<u64, WireError> {
        self.last_id += 1;
        let id = self.last_id;
        let asked =
            Asked { script: None, give_up: None, is_given_up: false, has_started: false, message: None };
        self.asked.insert(id, asked);
        self.send(&ClientMessage::Request { id, call }).await?;
        Ok(id)
    }

    async fn ask(&mut self, request: &RequestScene) -> Result<(), WireError> {
        match request {
            RequestScene::Models => self.request(Call::Models).await.map(drop),
            RequestScene::Guests => self.request(Call::Guests).await.map(drop),
            RequestScene::Limits => self.request(Call::Limits).await.map(drop),
            RequestScene::Stop(guest_id) => self.request(Call::Stop { guest_id: *guest_id }).await.map(drop),
            RequestScene::Guest(guest) => self.start(guest).await,
            RequestScene::Detached(_) => unreachable!("clients of the library read detached guests"),
        }
    }

    async fn start(&mut self, guest: &GuestScene) -> Result<(), WireError> {
        let start = Start {
            program: Program::Named { name: "script".to_owned() },
            arguments: vec![guest.script.to_string()],
            model: Some(MODELS[guest.model].to_owned()),
            seed: None,
            credit_bytes: CREDIT_BYTES,
            deadline_ms: None,
            label: None,
            is_recorded: false,
            is_profiled: false,
        };
        let id = self.request(Call::Start(start)).await?;
        self.seat.notes().fault(Fault::SlowReader);
        let script = self.seat.script(guest);
        let asked = self.asked.get_mut(&id).expect("it was just asked");
        asked.script = Some((script, 0));
        asked.give_up = guest.give_up.map(|GiveUp { after, is_drop }| (Instant::now() + after, is_drop));
        Ok(())
    }

    async fn talk(&mut self, frames: &mut FrameReader<ReadHalf<End>>) -> Result<(), WireError> {
        let requests = self.seat.scene.requests.clone();
        for request in &requests {
            self.ask(request).await?;
            if !self.seat.scene.is_at_once && !self.await_all(frames).await? {
                return Ok(());
            }
        }
        if !self.await_all(frames).await? || !self.seat.scene.breaks {
            return Ok(());
        }
        self.seat.notes().fault(Fault::Broken);
        self.send(&ClientMessage::Request { id: 0, call: Call::Models }).await?;
        let answer = frames.next().await?;
        let is_told = match &answer {
            Some(ServerMessage::Fault { error }) => {
                error.code == ErrorCode::Protocol || self.seat.may_end(&error.code, false)
            }
            None => self.seat.may_be_lost(),
            Some(_) => false,
        };
        let number = self.seat.number;
        self.seat.notes().expect(is_told, || format!("client {number}: a stale id was answered {answer:?}"));
        let rest: Option<ServerMessage> = frames.next().await?;
        self.seat.notes().expect(rest.is_none(), || format!("client {number}: {rest:?} after a fault"));
        Ok(())
    }

    /// Hears what comes until all requests have ended; says whether the connection goes on.
    async fn await_all(&mut self, frames: &mut FrameReader<ReadHalf<End>>) -> Result<bool, WireError> {
        let mut credit = Instant::now() + CREDIT_EVERY;
        while !self.asked.is_empty() {
            let give_up = self.asked.values().filter_map(|asked| asked.give_up).map(|(at, _)| at).min();
            tokio::select! {
                biased;
                message = frames.next() => match message? {
                    Some(message) => {
                        if !self.hear(message).await? {
                            return Ok(false);
                        }
                    }
                    None => {
                        let number = self.seat.number;
                        self.seat.notes().expect(self.seat.may_be_lost(), || format!("client {number} was left"));
                        return Ok(false);
                    }
                },
                () = tokio::time::sleep_until(give_up.unwrap_or_else(far)), if give_up.is_some() => {
                    self.give_up().await?;
                }
                () = tokio::time::sleep_until(credit) => {
                    credit = Instant::now() + CREDIT_EVERY;
                    let is_guest = |(&id, asked): (&u64, &Asked)| asked.script.is_some().then_some(id);
                    let ids: Vec<u64> = self.asked.iter().filter_map(is_guest).collect();
                    for id in ids {
                        self.send(&ClientMessage::Credit { id, n_bytes: CREDIT_BYTES }).await?;
                    }
                }
            }
        }
        Ok(true)
    }

    async fn give_up(&mut self) -> Result<(), WireError> {
        let now = Instant::now();
        let is_due =
            |(&id, asked): (&u64, &Asked)| asked.give_up.is_some_and(|(at, _)| at <= now).then_some(id);
        let due: Vec<u64> = self.asked.iter().filter_map(is_due).collect();
        for id in due {
            let asked = self.asked.get_mut(&id).expect("it is there");
            (asked.give_up, asked.is_given_up) = (None, true);
            self.seat.notes().fault(Fault::Cancel);
            self.send(&ClientMessage::Cancel { id }).await?;
        }
        Ok(())
    }

    async fn hear(&mut self, message: ServerMessage) -> Result<bool, WireError> {
        let number = self.seat.number;
        match message {
            ServerMessage::Event { id, event } => self.hear_event(id, event).await?,
            ServerMessage::End { id, outcome, .. } => {
                let Some(asked) = self.asked.remove(&id) else {
                    self.seat.notes().violation(format!("client {number}: request {id} ended twice"));
                    return Ok(false);
                };
                self.seat.notes().event(format_args!("client {number}: request {id} has ended"));
                match outcome {
                    Outcome::Ok { .. } => {
                        let n_missing = asked.script.map_or(0, |(script, n)| script.sent().count() - n);
                        self.seat.notes().expect(n_missing == 0, || {
                            format!("client {number}: request {id} ended {n_missing} outputs early")
                        });
                        if let Some((to, n)) = asked.message {
                            self.tell(to, n + 1).await?;
                        }
                    }
                    Outcome::Error { error } => {
                        let may_end = self.seat.may_end(&error.code, asked.is_given_up);
                        self.seat.notes().expect(may_end, || {
                            format!("client {number}: request {id} ended with {error:?}")
                        });
                        // The guest would wait for the message.
                        if let Some((id, _)) = asked.message
                            && let Some(guest) = self.asked.get_mut(&id)
                        {
                            guest.is_given_up = true;
                            self.send(&ClientMessage::Cancel { id }).await?;
                        }
                    }
                    Outcome::Unknown => self.seat.notes().violation("an outcome without a name".to_owned()),
                }
            }
            ServerMessage::Fault { error } => {
                let may_be = self.seat.may_be_lost();
                self.seat.notes().expect(may_be, || format!("client {number} was told {error:?}"));
                return Ok(false);
            }
            ServerMessage::Unknown => self.seat.notes().violation("a message without a name".to_owned()),
        }
        Ok(true)
    }

    /// Sends a guest one of the messages that it waits for; the next one follows when there was room for this one.
    async fn tell(&mut self, to: u64, n: usize) -> Result<(), WireError> {
        let n_messages =
            self.asked.get(&to).and_then(|asked| asked.script.as_ref()).map(|(it, _)| it.n_messages);
        if n_messages.is_none_or(|n_messages| n >= n_messages) {
            return Ok(());
        }
        let id = self.request(Call::Message { to, text: message(n) }).await?;
        let asked = self.asked.get_mut(&id).expect("it was just asked");
        (asked.message, asked.is_given_up) = (Some((to, n)), true);
        Ok(())
    }

    async fn hear_event(&mut self, id: u64, event: Event) -> Result<(), WireError> {
        let number = self.seat.number;
        let Some(asked) = self.asked.get_mut(&id) else {
            self.seat
                .notes()
                .violation(format!("client {number}: an event of request {id}, which has ended"));
            return Ok(());
        };
        let Some((script, n)) = &mut asked.script else {
            self.seat.notes().violation(format!("client {number}: {event:?} of request {id}"));
            return Ok(());
        };
        let output = match event {
            Event::Tokens { tokens } => tokens,
            Event::Text { text } => text.bytes().map(u32::from).collect(),
            Event::Started { .. } => {
                asked.has_started = true;
                return self.tell(id, 0).await;
            }
            _ => return Ok(()),
        };
        let (expected, idx) = (script.sent().nth(*n), *n);
        *n += 1;
        let is_right = asked.has_started && expected == Some(&output);
        let expected = expected.cloned();
        self.seat.notes().expect(is_right, || {
            format!("client {number}: output {idx} of request {id} is {output:?}, not {expected:?}")
        });
        Ok(())
    }
}
