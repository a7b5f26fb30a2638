use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::task::JoinHandle;
use tokio::time::timeout;
use trellis_engine::account::{ActorId, GuestId};

use super::*;
use crate::config::{CatalogModel, Config};
use crate::loader::Fittings;
use crate::models::names;
use crate::on_demand::{Again, Asker, LoadListener, NotLoaded, Opened};

const PATIENCE: Duration = Duration::from_secs(120);

/// Three models of one size, `a`, `b` and `c`, where there is room for one.
async fn loader(folder: &Path, change: impl Fn(&mut Config)) -> Arc<Loader> {
    let draft = || CatalogModel { path: "draft".to_owned(), ..CatalogModel::default() };
    let mut config = Config {
        models: Vec::new(),
        catalog: ["a", "b", "c"].map(|name| (name.to_owned(), draft())).into(),
        device: Device::Cpu,
        model_resident_ms: 0,
        model_wait_ms: u64::try_from(PATIENCE.as_millis()).expect("it is short"),
        ..Config::default()
    };
    change(&mut config);
    let start = |config: &Config| {
        let loader = Loader::start(config.clone(), folder.to_owned(), Fittings::default(), &|_| {});
        Arc::new(loader.expect("it starts"))
    };
    let fit = start(&config).fit("a".to_owned(), None).await.expect("it is there");
    let needed_bytes = fit.needs.fixed_bytes + fit.needs.kv_bytes_min();
    let loader = start(&Config { model_bytes: Some(needed_bytes + needed_bytes / 2), ..config });
    loader.open_catalog();
    loader
}

type Opening = JoinHandle<Result<Opened, NotLoaded>>;

/// A guest of a user asks for a model.
fn open(loader: &Loader, user: u32, name: &str) -> Opening {
    open_by(loader, user, name, LoadListener::default())
}

/// As [`open`], and hears how far it is.
fn open_by(loader: &Loader, user: u32, name: &str, loads: LoadListener) -> Opening {
    static N_GUESTS: AtomicU64 = AtomicU64::new(1);
    let guest = GuestId(N_GUESTS.fetch_add(1, Ordering::Relaxed));
    let asker = Asker { guest, user: ActorId(user), loads };
    tokio::spawn(loader.models.opener().expect("there is one").open(name, asker))
}

async fn opened(opening: Opening) -> Opened {
    timeout(PATIENCE, opening).await.expect("it comes").expect("no panic").expect("it is loaded")
}

async fn n_waiting(loader: &Loader, n: usize) {
    let all = async {
        while loader.queue.lock().waiting.len() != n {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(PATIENCE, all).await.expect("they wait");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_who_asks_for_one_model_after_the_other_keeps_nobody_out() {
    let folder = tempfile::tempdir().expect("a folder");
    let loader = loader(folder.path(), |config| config.model_resident_ms = 500).await;
    drop(opened(open(&loader, 1, "a")).await);
    let alternates = loader.clone();
    let alternating = tokio::spawn(async move {
        for name in ["b", "a"].into_iter().cycle() {
            // Others have it at times.
            let opened = open(&alternates, 1, name).await.expect("no panic").expect("it is loaded");
            tokio::time::sleep(Duration::from_millis(5)).await;
            drop(opened);
        }
    });
    for _ in 0..3 {
        drop(opened(open(&loader, 2, "c")).await);
    }
    alternating.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn who_came_first_has_the_room_first() {
    let folder = tempfile::tempdir().expect("a folder");
    let loader = loader(folder.path(), |_| {}).await;
    let a = opened(open(&loader, 1, "a")).await;
    let b = open(&loader, 2, "b");
    n_waiting(&loader, 1).await;
    let c = open(&loader, 3, "c");
    n_waiting(&loader, 2).await;
    drop(a);
    let b = opened(b).await;
    assert!(!c.is_finished(), "its room is taken");
    assert_eq!(names(&loader.models.now()), ["b"]);
    // What nobody waits for any more is in nobody's way.
    let a = open(&loader, 1, "a");
    n_waiting(&loader, 2).await;
    c.abort();
    n_waiting(&loader, 1).await;
    drop(b);
    drop(opened(a).await);
    n_waiting(&loader, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_comes_late_to_a_load_waits_as_long_as_the_first() {
    const WAIT_MS: u64 = 600;
    let folder = tempfile::tempdir().expect("a folder");
    let loader = loader(folder.path(), |config| config.model_wait_ms = WAIT_MS).await;
    let _held = opened(open(&loader, 1, "a")).await;
    let first = open(&loader, 2, "b");
    n_waiting(&loader, 1).await;
    tokio::time::sleep(Duration::from_millis(WAIT_MS / 2)).await;
    let (begun, second) = (Instant::now(), open(&loader, 3, "b"));
    for opening in [first, second] {
        let late = timeout(PATIENCE, opening).await.expect("it ends").expect("no panic");
        let late = late.expect_err("there is no room");
        assert!(late.again == Again::Later && late.reason.contains("guests use a"), "{late:?}");
    }
    assert!(begun.elapsed() >= Duration::from_millis(WAIT_MS), "{:?}", begun.elapsed());
    n_waiting(&loader, 0).await;
    assert_eq!(loader.news.last_failure(), None, "that is none of the daemon");
}

/// Guests of one user that each go once the next one is there, or after a tenth of a second.
async fn without_a_gap(loader: Arc<Loader>, user: u32, name: &'static str) {
    const SHORT: Duration = Duration::from_millis(100);
    let mut here = opened(open(&loader, user, name)).await;
    loop {
        let mut next = open(&loader, user, name);
        match timeout(SHORT, &mut next).await {
            Ok(there) => here = there.expect("no panic").expect("it is loaded"),
            Err(_) => {
                drop(here);
                here = opened(next).await;
            }
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn guests_that_come_without_a_gap_keep_nobody_out() {
    let folder = tempfile::tempdir().expect("a folder");
    let loader = loader(folder.path(), |_| {}).await;
    let running = [1, 3].map(|user| tokio::spawn(without_a_gap(loader.clone(), user, "a")));
    let a_is_there = async || {
        while names(&loader.models.now()) != ["a"] {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    for _ in 0..2 {
        timeout(PATIENCE, a_is_there()).await.expect("it comes");
        let b = opened(open(&loader, 2, "b")).await;
        // They wait for their turn, and get it.
        n_waiting(&loader, 1).await;
        drop(b);
    }
    timeout(PATIENCE, a_is_there()).await.expect("it comes again");
    assert!(running.iter().all(|running| !running.is_finished()), "nothing was refused");
    running.iter().for_each(JoinHandle::abort);
}

#[tokio::test(flavor = "multi_thread")]
async fn those_behind_hear_at_once_that_gates_close_for_the_first() {
    let folder = tempfile::tempdir().expect("a folder");
    let loader = loader(folder.path(), |config| config.model_wait_ms = 400).await;
    let _held = opened(open(&loader, 1, "a")).await;
    let needs = loader.fit("b".to_owned(), None).await.expect("it is there").needs;
    let in_the_way = loader.models.now();
    let mut first = Ticket::new(&loader, Device::Cpu, Wish::User(ActorId(2)));
    first.wait(needs);
    let changes = loader.changes.subscribe();
    first.press(&in_the_way);
    assert!(!changes.has_changed().expect("the loader lives"), "it has not been the first for a turn");
    first.over().await;
    first.press(&in_the_way);
    assert_eq!(loader.gates.n_closed(Instant::now()), 1);
    assert!(changes.has_changed().expect("the loader lives"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_holds_a_model_for_long_stops_the_starts_of_others_for_a_while_only() {
    let folder = tempfile::tempdir().expect("a folder");
    let loader = loader(folder.path(), |config| config.model_wait_ms = 8_000).await;
    let _held = opened(open(&loader, 1, "a")).await;
    let b = open(&loader, 2, "b");
    let is_closed = || loader.gates.n_closed(Instant::now()) == 1;
    let closed = async {
        while !is_closed() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(PATIENCE, closed).await.expect("it has waited for a turn");
    let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
    let listener = LoadListener::new(move |model, done, total| {
        let _ = tell.send((model.to_owned(), done, total));
    });
    let late = open_by(&loader, 1, "a", listener);
    assert_eq!(timeout(PATIENCE, told.recv()).await.expect("it waits"), Some(("a".to_owned(), 0, 0)));
    assert!(is_closed() && !late.is_finished() && !b.is_finished());
    drop(opened(late).await);
    assert!(!is_closed());
    drop(opened(open(&loader, 3, "a")).await);
    let refused = timeout(PATIENCE, b).await.expect("it ends").expect("no panic").expect_err("a is held");
    assert!(refused.again == Again::Later && refused.reason.contains("guests use a"), "{refused:?}");
    assert!(!is_closed(), "nobody waits");
}

#[tokio::test(flavor = "multi_thread")]
async fn where_gates_rest_for_the_first_they_close_for_the_next_and_the_first_has_the_room_all_the_same() {
    const CLOSED: Duration = Duration::from_secs(100);
    let folder = tempfile::tempdir().expect("a folder");
    let loader = loader(folder.path(), |config| config.model_wait_ms = 20_000).await;
    let a = opened(open(&loader, 1, "a")).await;
    // Gates were closed for a load of the second user on another device.
    let cause = Cause { wish: Wish::User(ActorId(2)), device: Device::Ordinal(1) };
    drop(loader.gates.close(cause, Vec::new(), Instant::now() - CLOSED, CLOSED));
    let b = open(&loader, 2, "b");
    n_waiting(&loader, 1).await;
    let c = open(&loader, 3, "c");
    n_waiting(&loader, 2).await;
    let closed = async {
        while loader.gates.n_closed(Instant::now()) == 0 {
            assert!(!b.is_finished() && !c.is_finished(), "nobody pressed");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(PATIENCE, closed).await.expect("the next one presses");
    drop(a);
    let b = opened(b).await;
    assert!(!c.is_finished(), "its room is taken");
    drop(b);
    drop(opened(c).await);
}
