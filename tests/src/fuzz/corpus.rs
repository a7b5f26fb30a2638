//! Where inputs lie.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use trellis_oracles::Target;

use super::tools::{Tools, folder};

/// What is kept of a target in the repository, at most.
const KEPT_BYTES_MAX: u64 = 100 << 10;
const N_KEPT_MAX: usize = 64;

/// Inputs that were findings, and stay mended.
pub(super) fn regressions(name: &str) -> PathBuf {
    folder().join("regressions").join(name)
}

/// Inputs that are kept for what they reach.
fn kept(name: &str) -> PathBuf {
    folder().join("corpus").join(name)
}

/// Corpora that grow beside the build.
#[derive(Debug)]
pub(super) struct Corpora {
    folder: PathBuf,
}

/// The folders of one target.
#[derive(Debug)]
pub(super) struct Folders {
    /// Where new inputs are written.
    pub(super) found: PathBuf,
    /// From where inputs are read.
    pub(super) kept: Vec<PathBuf>,
    /// Where cargo-fuzz has inputs written that fail.
    pub(super) artifacts: PathBuf,
}

impl Corpora {
    pub(super) fn beside(target_dir: &Path) -> Self {
        Self { folder: target_dir.join("fuzz") }
    }

    /// The folders of a target, which are made if they are missing.
    pub(super) fn of(&self, name: &str) -> io::Result<Folders> {
        let found = self.folder.join("corpus").join(name);
        let artifacts = folder().join("artifacts").join(name);
        fs::create_dir_all(&found)?;
        fs::create_dir_all(&artifacts)?;
        let kept = [kept(name), regressions(name)].into_iter().filter(|folder| folder.is_dir()).collect();
        Ok(Folders { found, kept, artifacts })
    }

    /// Keeps few inputs that reach what all of them reach, those that reach most first, as far as there is room.
    pub(super) fn keep(&self, tools: &Tools, target: &Target) -> io::Result<()> {
        let folders = self.of(target.name)?;
        let merged = self.folder.join("merged").join(target.name);
        if merged.is_dir() {
            fs::remove_dir_all(&merged)?;
        }
        fs::create_dir_all(&merged)?;
        let mut command = tools.fuzz("run");
        // Into the first folder, of all of them. How often an edge is passed does not count.
        command.arg(target.name).args([&merged, &folders.found]).args(&folders.kept).arg("--");
        command.args([
            "-set_cover_merge=1",
            "-use_counters=0",
            &format!("-max_len={}", target.input_bytes_max),
        ]);
        let output = command.output()?;
        if !output.status.success() {
            let reason = String::from_utf8_lossy(&output.stderr).into_owned();
            return Err(io::Error::other(reason));
        }
        let mut inputs: Vec<(SystemTime, u64, PathBuf)> = Vec::new();
        for entry in fs::read_dir(&merged)? {
            let entry = entry?;
            let about = entry.metadata()?;
            inputs.push((about.modified()?, about.len(), entry.path()));
        }
        // They are written in the order in which they are chosen: each reaches most of what those before it do not.
        inputs.sort();
        let kept = kept(target.name);
        if kept.is_dir() {
            fs::remove_dir_all(&kept)?;
        }
        fs::create_dir_all(&kept)?;
        let (mut n_bytes, mut n_kept) = (0, 0);
        for (_, length, path) in inputs.iter().take(N_KEPT_MAX) {
            n_bytes += length;
            if n_bytes > KEPT_BYTES_MAX {
                break;
            }
            fs::copy(path, kept.join(path.file_name().expect("it has a name")))?;
            n_kept += 1;
        }
        println!("{}: {n_kept} of {} inputs are kept", target.name, inputs.len());
        Ok(())
    }
}
