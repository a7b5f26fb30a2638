//! The host API, called by a guest as bytes say: whatever it calls is answered or refused, and nothing of it is left.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use tokio::runtime::Runtime;
use trellis::config::{Config, Device};
use trellis::daemon::Daemon;
use trellis::guest::GuestLimits;
use trellis_client::{Error, Event, Program, StartOptions};

use crate::held::{PATIENCE, nothing_is_held};

/// Names the program that compiles guests, and the component of `tests/guests/hostile`, to a fuzzer.
pub const COMPILER: &str = "TRELLIS_FUZZ_COMPILER";
/// As [`COMPILER`], the component.
pub const GUEST: &str = "TRELLIS_FUZZ_GUEST";

/// How a guest may end that has made mistakes: by a limit of its own.
const ENDS: [&str; 2] = ["budget_exceeded", "deadline_exceeded"];

/// A daemon with the bundled models, and a guest that does what bytes say.
pub struct Host {
    daemon: Daemon,
    runtime: Runtime,
    wasm: Vec<u8>,
}

impl std::fmt::Debug for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Host").finish_non_exhaustive()
    }
}

impl Host {
    /// Starts a daemon in this process. `compiler` is a program that is `trellis` as well, and compiles guests.
    ///
    /// # Panics
    /// It does not start.
    #[must_use]
    pub fn start(compiler: PathBuf, cache_dir: PathBuf, wasm: Vec<u8>) -> Self {
        // So little that scripts come to each end of it.
        let limits = GuestLimits {
            compile_ms: 600_000,
            cpu_ms: 30_000,
            deadline_ms: 120_000,
            n_contexts: 12,
            n_handles: 60,
            n_pages: 48,
            n_tokens: 4_000,
            call_bytes: 1 << 20,
            ..GuestLimits::default()
        };
        let config = Config {
            models: vec!["tiny".to_owned(), "draft".to_owned()],
            device: Device::Cpu,
            compile_exe: Some(compiler),
            cache_dir: Some(cache_dir),
            limits,
            ..Config::default()
        };
        let daemon = Daemon::start(&config, &|_| {}).expect("the daemon starts");
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .expect("a runtime");
        Self { daemon, runtime, wasm }
    }

    /// Has the guest do what these bytes say.
    ///
    /// # Panics
    /// The guest traps, the daemon fails, or something is still held when the guest has ended.
    pub fn check(&self, input: &[u8]) {
        let hex: String = input.iter().map(|byte| format!("{byte:02x}")).collect();
        self.runtime.block_on(async {
            let end = tokio::time::timeout(PATIENCE, self.run(hex)).await.expect("a script ends");
            match end {
                None => {}
                Some(Error::Daemon(body)) => {
                    assert!(ENDS.contains(&body.code.as_str()), "{body:?}");
                    assert!(body.name.is_some() && body.limit.is_some(), "{body:?}");
                }
                Some(error) => panic!("{error}"),
            }
            nothing_is_held(&self.daemon, N_NAMES).await;
        });
    }

    /// How a script ended, unless well.
    async fn run(&self, hex: String) -> Option<Error> {
        let client = self.daemon.connect().await.expect("the daemon takes connections");
        let arguments = vec!["script".to_owned(), hex];
        let options = StartOptions { arguments, seed: Some(7), ..StartOptions::default() };
        let program = Program::wasm(self.wasm.clone());
        let mut guest = client.start(program, options).await.expect("the connection stands");
        let mut end = None;
        while let Some(event) = guest.next().await {
            match event {
                Ok(Event::Log { .. } | Event::Text { .. } | Event::Tokens { .. }) => {}
                Ok(_) => {}
                Err(error) => end = Some(error),
            }
        }
        end
    }
}

/// Names under which scripts save contexts.
const N_NAMES: usize = 3;

/// Has a guest do what these bytes say, in a daemon that is started for the first of them with what the environment names.
///
/// # Panics
/// As [`Host::check`], and where the environment names nothing.
pub fn check(input: &[u8]) {
    static HOST: LazyLock<Host> = LazyLock::new(|| {
        let path =
            |name: &str| PathBuf::from(std::env::var_os(name).unwrap_or_else(|| panic!("{name} is not set")));
        let (compiler, guest) = (path(COMPILER), path(GUEST));
        let wasm = std::fs::read(&guest).expect("the guest can be read");
        let beside: &Path = guest.parent().expect("a file is in a folder");
        Host::start(compiler, beside.join("fuzz-cache"), wasm)
    });
    HOST.check(input);
}
