//! A model folder or file, opened and checked as a whole.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::chat::ChatTemplate;
use super::checkpoint::{Checkpoint, Dtype};
use super::config::ModelConfig;
use super::error::ModelError;
use super::fields::{Fields, parse_object};
use super::gguf;
use super::source::ModelSource;
use super::tensors;
use super::tokenizer::Tokenizer;
use crate::batch::Token;

pub(super) const CONFIG: &str = "config.json";
const GENERATION_CONFIG: &str = "generation_config.json";
const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const CHAT_TEMPLATE: &str = "chat_template.jinja";

const CONFIG_BYTES_MAX: u64 = 4 << 20;
/// The largest published ones are about 35 MB.
pub(crate) const TOKENIZER_BYTES_MAX: u64 = 128 << 20;
const N_STOP_TOKENS_MAX: usize = 256;

/// A model that is ready to be loaded onto a device.
#[derive(Debug)]
pub struct Model {
    /// The name that users know it by.
    pub name: String,
    /// The folder or file that it was opened from, without links; none for one that is compiled in or has random weights.
    pub folder: Option<PathBuf>,
    /// Shapes and constants.
    pub config: ModelConfig,
    /// The weights, checked against `config`.
    pub checkpoint: Checkpoint,
    /// Text to tokens and back.
    pub tokenizer: Arc<Tokenizer>,
    /// How the model expects a chat, if it was trained for one.
    pub chat: Option<ChatTemplate>,
    /// The token that every text of the training began with, if there was one.
    pub bos_token: Option<Token>,
    /// Tokens that end a text.
    pub stop_tokens: Vec<Token>,
    /// Tells models apart: a BLAKE3 hash over the config, the tokenizer, and the headers, lengths and a sample
    /// of every tensor of the weights. The same for a folder and for the same files embedded.
    pub fingerprint: [u8; 32],
    /// The type that most of the weights are stored in; that in which they are loaded unless another one is asked for, where they are
    /// quantised: bf16.
    pub dtype: Dtype,
    /// Weights of the model; a tied output projection is not counted twice.
    pub n_parameters: u64,
    /// What its tokenizer was made of.
    tokenizer_json: Cow<'static, [u8]>,
    /// What its chat template was made of.
    chat_text: Option<ChatText>,
}

/// A model without its weights, as data: all that is asked of one where it is not computed.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ModelCard {
    name: String,
    config: ModelConfig,
    #[serde(with = "serde_bytes")]
    tokenizer_json: Vec<u8>,
    chat_text: Option<ChatText>,
    bos_token: Option<Token>,
    stop_tokens: Vec<Token>,
    fingerprint: [u8; 32],
    dtype: Dtype,
    n_parameters: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct ChatText {
    /// Where the template stands.
    file: String,
    template: String,
    bos_text: Option<String>,
    eos_text: Option<String>,
}

impl ChatText {
    fn parse(&self) -> Result<ChatTemplate, ModelError> {
        ChatTemplate::new(&self.file, &self.template, self.bos_text.clone(), self.eos_text.clone())
    }
}

impl Model {
    /// Opens a model and checks its files against each other. Weights are not loaded.
    ///
    /// # Errors
    ///
    /// [`ModelError`] naming the file, what was expected in it and what was found.
    pub fn open(name: impl Into<String>, source: &ModelSource) -> Result<Self, ModelError> {
        source.check()?;
        if let ModelSource::Gguf(path) = source {
            return Self::open_gguf(name.into(), source, path);
        }
        let config_bytes = required(source, CONFIG, CONFIG_BYTES_MAX, "config.json of a Llama-family model")?;
        let config_file = source.describe(CONFIG);
        let config = ModelConfig::from_json(&config_file, &config_bytes)?;

        let tokenizer_bytes =
            required(source, TOKENIZER, TOKENIZER_BYTES_MAX, "tokenizer.json of the `tokenizers` library")?;
        let tokenizer =
            Tokenizer::from_json(&source.describe(TOKENIZER), &tokenizer_bytes, config.vocab_size)?;

        let checkpoint = Checkpoint::open(source)?;
        tensors::check(&config, &checkpoint)?;

        let config_map = parse_object(&config_file, &config_bytes)?;
        let generation_file = source.describe(GENERATION_CONFIG);
        let generation_map = optional_object(source, GENERATION_CONFIG)?;
        let tokenizer_config_file = source.describe(TOKENIZER_CONFIG);
        let tokenizer_config_map = optional_object(source, TOKENIZER_CONFIG)?;
        let config_fields = Fields::new(&config_file, &config_map);
        let generation_fields = Fields::new(&generation_file, &generation_map);
        let tokenizer_fields = Fields::new(&tokenizer_config_file, &tokenizer_config_map);

        let stop_tokens = match token_list(&generation_fields, "eos_token_id", config.vocab_size)? {
            Some(tokens) => tokens,
            None => token_list(&config_fields, "eos_token_id", config.vocab_size)?.unwrap_or_default(),
        };
        let bos_text = token_text(&tokenizer_fields, "bos_token")?;
        let eos_text = token_text(&tokenizer_fields, "eos_token")?;
        let bos_token = match &bos_text {
            Some(text) => Some(tokenizer.token(text).ok_or_else(|| {
                tokenizer_fields.error("bos_token", "an entry of the vocabulary in tokenizer.json")
            })?),
            // Written as null it means that there is none, whatever config.json says.
            None if tokenizer_fields.has("bos_token") => None,
            None => {
                config_fields.count("bos_token_id", 0, config.vocab_size - 1)?.map(|token| token as Token)
            }
        };
        let chat_text = chat_template(source, &tokenizer_fields)?.map(|(file, template)| ChatText {
            file,
            template,
            bos_text,
            eos_text,
        });
        let chat = chat_text.as_ref().map(ChatText::parse).transpose()?;

        let fingerprint = fingerprint(&config_bytes, &tokenizer_bytes, &checkpoint)?;
        let (dtype, n_parameters) = count_parameters(&config, &checkpoint);
        Ok(Self {
            name: name.into(),
            folder: source.folder(),
            config,
            checkpoint,
            tokenizer: Arc::new(tokenizer),
            chat,
            bos_token,
            stop_tokens,
            fingerprint,
            dtype,
            n_parameters,
            tokenizer_json: tokenizer_bytes,
            chat_text,
        })
    }

    fn open_gguf(name: String, source: &ModelSource, path: &Path) -> Result<Self, ModelError> {
        let file_name = path.display().to_string();
        let (file, n_bytes) = ModelSource::open_gguf(path)?;
        let gguf::Opened { config, checkpoint, vocabulary, chat_template } =
            gguf::open(&file_name, file, n_bytes)?;
        let tokenizer_json = vocabulary.tokenizer_json;
        let tokenizer = Tokenizer::from_json(&file_name, &tokenizer_json, config.vocab_size)?;
        let chat_text = chat_template.map(|template| ChatText {
            file: file_name,
            template,
            bos_text: vocabulary.bos_text,
            eos_text: vocabulary.eos_text,
        });
        // What its header says of the config is in the checkpoint's.
        let fingerprint = fingerprint(&[], &tokenizer_json, &checkpoint)?;
        let (dtype, n_parameters) = count_parameters(&config, &checkpoint);
        Ok(Self {
            name,
            folder: source.folder(),
            config,
            checkpoint,
            tokenizer: Arc::new(tokenizer),
            chat: chat_text.as_ref().map(ChatText::parse).transpose()?,
            bos_token: vocabulary.bos_token,
            stop_tokens: vocabulary.stop_tokens,
            fingerprint,
            dtype,
            n_parameters,
            tokenizer_json: tokenizer_json.into(),
            chat_text,
        })
    }

    /// The kind of its tokenizer, by the name in `tokenizer.json`.
    pub(super) fn tokenizer_kind(&self) -> Option<String> {
        let tokenizer: Value = serde_json::from_slice(&self.tokenizer_json).ok()?;
        tokenizer["model"]["type"].as_str().map(str::to_owned)
    }

    /// Tells it from every other model, to the last bit of its weights, and from itself once one of its files was changed. It may
    /// read all that is compiled in.
    #[must_use]
    pub fn identity(&self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new_derive_key("trellis model identity 1");
        hasher.update(&self.fingerprint);
        self.checkpoint.identify(&mut hasher);
        *hasher.finalize().as_bytes()
    }

    /// The model without its weights, as data.
    #[must_use]
    pub fn card(&self) -> ModelCard {
        ModelCard {
            name: self.name.clone(),
            config: self.config.clone(),
            tokenizer_json: self.tokenizer_json.to_vec(),
            chat_text: self.chat_text.clone(),
            bos_token: self.bos_token,
            stop_tokens: self.stop_tokens.clone(),
            fingerprint: self.fingerprint,
            dtype: self.dtype,
            n_parameters: self.n_parameters,
        }
    }

    /// The model of a card, whose weights are elsewhere.
    ///
    /// # Errors
    /// The tokenizer or the template is none.
    pub fn without_weights(card: ModelCard) -> Result<Self, ModelError> {
        let tokenizer = Tokenizer::from_json(TOKENIZER, &card.tokenizer_json, card.config.vocab_size)?;
        Ok(Self {
            tokenizer: Arc::new(tokenizer),
            checkpoint: Checkpoint::empty(),
            chat: card.chat_text.as_ref().map(ChatText::parse).transpose()?,
            folder: None,
            name: card.name,
            config: card.config,
            bos_token: card.bos_token,
            stop_tokens: card.stop_tokens,
            fingerprint: card.fingerprint,
            dtype: card.dtype,
            n_parameters: card.n_parameters,
            tokenizer_json: card.tokenizer_json.into(),
            chat_text: card.chat_text,
        })
    }
}

impl Model {
    /// A model of any shape whose weights are a function of the seed, for measurements: they take no file and no
    /// memory. Norms are 1, all else is finite and small. `tokenizer_json` may have fewer tokens than the config; the
    /// rest stand for no text.
    ///
    /// # Errors
    ///
    /// [`ModelError`] when the tokenizer is broken or has tokens that the config has not.
    pub fn with_random_weights(
        name: impl Into<String>,
        config: ModelConfig,
        dtype: Dtype,
        seed: u64,
        tokenizer_json: &[u8],
    ) -> Result<Self, ModelError> {
        let tokenizer = Tokenizer::from_json(TOKENIZER, tokenizer_json, config.vocab_size)?;
        let checkpoint = Checkpoint::random(&config, dtype, seed);
        let fingerprint = fingerprint(format!("{config:?}").as_bytes(), tokenizer_json, &checkpoint)?;
        let (dtype, n_parameters) = count_parameters(&config, &checkpoint);
        Ok(Self {
            name: name.into(),
            folder: None,
            config,
            checkpoint,
            tokenizer: Arc::new(tokenizer),
            chat: None,
            bos_token: None,
            stop_tokens: Vec::new(),
            fingerprint,
            dtype,
            n_parameters,
            tokenizer_json: tokenizer_json.to_vec().into(),
            chat_text: None,
        })
    }
}

fn required(
    source: &ModelSource,
    name: &str,
    limit_bytes: u64,
    expected: &'static str,
) -> Result<Cow<'static, [u8]>, ModelError> {
    source
        .read(name, limit_bytes)?
        .ok_or_else(|| ModelError::MissingFile { file: source.describe(name), expected })
}

/// An object that counts as empty when its file is not there.
fn optional_object(source: &ModelSource, name: &str) -> Result<Map<String, Value>, ModelError> {
    match source.read(name, CONFIG_BYTES_MAX)? {
        Some(bytes) => parse_object(&source.describe(name), &bytes),
        None => Ok(Map::new()),
    }
}

/// One token or a list of them, without repetition.
fn token_list(fields: &Fields, field: &str, vocab_size: usize) -> Result<Option<Vec<Token>>, ModelError> {
    let Some(value) = fields.get(field) else { return Ok(None) };
    let fail = || {
        let expected = format!(
            "a token below vocab_size {vocab_size}, or a list of at most {N_STOP_TOKENS_MAX} of them"
        );
        fields.error(field, expected)
    };
    let values = match value {
        Value::Array(values) if values.len() <= N_STOP_TOKENS_MAX => values.as_slice(),
        single => std::slice::from_ref(single),
    };
    let mut tokens = Vec::with_capacity(values.len());
    for value in values {
        let token = value.as_u64().filter(|token| *token < vocab_size as u64).ok_or_else(fail)? as Token;
        if !tokens.contains(&token) {
            tokens.push(token);
        }
    }
    Ok(Some(tokens))
}

/// A special token of `tokenizer_config.json`: its text, or an object with it as `content`.
fn token_text(fields: &Fields, field: &str) -> Result<Option<String>, ModelError> {
    let Some(value) = fields.get(field) else { return Ok(None) };
    let text = value.as_str().or_else(|| value.get("content").and_then(Value::as_str));
    match text {
        Some(text) => Ok(Some(text.to_owned())),
        None => Err(fields.error(field, "a string, an object with `content`, or null")),
    }
}

/// The template and the file that it stands in. A file of its own wins, as in transformers.
fn chat_template(source: &ModelSource, fields: &Fields) -> Result<Option<(String, String)>, ModelError> {
    if let Some(bytes) = source.read(CHAT_TEMPLATE, CONFIG_BYTES_MAX)? {
        let file = source.describe(CHAT_TEMPLATE);
        return match String::from_utf8(bytes.into_owned()) {
            Ok(template) => Ok(Some((file, template))),
            Err(error) => Err(ModelError::Syntax { file, reason: error.to_string() }),
        };
    }
    let template = match fields.get("chat_template") {
        None => return Ok(None),
        Some(Value::String(template)) => Some(template.as_str()),
        Some(Value::Array(named)) => {
            named.iter().find(|entry| entry["name"] == "default").and_then(|entry| entry["template"].as_str())
        }
        Some(_) => None,
    };
    match template {
        Some(template) => Ok(Some((source.describe(TOKENIZER_CONFIG), template.to_owned()))),
        None => {
            let expected = "a string, or a list of objects with `name` and `template`, one named \"default\"";
            Err(fields.error("chat_template", expected))
        }
    }
}

fn fingerprint(config: &[u8], tokenizer: &[u8], checkpoint: &Checkpoint) -> Result<[u8; 32], ModelError> {
    let mut hasher = blake3::Hasher::new();
    for bytes in [config, tokenizer] {
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        hasher.update(bytes);
    }
    checkpoint.fingerprint(&mut hasher)?;
    Ok(*hasher.finalize().as_bytes())
}

fn count_parameters(config: &ModelConfig, checkpoint: &Checkpoint) -> (Dtype, u64) {
    let mut counts = [(Dtype::F32, 0), (Dtype::F16, 0), (Dtype::Bf16, 0)];
    for spec in tensors::expected(config) {
        let info = checkpoint.tensor(&spec.name).expect("the checkpoint was checked against the config");
        for (dtype, count) in &mut counts {
            *count += if *dtype == info.loaded_dtype() { info.n_elements() as u64 } else { 0 };
        }
    }
    let (dtype, _) = counts.into_iter().max_by_key(|(_, count)| *count).expect("three types");
    (dtype, counts.iter().map(|(_, count)| count).sum())
}
