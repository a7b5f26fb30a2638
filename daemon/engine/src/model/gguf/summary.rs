//! What a GGUF file says of itself, whether or not its model can be used.

use std::collections::BTreeMap;

use super::super::error::ModelError;
use super::super::explain::{ModelFacts, TensorTypes};
use super::super::fields::Fields;
use super::super::source::RangeFile;
use super::header::{Header, Value, shortened};
use super::{ROPE_DIVISORS, blocks, header_bytes, parse};

/// # Errors
/// The file cannot be read, or has no header.
pub(in super::super) fn summary(
    name: &str,
    file: &RangeFile,
    n_file_bytes: u64,
) -> Result<ModelFacts, ModelError> {
    let bytes = header_bytes(name, file, n_file_bytes)?;
    let header = parse(name, &bytes)?;
    let map = header.fields();
    let fields = Fields::new(name, &map);
    // People read them: no name is longer.
    let text = |key: &str| fields.get(key).and_then(|value| value.as_str()).map(shortened);
    let architecture = text("general.architecture");
    let n_positions =
        architecture.as_ref().and_then(|name| fields.get(&format!("{name}.context_length"))?.as_u64());
    let tokenizer = text("tokenizer.ggml.model").map(|model| match text("tokenizer.ggml.pre") {
        Some(pre) => format!("{model} ({pre})"),
        None => model,
    });
    let (mut types, mut n_parameters) = (BTreeMap::<u32, TensorTypes>::new(), 0_u64);
    for tensor in header.tensors.iter().filter(|tensor| tensor.name != ROPE_DIVISORS) {
        let of_type = types.entry(tensor.type_id).or_insert_with(|| TensorTypes {
            name: blocks::type_name(tensor.type_id),
            n_tensors: 0,
            n_elements: 0,
        });
        of_type.n_tensors += 1;
        of_type.n_elements = of_type.n_elements.saturating_add(tensor.n_elements);
        n_parameters = n_parameters.saturating_add(tensor.n_elements);
    }
    Ok(ModelFacts {
        format: "GGUF",
        n_bytes: n_file_bytes,
        architecture,
        n_parameters,
        types: types.into_values().collect(),
        tokenizer,
        n_tokens: Some(header.n_tokens()).filter(|n| *n > 0),
        n_positions,
        has_chat_template: fields.has("tokenizer.chat_template"),
    })
}

impl Header<'_> {
    /// Entries of the vocabulary.
    pub(super) fn n_tokens(&self) -> usize {
        match self.values.get("tokenizer.ggml.tokens") {
            Some(Value::Texts(texts)) => texts.len(),
            _ => 0,
        }
    }
}
