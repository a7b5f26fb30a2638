//! Models that come and go as guests ask for them: the daemon's loader over a machine whose loads take virtual time, fail, are given
//! up and stand in each other's way.
//!
//! What has to hold: who asks has one answer, within a bound; who holds a model has it for as long; what is on the device is never
//! more than it has; a pinned model stays; in the end nobody waits, and nothing is left on the device.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::{join, join_all};
use tokio::time::{Instant, sleep, timeout};
use trellis::config::{CatalogModel, Config, Device as DeviceChoice};
use trellis::fuzzing::{Again, LoadListener, Loads, simulate_blocking};

use super::draws::Draws;
use super::guest::until_killed;
use super::machine::{self, SimMachine};
use super::mutation::Mutation;
use super::notes::{Fault, Notes};

/// Names of the models of the catalog.
pub(super) const CATALOG: [&str; 4] = ["alpha", "beta", "gamma", "delta"];

/// In which who asks for a model has an answer: several times what the longest load and the longest patience come to.
const ANSWER_TIME: Duration = Duration::from_secs(120);

/// In which all come to rest once nobody asks any more.
const REST_TIME: Duration = Duration::from_secs(60);

/// A model of the catalog.
#[derive(Clone, Copy, Debug)]
pub(super) struct LoadedScene {
    pub(super) weight_bytes: u64,
    pub(super) is_pinned: bool,
    pub(super) idle_ms: Option<u64>,
    pub(super) per_mille_failed: usize,
}

/// What happens to models.
#[derive(Clone, Debug)]
pub(super) struct LoadsScene {
    pub(super) capacity_bytes: u64,
    pub(super) models: Vec<LoadedScene>,
    wait_ms: u64,
    resident_ms: u64,
    /// How long what blocks takes: mostly not at all, then up to the first, and in a few up to the second.
    takes_ms: [usize; 2],
    askers: Vec<AskerScene>,
    deeds: Vec<(Duration, Deed)>,
    /// When the daemon takes on no more loads, and stops.
    ends: Option<(Duration, Duration)>,
}

#[derive(Clone, Debug)]
struct AskerScene {
    uid: u32,
    asks: Vec<AskScene>,
}

/// One question for a model.
#[derive(Clone, Copy, Debug)]
struct AskScene {
    after: Duration,
    model: usize,
    holds: Duration,
    /// When it waits no more.
    gives_up: Option<Duration>,
    /// After how many polls it is dropped where it waits.
    killed_after: Option<usize>,
}

/// What is done by who runs the daemon.
#[derive(Clone, Copy, Debug)]
enum Deed {
    Load { model: usize, killed_after: Option<usize> },
    Unload { model: usize, drain: Duration, killed_after: Option<usize> },
    Reopen,
}

fn ms(n: usize) -> Duration {
    Duration::from_millis(n as u64)
}

impl LoadsScene {
    pub(super) fn draw(draws: &mut Draws) -> Self {
        let is_calm = draws.happens(200);
        let n_models = draws.between(2, CATALOG.len());
        let model = |draws: &mut Draws| {
            let is_pinned = draws.happens(200);
            LoadedScene {
                weight_bytes: draws.between(1_000, 9_000) as u64,
                is_pinned,
                idle_ms: (!is_pinned && draws.happens(250)).then(|| draws.between(1, 400) as u64),
                per_mille_failed: if !is_calm && draws.happens(300) { draws.between(100, 900) } else { 0 },
            }
        };
        let killed_after = |draws: &mut Draws| (!is_calm && draws.happens(150)).then(|| draws.between(0, 12));
        let ask = |draws: &mut Draws| AskScene {
            after: ms(draws.pick(&[0, 0, 3, 50, 1_500])),
            model: draws.below(n_models),
            holds: ms(draws.pick(&[0, 5, 100, 700])),
            gives_up: (!is_calm && draws.happens(150)).then(|| ms(draws.below(300))),
            killed_after: killed_after(draws),
        };
        let deed = |draws: &mut Draws| {
            let model = draws.below(n_models);
            let deed = match draws.below(5) {
                0 => Deed::Reopen,
                1 | 2 => Deed::Load { model, killed_after: killed_after(draws) },
                _ => {
                    let drain = ms(draws.pick(&[0, 50, 1_000]));
                    Deed::Unload { model, drain, killed_after: killed_after(draws) }
                }
            };
            (ms(draws.below(3_000)), deed)
        };
        let n_askers = draws.between(2, 7);
        let n_deeds = if is_calm { 0 } else { draws.below(4) };
        let is_ended = !is_calm && draws.happens(200);
        Self {
            capacity_bytes: draws.between(5_000, 24_000) as u64,
            models: (0..n_models).map(|_| model(draws)).collect(),
            wait_ms: draws.pick(&[0, 300, 5_000, 60_000]),
            resident_ms: draws.pick(&[0, 50, 2_000, 30_000]),
            takes_ms: draws.pick(&[[0, 10], [10, 300], [5, 4_000]]),
            askers: (0..n_askers)
                .map(|_| AskerScene {
                    uid: 1000 + draws.below(3) as u32,
                    asks: (0..draws.between(1, 5)).map(|_| ask(draws)).collect(),
                })
                .collect(),
            deeds: (0..n_deeds).map(|_| deed(draws)).collect(),
            ends: is_ended.then(|| (ms(draws.below(2_000)), ms(draws.below(300)))),
        }
    }

    fn config(&self, notes: &Notes) -> Config {
        let is_forgotten = notes.makes(Mutation::ForgottenPin);
        let catalog = CATALOG.iter().zip(&self.models).map(|(name, model)| {
            let declared = CatalogModel {
                path: format!("nowhere/{name}"),
                is_pinned: model.is_pinned && !is_forgotten,
                idle_unload_ms: model.idle_ms,
                ..CatalogModel::default()
            };
            ((*name).to_owned(), declared)
        });
        Config {
            models: Vec::new(),
            catalog: catalog.collect(),
            device: DeviceChoice::Cpu,
            model_wait_ms: self.wait_ms,
            model_resident_ms: self.resident_ms,
            ..Config::default()
        }
    }
}

struct World {
    scene: LoadsScene,
    loads: Loads,
    notes: Arc<Notes>,
    /// Pinned models that were there.
    pinned: Mutex<BTreeSet<String>>,
    has_ended: AtomicBool,
}

/// Plays a scene, in a runtime whose clock is paused.
pub(super) async fn play(seed: u64, notes: Arc<Notes>, scene: LoadsScene) {
    let mut draws = Draws::of(seed, 6);
    simulate_blocking(Some(Box::new(takes(&scene, draws.fork(), notes.clone()))));
    // A device that was not opened again is opened by the next load.
    let n_engines = 2 + 2 * scene.deeds.len();
    let (machine, loops) = SimMachine::begin(&scene, n_engines, draws.fork(), notes.clone());
    let loads = Loads::start(scene.config(&notes), machine.clone()).expect("nothing is loaded at the start");
    let (pinned, has_ended) = (Mutex::default(), AtomicBool::new(false));
    let world = Arc::new(World { scene, loads, notes: notes.clone(), pinned, has_ended });
    let playing = async {
        world.clone().live().await;
        drop(world);
        // Engines and what was on them go with the loader.
        sleep(Duration::from_secs(10)).await;
        machine.check_empty();
    };
    let turning = async {
        machine::turn(loops, draws, &notes).await;
        std::future::pending().await
    };
    tokio::select! {
        biased;
        () = notes.violated() => {}
        () = playing => {}
        () = turning => {}
    }
    simulate_blocking(None);
}

/// How long each thing takes that blocks.
fn takes(scene: &LoadsScene, mut draws: Draws, notes: Arc<Notes>) -> impl FnMut() -> Duration + 'static {
    let [short, long] = scene.takes_ms;
    move || {
        if notes.makes(Mutation::LostLoad) && draws.happens(50) {
            return Duration::from_secs(1 << 20);
        }
        ms(match draws.below(10) {
            0..6 => 0,
            6..9 => draws.below(short + 1),
            _ => draws.below(long + 1),
        })
    }
}

impl World {
    async fn live(self: Arc<Self>) {
        let askers = self.scene.askers.clone().into_iter().enumerate().map(|(number, asker)| {
            let world = self.clone();
            tokio::spawn(async move { world.ask_all(number as u64 + 1, asker).await })
        });
        let deeds = self.scene.deeds.clone().into_iter().map(|(at, deed)| {
            let world = self.clone();
            tokio::spawn(async move {
                sleep(at).await;
                world.act(deed).await;
            })
        });
        let tasks: Vec<_> = askers.chain(deeds).collect();
        let ending = async {
            let Some((at, later)) = self.scene.ends else { return };
            sleep(at).await;
            self.has_ended.store(true, Ordering::Relaxed);
            self.notes.event(format_args!("no more is loaded"));
            self.loads.load_no_more();
            sleep(later).await;
            self.notes.fault(Fault::Shutdown);
            self.loads.stop();
        };
        let (ended, ()) = join(join_all(tasks), ending).await;
        self.notes.expect(ended.iter().all(Result::is_ok), || "an asker or a deed panicked".to_owned());
        // Loads that were given up last hear of it.
        sleep(Duration::from_secs(1)).await;
        let Ok((tenants, n_waiting)) = timeout(REST_TIME, self.loads.at_rest()).await else {
            return self.notes.violation(format!("loads are under way {REST_TIME:?} after all have left"));
        };
        self.notes.event(format_args!("at rest with {tenants:?}"));
        self.notes.expect(n_waiting == 0, || format!("{n_waiting} loads wait and nobody waits for them"));
        self.check_pinned();
        self.loads.load_no_more();
        self.loads.stop();
    }

    fn pinned(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.pinned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether who runs the daemon may have sent models off.
    fn may_go(&self) -> bool {
        [Fault::Unload, Fault::Reopen, Fault::Shutdown].into_iter().any(|fault| self.notes.has(fault))
    }

    fn check_pinned(&self) {
        let names = self.loads.names();
        let mut pinned = self.pinned();
        let missing = pinned.iter().find(|name| !names.contains(name));
        self.notes
            .expect(missing.is_none() || self.may_go(), || format!("{missing:?} is pinned and has gone"));
        let is_pinned = |name: &&String| {
            CATALOG.iter().zip(&self.scene.models).any(|(known, model)| known == name && model.is_pinned)
        };
        pinned.extend(names.iter().filter(is_pinned).cloned());
    }

    async fn ask_all(&self, guest: u64, asker: AskerScene) {
        for ask in asker.asks {
            sleep(ask.after).await;
            self.ask(guest, asker.uid, ask).await;
            self.check_pinned();
        }
    }

    async fn ask(&self, guest: u64, uid: u32, ask: AskScene) {
        let (name, notes) = (CATALOG[ask.model], &self.notes);
        notes.event(format_args!("guest {guest} of user {uid} asks for {name}"));
        let is_answered = Arc::new(AtomicBool::new(false));
        let (heard, hears) = (is_answered.clone(), notes.clone());
        let listener = LoadListener::new(move |model, done, total| {
            hears.event(format_args!("guest {guest} hears of {model}: {done} of {total} bytes"));
            let is_late = heard.load(Ordering::Relaxed);
            hears.expect(!is_late, || format!("guest {guest} hears of {model}, which it has"));
        });
        let opening = until_killed(ask.killed_after, self.loads.open(name, (guest, uid), listener));
        let patience = ask.gives_up.unwrap_or(ANSWER_TIME);
        let answer = timeout(patience, opening).await;
        is_answered.store(true, Ordering::Relaxed);
        match answer {
            Err(_) if ask.gives_up.is_none() => {
                notes.violation(format!("guest {guest} has no answer for {name} in {ANSWER_TIME:?}"));
            }
            Err(_) | Ok(None) => notes.fault(Fault::GivenUp),
            Ok(Some(Ok(held))) => {
                notes.event(format_args!("guest {guest} has {name}"));
                let is_it = held.model.model().name == name;
                notes.expect(is_it, || format!("guest {guest} has {:?} for {name}", held.model.device()));
                self.hold(guest, &held.model, ask.holds).await;
                notes.event(format_args!("guest {guest} lets {name} go"));
            }
            Ok(Some(Err((reason, again)))) => {
                notes.event(format_args!("guest {guest} does not get {name}: {again:?}: {reason}"));
                let may_be = match again {
                    Again::Later => true,
                    Again::NextDaemon => self.has_ended.load(Ordering::Relaxed),
                    Again::Never => self.may_never_come(ask.model),
                };
                notes.expect(may_be, || format!("guest {guest} is never to have {name}: {reason}"));
            }
        }
    }

    /// Uses a model for so long. Nobody but who runs the daemon takes it away.
    async fn hold(&self, guest: u64, model: &trellis_engine::ModelHandle, holds: Duration) {
        let until = Instant::now() + holds;
        loop {
            let used = timeout(ANSWER_TIME, model.stats()).await;
            let works = matches!(used, Ok(Ok(_))) && !model.is_unloaded();
            self.notes.expect(works || self.may_go(), || {
                format!("guest {guest} holds {} which has gone: {used:?}", model.model().name)
            });
            if Instant::now() >= until {
                return;
            }
            sleep(ms(50).min(holds)).await;
        }
    }

    /// Whether something is wrong with a model, or it is too large beside what is pinned.
    fn may_never_come(&self, model: usize) -> bool {
        let scene = &self.scene;
        let others = scene.models.iter().enumerate().filter(|(idx, other)| *idx != model && other.is_pinned);
        let bytes = |model: &LoadedScene| model.weight_bytes + machine::KV_BYTES_MIN;
        let n_bytes = others.map(|(_, other)| bytes(other)).sum::<u64>() + bytes(&scene.models[model]);
        self.notes.has(Fault::Load) || self.may_go() || n_bytes > scene.capacity_bytes
    }

    async fn act(&self, deed: Deed) {
        let notes = &self.notes;
        notes.event(format_args!("{deed:?}"));
        match deed {
            Deed::Load { model, killed_after } => {
                let loading = until_killed(killed_after, self.loads.load(CATALOG[model]));
                let Ok(loaded) = timeout(ANSWER_TIME, loading).await else {
                    return notes.violation(format!("a load of {} has no end", CATALOG[model]));
                };
                // A load that nobody waits for has its model go again.
                if loaded.is_none() {
                    notes.fault(Fault::Unload);
                }
                notes.event(format_args!(
                    "{deed:?}: {:?}",
                    loaded.map(|it| it.map_err(|error| error.to_string()))
                ));
            }
            Deed::Unload { model, drain, killed_after } => {
                notes.fault(Fault::Unload);
                let unloading = until_killed(killed_after, self.loads.unload(CATALOG[model], drain));
                let Ok(unloaded) = timeout(ANSWER_TIME, unloading).await else {
                    return notes.violation(format!("{} does not go", CATALOG[model]));
                };
                notes.event(format_args!(
                    "{deed:?}: {:?}",
                    unloaded.map(|it| it.map_err(|error| error.to_string()))
                ));
            }
            Deed::Reopen => {
                notes.fault(Fault::Reopen);
                let Ok(reopened) = timeout(ANSWER_TIME, self.loads.reopen(REST_TIME)).await else {
                    return notes.violation("the device is not opened again".to_owned());
                };
                notes.event(format_args!("{deed:?}: {:?}", reopened.map_err(|error| error.to_string())));
            }
        }
    }
}
