//! The command line: one file for each command.
//!
//! - Comes in: arguments, standard input as messages to a guest (`input`), signals (`interrupt`), the answers and events of a
//!   daemon.
//! - Goes out: results on standard output, as text for people or with `--json` for programs (`output`, `table`, `width`, `screen`, `top`);
//!   remarks, progress and errors on standard error; an exit status (`error`), which is part of the interface.
//! - Most commands are clients of a daemon. `connect` finds the one that runs, or starts one inside this process; `resolve`
//!   says what a word means as a guest, and `cargo` and `toolchain` build it. `serve` is the daemon; `doctor` and `bench`
//!   look at the machine itself.
//! - Must not happen: a way to guests or engines past the client, but for `replay` and `bench`; text of a guest or a model on a
//!   terminal unescaped, where it could pass for ours; a bar or a remark on standard output; a command without an example in
//!   its help.

mod access;
mod attach;
mod bar_screen;
mod bench;
mod build;
mod cargo;
mod changes;
mod chat;
mod check;
mod completions;
mod config;
mod connect;
mod detach;
mod doctor;
mod error;
mod info;
mod input;
mod interrupt;
mod limits;
mod load;
mod logs;
mod man;
mod manager;
mod metrics;
mod models;
mod new;
mod output;
mod patience;
mod profile;
mod progress;
mod ps;
mod record;
mod reload;
mod replay;
mod resolve;
mod run;
mod screen;
mod seconds;
mod seed;
mod serve;
mod served;
mod service;
mod sockets;
mod start_notes;
mod status;
mod stop;
mod table;
mod test;
mod test_runner;
mod toolchain;
mod top;
mod unload;
mod upgrade;
mod usage_error;
mod watch;
mod width;

use std::process::ExitCode;
use std::sync::OnceLock;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use self::error::CliError;
pub use self::error::TRY_AGAIN;
use self::output::Format;
use crate::daemon::BackendWrap;

const EXAMPLES: &str = "\
Examples:
  trellis run chat \"What is 37 + 48?\"     run an example; starts a daemon inside if none is running
  trellis run ./my-guest --beams 4        build a guest crate and run it
  trellis serve                           keep the model loaded for everybody
  trellis chat                            talk to the model

Exit status: 0 done, 1 the guest failed, 2 a mistake in the command or no daemon, 3 a replay left its
recording, or `trellis status` found no daemon that serves, 75 the device or the model failed, the model was unloaded
or on its way out, or the daemon was going down: the same may work another time, 130 interrupted.";

/// Programmable LLM decoding: runs small sandboxed programs next to the model
#[derive(Debug, Parser)]
#[command(name = "trellis", version, after_help = EXAMPLES, arg_required_else_help = true, max_term_width = 100)]
struct Cli {
    /// Print JSON for programs instead of text for people
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Serve(serve::ServeArgs),
    Run(run::RunArgs),
    Attach(attach::AttachArgs),
    Replay(replay::ReplayArgs),
    Chat(chat::ChatArgs),
    New(new::NewArgs),
    Build(build::BuildArgs),
    Check(check::CheckArgs),
    Test(test::TestArgs),
    #[command(hide = true)]
    TestRunner(test_runner::TestRunnerArgs),
    Models(models::ModelsArgs),
    Load(load::LoadArgs),
    Unload(unload::UnloadArgs),
    Reload(reload::ReloadArgs),
    Upgrade(upgrade::UpgradeArgs),
    Status(status::StatusArgs),
    Top(top::TopArgs),
    Ps(ps::PsArgs),
    Stop(stop::StopArgs),
    Info(info::InfoArgs),
    Limits(limits::LimitsArgs),
    Metrics(metrics::MetricsArgs),
    Logs(logs::LogsArgs),
    Config(config::ConfigArgs),
    Service(service::ServiceArgs),
    Doctor(doctor::DoctorArgs),
    Bench(bench::BenchArgs),
    Completions(completions::CompletionsArgs),
    #[command(hide = true)]
    Man(man::ManArgs),
    /// The process that compiles one component over its standard streams
    #[command(hide = true)]
    CompileWorker,
    /// The process that tries out one grammar over its standard streams
    #[command(hide = true)]
    TrialWorker,
    /// The process that guests of one user run in
    #[cfg(target_os = "linux")]
    #[command(hide = true)]
    GuestWorker {
        /// Try to get out instead
        #[arg(long)]
        probe: bool,
    },
}

/// In what a program of the tests differs from the released one.
#[derive(Clone, Default)]
pub struct TestBuild {
    /// What its daemon has between engines and backends, which may fail when they are told to.
    pub wrap: Option<BackendWrap>,
    /// Its version; that of this crate otherwise.
    pub version: Option<&'static str>,
    /// The format in which its daemon leaves its socket to another program, and takes one; that of this crate otherwise.
    pub hand_over_format: Option<u32>,
}

static TEST_BUILD: OnceLock<TestBuild> = OnceLock::new();

/// What is particular to this program.
pub(crate) fn test_build() -> TestBuild {
    TEST_BUILD.get().cloned().unwrap_or_default()
}

/// As [`main`], for the tests' own program.
#[must_use]
pub fn main_of(build: TestBuild) -> ExitCode {
    let _ = TEST_BUILD.set(build);
    main()
}

/// What the command line says, or why it is none.
fn parsed() -> Result<Cli, clap::Error> {
    let command = Cli::command();
    let command = match test_build().version {
        Some(version) => command.version(version),
        None => command,
    };
    Cli::from_arg_matches(&command.try_get_matches()?)
}

/// Whether this process was started as a child of a daemon in the same program: to compile a guest, to try out a grammar, or to run
/// guests. A program of its own that has a daemon in it calls [`main`] then.
#[must_use]
pub fn is_child() -> bool {
    #[cfg(target_os = "linux")]
    const GUEST_WORKER: Option<&str> = Some(crate::isolation::GUEST_WORKER);
    #[cfg(not(target_os = "linux"))]
    const GUEST_WORKER: Option<&str> = None;
    let first = std::env::args().nth(1);
    let is = |argument| first.as_deref() == Some(argument);
    is(crate::guest::COMPILE_WORKER) || is(crate::guest::TRIAL_WORKER) || GUEST_WORKER.is_some_and(is)
}

/// The whole program: reads the command line, does what it says, and says how that went.
#[must_use]
pub fn main() -> ExitCode {
    let Cli { json, command } = match parsed() {
        Ok(cli) => cli,
        Err(error) => return usage_error::say(&error),
    };
    let format = if json { Format::Json } else { Format::Text };
    if is_child() {
        crate::spawner::name_this();
    }
    if let Command::CompileWorker = command {
        return crate::guest::compile_worker_main();
    }
    if let Command::TrialWorker = command {
        return crate::guest::trial_worker_main();
    }
    #[cfg(target_os = "linux")]
    if let Command::GuestWorker { probe } = command {
        let serve: fn(_, _) = if probe { crate::isolation::probe::serve } else { crate::isolation::live };
        return crate::isolation::guest_worker_main(serve);
    }
    // One thread of a daemon takes them, from when they are watched for: what comes while another program takes its place would be
    // taken by any other thread and be lost.
    if let Command::Serve(_) = command {
        crate::upgrade::hold_signals();
    }
    let result = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => {
            let result = runtime.block_on(dispatch(command, format));
            // A guest's end has been awaited; what is left, such as a read of a terminal, is not needed.
            runtime.shutdown_background();
            result
        }
        Err(source) => Err(CliError::Io { doing: "start the runtime".to_owned(), source }),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            error.print(format);
            ExitCode::from(error.exit_code())
        }
    }
}

async fn dispatch(command: Command, format: Format) -> Result<(), CliError> {
    match command {
        Command::Serve(args) => serve::serve(args, format).await,
        Command::Run(args) => run::run(args, format).await,
        Command::Attach(args) => attach::attach(args, format).await,
        Command::Replay(args) => replay::replay(args, format).await,
        Command::Chat(args) => chat::chat(args, format).await,
        Command::New(args) => new::new(&args, format),
        Command::Build(args) => build::build(args, format).await,
        Command::Check(args) => check::check(args, format).await,
        Command::Test(args) => test::test(args, format).await,
        Command::TestRunner(args) => test_runner::run(args, format).await,
        Command::Models(args) => models::models(args, format).await,
        Command::Load(args) => load::load(args, format).await,
        Command::Unload(args) => unload::unload(args, format).await,
        Command::Reload(args) => reload::reload(args, format).await,
        Command::Upgrade(args) => upgrade::upgrade(args, format).await,
        Command::Status(args) => status::status(args, format).await,
        Command::Top(args) => top::top(args, format).await,
        Command::Ps(args) => ps::ps(args, format).await,
        Command::Stop(args) => stop::stop(args, format).await,
        Command::Info(args) => info::info(args, format).await,
        Command::Limits(args) => limits::limits(args, format).await,
        Command::Metrics(args) => metrics::metrics(args, format).await,
        Command::Logs(args) => logs::logs(args, format).await,
        Command::Config(args) => config::config(args, format),
        Command::Service(args) => service::service(args, format),
        Command::Doctor(args) => doctor::doctor(args, format).await,
        Command::Bench(args) => bench::bench(args, format).await,
        Command::Completions(args) => completions::completions(&args),
        Command::Man(args) => man::man(&args),
        Command::CompileWorker | Command::TrialWorker => unreachable!("it runs without a runtime"),
        #[cfg(target_os = "linux")]
        Command::GuestWorker { .. } => unreachable!("it runs without a runtime"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(line.split_whitespace())
    }

    #[test]
    fn the_definitions_hold_together() {
        Cli::command().debug_assert();
    }

    #[test]
    fn what_follows_the_guest_is_the_guests() {
        let cli = parse("trellis run --seed 7 chat --json --system x -- --y").expect("valid");
        assert!(!cli.json);
        let Command::Run(args) = cli.command else { panic!("{cli:?}") };
        assert_eq!(args.seed, Some(7));
        assert_eq!(args.words, ["chat", "--json", "--system", "x", "--", "--y"]);
    }

    #[test]
    fn json_may_stand_anywhere_before() {
        assert!(parse("trellis --json ps").expect("valid").json);
        assert!(parse("trellis ps --json").expect("valid").json);
        assert!(parse("trellis run --json chat").expect("valid").json);
    }

    #[test]
    fn a_number_that_is_no_seed_is_told_which_are() {
        for line in [
            "trellis run --seed -1 chat",
            "trellis run --seed=18446744073709551616 chat",
            "trellis chat --seed -1",
            "trellis chat --seed x",
        ] {
            let said = parse(line).expect_err(line).to_string();
            assert!(said.contains("--seed <N>"), "{line}: {said}");
            assert!(said.contains("from 0 to 18446744073709551615"), "{line}: {said}");
            assert!(!said.contains("tip:"), "{line}: {said}");
        }
    }

    #[test]
    fn a_word_that_is_no_guests_number_is_told_where_those_are() {
        for word in ["abc", "1.5", "18446744073709551616"] {
            let said = parse(&format!("trellis stop {word}")).expect_err(word).to_string();
            assert!(said.contains("expected the number of a guest, which `trellis ps` lists"), "{said}");
        }
    }

    #[test]
    fn mistakes_are_usage_errors() {
        for line in [
            "trellis run",
            "trellis run --bogus chat",
            "trellis run --local --socket /tmp/x chat",
            "trellis run --socket /tmp/x --device cpu chat",
            "trellis run --timeout never chat",
            "trellis serve --device tpu",
            "trellis serve --dtype f64",
            "trellis doctor now",
            "trellis attach",
            "trellis attach twelve",
            "trellis run --detach --local chat",
            "trellis run --detach --record out.rec chat",
            "trellis run --detach --watch ./my-guest",
            "trellis load",
            "trellis load draft --device gpu",
            "trellis unload draft --drain -1",
            "trellis stop",
            "trellis replay",
            "trellis run --record",
            "trellis stop 3 --daemon",
            "trellis stop three",
            "trellis top --interval 0",
            "trellis top --interval 1h",
            "trellis status now",
            "trellis bench --tokens 1",
            "trellis bench --contexts 0",
            "trellis chat --temperature warm",
            "trellis limits --config /tmp/x --socket /tmp/y",
            "trellis limits cpu_ms memory_bytes",
            "trellis logs -n -1",
            "trellis metrics --list --socket /tmp/y",
        ] {
            let error = parse(line).expect_err(line);
            assert_eq!(error.exit_code(), 2, "{line}");
        }
    }

    #[test]
    fn every_command_shows_an_example() {
        for command in Cli::command().get_subcommands().filter(|command| !command.is_hide_set()) {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert!(help.contains(&format!("trellis {}", command.get_name())), "{}", command.get_name());
        }
    }
}
