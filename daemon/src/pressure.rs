//! Memory that is short, on the machine or in the daemon's control group: the kernel says so at a threshold (pressure stall
//! information), and the daemon lets go of what it can have again. A daemon under no pressure is not woken for it.
//!
//! A service manager says what is to be watched in `MEMORY_PRESSURE_WATCH` and `MEMORY_PRESSURE_WRITE`
//! (<https://systemd.io/MEMORY_PRESSURE>): a file of the kernel's, or a pipe or a socket to which somebody writes. Where it says
//! nothing, the daemon's control group is watched, or else the machine; where there is neither, nothing.

use std::convert::Infallible;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use tokio::sync::mpsc;

use crate::daemon::Daemon;

/// What systemd asks for as well: that some task has waited for memory for 200 ms within 2 s. Windows of whole two seconds need no
/// privilege.
const TRIGGER: &[u8] = b"some 200000 2000000\0";

/// Between two times at which something goes, however often the kernel or whoever writes says so.
const PAUSE: Duration = Duration::from_secs(1);

/// What a pipe or a socket is read of for one event at most.
const READ_BYTES: usize = 4 << 10;

/// Somewhere to hear from that memory is short.
#[derive(Debug)]
pub(crate) struct Pressure {
    fd: OwnedFd,
    /// A file of the kernel's has urgent news; all else is read.
    is_kernels: bool,
}

impl Pressure {
    /// Watches what a service manager says, by these variables, or what there is. None where that is nothing.
    ///
    /// # Errors
    /// What the service manager says cannot be watched.
    fn open(told: impl Fn(&str) -> Option<String>) -> io::Result<Option<Self>> {
        match told("MEMORY_PRESSURE_WATCH") {
            Some(path) if path == "/dev/null" => Ok(None),
            Some(path) => {
                let first = told("MEMORY_PRESSURE_WRITE").map(base64::decode).transpose();
                let first = first.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
                Self::watch(Path::new(&path), &first.unwrap_or_default()).map(Some)
            }
            None => Ok(usual().iter().find_map(|path| Self::watch(path, TRIGGER).ok())),
        }
    }

    /// Watches a file, a pipe or a socket, to which this is written first.
    fn watch(path: &Path, first: &[u8]) -> io::Result<Self> {
        let kind = fs::metadata(path)?.file_type();
        let fd: OwnedFd = if kind.is_socket() {
            let stream = UnixStream::connect(path)?;
            stream.set_nonblocking(true)?;
            stream.into()
        } else {
            // A pipe that is open for writing here, too, has no end when its writer goes.
            rustix::fs::open(path, OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())?
        };
        if !first.is_empty() {
            rustix::io::write(&fd, first)?;
        }
        Ok(Self { fd, is_kernels: kind.is_file() })
    }

    /// Waits until memory is short, for so long at most, or for as long as it takes. Whether it is.
    ///
    /// # Errors
    /// Nothing more will be heard.
    fn hear(&self, within: Option<Duration>) -> io::Result<bool> {
        let wanted = if self.is_kernels { PollFlags::PRI } else { PollFlags::IN };
        let within = within.map(|within| Timespec {
            tv_sec: within.as_secs() as i64,
            tv_nsec: within.subsec_nanos().into(),
        });
        loop {
            let mut fds = [PollFd::new(&self.fd, wanted)];
            match poll(&mut fds, within.as_ref()) {
                Ok(0) => return Ok(false),
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            }
            let happened = fds[0].revents();
            if self.is_kernels {
                // Its control group is gone.
                let is_gone = happened.contains(PollFlags::ERR);
                return if is_gone { Err(io::ErrorKind::NotFound.into()) } else { Ok(true) };
            }
            match rustix::io::read(&self.fd, &mut [0; READ_BYTES]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                // Whatever it is. What is left is another event.
                Ok(_) => return Ok(true),
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Hears from a thread of its own, which sleeps meanwhile, for as long as somebody listens.
    ///
    /// # Errors
    /// The system has no thread.
    fn listen(self) -> io::Result<mpsc::Receiver<io::Result<()>>> {
        let (tell, told) = mpsc::channel(1);
        let hear = move || {
            loop {
                let heard = self.hear(None).map(|_| ());
                let is_last = heard.is_err();
                if tell.blocking_send(heard).is_err() || is_last {
                    return;
                }
            }
        };
        thread::Builder::new().name("memory-pressure".to_owned()).spawn(hear)?;
        Ok(told)
    }
}

/// Where the kernel tells of the daemon's control group, and of the machine.
fn usual() -> Vec<PathBuf> {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let own = groups.lines().find_map(|line| line.strip_prefix("0::/"));
    let own = own.map(|own| Path::new("/sys/fs/cgroup").join(own).join("memory.pressure"));
    own.into_iter().chain([PathBuf::from("/proc/pressure/memory")]).collect()
}

/// Has the daemon let go of what it can have again whenever memory is short.
pub(crate) async fn follow(daemon: &Daemon) -> Infallible {
    let opened = Pressure::open(|name| std::env::var(name).ok());
    match opened.and_then(|pressure| pressure.map(Pressure::listen).transpose()) {
        Ok(Some(mut told)) => {
            while let Some(heard) = told.recv().await {
                if let Err(error) = heard {
                    tracing::warn!(%error, "nothing more is heard of memory pressure");
                    break;
                }
                daemon.service().relieve().await;
                tokio::time::sleep(PAUSE).await;
            }
        }
        Ok(None) => tracing::debug!("memory pressure is not watched"),
        Err(error) => {
            tracing::warn!(%error, "memory pressure cannot be watched as MEMORY_PRESSURE_WATCH says")
        }
    }
    std::future::pending().await
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixListener;

    use super::*;

    const SOON: Duration = Duration::from_millis(50);

    fn told(path: &Path, first: Option<&str>) -> impl Fn(&str) -> Option<String> {
        let (path, first) = (path.to_str().expect("UTF-8").to_owned(), first.map(str::to_owned));
        move |name| match name {
            "MEMORY_PRESSURE_WATCH" => Some(path.clone()),
            "MEMORY_PRESSURE_WRITE" => first.clone(),
            _ => None,
        }
    }

    #[test]
    fn what_is_written_to_a_pipe_is_heard_once_for_each_time() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("pressure");
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, Mode::RUSR | Mode::WUSR).expect("made");
        let pressure = Pressure::open(told(&path, None)).expect("it is there").expect("it is watched");
        for _ in 0..2 {
            assert!(!pressure.hear(Some(SOON)).expect("it is open"), "nothing was written");
            // Whoever writes comes and goes.
            fs::OpenOptions::new().write(true).open(&path).expect("open").write_all(b"x").expect("written");
            assert!(pressure.hear(Some(SOON)).expect("it is open"));
        }
    }

    #[test]
    fn a_socket_is_told_what_was_asked_for_and_its_end_is_seen() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("pressure");
        let listener = UnixListener::bind(&path).expect("bound");
        let opened = Pressure::open(told(&path, Some("c29tZQA=")));
        let pressure = opened.expect("it is there").expect("it is watched");
        let (mut peer, _) = listener.accept().expect("it has come");
        let mut first = [0; 5];
        peer.read_exact(&mut first).expect("it was written");
        assert_eq!(&first, b"some\0");
        assert!(!pressure.hear(Some(SOON)).expect("it is open"));
        peer.write_all(b"now").expect("written");
        assert!(pressure.hear(Some(SOON)).expect("it is open"));
        drop(peer);
        let end = pressure.hear(Some(SOON));
        assert_eq!(end.expect_err("nothing more comes").kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn what_is_not_to_be_watched_or_cannot_be_is_not() {
        assert!(Pressure::open(told(Path::new("/dev/null"), None)).expect("no error").is_none());
        Pressure::open(told(Path::new("/nonexistent/pressure"), None)).expect_err("it is not there");
        let error = Pressure::open(told(Path::new("/dev/zero"), Some("?"))).expect_err("that is no base64");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }
}
