//! The text of a file of settings: what it sets, and what it may have meant where it has a wrong name.

use std::fs;
use std::io::{self, Read};
use std::path::Path;

use serde_json::Value;
use toml::Table;

use super::{CatalogModel, ClassSettings, Config};
use crate::limits::{self, SetByFile};
use crate::nearest::{Hint, hint};

/// The longest file of settings.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// What is wrong with a text, where, and what was probably meant.
#[derive(Debug, thiserror::Error)]
#[error("{}{hint}", .error.to_string().trim_end())]
pub struct WrongText {
    error: Box<toml::de::Error>,
    hint: Hint,
}

/// The text of a file.
pub(super) fn read_text(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    fs::File::open(path)?.take(CONFIG_BYTES_MAX + 1).read_to_string(&mut text)?;
    if text.len() as u64 > CONFIG_BYTES_MAX {
        return Err(io::Error::other(format!("it has more than {CONFIG_BYTES_MAX} bytes")));
    }
    Ok(text)
}

impl Config {
    /// What a text of TOML sets, and the defaults for the rest. The numbers are not looked at.
    pub(crate) fn parse(text: &str) -> Result<Self, WrongText> {
        let config = toml::from_str::<Self>(text).and_then(|config| {
            let set_by_file = SetByFile::of(&text.parse()?);
            Ok(Self { set_by_file, ..config })
        });
        config.map_err(|error| WrongText { hint: meant(&error, text), error: Box::new(error) })
    }
}

/// The name that a text probably means with the one that the error is about.
fn meant(error: &toml::de::Error, text: &str) -> Hint {
    let message = error.message();
    let unknown = message.strip_prefix("unknown field `").and_then(|rest| rest.split_once('`'));
    let (Some((key, _)), Ok(file)) = (unknown, text.parse::<Table>()) else { return Hint::NONE };
    let known = serde_json::to_value(with_names_of(&file)).expect("settings serialise");
    let near = near(key, &file, &known).unwrap_or(Hint::NONE);
    if !near.is_none() {
        return near;
    }
    // It may be right elsewhere.
    let elsewhere = limits::table(&Config::default()).into_iter().map(|limit| limit.name);
    let is_right = |name: &String| name.rsplit('.').next() == Some(key);
    elsewhere.into_iter().find(is_right).map_or(Hint::NONE, Hint::of)
}

/// The defaults, with those of the classes and models that a file names.
fn with_names_of(file: &Table) -> Config {
    let names = |table: &str| {
        let table = file.get(table).and_then(toml::Value::as_table);
        table.into_iter().flat_map(Table::keys).cloned().collect::<Vec<_>>()
    };
    let classes = names("classes").into_iter().map(|name| (name, ClassSettings::default())).collect();
    let catalog = names("catalog").into_iter().map(|name| (name, CatalogModel::default())).collect();
    Config { classes, catalog, ..Config::default() }
}

/// What is near to a key, of the names at the place where a file has it and may not.
fn near(key: &str, file: &Table, known: &Value) -> Option<Hint> {
    let names = known.as_object()?;
    if file.contains_key(key) && !names.contains_key(key) {
        return Some(hint(key, names.keys().map(String::as_str)));
    }
    file.iter().find_map(|(name, inner)| near(key, inner.as_table()?, names.get(name)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_name_is_told_the_right_one() {
        for (text, end) in [
            ("modles = ['draft']", "; did you mean \"models\"?"),
            ("[limits]\nn_context = 7", "; did you mean \"n_contexts\"?"),
            ("[sessions]\nn_conections = 7", "; did you mean \"n_connections\"?"),
            (
                "[budgets.user]\nn_tokens = 1\nn_pages = 1\nn_contexts = 1\nhost_byte = 1",
                "; did you mean \"host_bytes\"?",
            ),
            ("[classes.research]\nuser = ['ada']", "; did you mean \"users\"?"),
            ("[permissions]\nsee_other = []", "; did you mean \"see_others\"?"),
            ("[permission]\nrun = []", "; did you mean \"permissions\"?"),
            ("[catalog.small]\naliasses = ['s']", "; did you mean \"aliases\"?"),
            ("[catalog.small]\nalias = ['s']", "; did you mean \"aliases\"?"),
            ("[clases.research]\nusers = ['ada']", "; did you mean \"classes\"?"),
            ("[budget.user]\nn_tokens = 1", "; did you mean \"budgets\"?"),
            ("n_connections = 7", "; did you mean \"sessions.n_connections\"?"),
            ("[sessions]\ncpu_ms = 7", "; did you mean \"limits.cpu_ms\"?"),
        ] {
            let error = Config::parse(text).expect_err(text).to_string();
            assert!(error.contains("unknown field") && error.ends_with(end), "{text}: {error}");
        }
        for text in ["[limits]\nabacus = 7", "limits = 7", "models = 7", "[limits"] {
            let error = Config::parse(text).expect_err(text).to_string();
            assert!(!error.contains("did you mean"), "{text}: {error}");
        }
    }

    #[test]
    fn sessions_are_bounded_as_the_file_says() {
        let config = Config::parse("[sessions]\nn_connections = 7\nhello_ms = 9").expect("valid");
        assert_eq!((config.sessions.n_connections, config.sessions.hello_ms), (7, 9));
        assert_eq!(config.sessions.n_uploads, 4, "the rest is as ever");
        assert!(config.set_by_file.has("sessions.hello_ms") && !config.set_by_file.has("sessions.n_uploads"));
    }
}
