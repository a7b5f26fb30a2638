use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::*;

const PATIENCE: Duration = Duration::from_secs(120);

/// A load whose first tensor takes until it is let go.
struct Stalled {
    loading: JoinHandle<Result<ModelHandle, DaemonError>>,
    begun: UnboundedReceiver<()>,
    go: mpsc::Sender<()>,
    n_tensors: Arc<AtomicUsize>,
}

impl Stalled {
    fn begin(loader: &Arc<Loader>, choice: &str) -> Self {
        let (says, begun) = unbounded_channel();
        let (go, wait) = mpsc::channel();
        let (wait, n_tensors) = (Mutex::new(wait), Arc::new(AtomicUsize::new(0)));
        let (loader, choice, n_heard) = (loader.clone(), choice.to_owned(), n_tensors.clone());
        let hear = move |_, _| {
            n_heard.fetch_add(1, Ordering::Relaxed);
            let _ = says.send(());
            // The others do not wait.
            let _ = wait.lock().expect("no panic").recv();
        };
        let loading = tokio::spawn(async move { loader.load(choice, None, hear).await });
        Self { loading, begun, go, n_tensors }
    }

    async fn begun(&mut self) {
        timeout(PATIENCE, self.begun.recv()).await.expect("it reads").expect("it is there");
    }

    /// Its caller stops waiting, and then nothing holds it up.
    async fn give_up(self) {
        self.loading.abort();
        assert!(self.loading.await.expect_err("it was aborted").is_cancelled());
        drop(self.go);
    }

    /// Nothing holds it up any more.
    fn go_on(self) -> JoinHandle<Result<ModelHandle, DaemonError>> {
        drop(self.go);
        self.loading
    }
}

fn loader(folder: &Path) -> Arc<Loader> {
    let config = Config {
        models: vec!["tiny".to_owned()],
        device: Device::Cpu,
        kv_bytes: Some(48 << 20),
        ..Config::default()
    };
    Arc::new(Loader::start(config, folder.to_owned(), Fittings::default(), &|_| {}).expect("it loads"))
}

/// A copy of `draft` under another name.
fn other(below: &Path) -> String {
    let folder = below.join("other");
    std::fs::create_dir(&folder).expect("made");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/models/draft");
    for file in std::fs::read_dir(source).expect("it is there") {
        let file = file.expect("it can be read").path();
        std::fs::copy(&file, folder.join(file.file_name().expect("a name"))).expect("copied");
    }
    folder.to_str().expect("UTF-8").to_owned()
}

async fn load(loader: &Arc<Loader>, choice: &str) -> ModelHandle {
    let loading = loader.load(choice.to_owned(), None, |_, _| {});
    timeout(PATIENCE, loading).await.expect("nothing holds it up").expect("it loads")
}

async fn unload(loader: &Arc<Loader>, name: &str) {
    let unloading = loader.unload(name, Duration::ZERO);
    timeout(PATIENCE, unloading).await.expect("nothing holds it up").expect("it goes");
}

async fn n_pages(model: &ModelHandle) -> usize {
    model.stats().await.expect("it lives").n_pages
}

#[tokio::test]
async fn a_load_that_reads_holds_up_nobody_and_one_that_is_given_up_reads_no_more() {
    let folder = tempfile::tempdir().expect("a folder");
    let (loader, other) = (loader(folder.path()), other(folder.path()));
    let tiny = loader.models().now().remove(0);
    let before = n_pages(&tiny).await;
    let mut stalled = Stalled::begin(&loader, "draft");
    stalled.begun().await;
    let beside = n_pages(&tiny).await;
    assert!(beside < before, "its place is kept");
    let other = load(&loader, &other).await;
    let kv_bytes = |model: &ModelHandle, n_pages: usize| n_pages * model.limits().page_bytes;
    let of_both = kv_bytes(&tiny, n_pages(&tiny).await) + kv_bytes(&other, n_pages(&other).await);
    let of_draft = loader.devices.lock().await[0].coming[0].needs().kv_bytes_min() as usize;
    assert!(of_draft > 0 && of_both + of_draft <= 48 << 20, "{of_both} and {of_draft} bytes");
    unload(&loader, "other").await;

    // A second load of the same model gets it once the first is given up.
    let second = Stalled::begin(&loader, "draft");
    while loader.changes.receiver_count() == 0 {
        tokio::task::yield_now().await;
    }
    let n_tensors = stalled.n_tensors.clone();
    stalled.give_up().await;
    let draft = timeout(PATIENCE, second.go_on()).await.expect("it comes").expect("no panic");
    assert_eq!(draft.expect("it loads").model().name, "draft");
    assert_eq!(n_tensors.load(Ordering::Relaxed), 1, "no more was read");
    unload(&loader, "draft").await;
    assert_eq!(n_pages(&tiny).await, before, "all is back");
}

#[tokio::test]
async fn a_load_given_up_alone_gives_all_back() {
    let folder = tempfile::tempdir().expect("a folder");
    let loader = loader(folder.path());
    let tiny = loader.models().now().remove(0);
    let before = n_pages(&tiny).await;
    let mut stalled = Stalled::begin(&loader, "draft");
    stalled.begun().await;
    let n_tensors = stalled.n_tensors.clone();
    stalled.give_up().await;
    let devices = timeout(PATIENCE, loader.devices_at_rest()).await.expect("it comes to rest");
    assert_eq!((devices[0].tenants.len(), n_tensors.load(Ordering::Relaxed)), (1, 1));
    drop(devices);
    assert_eq!(n_pages(&tiny).await, before);
    assert_eq!(loader.models().now().len(), 1);
}

#[tokio::test]
async fn a_load_for_which_others_leave_no_room_waits_until_they_are_there() {
    let folder = tempfile::tempdir().expect("a folder");
    let (loader, other) = (loader(folder.path()), other(folder.path()));
    unload(&loader, "tiny").await;
    // The first on a device comes with all of its KV memory.
    let mut first = Stalled::begin(&loader, "draft");
    first.begun().await;
    let second = Stalled::begin(&loader, &other);
    while loader.changes.receiver_count() == 0 {
        tokio::task::yield_now().await;
    }
    assert_eq!(second.n_tensors.load(Ordering::Relaxed), 0);
    let first =
        timeout(PATIENCE, first.go_on()).await.expect("it comes").expect("no panic").expect("it loads");
    let second =
        timeout(PATIENCE, second.go_on()).await.expect("it comes").expect("no panic").expect("it loads");
    let page_bytes = |model: &ModelHandle| model.limits().page_bytes;
    let kv_bytes = n_pages(&first).await * page_bytes(&first) + n_pages(&second).await * page_bytes(&second);
    assert!(n_pages(&second).await > 0 && kv_bytes <= 48 << 20, "{kv_bytes} bytes");
}

#[tokio::test]
async fn a_daemon_that_ends_reads_no_more() {
    let folder = tempfile::tempdir().expect("a folder");
    let loader = loader(folder.path());
    let mut stalled = Stalled::begin(&loader, "draft");
    stalled.begun().await;
    loader.stop();
    let n_tensors = stalled.n_tensors.clone();
    let ended = timeout(PATIENCE, stalled.go_on()).await.expect("it ends").expect("no panic");
    assert!(matches!(ended, Err(DaemonError::GivenUp)), "{ended:?}");
    assert_eq!(n_tensors.load(Ordering::Relaxed), 1);
}
