//! What can be wrong with the files of a model.

use std::io;

/// Why a model cannot be used. `file` is a path, or a bare file name when the model is embedded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The path is neither a folder nor a file.
    #[error("{path}: neither a folder in the Hugging Face layout nor a GGUF file")]
    NotAFolder {
        /// The path that was asked for.
        path: String,
    },
    /// A file that every model has is not there.
    #[error("{file}: no such file; expected {expected}")]
    MissingFile {
        /// The file.
        file: String,
        /// What a model needs instead of nothing.
        expected: &'static str,
    },
    /// The operating system refused.
    #[error("{file}: {source}")]
    Io {
        /// The file.
        file: String,
        /// The reason.
        source: io::Error,
    },
    /// A text file or header is larger than any honest one.
    #[error("{file}: {found_bytes} bytes, more than the limit of {limit_bytes}")]
    TooLarge {
        /// The file.
        file: String,
        /// Its size, or the size it claims.
        found_bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// The text is not JSON, or not UTF-8.
    #[error("{file}: not valid: {reason}")]
    Syntax {
        /// The file.
        file: String,
        /// What the parser said, with line and column.
        reason: String,
    },
    /// A field is missing, has the wrong type, or a value that cannot be.
    #[error("{file}: {field} is {found}; expected {expected}")]
    Field {
        /// The file.
        file: String,
        /// The field, with dots between levels.
        field: String,
        /// Its value as JSON, or `missing`.
        found: String,
        /// What is allowed.
        expected: String,
    },
    /// A weights file ends before or after its header says.
    #[error("{file}: {found_bytes} bytes long; its header expects {expected_bytes}")]
    FileLength {
        /// The file.
        file: String,
        /// Length by the header.
        expected_bytes: u64,
        /// Length on disk.
        found_bytes: u64,
    },
    /// A safetensors header is broken.
    #[error("{file}: safetensors header: {reason}")]
    Header {
        /// The file.
        file: String,
        /// What is wrong.
        reason: String,
    },
    /// The header of a GGUF file is broken, or says of tensors what cannot be.
    #[error("{file}: GGUF header: {reason}")]
    GgufHeader {
        /// The file.
        file: String,
        /// What is wrong.
        reason: String,
    },
    /// A tensor is stored in a type that is not read.
    #[error("{file}: tensor {tensor} is {found}; expected {expected}")]
    TensorDtype {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// Its element type.
        found: String,
        /// The types that are read.
        expected: &'static str,
    },
    /// Two shards hold a tensor of the same name.
    #[error("tensor {tensor} is in both {first_file} and {second_file}; expected it once")]
    DuplicateTensor {
        /// The tensor.
        tensor: String,
        /// One file.
        first_file: String,
        /// The other.
        second_file: String,
    },
    /// The index puts a tensor in a shard that does not hold it.
    #[error("{index_file}: places tensor {tensor} in {shard_file}, which does not hold it")]
    NotInShard {
        /// The index.
        index_file: String,
        /// The tensor.
        tensor: String,
        /// The shard.
        shard_file: String,
    },
    /// A tensor that the config calls for is not there.
    #[error("{file}: no tensor {tensor}; expected it with shape {expected:?}")]
    MissingTensor {
        /// The weights file, or the index of several.
        file: String,
        /// The tensor.
        tensor: String,
        /// The shape that the config asks for.
        expected: Vec<usize>,
    },
    /// A tensor was asked for that the files do not hold.
    #[error("{file}: no tensor {tensor}")]
    UnknownTensor {
        /// The weights file, or the index of several.
        file: String,
        /// The tensor.
        tensor: String,
    },
    /// A tensor has another shape than the config says.
    #[error("{file}: tensor {tensor} has shape {found:?}; the config expects {expected:?}")]
    TensorShape {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// The shape that the config asks for.
        expected: Vec<usize>,
        /// The shape in the file.
        found: Vec<usize>,
    },
    /// A tensor is there that has no place in the model of the config.
    #[error(
        "{file}: tensor {tensor} with shape {found:?} has no place in the model that its configuration describes; expected none"
    )]
    UnexpectedTensor {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// The shape in the file.
        found: Vec<usize>,
    },
    /// `tokenizer.json` cannot be used.
    #[error("{file}: {reason}")]
    Tokenizer {
        /// The file.
        file: String,
        /// What the tokenizer library said.
        reason: String,
    },
    /// The tokenizer knows tokens for which the model has no embedding.
    #[error("{file}: token {token} is past the model's vocabulary; expected every token below {vocab_size}")]
    Vocabulary {
        /// The file.
        file: String,
        /// The highest token.
        token: u32,
        /// `vocab_size` of `config.json`.
        vocab_size: usize,
    },
    /// The chat template does not compile.
    #[error("{file}: chat template: {reason}")]
    Template {
        /// The file.
        file: String,
        /// What the template engine said.
        reason: String,
    },
}
