//! Daemons with a small world of their own, in this process or in another, and what their guests send.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use trellis::config::{Config, Device, DtypeChoice, Isolation, SavedContexts};
use trellis::daemon::{Daemon, Seams};
use trellis::guest::GuestLimits;
use trellis::session::SessionLimits;
use trellis_client::{Client, Error, ErrorBody, Event, Guest, GuestUsage, Program, StartOptions};
use trellis_engine::{EngineStats, Port};

use crate::device::device;
use crate::{guests, pack};

/// Long enough for anything that ends at all, on a slow machine that does other things too. No test that passes waits
/// so long.
pub const PATIENCE: Duration = Duration::from_secs(300);

/// The file of a daemon's log, in its folder.
const LOG: &str = "trellis.log";

/// What guests may use in tests that are not about it: time for a slow machine, to compile them and to run.
#[must_use]
pub fn limits() -> GuestLimits {
    GuestLimits { compile_ms: 600_000, cpu_ms: 600_000, deadline_ms: 1_200_000, ..GuestLimits::default() }
}

/// The settings that a test starts from: the device under test; `exe` compiles guests, and compiled guests are
/// kept beside it, so that only the first test of a build waits for the compiler.
#[must_use]
pub fn config(exe: &str) -> Config {
    let exe = PathBuf::from(exe);
    let cache_dir = exe.with_file_name("tests-cache");
    let config = Config {
        cache_dir: Some(cache_dir),
        compile_exe: Some(exe),
        limits: limits(),
        isolation: isolation(),
        saved_contexts: SavedContexts::Memory,
        // Most tests end their daemons beside guests that never end.
        sessions: SessionLimits { drain_ms: 0, ..SessionLimits::default() },
        ..Config::default()
    };
    match device() {
        // What the tests compare is computed in float32, and many of their daemons share the card.
        Device::Cuda => {
            Config { device: Device::Cuda, dtype: DtypeChoice::F32, kv_bytes: Some(256 << 20), ..config }
        }
        device => Config { device, ..config },
    }
}

/// Where guests run in tests that are not about it: in threads, unless `TRELLIS_TEST_ISOLATION` says `process`.
///
/// # Panics
/// It says something else.
#[must_use]
pub fn isolation() -> Isolation {
    match std::env::var("TRELLIS_TEST_ISOLATION").as_deref() {
        Ok("process") => Isolation::Process,
        Ok("thread") | Err(_) => Isolation::Thread,
        Ok(other) => panic!("TRELLIS_TEST_ISOLATION is {other:?}, and neither thread nor process"),
    }
}

/// A daemon in this process.
///
/// # Panics
/// It does not start.
#[must_use]
pub fn start(config: &Config) -> Daemon {
    Daemon::start(config, &|_| {}).expect("the daemon starts")
}

/// A daemon in this process, whose guests are at the other end of this port.
///
/// # Panics
/// It does not start.
#[must_use]
pub fn start_over(port: Port, config: &Config) -> Daemon {
    let seams = Seams { port, ..Seams::default() };
    Daemon::start_with(config, seams, &|_| {}).expect("the daemon starts")
}

/// Options with these arguments and a fixed seed.
#[must_use]
pub fn with(arguments: &[&str]) -> StartOptions {
    let arguments = arguments.iter().map(|&argument| argument.to_owned()).collect();
    StartOptions { arguments, seed: Some(7), ..StartOptions::default() }
}

/// All that a guest sent, and how it ended.
#[derive(Debug, Default)]
pub struct Ended {
    /// Its text.
    pub text: String,
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// Its JSON texts.
    pub json: Vec<serde_json::Value>,
    /// Its log.
    pub log: Vec<String>,
    /// Its recording.
    pub recorded: Vec<u8>,
    /// How it ended, unless well.
    pub error: Option<Error>,
    /// What it used.
    pub usage: Option<GuestUsage>,
}

impl Ended {
    /// Asserts that the guest ended well.
    ///
    /// # Panics
    /// It did not.
    #[must_use]
    pub fn well(self) -> Self {
        assert!(self.error.is_none(), "{self:?}");
        self
    }

    /// The daemon's reason for the end.
    ///
    /// # Panics
    /// The guest ended well, or the connection was lost.
    #[must_use]
    pub fn reason(&self) -> &ErrorBody {
        match &self.error {
            Some(Error::Daemon(body)) => body,
            _ => panic!("no error of the daemon: {self:?}"),
        }
    }
}

/// Runs a guest and collects what it sends.
///
/// # Panics
/// The connection is lost before it starts, or it sends no JSON where it says so.
pub async fn run(client: &Client, wasm: &[u8], options: StartOptions) -> Ended {
    let guest = client.start(Program::wasm(wasm.to_vec()), options).await.expect("the connection stands");
    collect(guest).await
}

/// The number of a guest, once it runs.
///
/// # Panics
/// It sends something or ends before it is said to run.
pub async fn started(guest: &mut Guest) -> u64 {
    loop {
        match guest.next().await {
            Some(Ok(Event::Progress { .. })) => {}
            Some(Ok(Event::Started { guest_id })) => return guest_id,
            other => panic!("the guest has not started: {other:?}"),
        }
    }
}

/// Whether a guest is on the list.
///
/// # Panics
/// The daemon does not answer.
pub async fn is_listed(client: &Client, guest_id: u64) -> bool {
    client.ps().await.expect("the daemon answers").iter().any(|guest| guest.guest_id == guest_id)
}

/// Collects what a guest sends from here on.
///
/// # Panics
/// It sends no JSON where it says so.
pub async fn collect(mut guest: Guest) -> Ended {
    let mut ended = Ended::default();
    while let Some(event) = guest.next().await {
        match event {
            Ok(Event::Text { text }) => ended.text.push_str(&text),
            Ok(Event::Tokens { tokens }) => ended.tokens.extend(tokens),
            Ok(Event::Json { json }) => ended.json.push(serde_json::from_str(&json).expect("it is JSON")),
            Ok(Event::Log { line, .. }) => ended.log.push(line),
            Ok(Event::Recorded { bytes }) => ended.recorded.extend(bytes),
            Ok(
                Event::Progress { .. }
                | Event::Started { .. }
                | Event::Attached { .. }
                | Event::Wanted
                | Event::Profiled { .. }
                | Event::Unknown,
            ) => {}
            Err(error) => ended.error = Some(error),
        }
    }
    ended.usage = guest.usage().cloned();
    ended
}

/// Waits until a condition holds.
///
/// # Panics
/// It does not hold within [`PATIENCE`].
pub async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let begun = Instant::now();
    while !holds().await {
        assert!(begun.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Waits until no guest runs, and asserts that every page is free again.
///
/// # Panics
/// Something is still held.
pub async fn nothing_is_held(daemon: &Daemon) {
    until("no guest runs", async || daemon.service().host().guests().is_empty()).await;
    for model in daemon.service().host().models().iter() {
        // The engine answers in order: by now it has released what was dropped before.
        let stats: EngineStats = model.stats().await.expect("the engine lives");
        assert_eq!(stats.n_contexts, 0, "{stats:?}");
        assert_eq!(stats.n_saved, 0, "{stats:?}");
        assert_eq!(stats.n_pages_free + stats.n_pages_cached, stats.n_pages, "to the page: {stats:?}");
        assert_eq!(stats.n_pages_on_host, 0, "{stats:?}");
    }
}

/// `trellis serve` in a process of its own, with a socket of its own. Killed when dropped.
#[derive(Debug)]
pub struct Served {
    child: Child,
    exe: PathBuf,
    folder: TempDir,
}

impl Served {
    /// Starts the daemon and waits until it takes connections.
    ///
    /// # Panics
    /// It does not start.
    #[must_use]
    pub fn start(exe: &str) -> Self {
        Self::start_with(exe, &config(exe), &[])
    }

    /// As [`Served::start`], with these settings, and this in its environment.
    ///
    /// # Panics
    /// It does not start.
    #[must_use]
    pub fn start_with(exe: &str, config: &Config, environment: &[(&str, &str)]) -> Self {
        let text = toml::to_string(config).expect("settings can be written down");
        Self::start_on(exe, &text, environment)
    }

    /// As [`Served::start_with`], with this text of settings.
    ///
    /// # Panics
    /// It does not start.
    #[must_use]
    pub fn start_on(exe: &str, text: &str, environment: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("trellis.toml"), text).expect("the settings are written");
        let mut served = Self { child: serve(exe, folder.path(), environment), exe: exe.into(), folder };
        served.becomes_ready();
        served
    }

    /// Starts another daemon in the place of one that has ended.
    ///
    /// # Panics
    /// It does not start.
    pub fn start_again(&mut self) {
        self.child = serve(&self.exe.to_string_lossy(), self.folder.path(), &[]);
        self.becomes_ready();
    }

    fn becomes_ready(&mut self) {
        let begun = Instant::now();
        while !output(&mut self.trellis(&["info"])).status.success() {
            let status = self.child.try_wait().expect("the child can be asked");
            assert!(status.is_none() && begun.elapsed() < PATIENCE, "the daemon is not ready: {status:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("trellis.sock")
    }

    /// The file of its settings.
    #[must_use]
    pub fn config(&self) -> PathBuf {
        self.folder.path().join("trellis.toml")
    }

    /// What it has logged so far.
    ///
    /// # Panics
    /// The log cannot be read.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join(LOG)).expect("it is there")
    }

    /// A command on this daemon; its output is left out unless the test takes it.
    #[must_use]
    pub fn trellis(&self, arguments: &[&str]) -> Command {
        let mut command = trellis(&self.exe.to_string_lossy());
        let (name, rest) = arguments.split_first().expect("a command has a name");
        command.arg(name).arg("--socket").arg(self.socket()).args(rest);
        command
    }

    /// The daemon's process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for the daemon's end.
    ///
    /// # Panics
    /// It does not end within [`PATIENCE`].
    pub fn wait(&mut self) -> ExitStatus {
        wait(&mut self.child)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The command with nothing of this build in its environment, and no daemon of the user's in sight.
#[must_use]
pub fn trellis(exe: &str) -> Command {
    let mut command = Command::new(exe);
    guests::clean(&mut command);
    command.env_remove("TRELLIS_SOCKET");
    command.current_dir(pack::root());
    command.env("XDG_RUNTIME_DIR", "/nonexistent/trellis-tests");
    // A busy machine is to change nothing.
    command.env("MEMORY_PRESSURE_WATCH", "/dev/null");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command
}

fn serve(exe: &str, folder: &Path, environment: &[(&str, &str)]) -> Child {
    let mut command = trellis(exe);
    command.envs(environment.iter().copied());
    command.arg("serve").arg("--socket").arg(folder.join("trellis.sock"));
    command.arg("--config").arg(folder.join("trellis.toml"));
    command.stderr(std::fs::File::create(folder.join(LOG)).expect("the folder takes files"));
    command.spawn().expect("the daemon starts")
}

/// Runs a process to its end and collects what it writes.
///
/// # Panics
/// It does not end within [`PATIENCE`]; it is killed then.
pub fn output(command: &mut Command) -> Output {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it runs");
    let (out, err) = (child.stdout.take().expect("piped"), child.stderr.take().expect("piped"));
    let (out, err) = (std::thread::spawn(move || read(out)), std::thread::spawn(move || read(err)));
    let status = wait(&mut child);
    let joined = |reader: JoinHandle<Vec<u8>>| reader.join().expect("no panic");
    Output { status, stdout: joined(out), stderr: joined(err) }
}

fn read(mut pipe: impl Read) -> Vec<u8> {
    let mut bytes = Vec::new();
    pipe.read_to_end(&mut bytes).expect("a pipe can be read");
    bytes
}

/// Waits for the end of a process.
///
/// # Panics
/// It does not end within [`PATIENCE`]; it is killed then.
pub fn wait(child: &mut Child) -> ExitStatus {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait().expect("the child can be asked") {
            return status;
        }
        if begun.elapsed() > PATIENCE {
            child.kill().and_then(|()| child.wait()).expect("it can be killed");
            panic!("process {} does not end", child.id());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}
