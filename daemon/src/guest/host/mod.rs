//! The host API: what guests call.
//!
//! One file for each interface of the package in `wit/`, with the traits that the bindings demand. What a handle of a guest
//! stands for is in `types`, how errors and values of the engine look to a guest in `convert`.
//!
//! - Comes in: one call at a time of one guest, from the linker. Every call passes `taped` first: there it is recorded with
//!   its answer (`values`), or answered from a recording without being made.
//! - Goes out: operations of the engine in the guest's name, on its account; the answer, or an error that the guest can act on,
//!   with the value and the limit. A call that waits suspends the guest's fiber and holds no thread.
//! - `streams`, `generate`, `generations` and `speculation` are built on the same runs of the engine; `mixtures`, `beams` and `looks` add what
//!   is drawn together, searched for, or looked at beside. `v0_1` is the API of components that were made before.
//! - Must not happen: a mistake of the guest that ends in a panic or, where the types can express it, in a trap; work whose
//!   time grows with what a guest passes on the threads that guests share, beyond a short one; memory kept for a guest that
//!   no account or limit of it covers; a function that a recording does not see; something of another guest behind a handle.

mod beams;
mod constraints;
mod contexts;
mod convert;
mod decoding;
mod generate;
mod generations;
mod looks;
mod mixtures;
mod models;
mod paid;
mod parts;
pub(crate) mod programs;
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
