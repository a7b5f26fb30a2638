//! Where the daemon's socket is.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The socket of the daemon that serves the whole machine.
pub const SYSTEM_SOCKET: &str = "/run/trellis/trellis.sock";

/// The socket of the user's own daemon: in `$XDG_RUNTIME_DIR`, or in `/run/user/UID` where a login made one.
/// `None` for a user without a runtime directory.
#[must_use]
pub fn user_socket() -> Option<PathBuf> {
    let uid = rustix::process::geteuid().as_raw();
    user_socket_in(std::env::var_os("XDG_RUNTIME_DIR"), Path::new(&format!("/run/user/{uid}")))
}

/// The sockets on which a client looks for a daemon, in that order: the user's own, then the machine's.
#[must_use]
pub fn candidates() -> Vec<PathBuf> {
    user_socket().into_iter().chain([PathBuf::from(SYSTEM_SOCKET)]).collect()
}

/// The socket on which a daemon of this user listens. `None` for a user, other than root, without a runtime
/// directory: such a daemon has to be told.
#[must_use]
pub fn default_socket() -> Option<PathBuf> {
    let system = || rustix::process::geteuid().is_root().then(|| PathBuf::from(SYSTEM_SOCKET));
    user_socket().or_else(system)
}

/// The XDG specification asks to ignore relative paths.
fn user_socket_in(runtime_dir: Option<OsString>, login_dir: &Path) -> Option<PathBuf> {
    let runtime_dir = runtime_dir.map(PathBuf::from).filter(|dir| dir.is_absolute());
    let dir = runtime_dir.or_else(|| login_dir.is_dir().then(|| login_dir.to_owned()))?;
    Some(dir.join("trellis/trellis.sock"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_users_socket_is_in_the_runtime_directory() {
        let dir = tempfile::tempdir().unwrap();
        let in_login = Some(dir.path().join("trellis/trellis.sock"));
        let nowhere = dir.path().join("nowhere");
        let xdg = Some(PathBuf::from("/xdg/trellis/trellis.sock"));
        assert_eq!(user_socket_in(Some("/xdg".into()), dir.path()), xdg);
        assert_eq!(user_socket_in(None, dir.path()), in_login);
        assert_eq!(user_socket_in(Some("relative".into()), dir.path()), in_login);
        assert_eq!(user_socket_in(Some("".into()), dir.path()), in_login);
        assert_eq!(user_socket_in(None, &nowhere), None);
    }

    #[test]
    fn the_machines_socket_comes_last() {
        assert_eq!(candidates().last().unwrap(), Path::new(SYSTEM_SOCKET));
    }
}
