//! What the tests share: engines over the bundled models, golden data, guests built from source, daemons.

pub mod daemons;
pub mod engines;
pub mod goldens;
pub mod guests;
