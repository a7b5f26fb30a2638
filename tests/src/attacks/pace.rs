//! What a neighbour has beside an attack, in windows alone and attacked by turns.

use std::io;
use std::time::Duration;

use serde::Serialize;
use trellis::config::Config;
use trellis::guest::GuestLimits;

use super::Attack;
use super::neighbour::{MARK, Window};
use super::processes::{Daemon, Neighbour, Orders, Tally, User};
use super::state::Load;

/// The least that a neighbour keeps of its pace, of 1.
pub const PACE_MIN: f64 = 0.45;
/// The longest that it is silent, and that `info`, `stop` and the encoding of a short text take.
pub const MS_MAX: f64 = 60.0;

/// From the attackers' beginning to that of the window, and from their end to the next window.
const SETTLE: Duration = Duration::from_millis(400);

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
    /// Beside them.
    pub attacked: Window,
    /// How they ended.
    pub ends: Tally,
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
        for (what, ms) in [
            ("silence", self.attacked.silence_ms),
            ("info", self.attacked.info_ms),
            ("stop", self.attacked.stop_ms),
            ("encode", self.attacked.encode_ms),
        ] {
            if ms > MS_MAX {
                over.push(what.to_owned());
            }
        }
        let n_wrong = self.alone.n_wrong + self.attacked.n_wrong;
        if n_wrong > 0 {
            over.push(format!("{n_wrong} wrong tokens"));
        }
        over.extend(self.alone.errors.iter().chain(&self.attacked.errors).cloned());
        over
    }

    /// The head of a table of rows.
    #[must_use]
    pub fn head() -> String {
        format!(
            "{:<30}{:>7}{:>9}{:>9}{:>7}{:>11}{:>9}{:>9}{:>10}{:>9}  over / ends",
            "attack", "copies", "alone/s", "beside/s", "pace", "silence", "info", "stop", "encode", "foreign"
        )
    }

    /// As a line of that table.
    #[must_use]
    pub fn line(&self) -> String {
        let over = self.over();
        let over = if over.is_empty() { String::new() } else { format!("OVER: {}; ", over.join(", ")) };
        format!(
            "{:<30}{:>7}{:>9.0}{:>9.0}{:>6.0}%{:>8.0} ms{:>6.0} ms{:>6.0} ms{:>7.0} ms{:>9.2}  {over}{}",
            self.name,
            self.n_copies,
            self.alone.pace(),
            self.attacked.pace(),
            100.0 * self.share(),
            self.attacked.silence_ms,
            self.attacked.info_ms,
            self.attacked.stop_ms,
            self.attacked.encode_ms,
            self.foreign,
            self.ends.line(),
        )
    }
}

/// A daemon and a neighbour whose pace is measured.
#[derive(Debug)]
pub struct Track {
    daemon: Daemon,
    neighbour: Neighbour,
}

impl Track {
    /// Lets the neighbour begin, and learn what it has alone.
    ///
    /// # Errors
    /// A process does not do what it should.
    pub fn begin(daemon: Daemon) -> io::Result<Self> {
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
        let begun = std::time::Instant::now();
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
        let mut ends = Tally::default();
        let begun = std::time::Instant::now();
        let load = Load::of(&pids);
        for _ in 0..n_rounds {
            alone = alone.and(&self.window(seconds)?);
            let orders = Orders {
                name: attack.name.to_owned(),
                n_copies,
                seconds: seconds + SETTLE.as_secs_f64() + 0.1,
                is_repeated: true,
            };
            let mut attackers = self.daemon.attack(User(1), &orders)?;
            attackers.begun()?;
            std::thread::sleep(SETTLE);
            attacked = attacked.and(&self.window(seconds)?);
            ends.add(attackers.wait()?);
            if let Some(status) = self.daemon.has_ended()? {
                let log = self.daemon.log();
                return Err(io::Error::other(format!("{}: the daemon ended, {status}\n{log}", attack.name)));
            }
            self.calm()?;
        }
        let foreign = Load::of(&pids).foreign_since(&load, begun.elapsed().as_secs_f64());
        Ok(Row { name: attack.name, n_copies, alone, attacked, ends, foreign })
    }
}
