//! The host API, called by components that are made of the bytes: `wit` reads what there is to call, `values` makes arguments of
//! all its types, `module` puts calls in an order, `code` writes them down.
//!
//! Such a component calls anything in any order, with objects that it was given, that it has dropped, that are of another kind or
//! were never made, with texts and lists within its memory and beyond, with what the call before has returned; it allocates
//! wrongly for the host, grows its memory, traps, or never ends. Some have bytes changed and are no components any more.

mod code;
mod module;
mod values;
mod wit;

use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

use tokio::runtime::Runtime;
use trellis::config::{Config, Device, SavedContexts};
use trellis::daemon::Daemon;
use trellis::fuzzing;
use trellis::guest::{GuestError, GuestLimits};
use trellis::session::Actor;
use trellis_client::{Error, Program, StartOptions};
use trellis_engine::account::{Account, ActorId, Budget, GuestId, Owner, SessionId};
use trellis_engine::batch::Token;
use trellis_engine::model::SpecialTokens;
use trellis_engine::sampling::Sampler;
use trellis_engine::{Ahead, Context, MaskSource, ModelHandle, Pull, RunKey, RunSettings};

use self::module::{Made, make};
use self::values::SAVED_NAMES;
use self::wit::World;
use crate::held::{PATIENCE, nothing_is_held, until};
use crate::host::COMPILER;

/// How a guest may end, unless well: by what it did itself, or a limit of its own.
const ENDS: [&str; 4] = ["budget_exceeded", "deadline_exceeded", "guest_failed", "guest_trapped"];

/// What a user beside the guest has computed, and as which user.
const PROMPT: &str = "Once upon a time";
const N_TOKENS: usize = 6;
const OTHER_USER: u32 = u32::MAX - 7;

/// How a component came out.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// It was no component, or none that fits the host.
    Refused,
    /// It ran to its end.
    Finished,
    /// It was ended, or failed: the code of the error.
    Ended(String),
}

static WORLDS: LazyLock<[World; 2]> = LazyLock::new(|| [false, true].map(World::new));

/// A daemon with the bundled models, in which components run, and another user of it.
pub struct Components {
    daemon: Daemon,
    runtime: Runtime,
    /// What the other user's tokens are, alone.
    expected: Vec<Token>,
    /// What users held before there was a guest.
    idle: [u64; 3],
}

impl std::fmt::Debug for Components {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Components").finish_non_exhaustive()
    }
}

impl Components {
    /// Starts a daemon in this process. `compiler` is a program that is `trellis` as well, and tries out grammars.
    ///
    /// # Panics
    /// It does not start.
    #[must_use]
    pub fn start(compiler: PathBuf, cache_dir: PathBuf) -> Self {
        // So little that guests come to each end of it, and none takes long.
        let limits = GuestLimits {
            cpu_ms: 300,
            deadline_ms: 60_000,
            memory_bytes: 4 << 20,
            n_contexts: 6,
            n_handles: 24,
            n_pages: 24,
            n_tokens: 400,
            n_programs: 2,
            call_bytes: 64 << 10,
            host_bytes: 1 << 20,
            constraint_compile_ms: 1_000,
            ..GuestLimits::default()
        };
        let config = Config {
            models: vec!["tiny".to_owned(), "draft".to_owned()],
            device: Device::Cpu,
            compile_exe: Some(compiler),
            cache_dir: Some(cache_dir),
            // What one process has saved is nothing to the next.
            saved_contexts: SavedContexts::Memory,
            limits,
            ..Config::default()
        };
        let daemon = Daemon::start(&config, &|_| {}).expect("the daemon starts");
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .expect("a runtime");
        let idle = fuzzing::held(daemon.service());
        let mut components = Self { daemon, runtime, expected: Vec::new(), idle };
        // One that does nothing.
        let Made { wasm, .. } = make(WORLDS.each_ref(), &[96]);
        components.runtime.block_on(async {
            components.compile(&wasm).expect("a component that does nothing is one");
            let end = components.run(wasm).await;
            assert!(end.is_none(), "{end:?}");
            nothing_is_held(&components.daemon, 0).await;
        });
        components.expected = components.runtime.block_on(other(&components.model()));
        components
    }

    fn model(&self) -> ModelHandle {
        self.daemon.model(Some("tiny")).expect("it is loaded")
    }

    fn compile(&self, wasm: &[u8]) -> Result<(), GuestError> {
        let user = ActorId(Actor::this_process().uid);
        fuzzing::compile(self.daemon.service().host(), user, wasm)
    }

    /// Runs the component that these bytes make, and says how it came out.
    ///
    /// # Panics
    /// The daemon fails, a component is refused that is one, a guest ends in another way than by what it did, something is still held
    /// when it has ended, or another user's tokens are others than without it.
    pub fn check(&self, input: &[u8]) -> Outcome {
        let Made { wasm, is_whole, .. } = make(WORLDS.each_ref(), input);
        match self.compile(&wasm) {
            Ok(()) => {}
            Err(error) => {
                assert!(!is_whole && is_about_the_component(&error), "{error}");
                return Outcome::Refused;
            }
        }
        self.runtime.block_on(async {
            let model = self.model();
            let run = tokio::time::timeout(PATIENCE, self.run(wasm));
            let (end, tokens) = tokio::join!(run, other(&model));
            assert_eq!(tokens, self.expected, "what another user draws beside it");
            let outcome = match end.expect("a guest ends") {
                None => Outcome::Finished,
                Some(Error::Daemon(body)) => {
                    assert!(ENDS.contains(&body.code.as_str()), "{body:?}");
                    Outcome::Ended(body.code.as_str().to_owned())
                }
                Some(error) => panic!("{error}"),
            };
            nothing_is_held(&self.daemon, SAVED_NAMES.len()).await;
            self.forget().await;
            nothing_is_held(&self.daemon, 0).await;
            let service = self.daemon.service();
            until("something is still on an account", || fuzzing::held(service) == self.idle).await;
            outcome
        })
    }

    /// How a guest ended, unless well.
    async fn run(&self, wasm: Vec<u8>) -> Option<Error> {
        let client = self.daemon.connect().await.expect("the daemon takes connections");
        let options = StartOptions { seed: Some(7), ..StartOptions::default() };
        let mut guest = client.start(Program::wasm(wasm), options).await.expect("the connection stands");
        // What waits for a message hears that there is none; a guest that has ended hears nothing.
        let _ = guest.end_messages().await;
        let mut end = None;
        while let Some(event) = guest.next().await {
            end = end.or(event.err());
        }
        end
    }

    /// Forgets what guests have saved.
    async fn forget(&self) {
        for model in self.daemon.service().host().models().iter() {
            for name in SAVED_NAMES {
                // Most have saved nothing.
                let _ = model.forget(&owner(Actor::this_process().uid), name).await;
            }
        }
    }
}

/// Whether a component was refused for what it is.
fn is_about_the_component(error: &GuestError) -> bool {
    use GuestError::{
        CoreModule, Invalid, MissingRun, NeedsTooMuch, NotWasm, UnknownImport, WrongType, WrongVersion,
    };
    matches!(
        error,
        CoreModule
            | Invalid { .. }
            | MissingRun { .. }
            | NeedsTooMuch { .. }
            | NotWasm { .. }
            | UnknownImport { .. }
            | WrongType { .. }
            | WrongVersion { .. }
    )
}

fn owner(user: u32) -> Owner {
    Owner {
        actor: ActorId(user),
        session: SessionId(u64::MAX),
        guest: GuestId(u64::MAX),
        account: Account::new("guest", Budget::UNLIMITED, None),
    }
}

/// Some tokens of a seeded stream of another user.
async fn other(model: &ModelHandle) -> Vec<Token> {
    let prompt = model.model().tokenizer.encode(PROMPT, SpecialTokens::AsText).expect("the text encodes");
    let mut context = Context::create(model, owner(OTHER_USER)).await.expect("it has no limit");
    context.append(&prompt).await.expect("it fits");
    let settings = || RunSettings {
        sampler: Arc::new(Sampler { temperature: 0.9, top_p: Some(0.95), seed: 11, ..Sampler::greedy() }),
        stop_tokens: Arc::new([]),
        n_tokens_max: Some(N_TOKENS),
        ahead: Ahead::Adaptive,
        masks: MaskSource::Sampler,
    };
    let mut tokens = Vec::new();
    while let Pull::Token(drawn) = context.pull(RunKey(0), settings).await.expect("it is drawn") {
        tokens.push(drawn.candidate.token);
    }
    assert_eq!(tokens.len(), N_TOKENS);
    tokens
}

/// Runs the component that these bytes make, in a daemon that is started for the first of them with what the environment names.
///
/// # Panics
/// As [`Components::check`], and where the environment does not name the program that tries out grammars.
pub fn check(input: &[u8]) {
    static COMPONENTS: LazyLock<Components> = LazyLock::new(|| {
        let compiler = std::env::var_os(COMPILER).unwrap_or_else(|| panic!("{COMPILER} is not set"));
        let folder = tempfile::tempdir().expect("a folder").keep();
        Components::start(compiler.into(), folder)
    });
    let _ = COMPONENTS.check(input);
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::random_input;

    #[test]
    fn every_function_is_called_and_components_are_as_they_have_to_be() {
        let mut called: [BTreeSet<String>; 2] = Default::default();
        for seed in 0..1_200 {
            let mut input = random_input(seed, 512);
            let is_former = seed % 3 == 0;
            // The encoder looks at each of them itself.
            input.insert(0, if is_former { 7 } else { 8 });
            let made = make(WORLDS.each_ref(), &input);
            assert!(made.is_whole);
            called[usize::from(is_former)].extend(made.names);
        }
        for (world, called) in WORLDS.iter().zip(&called) {
            let missing: Vec<&str> =
                world.calls.iter().map(|call| &*call.name).filter(|name| !called.contains(*name)).collect();
            assert!(missing.is_empty() && world.calls.len() > 50, "{missing:?} of {}", world.calls.len());
        }
    }
}
