//! `trellis service`: the daemon as a service of systemd, where no package has made it one.

use std::fs::{self, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use clap::{Args, Subcommand};
use serde::Serialize;

use super::config::check;
use super::error::CliError;
use super::output::{self, Format};
use crate::config::example;

const EXAMPLES: &str = "\
Examples:
  sudo trellis service install        start the daemon now, and with the machine
  trellis service status
  sudo trellis service uninstall

To upgrade, install again with the new program: what runs is waited for (sessions.drain_ms), and who comes meanwhile waits
for the new daemon. `systemctl` and `journalctl -u trellis` work as with any service. Without systemd, have whatever watches
over services run `trellis serve --config FILE`.";

/// Run the daemon as a service of systemd
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ServiceArgs {
    #[command(subcommand)]
    command: ServiceCommand,
}

#[derive(Debug, Subcommand)]
enum ServiceCommand {
    /// Install this program as a service, or upgrade the one that there is, and start it
    #[command(after_help = INSTALL_EXAMPLES)]
    Install {
        /// Put the files under this folder, as for an image, and start nothing
        #[arg(long, value_name = "FOLDER")]
        root: Option<PathBuf>,
    },
    /// Stop the service and take away all that installing has put there
    #[command(after_help = UNINSTALL_EXAMPLES)]
    Uninstall {
        /// Take the files from under this folder, and stop nothing
        #[arg(long, value_name = "FOLDER")]
        root: Option<PathBuf>,
        /// The configuration too, though it was changed, and the system's user
        #[arg(long)]
        purge: bool,
    },
    /// Say whether the service runs
    #[command(after_help = STATUS_EXAMPLES)]
    Status,
}

const INSTALL_EXAMPLES: &str = "\
Examples:
  sudo trellis service install
  trellis service install --root ./image     the files alone

The program goes to /usr/local/bin, units to /etc/systemd/system, and a configuration to /etc/trellis/trellis.toml where there is
none. The daemon runs as the user trellis; members of the group trellis may use it (`sudo usermod -aG trellis ADA`).";

const UNINSTALL_EXAMPLES: &str = "\
Examples:
  sudo trellis service uninstall
  sudo trellis service uninstall --purge";

const STATUS_EXAMPLES: &str = "\
Examples:
  trellis service status
  trellis service status --json | jq -r .state

Exit status: 0 it runs or starts, 1 it does not.";

const UNIT: &str = include_str!("../../packaging/trellis.service");
const SOCKET_UNIT: &str = include_str!("../../packaging/trellis.socket");
const SYSUSERS: &str = include_str!("../../packaging/sysusers.conf");

/// Where a package has the program, as the unit names it, and where this command puts it.
const PACKAGED_EXE: &str = "/usr/bin/trellis";
const EXE: &str = "/usr/local/bin/trellis";

const CONFIG: &str = "/etc/trellis/trellis.toml";
const UNIT_FILE: &str = "/etc/systemd/system/trellis.service";
const SOCKET_FILE: &str = "/etc/systemd/system/trellis.socket";
const SYSUSERS_FILE: &str = "/etc/sysusers.d/trellis.conf";

/// Where packages have the unit.
const PACKAGED_UNITS: [&str; 2] =
    ["/usr/lib/systemd/system/trellis.service", "/lib/systemd/system/trellis.service"];

/// What the service leaves behind by itself.
const LEFTOVERS: [&str; 3] = ["/var/cache/trellis", "/var/lib/trellis", "/run/trellis"];

/// Where systemd is while it runs the machine.
const RUNNING: &str = "/run/systemd/system";

const UNITS: [&str; 2] = ["trellis.socket", "trellis.service"];
const USER: &str = "trellis";

/// A file that installing writes.
struct File {
    path: &'static str,
    text: String,
}

/// What was done.
#[derive(Serialize)]
struct Done {
    wrote: Vec<PathBuf>,
    removed: Vec<PathBuf>,
    kept: Vec<PathBuf>,
    started: bool,
}

/// How the service is.
#[derive(Serialize)]
struct State {
    /// As systemd has it: `active`, `inactive`, `failed`, ...; `not-installed` where there is none.
    state: String,
    /// What the daemon has said last.
    status: Option<String>,
    pid: Option<u32>,
    /// How often systemd has started it again.
    n_restarts: u64,
}

pub(crate) fn service(args: ServiceArgs, format: Format) -> Result<(), CliError> {
    match args.command {
        ServiceCommand::Install { root } => install(root.as_deref(), format),
        ServiceCommand::Uninstall { root, purge } => uninstall(root.as_deref(), purge, format),
        ServiceCommand::Status => status(format),
    }
}

fn install(root: Option<&Path>, format: Format) -> Result<(), CliError> {
    if let Some(unit) = PACKAGED_UNITS.into_iter().map(|unit| under(root, unit)).find(|unit| unit.exists()) {
        return Err(CliError::ServiceOfPackage { unit });
    }
    if root.is_none() {
        may_manage()?;
    }
    let config = under(root, CONFIG);
    let mut done = Done { wrote: Vec::new(), removed: Vec::new(), kept: Vec::new(), started: false };
    if config.exists() {
        // A daemon that runs is not to be stopped for one that would not start.
        if root.is_none() {
            check(&config)?;
        }
        done.kept.push(config);
    } else {
        done.wrote.push(write(root, CONFIG, example().as_bytes(), 0o644)?);
    }
    let program = std::env::current_exe().map_err(CliError::io("find this program"))?;
    let own = under(root, EXE);
    if !is_same(&program, &own) {
        let bytes = fs::read(&program).map_err(CliError::io(format!("read {}", program.display())))?;
        done.wrote.push(write(root, EXE, &bytes, 0o755)?);
    }
    for File { path, text } in files() {
        done.wrote.push(write(root, path, text.as_bytes(), 0o644)?);
    }
    if root.is_none() {
        run("systemd-sysusers", &[SYSUSERS_FILE])?;
        run("systemctl", &["daemon-reload"])?;
        run("systemctl", &["enable", "--quiet", UNITS[0], UNITS[1]])?;
        run("systemctl", &["start", UNITS[0]])?;
        output::note(format, "starting; what runs is waited for");
        run("systemctl", &["restart", UNITS[1]])?;
        done.started = true;
    }
    tell(&done, format)
}

fn uninstall(root: Option<&Path>, purge: bool, format: Format) -> Result<(), CliError> {
    if root.is_none() {
        may_manage()?;
    }
    if !under(root, UNIT_FILE).exists() {
        return Err(CliError::NoService);
    }
    if root.is_none() {
        output::note(format, "stopping; what runs is waited for");
        run("systemctl", &["disable", "--quiet", "--now", UNITS[0], UNITS[1]])?;
    }
    let mut done = Done { wrote: Vec::new(), removed: Vec::new(), kept: Vec::new(), started: false };
    let config = under(root, CONFIG);
    if purge || fs::read_to_string(&config).is_ok_and(|text| text == example()) {
        remove(&config, &mut done)?;
        // Other files of the operator's may be there.
        let _ = fs::remove_dir(config.parent().expect("it is in a folder"));
    } else if config.exists() {
        done.kept.push(config);
    }
    let files = files();
    for path in files.iter().map(|file| file.path).chain([EXE]).chain(LEFTOVERS) {
        remove(&under(root, path), &mut done)?;
    }
    if root.is_none() {
        run("systemctl", &["daemon-reload"])?;
        if purge {
            run("userdel", &[USER])?;
        }
    }
    tell(&done, format)
}

fn status(format: Format) -> Result<(), CliError> {
    let shown = ["LoadState", "ActiveState", "StatusText", "MainPID", "NRestarts"].join(",");
    let output = ran("systemctl", &["show", UNITS[1], "--property", &shown]);
    let state = match output {
        Ok(output) if !output.status.success() => return Err(CliError::NoSystemd),
        Ok(output) => state_of(&String::from_utf8_lossy(&output.stdout)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(CliError::NoSystemd),
        Err(error) => return Err(CliError::io("run systemctl")(error)),
    };
    output::print(format, &state, text_of)?;
    let is_up = ["active", "activating", "reloading"].contains(&state.state.as_str());
    if is_up { Ok(()) } else { Err(CliError::ServiceDown) }
}

/// Of what `systemctl show` says.
fn state_of(shown: &str) -> State {
    let value = |name: &str| {
        let line = shown.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        line.filter(|value| !value.is_empty())
    };
    let state = match value("LoadState") {
        Some("loaded") => value("ActiveState").unwrap_or("unknown"),
        _ => "not-installed",
    };
    State {
        state: state.to_owned(),
        status: value("StatusText").map(str::to_owned),
        pid: value("MainPID").and_then(|pid| pid.parse().ok()).filter(|&pid| pid > 0),
        n_restarts: value("NRestarts").and_then(|n| n.parse().ok()).unwrap_or(0),
    }
}

fn text_of(state: &State) -> String {
    let State { state, status, pid, n_restarts } = state;
    let pid = pid.map(|pid| format!(", process {pid}")).unwrap_or_default();
    let status = status.as_ref().map(|status| format!(": {status}")).unwrap_or_default();
    let again = match n_restarts {
        0 => String::new(),
        n => format!(" (started again {n} times)"),
    };
    match state.as_str() {
        "not-installed" => "not installed; `sudo trellis service install` does that".to_owned(),
        state => format!("{state}{pid}{status}{again}"),
    }
}

/// The units and the user's, for the place of the program.
fn files() -> [File; 3] {
    let unit = UNIT.replace(PACKAGED_EXE, EXE);
    [
        File { path: UNIT_FILE, text: unit },
        File { path: SOCKET_FILE, text: SOCKET_UNIT.to_owned() },
        File { path: SYSUSERS_FILE, text: SYSUSERS.to_owned() },
    ]
}

fn under(root: Option<&Path>, path: &str) -> PathBuf {
    match root {
        Some(root) => root.join(path.trim_start_matches('/')),
        None => PathBuf::from(path),
    }
}

/// Writes a file as a whole or not at all: a program that runs cannot be written over.
fn write(root: Option<&Path>, path: &str, bytes: &[u8], mode: u32) -> Result<PathBuf, CliError> {
    let path = under(root, path);
    let folder = path.parent().expect("it is in a folder");
    let written = make_folder(folder).and_then(|()| {
        let part =
            folder.join(format!(".{}.new", path.file_name().expect("it has a name").to_string_lossy()));
        let mut file = fs::File::create(&part)?;
        file.write_all(bytes)?;
        file.set_permissions(Permissions::from_mode(mode))?;
        file.sync_all()?;
        fs::rename(&part, &path).inspect_err(|_| drop(fs::remove_file(&part)))
    });
    written.map_err(CliError::io(format!("write {}", path.display())))?;
    Ok(path)
}

/// Makes a folder that everybody may look into, whatever the umask.
fn make_folder(folder: &Path) -> io::Result<()> {
    if folder.is_dir() {
        return Ok(());
    }
    folder.parent().map_or(Ok(()), make_folder)?;
    fs::create_dir(folder)?;
    fs::set_permissions(folder, Permissions::from_mode(0o755))
}

fn remove(path: &Path, done: &mut Done) -> Result<(), CliError> {
    let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    match removed {
        Ok(()) => done.removed.push(path.to_owned()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(source) => return Err(CliError::io(format!("remove {}", path.display()))(source)),
    }
    Ok(())
}

fn is_same(one: &Path, other: &Path) -> bool {
    matches!((one.canonicalize(), other.canonicalize()), (Ok(one), Ok(other)) if one == other)
}

/// # Errors
/// This user may not manage services here, or there is nothing that does.
fn may_manage() -> Result<(), CliError> {
    if !Path::new(RUNNING).is_dir() {
        return Err(CliError::NoSystemd);
    }
    if rustix::process::geteuid().is_root() { Ok(()) } else { Err(CliError::NotRoot) }
}

fn ran(program: &str, arguments: &[&str]) -> io::Result<Output> {
    Command::new(program).args(arguments).stdin(Stdio::null()).output()
}

fn run(program: &str, arguments: &[&str]) -> Result<(), CliError> {
    let line = || format!("{program} {}", arguments.join(" "));
    let output = ran(program, arguments).map_err(|source| CliError::io(format!("run {}", line()))(source))?;
    if output.status.success() {
        return Ok(());
    }
    let complaint = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(CliError::NotManaged { line: line(), status: output.status, complaint })
}

fn tell(done: &Done, format: Format) -> Result<(), CliError> {
    output::print(format, done, |done| {
        let line = |what: &str, paths: &[PathBuf]| -> String {
            paths.iter().map(|path| format!("{what:<8} {}\n", path.display())).collect()
        };
        let Done { wrote, removed, kept, started } = done;
        let last = if *started { "the service runs; `trellis service status` says how it is\n" } else { "" };
        line("wrote", wrote) + &line("removed", removed) + &line("kept", kept) + last
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_installed_is_taken_away_again() {
        let root = tempfile::tempdir().expect("a folder");
        let at = |path: &str| under(Some(root.path()), path);
        install(Some(root.path()), Format::Json).expect("nothing is there");
        let unit = fs::read_to_string(at(UNIT_FILE)).expect("written");
        assert!(unit.contains("ExecStart=/usr/local/bin/trellis serve --config /etc/trellis/trellis.toml\n"));
        let mode = |path: &str| fs::metadata(at(path)).expect("written").permissions().mode() & 0o777;
        assert_eq!((mode(EXE), mode(UNIT_FILE), mode("/etc/trellis")), (0o755, 0o644, 0o755));
        check(&at(CONFIG)).expect("a daemon starts with it");

        // What the operator has changed stays, over an upgrade too.
        fs::write(at(CONFIG), "models = ['draft']").expect("written");
        install(Some(root.path()), Format::Json).expect("again");
        uninstall(Some(root.path()), false, Format::Json).expect("it is there");
        assert_eq!(fs::read_to_string(at(CONFIG)).expect("kept"), "models = ['draft']");
        assert!(!at(UNIT_FILE).exists() && !at(SOCKET_FILE).exists() && !at(EXE).exists());
        assert!(matches!(uninstall(Some(root.path()), false, Format::Json), Err(CliError::NoService)));
        install(Some(root.path()), Format::Json).expect("again");
        uninstall(Some(root.path()), true, Format::Json).expect("it is there");
        assert!(!at("/etc/trellis").exists());

        fs::create_dir_all(at(PACKAGED_UNITS[0]).parent().expect("a folder")).expect("made");
        fs::write(at(PACKAGED_UNITS[0]), UNIT).expect("written");
        assert!(matches!(install(Some(root.path()), Format::Json), Err(CliError::ServiceOfPackage { .. })));
    }

    #[test]
    fn the_state_is_what_systemd_says() {
        let shown =
            "LoadState=loaded\nActiveState=active\nStatusText=serving tiny on cpu\nMainPID=7\nNRestarts=2\n";
        let state = state_of(shown);
        assert_eq!(text_of(&state), "active, process 7: serving tiny on cpu (started again 2 times)");
        let state =
            state_of("LoadState=not-found\nActiveState=inactive\nStatusText=\nMainPID=0\nNRestarts=0\n");
        assert_eq!((state.state.as_str(), state.pid, state.status), ("not-installed", None, None));
    }
}
