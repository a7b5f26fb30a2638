//! What a neighbour has beside an attack, in windows alone and attacked by turns.

use std::io;
use std::time::{Duration, Instant};

use serde::Serialize;
use trellis::config::Config;
use trellis::guest::GuestLimits;

use super::neighbour::{MARK, Window};
use super::processes::{Daemon, Neighbour, Orders, Tally, User};
use super::state::Load;
use super::{Attack, table};

/// The least that a neighbour keeps of its pace, of 1.
pub const PACE_MIN: f64 = 0.45;
/// The longest that it is silent, and that `info` and `stop` take. A short text that a guest of the neighbour's
/// encodes may take longer.
pub const MS_MAX: f64 = 60.0;
/// The longest that it takes to encode a short text: four turns one after the other, of the guest and of the work beside it.
pub const ENCODE_MS_MAX: f64 = 4.0 * MS_MAX;

/// The beginning of an attack, of which a silence is shown beside that of all of it: connections are made and components compiled
/// then.
const FIRST: Duration = Duration::from_millis(400);

/// From the attackers' end to the next window.
const SETTLE: Duration = Duration::from_millis(400);

/// How long attackers go on after the window beside them.
const SURPLUS: Duration = Duration::from_millis(100);

/// What an attack takes beside its windows: processes that start and end, and the time until the neighbour is alone again. Most
/// take a second, and some are waited for.
const BESIDE: Duration = Duration::from_millis(1_500);

/// How long the measurement beside so many attacks takes, about.
#[must_use]
pub fn estimate(n_attacks: usize, seconds: f64, n_rounds: usize) -> Duration {
    let round = 2.0 * seconds + SURPLUS.as_secs_f64() + BESIDE.as_secs_f64();
    Duration::from_secs_f64(round * (n_attacks * n_rounds) as f64)
}

/// The attack that is made once before all others: it begins and ends at once, as the guest that most of them are.
const FIRST_OF_ALL: &str = "exit-with-a-status";

/// How long a neighbour may have no tokens after an attack until it is alone again.
const CALM_TIME_MAX: Duration = Duration::from_secs(20);

/// The settings of a daemon beside which the pace is measured: those that it has by itself, but that nobody uses up their time.
#[must_use]
pub fn config(config: Config) -> Config {
    let limits =
        GuestLimits { cpu_ms: 3_600_000, deadline_ms: 7_200_000, n_tokens: i64::MAX as u64, ..config.limits };
    Config { limits, ..config }
}

/// The neighbour's pace beside one attack.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The attack.
    pub name: &'static str,
    /// How many of it.
    pub n_copies: usize,
    /// Alone.
    pub alone: Window,
    /// Beside them, from the first moment on.
    pub attacked: Window,
    /// The longest silence of those that began with the attack or came within its first 400 ms.
    pub first_silence_ms: f64,
    /// How they ended.
    pub ends: Tally,
    /// What is wrong with that.
    pub wrong_ends: Vec<String>,
    /// Processors that others kept busy meanwhile.
    pub foreign: f64,
}

impl Row {
    /// The pace, of that alone.
    #[must_use]
    pub fn share(&self) -> f64 {
        self.attacked.pace() / self.alone.pace().max(0.001)
    }

    /// What is over its limit, in words.
    #[must_use]
    pub fn over(&self) -> Vec<String> {
        let mut over = Vec::new();
        if self.share() < PACE_MIN {
            over.push("pace".to_owned());
        }
        let Window { silence_ms, info_ms, n_infos, stop_ms, n_stops, encode_ms, n_encodes, n_tokens, .. } =
            self.attacked;
        for (what, ms_max, ms, n) in [
            ("silence", MS_MAX, silence_ms, n_tokens),
            ("info", MS_MAX, info_ms, n_infos),
            ("stop", MS_MAX, stop_ms, n_stops),
            ("encode", ENCODE_MS_MAX, encode_ms, n_encodes),
        ] {
            if ms > ms_max {
                over.push(what.to_owned());
            }
            // Nothing is within a limit that was never there.
            if n == 0 {
                over.push(format!("no {}", if what == "silence" { "tokens" } else { what }));
            }
        }
        // Nothing is compared with that.
        if self.alone.n_tokens == 0 {
            over.push("no tokens alone".to_owned());
        }
        let n_wrong = self.alone.n_wrong + self.attacked.n_wrong;
        if n_wrong > 0 {
            over.push(format!("{n_wrong} wrong tokens"));
        }
        over.extend(self.alone.errors.iter().chain(&self.attacked.errors).chain(&self.wrong_ends).cloned());
        over
    }

    /// The head of a table of rows.
    #[must_use]
    pub fn head() -> String {
        format!(
            "{:<30}{:>7}{:>9}{:>9}{:>7}{:>11}{:>9}{:>9}{:>9}{:>10}{:>9}  over / ends",
            "attack",
            "copies",
            "alone/s",
            "beside/s",
            "pace",
            "silence",
            "first",
            "info",
            "stop",
            "encode",
            "foreign"
        )
    }

    /// As a line of that table.
    #[must_use]
    pub fn line(&self) -> String {
        let over = self.over();
        let over = if over.is_empty() { String::new() } else { format!("OVER: {}; ", over.join(", ")) };
        format!(
            "{:<30}{:>7}{:>9.0}{:>9.0}{:>6.0}%{:>8.0} ms{:>6.0} ms{:>6.0} ms{:>6.0} ms{:>7.0} ms{:>9.2}  {over}{}",
            self.name,
            self.n_copies,
            self.alone.pace(),
            self.attacked.pace(),
            100.0 * self.share(),
            self.attacked.silence_ms,
            self.first_silence_ms,
            self.attacked.info_ms,
            self.attacked.stop_ms,
            self.attacked.encode_ms,
            self.foreign,
            self.ends.line(),
        )
    }
}

/// The user who attacks.
const ATTACKER: User = User(1);

/// A daemon and a neighbour whose pace is measured.
#[derive(Debug)]
pub struct Track {
    daemon: Daemon,
    neighbour: Neighbour,
}

impl Track {
    /// Lets the neighbour begin, and learn what it has alone. The attackers' user has its guest compiled before: that is no part of the
    /// attack that comes first.
    ///
    /// # Errors
    /// A process does not do what it should.
    pub fn begin(daemon: Daemon) -> io::Result<Self> {
        let orders = Orders { name: FIRST_OF_ALL.to_owned(), n_copies: 1, seconds: 0.0, is_repeated: false };
        let ends = daemon.attack(ATTACKER, &orders)?.wait()?;
        let attack = table().into_iter().find(|attack| attack.name == FIRST_OF_ALL);
        if !attack.is_some_and(|attack| attack.wrong_ends(&ends).is_empty()) {
            return Err(io::Error::other(format!("{FIRST_OF_ALL} ended with {}", ends.line())));
        }
        let mut neighbour = daemon.neighbour(User(0))?;
        neighbour.learn()?;
        Ok(Self { daemon, neighbour })
    }

    /// Whether other users attack than the neighbour is.
    #[must_use]
    pub fn has_users(&self) -> bool {
        self.daemon.has_users
    }

    fn window(&mut self, seconds: f64) -> io::Result<Window> {
        self.neighbour.tell(MARK)?;
        std::thread::sleep(Duration::from_secs_f64(seconds));
        self.neighbour.tell(MARK)
    }

    /// Waits until the neighbour is alone again: until it has tokens without long silences.
    fn calm(&mut self) -> io::Result<()> {
        let begun = Instant::now();
        std::thread::sleep(SETTLE);
        while self.window(0.2)?.silence_ms > MS_MAX / 2.0 && begun.elapsed() < CALM_TIME_MAX {}
        Ok(())
    }

    /// Measures beside one attack: so many windows alone and attacked by turns, so many seconds each.
    ///
    /// # Errors
    /// The daemon or the neighbour is gone.
    pub fn measure(
        &mut self,
        attack: &Attack,
        n_copies: usize,
        seconds: f64,
        n_rounds: usize,
    ) -> io::Result<Row> {
        let pids = [self.daemon.pid(), self.neighbour.pid(), std::process::id()];
        let (mut alone, mut attacked) = (Window::default(), Window::default());
        let mut first_silence_ms: f64 = 0.0;
        let mut ends = Tally::default();
        let begun = Instant::now();
        let load = Load::of(&pids);
        for _ in 0..n_rounds {
            alone = alone.and(&self.window(seconds)?);
            let orders = Orders {
                name: attack.name.to_owned(),
                n_copies,
                seconds: seconds + SURPLUS.as_secs_f64(),
                is_repeated: true,
            };
            let mut attackers = self.daemon.ready(ATTACKER, &orders)?;
            self.neighbour.tell(MARK)?;
            let until = Instant::now() + Duration::from_secs_f64(seconds);
            attackers.go();
            std::thread::sleep(FIRST.min(Duration::from_secs_f64(seconds)));
            let first = self.neighbour.tell(MARK)?;
            std::thread::sleep(until.saturating_duration_since(Instant::now()));
            first_silence_ms = first_silence_ms.max(first.silence_ms);
            attacked = attacked.and(&first).and(&self.neighbour.tell(MARK)?);
            ends.add(attackers.wait()?);
            if let Some(status) = self.daemon.has_ended()? {
                let log = self.daemon.log();
                return Err(io::Error::other(format!("{}: the daemon ended, {status}\n{log}", attack.name)));
            }
            self.calm()?;
        }
        let foreign = Load::of(&pids).foreign_since(&load, begun.elapsed().as_secs_f64());
        let (name, wrong_ends) = (attack.name, attack.wrong_ends(&ends));
        Ok(Row { name, n_copies, alone, attacked, first_silence_ms, ends, wrong_ends, foreign })
    }
}
