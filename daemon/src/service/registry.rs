//! Guests that clients start by name: the files `NAME.wasm` of one folder.

use std::path::PathBuf;

use bytes::Bytes;
use trellis_wire::{ErrorBody, ErrorCode};

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
        let known = self.names().await;
        if !known.iter().any(|other| other == name) {
            let name = shown_name(name);
            let message = format!("no program {name:?} is registered; registered: {}", listed_names(&known));
            return Err(ErrorBody::new(ErrorCode::UnknownProgram, message).about("program").with_value(name));
        }
        let folder = self.folder.as_ref().expect("a name is known only where there is a folder");
        let path = folder.join(format!("{name}.wasm"));
        tokio::fs::read(&path)
            .await
            .map(Bytes::from)
            .map_err(|error| ErrorBody::new(ErrorCode::Internal, format!("{}: {error}", path.display())))
    }

    /// The names, sorted. A folder that cannot be read holds none.
    pub(super) async fn names(&self) -> Vec<String> {
        let Some(folder) = &self.folder else { return Vec::new() };
        let Ok(mut entries) = tokio::fs::read_dir(folder).await else { return Vec::new() };
        let mut names = Vec::new();
        while let Ok(Some(entry)) = entries.next_entry().await {
            let path = entry.path();
            if path.extension().is_some_and(|extension| extension == "wasm")
                && let Some(stem) = path.file_stem().and_then(|stem| stem.to_str())
            {
                names.push(stem.to_owned());
            }
        }
        names.sort_unstable();
        names
    }
}
