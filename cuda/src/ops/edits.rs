//! Words that a step brings along, put where they stay: entries of page tables, and tokens beside their pages.

use super::common::expect;
use crate::driver::params;
use crate::{CudaError, Kernel, Launch, Module, Plain, Pointer, Slice, Source, Stream};

/// Threads of a block. Most edits are an entry or two, or the tokens of a page.
const N_THREADS: u32 = 64;

/// Words of an edit at most, so that a long table is copied by several blocks.
pub const N_WORDS_MAX: usize = 1024;

/// Words of an [`Edit`].
pub const EDIT_WORDS: usize = 4;

/// What an edit writes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Target(u32);

impl Target {
    /// The memory of steps, where the page tables lie.
    pub const MEMORY: Self = Self(0);
    /// The tokens of the pages.
    pub const PAGE_TOKENS: Self = Self(1);
}

/// The kernel's source.
#[must_use]
pub fn source() -> Source {
    Source::new("edits.cu", include_str!("edits.cu"))
        .with("N_THREADS", N_THREADS)
        .with("INTO_PAGE_TOKENS", Target::PAGE_TOKENS.0)
}

/// Words that go elsewhere, as the kernel reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Edit {
    /// First word of the step's memory.
    pub from: u32,
    /// First word that is written.
    pub to: u32,
    /// How many.
    pub n_words: u32,
    /// Of what.
    pub into: Target,
}

const _: () = assert!(size_of::<Edit>() == 4 * EDIT_WORDS);
// SAFETY: four fields of 4 bytes without padding, all of which take any bits.
unsafe impl Plain for Edit {}

/// As in `edits.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct EditParams {
    memory: Pointer,
    page_tokens: Pointer,
    edits: Pointer,
}
params!(EditParams, 24);

/// Makes edits; see `edits.cu`.
#[derive(Clone, Debug)]
pub struct Edits {
    kernel: Kernel<EditParams>,
}

impl Edits {
    /// Finds the kernel in the module of [`source`].
    ///
    /// # Errors
    /// The driver refused.
    pub fn new(module: &Module) -> Result<Self, CudaError> {
        Ok(Self { kernel: module.kernel("edit")? })
    }

    /// Makes `n_edits` edits. Every word that one names lies in the memory, or among the tokens; none is written twice, none
    /// both read and written.
    ///
    /// # Errors
    /// The driver refused the launch.
    ///
    /// # Panics
    /// The list is too short or not aligned.
    pub fn run(
        &self,
        stream: &Stream,
        n_edits: usize,
        edits: Slice,       // [n_edits]
        memory: Slice,      // words
        page_tokens: Slice, // i32 [n_pages, PAGE_LEN]
    ) -> Result<(), CudaError> {
        if n_edits == 0 {
            return Ok(());
        }
        expect("edits", edits, n_edits, size_of::<Edit>());
        let params =
            EditParams { memory: memory.into(), page_tokens: page_tokens.into(), edits: edits.into() };
        let launch = Launch { grid: (n_edits as u32, 1, 1), block: (N_THREADS, 1, 1), shared_bytes: 0 };
        // SAFETY: the list's length was checked above; the caller keeps what it names inside.
        unsafe { launch.run(stream, &self.kernel, &params) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::common::check::*;
    use crate::testing::{Random, gpu};

    #[test]
    fn compiles() {
        assert_compiles(source());
    }

    #[test]
    fn words_go_where_they_stay() {
        let Some(test) = gpu() else { return };
        let kernel = Edits::new(&test.module(source())).expect("the kernel");
        let mut random = Random(12);
        for n_edits in [1, 7, 300] {
            // The first half of the memory is read, the second written.
            let half = n_edits * N_WORDS_MAX;
            let mut memory: Vec<u32> = (0..2 * half).map(|_| random.next() as u32).collect();
            let mut tokens = vec![0u32; half];
            let mut edit = |idx: usize| {
                let n_words = [1, 16, N_WORDS_MAX, 1 + random.below(N_WORDS_MAX)][random.below(4)];
                let spare = N_WORDS_MAX - n_words;
                let into = if random.below(2) == 0 { Target::MEMORY } else { Target::PAGE_TOKENS };
                let start = if into == Target::MEMORY { half } else { 0 };
                Edit {
                    from: (idx * N_WORDS_MAX + random.below(spare + 1)) as u32,
                    to: (start + (n_edits - 1 - idx) * N_WORDS_MAX + random.below(spare + 1)) as u32,
                    n_words: n_words as u32,
                    into,
                }
            };
            let edits: Vec<Edit> = (0..n_edits).map(&mut edit).collect();
            let (d_memory, d_tokens) = (upload(&test, &memory), upload(&test, &tokens));
            let d_edits = upload(&test, &edits);
            kernel
                .run(&test.stream, n_edits, d_edits.slice(), d_memory.slice(), d_tokens.slice())
                .expect("a launch");
            for Edit { from, to, n_words, into } in edits {
                let words = memory[from as usize..][..n_words as usize].to_vec();
                let into = if into == Target::MEMORY { &mut memory } else { &mut tokens };
                into[to as usize..][..words.len()].copy_from_slice(&words);
            }
            assert!(download(&test, d_memory.slice(), memory.len(), 0u32) == memory, "{n_edits} edits");
            assert!(download(&test, d_tokens.slice(), tokens.len(), 0u32) == tokens, "{n_edits} edits");
        }
    }
}
