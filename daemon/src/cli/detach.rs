//! `trellis run --detach`: starts a guest that goes on without this command.

use trellis_client::{ErrorCode, Event, StartOptions};

use super::connect::{Found, HomeArgs};
use super::error::CliError;
use super::fetch::RegistryArgs;
use super::interrupt::Interrupts;
use super::output::{self, Format};
use super::patience::not_begun;
use super::run::{label, program_for, unknown_guest};
use super::screen::Screen;

/// Starts a guest in the running daemon and says its number.
///
/// # Errors
/// No daemon runs, or it does not start the guest.
pub(crate) async fn detach(
    word: &str,
    home: &HomeArgs,
    registry: RegistryArgs,
    options: StartOptions,
    format: Format,
) -> Result<(), CliError> {
    let interrupts = Interrupts::watch()?;
    let mut patience = home.patience(format);
    let named = interrupts.stop(super::run::meant_in_time(word, home, &mut patience)).await?;
    let mut there = match interrupts.stop(home.find(&mut patience)).await {
        Ok(Found::There(there)) => there,
        Ok(Found::Lacking(lacking)) => return Err(CliError::NoSuchModel { lacking }),
        Ok(Found::Here(why)) => return Err(CliError::NothingToDetachFrom { why }),
        Err(CliError::Client(error)) => interrupts.stop(patience.next(home, not_begun(error)?)).await?,
        Err(error) => return Err(error),
    };
    let program = interrupts.stop(program_for(&named, home, registry, format)).await?;
    let mut screen = Screen::new(format);
    let mut shown = Ok(());
    let guest_id = loop {
        let (program, options) = (program.clone(), options.clone());
        let options = StartOptions { model: there.model.clone(), label: label(word), ..options };
        let starting = there.client.start_detached(program, options, |event| {
            if shown.is_ok() {
                shown = screen.show(&event);
            }
        });
        match interrupts.stop(async { Ok(starting.await) }).await? {
            Ok(guest_id) => break guest_id,
            Err(error) if error.code() == Some(&ErrorCode::UnknownProgram) => {
                return Err(unknown_guest(word, Some(&there.client)).await);
            }
            Err(error) => there = interrupts.stop(patience.next(home, not_begun(error)?)).await?,
        }
    };
    // The guest runs: its number is said first, whatever could not be shown before.
    let started = screen.show(&Event::Started { guest_id });
    if format == Format::Text {
        output::print_line(&guest_id.to_string())?;
    }
    shown?;
    started?;
    output::note(
        format,
        &format!("it goes on; `trellis attach {guest_id}` reads it, `trellis stop {guest_id}` ends it"),
    );
    Ok(())
}
