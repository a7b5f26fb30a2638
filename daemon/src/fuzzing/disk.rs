//! A disk in memory that fills, fails, and loses what was not waited for.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io::{self, Cursor, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use crate::saved::{Disk, Found, Opened};

/// Says of each call whether it fails.
type Fails = Box<dyn FnMut(&'static str) -> bool + Send>;

/// A disk, which all that hold it share.
#[derive(Clone)]
pub struct SimulatedDisk(Arc<Mutex<State>>);

struct State {
    here: Content,
    capacity_bytes: u64,
    /// In the place of a time.
    n_uses: u64,
    n_calls: u64,
    /// The call in the middle of which the disk is looked at that a killed daemon leaves.
    killed_at: u64,
    killed: Option<Content>,
    fails: Fails,
}

#[derive(Clone, Default)]
struct Content {
    files: BTreeMap<PathBuf, File>,
    folders: BTreeSet<PathBuf>,
    /// Files as they are whatever happens.
    durable: BTreeMap<PathBuf, File>,
    /// What has changed since, in its order, that nobody has waited for.
    unsynced: Vec<Change>,
}

#[derive(Clone)]
struct File {
    bytes: Arc<[u8]>,
    used: u64,
}

#[derive(Clone)]
enum Change {
    Write(PathBuf, File),
    Move(PathBuf, PathBuf),
    Remove(PathBuf),
}

impl Change {
    fn apply(&self, files: &mut BTreeMap<PathBuf, File>) {
        match self {
            Self::Write(path, file) => drop(files.insert(path.clone(), file.clone())),
            Self::Move(from, to) => {
                if let Some(file) = files.remove(from) {
                    files.insert(to.clone(), file);
                }
            }
            Self::Remove(path) => drop(files.remove(path)),
        }
    }

    fn is_in(&self, dir: &Path) -> bool {
        let (Self::Write(path, _) | Self::Move(_, path) | Self::Remove(path)) = self;
        path.parent() == Some(dir)
    }
}

impl Content {
    fn change(&mut self, change: Change) {
        change.apply(&mut self.files);
        self.unsynced.push(change);
    }

    fn n_bytes(&self) -> u64 {
        self.files.values().map(|file| file.bytes.len() as u64).sum()
    }
}

impl fmt::Debug for SimulatedDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimulatedDisk")
            .field("n_files", &self.lock().here.files.len())
            .finish_non_exhaustive()
    }
}

impl SimulatedDisk {
    /// One with room for so many bytes. In the middle of its call of number `killed_at` it is kept as it is then, for
    /// [`Self::killed`]; `fails` hears of each call and says whether that fails.
    #[must_use]
    pub fn new(
        capacity_bytes: u64,
        killed_at: u64,
        fails: impl FnMut(&'static str) -> bool + Send + 'static,
    ) -> Self {
        Self::with(Content::default(), capacity_bytes, (killed_at, Box::new(fails)))
    }

    fn with(here: Content, capacity_bytes: u64, (killed_at, fails): (u64, Fails)) -> Self {
        let (n_uses, n_calls, killed) = (0, 0, None);
        let state = State { here, capacity_bytes, n_uses, n_calls, killed_at, killed, fails };
        Self(Arc::new(Mutex::new(state)))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the next daemon finds where this one was killed in the middle of that call, or was not before this moment: everything,
    /// or where the machine has stopped with it, of what nobody has waited for as many changes as `n_kept` says of so many. That
    /// disk does not fail.
    #[must_use]
    pub fn killed(&self, n_kept: Option<&mut dyn FnMut(usize) -> usize>) -> Self {
        let state = self.lock();
        let Content { mut files, folders, durable, unsynced } =
            state.killed.clone().unwrap_or_else(|| state.here.clone());
        if let Some(n_kept) = n_kept {
            files = durable;
            let n_kept = n_kept(unsynced.len()).min(unsynced.len());
            unsynced[..n_kept].iter().for_each(|change| change.apply(&mut files));
        }
        let here = Content { durable: files.clone(), files, folders, unsynced: Vec::new() };
        Self::with(here, u64::MAX, (u64::MAX, Box::new(|_| false)))
    }

    /// Files that are there, whole or not.
    #[must_use]
    pub fn n_files(&self) -> usize {
        self.lock().here.files.len()
    }
}

impl State {
    /// One call more. Where the daemon is killed in the middle of it, `half` is what has come of it by then.
    fn call(&mut self, name: &'static str, half: impl FnOnce(&mut Content)) -> io::Result<()> {
        self.n_calls += 1;
        if self.n_calls == self.killed_at {
            let mut content = self.here.clone();
            half(&mut content);
            self.killed = Some(content);
        }
        match (self.fails)(name) {
            true => Err(io::Error::other(format!("an injected failure of {name}"))),
            false => Ok(()),
        }
    }

    fn use_number(&mut self) -> u64 {
        self.n_uses += 1;
        self.n_uses
    }
}

impl Disk for SimulatedDisk {
    fn if_unused(&self, dir: &Path, then: &mut dyn FnMut()) {
        let is_there = self.lock().here.folders.contains(dir);
        if is_there {
            then();
        }
    }

    fn note_in_use(&self, _: &Path) {}

    fn make_folder(&self, dir: &Path) -> io::Result<()> {
        let mut state = self.lock();
        state.call("make_folder", |_| {})?;
        state.here.folders.insert(dir.to_owned());
        Ok(())
    }

    fn folders(&self, dir: &Path) -> Vec<PathBuf> {
        let state = self.lock();
        state.here.folders.iter().filter(|path| path.parent() == Some(dir)).cloned().collect()
    }

    fn files(&self, dir: &Path, extension: &str) -> Vec<Found> {
        let state = self.lock();
        let is_asked = |path: &Path| {
            path.parent() == Some(dir) && path.extension().is_some_and(|found| found == extension)
        };
        let files = state.here.files.iter().filter(|(path, _)| is_asked(path));
        let found = files.map(|(path, file)| Found {
            path: path.clone(),
            n_bytes: file.bytes.len() as u64,
            used: SystemTime::UNIX_EPOCH + Duration::from_secs(file.used),
        });
        found.collect()
    }

    fn write_whole(&self, path: &Path, parts: &[&[u8]]) -> io::Result<()> {
        let bytes = parts.concat();
        let mut state = self.lock();
        let used = state.use_number();
        let file = |bytes: &[u8]| File { bytes: bytes.into(), used };
        let half = file(&bytes[..bytes.len() / 2]);
        let free_bytes = state.capacity_bytes.saturating_sub(state.here.n_bytes());
        let write_half = |content: &mut Content| content.change(Change::Write(path.to_owned(), half.clone()));
        let called = state.call("write", write_half);
        if called.is_err() || bytes.len() as u64 > free_bytes {
            write_half(&mut state.here);
            called?;
            return Err(io::ErrorKind::StorageFull.into());
        }
        state.here.change(Change::Write(path.to_owned(), file(&bytes)));
        Ok(())
    }

    fn replace(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut state = self.lock();
        state.call("replace", |_| {})?;
        if !state.here.files.contains_key(from) {
            return Err(io::ErrorKind::NotFound.into());
        }
        state.here.change(Change::Move(from.to_owned(), to.to_owned()));
        Ok(())
    }

    fn sync_folder(&self, dir: &Path) -> io::Result<()> {
        let mut state = self.lock();
        state.call("sync_folder", |_| {})?;
        let Content { durable, unsynced, .. } = &mut state.here;
        unsynced.retain(|change| {
            let is_in = change.is_in(dir);
            if is_in {
                change.apply(durable);
            }
            !is_in
        });
        Ok(())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        let mut state = self.lock();
        if !state.here.files.contains_key(path) {
            return Err(io::ErrorKind::NotFound.into());
        }
        state.call("remove", |_| {})?;
        state.here.change(Change::Remove(path.to_owned()));
        Ok(())
    }

    fn discard(&self, path: &Path) {
        let _ = self.remove(path);
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn Opened>> {
        let mut state = self.lock();
        let Some(file) = state.here.files.get(path) else { return Err(io::ErrorKind::NotFound.into()) };
        let bytes = file.bytes.clone();
        state.call("open", |_| {})?;
        Ok(Box::new(OpenFile { disk: self.clone(), path: path.to_owned(), bytes: Cursor::new(bytes) }))
    }
}

struct OpenFile {
    disk: SimulatedDisk,
    path: PathBuf,
    bytes: Cursor<Arc<[u8]>>,
}

impl Read for OpenFile {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.bytes.read(buf)
    }
}

impl Seek for OpenFile {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.bytes.seek(to)
    }
}

impl Opened for OpenFile {
    fn is_strange(&self) -> io::Result<Option<&'static str>> {
        Ok(None)
    }

    fn note_used(&self) {
        let mut state = self.disk.lock();
        let used = state.use_number();
        if let Some(file) = state.here.files.get_mut(&self.path) {
            file.used = used;
        }
    }
}
