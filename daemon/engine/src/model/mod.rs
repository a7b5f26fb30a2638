//! Models: folders in the Hugging Face layout, and GGUF files.
//!
//! - Comes in: a [`ModelSource`], which is a folder, a file (`gguf`) or files that are part of the executable; or the name of a published
//!   [`shape()`], for random weights.
//! - Goes out: a [`Model`]: what the decoder looks like (`config`), its weights as ranges to be read (`checkpoint`,
//!   `generated`), text to tokens and back (`tokenizer`, `decode_stream`), messages to the tokens of a chat (`chat`), both in parts that may be given up (`yield_point`), and a
//!   fingerprint by which caches tell models apart. Or a [`ModelError`] with the file, what was expected in it and what was
//!   found.
//! - Files are checked once, on the way in, and against each other (`tensors`); what is made of them cannot be wrong any more.
//!   A file is data from a stranger: no length or offset in it is believed, none is read past its limit, and a template may
//!   neither run for ever nor pass a message's text for a special token (`shield`).
//! - Must not happen: weights in memory (a backend reads them, range by range, and nothing is mapped); a device, a KV page or
//!   a guest in here; a clock (the date of a template is passed in); a default that differs from that of transformers.

mod added_tokens;
mod chat;
mod chat_engine;
mod checkpoint;
mod config;
mod config_file;
mod date;
mod decode_stream;
mod error;
mod explain;
mod fields;
mod folder;
mod generated;
mod gguf;
mod merges;
mod one_word;
mod rope;
mod rope_file;
mod shape;
mod shield;
mod source;
pub mod tensors;
mod token_bytes;
mod tokenizer;
mod words;
mod yield_point;

pub use chat::{ChatError, ChatTemplate, GenerationPrompt, Message, Role};
pub use checkpoint::{Checkpoint, Dtype, TensorInfo};
pub use config::{Architecture, ModelConfig, RopeConfig, RopeScaling};
pub use date::Date;
pub use decode_stream::DecodeStream;
pub use error::ModelError;
pub use explain::{ModelFacts, TensorTypes};
pub use folder::{Model, ModelCard};
pub use rope::inverse_frequencies;
pub use shape::{SHAPES, shape};
pub use source::ModelSource;
pub use tokenizer::{EncodeError, SpecialText, SpecialTokens, Tokenizer};
pub use yield_point::{GivenUp, YieldPoint};
