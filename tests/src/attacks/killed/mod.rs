//! A daemon that is killed at random moments under honest clients, and started again where it was.
//!
//! - Comes in: how often, a seed, and the settings of the daemon; a folder and a socket for all its lives (`house`).
//! - Each life: the daemon starts over what the last one left, and is held against what has to be so (`clients`): streams and
//!   components are what they were, what was saved is whole or gone. Then clients keep it busy until it is killed, as it starts, as
//!   it serves, or as it ends.
//! - Goes out: a [`Report`]. A complaint is: a call under way that hangs, ends with something that is not retryable, or gets what
//!   is wrong; a daemon that does not start; a file that is not whole under its final name, or that stays; a process that stays.

mod clients;
mod house;

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::{BoxFuture, join_all};
use serde::Serialize;
use trellis::config::Config;
use trellis_client::Error;

use self::clients::{Stop, World};
use self::house::{House, Life};
use crate::engines::Random;

/// The last moment of a kill after the clients have begun.
const SERVING_TIME_MAX: Duration = Duration::from_millis(600);

/// The last moment of a kill after the daemon was asked to end.
const ENDING_TIME_MAX: Duration = Duration::from_millis(40);

/// Within this after the kill, every call has ended.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(5);

/// Within this a daemon that was started again has shown that it is well.
const CHECK_TIME_MAX: Duration = Duration::from_secs(60);

/// Components of one life that are run again.
const N_COMPONENTS_CHECKED: usize = 8;

/// When in its life a daemon is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Moment {
    /// Before it answers, or as it does.
    Starting,
    /// Under its clients.
    Serving,
    /// After it was asked to end.
    Ending,
}

/// Which saved contexts of earlier lives are opened before a daemon may be killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Opened {
    /// The others are opened while it may be.
    Half,
    All,
}

/// What became of all lives.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// Kills.
    pub n_kills: usize,
    /// Of those, by their moments.
    pub n_kills_at: BTreeMap<Moment, usize>,
    /// Calls of clients that ended well.
    pub n_calls: usize,
    /// Calls that a kill ended, by their names.
    pub n_cut: BTreeMap<&'static str, usize>,
    /// Tokens of streams, each of which was looked at.
    pub n_tokens: usize,
    /// Components of killed daemons that were run again: from the cache.
    pub n_from_disk: usize,
    /// And those that were compiled again.
    pub n_compiled: usize,
    /// Contexts that were saved when a daemon was killed, or were being saved.
    pub n_saved: usize,
    /// Of those, how many the next daemon had, whole: those that had come to the disk.
    pub n_saved_whole: usize,
    /// Others of them, which were opened, whole, while the daemon might be killed.
    pub n_reopened: usize,
    /// Files that were being written when a daemon was killed.
    pub n_half_written: usize,
    /// Children, at the moment of the kill, by what they were started as.
    pub n_children: BTreeMap<String, usize>,
    /// The longest time from a kill to the end of a call.
    pub answer_ms_max: f64,
    /// The longest time from the end of a daemon to that of its last child.
    pub gone_ms_max: f64,
    /// The longest start.
    pub start_ms_max: f64,
    /// Compiled components in the cache at the end.
    pub n_components: usize,
    /// What is wrong; nothing where all is well.
    pub complaints: Vec<String>,
}

impl Report {
    /// The figures in lines.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        let tally = |of: &BTreeMap<&'static str, usize>| {
            of.iter().map(|(name, n)| format!("{n} {name}")).collect::<Vec<_>>().join(", ")
        };
        vec![
            format!("{} kills: {:?}", self.n_kills, self.n_kills_at),
            format!(
                "{} calls ended well, {} tokens; cut: {}",
                self.n_calls,
                self.n_tokens,
                tally(&self.n_cut)
            ),
            format!(
                "components run again: {} from the cache, {} compiled; {} files half written; {} in the cache at the end",
                self.n_from_disk, self.n_compiled, self.n_half_written, self.n_components
            ),
            format!(
                "contexts saved: {}, there in the next life: {}; others opened before a kill: {}",
                self.n_saved, self.n_saved_whole, self.n_reopened
            ),
            format!("children at the kills: {:?}", self.n_children),
            format!(
                "longest: {:.0} ms to an answer, {:.0} ms to the end of children, {:.0} ms to start",
                self.answer_ms_max, self.gone_ms_max, self.start_ms_max
            ),
        ]
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

/// All lives.
struct Lives {
    house: House,
    world: Arc<World>,
    random: Random,
    runtime: tokio::runtime::Runtime,
    report: Report,
    /// How long a start takes, as far as is known.
    start_time: Duration,
    /// Components and contexts of lives that have not been looked for in a later one.
    begun: Vec<u64>,
    ran: Vec<u64>,
    saved: Vec<u64>,
    forgotten: Vec<u64>,
}

/// Kills a daemon so often.
///
/// # Errors
/// A daemon does not start, or the system refuses something.
pub fn run(
    trellis: &Path,
    config: &Config,
    n_kills: usize,
    seed: u64,
    say: &dyn Fn(&str),
) -> io::Result<Report> {
    let house = House::open(trellis, config)?;
    let world = Arc::new(World::new(house.socket()));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let mut lives = Lives {
        house,
        world,
        random: Random(seed),
        runtime,
        report: Report::default(),
        start_time: Duration::ZERO,
        begun: Vec::new(),
        ran: Vec::new(),
        saved: Vec::new(),
        forgotten: Vec::new(),
    };
    lives.learn()?;
    for number in 1..=n_kills {
        lives.one()?;
        if number % 10 == 0 {
            let (n_complaints, report) = (lives.report.complaints.len(), &lives.report);
            say(&format!(
                "{number} kills: {:?} cut, {} files half written, {n_complaints} complaints",
                report.n_cut.values().sum::<usize>(),
                report.n_half_written
            ));
        }
    }
    lives.last()?;
    let mut report = lives.report;
    report.n_calls = lives.world.ledger().n_calls;
    report.n_tokens = lives.world.ledger().n_tokens;
    report.n_reopened = lives.world.ledger().n_reopened;
    Ok(report)
}

impl Lives {
    fn complain(&mut self, what: impl Into<String>) {
        let kill = self.report.n_kills;
        self.report.complaints.push(format!("kill {kill}: {}", what.into()));
    }

    /// A number of milliseconds below this time.
    fn below(&mut self, time: Duration) -> Duration {
        Duration::from_micros(self.random.draw() % (time.as_micros() as u64).max(1))
    }

    /// The first life, which nobody disturbs.
    fn learn(&mut self) -> io::Result<()> {
        let mut life = self.house.start()?;
        self.house.ready(&mut life, &self.runtime)?;
        let golden = self.runtime.block_on(self.world.learn());
        let golden = golden.map_err(|stop| io::Error::other(format!("the first daemon: {stop:?}")))?;
        Arc::get_mut(&mut self.world).expect("no client is there").golden = Some(golden);
        life.ask_to_end()?;
        life.end()?;
        // The code of what runs in every life is there by now, as it is then.
        let mut life = self.house.start()?;
        self.start_time = self.house.ready(&mut life, &self.runtime)?;
        life.kill()?;
        Ok(())
    }

    /// One life and its end by a kill.
    fn one(&mut self) -> io::Result<()> {
        let moment = match self.random.below(8) {
            0 | 1 => Moment::Starting,
            2 => Moment::Ending,
            _ => Moment::Serving,
        };
        let mut life = self.house.start()?;
        let is_killed = Arc::new(AtomicBool::new(false));
        let clients = match moment {
            Moment::Starting => vec![self.client("visits", &is_killed, moment)],
            Moment::Serving | Moment::Ending => {
                self.begin(&mut life, Opened::Half)?;
                ["streams", "compiles", "compiles", "uploads", "saves", "replaces", "reopens", "visits"]
                    .map(|name| self.client(name, &is_killed, moment))
                    .into()
            }
        };
        let clients: Vec<_> = clients.into_iter().map(|client| self.runtime.spawn(client)).collect();
        match moment {
            Moment::Starting => {
                let at = self.below(self.start_time);
                std::thread::sleep(at.saturating_sub(life.begun.elapsed()));
            }
            Moment::Serving | Moment::Ending => std::thread::sleep(self.below(SERVING_TIME_MAX)),
        }
        let killed_at = Instant::now();
        if moment == Moment::Ending {
            life.ask_to_end()?;
            std::thread::sleep(self.below(ENDING_TIME_MAX));
        }
        for role in self.house.processes()?.into_iter().filter(|role| role != "serve") {
            *self.report.n_children.entry(role).or_default() += 1;
        }
        life.kill()?;
        is_killed.store(true, Ordering::SeqCst);
        self.report.n_kills += 1;
        *self.report.n_kills_at.entry(moment).or_default() += 1;
        let (gone, there) = self.house.gone()?;
        self.report.gone_ms_max = self.report.gone_ms_max.max(ms(gone));
        if !there.is_empty() {
            self.complain(format!("{there:?} are left"));
        }

        let ends = self.runtime.block_on(async {
            let ended = |client| async move { tokio::time::timeout(ANSWER_TIME_MAX, client).await };
            join_all(clients.into_iter().map(ended)).await
        });
        for end in ends {
            match end {
                Err(_) => self.complain(format!("a call hangs for {ANSWER_TIME_MAX:?}")),
                Ok(Err(error)) => self.complain(format!("a client ended with {error}")),
                Ok(Ok(stop)) => self.judge(stop, killed_at),
            }
        }
        let left = self.house.left(&life)?;
        self.report.n_half_written += left.n_half_written;
        left.complaints.into_iter().for_each(|complaint| self.complain(complaint));
        let mut ledger = self.world.ledger();
        self.begun.append(&mut ledger.begun);
        self.ran.append(&mut ledger.ran);
        self.saved.append(&mut ledger.saved);
        self.saved.append(&mut ledger.unopened);
        self.forgotten.append(&mut ledger.forgotten);
        Ok(())
    }

    /// A client by its name.
    fn client(
        &self,
        name: &'static str,
        is_killed: &Arc<AtomicBool>,
        moment: Moment,
    ) -> BoxFuture<'static, Stop> {
        let (world, is_killed) = (self.world.clone(), is_killed.clone());
        Box::pin(async move {
            let is_awaited = || moment == Moment::Starting && !is_killed.load(Ordering::SeqCst);
            let ended = match name {
                "streams" => world.stream().await,
                "compiles" => world.compile().await,
                "uploads" => world.upload().await,
                "saves" => world.save().await,
                "replaces" => world.replace().await,
                "reopens" => world.reopen().await,
                _ => world.visit(&is_awaited).await,
            };
            let Err(stop) = ended;
            stop
        })
    }

    /// How a client stopped, when its daemon was killed at that time.
    fn judge(&mut self, stop: Stop, killed_at: Instant) {
        match stop {
            Stop::Wrong(what) => self.complain(what),
            Stop::Error { call, error, at } => {
                *self.report.n_cut.entry(call).or_default() += 1;
                // Where nobody listens, no call is under way.
                let is_refused = call == "connect" && matches!(error, Error::NotRunning { .. });
                match at.checked_duration_since(killed_at) {
                    None => self.complain(format!("{call} ended before the kill: {error:?}")),
                    Some(after) => {
                        self.report.answer_ms_max = self.report.answer_ms_max.max(ms(after));
                        if !error.is_retryable() && !is_refused {
                            self.complain(format!("{call} ended with what is not retryable: {error:?}"));
                        }
                    }
                }
            }
        }
    }

    /// Waits for a daemon that follows one that was killed, and holds it against what has to be so.
    fn begin(&mut self, life: &mut Life, opened: Opened) -> io::Result<()> {
        let start = self.house.ready(life, &self.runtime)?;
        self.report.start_ms_max = self.report.start_ms_max.max(ms(start));
        let left = self.house.left(life)?;
        // Clients that waited for the daemon may have it compile by now.
        if left.n_of_others > 0 {
            self.complain(format!("{} files of a daemon that was killed stay", left.n_of_others));
        }
        left.complaints.into_iter().for_each(|complaint| self.complain(complaint));
        let (mut begun, ran) = (std::mem::take(&mut self.begun), std::mem::take(&mut self.ran));
        let random = &mut self.random;
        let is_now = |_: &u64| opened == Opened::All || random.below(2) == 0;
        let (saved, unopened): (Vec<u64>, Vec<u64>) =
            std::mem::take(&mut self.saved).into_iter().partition(is_now);
        self.world.ledger().unopened = unopened;
        let forgotten = self.forgotten.clone();
        // The last ones: what was under way is among them.
        begun.drain(..begun.len().saturating_sub(N_COMPONENTS_CHECKED));
        let world = self.world.clone();
        let checks = async {
            world.check_begun().await?;
            let components = world.check_components(&begun, &ran).await?;
            Ok::<_, Stop>((components, world.check_saved(&saved, &forgotten).await?))
        };
        let checked = self.runtime.block_on(async { tokio::time::timeout(CHECK_TIME_MAX, checks).await });
        match checked {
            Err(_) => self.complain(format!("the next daemon is not well within {CHECK_TIME_MAX:?}")),
            Ok(Err(stop)) => self.complain(format!("the next daemon: {stop:?}")),
            Ok(Ok(((n_from_disk, n_compiled), n_whole))) => {
                self.report.n_from_disk += n_from_disk;
                self.report.n_compiled += n_compiled;
                self.report.n_saved += saved.len();
                self.report.n_saved_whole += n_whole;
            }
        }
        Ok(())
    }

    /// The last life, which ends by itself and leaves nothing but what is cached.
    fn last(&mut self) -> io::Result<()> {
        let mut life = self.house.start()?;
        self.begin(&mut life, Opened::All)?;
        life.ask_to_end()?;
        let status = life.end()?;
        if !status.success() {
            self.complain(format!("the last daemon ended with {status}"));
        }
        let (_, there) = self.house.gone()?;
        if !there.is_empty() {
            self.complain(format!("{there:?} are left of the last daemon"));
        }
        let left = self.house.left(&life)?;
        self.report.n_components = left.n_components;
        left.complaints.into_iter().for_each(|complaint| self.complain(complaint));
        if left.n_half_written > 0 || self.house.socket().exists() {
            self.complain(format!("the last daemon leaves its socket or {} files", left.n_half_written));
        }
        if let Some(line) = self.house.log().lines().find(|line| line.contains("panicked")) {
            self.complain(format!("a daemon logged {line:?}"));
        }
        Ok(())
    }
}
