//! What the daemon is told at start-up.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use trellis_engine::account::Budget;

use crate::guest::GuestLimits;

/// The daemon's settings. Every field has a default, so that the daemon starts without a file.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Models to load: names of bundled ones (`tiny`, `draft`) or folders in the Hugging Face layout. The first
    /// is the default.
    pub models: Vec<String>,
    /// What runs them.
    pub device: Device,
    /// Bytes of KV cache for each model. Memory is taken from the system as it is used.
    pub kv_bytes: u64,
    /// Bytes of host memory for the KV of contexts that had to make room, for each model.
    pub kv_host_bytes: u64,
    /// Tokens that one step computes at most.
    pub n_step_tokens: usize,
    /// Contexts that one step computes at most.
    pub n_step_rows: usize,
    /// Whether users share the prefix cache. One user could then tell by timing what another has asked.
    pub is_prefix_cache_shared: bool,
    /// Where the daemon listens; the runtime directory of its user when absent.
    pub socket: Option<PathBuf>,
    /// Where compiled guests are kept; `trellis` in the cache directory of its user when absent.
    pub cache_dir: Option<PathBuf>,
    /// Where guests that clients start by name lie, as `NAME.wasm`; none when absent.
    pub guests_dir: Option<PathBuf>,
    /// The executable that compiles guests when called with `compile-worker`; this one when absent.
    pub compile_exe: Option<PathBuf>,
    /// What a guest may use.
    pub limits: GuestLimits,
    /// What all guests of a session and of a user may use together.
    pub budgets: Budgets,
}

/// Budgets around those of single guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Budgets {
    /// All guests of one connection.
    pub session: SharedBudget,
    /// All guests of one user, and what they saved.
    pub user: SharedBudget,
}

/// The most of each resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SharedBudget {
    /// Tokens computed while the session, or the daemon, lasts.
    pub n_tokens: u64,
    /// KV pages held at once.
    pub n_pages: u64,
    /// Contexts open or saved at once.
    pub n_contexts: u64,
}

impl Default for Budgets {
    fn default() -> Self {
        // A TOML integer has 63 bits.
        let n_tokens = i64::MAX as u64;
        Self {
            session: SharedBudget { n_tokens, n_pages: 65_536, n_contexts: 4_096 },
            user: SharedBudget { n_tokens, n_pages: 65_536, n_contexts: 8_192 },
        }
    }
}

impl From<SharedBudget> for Budget {
    fn from(shared: SharedBudget) -> Self {
        let SharedBudget { n_tokens, n_pages, n_contexts } = shared;
        Self { n_tokens, n_pages, n_contexts }
    }
}

/// What runs the models.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    /// The best that this build can use.
    #[default]
    Auto,
    /// The processor.
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            models: vec!["tiny".to_owned()],
            device: Device::default(),
            kv_bytes: 256 << 20,
            kv_host_bytes: 256 << 20,
            n_step_tokens: 256,
            n_step_rows: 128,
            is_prefix_cache_shared: false,
            socket: None,
            cache_dir: None,
            guests_dir: None,
            compile_exe: None,
            limits: GuestLimits::default(),
            budgets: Budgets::default(),
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
        source: Box<toml::de::Error>,
    },
    /// A number outside its range.
    #[error("{field} is {value}, expected {expected}")]
    OutOfRange {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// The range.
        expected: &'static str,
    },
}

impl Config {
    /// Reads a TOML file.
    ///
    /// # Errors
    /// The file cannot be read, does not parse, has an unknown field or a number out of range.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text =
            fs::read_to_string(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        let config: Self = toml::from_str(&text)
            .map_err(|source| ConfigError::Parse { path: path.to_owned(), source: Box::new(source) })?;
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<(), ConfigError> {
        let positive = [
            ("models", self.models.len() as u64),
            ("n_step_tokens", self.n_step_tokens as u64),
            ("n_step_rows", self.n_step_rows as u64),
        ];
        for (field, value) in positive {
            if value == 0 {
                return Err(ConfigError::OutOfRange { field, value, expected: "at least 1" });
            }
        }
        // Decode rows go first; a step of nothing but decode rows has to leave tokens for prompts.
        if self.n_step_tokens <= self.n_step_rows {
            return Err(ConfigError::OutOfRange {
                field: "n_step_tokens",
                value: self.n_step_tokens as u64,
                expected: "more than n_step_rows",
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
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
            ("draft", Device::Cpu, 1 << 20)
        );
        let unknown = load("modles = ['draft']").expect_err("a typo");
        assert!(unknown.to_string().contains("modles"), "{unknown}");
        assert!(matches!(load("models = []"), Err(ConfigError::OutOfRange { field: "models", .. })));
        assert!(matches!(
            load("n_step_rows = 256"),
            Err(ConfigError::OutOfRange { field: "n_step_tokens", .. })
        ));
        assert!(matches!(Config::load(Path::new("/nonexistent")), Err(ConfigError::Read { .. })));
    }

    #[test]
    fn the_defaults_hold_together() {
        Config::default().check().expect("defaults are valid");
    }
}
