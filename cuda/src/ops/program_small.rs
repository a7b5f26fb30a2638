//! Programs that neither select, nor add up rows, nor look at the history: elementwise operations, masks, biases, and what takes
//! the best of a row, draws, counts or adds up exponentials.
//!
//! Many of a guest's programs are such. They have kernels of their own, whose code is short, as it comes anew from memory in
//! every step: one for those that read their row once, in which any number of blocks share a row, since none waits for what
//! others have found; and one in clusters for the others.

use super::program::{N_PLAN, defined};
use super::program_code::{Code, Element, Entry, Root, code};
use super::program_plan::N_HEADER;
use crate::Source;

/// The text of a kernel of such programs: what all share, and its own file.
macro_rules! small_text {
    ($own:literal) => {
        concat!(
            super::program::shared_text!(),
            include_str!("program_numbers.cuh"),
            include_str!("program_tiles.cuh"),
            include_str!($own)
        )
    };
}
pub(super) use small_text;

/// Which kernels can run a program; each runs what those before it do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ProgramKind {
    /// It reads its row once, and takes the best of rows or draws.
    SinglePass,
    /// It reads its row several times, and neither selects, nor adds up rows, nor looks at the history.
    Passes,
    /// Any program.
    Any,
}

/// Rows that a program of one pass takes the best of, or draws from.
pub(super) const N_SINGLE_ROOTS: usize = 4;
/// Sources of noise.
const N_SOURCES: usize = 8;
/// Rows that are alive at once, besides the one that is being made and the logits.
const N_REGISTERS: usize = 3;

/// Code for the kernels of such programs, which make what all roots take by instructions, also those that are plain.
#[derive(Debug)]
pub(super) struct SmallCode {
    pub(super) entries: Vec<Entry>,
    n_passes: usize,
    /// Whether every pass so far takes the best of rows or draws, and of few.
    is_best: bool,
    /// Whether no step was found that these kernels do not take.
    fits: bool,
}

impl Default for SmallCode {
    fn default() -> Self {
        Self { entries: Vec::new(), n_passes: 0, is_best: true, fits: true }
    }
}

impl SmallCode {
    /// A step that they do not take.
    pub(super) fn refuse(&mut self) {
        self.fits = false;
    }

    /// The code of a pass over these roots, whose results are their slots; returns where it begins.
    pub(super) fn push_pass(&mut self, elements: &[Option<Element>], roots: &[Root]) -> u32 {
        let start = self.entries.len() as u32;
        let is_best = |root: &Root| matches!(root.code, Code::Best | Code::Draw);
        let is_small =
            |root: &Root| is_best(root) || matches!(root.code, Code::Count | Code::LogSumExp | Code::Entropy);
        self.n_passes += 1;
        self.is_best &= roots.len() <= N_SINGLE_ROOTS && roots.iter().all(is_best);
        match code(elements, roots) {
            Ok((entries, n_registers)) if n_registers <= N_REGISTERS && roots.iter().all(is_small) => {
                self.entries.extend(entries);
            }
            _ => self.refuse(),
        }
        start
    }

    /// Which kernels can run the program, of whose plan the rest is so long. Where it is any, there is no code.
    pub(super) fn finish(&mut self, n_steps: usize, n_code: usize, n_sources: usize) -> ProgramKind {
        let n_entries = N_HEADER + n_steps + n_code + self.entries.len() + n_sources;
        if !self.fits || self.n_passes == 0 || n_sources > N_SOURCES || n_entries > N_PLAN {
            self.entries.clear();
            return ProgramKind::Any;
        }
        if self.n_passes == 1 && self.is_best { ProgramKind::SinglePass } else { ProgramKind::Passes }
    }
}

/// What the kernels of such programs are compiled with.
pub(super) fn with_small(source: Source) -> Source {
    defined(source)
        .with("GROUPS", 2)
        .with("AT_ONCE", 1)
        .with("N_SMALL_SOURCES", N_SOURCES)
        .with("N_SMALL_REGISTERS", N_REGISTERS)
}

#[cfg(test)]
#[path = "program_small_tests.rs"]
mod tests;
