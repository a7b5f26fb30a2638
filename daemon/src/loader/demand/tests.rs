use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use trellis_engine::account::GuestId;

use super::*;
use crate::config::{CatalogModel, Config, Device};
use crate::loader::Fittings;
use crate::on_demand::LoadListener;

/// How often a model goes while others ask for it.
const N_EVICTIONS: usize = 8;

fn loader(folder: &Path) -> Arc<Loader> {
    let draft = CatalogModel { path: "draft".to_owned(), ..CatalogModel::default() };
    let config = Config {
        models: Vec::new(),
        catalog: [("draft".to_owned(), draft)].into(),
        device: Device::Cpu,
        ..Config::default()
    };
    let loader = Loader::start(config, folder.to_owned(), Fittings::default(), &|_| {});
    let loader = Arc::new(loader.expect("it starts"));
    loader.open_catalog();
    loader
}

fn asker(loads: LoadListener) -> Asker {
    Asker { guest: GuestId(1), user: ActorId(1), loads }
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_asks_while_a_model_goes_holds_it_or_has_it_loaded_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let loader = loader(folder.path());
    let (is_over, n_evicted) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let (evicts, over, counted) = (loader.clone(), is_over.clone(), n_evicted.clone());
    let evicting = tokio::spawn(async move {
        while !over.load(Ordering::Relaxed) {
            for model in evicts.models().now() {
                if let Some(gone) = evicts.evict(&model, "a test") {
                    gone.await.expect("it goes");
                    counted.fetch_add(1, Ordering::Relaxed);
                }
            }
            tokio::task::yield_now().await;
        }
    });
    let asking = (0..4).map(|_| {
        let (loader, n_evicted) = (loader.clone(), n_evicted.clone());
        tokio::spawn(async move {
            // As often as it takes for the model to go in between.
            while n_evicted.load(Ordering::Relaxed) < N_EVICTIONS {
                let opener = loader.models().opener().expect("there is one").clone();
                let opened = opener.open("draft", asker(LoadListener::default())).await;
                let Opened { model, claim } = opened.expect("it is loaded");
                for _ in 0..3 {
                    assert!(!model.is_closed() && !model.is_unloaded(), "it is held");
                    tokio::task::yield_now().await;
                }
                drop(claim);
                tokio::task::yield_now().await;
            }
        })
    });
    for asked in asking.collect::<Vec<_>>() {
        asked.await.expect("no panic");
    }
    is_over.store(true, Ordering::Relaxed);
    evicting.await.expect("no panic");
    assert_eq!(loader.progress_of("draft"), None, "nobody waits");
}

#[tokio::test(flavor = "multi_thread")]
async fn all_that_wait_hear_how_far_it_is() {
    let folder = tempfile::tempdir().expect("a folder");
    let loader = loader(folder.path());
    let opener = loader.models().opener().expect("there is one").clone();
    let heard = Arc::new(Mutex::new(Vec::new()));
    let hears = |n: usize| {
        let heard = heard.clone();
        LoadListener::new(move |model, done, total| {
            heard.lock().expect("no panic").push((n, model.to_owned(), done, total));
        })
    };
    let (one, other) =
        tokio::join!(opener.open("draft", asker(hears(1))), opener.open("draft", asker(hears(2))));
    let (one, other) = (one.expect("loaded"), other.expect("loaded"));
    assert!(one.model.is_same(&other.model), "one load");
    let heard = heard.lock().expect("no panic");
    for n in [1, 2] {
        let states: Vec<_> = heard.iter().filter(|(by, ..)| *by == n).collect();
        assert!(states.iter().all(|(_, model, done, total)| model == "draft" && done <= total));
        assert!(!states.is_empty() && states.is_sorted_by_key(|(_, _, done, _)| *done), "{states:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_load_of_a_model_is_at_its_files_however_many_are_given_up() {
    let folder = tempfile::tempdir().expect("a folder");
    let loader = loader(folder.path());
    let opener = loader.models().opener().expect("there is one").clone();
    // As one that is given up and reads from where nothing answers.
    let turn = loader.demand.turn("draft").lock_owned().await;
    for _ in 0..8 {
        let opening = tokio::spawn(opener.open("draft", asker(LoadListener::default())));
        while loader.progress_of("draft").is_none() {
            tokio::task::yield_now().await;
        }
        opening.abort();
        assert!(opening.await.expect_err("it was aborted").is_cancelled());
    }
    let waiting = tokio::spawn(opener.open("draft", asker(LoadListener::default())));
    while loader.progress_of("draft").is_none() {
        tokio::task::yield_now().await;
    }
    assert!(loader.news().loading().is_empty(), "none has begun");
    drop(turn);
    waiting.await.expect("no panic").expect("it is loaded");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_ends_loads_no_more_and_lends_what_it_has() {
    let folder = tempfile::tempdir().expect("a folder");
    let loader = loader(folder.path());
    let opener = loader.models().opener().expect("there is one").clone();
    drop(opener.open("draft", asker(LoadListener::default())).await.expect("it is loaded"));
    loader.load_no_more();
    drop(opener.open("draft", asker(LoadListener::default())).await.expect("it is there"));
    loader.unload("draft", Duration::ZERO).await.expect("it goes");
    let refused = opener.open("draft", asker(LoadListener::default())).await.expect_err("it is gone");
    assert!(refused.again == Again::NextDaemon && refused.reason.contains("shutting down"), "{refused:?}");
}
