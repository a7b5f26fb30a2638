//! Each attack once, and a look at everything afterwards.

use std::io;
use std::time::{Duration, Instant};

use serde::Serialize;
use trellis::config::Config;
use trellis::guest::GuestLimits;

use super::neighbour::{GO, PAUSE};
use super::processes::{Daemon, Neighbour, Orders, Tally, User};
use super::raw::Raw;
use super::state::State;
use super::{Attack, Component};

/// How long those attacks go on that could go on for ever.
const SECONDS: f64 = 1.5;

/// Time between two looks at the daemon.
const LOOK_PERIOD: Duration = Duration::from_millis(50);

/// How long the daemon may take to give back what an attack has taken: threads that have nothing to do end after ten seconds.
const BACK_TIME_MAX: Duration = Duration::from_secs(13);

/// Attacks that make the daemon take what it takes once: pages, buffers of the widest step, threads. By name and copies.
const WARMING: [(&str, usize); 16] = [
    ("pages", 4),
    ("encode-random", 4),
    ("encode-emoji", 4),
    ("score-256", 2),
    ("full-16", 2),
    ("top-1024-of-256", 2),
    ("beams-512", 1),
    ("generate-256", 1),
    ("text-of-a-byte", 8),
    ("random-bytes", 4),
    ("memory-hog", 2),
    ("grammar-schema", 4),
    ("functions-of-30000", 2),
    ("infos", 4),
    // Components that were uploaded are kept up to some bytes.
    ("data-of-12-mb", 1),
    ("upload-twice-at-once", 2),
];

/// The settings of a daemon that is attacked once by each: short limits, so that what goes on without end has one soon, and little KV
/// memory, so that all of it has been used before anything is measured. Of compiled components one is kept ready, so that it is the
/// same one whenever something is measured.
#[must_use]
pub fn config(config: Config) -> Config {
    let limits = GuestLimits {
        cpu_ms: 600,
        deadline_ms: 3_000,
        idle_ms: 2_000,
        memory_bytes: 96 << 20,
        n_programs: 1,
        ..config.limits
    };
    Config { kv_bytes: Some(48 << 20), kv_host_bytes: Some(32 << 20), limits, ..config }
}

/// Makes the daemon take what it takes once.
pub(super) fn warm(daemon: &Daemon, user: User) -> io::Result<()> {
    for (name, n_copies) in WARMING {
        let orders = Orders { name: name.to_owned(), n_copies, seconds: SECONDS, is_repeated: false };
        daemon.attack(user, &orders)?.wait()?;
    }
    Ok(())
}

/// What became of one attack.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The attack.
    pub name: &'static str,
    /// Its category.
    pub category: &'static str,
    /// How it ended.
    pub ends: Tally,
    /// What is wrong; nothing where all is well.
    pub complaints: Vec<String>,
    /// What the daemon held afterwards.
    pub state: State,
    /// How long it took until all was back.
    pub back_ms: u64,
}

/// A daemon beside a neighbour, and what it held before all attacks.
#[derive(Debug)]
pub struct Suite {
    daemon: Daemon,
    neighbour: Neighbour,
    attacker: User,
    hostile: Component,
    raw: Raw,
    runtime: tokio::runtime::Runtime,
    before: State,
}

impl Suite {
    /// Lets the neighbour learn what it has alone, and the daemon take what it takes once.
    ///
    /// # Errors
    /// A process does not do what it should.
    pub fn begin(daemon: Daemon, hostile: Component) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let raw = runtime.block_on(Raw::connect(&daemon.socket()))?;
        let mut neighbour = daemon.neighbour(User(0))?;
        neighbour.learn()?;
        neighbour.tell(PAUSE)?;
        let (attacker, before) = (User(1), State::default());
        let mut suite = Self { daemon, neighbour, attacker, hostile, raw, runtime, before };
        warm(&suite.daemon, suite.attacker)?;
        // What is held of those is given back first.
        let begun = Instant::now();
        suite.before = suite.state()?;
        while suite.before.n_guests > 0 && begun.elapsed() < BACK_TIME_MAX {
            std::thread::sleep(Duration::from_millis(100));
            suite.before = suite.state()?;
        }
        // What its guests have a process for is kept for a while only.
        suite.neighbour.tell(GO)?;
        suite.neighbour.tell(PAUSE)?;
        suite.before = suite.state()?;
        Ok(suite)
    }

    /// What the daemon held before all attacks.
    #[must_use]
    pub fn before(&self) -> &State {
        &self.before
    }

    /// Whether other users attack than the neighbour is.
    #[must_use]
    pub fn has_users(&self) -> bool {
        self.daemon.has_users
    }

    /// What the daemon holds, with the hostile guest as the component that is kept ready.
    fn state(&mut self) -> io::Result<State> {
        let ending = self.runtime.block_on(async {
            let uploaded = self.raw.upload(&self.hostile).await?;
            if !uploaded.is_well() {
                return Ok(uploaded);
            }
            let id = self.raw.start(&self.hostile, &["exit-well"]).await?;
            self.raw.follow(id).await
        })?;
        if !ending.is_well() {
            return Err(io::Error::other(format!(
                "a guest that does nothing ended with {}: {}",
                ending.short(),
                ending.message
            )));
        }
        self.runtime.block_on(State::of(&mut self.raw, self.daemon.pid()))
    }

    /// Waits until the daemon holds no more than before; what it holds then, and what of it is too much.
    fn back(&mut self) -> io::Result<(State, Vec<String>)> {
        let begun = Instant::now();
        loop {
            let state = self.state()?;
            let beyond = state.beyond(&self.before);
            if beyond.is_empty() || begun.elapsed() > BACK_TIME_MAX {
                return Ok((state, beyond));
            }
            std::thread::sleep(LOOK_PERIOD);
        }
    }

    /// Lets one attack loose and looks at everything.
    ///
    /// # Errors
    /// The daemon or the neighbour is gone.
    pub fn attack(&mut self, attack: &Attack) -> io::Result<Report> {
        let mut complaints = Vec::new();
        self.neighbour.tell(GO)?;
        let orders =
            Orders { name: attack.name.to_owned(), n_copies: 1, seconds: SECONDS, is_repeated: false };
        let ends = self.daemon.attack(self.attacker, &orders)?.wait()?;
        for (ending, _) in ends.by_end.values() {
            if !attack.allows(ending) {
                complaints.push(format!("it ended with {}: {}", ending.short(), shown(&ending.message)));
            }
        }
        let window = self.neighbour.tell(PAUSE)?;
        if window.n_wrong > 0 {
            complaints.push(format!("{} tokens of the neighbour were wrong", window.n_wrong));
        }
        complaints.extend(window.errors.iter().map(|error| format!("the neighbour: {}", shown(error))));
        let ended = Instant::now();
        if let Some(status) = self.daemon.has_ended()? {
            return Err(io::Error::other(format!(
                "{}: the daemon ended, {status}\n{}",
                attack.name,
                self.daemon.log()
            )));
        }
        let (state, beyond) = self.back()?;
        let back_ms = ended.elapsed().as_millis() as u64;
        if !beyond.is_empty() {
            complaints.extend(beyond);
            // The next one is not to blame.
            if state.beside_programs_kb() > self.before.beside_programs_kb() {
                (self.before.resident_kb, self.before.programs_kb) = (state.resident_kb, state.programs_kb);
            }
            self.before.n_descriptors = self.before.n_descriptors.max(state.n_descriptors);
            (self.before.n_images, self.before.n_modules_most) = (state.n_images, state.n_modules_most);
            self.before.n_threads = self.before.n_threads.max(state.n_threads);
            self.before.n_contexts = self.before.n_contexts.max(state.n_contexts);
            self.before.n_pages = self.before.n_pages.max(state.n_pages);
        }
        Ok(Report { name: attack.name, category: attack.category.name(), ends, complaints, state, back_ms })
    }
}

/// The beginning of a message, in one line.
fn shown(message: &str) -> String {
    message.chars().take(160).map(|c| if c.is_control() { ' ' } else { c }).collect()
}
