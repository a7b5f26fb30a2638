//! Who sets a limit.

use std::collections::BTreeSet;

use toml::{Table, Value};

/// Where the number of a limit is from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Nobody has set it.
    Default,
    /// The configuration file, be it to the default.
    File,
    /// Nobody has set it, and it follows from the device and its memory.
    Machine,
    /// The program that started the daemon inside itself.
    Program,
    /// The class of the user that asks, as the configuration file has it.
    Class,
}

impl Source {
    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::File => "file",
            Self::Machine => "machine",
            Self::Program => "program",
            Self::Class => "class",
        }
    }
}

/// What a file has set, by names such as `limits.cpu_ms`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SetByFile(BTreeSet<String>);

impl SetByFile {
    /// All that this file sets.
    pub(crate) fn of(file: &Table) -> Self {
        let mut names = BTreeSet::new();
        collect(file, "", &mut names);
        Self(names)
    }

    /// Whether the file has set the limit of this name.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.0.contains(name)
    }

    /// This, with what another file sets of some names in the place of what this one does.
    pub(crate) fn with_those_of(&self, other: &Self, is_taken: impl Fn(&str) -> bool) -> Self {
        let kept = self.0.iter().filter(|name| !is_taken(name));
        Self(kept.chain(other.0.iter().filter(|name| is_taken(name))).cloned().collect())
    }

    /// The names of all that it has set.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }
}

fn collect(table: &Table, place: &str, names: &mut BTreeSet<String>) {
    for (key, value) in table {
        let name = format!("{place}{key}");
        match value {
            Value::Table(inner) => collect(inner, &format!("{name}."), names),
            _ => drop(names.insert(name)),
        }
    }
}
