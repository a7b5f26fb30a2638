//! `trellis push`: brings a guest to a registry or a folder.

use std::sync::Arc;

use clap::Args;
use serde::Serialize;
use trellis_client::Program;

use super::error::CliError;
use super::fetch::{RegistryArgs, shown};
use super::interrupt::Interrupts;
use super::oci::{self, Digest, Reference, Said};
use super::output::{self, Format};
use super::progress::ProgressDisplay;
use super::resolve;
use super::run;

const EXAMPLES: &str = "\
Examples:
  trellis push ./my-guest ghcr.io/OWNER/my-guest:1.0   builds it, and says its digest
  trellis push guest.wasm localhost:5000/guest         a component, which has its digest for a name
  trellis push guest.wasm oci:./shared:1.0             into a folder, an OCI image layout

The same component, with the same title, is the same artifact: pushed twice it has one digest, unless --created says when it was
made. Passwords are those of docker's configuration (`docker login`); registries on this machine are asked without TLS.";

/// Bring a guest to a registry or a folder
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct PushArgs {
    /// A component, the folder of a guest's crate, or an example's name
    #[arg(value_name = "PATH|NAME")]
    guest: String,
    /// REGISTRY/NAME or oci:FOLDER, and :TAG if it is to have one
    #[arg(value_name = "REFERENCE")]
    reference: Reference,
    /// What it is called; otherwise as the guest is
    #[arg(long, value_name = "TEXT")]
    title: Option<String>,
    /// When it was made, such as 2026-11-30T20:48:19Z
    #[arg(long, value_name = "TIME", value_parser = time)]
    created: Option<String>,
    #[command(flatten)]
    registry: RegistryArgs,
}

#[derive(Serialize)]
struct Pushed {
    /// As it is run: by its digest.
    pushed: String,
    digest: Digest,
    tag: Option<String>,
    /// Of the component.
    bytes: usize,
}

pub(crate) async fn push(args: PushArgs, format: Format) -> Result<(), CliError> {
    let PushArgs { guest, reference, title, created, registry } = args;
    let interrupts = Interrupts::watch()?;
    let named = resolve::resolve(&guest, &resolve::example_folders())?;
    let said = Said { title: title.or_else(|| run::label(&guest)), created };
    let progress = Arc::new(ProgressDisplay::new(format));
    let pushing = async {
        let Program::Wasm(component) = run::program(&named, format).await? else {
            return Err(run::unknown_guest(&guest, None).await);
        };
        let bytes = component.len();
        let pushing = oci::push(component, &reference, &said, registry.plain_http, &progress);
        Ok((shown(&progress, pushing).await?, bytes))
    };
    let (digest, bytes) = interrupts.stop(pushing).await?;
    let pushed =
        Pushed { pushed: reference.pinned(digest).to_string(), digest, tag: reference.tag.clone(), bytes };
    output::print(format, &pushed, |pushed| {
        let tag = pushed.tag.iter().map(|tag| format!(", tagged {tag}")).collect::<String>();
        format!("{} ({}{tag})", pushed.pushed, output::bytes(pushed.bytes as u64))
    })
}

/// A time of RFC 3339 in UTC, in the one writing that `date -u +%FT%TZ` gives.
fn time(text: &str) -> Result<String, String> {
    let is_shape = text.len() == 20
        && text.bytes().zip("dddd-dd-ddTdd:dd:ddZ".bytes()).all(|(byte, like)| match like {
            b'd' => byte.is_ascii_digit(),
            like => byte == like,
        });
    let within = |start: usize, least: u8, most: u8| {
        text[start..start + 2].parse().is_ok_and(|number: u8| (least..=most).contains(&number))
    };
    let is_time = is_shape
        && within(5, 1, 12)
        && within(8, 1, 31)
        && within(11, 0, 23)
        && within(14, 0, 59)
        && within(17, 0, 60);
    match is_time {
        true => Ok(text.to_owned()),
        false => Err("expected a time in UTC, such as 2026-11-30T20:48:19Z".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_rfc_3339_in_utc() {
        for text in ["2026-11-30T20:48:19Z", "1970-01-01T00:00:00Z", "2016-12-31T23:59:60Z"] {
            assert_eq!(time(text).as_deref(), Ok(text));
        }
        for text in [
            "",
            "now",
            "2026-11-30",
            "2026-13-30T20:48:19Z",
            "2026-11-30T24:48:19Z",
            "2026-11-30T20:48:19+01:00",
            "2026-11-30 20:48:19é",
        ] {
            assert!(time(text).is_err(), "{text}");
        }
    }
}
