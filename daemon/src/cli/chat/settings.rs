//! How answers are drawn, as the user has set it.

use std::fmt::Display;
use std::str::FromStr;

use serde::Serialize;

use crate::nearest;

/// What goes back to what it was before it was set.
const DEFAULT: &str = "default";

/// What is set; the guest decides about the rest. As the guest reads it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Settings {
    #[serde(skip_serializing_if = "Option::is_none")]
    temperature: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_k: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_p: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    seed: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_tokens: Option<u32>,
}

/// Why something cannot be set.
#[derive(Debug, thiserror::Error)]
pub(super) enum SettingError {
    #[error("there is no setting {name:?}{}", if .hint.is_none() { known() } else { .hint.to_string() })]
    Unknown { name: String, hint: nearest::Hint },
    #[error("{name} cannot be {value:?}: it is {range}, or `default`")]
    OutOfRange { name: &'static str, value: String, range: &'static str },
}

fn known() -> String {
    format!("; there are {}", Settings::names().collect::<Vec<_>>().join(", "))
}

/// A name, the range in words, and what sets or shows it.
struct Setting {
    name: &'static str,
    range: &'static str,
    set: fn(&mut Settings, &str) -> Option<()>,
    shown: fn(&Settings) -> Option<String>,
}

/// A setting of this field, whose values pass the test.
macro_rules! setting {
    ($field:ident, $range:literal, $test:expr) => {
        Setting {
            name: stringify!($field),
            range: $range,
            set: |settings, text| {
                settings.$field = parsed(text, $test)?;
                Some(())
            },
            shown: |settings| settings.$field.as_ref().map(shown),
        }
    };
}

const SETTINGS: [Setting; 5] = [
    setting!(temperature, "a number of at least 0", |t: &f32| t.is_finite() && *t >= 0.0),
    setting!(top_k, "a whole number of at least 1", |k: &u32| *k > 0),
    setting!(top_p, "a number above 0 and up to 1", |p: &f32| *p > 0.0 && *p <= 1.0),
    setting!(seed, "a whole number from 0 to 18446744073709551615", |_: &u64| true),
    setting!(max_tokens, "a whole number of at least 1", |n: &u32| *n > 0),
];

/// The value, or none for the default; nothing where it is out of range.
fn parsed<T: FromStr>(text: &str, is_in_range: impl Fn(&T) -> bool) -> Option<Option<T>> {
    if text == DEFAULT {
        return Some(None);
    }
    text.parse().ok().filter(is_in_range).map(Some)
}

fn shown(value: &impl Display) -> String {
    value.to_string()
}

impl Settings {
    /// With what the command line says.
    pub(super) fn new(temperature: Option<f32>, max_tokens: Option<u32>) -> Self {
        Self { temperature, max_tokens, ..Self::default() }
    }

    /// What can be set.
    pub(super) fn names() -> impl Iterator<Item = &'static str> {
        SETTINGS.iter().map(|setting| setting.name)
    }

    /// Sets one, or puts it back to its default.
    ///
    /// # Errors
    /// There is none of that name, or it cannot have that value.
    pub(super) fn set(&mut self, name: &str, value: &str) -> Result<(), SettingError> {
        let Some(setting) = SETTINGS.iter().find(|setting| setting.name == name) else {
            let hint = nearest::hint(name, Self::names());
            return Err(SettingError::Unknown { name: name.to_owned(), hint });
        };
        let Setting { name, range, .. } = *setting;
        (setting.set)(self, value).ok_or_else(|| SettingError::OutOfRange {
            name,
            value: value.to_owned(),
            range,
        })
    }

    /// A line for each.
    pub(super) fn list(&self) -> String {
        let lines = SETTINGS.iter().map(|setting| {
            let value = (setting.shown)(self).unwrap_or_else(|| DEFAULT.to_owned());
            format!("  {:<20}{value}\n", setting.name)
        });
        lines.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_set_goes_to_the_guest_and_the_rest_does_not() {
        let mut settings = Settings::default();
        assert_eq!(serde_json::to_string(&settings).expect("JSON"), "{}");
        for (name, value) in [("temperature", "0.5"), ("seed", "18446744073709551615"), ("top_k", "4")] {
            settings.set(name, value).expect(name);
        }
        settings.set("top_k", "default").expect("it goes back");
        let json = serde_json::to_string(&settings).expect("JSON");
        assert_eq!(json, r#"{"temperature":0.5,"seed":18446744073709551615}"#);
        let list = settings.list();
        assert!(
            list.contains("temperature         0.5\n") && list.contains("top_k               default\n"),
            "{list}"
        );
    }

    #[test]
    fn what_cannot_be_set_changes_nothing_and_is_told_what_can() {
        let mut settings = Settings::default();
        for (name, value, says) in [
            ("temprature", "1", "did you mean \"temperature\"?"),
            ("colour", "1", "there are temperature, top_k"),
            ("temperature", "-1", "a number of at least 0"),
            ("temperature", "NaN", "a number of at least 0"),
            ("top_p", "0", "above 0 and up to 1"),
            ("top_k", "0", "at least 1"),
            ("seed", "-1", "from 0 to 18446744073709551615"),
            ("max_tokens", "0", "or `default`"),
        ] {
            let said = settings.set(name, value).expect_err(name).to_string();
            assert!(said.contains(says), "{name}: {said}");
        }
        assert_eq!(settings, Settings::default());
    }
}
