use std::num::NonZeroUsize;

use trellis_engine::account::{Budget, GuestId, Owner, SessionId, USER};
use trellis_engine::cpu::{CpuBackend, CpuOptions};
use trellis_engine::{Context, Engine, EngineSettings, KvBounds, ModelFittings};

use super::*;

/// An archive that keeps what it is told of.
#[derive(Debug, Default)]
struct Told(Mutex<Vec<Kept>>);

impl Archive for Told {
    fn note_saved(&self, _name: SavedName, kept: Kept) {
        self.0.lock().expect("no panic").push(kept);
    }

    fn fetch(&self, _name: SavedName, _account: Arc<Account>, wanted: Wanted<Box<SavedContext>>) {
        wanted.answer(None);
    }

    fn forget(&self, _name: SavedName, wanted: Wanted<()>) {
        wanted.answer(None);
    }
}

fn model(name: &str) -> Arc<Model> {
    let source = bundled::source("draft").expect("a bundled model");
    Arc::new(Model::open(name, &source).expect("it opens"))
}

/// So many contexts that were saved.
async fn kept(n_saved: usize) -> Vec<Kept> {
    let model = model("draft");
    let options = CpuOptions {
        n_pages: 64,
        n_host_pages: 0,
        n_threads: NonZeroUsize::new(1),
        n_rows_max: 8,
        n_tokens_max: 256,
    };
    let backend: Box<dyn Backend> = Box::new(CpuBackend::new(&model, &options).expect("it loads"));
    let told = Arc::new(Told::default());
    let engine = Engine::start(EngineSettings::default());
    let bounds = KvBounds::of(backend.as_ref());
    let fittings = ModelFittings { operator: None, archive: Some(told.clone()) };
    let model = engine.add_with(fittings, model, backend, bounds).expect("the engine works");
    let account = Account::new(USER, Budget::UNLIMITED, None);
    let owner = Owner { actor: ActorId(7), session: SessionId(1), guest: GuestId(1), account };
    for _ in 0..n_saved {
        let mut context = Context::create(&model, owner.clone()).await.expect("a context");
        context.append(&[10, 11, 12]).await.expect("they fit");
        context.save("plans").await.expect("saved");
    }
    std::mem::take(&mut *told.0.lock().expect("no panic"))
}

#[tokio::test]
async fn what_is_forgotten_of_all_models_goes_forward_with_each_and_stays_between_what_is_saved_of_its_name()
{
    let of = |name| {
        let kind = OnceLock::new();
        Some(Arc::new(OfModel { model: model(name), format: String::new(), page_bytes: 1, kind }))
    };
    let (draft, other) = (of("draft"), of("other"));
    let mut kept = kept(3).await.into_iter();
    let mut save = |model: &Option<Arc<OfModel>>, name: &str| Job {
        model: model.clone(),
        name: SavedName { actor: ActorId(7), name: name.to_owned() },
        asked: Asked::Save(kept.next().expect("it was saved")),
        number: 1,
    };
    let forget = |actor| Job {
        model: None,
        name: SavedName { actor: ActorId(actor), name: "plans".to_owned() },
        asked: Asked::ForgetOfNone(oneshot::channel().0),
        number: 5,
    };
    let jobs = [save(&other, "plans"), save(&other, "notes"), forget(7), save(&draft, "plans")];
    let mut queues = Queues::default();
    queues.by_user.insert(ActorId(7), jobs.into());
    queues.order.push_back(ActorId(7));
    queues.bring_forward("draft");
    let told = |job: &Job| {
        let model = job.model.as_ref().map_or("all", |of| of.model.name.as_str()).to_owned();
        (model, job.name.name.clone())
    };
    let order: Vec<_> = queues.by_user[&ActorId(7)].iter().map(told).collect();
    let expected = [("other", "plans"), ("all", "plans"), ("draft", "plans"), ("other", "notes")];
    assert_eq!(order, expected.map(|(model, name)| (model.to_owned(), name.to_owned())));

    let mut queues = Queues::default();
    let has_of = |queues: &Queues, of| queues.has_jobs_of(of, 6);
    assert!(!has_of(&queues, Some("draft")));
    queues.by_user.insert(ActorId(8), [forget(8)].into());
    assert!(has_of(&queues, Some("draft")) && has_of(&queues, None), "it is about each");
    assert!(!queues.has_jobs_of(Some("draft"), 5), "it was asked for later");
    queues.by_user.clear();
    queues.busy = vec![(other, 5)];
    assert!(!has_of(&queues, Some("draft")) && has_of(&queues, Some("other")));
    queues.busy = vec![(None, 5)];
    assert!(has_of(&queues, Some("draft")), "it is under way");
    assert!(!queues.has_jobs_of(Some("draft"), 5));
}
