//! `trellis run`: starts a guest and shows what it sends.

use std::path::{Path, PathBuf};
use std::pin::pin;
use std::time::Duration;

use clap::Args;
use tokio_util::task::AbortOnDropHandle;
use trellis_client::{Client, Error, ErrorCode, Event, Guest, Program, StartOptions};

use super::cargo;
use super::connect::{Found, Home, HomeArgs, read_component};
use super::error::{CliError, ErrorObject};
use super::fetch::{RegistryArgs, fetch};
use super::input::{self, Sent};
use super::interrupt::Interrupts;
use super::oci::{Reference, Terms};
use super::output::{Format, note};
use super::patience::{Patience, not_begun};
use super::profile::Profiling;
use super::record::Recording;
use super::resolve::{self, Named};
use super::screen::Screen;
use super::seconds::some_seconds;
use super::seed::seed;
use crate::recording::Head;

const EXAMPLES: &str = "\
Examples:
  trellis run chat \"What is 37 + 48?\"           an example, by its name
  trellis run --seed 7 ./my-guest --beams 4     a guest's crate, built on the way, and its arguments
  trellis run guest.wasm < questions.txt        a component; each line becomes a message to it
  trellis run --record out.rec chat \"Hello\"     for `trellis replay out.rec`, which needs no model
  trellis run --profile out.json chat \"Hello\"   where its time went, with a timeline for the Firefox Profiler
  trellis run --watch ./my-guest \"Hello\"         again after each change of its source
  trellis run --detach ./my-guest \"Hello\"      says its number and ends; the guest goes on, see `trellis attach`
  trellis run --json best-of-n \"Hello\" | jq     its events, one JSON object a line
  trellis run ghcr.io/OWNER/chat@sha256:… \"Hi\"  a guest of a registry, as `trellis push` says its name; kept once it is fetched

A name is a crate's folder here, or else a guest that the daemon's operator has in guests_dir, or else an example of this
folder's or the program's checkout, a file here, or a component of a package. Whoever means an example gives its folder.

What the guest sends goes to standard output byte for byte, but to a terminal with control characters escaped
(\\u{1b}); its log and errors, on standard error, have them escaped always.";

/// Run a guest and show what it sends
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct RunArgs {
    /// The seed that the guest sees; the same seed gives the same text
    #[arg(long, value_name = "N", value_parser = seed, allow_negative_numbers = true)]
    pub(crate) seed: Option<u64>,
    /// Stop the guest after so many seconds
    #[arg(long, value_name = "SECONDS", value_parser = some_seconds, allow_negative_numbers = true)]
    timeout: Option<Duration>,
    /// Leave standard input alone; otherwise its lines are messages to the guest, and the status is 2 where one
    /// cannot be sent
    #[arg(long)]
    no_stdin: bool,
    /// Record what the guest asks and is answered, for `trellis replay`; prompts and answers are in it
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// Say where the guest's time went, and write it as a timeline for the Firefox Profiler
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// Build and run the guest again whenever its source changes, with the model kept loaded; it gets no messages
    #[arg(long)]
    watch: bool,
    /// Say the guest's number once it runs in the daemon, and end; `trellis attach` shows what it sends. It gets no messages
    /// until then
    #[arg(long, conflicts_with_all = ["record", "profile", "watch", "local", "device", "dtype"])]
    detach: bool,
    #[command(flatten)]
    registry: RegistryArgs,
    #[command(flatten)]
    home: HomeArgs,
    /// A component, the folder of a guest's crate, the name of a guest of the daemon's or an example, or a guest of a registry
    /// (REGISTRY/NAME:TAG, REGISTRY/NAME@sha256:…) or a folder (oci:FOLDER); then the guest's own arguments
    #[arg(value_name = "PATH|NAME [ARGS]", required = true, trailing_var_arg = true)]
    pub(crate) words: Vec<String>,
}

/// What a guest gets to hear from its user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UserInput {
    /// The lines of standard input.
    Lines,
    /// Nothing.
    Nothing,
}

pub(crate) async fn run(args: RunArgs, format: Format) -> Result<(), CliError> {
    let RunArgs { seed, timeout, no_stdin, record, profile, watch, detach, registry, home, mut words } = args;
    let arguments = words.split_off(1);
    let (is_recorded, is_profiled) = (record.is_some(), profile.is_some());
    let options = StartOptions {
        arguments,
        seed,
        deadline: timeout,
        is_recorded,
        is_profiled,
        ..StartOptions::default()
    };
    let input = if no_stdin { UserInput::Nothing } else { UserInput::Lines };
    let wanted = Wanted { record, profile };
    if detach {
        return super::detach::detach(&words[0], &home, registry, options, format).await;
    }
    if watch {
        return super::watch::watch(&words[0], &home, &options, &wanted, format).await;
    }
    start(&words[0], &home, registry, options, input, wanted, format).await
}

/// The files that are to be written beside a run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Wanted {
    pub(crate) record: Option<PathBuf>,
    pub(crate) profile: Option<PathBuf>,
}

impl Wanted {
    /// Where they lie.
    pub(crate) fn paths(&self) -> Vec<&Path> {
        self.record.iter().chain(&self.profile).map(PathBuf::as_path).collect()
    }
}

/// What comes for them.
#[derive(Debug)]
struct Kept {
    recording: Option<Recording>,
    profiling: Option<Profiling>,
}

/// Finds, builds and runs a guest. One that a daemon refuses because it is about to go down is started in the next.
///
/// # Errors
/// Whatever keeps it from starting, or [`CliError::Guest`] for what it ended with.
pub(crate) async fn start(
    word: &str,
    home: &HomeArgs,
    registry: RegistryArgs,
    options: StartOptions,
    input: UserInput,
    wanted: Wanted,
    format: Format,
) -> Result<(), CliError> {
    let interrupts = Interrupts::watch()?;
    let mut patience = home.patience(format);
    let named = interrupts.stop(meant_in_time(word, home, &mut patience)).await?;
    let (found, program) = interrupts
        .stop(async {
            let program = program_for(&named, home, registry, format).await?;
            Ok((self::home(home, &named, &mut patience).await, program))
        })
        .await?;
    let mut found = match found {
        Err(CliError::Client(error)) => interrupts.stop(patience.next(home, not_begun(error)?)).await?,
        found => found?,
    };
    loop {
        let (program, options, wanted) = (program.clone(), options.clone(), wanted.clone());
        match go(&found, word, program, options, input, wanted, format, &interrupts).await {
            Err(CliError::NotBegun(body)) => {
                found = interrupts.stop(patience.next(home, body)).await?;
            }
            result => return result,
        }
    }
}

/// As [`meant`], of the next daemon where one takes on nothing more.
///
/// # Errors
/// As there.
pub(super) async fn meant_in_time(
    word: &str,
    args: &HomeArgs,
    patience: &mut Patience,
) -> Result<Named, CliError> {
    loop {
        match meant(word, args, patience).await {
            // The next one may have registered it.
            Err(CliError::Client(error)) => drop(patience.next(args, not_begun(error)?).await?),
            named => return named,
        }
    }
}

/// What a word means where a guest is to run: what the operator of the daemon has put there comes before the examples.
///
/// # Errors
/// It means nothing, or a daemon runs and does not say what it has.
async fn meant(word: &str, args: &HomeArgs, patience: &mut Patience) -> Result<Named, CliError> {
    let named = resolve::resolve(word, &resolve::example_folders())?;
    if !resolve::yields_to_registered(word, &named) || args.stays_inside() {
        return Ok(named);
    }
    let client = match patience.connect(&args.socket).await {
        Ok(client) => client,
        // That is said once one is wanted.
        Err(CliError::Client(Error::NotRunning { .. })) => return Ok(named),
        Err(error) => return Err(error),
    };
    let registered = client.info().await?.programs;
    Ok(if registered.iter().any(|name| name == word) { Named::Registered(word.to_owned()) } else { named })
}

/// Where a guest is to run.
///
/// # Errors
/// No daemon can be reached or started, or there is none that knows the guest by its name.
pub(crate) async fn home(args: &HomeArgs, named: &Named, patience: &mut Patience) -> Result<Home, CliError> {
    match (args.find(patience).await?, named) {
        (Found::There(home), _) => Ok(home),
        (Found::Here(_) | Found::Lacking(_), Named::Registered(name)) => Err(unknown_guest(name, None).await),
        (Found::Here(why), _) => args.make(why, patience.format).await,
        (Found::Lacking(lacking), _) => {
            note(patience.format, &format!("{lacking}; loading it inside this process"));
            args.make("the daemon does not have it", patience.format).await
        }
    }
}

/// Runs a program and shows what it sends.
///
/// # Errors
/// Whatever keeps it from starting, or [`CliError::Guest`] for what it ended with.
#[expect(clippy::too_many_arguments, reason = "all that a run has")]
pub(crate) async fn go(
    home: &Home,
    word: &str,
    program: Program,
    options: StartOptions,
    input: UserInput,
    wanted: Wanted,
    format: Format,
    interrupts: &Interrupts,
) -> Result<(), CliError> {
    let recording = wanted.record.map(|path| Recording::create(path, head(word, &program))).transpose()?;
    let profiling = wanted.profile.map(|path| Profiling::create(path, word)).transpose()?;
    let kept = Kept { recording, profiling };
    let options = StartOptions { model: home.model.clone(), label: label(word), ..options };
    let guest = match home.client.start(program, options).await {
        Ok(guest) => guest,
        Err(error) => return Err(not_begun(error).map_or_else(CliError::from, CliError::NotBegun)),
    };
    match drive(guest, input, kept, format, interrupts).await {
        Err(CliError::Client(error)) if error.code() == Some(&ErrorCode::UnknownProgram) => {
            Err(unknown_guest(word, Some(&home.client)).await)
        }
        result => result,
    }
}

/// Whether a guest refused an option because it is one of this command.
pub(crate) fn names_own_option(message: &str) -> bool {
    let Some((_, rest)) = message.split_once("there is no option --") else { return false };
    let name = rest.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '-').next();
    let command = RunArgs::augment_args(clap::Command::new("run"));
    let mut own = command.get_arguments().filter_map(|argument| argument.get_long());
    // Of every command.
    name == Some("json") || own.any(|own| Some(own) == name)
}

/// What the user calls a guest, without the place where it lies.
pub(super) fn label(word: &str) -> Option<String> {
    if let Some(artifact) = Reference::of_word(word) {
        return Some(artifact.label());
    }
    Some(Path::new(word).file_stem()?.to_string_lossy().into_owned())
}

/// What the client knows of a recording.
fn head(word: &str, program: &Program) -> Head {
    let component = match program {
        Program::Wasm(bytes) => Some(bytes.to_vec()),
        Program::Named(_) => None,
    };
    Head { guest: word.to_owned(), component }
}

/// What to start, built or fetched if it has to be, for the daemon that is meant.
///
/// # Errors
/// As [`program`].
pub(super) async fn program_for(
    named: &Named,
    home: &HomeArgs,
    registry: RegistryArgs,
    format: Format,
) -> Result<Program, CliError> {
    match named {
        Named::Artifact(artifact) => {
            let terms = registry.terms(home).await;
            Ok(Program::Wasm(fetch(artifact, &terms, format).await?.component))
        }
        named => program(named, format).await,
    }
}

/// What to start, built or fetched if it has to be, within the limits of a daemon without a configuration.
///
/// # Errors
/// It does not build, does not come, cannot be read, or is no component.
pub(crate) async fn program(named: &Named, format: Format) -> Result<Program, CliError> {
    Ok(match named {
        Named::Component(path) => Program::Wasm(read_component(path).await?),
        Named::Crate(folder) => Program::Wasm(read_component(&cargo::build(folder, format).await?).await?),
        Named::Artifact(artifact) => {
            Program::Wasm(fetch(artifact, &Terms::default(), format).await?.component)
        }
        Named::Registered(name) => Program::named(name),
    })
}

pub(super) async fn unknown_guest(name: &str, client: Option<&Client>) -> CliError {
    let mut known = resolve::example_names(&resolve::example_folders());
    if let Some(client) = client {
        known.extend(client.info().await.map(|info| info.programs).unwrap_or_default());
    }
    known.sort();
    known.dedup();
    CliError::UnknownGuest { name: name.to_owned(), known }
}

/// Shows a guest's events until its end. Where their reader is gone the guest is stopped, and only its recording goes on, up
/// to that end.
async fn drive(
    mut guest: Guest,
    input: UserInput,
    kept: Kept,
    format: Format,
    interrupts: &Interrupts,
) -> Result<(), CliError> {
    let Kept { mut recording, mut profiling } = kept;
    let screen = &mut Screen::new(format);
    // In a task of its own: here, showing an event or a note takes as long as its reader likes.
    let (interrupted, canceller) = (interrupts.clone(), guest.sender());
    let _cancelling = AbortOnDropHandle::new(tokio::spawn(async move {
        interrupted.first().await;
        canceller.cancel();
    }));
    let (sender, stopper) = (guest.sender(), guest.sender());
    let mut messages = pin!(async move {
        match input {
            UserInput::Lines => input::send_lines(sender).await,
            UserInput::Nothing => input::send_nothing(sender).await,
        }
    });
    let (mut has_messages, mut is_interrupted, mut has_started) = (true, false, false);
    let mut sent = Sent::All;
    let mut shown = Ok(());
    let error = loop {
        tokio::select! {
            biased;
            () = interrupts.first(), if !is_interrupted => {
                is_interrupted = true;
                screen.note("stopping the guest; interrupt again to leave at once");
            }
            event = guest.next() => match event {
                Some(Ok(Event::Recorded { bytes })) => {
                    if let Some(recording) = &mut recording {
                        recording.add(&bytes)?;
                    }
                }
                Some(Ok(Event::Profiled { bytes })) => {
                    if let Some(profiling) = &mut profiling {
                        profiling.add(&bytes);
                    }
                }
                Some(Ok(event)) => {
                    if let Event::Started { .. } = event {
                        has_started = true;
                        profiling.as_mut().map(Profiling::begin);
                    }
                    if shown.is_ok() {
                        shown = screen.show(&event);
                        if shown.is_err() && recording.is_none() {
                            return shown;
                        }
                        if shown.is_err() {
                            stopper.cancel();
                        }
                    }
                }
                Some(Err(error)) => break Some(error),
                None => break None,
            },
            () = screen.progress_due() => {}
            // What is read is not lost with a start that comes to nothing.
            outcome = &mut messages, if has_messages && has_started => (sent, has_messages) = (outcome, false),
        }
    };
    let error = match error {
        Some(error) if !has_started && !is_interrupted => match not_begun(error) {
            Ok(body) => return Err(CliError::NotBegun(body)),
            Err(error) => Some(error),
        },
        error => error,
    };
    let profiled = profiling.filter(|_| has_started).map(|profiling| profiling.finish(format)).transpose();
    let shown = shown.and_then(|()| screen.end(error.as_ref().map(ErrorObject::from), guest.usage()));
    if has_started && let Some(recording) = recording {
        let finished = recording.finish();
        // Where the connection is lost that is why nothing was recorded.
        if matches!(error, None | Some(Error::Daemon(_))) {
            finished?;
        }
    }
    shown?;
    if matches!(error, None | Some(Error::Daemon(_))) {
        profiled?;
    }
    match error {
        None if sent == Sent::NotAll => Err(CliError::InputCutShort),
        None => Ok(()),
        Some(_) if is_interrupted => Err(CliError::Interrupted),
        Some(Error::Daemon(body)) if has_started => Err(CliError::Guest(body)),
        Some(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_cannot_run_is_refused_before_a_model_is_loaded() {
        let start = async |word: &str| {
            let home =
                HomeArgs { local: true, models: vec!["/no/such/model".to_owned()], ..HomeArgs::default() };
            let (options, registry) = (StartOptions::default(), RegistryArgs::default());
            start(word, &home, registry, options, UserInput::Nothing, Wanted::default(), Format::Text).await
        };
        let error = start("no-such-guest").await.expect_err("no name");
        assert!(matches!(&error, CliError::UnknownGuest { name, .. } if name == "no-such-guest"), "{error}");
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), "root:x:0:0").expect("written");
        let error = start(file.path().to_str().expect("UTF-8")).await.expect_err("no component");
        assert!(matches!(&error, CliError::NotAComponent { path, .. } if path == file.path()), "{error}");
        std::fs::write(file.path(), b"\0asm\x0d\0\x01\0").expect("written");
        let error = start(file.path().to_str().expect("UTF-8")).await.expect_err("no model");
        assert!(matches!(&error, CliError::Daemon(_)), "{error}");
    }

    #[tokio::test]
    async fn a_daemon_that_does_not_answer_is_not_one_that_has_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("trellis.sock");
        let listener = std::os::unix::net::UnixListener::bind(&socket).expect("a free place");
        let mut home = HomeArgs::default();
        home.socket.socket = Some(socket);
        let goes = std::thread::spawn(move || drop(listener.accept()));
        // A file beside the tests, whose name a daemon could have as well.
        let mut patience = home.patience(Format::Text);
        let error = meant("Cargo.toml", &home, &mut patience).await.expect_err("it may have it");
        assert!(matches!(error, CliError::Client(Error::ConnectionLost(_))), "{error}");
        goes.join().expect("no panic");
        let named = meant("Cargo.toml", &home, &mut patience).await.expect("no daemon runs");
        assert!(matches!(named, Named::Component(_)), "{named:?}");
    }
}
