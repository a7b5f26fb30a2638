//! Engines over the bundled models, on the CPU.

use std::sync::Arc;
use std::time::Duration;

use trellis_engine::account::{Account, ActorId, Budget, GuestId, Owner, SessionId};
use trellis_engine::cpu::{CpuBackend, CpuOptions};
use trellis_engine::model::{Model, SpecialTokens};
use trellis_engine::{Engine, EngineHandle, EngineSettings, PrefixScope};

/// Sizes of an engine.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Device pages.
    pub n_pages: usize,
    /// Pages of host memory.
    pub n_host_pages: usize,
    /// Contexts in one step.
    pub n_step_rows: usize,
    /// Tokens in one step.
    pub n_step_tokens: usize,
}

impl Default for Sizes {
    fn default() -> Self {
        Self { n_pages: 512, n_host_pages: 512, n_step_rows: 128, n_step_tokens: 256 }
    }
}

/// An engine over a bundled model.
///
/// # Panics
/// The model cannot be loaded.
#[must_use]
pub fn engine(model: &str, sizes: Sizes) -> Engine {
    let source = trellis::bundled::source(model).expect("a bundled model");
    let model = Model::open(model, &source).expect("the bundled model opens");
    let options = CpuOptions {
        n_pages: sizes.n_pages,
        n_host_pages: sizes.n_host_pages,
        n_threads: None,
        n_rows_max: sizes.n_step_rows,
        n_tokens_max: sizes.n_step_tokens,
    };
    let backend = CpuBackend::new(&model, &options).expect("the bundled model loads");
    let settings = EngineSettings { prefix_scope: PrefixScope::Actor, n_step_tokens: sizes.n_step_tokens };
    Engine::start(Arc::new(model), Box::new(backend), settings)
}

/// An owner without limits; each number is a user with one session and one guest.
#[must_use]
pub fn owner(number: u32) -> Owner {
    Owner {
        actor: ActorId(number),
        session: SessionId(number.into()),
        guest: GuestId(number.into()),
        account: Account::new("guest", Budget::UNLIMITED, None),
    }
}

/// The tokens of a text in which special tokens are written out.
///
/// # Panics
/// The text cannot be encoded.
#[must_use]
pub fn encode(engine: &EngineHandle, text: &str) -> Vec<u32> {
    engine.model().tokenizer.encode(text, SpecialTokens::Parse).expect("the text encodes")
}

/// What does not end by then never will.
const TEST_TIME_MAX: Duration = Duration::from_secs(240);

/// Runs a future to its end on a runtime of its own.
///
/// # Panics
/// The runtime cannot be made, or the future does not end.
pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime")
        .block_on(async { tokio::time::timeout(TEST_TIME_MAX, future).await.expect("the test ends in time") })
}
