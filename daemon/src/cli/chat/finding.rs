//! The daemon in which a conversation goes on after the one that it was held in.

use trellis_client::{Error, ErrorBody, ErrorCode};

use crate::cli::connect::{Found, Home, HomeArgs};
use crate::cli::error::CliError;
use crate::cli::output::Format;
use crate::cli::patience::{Patience, not_begun};

/// One search, which may come upon several daemons one after the other.
pub(super) struct Finding {
    patience: Patience,
    has_looked: bool,
}

impl Finding {
    pub(super) fn new(args: &HomeArgs) -> Self {
        Self { patience: args.patience(Format::Text), has_looked: false }
    }

    /// The daemon after one that has said that it ends, which is waited for; or after one that has gone without a word, which is
    /// looked for once. A conversation that was held elsewhere loads no models into this process.
    ///
    /// # Errors
    /// It was another error, or there is no daemon.
    pub(super) async fn after(&mut self, args: &HomeArgs, error: CliError) -> Result<Home, CliError> {
        match told(error) {
            Ok(body) => self.patience.next(args, body).await,
            Err(CliError::Client(Error::ConnectionLost(lost))) if !self.has_looked => {
                self.has_looked = true;
                let found = match args.find(&mut self.patience).await {
                    Err(CliError::Client(error)) => Err(not_begun(error)?),
                    found => Ok(found?),
                };
                match found {
                    Ok(Found::There(home)) => Ok(home),
                    Ok(Found::Here(_)) => Err(Error::ConnectionLost(lost).into()),
                    Err(body) => self.patience.next(args, body).await,
                }
            }
            Err(error) => Err(error),
        }
    }
}

/// What the daemon said that takes on nothing more, of a guest or of the connection.
fn told(error: CliError) -> Result<Box<ErrorBody>, CliError> {
    match error {
        CliError::Guest(body) | CliError::NotBegun(body) if body.code == ErrorCode::ShuttingDown => Ok(body),
        CliError::Client(error) => not_begun(error).map_err(CliError::from),
        error => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use trellis_client::Lost;

    use super::*;

    #[test]
    fn a_daemon_is_waited_for_after_one_that_has_said_that_it_ends() {
        let body = |code| Box::new(ErrorBody::new(code, "no"));
        let ends = || body(ErrorCode::ShuttingDown);
        for error in [
            CliError::Guest(ends()),
            CliError::NotBegun(ends()),
            CliError::Client(Error::Daemon(ends())),
            CliError::Client(Error::ConnectionLost(Lost::Fault(ends()))),
        ] {
            assert!(told(error).is_ok());
        }
        for error in [
            CliError::Guest(body(ErrorCode::GuestFailed)),
            CliError::Client(Error::ConnectionLost(Lost::Closed)),
            CliError::Interrupted,
        ] {
            assert!(told(error).is_err());
        }
    }
}
