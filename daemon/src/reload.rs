//! A configuration that is read again while the daemon runs.
//!
//! - Comes in: that it is to be read again, and where it is from ([`Origin`]).
//! - Goes out: the settings that hold from now on, and those that would with another start; or what is wrong, and then nothing has
//!   changed.
//! - Who may do what, classes, what connections may ask for, and what is logged are changed at once: what was begun goes on, and what is
//!   asked next is held to the new. All else waits: it says how memory and devices were laid out when the daemon started.
//! - What a start would refuse is refused in the words of the start (`start_check`), also where it is of what waits. Where nothing of
//!   that has changed since it was looked at last, folders, models and the policy are not looked at: a permission is revoked while a
//!   model's folder is away.
//! - Must not happen: some of a file that is applied, where another part of it is wrong; a change that is not told.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use serde_json::Value;
use tokio_util::sync::CancellationToken;
use trellis_wire::{ReloadInfo, SettingChange};

use crate::accounts::Accounts;
use crate::config::{Config, ConfigError};
use crate::daemon::DaemonError;
use crate::live::Live;
use crate::loader::Loader;
use crate::permissions::Permissions;
use crate::service::HostService;
use crate::session::Sessions;
use crate::start_check::{self, Startable, Starter};
use crate::tasks::blocking;

/// Where the configuration of a daemon is from.
pub trait Origin: Send + Sync {
    /// Reads it again: the file, with what the command line and the environment say over it, as at the start.
    ///
    /// # Errors
    /// It cannot be read, or is wrong.
    fn read(&self) -> Result<Config, ConfigError>;

    /// It is about to be read.
    fn begins(&self) {}

    /// What has come of it; the configuration is what holds now.
    fn ends(&self, _outcome: &Result<ReloadInfo, ReloadError>, _config: &Config) {}
}

/// Why a configuration was not taken.
#[derive(Debug, thiserror::Error)]
pub enum ReloadError {
    /// There is nothing to be read.
    #[error("this daemon has its configuration from no file")]
    NoOrigin,
    /// The daemon is about to go down.
    #[error("the daemon is about to go down")]
    Ending,
    /// The daemon itself failed over it.
    #[error("it could not be read again: the daemon failed over it, which is a defect")]
    Panicked,
    /// It is wrong by itself.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// No daemon would start with it.
    #[error(transparent)]
    Daemon(#[from] DaemonError),
}

/// What a reload changes.
pub(crate) struct Reload {
    origin: OnceLock<Arc<dyn Origin>>,
    turn: Mutex<()>,
    running: Arc<Live<Config>>,
    permissions: Arc<Live<Permissions>>,
    accounts: Arc<Accounts>,
    sessions: OnceLock<Weak<Sessions<HostService>>>,
    loader: OnceLock<Weak<Loader>>,
    /// What a start was last asked about that waits, and would take.
    checked: Mutex<Option<Config>>,
    shutdown: CancellationToken,
}

impl Reload {
    pub(crate) fn new(
        config: Config,
        permissions: Arc<Live<Permissions>>,
        accounts: Arc<Accounts>,
        shutdown: CancellationToken,
    ) -> Arc<Self> {
        Arc::new(Self {
            origin: OnceLock::new(),
            turn: Mutex::default(),
            running: Arc::new(Live::new(config)),
            permissions,
            accounts,
            sessions: OnceLock::new(),
            loader: OnceLock::new(),
            checked: Mutex::default(),
            shutdown,
        })
    }

    /// The configuration that holds now.
    pub(crate) fn running(&self) -> Arc<Config> {
        self.running.get()
    }

    /// Says where the configuration is read again from.
    pub(crate) fn set_origin(&self, origin: Arc<dyn Origin>) {
        // A daemon has one, which is said before it serves.
        let _ = self.origin.set(origin);
    }

    /// Says which sessions are held to it.
    pub(crate) fn set_sessions(&self, sessions: &Arc<Sessions<HostService>>) {
        let _ = self.sessions.set(Arc::downgrade(sessions));
    }

    /// Says who loads models: those that have failed may be tried at once after a reload.
    pub(crate) fn set_loader(&self, loader: &Arc<Loader>) {
        let _ = self.loader.set(Arc::downgrade(loader));
    }

    /// Reads the configuration again, and has hold of it what can.
    ///
    /// # Errors
    /// What is wrong; nothing has changed then.
    pub(crate) async fn reload(self: &Arc<Self>) -> Result<ReloadInfo, ReloadError> {
        let this = self.clone();
        // A daemon that is about to go down waits for it: what it has compiled there ends before another program takes its place.
        let work = self.sessions().map(|sessions| sessions.at_work());
        // To its end, also where nobody waits for that.
        blocking(move || {
            let _work = work;
            let _turn = this.turn.lock().unwrap_or_else(PoisonError::into_inner);
            let origin = this.origin.get().ok_or(ReloadError::NoOrigin)?;
            if this.is_ending() {
                return Err(ReloadError::Ending);
            }
            origin.begins();
            // What has begun is said to have ended, come what may.
            let outcome = catch_unwind(AssertUnwindSafe(|| this.take(&**origin)));
            let outcome = outcome.unwrap_or(Err(ReloadError::Panicked));
            origin.ends(&outcome, &this.running());
            outcome
        })
        .await
    }

    /// Whether the daemon takes on nothing more.
    fn is_ending(&self) -> bool {
        self.shutdown.is_cancelled() || self.sessions().is_some_and(|sessions| sessions.is_draining())
    }

    fn sessions(&self) -> Option<Arc<Sessions<HostService>>> {
        self.sessions.get().and_then(Weak::upgrade)
    }

    fn take(&self, origin: &dyn Origin) -> Result<ReloadInfo, ReloadError> {
        let wanted = origin.read()?;
        let running = self.running();
        let next = running.with_live_of(&wanted);
        let info = ReloadInfo { changed: differences(&running, &next), waiting: differences(&next, &wanted) };
        // What has waited since a reload before was looked at then.
        let mut checked = self.checked.lock().unwrap_or_else(PoisonError::into_inner);
        let has_changed = checked.as_ref().is_none_or(|checked| {
            differences(&checked.with_live_of(&wanted), &wanted).iter().any(is_looked_up)
        });
        let has_to_be = info.waiting.iter().any(is_looked_up);
        let is_new = has_changed && has_to_be;
        let Startable { classes, permissions, .. } = match is_new {
            true => start_check::check(&wanted, Starter::Own)?,
            false => Startable::at_once(&wanted)?,
        };
        match (is_new, has_to_be) {
            (true, _) => *checked = Some(wanted.clone()),
            (false, true) => {}
            // What is told again later may be another start by then.
            (false, false) => *checked = None,
        }
        drop(checked);
        // That may have taken long, and nothing is changed of a daemon that is about to go down.
        if self.is_ending() {
            return Err(ReloadError::Ending);
        }
        // From here on nothing fails.
        self.permissions.set(permissions);
        if next.classes != running.classes {
            self.accounts.set_classes(classes);
        }
        if let Some(sessions) = self.sessions() {
            sessions.set_limits(next.sessions.clone());
        }
        if let Some(loader) = self.loader.get().and_then(Weak::upgrade) {
            loader.forget_setbacks();
        }
        self.running.set(next);
        Ok(info)
    }
}

/// Settings that wait for a restart and that no folder, model or policy depends on.
const OF_THEMSELVES: [&str; 11] = [
    "budgets",
    "http",
    "log_bytes",
    "log_format",
    "metrics_listen",
    "model_resident_ms",
    "model_wait_ms",
    "on_device_failure",
    "saved_disk_bytes",
    "saved_disk_bytes_per_user",
    "socket",
];

/// Whether a start with a changed setting would find other folders or models, or another policy, or have other room for them.
fn is_looked_up(change: &SettingChange) -> bool {
    let name = change.name.split_once('.').map_or(change.name.as_str(), |(table, _)| table);
    !OF_THEMSELVES.contains(&name)
}

/// The settings of two configurations that are not the same, by the order in which a file has them.
fn differences(before: &Config, after: &Config) -> Vec<SettingChange> {
    let (before, after) = (before.settings(), after.settings());
    let text = |value: &Value| (!value.is_null()).then(|| value.to_string());
    let mut changes: Vec<SettingChange> = after
        .iter()
        .map(|setting| {
            let old = before.iter().find(|other| other.name == setting.name);
            let before = old.and_then(|old| text(&old.value));
            SettingChange { name: setting.name.clone(), before, after: text(&setting.value) }
        })
        .collect();
    let gone = before.iter().filter(|setting| after.iter().all(|other| other.name != setting.name));
    changes.extend(gone.map(|setting| SettingChange {
        name: setting.name.clone(),
        before: text(&setting.value),
        after: None,
    }));
    changes.retain(|change| change.before != change.after);
    changes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> Config {
        Config::parse(text).expect("valid")
    }

    fn names(changes: &[SettingChange]) -> Vec<&str> {
        changes.iter().map(|change| change.name.as_str()).collect()
    }

    #[test]
    fn what_holds_at_once_is_taken_and_the_rest_waits() {
        let running = config("kv_bytes = 1\n[permissions]\nload = ['ada']\n[classes.a]\nshare = 2");
        let wanted = config(
            "kv_bytes = 2\nlog = 'debug'\n[permissions]\nload = ['@lab']\n[classes.b]\nrank = 1\n\
             [sessions]\nn_requests = 9\n[limits]\ncpu_ms = 7",
        );
        let next = running.with_live_of(&wanted);
        let changed = differences(&running, &next);
        let mut seen = names(&changed);
        seen.sort_unstable();
        assert_eq!(
            seen,
            [
                "classes.a.groups",
                "classes.a.rank",
                "classes.a.share",
                "classes.a.users",
                "classes.b.groups",
                "classes.b.rank",
                "classes.b.share",
                "classes.b.users",
                "log",
                "permissions.load",
                "sessions.n_requests",
            ]
        );
        let load = changed.iter().find(|change| change.name == "permissions.load").expect("it is there");
        assert_eq!(load.before.as_deref(), Some("[\"ada\"]"));
        assert_eq!(load.after.as_deref(), Some("[\"@lab\"]"));
        assert_eq!(names(&differences(&next, &wanted)), ["kv_bytes", "limits.cpu_ms"]);
        // Who has set what goes with the values.
        assert!(next.set_by_file.has("sessions.n_requests") && next.set_by_file.has("kv_bytes"));
        assert!(!next.set_by_file.has("limits.cpu_ms") && !next.set_by_file.has("classes.a.share"));
        // What waits is told again, until there is another start; and what is taken back waits no more.
        let again = next.with_live_of(&wanted);
        assert!(differences(&next, &again).is_empty());
        assert_eq!(names(&differences(&again, &wanted)), ["kv_bytes", "limits.cpu_ms"]);
        assert!(differences(&again, &config("kv_bytes = 1").with_live_of(&wanted)).is_empty());
    }

    /// An origin that has one text after another.
    struct Texts(Mutex<Vec<String>>);

    impl Origin for Texts {
        fn read(&self) -> Result<Config, ConfigError> {
            Ok(config(&self.0.lock().expect("nothing panicked").remove(0)))
        }
    }

    #[tokio::test]
    async fn who_may_do_what_is_changed_while_a_model_is_away_and_models_are_not() {
        let folder = tempfile::tempdir().expect("a folder");
        let away = format!(
            "models = ['/no/such/model']\ndevice = 'cpu'\ncache_dir = '{}'\n",
            folder.path().join("cache").display()
        );
        let permissions = Arc::new(Live::new(Permissions::of(&config("").permissions).expect("no names")));
        let accounts = Accounts::new(&config("").budgets, 1 << 30);
        let reload = Reload::new(config(&away), permissions.clone(), accounts, CancellationToken::new());
        let texts = [
            "log_bytes = 40_000\n[permissions]\nload = [0]\n",
            "[permissions]\nload = ['no such user']\n",
            "kv_bytes = 1_000_000_000\n",
        ];
        reload.set_origin(Arc::new(Texts(Mutex::new(
            texts.iter().map(|text| format!("{away}{text}")).collect(),
        ))));
        let before = permissions.get();
        let info = reload.reload().await.expect("no model has changed");
        assert_eq!(names(&info.changed), ["permissions.load"]);
        assert_eq!(names(&info.waiting), ["log_bytes"]);
        assert!(!Arc::ptr_eq(&before, &permissions.get()));
        let nobody = reload.reload().await.expect_err("there is no such user");
        assert!(matches!(nobody, ReloadError::Daemon(DaemonError::Permission(_))), "{nobody}");
        let away = reload.reload().await.expect_err("a start with other room opens the model");
        assert!(away.to_string().contains("/no/such/model"), "{away}");
    }

    #[tokio::test]
    async fn what_waits_is_looked_at_once() {
        let folder = tempfile::tempdir().expect("a folder");
        let guests = folder.path().join("guests");
        std::fs::create_dir(&guests).expect("made");
        let basis =
            format!("models = []\ndevice = 'cpu'\ncache_dir = '{}'\n", folder.path().join("cache").display());
        let waits = format!("{basis}guests_dir = '{}'\n", guests.display());
        let permissions = Arc::new(Live::new(Permissions::of(&config("").permissions).expect("no names")));
        let accounts = Accounts::new(&config("").budgets, 1 << 30);
        let reload = Reload::new(config(&basis), permissions, accounts, CancellationToken::new());
        let open = "[permissions]\nload = [0]\n";
        reload.set_origin(Arc::new(Texts(Mutex::new(vec![
            waits.clone(),
            format!("{waits}{open}"),
            format!("kv_bytes = 1_000_000_000\n{waits}"),
            format!("{basis}{open}"),
            waits.clone(),
        ]))));
        let info = reload.reload().await.expect("the folder is there");
        assert_eq!(names(&info.waiting), ["guests_dir"]);
        std::fs::remove_dir(&guests).expect("it is empty");
        let info = reload.reload().await.expect("what waits is as it was");
        assert_eq!(
            (names(&info.changed), names(&info.waiting)),
            (vec!["permissions.load"], vec!["guests_dir"])
        );
        let away = reload.reload().await.expect_err("something else waits as well");
        assert!(away.to_string().contains("guests_dir"), "{away}");
        let info = reload.reload().await.expect("nothing waits any more");
        assert!(info.waiting.is_empty(), "{info:?}");
        let away = reload.reload().await.expect_err("it waits anew, and is looked at anew");
        assert!(away.to_string().contains("guests_dir"), "{away}");
    }

    /// An origin that panics.
    #[derive(Default)]
    struct Broken {
        said: Mutex<Vec<String>>,
    }

    impl Origin for Broken {
        fn read(&self) -> Result<Config, ConfigError> {
            panic!("an injected panic")
        }

        fn begins(&self) {
            self.said.lock().expect("nothing panicked").push("begins".to_owned());
        }

        fn ends(&self, outcome: &Result<ReloadInfo, ReloadError>, _config: &Config) {
            let error = outcome.as_ref().expect_err("it panics").to_string();
            self.said.lock().expect("nothing panicked").push(error);
        }
    }

    #[tokio::test]
    async fn what_has_begun_ends_and_nothing_begins_at_the_end() {
        let permissions = Permissions::of(&config("").permissions).expect("there are no names in it");
        let accounts = Accounts::new(&config("").budgets, 1 << 30);
        let shutdown = CancellationToken::new();
        let reload = Reload::new(config(""), Arc::new(Live::new(permissions)), accounts, shutdown.clone());
        let broken = Arc::new(Broken::default());
        reload.set_origin(broken.clone());
        for _ in 0..2 {
            assert!(matches!(reload.reload().await, Err(ReloadError::Panicked)));
        }
        shutdown.cancel();
        assert!(matches!(reload.reload().await, Err(ReloadError::Ending)));
        let said = broken.said.lock().expect("nothing panicked");
        assert_eq!(said.len(), 4, "{said:?}");
        assert!(said[0] == "begins" && said[1].contains("a defect"), "{said:?}");
    }
}
