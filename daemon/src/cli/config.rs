//! `trellis config`: whether a daemon would start with a file of settings, and what it would have.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use serde::Serialize;
use serde_json::Value;

use super::connect;
use super::error::CliError;
use super::output::{self, Format};
use super::service;
use super::table::{Align, Table};
use crate::classes::Classes;
use crate::config::{Config, example};
use crate::daemon::{DaemonError, open_model};
use crate::permissions::Permissions;

const EXAMPLES: &str = "\
Examples:
  trellis config check /etc/trellis.toml
  trellis config show --config /etc/trellis.toml
  trellis config show idle_ms                     what has idle_ms in its name, and what it is for
  trellis config example > trellis.toml           a file to begin with";

const CHECK_EXAMPLES: &str = "\
Examples:
  trellis config check trellis.toml && trellis serve --config trellis.toml

Looked at are the file, with the nearest right name for a wrong one, users and groups of classes and permissions, the head of each model,
and whether the operator's component and the folder of guests are there. No model is loaded. `trellis doctor --config FILE`
compares them with the memory of the device as well.

Exit status: 0 a daemon would start with it, 2 it would not, or there is no such file.";

const SHOW_EXAMPLES: &str = "\
Examples:
  trellis config show                                          the defaults
  trellis config show --config trellis.toml                    with a file
  trellis config show --config trellis.toml --json | jq -r '.[] | select(.source == \"file\") | .name'

Names are those of the file: limits.cpu_ms is cpu_ms in its table [limits]. SET BY says where a value is from: the default, the
file, the environment (TRELLIS_SOCKET), or the machine (the device and its memory), which decides where nothing is said.
What a daemon that runs has of its limits, and what is in use of them, is in `trellis limits`.";

const EXAMPLE_EXAMPLES: &str = "\
Examples:
  trellis config example > trellis.toml";

/// Look at a file of settings before a daemon does
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ConfigArgs {
    #[command(subcommand)]
    command: ConfigCommand,
}

#[derive(Debug, Subcommand)]
enum ConfigCommand {
    /// Say whether a daemon would start with a file
    #[command(after_help = CHECK_EXAMPLES)]
    Check {
        /// The file
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
    /// Print a file that sets nothing, and says of each setting what it is for
    #[command(after_help = EXAMPLE_EXAMPLES)]
    Example,
    /// Show every setting, and who has set it
    #[command(after_help = SHOW_EXAMPLES)]
    Show {
        /// Only settings with this in their names, with what they are for
        #[arg(value_name = "NAME")]
        name: Option<String>,
        /// Those of a daemon with this file
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
    },
}

/// What was found of a file that is as it should be.
#[derive(Serialize)]
pub(super) struct Checked {
    path: PathBuf,
    models: Vec<String>,
    /// Those of the catalog.
    on_demand: Vec<String>,
    /// The names of what it sets.
    sets: Vec<String>,
    /// What a daemon would pass over.
    warnings: Vec<String>,
}

impl Checked {
    pub(super) fn warnings(&self) -> &[String] {
        &self.warnings
    }
}

/// A setting, as it is shown.
#[derive(Serialize)]
struct Shown {
    name: String,
    value: Value,
    source: String,
    about: String,
}

pub(crate) fn config(args: ConfigArgs, format: Format) -> Result<(), CliError> {
    match args.command {
        ConfigCommand::Check { file } => {
            let checked = check(&file)?;
            output::print(format, &checked, |checked| {
                let Checked { path, models, on_demand, sets, warnings } = checked;
                let n_sets = match sets.len() {
                    0 => "nothing".to_owned(),
                    n => format!("{n} ({})", sets.join(", ")),
                };
                let on_demand = match on_demand.as_slice() {
                    [] => String::new(),
                    all => format!("; on demand: {}", all.join(", ")),
                };
                let models =
                    if models.is_empty() { "none".to_owned() } else { models.join(", ") } + &on_demand;
                let warnings: String =
                    warnings.iter().map(|warning| format!("\nwarning: {warning}")).collect();
                format!(
                    "{}: a daemon would start with it; models: {models}; it sets {n_sets}{warnings}",
                    path.display()
                )
            })
        }
        ConfigCommand::Example => output::print(format, &example(), Clone::clone),
        ConfigCommand::Show { name, config } => {
            let config = config.map_or_else(|| Ok(Config::default()), |path| Config::load(&path))?;
            let mut settings = shown(&config, connect::socket_of_environment());
            if let Some(name) = &name {
                settings.retain(|setting| setting.name.contains(name.as_str()));
                if settings.is_empty() {
                    return Err(CliError::NoSuchSetting { name: name.clone() });
                }
            }
            output::print(format, &settings, |settings| match &name {
                Some(_) => table(settings) + "\n" + &meanings(settings),
                None => table(settings),
            })
        }
    }
}

/// Looks at all that can be looked at without a device.
pub(super) fn check(file: &Path) -> Result<Checked, CliError> {
    let config = Config::load(file)?;
    let (models, on_demand) = check_settings(&config)?;
    Ok(Checked {
        path: file.to_owned(),
        models,
        on_demand,
        sets: config.set_by_file.names().map(str::to_owned).collect(),
        warnings: socket_passed_over(&config, service::lent_socket()).into_iter().collect(),
    })
}

/// Looks at all settings as [`check`] does at those of a file; the models that would be loaded, and those of the catalog.
pub(super) fn check_settings(config: &Config) -> Result<(Vec<String>, Vec<String>), CliError> {
    Classes::of(&config.classes).map_err(|error| Box::new(DaemonError::from(error)))?;
    Permissions::of(&config.permissions).map_err(|error| Box::new(DaemonError::from(error)))?;
    let models = config.models.iter().map(|choice| {
        let model = open_model(choice, config).map_err(Box::new)?;
        Ok(model.name)
    });
    let models = models.collect::<Result<_, CliError>>()?;
    let catalog = config.catalog.keys().map(|name| open_model(name, config).map_err(Box::new));
    let on_demand = catalog.map(|model| Ok(model?.name)).collect::<Result<_, CliError>>()?;
    for path in config.policy.component.iter().chain(&config.guests_dir) {
        std::fs::metadata(path).map_err(CliError::io(format!("find {}", path.display())))?;
    }
    Ok((models, on_demand))
}

/// Of a socket of the file's beside one that a service manager hands over, which is the one that is used.
fn socket_passed_over(config: &Config, lent: Option<PathBuf>) -> Option<String> {
    let (told, lent) = (config.socket.as_ref()?, lent?);
    (*told != lent).then(|| {
        let (told, lent) = (told.display(), lent.display());
        format!(
            "socket: the service does not listen on {told}, but on {lent}, which systemd hands it: `systemctl edit \
             trellis.socket` sets ListenStream="
        )
    })
}

fn shown(config: &Config, socket: Option<PathBuf>) -> Vec<Shown> {
    let settings = config.settings().into_iter().map(|setting| {
        let (mut value, mut source) = (setting.value, setting.source.name());
        if let ("socket", Some(socket)) = (setting.name.as_str(), &socket) {
            (value, source) = (socket.to_string_lossy().into(), "environment");
        }
        Shown { name: setting.name, value, source: source.to_owned(), about: setting.about }
    });
    settings.collect()
}

/// As TOML has it, but for text, which has no quotes.
fn value(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.clone(),
        value => value.to_string(),
    }
}

fn table(settings: &[Shown]) -> String {
    let mut table = Table::new([("SETTING", Align::Left), ("VALUE", Align::Left), ("SET BY", Align::Left)]);
    for setting in settings {
        table.push([setting.name.clone(), value(&setting.value), setting.source.clone()]);
    }
    table.render()
}

fn meanings(settings: &[Shown]) -> String {
    settings.iter().map(|setting| format!("{}: {}\n", setting.name, setting.about)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_environment_says_wins_over_the_file() {
        let config = Config::parse("socket = '/run/a.sock'").expect("valid");
        let of = |socket: Option<&str>| {
            let settings = shown(&config, socket.map(PathBuf::from));
            let socket = settings.into_iter().find(|setting| setting.name == "socket").expect("it is there");
            (value(&socket.value), socket.source)
        };
        assert_eq!(of(None), ("/run/a.sock".to_owned(), "file".to_owned()));
        assert_eq!(of(Some("/run/b.sock")), ("/run/b.sock".to_owned(), "environment".to_owned()));
    }

    #[test]
    fn a_socket_beside_the_one_that_is_handed_over_is_warned_of() {
        let lent = || Some(PathBuf::from("/run/trellis/trellis.sock"));
        let of = |text: &str, lent| socket_passed_over(&Config::parse(text).expect("valid"), lent);
        let warning = of("socket = '/run/a.sock'", lent()).expect("it is passed over");
        assert!(warning.contains("not listen on /run/a.sock, but on /run/trellis/trellis.sock"), "{warning}");
        assert_eq!(of("socket = '/run/trellis/trellis.sock'", lent()), None);
        assert_eq!(of("socket = '/run/a.sock'", None), None);
        assert_eq!(of("", lent()), None);
    }
}
