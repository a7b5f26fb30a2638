//! Sessions that are opened, used and dropped at every moment of a session, several at once and by several users: nothing is held
//! afterwards.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use tokio::net::UnixListener;
use trellis::config::{Config, Isolation};
use trellis::daemon::Daemon;
use trellis::session::Actor;
use trellis_client::Client;
use trellis_tests::attacks::sessions::{self, MOMENTS, Visits};
use trellis_tests::attacks::{Component, Site, saved};
use trellis_tests::daemons::{self, nothing_is_held, until};
use trellis_tests::engines::block_on;
use trellis_tests::guests;

use crate::exe;

/// What nobody else on the machine is.
const USERS: [u32; 3] = [60_111, 60_112, 60_113];

/// Sessions of all users: each is at each moment twice and more.
const N_SESSIONS: usize = 300;

/// Sessions of each user at once.
const N_AT_ONCE: usize = 5;

/// Serves everybody who connects here as this user.
fn listen(daemon: &Arc<Daemon>, listener: UnixListener, uid: u32) {
    let daemon = daemon.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let daemon = daemon.clone();
            // How a connection ends is its client's to see.
            tokio::spawn(async move {
                let actor = Actor { uid, gid: uid };
                let _ = daemon.sessions().serve(stream, actor, daemon.shutdown().clone()).await;
            });
        }
    });
}

fn come_and_go(isolation: Isolation) {
    block_on(async {
        let folder = tempfile::tempdir().expect("a folder");
        let config = saved::on_disk(sessions::config(daemons::config(exe())), folder.path());
        let config = Config { isolation, ..config };
        let daemon = Arc::new(daemons::start(&config));
        let hostile = Component::new(guests::hostile());
        let begun = Instant::now();
        let done = Arc::new(AtomicUsize::new(0));
        let visiting = USERS.map(|uid| {
            let socket = folder.path().join(format!("{uid}.sock"));
            listen(&daemon, UnixListener::bind(&socket).expect("the place is free"), uid);
            let (socket, hostile) = (socket.into(), hostile.clone());
            let site = Site { socket, hostile, until: begun, patience: None };
            let n_sessions = N_SESSIONS / USERS.len();
            let visits = Visits { n_sessions, n_at_once: N_AT_ONCE, seed: u64::from(uid) };
            let done = done.clone();
            tokio::spawn(async move { sessions::visit(&site, visits, done).await })
        });
        let mut seen = sessions::ByMoment::new();
        for visitor in visiting {
            for (moment, tally) in visitor.await.expect("no panic").expect("no panic") {
                seen.entry(moment).or_default().add(tally);
            }
        }
        println!("{isolation:?}: {N_SESSIONS} sessions at {} moments, {:?}", seen.len(), begun.elapsed());
        assert_eq!(seen.len(), MOMENTS.len(), "each is there");
        assert_eq!(done.load(Ordering::Relaxed), N_SESSIONS);
        assert_eq!(sessions::complaints(&seen), Vec::<String>::new());

        let client = Client::over(connect(&daemon, USERS[0])).await.expect("the daemon says hello");
        until("no other connection is left", async || {
            client.info().await.expect("the daemon answers").n_sessions == 1
        })
        .await;
        assert_eq!(daemon.sessions().n_uploads(), 0);
        drop(client);
        until("nothing is compiled for nobody", async || daemon.service().host().n_compiles() == 0).await;
        nothing_is_held(&daemon).await;
        until("nothing is left among saved contexts", async || {
            saved::files(folder.path()).expect("the folder is read").is_empty()
        })
        .await;
    });
}

/// A connection of a user.
fn connect(daemon: &Arc<Daemon>, uid: u32) -> tokio::net::UnixStream {
    let (ours, theirs) = tokio::net::UnixStream::pair().expect("a pair of sockets");
    let daemon = daemon.clone();
    tokio::spawn(async move {
        let actor = Actor { uid, gid: uid };
        let _ = daemon.sessions().serve(theirs, actor, daemon.shutdown().clone()).await;
    });
    ours
}

#[test]
fn sessions_dropped_at_every_moment_leave_nothing() {
    come_and_go(Isolation::Thread);
}

#[cfg(target_os = "linux")]
#[test]
fn sessions_dropped_at_every_moment_leave_nothing_by_process() {
    come_and_go(Isolation::Process);
}

#[test]
fn each_moment_has_a_name_of_its_own() {
    let mut names = MOMENTS.iter().map(|moment| moment.name).collect::<Vec<_>>();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), MOMENTS.len());
}

#[test]
fn the_attacks_on_memory_are_attacks() {
    use trellis_tests::attacks::{memory, table};

    let known: Vec<&str> = table().iter().map(|attack| attack.name).collect();
    for name in memory::NAMES {
        assert!(known.contains(&name), "{name}");
    }
}
