//! `trellis run --detach`: starts a guest that goes on without this command.

use trellis_client::{Error, ErrorCode, Event, StartOptions};

use super::connect::{Found, HomeArgs};
use super::error::CliError;
use super::interrupt::Interrupts;
use super::output::{self, Format};
use super::run::{label, program, unknown_guest};
use super::screen::Screen;

/// Starts a guest in the running daemon and says its number.
///
/// # Errors
/// No daemon runs, or it does not start the guest.
pub(crate) async fn detach(
    word: &str,
    home: &HomeArgs,
    options: StartOptions,
    format: Format,
) -> Result<(), CliError> {
    let interrupts = Interrupts::watch()?;
    let named = interrupts.stop(super::run::meant(word, home)).await?;
    let home = match interrupts.stop(home.find(format)).await? {
        Found::There(home) => home,
        Found::Here(why) => return Err(CliError::NothingToDetachFrom { why }),
    };
    let program = interrupts.stop(program(&named, format)).await?;
    let options = StartOptions { model: home.model.clone(), label: label(word), ..options };
    let mut screen = Screen::new(format);
    let mut shown = Ok(());
    let starting = home.client.start_detached(program, options, |event| {
        if shown.is_ok() {
            shown = screen.show(&event);
        }
    });
    let started = interrupts.stop(async { Ok(starting.await) }).await?;
    let guest_id = match started {
        Ok(guest_id) => guest_id,
        Err(error) if error.code() == Some(&ErrorCode::UnknownProgram) => {
            return Err(unknown_guest(word, Some(&home.client)).await);
        }
        Err(Error::Daemon(body)) if body.code == ErrorCode::ShuttingDown => {
            return Err(CliError::NotBegun(body));
        }
        Err(error) => return Err(error.into()),
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
