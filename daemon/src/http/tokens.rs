//! Who asks, where nothing but a token says it.

use std::fs::{self, Metadata, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use nix::unistd::{Uid, User};

use crate::session::Actor;

/// The fewest bytes of a token: 128 bits as hexadecimal digits.
const TOKEN_BYTES_MIN: usize = 32;

/// The most bytes of a token's file.
const FILE_BYTES_MAX: u64 = 4096;

/// How long the files are believed that were read.
const FRESH_TIME: Duration = Duration::from_secs(1);

/// The file of the daemon's own token in its state.
const OWN: &str = "http-token";

/// Where tokens are.
#[derive(Debug)]
enum Place {
    /// Files that are named by their users.
    Folder(PathBuf),
    /// The daemon's own.
    Own(PathBuf),
}

/// The tokens by which requests come, read anew where they may have changed.
#[derive(Debug)]
pub(super) struct Tokens {
    place: Place,
    known: Mutex<Option<(Instant, Vec<Known>)>>,
}

#[derive(Clone, Debug)]
struct Known {
    hash: blake3::Hash,
    actor: Actor,
}

impl Tokens {
    /// Those of a folder.
    pub(super) fn in_folder(folder: PathBuf) -> io::Result<Self> {
        fs::read_dir(&folder)?;
        Ok(Self { place: Place::Folder(folder), known: Mutex::default() })
    }

    /// One of the daemon's own user, which is made where there is none.
    pub(super) fn own(state: &Path) -> io::Result<Self> {
        let path = state.join(OWN);
        if let Err(error) = fs::symlink_metadata(&path) {
            if error.kind() != io::ErrorKind::NotFound {
                return Err(error);
            }
            fs::create_dir_all(state)?;
            make(&path)?;
        }
        // A daemon that starts says what is wrong with it.
        read(&path, Actor::this_process().uid)?;
        Ok(Self { place: Place::Own(path), known: Mutex::default() })
    }

    /// Where they are, for people.
    pub(super) fn place(&self) -> &Path {
        match &self.place {
            Place::Folder(path) | Place::Own(path) => path,
        }
    }

    /// Whose token this is.
    pub(super) fn owner(&self, token: &str) -> Option<Actor> {
        // Hashes are compared in a time that says nothing of the bytes.
        let hash = blake3::hash(token.as_bytes());
        let mut known = self.known.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if known.as_ref().is_none_or(|(read, _)| read.elapsed() >= FRESH_TIME) {
            *known = Some((Instant::now(), self.read()));
        }
        let (_, all) = known.as_ref()?;
        all.iter().find(|known| known.hash == hash).map(|known| known.actor)
    }

    fn read(&self) -> Vec<Known> {
        match &self.place {
            Place::Own(path) => {
                let actor = Actor::this_process();
                read(path, actor.uid).map(|hash| Known { hash, actor }).into_iter().collect()
            }
            Place::Folder(folder) => {
                let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
                let paths = entries.flatten().map(|entry| entry.path());
                paths.filter_map(|path| of_user(&path)).collect()
            }
        }
    }
}

/// The token in a file that is named by its user.
fn of_user(path: &Path) -> Option<Known> {
    let name = path.file_name()?.to_str()?;
    let user = match name.parse::<u32>() {
        Ok(uid) => User::from_uid(Uid::from_raw(uid)),
        Err(_) => User::from_name(name),
    };
    let refused = |why: String| tracing::warn!(path = %path.display(), why, "a token is passed over");
    let user = match user {
        Ok(Some(user)) => user,
        Ok(None) => {
            refused("no user has the name of its file".to_owned());
            return None;
        }
        Err(error) => {
            refused(format!("the user cannot be looked up: {error}"));
            return None;
        }
    };
    let actor = Actor { uid: user.uid.as_raw(), gid: user.gid.as_raw() };
    match read(path, actor.uid) {
        Ok(hash) => Some(Known { hash, actor }),
        Err(error) => {
            refused(error.to_string());
            None
        }
    }
}

/// The hash of the token in a file that nobody can have read but its user, root and the daemon.
fn read(path: &Path, uid: u32) -> io::Result<blake3::Hash> {
    let wrong =
        |why: String| io::Error::new(io::ErrorKind::InvalidData, format!("{}: {why}", path.display()));
    let mut file = OpenOptions::new().read(true).custom_flags(nofollow()).open(path)?;
    check(&file.metadata()?, uid).map_err(wrong)?;
    let mut text = String::new();
    (&mut file).take(FILE_BYTES_MAX).read_to_string(&mut text)?;
    let token = text.trim();
    if token.len() < TOKEN_BYTES_MIN {
        return Err(wrong(format!(
            "a token has at least {TOKEN_BYTES_MIN} characters, this has {}",
            token.len()
        )));
    }
    Ok(blake3::hash(token.as_bytes()))
}

/// A link might lead to the file of somebody else; a pipe is not waited for.
fn nofollow() -> i32 {
    (rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK).bits() as i32
}

fn check(file: &Metadata, uid: u32) -> Result<(), String> {
    if !file.is_file() {
        return Err("it is no file".to_owned());
    }
    let (owner, own) = (file.uid(), Actor::this_process().uid);
    if ![uid, own, 0].contains(&owner) {
        return Err(format!("its owner is {owner}, neither its user nor root nor the daemon"));
    }
    match file.mode() & 0o077 {
        0 => Ok(()),
        _ => Err(format!("others may read or write it (mode {:o}): chmod 600", file.mode() & 0o777)),
    }
}

/// A new token, which nobody can guess, for the daemon's own user.
fn make(path: &Path) -> io::Result<()> {
    let token = format!("{}\n", random_hex::<32>());
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(token.as_bytes())
}

/// So many random bytes, as hexadecimal digits.
///
/// # Panics
/// The system has none.
pub(super) fn random_hex<const N: usize>() -> String {
    let mut bytes = [0; N];
    let n = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    assert_eq!(n, Ok(N), "the system gives as many random bytes as are asked for");
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn the_daemon_makes_a_token_that_its_user_alone_reads() {
        let folder = tempfile::tempdir().expect("a folder");
        let state = folder.path().join("state");
        let tokens = Tokens::own(&state).expect("it is made");
        let token = fs::read_to_string(tokens.place()).expect("it is there");
        assert_eq!(fs::metadata(tokens.place()).expect("it is there").mode() & 0o777, 0o600);
        assert_eq!(tokens.owner(token.trim()), Some(Actor::this_process()));
        assert_eq!(tokens.owner(""), None);
        assert_eq!(tokens.owner(&token.trim()[1..]), None);
        let again = Tokens::own(&state).expect("it is kept");
        assert_eq!(again.owner(token.trim()), Some(Actor::this_process()));

        fs::set_permissions(again.place(), Permissions::from_mode(0o640)).expect("it is ours");
        let error = Tokens::own(&state).expect_err("others may read it").to_string();
        assert!(error.contains("mode 640"), "{error}");
    }

    #[test]
    fn tokens_of_a_folder_are_those_of_the_users_that_name_their_files() {
        let folder = tempfile::tempdir().expect("a folder");
        let own = Actor::this_process();
        let write = |name: &str, text: &str, mode: u32| {
            let path = folder.path().join(name);
            fs::write(&path, text).expect("written");
            fs::set_permissions(&path, Permissions::from_mode(mode)).expect("it is ours");
        };
        let (ours, short, open, nobodys) = ("a".repeat(32), "b".repeat(31), "c".repeat(32), "d".repeat(32));
        write(&own.uid.to_string(), &format!("{ours}\n"), 0o600);
        write("no-such-user-here", &nobodys, 0o600);
        let tokens = Tokens::in_folder(folder.path().to_owned()).expect("it can be read");
        assert_eq!(tokens.owner(&ours).map(|actor| actor.uid), Some(own.uid));
        assert_eq!(tokens.owner(&nobodys), None);
        for (text, mode) in [(&short, 0o600), (&open, 0o644)] {
            write(&own.uid.to_string(), text, mode);
            let tokens = Tokens::in_folder(folder.path().to_owned()).expect("it can be read");
            assert_eq!(tokens.owner(text), None, "{mode:o}");
        }
        assert!(Tokens::in_folder(folder.path().join("nowhere")).is_err());
    }
}
