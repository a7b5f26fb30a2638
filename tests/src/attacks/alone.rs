//! What a user has beside whom there is nobody: all processors, for whatever it does, and as many KV pages as the table of limits
//! promises.

use std::io;
use std::path::Path;
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use trellis::config::Config;
use trellis::guest::GuestLimits;
use trellis_wire::{Call, LimitInfo, Value};

use super::clients::{fresh, salted};
use super::processes::{Daemon, LONE, Orders, User, site};
use super::raw::Raw;
use super::state::{Load, n_online};
use super::{Component, components, pace, table};

/// The least of all processors that guests and streams of a lone user keep busy, of 1.
const BUSY_MIN: f64 = 0.9;

/// The least number of compilations at once of a lone user, of as many as there are processors or places.
const COMPILES_MIN: f64 = 0.8;

/// The least part of the pages that a lone user is promised which it comes to hold. What has no room for a whole context, of 63 pages,
/// is left.
const PAGES_MIN: f64 = 0.95;

/// From the beginning of a load to that of its window: components are compiled and threads started until then.
const WARM: Duration = Duration::from_millis(1_500);

/// Operations of the one function of a component that is compiled: functions of one are compiled on several threads, so that this is
/// work for one processor.
const N_OPERATIONS: usize = 30_000;

/// How often one component is compiled with nothing beside it.
const N_SINGLE: usize = 3;

/// KV memory of the daemon, soon full: of the model `tiny` 1,536 pages.
const KV_BYTES: u64 = 192 << 20;

/// How long it may take until a user holds as many pages as it comes to hold.
const PAGES_TIME_MAX: Duration = Duration::from_secs(60);

/// Time between two looks at pages.
const LOOK_PERIOD: Duration = Duration::from_millis(10);

/// What keeps processors busy: what it is, an attack that does nothing else, and how many guests of it for each processor.
const LOADS: [(&str, &str, usize); 4] = [
    ("guests that compute", "spin", 2),
    ("texts that are encoded", "encode-random", 2),
    ("streams of tokens", "generate-crowd", 8),
    ("prompts", "prefill", 8),
];

/// Something that a lone user had.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// What it is about.
    pub what: String,
    /// What its numbers count.
    pub unit: &'static str,
    /// How much of it the user had.
    pub had: f64,
    /// How much there was for it.
    pub of: f64,
    /// The least that it has to have of that, of 1.
    pub least: f64,
    /// What went wrong meanwhile.
    pub errors: Vec<String>,
}

impl Row {
    /// What it had, of what there was.
    #[must_use]
    pub fn share(&self) -> f64 {
        self.had / self.of.max(0.001)
    }

    /// Whether it had too little, or something went wrong.
    #[must_use]
    pub fn is_missed(&self) -> bool {
        // What cannot be compared is no success.
        let has_enough = self.share() >= self.least;
        !has_enough || !self.errors.is_empty()
    }

    /// The head of a table of rows.
    #[must_use]
    pub fn head() -> String {
        format!(
            "     {:<26}{:>10}{:>10}  {:<14}{:>7}{:>8}",
            "of a lone user", "had", "there was", "", "share", "least"
        )
    }

    /// As a line of that table.
    #[must_use]
    pub fn line(&self) -> String {
        let Self { what, unit, had, of, errors, .. } = self;
        let mark = if self.is_missed() { "FAIL" } else { "ok  " };
        let [share, least] = [self.share(), self.least].map(|part| 100.0 * part);
        let errors = errors.join("; ");
        format!("{mark} {what:<26}{had:>10.2}{of:>10.2}  {unit:<14}{share:>6.0}%{least:>7.0}%  {errors}")
    }
}

/// The settings of a daemon that has one user: those that it has by itself, but that nothing that goes on for ever is ended, that
/// many components may wait to be compiled, and that KV memory is soon full.
#[must_use]
pub fn config(config: Config) -> Config {
    let config = pace::config(config);
    let limits = GuestLimits { n_compiles_queued: 1_000, ..config.limits };
    Config { kv_bytes: Some(KV_BYTES), limits, ..config }
}

/// What the process of the lone user's compilations is to do.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Compiles {
    /// Components that nobody has compiled, started at once.
    pub n_at_once: usize,
}

/// Measures everything, in windows of so many seconds, and tells each row.
///
/// # Errors
/// The daemon is gone, or a process does not do what it should.
pub fn run(mut daemon: Daemon, seconds: f64, say: &dyn Fn(&Row)) -> io::Result<Vec<Row>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut raw = runtime.block_on(Raw::connect(&daemon.socket()))?;
    let limits = runtime.block_on(limits(&mut raw))?;
    let mut rows = Vec::new();
    let mut add = |row: Row| {
        say(&row);
        rows.push(row);
    };
    for (what, name, n_guests) in LOADS {
        add(load(&daemon, what, name, n_guests * n_processors(), seconds)?);
    }
    add(compiles(&daemon, &limits)?);
    add(runtime.block_on(pages(&daemon, &mut raw, &limits))?);
    match daemon.has_ended()? {
        Some(status) => Err(io::Error::other(format!("the daemon ended, {status}\n{}", daemon.log()))),
        None => Ok(rows),
    }
}

/// Processors that this process may use, as the daemon that it has started.
fn n_processors() -> usize {
    available_parallelism().map_or(1, usize::from)
}

/// The lone user.
const USER: User = User(1);

fn orders(name: &str, n_copies: usize, seconds: f64) -> Orders {
    Orders { name: name.to_owned(), n_copies, seconds, is_repeated: true }
}

/// What is wrong with how guests of this attack have ended.
fn wrong_ends(name: &str, attackers: super::processes::Attackers) -> io::Result<Vec<String>> {
    let tally = attackers.wait()?;
    let attack = table().into_iter().find(|attack| attack.name == name);
    Ok(attack.map_or_else(|| vec![format!("no attack is called {name}")], |attack| attack.wrong_ends(&tally)))
}

/// The processors that the user keeps busy with guests of this attack: by them, by what the daemon does for them, and by its clients.
/// There are those that nobody else on the machine keeps busy.
fn load(daemon: &Daemon, what: &str, name: &str, n_guests: usize, seconds: f64) -> io::Result<Row> {
    let pids = [daemon.pid(), std::process::id()];
    let attackers = daemon.attack(USER, &orders(name, n_guests, WARM.as_secs_f64() + seconds))?;
    std::thread::sleep(WARM);
    let (begun, before) = (Instant::now(), Load::of(&pids));
    std::thread::sleep(Duration::from_secs_f64(seconds));
    let (after, seconds) = (Load::of(&pids), begun.elapsed().as_secs_f64());
    let had = after.own_since(&before, seconds);
    let of = (n_processors() as f64).min(n_online() as f64 - after.foreign_since(&before, seconds));
    let (what, errors) = (format!("{n_guests} {what}"), wrong_ends(name, attackers)?);
    Ok(Row { what, unit: "processors", had, of, least: BUSY_MIN, errors })
}

/// How many components are compiled at once on average, of twice as many as there may be: by how long they take together, and how
/// long one takes that is alone.
fn compiles(daemon: &Daemon, limits: &[LimitInfo]) -> io::Result<Row> {
    let compile = |n_at_once: usize| -> io::Result<f64> {
        let mut seconds = None;
        daemon.run_clients(USER, LONE, &Compiles { n_at_once }, &mut |line| {
            seconds = line.parse::<f64>().ok()
        })?;
        seconds.ok_or_else(|| io::Error::other("who compiles does not say how long it took"))
    };
    let mut single = (0..N_SINGLE).map(|_| compile(1)).collect::<io::Result<Vec<f64>>>()?;
    single.sort_by(f64::total_cmp);
    let n_places = n_processors().min(value(limits, "limits.n_compiles")? as usize).max(1);
    let n_at_once = 2 * n_places;
    let had = n_at_once as f64 * single[N_SINGLE / 2] / compile(n_at_once)?;
    let what = format!("{n_at_once} components compiled");
    let of = n_places as f64;
    Ok(Row { what, unit: "at once", had, of, least: COMPILES_MIN, errors: Vec::new() })
}

/// The most KV pages that guests of the user come to hold that take all they can get, of as many as there are, or as many as it may have.
async fn pages(daemon: &Daemon, raw: &mut Raw, limits: &[LimitInfo]) -> io::Result<Row> {
    let (_, n_all) = pages_held(raw).await?;
    let of_levels = ["budgets.user.n_pages", "budgets.daemon.n_pages"].map(|name| value(limits, name));
    let n_promised = of_levels.into_iter().try_fold(n_all, |least, level| level.map(|n| least.min(n)))?;
    let seconds = PAGES_TIME_MAX.as_secs_f64();
    let mut attackers = daemon.attack(USER, &orders("pages", 2 * n_processors(), seconds))?;
    let begun = Instant::now();
    let mut most = 0;
    while (most as f64) < PAGES_MIN * n_promised as f64 && begun.elapsed() < PAGES_TIME_MAX {
        tokio::time::sleep(LOOK_PERIOD).await;
        most = pages_held(raw).await?.0.max(most);
    }
    attackers.kill()?;
    let (what, had, of) = ("KV pages held".to_owned(), most as f64, n_promised as f64);
    Ok(Row { what, unit: "pages", had, of, least: PAGES_MIN, errors: Vec::new() })
}

/// KV pages that something holds, and those that there are.
async fn pages_held(raw: &mut Raw) -> io::Result<(u64, u64)> {
    let Value::Models { models } = raw.value(Call::Models).await? else {
        return Err(io::Error::other("the answer to models is none"));
    };
    let n_all = models.iter().map(|model| model.n_pages).sum();
    let n_free: u64 = models.iter().map(|model| model.n_pages_free).sum();
    Ok((n_all - n_free, n_all))
}

async fn limits(raw: &mut Raw) -> io::Result<Vec<LimitInfo>> {
    match raw.value(Call::Limits).await? {
        Value::Limits { limits } => Ok(limits),
        _ => Err(io::Error::other("the answer to limits is none")),
    }
}

/// The value of the limit of this name.
fn value(limits: &[LimitInfo], name: &str) -> io::Result<u64> {
    let limit = limits.iter().find(|limit| limit.name == name).and_then(|limit| limit.value);
    limit.ok_or_else(|| io::Error::other(format!("no limit is called {name}")))
}

/// The process of the lone user's compilations: says how many seconds they took together.
///
/// # Errors
/// The daemon cannot be reached, or refuses one.
pub fn be_lone(folder: &Path, compiles: Compiles) -> io::Result<()> {
    let site = site(folder)?;
    let base = Component::new(components::function_of(N_OPERATIONS));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let seconds = runtime.block_on(async {
        let mut uploaded = Vec::new();
        for _ in 0..compiles.n_at_once {
            let component = salted(&base, fresh());
            let mut raw = Raw::connect(&site.socket).await?;
            well(raw.upload(&component).await?)?;
            uploaded.push((raw, component));
        }
        let begun = Instant::now();
        let mut started = Vec::new();
        for (mut raw, component) in uploaded {
            let id = raw.start(&component, &[]).await?;
            started.push((raw, id));
        }
        for (mut raw, id) in started {
            well(raw.follow(id).await?)?;
        }
        io::Result::Ok(begun.elapsed().as_secs_f64())
    })?;
    println!("{seconds}");
    Ok(())
}

fn well(ending: super::Ending) -> io::Result<()> {
    match ending.is_well() {
        true => Ok(()),
        false => Err(io::Error::other(format!("{}: {}", ending.short(), ending.message))),
    }
}
