//! The KV cache as the scheduler sees it: which blocks hold the keys and values of which tokens, which contexts hold them,
//! where they are, and under which key the prefix cache can give them again.
//!
//! `evictions` says which tokens of a context are gone and where the others stand, `cells` where they lie.
//!
//! In come holders and what they computed; out go pages, moves and room. Nothing here touches the memory of a page:
//! that is a backend's.

mod bundles;
mod cells;
mod evictions;
mod footprint;
mod free_pages;
mod holders;
mod pages;
mod prefix;
mod sequence;
mod shared;
mod tokens;

pub(crate) use evictions::Evictions;
pub use evictions::{N_STRETCHES_MAX, Positions};
pub(crate) use footprint::Footprint;
pub(crate) use pages::{BlockId, PageTable};
pub(crate) use prefix::PrefixKey;
pub use prefix::PrefixScope;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use sequence::Holdings;
pub(crate) use sequence::{Sequence, Told};
pub(crate) use tokens::{SegmentId, TokenStore};

/// The lengths of what contexts with a common beginning share as a whole.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SegmentLengths {
    /// Tokens that lie together. It is also what a context holds at least, and what its memory is charged in.
    pub(crate) n_tokens: usize,
    /// Blocks that are held together.
    pub(crate) n_bundle_blocks: usize,
}

impl Default for SegmentLengths {
    /// A fork of 131,072 tokens counts 512 and 64 of them.
    fn default() -> Self {
        Self { n_tokens: footprint::N_TOKENS_TOGETHER, n_bundle_blocks: 128 }
    }
}
