//! `trellis pull`: fetches a guest from a registry or a folder.

use std::path::{Path, PathBuf};
use std::{fs, io};

use clap::Args;
use serde::Serialize;

use super::connect::{HomeArgs, SocketArgs};
use super::error::CliError;
use super::fetch::{RegistryArgs, fetch};
use super::interrupt::Interrupts;
use super::oci::{Digest, OciError, Reference, write_whole};
use super::output::{self, Format, escaped_line};

const EXAMPLES: &str = "\
Examples:
  trellis pull ghcr.io/OWNER/chat:1.0                    says its digest, and keeps it for `trellis run`
  trellis pull ghcr.io/OWNER/chat@sha256:… -o chat.wasm  that one and no other, into a file
  trellis pull oci:./shared:1.0                          from a folder, an OCI image layout

Every digest is worked out anew. What is asked for by its digest and was fetched before comes from the cache, without a registry;
the cache keeps up to 1 GB, and what was not asked for for the longest goes (`trellis doctor` says how much there is).
Passwords are those of docker's configuration (`docker login`); registries on this machine are asked without TLS.";

/// Fetch a guest from a registry or a folder, and check it
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct PullArgs {
    /// REGISTRY/NAME or oci:FOLDER, with :TAG or @sha256:…
    #[arg(value_name = "REFERENCE")]
    reference: String,
    /// Also put the component here
    #[arg(short, long, value_name = "PATH")]
    output: Option<PathBuf>,
    #[command(flatten)]
    registry: RegistryArgs,
    #[command(flatten)]
    socket: SocketArgs,
}

#[derive(Serialize)]
struct Fetched {
    /// As it is run from now on: by its digest.
    pulled: String,
    digest: Digest,
    /// Of the component.
    bytes: usize,
    /// Where it is; absent where it is kept nowhere.
    path: Option<PathBuf>,
    title: Option<String>,
    /// The package that it was written against; none if it imports nothing of it.
    world: Option<String>,
    /// Whether it had been fetched before.
    was_kept: bool,
}

pub(crate) async fn pull(args: PullArgs, format: Format) -> Result<(), CliError> {
    let PullArgs { reference, output, registry, socket } = args;
    let interrupts = Interrupts::watch()?;
    let reference = pinpointed(&reference)?;
    if let Some(path) = &output {
        is_replaceable(path).map_err(CliError::io(format!("write {}", path.display())))?;
    }
    let home = HomeArgs { socket, ..HomeArgs::default() };
    let pulled = interrupts
        .stop(async {
            let terms = registry.terms(&home).await;
            fetch(&reference, &terms, format).await
        })
        .await?;
    let kept = match &output {
        Some(path) => {
            let doing = format!("write {}", path.display());
            write_whole(path, &pulled.component).map_err(CliError::io(doing))?;
            output
        }
        // It was to be kept.
        None => pulled.kept?,
    };
    let fetched = Fetched {
        pulled: reference.pinned(pulled.digest).to_string(),
        digest: pulled.digest,
        bytes: pulled.component.len(),
        path: kept,
        title: pulled.title,
        world: pulled.world.host_package(),
        was_kept: pulled.was_kept,
    };
    output::print(format, &fetched, |fetched| {
        let bytes = output::bytes(fetched.bytes as u64);
        let title =
            fetched.title.iter().map(|title| format!(", {}", escaped_line(title))).collect::<String>();
        let place = fetched.path.iter().map(|path| format!("\n{}", path.display())).collect::<String>();
        format!("{} ({bytes}{title}){place}", fetched.pulled)
    })
}

/// Whether there can be a file at a path afterwards: it takes the place of what is there, which a device or a pipe is not for.
fn is_replaceable(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(found) if !found.is_file() && !found.is_symlink() => Err(io::Error::other("it is not a file")),
        _ => Ok(()),
    }
}

/// A reference that says which artifact is meant.
fn pinpointed(word: &str) -> Result<Reference, OciError> {
    let reference: Reference = word.parse()?;
    if !Reference::is_meant(word) {
        let reason = "give a tag or a digest: NAME:TAG, NAME@sha256:…".to_owned();
        return Err(OciError::Reference { word: word.to_owned(), reason });
    }
    Ok(reference)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_or_a_folder_is_not_replaced() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("x.wasm");
        is_replaceable(&file).expect("nothing is there");
        fs::write(&file, "x").expect("written");
        is_replaceable(&file).expect("a file");
        assert!(is_replaceable(folder.path()).is_err());
        #[cfg(unix)]
        assert!(is_replaceable(Path::new("/dev/null")).is_err());
    }
}
