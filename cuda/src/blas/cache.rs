//! Timed algorithms on disk.
//!
//! A text file for each device, driver, library version and workspace: a header that repeats them, a line for each
//! shape, and a hash of all that. What does not match is as good as missing.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use super::problem::Algorithm;
use super::{MatmulShape, Update};
use crate::ops::common::{Dtype, Element, dtype_name};

const MAGIC: &str = "trellis matmul 1";

/// Where the algorithms of one device and library version are kept.
#[derive(Debug)]
pub(super) struct CacheFile {
    path: PathBuf,
    header: String,
}

impl CacheFile {
    /// `key`: what the timings hold for.
    pub(super) fn new(dir: &Path, key: &str) -> Self {
        let hash = blake3::hash(key.as_bytes()).to_hex();
        Self { path: dir.join(format!("matmul-{}.txt", &hash[..16])), header: format!("{MAGIC}\n{key}\n") }
    }

    /// What is known; nothing if the file is missing, damaged or of another kind.
    pub(super) fn load(&self) -> HashMap<MatmulShape, Algorithm> {
        let Ok(text) = fs::read_to_string(&self.path) else { return HashMap::new() };
        let known = parse(&text, &self.header);
        if known.is_none() {
            tracing::warn!(path = %self.path.display(), "not a list of matrix products for this device");
        }
        known.unwrap_or_default()
    }

    /// Adds to what is known there: several models, or daemons, may be tuned at once. Written whole or not at all; a cache
    /// that cannot be written only costs time.
    pub(super) fn store(&self, known: &HashMap<MatmulShape, Algorithm>) {
        if let Err(error) = self.merge(known) {
            tracing::warn!(path = %self.path.display(), %error, "cannot keep timed matrix products");
        }
    }

    fn merge(&self, known: &HashMap<MatmulShape, Algorithm>) -> io::Result<()> {
        self.path.parent().map_or(Ok(()), fs::create_dir_all)?;
        // The lock file is never deleted: a waiter could lock an unlinked file. Closing it releases the lock.
        let turn = File::create(self.path.with_extension("lock"))?;
        turn.lock()?;
        let mut all = self.load();
        all.extend(known);
        let partial = self.path.with_extension("partial");
        fs::write(&partial, format(&self.header, &all))?;
        fs::rename(&partial, &self.path)
    }
}

fn format(header: &str, known: &HashMap<MatmulShape, Algorithm>) -> String {
    let mut entries: Vec<_> = known.iter().collect();
    entries.sort_unstable();
    let mut text = header.to_owned();
    for (shape, algorithm) in entries {
        let MatmulShape { n_tokens, n_out, n_in, dtype, out, update } = shape;
        let update = match update {
            Update::Replace => "replace",
            Update::Add => "add",
        };
        write!(text, "{n_tokens} {n_out} {n_in} {} {} {update}", dtype_name(*dtype), out.name())
            .expect("a string takes everything");
        for word in algorithm.data {
            write!(text, " {word:x}").expect("a string takes everything");
        }
        text.push('\n');
    }
    let hash = blake3::hash(text.as_bytes()).to_hex();
    text + &hash + "\n"
}

fn parse(text: &str, header: &str) -> Option<HashMap<MatmulShape, Algorithm>> {
    let (hashed, last_line) = text.trim_end_matches('\n').rsplit_once('\n')?;
    let hashed = &text[..hashed.len() + 1];
    if *blake3::hash(hashed.as_bytes()).to_hex() != *last_line {
        return None;
    }
    hashed.strip_prefix(header)?.lines().map(parse_line).collect()
}

fn parse_line(line: &str) -> Option<(MatmulShape, Algorithm)> {
    let mut words = line.split(' ');
    let mut count = || words.next()?.parse().ok();
    let (n_tokens, n_out, n_in) = (count()?, count()?, count()?);
    let dtype = words.next()?;
    let dtype =
        [Dtype::F32, Dtype::F16, Dtype::Bf16].into_iter().find(|known| dtype_name(*known) == dtype)?;
    let out = words.next()?;
    let out = [Element::Model, Element::F32].into_iter().find(|known| known.name() == out)?;
    let update = match words.next()? {
        "replace" => Update::Replace,
        "add" => Update::Add,
        _ => return None,
    };
    let mut data = [0u64; 8];
    for word in &mut data {
        *word = u64::from_str_radix(words.next()?, 16).ok()?;
    }
    let shape = MatmulShape { n_tokens, n_out, n_in, dtype, out, update };
    words.next().is_none().then_some((shape, Algorithm { data }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known() -> HashMap<MatmulShape, Algorithm> {
        let shape = MatmulShape {
            n_tokens: 24,
            n_out: 6144,
            n_in: 4096,
            dtype: Dtype::Bf16,
            out: Element::Model,
            update: Update::Replace,
        };
        let added = MatmulShape { out: Element::F32, update: Update::Add, dtype: Dtype::F16, ..shape };
        HashMap::from([
            (shape, Algorithm { data: [1, 2, 3, u64::MAX, 5, 6, 7, 8] }),
            (added, Algorithm { data: [9; 8] }),
        ])
    }

    #[test]
    fn what_was_stored_is_loaded() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = CacheFile::new(&dir.path().join("new"), "a device\nand its driver");
        assert!(file.load().is_empty());
        file.store(&known());
        assert_eq!(file.load(), known());
        file.store(&HashMap::new());
        assert_eq!(file.load(), known(), "it is added to");
    }

    #[test]
    fn loads_that_tune_at_once_lose_nothing_of_each_other() {
        const N: usize = 8;
        let dir = tempfile::tempdir().expect("a directory");
        let of_load = |load: usize| -> HashMap<MatmulShape, Algorithm> {
            let tuned = known().into_iter();
            tuned.map(|(shape, algorithm)| (MatmulShape { n_out: load + 1, ..shape }, algorithm)).collect()
        };
        std::thread::scope(|scope| {
            for load in 0..N {
                let file = CacheFile::new(dir.path(), "a device");
                scope.spawn(move || file.store(&of_load(load)));
            }
        });
        let all: HashMap<_, _> = (0..N).flat_map(of_load).collect();
        assert_eq!(CacheFile::new(dir.path(), "a device").load(), all);
    }

    #[test]
    fn another_device_knows_nothing() {
        let text = format("device a\n", &known());
        assert_eq!(parse(&text, "device a\n"), Some(known()));
        assert_eq!(parse(&text, "device b\n"), None);
    }

    #[test]
    fn damage_anywhere_is_noticed() {
        let header = "device a\n";
        let text = format(header, &known());
        for i in 0..text.len() - 1 {
            let mut damaged = text.clone().into_bytes();
            damaged[i] ^= 1;
            let damaged = String::from_utf8(damaged).expect("ASCII");
            assert_eq!(parse(&damaged, header), None, "byte {i}");
            assert_eq!(parse(&text[..i], header), None, "cut at {i}");
        }
    }
}
