//! The socket: whether a daemon answers there, and if none does, whether one could listen.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::net::UnixStream;
use trellis_client::socket::{candidates, default_socket};
use trellis_client::{Client, Error};

use super::finding::{Check, Code, Finding};
use crate::cli::access::{Identity, Wanted};
use crate::ipc::{Lock, Owner, Phase, Seen, owner_of};

/// A daemon that has not answered for so long has much to do, or hangs.
pub(super) const ANSWER_MAX: Duration = Duration::from_secs(3);

/// Whether a daemon is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Daemon {
    /// It has loaded what it was told to.
    Running,
    /// None that is known of.
    Absent,
}

/// What is found at a socket's path.
#[derive(Debug)]
enum Reached {
    /// There is no such file.
    Nothing,
    /// A file on which nobody listens.
    Abandoned,
    /// This user may not connect.
    Closed,
    /// It is no socket, or no path of one.
    Unusable(io::Error),
    /// Somebody listens, and says nothing.
    Silent { pid: Option<i32> },
    /// Somebody listens, and is no daemon, or one of another version.
    Foreign(Error),
    /// A daemon answers.
    Daemon { failure: Option<String>, policy: Option<String> },
}

/// Looks at the socket that a daemon would listen at: the one that it is told, or else those where clients look for one.
pub(super) async fn check(told: Option<&Path>, who: &Identity, patience: Duration) -> (Check, Daemon) {
    let paths =
        told.map_or_else(candidates, |socket| vec![std::path::absolute(socket).unwrap_or(socket.into())]);
    let mut check = Check::new("socket", "no daemon is running");
    for path in paths {
        let reached = reach(&path, patience).await;
        check.details.push(format!("{}: {}", path.display(), shown(&reached)));
        let is_there = !matches!(reached, Reached::Nothing | Reached::Abandoned);
        if let Reached::Daemon { failure: None, policy } = &reached {
            let policy =
                policy.as_ref().map(|policy| format!(", with the policy {policy}")).unwrap_or_default();
            check.said = format!("a daemon is running{policy}");
            return (check, Daemon::Running);
        }
        let starts = owner_of(&path).and_then(|Owner { pid, phase }| match phase {
            Phase::Starting(Some(progress)) => Some((pid, progress)),
            Phase::Starting(None) | Phase::Ready | Phase::Ending => None,
        });
        if let (Reached::Silent { .. }, Some((pid, progress))) = (&reached, starts) {
            let said = format!("{} starts: {progress}", process(Some(pid)));
            let finding =
                Finding::note(Code::DaemonSilent, said, "wait; `trellis status` says how far it is");
            check.findings.push(finding.with(path.display().to_string()));
        } else {
            check.findings.extend(finding_of(&path, &reached, &Lock::look(&path), who, patience));
        }
        if is_there {
            check.said = String::new();
            return (check, Daemon::Absent);
        }
    }
    let place = told.map(Path::to_owned).or_else(default_socket);
    check.findings.extend(match place {
        Some(place) => closed_place(&std::path::absolute(&place).unwrap_or(place), who),
        None => Some(Finding::problem(
            Code::NoSocketPlace,
            "this user has no runtime directory, where the socket would be",
            "`trellis serve --socket /absolute/path/trellis.sock`",
        )),
    });
    (check, Daemon::Absent)
}

async fn reach(path: &Path, patience: Duration) -> Reached {
    let stream = match tokio::time::timeout(patience, UnixStream::connect(path)).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => {
            return match error.kind() {
                io::ErrorKind::NotFound => Reached::Nothing,
                io::ErrorKind::ConnectionRefused if is_socket(path) => Reached::Abandoned,
                io::ErrorKind::PermissionDenied => Reached::Closed,
                // As many wait there as may.
                io::ErrorKind::WouldBlock => Reached::Silent { pid: None },
                _ => Reached::Unusable(error),
            };
        }
        Err(_) => return Reached::Silent { pid: None },
    };
    let pid = stream.peer_cred().ok().and_then(|peer| peer.pid());
    let asked = async { Client::over(stream).await?.info().await };
    match tokio::time::timeout(patience, asked).await {
        Ok(Ok(info)) => Reached::Daemon { failure: info.failure, policy: info.policy },
        Ok(Err(error)) => Reached::Foreign(error),
        Err(_) => Reached::Silent { pid },
    }
}

fn is_socket(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt as _;
    std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket())
}

fn shown(reached: &Reached) -> String {
    match reached {
        Reached::Nothing => "not there".to_owned(),
        Reached::Abandoned => "a socket on which nobody listens".to_owned(),
        Reached::Closed => "this user may not connect".to_owned(),
        Reached::Unusable(error) => error.to_string(),
        Reached::Silent { .. } => "somebody listens and does not answer".to_owned(),
        Reached::Foreign(error) => error.to_string(),
        Reached::Daemon { .. } => "a daemon answers".to_owned(),
    }
}

fn finding_of(
    path: &Path,
    reached: &Reached,
    lock: &Seen,
    who: &Identity,
    patience: Duration,
) -> Option<Finding> {
    let lock_path = Lock::path(path);
    let finding = match (reached, lock) {
        (Reached::Nothing | Reached::Abandoned, Seen::Held { pid }) => {
            let what = match reached {
                Reached::Nothing => "the socket's file is gone",
                _ => "nobody listens on the socket",
            };
            let said = format!("{} holds the lock of the socket, and {what}", process(*pid));
            let remedy =
                format!("a daemon makes its socket anew within seconds; if not, {}", end(*pid, &lock_path));
            Finding::problem(Code::LockHeld, said, remedy).with(lock_path.display().to_string())
        }
        (Reached::Nothing, _) => return None,
        (Reached::Abandoned, Seen::Free { pid }) => {
            let said = format!("a lock and a socket are left of {}, which is gone", process(*pid));
            let remedy = "`trellis serve` takes both over";
            Finding::note(Code::StaleLock, said, remedy).with(lock_path.display().to_string())
        }
        (Reached::Abandoned, Seen::Absent | Seen::Closed) => {
            let said = "nobody listens on the socket: its daemon is gone";
            Finding::note(Code::StaleSocket, said, "`trellis serve` takes its place")
        }
        (Reached::Closed, _) => match who.kept_from(path, Wanted::Write) {
            Some(closed) => {
                let said = format!("{} may not use the socket: it is {}", who.name(), closed.whose());
                Finding::problem(Code::SocketNoPermission, said, closed.remedy(who)).with(closed.details())
            }
            None => {
                let said = "the system keeps this process from the socket, although the modes allow it";
                Finding::problem(
                    Code::SocketNoPermission,
                    said,
                    "look at what confines it: SELinux, AppArmor, a container",
                )
            }
        },
        (Reached::Unusable(error), _) => {
            let said = format!("no daemon can be reached there: {error}");
            Finding::problem(Code::SocketUnusable, said, "give `trellis serve` and clients another --socket")
        }
        (Reached::Silent { pid }, lock) => {
            let pid = match lock {
                Seen::Held { pid } => *pid,
                _ => pid.and_then(|pid| u32::try_from(pid).ok()),
            };
            let said = format!(
                "{} listens on the socket and has not answered for {} s: it starts, or it hangs",
                process(pid),
                patience.as_secs_f64()
            );
            let remedy = format!(
                "`trellis service status` says whether it starts; if it hangs, {}",
                end(pid, &lock_path)
            );
            Finding::problem(Code::DaemonSilent, said, remedy).with(lock_path.display().to_string())
        }
        (Reached::Foreign(error), _) => {
            let said = format!("what listens on the socket is no daemon that this program knows: {error}");
            let remedy = "restart the daemon with this `trellis`, or give another --socket";
            Finding::problem(Code::NotADaemon, said, remedy)
        }
        (Reached::Daemon { failure, .. }, _) => {
            let said = format!("a daemon is running whose device has failed: {}", failure.as_ref()?);
            Finding::problem(Code::DaemonFailed, said, "`trellis stop --daemon`, then start it again")
        }
    };
    Some(finding.with(path.display().to_string()))
}

/// What keeps another user than this process's from making a socket there, as far as modes tell.
pub(super) fn closed_place_for(socket: &Path, who: &Identity) -> Option<Finding> {
    let folder = socket.ancestors().skip(1).find(|folder| folder.exists())?;
    let closed = who.kept_from(folder, Wanted::Write)?;
    let said = format!("{} cannot make a socket where it would be", who.name());
    let remedy = "set `socket` to a path in a folder of that user's, or leave it out";
    Some(Finding::problem(Code::SocketPlaceClosed, said, remedy).with(closed.details()))
}

/// Whether a socket can be made there, as far as modes tell.
fn closed_place(socket: &Path, who: &Identity) -> Option<Finding> {
    let folder: PathBuf = socket.ancestors().skip(1).find(|folder| folder.exists())?.to_owned();
    let remedy = "`trellis serve --socket /absolute/path/trellis.sock` takes another place";
    if let Some(closed) = who.kept_from(&folder, Wanted::Write) {
        let said = format!("{} cannot make a socket where it would be", who.name());
        return Some(Finding::problem(Code::SocketPlaceClosed, said, remedy).with(closed.details()));
    }
    // A file system may be mounted to be read alone.
    let error = rustix::fs::access(&folder, rustix::fs::Access::WRITE_OK).err()?;
    let said = format!("no socket can be made where it would be: {error}");
    Some(Finding::problem(Code::SocketPlaceClosed, said, remedy).with(folder.display().to_string()))
}

fn process(pid: Option<u32>) -> String {
    pid.map_or_else(|| "a process".to_owned(), |pid| format!("process {pid}"))
}

/// How to end it.
fn end(pid: Option<u32>, lock: &Path) -> String {
    match pid {
        Some(pid) => format!("`kill {pid}`"),
        None => format!("end what `fuser {}` names", lock.display()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File, Permissions};
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::net::UnixListener;

    use super::*;

    const SOON: Duration = Duration::from_millis(300);

    fn place() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("t.sock");
        (folder, socket)
    }

    async fn found(socket: &Path) -> (Check, Daemon) {
        check(Some(socket), &Identity::this_process(), SOON).await
    }

    fn only(check: &Check) -> &Finding {
        let [found] = &check.findings[..] else { panic!("{check:?}") };
        found
    }

    /// As a daemon of this process number holds it.
    fn held(socket: &Path, pid: &str) -> File {
        fs::write(Lock::path(socket), pid).expect("written");
        let lock = File::open(Lock::path(socket)).expect("it is there");
        lock.lock().expect("nobody has it");
        lock
    }

    #[tokio::test]
    async fn where_nothing_is_nothing_is_wrong() {
        let (_folder, socket) = place();
        let (check, daemon) = found(&socket).await;
        assert_eq!((check.findings.as_slice(), check.said.as_str()), (&[][..], "no daemon is running"));
        assert_eq!(daemon, Daemon::Absent);
        // A lock stays behind every daemon that has ended.
        fs::write(Lock::path(&socket), "1\n").expect("written");
        assert_eq!(found(&socket).await.0.findings, []);
    }

    #[tokio::test]
    async fn a_socket_on_which_nobody_listens_is_a_leftover() {
        let (_folder, socket) = place();
        drop(UnixListener::bind(&socket).expect("bound"));
        let (check, _) = found(&socket).await;
        assert_eq!((only(&check).code, only(&check).is_problem()), (Code::StaleSocket, false));
        fs::write(Lock::path(&socket), "4194000\n").expect("written");
        let (check, _) = found(&socket).await;
        assert_eq!((only(&check).code, only(&check).is_problem()), (Code::StaleLock, false));
        assert!(only(&check).said.contains("process 4194000"), "{check:?}");
    }

    #[tokio::test]
    async fn who_holds_the_lock_and_does_not_listen_is_named() {
        let (_folder, socket) = place();
        let _lock = held(&socket, "4194001\n");
        for _ in ["without a file", "with a file that nobody listens on"] {
            let (check, _) = found(&socket).await;
            assert_eq!((only(&check).code, only(&check).is_problem()), (Code::LockHeld, true));
            assert!(only(&check).said.starts_with("process 4194001 holds the lock"), "{check:?}");
            assert!(only(&check).remedy.contains("`kill 4194001`"), "{check:?}");
            drop(UnixListener::bind(&socket));
        }
    }

    #[tokio::test]
    async fn who_listens_and_does_not_answer_is_named() {
        let (_folder, socket) = place();
        let _listener = UnixListener::bind(&socket).expect("bound");
        let (check, daemon) = found(&socket).await;
        assert_eq!((only(&check).code, daemon), (Code::DaemonSilent, Daemon::Absent));
        let own = std::process::id();
        assert!(only(&check).remedy.contains(&format!("`kill {own}`")), "{check:?}");
        let _lock = held(&socket, "4194002\n");
        let (check, _) = found(&socket).await;
        assert!(only(&check).said.starts_with("process 4194002 listens"), "the lock knows better: {check:?}");
    }

    #[tokio::test]
    async fn what_is_no_daemon_is_told_from_one() {
        let (folder, socket) = place();
        let listener = UnixListener::bind(&socket).expect("bound");
        let answering = std::thread::spawn(move || {
            use std::io::Write as _;
            let (mut stream, _) = listener.accept().expect("the check comes");
            stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").expect("it listens");
        });
        let (check, _) = check(Some(&socket), &Identity::this_process(), ANSWER_MAX).await;
        assert_eq!(only(&check).code, Code::NotADaemon, "{check:?}");
        answering.join().expect("no panic");

        let file = folder.path().join("file");
        fs::write(&file, "text").expect("written");
        assert_eq!(only(&found(&file).await.0).code, Code::SocketUnusable);
        let long = folder.path().join("x".repeat(120));
        assert_eq!(only(&found(&long).await.0).code, Code::SocketUnusable);
    }

    #[test]
    fn who_may_not_connect_hears_which_group_may() {
        let (folder, socket) = place();
        let _listener = UnixListener::bind(&socket).expect("bound");
        let other = Identity::new(4_000_000, Vec::new());
        let finding = |mode: u32, of_folder: u32| {
            let set =
                |path: &Path, mode| fs::set_permissions(path, Permissions::from_mode(mode)).expect("ours");
            set(&socket, mode);
            set(folder.path(), of_folder);
            finding_of(&socket, &Reached::Closed, &Seen::Absent, &other, SOON).expect("it is found")
        };
        let of_socket = finding(0o660, 0o755);
        assert_eq!(of_socket.code, Code::SocketNoPermission);
        assert!(of_socket.details[0].contains("t.sock: mode 660"), "{of_socket:?}");
        let of_folder = finding(0o666, 0o700);
        assert!(
            !of_folder.details[0].contains("t.sock") && of_folder.details[0].contains("mode 700"),
            "{of_folder:?}"
        );
        assert!(finding(0o666, 0o755).remedy.contains("SELinux"));
        let place = folder.path().join("below/t.sock");
        assert_eq!(closed_place(&place, &other).map(|found| found.code), Some(Code::SocketPlaceClosed));
        assert_eq!(closed_place(&place, &Identity::this_process()), None);
    }
}
