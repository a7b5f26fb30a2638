//! Guests that clients start by name: the files `NAME.wasm` of one folder.

use std::io;
use std::path::PathBuf;

use bytes::Bytes;
use trellis_wire::{ErrorBody, ErrorCode};

use crate::descriptors;
use crate::guest::{listed_names, shown_name};

pub(super) struct Registry {
    folder: Option<PathBuf>,
}

impl Registry {
    pub(super) fn new(folder: Option<PathBuf>) -> Self {
        Self { folder }
    }

    /// The bytes of the component of that name.
    pub(super) async fn read(&self, name: &str) -> Result<Bytes, ErrorBody> {
        let known = self.list().await.map_err(|error| unread(&error))?;
        if !known.iter().any(|other| other == name) {
            let name = shown_name(name);
            let message = format!("no program {name:?} is registered; registered: {}", listed_names(&known));
            return Err(ErrorBody::new(ErrorCode::UnknownProgram, message).about("program").with_value(name));
        }
        let folder = self.folder.as_ref().expect("a name is known only where there is a folder");
        let path = folder.join(format!("{name}.wasm"));
        tokio::fs::read(&path).await.map(Bytes::from).map_err(|error| unread(&error))
    }

    /// The names, sorted. A folder that cannot be read holds none.
    pub(super) async fn names(&self) -> Vec<String> {
        self.list().await.unwrap_or_default()
    }

    async fn list(&self) -> io::Result<Vec<String>> {
        let Some(folder) = &self.folder else { return Ok(Vec::new()) };
        let mut entries = match tokio::fs::read_dir(folder).await {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            opened => opened?,
        };
        let mut names = Vec::new();
        while let Some(entry) = entries.next_entry().await? {
            let path = entry.path();
            if path.extension().is_some_and(|extension| extension == "wasm")
                && let Some(stem) = path.file_stem().and_then(|stem| stem.to_str())
            {
                names.push(stem.to_owned());
            }
        }
        names.sort_unstable();
        Ok(names)
    }
}

/// Where the folder is, is nothing for clients.
fn unread(error: &io::Error) -> ErrorBody {
    let code = if descriptors::are_used_up(error) { ErrorCode::Overloaded } else { ErrorCode::Internal };
    ErrorBody::new(code, format!("the registered programs cannot be read: {error}"))
}
