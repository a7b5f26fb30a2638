//! Engines on the device under test.

use std::sync::Arc;
use std::time::Duration;

use trellis::config::{self, Device};
use trellis_cuda::{Card, CudaBackend, CudaOptions, LoadError};
use trellis_engine::account::{Account, ActorId, Budget, GuestId, Owner, SessionId};
use trellis_engine::backend::Backend;
use trellis_engine::cpu::{CpuBackend, CpuOptions};
use trellis_engine::model::{Dtype, Model, SpecialTokens};
use trellis_engine::{EngineSettings, KvBounds, ModelHandle, OneModel, PrefixScope};

use crate::device::{card, device};
use crate::models;

/// Sizes of an engine.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Device pages.
    pub n_pages: usize,
    /// Pages of host memory.
    pub n_host_pages: usize,
    /// Contexts in one step.
    pub n_step_rows: usize,
    /// Tokens up to which prompts fill a step, and guesses beside them.
    pub n_step_tokens: usize,
}

impl Sizes {
    /// Those that a daemon has on the processor.
    #[must_use]
    pub fn of_daemon() -> Self {
        let config::Sizes { n_step_rows, n_step_tokens, .. } = config::Sizes::CPU;
        Self { n_step_rows, n_step_tokens, ..Self::default() }
    }

    fn n_tokens_max(self) -> usize {
        let Self { n_step_rows, n_step_tokens, .. } = self;
        config::Sizes { n_step_rows, n_step_tokens, ..config::Sizes::CPU }.n_tokens_max()
    }
}

impl Default for Sizes {
    fn default() -> Self {
        Self { n_pages: 512, n_host_pages: 512, n_step_rows: 128, n_step_tokens: 256 }
    }
}

/// An engine over a bundled model, in float32.
///
/// # Panics
/// The model cannot be loaded.
#[must_use]
pub fn engine(model: &str, sizes: Sizes) -> OneModel {
    let model = models::bundled(model);
    let backend = backend(&model, sizes);
    start(model, backend, sizes)
}

/// An engine over two bundled models, in float32; the second is beside it.
///
/// # Panics
/// A model cannot be loaded.
#[must_use]
pub fn engine_of_two(models: [&str; 2], sizes: Sizes) -> (OneModel, ModelHandle) {
    let [first, second] = models.map(models::bundled);
    let [of_first, of_second]: [Box<dyn Backend>; 2] = match device() {
        Device::Cuda | Device::Ordinal(_) => {
            let card = card();
            let load = |model| cuda_backend(&card, model, sizes, Dtype::F32).expect("it loads onto the card");
            [Box::new(load(&first)), Box::new(load(&second))]
        }
        Device::Auto | Device::Cpu => [&first, &second].map(|model| backend(model, sizes)),
    };
    let engine = start(first, of_first, sizes);
    let bounds = KvBounds::of(of_second.as_ref());
    let other = engine.engine().add(Arc::new(second), of_second, bounds).expect("the engine lives");
    (engine, other)
}

/// A model on the device under test, in float32.
///
/// # Panics
/// The model cannot be loaded.
#[must_use]
pub fn backend(model: &Model, sizes: Sizes) -> Box<dyn Backend> {
    match device() {
        Device::Cuda | Device::Ordinal(_) => {
            Box::new(cuda_backend(&card(), model, sizes, Dtype::F32).expect("the model loads onto the card"))
        }
        Device::Auto | Device::Cpu => Box::new(cpu_backend(model, sizes)),
    }
}

/// A model on the processor.
///
/// # Panics
/// The model cannot be loaded.
#[must_use]
pub fn cpu_backend(model: &Model, sizes: Sizes) -> CpuBackend {
    let options = CpuOptions {
        n_pages: sizes.n_pages,
        n_host_pages: sizes.n_host_pages,
        n_threads: None,
        n_rows_max: sizes.n_step_rows,
        n_tokens_max: sizes.n_tokens_max(),
    };
    CpuBackend::new(model, &options).expect("the model loads")
}

/// A model on a card.
///
/// # Errors
/// It does not fit, or the card failed.
pub fn cuda_backend(
    card: &Card,
    model: &Model,
    sizes: Sizes,
    dtype: Dtype,
) -> Result<CudaBackend, LoadError> {
    let page_bytes = CudaBackend::page_bytes(&model.config, dtype);
    let options = CudaOptions {
        dtype: Some(dtype),
        kv_bytes: sizes.n_pages as u64 * page_bytes,
        kv_bytes_max: sizes.n_pages as u64 * page_bytes,
        kv_host_bytes: sizes.n_host_pages as u64 * page_bytes,
        n_rows_max: sizes.n_step_rows,
        n_tokens_max: sizes.n_tokens_max(),
    };
    CudaBackend::load(card, model, &options, &|_, _| {})
}

/// An engine over a loaded model.
#[must_use]
pub fn start(model: Model, backend: Box<dyn Backend>, sizes: Sizes) -> OneModel {
    let settings = EngineSettings {
        prefix_scope: PrefixScope::Actor,
        n_step_tokens: sizes.n_step_tokens,
        ..EngineSettings::default()
    };
    OneModel::start(Arc::new(model), backend, settings)
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
pub fn encode(model: &ModelHandle, text: &str) -> Vec<u32> {
    model.model().tokenizer.encode(text, SpecialTokens::Parse).expect("the text encodes")
}

/// What does not end by then never will, on a slow machine either, on which the first test builds the guests and the
/// others wait for it.
const TEST_TIME_MAX: Duration = Duration::from_secs(1_800);

/// Runs a future to its end on a runtime of its own.
///
/// # Panics
/// The runtime cannot be made, or the future does not end.
pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    block_on_for(TEST_TIME_MAX, future)
}

/// Runs a future that may take so long.
///
/// # Panics
/// The runtime cannot be made, or the future does not end in time.
pub fn block_on_for<T>(limit: Duration, future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime")
        .block_on(async { tokio::time::timeout(limit, future).await.expect("the test ends in time") })
}

/// splitmix64: numbers for tests, the same on every machine.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// The next number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// A number in `0..n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.draw() % n as u64) as usize
    }

    /// So many tokens in `20..vocab_size`, past the special ones.
    pub fn tokens(&mut self, n: usize, vocab_size: usize) -> Vec<u32> {
        (0..n).map(|_| 20 + self.below(vocab_size - 20) as u32).collect()
    }
}
