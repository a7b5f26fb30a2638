//! How the daemon is seen from outside: where its metrics are, and where its log goes.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::ConfigError;
use crate::metrics::is_loopback;

/// What becomes of the daemon's log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Lines for people on standard error, which a service manager keeps.
    #[default]
    Text,
    /// Lines of JSON on standard error.
    Json,
    /// Entries of systemd's journal, with their fields.
    Journald,
}

/// The least that is kept of a log: one line of the longest, and some before it.
const LOG_BYTES_LEAST: usize = 32 << 10;

/// Refuses an address that other machines reach, as who asks there is not known, and a log that keeps no line.
pub(super) fn check(metrics_listen: Option<SocketAddr>, log_bytes: usize) -> Result<(), ConfigError> {
    if log_bytes < LOG_BYTES_LEAST {
        let expected = format!("at least {LOG_BYTES_LEAST}");
        return Err(ConfigError::OutOfRange { field: "log_bytes", value: log_bytes as f64, expected });
    }
    match metrics_listen.filter(|address| !is_loopback(address)) {
        Some(address) => Err(ConfigError::NotLoopback { address }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Config;
    use super::*;

    #[test]
    fn metrics_are_for_this_machine_alone() {
        let checked = |text: &str| {
            let config =
                Config::parse(&format!("metrics_listen = '{text}'")).map_err(|error| error.to_string())?;
            check(config.metrics_listen, config.log_bytes).map_err(|error| error.to_string())
        };
        assert_eq!(checked("127.0.0.1:9464"), Ok(()));
        assert_eq!(checked("[::1]:0"), Ok(()));
        let error = checked("0.0.0.0:9464").expect_err("everybody reaches it");
        assert!(error.starts_with("metrics_listen is 0.0.0.0:9464, which other machines reach"), "{error}");
        assert!(checked("localhost:9464").expect_err("a name").contains("metrics_listen"));
    }

    #[test]
    fn a_log_has_one_of_three_formats() {
        for (text, format) in
            [("text", LogFormat::Text), ("json", LogFormat::Json), ("journald", LogFormat::Journald)]
        {
            let config = Config::parse(&format!("log_format = '{text}'")).expect("valid");
            assert_eq!(config.log_format, format);
        }
        assert_eq!(Config::default().log_format, LogFormat::Text);
        let error = Config::parse("log_format = 'xml'").expect_err("no format").to_string();
        assert!(error.contains("`text`, `json`, `journald`"), "{error}");
    }
}
