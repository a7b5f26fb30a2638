//! What a guests' process gets at that tries: run in the child, after it has confined itself.
//!
//! It does what the code of a guest would do that has broken out of the sandbox of WebAssembly. What no safe function asks the
//! system for (`bpf`, `ptrace` and others) the tests of the filter hold against the filter itself, and those of `native` against the
//! kernel.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use memmap2::MmapMut;
use rustix::fs::{CWD, MemfdFlags, OFlags};
use rustix::net::{AddressFamily, SocketType};
use rustix::process::{DumpableBehavior, Pid, PidfdFlags, Resource, Rlimit, Signal};
use serde::{Deserialize, Serialize};

use super::channel::{ChannelError, Receiver, Sender};
use super::error::SpawnError;
use super::spawn::{GuestProcess, ProcessEnd};

/// What there is to get at.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Targets {
    /// The daemon.
    pub parent: i32,
    /// A socket that somebody listens at, such as the daemon's.
    pub socket: PathBuf,
    /// Bytes of data, used or set aside, that the child may have.
    pub data_bytes: u64,
}

/// How a try went.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Try {
    /// What was tried.
    pub what: String,
    /// The system's error; nothing where it did what was asked.
    pub error: Option<TryError>,
}

/// Why something did not work.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TryError {
    /// The system's number of it, where it has one.
    pub errno: Option<i32>,
    /// In words.
    pub said: String,
}

impl Try {
    fn of(what: &str, result: io::Result<()>) -> Self {
        let error =
            result.err().map(|error| TryError { errno: error.raw_os_error(), said: error.to_string() });
        Self { what: what.to_owned(), error }
    }

    /// Whether the system said that this process may not, or must do without.
    #[must_use]
    pub fn is_refused(&self) -> bool {
        let refusals = [libc::EPERM, libc::EACCES, libc::ENOSYS, libc::ENOMEM];
        self.error.as_ref().is_some_and(|error| error.errno.is_some_and(|errno| refusals.contains(&errno)))
    }
}

/// What came of all tries.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Findings {
    /// What has to be refused.
    pub attacks: Vec<Try>,
    /// What has to work.
    pub needs: Vec<Try>,
}

impl Findings {
    /// What is not as it has to be, in words.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        let through = self.attacks.iter().filter(|one| !one.is_refused()).map(|one| match &one.error {
            None => format!("{} went through", one.what),
            Some(error) => format!("{} was not refused: {}", one.what, error.said),
        });
        let broken = self.needs.iter().filter_map(|one| {
            one.error.as_ref().map(|error| format!("{} does not work: {}", one.what, error.said))
        });
        through.chain(broken).collect()
    }
}

/// Why the probe has found nothing.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// There is no process to try it in.
    #[error(transparent)]
    Spawn(#[from] SpawnError),
    /// Its channel has ended.
    #[error("the process that tries: {0}")]
    Channel(#[from] ChannelError),
    /// It ended on the way.
    #[error("the process that tries ended: {end:?}, {said:?}")]
    Ended {
        /// How.
        end: ProcessEnd,
        /// The last line of its complaints.
        said: Option<String>,
    },
    /// What it says is not what was found.
    #[error("the process that tries does not say what it found: {0}")]
    Findings(#[from] rmp_serde::decode::Error),
    /// What there is to get at cannot be told.
    #[error("the process that tries cannot be told what to try: {0}")]
    Targets(#[from] rmp_serde::encode::Error),
}

/// The child's part: tries what each frame names.
pub fn serve(mut sender: Sender, mut receiver: Receiver) {
    let mut frame = Vec::new();
    while receiver.recv(&mut frame).is_ok() {
        let answered = rmp_serde::from_slice(&frame)
            .map_err(|error| error.to_string())
            .and_then(|targets| {
                rmp_serde::to_vec_named(&findings(&targets)).map_err(|error| error.to_string())
            })
            .and_then(|answer| sender.send(&answer).map_err(|error| error.to_string()));
        if let Err(error) = answered {
            eprintln!("the probe: {error}");
            return;
        }
    }
}

/// The daemon's part: has a process try what it can get at. Dropping the future kills the process.
///
/// # Errors
/// The process ends on the way, or says something else.
pub async fn run(
    mut process: GuestProcess,
    mut sender: Sender,
    mut receiver: Receiver,
    targets: &Targets,
) -> Result<Findings, ProbeError> {
    let asked = rmp_serde::to_vec_named(targets)?;
    let answer = tokio::task::spawn_blocking(move || {
        let mut frame = Vec::new();
        sender.send(&asked)?;
        receiver.recv(&mut frame)?;
        // The process ends when it sees the end of either.
        Ok::<_, ChannelError>((frame, sender, receiver))
    });
    let mut answer = std::pin::pin!(answer);
    let answer = tokio::select! {
        answer = &mut answer => answer,
        ended = process.wait() => {
            let (end, said) = (ended?, process.last_complaint());
            return Err(ProbeError::Ended { end, said });
        }
    };
    let (frame, _sender, _receiver) = answer.expect("receiving does not panic")?;
    Ok(rmp_serde::from_slice(&frame)?)
}

fn findings(targets: &Targets) -> Findings {
    Findings { attacks: attacks(targets), needs: needs() }
}

fn attacks(targets: &Targets) -> Vec<Try> {
    let parent = Pid::from_raw(targets.parent).unwrap_or(Pid::INIT);
    let mut tries = Vec::new();
    let mut attack = |what: &str, result: io::Result<()>| tries.push(Try::of(what, result));
    let read = |path: &str| fs::read(path).map(drop);
    let open = |path: &str| File::options().read(true).write(true).open(path).map(drop);

    attack("reading /etc/passwd", read("/etc/passwd"));
    attack("listing /", fs::read_dir("/").map(drop));
    attack("looking for /etc", fs::metadata("/etc").map(drop));
    attack("making a file in /tmp", File::create("/tmp/trellis-probe").map(drop));
    attack("making a folder in /tmp", fs::create_dir("/tmp/trellis-probe"));
    attack("opening /dev/null", open("/dev/null"));
    attack("opening /dev/nvidia0", open("/dev/nvidia0"));
    attack("reading its environment", read("/proc/self/environ"));
    attack("opening its own memory", open("/proc/self/mem"));
    attack("opening the daemon's memory", open(&format!("/proc/{}/mem", targets.parent)));
    attack(
        "listing the daemon's descriptors",
        fs::read_dir(format!("/proc/{}/fd", targets.parent)).map(drop),
    );

    for (name, family, kind) in [
        ("unix", AddressFamily::UNIX, SocketType::STREAM),
        ("inet", AddressFamily::INET, SocketType::STREAM),
        ("inet6", AddressFamily::INET6, SocketType::DGRAM),
        ("netlink", AddressFamily::NETLINK, SocketType::RAW),
    ] {
        let made = rustix::net::socket(family, kind, None);
        attack(&format!("making a socket: {name}"), refused_or(made.map(drop)));
    }
    attack("connecting to the daemon", UnixStream::connect(&targets.socket).map(drop));
    attack("making a pipe", refused_or(rustix::pipe::pipe().map(drop)));

    attack("starting a program", Command::new("/bin/true").spawn().map(drop));
    attack("becoming a program", Err(Command::new("/bin/true").exec()));
    attack("a signal to the daemon", refused_or(rustix::process::kill_process(parent, Signal::URG)));
    attack(
        "a handle of the daemon",
        refused_or(rustix::process::pidfd_open(parent, PidfdFlags::empty()).map(drop)),
    );
    attack(
        "memory behind a descriptor",
        refused_or(rustix::fs::memfd_create("probe", MemfdFlags::empty()).map(drop)),
    );
    attack(
        "mounting",
        refused_or(rustix::mount::mount(
            c"none",
            c"/mnt",
            c"tmpfs",
            rustix::mount::MountFlags::empty(),
            None,
        )),
    );
    attack("another root", refused_or(rustix::process::chroot(c"/tmp")));
    attack("another user", refused_or(rustix::thread::set_thread_uid(rustix::thread::Uid::ROOT)));
    attack(
        "watching files",
        refused_or(rustix::fs::inotify::init(rustix::fs::inotify::CreateFlags::empty()).map(drop)),
    );
    attack(
        "a file without a name",
        refused_or(
            rustix::fs::openat(CWD, "/tmp", OFlags::TMPFILE | OFlags::RDWR, rustix::fs::Mode::RUSR).map(drop),
        ),
    );

    let more = Rlimit { current: Some(targets.data_bytes * 2), maximum: Some(targets.data_bytes * 2) };
    let daemons = rustix::process::prlimit(
        Some(parent),
        Resource::Nofile,
        Rlimit { current: Some(1), maximum: Some(1) },
    );
    attack("lowering the daemon's limits", refused_or(daemons.map(drop)));
    attack("raising its own limits", refused_or(rustix::process::setrlimit(Resource::Data, more)));
    attack("outliving the daemon", refused_or(rustix::process::set_parent_process_death_signal(None)));
    attack(
        "being open to debuggers",
        refused_or(rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable)),
    );
    attack("doorbells that block", refused_or(rustix::fs::fcntl_setfl(io::stderr(), OFlags::empty())));
    attack("the same by another call", refused_or(rustix::io::ioctl_fionbio(io::stderr(), false)));

    let n_bytes = usize::try_from(targets.data_bytes).unwrap_or(usize::MAX);
    attack("mapping more memory than it may", MmapMut::map_anon(n_bytes).map(drop));
    tries
}

fn refused_or(result: rustix::io::Result<()>) -> io::Result<()> {
    result.map_err(io::Error::from)
}

/// What guests take of the system.
fn needs() -> Vec<Try> {
    let mut tries = Vec::new();
    let mut need = |what: &str, result: io::Result<()>| tries.push(Try::of(what, result));
    need("threads", threads());
    need("code", MmapMut::map_anon(1 << 16).and_then(MmapMut::make_exec).map(drop));
    need("memory", memory());
    need("clocks", clocks());
    need(
        "randomness",
        rustix::rand::getrandom(&mut [0; 32], rustix::rand::GetRandomFlags::empty())
            .map(drop)
            .map_err(io::Error::from),
    );
    let events = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC);
    need("doorbells of its own", events.map(drop).map_err(io::Error::from));
    need(
        "panics",
        match std::panic::catch_unwind(|| std::panic::resume_unwind(Box::new(()))) {
            Err(_) => Ok(()),
            Ok(()) => Err(io::Error::other("it was not caught")),
        },
    );
    tries
}

fn threads() -> io::Result<()> {
    let (sender, receiver) = mpsc::channel();
    let threads: Vec<_> = (0..4_u64)
        .map(|idx| {
            let sender = sender.clone();
            let work = move || {
                thread::sleep(Duration::from_millis(1));
                sender.send(idx).is_ok()
            };
            thread::Builder::new().name(format!("probe-{idx}")).spawn(work)
        })
        .collect::<io::Result<_>>()?;
    let sum: u64 = receiver.iter().take(threads.len()).sum();
    let all_sent = threads.into_iter().all(|thread| thread.join().is_ok_and(|is_sent| is_sent));
    if sum == 6 && all_sent { Ok(()) } else { Err(io::Error::other("threads do not hear each other")) }
}

fn memory() -> io::Result<()> {
    let mut bytes = Vec::<u8>::new();
    bytes.try_reserve_exact(8 << 20).map_err(|_| io::Error::from(ErrorKind::OutOfMemory))?;
    bytes.resize(8 << 20, 7);
    let sum: u64 = bytes.iter().step_by(4096).map(|byte| u64::from(*byte)).sum();
    if sum == 7 * 2048 { Ok(()) } else { Err(io::Error::other("memory forgets")) }
}

fn clocks() -> io::Result<()> {
    let (start, of_day) = (Instant::now(), SystemTime::now());
    thread::sleep(Duration::from_millis(1));
    let goes_on = start.elapsed() >= Duration::from_millis(1) && of_day > SystemTime::UNIX_EPOCH;
    if goes_on { Ok(()) } else { Err(io::Error::other("they stand still")) }
}

/// What a probe from this process on tries to get at.
#[must_use]
pub fn targets(socket: &Path, data_bytes: u64) -> Targets {
    Targets { parent: std::process::id().cast_signed(), socket: socket.to_owned(), data_bytes }
}
