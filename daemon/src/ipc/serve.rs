use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::Listener;
use super::complaints::Complaints;
use super::places::Places;
use crate::descriptors::Shares;
use crate::session::{Service, Sessions, turn_away};

/// How long to wait when the system has no room for another connection, rather than to ask again at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Accepts and serves connections until `shutdown` is cancelled. Then the socket is removed, the guests are stopped, and
/// the connections are given time to say so; returns when all are closed. No other daemon can start before that.
pub async fn run<S: Service>(
    listener: Listener,
    sessions: Arc<Sessions<S>>,
    shutdown: CancellationToken,
) {
    let tasks = TaskTracker::new();
    let complaints = Arc::new(Complaints::default());
    let places = Places::new(Shares::now().n_connections);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = shutdown.cancelled() => break,
        };
        complaints.note_accepted(accepted.as_ref().err());
        match accepted {
            Ok((mut stream, peer)) => {
                let place = match places.take(peer.actor) {
                    Ok(place) => place,
                    Err(error) => {
                        turn_away(&mut stream, &error);
                        complaints.note_ended(peer.actor, peer.pid, &error);
                        continue;
                    }
                };
                let (sessions, shutdown, complaints) =
                    (sessions.clone(), shutdown.clone(), complaints.clone());
                tasks.spawn(async move {
                    let _place = place;
                    tracing::debug!(uid = peer.actor.uid, pid = peer.pid, "connected");
                    match sessions.serve(stream, peer.actor, shutdown).await {
                        Ok(()) => tracing::debug!(uid = peer.actor.uid, pid = peer.pid, "disconnected"),
                        Err(error) => complaints.note_ended(peer.actor, peer.pid, &error),
                    }
                });
            }
            Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
        }
    }
    let _lock = listener.close();
    tasks.close();
    tasks.wait().await;
}
