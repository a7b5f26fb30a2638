//! Guests that are named by where they lie, for every command that takes a guest.

use std::sync::Arc;

use clap::Args;

use super::connect::HomeArgs;
use super::error::CliError;
use super::oci::{self, Pulled, Reference, Terms};
use super::output::{Format, note};
use super::progress::ProgressDisplay;

/// The limit of a daemon that is the most that a component may have.
const COMPONENT_BYTES: &str = "limits.component_bytes";

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
        // That one does not answer is said by what comes next.
        if let Ok(client) = home.socket.connect_silently().await
            && let Ok(limits) = client.limits().await
            && let Some(limit) = limits.iter().find(|limit| limit.name == COMPONENT_BYTES)
        {
            terms.component_bytes = limit.value.unwrap_or(terms.component_bytes);
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
    work: impl Future<Output = Result<T, oci::OciError>>,
) -> Result<T, CliError> {
    let mut work = std::pin::pin!(work);
    loop {
        tokio::select! {
            result = &mut work => return Ok(result?),
            () = progress.due() => {}
        }
    }
}
