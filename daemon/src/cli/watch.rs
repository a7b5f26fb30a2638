//! `trellis run --watch`: a guest that is built and run again whenever its source has changed.

use trellis_client::StartOptions;

use super::changes::Changes;
use super::connect::{Home, HomeArgs};
use super::error::CliError;
use super::interrupt::Interrupts;
use super::output::{Format, note};
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
                // A daemon that is gone may be there again.
                if let CliError::Client(_) | CliError::NotBegun(_) = error {
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
    if home.is_none() {
        *home = Some(interrupts.stop(run::home(args, named, format)).await?);
    }
    let home = home.as_ref().expect("it was just made");
    run::go(home, word, program, options, UserInput::Nothing, wanted, format, interrupts).await
}
