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
pub(crate) mod types;

#[cfg(test)]
mod tests;
