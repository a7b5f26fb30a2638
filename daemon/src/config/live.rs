//! Which settings hold at once when a file is read again, and which wait for another start.

use super::Config;

/// Settings, and tables of them that end in a dot, that hold at once.
const LIVE: [&str; 4] = ["log", "classes.", "permissions.", "sessions."];

fn is_live(name: &str) -> bool {
    LIVE.iter().any(|live| if live.ends_with('.') { name.starts_with(live) } else { name == *live })
}

impl Config {
    /// These settings, with those of others that hold at once.
    pub(crate) fn with_live_of(&self, wanted: &Self) -> Self {
        Self {
            log: wanted.log.clone(),
            classes: wanted.classes.clone(),
            permissions: wanted.permissions.clone(),
            sessions: wanted.sessions.clone(),
            set_by_file: self.set_by_file.with_those_of(&wanted.set_by_file, is_live),
            ..self.clone()
        }
    }
}
