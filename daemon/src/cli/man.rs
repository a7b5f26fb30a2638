//! `trellis man`: the manual pages of all commands, for packages.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use clap::{Args, CommandFactory as _};

use super::Cli;
use super::error::CliError;

const EXAMPLES: &str = "\
Examples:
  trellis man /usr/local/share/man/man1";

/// Write the manual pages of all commands into a folder
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ManArgs {
    /// The folder, made if need be
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
}

pub(crate) fn man(args: &ManArgs) -> Result<(), CliError> {
    write(&args.folder).map_err(CliError::io(format!("write manual pages to {}", args.folder.display())))
}

fn write(folder: &Path) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    clap_mangen::generate_to(Cli::command(), folder)?;
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let is_ours =
            path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("trellis"));
        if is_ours {
            fs::write(&path, with_lines_kept(&fs::read_to_string(&path)?))?;
        }
    }
    Ok(())
}

/// A page whose examples keep their lines, which a manual page fills otherwise.
fn with_lines_kept(page: &str) -> String {
    const EXTRA: &str = "\n.SH EXTRA\n";
    let Some((before, after)) = page.split_once(EXTRA) else { return page.to_owned() };
    let end = after.find("\n.SH ").map_or(after.len(), |place| place + 1);
    let (examples, rest) = after.split_at(end);
    // The title of the section says it.
    let examples = examples.trim_start_matches("Examples:\n").trim_end();
    format!("{before}\n.SH EXAMPLES\n.nf\n{examples}\n.fi\n{rest}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_that_is_shown_has_a_page() {
        let folder = tempfile::tempdir().expect("a folder");
        write(folder.path()).expect("written");
        let page = |name: &str| fs::read_to_string(folder.path().join(format!("{name}.1")));
        for command in Cli::command().get_subcommands() {
            let page = page(&format!("trellis-{}", command.get_name()));
            assert_eq!(page.is_ok(), !command.is_hide_set(), "{}", command.get_name());
        }
        let doctor = page("trellis-doctor").expect("it is shown");
        assert!(
            doctor.contains("\n.SH EXAMPLES\n.nf\n  trellis doctor") && doctor.contains("\n.fi\n"),
            "{doctor}"
        );
        assert!(page("trellis").expect("the first").contains("trellis\\-doctor(1)"));
        assert!(page("trellis-service-install").is_ok());
    }
}
