//! `trellis config`: whether a daemon would start with a file of settings, and what it would have.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use serde::Serialize;
use serde_json::Value;

use super::connect;
use super::error::CliError;
use super::output::{self, Format};
use super::served;
use super::service;
use super::table::{Align, Table};
use super::width::{WidthArgs, screen_width, wrapped};
use crate::config::{Config, Isolation, example};
use crate::daemon::open_model;
use crate::start_check::{self, Startable, Starter};

const EXAMPLES: &str = "\
Examples:
  trellis config check /etc/trellis.toml
  trellis config show --config /etc/trellis.toml
  trellis config show idle_ms                     what has idle_ms in its name, and what it is for
  trellis config example > trellis.toml           a file to begin with";

const CHECK_EXAMPLES: &str = "\
Examples:
  trellis config check trellis.toml && trellis serve --config trellis.toml

Looked at are the file, with the nearest right name for a wrong one, users and groups of classes and permissions, the folders of
guests and of the cache, the head of each model, and whether the models fit `model_bytes`, and on the CPU the machine. The operator's
component is compiled, begins, and says what it puts in front of each model. No model is loaded, and what is refused is refused in the
words of the start. A model of the catalog alone that cannot be loaded is warned of: whoever asks for it is refused. Of the file of the
service the cache is looked at as its user has it. `trellis doctor --config FILE` compares the models with the memory that is free as well.

Exit status: 0 a daemon would start with it, 2 it would not, or there is no such file.";

const SHOW_EXAMPLES: &str = "\
Examples:
  trellis config show                                          the defaults
  trellis config show --config trellis.toml                    with a file
  trellis config show --config trellis.toml --wide             values that are long in whole
  trellis config show --config trellis.toml --json | jq -r '.[] | select(.source == \"file\") | .name'

Lines fit the terminal, or 80 columns where there is none: a value that is too long is cut with a sign (\u{2026}).
Names are those of the file: limits.cpu_ms is cpu_ms in its table [limits]. SET BY says where a value is from: the default, the
file, the environment (TRELLIS_SOCKET), the machine (the device and its memory), which decides where nothing is said, or the socket, where
the isolation of guests follows from who may come there.
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
        #[command(flatten)]
        width: WidthArgs,
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
            let checked = check(&file, service::starter_of(&file))?;
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
                let said = format!(
                    "{}: a daemon would start with it; models: {models}; it sets {n_sets}",
                    path.display()
                );
                let warnings = warnings.iter().map(|warning| format!("warning: {warning}"));
                let lines = std::iter::once(said).chain(warnings);
                lines.map(|line| wrapped("", &line, N_INDENT, screen_width())).collect()
            })
        }
        ConfigCommand::Example => output::print(format, &example(), Clone::clone),
        ConfigCommand::Show { name, config, width } => {
            let file = config;
            let config = file.as_deref().map_or_else(|| Ok(Config::default()), Config::load)?;
            let isolation = served::with_isolation(file.as_deref(), config.clone()).isolation;
            let mut settings = shown(&config, connect::socket_of_environment(), isolation);
            if let Some(name) = &name {
                settings.retain(|setting| setting.name.contains(name.as_str()));
                if settings.is_empty() {
                    return Err(CliError::NoSuchSetting { name: name.clone() });
                }
            }
            output::print(format, &settings, |settings| match &name {
                Some(_) => table(settings, width.n_cells()) + "\n" + &meanings(settings, width.n_cells()),
                None => table(settings, width.n_cells()),
            })
        }
    }
}

/// Looks at all that can be looked at without a device.
pub(super) fn check(file: &Path, starter: Starter) -> Result<Checked, CliError> {
    let config = served::for_starter(starter, Config::load(file)?);
    let Startable { models, .. } = start_check::check(&config, starter).map_err(Box::new)?;
    let models: Vec<String> = models.into_iter().map(|model| model.name).collect();
    let mut warnings: Vec<String> = socket_passed_over(&config, service::lent_socket()).into_iter().collect();
    warnings.extend(not_loadable(&config, &models));
    Ok(Checked {
        path: file.to_owned(),
        models,
        on_demand: config.catalog.keys().cloned().collect(),
        sets: config.set_by_file.names().map(str::to_owned).collect(),
        warnings,
    })
}

/// Of models of the catalog that nobody could have. A daemon starts all the same, and says so to whoever asks for one.
fn not_loadable(config: &Config, at_the_start: &[String]) -> Vec<String> {
    let on_demand = config.catalog.keys().filter(|name| !at_the_start.contains(name));
    let error = |name: &String| Some((name.clone(), open_model(name, config).err()?));
    let warning = |(name, error)| format!("catalog.{name}: whoever asks for it is refused: {error}");
    on_demand.filter_map(error).map(warning).collect()
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

/// `isolation` is what it comes to where the settings leave that open.
fn shown(config: &Config, socket: Option<PathBuf>, isolation: Isolation) -> Vec<Shown> {
    let settings = config.settings().into_iter().map(|setting| {
        let (mut value, mut source) = (setting.value, setting.source.name());
        if let ("socket", Some(socket)) = (setting.name.as_str(), &socket) {
            (value, source) = (socket.to_string_lossy().into(), "environment");
        }
        if setting.name == "isolation" && config.isolation == Isolation::Auto {
            (value, source) = (isolation.name().into(), "socket");
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

fn table(settings: &[Shown], n_cells: usize) -> String {
    let mut table = Table::new([("SETTING", Align::Left), ("VALUE", Align::Left), ("SET BY", Align::Left)]);
    table.squeeze("VALUE", 12);
    for setting in settings {
        table.push([setting.name.clone(), value(&setting.value), setting.source.clone()]);
    }
    table.render_in(n_cells)
}

/// Cells before further lines of what is said of one thing.
const N_INDENT: usize = 2;

fn meanings(settings: &[Shown], n_cells: usize) -> String {
    let line = |setting: &Shown| format!("{}: {}", setting.name, setting.about);
    settings.iter().map(|setting| wrapped("", &line(setting), N_INDENT, n_cells)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_environment_says_wins_over_the_file() {
        let config = Config::parse("socket = '/run/a.sock'").expect("valid");
        let of = |socket: Option<&str>| {
            let settings = shown(&config, socket.map(PathBuf::from), Isolation::Thread);
            let socket = settings.into_iter().find(|setting| setting.name == "socket").expect("it is there");
            (value(&socket.value), socket.source)
        };
        assert_eq!(of(None), ("/run/a.sock".to_owned(), "file".to_owned()));
        assert_eq!(of(Some("/run/b.sock")), ("/run/b.sock".to_owned(), "environment".to_owned()));
    }

    #[test]
    fn where_guests_run_is_said_and_what_that_follows_from() {
        let of = |text: &str, decided: Isolation| {
            let settings = shown(&Config::parse(text).expect("valid"), None, decided);
            let isolation = settings.into_iter().find(|setting| setting.name == "isolation");
            let isolation = isolation.expect("it is there");
            (value(&isolation.value), isolation.source)
        };
        let seen = |value: &str, source: &str| (value.to_owned(), source.to_owned());
        assert_eq!(of("", Isolation::Process), seen("process", "socket"));
        assert_eq!(of("isolation = 'auto'", Isolation::Thread), seen("thread", "socket"));
        assert_eq!(of("isolation = 'thread'", Isolation::Thread), seen("thread", "file"));
    }

    #[test]
    fn lines_fit_the_screen_and_values_are_cut_and_not_names() {
        let long = "['a-user-of-a-long-name', 'another-user', 'and-one-more-user']";
        let text = format!("[classes.research-and-development]\nusers = {long}");
        let settings = shown(&Config::parse(&text).expect("valid"), None, Isolation::Thread);
        for text in [table(&settings, 80), meanings(&settings, 80)] {
            assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        }
        let narrow = table(&settings, 80);
        let line = narrow.lines().find(|line| line.starts_with("classes.research-and-development.users "));
        let line = line.unwrap_or_else(|| panic!("{narrow}"));
        assert!(line.contains(" [\"a-user-of") && !line.contains("and-one-more-user"), "{line}");
        assert!(table(&settings, usize::MAX).contains("and-one-more-user"));
    }

    #[test]
    fn models_that_nobody_asks_for_at_the_start_are_warned_of() {
        let text = "[catalog.broken]\npath = '/no/such/model'\n[catalog.small]\npath = 'draft'";
        let config = Config::parse(text).expect("valid");
        let warnings = not_loadable(&config, &[]);
        let [warning] = &warnings[..] else { panic!("{warnings:?}") };
        assert!(warning.starts_with("catalog.broken: whoever asks for it is refused: "), "{warning}");
        assert!(warning.contains("/no/such/model"), "{warning}");
        assert!(not_loadable(&config, &["broken".to_owned()]).is_empty(), "the start has said so");
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
