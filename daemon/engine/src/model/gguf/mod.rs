//! Models in one GGUF file, as llama.cpp has them.
//!
//! - Comes in: an opened file (`header`: its keys and where its tensors are).
//! - Goes out: what a folder has in several files: the config (`config`), the tokenizer in the form of the `tokenizers` library
//!   (`vocabulary`, `pre`, `ends`), the chat template, and a checkpoint whose tensors have the names, the order and the types of
//!   transformers (`names`, `read`, `blocks`), so that nothing behind it knows of GGUF.
//! - Must not happen: a header that is believed; a tensor in memory; a type that is read as another one.

mod blocks;
mod config;
mod ends;
mod header;
mod names;
mod pre;
mod read;
mod summary;
mod vocabulary;

use super::checkpoint::{Checkpoint, TensorInfo};
use super::config::{Architecture, ModelConfig};
use super::error::ModelError;
use super::fields::Fields;
use super::source::RangeFile;
use super::tensors;
use header::{Header, HeaderError, Tensor};
use read::Rows;
use vocabulary::Vocabulary;

pub(super) use blocks::Encoding;
pub(super) use read::{Rows as RowOrder, Stored};
pub(super) use summary::summary;

/// Headers are mostly vocabulary: published ones are below 20 MB.
const HEADER_BYTES_MAX: u64 = 256 << 20;
/// What is read of a file at first; most headers need a few times as much.
const HEADER_BYTES_FIRST: u64 = 1 << 20;
const TEMPLATE_BYTES_MAX: usize = 4 << 20;

const ROPE_DIVISORS: &str = "rope_freqs.weight";
const EMBEDDING: &str = "token_embd.weight";

/// What a file has of a model.
pub(super) struct Opened {
    pub(super) config: ModelConfig,
    pub(super) checkpoint: Checkpoint,
    pub(super) vocabulary: Vocabulary,
    pub(super) chat_template: Option<String>,
}

/// Opens the model of a file; `name` is its path, for errors.
///
/// # Errors
/// [`ModelError`] naming the file, what was expected in it and what was found.
pub(super) fn open(name: &str, file: RangeFile, n_file_bytes: u64) -> Result<Opened, ModelError> {
    let stamp = file.stamp().map_err(|source| ModelError::Io { file: name.to_owned(), source })?;
    let bytes = header_bytes(name, &file, n_file_bytes)?;
    let header = parse(name, &bytes)?;
    let map = header.fields();
    let fields = Fields::new(name, &map);
    if fields.count("split.count", 0, usize::MAX)?.is_some_and(|n| n > 1) {
        let expected = "1: put the parts together with `llama-gguf-split --merge`";
        return Err(fields.error("split.count", expected));
    }
    let (_, architecture) = config::architecture(&fields)?;
    let stored = stored_tensors(name, &header, n_file_bytes)?;
    let find = |wanted: &str| stored.iter().find(|(tensor, _)| tensor.name == wanted);
    let divisors = match find(ROPE_DIVISORS) {
        Some((tensor, stored)) => Some(read_divisors(name, &file, tensor, stored)?),
        None => None,
    };
    let vocabulary = vocabulary::vocabulary(&header, &fields)?;
    let facts = config::Facts {
        vocab_size: match find(EMBEDDING) {
            Some((tensor, _)) => tensor.shape.first().copied().unwrap_or(0),
            None => header.n_tokens(),
        },
        has: &|wanted| find(wanted).is_some(),
        divisors,
    };
    // What the config has of them is in no tensor that a decoder reads.
    let mut contents = blake3::Hasher::new();
    contents.update(&bytes[..header.n_bytes]);
    for divisor in facts.divisors.iter().flatten() {
        contents.update(&divisor.to_le_bytes());
    }
    let config = config::config(&fields, facts)?;
    if header.n_tokens() > config.vocab_size {
        let (token, vocab_size) = (header.n_tokens() as u32 - 1, config.vocab_size);
        return Err(ModelError::Vocabulary { file: name.to_owned(), token, vocab_size });
    }
    let tensors =
        stored.into_iter().filter(|(tensor, _)| tensor.name != ROPE_DIVISORS).map(|(tensor, mut stored)| {
            let own_name = names::transformers_name(tensor.name).unwrap_or_else(|| tensor.name.to_owned());
            stored.rows = rows_of(architecture, &config, &own_name, tensor);
            (own_name, TensorInfo::stored(tensor.shape.clone(), tensor.n_elements as usize, stored))
        });
    let checkpoint = Checkpoint::of_file(name, file, n_file_bytes, contents.finalize(), stamp, tensors)?;
    tensors::check(&config, &checkpoint)?;
    let chat_template = fields.text("tokenizer.chat_template")?.map(str::to_owned);
    if chat_template.as_ref().is_some_and(|template| template.len() > TEMPLATE_BYTES_MAX) {
        return Err(fields.error("tokenizer.chat_template", format!("at most {TEMPLATE_BYTES_MAX} bytes")));
    }
    Ok(Opened { config, checkpoint, vocabulary, chat_template })
}

/// The first bytes of a file, with its whole header among them.
fn header_bytes(name: &str, file: &RangeFile, n_file_bytes: u64) -> Result<Vec<u8>, ModelError> {
    let mut bytes: Vec<u8> = Vec::new();
    let mut wanted = HEADER_BYTES_FIRST;
    loop {
        let n_bytes = wanted.min(n_file_bytes).min(HEADER_BYTES_MAX);
        let n_read = bytes.len();
        bytes.resize(n_bytes as usize, 0);
        file.read_exact_at(&mut bytes[n_read..], n_read as u64)
            .map_err(|source| ModelError::Io { file: name.to_owned(), source })?;
        match Header::parse(&bytes) {
            Err(HeaderError::Ends) if n_bytes < n_file_bytes.min(HEADER_BYTES_MAX) => wanted *= 4,
            Err(HeaderError::Ends) if n_bytes < n_file_bytes => {
                let reason = format!("longer than {HEADER_BYTES_MAX} bytes");
                return Err(ModelError::GgufHeader { file: name.to_owned(), reason });
            }
            // What is wrong with it, whoever asks for it says.
            _ => return Ok(bytes),
        }
    }
}

fn parse<'a>(name: &str, bytes: &'a [u8]) -> Result<Header<'a>, ModelError> {
    Header::parse(bytes).map_err(|error| {
        let reason = match error {
            HeaderError::Ends => {
                format!("it goes on behind the end of the file, which has {} bytes", bytes.len())
            }
            HeaderError::Broken(reason) => reason,
        };
        ModelError::GgufHeader { file: name.to_owned(), reason }
    })
}

/// Where each tensor lies. One stands behind the other, so that no byte of a file counts twice.
fn stored_tensors<'h, 'a>(
    name: &str,
    header: &'h Header<'a>,
    n_file_bytes: u64,
) -> Result<Vec<(&'h Tensor<'a>, Stored)>, ModelError> {
    let broken = |reason: String| ModelError::GgufHeader { file: name.to_owned(), reason };
    let (mut all, mut end) = (Vec::with_capacity(header.tensors.len()), 0_u64);
    for tensor in &header.tensors {
        let encoding = Encoding::of(tensor.type_id).ok_or_else(|| ModelError::TensorDtype {
            file: name.to_owned(),
            tensor: tensor.name.to_owned(),
            found: blocks::type_name(tensor.type_id),
            expected: blocks::READ,
        })?;
        let row_len = tensor.shape.last().copied().unwrap_or(1);
        // A vector is read an element at a time where a projection's rows are put in another order.
        if encoding.block_len() > 1 && tensor.shape.len() < 2 {
            let type_name = encoding.name();
            return Err(broken(format!("tensor {:?} is a vector of {type_name}; expected F32", tensor.name)));
        }
        if !row_len.is_multiple_of(encoding.block_len()) {
            let (type_name, block_len) = (encoding.name(), encoding.block_len());
            let reason = format!(
                "tensor {:?} is {type_name} with rows of {row_len}; expected a multiple of {block_len}",
                tensor.name
            );
            return Err(broken(reason));
        }
        let expected = end.next_multiple_of(header.alignment);
        if tensor.offset != expected {
            let reason =
                format!("tensor {:?} begins at byte {}; expected {expected}", tensor.name, tensor.offset);
            return Err(broken(reason));
        }
        let n_bytes = tensor.n_elements / encoding.block_len() as u64 * encoding.block_bytes() as u64;
        let past = || broken(format!("tensor {:?} ends behind the largest file", tensor.name));
        end = expected.checked_add(n_bytes).filter(|end| *end < 1 << 62).ok_or_else(past)?;
        let offset = header.data_offset + tensor.offset;
        all.push((tensor, Stored { offset, encoding, rows: Rows::AsStored }));
    }
    let expected_bytes = header.data_offset + end;
    if n_file_bytes < expected_bytes {
        return Err(ModelError::FileLength {
            file: name.to_owned(),
            expected_bytes,
            found_bytes: n_file_bytes,
        });
    }
    Ok(all)
}

/// The order in which a tensor's rows are read: with `llama`, ggml rotates neighbours.
fn rows_of(architecture: Architecture, config: &ModelConfig, name: &str, tensor: &Tensor) -> Rows {
    const ROTATED: [&str; 2] = [".self_attn.q_proj.", ".self_attn.k_proj."];
    let is_rotated = architecture == Architecture::Llama && ROTATED.iter().any(|part| name.contains(part));
    let row_len = tensor.shape.get(1).copied().unwrap_or(1);
    match tensor.shape.first() {
        Some(n_rows) if is_rotated && n_rows.is_multiple_of(config.head_dim) && row_len > 0 => {
            Rows::ByHalves { head_dim: config.head_dim, row_len }
        }
        _ => Rows::AsStored,
    }
}

/// `rope_freqs.weight`: one number for each pair of a head.
fn read_divisors(
    name: &str,
    file: &RangeFile,
    tensor: &Tensor,
    stored: &Stored,
) -> Result<Vec<f32>, ModelError> {
    const N_MOST: u64 = 1 << 10;
    let is_plain = stored.encoding == Encoding::Plain(super::checkpoint::Dtype::F32);
    if !is_plain || tensor.n_elements > N_MOST {
        let reason = format!(
            "tensor {ROPE_DIVISORS:?} has {} elements; expected at most {N_MOST} of F32",
            tensor.n_elements
        );
        return Err(ModelError::GgufHeader { file: name.to_owned(), reason });
    }
    let mut bytes = vec![0; 4 * tensor.n_elements as usize];
    stored.read(file, 0, &mut bytes).map_err(|source| ModelError::Io { file: name.to_owned(), source })?;
    Ok(bytes.as_chunks::<4>().0.iter().map(|four| f32::from_le_bytes(*four)).collect())
}
