//! Model folders in the Hugging Face layout.

mod added_tokens;
mod chat;
mod chat_engine;
mod checkpoint;
mod config;
mod config_file;
mod date;
mod decode_stream;
mod error;
mod fields;
mod folder;
mod generated;
mod rope;
mod rope_file;
mod shape;
mod shield;
mod source;
pub mod tensors;
mod token_bytes;
mod tokenizer;

pub use chat::{ChatError, ChatTemplate, GenerationPrompt, Message, Role};
pub use checkpoint::{Checkpoint, Dtype, TensorInfo};
pub use config::{Architecture, ModelConfig, RopeConfig, RopeScaling};
pub use date::Date;
pub use decode_stream::DecodeStream;
pub use error::ModelError;
pub use folder::Model;
pub use rope::inverse_frequencies;
pub use shape::{SHAPES, shape};
pub use source::ModelSource;
pub use tokenizer::{EncodeError, SpecialText, SpecialTokens, Tokenizer};
