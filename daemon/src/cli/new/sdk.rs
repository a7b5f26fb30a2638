//! Where the crate is that guests are written with: in the checkout that this program was built from, or else unpacked from
//! this program itself.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use include_dir::{Dir, include_dir};

use super::super::error::CliError;

/// What `trellis-guest` is made of, as it lies in a checkout.
static PARTS: [(&str, Dir<'_>); 3] = [
    ("sdk/guest", include_dir!("$CARGO_MANIFEST_DIR/../sdk/guest")),
    ("sdk/programs", include_dir!("$CARGO_MANIFEST_DIR/../sdk/programs")),
    ("wit", include_dir!("$CARGO_MANIFEST_DIR/../wit")),
];

/// The manifest of the workspace that they are part of.
const WORKSPACE: &str = include_str!("../../../../Cargo.toml");

/// The crate's folder.
///
/// # Errors
/// It has to be unpacked, and cannot be.
pub(super) fn guest_crate() -> Result<PathBuf, CliError> {
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).parent().map(|root| root.join("sdk/guest"));
    if let Some(folder) = checkout.filter(|folder| folder.join("Cargo.toml").is_file()) {
        return Ok(folder);
    }
    let home = data_folder().ok_or(CliError::NoHome)?;
    let unpacked = unpack(&home).map_err(CliError::io(format!("write to {}", home.display())))?;
    Ok(unpacked.join("sdk/guest"))
}

/// The host's interfaces of today, each a file's name and its text.
pub(super) fn interfaces() -> impl Iterator<Item = (&'static str, &'static str)> {
    let files = PARTS.iter().filter(|(place, _)| *place == "wit").flat_map(|(_, wit)| wit.files());
    files.filter_map(|file| Some((file.path().to_str()?, file.contents_utf8()?)))
}

/// Where programs of this user keep data, by the XDG base directory specification.
fn data_folder() -> Option<PathBuf> {
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let data = absolute("XDG_DATA_HOME").or_else(|| Some(absolute("HOME")?.join(".local/share")))?;
    Some(data.join("trellis"))
}

/// Unpacks the parts into a folder that has their hash in its name, unless they lie there.
fn unpack(home: &Path) -> io::Result<PathBuf> {
    let folder = home.join(format!("sdk-{}-{}", env!("CARGO_PKG_VERSION"), &hash().to_hex()[..16]));
    if folder.is_dir() {
        return Ok(folder);
    }
    fs::create_dir_all(home)?;
    // Whole, or not there.
    let begun = tempfile::tempdir_in(home)?;
    fs::write(begun.path().join("Cargo.toml"), workspace())?;
    for (place, part) in &PARTS {
        let place = begun.path().join(place);
        fs::create_dir_all(&place)?;
        part.extract(&place)?;
    }
    match fs::rename(begun.path(), &folder) {
        // Another process may have been faster.
        Err(error) if !folder.is_dir() => Err(error),
        _ => Ok(folder),
    }
}

fn hash() -> blake3::Hash {
    fn add(dir: &Dir<'_>, hasher: &mut blake3::Hasher) {
        for file in dir.files() {
            hasher.update(file.path().to_string_lossy().as_bytes()).update(file.contents());
        }
        dir.dirs().for_each(|dir| add(dir, hasher));
    }
    let mut hasher = blake3::Hasher::new();
    hasher.update(WORKSPACE.as_bytes());
    PARTS.iter().for_each(|(_, part)| add(part, &mut hasher));
    hasher.finalize()
}

/// The workspace's manifest with these members alone.
fn workspace() -> String {
    let mut manifest: toml::Table = toml::from_str(WORKSPACE).expect("the manifest of this very program");
    let mut workspace = manifest.remove("workspace").expect("it is a workspace");
    let members: Vec<toml::Value> = PARTS
        .iter()
        .map(|&(place, _)| place)
        .filter(|place| *place != "wit")
        .map(toml::Value::from)
        .collect();
    let table = workspace.as_table_mut().expect("a table");
    table.remove("exclude");
    table.insert("members".to_owned(), members.into());
    toml::Table::from_iter([("workspace".to_owned(), workspace)]).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_unpacked_is_there_once_and_has_all_that_it_names() {
        let home = tempfile::tempdir().expect("a folder");
        let folder = unpack(home.path()).expect("unpacked");
        assert_eq!(unpack(home.path()).expect("it is there"), folder);
        assert_eq!(fs::read_dir(home.path()).expect("a folder").count(), 1, "nothing else is left");
        for file in ["sdk/guest/src/lib.rs", "sdk/programs/Cargo.toml", "wit/session.wit"] {
            assert!(folder.join(file).is_file(), "{file}");
        }
        let manifest = fs::read_to_string(folder.join("Cargo.toml")).expect("written");
        let manifest: toml::Table = toml::from_str(&manifest).expect("TOML");
        let members = manifest["workspace"]["members"].as_array().expect("a list");
        assert_eq!(members.len(), 2);
    }
}
