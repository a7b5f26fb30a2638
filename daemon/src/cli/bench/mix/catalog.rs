//! The mixes that come with the program.

use std::path::Path;

use serde::Serialize;

use super::error::MixError;
use super::file::Mix;
use crate::cli::table::{Align, Table};
use crate::nearest::hint;

/// A mix that comes with the program: its name and its file.
type Builtin = (&'static str, &'static str);

/// `daemon/mixes/NAME.toml`
macro_rules! builtin {
    ($($name:literal),* $(,)?) => {
        [$(($name, include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/mixes/", $name, ".toml")))),*]
    };
}

/// In the order in which they are listed.
pub(super) const BUILTIN: [Builtin; 19] = builtin![
    "prompts-beside-streams",
    "one-long",
    "stepping",
    "speculation",
    "constrained",
    "programs",
    "guidance",
    "guidance-of-two",
    "beams",
    "wide-beams",
    "runs-end",
    "clients-256",
    "guests",
    "penalties",
    "two-users",
    "one-beside-many",
    "loads",
    "wide",
    "verify",
];

/// The text of the mix that is meant: a name, or the path of a file.
///
/// # Errors
/// There is no such mix, or it cannot be read.
pub(super) fn read(name: &str) -> Result<String, MixError> {
    if let Some((_, text)) = BUILTIN.iter().find(|(builtin, _)| *builtin == name) {
        return Ok((*text).to_owned());
    }
    let path = Path::new(name);
    let is_path = path.exists() || name.ends_with(".toml") || name.contains(std::path::MAIN_SEPARATOR);
    if !is_path {
        let hint = hint(name, BUILTIN.iter().map(|(name, _)| *name));
        return Err(MixError::UnknownMix { name: name.to_owned(), hint });
    }
    std::fs::read_to_string(path).map_err(|source| MixError::Read { path: path.to_owned(), source })
}

/// One line of the list.
#[derive(Debug, Serialize)]
pub(super) struct Listed {
    name: &'static str,
    about: String,
}

/// What comes with the program.
pub(super) fn list() -> Vec<Listed> {
    let about = |text| Mix::parse(text).expect("the mixes that come with the program are valid").about;
    BUILTIN.iter().map(|&(name, text)| Listed { name, about: about(text) }).collect()
}

pub(super) fn render(list: &Vec<Listed>) -> String {
    let mut table = Table::new([("NAME", Align::Left), ("WHAT IT SHOWS", Align::Left)]);
    for Listed { name, about } in list {
        table.push([(*name).to_owned(), about.clone()]);
    }
    table.render()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_is_embedded_and_valid() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("mixes");
        let mut files: Vec<String> = std::fs::read_dir(folder)
            .expect("the folder is there")
            .map(|entry| entry.expect("an entry").file_name().into_string().expect("UTF-8"))
            .collect();
        files.sort();
        let mut names: Vec<String> = BUILTIN.iter().map(|(name, _)| format!("{name}.toml")).collect();
        names.sort();
        assert_eq!(files, names);
        for Listed { name, about } in list() {
            assert!(about.len() > 20, "{name} does not say what it shows");
        }
        assert!(render(&list()).contains("prompts-beside-streams"));
    }

    #[test]
    fn a_name_that_is_nearly_right_is_suggested() {
        let error = read("one-lnog").expect_err("no such mix");
        assert!(error.to_string().contains("did you mean \"one-long\""), "{error}");
        let error = read("nosuch").expect_err("no such mix");
        assert!(!error.to_string().contains("did you mean"), "{error}");
        assert!(matches!(read("./no-such.toml"), Err(MixError::Read { .. })));
        assert!(read("wide").is_ok());
    }
}
