//! The device under test: the processor, or a card when the tests are started with `TRELLIS_TEST_DEVICE=cuda`.

use std::env::{self, VarError};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use trellis::config::Device;
use trellis_cuda::Card;

const TEST_DEVICE: &str = "TRELLIS_TEST_DEVICE";

/// On a machine that has to have a card, a test that finds none fails instead of being skipped.
const REQUIRE_CUDA: &str = "TRELLIS_REQUIRE_CUDA";

/// The largest difference of two float32 log-probabilities of one position that were computed in batches of
/// different sizes. Each is the result of some thousand roundings of relative size 6e-8 on the way through the
/// layers, in another order, and reaches about 15 nat; goldens are held to 1e-3 against another implementation.
const ROUNDING_NAT: f32 = 2e-4;

/// What the tests run on.
///
/// # Panics
/// The variable names no device, or there is no card where one is asked for.
#[must_use]
pub fn device() -> Device {
    static DEVICE: OnceLock<Device> = OnceLock::new();
    *DEVICE.get_or_init(|| match env::var(TEST_DEVICE).as_deref() {
        Err(VarError::NotPresent) | Ok("cpu") => Device::Cpu,
        Ok("cuda") => {
            eprintln!("the tests run on {}", card().gpu().name());
            Device::Cuda
        }
        other => panic!("{TEST_DEVICE} is {other:?}, expected cpu or cuda"),
    })
}

/// The card, opened for one engine: the models on a card that was opened once compute in one memory, one after the other.
///
/// # Panics
/// There is none.
#[must_use]
pub fn card() -> Card {
    open().unwrap_or_else(|error| panic!("no CUDA device: {error}"))
}

/// A card of a test's own: nothing else counts in its memory statistics, and no other test that measures runs.
pub struct CardAlone {
    /// The card.
    pub card: Card,
    _turn: MutexGuard<'static, ()>,
}

/// A card for a test that can run on nothing else; `None`, with a line that says so, on a machine without one.
///
/// # Panics
/// There is none, and `TRELLIS_REQUIRE_CUDA=1`.
#[must_use]
pub fn card_alone() -> Option<CardAlone> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    match open() {
        Ok(card) => Some(CardAlone { card, _turn: turn }),
        Err(error) => {
            let is_required = env::var_os(REQUIRE_CUDA).is_some_and(|value| value == "1");
            assert!(!is_required, "{REQUIRE_CUDA}=1, but: {error}");
            eprintln!("skipped: no CUDA device ({error})");
            None
        }
    }
}

fn open() -> Result<Card, trellis_cuda::CudaError> {
    Card::open(0, Some(&cache_dir()))
}

/// Where compiled kernels are kept from one test program to the next.
fn cache_dir() -> PathBuf {
    let exe = env::current_exe().expect("a program knows its file");
    exe.with_file_name("tests-cache").join("cuda")
}

/// A log-probability or an entropy as a test compares it: to the bit on the CPU, where a row's result depends on
/// nothing else in the batch; up to rounding on CUDA, where a batch of another size runs other kernels.
#[derive(Clone, Copy, Debug)]
pub struct Nat(pub f32);

impl PartialEq for Nat {
    fn eq(&self, other: &Self) -> bool {
        match device() {
            // What a program makes of log-probabilities may be large.
            Device::Cuda | Device::Ordinal(_) => {
                (self.0 - other.0).abs() <= ROUNDING_NAT * self.0.abs().max(1.0)
            }
            Device::Auto | Device::Cpu => self.0.to_bits() == other.0.to_bits(),
        }
    }
}

/// Whether two JSON values say the same; numbers that are not whole as [`Nat`] compares them.
#[must_use]
pub fn says_the_same(a: &serde_json::Value, b: &serde_json::Value) -> bool {
    use serde_json::Value;
    match (a, b) {
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| says_the_same(a, b))
        }
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(name, a)| b.get(name).is_some_and(|b| says_the_same(a, b)))
        }
        (Value::Number(x), Value::Number(y)) if x.is_f64() && y.is_f64() => {
            let [x, y] = [x, y].map(|x| Nat(x.as_f64().expect("a float") as f32));
            x == y
        }
        (a, b) => a == b,
    }
}
