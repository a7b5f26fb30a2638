//! A daemon, a neighbour and attackers, each a process of its own and, where this one may, a user of its own.

use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tempfile::TempDir;
use trellis::config::Config;

use super::group::Group;
use super::neighbour::{GO, MARK, N_TOKENS, Window};
use super::saved;
use super::{Attack, Component, Ending, Site};

/// Users that nobody is, for who has the right to become another: the neighbour and the attackers.
const FIRST_UID: u32 = 60_100;

/// How long a daemon may take to start.
const START_TIME_MAX: Duration = Duration::from_secs(60);

/// How long anything that was asked of another process may take.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(120);

/// How long attackers may take to end: many components are compiled one after the other, beside all that others do.
const END_TIME_MAX: Duration = Duration::from_secs(400);

/// How long after the end of attacks those may go on that are repeated, before their guests are cancelled.
const CANCEL_TIME: Duration = Duration::from_millis(200);

/// How long after the end of attacks those may go on that are repeated, before their connections are dropped.
const LEAVE_TIME: Duration = Duration::from_secs(3);

/// How long after the end of attacks the first of one that ends by itself is waited for: some are compiled for long before they do.
const END_TIME: Duration = Duration::from_secs(20);

/// A user of the daemon, by number: 0 is the neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct User(pub u32);

/// A daemon and the folder that its socket is in.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    folder: TempDir,
    clients: PathBuf,
    /// Whether clients run under other users.
    pub has_users: bool,
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

impl Daemon {
    /// Starts `trellis serve` of one executable, whose clients run another one, that of the command `attacks`.
    ///
    /// # Errors
    /// It does not start.
    pub fn start(trellis: &Path, clients: &Path, config: &Config, hostile: &Component) -> io::Result<Self> {
        Self::start_in(None, trellis, clients, config, hostile)
    }

    /// As [`Daemon::start`], in this control group.
    ///
    /// # Errors
    /// It does not start.
    pub fn start_in(
        group: Option<&Group>,
        trellis: &Path,
        clients: &Path,
        config: &Config,
        hostile: &Component,
    ) -> io::Result<Self> {
        let folder = tempfile::Builder::new().prefix("trellis-attacks").tempdir()?;
        fs::set_permissions(folder.path(), Permissions::from_mode(0o755))?;
        fs::write(folder.path().join("hostile.wasm"), &hostile.wasm)?;
        // Never what its user has saved for itself.
        let config = saved::on_disk(config.clone(), folder.path());
        let text = toml::to_string(&config).map_err(io::Error::other)?;
        fs::write(folder.path().join("trellis.toml"), text)?;
        let log = File::create(folder.path().join("daemon.log"))?;
        let mut command = match group {
            None => Command::new(trellis),
            Some(group) => {
                // What it starts is where it is itself, from the first byte on.
                let mut command = Command::new("/bin/sh");
                command.args(["-c", r#"echo $$ > "$0" && exec "$@""#]).arg(group.members()).arg(trellis);
                command
            }
        };
        crate::guests::clean(&mut command).env_remove("TRELLIS_SOCKET");
        command.args(["serve", "--log", "warn", "--socket"]).arg(folder.path().join("trellis.sock"));
        command.arg("--config").arg(folder.path().join("trellis.toml"));
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn()?;
        let mut daemon = Self { child, folder, clients: clients.to_owned(), has_users: is_root() };
        daemon.wait_for_socket()?;
        if daemon.has_users {
            // Its mode lets its group in; here it is for everybody.
            fs::set_permissions(daemon.socket(), Permissions::from_mode(0o666))?;
        }
        Ok(daemon)
    }

    fn wait_for_socket(&mut self) -> io::Result<()> {
        let begun = Instant::now();
        while std::os::unix::net::UnixStream::connect(self.socket()).is_err() {
            if let Some(status) = self.child.try_wait()? {
                return Err(io::Error::other(format!(
                    "the daemon has not started, {status}: {}",
                    self.log()
                )));
            }
            if begun.elapsed() > START_TIME_MAX {
                return Err(io::Error::other(format!("the daemon is not ready after {START_TIME_MAX:?}")));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Its socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("trellis.sock")
    }

    /// Its process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The folder with all that is its own.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// What it has logged.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("daemon.log")).unwrap_or_default()
    }

    /// How it has ended, where it has.
    ///
    /// # Errors
    /// The system does not say.
    pub fn has_ended(&mut self) -> io::Result<Option<ExitStatus>> {
        self.child.try_wait()
    }

    /// A command of the clients' executable, as this user.
    fn client(&self, user: User, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.clients);
        command.args(arguments).arg("--folder").arg(self.folder.path()).current_dir("/");
        if self.has_users {
            command.uid(FIRST_UID + user.0).gid(FIRST_UID + user.0);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        command
    }

    /// Starts a neighbour, which waits to be told to go.
    ///
    /// # Errors
    /// It does not start.
    pub fn neighbour(&self, user: User) -> io::Result<Neighbour> {
        let mut child = self.client(user, &[NEIGHBOUR]).spawn()?;
        let (told, answers) = pipes(&mut child)?;
        Ok(Neighbour { child, told, answers })
    }

    /// Starts copies of an attack, in one process, which go on for so long or, where they are to attack once, end when they do.
    ///
    /// # Errors
    /// It does not start.
    pub fn attack(&self, user: User, orders: &Orders) -> io::Result<Attackers> {
        let mut attackers = self.ready(user, orders)?;
        attackers.go();
        Ok(attackers)
    }

    /// As [`Daemon::attack`], but lets them loose only when they are told to [go](Attackers::go), and waits until that needs no more
    /// than the word.
    ///
    /// # Errors
    /// It does not start.
    pub fn ready(&self, user: User, orders: &Orders) -> io::Result<Attackers> {
        let orders = serde_json::to_string(orders)?;
        let mut child = self.client(user, &[ATTACKER, "--orders", &orders]).spawn()?;
        let (told, mut answers) = pipes(&mut child)?;
        answers.read_line(&mut String::new())?;
        Ok(Attackers { child, told: Some(told), answers })
    }

    /// Runs a process of clients with these orders to its end, and hears each line that it says.
    ///
    /// # Errors
    /// It does not start, or fails.
    pub(super) fn run_clients(
        &self,
        user: User,
        role: &str,
        orders: &impl Serialize,
        hear: &mut dyn FnMut(&str),
    ) -> io::Result<()> {
        let orders = serde_json::to_string(orders)?;
        let mut child = self.client(user, &[role, "--orders", &orders]).spawn()?;
        let (_told, answers) = pipes(&mut child)?;
        for line in answers.lines() {
            hear(&line?);
        }
        let status = child.wait()?;
        if status.success() { Ok(()) } else { Err(io::Error::other(format!("{role} ended: {status}"))) }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The command of the clients' executable that is the neighbour.
pub const NEIGHBOUR: &str = "neighbour-process";
/// The command of the clients' executable that attacks.
pub const ATTACKER: &str = "attacker-process";
/// The command of the clients' executable that is a user beside whom there is nobody.
pub const LONE: &str = "lone-process";
/// The command of the clients' executable that opens sessions and drops them.
pub const VISITOR: &str = "visitor-process";

fn pipes(child: &mut Child) -> io::Result<(ChildStdin, BufReader<ChildStdout>)> {
    match (child.stdin.take(), child.stdout.take()) {
        (Some(told), Some(answers)) => Ok((told, BufReader::new(answers))),
        _ => Err(io::Error::other("a process without pipes")),
    }
}

/// The neighbour's process.
#[derive(Debug)]
pub struct Neighbour {
    child: Child,
    told: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Neighbour {
    /// Its process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Lets it begin, and learn alone what its stream is: waits until it has had it twice.
    ///
    /// # Errors
    /// It is gone, or has not had it in time.
    pub fn learn(&mut self) -> io::Result<()> {
        self.tell(GO)?;
        self.tokens(2 * N_TOKENS as u64, Duration::from_millis(100)).map(drop)
    }

    /// Waits until it has tokens; what it has seen until then.
    ///
    /// # Errors
    /// It is gone, or has none in time.
    pub fn first_tokens(&mut self) -> io::Result<Window> {
        self.tokens(1, Duration::from_millis(5))
    }

    /// Waits until it has so many tokens, and looks now and then.
    fn tokens(&mut self, n: u64, period: Duration) -> io::Result<Window> {
        let begun = Instant::now();
        let mut seen = Window::default();
        while seen.n_tokens < n {
            if begun.elapsed() > ANSWER_TIME_MAX {
                let n_tokens = seen.n_tokens;
                let message = format!("alone the neighbour has {n_tokens} tokens in {ANSWER_TIME_MAX:?}");
                return Err(io::Error::other(message));
            }
            std::thread::sleep(period);
            seen = seen.and(&self.tell(MARK)?);
        }
        Ok(seen)
    }

    /// Tells it something and waits for its answer.
    ///
    /// # Errors
    /// It is gone.
    pub fn tell(&mut self, word: &str) -> io::Result<Window> {
        writeln!(self.told, "{word}")?;
        self.told.flush()?;
        let mut line = String::new();
        if self.answers.read_line(&mut line)? == 0 {
            return Err(io::Error::other(format!("the neighbour has ended: {:?}", self.child.wait()?)));
        }
        Ok(serde_json::from_str(&line)?)
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What a process of attackers is to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Orders {
    /// The attack's name.
    pub name: String,
    /// How many at once.
    pub n_copies: usize,
    /// How long those that could go on for ever do so.
    pub seconds: f64,
    /// Whether each begins again when it has ended, until the time is over.
    pub is_repeated: bool,
}

/// Endings of attacks, and how often each came.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Tally {
    /// By what is short of them: one of them whole, and how many.
    pub by_end: BTreeMap<String, (Ending, usize)>,
}

impl Tally {
    pub(super) fn note(&mut self, ending: Ending, n: usize) {
        self.by_end.entry(ending.short()).or_insert((ending, 0)).1 += n;
    }

    /// Those of another one too.
    pub fn add(&mut self, other: Self) {
        for (ending, n) in other.by_end.into_values() {
            self.note(ending, n);
        }
    }

    /// In one line.
    #[must_use]
    pub fn line(&self) -> String {
        let parts: Vec<String> = self
            .by_end
            .iter()
            .map(|(end, (_, n))| if *n == 1 { end.clone() } else { format!("{n} x {end}") })
            .collect();
        parts.join(", ")
    }
}

/// A process of attackers.
#[derive(Debug)]
pub struct Attackers {
    child: Child,
    /// They are let loose when it closes.
    told: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Attackers {
    /// Their process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Lets them loose.
    pub fn go(&mut self) {
        self.told = None;
    }

    /// Kills them: the daemon ends their guests.
    ///
    /// # Errors
    /// The system does not.
    pub fn kill(&mut self) -> io::Result<()> {
        self.child.kill()?;
        self.child.wait().map(drop)
    }

    /// Waits until they have ended; how they did. Kills those that do not.
    ///
    /// # Errors
    /// They end without a word.
    pub fn wait(mut self) -> io::Result<Tally> {
        self.go();
        let pid = self.child.id();
        let (done, is_done) = std::sync::mpsc::channel::<()>();
        let watch = std::thread::spawn(move || {
            if is_done.recv_timeout(END_TIME_MAX).is_err()
                && let Some(pid) = rustix::process::Pid::from_raw(pid as i32)
            {
                // Gone by itself in this very moment: as good.
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        });
        let mut text = String::new();
        let read = io::Read::read_to_string(&mut self.answers, &mut text);
        let _ = done.send(());
        let _ = watch.join();
        let status = self.child.wait()?;
        read?;
        let last = text.lines().last().unwrap_or_default();
        // One that took too long was ended before it could say how it went.
        serde_json::from_str(last).map_err(|_| {
            io::Error::other(format!(
                "attackers did not say how they ended, {status}; their last word: {last:?}"
            ))
        })
    }
}

/// The folder that a client's process was given.
pub(super) fn site(folder: &Path) -> io::Result<Site> {
    let hostile = Component::new(fs::read(folder.join("hostile.wasm"))?);
    Ok(Site { socket: folder.join("trellis.sock").into(), hostile, until: Instant::now(), patience: None })
}

/// The process of a neighbour.
///
/// # Errors
/// The daemon cannot be reached.
pub fn be_neighbour(folder: &Path) -> io::Result<()> {
    let site = site(folder)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(super::neighbour::run(&site.socket, site.hostile))
}

/// The process of attackers: says when they are ready, begins when standard input ends, and says at the end how they ended.
///
/// # Errors
/// There is no attack of that name.
pub fn be_attackers(folder: &Path, orders: &Orders) -> io::Result<()> {
    let attack = super::table().into_iter().find(|attack| attack.name == orders.name);
    let attack = attack.ok_or_else(|| io::Error::other(format!("no attack is called {}", orders.name)))?;
    let mut site = site(folder)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    attack.prepare();
    println!("ready");
    io::stdin().lock().read_line(&mut String::new())?;
    site.until = Instant::now() + Duration::from_secs_f64(orders.seconds);
    let tally = runtime.block_on(async {
        let copies: Vec<_> = (0..orders.n_copies)
            .map(|_| tokio::spawn(attack_with(attack, site.clone(), orders.is_repeated)))
            .collect();
        let mut tally = Tally::default();
        for copy in copies {
            tally.add(copy.await.map_err(io::Error::other)?);
        }
        if let Err(error) = attack.clean_up(&site).await {
            tally.note(Ending::wrong(format!("what it left cannot be taken away: {error}")), 1);
        }
        io::Result::Ok(tally)
    })?;
    println!("{}", serde_json::to_string(&tally)?);
    // Whatever still waits for the system is not waited for.
    runtime.shutdown_background();
    Ok(())
}

async fn attack_with(attack: Attack, mut site: Site, is_repeated: bool) -> Tally {
    let mut tally = Tally::default();
    loop {
        let ending = if is_repeated {
            let is_awaited = attack.ends_by_itself() && tally.by_end.is_empty();
            let (cancel, leave) = if is_awaited { (END_TIME, END_TIME) } else { (CANCEL_TIME, LEAVE_TIME) };
            site.patience = Some(cancel);
            // Some wait for their guests, and those for their limits.
            let leaving = tokio::time::timeout_at((site.until + leave).into(), attack.run(&site));
            leaving.await.unwrap_or_else(|_| Ok(Ending::left()))
        } else {
            attack.run(&site).await
        };
        match ending {
            Ok(ending) => tally.note(ending, 1),
            Err(error) => {
                tally.note(Ending { code: "lost".to_owned(), name: None, message: error.to_string() }, 1);
                // Refused connections should not become a flood of the system's own.
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        if !is_repeated || !site.goes_on() {
            return tally;
        }
    }
}
