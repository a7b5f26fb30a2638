//! Each attack once, and a look at everything afterwards.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use std::{fs, io};

use serde::Serialize;
use trellis::config::Config;
use trellis::guest::GuestLimits;

use super::neighbour::{GO, PAUSE};
use super::processes::{Daemon, Neighbour, Orders, Tally, User};
use super::raw::Raw;
use super::saved::{self, SavedFile};
use super::state::{LOOK_PERIOD_MAX, State};
use super::{Attack, Component, Ending};

/// How long those attacks go on that could go on for ever.
const SECONDS: f64 = 1.5;

/// Time between two looks at the daemon.
const LOOK_PERIOD: Duration = Duration::from_millis(50);

/// How long the daemon may take to give back what an attack has taken. Threads that have nothing to do end after ten seconds, and
/// jemalloc gives back what was not used for ten; both begin anew with whatever goes on a little after the attack. What a process of
/// guests has then it has until it ends, after a minute without guests.
const BACK_TIME_MAX: Duration = Duration::from_secs(80);

/// How long the neighbour streams at least beside an attack, also where that is over before.
const WINDOW: Duration = Duration::from_millis(250);

/// Attacks that make the daemon take what it takes once: pages, buffers of the widest step, threads. By name and copies.
const WARMING: [(&str, usize); 17] = [
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
    ("saves-past-the-disk", 1),
];

/// Bytes on disk of contexts that a user may have saved: those of a few contexts.
pub const SAVED_BYTES_MAX: u64 = 4 << 20;

/// What the daemon's own user saves, under a name that guests of attacks save, open and forget under.
pub const ASIDE: &str = "turn 0";

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
    Config {
        kv_bytes: Some(48 << 20),
        kv_host_bytes: Some(32 << 20),
        saved_disk_bytes_per_user: SAVED_BYTES_MAX,
        limits,
        ..config
    }
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
    /// The most bytes on disk that a user was seen to have of saved contexts.
    pub saved_bytes_most: u64,
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
    /// Bytes on disk of contexts that each user had saved.
    saved_before: BTreeMap<String, u64>,
    /// The file of what was set aside, where others attack than the daemon's own user.
    aside: Option<(PathBuf, Vec<u8>)>,
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
        let (saved_before, aside) = Default::default();
        let mut suite =
            Self { daemon, neighbour, attacker, hostile, raw, runtime, before, saved_before, aside };
        warm(&suite.daemon, suite.attacker)?;
        if suite.has_users() {
            suite.set_aside()?;
        }
        suite.calm()?;
        // What its guests have a process for is kept for a while only.
        suite.neighbour.tell(GO)?;
        suite.neighbour.tell(PAUSE)?;
        suite.before = suite.calm()?;
        suite.saved_before = saved::bytes(&suite.saved_files()?);
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

    /// How a guest of the daemon's own user ends.
    fn run(&mut self, arguments: &[&str]) -> io::Result<Ending> {
        self.runtime.block_on(async {
            let uploaded = self.raw.upload(&self.hostile).await?;
            if !uploaded.is_well() {
                return Ok(uploaded);
            }
            let id = self.raw.start(&self.hostile, arguments).await?;
            self.raw.follow(id).await
        })
    }

    fn saved_files(&self) -> io::Result<Vec<SavedFile>> {
        saved::files(self.daemon.folder())
    }

    /// Has the daemon's own user save something, and waits until it is on disk.
    fn set_aside(&mut self) -> io::Result<()> {
        for mode in ["set-aside", "is-aside"] {
            let ending = self.run(&[mode, ASIDE])?;
            if !ending.is_well() {
                return Err(io::Error::other(format!("{mode}: {}: {}", ending.short(), ending.message)));
            }
        }
        let user = rustix::process::geteuid().as_raw().to_string();
        let begun = Instant::now();
        while begun.elapsed() < BACK_TIME_MAX {
            let files = self.saved_files()?;
            let is_it = |file: &&SavedFile| file.user == user && file.kind == saved::Kind::Context;
            if let Some(file) = files.iter().find(is_it) {
                self.aside = Some((file.path.clone(), fs::read(&file.path)?));
                return Ok(());
            }
            std::thread::sleep(LOOK_PERIOD);
        }
        Err(io::Error::other("what was saved does not come to the disk"))
    }

    /// What has become of what was set aside, where it is not what it was.
    fn look_aside(&mut self) -> io::Result<Vec<String>> {
        let Some((path, bytes)) = self.aside.take() else { return Ok(Vec::new()) };
        let mut complaints = Vec::new();
        match fs::read(&path) {
            Ok(found) if found == bytes => {}
            Ok(_) => complaints.push("the file of what another user saved has changed".to_owned()),
            Err(error) => complaints.push(format!("the file of what another user saved: {error}")),
        }
        self.aside = Some((path, bytes));
        let ending = self.run(&["is-aside", ASIDE])?;
        if !ending.is_well() {
            let message = shown(&ending.message);
            complaints.push(format!("what another user saved: {}: {message}", ending.short()));
        }
        Ok(complaints)
    }

    /// Waits until no guest runs; what the daemon holds then.
    fn calm(&mut self) -> io::Result<State> {
        let begun = Instant::now();
        loop {
            let state = self.state()?;
            if state.n_guests == 0 || begun.elapsed() > BACK_TIME_MAX {
                return Ok(state);
            }
            std::thread::sleep(LOOK_PERIOD);
        }
    }

    /// What the daemon holds, with the hostile guest as the component that is kept ready.
    fn state(&mut self) -> io::Result<State> {
        let ending = self.run(&["exit-well"])?;
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
        let (begun, mut period) = (Instant::now(), LOOK_PERIOD);
        loop {
            let state = self.state()?;
            let mut beyond = state.beyond(&self.before);
            let files = self.saved_files()?;
            beyond.extend(saved::beyond(&files, SAVED_BYTES_MAX));
            for (user, n) in saved::bytes(&files) {
                let before = self.saved_before.get(&user).copied().unwrap_or(0);
                if n > before {
                    beyond.push(format!("{n} bytes of user {user} on disk, before {before}"));
                }
            }
            if beyond.is_empty() || begun.elapsed() > BACK_TIME_MAX {
                return Ok((state, beyond));
            }
            std::thread::sleep(period);
            period = (2 * period).min(LOOK_PERIOD_MAX);
        }
    }

    /// Lets one attack loose and looks at everything.
    ///
    /// # Errors
    /// The daemon or the neighbour is gone.
    pub fn attack(&mut self, attack: &Attack) -> io::Result<Report> {
        let mut complaints = Vec::new();
        self.neighbour.tell(GO)?;
        // Its tokens beside the attack are those of a stream that is there before.
        let before = self.neighbour.first_tokens()?;
        let begun = Instant::now();
        let orders =
            Orders { name: attack.name.to_owned(), n_copies: 1, seconds: SECONDS, is_repeated: false };
        let folder = self.daemon.folder();
        let attacked = || self.daemon.attack(self.attacker, &orders)?.wait();
        let (ends, saved_bytes_most) = saved::most_while(folder, attacked)?;
        // What is new is there before others make room for it, and is no more than the limit itself.
        if saved_bytes_most > 2 * SAVED_BYTES_MAX {
            complaints.push(format!("a user had {saved_bytes_most} bytes on disk of {SAVED_BYTES_MAX}"));
        }
        for (ending, _) in ends.by_end.values() {
            if !attack.allows(ending) {
                complaints.push(format!("it ended with {}: {}", ending.short(), shown(&ending.message)));
            }
        }
        std::thread::sleep(WINDOW.saturating_sub(begun.elapsed()));
        let window = self.neighbour.tell(PAUSE)?;
        if window.n_tokens == 0 {
            complaints.push(format!("the neighbour had nothing in {:.1} s", window.seconds));
        }
        let window = before.and(&window);
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
        complaints.extend(self.look_aside()?);
        if !beyond.is_empty() {
            complaints.extend(beyond);
            // The next one is not to blame.
            self.before.raise_to(&state);
            self.saved_before = saved::bytes(&self.saved_files()?);
        }
        let (name, category) = (attack.name, attack.category.name());
        Ok(Report { name, category, ends, complaints, state, saved_bytes_most, back_ms })
    }
}

/// The beginning of a message, in one line.
fn shown(message: &str) -> String {
    message.chars().take(160).map(|c| if c.is_control() { ' ' } else { c }).collect()
}
