//! Mixtures of contexts of two models on one processor.

use std::any::Any;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::task::{self, Waker};

use trellis_programs::library;

use crate::account::{Account, ActorId, Budget, GuestId, Owner, SessionId};
use crate::backend::{Backend, BackendError, Collected, Damage, Limits, WeightsInfo};
use crate::batch::{Batch, CellMove, Drawn, HostPageId, LateMask, PageId, Token};
use crate::command::{Ahead, MaskSource, RunSettings};
use crate::context::{Context, Pull, RunKey};
use crate::cpu::{CpuBackend, CpuOptions};
use crate::engine::{Engine, EngineSettings, KvBounds};
use crate::error::EngineError;
use crate::kept::KeptRow;
use crate::model::{Model, ModelSource};
use crate::model_handle::ModelHandle;
use crate::port::Port;
use crate::sampling::program::{Definition, Program, PutOn, RowShape};
use crate::sampling::{Looks, Sampler};

/// What the test tells the backends, and sees of them.
#[derive(Default)]
struct Told {
    refuses_rows: AtomicBool,
    fails: AtomicBool,
    rows: Mutex<Vec<Weak<dyn Any + Send + Sync>>>,
}

impl Told {
    fn n_rows_given(&self) -> usize {
        self.rows.lock().expect("nobody panicked").len()
    }

    fn n_rows_held(&self) -> usize {
        self.rows.lock().expect("nobody panicked").iter().filter(|row| row.strong_count() > 0).count()
    }
}

/// The processor, seen.
struct Seen {
    backend: CpuBackend,
    told: Arc<Told>,
}

impl Backend for Seen {
    fn limits(&self) -> &Limits {
        self.backend.limits()
    }

    fn weights(&self) -> WeightsInfo {
        self.backend.weights()
    }

    fn device(&self) -> &str {
        self.backend.device()
    }

    fn keep_row(&mut self) -> Option<KeptRow> {
        if self.told.refuses_rows.load(Ordering::Relaxed) {
            return None;
        }
        let row = self.backend.keep_row()?;
        self.told.rows.lock().expect("nobody panicked").push(row.weak());
        Some(row)
    }

    fn submit(&mut self, batch: &Batch<'_>) -> Result<(), BackendError> {
        self.backend.submit(batch)
    }

    fn supply(&mut self, masks: &[LateMask<'_>]) -> Result<Vec<usize>, BackendError> {
        self.backend.supply(masks)
    }

    fn waits_for_masks(&mut self) -> Result<bool, BackendError> {
        self.backend.waits_for_masks()
    }

    fn collect(&mut self) -> Result<Collected, BackendError> {
        let collected = self.backend.collect()?;
        if self.told.fails.swap(false, Ordering::Relaxed) {
            let (device, call, reason) = (String::new(), "collect", String::new());
            return Err(BackendError::Device { device, call, reason, damage: Damage::Call });
        }
        Ok(collected)
    }

    fn n_pages(&self) -> usize {
        self.backend.n_pages()
    }

    fn resize(&mut self, n_pages: usize) -> Result<(), BackendError> {
        self.backend.resize(n_pages)
    }

    fn move_pages(&mut self, moves: &[(PageId, PageId)]) -> Result<(), BackendError> {
        self.backend.move_pages(moves)
    }

    fn move_cells(&mut self, moves: &[CellMove]) -> Result<(), BackendError> {
        self.backend.move_cells(moves)
    }

    fn swap_out(&mut self, moves: &[(PageId, HostPageId)]) -> Result<(), BackendError> {
        self.backend.swap_out(moves)
    }

    fn swap_in(&mut self, moves: &[(HostPageId, PageId)]) -> Result<(), BackendError> {
        self.backend.swap_in(moves)
    }
}

/// Two models on one engine.
struct House {
    models: [ModelHandle; 2],
    told: [Arc<Told>; 2],
    // Stops when it goes.
    _engine: Engine,
}

impl House {
    fn new() -> Self {
        let engine = Engine::start(EngineSettings { port: Port::Encoded, ..EngineSettings::default() });
        let told = [Arc::<Told>::default(), Arc::<Told>::default()];
        let mut idx = 0;
        let models = ["tiny", "draft"].map(|name| {
            let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models").join(name);
            let model = Model::open(name, &ModelSource::Folder(folder)).expect("the bundled model opens");
            let (n_pages, n_host_pages, n_threads) = (256, 0, None);
            let options = CpuOptions { n_pages, n_host_pages, n_threads, n_rows_max: 64, n_tokens_max: 128 };
            let backend = CpuBackend::new(&model, &options).expect("the bundled model loads");
            let backend = Seen { backend, told: told[idx].clone() };
            idx += 1;
            let bounds = KvBounds::of(&backend);
            engine.add(Arc::new(model), Box::new(backend), bounds).expect("the engine works")
        });
        Self { models, told, _engine: engine }
    }

    /// The contexts of a mixture: two of the large model around one of the small one.
    async fn contexts(&self, owner: &Owner, n: usize) -> Vec<Context> {
        let mut contexts = Vec::new();
        for (idx, model) in [0, 1, 0].into_iter().enumerate().take(n) {
            let mut context = Context::create(&self.models[model], owner.clone()).await.expect("a context");
            let prompt: Vec<Token> = (0..20 + 7 * idx as Token).map(|token| 30 + token * 3 % 200).collect();
            context.append(&prompt).await.expect("it fits");
            contexts.push(context);
        }
        contexts
    }

    /// Waits until no row is held any more.
    async fn rows_are_free(&self) {
        for _ in 0..1000 {
            if self.told.iter().all(|told| told.n_rows_held() == 0) {
                return;
            }
            // What was let go of is heard of in a turn to come.
            self.models[0].stats().await.expect("the engine works");
        }
        panic!("rows are held that nobody needs");
    }
}

fn owner(number: u32) -> Owner {
    let account = Account::new("guest", Budget::UNLIMITED, None);
    Owner { actor: ActorId(1), session: SessionId(1), guest: GuestId(number.into()), account }
}

fn sampler(model: &ModelHandle, n_others: usize, seed: u64) -> Arc<Sampler> {
    let definition = Definition::build(|b| {
        let n = b.state(0.5);
        n.set(n.get() + 1.0);
        b.report(n.get());
        let row = match n_others {
            1 => library::guidance(b.logits(), b.member(0), 1.5),
            _ => library::experts(b.logits(), b.member(0), b.member(1), 0.7),
        };
        library::temperature(row, 0.9).draw(trellis_programs::Source::SEED)
    });
    let limits = model.limits();
    let shape = RowShape { vocab_size: limits.vocab_size, n_positions: limits.n_positions_max };
    let put_on = PutOn::new(Arc::new(Program::new(definition, shape).expect("it is in order")));
    let looks = Looks { n_top: 3, hidden: vec![2] };
    Arc::new(Sampler { seed, program: Some(Box::new(put_on)), looks, ..Sampler::greedy() })
}

fn settings(sampler: &Arc<Sampler>) -> RunSettings {
    let (sampler, stop_tokens, ahead) = (sampler.clone(), Arc::new([]), Ahead::Adaptive);
    RunSettings { sampler, stop_tokens, n_tokens_max: None, ahead, masks: MaskSource::Sampler }
}

async fn pull(members: &mut [Context], sampler: &Arc<Sampler>) -> Result<Drawn, EngineError> {
    let (first, others) = members.split_first_mut().expect("a member");
    let mut others: Vec<&mut Context> = others.iter_mut().collect();
    match first.pull_mixed(&mut others, RunKey(1), || settings(sampler)).await? {
        Pull::Token(drawn) => Ok(drawn),
        Pull::Finished(finish) => panic!("{finish:?}"),
    }
}

#[tokio::test]
async fn rows_that_stay_on_the_device_give_what_rows_give_that_leave_it() {
    let house = House::new();
    for n in [2, 3] {
        let sampler = sampler(&house.models[0], n - 1, n as u64);
        let mut found = Vec::new();
        for refuses in [false, true] {
            house.told.iter().for_each(|told| told.refuses_rows.store(refuses, Ordering::Relaxed));
            let n_given: usize = house.told.iter().map(|told| told.n_rows_given()).sum();
            let mut members = house.contexts(&owner(1), n).await;
            let mut drawn = Vec::new();
            for idx in 0..25 {
                drawn.push(pull(&mut members, &sampler).await.expect("a token"));
                if idx % 8 == 5 {
                    // What they hold now counts.
                    members[1].append(&[40 + idx]).await.expect("it fits");
                    let n_tokens = members[0].tokens().len();
                    members[0].truncate(n_tokens - 1).await.expect("there are as many");
                }
            }
            let n_given = house.told.iter().map(|told| told.n_rows_given()).sum::<usize>() - n_given;
            assert_eq!(n_given >= 25 * (n - 1), !refuses, "{n_given}");
            found.push(drawn);
        }
        assert_eq!(found[0], found[1], "{n} members");
    }
    house.rows_are_free().await;
}

#[tokio::test]
async fn mixtures_of_many_guests_are_drawn_beside_each_other() {
    let house = Arc::new(House::new());
    let draw = |number: u32| {
        let house = house.clone();
        async move {
            let sampler = sampler(&house.models[0], 1, number.into());
            let mut members = house.contexts(&owner(number), 2).await;
            let mut drawn = Vec::new();
            for _ in 0..12 {
                drawn.push(pull(&mut members, &sampler).await.expect("a token"));
            }
            drawn
        }
    };
    let together: Vec<_> = (0..6).map(|number| tokio::spawn(draw(number))).collect();
    for (number, together) in together.into_iter().enumerate() {
        let alone = draw(number as u32).await;
        assert_eq!(together.await.expect("no panic"), alone);
    }
    house.rows_are_free().await;
}

#[tokio::test]
async fn rows_are_let_go_of_when_a_draw_is_given_up_fails_or_its_guest_ends() {
    let house = House::new();
    let sampler = sampler(&house.models[0], 2, 1);
    let guest = owner(1);
    let mut members = house.contexts(&guest, 3).await;
    let first = pull(&mut members, &sampler).await.expect("a token");
    for n_polls in 1..6 {
        let mut pulled = pin!(pull(&mut members, &sampler));
        for _ in 0..n_polls {
            if pulled.as_mut().poll(&mut task::Context::from_waker(Waker::noop())).is_ready() {
                break;
            }
            tokio::time::sleep(std::time::Duration::from_millis(n_polls)).await;
        }
    }
    house.rows_are_free().await;
    for told in &house.told {
        told.fails.store(true, Ordering::Relaxed);
        let failed = pull(&mut members, &sampler).await.expect_err("the step failed");
        assert!(matches!(failed, EngineError::Step(_)), "{failed:?}");
        house.rows_are_free().await;
    }
    let mut anew = house.contexts(&guest, 3).await;
    assert_eq!(pull(&mut anew, &sampler).await.expect("a token"), first);
    {
        let mut pulled = pin!(pull(&mut anew, &sampler));
        let _ = pulled.as_mut().poll(&mut task::Context::from_waker(Waker::noop()));
    }
    drop((members, anew, guest));
    house.rows_are_free().await;
}
