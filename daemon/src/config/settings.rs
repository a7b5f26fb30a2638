//! Every setting by its name: what it is, and who has set it.

use documented::DocumentedFields;
use serde_json::Value;

use super::{
    CatalogModel, ClassLimits, ClassSettings, Config, HttpSettings, PermissionSettings, PolicySettings,
};
use crate::limits::{self, Source};

/// A setting of a daemon with this configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Setting {
    /// As in the file: `limits.cpu_ms` is `cpu_ms` in its table `[limits]`.
    pub(crate) name: String,
    /// As JSON has it; null where nothing is set.
    pub(crate) value: Value,
    /// Who has set it.
    pub(crate) source: Source,
    /// What it is for.
    pub(crate) about: String,
}

impl Config {
    /// All settings, those at the top of the file first.
    pub(crate) fn settings(&self) -> Vec<Setting> {
        let limits = limits::table(self);
        let mut settings = Vec::new();
        let whole = serde_json::to_value(self).expect("settings serialise");
        leaves(&whole, "", &mut |name, value| {
            let limit = limits.iter().find(|limit| limit.name == name);
            let source = match limit {
                _ if self.set_by_file.has(&name) => Source::File,
                Some(limit) => limit.source,
                None => Source::Default,
            };
            let about = limit.map_or_else(|| about(&name), |limit| limit.about.clone());
            settings.push(Setting { name, value: value.clone(), source, about });
        });
        settings.sort_by_key(|setting| setting.name.contains('.'));
        settings
    }
}

/// Calls `see` with each value that is no table, by its name.
fn leaves(value: &Value, place: &str, see: &mut impl FnMut(String, &Value)) {
    match value.as_object() {
        Some(fields) => {
            let dot = if place.is_empty() { "" } else { "." };
            fields.iter().for_each(|(name, value)| leaves(value, &format!("{place}{dot}{name}"), see));
        }
        None => see(place.to_owned(), value),
    }
}

/// What a setting that bounds nothing is for.
fn about(name: &str) -> String {
    let (table, field) = name.rsplit_once('.').unwrap_or(("", name));
    let docs = match table {
        "" => Config::get_field_docs(field),
        "permissions" => PermissionSettings::get_field_docs(field),
        "http" => HttpSettings::get_field_docs(field),
        "policy" => PolicySettings::get_field_docs(field),
        table if table.starts_with("classes.") && table.ends_with(".limits") => {
            ClassLimits::get_field_docs(field)
        }
        table if table.starts_with("classes.") => ClassSettings::get_field_docs(field),
        table if table.starts_with("catalog.") => CatalogModel::get_field_docs(field),
        // What the operator's component takes, and it alone knows.
        _ => return String::new(),
    };
    docs.unwrap_or_default().replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_setting_says_what_it_is_for_and_who_has_set_it() {
        let text = "device = 'cpu'\n[limits]\ncpu_ms = 7\n[classes.research]\nusers = ['ada']\n\
                    [catalog.small]\npath = 'draft'\n\
                    [policy]\ncomponent = 'p.wasm'\n[policy.settings]\nkey = '1'";
        let settings = Config::parse(text).expect("valid").settings();
        let find = |name: &str| settings.iter().find(|setting| setting.name == name).expect(name);
        for setting in settings.iter().filter(|setting| setting.name != "policy.settings.key") {
            assert!(setting.about.ends_with('.'), "{setting:?}");
        }
        let by_file: Vec<&str> = settings
            .iter()
            .filter(|setting| setting.source == Source::File)
            .map(|setting| setting.name.as_str())
            .collect();
        let mut expected = [
            "device",
            "classes.research.users",
            "catalog.small.path",
            "limits.cpu_ms",
            "policy.component",
            "policy.settings.key",
        ];
        let mut seen = by_file.clone();
        seen.sort_unstable();
        expected.sort_unstable();
        assert_eq!(seen, expected);
        assert_eq!(by_file[0], "device", "what is at the top of the file comes first");
        assert_eq!(find("limits.cpu_ms").value, 7);
        assert_eq!((find("kv_bytes").source, &find("kv_bytes").value), (Source::Machine, &Value::Null));
        assert_eq!(find("models").source, Source::Default);
    }
}
