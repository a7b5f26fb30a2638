use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::Listener;
use super::complaints::Complaints;
use super::places::Places;
use super::rate::Rate;
use crate::descriptors::Shares;
use crate::session::{Service, Sessions};

/// How long to wait when the system has no room for another connection, rather than to ask again at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// How often to look whether the socket's file is still there.
const LOOK_INTERVAL: Duration = Duration::from_secs(2);

/// Accepts and serves connections until `shutdown` is cancelled. Then the socket is removed, the guests are stopped, and
/// the connections are given time to say so; returns when all are closed. No other daemon can start before that. A socket
/// whose file somebody removes is made anew.
pub async fn run<S: Service>(
    mut listener: Listener,
    sessions: Arc<Sessions<S>>,
    shutdown: CancellationToken,
) {
    let tasks = TaskTracker::new();
    let complaints = Arc::new(Complaints::default());
    let places = Places::new(Shares::now().n_connections);
    let mut rate = Rate::new(sessions.n_connections_per_s());
    let mut looks = tokio::time::interval(LOOK_INTERVAL);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = looks.tick() => {
                complaints.note_place(&listener.restore());
                rate.forget_idle(Instant::now());
                continue;
            }
            () = shutdown.cancelled() => break,
        };
        match accepted {
            Ok(accepted) => {
                let peer = accepted.peer();
                let place = places.take(peer.actor);
                let turn = place.and_then(|place| Ok((place, rate.take(peer.actor, Instant::now())?)));
                let (place, begins) = match turn {
                    Ok(turn) => turn,
                    Err(error) => {
                        accepted.turn_away(&error);
                        complaints.note_ended(peer.actor, peer.pid, &error);
                        continue;
                    }
                };
                let stream = accepted.into_stream();
                complaints.note_accepted(stream.as_ref().err());
                let Ok(stream) = stream else {
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                };
                let (sessions, shutdown, complaints) =
                    (sessions.clone(), shutdown.clone(), complaints.clone());
                tasks.spawn(async move {
                    let _place = place;
                    tracing::debug!(uid = peer.actor.uid, pid = peer.pid, "connected");
                    // A timer would take a millisecond of those that need not wait.
                    if begins > Instant::now() {
                        tokio::select! {
                            biased;
                            () = shutdown.cancelled() => return,
                            () = tokio::time::sleep_until(begins.into()) => {}
                        }
                    }
                    match sessions.serve(stream, peer.actor, shutdown).await {
                        Ok(()) => tracing::debug!(uid = peer.actor.uid, pid = peer.pid, "disconnected"),
                        Err(error) => complaints.note_ended(peer.actor, peer.pid, &error),
                    }
                });
            }
            Err(error) => {
                complaints.note_accepted(Some(&error));
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    let _lock = listener.close();
    tasks.close();
    tasks.wait().await;
}
