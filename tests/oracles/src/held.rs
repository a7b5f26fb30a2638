//! What is left in a daemon when its guests have ended.

use std::time::{Duration, Instant};

use trellis::daemon::Daemon;
use trellis_engine::EngineStats;

/// The longest wait for the end of a guest, or for what it held: no machine is so slow.
pub(crate) const PATIENCE: Duration = Duration::from_secs(300);

/// Waits for the last guest to be gone and sees that no engine holds anything of one, but for so many contexts that were saved:
/// those are their user's, and stay.
pub(crate) async fn nothing_is_held(daemon: &Daemon, n_saved_max: usize) {
    let host = daemon.service().host();
    until("the guest is still there", || host.guests().is_empty()).await;
    for model in host.models().iter() {
        // Engines answer in order: by then they have released what was dropped before.
        let stats: EngineStats = model.stats().await.expect("the engine lives");
        assert_eq!(stats.n_contexts, 0, "{stats:?}");
        assert!(stats.n_saved <= n_saved_max, "{stats:?}");
    }
}

/// Waits for something that comes soon.
pub(crate) async fn until(complaint: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < PATIENCE, "{complaint}");
        match begun.elapsed() < Duration::from_millis(1) {
            true => tokio::task::yield_now().await,
            false => tokio::time::sleep(Duration::from_millis(1)).await,
        }
    }
}
