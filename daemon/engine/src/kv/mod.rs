//! The KV cache as the scheduler sees it: which blocks hold the keys and values of which tokens, who holds them, where
//! they are, and under which key the prefix cache can give them again.
//!
//! In come holders and what they computed; out go pages, moves and room. Nothing here touches the memory of a page:
//! that is a backend's.

mod footprint;
mod pages;
mod prefix;
mod sequence;

pub(crate) use footprint::Footprint;
pub(crate) use pages::{BlockId, PageTable};
pub(crate) use prefix::PrefixKey;
pub use prefix::PrefixScope;
pub(crate) use sequence::Sequence;
