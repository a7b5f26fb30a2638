//! The file of settings: whether a daemon can read it, whom its classes and permissions name, and whether its policy begins.

use std::path::{Path, PathBuf};

use super::finding::{Check, Code, Finding};
use crate::classes::Classes;
use crate::config::{Config, ConfigError, PermissionSettings};
use crate::daemon::cache_dir;
use crate::guest::{Policy, make_private};
use crate::permissions::Permissions;

/// Reads the file, if there is one; the settings are the defaults where it cannot be read.
pub(super) fn check(file: Option<&Path>) -> (Check, Config) {
    let check = Check::new("config", "no file is given, and nothing is set");
    let Some(file) = file else { return (check, Config::default()) };
    match Config::load(file) {
        Ok(config) => {
            let names: Vec<&str> = config.set_by_file.names().collect();
            let said = if names.is_empty() {
                "it sets nothing".to_owned()
            } else {
                format!("it sets {}", names.join(", "))
            };
            (Check::new("config", said).with(file.display().to_string()), config)
        }
        Err(error) => {
            let remedy = match error {
                ConfigError::Read { .. } => "give `--config` a file that this user can read".to_owned(),
                _ => format!(
                    "change it in {}; `trellis config show NAME` says what a setting is for",
                    file.display()
                ),
            };
            let whole = error.to_string();
            let said = whole.replace(&format!("{}: ", file.display()), "");
            (
                Check::found("config", Finding::problem(Code::ConfigBroken, said, remedy).with(whole)),
                Config::default(),
            )
        }
    }
}

/// Looks for the members of the classes among the users and groups of this machine.
pub(super) fn check_classes(config: &Config) -> Check {
    let said = match config.classes.len() {
        0 => "none: all users have the same share".to_owned(),
        n => format!("{n}, whose members the machine knows"),
    };
    match Classes::of(&config.classes) {
        Ok(_) => Check::new("classes", said),
        Err(error) => {
            let remedy = "`getent passwd` and `getent group` list whom the machine knows: change `[classes]`";
            Check::found("classes", Finding::problem(Code::ClassBroken, error.to_string(), remedy))
        }
    }
}

/// Looks for those whom permissions are given to.
pub(super) fn check_permissions(config: &Config) -> Check {
    let said = match config.permissions == PermissionSettings::default() {
        true => "everybody runs guests and brings components, the operator alone does all else",
        false => "given to users and groups that the machine knows",
    };
    match Permissions::of(&config.permissions) {
        Ok(_) => Check::new("permissions", said),
        Err(error) => {
            let remedy =
                "`getent passwd` and `getent group` list whom the machine knows: change `[permissions]`";
            Check::found("permissions", Finding::problem(Code::PermissionBroken, error.to_string(), remedy))
        }
    }
}

/// Compiles the policy, and has an instance of it begin. What it says of models is for the daemon to see.
pub(super) fn check_policy(config: &Config) -> Check {
    let found = |said: String| {
        let remedy = "change `[policy]`, or build its component again: `trellis check` says what it asks for";
        Check::found("policy", Finding::problem(Code::PolicyBroken, said, remedy))
    };
    // What is wrong with the cache is said of the cache.
    let dir: Option<PathBuf> = cache_dir(config).filter(|dir| make_private(dir).is_ok());
    let Some(dir) = dir else { return Check::new("policy", "not tried: there is no place for its code") };
    match Policy::open(&config.policy, &config.limits, &dir, config.compile_exe.as_deref()) {
        Ok(policy) => Check::new("policy", policy.map_or_else(|| "none".to_owned(), |policy| policy.shown())),
        Err(error) => found(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_cannot_be_read_is_told_from_one_that_is_wrong() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("trellis.toml");
        let (missing, _) = check(Some(&file));
        assert!(missing.findings[0].remedy.contains("--config"), "{missing:?}");
        std::fs::write(&file, "[sessions]\nn_conections = 7\n").expect("written");
        let (wrong, _) = check(Some(&file));
        assert!(wrong.findings[0].code == Code::ConfigBroken, "{wrong:?}");
        assert!(wrong.findings[0].said.contains("did you mean \"n_connections\"?"), "{wrong:?}");
        std::fs::write(&file, "models = ['draft']").expect("written");
        let (right, config) = check(Some(&file));
        assert_eq!((right.said.as_str(), config.models), ("it sets models", vec!["draft".to_owned()]));
    }

    #[test]
    fn a_member_that_the_machine_does_not_know_is_named() {
        let config =
            Config::parse("[classes.research]\nusers = ['nobody-of-this-name']\n").expect("it is TOML");
        let found = check_classes(&config).findings;
        assert!(
            found[0].code == Code::ClassBroken && found[0].said.contains("nobody-of-this-name"),
            "{found:?}"
        );
        assert!(check_classes(&Config::default()).findings.is_empty());
        let config = Config::parse("[permissions]\nload = ['@nobody-of-this-name']\n").expect("it is TOML");
        let found = check_permissions(&config).findings;
        assert!(
            found[0].code == Code::PermissionBroken && found[0].said.contains("nobody-of-this-name"),
            "{found:?}"
        );
        assert!(check_permissions(&Config::default()).findings.is_empty());
    }

    #[test]
    fn a_policy_that_is_not_there_is_a_problem() {
        let config = Config::parse("[policy]\ncomponent = '/no/such/policy.wasm'\n").expect("it is TOML");
        let folder = tempfile::tempdir().expect("a folder");
        let config = Config { cache_dir: Some(folder.path().join("cache")), ..config };
        assert_eq!(check_policy(&config).findings[0].code, Code::PolicyBroken);
        assert_eq!(check_policy(&Config { policy: Config::default().policy, ..config }).said, "none");
    }
}
