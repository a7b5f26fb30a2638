//! A scene from its beginning to its end, and what must hold then: nothing is left of it.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::future::{join, join_all};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use trellis::guest::GuestLimits;
use trellis::session::{Actor, SessionLimits, Sessions};
use trellis_client::Client;
use trellis_engine::EngineSettings;
use trellis_engine::fuzzing::{Awaited, EngineHolds, EngineLoop};
use trellis_engine::model::Model;

use super::clients::{self, Seat};
use super::device::Clock;
use super::draws::Draws;
use super::lines::Lines;
use super::notes::{Fault, Notes};
use super::scene::{End, LinkScene, MODELS, Scene, Unload};
use super::script::{N_NAMES, saved_name};
use super::service::{OPERATOR, SimService};
use super::{raw, wiretap};

/// In which clients have to come to their ends, whatever is done to them: several times what the slowest scene needs.
const CLIENTS_TIME: Duration = Duration::from_secs(120);

/// In which sessions have to end whose clients have left, or that are told to.
const SESSIONS_TIME: Duration = Duration::from_secs(30);

/// In which a guest has to stop.
const STOP_MS: u64 = 2_000;

/// Turns of an engine that does not come to rest.
const N_TURNS_MAX: u64 = 1_000_000;

/// The model whose tokenizer and shape all models here have.
fn model() -> Arc<Model> {
    static MODEL: OnceLock<Arc<Model>> = OnceLock::new();
    MODEL.get_or_init(|| Arc::new(crate::models::bundled("draft"))).clone()
}

struct World {
    service: Arc<SimService>,
    sessions: Arc<Sessions<SimService>>,
    notes: Arc<Notes>,
    lines: Arc<Lines>,
}

/// Plays the scene of a seed, in a runtime whose clock is paused.
pub(super) async fn play(seed: u64, scene: Scene, notes: Arc<Notes>) {
    let settings = EngineSettings {
        prefix_scope: scene.prefix_scope,
        n_step_tokens: scene.n_step_tokens,
        port: scene.port,
        ..EngineSettings::default()
    };
    let (engine, mut turning) = EngineLoop::begin(settings);
    let (clock, draws) = (Clock::default(), Draws::of(seed, 2));
    let service = SimService::new(scene, engine, model(), clock.clone(), draws, notes.clone());
    let over = CancellationToken::new();
    let driving = async {
        tokio::select! {
            biased;
            () = over.cancelled() => {}
            () = drive(&mut turning, &clock, Draws::of(seed, 3), &notes) => over.cancelled().await,
        }
    };
    let scenario = async {
        tokio::select! {
            biased;
            () = notes.violated() => {}
            () = live(seed, service.clone()) => {}
        }
        over.cancel();
    };
    join(driving, scenario).await;
    if notes.first_violation().is_none() {
        check_engine(&mut turning, &service);
    }
}

/// Turns an engine's loop: its thread, as a task.
async fn drive(engine: &mut EngineLoop, clock: &Clock, mut draws: Draws, notes: &Notes) {
    for _ in 0..N_TURNS_MAX {
        let awaited = match engine.turn(Instant::now().into_std()) {
            Ok(awaited) => awaited,
            Err(failure) => return notes.event(format_args!("the engine has failed: {failure}")),
        };
        if draws.happens(50) {
            // What it returns is compared with the accounts when all is over.
            let _ = engine.check();
        }
        let done = clock.oldest();
        let step = async {
            match done {
                Some(done) => sleep_until(done).await,
                None => std::future::pending().await,
            }
        };
        match awaited {
            Awaited::Nothing if draws.happens(500) => tokio::task::yield_now().await,
            Awaited::Nothing => {}
            Awaited::Device => {
                step.await;
                engine.collect();
            }
            Awaited::DeviceOrInput => {
                let is_done = tokio::select! {
                    biased;
                    () = step => true,
                    () = engine.input() => false,
                };
                if is_done {
                    engine.collect();
                }
            }
            Awaited::Input => engine.input().await,
            Awaited::InputBefore(moment) => {
                let is_done = tokio::select! {
                    biased;
                    () = step => true,
                    () = sleep_until(moment.into()) => false,
                    () = engine.input() => false,
                };
                // A step that the thread computes is not known to be done.
                if is_done && !engine.is_done() {
                    tokio::select! {
                        biased;
                        () = sleep_until(moment.into()) => {}
                        () = engine.input() => {}
                    }
                }
            }
            Awaited::LayersOrInput => panic!("no script draws under late masks"),
            Awaited::Stopped => return notes.violation("the engine has stopped".to_owned()),
        }
    }
    notes.violation(format!("the engine does not come to rest in {N_TURNS_MAX} turns"));
}

async fn live(seed: u64, service: Arc<SimService>) {
    let scene = service.scene.clone();
    let limits = SessionLimits {
        n_connections: scene.n_connections,
        n_requests: scene.n_requests,
        stop_ms: STOP_MS,
        n_detached: scene.detached.n_max,
        n_detached_ended: scene.detached.n_ended,
        detached_bytes: 0,
        detached_kept_bytes: scene.detached.kept_bytes,
        detached_idle_ms: scene.detached.idle_ms,
        detached_ended_ms: scene.detached.ended_ms,
        ..SessionLimits::default()
    };
    let sessions = Sessions::new(service.clone(), limits, GuestLimits::default());
    let notes = service.notes.clone();
    let draws = &mut Draws::of(seed, 4);
    let lines = Arc::new(Lines::new(sessions.clone(), service.clone(), draws.fork()));
    let world = World { service, sessions, notes, lines };
    let mut living = Vec::new();
    for (number, scene) in scene.clients.iter().enumerate() {
        let actor = Actor { uid: scene.uid, gid: scene.uid };
        let (link, end) = world.lines.connect(actor, scene.link);
        let (lines, service) = (world.lines.clone(), world.service.clone());
        let seat = Seat { number, scene: scene.clone(), link, lines, service };
        living.push(match seat.scene.is_raw {
            true => tokio::spawn(raw::run(seat, end)),
            false => tokio::spawn(clients::run(seat, end)),
        });
    }
    let operating = world.operate();
    let lived = timeout(CLIENTS_TIME, async {
        for (number, ended) in join_all(living).await.into_iter().enumerate() {
            world.notes.expect(ended.is_ok(), || format!("client {number} panicked"));
        }
        if let Some(operating) = operating {
            world.notes.expect(operating.await.is_ok(), || "the operator panicked".to_owned());
        }
    });
    if lived.await.is_err() {
        return world.notes.violation(format!("clients have not come to their ends in {CLIENTS_TIME:?}"));
    }
    world.end().await;
}

impl World {
    /// What happens to the daemon meanwhile.
    fn operate(&self) -> Option<JoinHandle<()>> {
        let Scene { end, unload, share, .. } = self.service.scene.clone();
        if matches!(end, End::Left) && unload.is_none() && share.is_none() {
            return None;
        }
        let link = LinkScene { capacity: 4096, split_max: 4096, delay_ms: 0, cut: None };
        let (_, end_of_link) = self.lines.connect(OPERATOR, link);
        let (service, notes, lines) = (self.service.clone(), self.notes.clone(), self.lines.clone());
        Some(tokio::spawn(async move {
            let begun = Instant::now();
            let client = Client::over(end_of_link).await.expect("the daemon answers its operator");
            let sharing = async {
                let Some((at, per_mille)) = share else { return };
                sleep_until(begun + at).await;
                let total: u64 = service.scene.models.iter().map(|model| model.n_pages as u64 * 128).sum();
                match service.engine.share(total * per_mille / 1000) {
                    Ok(shared) => {
                        let shared = shared.await.map_err(|error| error.to_string());
                        notes.event(format_args!("memory is shared anew: {shared:?}"));
                    }
                    Err(error) => notes.event(format_args!("memory is not shared anew: {error}")),
                }
            };
            let unloading = async {
                let Some(Unload { at, model, drain, comes_back }) = unload else { return };
                sleep_until(begun + at).await;
                notes.fault(Fault::Unload);
                let unloaded = client.unload_model(MODELS[model], Some(drain)).await;
                notes.event(format_args!("unloaded: {:?}", unloaded.map_err(|error| error.to_string())));
                if comes_back {
                    let loaded = client.load_model(MODELS[model], None, |_, _| {}).await;
                    notes.event(format_args!("loaded: {:?}", loaded.map_err(|error| error.to_string())));
                }
            };
            let ending = async {
                match end {
                    End::Left => {}
                    End::Shutdown(at) => {
                        sleep_until(begun + at).await;
                        let told = client.shutdown().await.map_err(|error| error.to_string());
                        notes.event(format_args!("told to shut down: {told:?}"));
                    }
                    End::Crash(at) => {
                        sleep_until(begun + at).await;
                        notes.fault(Fault::Crash);
                        lines.crash();
                    }
                }
            };
            join(join(sharing, unloading), ending).await;
        }))
    }

    /// All clients have left.
    async fn end(self) {
        let [serving, hung] = self.lines.take_serving();
        for (sessions, why) in [(serving, "their clients left"), (hung, "they were told to")] {
            let ended = timeout(SESSIONS_TIME, join_all(sessions)).await;
            let Ok(ended) = ended else {
                return self
                    .notes
                    .violation(format!("sessions have not ended {SESSIONS_TIME:?} after {why}"));
            };
            for session in ended {
                let has_panicked = session.is_err_and(|error| error.is_panic());
                self.notes.expect(!has_panicked, || "a session panicked".to_owned());
            }
            self.service.shutdown.cancel();
        }
        let detached_ended = async {
            while self.sessions.used(OPERATOR).all.n_detached > 0 {
                sleep(Duration::from_millis(1)).await;
            }
        };
        if timeout(SESSIONS_TIME, detached_ended).await.is_err() {
            return self.notes.violation(format!("detached guests have not ended in {SESSIONS_TIME:?}"));
        }
        for link in &self.lines.links() {
            if let Err(violation) = wiretap::check(&link.tapes()) {
                self.notes.violation(violation);
            }
        }
        self.let_go_of_saved().await;
        self.check().await;
    }

    async fn let_go_of_saved(&self) {
        for uid in self.service.uids() {
            let owner = self.service.owner_of(uid).await;
            for model in self.service.handles() {
                for name in 0..N_NAMES {
                    // Most were not saved.
                    let _ = model.forget(&owner, &saved_name(name)).await;
                }
            }
        }
    }

    async fn check(&self) {
        let Self { service, sessions, notes, .. } = self;
        // What dropped its guest may still tell the guest's task so.
        tokio::time::sleep(Duration::from_millis(100)).await;
        for model in service.handles() {
            let Ok(stats) = model.stats().await else { continue };
            let n_free = stats.n_pages_free + stats.n_pages_cached;
            let is_empty = stats.n_contexts == 0 && stats.n_saved == 0 && n_free == stats.n_pages;
            notes.expect(is_empty, || format!("{} holds {stats:?}", model.device()));
        }
        let (n_alive, n_sessions, n_uploads) =
            (service.n_alive(), service.n_sessions(), sessions.n_uploads());
        notes.expect((n_alive, n_sessions, n_uploads) == (0, 0, 0), || {
            format!("{n_alive} guests, {n_sessions} sessions and {n_uploads} uploads are left")
        });
        for client in &service.scene.clients {
            let used = sessions.used(Actor { uid: client.uid, gid: client.uid });
            notes.expect(used == Default::default(), || format!("user {} still uses {used:?}", client.uid));
        }
    }
}

/// Holds against nothing what an engine and the accounts keep when all is over.
fn check_engine(engine: &mut EngineLoop, service: &SimService) {
    let notes = &service.notes;
    for _ in 0..N_TURNS_MAX {
        match engine.turn(Instant::now().into_std()) {
            Ok(Awaited::Device | Awaited::DeviceOrInput) => engine.collect(),
            Ok(Awaited::Nothing | Awaited::InputBefore(_)) if engine.holds().n_steps_under_way > 0 => {}
            Ok(Awaited::Nothing) => {}
            _ => break,
        }
    }
    let (holds, n_held) = (engine.holds(), engine.check());
    notes.expect(holds == EngineHolds::default() && n_held == 0, || {
        format!("the engine keeps {holds:?} and {n_held} pages")
    });
    let charged = service.charged();
    notes.expect(charged.is_empty(), || format!("{charged:?} are charged to nobody"));
}
