//! A load as those see it who wait for it: whose it is, how they give it up, and how long they wait where there is no room.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::residents::Wish;
use crate::daemon::DaemonError;

/// What a load has to know of whoever wants it.
pub(super) struct Errand {
    pub(super) wish: Wish,
    /// Nobody wants it any more.
    pub(super) given_up: CancellationToken,
    /// What it lacks, as long as it waits for room.
    pub(super) lacks: watch::Sender<Option<Lack>>,
}

/// Why there is no room.
#[derive(Clone, Debug)]
pub(super) struct Lack {
    pub(super) name: String,
    /// What all of the room has to be.
    pub(super) needed_bytes: u64,
    /// Models in the way that guests use.
    pub(super) used: Vec<String>,
}

impl Errand {
    /// One, and how it is heard that it waits for room.
    pub(super) fn new(wish: Wish, given_up: CancellationToken) -> (Self, watch::Receiver<Option<Lack>>) {
        let (lacks, heard) = watch::channel(None);
        (Self { wish, given_up, lacks }, heard)
    }
}

/// How long somebody waits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    waits_for: Duration,
    until: Option<Instant>,
}

impl Patience {
    /// From now on.
    pub(super) fn begin(waits_for: Duration) -> Self {
        Self { waits_for, until: Instant::now().checked_add(waits_for) }
    }

    /// Waits until it is over.
    pub(super) async fn over(&self) {
        match self.until {
            Some(until) => tokio::time::sleep_until(until).await,
            None => std::future::pending().await,
        }
    }

    /// Waits until it is over and the load waits for room; what is read takes as long as it takes.
    pub(super) async fn over_for(&self, mut lacks: watch::Receiver<Option<Lack>>) -> DaemonError {
        self.over().await;
        let lack = lacks.wait_for(Option::is_some).await.ok().and_then(|lack| lack.clone());
        match lack {
            Some(Lack { name, needed_bytes, used }) => {
                DaemonError::NoRoomNow { name, needed_bytes, used, waited: self.waits_for }
            }
            // The load is over.
            None => std::future::pending().await,
        }
    }
}
