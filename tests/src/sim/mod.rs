//! Deterministic simulation: daemon, scheduler, sessions and clients on one thread, in virtual time, with faults.
//!
//! - Comes in: a seed (`scene` says what follows from it, `draws` how).
//! - Goes out: an [`Outcome`]: the trace of all events as a digest, faults by kind, and the first thing that must not be.
//! - What is real: the engine's core with its inbox, scheduler, pages, prefix cache, runs, budgets and accounts
//!   ([`EngineLoop`](trellis_engine::fuzzing::EngineLoop) is the loop without its thread); contexts as the host API has them;
//!   the sessions with their protocol, credit, uploads, cancels, detached guests and shutdown; the accounts of sessions, users and
//!   the daemon; the client library.
//! - What is simulated: time; the device (`device`), which answers from the pages that it is told to read, and fails; the network
//!   (`network`); guests (`guest`), which follow a `script` in the place of wasm; the `service` between sessions and engine.
//! - What it is held against: `naive`, which knows the tokens of a context and nothing else. `clients` and `raw` clients compare
//!   what they are sent, guests what they are answered, `wiretap` reads connections again, `world` looks at what is left.
//! - Must not happen: anything in a scene that does not follow from its seed. Nothing here asks the machine for the time, for
//!   random numbers, for the order of a hash table or for another thread. Two processes give the same traces, byte for byte.
//!
//! Time is that of tokio's runtime of one thread with its clock paused: it stands still while any task can go on, and jumps to the
//! next timer when none can. Its timers count whole milliseconds. The order of tasks is the order in which they were woken, and
//! scenes vary it by delays. `turmoil` simulates hosts and their TCP, of which there are none here; `madsim` replaces tokio by a
//! runtime that also draws the order of tasks, and with it every dependency that names tokio. Both would be one dependency more for
//! what a paused clock, one sequence of random numbers for each part and streams in memory do in some hundred lines.
//!
//! What has to hold in every scene: a request ends once, and says nothing after that; whatever a client is sent is what the naive
//! model says, in order, without holes, and all of it where the request ends well; no error but one that a fault of the scene
//! allows; no output without credit; no budget passed; all clients come to their ends within a bound of virtual time; once they are
//! gone, sessions end, and no context, page, byte, caller, mailbox or upload is left; the page tables agree with the contexts,
//! between any two turns. Over however many connections a detached guest is read, what comes is what it has sent, once and in
//! order (`detached`).
//!
//! That this is seen when it does not hold is shown by mistakes that the simulated parts make when they are told to
//! ([`Mutation`]); each is noticed within so many seeds from 0 on:
//!
//! | mistake | first noticed in seed | by |
//! |---|---|---|
//! | `wrong-token` | 14 | the guest's answer |
//! | `forgotten-copy` | 0 | the guest's answer |
//! | `lost-swap` | 0 | the guest's answer |
//! | `unsaid-error` | 0 | the guest's answer |
//! | `doubled-bytes` | 5 | the bound of virtual time |
//! | `lost-bytes` | 0 | the bound of virtual time |
//! | `leaked-context` | 3 | what the engine holds in the end |
//! | `lost-end` | 4 | guests that are left |
//! | `doubled-output` | 0 | what the client is sent |
//! | `lost-step` | 7 | the bound of virtual time |
//! | `lost-bytes-of-host` | 30 | accounts in the end |
//! | `forgotten-session` | 6 | sessions that are left |
//! | `forgotten-event` | 19 | the next reading of a detached guest |
//!
//! `cargo run --release -p trellis-tests --bin simulate` plays many seeds, `-- --seed N --trace` shows one. A seed says the same
//! as long as nothing that it draws from changes: seeds that once found something are kept in the test, and what they found has
//! a test of its own where it lies.

mod clients;
mod detached;
mod device;
mod draws;
mod guest;
mod lines;
mod mutation;
mod naive;
mod network;
mod notes;
mod raw;
mod run;
mod scene;
mod script;
mod service;
mod wiretap;
mod world;

pub use mutation::Mutation;
pub use notes::{Fault, Tally};
pub use run::{Outcome, Summary, run, run_all};
