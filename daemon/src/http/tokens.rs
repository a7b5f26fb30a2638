//! Who asks, where nothing but a token says it.

use std::collections::HashMap;
use std::fmt;
use std::fs::{self, Metadata, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::unistd::{Uid, User};
use tokio_util::sync::CancellationToken;

use crate::groups::PATIENCE;
use crate::session::Actor;
use crate::tasks::blocking;

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

/// Finds the user that a file is named by, by name or by number. It may ask a server that does not answer.
type LookUp = fn(&str) -> io::Result<Option<Actor>>;

/// The tokens by which requests come, read anew where they may have changed.
pub(super) struct Tokens {
    place: Place,
    look_up: LookUp,
    patience: Duration,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// When what is known was read.
    read: Option<Instant>,
    known: Vec<Known>,
    /// What is being read: since when, and a token that is cancelled at its end.
    reading: Option<(Instant, CancellationToken)>,
    /// What is wrong with which file, as it was logged.
    complaints: HashMap<PathBuf, String>,
}

#[derive(Clone, Debug)]
struct Known {
    path: PathBuf,
    hash: blake3::Hash,
    actor: Actor,
}

/// What was read: the tokens, and what is wrong with which file.
#[derive(Default)]
struct Files {
    known: Vec<Known>,
    complaints: HashMap<PathBuf, String>,
}

impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokens").field("place", &self.place).finish_non_exhaustive()
    }
}

impl Tokens {
    /// Those of a folder.
    ///
    /// # Errors
    /// It cannot be read, or others may write to it.
    pub(super) fn in_folder(folder: PathBuf) -> io::Result<Self> {
        check_folder(&folder)?;
        fs::read_dir(&folder)?;
        Ok(Self::at(Place::Folder(folder), user_of))
    }

    /// One of the daemon's own user, which is made where there is none.
    ///
    /// # Errors
    /// It can be neither read nor made, or others may read it.
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
        Ok(Self::at(Place::Own(path), user_of))
    }

    fn at(place: Place, look_up: LookUp) -> Self {
        Self { place, look_up, patience: PATIENCE, state: Mutex::default() }
    }

    /// Where they are, for people.
    pub(super) fn place(&self) -> &Path {
        match &self.place {
            Place::Folder(path) | Place::Own(path) => path,
        }
    }

    /// Whose token this is.
    pub(super) async fn owner(self: &Arc<Self>, token: &str) -> Option<Actor> {
        // Hashes are compared in a time that says nothing of the bytes.
        let hash = blake3::hash(token.as_bytes());
        let is_fresh = self.is_fresh().await;
        let found = self.state().known.iter().find(|known| known.hash == hash).cloned()?;
        if is_fresh {
            return Some(found.actor);
        }
        // Users cannot be looked up now. Whether a token still holds is said by its file alone.
        let tokens = self.clone();
        blocking(move || {
            let is_there = tokens.is_closed().is_ok()
                && read(&found.path, found.actor.uid).is_ok_and(|now| now == found.hash);
            is_there.then_some(found.actor)
        })
        .await
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the files read anew that may have changed, by one task for all who wait for it. False where that takes too long: it goes on,
    /// and nobody waits for it any more.
    async fn is_fresh(self: &Arc<Self>) -> bool {
        let (since, done) = {
            let mut state = self.state();
            if state.read.is_some_and(|read| read.elapsed() < FRESH_TIME) {
                return true;
            }
            match &state.reading {
                Some((since, done)) if !done.is_cancelled() => (*since, done.clone()),
                _ => {
                    let begun = (Instant::now(), CancellationToken::new());
                    state.reading = Some(begun.clone());
                    self.clone().read_anew(begun.clone());
                    begun
                }
            }
        };
        let left = self.patience.saturating_sub(since.elapsed());
        tokio::time::timeout(left, done.cancelled()).await.is_ok()
    }

    /// On a thread of its own, for as long as that takes.
    fn read_anew(self: Arc<Self>, (begun, done): (Instant, CancellationToken)) {
        tokio::task::spawn_blocking(move || {
            let _done = done.drop_guard();
            let before = self.state().known.clone();
            let Files { known, complaints } = self.read(&before);
            let mut state = self.state();
            for (path, why) in &complaints {
                // Not each time that somebody asks.
                if state.complaints.get(path) != Some(why) {
                    tracing::warn!(path = %path.display(), why, "a token is passed over");
                }
            }
            (state.read, state.known, state.complaints) = (Some(begun), known, complaints);
        });
    }

    /// That others have no say in what lies there.
    fn is_closed(&self) -> io::Result<()> {
        match &self.place {
            Place::Folder(folder) => check_folder(folder),
            Place::Own(_) => Ok(()),
        }
    }

    fn read(&self, before: &[Known]) -> Files {
        let mut files = Files::default();
        let paths = match &self.place {
            Place::Own(path) => Ok(vec![path.clone()]),
            Place::Folder(folder) => check_folder(folder).and_then(|()| {
                fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>()
            }),
        };
        let paths = paths.unwrap_or_else(|error| {
            files.complaints.insert(self.place().to_owned(), error.to_string());
            Vec::new()
        });
        for path in paths {
            let known = self.actor_of(&path, before).and_then(|actor| {
                let hash = read(&path, actor.uid).map_err(|error| error.to_string())?;
                Ok(Known { path: path.clone(), hash, actor })
            });
            match known {
                Ok(known) => files.known.push(known),
                Err(why) => {
                    files.complaints.insert(path, why);
                }
            }
        }
        files
    }

    /// The user of a file: as it was known before where the machine does not say now.
    fn actor_of(&self, path: &Path, before: &[Known]) -> Result<Actor, String> {
        if let Place::Own(_) = self.place {
            return Ok(Actor::this_process());
        }
        let name = path.file_name().and_then(|name| name.to_str()).ok_or("its name is no user's")?;
        match (self.look_up)(name) {
            Ok(Some(actor)) => Ok(actor),
            Ok(None) => Err("no user has the name of its file".to_owned()),
            Err(error) => {
                let known = before.iter().find(|known| known.path == path);
                known.map(|known| known.actor).ok_or_else(|| format!("the user cannot be looked up: {error}"))
            }
        }
    }
}

/// The user of this name or number, as the machine knows it.
fn user_of(name: &str) -> io::Result<Option<Actor>> {
    let user = match name.parse::<u32>() {
        Ok(uid) => User::from_uid(Uid::from_raw(uid))?,
        Err(_) => User::from_name(name)?,
    };
    Ok(user.map(|user| Actor { uid: user.uid.as_raw(), gid: user.gid.as_raw() }))
}

/// Refuses a folder in which others could put a token, or take one away.
fn check_folder(folder: &Path) -> io::Result<()> {
    let metadata = fs::metadata(folder)?;
    let wrong = |why: String| {
        Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("{}: {why}", folder.display())))
    };
    if !metadata.is_dir() {
        return Err(io::Error::new(
            io::ErrorKind::NotADirectory,
            format!("{}: it is no folder", folder.display()),
        ));
    }
    if ![0, Actor::this_process().uid].contains(&metadata.uid()) {
        return wrong(format!("its owner is {}, neither root nor the daemon", metadata.uid()));
    }
    match metadata.mode() & 0o022 {
        0 => Ok(()),
        _ => wrong(format!("others may write to it (mode {:o}): chmod go-w", metadata.mode() & 0o7777)),
    }
}

/// The hash of the token in a file that nobody can have read but its user, root and the daemon.
fn read(path: &Path, uid: u32) -> io::Result<blake3::Hash> {
    let wrong =
        |why: String| io::Error::new(io::ErrorKind::InvalidData, format!("{}: {why}", path.display()));
    let mut file = OpenOptions::new().read(true).custom_flags(nofollow()).open(path)?;
    check(&file.metadata()?, uid).map_err(wrong)?;
    let mut text = String::new();
    let n_bytes = (&mut file).take(FILE_BYTES_MAX + 1).read_to_string(&mut text)?;
    if n_bytes as u64 > FILE_BYTES_MAX {
        return Err(wrong(format!("it has more than {FILE_BYTES_MAX} bytes")));
    }
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

    #[tokio::test]
    async fn the_daemon_makes_a_token_that_its_user_alone_reads() {
        let folder = tempfile::tempdir().expect("a folder");
        let state = folder.path().join("state");
        let tokens = Arc::new(Tokens::own(&state).expect("it is made"));
        let token = fs::read_to_string(tokens.place()).expect("it is there");
        assert_eq!(fs::metadata(tokens.place()).expect("it is there").mode() & 0o777, 0o600);
        assert_eq!(tokens.owner(token.trim()).await, Some(Actor::this_process()));
        assert_eq!(tokens.owner("").await, None);
        assert_eq!(tokens.owner(&token.trim()[1..]).await, None);
        let again = Arc::new(Tokens::own(&state).expect("it is kept"));
        assert_eq!(again.owner(token.trim()).await, Some(Actor::this_process()));

        fs::set_permissions(again.place(), Permissions::from_mode(0o640)).expect("it is ours");
        let error = Tokens::own(&state).expect_err("others may read it").to_string();
        assert!(error.contains("mode 640"), "{error}");
    }

    /// A folder that nobody else writes to.
    fn closed() -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("a folder");
        fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).expect("it is ours");
        folder
    }

    fn write(folder: &Path, name: &str, text: &str, mode: u32) {
        let path = folder.join(name);
        fs::write(&path, text).expect("written");
        fs::set_permissions(&path, Permissions::from_mode(mode)).expect("it is ours");
    }

    fn in_folder(folder: &Path) -> Arc<Tokens> {
        Arc::new(Tokens::in_folder(folder.to_owned()).expect("it can be read"))
    }

    /// As after the time for which what was read is believed.
    fn outdate(tokens: &Tokens) {
        tokens.state().read = None;
    }

    #[tokio::test]
    async fn tokens_of_a_folder_are_those_of_the_users_that_name_their_files() {
        let folder = closed();
        let own = Actor::this_process();
        let (ours, short, open, nobodys) = ("a".repeat(32), "b".repeat(31), "c".repeat(32), "d".repeat(32));
        let name = own.uid.to_string();
        write(folder.path(), &name, &format!("{ours}\n"), 0o600);
        write(folder.path(), "no-such-user-here", &nobodys, 0o600);
        let tokens = in_folder(folder.path());
        assert_eq!(tokens.owner(&ours).await.map(|actor| actor.uid), Some(own.uid));
        assert_eq!(tokens.owner(&nobodys).await, None);
        let long = "e".repeat(FILE_BYTES_MAX as usize + 1);
        for (text, mode) in [(&short, 0o600), (&open, 0o644), (&long, 0o600)] {
            write(folder.path(), &name, text, mode);
            let tokens = in_folder(folder.path());
            assert_eq!(
                tokens.owner(&text[..text.len().min(FILE_BYTES_MAX as usize)]).await,
                None,
                "{mode:o}"
            );
            assert_eq!(tokens.state().complaints.len(), 2, "it and that of nobody");
        }
        assert!(Tokens::in_folder(folder.path().join("nowhere")).is_err());
    }

    #[tokio::test]
    async fn a_folder_that_others_write_to_has_no_tokens() {
        let folder = closed();
        let token = "a".repeat(32);
        write(folder.path(), &Actor::this_process().uid.to_string(), &token, 0o600);
        let tokens = in_folder(folder.path());
        assert!(tokens.owner(&token).await.is_some());
        fs::set_permissions(folder.path(), Permissions::from_mode(0o775)).expect("it is ours");
        let error = Tokens::in_folder(folder.path().to_owned()).expect_err("others write to it").to_string();
        assert!(error.contains("mode 775"), "{error}");
        outdate(&tokens);
        assert_eq!(tokens.owner(&token).await, None);
    }

    const HANG: Duration = Duration::from_secs(3);

    fn hangs(name: &str) -> io::Result<Option<Actor>> {
        std::thread::sleep(HANG);
        user_of(name)
    }

    fn fails(_: &str) -> io::Result<Option<Actor>> {
        Err(io::ErrorKind::TimedOut.into())
    }

    #[tokio::test]
    async fn what_is_known_holds_where_users_cannot_be_looked_up_as_long_as_its_file_is_there() {
        let folder = closed();
        let (own, token) = (Actor::this_process(), "a".repeat(32));
        let name = own.uid.to_string();
        for look_up in [hangs as LookUp, fails] {
            write(folder.path(), &name, &token, 0o600);
            let mut tokens = Tokens::at(Place::Folder(folder.path().to_owned()), user_of);
            let path = folder.path().join(&name);
            let known = Known { path: path.clone(), hash: blake3::hash(token.as_bytes()), actor: own };
            (tokens.look_up, tokens.patience) = (look_up, Duration::from_millis(20));
            tokens.state().known.push(known);
            let tokens = Arc::new(tokens);
            let begun = Instant::now();
            let asked = (0..8).map(|_| tokens.owner(&token));
            let owners = futures_util::future::join_all(asked).await;
            assert!(owners.iter().all(|owner| *owner == Some(own)), "{owners:?}");
            assert_eq!(tokens.owner(&"b".repeat(32)).await, None);
            assert!(begun.elapsed() < HANG, "nobody waits longer than the patience");
            fs::remove_file(path).expect("it was there");
            outdate(&tokens);
            assert_eq!(tokens.owner(&token).await, None, "it was taken away");
        }
    }
}
