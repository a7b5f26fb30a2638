//! The operator's policy: a component that stands between guests and their clients, and says what stands in front of all samplers.
//!
//! - Comes in: the section `[policy]` of the configuration ([`PolicySettings`]); models as they are loaded; what flows between a
//!   guest and its client.
//! - Goes out: an [`Operator`] for each model, which its engine puts in front of everybody's samplers; for each guest a [`Gate`],
//!   through which its arguments, its messages, its outputs and the text of its error go.
//! - On the way: `instance` bounds each call in time and memory, `state` is what the component can reach: its model's tokenizer
//!   and the daemon's log.
//! - It fails closed: a policy that does not begin keeps the daemon from starting, one that fails for a model keeps it from being
//!   loaded, and one that fails for a guest ends that guest, with an error that names the policy. The daemon goes on.
//! - Must not happen: a call on an engine's thread, an instance that two guests share or that is used after a failure, anything
//!   of a guest's that reaches its client past the policy.

mod bindings;
mod error;
mod gate;
mod instance;
mod settings;
mod state;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use trellis_engine::account::{Account, ActorId, Budget};
use trellis_engine::model::Model;
use trellis_engine::sampling::Operator;
use trellis_engine::sampling::program::RowShape;
use wasmtime::component::{HasSelf, Linker};

use self::bindings::PolicyPre;
use self::bindings::trellis::host::policies;
pub use self::error::{PolicyError, PolicyFailure};
pub(crate) use self::gate::{Closed, Gate, Passage, PolicedGuest, Ruling};
use self::instance::Instance;
pub use self::settings::PolicySettings;
use self::state::PolicyState;
use super::cache::{CacheLimits, CodeCache};
use super::compile::Compiler;
use super::component::{check_kind, load_trusted};
use super::error::GuestError;
use super::host::programs::row_definition;
use super::limits::GuestLimits;
use super::runtime::compiling_engine;
use super::ticker::Ticker;
use super::wasi;
use crate::user_places::UserPlaces;

/// The part of the processors that calls for one user may take beside those for others, and one in any case. Calls are bounded.
const PART_OF_PROCESSORS: usize = 2;

/// A policy that has begun once, and may for every guest.
pub struct Policy {
    path: PathBuf,
    hash: blake3::Hash,
    settings: PolicySettings,
    guest_limits: GuestLimits,
    pre: PolicyPre<PolicyState>,
    ticker: Ticker,
    /// For calls under way, which are nobody's time but the daemon's: a user that is alone has all processors.
    places: UserPlaces,
}

impl std::fmt::Debug for Policy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Policy").field("path", &self.path).field("hash", &self.hash).finish_non_exhaustive()
    }
}

impl Policy {
    /// Compiles the component of the settings, if they name one, and has an instance of it begin. Blocks until that is done.
    ///
    /// # Errors
    /// It cannot be read, is no policy, or does not begin.
    pub(crate) fn open(
        settings: &PolicySettings,
        guest_limits: &GuestLimits,
        cache_dir: &Path,
        compile_exe: Option<&Path>,
    ) -> Result<Option<Arc<Self>>, PolicyError> {
        let Some(path) = settings.component.clone() else { return Ok(None) };
        let of = |why| PolicyError { path: path.clone(), why };
        let wasm = std::fs::read(&path).map_err(|source| of(PolicyFailure::Unread { source }))?;
        apart(async {
            let policy = Self::compiled(&wasm, settings, guest_limits, cache_dir, compile_exe, path.clone());
            let policy = Arc::new(policy.await.map_err(|source| PolicyFailure::Component { source })?);
            policy.instance(&Account::new("policy", Budget::UNLIMITED, None)).await?;
            Ok(Some(policy))
        })
        .map_err(of)
    }

    async fn compiled(
        wasm: &[u8],
        settings: &PolicySettings,
        guest_limits: &GuestLimits,
        cache_dir: &Path,
        compile_exe: Option<&Path>,
        path: PathBuf,
    ) -> Result<Self, GuestError> {
        check_kind(wasm, guest_limits)?;
        let engine = compiling_engine()?;
        let cache_limits = CacheLimits {
            n_bytes: guest_limits.cache_bytes,
            n_code_bytes: guest_limits.compiled_bytes as u64,
        };
        let cache = CodeCache::open(cache_dir, &engine, cache_limits)?;
        let hash = blake3::hash(wasm);
        let code = match cache.load(&hash) {
            Some(code) => code,
            None => {
                let exe = match compile_exe {
                    Some(exe) => exe.to_owned(),
                    None => crate::spawner::own_program().map_err(|source| GuestError::Compiler {
                        exe: "the running executable".into(),
                        source,
                    })?,
                };
                let compiler = Compiler::new(exe, Arc::new(guest_limits.clone()));
                let code = compiler.compile(wasm, &mut |_| ()).await?;
                if let Err(error) = cache.store(&hash, &code) {
                    tracing::warn!(%error, "cannot keep the compiled policy");
                }
                code
            }
        };
        let component = load_trusted(&engine, &code)?;
        let wrong_type = |error: wasmtime::Error| GuestError::WrongType { reason: format!("{error:#}") };
        let mut linker = Linker::new(&engine);
        policies::add_to_linker::<_, HasSelf<PolicyState>>(&mut linker, |state| state).map_err(wrong_type)?;
        wasi::add_to_linker(&mut linker).map_err(wrong_type)?;
        let pre = linker.instantiate_pre(&component).and_then(PolicyPre::new).map_err(wrong_type)?;
        let ticker = Ticker::start(&engine, || ())?;
        let (settings, guest_limits) = (settings.clone(), guest_limits.clone());
        let n_processors = std::thread::available_parallelism().map_or(1, usize::from);
        let places = UserPlaces::new(n_processors, (n_processors / PART_OF_PROCESSORS).max(1));
        Ok(Self { path, hash, settings, guest_limits, pre, ticker, places })
    }

    /// What it was configured by.
    #[must_use]
    pub fn settings(&self) -> &PolicySettings {
        &self.settings
    }

    /// Its file and the beginning of its hash, for people.
    #[must_use]
    pub fn shown(&self) -> String {
        format!("{} ({})", self.path.display(), &self.hash.to_hex()[..12])
    }

    /// An instance that has begun, whose memory is charged to this account.
    async fn instance(self: &Arc<Self>, account: &Arc<Account>) -> Result<Instance, PolicyFailure> {
        let mut instance = Instance::new(self.clone(), account).await?;
        let settings: Vec<(String, String)> =
            self.settings.settings.iter().map(|(name, text)| (name.clone(), text.clone())).collect();
        instance.begin(&settings).await?;
        Ok(instance)
    }

    /// What it puts in front of everybody's samplers for a model whose contexts have so many positions. Blocks until that is
    /// done.
    ///
    /// # Errors
    /// It fails, or what it gives may not stand there.
    pub(crate) fn operator(
        self: &Arc<Self>,
        model: &Model,
        n_positions: usize,
    ) -> Result<Option<Arc<Operator>>, PolicyError> {
        let operator = self.front(model, n_positions)?;
        if let Some(operator) = &operator {
            tracing::info!(
                model = model.name,
                forbidden = operator.n_forbidden(),
                operations = operator.n_operations(),
                "the policy stands in front of the model's samplers"
            );
        }
        Ok(operator.map(Arc::new))
    }

    /// As [`Self::operator`], for a model that is not loaded yet.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn front(
        self: &Arc<Self>,
        model: &Model,
        n_positions: usize,
    ) -> Result<Option<Operator>, PolicyError> {
        let front = apart(async {
            let mut instance = self.instance(&Account::new("policy", Budget::UNLIMITED, None)).await?;
            instance.front(&model.name, &model.tokenizer).await
        });
        let shape = RowShape { vocab_size: model.config.vocab_size, n_positions };
        let operator = front.and_then(|front| {
            let program = front.program.map(row_definition);
            Ok(Operator::new(&front.forbidden, program, shape)?)
        });
        operator.map_err(|why| PolicyError { path: self.path.clone(), why: why.of_model(&model.name) })
    }

    /// A gate for a guest that is to start, which pays for its instance.
    ///
    /// # Errors
    /// The policy does not begin.
    pub(crate) async fn gate(
        self: &Arc<Self>,
        about: PolicedGuest,
        account: &Arc<Account>,
    ) -> Result<Gate, PolicyFailure> {
        let instance = {
            let _place = self.places.take(ActorId(about.uid)).await;
            self.instance(account).await?
        };
        Ok(Gate::new(instance, self.places.clone(), about, account.clone(), &self.guest_limits))
    }
}

/// Waits for something on a thread of its own, from wherever this is called.
fn apart<T: Send>(work: impl Future<Output = T> + Send) -> T {
    let wait = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime
            .expect("a runtime needs few descriptors, and the daemon is starting or loads a model")
            .block_on(work)
    };
    std::thread::scope(|scope| {
        scope.spawn(wait).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}
