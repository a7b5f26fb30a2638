//! Typed access to the fields of a JSON object, with errors that name file, field, value and expectation.

use serde_json::{Map, Value};

use super::error::ModelError;

/// Longest value that an error repeats, in characters.
const N_SHOWN_MAX: usize = 120;

/// One JSON object of one file.
#[derive(Clone, Copy)]
pub(crate) struct Fields<'a> {
    file: &'a str,
    prefix: &'a str,
    map: &'a Map<String, Value>,
}

/// Parses a file that holds one JSON object.
pub(crate) fn parse_object(file: &str, bytes: &[u8]) -> Result<Map<String, Value>, ModelError> {
    serde_json::from_slice(bytes)
        .map_err(|error| ModelError::Syntax { file: file.to_owned(), reason: error.to_string() })
}

impl<'a> Fields<'a> {
    pub(crate) fn new(file: &'a str, map: &'a Map<String, Value>) -> Self {
        Self { file, prefix: "", map }
    }

    /// The value of a field; `null` counts as absent.
    pub(crate) fn get(&self, field: &str) -> Option<&'a Value> {
        self.map.get(field).filter(|value| !value.is_null())
    }

    /// Whether the field is written, be it as `null`.
    pub(crate) fn has(&self, field: &str) -> bool {
        self.map.contains_key(field)
    }

    /// An error about a field of this object.
    pub(crate) fn error(&self, field: &str, expected: impl Into<String>) -> ModelError {
        let found = match self.map.get(field) {
            None => "missing".to_owned(),
            Some(value) => {
                let text = value.to_string();
                match text.char_indices().nth(N_SHOWN_MAX) {
                    Some((end, _)) => format!("{}…", &text[..end]),
                    None => text,
                }
            }
        };
        ModelError::Field {
            file: self.file.to_owned(),
            field: format!("{}{field}", self.prefix),
            found,
            expected: expected.into(),
        }
    }

    /// An integer in `min..=max`, or `None` when absent.
    pub(crate) fn count(&self, field: &str, min: usize, max: usize) -> Result<Option<usize>, ModelError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        value
            .as_u64()
            .and_then(|count| usize::try_from(count).ok())
            .filter(|count| (min..=max).contains(count))
            .map(Some)
            .ok_or_else(|| self.error(field, format!("an integer from {min} to {max}")))
    }

    /// An integer in `min..=max` that has to be there.
    pub(crate) fn required_count(&self, field: &str, min: usize, max: usize) -> Result<usize, ModelError> {
        self.count(field, min, max)?
            .ok_or_else(|| self.error(field, format!("an integer from {min} to {max}")))
    }

    /// A finite number in `min..=max`, or `None` when absent.
    pub(crate) fn number(&self, field: &str, min: f64, max: f64) -> Result<Option<f64>, ModelError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        value
            .as_f64()
            .filter(|number| (min..=max).contains(number))
            .map(Some)
            .ok_or_else(|| self.error(field, format!("a number from {min} to {max}")))
    }

    /// A finite number in `min..=max` that has to be there.
    pub(crate) fn required_number(&self, field: &str, min: f64, max: f64) -> Result<f64, ModelError> {
        self.number(field, min, max)?
            .ok_or_else(|| self.error(field, format!("a number from {min} to {max}")))
    }

    /// `true` or `false`, or `None` when absent.
    pub(crate) fn flag(&self, field: &str) -> Result<Option<bool>, ModelError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.error(field, "true or false"))
    }

    /// A string, or `None` when absent.
    pub(crate) fn text(&self, field: &str) -> Result<Option<&'a str>, ModelError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.error(field, "a string"))
    }

    /// An object, or `None` when absent. `prefix` is what errors put before its fields.
    pub(crate) fn object(&self, field: &str, prefix: &'a str) -> Result<Option<Fields<'a>>, ModelError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        value
            .as_object()
            .map(|map| Some(Fields { file: self.file, prefix, map }))
            .ok_or_else(|| self.error(field, "an object"))
    }
}
