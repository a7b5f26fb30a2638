//! What the daemon is told at start-up.

mod budgets;
mod catalog;
mod class_limits;
pub(crate) mod classes;
mod device;
mod example;
mod file;
mod http;
mod isolation;
mod live;
mod log;
mod permissions;
mod seen;
mod settings;

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use documented::DocumentedFields;
use serde::{Deserialize, Serialize};
use trellis_engine::EngineSettings;
use trellis_engine::model::Dtype;

pub(crate) use self::budgets::HostBytes;
pub use self::budgets::{Budgets, SharedBudget};
pub use self::catalog::{Catalog, CatalogModel, WrongCatalog};
pub use self::class_limits::ClassLimits;
pub use self::classes::{ClassSettings, ClassTable, DEFAULT_CLASS, NameOrId, RANKS, SHARES, WrongClass};
pub use self::device::{Device, UnknownDevice};
pub(crate) use self::example::example;
pub use self::file::WrongText;
pub use self::http::{HttpListen, HttpSettings, NoHttpPlace};
pub use self::isolation::Isolation;
pub(crate) use self::isolation::Served;
pub use self::log::{LogFilter, WrongLogFilter};
pub use self::permissions::{NamesNobody, PermissionSettings, Who};
pub use self::seen::LogFormat;
use crate::guest::{COMPILE_BYTES_LEAST, GuestLimits, OWN_BYTES, PolicySettings};
use crate::limits::SetByFile;
use crate::session::SessionLimits;

/// The daemon's settings. Every field has a default, so that the daemon starts without a file.
#[derive(Clone, Debug, Serialize, Deserialize, DocumentedFields)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Models to load: names of bundled ones (`tiny`, `draft`), folders in the Hugging Face layout or of the Hugging Face cache,
    /// `shape:NAME` for random weights of a published shape, or names of the catalog. The first is the default. They stay loaded, but
    /// for those of the catalog that are not pinned. With a catalog there may be none: a guest then names the model that it wants, or
    /// gets the only one.
    pub models: Vec<String>,
    /// What runs them.
    pub device: Device,
    /// Type of weights, activations and KV cache.
    pub dtype: DtypeChoice,
    /// Bytes of KV cache for all models on a device together; how much of it each has follows what guests ask.
    /// When absent: on the CPU, which takes memory from the system as it is used, for each model 256 MiB or one context,
    /// whichever is more, up to 4 GiB; on a GPU what the weights leave. The longest context of each has to fit in it.
    pub kv_bytes: Option<u64>,
    /// Bytes that all models on a device may have together, KV cache included. When absent: on the CPU what the machine has available
    /// when the device is first used, on a GPU what is free then, but for a reserve. A model of the catalog that does not fit takes the
    /// place of others of the catalog that nobody uses.
    pub model_bytes: Option<u64>,
    /// Milliseconds for which a model of the catalog stays, once it is loaded, before it makes room for one that another user asks for:
    /// users who want different models share the device by turns, and none makes the daemon do nothing but load. What the same user
    /// has loaded in its place has the rest of that time.
    pub model_resident_ms: u64,
    /// Milliseconds for which whoever wants a model waits for others that are in use to come free, where the device has no room for one
    /// more; then that fails, and may be tried again. Who came first has the room first. After a quarter of this, and three seconds at
    /// most, models in the way take no new guests until those go that use them, for half of this and ten seconds at most.
    pub model_wait_ms: u64,
    /// Bytes of host memory for the KV of contexts that had to make room, for each model; when absent 256 MiB on the
    /// CPU, and 1 GiB, locked in memory as KV moves there, with a GPU.
    pub kv_host_bytes: Option<u64>,
    /// Tokens up to which prompts fill a step, and guesses beside them; when absent 256 on the CPU, 2048 on a GPU.
    /// Contexts that decode may be more, and leave as many tokens to prompts as they are.
    pub n_step_tokens: Option<usize>,
    /// Contexts that one step computes at most; when absent 1024. On a GPU the memory of a step is laid out for twice as many
    /// tokens, or for `n_step_tokens` where those are more.
    pub n_step_rows: Option<usize>,
    /// The latency target: how many times as long a step may last, while contexts decode, as it would without prompts;
    /// at least 1. More computes prompts faster and makes streams wait longer for each token.
    pub latency_multiple: f64,
    /// Whether users share the prefix cache. One user could then tell by timing what another has asked.
    pub is_prefix_cache_shared: bool,
    /// Where the daemon listens, unless `--socket` or the environment's `TRELLIS_SOCKET` say otherwise; the runtime directory of its
    /// user when absent.
    pub socket: Option<PathBuf>,
    /// Where compiled guests are kept; `trellis` in the cache directory of its user when absent.
    pub cache_dir: Option<PathBuf>,
    /// Where contexts live that guests save: with `disk` they are kept in `state_dir` as well, and outlive the daemon.
    pub saved_contexts: SavedContexts,
    /// Where saved contexts are kept; `trellis` in the state directory of its user when absent.
    pub state_dir: Option<PathBuf>,
    /// Bytes on disk of contexts that a user saved. Those that were used longest ago go for a new one.
    pub saved_disk_bytes_per_user: u64,
    /// Bytes on disk of contexts that all users saved. Past it those of the user with most go that were used longest ago.
    pub saved_disk_bytes: u64,
    /// Where guests that clients start by name lie, as `NAME.wasm`; none when absent. The folder has to be there when the daemon starts.
    pub guests_dir: Option<PathBuf>,
    /// The executable of the daemon's children, which compile guests, try out grammars, and run guests when called with `compile-worker`,
    /// `trial-worker`, and `guest-worker`; this one when absent.
    pub compile_exe: Option<PathBuf>,
    /// Where guests run: `thread` for threads of the daemon, where guests are trusted; `process` for a process of each user, which
    /// needs Linux. `auto`: by process where root runs the daemon or others may come to its socket, as to that of the service; otherwise
    /// in threads, and others but root are turned away if they come later.
    pub isolation: Isolation,
    /// What becomes of the daemon when the device fails. Its guests are ended either way, and its contexts are gone.
    pub on_device_failure: OnDeviceFailure,
    /// Where the daemon answers Prometheus, as `127.0.0.1:9464`: its metrics, of all users together, are at `/metrics` there. Only a
    /// loopback address, and every local user may ask there; nowhere when absent. Not under the packaged unit, which is shut off from
    /// every network: `trellis-metrics.socket` hands it the socket, and this stays absent.
    pub metrics_listen: Option<SocketAddr>,
    /// What the log is: `text` or `json` for lines on standard error, or `journald` for entries of systemd's journal with their fields.
    pub log_format: LogFormat,
    /// Bytes of the newest lines of the log that are kept in memory, for `trellis logs`; at least 32 KiB.
    pub log_bytes: usize,
    /// What to log, unless `--log` says otherwise: `error`, `warn`, `info`, `debug`, `trace`, `off`, or a filter such as
    /// `trellis=debug`.
    pub log: LogFilter,
    /// What a guest may use.
    pub limits: GuestLimits,
    /// What all guests of a session, of a user and of the daemon may use together.
    pub budgets: Budgets,
    /// What connections may ask for.
    pub sessions: SessionLimits,
    /// Classes of users by name, for those who have more or less of the device than others; none by default, so that all share
    /// alike. A user who is in none has the class `default`.
    pub classes: ClassTable,
    /// Who may do what.
    pub permissions: PermissionSettings,
    /// Models that are loaded when a guest asks for them, by the names that guests ask for; none by default. Any user may cause such a
    /// load, and no user any other: what stands here is what users may have the daemon read.
    pub catalog: Catalog,
    /// Requests in the form of HTTP APIs.
    pub http: HttpSettings,
    /// What the operator puts between guests and their clients, and in front of all samplers.
    pub policy: PolicySettings,
    /// What a file has set of all this.
    #[serde(skip)]
    pub set_by_file: SetByFile,
}

/// Type of weights, activations and KV cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DtypeChoice {
    /// That of the model's files on a GPU, `f32` on the CPU.
    #[default]
    Auto,
    /// 32 bits; the only one that the CPU computes in.
    F32,
    /// 16 bits, 11 of them for digits.
    F16,
    /// 16 bits, 8 of them for digits, and the range of `f32`.
    Bf16,
}

impl DtypeChoice {
    /// The type that was chosen; `None` when that is left to the device.
    #[must_use]
    pub fn chosen(self) -> Option<Dtype> {
        match self {
            Self::Auto => None,
            Self::F32 => Some(Dtype::F32),
            Self::F16 => Some(Dtype::F16),
            Self::Bf16 => Some(Dtype::Bf16),
        }
    }
}

/// Where saved contexts live.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SavedContexts {
    /// With their model in the daemon, and on disk.
    #[default]
    Disk,
    /// With their model in the daemon alone: what is saved is forgotten with the one or the other.
    Memory,
}

/// What becomes of a daemon whose device has failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnDeviceFailure {
    /// It ends, with an exit status of its own, so that whatever watches over it starts another.
    #[default]
    Exit,
    /// It opens the device again and loads the models again, but for those of the catalog that are not pinned, which come back when a
    /// guest asks for them. If that fails, or the device fails again at once, it ends.
    Reopen,
}

/// Sizes that the settings leave to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Bytes of host memory to move KV to, for each model.
    pub kv_host_bytes: u64,
    /// Tokens up to which prompts fill a step, and guesses beside them.
    pub n_step_tokens: usize,
    /// Contexts in one step.
    pub n_step_rows: usize,
}

impl Sizes {
    /// For the processor: a step of 256 tokens of a small model takes about as long as people wait for a token. Memory for more
    /// rows is taken when they come.
    pub const CPU: Self = Self { kv_host_bytes: 256 << 20, n_step_tokens: 256, n_step_rows: 1024 };
    /// For a GPU: products are bound by arithmetic from a few hundred tokens on.
    pub const CUDA: Self = Self { kv_host_bytes: 1 << 30, n_step_tokens: 2048, n_step_rows: 1024 };

    /// Tokens in one step at most: decode rows go first, and a step of nothing but those has to leave tokens for prompts.
    #[must_use]
    pub fn n_tokens_max(&self) -> usize {
        self.n_step_tokens.max(self.n_step_rows.saturating_mul(2))
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            models: vec!["tiny".to_owned()],
            device: Device::default(),
            dtype: DtypeChoice::default(),
            kv_bytes: None,
            model_bytes: None,
            model_resident_ms: 30_000,
            model_wait_ms: 60_000,
            kv_host_bytes: None,
            n_step_tokens: None,
            n_step_rows: None,
            latency_multiple: EngineSettings::default().latency_multiple,
            is_prefix_cache_shared: false,
            socket: None,
            cache_dir: None,
            saved_contexts: SavedContexts::default(),
            state_dir: None,
            saved_disk_bytes_per_user: 4 << 30,
            saved_disk_bytes: 16 << 30,
            guests_dir: None,
            compile_exe: None,
            isolation: Isolation::default(),
            on_device_failure: OnDeviceFailure::default(),
            metrics_listen: None,
            log_format: LogFormat::default(),
            log_bytes: 256 << 10,
            log: LogFilter::default(),
            limits: GuestLimits::default(),
            budgets: Budgets::default(),
            sessions: SessionLimits::default(),
            classes: ClassTable::default(),
            permissions: PermissionSettings::default(),
            catalog: Catalog::default(),
            http: HttpSettings::default(),
            policy: PolicySettings::default(),
            set_by_file: SetByFile::default(),
        }
    }
}

/// A configuration file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// It cannot be read.
    #[error("{}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is not what was expected; the message names line, field and value.
    #[error("{}: {source}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// What is wrong where.
        source: WrongText,
    },
    /// A class that cannot be.
    #[error("{}: {source}", path.display())]
    Class {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: WrongClass,
    },
    /// A model of the catalog that cannot be.
    #[error("{}: {source}", path.display())]
    Catalog {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: WrongCatalog,
    },
    /// A number outside its range.
    #[error("{field} is {value}, expected {expected}")]
    OutOfRange {
        /// The field.
        field: &'static str,
        /// Its value.
        value: f64,
        /// The range.
        expected: String,
    },
    /// An address for metrics that is not only for this machine.
    #[error(
        "metrics_listen is {address}, which other machines reach: expected a loopback address, as 127.0.0.1:9464"
    )]
    NotLoopback {
        /// The address.
        address: SocketAddr,
    },
    /// Settings for a policy that there is none of.
    #[error("policy.settings has {names}, and policy.component names no policy that they would be for")]
    NoPolicy {
        /// Their names.
        names: String,
    },
}

impl Config {
    /// Reads a TOML file.
    ///
    /// # Errors
    /// The file cannot be read, does not parse, has an unknown field or a number out of range.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text =
            file::read_text(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        let config =
            Self::parse(&text).map_err(|source| ConfigError::Parse { path: path.to_owned(), source })?;
        config.check()?;
        classes::check(&config.classes)
            .map_err(|source| ConfigError::Class { path: path.to_owned(), source })?;
        catalog::check(&config.catalog)
            .map_err(|source| ConfigError::Catalog { path: path.to_owned(), source })?;
        Ok(config)
    }

    fn check(&self) -> Result<(), ConfigError> {
        let least = [
            ("models", Some(self.models.len() + self.catalog.len()), 1, "at least 1"),
            ("n_step_rows", self.n_step_rows, 1, "at least 1"),
            ("n_step_tokens", self.n_step_tokens, 2, "at least 2"),
            ("sessions.n_connections", Some(self.sessions.n_connections), 1, "at least 1"),
            ("sessions.n_connections_per_s", Some(self.sessions.n_connections_per_s), 1, "at least 1"),
            ("sessions.n_requests", Some(self.sessions.n_requests), 1, "at least 1"),
            ("sessions.n_uploads", Some(self.sessions.n_uploads), 1, "at least 1"),
            ("sessions.hello_ms", usize::try_from(self.sessions.hello_ms).ok(), 1, "at least 1"),
        ];
        for (field, value, least, expected) in least {
            if let Some(value) = value.filter(|&value| value < least) {
                let expected = expected.to_owned();
                return Err(ConfigError::OutOfRange { field, value: value as f64, expected });
            }
        }
        // With less no guest would ever run, and each would be told that it may try again.
        let GuestLimits { process_memory_bytes, compile_memory_bytes, .. } = self.limits;
        for (field, value, least) in [
            ("limits.process_memory_bytes", process_memory_bytes, OWN_BYTES),
            ("limits.compile_memory_bytes", compile_memory_bytes, COMPILE_BYTES_LEAST),
        ] {
            if let Some(value) = value.filter(|&value| value < least) {
                let expected = format!("at least {least}");
                return Err(ConfigError::OutOfRange { field, value: value as f64, expected });
            }
        }
        seen::check(self.metrics_listen, self.log_bytes)?;
        http::check(&self.http)?;
        let PolicySettings { component, settings, .. } = &self.policy;
        if component.is_none() && !settings.is_empty() {
            let names = settings.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
            return Err(ConfigError::NoPolicy { names });
        }
        if self.latency_multiple.is_nan() || self.latency_multiple < 1.0 {
            return Err(ConfigError::OutOfRange {
                field: "latency_multiple",
                value: self.latency_multiple,
                expected: "at least 1".to_owned(),
            });
        }
        Ok(())
    }

    /// Bytes of host memory of each level of budgets on a machine, or in a control group, with so much memory.
    pub(crate) fn host_bytes(&self, memory_bytes: u64) -> HostBytes {
        let user_most = match self.isolation {
            Isolation::Auto | Isolation::Thread => u64::MAX,
            Isolation::Process => self.limits.process_bytes(memory_bytes).for_budgets(),
        };
        self.budgets.host_bytes(memory_bytes, user_most)
    }

    /// The sizes, with those of the device where the settings say nothing.
    #[must_use]
    pub fn sizes(&self, device: Sizes) -> Sizes {
        Sizes {
            kv_host_bytes: self.kv_host_bytes.unwrap_or(device.kv_host_bytes),
            n_step_tokens: self.n_step_tokens.unwrap_or(device.n_step_tokens),
            n_step_rows: self.n_step_rows.unwrap_or(device.n_step_rows),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn load(text: &str) -> Result<Config, ConfigError> {
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        fs::write(file.path(), text).expect("written");
        Config::load(file.path())
    }

    #[test]
    fn a_file_may_set_what_it_likes_and_nothing_else() {
        let config = load("models = ['draft']\ndevice = 'cpu'\nkv_bytes = 1048576\n").expect("valid");
        assert_eq!(
            (config.models[0].as_str(), config.device, config.kv_bytes),
            ("draft", Device::Cpu, Some(1 << 20))
        );
        let unknown = load("modles = ['draft']").expect_err("a typo");
        assert!(unknown.to_string().contains("modles"), "{unknown}");
        assert_eq!(config.on_device_failure, OnDeviceFailure::Exit);
        let reopens = load("on_device_failure = 'reopen'").expect("valid");
        assert_eq!(reopens.on_device_failure, OnDeviceFailure::Reopen);
        assert!(matches!(load("models = []"), Err(ConfigError::OutOfRange { field: "models", .. })));
        assert!(matches!(
            load("n_step_tokens = 1"),
            Err(ConfigError::OutOfRange { field: "n_step_tokens", value: 1.0, .. })
        ));
        let error = load("latency_multiple = 0.5").expect_err("too small");
        assert_eq!(error.to_string(), "latency_multiple is 0.5, expected at least 1");
        assert!(matches!(load("n_step_rows = 0"), Err(ConfigError::OutOfRange { field: "n_step_rows", .. })));
        let error = load("[sessions]\nn_connections = 0").expect_err("nobody could come in");
        assert_eq!(error.to_string(), "sessions.n_connections is 0, expected at least 1");
        for path in ["/nonexistent", "/dev/zero"] {
            assert!(matches!(Config::load(Path::new(path)), Err(ConfigError::Read { .. })), "{path}");
        }
    }

    #[test]
    fn settings_of_no_policy_are_refused() {
        let error = load("[policy.settings]\nkey = '1'\nisolation = 'process'").expect_err("no component");
        assert!(error.to_string().starts_with("policy.settings has isolation, key, and"), "{error}");
        assert!(load("[policy]\ncomponent = 'p.wasm'\n[policy.settings]\nkey = '1'").is_ok());
    }

    #[test]
    fn processes_that_nothing_could_run_in_are_refused() {
        let least = |field: &str, n_bytes: u64| format!("[limits]\n{field} = {n_bytes}");
        for (field, least_bytes) in
            [("process_memory_bytes", OWN_BYTES), ("compile_memory_bytes", COMPILE_BYTES_LEAST)]
        {
            for n_bytes in [0, 64 << 20, least_bytes - 1] {
                let error = load(&least(field, n_bytes)).expect_err("too small").to_string();
                assert_eq!(error, format!("limits.{field} is {n_bytes}, expected at least {least_bytes}"));
            }
            assert!(load(&least(field, least_bytes)).is_ok(), "{field}");
        }
    }

    #[test]
    fn the_defaults_hold_together() {
        Config::default().check().expect("defaults are valid");
    }

    #[test]
    fn what_is_not_said_fits_what_is() {
        let sizes = |text: &str| load(text).expect("valid").sizes(Sizes::CPU);
        assert_eq!(sizes(""), Sizes::CPU);
        assert_eq!(load("").expect("valid").sizes(Sizes::CUDA), Sizes::CUDA);
        assert_eq!(sizes("kv_host_bytes = 0").kv_host_bytes, 0);
        for (text, n_rows, n_tokens, n_tokens_max) in [
            ("n_step_rows = 5000", 5000, 256, 10_000),
            ("n_step_tokens = 2", 1024, 2, 2048),
            ("n_step_tokens = 3000", 1024, 3000, 3000),
            ("n_step_rows = 1", 1, 256, 256),
            ("n_step_rows = 256\nn_step_tokens = 256", 256, 256, 512),
        ] {
            let sizes = sizes(text);
            let seen = (sizes.n_step_rows, sizes.n_step_tokens, sizes.n_tokens_max());
            assert_eq!(seen, (n_rows, n_tokens, n_tokens_max), "{text}");
        }
    }

    #[test]
    fn a_step_of_any_device_takes_the_widest_beams_and_leaves_tokens_for_prompts() {
        for device in [Sizes::CPU, Sizes::CUDA] {
            assert_eq!(device.n_step_rows, 1024);
            assert!(device.n_tokens_max() > device.n_step_rows, "{device:?}");
        }
    }

    #[test]
    fn a_configuration_survives_being_written_down() {
        let config = load("dtype = 'bf16'\nkv_bytes = 7\nn_step_rows = 9").expect("valid");
        let text = toml::to_string(&config).expect("it serialises");
        let again = load(&text).expect("valid");
        assert_eq!((again.dtype, again.kv_bytes, again.n_step_rows), (DtypeChoice::Bf16, Some(7), Some(9)));
        assert_eq!(again.n_step_tokens, None);
        assert_eq!(again.dtype.chosen(), Some(Dtype::Bf16));
    }
}
