//! A step of a whole engine: its own thread, guests on others. What counts is the processor time of the engine's thread
//! between two calls of the device, which is held up until all guests have had what the step before gave.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use super::device::{Device, Stock};
use super::house;
use super::median;
use crate::account::{Account, ActorId, Budget, GuestId, Owner, SessionId};
use crate::backend::{Backend, BackendError, Collected, Limits, PAGE_LEN, WeightsInfo};
use crate::batch::{Batch, CellMove, HostPageId, LateMask, PageId, Token};
use crate::command::{Ahead, Ask, MaskSource, RunSettings};
use crate::context::{Context, Pull, RunKey};
use crate::engine::{EngineSettings, OneModel};
use crate::model::{Model, ModelSource};
use crate::sampling::Sampler;

/// What the calling thread has used of a processor.
fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

#[derive(Default)]
struct Desk {
    n_taken: AtomicU64,
    n_steps: AtomicU64,
    /// Of steps with as many rows as there are guests.
    times: Mutex<Vec<Duration>>,
}

struct Watched {
    device: Device,
    desk: Arc<Desk>,
    n_rows: usize,
    n_drawn: u64,
    left: Duration,
}

impl Backend for Watched {
    fn limits(&self) -> &Limits {
        self.device.limits()
    }

    fn weights(&self) -> WeightsInfo {
        self.device.weights()
    }

    fn device(&self) -> &str {
        self.device.device()
    }

    fn submit(&mut self, batch: &Batch<'_>) -> Result<(), BackendError> {
        let host = thread_time().saturating_sub(self.left);
        let is_whole =
            batch.rows.len() == self.n_rows && batch.rows.iter().all(|row| row.end() - row.start == 1);
        if is_whole {
            self.desk.times.lock().unwrap_or_else(PoisonError::into_inner).push(host);
        }
        let mut n_waited = 0;
        while self.desk.n_taken.load(Ordering::SeqCst) < self.n_drawn && n_waited < 2_000 {
            std::thread::sleep(Duration::from_micros(50));
            n_waited += 1;
        }
        self.device.submit(batch)?;
        self.n_drawn += batch.rows.iter().map(|row| row.outputs.len() as u64).sum::<u64>();
        self.desk.n_steps.fetch_add(1, Ordering::SeqCst);
        self.left = thread_time();
        Ok(())
    }

    fn supply(&mut self, masks: &[LateMask<'_>]) -> Result<Vec<usize>, BackendError> {
        self.device.supply(masks)
    }

    fn waits_for_masks(&mut self) -> Result<bool, BackendError> {
        self.device.waits_for_masks()
    }

    fn collect(&mut self) -> Result<Collected, BackendError> {
        self.device.collect()
    }

    fn n_pages(&self) -> usize {
        self.device.n_pages()
    }

    fn resize(&mut self, n_pages: usize) -> Result<(), BackendError> {
        self.device.resize(n_pages)
    }

    fn move_pages(&mut self, moves: &[(PageId, PageId)]) -> Result<(), BackendError> {
        self.device.move_pages(moves)
    }

    fn move_cells(&mut self, moves: &[CellMove]) -> Result<(), BackendError> {
        self.device.move_cells(moves)
    }

    fn swap_out(&mut self, moves: &[(PageId, HostPageId)]) -> Result<(), BackendError> {
        self.device.swap_out(moves)
    }

    fn swap_in(&mut self, moves: &[(HostPageId, PageId)]) -> Result<(), BackendError> {
        self.device.swap_in(moves)
    }
}

async fn pull(mut context: Context, desk: Arc<Desk>) {
    let settings = || RunSettings {
        sampler: Arc::new(Sampler::greedy()),
        stop_tokens: Arc::new([]),
        n_tokens_max: None,
        ahead: Ahead::Adaptive,
        masks: MaskSource::Sampler,
    };
    while let Ok(Pull::Token(_)) = context.pull(RunKey(0), settings).await {
        desk.n_taken.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
#[ignore = "prints times, which mean something on a quiet machine alone"]
fn of_steps_with_guests_on_other_threads() {
    for (n_rows, n_tokens) in [(32, 1_000), (256, 1_000), (1024, 1_000), (256, 100_000)] {
        let desk = Arc::<Desk>::default();
        let limits = Limits {
            n_steps_under_way: 1,
            ..Limits::of_nothing(n_rows, n_rows * (n_tokens + 2_000) / PAGE_LEN)
        };
        let device = Device::new(limits, Stock::default());
        let watched = Watched { device, desk: desk.clone(), n_rows, n_drawn: 0, left: Duration::ZERO };
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models/tiny");
        let model = Model::open("tiny", &ModelSource::Folder(folder)).expect("the bundled model opens");
        let settings = EngineSettings { n_step_tokens: usize::MAX, ..EngineSettings::default() };
        let engine = OneModel::start(Arc::new(model), Box::new(watched), settings);
        let user = Account::new("user", Budget::UNLIMITED, None);
        let runtime = tokio::runtime::Runtime::new().expect("threads can be started");
        let times = runtime.block_on(async {
            let mut contexts = Vec::new();
            for idx in 0..n_rows {
                let session = Account::new("session", Budget::UNLIMITED, Some(user.clone()));
                let account = Account::new("guest", Budget::UNLIMITED, Some(session));
                let (session, guest) = (SessionId(idx as u64), GuestId(idx as u64));
                let owner = Owner { actor: ActorId(0), session, guest, account };
                let mut context = Context::create(engine.handle(), owner).await.expect("a context");
                let tokens: Vec<Token> = house::text(idx, n_tokens + idx % 16).collect();
                context.append(&tokens).await.expect("they fit");
                context.ask(Ask::Prefill).await.expect("asked").answer().await.expect("answered");
                contexts.push(context);
            }
            for context in contexts {
                tokio::spawn(pull(context, desk.clone()));
            }
            loop {
                tokio::time::sleep(Duration::from_millis(20)).await;
                let mut times = desk.times.lock().unwrap_or_else(PoisonError::into_inner);
                if times.len() >= 500 {
                    break times.split_off(60);
                }
            }
        });
        runtime.shutdown_background();
        println!("{n_rows} rows of {n_tokens}: {:.1} µs of the engine's thread a step", median(times));
    }
}
