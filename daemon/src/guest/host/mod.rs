//! The host API: what guests call.

mod beams;
mod constraints;
mod contexts;
mod convert;
mod decoding;
mod generate;
mod looks;
mod mixtures;
mod models;
mod programs;
mod samplers;
mod session;
mod speculation;
mod stop_texts;
mod streams;
mod taped;
pub(crate) mod types;
mod v0_1;
mod values;

pub(crate) use taped::{HasTape, Taped};
pub(crate) use v0_1::bindings::Guest as GuestV0_1;

#[cfg(test)]
mod tests;
