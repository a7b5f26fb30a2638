//! The Trellis engine: model files, tokenizer, KV pages, scheduling, sampling and the CPU backend.
//!
//! The crate knows nothing about wasm, sockets or users' files beyond a model folder. The page table, the
//! scheduler and the sampling definitions do no I/O, read no clock and draw no randomness of their own.

pub mod account;
mod archive;
pub mod asked;
pub mod backend;
pub mod batch;
mod causes;
mod command;
mod completion;
pub mod constraint;
mod context;
pub mod cpu;
mod engine;
mod error;
pub mod fair;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod guess;
mod handle;
mod history;
mod job;
mod kept;
mod kv;
mod mailbox;
mod mask_threads;
pub mod model;
mod model_handle;
mod observed;
mod operator;
mod port;
pub mod remote;
mod run;
mod run_stats;
pub mod sampling;
mod scheduler;
mod segments;
mod stats;
mod steering;
mod violation;

pub use archive::{Archive, Kept, SavedContext, SavedHead, SavedName, Taken, Wanted};
pub use causes::{Cause, Causes};
pub use command::{
    Ahead, Answer, Ask, MaskSource, N_ATTENTION_TOKENS_MAX, N_ENTRIES_PER_TOKEN, Pooling, RunSettings,
};
pub use context::{BeamSearch, Context, Pending, Pull, RunKey};
pub use engine::{Engine, EngineSettings, KvBounds, ModelFittings, OneModel};
pub use error::{EngineError, EngineFailure};
pub use guess::{Guess, GuessNode, GuessTree, GuessTreeError, N_GUESS_MAX, N_TREE_NODES_MAX};
pub use handle::{EngineState, EngineWatch};
pub use kept::{KeptRow, RowName};
pub use kv::{N_STRETCHES_MAX, Positions, PrefixScope};
pub use model_handle::{ModelHandle, ModelLease};
pub use observed::Distribution;
pub use port::Port;
pub use run::Finish;
pub use run_stats::{RunEnd, RunStats};
pub use stats::EngineStats;
pub use steering::{Steered, Steering, SteeringError};
