use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use interprocess::os::unix::uds_local_socket::tokio::Stream;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::Listener;
use super::accepted::Peer;
use super::complaints::Complaints;
use super::hand_over::HandOver;
use super::lock::Lock;
use super::looks::Looks;
use super::places::Place;
use super::rate::Rate;
use crate::guest::give_way;
use crate::session::{Service, Sessions};

/// How long to wait when the system has no room for another connection, rather than to ask again at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Time between two words to those who wait for the next daemon.
const NOTE_PERIOD: Duration = Duration::from_secs(1);

/// By how much the thread that accepts gives way to the engines' threads, in the system's steps of niceness. Less than guests do:
/// whoever comes in an honest way stands in one line with those that connect and leave all the time.
const NICENESS: i32 = 2;

/// Accepts and serves connections until `shutdown` is cancelled. Then the socket is removed, the guests are stopped, and
/// the connections are given time to say so; returns when all are closed. No other daemon can start before that. A socket
/// whose file somebody removes is made anew. Where a hand-over has begun before that, the socket stays, and lies there in the end.
///
/// # Panics
/// The system has no thread for it, or it panicked there; first all ends as after `shutdown`.
pub async fn run<S: Service>(
    listener: Listener,
    sessions: Arc<Sessions<S>>,
    shutdown: CancellationToken,
    hand_over: Arc<HandOver>,
) {
    let tasks = TaskTracker::new();
    // Before the thread that accepts has begun, it may be asked for.
    hand_over.note(&listener);
    // Whoever gives up this future has nobody accepted any more.
    let until = shutdown.child_token();
    let _until = until.clone().drop_guard();
    let (door_shutdown, door_tasks) = (shutdown.clone(), tasks.clone());
    let door = Door {
        sessions: sessions.clone(),
        shutdown: door_shutdown,
        hand_over: hand_over.clone(),
        tasks: door_tasks,
    };
    let left = beside(door.accept(listener, until)).await;
    if left.is_none() {
        tracing::error!("nobody accepts connections any more: the daemon ends");
        shutdown.cancel();
    }
    tasks.close();
    if !sessions.ends_by().wait(tasks.wait()).await {
        tracing::warn!("connections have not ended in time");
    }
    sessions.detached_ended().await;
    match left.expect("the thread that accepts connections ends when it is told to") {
        Left::Kept(listener) => hand_over.keep(*listener),
        // Until here no other daemon can start.
        Left::Closed(lock) => drop(lock),
    }
}

/// What is left once nobody is accepted any more.
enum Left {
    /// What keeps other daemons away.
    Closed(Lock),
    /// All, for the next program.
    Kept(Box<Listener>),
}

/// Runs something on a thread that gives way to those that decode and those that serve sessions: whoever connects and leaves all the
/// time does not take half of an engine's processor with it.
async fn beside<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> Option<T> {
    let (done, is_done) = oneshot::channel();
    let runtime = Handle::current();
    let thread = thread::Builder::new().name("accept".to_owned()).spawn(move || {
        give_way(NICENESS);
        // Nobody waits where the future was given up.
        let _ = done.send(runtime.block_on(work));
    });
    if let Err(error) = thread {
        tracing::error!(%error, "no thread accepts connections");
    }
    is_done.await.ok()
}

async fn pause(until: &CancellationToken) {
    tokio::select! {
        biased;
        () = until.cancelled() => {}
        () = tokio::time::sleep(ACCEPT_PAUSE) => {}
    }
}

/// Where connections come in.
struct Door<S> {
    sessions: Arc<Sessions<S>>,
    shutdown: CancellationToken,
    hand_over: Arc<HandOver>,
    tasks: TaskTracker,
}

impl<S: Service> Door<S> {
    /// Lets connections in until it is told to stop; what is returned keeps other daemons away.
    async fn accept(self, mut listener: Listener, until: CancellationToken) -> Left {
        let complaints = Arc::new(Complaints::default());
        let places = self.sessions.places().clone();
        let mut rate = Rate::new(self.sessions.limits().n_connections_per_s);
        let mut looks = Looks::of(listener.path());
        self.hand_over.note(&listener);
        loop {
            let accepted = tokio::select! {
                // First, so that no timer is asked of a runtime that is gone.
                biased;
                () = until.cancelled() => break,
                // Whoever comes from now on waits at the socket for the next daemon.
                () = self.sessions.drains(), if listener.is_lent() => {
                    self.say_what_comes(&listener, &until).await;
                    break;
                }
                () = self.hand_over.begins() => {
                    self.say_what_comes(&listener, &until).await;
                    break;
                }
                () = looks.next() => {
                    let place = listener.restore();
                    self.hand_over.note(&listener);
                    complaints.note_place(&place);
                    if !matches!(place, Ok(super::listener::Place::Kept)) {
                        looks.watch();
                    }
                    continue;
                }
                accepted = listener.accept() => accepted,
            };
            let accepted = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    complaints.note_accepted(Some(&error));
                    pause(&until).await;
                    continue;
                }
            };
            let peer = accepted.peer();
            rate.set(self.sessions.limits().n_connections_per_s);
            let place = listener.check_served(peer.actor).and_then(|()| places.take(peer.actor));
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
            match stream {
                Ok(stream) => self.serve(stream, peer, place, begins, complaints.clone()),
                Err(_) => pause(&until).await,
            }
        }
        if self.hand_over.has_begun() {
            return Left::Kept(Box::new(listener));
        }
        // Connections wait at a lent socket for the next daemon, whatever ends this one.
        if listener.is_lent()
            && let Ok(note) = listener.start_note()
        {
            let _ = note.say_ending();
        }
        Left::Closed(listener.close())
    }

    /// Says for who waits at the socket what is waited for, until it is told to stop. Once a second: that it is written again tells also
    /// those who may not read it that this process goes on. No program takes the place of this one where the socket is lent, or where
    /// that was given up.
    async fn say_what_comes(&self, listener: &Listener, until: &CancellationToken) {
        let note = listener.start_note().inspect_err(|error| tracing::debug!(%error, "nothing is said"));
        loop {
            let is_replaced = self.hand_over.has_begun() && !self.hand_over.is_given_up();
            // That it is not said keeps nobody from being replaced.
            let _ = note.as_ref().map(|note| match is_replaced {
                true => note.say_replaced(self.sessions.ends_by().drain_left()),
                false => note.say_ending(),
            });
            tokio::select! {
                biased;
                () = until.cancelled() => return,
                () = self.hand_over.gives_up(), if is_replaced => {}
                () = tokio::time::sleep(NOTE_PERIOD) => {}
            }
        }
    }

    /// Serves one, once its turn has come.
    fn serve(&self, stream: Stream, peer: Peer, place: Place, begins: Instant, complaints: Arc<Complaints>) {
        let (sessions, shutdown) = (self.sessions.clone(), self.shutdown.clone());
        self.tasks.spawn(async move {
            let _place = place;
            tracing::debug!(uid = peer.actor.uid, pid = peer.pid, "connected");
            // A timer would take a millisecond of those that need not wait.
            if begins > Instant::now() {
                tokio::select! {
                    biased;
                    // It is told so as any other.
                    () = shutdown.cancelled() => {}
                    () = tokio::time::sleep_until(begins.into()) => {}
                }
            }
            match sessions.serve(stream, peer.actor, shutdown).await {
                Ok(()) => tracing::debug!(uid = peer.actor.uid, pid = peer.pid, "disconnected"),
                Err(error) => complaints.note_ended(peer.actor, peer.pid, &error),
            }
        });
    }
}
