//! What a daemon logs.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

/// A level for everything, or a filter by module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct LogFilter(String);

/// What filters no log.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WrongLogFilter {
    /// A bare word that is no level, and would be taken for a module's name.
    #[error("expected error, warn, info, debug, trace, off, or MODULE=LEVEL")]
    NoLevel,
    /// It does not parse.
    #[error("{0}")]
    Filter(String),
}

impl LogFilter {
    /// As the log takes it.
    pub(crate) fn filter(&self) -> EnvFilter {
        EnvFilter::try_new(&self.0).expect("it was checked when it was made")
    }
}

impl Default for LogFilter {
    fn default() -> Self {
        Self("info".to_owned())
    }
}

impl fmt::Display for LogFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for LogFilter {
    type Err = WrongLogFilter;

    fn from_str(text: &str) -> Result<Self, WrongLogFilter> {
        let is_level = !text.is_empty() && text.parse::<LevelFilter>().is_ok();
        if !is_level && !text.contains('=') {
            return Err(WrongLogFilter::NoLevel);
        }
        EnvFilter::try_new(text).map_err(|error| WrongLogFilter::Filter(error.to_string()))?;
        Ok(Self(text.to_owned()))
    }
}

impl TryFrom<String> for LogFilter {
    type Error = WrongLogFilter;

    fn try_from(text: String) -> Result<Self, WrongLogFilter> {
        text.parse()
    }
}

impl From<LogFilter> for String {
    fn from(filter: LogFilter) -> Self {
        filter.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_filters_are_checked() {
        for text in ["info", "off", "warn,trellis=debug"] {
            assert_eq!(text.parse::<LogFilter>().expect(text).to_string(), text);
        }
        for text in ["", "loud", "trellis=loud"] {
            assert!(text.parse::<LogFilter>().is_err(), "{text}");
        }
    }
}
