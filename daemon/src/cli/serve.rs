//! `trellis serve`: the daemon, in the foreground.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use trellis_client::{ReloadInfo, SettingChange};

use super::connect::{self, DtypeArg};
use super::error::CliError;
use super::interrupt::{HangUps, Interrupts, UpgradeSignals};
use super::manager::{self, Manager};
use super::output::{self, Format};
use super::served;
use super::sockets::Sockets;
use super::start_notes::StartNotes;
use crate::config::{Config, ConfigError, Device, DtypeChoice, LogFilter, LogFormat};
use crate::daemon::{Daemon, usual_state_dir};
use crate::http::{Front, HttpSocket};
use crate::logs::{self, SetLog};
use crate::reload::{Origin, ReloadError};
use crate::start_check::{self, Startable, Starter};
use crate::tasks::joined;
use crate::upgrade::{self, CommandLine, Signals};
use crate::{cores, descriptors};

const EXAMPLES: &str = "\
Examples:
  trellis serve                                  the bundled model, for your own user
  trellis serve --model ./Llama-3.2-1B --device cuda --dtype bf16
  trellis serve --config /etc/trellis.toml       under a service manager

Told to end by SIGTERM, Ctrl-C or the end of its terminal, the daemon takes on nothing more and waits for what
it is at, up to sessions.drain_ms (10 s), of which guests are told, so that they may save what they have; then it ends guests, their
clients hear shutting_down, which may be tried again, and the socket is removed, within a second, whatever does not come to its end;
where drain_ms is 0 each thing has the time of its own for that. A second SIGTERM or Ctrl-C does not wait for guests, and the daemon
is gone within a second of it; a third waits for nothing.
Under nohup the end of the terminal changes nothing. `trellis stop --daemon` does not wait for guests either, and while the daemon
waits for them it is a second signal, as is a device that fails; where the daemon takes no connections meanwhile, as with a socket of
systemd's or while another program takes its place, it says so and names the process, to which SIGTERM is the signal.

SIGHUP, where it is not the end of the terminal, has the daemon read its configuration again, as `trellis reload` does, which says
what has changed and what waits for a restart. A file that is wrong changes nothing.

SIGUSR2 has what lies at the path of the program now take its place, as `trellis upgrade` does: same process, same socket, nobody is
refused. What has come of that is in the log.

On Linux it hears when memory is short, by the kernel's pressure stall information or by what MEMORY_PRESSURE_WATCH names, and lets go
of what it can compute or read again; MEMORY_PRESSURE_WATCH=/dev/null has it watch nothing.

The guests of each user run in a process of their own where root runs the daemon, where it listens on the socket of the machine, and
where others may pass the folders of its socket; in threads of the daemon otherwise, which then serves its own user and root alone.
The file's `isolation` says otherwise.

Started by systemd with Type=notify, it says there how far the start is, that it serves, and that it ends; with
WatchdogSec=, that each engine answers, and where one never does, systemd starts it again. With a socket unit it listens
on the socket that it is handed, where clients wait while no daemon runs.

With [http] in the file it answers requests in the form of OpenAI's API as well, on a Unix socket, or on a loopback address with a token.

Exit status: 0 stopped, 2 it could not start, 75 the device failed: clients were told, start it again
(with on_device_failure = \"reopen\" in the configuration it first tries to open the device again).";

/// Run the daemon in the foreground
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ServeArgs {
    /// Read the settings from this TOML file; the flags below win over it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Load this model: a bundled name (tiny, draft), a folder or a GGUF file; the first one given is the default
    #[arg(long = "model", value_name = "NAME|PATH")]
    models: Vec<String>,
    /// What runs the models: auto, cpu, cuda, or cuda:N for one GPU of several
    #[arg(long, value_name = "DEVICE")]
    device: Option<Device>,
    /// Type of weights, activations and KV cache
    #[arg(long, value_enum)]
    dtype: Option<DtypeArg>,
    /// Listen here; otherwise where TRELLIS_SOCKET says, or else the file's `socket`, or else in the user's runtime directory
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Say whether a daemon would start with all that, and end: nothing is loaded, and nobody is served
    #[arg(long)]
    check: bool,
    /// What to log: error, warn, info, debug, trace, or a filter such as trellis=debug; otherwise what the file's `log` says, or info
    #[arg(long, value_name = "LEVEL")]
    log: Option<LogFilter>,
}

/// The settings of a daemon: a file, and what the command line and the environment say over it.
struct Settings {
    file: Option<PathBuf>,
    models: Vec<String>,
    device: Option<Device>,
    dtype: Option<DtypeArg>,
    socket: Option<PathBuf>,
    log: Option<LogFilter>,
    manager: Arc<Manager>,
    set_log: OnceLock<SetLog>,
    /// Where the daemon listens, once it does.
    listened: OnceLock<PathBuf>,
}

impl Settings {
    /// As the command line says. A file is found again wherever the process goes.
    fn of(args: ServeArgs, manager: &Arc<Manager>) -> Result<Self, CliError> {
        let ServeArgs { config, models, device, dtype, socket, check: _, log } = args;
        let file = config.map(std::path::absolute).transpose();
        let file = file.map_err(CliError::io("find the current folder"))?;
        let (manager, set_log, listened) = (manager.clone(), OnceLock::new(), OnceLock::new());
        Ok(Self { file, models, device, dtype, socket, log, manager, set_log, listened })
    }

    /// With where guests run decided by where the daemon listens, or is told to.
    fn decided(&self, config: Config) -> Config {
        let isolation = match self.listened.get() {
            Some(socket) => config.isolation.of(served::by(socket)),
            None => served::isolation_of(&config),
        };
        Config { isolation, ..config }
    }

    /// What is said, with nothing decided.
    fn told(&self) -> Result<Config, ConfigError> {
        if self.set_log.get().is_some()
            && let Some(path) = &self.file
        {
            check_regular(path).map_err(|source| ConfigError::Read { path: path.clone(), source })?;
        }
        let mut config = self.file.as_deref().map_or_else(|| Ok(Config::default()), Config::load)?;
        if !self.models.is_empty() {
            config.models.clone_from(&self.models);
        }
        config.device = self.device.unwrap_or(config.device);
        config.dtype = self.dtype.map_or(config.dtype, DtypeChoice::from);
        config.socket = connect::socket_told(self.socket.clone(), connect::socket_of_environment(), &config);
        config.log = self.log.clone().unwrap_or(config.log);
        // Daemons that serve nobody else keep nothing.
        config.state_dir = config.state_dir.or_else(usual_state_dir);
        Ok(config)
    }
}

impl Origin for Settings {
    fn read(&self) -> Result<Config, ConfigError> {
        Ok(self.decided(self.told()?))
    }

    fn begins(&self) {
        self.manager.reloads();
    }

    fn ends(&self, outcome: &Result<ReloadInfo, ReloadError>, config: &Config) {
        let said = match outcome {
            Ok(info) => {
                let (n_changed, n_waiting) = (info.changed.len(), info.waiting.len());
                format!("serving; read again: {n_changed} settings changed, {n_waiting} wait for a restart")
            }
            Err(ReloadError::Panicked) => "serving; the configuration could not be read again".to_owned(),
            Err(ReloadError::Ending) => "the daemon is about to go down".to_owned(),
            Err(_) => "serving; the configuration is wrong and was not read again".to_owned(),
        };
        // After what is logged, and also where that fails.
        let _told = Told { manager: &self.manager, said };
        match outcome {
            Ok(info) => {
                // First: what is said of it is logged as it says.
                if let Some(set_log) = self.set_log.get() {
                    set_log(&config.log);
                }
                // Not the values, which may be secrets, as in the settings of a policy.
                for SettingChange { name, .. } in &info.changed {
                    tracing::info!(setting = name, "changed");
                }
                for SettingChange { name, .. } in &info.waiting {
                    tracing::warn!(setting = name, "waits for a restart");
                }
            }
            // Who asked is told.
            Err(ReloadError::Ending) => {}
            Err(error @ ReloadError::Panicked) => tracing::error!(%error, "nothing has changed"),
            Err(error) => {
                tracing::error!(%error, "the configuration is wrong, and nothing of it has changed");
            }
        }
    }
}

/// Tells the service manager what has come of a reload when it is dropped.
struct Told<'a> {
    manager: &'a Manager,
    said: String,
}

impl Drop for Told<'_> {
    fn drop(&mut self) {
        self.manager.has_reloaded(&self.said);
    }
}

/// Whether what is read again can be: a pipe, from which a start may read, has nothing more to give, and who reads it waits.
fn check_regular(path: &Path) -> io::Result<()> {
    match std::fs::metadata(path)?.is_file() {
        true => Ok(()),
        false => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file")),
    }
}

/// What the daemon says once it takes connections.
#[derive(Serialize)]
struct Ready {
    ready: bool,
    device: String,
    dtype: String,
    models: Vec<String>,
    socket: PathBuf,
    /// Where metrics are, over HTTP.
    #[serde(skip_serializing_if = "Option::is_none")]
    metrics: Option<SocketAddr>,
    /// Where HTTP requests are answered: an address, or the path of a socket.
    #[serde(skip_serializing_if = "Option::is_none")]
    http: Option<String>,
    took_ms: u64,
}

pub(crate) async fn serve(args: ServeArgs, format: Format) -> Result<(), CliError> {
    let started = Instant::now();
    if args.check {
        // Nothing takes its place, and an interrupt ends it.
        upgrade::let_signals_through();
        return check(args, format);
    }
    let (interrupts, mut hang_ups) = Interrupts::watch_beside_hang_ups()?;
    let mut upgrades = UpgradeSignals::watch()?;
    let signals = Signals::take().map_err(CliError::io("start the thread that takes signals"))?;
    // Before the file of this program is renamed for a newer one.
    let command = CommandLine::own().map_err(CliError::io("find this program"))?;
    let lent = manager::lent_sockets().map_err(CliError::io("take the sockets of systemd"))?;
    let manager = match lent.inherited {
        Some(_) => Manager::of_successor(),
        None => Manager::default(),
    };
    let manager = Arc::new(manager);
    let settings = Arc::new(Settings::of(args, &manager)?);
    let config = settings.told()?;
    let set_log = logs::start(config.log.filter(), config.log_format, config.log_bytes)
        .map_err(CliError::io("reach journald, to which log_format sends the log"))?;
    // It is set here, and here alone.
    let _ = settings.set_log.set(set_log);
    if let Err(error) = cores::forbid() {
        tracing::warn!(%error, "a daemon that dies may leave a core dump");
    }
    if let Err(error) = descriptors::raise_limit() {
        tracing::warn!(%error, "the limit of open files stays as low as it was");
    }

    // Before the models are loaded: of two daemons that start at once, one should hear so now, and clients
    // that come meanwhile should wait for this one.
    let Sockets { mut listener, endpoint, metrics_are_lent, http, are_inherited } =
        Sockets::of(lent, &config).await?;
    let socket = listener.path().to_owned();
    // The service manager may have said where.
    let _ = settings.listened.set(socket.clone());
    let isolation = config.isolation;
    let config = settings.decided(config);
    let users = isolation.shares_unasked(config.isolation).then(|| [rustix::process::geteuid().as_raw(), 0]);
    if let Some(users) = users {
        // Others may come later, where the modes of the socket and its folders are changed.
        listener.serve_only(users);
    }
    let told = manager.clone();
    let notes = StartNotes::in_(listener.start_note().map_err(CliError::io("open the lock"))?);
    let words = Words { format, is_text: config.log_format == LogFormat::Text };
    let starting = connect::start_told(&config, words.format_of_progress(), move |progress| {
        told.loads(progress);
        notes.tell(progress);
    });
    let daemon = interrupts.stop(starting).await?;
    daemon.set_origin(settings);
    daemon.upgrade().set_command(command);
    let model = daemon.model(None);
    let ready = Ready {
        ready: true,
        device: model.as_ref().map(|model| model.device().to_owned()).unwrap_or_default(),
        dtype: model.as_ref().map(|model| model.weights().dtype.name().to_owned()).unwrap_or_default(),
        models: config.models.clone(),
        socket,
        metrics: endpoint.as_ref().map(|(_, address)| *address),
        http: http.as_ref().map(|(_, place)| place.clone()),
        took_ms: u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX),
    };
    let serving = match &model {
        Some(_) => format!("{} in {} on {}", ready.models.join(", "), ready.dtype, ready.device),
        None => "models are loaded on demand".to_owned(),
    };
    manager.serves(&match &model {
        Some(_) => format!("serving {} on {}", ready.models.join(", "), ready.device),
        None => format!("serving; {serving}"),
    });
    match format {
        Format::Json => output::print_line(&output::to_json(&ready))?,
        Format::Text => words.say(&format!(
            "ready in {} ms: {serving}, listening on {}",
            ready.took_ms,
            ready.socket.display()
        )),
    }

    let metrics = endpoint.map(|(endpoint, address)| {
        tracing::info!(%address, "metrics are read over HTTP");
        let socket = endpoint.socket();
        let sessions = daemon.sessions().clone();
        let read = move || {
            let sessions = sessions.clone();
            async move { sessions.metrics(None).await.ok() }
        };
        (socket, tokio::spawn(endpoint.serve(read, daemon.shutdown().clone())))
    });
    let http = match http {
        Some((socket, place)) => match Front::new(&daemon, &config, socket.needs_token(), users) {
            Ok(front) => {
                tracing::info!(place, "HTTP requests are answered");
                Some(tokio::spawn(socket.serve(front, daemon.shutdown().clone())))
            }
            // Those who are served already are not to suffer for it.
            Err(error) if are_inherited => {
                tracing::warn!(%error, "no HTTP requests are answered: their tokens cannot be read");
                None
            }
            Err(error) => return Err(CliError::io("read the tokens of HTTP requests")(error)),
        },
        None => None,
    };
    let (ending, ends, replaced) = (daemon.shutdown().clone(), manager.clone(), daemon.upgrade().clone());
    tokio::spawn(async move {
        ending.cancelled().await;
        if !replaced.is_replaced() {
            ends.ends("guests are being ended");
        }
    });
    tokio::select! {
        served = daemon.serve(listener) => served.map_err(CliError::Device)?,
        never = manager::watch(&daemon) => match never {},
        never = reload(&daemon, &mut hang_ups) => match never {},
        never = follow_upgrades(&daemon, &mut upgrades) => match never {},
        never = follow_pressure(&daemon) => match never {},
        never = leave(&daemon, &interrupts, &manager, words) => match never {},
    }
    let http = match http {
        Some(task) => joined(task).await,
        None => None,
    };
    let Some((successor, listener)) = daemon.upgrade().take() else {
        words.say("stopped");
        return Ok(());
    };
    let metrics = match metrics {
        Some((socket, task)) => {
            joined(task).await;
            Some(socket)
        }
        None => None,
    };
    // The devices are given back, and processes of guests end.
    drop((model, daemon));
    // What comes from here on is for the next program; what came before is heard of now.
    signals.hold();
    interrupts.heard_all().await;
    if interrupts.has_come() {
        words.say("stopped");
        return Ok(());
    }
    let (program, version) = (successor.program().display().to_string(), successor.version().to_owned());
    words.say(&format!("{program} ({version}) takes the place of this program"));
    let metrics = metrics.as_ref().map(|socket| (socket.as_fd(), metrics_are_lent));
    let http = http.as_ref().map(HttpSocket::to_hand_over);
    let error = upgrade::replace(&successor, &listener, metrics, http);
    tracing::error!(%error, program, "the program that was to take the place of this one cannot be started");
    Err(CliError::io(format!("start {program} in the place of this program"))(error))
}

/// Says whether a daemon would start with this command line.
fn check(args: ServeArgs, format: Format) -> Result<(), CliError> {
    upgrade::check_asked().map_err(CliError::io("take the place of the daemon"))?;
    let settings = Settings::of(args, &Arc::default())?;
    if let Some(path) = &settings.file {
        check_regular(path).map_err(|source| ConfigError::Read { path: path.clone(), source })?;
    }
    let config = settings.read()?;
    let Startable { models, .. } = start_check::check(&config, Starter::Own).map_err(Box::new)?;
    let models: Vec<String> = models.into_iter().map(|model| model.name).collect();
    let on_demand = config.catalog.keys().cloned().collect();
    output::print(format, &Checked { models, on_demand }, |Checked { models, on_demand }| {
        let named = |names: &[String]| if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        format!("a daemon would start so; models: {}; on demand: {}", named(models), named(on_demand))
    })
}

/// What a daemon would have that would start.
#[derive(Serialize)]
struct Checked {
    models: Vec<String>,
    /// Those of the catalog.
    on_demand: Vec<String>,
}

/// How the daemon says what it is at, beside its log.
#[derive(Clone, Copy)]
struct Words {
    format: Format,
    /// Whether the log is text, beside which a remark may stand; it is a line of any other log.
    is_text: bool,
}

impl Words {
    fn say(self, line: &str) {
        match (self.format, self.is_text) {
            (Format::Text, true) => {
                output::note(self.format, line);
                logs::keep(&format!("trellis: {line}"));
            }
            (_, false) => tracing::info!("{line}"),
            (Format::Json, true) => {}
        }
    }

    /// Nothing but lines of the log stands between those.
    fn format_of_progress(self) -> Format {
        if self.is_text { self.format } else { Format::Json }
    }
}

/// Has the daemon read its configuration again whenever it is told to.
async fn reload(daemon: &Daemon, hang_ups: &mut HangUps) -> Infallible {
    loop {
        hang_ups.next().await;
        // What has come of it is in the log, where it was begun.
        if let Err(ReloadError::Ending) = daemon.reload().await {
            tracing::info!("the configuration is not read again: the daemon is about to go down");
        }
    }
}

/// Has another program take the place of this one whenever the process is told to.
async fn follow_upgrades(daemon: &Daemon, signals: &mut UpgradeSignals) -> Infallible {
    loop {
        signals.next().await;
        if let Err(error) = daemon.upgrade().begin(None).await {
            tracing::error!(%error, "no program takes the place of this one, and nothing has changed");
        }
    }
}

/// Has the daemon let go of what it can have again while memory is short.
async fn follow_pressure(daemon: &Daemon) -> Infallible {
    #[cfg(target_os = "linux")]
    crate::pressure::follow(daemon).await;
    #[cfg(not(target_os = "linux"))]
    let _ = daemon;
    std::future::pending().await
}

/// What a service manager is told meanwhile.
const DRAINS: &str = "what runs comes to its end; nothing more is taken on";

/// What guests may take to end after the drain, of which a service manager hears.
const END_TIME: Duration = Duration::from_secs(60);

/// Has the daemon end once it is told to, or once another program is to take its place, after what it is at.
async fn leave(daemon: &Daemon, interrupts: &Interrupts, manager: &Manager, words: Words) -> Infallible {
    let second = interrupts.second();
    let is_told_to_end = tokio::select! {
        biased;
        () = interrupts.first() => true,
        () = daemon.upgrade().hand_over().begins() => false,
    };
    let (time, n) = daemon.drains();
    let time_to_end = time.saturating_add(END_TIME);
    let (seconds, waits) = (time.as_secs_f64(), n > 0 && !time.is_zero());
    if is_told_to_end {
        manager.drains(time_to_end, DRAINS);
        if waits {
            words.say(&format!("waiting up to {seconds} s for {n} at work; once more to end them now"));
        }
    } else {
        manager.hands_over(
            time_to_end,
            "what runs comes to its end; then another program takes the place of this one",
        );
        let at_work = if waits {
            format!(", in up to {seconds} s, when {n} at work have ended")
        } else {
            String::new()
        };
        words.say(&format!("another program takes the place of this one{at_work}"));
    }
    let told_meanwhile = async {
        interrupts.first().await;
        daemon.upgrade().give_up();
        if !is_told_to_end {
            manager.drains(time_to_end, DRAINS);
            words.say("this daemon ends, and no program takes its place; once more to end what runs now");
        }
        second.await;
    };
    let has_drained = tokio::select! {
        () = daemon.drain() => true,
        () = told_meanwhile => false,
    };
    if has_drained {
        // What comes after a drain has what is left of its time, such as that what was saved comes onto disk, unless it is cut short.
        daemon.shutdown().cancel();
        interrupts.second().await;
    }
    daemon.sessions().ends_by().note_end();
    daemon.shutdown().cancel();
    std::future::pending().await
}
