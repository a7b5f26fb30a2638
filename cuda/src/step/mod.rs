//! One step on the device: what the host tells it in one copy, the launches, and what comes back in one.
//!
//! - Comes in: the rows of a batch, with what is asked for each.
//! - Goes out: an output for each request, in their order, once the step is waited for; meanwhile the next may be under way.
//! - Must not happen: an allocation of the device; a copy for each row; full rows of logits on the host unless they were
//!   asked for or no kernel draws from them.

mod by_host;
mod captured;
mod given;
mod histories;
mod layout;
mod lists;
mod masses;
mod outputs;
mod programs;
mod returned;
mod row;
mod slots;
mod steps;
mod taps;
mod whole;
mod words;

pub(crate) use given::given_bytes;
pub(crate) use histories::N_COPIED_PAGES;
pub(crate) use layout::{Count, Dims, Layout, N_SLOTS, Steers};
pub(crate) use lists::StepLists;
pub(crate) use outputs::{Group, MASK_BYTES_MAX, N_SCORES_MAX, N_TOP_ENTRIES_MAX, Room};
pub(crate) use returned::{Place, Returned, ReturnedStarts};
pub(crate) use row::StepRow;
pub(crate) use slots::Slots;
pub(crate) use steps::{InFlight, LATE_MASK_BYTES_MAX, StepLimits, Steps};
pub(crate) use whole::whole_bytes;

#[cfg(test)]
mod program_tests;
#[cfg(test)]
mod tests;
