//! What the user means by `PATH|NAME`.

use std::fs;
use std::path::{Path, PathBuf};

use super::error::CliError;
use crate::checkout::{self, EXAMPLES, INSTALLED};

/// A guest as the user named it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Named {
    /// A component.
    Component(PathBuf),
    /// A crate that builds one.
    Crate(PathBuf),
    /// Neither here nor in the checkout; perhaps a daemon has it.
    Registered(String),
}

/// The folders in which a guest may be given by name alone: the examples of this folder, then those of the
/// checkout that this program was built from, if it is still there, then the components that a package has put on the machine.
pub(crate) fn example_folders() -> Vec<PathBuf> {
    let mut folders = vec![PathBuf::from(EXAMPLES)];
    folders.extend(checkout::examples());
    folders.retain(|folder| folder.is_dir());
    folders.push(PathBuf::from(INSTALLED));
    folders
}

/// Finds what `word` names.
///
/// A word with a separator, or one that ends in `.wasm`, is a path. Any other is a crate's folder if there is
/// one of that name here, else an example, else a file here, else a component among the examples, else a name for the
/// daemon to know.
///
/// # Errors
/// [`CliError::NoSuchPath`] and [`CliError::NotACrate`] for paths.
pub(crate) fn resolve(word: &str, examples: &[PathBuf]) -> Result<Named, CliError> {
    let path = Path::new(word);
    if is_name(word) {
        let here = std::iter::once(path.to_owned());
        let found =
            here.chain(examples.iter().map(|folder| folder.join(word))).find(|folder| is_crate(folder));
        return Ok(match found {
            Some(folder) => Named::Crate(folder),
            None if path.is_file() => Named::Component(path.to_owned()),
            None => {
                let component = format!("{word}.wasm");
                let mut built = examples.iter().map(|folder| folder.join(&component));
                built
                    .find(|path| path.is_file())
                    .map_or_else(|| Named::Registered(word.to_owned()), Named::Component)
            }
        });
    }
    if path.is_dir() {
        return if is_crate(path) {
            Ok(Named::Crate(path.to_owned()))
        } else {
            Err(CliError::NotACrate { path: path.to_owned() })
        };
    }
    if path.exists() {
        Ok(Named::Component(path.to_owned()))
    } else {
        Err(CliError::NoSuchPath { path: path.to_owned() })
    }
}

/// Whether a guest of that name that a daemon has comes before what was found: a path means what it says, and a crate's folder here is
/// the user's own.
pub(crate) fn yields_to_registered(word: &str, named: &Named) -> bool {
    match named {
        Named::Crate(path) => is_name(word) && path != Path::new(word),
        Named::Component(_) => is_name(word),
        Named::Registered(_) => false,
    }
}

/// Whether a word is no path.
fn is_name(word: &str) -> bool {
    let path = Path::new(word);
    path.file_name().is_some_and(|name| name == path.as_os_str()) && !word.ends_with(".wasm")
}

/// The folder of the crate that `word` names.
///
/// # Errors
/// It names none.
pub(crate) fn crate_folder(word: &str) -> Result<PathBuf, CliError> {
    match resolve(word, &example_folders())? {
        Named::Crate(folder) => Ok(folder),
        Named::Component(path) => Err(CliError::NotACrate { path }),
        Named::Registered(name) if Path::new(&name).is_dir() => {
            Err(CliError::NotACrate { path: name.into() })
        }
        Named::Registered(name) => Err(CliError::NoSuchPath { path: name.into() }),
    }
}

/// The names that [`resolve`] finds in these folders, in order.
pub(crate) fn example_names(examples: &[PathBuf]) -> Vec<String> {
    let mut names: Vec<String> = examples
        .iter()
        .filter_map(|folder| fs::read_dir(folder).ok())
        .flatten()
        .filter_map(Result::ok)
        .filter(|entry| is_crate(&entry.path()))
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort();
    names.dedup();
    names
}

fn is_crate(folder: &Path) -> bool {
    folder.join("Cargo.toml").is_file()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_paths_are_told_apart() {
        let root = tempfile::tempdir().expect("a folder");
        let (near, far) = (root.path().join("near"), root.path().join("far"));
        for guest in [near.join("chat"), far.join("chat"), far.join("beam"), root.path().join("empty")] {
            fs::create_dir_all(&guest).expect("made");
            if !guest.ends_with("empty") {
                fs::write(guest.join("Cargo.toml"), "").expect("written");
            }
        }
        let wasm = root.path().join("guest.wasm");
        fs::write(&wasm, "").expect("written");
        let examples = [near.clone(), far.clone()];
        let resolve = |word: &str| super::resolve(word, &examples);
        let text = |path: &Path| path.to_str().expect("UTF-8").to_owned();

        assert_eq!(resolve("chat").expect("near"), Named::Crate(near.join("chat")));
        assert_eq!(resolve("beam").expect("far"), Named::Crate(far.join("beam")));
        let yields = |word: &str| yields_to_registered(word, &resolve(word).expect("it is there"));
        assert!(yields("chat") && yields("Cargo.toml") && !yields("no-such"));
        assert!(!yields(&text(&near.join("chat"))) && !yields(&text(&wasm)));
        assert!(!yields_to_registered("chat", &Named::Crate("chat".into())), "it is the user's own");
        assert_eq!(resolve("no-such").expect("a name"), Named::Registered("no-such".to_owned()));
        assert_eq!(resolve(&text(&wasm)).expect("a file"), Named::Component(wasm));
        assert_eq!(resolve(&text(&far.join("beam"))).expect("a folder"), Named::Crate(far.join("beam")));
        assert_eq!(resolve("Cargo.toml").expect("a file here"), Named::Component("Cargo.toml".into()));
        assert!(matches!(resolve("gone.wasm"), Err(CliError::NoSuchPath { .. })));
        assert!(matches!(resolve("./no/such"), Err(CliError::NoSuchPath { .. })));
        assert!(matches!(resolve(&text(&root.path().join("empty"))), Err(CliError::NotACrate { .. })));
        assert!(matches!(resolve(".."), Err(CliError::NotACrate { .. }) | Ok(Named::Crate(_))));
        assert_eq!(example_names(&examples), ["beam", "chat"]);
    }

    #[test]
    fn the_checkout_has_examples() {
        assert!(example_names(&example_folders()).contains(&"chat".to_owned()));
    }
}
