//! The folder of saved contexts: `UID/HASH.context`, where the hash is over user, model and name.
//!
//! A file is written beside its place and moved there, so that whoever kills the daemon finds the one before or the new one. Where
//! a user, or the daemon, has no room for it, those go that were used longest ago: of the user's own, and then of the user
//! with most.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

use trellis_engine::account::{Account, ActorId, HostCharge};
use trellis_engine::{SavedContext, SavedName};

use super::file::{HEAD_BYTES_MAX, Head, ModelKind, ReadError, Seal};
use crate::accounts::Accounts;
use crate::files::{discard, is_full, open, replace, sync_folder, write_whole};
use crate::guest::make_private;

const EXTENSION: &str = "context";
const TEMPORARY: &str = "tmp";

/// The limit of each user's files that classes may set.
const LIMIT: &str = "saved_disk_bytes_per_user";

/// The folder, and how much there may be in it.
#[derive(Debug)]
pub(crate) struct Store {
    dir: PathBuf,
    limits: StoreLimits,
    /// Of those users, whose classes may say how much each may have.
    accounts: OnceLock<Arc<Accounts>>,
    n_temporary: AtomicU64,
    /// The folder, locked as one that is in use: daemons of a user may share it.
    in_use: OnceLock<fs::File>,
}

/// Bytes of files.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StoreLimits {
    /// Of one user.
    pub(crate) of_user: u64,
    /// Of all.
    pub(crate) of_all: u64,
}

/// A file that is there.
#[derive(Debug)]
struct Found {
    path: PathBuf,
    n_bytes: u64,
    used: SystemTime,
}

impl Store {
    /// The store in a folder, which is made with the first file.
    pub(crate) fn new(dir: PathBuf, limits: StoreLimits) -> Self {
        let (accounts, in_use) = (OnceLock::new(), OnceLock::new());
        let store = Self { dir, limits, accounts, n_temporary: AtomicU64::new(0), in_use };
        // Left behind by a daemon that was killed, unless another is there that may be writing it.
        if let Ok(folder) = fs::File::open(&store.dir)
            && folder.try_lock().is_ok()
        {
            for user in store.users() {
                files(&user, TEMPORARY).for_each(|found| drop(fs::remove_file(found.path)));
            }
        }
        store.note_in_use();
        store
    }

    /// Says whose classes say how much each user may have; without that each has as much as another.
    pub(crate) fn set_accounts(&self, accounts: &Arc<Accounts>) {
        // A daemon has one of them.
        let _ = self.accounts.set(accounts.clone());
    }

    /// Bytes that a user may have, and the most that a file of it has.
    fn limit_of(&self, actor: ActorId) -> u64 {
        let StoreLimits { of_user, of_all } = self.limits;
        let own = self.accounts.get().map(|accounts| accounts.limit_of(actor, LIMIT, of_user));
        own.unwrap_or(of_user).min(of_all)
    }

    /// Bytes that a user may keep. Where nobody can tell which class the user is in, all users' are all that bounds it: what is
    /// removed by the limit of another class is gone for good.
    fn kept_limit_of(&self, actor: ActorId) -> u64 {
        let StoreLimits { of_user, of_all } = self.limits;
        let own = self
            .accounts
            .get()
            .map_or(Some(of_user), |accounts| accounts.sure_limit_of(actor, LIMIT, of_user));
        own.map_or(of_all, |own| own.min(of_all))
    }

    /// Locks the folder for as long as the store is there, if it is there itself.
    fn note_in_use(&self) {
        if self.in_use.get().is_none()
            && let Ok(folder) = fs::File::open(&self.dir)
            && folder.try_lock_shared().is_ok()
        {
            let _ = self.in_use.set(folder);
        }
    }

    fn folder(&self, actor: ActorId) -> PathBuf {
        self.dir.join(actor.0.to_string())
    }

    /// Where a context is kept.
    pub(super) fn path(&self, model: &str, name: &SavedName) -> PathBuf {
        let mut hasher = blake3::Hasher::new_derive_key("trellis saved context 1");
        for part in [model, &name.name] {
            hasher.update(&(part.len() as u64).to_le_bytes()).update(part.as_bytes());
        }
        self.folder(name.actor).join(format!("{}.{EXTENSION}", hasher.finalize().to_hex()))
    }

    /// The folders of users.
    fn users(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(&self.dir).into_iter().flatten().flatten();
        let is_user = |path: &PathBuf| {
            let name = path.file_name().and_then(|name| name.to_str());
            name.is_some_and(|name| name.parse::<u32>().is_ok())
                && fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_dir())
        };
        entries.map(|entry| entry.path()).filter(is_user).collect()
    }

    /// Keeps a context; the KV is left out where it has no room. Returns the bytes of its file.
    ///
    /// # Errors
    /// There is no room for it, or the folder cannot be used. What was kept under the name is gone then: it is not what
    /// was saved last.
    pub(crate) fn put(&self, kind: &ModelKind, name: &SavedName, context: &SavedContext) -> io::Result<u64> {
        self.put_by(kind, name, context, write_whole)
    }

    fn put_by(
        &self,
        kind: &ModelKind,
        name: &SavedName,
        SavedContext { head, kv, .. }: &SavedContext,
        write: impl Fn(&Path, &[&[u8]]) -> io::Result<()>,
    ) -> io::Result<u64> {
        let path = self.path(&kind.model, name);
        let mut head =
            Head { uid: name.actor.0, name: name.name.clone(), of: kind.clone(), context: head.clone() };
        let mut kv = kv.as_slice();
        let most = self.limit_of(name.actor);
        let n_bytes = |encoded: &[u8], kv: &[u8]| (encoded.len() + kv.len() + blake3::OUT_LEN) as u64;
        let mut encoded = head.encode();
        if n_bytes(&encoded, kv) > most || head.kv_bytes() != Some(kv.len() as u64) {
            head.context.forget_kv();
            encoded = head.encode();
            kv = &[];
        }
        let n_bytes = n_bytes(&encoded, kv);
        let stored = match n_bytes <= most && encoded.len() as u64 <= HEAD_BYTES_MAX {
            true => {
                self.write(name.actor, &path, [&encoded, kv, Seal::of(&encoded).over(kv).as_bytes()], write)
            }
            false => Err(io::ErrorKind::QuotaExceeded.into()),
        };
        if stored.is_err() {
            discard(&path);
        }
        stored?;
        self.make_room(name.actor, &path);
        Ok(n_bytes)
    }

    fn write(
        &self,
        actor: ActorId,
        path: &Path,
        parts: [&[u8]; 3],
        write: impl Fn(&Path, &[&[u8]]) -> io::Result<()>,
    ) -> io::Result<()> {
        let folder = self.folder(actor);
        for dir in [&self.dir, &folder] {
            make_private(dir).map_err(io::Error::other)?;
        }
        self.note_in_use();
        let n = self.n_temporary.fetch_add(1, Ordering::Relaxed);
        let temporary = folder.join(format!("{}-{n}.{TEMPORARY}", std::process::id()));
        let put = || {
            let written = write(&temporary, &parts).and_then(|()| replace(&temporary, path));
            written.inspect_err(|_| drop(fs::remove_file(&temporary)))
        };
        let mut stored = put();
        if stored.as_ref().is_err_and(is_full) {
            // Of the user's own: nobody else's goes for it.
            let n_bytes = parts.iter().map(|part| part.len() as u64).sum();
            let own: Vec<Found> = files(&folder, EXTENSION).filter(|found| found.path != path).collect();
            // Not in vain, where others have filled the disk.
            if own.iter().map(|found| found.n_bytes).sum::<u64>() >= n_bytes {
                give_up(own, n_bytes);
                stored = put();
            }
        }
        stored?;
        sync_folder(&folder)
    }

    /// Removes what was used longest ago, until there is no more than may be; never the newest.
    fn make_room(&self, actor: ActorId, newest: &Path) {
        let of = |folder: &Path| -> Vec<Found> { files(folder, EXTENSION).collect() };
        let sum = |found: &[Found]| found.iter().map(|found| found.n_bytes).sum::<u64>();
        let own = of(&self.folder(actor));
        let n_over = sum(&own).saturating_sub(self.kept_limit_of(actor));
        give_up(own.into_iter().filter(|found| found.path != newest).collect(), n_over);
        let of_users = || -> Vec<Vec<Found>> { self.users().iter().map(|folder| of(folder)).collect() };
        let over = |users: &[Vec<Found>]| {
            users.iter().map(|found| sum(found)).sum::<u64>().saturating_sub(self.limits.of_all)
        };
        let mut users = of_users();
        // Where all have too much, who may be of a class that has less comes first, and no other user for it.
        let own = of(&self.folder(actor));
        let n_unsure = sum(&own).saturating_sub(self.limit_of(actor)).min(over(&users));
        if n_unsure > 0 {
            give_up(own.into_iter().filter(|found| found.path != newest).collect(), n_unsure);
            users = of_users();
        }
        let mut n_over = over(&users);
        users.iter_mut().for_each(|found| found.sort_by_key(|found| std::cmp::Reverse(found.used)));
        while n_over > 0 {
            // Of the user with most: nobody sends away what others have with files of its own.
            let may_give = users.iter_mut().filter(|found| found.iter().any(|found| found.path != newest));
            let Some(most) = may_give.max_by_key(|found| sum(found)) else { return };
            let oldest = most.iter().rposition(|found| found.path != newest).expect("it has one to give");
            let Found { path, n_bytes, .. } = most.remove(oldest);
            let _ = fs::remove_file(path);
            n_over = n_over.saturating_sub(n_bytes);
        }
    }

    /// What is kept under a name for a model of this kind. Its KV is left out where it is another model's, or the user has no
    /// host memory for it. What is broken is removed.
    pub(crate) fn get(
        &self,
        kind: &ModelKind,
        name: &SavedName,
        account: &Arc<Account>,
    ) -> Option<SavedContext> {
        let path = self.path(&kind.model, name);
        let read = match open(&path) {
            Ok(file) => read(file, kind, name, account),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => Err(error.into()),
        };
        match read {
            Ok(found) => found,
            Err(error) => {
                tracing::warn!(uid = name.actor.0, path = %path.display(), %error, "a saved context is not used");
                // A file that the system does not give out at the moment may be whole; a link is none of ours.
                let is_link =
                    |error: &io::Error| error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error());
                if match &error {
                    ReadError::Broken(_) => true,
                    ReadError::Io(error) => is_link(error),
                } {
                    discard(&path);
                }
                None
            }
        }
    }

    /// Keeps nothing under a name any more; returns whether anything was.
    ///
    /// # Errors
    /// It cannot be removed.
    pub(crate) fn forget(&self, model: &str, name: &SavedName) -> io::Result<bool> {
        let path = self.path(model, name);
        match fs::remove_file(&path) {
            Ok(()) => sync_folder(&self.folder(name.actor)).map(|()| true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Bytes of files: of a user, or of all.
    pub(crate) fn n_bytes(&self, actor: Option<ActorId>) -> u64 {
        let folders = actor.map_or_else(|| self.users(), |actor| vec![self.folder(actor)]);
        folders.iter().flat_map(|folder| files(folder, EXTENSION)).map(|found| found.n_bytes).sum()
    }
}

/// Reads an open file; `None` where it is whole and nothing for the model.
fn read(
    mut file: fs::File,
    kind: &ModelKind,
    name: &SavedName,
    account: &Arc<Account>,
) -> Result<Option<SavedContext>, ReadError> {
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(ReadError::Broken("no file"));
    }
    #[cfg(unix)]
    if std::os::unix::fs::MetadataExt::uid(&metadata) != rustix::process::geteuid().as_raw() {
        return Err(ReadError::Broken("another user's"));
    }
    let (head, seal) = Head::read(&mut file)?;
    if head.saved_name() != *name || head.of.model != kind.model {
        return Err(ReadError::Broken("under another name"));
    }
    if head.of.tokenizer != kind.tokenizer {
        return Ok(None);
    }
    let n_bytes = head.kv_bytes().ok_or(ReadError::Broken("longer than any"))?;
    let charge = match head.of == *kind && n_bytes <= metadata.len() {
        true => HostCharge::new(account, n_bytes).ok(),
        false => None,
    };
    let mut context = head.context;
    let kv = match &charge {
        Some(_) => seal.read(&mut file, n_bytes)?,
        None => {
            Seal::skip(&mut file, n_bytes)?;
            context.forget_kv();
            Vec::new()
        }
    };
    // The time of use orders what goes first; without it the time of writing does.
    let _ = file.set_modified(SystemTime::now());
    Ok(Some(SavedContext { head: context, kv, charge }))
}

/// Removes files, those used longest ago first, until so many bytes are free.
fn give_up(mut found: Vec<Found>, n_bytes: u64) {
    found.sort_by_key(|found| found.used);
    let mut n_freed = 0;
    for Found { path, n_bytes: n, .. } in found {
        if n_freed >= n_bytes {
            return;
        }
        if fs::remove_file(path).is_ok() {
            n_freed += n;
        }
    }
}

fn files(folder: &Path, extension: &str) -> impl Iterator<Item = Found> {
    fs::read_dir(folder).into_iter().flatten().flatten().filter_map(move |entry| {
        let (path, metadata) = (entry.path(), entry.metadata().ok()?);
        let is_ours = metadata.is_file() && path.extension().is_some_and(|found| found == extension);
        let used = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
        is_ours.then_some(Found { path, n_bytes: metadata.len(), used })
    })
}

#[cfg(all(test, unix))]
mod tests;
