//! What can be told of a model from its files before any weight is read, and also where it cannot be used.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::Value;

use super::error::ModelError;
use super::folder::{CONFIG, Model};
use super::gguf;
use super::source::ModelSource;

/// The largest `config.json` that is looked into.
const CONFIG_BYTES_MAX: u64 = 4 << 20;

/// What the files of a model say. What they do not say, or not in a way that is known, is left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelFacts {
    /// `GGUF`, or `safetensors` for a folder.
    pub format: &'static str,
    /// Bytes of the file, or of the folder's weights.
    pub n_bytes: u64,
    /// As the files name it.
    pub architecture: Option<String>,
    /// Elements of all tensors.
    pub n_parameters: u64,
    /// How they are stored; those of most elements first.
    pub types: Vec<TensorTypes>,
    /// The kind of tokenizer.
    pub tokenizer: Option<String>,
    /// Tokens of the vocabulary.
    pub n_tokens: Option<usize>,
    /// Tokens of the longest context.
    pub n_positions: Option<u64>,
    /// Whether it says how a chat is written.
    pub has_chat_template: bool,
}

/// Tensors that are stored alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorTypes {
    /// The type, as the format names it.
    pub name: String,
    /// Tensors of it.
    pub n_tensors: usize,
    /// Their elements.
    pub n_elements: u64,
}

impl ModelFacts {
    /// What the files of a source say, and the model if it can be opened.
    ///
    /// # Errors
    /// [`ModelError`] where nothing can be told: no file, or one that is of neither format.
    pub fn of(name: &str, source: &ModelSource) -> Result<(Self, Result<Model, ModelError>), ModelError> {
        let opened = Model::open(name, source);
        let mut facts = match (source, &opened) {
            (ModelSource::Gguf(path), _) => {
                let (file, n_bytes) = ModelSource::open_gguf(path)?;
                gguf::summary(&source.describe(""), &file, n_bytes)?
            }
            (_, Ok(model)) => of_model(model),
            (ModelSource::Folder(folder), Err(_)) => of_folder(source, folder)?,
            (ModelSource::Embedded(_), Err(_)) => Self { format: "safetensors", ..Self::default() },
        };
        facts.types.sort_by_key(|of_type| std::cmp::Reverse(of_type.n_elements));
        Ok((facts, opened))
    }
}

fn of_model(model: &Model) -> ModelFacts {
    let mut types = BTreeMap::<&str, TensorTypes>::new();
    for (_, info) in model.checkpoint.tensors() {
        let name = info.type_name();
        let of_type =
            types.entry(name).or_insert(TensorTypes { name: name.to_owned(), n_tensors: 0, n_elements: 0 });
        of_type.n_tensors += 1;
        of_type.n_elements += info.n_elements() as u64;
    }
    ModelFacts {
        format: "safetensors",
        n_bytes: model.checkpoint.n_file_bytes(),
        architecture: Some(model.config.architecture.name().to_owned()),
        n_parameters: model.n_parameters,
        types: types.into_values().collect(),
        tokenizer: model.tokenizer_kind(),
        n_tokens: Some(model.tokenizer.vocab_size()),
        n_positions: Some(model.config.n_positions as u64),
        has_chat_template: model.chat.is_some(),
    }
}

/// Of a folder that cannot be used.
fn of_folder(source: &ModelSource, folder: &Path) -> Result<ModelFacts, ModelError> {
    let config = source.read(CONFIG, CONFIG_BYTES_MAX)?.ok_or_else(|| ModelError::MissingFile {
        file: source.describe(CONFIG),
        expected: "config.json of a Llama-family model",
    })?;
    let config: Value = serde_json::from_slice(&config).unwrap_or_default();
    let is_weights = |path: &Path| path.extension().is_some_and(|end| end == "safetensors");
    let files =
        fs::read_dir(folder).into_iter().flatten().flatten().filter(|entry| is_weights(&entry.path()));
    Ok(ModelFacts {
        format: "safetensors",
        n_bytes: files
            .filter_map(|entry| fs::metadata(entry.path()).ok())
            .map(|metadata| metadata.len())
            .sum(),
        architecture: config["architectures"][0].as_str().map(str::to_owned),
        n_positions: config["max_position_embeddings"].as_u64(),
        n_tokens: config["vocab_size"].as_u64().and_then(|n| usize::try_from(n).ok()),
        ..ModelFacts::default()
    })
}
