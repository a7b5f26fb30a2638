//! Where a model's files come from: a folder, or the executable itself.

use std::borrow::Cow;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::error::ModelError;
use super::generated::Generated;

/// The files of one model.
#[derive(Clone, Debug)]
pub enum ModelSource {
    /// A folder in the Hugging Face layout.
    Folder(PathBuf),
    /// A GGUF file.
    Gguf(PathBuf),
    /// File names with their bytes, compiled into the program.
    Embedded(&'static [(&'static str, &'static [u8])]),
}

/// An opened file of which ranges are read, from several threads at once.
#[derive(Debug)]
pub(crate) enum RangeFile {
    Disk(File),
    Memory(&'static [u8]),
    Generated(Generated),
}

impl ModelSource {
    /// What is at a path: a file is one in the GGUF format.
    #[must_use]
    pub fn at(path: PathBuf) -> Self {
        if path.is_file() { Self::Gguf(path) } else { Self::Folder(path) }
    }

    /// The name of a file as the user knows it.
    pub(crate) fn describe(&self, name: &str) -> String {
        match self {
            Self::Folder(folder) => folder.join(name).display().to_string(),
            Self::Gguf(path) => path.display().to_string(),
            Self::Embedded(_) => name.to_owned(),
        }
    }

    /// The folder or file, by a path that names no other.
    pub(crate) fn folder(&self) -> Option<PathBuf> {
        match self {
            Self::Folder(path) | Self::Gguf(path) => path.canonicalize().ok(),
            Self::Embedded(_) => None,
        }
    }

    pub(crate) fn check(&self) -> Result<(), ModelError> {
        match self {
            Self::Folder(folder) if !folder.is_dir() => {
                Err(ModelError::NotAFolder { path: folder.display().to_string() })
            }
            _ => Ok(()),
        }
    }

    /// Opens a file and tells its length; `None` when there is none.
    pub(crate) fn open(&self, name: &str) -> Result<Option<(RangeFile, u64)>, ModelError> {
        match self {
            Self::Embedded(files) => Ok(files
                .iter()
                .find(|(file_name, _)| *file_name == name)
                .map(|(_, bytes)| (RangeFile::Memory(bytes), bytes.len() as u64))),
            Self::Folder(folder) => open_disk(&folder.join(name)),
            // Its one file has a header of its own.
            Self::Gguf(_) => Ok(None),
        }
    }

    /// Opens the one file of a model, and tells its length.
    pub(crate) fn open_gguf(path: &Path) -> Result<(RangeFile, u64), ModelError> {
        open_disk(path)?.ok_or_else(|| ModelError::MissingFile {
            file: path.display().to_string(),
            expected: "a GGUF file, or a folder in the Hugging Face layout",
        })
    }

    /// Reads a whole text file of at most `limit_bytes`; `None` when there is none.
    pub(crate) fn read(
        &self,
        name: &str,
        limit_bytes: u64,
    ) -> Result<Option<Cow<'static, [u8]>>, ModelError> {
        let Some((file, found_bytes)) = self.open(name)? else { return Ok(None) };
        let too_large =
            |found_bytes| ModelError::TooLarge { file: self.describe(name), found_bytes, limit_bytes };
        if found_bytes > limit_bytes {
            return Err(too_large(found_bytes));
        }
        match file {
            RangeFile::Memory(bytes) => Ok(Some(Cow::Borrowed(bytes))),
            RangeFile::Disk(file) => {
                let mut bytes = Vec::new();
                // The file may grow while it is read.
                file.take(limit_bytes + 1)
                    .read_to_end(&mut bytes)
                    .map_err(|source| ModelError::Io { file: self.describe(name), source })?;
                if bytes.len() as u64 > limit_bytes {
                    return Err(too_large(bytes.len() as u64));
                }
                Ok(Some(Cow::Owned(bytes)))
            }
            RangeFile::Generated(_) => unreachable!("no source has such files"),
        }
    }
}

fn open_disk(path: &Path) -> Result<Option<(RangeFile, u64)>, ModelError> {
    let fail = |source| ModelError::Io { file: path.display().to_string(), source };
    // Before it is opened: opening a pipe waits for its writer.
    if std::fs::metadata(path).is_ok_and(|metadata| !metadata.is_file()) {
        return Err(fail(io::Error::other("not a regular file")));
    }
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(fail(error)),
    };
    let metadata = file.metadata().map_err(fail)?;
    if !metadata.is_file() {
        return Err(fail(io::Error::other("not a regular file")));
    }
    Ok(Some((RangeFile::Disk(file), metadata.len())))
}

impl RangeFile {
    /// What tells the file from one that is put in its place or written over: when it was changed. For what cannot change,
    /// nothing.
    pub(crate) fn stamp(&self) -> io::Result<Vec<u8>> {
        let Self::Disk(file) = self else { return Ok(Vec::new()) };
        let metadata = file.metadata()?;
        let modified = metadata.modified()?.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let mut stamp = modified.as_nanos().to_le_bytes().to_vec();
        #[cfg(unix)]
        {
            use std::os::unix::fs::MetadataExt as _;
            // Whoever sets the time of a change by hand does not set this one.
            stamp.extend(metadata.ctime().to_le_bytes());
            stamp.extend(metadata.ctime_nsec().to_le_bytes());
        }
        Ok(stamp)
    }

    /// Fills `out` from the bytes at `offset`.
    pub(crate) fn read_exact_at(&self, out: &mut [u8], offset: u64) -> io::Result<()> {
        match self {
            Self::Disk(file) => disk_read_exact_at(file, out, offset),
            Self::Memory(bytes) => {
                let start = usize::try_from(offset).map_err(|_| io::ErrorKind::UnexpectedEof)?;
                let end = start.checked_add(out.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
                out.copy_from_slice(bytes.get(start..end).ok_or(io::ErrorKind::UnexpectedEof)?);
                Ok(())
            }
            Self::Generated(generated) => {
                generated.fill(out, offset);
                Ok(())
            }
        }
    }
}

#[cfg(unix)]
fn disk_read_exact_at(file: &File, out: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, out, offset)
}

#[cfg(windows)]
fn disk_read_exact_at(file: &File, mut out: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !out.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, out, offset) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n_read) => {
                out = &mut out[n_read..];
                offset += n_read as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
