//! The Trellis daemon: guests, sessions and the socket around the engine.

mod accounts;
mod allocator;
pub mod bundled;
mod checkout;
mod classes;
pub mod cli;
pub mod config;
mod cores;
pub mod daemon;
mod descriptors;
mod device;
mod directory;
mod files;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod groups;
pub mod guest;
mod http;
mod hub;
pub mod ipc;
#[cfg(target_os = "linux")]
pub mod isolation;
mod leaving;
pub mod limits;
mod live;
mod loader;
mod logs;
mod machine;
pub mod metrics;
mod models;
mod nearest;
mod on_demand;
mod permissions;
#[cfg(target_os = "linux")]
mod pressure;
mod profile;
mod recording;
pub mod reload;
mod replay;
mod saved;
pub mod service;
pub mod session;
mod shares;
mod spawner;
mod start_check;
mod tasks;
mod thread_time;
mod totals;
mod upgrade;
mod user_places;
