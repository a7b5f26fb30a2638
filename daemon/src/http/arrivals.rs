//! Requests that come as the daemon is about to end: those that the next daemon answers, and those that this one still does.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

/// How long a connection that was accepted has to ask something before the daemon takes on nothing more.
const ARRIVAL_TIME: Duration = Duration::from_secs(1);

/// Where the socket outlives the daemon, nobody is accepted whose request would then be refused.
#[derive(Clone, Debug, Default)]
pub(crate) struct Arrivals(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    closed: CancellationToken,
    under_way: TaskTracker,
}

impl Arrivals {
    /// Accepts nobody any more, and waits until those who were accepted before have been answered or have a guest, for a moment and no
    /// longer than this. Who connects meanwhile waits at the socket for the next daemon.
    pub(crate) async fn end(&self, at_most: Duration) {
        self.0.closed.cancel();
        self.0.under_way.close();
        let _ = tokio::time::timeout(at_most.min(ARRIVAL_TIME), self.0.under_way.wait()).await;
    }

    /// Resolves once nobody is accepted any more.
    pub(super) async fn ended(&self) {
        self.0.closed.cancelled().await;
    }

    /// Somebody whose request is to be answered by this daemon, until this is dropped.
    pub(super) fn note(&self) -> TaskTrackerToken {
        self.0.under_way.token()
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    #[tokio::test]
    async fn who_was_accepted_is_waited_for_and_for_a_moment_alone() {
        let long = Duration::from_secs(3_600);
        let arrivals = Arrivals::default();
        let begun = Instant::now();
        let arrived = arrivals.note();
        let asks = tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(20)).await;
            drop(arrived);
        });
        arrivals.end(long).await;
        assert!(asks.is_finished(), "it was waited for");
        arrivals.ended().await;
        arrivals.end(long).await;
        let silent = arrivals.note();
        arrivals.end(Duration::from_millis(20)).await;
        arrivals.end(long).await;
        assert!(begun.elapsed() >= ARRIVAL_TIME);
        drop(silent);
    }
}
