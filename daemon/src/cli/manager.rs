//! What a service manager is told: how far the start is, that the daemon serves, that it reads its configuration again, that its
//! engines go round, that it ends.
//!
//! The protocol is that of `sd_notify(3)`. Who started the daemon says where to in `NOTIFY_SOCKET`; otherwise nothing is said.

use std::convert::Infallible;
use std::io;
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use listenfd::ListenFd;
use sd_notify::NotifyState;

use crate::daemon::{Daemon, LoadProgress};
use crate::upgrade::{self, Inherited};

/// Time between two messages while models are loaded.
const PERIOD: Duration = Duration::from_secs(1);

/// How much longer the start may take after each message: a load that no longer comes on is one that failed.
const EXTENSION: Duration = Duration::from_secs(30);

/// Where to, how often, and what was said last.
#[derive(Debug, Default)]
pub(super) struct Manager {
    /// The daemon before in this process served, and was expected to say that it lives.
    is_successor: bool,
    loading: Mutex<Option<Loading>>,
    /// Held while something is said; whether that was that the daemon ends, after which nothing of a reload is.
    ends: Mutex<bool>,
}

/// A load, from its first message on.
#[derive(Debug)]
struct Loading {
    model: String,
    begun: Instant,
    told: Instant,
    done_bytes: u64,
}

impl Manager {
    /// Of a daemon that takes the place of another in the same process.
    pub(super) fn of_successor() -> Self {
        Self { is_successor: true, ..Self::default() }
    }

    /// How far the start is; said once a second, and only where it has come on since.
    pub(super) fn loads(&self, progress: &LoadProgress) {
        let LoadProgress::Loading { model, done_bytes, total_bytes } = progress else { return };
        let mut loading = self.loading.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let is_new = loading.as_ref().is_none_or(|loading| loading.model != *model);
        if is_new {
            *loading = Some(Loading { model: model.clone(), begun: now, told: now, done_bytes: *done_bytes });
        }
        let Some(loading) = loading.as_mut() else { return };
        let is_due = now.duration_since(loading.told) >= PERIOD && *done_bytes > loading.done_bytes;
        if !is_new && !is_due {
            return;
        }
        (loading.told, loading.done_bytes) = (now, *done_bytes);
        let status = status(model, *done_bytes, *total_bytes, now.duration_since(loading.begun));
        let extension = u32::try_from(EXTENSION.as_micros()).unwrap_or(u32::MAX);
        say(&[NotifyState::Status(&status), NotifyState::ExtendTimeoutUsec(extension)]);
        if self.is_successor {
            // As of a start that comes on.
            say(&[NotifyState::Watchdog]);
        }
    }

    /// The socket answers.
    pub(super) fn serves(&self, status: &str) {
        say(&[NotifyState::Ready, NotifyState::Status(status)]);
    }

    /// The daemon reads its configuration again; what comes of that is said by [`Self::has_reloaded`].
    pub(super) fn reloads(&self) {
        match NotifyState::monotonic_usec_now() {
            Ok(now) => self.say_while_it_serves(&[NotifyState::Reloading, now]),
            Err(error) => tracing::warn!(%error, "the service manager is not told of the reload"),
        }
    }

    /// The daemon serves on, as the configuration says or as it did.
    pub(super) fn has_reloaded(&self, status: &str) {
        self.say_while_it_serves(&[NotifyState::Ready, NotifyState::Status(status)]);
    }

    fn say_while_it_serves(&self, states: &[NotifyState<'_>]) {
        let ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner);
        if !*ends {
            say(states);
        }
    }

    fn say_that_it_ends(&self, states: &[NotifyState<'_>]) {
        let mut ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner);
        *ends = true;
        say(states);
    }

    /// The daemon lets what runs come to its end, which takes so long at most.
    pub(super) fn drains(&self, time: Duration, status: &str) {
        let time = u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
        self.say_that_it_ends(&[
            NotifyState::Stopping,
            NotifyState::Status(status),
            NotifyState::ExtendTimeoutUsec(time),
        ]);
    }

    /// Another program is about to take the place of this one, which takes so long at most until it loads its models. It serves when
    /// it says so. Nothing more is said of the end of this one.
    pub(super) fn hands_over(&self, time: Duration, status: &str) {
        let time = u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
        let mut states = vec![NotifyState::Status(status), NotifyState::ExtendTimeoutUsec(time)];
        if let Ok(now) = NotifyState::monotonic_usec_now() {
            states.extend([NotifyState::Reloading, now]);
        }
        self.say_that_it_ends(&states);
    }

    /// The daemon comes to its end.
    pub(super) fn ends(&self, status: &str) {
        self.say_that_it_ends(&[NotifyState::Stopping, NotifyState::Status(status)]);
    }
}

/// Says twice in the time in which the service manager wants to hear it that the daemon lives, as long as each of its engines
/// answers. Without such a time it never returns.
pub(super) async fn watch(daemon: &Daemon) -> Infallible {
    let Some(time) = sd_notify::watchdog_enabled() else { return std::future::pending().await };
    let mut beats = tokio::time::interval(time / 2);
    beats.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        beats.tick().await;
        let models = daemon.service().host().models();
        // Whatever it answers, its thread has come round. One that never does is what the service manager is there for.
        let answers = join_all(models.iter().map(|model| async { drop(model.stats().await) }));
        if tokio::time::timeout(time / 2, answers).await.is_ok() {
            say(&[NotifyState::Watchdog]);
        }
    }
}

/// The name of a socket that is for metrics (`FileDescriptorName=`).
const METRICS_NAME: &str = "metrics";

/// The sockets that a service manager has made for this process and handed it (`sd_listen_fds(3)`).
#[derive(Debug)]
pub(super) struct Lent {
    /// Where clients come.
    pub(super) clients: Option<UnixListener>,
    /// Where metrics are asked for.
    pub(super) metrics: Option<TcpListener>,
    /// What the daemon before in this process has left, in place of both.
    pub(super) inherited: Option<Inherited>,
}

/// Takes what was handed over, whatever the order is.
///
/// # Errors
/// What is for clients is no Unix socket, or what is for metrics is none of TCP, or the daemon before has left nothing that is known.
pub(super) fn lent_sockets() -> io::Result<Lent> {
    let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
    let mut handed = ListenFd::from_env();
    if let Some(idx) = names.split(':').position(|name| name == upgrade::NAME)
        && let Some(left) = handed.take_unix_listener(idx)?
    {
        return Ok(Lent { clients: None, metrics: None, inherited: Some(Inherited::take(left)?) });
    }
    let (clients, metrics) = places(&names, handed.len());
    let clients = clients.map(|idx| handed.take_unix_listener(idx)).transpose()?.flatten();
    let metrics = metrics.map(|idx| handed.take_tcp_listener(idx)).transpose()?.flatten();
    Ok(Lent { clients, metrics, inherited: None })
}

/// Which of so many sockets is for clients, and which for metrics: the first of that name, and the first of any other or of none.
fn places(names: &str, n: usize) -> (Option<usize>, Option<usize>) {
    let names: Vec<&str> = names.split(':').collect();
    let is_for_metrics = |idx: &usize| names.get(*idx) == Some(&METRICS_NAME);
    ((0..n).find(|idx| !is_for_metrics(idx)), (0..n).find(is_for_metrics))
}

fn say(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!(%error, "the service manager does not hear");
    }
}

fn status(model: &str, done_bytes: u64, total_bytes: u64, time: Duration) -> String {
    let gb = |n_bytes: u64| n_bytes as f64 / 1e9;
    let rate = match time.as_secs_f64() {
        seconds if seconds > 0.0 => format!(", {:.2} GB/s", gb(done_bytes) / seconds),
        _ => String::new(),
    };
    match total_bytes {
        0 => format!("loading {model}"),
        _ => format!("loading {model}: {:.2} of {:.2} GB{rate}", gb(done_bytes), gb(total_bytes)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_are_told_apart_by_their_names() {
        assert_eq!(places("", 0), (None, None));
        assert_eq!(places("", 1), (Some(0), None));
        assert_eq!(places("trellis.socket", 1), (Some(0), None));
        assert_eq!(places("metrics:trellis.socket", 2), (Some(1), Some(0)));
        assert_eq!(places("trellis.socket:metrics", 2), (Some(0), Some(1)));
        assert_eq!(places("metrics", 1), (None, Some(0)));
    }

    #[test]
    fn a_load_is_said_with_its_rate() {
        let seconds = Duration::from_secs;
        assert_eq!(
            status("big", 3_000_000_000, 12_500_000_000, seconds(2)),
            "loading big: 3.00 of 12.50 GB, 1.50 GB/s"
        );
        assert_eq!(status("big", 0, 12_500_000_000, seconds(0)), "loading big: 0.00 of 12.50 GB");
        assert_eq!(status("big", 0, 0, seconds(9)), "loading big");
    }
}
