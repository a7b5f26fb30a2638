//! What the tests share: attacks, engines on the device under test, golden data, guests built from source, daemons, fuzzers,
//! scenes in virtual time, what policies gain, a registry of OCI artifacts.

pub mod attacks;
pub mod builds;
pub mod daemons;
pub mod device;
pub mod engines;
pub mod faulty;
pub mod fuzz;
#[path = "../../daemon/engine/tests/gguf/files/mod.rs"]
pub mod gguf;
pub mod goldens;
pub mod guests;
pub mod guide;
pub mod held;
pub mod models;
pub mod pack;
pub mod policies;
pub mod registry;
pub mod sim;
pub mod terminal;
