//! What stands behind the handles of a guest.
#![expect(unreachable_pub, reason = "the generated bindings re-export these types")]

use std::sync::Arc;

use tokio::sync::{Mutex, MutexGuard};
use trellis_engine::account::HostCharge;
use trellis_engine::batch::{Seen, Token};
use trellis_engine::constraint::{Constraint, Rule};
use trellis_engine::model::DecodeStream;
use trellis_engine::sampling::program::Program;
use trellis_engine::sampling::{Bias, Sampler, TokenMask};
use trellis_engine::{BeamSearch, Context, Guess, RunKey};

use super::generations::Slot;
use super::speculation::Speculation;
use crate::guest::bindings::trellis::host::streams::FinishReason;
use crate::guest::bindings::trellis::host::types::{Error as ApiError, Host};
use crate::guest::held::HeldModel;
use crate::guest::store::GuestState;

/// `model`
pub struct GuestModel {
    pub(crate) model: HeldModel,
}

/// `text-decoder`
pub struct GuestDecoder {
    pub(crate) model: HeldModel,
    pub(crate) stream: DecodeStream,
}

/// `context`. Streams over it keep the cell alive.
pub struct GuestContext {
    pub(crate) cell: Arc<Mutex<Context>>,
    pub(crate) model: HeldModel,
}

impl GuestContext {
    pub(crate) fn new(context: Context, model: HeldModel) -> Self {
        Self { cell: Arc::new(Mutex::new(context)), model }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Context> {
        self.cell.try_lock().expect("a guest is in one host call at a time")
    }
}

/// `token-mask`. Samplers and streams that have it keep it alive.
pub struct GuestMask {
    pub(crate) held: Arc<HeldMask>,
}

/// A mask, as long as a guest has anything that draws under it.
pub(crate) struct HeldMask {
    pub(crate) mask: Arc<TokenMask>,
    /// The model that it was made for.
    pub(crate) model: HeldModel,
    /// Its bytes.
    #[expect(dead_code, reason = "it is paid for until it is dropped")]
    pub(crate) charge: HostCharge,
}

/// `program`. Samplers and streams that have it keep it alive.
#[derive(Clone)]
pub struct GuestProgram {
    pub(crate) program: Arc<Program>,
    /// The model that it was checked for.
    pub(crate) model: HeldModel,
    /// Its bytes.
    #[expect(dead_code, reason = "it is paid for until it is dropped")]
    pub(crate) charge: Arc<HostCharge>,
}

/// `token-bias`. Samplers and streams that have it keep it alive.
pub struct GuestBias {
    pub(crate) held: Arc<HeldBias>,
}

/// A bias, as long as a guest has anything that draws with it.
pub(crate) struct HeldBias {
    pub(crate) bias: Arc<Bias>,
    /// The model that it was made for.
    pub(crate) model: HeldModel,
    /// Its bytes.
    #[expect(dead_code, reason = "it is paid for until it is dropped")]
    pub(crate) charge: HostCharge,
}

/// `constraint`. Samplers and streams that have it keep it alive.
pub struct GuestConstraint {
    pub(crate) held: Arc<HeldConstraint>,
}

/// A constraint, as long as a guest has anything that draws under it.
pub(crate) struct HeldConstraint {
    pub(crate) constraint: Arc<Constraint>,
    /// The model that it was compiled for.
    pub(crate) model: HeldModel,
}

/// A constraint that was put on a sampler.
#[derive(Clone)]
pub(crate) struct GivenConstraint {
    pub(crate) rule: Arc<Rule>,
    pub(crate) held: Arc<HeldConstraint>,
}

/// What a sampler is given besides numbers: kept alive, and paid for, as long as something draws with it.
#[derive(Clone, Default)]
pub(crate) struct Given {
    /// The mask of the chain.
    pub(crate) mask: Option<Arc<HeldMask>>,
    /// The bytes of the chain's bias.
    pub(crate) bias: Option<Arc<HostCharge>>,
    pub(crate) program: Option<GuestProgram>,
    pub(crate) masks: Vec<Arc<HeldMask>>,
    pub(crate) biases: Vec<Arc<HeldBias>>,
    pub(crate) constraint: Option<GivenConstraint>,
}

impl Given {
    /// What draws keep to.
    pub(crate) fn rule(&self) -> Option<&Arc<Rule>> {
        self.constraint.as_ref().map(|given| &given.rule)
    }
}

/// `sampler`
#[derive(Clone)]
pub struct GuestSampler {
    pub(crate) settings: Arc<Sampler>,
    pub(crate) given: Given,
}

/// A context whose model is held with it.
pub(crate) type Other = (Arc<Mutex<Context>>, HeldModel);

/// `stream`
pub struct GuestStream {
    pub(crate) cell: Arc<Mutex<Context>>,
    #[expect(dead_code, reason = "the stream may be all that its guest has of the model")]
    pub(crate) model: HeldModel,
    pub(crate) settings: Arc<Sampler>,
    /// The stream may be all that draws with it.
    pub(crate) given: Given,
    pub(crate) key: RunKey,
    /// The key under which what came ahead is a guess for the next token: that of the settings before they changed.
    pub(crate) key_before: Option<RunKey>,
    /// Tokens that it had given when they last changed.
    pub(crate) changed_at: usize,
    pub(crate) n_tokens_max: Option<usize>,
    pub(crate) n_given: usize,
    pub(crate) stop_tokens: Arc<[Token]>,
    pub(crate) speculation: Option<Speculation>,
    /// The others of a mixture, with their models: the stream may be all that its guest has of them.
    pub(crate) others: Vec<Other>,
    /// What the guest expects next.
    pub(crate) guess: Guess,
    pub(crate) finish: Option<FinishReason>,
    /// What was looked at in the place of the last token.
    pub(crate) seen: Option<Box<Seen>>,
    #[expect(dead_code, reason = "it is paid for until it is dropped")]
    pub(crate) charge: Option<HostCharge>,
}

/// `generations`
pub struct GuestGenerations {
    pub(crate) slots: Vec<Slot>,
}

/// `beam-search`
pub struct GuestBeamSearch {
    pub(crate) search: BeamSearch,
    pub(crate) model: HeldModel,
    /// The search may be all that draws with it.
    #[expect(dead_code, reason = "it is paid for until it is dropped")]
    pub(crate) given: Given,
}

/// What a host function returns instead of a value.
#[derive(Debug)]
pub enum HostError {
    /// An error of the host API.
    Refused(ApiError),
    /// Something that ends the guest.
    Fault(wasmtime::Error),
}

impl From<ApiError> for HostError {
    fn from(error: ApiError) -> Self {
        Self::Refused(error)
    }
}

impl From<wasmtime::component::ResourceTableError> for HostError {
    fn from(error: wasmtime::component::ResourceTableError) -> Self {
        Self::Fault(error.into())
    }
}

impl Host for GuestState {
    fn convert_error(&mut self, error: HostError) -> wasmtime::Result<ApiError> {
        match error {
            HostError::Refused(error) => Ok(error),
            HostError::Fault(fault) => Err(fault),
        }
    }
}
