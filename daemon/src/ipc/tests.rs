use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use trellis_client::lock;
use trellis_client::{Client, Error, ErrorCode, Event, Lost, Program, StartOptions};

use super::listener::Place;
use super::{BindError, HandOver, Listener, Phase, owner_of, run};
use crate::guest::GuestLimits;
use crate::session::tests::fake::Fake;
use crate::session::{Actor, SessionLimits, Sessions};

struct Daemon {
    fake: Arc<Fake>,
    shutdown: CancellationToken,
    task: JoinHandle<()>,
}

fn daemon(path: &Path) -> Daemon {
    daemon_with(path, SessionLimits::default())
}

fn daemon_with(path: &Path, limits: SessionLimits) -> Daemon {
    let listener = Listener::bind(path, 0o700).unwrap();
    let fake = Arc::new(Fake::default());
    let shutdown = CancellationToken::new();
    let sessions = Sessions::new(fake.clone(), limits, GuestLimits::default());
    let task = tokio::spawn(run(listener, sessions, shutdown.clone(), Arc::default()));
    Daemon { fake, shutdown, task }
}

fn directory() -> TempDir {
    tempfile::tempdir().unwrap()
}

#[tokio::test]
async fn a_socket_that_is_lent_stays_with_those_who_wait_there() {
    let directory = directory();
    let path = directory.path().join("trellis.sock");
    let lender = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let serve = |listener| {
        let sessions =
            Sessions::new(Arc::new(Fake::default()), SessionLimits::default(), GuestLimits::default());
        let shutdown = CancellationToken::new();
        (tokio::spawn(run(listener, sessions, shutdown.clone(), Arc::default())), shutdown)
    };
    for _ in 0..2 {
        // Nobody listens yet: it waits.
        let early = tokio::spawn({
            let path = path.clone();
            async move { Client::connect_to(&path).await }
        });
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!early.is_finished());
        let listener = Listener::adopt(lender.try_clone().unwrap(), 0o755).unwrap();
        assert_eq!(listener.path(), path);
        let again = Listener::adopt(lender.try_clone().unwrap(), 0o755);
        assert!(matches!(again, Err(BindError::AlreadyRunning { .. })), "{again:?}");
        let (daemon, shutdown) = serve(listener);
        early.await.unwrap().unwrap();
        shutdown.cancel();
        daemon.await.unwrap();
        assert!(path.exists(), "it is its lender's");
    }
    drop(lender);
    Listener::bind(&path, 0o700).unwrap();
    let (unnamed, _) = std::os::unix::net::UnixStream::pair().unwrap();
    let unnamed = std::os::unix::net::UnixListener::from(std::os::fd::OwnedFd::from(unnamed));
    assert!(matches!(Listener::adopt(unnamed, 0o700), Err(BindError::NoPath { .. })));
}

#[tokio::test]
async fn who_is_not_served_is_told_so() {
    let directory = directory();
    let path = directory.path().join("trellis.sock");
    let own = Actor::this_process().uid;
    for (users, is_served) in [([own, 0], true), ([own + 1, own + 2], false)] {
        let mut listener = Listener::bind(&path, 0o700).unwrap();
        listener.serve_only(users);
        let sessions =
            Sessions::new(Arc::new(Fake::default()), SessionLimits::default(), GuestLimits::default());
        let shutdown = CancellationToken::new();
        let task = tokio::spawn(run(listener, sessions, shutdown.clone(), Arc::default()));
        let asked = async { Client::connect_to(&path).await?.ps().await }.await;
        assert_eq!(asked.is_ok(), is_served, "{asked:?}");
        if let Err(refused) = asked {
            assert_eq!(refused.code(), Some(&ErrorCode::PermissionDenied), "{refused:?}");
            let said = refused.to_string();
            assert!(
                said.contains(&format!("user {own} is not served")) && said.contains("`isolation`"),
                "{said}"
            );
        }
        shutdown.cancel();
        task.await.unwrap();
    }
}

#[tokio::test]
async fn who_waits_at_a_lent_socket_sees_that_the_daemon_before_goes_on() {
    let directory = directory();
    let path = directory.path().join("trellis.sock");
    let lender = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let listener = Listener::adopt(lender.try_clone().unwrap(), 0o755).unwrap();
    listener.start_note().unwrap().say_ready().unwrap();
    let limits = SessionLimits { drain_ms: 600_000, ..SessionLimits::default() };
    let sessions = Sessions::new(Arc::new(Fake::default()), limits, GuestLimits::default());
    let shutdown = CancellationToken::new();
    let daemon = tokio::spawn(run(listener, sessions.clone(), shutdown.clone(), Arc::default()));
    let at_work = sessions.at_work();
    let draining = tokio::spawn(async move { sessions.drain().await });
    let phase = || owner_of(&path).map(|owner| owner.phase);
    in_time("it says that it ends", || phase() == Some(Phase::Ending)).await;
    let written = || fs::metadata(lock::path(&path)).unwrap().modified().unwrap();
    for _ in 0..2 {
        let before = written();
        in_time("it says so again", || written() != before).await;
        assert_eq!(phase(), Some(Phase::Ending));
    }
    drop(at_work);
    draining.await.unwrap();
    shutdown.cancel();
    daemon.await.unwrap();
    assert_eq!(phase(), None, "it is gone");
}

async fn in_time(what: &str, holds: impl Fn() -> bool) {
    let begun = std::time::Instant::now();
    while !holds() {
        assert!(begun.elapsed() < Duration::from_secs(120), "{what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn a_socket_that_is_handed_over_is_kept_and_nobody_is_accepted_meanwhile() {
    let directory = directory();
    let path = directory.path().join("trellis.sock");
    let listener = Listener::bind(&path, 0o700).unwrap();
    let sessions = Sessions::new(Arc::new(Fake::default()), SessionLimits::default(), GuestLimits::default());
    let (shutdown, hand_over) = (CancellationToken::new(), Arc::<HandOver>::default());
    let daemon = tokio::spawn(run(listener, sessions, shutdown.clone(), hand_over.clone()));
    let client = Client::connect_to(&path).await.unwrap();
    hand_over.begin();
    // Those who are there may still ask; others wait.
    client.ps().await.unwrap();
    let mut late = tokio::spawn({
        let path = path.clone();
        async move { Client::connect_to(&path).await }
    });
    let waits = tokio::time::timeout(Duration::from_millis(100), &mut late).await;
    assert!(waits.is_err(), "{waits:?}");
    assert!(hand_over.take().is_none(), "it is in use");
    shutdown.cancel();
    daemon.await.unwrap();
    let kept = hand_over.take().expect("it was laid down");
    assert!(path.exists() && !kept.is_lent());
    let other = Listener::bind(&path, 0o700);
    assert!(matches!(other, Err(BindError::AlreadyRunning { .. })), "{other:?}");
    let sessions = Sessions::new(Arc::new(Fake::default()), SessionLimits::default(), GuestLimits::default());
    let shutdown = CancellationToken::new();
    let next = tokio::spawn(run(kept, sessions, shutdown.clone(), Arc::default()));
    late.await.unwrap().unwrap().ps().await.unwrap();
    shutdown.cancel();
    next.await.unwrap();
    assert!(!path.exists());
}

#[tokio::test]
async fn serves_and_goes_down_clean() {
    let directory = directory();
    let path = directory.path().join("trellis/trellis.sock");
    let daemon = daemon(&path);
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o660, 0o700));

    let client = Client::connect_to(&path).await.unwrap();
    let options = StartOptions { arguments: vec!["3".into()], ..StartOptions::default() };
    let guest = client.start(Program::named("count"), options).await.unwrap();
    assert_eq!(guest.text().await.unwrap(), "0 1 2 ");

    let mut forever = client.start(Program::named("forever"), StartOptions::default()).await.unwrap();
    assert!(matches!(forever.next().await, Some(Ok(Event::Started { .. }))));
    let uid = fs::metadata(&path).unwrap().uid();
    assert_eq!(client.ps().await.unwrap()[0].uid, uid, "the kernel names the peer");
    assert_eq!(Actor::this_process().uid, uid);

    daemon.shutdown.cancel();
    assert_eq!(forever.wait().await.unwrap_err().code(), Some(&ErrorCode::ShuttingDown));
    daemon.task.await.unwrap();
    assert_eq!(daemon.fake.n_alive(), 0);
    assert!(!path.exists());
    let error = client.ps().await.unwrap_err();
    assert!(matches!(error, Error::ConnectionLost(Lost::Fault(_) | Lost::Closed)), "{error:?}");
    let error = Client::connect_to(&path).await.unwrap_err();
    assert!(matches!(&error, Error::NotRunning { tried } if tried[0].path == path), "{error:?}");
}

#[tokio::test]
async fn a_second_daemon_is_refused() {
    let directory = directory();
    let path = directory.path().join("trellis.sock");
    let first = daemon(&path);
    let error = Listener::bind(&path, 0o700).unwrap_err();
    assert!(matches!(error, BindError::AlreadyRunning { pid: Some(pid), .. } if pid == std::process::id()));
    Client::connect_to(&path).await.unwrap().ps().await.unwrap();
    first.shutdown.cancel();
    first.task.await.unwrap();
    Listener::bind(&path, 0o700).unwrap();
}

#[tokio::test]
async fn a_stale_socket_is_replaced() {
    let directory = directory();
    let path = directory.path().join("trellis.sock");
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let error = Client::connect_to(&path).await.unwrap_err();
    assert!(error.to_string().contains("nobody listens"), "{error}");
    let daemon = daemon(&path);
    Client::connect_to(&path).await.unwrap().ps().await.unwrap();
    daemon.shutdown.cancel();
    daemon.task.await.unwrap();
}

/// Connects once the daemon has noticed what became of its socket's file.
async fn connect_in_time(path: &Path) -> Client {
    let begun = std::time::Instant::now();
    loop {
        match Client::connect_to(path).await {
            Ok(client) => return client,
            Err(error) => assert!(begun.elapsed() < Duration::from_secs(120), "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn a_socket_that_was_removed_comes_back() {
    let directory = directory();
    let path = directory.path().join("trellis/trellis.sock");
    let daemon = daemon(&path);
    let client = Client::connect_to(&path).await.unwrap();
    let mut forever = client.start(Program::named("forever"), StartOptions::default()).await.unwrap();
    assert!(matches!(forever.next().await, Some(Ok(Event::Started { .. }))));

    fs::remove_file(&path).unwrap();
    let error = Listener::bind(&path, 0o700).unwrap_err();
    let pid = std::process::id();
    assert!(matches!(error, BindError::AlreadyRunning { pid: Some(found), .. } if found == pid));
    let said = error.to_string();
    assert!(said.contains(&format!("process {pid}")), "{said}");
    // The daemon may have made another by now.
    assert!(path.exists() || said.contains("its socket's file was removed"), "{said}");
    assert_eq!(connect_in_time(&path).await.ps().await.unwrap().len(), 1, "the same daemon");

    // With its folder and the lock in it.
    fs::remove_dir_all(path.parent().unwrap()).unwrap();
    assert_eq!(connect_in_time(&path).await.ps().await.unwrap().len(), 1);
    assert!(matches!(Listener::bind(&path, 0o700), Err(BindError::AlreadyRunning { .. })));
    client.ps().await.unwrap();
    daemon.shutdown.cancel();
    daemon.task.await.unwrap();
    assert!(!path.exists());
}

#[tokio::test]
async fn a_socket_that_is_another_daemons_is_left_alone() {
    let directory = directory();
    let path = directory.path().join("trellis/trellis.sock");
    let mut first = Listener::bind(&path, 0o700).unwrap();
    assert_eq!(first.restore().unwrap(), Place::Kept);
    fs::remove_dir_all(path.parent().unwrap()).unwrap();
    let second = daemon(&path);
    let error = first.restore().unwrap_err();
    assert!(matches!(error, BindError::Displaced { .. }), "{error}");
    // As while the other one is about to listen.
    let elsewhere = directory.path().join("elsewhere");
    fs::rename(&path, &elsewhere).unwrap();
    assert!(matches!(first.restore(), Err(BindError::AlreadyRunning { .. })));
    fs::rename(&elsewhere, &path).unwrap();
    drop(first.close());
    Client::connect_to(&path).await.unwrap().ps().await.unwrap();
    second.shutdown.cancel();
    second.task.await.unwrap();
    assert!(!path.exists());
}

#[tokio::test]
async fn unsafe_places_are_refused() {
    let directory = directory();
    let path = directory.path().join("trellis.sock");
    fs::write(&path, "precious").unwrap();
    assert!(matches!(Listener::bind(&path, 0o700), Err(BindError::NotASocket { .. })));
    assert_eq!(fs::read(&path).unwrap(), b"precious");
    fs::remove_file(&path).unwrap();

    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let error = Listener::bind(&path, 0o700).unwrap_err();
    assert!(matches!(error, BindError::OpenDirectory { mode: 0o777, .. }), "{error:?}");
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o700)).unwrap();

    let long = directory.path().join("x".repeat(120));
    let error = Listener::bind(&long, 0o700).unwrap_err();
    assert!(matches!(error, BindError::PathTooLong { limit: 107, .. }), "{error:?}");
    assert!(matches!(Listener::bind(Path::new("trellis.sock"), 0o700), Err(BindError::NoPath { .. })));
    let nowhere = directory.path().join("a/b/trellis.sock");
    assert!(matches!(Listener::bind(&nowhere, 0o700), Err(BindError::Io { action: "create", .. })));
}

#[tokio::test]
async fn a_client_that_dies_takes_its_guests_along() {
    let directory = directory();
    let path = directory.path().join("trellis.sock");
    let daemon = daemon(&path);
    let client = Client::connect_to(&path).await.unwrap();
    let mut guest = client.start(Program::named("flood"), StartOptions::default()).await.unwrap();
    assert!(matches!(guest.next().await, Some(Ok(Event::Started { .. }))));
    assert_eq!(daemon.fake.n_alive(), 1);
    drop((client, guest));
    while daemon.fake.n_alive() > 0 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    daemon.shutdown.cancel();
    daemon.task.await.unwrap();
}

#[tokio::test]
async fn who_connects_all_the_time_waits_and_is_told() {
    let directory = directory();
    let path = directory.path().join("trellis.sock");
    let daemon = daemon_with(&path, SessionLimits { n_connections_per_s: 8, ..SessionLimits::default() });
    let ask = async || Client::connect_to(&path).await?.ps().await;
    let (served, refused): (Vec<_>, Vec<_>) =
        join_all((0..30).map(|_| ask())).await.into_iter().partition(Result::is_ok);
    // Nine at once, and eight that wait; more if this thread waits for a processor meanwhile.
    assert!(served.len() >= 17, "{}", served.len());
    for error in refused.iter().filter_map(|refused| refused.as_ref().err()) {
        assert_eq!(error.code(), Some(&ErrorCode::Overloaded), "{error:?}");
        assert!(error.to_string().contains("more than the limit of 8 connections a second"), "{error}");
    }
    assert!(!refused.is_empty(), "30 are more than three seconds of them");
    tokio::time::sleep(Duration::from_secs(1)).await;
    Client::connect_to(&path).await.unwrap().ps().await.unwrap();
    daemon.shutdown.cancel();
    daemon.task.await.unwrap();
}

#[tokio::test]
async fn who_has_all_its_connections_is_told() {
    let directory = directory();
    let path = directory.path().join("trellis.sock");
    let daemon = daemon_with(&path, SessionLimits { n_connections: 1, ..SessionLimits::default() });
    let client = Client::connect_to(&path).await.unwrap();
    client.ps().await.unwrap();
    for _ in 0..20 {
        let refused = async { Client::connect_to(&path).await?.ps().await }.await.unwrap_err();
        assert_eq!(refused.code(), Some(&ErrorCode::LimitExceeded), "{refused:?}");
    }
    client.ps().await.unwrap();
    daemon.shutdown.cancel();
    daemon.task.await.unwrap();
}
