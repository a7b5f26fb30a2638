//! One step as the device sees it: what the host tells it in one copy, and what it answers in one.

mod answer;
mod layout;
mod outputs;
mod plan;
mod row;

pub(crate) use answer::{Answers, Place};
pub(crate) use layout::{Count, Dims, Layout, N_SLOTS};
pub(crate) use outputs::{Group, N_SCORES_MAX, N_TOP_ENTRIES_MAX, Room};
pub(crate) use plan::StepPlan;
pub(crate) use row::StepRow;

#[cfg(test)]
mod tests;
