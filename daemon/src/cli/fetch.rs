//! Guests that are named by where they lie, for every command that takes a guest.

use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use trellis_client::{ErrorBody, ErrorCode};

use super::connect::HomeArgs;
use super::error::CliError;
use super::oci::{self, OciError, Pulled, Reference, Terms};
use super::output::{Format, note};
use super::progress::ProgressDisplay;
use crate::guest::GuestError;

/// The limit of a daemon that is the most that a component may have.
const COMPONENT_BYTES: &str = "limits.component_bytes";

/// What a daemon has to say what it takes.
const ANSWERS: Duration = Duration::from_secs(5);

/// How registries are asked.
#[derive(Clone, Copy, Debug, Default, Args)]
pub(crate) struct RegistryArgs {
    /// Ask the registry without TLS, also where it is on another machine
    #[arg(long)]
    pub(crate) plain_http: bool,
}

impl RegistryArgs {
    /// On whose terms a guest is fetched: a component is never larger than the daemon takes that it is for.
    pub(crate) async fn terms(self, home: &HomeArgs) -> Terms {
        let mut terms = Terms { plain_http: self.plain_http, ..Terms::default() };
        if home.stays_inside() {
            return terms;
        }
        let asked = async {
            let client = home.socket.connect_silently().await.ok()?;
            let limits = client.limits().await.ok()?;
            limits.into_iter().find(|limit| limit.name == COMPONENT_BYTES)?.value
        };
        // That a daemon does not answer is said by what comes next.
        if let Ok(Some(limit)) = tokio::time::timeout(ANSWERS, asked).await {
            terms.component_bytes = limit;
        }
        terms
    }
}

/// Fetches a guest, and says which one a tag means.
///
/// # Errors
/// It does not come, is not what was asked for, or is no guest.
pub(crate) async fn fetch(reference: &Reference, terms: &Terms, format: Format) -> Result<Pulled, CliError> {
    let progress = Arc::new(ProgressDisplay::new(format));
    let pulled = shown(&progress, oci::pull(reference, terms, &progress)).await?;
    if reference.digest.is_none() {
        note(format, &format!("{reference} is {}", reference.pinned(pulled.digest)));
    }
    if let Err(error) = &pulled.kept {
        note(format, &format!("it is not kept: {error}"));
    }
    Ok(pulled)
}

/// Has the bar drawn also while nothing comes.
pub(crate) async fn shown<T>(
    progress: &ProgressDisplay,
    work: impl Future<Output = Result<T, OciError>>,
) -> Result<T, CliError> {
    let mut work = std::pin::pin!(work);
    loop {
        tokio::select! {
            result = &mut work => return Ok(result?),
            () = progress.due() => {}
        }
    }
}

/// The error for programs, under the codes that a daemon has for the same.
pub(super) fn body(error: &OciError) -> ErrorBody {
    let body = |code| ErrorBody::new(code, error.to_string());
    match error {
        OciError::Digest { actual, .. } => body(ErrorCode::HashMismatch).about("digest").with_value(actual),
        OciError::TooLarge { what, n_bytes, limit_bytes } => {
            body(ErrorCode::LimitExceeded).about(what).with_value(n_bytes).with_limit(*limit_bytes)
        }
        OciError::NoGuest { source, .. } => match source {
            GuestError::UnknownImport { import, .. } | GuestError::WrongVersion { import, .. } => {
                body(ErrorCode::IncompatibleHost).about("import").with_value(import)
            }
            _ => body(ErrorCode::InvalidComponent),
        },
        OciError::Unauthorised { host, .. } => {
            body(ErrorCode::PermissionDenied).about("registry").with_value(host)
        }
        _ => body(ErrorCode::Other("cli".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::super::oci::Digest;
    use super::*;

    #[test]
    fn programs_find_the_codes_that_they_know() {
        let (expected, actual) = (Digest::of(b"a"), Digest::of(b"b"));
        let changed = body(&OciError::Digest { what: "it".to_owned(), expected, actual });
        assert_eq!(changed.code, ErrorCode::HashMismatch);
        assert_eq!(changed.value, Some(actual.to_string()));
        assert!(changed.message.contains(&expected.to_string()), "{}", changed.message);
        let large = body(&OciError::TooLarge { what: "it".to_owned(), n_bytes: 2, limit_bytes: 1 });
        assert_eq!((large.code, large.limit), (ErrorCode::LimitExceeded, Some(1)));
        let missing = body(&OciError::NotFound("it".to_owned()));
        assert_eq!(missing.code, ErrorCode::Other("cli".to_owned()));
    }
}
