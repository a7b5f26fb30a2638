//! What a start asks of a configuration, asked without starting: before a reload takes it, and of a file that no daemon has yet.
//!
//! - Comes in: a configuration, and the user that a daemon would run as.
//! - Goes out: the first thing that a start would refuse, in the words of the start; or what it would have.
//! - Where guests are to run in processes of their own, one is started and confined. Of the models the heads are read, and they are compared with the memory that they may have; a policy is compiled, begins, and says
//!   what it puts in front of each model, as at a start. What others have taken of a device, a socket or a port at that moment,
//!   the start alone finds out.
//! - Must not happen: a folder that is made, a device that is opened, a weight that is read.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use trellis_engine::model::Model;

use crate::classes::Classes;
use crate::config::Config;
use crate::daemon::{DaemonError, cache_dir};
use crate::guest::{GuestError, GuestHost, Policy, check_private};
use crate::loader::check_models;
use crate::permissions::Permissions;

/// Whose a daemon would be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Starter {
    /// This process's user.
    Own,
    /// The user of a service, by its number where it is there, which has a folder for its cache where the configuration names none.
    Service(Option<u32>),
}

/// What a daemon would have with a configuration.
#[derive(Debug)]
pub(crate) struct Startable {
    pub(crate) classes: Classes,
    pub(crate) permissions: Permissions,
    /// Those that are loaded at the start.
    pub(crate) models: Vec<Model>,
}

impl Startable {
    /// What a reload would have hold at once, which needs none of the models.
    ///
    /// # Errors
    /// A daemon would not start with it.
    pub(crate) fn at_once(config: &Config) -> Result<Self, DaemonError> {
        let classes = Classes::of(&config.classes)?;
        let permissions = Permissions::of(&config.permissions)?;
        Ok(Self { classes, permissions, models: Vec::new() })
    }
}

/// Asks what a start would.
///
/// # Errors
/// A daemon would not start with it.
pub(crate) fn check(config: &Config, starter: Starter) -> Result<Startable, DaemonError> {
    let cache = check_cache(config, starter)?;
    check_guests_dir(config)?;
    let at_once = Startable::at_once(config)?;
    GuestHost::check_isolation(config.isolation, config.compile_exe.as_deref())?;
    let policy = open_policy(config, cache.as_deref())?;
    let models = check_models(config)?;
    if let Some(policy) = policy {
        for model in &models {
            policy.front(model, model.config.n_positions)?;
        }
    }
    Ok(Startable { models, ..at_once })
}

/// Whether the guests that go by name can be listed.
///
/// # Errors
/// The folder is not there, or cannot be read.
pub(crate) fn check_guests_dir(config: &Config) -> Result<(), DaemonError> {
    let Some(path) = &config.guests_dir else { return Ok(()) };
    let listed = std::fs::read_dir(path).map(drop);
    listed.map_err(|source| DaemonError::GuestsDir { path: path.clone(), source })
}

/// The folder of compiled guests, where this process may use it and it is there.
fn check_cache(config: &Config, starter: Starter) -> Result<Option<PathBuf>, DaemonError> {
    match (starter, &config.cache_dir) {
        (Starter::Own, _) => {
            let dir = cache_dir(config).ok_or(DaemonError::NoCacheDir)?;
            check_private(&dir, rustix::process::geteuid().as_raw())?;
            Ok(Some(dir).filter(|dir| dir.is_dir()))
        }
        (Starter::Service(Some(uid)), Some(dir)) => Ok(check_private(dir, uid).map(|()| None)?),
        (Starter::Service(_), _) => Ok(None),
    }
}

/// Without a cache its code is kept in a folder that goes again.
fn open_policy(config: &Config, cache: Option<&Path>) -> Result<Option<Arc<Policy>>, DaemonError> {
    if config.policy.component.is_none() {
        return Ok(None);
    }
    let open = |dir: &Path| Policy::open(&config.policy, &config.limits, dir, config.compile_exe.as_deref());
    match cache {
        Some(dir) => Ok(open(dir)?),
        None => {
            let made = tempfile::tempdir();
            let dir = made.map_err(|error| GuestError::Cache {
                path: std::env::temp_dir(),
                reason: error.to_string(),
            })?;
            Ok(open(dir.path())?)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(config: &Config) -> String {
        check(config, Starter::Own).expect_err("a start would refuse it").to_string()
    }

    #[test]
    fn what_a_start_would_refuse_is_refused_in_its_words_and_nothing_is_made() {
        let folder = tempfile::tempdir().expect("a folder");
        let cache = folder.path().join("cache");
        let base = Config {
            cache_dir: Some(cache.clone()),
            device: crate::config::Device::Cpu,
            ..Config::default()
        };
        let startable = check(&base, Starter::Own).expect("it starts");
        assert_eq!(startable.models.iter().map(|model| model.name.as_str()).collect::<Vec<_>>(), ["tiny"]);
        assert!(!cache.exists());

        let file = folder.path().join("file");
        std::fs::write(&file, "").expect("written");
        let config = Config { cache_dir: Some(file.clone()), ..base.clone() };
        assert!(refused(&config).ends_with("file: not a folder"), "{}", refused(&config));
        for wrong in [file, folder.path().join("nowhere")] {
            let config = Config { guests_dir: Some(wrong.clone()), ..base.clone() };
            let said = refused(&config);
            assert!(said.starts_with(&format!("guests_dir {}: ", wrong.display())), "{said}");
            assert_eq!(check_guests_dir(&config).expect_err("as the start").to_string(), said);
        }
        let mut config = base.clone();
        config.policy.component = Some("/no/such/policy.wasm".into());
        assert!(refused(&config).starts_with("the policy /no/such/policy.wasm: "), "{}", refused(&config));
        assert!(!cache.exists());
    }

    #[test]
    fn of_a_service_the_cache_is_looked_at_where_the_file_names_one() {
        let folder = tempfile::tempdir().expect("a folder");
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        std::fs::set_permissions(folder.path(), mode).expect("its mode is set");
        let own = rustix::process::geteuid().as_raw();
        let config = Config { cache_dir: Some(folder.path().to_owned()), ..Config::default() };
        let of = |config: &Config, starter| check_cache(config, starter).map_err(|error| error.to_string());
        assert_eq!(of(&config, Starter::Service(Some(own))), Ok(None));
        assert!(
            of(&config, Starter::Service(Some(own + 1))).expect_err("another's").contains("belongs to user")
        );
        assert_eq!(of(&config, Starter::Service(None)), Ok(None));
        assert_eq!(of(&Config::default(), Starter::Service(Some(own + 1))), Ok(None));
    }
}
