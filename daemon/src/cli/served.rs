//! Whom a daemon serves, by where it listens and who runs it.

use std::path::Path;

use trellis_client::socket::{SYSTEM_SOCKET, default_socket};

use super::connect::{socket_of_environment, socket_told};
use super::service;
use crate::config::{Config, Isolation, Served};
use crate::start_check::Starter;

/// The mode of a folder that others come to a socket through.
pub(super) const OPEN_MODE: u32 = 0o755;

/// A user's own directory is closed to all others; the machine's has to let the socket's group in.
pub(super) fn directory_mode(socket: &Path) -> u32 {
    if socket == Path::new(SYSTEM_SOCKET) { OPEN_MODE } else { 0o700 }
}

/// What others need to come through a folder, by its mode.
const OTHERS_COME_THROUGH: u32 = 0o011;

/// Whom a daemon of this process's user serves that listens there.
pub(super) fn by(socket: &Path) -> Served {
    let is_root = rustix::process::geteuid().is_root();
    if is_root || socket == Path::new(SYSTEM_SOCKET) || lets_others_in(socket) {
        Served::Others
    } else {
        Served::Own
    }
}

/// Whether others come to a socket, whose mode lets its group in. A folder that is not there is made for this user alone.
fn lets_others_in(socket: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt as _;

    let is_open = |folder: &Path| {
        std::fs::metadata(folder).is_ok_and(|found| found.permissions().mode() & OTHERS_COME_THROUGH != 0)
    };
    socket.ancestors().skip(1).filter(|folder| !folder.as_os_str().is_empty()).all(is_open)
}

/// Where guests run of a daemon that listens where these settings say.
pub(super) fn isolation_of(config: &Config) -> Isolation {
    let socket = config.socket.clone().or_else(default_socket);
    let socket = socket.and_then(|socket| std::path::absolute(socket).ok());
    config.isolation.of(by(&socket.unwrap_or_default()))
}

/// The settings of a daemon with this file, or with none, with where its guests run decided: that of the service serves others.
pub(super) fn with_isolation(file: Option<&Path>, config: Config) -> Config {
    for_starter(file.map_or(Starter::Own, service::starter_of), config)
}

/// As [`with_isolation`], where it is known who starts the daemon.
pub(super) fn for_starter(starter: Starter, config: Config) -> Config {
    let isolation = match starter {
        Starter::Service(_) => config.isolation.of(Served::Others),
        Starter::Own => {
            let socket = socket_told(None, socket_of_environment(), &config);
            isolation_of(&Config { socket, ..config.clone() })
        }
    };
    Config { isolation, ..config }
}

#[cfg(test)]
mod tests {
    use std::fs::{Permissions, set_permissions};
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn only_the_machines_directory_is_open_to_look_into() {
        assert_eq!(directory_mode(Path::new("/run/user/1000/trellis/trellis.sock")), 0o700);
        assert_eq!(directory_mode(Path::new(SYSTEM_SOCKET)), 0o755);
    }

    #[test]
    fn a_socket_is_for_others_where_each_folder_lets_them_through() {
        let outer = tempfile::tempdir().expect("a folder");
        let inner = outer.path().join("trellis");
        std::fs::create_dir(&inner).expect("made");
        let socket = inner.join("trellis.sock");
        let mode = |folder: &Path, mode| set_permissions(folder, Permissions::from_mode(mode)).expect("set");
        for (of_outer, of_inner, is_open) in
            [(0o755, 0o755, true), (0o755, 0o710, true), (0o700, 0o755, false), (0o755, 0o700, false)]
        {
            mode(outer.path(), of_outer);
            mode(&inner, of_inner);
            assert_eq!(lets_others_in(&socket), is_open, "{of_outer:o} {of_inner:o}");
        }
        mode(outer.path(), 0o755);
        assert!(!lets_others_in(&outer.path().join("not-there/trellis.sock")), "it is made for one user");
    }

    #[test]
    fn the_machines_socket_and_all_of_root_are_for_others() {
        assert_eq!(by(Path::new(SYSTEM_SOCKET)), Served::Others);
        let folder = tempfile::tempdir().expect("a folder");
        let own = by(&folder.path().join("trellis.sock"));
        let is_root = rustix::process::geteuid().is_root();
        assert_eq!(own, if is_root { Served::Others } else { Served::Own });
        let told = Config { isolation: Isolation::Thread, ..Config::default() };
        assert_eq!(isolation_of(&told), Isolation::Thread, "the file decides where it says so");
    }
}
