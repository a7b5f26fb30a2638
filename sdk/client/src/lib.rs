//! Client of the Trellis daemon.
//!
//! ```no_run
//! # async fn example() -> Result<(), trellis_client::Error> {
//! use trellis_client::{Client, Event, Program, StartOptions};
//!
//! let client = Client::connect().await?;
//! let options = StartOptions { arguments: vec!["What is 37 + 48?".into()], ..StartOptions::default() };
//! let component = std::fs::read("chat.wasm").expect("trellis build chat -o chat.wasm");
//! let mut guest = client.start(Program::wasm(component), options).await?;
//! while let Some(event) = guest.next().await {
//!     if let Event::Text { text } = event? {
//!         print!("{text}");
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! A guest that is started with [`Client::start_detached`] goes on without its connection; [`Client::attach`] reads it, and
//! [`Resumed`] goes on reading over connections that are lost.
//!
//! Every request is cancelled when its future, or its [`Guest`], is dropped. All types work over any stream of bytes,
//! see [`Client::over`]; they need a running tokio runtime.

mod attached;
mod calls;
mod client;
mod connection;
mod error;
mod guest;
mod holder;
mod launch;
pub mod lock;
mod program;
mod resumed;
pub mod signs;
pub mod socket;
mod starts;
mod tried;
mod upload;

pub use attached::Attached;
pub use client::Client;
pub use error::{Error, Lost, Tried};
pub use guest::{Guest, GuestSender};
pub use program::{Program, StartOptions};
pub use resumed::Resumed;
pub use trellis_wire::{
    Causes, ClassInfo, ComponentHash, Computed, DaemonInfo, DeviceInfo, ErrorBody, ErrorCode, Event,
    FailureInfo, FitInfo, GuestAmounts, GuestInfo, GuestUsage, LimitInfo, LoadingInfo, LogLevel, LogLines,
    ModelInfo, ReloadInfo, SettingChange, Stage, UpgradeInfo,
};
