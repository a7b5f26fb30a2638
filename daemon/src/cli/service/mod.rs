//! `trellis service`: the daemon as a service of systemd, where no package has made it one.

mod image;
mod mark;
mod readable;
mod state;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use clap::{Args, Subcommand};
use serde::Serialize;

use self::image::Image;
use super::access::Identity;
use super::config::check;
use super::error::CliError;
use super::output::{self, Format};
use crate::config::{Config, example};
use crate::start_check::Starter;

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
        /// The configuration too, though it was changed, what guests have saved, and the system's user
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
none. The daemon runs as the user trellis; members of the group trellis may use it (`sudo usermod -aG trellis ADA`), each of whom has a
process of his own for guests unless the configuration says otherwise.";

const UNINSTALL_EXAMPLES: &str = "\
Examples:
  sudo trellis service uninstall
  sudo trellis service uninstall --purge";

const STATUS_EXAMPLES: &str = "\
Examples:
  trellis service status
  trellis service status --json | jq -r .state

Exit status: 0 it runs or starts, 1 it does not.";

const UNIT: &str = include_str!("../../../packaging/trellis.service");
const SOCKET_UNIT: &str = include_str!("../../../packaging/trellis.socket");
const METRICS_UNIT: &str = include_str!("../../../packaging/trellis-metrics.socket");
const SYSUSERS: &str = include_str!("../../../packaging/sysusers.conf");

/// Where a package has the program, as the unit names it, and where this command puts it.
const PACKAGED_EXE: &str = "/usr/bin/trellis";
const EXE: &str = "/usr/local/bin/trellis";

const CONFIG: &str = "/etc/trellis/trellis.toml";
const UNIT_FILE: &str = "/etc/systemd/system/trellis.service";
const SOCKET_FILE: &str = "/etc/systemd/system/trellis.socket";
const METRICS_FILE: &str = "/etc/systemd/system/trellis-metrics.socket";
const SYSUSERS_FILE: &str = "/etc/sysusers.d/trellis.conf";

/// Where packages have the unit.
const PACKAGED_UNITS: [&str; 2] =
    ["/usr/lib/systemd/system/trellis.service", "/lib/systemd/system/trellis.service"];
const PACKAGED_SOCKETS: [&str; 2] =
    ["/usr/lib/systemd/system/trellis.socket", "/lib/systemd/system/trellis.socket"];

/// What the service leaves behind by itself.
const LEFTOVERS: [&str; 2] = ["/var/cache/trellis", "/run/trellis"];

/// Contexts that guests have saved.
const STATE: &str = "/var/lib/trellis";

/// Where systemd is while it runs the machine.
const RUNNING: &str = "/run/systemd/system";

const UNITS: [&str; 2] = ["trellis.socket", "trellis.service"];
const METRICS_SOCKET: &str = "trellis-metrics.socket";
const USER: &str = "trellis";

/// A file that installing writes.
struct File {
    path: &'static str,
    text: String,
}

/// What was done.
#[derive(Default, Serialize)]
struct Done {
    wrote: Vec<PathBuf>,
    removed: Vec<PathBuf>,
    kept: Vec<PathBuf>,
    started: bool,
}

pub(crate) fn service(args: ServiceArgs, format: Format) -> Result<(), CliError> {
    match args.command {
        ServiceCommand::Install { root } => install(&Image::new(root), format),
        ServiceCommand::Uninstall { root, purge } => uninstall(&Image::new(root), purge, format),
        ServiceCommand::Status => state::show(format),
    }
}

fn install(image: &Image, format: Format) -> Result<(), CliError> {
    for unit in PACKAGED_UNITS {
        if image.has(unit).map_err(looking(unit))? {
            return Err(CliError::ServiceOfPackage { unit: image.at(unit).map_err(looking(unit))? });
        }
    }
    if image.is_machine() {
        may_manage()?;
    }
    let mut done = Done::default();
    let config = image.at(CONFIG).map_err(looking(CONFIG))?;
    if image.has(CONFIG).map_err(looking(CONFIG))? {
        // A daemon that runs is not to be stopped for one that would not start.
        if image.is_machine() {
            let user = Identity::of_user(USER).map_err(CliError::io(format!("look up the user {USER}")))?;
            let starter = Starter::Service(user.as_ref().map(Identity::uid));
            readable::check(
                &config,
                &Config::load(&config)?,
                &user.unwrap_or_else(|| Identity::stranger(USER)),
            )?;
            check(&config, starter)?.warnings().iter().for_each(|warning| output::note(format, warning));
        }
        done.kept.push(config);
    } else {
        done.wrote.push(write(image, CONFIG, example().as_bytes(), 0o644)?);
    }
    let mark = install_program(image, &mut done)?;
    for File { path, text } in files(mark.as_deref()) {
        done.wrote.push(write(image, path, text.as_bytes(), 0o644)?);
    }
    if image.is_machine() {
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

/// Puts this program in its place, unless it is there already. Its mark, if it is this command that has put it there.
fn install_program(image: &Image, done: &mut Done) -> Result<Option<String>, CliError> {
    let program = std::env::current_exe().map_err(CliError::io("find this program"))?;
    let bytes = fs::read(&program).map_err(CliError::io(format!("read {}", program.display())))?;
    let mark = mark::of(&bytes);
    if is_same(&program, &image.at(EXE).map_err(looking(EXE))?) {
        return Ok(mark_of_unit(image)?.filter(|earlier| *earlier == mark));
    }
    done.wrote.push(write(image, EXE, &bytes, 0o755)?);
    Ok(Some(mark))
}

fn mark_of_unit(image: &Image) -> Result<Option<String>, CliError> {
    let unit = image.read(UNIT_FILE).map_err(looking(UNIT_FILE))?;
    Ok(unit.and_then(|unit| mark::find(&String::from_utf8_lossy(&unit)).map(str::to_owned)))
}

fn uninstall(image: &Image, purge: bool, format: Format) -> Result<(), CliError> {
    if image.is_machine() {
        may_manage()?;
    }
    if !image.has(UNIT_FILE).map_err(looking(UNIT_FILE))? {
        return Err(CliError::NoService);
    }
    if image.is_machine() {
        output::note(format, "stopping; what runs is waited for");
        run("systemctl", &["disable", "--quiet", "--now", UNITS[0], UNITS[1]])?;
        // An earlier program has not put it there.
        if image.has(METRICS_FILE).map_err(looking(METRICS_FILE))? {
            run("systemctl", &["disable", "--quiet", "--now", METRICS_SOCKET])?;
        }
    }
    let mut done = Done::default();
    let config = image.at(CONFIG).map_err(looking(CONFIG))?;
    let is_unchanged =
        image.read(CONFIG).map_err(looking(CONFIG))?.is_some_and(|text| text == example().as_bytes());
    if purge || is_unchanged {
        remove(image, CONFIG, &mut done)?;
        // Other files of the operator's may be there.
        let _ = fs::remove_dir(config.parent().expect("it is in a folder"));
    } else if image.has(CONFIG).map_err(looking(CONFIG))? {
        done.kept.push(config);
    }
    let program = image.read(EXE).map_err(looking(EXE))?;
    match (program.map(|program| mark::of(&program)), mark_of_unit(image)?) {
        (Some(found), Some(installed)) if found == installed => remove(image, EXE, &mut done)?,
        (None, _) => {}
        // Somebody else has put it there.
        (Some(_), _) => done.kept.push(image.at(EXE).map_err(looking(EXE))?),
    }
    for path in files(None).iter().map(|file| file.path).chain(LEFTOVERS) {
        remove(image, path, &mut done)?;
    }
    if purge {
        remove(image, STATE, &mut done)?;
    } else if image.has(STATE).map_err(looking(STATE))? {
        done.kept.push(image.at(STATE).map_err(looking(STATE))?);
    }
    if image.is_machine() {
        run("systemctl", &["daemon-reload"])?;
        if purge {
            run("userdel", &[USER])?;
        }
    }
    tell(&done, format)
}

/// The texts of the units of the service that this machine has.
fn units() -> impl Iterator<Item = String> {
    [UNIT_FILE].into_iter().chain(PACKAGED_UNITS).filter_map(|unit| fs::read_to_string(unit).ok())
}

/// The name of the user that the service runs as, if this is the configuration of a service of this machine.
pub(super) fn user_of(file: &Path) -> Option<String> {
    units().find_map(|unit| {
        let (config, user) = starts(&unit)?;
        (config == file || is_same(&config, file)).then_some(user)
    })
}

/// Who starts a daemon with this configuration: the service whose it is, or this process's user.
pub(super) fn starter_of(file: &Path) -> Starter {
    let Some(user) = user_of(file) else { return Starter::Own };
    let known = Identity::of_user(&user).ok().flatten();
    Starter::Service(known.as_ref().map(Identity::uid))
}

/// The configuration that a unit starts a daemon with, and its user.
fn starts(unit: &str) -> Option<(PathBuf, String)> {
    let value = |name: &str| unit.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
    let mut words = value("ExecStart")?.split_whitespace();
    words.find(|word| *word == "--config")?;
    Some((words.next()?.into(), value("User")?.trim().to_owned()))
}

/// Where the socket is that systemd hands over, on a machine that has the socket unit.
pub(super) fn lent_socket() -> Option<PathBuf> {
    let texts =
        [SOCKET_FILE].into_iter().chain(PACKAGED_SOCKETS).filter_map(|unit| fs::read_to_string(unit).ok());
    texts.into_iter().find_map(|text| listen_stream(&text))
}

fn listen_stream(unit: &str) -> Option<PathBuf> {
    unit.lines().find_map(|line| line.strip_prefix("ListenStream=")).map(|path| PathBuf::from(path.trim()))
}

/// The units and the user's, for the place of the program; with its mark, if it has one.
fn files(mark: Option<&str>) -> [File; 4] {
    let unit = UNIT.replace(PACKAGED_EXE, EXE);
    let unit = mark.map_or_else(|| unit.clone(), |mark| mark::put(&unit, mark));
    [
        File { path: UNIT_FILE, text: unit },
        File { path: SOCKET_FILE, text: SOCKET_UNIT.to_owned() },
        // Nobody listens for scrapes until the operator enables it.
        File { path: METRICS_FILE, text: METRICS_UNIT.to_owned() },
        File { path: SYSUSERS_FILE, text: SYSUSERS.to_owned() },
    ]
}

fn looking(path: &str) -> impl FnOnce(io::Error) -> CliError {
    CliError::io(format!("look at {path}"))
}

fn write(image: &Image, path: &str, bytes: &[u8], mode: u32) -> Result<PathBuf, CliError> {
    image.write(path, bytes, mode).map_err(CliError::io(format!("write {path}")))
}

fn remove(image: &Image, path: &str, done: &mut Done) -> Result<(), CliError> {
    done.removed.extend(image.remove(path).map_err(CliError::io(format!("remove {path}")))?);
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
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn what_was_installed_is_taken_away_again() {
        let root = tempfile::tempdir().expect("a folder");
        let image = Image::new(Some(root.path().to_owned()));
        let at = |path: &str| image.at(path).expect("no circle");
        install(&image, Format::Json).expect("nothing is there");
        let unit = fs::read_to_string(at(UNIT_FILE)).expect("written");
        assert!(unit.contains("ExecStart=/usr/local/bin/trellis serve --config /etc/trellis/trellis.toml\n"));
        let metrics = fs::read_to_string(at(METRICS_FILE)).expect("written");
        assert!(metrics.contains("FileDescriptorName=metrics\n"), "{metrics}");
        let mode = |path: &str| fs::metadata(at(path)).expect("written").permissions().mode() & 0o777;
        assert_eq!((mode(EXE), mode(UNIT_FILE), mode("/etc/trellis")), (0o755, 0o644, 0o755));
        check(&at(CONFIG), Starter::Service(None)).expect("a daemon starts with it");

        // What the operator has changed stays, over an upgrade too.
        fs::write(at(CONFIG), "models = ['draft']").expect("written");
        install(&image, Format::Json).expect("again");
        fs::create_dir_all(at("/var/lib/trellis/contexts")).expect("made");
        uninstall(&image, false, Format::Json).expect("it is there");
        assert!(at("/var/lib/trellis/contexts").exists(), "what guests have saved stays");
        assert_eq!(fs::read_to_string(at(CONFIG)).expect("kept"), "models = ['draft']");
        assert!([UNIT_FILE, SOCKET_FILE, METRICS_FILE, EXE].iter().all(|path| !at(path).exists()));
        assert!(matches!(uninstall(&image, false, Format::Json), Err(CliError::NoService)));
        install(&image, Format::Json).expect("again");
        // A program that came there in another way is not this command's to take.
        fs::write(at(EXE), "another").expect("written");
        uninstall(&image, true, Format::Json).expect("it is there");
        assert!(!at("/etc/trellis").exists() && !at(STATE).exists());
        assert_eq!(fs::read_to_string(at(EXE)).expect("kept"), "another");

        fs::create_dir_all(at(PACKAGED_UNITS[0]).parent().expect("a folder")).expect("made");
        fs::write(at(PACKAGED_UNITS[0]), UNIT).expect("written");
        assert!(matches!(install(&image, Format::Json), Err(CliError::ServiceOfPackage { .. })));
    }

    #[test]
    fn a_program_that_was_in_its_place_before_is_not_marked() {
        let root = tempfile::tempdir().expect("a folder");
        let image = Image::new(Some(root.path().to_owned()));
        // In the place of the image is this very program, by a link.
        let own = image.at(EXE).expect("no circle");
        fs::create_dir_all(own.parent().expect("a folder")).expect("made");
        std::os::unix::fs::symlink(std::env::current_exe().expect("this program"), &own).expect("made");
        install(&image, Format::Json).expect("nothing else is there");
        assert_eq!(mark_of_unit(&image).expect("no circle"), None);
        uninstall(&image, false, Format::Json).expect("it is there");
        assert!(fs::symlink_metadata(&own).is_ok(), "it is not this command's");
    }

    #[test]
    fn whose_a_configuration_is_stands_in_the_unit() {
        assert_eq!(starts(UNIT), Some((PathBuf::from(CONFIG), USER.to_owned())));
        assert_eq!(starts("[Service]\nUser=ada\nExecStart=/usr/bin/trellis serve\n"), None);
        let folder = tempfile::tempdir().expect("a folder");
        assert_eq!(starter_of(&folder.path().join("trellis.toml")), Starter::Own);
    }

    #[test]
    fn the_socket_of_the_unit_is_known() {
        assert_eq!(listen_stream(SOCKET_UNIT), Some(trellis_client::socket::SYSTEM_SOCKET.into()));
        assert_eq!(listen_stream("[Socket]\n"), None);
    }
}
