//! Jobs over several contexts, whose last tokens get their rows once all are there: those of a mixture in one step, those of
//! draws and searches in one if there is room.
//!
//! What leads up to the last token of each is an ordinary prompt. This is a member's part; the job itself is the
//! scheduler's.

use std::sync::Arc;

use crate::completion::Tag;
use crate::sampling::{Sampler, TokenMask};

/// Tells the jobs over several contexts apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct JobId(pub(crate) u64);

/// A context's part in a job.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Membership {
    pub(crate) job: JobId,
    pub(crate) stage: Stage,
    /// Blocks from the first on for which it needs no pages: it holds them, or finds them with another member that holds
    /// them, or computes them before it.
    pub(crate) n_blocks_found: usize,
}

impl Membership {
    /// In a job that begins.
    pub(crate) fn new(job: JobId) -> Self {
        Self { job, stage: Stage::LeadsUp, n_blocks_found: 0 }
    }
}

/// What is asked after each member.
#[derive(Debug)]
pub(crate) struct JointWork {
    pub(crate) member: Membership,
    pub(super) wanted: Wanted,
    pub(super) tag: Tag,
}

/// What a row of a member is for.
#[derive(Clone, Debug)]
pub(crate) enum Wanted {
    /// A draw.
    Draw(Arc<Sampler>),
    /// The candidates of a beam search: of the model's own probabilities.
    Top { n: usize },
    /// Of what a sampler and a mask make of them.
    Ranked { sampler: Arc<Sampler>, within: Option<Arc<TokenMask>>, n: usize },
}

/// How far a member is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// It computes what comes before its last token, or has, and waits for the others.
    LeadsUp,
    /// Its last token has a row, or what is drawn next will have. Where others of a draw or a search have yet to get theirs, it
    /// leads up again once that is taken in.
    Rides,
}

impl JointWork {
    pub(crate) fn new(member: Membership, wanted: Wanted, tag: Tag) -> Self {
        Self { member, wanted, tag }
    }
}
