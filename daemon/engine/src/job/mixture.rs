//! Runs whose draws take the logits of other contexts into account, which get the tokens too.
//!
//! The first member of a mixture has the run; this is what is wanted of the others.

use super::Membership;
use crate::completion::Tag;

/// A context whose logits are mixed into the draws of another, and that gets what is drawn.
#[derive(Debug)]
pub(crate) struct MixedWork {
    pub(crate) member: Membership,
    pub(super) tag: Tag,
}

impl MixedWork {
    /// A part in the run of this tag.
    pub(crate) fn new(member: Membership, tag: Tag) -> Self {
        Self { member, tag }
    }
}

/// What the run of a mixture's first member has besides those of others.
#[derive(Debug)]
pub(crate) struct Mixture {
    pub(crate) member: Membership,
    pub(crate) n_others: usize,
}
