//! `trellis replay`: runs a recorded guest again, without a model.

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use clap::Args;
use trellis_client::{ErrorBody, ErrorCode, Program as ClientProgram};

use super::error::{CliError, ErrorObject};
use super::output::{Format, note};
use super::resolve::{self, Named};
use super::run;
use super::screen::{Extent, Screen};
use crate::config::Config;
use crate::daemon::{DaemonError, cache_dir};
use crate::guest::{GuestEnd, Verdict};
use crate::recording::{Head, Reader};
use crate::replay::{Replay, ReplayError};
use crate::service;
use crate::session::events;

const EXAMPLES: &str = "\
Examples:
  trellis run --record beam.rec beam \"Once\"     records what the guest asks and is answered
  trellis replay beam.rec                       runs it again, with the same answers and without a model
  trellis replay beam.rec ./my-beam             runs another build: what does it do differently, and where first?

A replay shows what the guest sends and says how it ended. Where all was as in the recording the exit status is 0,
whatever that end was; --json has the end of the recorded run as `recorded`, with `cut` where the recording lacks what the
guest did last. At the first call that is not the recorded one it stops, shows both, and exits with status 3.";

/// Run a recorded guest again, call by call the same, without a model
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ReplayArgs {
    /// The recording that `trellis run --record` wrote
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// A component, the folder of a guest's crate, or an example's name, instead of the recorded component
    #[arg(value_name = "GUEST")]
    guest: Option<String>,
}

pub(crate) async fn replay(args: ReplayArgs, format: Format) -> Result<(), CliError> {
    let broken = |source| CliError::Recording { path: args.file.clone(), source };
    let file = File::open(&args.file).map_err(CliError::io(format!("read {}", args.file.display())))?;
    let (mut head, reader) = Reader::open(BufReader::new(file)).map_err(broken)?;
    let wasm = match component(args.guest.as_deref(), &mut head, format).await? {
        Some(wasm) => wasm,
        None => return Err(CliError::NoRecordedComponent { guest: head.guest, file: args.file }),
    };
    let config = Config::default();
    let cache_dir = cache_dir(&config).ok_or_else(|| Box::new(DaemonError::NoCacheDir))?;
    let mut screen = Screen::new(format);
    let replay = Replay::prepare(reader, &config, cache_dir).map_err(|error| error.into_cli(&args.file))?;
    if replay.recorded_hash() != blake3::hash(&wasm) {
        note(format, "this is not the component that was recorded");
    }
    let mut problem = None;
    let name = head.guest.clone();
    let verdict = replay.run(wasm, name, |output| {
        for event in events(output) {
            if let Err(error) = screen.show(&event) {
                problem.get_or_insert(error);
            }
        }
    });
    let verdict = verdict.await.map_err(|error| error.into_cli(&args.file))?;
    if let Some(error) = problem {
        return Err(error);
    }
    finish(verdict, &args.file, &mut screen)
}

/// The component to run; nothing if the recording has none.
async fn component(
    guest: Option<&str>,
    head: &mut Head,
    format: Format,
) -> Result<Option<bytes::Bytes>, CliError> {
    let word = match (guest, head.component.take()) {
        (Some(word), _) => word,
        (None, Some(component)) => return Ok(Some(component.into())),
        (None, None) => &head.guest,
    };
    let named = resolve::resolve(word, &resolve::example_folders())?;
    match (run::program(&named, format).await?, named) {
        (ClientProgram::Wasm(wasm), _) => Ok(Some(wasm)),
        (_, Named::Registered(name)) if guest.is_some() => {
            let known = resolve::example_names(&resolve::example_folders());
            Err(CliError::UnknownGuest { name, known })
        }
        _ => Ok(None),
    }
}

fn finish(verdict: Verdict, file: &Path, screen: &mut Screen) -> Result<(), CliError> {
    let error = match verdict {
        Verdict::Same(end) => {
            let body = (end != GuestEnd::Finished).then(|| service::ended(&end));
            let extent = match end {
                GuestEnd::RecordingExceeded { .. } => Extent::Cut,
                _ => Extent::Whole,
            };
            screen.end_as_recorded(body.map(ErrorObject::from), extent)?;
            screen.note(&match extent {
                Extent::Whole => format!("all as recorded; that run ended so: {end}"),
                Extent::Cut => format!(
                    "all as recorded up to where the recording ends, which lacks the end of that run: {end} \
                     (recording_bytes)"
                ),
            });
            return Ok(());
        }
        Verdict::Different(difference) => CliError::Different(difference),
        Verdict::Broken(source) => CliError::Recording { path: file.to_owned(), source },
    };
    let body = ErrorBody::new(ErrorCode::Other("replay".to_owned()), error.to_string());
    screen.end(Some(body.into()), None)?;
    Err(error)
}

impl ReplayError {
    fn into_cli(self, file: &Path) -> CliError {
        match self {
            Self::Broken(source) => CliError::Recording { path: file.to_owned(), source },
            Self::Guest(error) => CliError::NotReplayed(error),
            Self::NotCompared(end) => CliError::NotCompared(Box::new(service::ended(&end))),
        }
    }
}
