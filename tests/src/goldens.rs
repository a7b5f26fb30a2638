//! Reference outputs of Hugging Face transformers, in float32 on the CPU.

use std::path::Path;

use serde::Deserialize;

use crate::pack;

/// All cases of one model.
#[derive(Debug, Deserialize)]
pub struct Goldens {
    /// The model's name.
    pub model: String,
    /// The cases.
    pub cases: Vec<Case>,
}

/// One prompt and what follows it.
#[derive(Debug, Deserialize)]
pub struct Case {
    /// The prompt, special tokens written out.
    pub prompt: String,
    /// Its tokens.
    pub prompt_ids: Vec<u32>,
    /// The ten most probable tokens after each position.
    pub top10_ids: Vec<Vec<u32>>, // [n_prompt, 10]
    /// Their log-probabilities.
    pub top10_logprobs: Vec<Vec<f32>>, // [n_prompt, 10]
    /// Greedy tokens, up to 40, a stop token included.
    pub greedy_ids: Vec<u32>,
    /// Beam searches.
    #[serde(default)]
    pub beams: Vec<Beams>,
}

/// One beam search.
#[derive(Clone, Debug, Deserialize)]
pub struct Beams {
    /// Beams, and hypotheses returned.
    pub num_beams: usize,
    /// Exponent of the length that divides the score.
    pub length_penalty: f64,
    /// `true`, `false` or `"never"`.
    pub early_stopping: serde_json::Value,
    /// The hypotheses, best first, padded to one length.
    pub sequences: Vec<Vec<u32>>,
    /// Their scores.
    pub scores: Vec<f64>,
}

/// The goldens of a model.
///
/// # Panics
/// The file is missing or not what it should be.
#[must_use]
pub fn load(model: &str) -> Goldens {
    read(&pack::root().join(format!("tests/golden/{model}.json")))
}

/// The goldens of a file.
///
/// # Panics
/// The file is missing or not what it should be.
#[must_use]
pub fn read(path: &Path) -> Goldens {
    let text = std::fs::read_to_string(path).expect("the golden file is there");
    serde_json::from_str(&text).expect("the golden file parses")
}
