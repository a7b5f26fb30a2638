//! Guests that go on without their connection: over however many connections one is read, what has come is what it has sent, once
//! and in order.

use std::time::Duration;

use tokio::time::{sleep, timeout};
use trellis::session::Actor;
use trellis_client::{Attached, Client, Error, Event, StartOptions};
use trellis_wire::ErrorCode;

use super::clients::{Seat, program};
use super::mutation::Mutation;
use super::notes::Fault;
use super::scene::{CutKind, DetachedScene, LinkScene, MODELS, ReadingScene};
use super::script::Script;

/// How long a client looks at a connection of which nobody says that it is silent.
const SILENCE: Duration = Duration::from_millis(400);

/// What a client has of its guest.
struct Read<'a> {
    guest_id: u64,
    scene: &'a DetachedScene,
    /// All that the guest is to send, one after the other.
    expected: Vec<u32>,
    /// By their numbers.
    events: Vec<Vec<u32>>,
    /// Of what is expected, what has come.
    n_units: usize,
    /// Readers that stayed when others came.
    stayed: Vec<(Client, Attached)>,
    has_ended: bool,
}

/// Starts a guest that goes on alone, and reads it as the scene says.
pub(super) async fn ask(seat: &Seat, client: &Client, scene: &DetachedScene) {
    let guest = &scene.guest;
    let options = StartOptions {
        arguments: vec![guest.script.to_string(), scene.n_texts.to_string()],
        model: Some(MODELS[guest.model].to_owned()),
        ..StartOptions::default()
    };
    let guest_id = match client.start_detached(program(guest.component), options, |_| {}).await {
        Ok(guest_id) => guest_id,
        Err(error) => return judge(seat, "a detached start", &error),
    };
    seat.notes().event(format_args!("client {}: guest {guest_id} is detached", seat.number));
    let script = Script::alone(guest.script, guest.model, scene.n_texts);
    let expected = script.sent().flatten().copied().collect();
    let (events, stayed) = (Vec::new(), Vec::new());
    let mut read = Read { guest_id, scene, expected, events, n_units: 0, stayed, has_ended: false };
    for reading in &scene.readings {
        read.over_one(seat, *reading).await;
    }
    if scene.is_read_out && !read.has_ended {
        let link = LinkScene { capacity: 65_536, split_max: 65_536, delay_ms: 0, cut: None };
        let n_events = usize::MAX;
        let (is_from_next, acknowledges, stays) = (true, false, false);
        let after = Duration::ZERO;
        let last = ReadingScene { after, link, n_events, is_from_next, acknowledges, stays };
        read.over_one(seat, last).await;
    }
    read.end(seat).await;
}

/// Holds an error of what is asked of a detached guest against what was done to the scene.
fn judge(seat: &Seat, what: &str, error: &Error) {
    let limits = seat.service.scene.detached;
    let notes = seat.notes();
    let may_be = match error.code() {
        // Who has heard the end says so, and over a connection that falls silent then has not heard it after all.
        Some(ErrorCode::UnknownGuest) => {
            notes.has(Fault::Shutdown) || notes.has(Fault::Silence) || limits.may_forget()
        }
        Some(ErrorCode::DeadlineExceeded) => limits.idle_ms < 3_600_000,
        Some(ErrorCode::LimitExceeded) if limits.n_max < 32 => true,
        _ => return seat.judge(what, error, false),
    };
    notes.event(format_args!("client {}: {what}: {error}", seat.number));
    notes.expect(may_be, || format!("client {}: {what} ended with {error:?}", seat.number));
}

impl Read<'_> {
    /// Reads over one connection, which may fall silent.
    async fn over_one(&mut self, seat: &Seat, reading: ReadingScene) {
        sleep(reading.after).await;
        if self.has_ended {
            return;
        }
        let actor = Actor { uid: seat.scene.uid, gid: seat.scene.uid };
        let (link, end) = seat.lines.connect(actor, reading.link);
        let seat = seat.over(link);
        let is_silent = reading.link.cut.is_some_and(|cut| cut.kind == CutKind::Silence);
        let going_on = async {
            match Client::over(end).await {
                Ok(client) => self.attach(&seat, client, reading).await,
                Err(error) => judge(&seat, "a connection to attach", &error),
            }
        };
        match is_silent {
            false => going_on.await,
            // Whether it was silent or only slow.
            true => drop(timeout(SILENCE, going_on).await),
        }
    }

    async fn attach(&mut self, seat: &Seat, client: Client, reading: ReadingScene) {
        let n_read = self.events.len() as u64;
        let from = reading.is_from_next.then_some(n_read);
        let mut attached = match client.attach(self.guest_id, from).await {
            Ok(attached) => attached,
            Err(error) => return judge(seat, "an attach", &error),
        };
        seat.notes().fault(Fault::Reattach);
        let first = attached.next_number();
        seat.notes().expect(first <= n_read, || {
            format!("guest {}: events {n_read}..{first} were never read and are gone", self.guest_id)
        });
        for _ in 0..reading.n_events {
            let number = attached.next_number();
            match attached.next().await {
                Some(Ok(event)) => self.take(seat, number, event),
                end => return self.hear_end(seat, end),
            }
            if !self.scene.guest.pause.is_zero() {
                sleep(self.scene.guest.pause).await;
            }
        }
        if seat.notes().makes(Mutation::ForgottenEvent) && self.events.len() > 1 {
            let forgotten = self.events.pop().expect("there are several");
            self.n_units -= forgotten.len();
        }
        if reading.acknowledges {
            attached.acknowledge();
        }
        if reading.stays {
            self.stayed.push((client, attached));
        }
    }

    fn take(&mut self, seat: &Seat, number: u64, event: Event) {
        let units: Vec<u32> = match event {
            Event::Tokens { tokens } => tokens,
            Event::Text { text } => text.bytes().map(u32::from).collect(),
            _ => return,
        };
        let (notes, guest) = (seat.notes(), self.guest_id);
        let number = usize::try_from(number).expect("there are few");
        if let Some(known) = self.events.get(number) {
            notes.expect(*known == units, || {
                format!("guest {guest}: event {number} was {known:?}, now {units:?}")
            });
            return;
        }
        let end = self.n_units + units.len();
        let is_next = number == self.events.len() && self.expected.get(self.n_units..end) == Some(&units);
        notes.expect(is_next, || {
            let (n_events, n_units) = (self.events.len(), self.n_units);
            format!("guest {guest}: event {number} after {n_events} events of {n_units} units is {units:?}")
        });
        self.events.push(units);
        self.n_units = end;
    }

    fn hear_end(&mut self, seat: &Seat, end: Option<Result<Event, Error>>) {
        let notes = seat.notes();
        match end {
            None => {
                self.has_ended = true;
                let (n_units, n_all) = (self.n_units, self.expected.len());
                notes.event(format_args!("client {}: guest {} is read", seat.number, self.guest_id));
                notes.expect(n_units == n_all, || {
                    format!("guest {} ended well after {n_units} of {n_all} units", self.guest_id)
                });
            }
            Some(Err(error)) => {
                self.has_ended = matches!(error, Error::Daemon(_));
                judge(seat, "the reading of a detached guest", &error);
            }
            Some(Ok(event)) => notes.violation(format!("{event:?} is no end")),
        }
    }

    /// All connections go; those that stayed have heard that others came.
    async fn end(self, seat: &Seat) {
        for (client, mut attached) in self.stayed {
            let heard = async {
                loop {
                    match attached.next().await {
                        Some(Ok(_)) => {}
                        end => return end,
                    }
                }
            };
            // It may be the last, of a guest that goes on.
            if let Ok(Some(Err(error))) = timeout(SILENCE, heard).await {
                if error.code() == Some(&ErrorCode::TakenOver) {
                    seat.notes().fault(Fault::TakenOver);
                }
                seat.notes().event(format_args!("client {}: a reader that stayed: {error}", seat.number));
            }
            drop(client);
        }
    }
}
