//! Engines that come and go over one folder.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use trellis_engine::account::{Account, ActorId, Budget, GuestId, Owner, Resource, SessionId};
use trellis_engine::backend::Backend;
use trellis_engine::cpu::{CpuBackend, CpuOptions};
use trellis_engine::model::Model;
use trellis_engine::{
    Answer, Ask, Context, Engine, EngineError, EngineSettings, KvBounds, ModelFittings, ModelHandle,
    Positions, SavedName,
};

use super::{Keepers, Store, StoreLimits};
use crate::bundled;

const PATIENCE: Duration = Duration::from_secs(60);

/// One life of a daemon's engine.
struct Life {
    _engine: Engine,
    model: ModelHandle,
    keepers: Keepers,
    account: Arc<Account>,
}

impl Life {
    fn begin(dir: &std::path::Path, n_host_pages: usize) -> Self {
        let limits = StoreLimits { of_user: 1 << 30, of_all: 1 << 30 };
        let keepers = Keepers::over(Store::new(dir.join("contexts"), limits), vec!["asleep".to_owned()]);
        let source = bundled::source("draft").expect("a bundled model");
        let model = Arc::new(Model::open("draft", &source).expect("it opens"));
        let options = CpuOptions {
            n_pages: 128,
            n_host_pages,
            n_threads: NonZeroUsize::new(1),
            n_rows_max: 8,
            n_tokens_max: 256,
        };
        let mut backend: Box<dyn Backend> = Box::new(CpuBackend::new(&model, &options).expect("it loads"));
        let archive = Some(keepers.of(&model, backend.as_mut()));
        let engine = Engine::start(EngineSettings::default());
        let bounds = KvBounds::of(backend.as_ref());
        let fittings = ModelFittings { operator: None, archive };
        let model = engine.add_with(fittings, model, backend, bounds).expect("the engine works");
        let user = Account::new(trellis_engine::account::USER, Budget::UNLIMITED, None);
        let account = Account::new("guest", Budget::UNLIMITED, Some(user));
        Self { _engine: engine, model, keepers, account }
    }

    fn owner(&self, uid: u32) -> Owner {
        let account = self.account.clone();
        Owner { actor: ActorId(uid), session: SessionId(1), guest: GuestId(1), account }
    }

    async fn context(&self, n_tokens: usize) -> Context {
        let mut context = Context::create(&self.model, self.owner(7)).await.expect("a context");
        let tokens: Vec<u32> = (0..n_tokens as u32).map(|idx| 10 + idx * 37 % 400).collect();
        context.append(&tokens).await.expect("they fit");
        assert_eq!(answer(&mut context, Ask::Prefill).await, Answer::Prefilled);
        context
    }

    async fn open(&self, uid: u32, name: &str) -> Result<Context, EngineError> {
        Context::open(&self.model, self.owner(uid), name).await
    }

    /// Tokens computed, and tokens whose KV came back.
    fn counts(&self) -> (u64, u64) {
        (self.account.used(Resource::Tokens), self.account.n_tokens_restored())
    }
}

async fn answer(context: &mut Context, ask: Ask) -> Answer {
    context.ask(ask).await.expect("asked").answer().await.expect("answered")
}

/// The bits of the whole distribution.
async fn bits(context: &mut Context) -> Vec<u32> {
    match answer(context, Ask::Full).await {
        Answer::Full(row) => row.into_iter().map(f32::to_bits).collect(),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn what_was_saved_is_opened_by_another_engine_and_nothing_is_computed_again() {
    let dir = tempfile::tempdir().expect("a folder");
    let n_tokens = 300;
    let wanted = {
        let life = Life::begin(dir.path(), 64);
        let mut context = life.context(n_tokens).await;
        context.save("plans").await.expect("saved");
        assert!(life.keepers.settle(None, PATIENCE));
        bits(&mut context).await
    };
    let life = Life::begin(dir.path(), 64);
    assert!(matches!(life.open(8, "plans").await, Err(EngineError::NotSaved { .. })), "another user's");
    assert!(matches!(life.open(7, "other").await, Err(EngineError::NotSaved { .. })));
    let mut opened = life.open(7, "plans").await.expect("it is on disk");
    assert_eq!(opened.tokens().len(), n_tokens);
    // All but the last, which is computed when it is asked about.
    assert_eq!(life.counts(), (0, n_tokens as u64 - 1));
    assert_eq!(bits(&mut opened).await, wanted);
    assert_eq!(life.counts(), (1, n_tokens as u64 - 1));
    let mut again = life.open(7, "plans").await.expect("it is in memory");
    assert_eq!(bits(&mut again).await, wanted);
    assert_eq!(life.counts(), (2, n_tokens as u64 - 1), "it came from disk once");
}

#[tokio::test]
async fn without_pages_for_it_the_rest_is_computed_again_to_the_same_bits() {
    let dir = tempfile::tempdir().expect("a folder");
    let wanted = {
        let life = Life::begin(dir.path(), 0);
        let mut context = life.context(100).await;
        context.save("plans").await.expect("saved");
        assert!(life.keepers.settle(None, PATIENCE));
        bits(&mut context).await
    };
    for (n_host_pages, n_restored) in [(0, 0), (3, 48)] {
        let life = Life::begin(dir.path(), n_host_pages);
        let mut opened = life.open(7, "plans").await.expect("it is on disk");
        assert_eq!(bits(&mut opened).await, wanted, "{n_host_pages} pages");
        assert_eq!(life.counts(), (100 - n_restored, n_restored));
    }
}

#[tokio::test]
async fn holes_and_steering_come_back_with_the_tokens() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut wanted = Vec::new();
    {
        let life = Life::begin(dir.path(), 64);
        let mut holed = life.context(120).await;
        holed.evict(40, 70, Positions::CloseUp).await.expect("evicted");
        holed.evict(10, 12, Positions::Keep).await.expect("evicted");
        holed.append(&[5, 6, 7]).await.expect("appended");
        holed.save("holed").await.expect("saved");
        let mut steered = life.context(50).await;
        let vector = vec![0.5; life.model.limits().hidden_size];
        steered.steer(vec![(1, vector)], 20).await.expect("steered");
        assert_eq!(answer(&mut steered, Ask::Prefill).await, Answer::Prefilled);
        steered.save("steered").await.expect("saved");
        assert!(life.keepers.settle(None, PATIENCE));
        for context in [&mut holed, &mut steered] {
            wanted.push((context.tokens().to_vec(), bits(context).await));
        }
    }
    let life = Life::begin(dir.path(), 64);
    for (name, wanted) in ["holed", "steered"].into_iter().zip(wanted) {
        let mut opened = life.open(7, name).await.expect("it is on disk");
        assert_eq!((opened.tokens().to_vec(), bits(&mut opened).await), wanted, "{name}");
    }
    assert_eq!(
        life.counts().1,
        49,
        "of a context with holes what comes before the first, in whole pages: none here"
    );
}

#[tokio::test]
async fn what_is_forgotten_stays_so() {
    let dir = tempfile::tempdir().expect("a folder");
    {
        let life = Life::begin(dir.path(), 64);
        let mut context = life.context(20).await;
        for name in ["a", "b"] {
            context.save(name).await.expect("saved");
        }
        life.model.forget(&life.owner(7), "a").await.expect("it was there");
        assert!(matches!(life.open(7, "a").await, Err(EngineError::NotSaved { .. })));
        assert!(life.keepers.settle(Some("draft"), PATIENCE));
    }
    let life = Life::begin(dir.path(), 64);
    assert!(matches!(life.open(7, "a").await, Err(EngineError::NotSaved { .. })));
    // On disk alone.
    assert!(matches!(life.model.forget(&life.owner(8), "b").await, Err(EngineError::NotSaved { .. })));
    life.model.forget(&life.owner(7), "b").await.expect("it was there");
    assert!(matches!(life.model.forget(&life.owner(7), "b").await, Err(EngineError::NotSaved { .. })));
    assert!(matches!(life.open(7, "b").await, Err(EngineError::NotSaved { .. })));
}

#[tokio::test]
async fn many_that_open_one_at_once_all_have_it_and_who_stops_waiting_leaves_nothing() {
    let dir = tempfile::tempdir().expect("a folder");
    {
        let life = Life::begin(dir.path(), 64);
        let mut context = life.context(200).await;
        context.save("plans").await.expect("saved");
        assert!(life.keepers.settle(None, PATIENCE));
    }
    let life = Life::begin(dir.path(), 64);
    let given_up = tokio::time::timeout(Duration::ZERO, life.open(7, "plans")).await;
    drop(given_up);
    let opened = futures_util::future::join_all((0..8).map(|_| life.open(7, "plans"))).await;
    let opened: Vec<Context> = opened.into_iter().map(|opened| opened.expect("it is on disk")).collect();
    assert!(opened.iter().all(|context| context.tokens().len() == 200));
    drop(opened);
    let stats = life.model.stats().await.expect("the engine works");
    assert_eq!((stats.n_contexts, stats.n_saved), (0, 1));
}

#[tokio::test]
async fn what_is_forgotten_while_it_comes_back_holds_up_nobody() {
    const N_NAMES: usize = 32;
    let dir = tempfile::tempdir().expect("a folder");
    let names: Vec<String> = (0..N_NAMES).map(|idx| format!("plans {idx}")).collect();
    {
        let life = Life::begin(dir.path(), 64);
        let mut context = life.context(400).await;
        for name in &names {
            context.save(name).await.expect("saved");
        }
        assert!(life.keepers.settle(None, PATIENCE));
    }
    let life = Life::begin(dir.path(), 64);
    let mut busy = life.context(10).await;
    for name in &names {
        // A step is under way, so that what comes back waits for it.
        let owner = life.owner(7);
        let (_, _, forgotten) =
            tokio::join!(bits(&mut busy), life.open(7, name), life.model.forget(&owner, name));
        forgotten.expect("it was on disk");
        let row = tokio::time::timeout(PATIENCE, bits(&mut busy)).await;
        row.unwrap_or_else(|_| panic!("{name}: the model makes no step any more"));
        assert!(matches!(life.open(7, name).await, Err(EngineError::NotSaved { .. })), "{name}");
    }
}

#[tokio::test]
async fn a_context_with_too_many_evictions_behind_it_is_not_kept_and_nor_is_what_it_replaces() {
    let dir = tempfile::tempdir().expect("a folder");
    {
        let life = Life::begin(dir.path(), 64);
        let mut context = life.context(20).await;
        context.save("plans").await.expect("saved");
        assert!(life.keepers.settle(None, PATIENCE));
        for token in 0..1100 {
            context.append(&[10 + token % 400]).await.expect("there is room");
            context.evict(1, 2, Positions::CloseUp).await.expect("evicted");
        }
        context.save("plans").await.expect("saved");
        assert!(life.keepers.settle(None, PATIENCE));
        assert_eq!(life.open(7, "plans").await.expect("it is in memory").tokens().len(), 20);
    }
    let life = Life::begin(dir.path(), 64);
    assert!(matches!(life.open(7, "plans").await, Err(EngineError::NotSaved { .. })));
}

#[tokio::test]
async fn what_was_saved_of_a_model_that_is_not_loaded_is_forgotten_as_well() {
    let dir = tempfile::tempdir().expect("a folder");
    let life = Life::begin(dir.path(), 64);
    life.context(20).await.save("plans").await.expect("saved");
    assert!(life.keepers.settle(None, PATIENCE));
    let limits = StoreLimits { of_user: 1 << 30, of_all: 1 << 30 };
    let store = Store::new(dir.path().join("contexts"), limits);
    let of = |model, uid| store.path(model, &SavedName { actor: ActorId(uid), name: "plans".to_owned() });
    std::fs::create_dir_all(of("asleep", 8).parent().expect("a folder")).expect("made");
    for (model, uid) in [("asleep", 7), ("asleep", 8), ("other", 7)] {
        std::fs::write(of(model, uid), "kept").expect("written");
    }
    life.model.forget(&life.owner(7), "plans").await.expect("it is forgotten");
    assert!(!of("draft", 7).exists() && !of("asleep", 7).exists());
    assert!(of("asleep", 8).exists(), "another user's");
    assert!(of("other", 7).exists(), "of no model that a guest may open");
}

#[tokio::test]
async fn what_is_saved_is_forgotten_where_no_engine_is() {
    let dir = tempfile::tempdir().expect("a folder");
    let keepers = {
        let life = Life::begin(dir.path(), 64);
        life.context(20).await.save("plans").await.expect("saved");
        assert!(life.keepers.settle(Some("draft"), PATIENCE));
        life.keepers
    };
    let name = |uid| SavedName { actor: ActorId(uid), name: "plans".to_owned() };
    assert!(!keepers.forget(name(8)).await, "it is another user's");
    assert!(keepers.forget(name(7)).await);
    assert!(!keepers.forget(name(7)).await, "it is gone");
    let life = Life::begin(dir.path(), 64);
    assert!(matches!(life.open(7, "plans").await, Err(EngineError::NotSaved { .. })));
}
