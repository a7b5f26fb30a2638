//! Where conversations and the lines of the prompt are kept: in the user's state folder, for the user alone.

use std::fs::{self, File, Permissions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use super::conversation::Conversation;
use crate::nearest;

/// The longest conversation that is read.
const BYTES_MAX: u64 = 64 << 20;
/// The longest name.
const NAME_LENGTH_MAX: usize = 64;

/// Why a conversation is not kept or not found.
#[derive(Debug, thiserror::Error)]
pub(super) enum StoreError {
    #[error("neither XDG_STATE_HOME nor HOME is set: there is no place for conversations")]
    NoPlace,
    #[error(
        "{name:?} is no name: it takes up to {NAME_LENGTH_MAX} letters, digits, '-', '_' and '.', a letter or digit first"
    )]
    NoName { name: String },
    #[error("no conversation is kept as {name:?}{hint}; /load lists them")]
    Unknown { name: String, hint: nearest::Hint },
    #[error("{} is no conversation: {reason}", path.display())]
    Broken { path: PathBuf, reason: String },
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
}

/// A folder of conversations, and the file of lines beside it.
#[derive(Clone, Debug)]
pub(super) struct Store {
    folder: PathBuf,
}

impl Store {
    /// That of the user: `$XDG_STATE_HOME/trellis`, or `~/.local/state/trellis`.
    ///
    /// # Errors
    /// The environment names neither.
    pub(super) fn of_user() -> Result<Self, StoreError> {
        let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let state = absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")));
        Ok(Self { folder: state.ok_or(StoreError::NoPlace)?.join("trellis") })
    }

    /// The file of what was written at the prompt, made if need be.
    ///
    /// # Errors
    /// It cannot be made.
    pub(super) fn history(&self) -> Result<PathBuf, StoreError> {
        let path = self.folder.join("chat_history");
        let failed = |source| StoreError::Io { path: path.clone(), source };
        make_private_folder(&self.folder).map_err(failed)?;
        private_file(&path).map_err(failed)?;
        Ok(path)
    }

    fn conversations(&self) -> PathBuf {
        self.folder.join("chats")
    }

    fn path(&self, name: &str) -> Result<PathBuf, StoreError> {
        let is_name = name.len() <= NAME_LENGTH_MAX
            && name.starts_with(|first: char| first.is_ascii_alphanumeric())
            && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'));
        if !is_name {
            return Err(StoreError::NoName { name: name.to_owned() });
        }
        Ok(self.conversations().join(format!("{name}.json")))
    }

    /// Keeps a conversation, in the place of one that had that name.
    ///
    /// # Errors
    /// It is no name, or the file cannot be written; then what was there before still is.
    pub(super) fn save(&self, name: &str, conversation: &Conversation) -> Result<(), StoreError> {
        let path = self.path(name)?;
        let json = serde_json::to_vec_pretty(conversation).expect("it has string keys");
        let write = || {
            make_private_folder(&self.folder)?;
            make_private_folder(&self.conversations())?;
            // Whole or not at all, whatever happens meanwhile. Its mode is 0600 from the first.
            let mut file = tempfile::NamedTempFile::new_in(self.conversations())?;
            file.write_all(&json)?;
            file.as_file().sync_all()?;
            file.persist(&path).map_err(|error| error.error)?;
            Ok(())
        };
        write().map_err(|source| StoreError::Io { path: path.clone(), source })
    }

    /// A conversation that was kept.
    ///
    /// # Errors
    /// There is none of that name, or it cannot be read.
    pub(super) fn load(&self, name: &str) -> Result<Conversation, StoreError> {
        let path = self.path(name)?;
        let file = File::open(&path).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => {
                let names = self.names();
                let hint = nearest::hint(name, names.iter().map(String::as_str));
                StoreError::Unknown { name: name.to_owned(), hint }
            }
            _ => StoreError::Io { path: path.clone(), source },
        })?;
        let mut json = Vec::new();
        file.take(BYTES_MAX + 1)
            .read_to_end(&mut json)
            .map_err(|source| StoreError::Io { path: path.clone(), source })?;
        if json.len() as u64 > BYTES_MAX {
            return Err(StoreError::Broken { path, reason: format!("it has more than {BYTES_MAX} bytes") });
        }
        serde_json::from_slice(&json).map_err(|error| StoreError::Broken { path, reason: error.to_string() })
    }

    /// The names of what is kept, in order.
    pub(super) fn names(&self) -> Vec<String> {
        let files = fs::read_dir(self.conversations()).into_iter().flatten().flatten();
        let mut names: Vec<String> = files
            .filter_map(|file| Some(file.file_name().to_str()?.strip_suffix(".json")?.to_owned()))
            .filter(|name| self.path(name).is_ok())
            .collect();
        names.sort();
        names
    }
}

fn make_private_folder(folder: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.recursive(true).create(folder)
}

/// Makes the file where it is missing, and takes it from all but the user.
fn private_file(path: &Path) -> io::Result<()> {
    let mut options = File::options();
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let file = options.create(true).append(true).open(path)?;
    #[cfg(unix)]
    file.set_permissions(<Permissions as std::os::unix::fs::PermissionsExt>::from_mode(0o600))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::super::conversation::Role;
    use super::*;

    fn store() -> (tempfile::TempDir, Store) {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Store { folder: folder.path().join("state/trellis") };
        (folder, store)
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).expect("it is there").permissions().mode() & 0o777
    }

    #[test]
    fn what_is_kept_comes_back_and_is_the_users_alone() {
        let (_folder, store) = store();
        assert!(store.names().is_empty());
        let mut conversation = Conversation { model: "tiny".to_owned(), ..Conversation::default() };
        conversation.push(Role::User, "a secret");
        store.save("sums", &Conversation::default()).expect("kept");
        store.save("sums", &conversation).expect("kept in its place");
        assert_eq!(store.load("sums").expect("it is there"), conversation);
        assert_eq!(store.names(), ["sums"]);
        let history = store.history().expect("made");
        fs::set_permissions(&history, Permissions::from_mode(0o644)).expect("changed");
        store.history().expect("again");
        let path = store.path("sums").expect("a name");
        assert_eq!((mode(&path), mode(&history)), (0o600, 0o600));
        assert_eq!((mode(&store.folder), mode(&store.conversations())), (0o700, 0o700));
    }

    #[test]
    fn what_cannot_be_loaded_is_said_to_be() {
        let (_folder, store) = store();
        store.save("sums", &Conversation::default()).expect("kept");
        let said = |name: &str| store.load(name).expect_err(name).to_string();
        assert!(said("smus").contains("did you mean \"sums\"?"), "{}", said("smus"));
        let long = "x".repeat(NAME_LENGTH_MAX + 1);
        for name in ["", "../sums", ".hidden", "a/b", "a b", long.as_str()] {
            assert!(said(name).contains("is no name"), "{name}");
            assert!(store.save(name, &Conversation::default()).is_err(), "{name}");
        }
        fs::write(store.path("broken").expect("a name"), "{\"messages\": 3}").expect("written");
        assert!(said("broken").contains("is no conversation"), "{}", said("broken"));
    }
}
