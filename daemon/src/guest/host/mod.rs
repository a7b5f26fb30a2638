//! The host API: what guests call.

mod contexts;
mod convert;
mod decoding;
mod generate;
mod models;
mod samplers;
mod session;
mod stop_strings;
mod streams;
mod taped;
pub(crate) mod types;
mod values;

pub(crate) use taped::{HasTape, Taped};

#[cfg(test)]
mod tests;
