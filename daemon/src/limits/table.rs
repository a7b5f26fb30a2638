//! The table itself.

use documented::DocumentedFields;
use serde_json::Value;
use trellis_wire::LimitInfo;

use super::scope::Scope;
use super::source::Source;
use super::unit::Unit;
use crate::config::{Budgets, Config, HostBytes, HttpSettings, SharedBudget, Sizes};
use crate::guest::{GuestLimits, PolicySettings, ProcessBytes};
use crate::session::SessionLimits;

/// The largest number that a file can have: of tokens for one, more than any machine comes to.
pub const UNLIMITED: u64 = i64::MAX as u64;

/// A number that bounds what somebody can make the daemon hold or do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    /// As in the configuration file: `limits.cpu_ms`.
    pub name: String,
    /// What it bounds, in a sentence or two.
    pub about: String,
    /// What its number counts.
    pub unit: Unit,
    /// Whose it is.
    pub scope: Scope,
    /// The most; `None` where the device decides and none is known.
    pub value: Option<u64>,
    /// Who has set it.
    pub source: Source,
}

impl From<Limit> for LimitInfo {
    fn from(limit: Limit) -> Self {
        let Limit { name, about, unit, scope, value, source } = limit;
        let (unit, scope, source) = (unit.name().into(), scope.name().into(), source.name().into());
        Self { name, about, unit, scope, value, source, ..Self::default() }
    }
}

/// All limits of a daemon with this configuration, those of guests first.
///
/// # Panics
/// A mistake of ours: the configuration does not serialise.
#[must_use]
pub fn table(config: &Config) -> Vec<Limit> {
    let json = |config: &Config| serde_json::to_value(config).expect("settings serialise");
    let (values, defaults) = (json(config), json(&Config::default()));
    let mut limits: Vec<Limit> = fields()
        .map(|Field { name, about, scope }| {
            let place = format!("/{}", name.replace('.', "/"));
            let value = values.pointer(&place).and_then(Value::as_u64);
            let source = match value {
                _ if config.set_by_file.has(&name) => Source::File,
                None => Source::Machine,
                Some(_) if values.pointer(&place) == defaults.pointer(&place) => Source::Default,
                Some(_) => Source::Program,
            };
            Limit { unit: Unit::of(&name), name, about, scope, value, source }
        })
        .collect();
    limits.sort_by_key(|limit| limit.scope);
    limits
}

/// Fills in what the device decides.
pub fn set_sizes(limits: &mut [Limit], sizes: &Sizes) {
    let Sizes { kv_host_bytes, n_step_tokens, n_step_rows } = *sizes;
    let sizes = [
        ("kv_host_bytes", kv_host_bytes),
        ("n_step_tokens", n_step_tokens as u64),
        ("n_step_rows", n_step_rows as u64),
    ];
    for (name, size) in sizes {
        if let Some(limit) = limits.iter_mut().find(|limit| limit.name == name) {
            limit.value.get_or_insert(size);
        }
    }
}

/// Fills in what the memory decides that the daemon's process may come to.
pub(crate) fn set_memory(limits: &mut [Limit], config: &Config, memory_bytes: u64) {
    let HostBytes { session, user, daemon, .. } = config.host_bytes(memory_bytes);
    let ProcessBytes { compile, guests, .. } = config.limits.process_bytes(memory_bytes);
    for (name, n_bytes) in [
        (OF_SESSION, session),
        (OF_USER, user),
        ("budgets.daemon.host_bytes", daemon),
        ("limits.compile_memory_bytes", compile),
        ("limits.process_memory_bytes", guests),
    ] {
        if let Some(limit) = limits.iter_mut().find(|limit| limit.name == name) {
            limit.value.get_or_insert(n_bytes);
        }
    }
}

/// The budgets of host memory of a user and of a session.
const OF_USER: &str = "budgets.user.host_bytes";
const OF_SESSION: &str = "budgets.session.host_bytes";

/// Puts in what the class of a user says, no more than all users together have, and of host memory no more than any class gives. A
/// session for which nothing is said has what its user has.
pub(crate) fn set_class(
    limits: &mut [Limit],
    host_bytes: HostBytes,
    of_class: impl Fn(&str, u64) -> Option<u64>,
) {
    for idx in 0..limits.len() {
        let around = match limits[idx].name.as_str() {
            "limits.n_guests_per_user" => "limits.n_guests".to_owned(),
            "saved_disk_bytes_per_user" => "saved_disk_bytes".to_owned(),
            name => name.replace("budgets.user.", "budgets.daemon."),
        };
        // Those that all users together have no number for are bounded by nothing else.
        let around = limits.iter().find(|limit| limit.name == around && around != limits[idx].name);
        let around = around.and_then(|limit| limit.value);
        let limit = &mut limits[idx];
        if let Some(most) = of_class(&limit.name, limit.value.unwrap_or(UNLIMITED)) {
            let most = if limit.name == OF_USER { most.min(host_bytes.class_most) } else { most };
            limit.value = Some(most.min(around.unwrap_or(UNLIMITED)));
            limit.source = Source::Class;
        }
    }
    let of_user = limits.iter().find(|limit| limit.name == OF_USER && limit.source == Source::Class);
    let of_user = of_user.and_then(|limit| limit.value);
    let of_session = limits.iter_mut().find(|limit| limit.name == OF_SESSION);
    // One that somebody has set holds whatever the user's class is.
    if let (Some(value), Some(limit)) = (of_user, of_session.filter(|limit| limit.source == Source::Machine))
    {
        (limit.value, limit.source) = (Some(value), Source::Class);
    }
}

/// The limits of a single guest, by the names of their fields, in their order.
pub(crate) fn of_guest(limits: &GuestLimits) -> Vec<(&'static str, u64)> {
    let values = serde_json::to_value(limits).expect("limits serialise");
    let names = GuestLimits::FIELD_NAMES.iter().copied();
    let names = names.filter(|name| Scope::of_guest_limits(name) == Some(Scope::Guest));
    names.filter_map(|name| Some((name, values[name].as_u64()?))).collect()
}

/// A field of the configuration that is a limit.
struct Field {
    name: String,
    about: String,
    scope: Scope,
}

fn fields() -> impl Iterator<Item = Field> {
    let budgets = Budgets::FIELD_NAMES.iter().flat_map(|level| {
        let scope = Scope::named(level);
        fields_of::<SharedBudget>(format!("budgets.{level}."), move |_| scope)
    });
    fields_of::<GuestLimits>("limits.".to_owned(), Scope::of_guest_limits)
        .chain(fields_of::<SessionLimits>("sessions.".to_owned(), Scope::of_session_limits))
        .chain(fields_of::<HttpSettings>("http.".to_owned(), Scope::of_http))
        .chain(fields_of::<PolicySettings>("policy.".to_owned(), Scope::of_policy))
        .chain(budgets)
        .chain(fields_of::<Config>(String::new(), Scope::of_sizes))
}

fn fields_of<T: DocumentedFields>(
    place: String,
    scope: impl Fn(&str) -> Option<Scope>,
) -> impl Iterator<Item = Field> {
    let documented = T::FIELD_NAMES.iter().zip(T::FIELD_DOCS);
    documented.filter_map(move |(field, docs)| {
        Some(Field { name: format!("{place}{field}"), about: docs.replace('\n', " "), scope: scope(field)? })
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// What of the configuration bounds nothing.
    const OTHERS: [&str; 25] = [
        "cache_dir",
        "compile_exe",
        "isolation",
        "device",
        "dtype",
        "guests_dir",
        "http.listen",
        "http.tokens_dir",
        "is_prefix_cache_shared",
        "latency_multiple",
        "log",
        "log_format",
        "metrics_listen",
        "models",
        "on_device_failure",
        "permissions.load",
        "permissions.run",
        "permissions.see_others",
        "permissions.stop_others",
        "permissions.upload",
        "policy.allows_recordings",
        "policy.component",
        "saved_contexts",
        "socket",
        "state_dir",
    ];

    fn leaves(value: &Value, place: &str, names: &mut BTreeSet<String>) {
        match value.as_object() {
            Some(fields) => {
                let inner =
                    |name: &String| if place.is_empty() { name.clone() } else { format!("{place}.{name}") };
                fields.iter().for_each(|(name, value)| leaves(value, &inner(name), names));
            }
            None => drop(names.insert(place.to_owned())),
        }
    }

    #[test]
    fn every_number_of_the_configuration_is_in_the_table_or_bounds_nothing() {
        let mut fields = BTreeSet::new();
        leaves(&serde_json::to_value(Config::default()).expect("it serialises"), "", &mut fields);
        let limits = table(&Config::default());
        let mut names: BTreeSet<String> = limits.iter().map(|limit| limit.name.clone()).collect();
        assert_eq!(names.len(), limits.len(), "each is there once");
        names.extend(OTHERS.map(str::to_owned));
        assert_eq!(names, fields, "a new field needs a scope, in `scope.rs`");
    }

    #[test]
    fn each_says_what_it_bounds_whose_it_is_and_how_much() {
        let limits = table(&Config::default());
        for limit in &limits {
            assert!(limit.about.ends_with('.') && !limit.about.contains('\n'), "{limit:?}");
            assert_eq!(limit.value.is_none(), limit.source == Source::Machine, "{limit:?}");
        }
        assert!(limits.is_sorted_by_key(|limit| limit.scope));
        let find = |name: &str| limits.iter().find(|limit| limit.name == name).expect(name);
        let memory = find("limits.memory_bytes");
        assert_eq!((memory.value, memory.unit, memory.scope), (Some(256 << 20), Unit::Bytes, Scope::Guest));
        assert_eq!(memory.about, "Bytes of linear memory, summed over all memories of a guest.");
        assert_eq!(
            (find("budgets.user.n_tokens").scope, find("limits.n_guests").scope),
            (Scope::User, Scope::Daemon)
        );
        assert_eq!(find("sessions.n_connections").value, Some(256));
    }

    #[test]
    fn who_has_set_a_number_is_said() {
        let file = "n_step_rows = 9\n[limits]\ncpu_ms = 60000\n[budgets.user]\nn_pages = 6";
        let mut config = Config::parse(file).expect("valid");
        config.limits.n_messages = 3;
        let mut limits = table(&config);
        set_sizes(&mut limits, &Sizes::CPU);
        set_memory(&mut limits, &config, 12 << 30);
        let seen = |name: &str| {
            let limit = limits.iter().find(|limit| limit.name == name).expect(name);
            (limit.value, limit.source)
        };
        assert_eq!(seen("limits.cpu_ms"), (Some(60_000), Source::File), "the default, as the file says too");
        assert_eq!(seen("limits.memory_bytes"), (Some(256 << 20), Source::Default));
        assert_eq!(seen("limits.n_messages"), (Some(3), Source::Program));
        assert_eq!(seen("budgets.user.n_pages"), (Some(6), Source::File));
        assert_eq!(seen("budgets.user.host_bytes"), (Some(2 << 30), Source::Machine));
        assert_eq!(seen("budgets.daemon.host_bytes"), (Some(4 << 30), Source::Machine));
        assert_eq!(seen("limits.compile_memory_bytes"), (Some(1 << 30), Source::Machine));
        assert_eq!(seen("limits.process_memory_bytes"), (Some(4 << 30), Source::Machine));
        assert_eq!(seen("n_step_rows"), (Some(9), Source::File));
        assert_eq!(seen("n_step_tokens"), (Some(256), Source::Machine));
        assert_eq!(seen("kv_bytes"), (None, Source::Machine));
    }

    #[test]
    fn what_the_class_of_a_user_says_is_shown_within_what_all_have() {
        let config = Config::parse("[budgets.daemon]\nn_contexts = 50").expect("valid");
        let mut limits = table(&config);
        set_class(&mut limits, config.host_bytes(12 << 30), |name, most| match name {
            "budgets.user.n_contexts" => Some(90),
            "limits.n_guests_per_user" => Some(most / 2),
            "sessions.n_detached" => Some(7),
            "sessions.n_connections" => Some(1000),
            "saved_disk_bytes_per_user" => Some(u64::MAX),
            _ => None,
        });
        let seen = |name: &str| {
            let limit = limits.iter().find(|limit| limit.name == name).expect(name);
            (limit.value, limit.source)
        };
        assert_eq!(seen("budgets.user.n_contexts"), (Some(50), Source::Class));
        assert_eq!(seen("limits.n_guests_per_user"), (Some(64), Source::Class));
        assert_eq!(seen("sessions.n_detached"), (Some(7), Source::Class));
        assert_eq!(seen("sessions.n_connections"), (Some(1000), Source::Class), "more than each user has");
        assert_eq!(
            seen("saved_disk_bytes_per_user"),
            (Some(config.saved_disk_bytes), Source::Class),
            "no more than all users together have"
        );
        assert_eq!(seen("budgets.daemon.n_contexts"), (Some(50), Source::File));
        assert_eq!(seen("budgets.user.n_pages").1, Source::Default);
    }

    #[test]
    fn host_memory_of_a_class_is_its_sessions_too_and_fits_in_the_process_of_a_user() {
        let seen = |file: &str, of_class: u64| {
            let config = Config::parse(file).expect("valid");
            let mut limits = table(&config);
            set_memory(&mut limits, &config, 48 << 30);
            set_class(&mut limits, config.host_bytes(48 << 30), |name, _| {
                (name == OF_USER).then_some(of_class)
            });
            [OF_SESSION, OF_USER].map(|name| {
                let limit = limits.iter().find(|limit| limit.name == name).expect(name);
                (limit.value.expect("it is known") >> 20, limit.source)
            })
        };
        let both = |mib| [(mib, Source::Class); 2];
        assert_eq!(seen("", 9 << 30), both(9 << 10));
        assert_eq!(seen("", 1 << 30), both(1 << 10));
        assert_eq!(seen("isolation = 'process'", 9 << 30), both(7 << 9), "4 GiB but what it needs itself");
        assert_eq!(seen("isolation = 'process'", 1 << 30), both(1 << 10));
        assert_eq!(
            seen("[budgets.session]\nhost_bytes = 1048576", 9 << 30),
            [(1, Source::File), (9 << 10, Source::Class)]
        );
    }

    #[test]
    fn budgets_fit_in_the_process_of_a_user() {
        let user = |file: &str| {
            let config = Config::parse(file).expect("valid");
            let mut limits = table(&config);
            set_memory(&mut limits, &config, 48 << 30);
            limits.iter().find(|limit| limit.name == "budgets.user.host_bytes").and_then(|limit| limit.value)
        };
        assert_eq!(user(""), Some(8 << 30));
        assert_eq!(user("isolation = 'process'"), Some(7 << 29));
        let said = "isolation = 'process'\n[limits]\nprocess_memory_bytes = 1073741824";
        assert_eq!(user(said), Some(1 << 29));
    }

    #[test]
    fn a_guest_has_its_own_by_the_names_of_their_fields() {
        let limits = of_guest(&GuestLimits { cpu_ms: 7, ..GuestLimits::default() });
        assert!(limits.contains(&("cpu_ms", 7)) && limits.contains(&("n_tokens", 10_000_000)), "{limits:?}");
        assert!(!limits.iter().any(|(name, _)| name.starts_with("n_guests")), "{limits:?}");
    }
}
