//! Guests that are given up at random moments, while others do the same: not one cancel is lost, and nothing of any guest
//! is left.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use trellis::config::Config;
use trellis::daemon::Daemon;
use trellis::guest::GuestLimits;
use trellis_client::{Client, Event, Guest, Program, Stage};
use trellis_tests::daemons::{self, PATIENCE, collect, nothing_is_held, until, with};
use trellis_tests::engines::{Random, block_on, block_on_for};
use trellis_tests::guests;

use crate::exe;

const N_CANCELS: usize = 20_000;
const N_CANCELS_SCALED: usize = 500;

/// Each has one guest at a time; so many share a connection.
const N_TASKS: u64 = 24;
const N_TASKS_PER_CLIENT: u64 = 3;

/// Of so many starts in a row, those of new components share one.
const N_STARTS_PER_COMPONENT: u64 = 40;

/// Numbers of new components from here on are those of guests that are started one by one.
const AFTER_THE_STORM: u64 = 1 << 32;

/// What never ends by itself in less than [`PATIENCE`]: its processor time and its deadline are longer.
const MODES: [&str; 7] =
    ["endless", "sleep", "loop", "flood-text", "flood-tokens", "flood-log", "wait-for-messages"];

/// How guests were given up, and how far they were.
#[derive(Debug, Default)]
struct Tally {
    n_begun: AtomicUsize,
    n_cancelled: AtomicUsize,
    n_dropped: AtomicUsize,
    n_left: AtomicUsize,
    n_before_all: AtomicUsize,
    n_uploading: AtomicUsize,
    n_compiling: AtomicUsize,
    n_running: AtomicUsize,
}

struct Storm {
    daemon: Daemon,
    tally: Tally,
    n_starts: AtomicU64,
    n_cancels: usize,
}

fn add(counter: &AtomicUsize) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl Storm {
    fn program(&self, random: &mut Random) -> Program {
        let number = self.n_starts.fetch_add(1, Ordering::Relaxed);
        match random.below(10) {
            // A new component: several starts of it meet in its upload, its compile and its load.
            0..3 => Program::wasm(guests::hostile_anew(number / N_STARTS_PER_COMPONENT)),
            _ => Program::wasm(guests::hostile()),
        }
    }

    /// One task: starts guests and gives them up, until enough were.
    async fn weather(self: Arc<Self>, client: Client, seed: u64) {
        let mut random = Random(seed);
        let mut client = client;
        while self.tally.n_begun.fetch_add(1, Ordering::Relaxed) < self.n_cancels {
            let options = with(&[MODES[random.below(MODES.len())]]);
            let guest = client.start(self.program(&mut random), options).await.expect("connected");
            let us_max = [0, 300, 3_000, 30_000, 300_000][random.below(5)];
            if us_max > 0 {
                tokio::time::sleep(Duration::from_micros(random.below(us_max) as u64)).await;
            }
            match random.below(20) {
                0..14 => self.cancel(guest, None, false, &mut random).await,
                14..19 => {
                    drop(guest);
                    add(&self.tally.n_dropped);
                }
                _ => {
                    // The whole client goes, and its guests with it, those of other tasks not.
                    client = self.daemon.connect().await.expect("connected");
                    drop(guest);
                    add(&self.tally.n_left);
                }
            }
        }
    }

    /// Starts guests of new components and gives each up at this stage, or once it runs, until one has come no further by
    /// the time its cancel does. Returns how many that took: none, if the counter says that it has happened before.
    async fn cancel_at(&self, at: Option<Stage>, counter: &AtomicUsize, random: &mut Random) -> usize {
        let client = self.daemon.connect().await.expect("connected");
        let mut n_guests = 0;
        while counter.load(Ordering::Relaxed) == 0 {
            n_guests += 1;
            let number = self.n_starts.fetch_add(1, Ordering::Relaxed);
            let program = Program::wasm(guests::hostile_anew(AFTER_THE_STORM + number));
            let mut guest = client.start(program, with(&["sleep"])).await.expect("connected");
            let (mut stage, mut has_started) = (None, false);
            while !has_started && (stage.is_none() || stage != at) {
                let next = tokio::time::timeout(PATIENCE, guest.next()).await;
                match next.unwrap_or_else(|_| panic!("a start hangs after {stage:?}")) {
                    Some(Ok(Event::Progress { stage: now, .. })) => stage = Some(now),
                    Some(Ok(Event::Started { .. })) => has_started = true,
                    Some(Ok(_)) => {}
                    other => panic!("a guest without end does not start: {other:?}"),
                }
            }
            self.cancel(guest, stage, has_started, random).await;
        }
        n_guests
    }

    async fn cancel(
        &self,
        guest: Guest,
        mut stage: Option<Stage>,
        mut has_started: bool,
        random: &mut Random,
    ) {
        let begun = Instant::now();
        if random.below(2) == 0 {
            guest.cancel();
        } else {
            guest.sender().cancel();
        }
        let mut guest = guest;
        let error = loop {
            let next = tokio::time::timeout(PATIENCE, guest.next()).await;
            match next.unwrap_or_else(|_| panic!("a cancel is lost: at {stage:?}, started: {has_started}")) {
                Some(Ok(Event::Progress { stage: now, .. })) => stage = Some(now),
                Some(Ok(Event::Started { .. })) => has_started = true,
                Some(Ok(_)) => {}
                Some(Err(error)) => break error,
                None => panic!("a guest without end ended well"),
            }
        };
        let code = error.code().map(|code| code.as_str().to_owned()).unwrap_or_default();
        assert_eq!(code, "cancelled", "after {:?}: {error:?}", begun.elapsed());
        add(&self.tally.n_cancelled);
        add(match stage {
            _ if has_started => &self.tally.n_running,
            Some(Stage::Upload) => &self.tally.n_uploading,
            Some(Stage::Compile) => &self.tally.n_compiling,
            _ => &self.tally.n_before_all,
        });
    }

    async fn nothing_is_left(&self) {
        let host = self.daemon.service().host();
        until("no upload is under way", async || self.daemon.sessions().n_uploads() == 0).await;
        until("nothing is compiled or loaded", async || host.n_compiles() == 0).await;
        nothing_is_held(&self.daemon).await;
        let client = self.daemon.connect().await.expect("connected");
        until("no session is open but this", async || {
            client.info().await.expect("the daemon answers").n_sessions == 1
        })
        .await;
        // A new start finds all places free.
        let anew = guests::hostile_anew(u64::MAX);
        let ended = daemons::run(&client, &anew, with(&["exit-well"])).await.well();
        assert!(ended.usage.is_some());
    }
}

async fn storm(n_cancels: usize) {
    let cache = tempfile::tempdir().expect("a folder");
    let limits = GuestLimits { n_compiles_queued: 2 * N_TASKS as usize, n_programs: 4, ..daemons::limits() };
    let config = Config { limits, cache_dir: Some(cache.path().join("code")), ..daemons::config(exe()) };
    let storm = Arc::new(Storm {
        daemon: daemons::start(&config),
        tally: Tally::default(),
        n_starts: AtomicU64::new(0),
        n_cancels,
    });
    let mut client = storm.daemon.connect().await.expect("connected");
    // The component that is known is compiled before, so that its guests begin at once.
    let _ = daemons::run(&client, &guests::hostile(), with(&["exit-well"])).await.well();
    let begun = Instant::now();
    let mut tasks = Vec::new();
    for task in 0..N_TASKS {
        if task % N_TASKS_PER_CLIENT == 0 {
            client = storm.daemon.connect().await.expect("connected");
        }
        tasks.push(tokio::spawn(storm.clone().weather(client.clone(), task)));
    }
    drop(client);
    for task in tasks {
        task.await.expect("no cancel is lost");
    }
    let took = begun.elapsed();
    let tally = &storm.tally;
    // Where chance has given up none at some stage, it is seen to.
    let (mut n_more, mut random) = (0, Random(N_TASKS));
    for (at, counter) in [
        (Some(Stage::Upload), &tally.n_uploading),
        (Some(Stage::Compile), &tally.n_compiling),
        (None, &tally.n_running),
    ] {
        n_more += storm.cancel_at(at, counter, &mut random).await;
    }
    storm.nothing_is_left().await;
    println!("{n_cancels} guests given up in {took:?}: {tally:?}; none lost, nothing left");
    let n = |counter: &AtomicUsize| counter.load(Ordering::Relaxed);
    assert_eq!(n(&tally.n_cancelled) + n(&tally.n_dropped) + n(&tally.n_left), n_cancels + n_more);
    for (what, counter) in [
        ("before all", &tally.n_before_all),
        ("uploading", &tally.n_uploading),
        ("compiling", &tally.n_compiling),
        ("running", &tally.n_running),
        ("dropped", &tally.n_dropped),
        ("left", &tally.n_left),
    ] {
        assert!(n(counter) > 0, "no guest was given up: {what}");
    }
}

#[test]
fn cancels_at_random_moments() {
    block_on(storm(N_CANCELS_SCALED));
}

/// With `--ignored --nocapture`.
#[test]
#[ignore = "takes minutes"]
fn twenty_thousand_cancels_at_random_moments() {
    block_on_for(Duration::from_secs(3_600), storm(N_CANCELS));
}

#[test]
fn many_clients_start_one_component_that_nobody_knows() {
    block_on(async {
        let cache = tempfile::tempdir().expect("a folder");
        let config = Config { cache_dir: Some(cache.path().join("code")), ..daemons::config(exe()) };
        let daemon = daemons::start(&config);
        let wasm = guests::hostile_anew(1);
        let mut guests = Vec::new();
        for _ in 0..64 {
            let client = daemon.connect().await.expect("connected");
            let options = with(&["tokens", "4", "<|begin_of_text|>"]);
            guests.push(client.start(Program::wasm(wasm.clone()), options).await.expect("connected"));
        }
        let ends: Vec<_> = guests.into_iter().map(|guest| tokio::spawn(collect(guest))).collect();
        for end in ends {
            assert_eq!(end.await.expect("no panic").well().tokens.len(), 4);
        }
        assert_eq!((daemon.sessions().n_uploads(), daemon.service().host().n_compiles()), (0, 0));
        nothing_is_held(&daemon).await;
    });
}
