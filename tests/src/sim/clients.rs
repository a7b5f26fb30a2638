//! Clients that use the client library, and what each of them holds against what it is told.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::Instant;
use trellis_client::{Client, Error, Event, Program, StartOptions};
use trellis_wire::ErrorCode;

use super::detached;
use super::lines::Lines;
use super::network::{End, Link};
use super::notes::{Fault, Notes};
use super::scene::{ClientScene, GiveUp, GuestScene, MODELS, N_CONNECTIONS_ENOUGH, RequestScene, Scene};
use super::script::{Script, message};
use super::service::SimService;

/// What a client knows of a scene.
#[derive(Clone)]
pub(super) struct Seat {
    pub(super) number: usize,
    pub(super) scene: ClientScene,
    pub(super) link: Link,
    pub(super) lines: Arc<Lines>,
    pub(super) service: Arc<SimService>,
}

/// The program that a guest is started from: the component of this name, or a named one.
pub(super) fn program(component_name: Option<u8>) -> Program {
    match component_name {
        Some(name) => Program::wasm(component(name)),
        None => Program::named("script"),
    }
}

/// The bytes of a component of this name.
pub(super) fn component(name: u8) -> Vec<u8> {
    (0..300 + 900 * usize::from(name)).map(|idx| (idx % 251) as u8 ^ name).collect()
}

impl Seat {
    pub(super) fn notes(&self) -> &Notes {
        &self.service.notes
    }

    /// The same client over another connection.
    pub(super) fn over(&self, link: Link) -> Self {
        Self { link, ..self.clone() }
    }

    fn all(&self) -> &Scene {
        &self.service.scene
    }

    /// Whether a connection may be lost.
    pub(super) fn may_be_lost(&self) -> bool {
        let notes = self.notes();
        self.link.is_cut()
            || notes.has(Fault::Shutdown)
            || notes.has(Fault::Crash)
            || self.all().n_connections < N_CONNECTIONS_ENOUGH
    }

    /// Whether a request may end so, whose client did this with it.
    pub(super) fn may_end(&self, code: &ErrorCode, is_given_up: bool) -> bool {
        let (notes, scene) = (self.notes(), self.all());
        match code {
            ErrorCode::Cancelled => is_given_up,
            ErrorCode::Stopped => notes.has(Fault::Stop),
            ErrorCode::UnknownGuest => true,
            ErrorCode::GuestTrapped => notes.has(Fault::Kill),
            ErrorCode::ShuttingDown => notes.has(Fault::Shutdown),
            ErrorCode::ModelUnloaded | ErrorCode::UnknownModel => notes.has(Fault::Unload),
            ErrorCode::DeviceFailed => notes.has(Fault::Device) || self.may_fail_for_good(),
            ErrorCode::EngineFailed => self.may_fail_for_good(),
            ErrorCode::BudgetExceeded => notes.has(Fault::Budget) || scene.budgets.is_limited,
            ErrorCode::LimitExceeded => scene.n_requests < 8 || scene.n_connections < N_CONNECTIONS_ENOUGH,
            _ => false,
        }
    }

    fn may_fail_for_good(&self) -> bool {
        self.notes().has(Fault::Step) || self.notes().has(Fault::Memory)
    }

    /// Holds an error against what was done to the scene.
    pub(super) fn judge(&self, what: &str, error: &Error, is_given_up: bool) {
        let may_be = match error {
            Error::Daemon(body) => self.may_end(&body.code, is_given_up),
            Error::ConnectionLost(_) | Error::Handshake(_) => self.may_be_lost(),
            Error::GuestEnded => true,
            _ => false,
        };
        self.notes().event(format_args!("client {}: {what}: {error}", self.number));
        self.notes().expect(may_be, || format!("client {}: {what} ended with {error:?}", self.number));
    }

    /// What the guest of this scene is to send.
    pub(super) fn script(&self, guest: &GuestScene) -> Script {
        Script::of(guest.script, guest.model, true)
    }
}

/// Lives.
pub(super) async fn run(seat: Seat, end: End) {
    tokio::time::sleep(seat.scene.comes).await;
    match seat.scene.leaves {
        None => live(&seat, end).await,
        Some(time) => {
            if tokio::time::timeout(time, live(&seat, end)).await.is_err() {
                seat.notes().fault(Fault::Leave);
            }
        }
    }
    seat.notes().event(format_args!("client {} leaves", seat.number));
}

async fn live(seat: &Seat, end: End) {
    let client = match Client::over(end).await {
        Ok(client) => client,
        Err(error) => return seat.judge("a connection", &error, false),
    };
    if seat.scene.is_at_once {
        join_all(seat.scene.requests.iter().map(|request| ask(seat, &client, request))).await;
        return;
    }
    for request in &seat.scene.requests {
        ask(seat, &client, request).await;
    }
}

async fn ask(seat: &Seat, client: &Client, request: &RequestScene) {
    let asked = match request {
        RequestScene::Guest(guest) => return ask_guest(seat, client, guest).await,
        RequestScene::Detached(scene) => return detached::ask(seat, client, scene).await,
        RequestScene::Models => client.models().await.map(|models| models.len()),
        RequestScene::Guests => client.ps().await.map(|guests| guests.len()),
        RequestScene::Limits => client.limits().await.map(|limits| limits.len()),
        RequestScene::Stop(number) => client.stop(*number).await.map(|()| 0),
    };
    match asked {
        Ok(n) => seat.notes().event(format_args!("client {}: {request:?}: {n}", seat.number)),
        Err(error) => seat.judge(&format!("{request:?}"), &error, false),
    }
}

async fn ask_guest(seat: &Seat, client: &Client, scene: &GuestScene) {
    let script = seat.script(scene);
    let program = program(scene.component);
    let options = StartOptions {
        arguments: vec![scene.script.to_string()],
        model: Some(MODELS[scene.model].to_owned()),
        ..StartOptions::default()
    };
    let mut guest = match client.start(program, options).await {
        Ok(guest) => guest,
        Err(error) => return seat.judge("a start", &error, false),
    };
    if !scene.pause.is_zero() {
        seat.notes().fault(Fault::SlowReader);
    }
    let sender = guest.sender();
    let mut is_given_up = false;
    let mut give_up = scene.give_up;
    let until = give_up.map_or_else(far, |GiveUp { after, .. }| Instant::now() + after);
    let talk = async {
        for n in 0..script.n_messages {
            if let Err(error) = sender.send(message(n)).await {
                seat.judge("a message", &error, true);
                // The guest would wait for it.
                sender.cancel();
                return true;
            }
        }
        false
    };
    let mut talk = std::pin::pin!(talk);
    let mut talks = true;
    let mut sent = script.sent();
    let result = loop {
        let next = tokio::select! {
            biased;
            has_failed = &mut talk, if talks => {
                talks = false;
                is_given_up |= has_failed;
                continue;
            }
            () = tokio::time::sleep_until(until), if give_up.is_some() => {
                let GiveUp { is_drop, .. } = give_up.take().expect("it is there");
                is_given_up = true;
                if is_drop {
                    seat.notes().fault(Fault::Drop);
                    return;
                }
                seat.notes().fault(Fault::Cancel);
                guest.cancel();
                continue;
            }
            next = guest.next() => next,
        };
        let output = match next {
            None => break Ok(()),
            Some(Err(error)) => break Err(error),
            Some(Ok(Event::Tokens { tokens })) => tokens,
            Some(Ok(Event::Text { text })) => text.bytes().map(u32::from).collect(),
            Some(Ok(_)) => continue,
        };
        let expected = sent.next();
        seat.notes().expect(expected == Some(&output), || {
            format!("client {}: script {} sent {output:?}, not {expected:?}", seat.number, scene.script)
        });
        if !scene.pause.is_zero() {
            tokio::time::sleep(scene.pause).await;
        }
    };
    match result {
        Ok(()) => {
            let n_missing = sent.count();
            seat.notes().event(format_args!("client {}: script {} is done", seat.number, scene.script));
            seat.notes().expect(n_missing == 0, || {
                format!("client {}: script {} ended {n_missing} outputs early", seat.number, scene.script)
            });
        }
        Err(error) => seat.judge(&format!("script {}", scene.script), &error, is_given_up),
    }
}

/// Later than everything.
pub(super) fn far() -> Instant {
    Instant::now() + Duration::from_secs(1 << 24)
}
