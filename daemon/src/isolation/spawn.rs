//! Starting a guests' process, and seeing to its end.

use std::ffi::OsStr;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::process::{Child, Command};
use tokio::task::JoinHandle;

use super::channel::{Channel, Closer, RING_BYTES, Receiver, Sender};
use super::child::{GUEST_WORKER, Greeting};
use super::complaints::Complaints;
use super::confine::{ConfineSettings, Confinement};
use super::error::SpawnError;
use super::handover::{self, Handover};
use super::look::{self, Look};
use crate::allocator::OF_BOUNDED_CHILDREN;
use crate::spawner;

/// How often it is looked at what a process has.
pub(crate) const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// What a guests' process may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessSettings {
    /// Whose guests it is for, as the log names them.
    pub user: String,
    /// Bytes that it may have in memory, without its channel; it is killed when it is seen with more.
    pub memory_bytes: u64,
    /// Bytes of data, used or set aside, beyond which the system refuses it more. What is refused there mostly ends it, so this
    /// lies behind all that it takes within its memory.
    pub data_bytes: u64,
    /// Descriptors that it may have open.
    pub n_descriptors: u64,
    /// Bytes of each of the two rings, a power of two.
    pub ring_bytes: usize,
    /// Bytes of the longest frame.
    pub frame_bytes_max: usize,
    /// Within this it has to be ready.
    pub start_ms: u64,
}

impl Default for ProcessSettings {
    fn default() -> Self {
        Self {
            user: String::new(),
            memory_bytes: 1 << 30,
            data_bytes: 1 << 30,
            n_descriptors: 64,
            ring_bytes: RING_BYTES,
            frame_bytes_max: 16 << 20,
            start_ms: 30_000,
        }
    }
}

/// How a guests' process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessEnd {
    /// By itself.
    Exited {
        /// Its exit status; 0 where all went well.
        code: i32,
    },
    /// By a signal: its own as it aborted, or another's.
    Killed {
        /// Which.
        signal: i32,
    },
    /// It was killed because it used more memory than it may.
    TooMuchMemory {
        /// Bytes that it used.
        used_bytes: u64,
        /// Bytes that it may use.
        limit_bytes: u64,
    },
    /// It was killed because it had more threads than it may.
    TooManyThreads {
        /// How many it had.
        n_threads: u64,
        /// How many it may have.
        limit: u64,
    },
}

impl From<ExitStatus> for ProcessEnd {
    fn from(status: ExitStatus) -> Self {
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Exited { code },
            (None, signal) => Self::Killed { signal: signal.unwrap_or(0) },
        }
    }
}

/// A running child for the guests of one user. Dropping it kills it and closes its channel.
#[derive(Debug)]
pub struct GuestProcess {
    child: Child,
    closer: Closer,
    complaints: Complaints,
    /// What reads them, until they have been read to their end.
    reading: Option<JoinHandle<()>>,
    memory_bytes: u64,
    data_bytes: u64,
    confinement: Confinement,
}

impl GuestProcess {
    /// Starts this executable with [`GUEST_WORKER`] and waits until it is confined. The caller is within a runtime.
    ///
    /// # Errors
    /// It does not start, cannot confine itself, or is late.
    pub async fn spawn(
        exe: &Path,
        settings: &ProcessSettings,
    ) -> Result<(Self, Sender, Receiver), SpawnError> {
        Self::spawn_as(exe, [GUEST_WORKER], settings).await
    }

    /// The same, for a [`probe`](super::probe) in the place of guests.
    ///
    /// # Errors
    /// As for [`Self::spawn`].
    pub async fn spawn_to_probe(
        exe: &Path,
        settings: &ProcessSettings,
    ) -> Result<(Self, Sender, Receiver), SpawnError> {
        Self::spawn_as(exe, [GUEST_WORKER, "--probe"], settings).await
    }

    pub(crate) async fn spawn_as(
        exe: &Path,
        arguments: impl IntoIterator<Item = impl AsRef<OsStr>>,
        settings: &ProcessSettings,
    ) -> Result<(Self, Sender, Receiver), SpawnError> {
        let (channel, fds) = Channel::pair(settings.ring_bytes, settings.frame_bytes_max)?;
        let handover = Handover {
            confine: ConfineSettings {
                data_bytes: settings.data_bytes,
                n_descriptors: settings.n_descriptors,
                parent: std::process::id().cast_signed(),
            },
            frame_bytes_max: settings.frame_bytes_max,
        };
        let socket = handover::give(&handover, fds)?;
        let mut command = Command::new(exe);
        command
            .args(arguments)
            .env_clear()
            .envs(OF_BOUNDED_CHILDREN)
            .stdin(Stdio::from(socket))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            // What a terminal sends to the daemon's group is for the daemon.
            .process_group(0)
            .kill_on_drop(true);
        let started = spawner::start(command).await;
        let mut child = started.map_err(|source| SpawnError::Exe { exe: exe.to_owned(), source })?;
        let complaints = Complaints::default();
        let stderr = child.stderr.take().expect("piped");
        let reading = tokio::spawn(complaints.clone().read(stderr, settings.user.clone()));
        let mut starting = Starting { child: Some(child), closer: channel.closer() };
        let (sender, receiver) = channel.split();
        let (confinement, receiver) = match starting.greeting(receiver, settings.start_ms).await? {
            Ok((Greeting::Ready(confinement), receiver)) => (confinement, receiver),
            Ok((Greeting::Failed(reason), _)) => return Err(SpawnError::NotConfined { reason }),
            Err(status) => {
                // Its end closed what it complained to.
                let _ = reading.await;
                return Err(SpawnError::Died { status: status.to_string(), said: complaints.last() });
            }
        };
        let child = starting.child.take().expect("it was started");
        let closer = starting.closer.clone();
        let ProcessSettings { memory_bytes, data_bytes, .. } = *settings;
        let reading = Some(reading);
        let process = Self { child, closer, complaints, reading, memory_bytes, data_bytes, confinement };
        Ok((process, sender, receiver))
    }

    /// How it is confined.
    #[must_use]
    pub fn confinement(&self) -> &Confinement {
        &self.confinement
    }

    /// Its number; nothing once it has ended.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    fn look(&self) -> Look {
        self.child.id().and_then(Look::at).unwrap_or_default()
    }

    /// Why it has to go, if it has more than it may.
    fn excess(&self) -> Option<ProcessEnd> {
        let Look { used_bytes, n_threads } = self.look();
        let (limit_bytes, limit) = (self.memory_bytes, look::n_threads_max());
        if used_bytes > limit_bytes {
            return Some(ProcessEnd::TooMuchMemory { used_bytes, limit_bytes });
        }
        (n_threads > limit).then_some(ProcessEnd::TooManyThreads { n_threads, limit })
    }

    /// Bytes of memory that it has to itself; none once it has ended.
    #[must_use]
    pub(crate) fn used_bytes(&self) -> u64 {
        self.look().used_bytes
    }

    /// The last line that it wrote to its standard error.
    #[must_use]
    pub fn last_complaint(&self) -> Option<String> {
        self.complaints.last()
    }

    /// Where the system refused it memory and it said so: what it may have, in words.
    #[must_use]
    pub(crate) fn refused_memory(&self) -> Option<String> {
        let Self { memory_bytes, data_bytes, .. } = self;
        self.complaints.tell_of_refused_memory().then(|| {
            format!(
                "the system refused it memory: it may have {memory_bytes} bytes in memory and set {data_bytes} bytes aside"
            )
        })
    }

    /// Waits for its end, and kills it if it uses more memory, or has more threads, than it may. What it had sent can still be received; then the
    /// channel's calls say that it is closed. Can be dropped and called again.
    ///
    /// # Errors
    /// The system does not tell how it ended.
    pub async fn wait(&mut self) -> Result<ProcessEnd, SpawnError> {
        let mut ticks = tokio::time::interval(LOOK_INTERVAL);
        let mut excess = None;
        let status = loop {
            tokio::select! {
                status = self.child.wait() => break status,
                _ = ticks.tick(), if excess.is_none() => {
                    excess = self.excess();
                    if excess.is_some() {
                        self.child.start_kill()?;
                    }
                }
            }
        };
        self.closer.peer_is_gone();
        if let Some(reading) = &mut self.reading {
            // Its end has closed what it complained to, and what it said is there to be read.
            reading.await.expect("reading does not panic");
            self.reading = None;
        }
        Ok(excess.unwrap_or(ProcessEnd::from(status?)))
    }
}

impl Drop for GuestProcess {
    fn drop(&mut self) {
        self.closer.close();
    }
}

/// A child that has not said that it is ready. Dropping it closes the channel, so that no thread waits for it.
struct Starting {
    child: Option<Child>,
    closer: Closer,
}

impl Starting {
    /// The child's greeting, or how it ended without one.
    async fn greeting(
        &mut self,
        mut receiver: Receiver,
        limit_ms: u64,
    ) -> Result<Result<(Greeting, Receiver), ExitStatus>, SpawnError> {
        let mut heard = tokio::task::spawn_blocking(move || {
            let mut frame = Vec::new();
            receiver.recv(&mut frame).map(|()| (frame, receiver))
        });
        let child = self.child.as_mut().expect("it was started");
        let limit = tokio::time::sleep(Duration::from_millis(limit_ms));
        let mut status = None;
        let heard = tokio::select! {
            heard = &mut heard => heard,
            ended = child.wait() => {
                status = Some(ended?);
                self.closer.peer_is_gone();
                heard.await
            }
            () = limit => return Err(SpawnError::Late { limit_ms }),
        };
        let (frame, receiver) = match (heard.expect("receiving does not panic"), status) {
            (Ok(heard), _) => heard,
            (Err(_), Some(status)) => return Ok(Err(status)),
            // It has closed the channel, or broken it, and not ended.
            (Err(error), None) => return Err(error.into()),
        };
        let n_bytes = frame.len();
        let greeting = rmp_serde::from_slice(&frame).map_err(|_| SpawnError::Greeting { n_bytes })?;
        Ok(Ok((greeting, receiver)))
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        if self.child.is_some() {
            self.closer.close();
        }
    }
}
