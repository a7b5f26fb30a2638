//! Model folders of files that are made for one input.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;

use tempfile::TempDir;

thread_local! {
    static FOLDER: TempDir = tempfile::tempdir().expect("a folder can be made");
}

/// A file of these bytes.
pub(crate) struct Draft<'a> {
    pub(crate) name: &'a str,
    pub(crate) bytes: &'a [u8],
}

/// Opens a folder that holds these files and no others.
pub(crate) fn with_files<T>(files: &[Draft<'_>], open: impl FnOnce(&Path) -> T) -> T {
    FOLDER.with(|folder| {
        let path = folder.path();
        for Draft { name, bytes } in files {
            let mut file = File::create(path.join(name)).expect("the file can be made");
            file.write_all(bytes).expect("the file can be written");
        }
        let opened = open(path);
        for Draft { name, .. } in files {
            fs::remove_file(path.join(name)).expect("the file can be removed");
        }
        opened
    })
}
