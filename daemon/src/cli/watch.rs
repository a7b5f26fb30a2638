//! `trellis run --watch`: a guest that is built and run again whenever its source has changed.

use trellis_client::{Error, ErrorCode, Lost, StartOptions};

use super::changes::Changes;
use super::connect::{Home, HomeArgs};
use super::error::CliError;
use super::interrupt::Interrupts;
use super::output::{Format, note};
use super::patience::not_begun;
use super::resolve::{self, Named};
use super::run::{self, UserInput, Wanted};

/// Runs a guest, and again after each change, until it is interrupted. What goes wrong is said, and the next change waited
/// for; the model stays loaded.
///
/// # Errors
/// The guest's files cannot be watched; in the end [`CliError::Interrupted`].
pub(crate) async fn watch(
    word: &str,
    args: &HomeArgs,
    options: &StartOptions,
    wanted: &Wanted,
    format: Format,
) -> Result<(), CliError> {
    let interrupts = Interrupts::watch()?;
    let named = resolve::resolve(word, &resolve::example_folders())?;
    let mut home = None;
    loop {
        // Before it is built: what is written meanwhile is not in it.
        let mut changes = Changes::of(&named, &wanted.paths())?;
        let round =
            round(word, &named, args, &mut home, options.clone(), wanted.clone(), format, &interrupts);
        let is_over = tokio::select! {
            biased;
            () = changes.next() => None,
            outcome = round => Some(outcome),
        };
        match is_over {
            None => {
                note(format, "the source has changed; starting again");
                continue;
            }
            Some(Err(error @ (CliError::Interrupted | CliError::OutputClosed))) => return Err(error),
            Some(Err(error)) => {
                error.print(format);
                // It was cut short for the next daemon.
                if let CliError::Guest(body) = &error
                    && body.code == ErrorCode::ShuttingDown
                {
                    continue;
                }
                // A daemon that is gone may be there again.
                if let CliError::Client(_) | CliError::NotBegun(_) | CliError::Silent { .. } = error {
                    home = None;
                }
            }
            Some(Ok(())) => {}
        }
        note(format, "waiting for a change of the source; interrupt to leave");
        tokio::select! {
            biased;
            () = interrupts.first() => return Err(CliError::Interrupted),
            () = changes.next() => {}
        }
    }
}

#[expect(clippy::too_many_arguments, reason = "one round of a loop")]
async fn round(
    word: &str,
    named: &Named,
    args: &HomeArgs,
    home: &mut Option<Home>,
    options: StartOptions,
    wanted: Wanted,
    format: Format,
    interrupts: &Interrupts,
) -> Result<(), CliError> {
    let program = interrupts.stop(run::program(named, format)).await?;
    let mut patience = args.patience(format);
    loop {
        // The daemon of the round before may have gone since.
        let there = match home.take() {
            Some(there) => {
                let asked = async {
                    let info = there.client.info().await;
                    Ok(info.map(|_| there))
                };
                interrupts.stop(asked).await?
            }
            None => Err(Error::ConnectionLost(Lost::Closed)),
        };
        let there = match there.map_err(not_begun) {
            Ok(there) => there,
            Err(Ok(body)) => interrupts.stop(patience.next(args, body)).await?,
            Err(Err(_)) => match interrupts.stop(run::home(args, named, &mut patience)).await {
                Err(CliError::Client(error)) => {
                    interrupts.stop(patience.next(args, not_begun(error)?)).await?
                }
                there => there?,
            },
        };
        let there = home.insert(there);
        let (program, options, wanted) = (program.clone(), options.clone(), wanted.clone());
        match run::go(there, word, program, options, UserInput::Nothing, wanted, format, interrupts).await {
            Err(CliError::NotBegun(body)) => *home = Some(interrupts.stop(patience.next(args, body)).await?),
            result => return result,
        }
    }
}
