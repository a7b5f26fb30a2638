//! Grammars that what is drawn keeps to.

pub use crate::bindings::trellis::host::constraints::{Beginning, Whitespace};

use crate::bindings::trellis::host::constraints as raw;
use crate::{Model, Result};

/// A grammar, compiled and held by the host. Put on a [`Sampler`](crate::Sampler), it holds for all that is drawn with it: in
/// generations, streams, steps and guesses, over forks and truncations.
///
/// ```no_run
/// # use trellis_guest::{Constraint, Model, Result, Sampler};
/// # fn f(model: &Model) -> Result<()> {
/// let schema = r#"{"type": "array", "items": {"type": "integer"}, "maxItems": 5}"#;
/// let list = Constraint::json_schema(model, schema)?;
/// let sampler = Sampler::seeded(7).temperature(1.5).constraint(&list).build()?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Constraint {
    raw: raw::Constraint,
}

impl Constraint {
    /// JSON that keeps to a schema, without whitespace between its parts. Keys come in the order of the schema. What of JSON
    /// Schema is supported stands in the WIT package; what is not is refused by its name.
    ///
    /// # Errors
    /// [`GrammarRefused`](crate::Error::GrammarRefused) with the place and the reason;
    /// [`InvalidArgument`](crate::Error::InvalidArgument) where it is too long;
    /// [`BudgetExceeded`](crate::Error::BudgetExceeded) for bytes of host memory.
    pub fn json_schema(model: &Model, schema: &str) -> Result<Self> {
        Self::json_schema_with(model, schema, Whitespace::Compact)
    }

    /// JSON that keeps to a schema, with this between its parts.
    ///
    /// # Errors
    /// As [`json_schema`](Self::json_schema).
    pub fn json_schema_with(model: &Model, schema: &str, whitespace: Whitespace) -> Result<Self> {
        let schema = raw::JsonSchema { schema: schema.to_owned(), whitespace };
        Self::compile(model, raw::Grammar::JsonSchema(schema))
    }

    /// What the whole of a regular expression matches, in the syntax of the `regex` crate without look-around, back-references
    /// and word boundaries.
    ///
    /// # Errors
    /// As [`json_schema`](Self::json_schema).
    pub fn regex(model: &Model, regex: &str) -> Result<Self> {
        Self::compile(model, raw::Grammar::Regex(regex.to_owned()))
    }

    /// A text of a [Lark grammar](https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md).
    ///
    /// # Errors
    /// As [`json_schema`](Self::json_schema).
    pub fn lark(model: &Model, grammar: &str) -> Result<Self> {
        Self::compile(model, raw::Grammar::Lark(grammar.to_owned()))
    }

    /// One of these texts.
    ///
    /// # Errors
    /// As [`json_schema`](Self::json_schema); also where there is none, or an empty one among them.
    pub fn choice<T: Into<String>>(model: &Model, texts: impl IntoIterator<Item = T>) -> Result<Self> {
        Self::compile(model, raw::Grammar::Choice(texts.into_iter().map(Into::into).collect()))
    }

    fn compile(model: &Model, grammar: raw::Grammar) -> Result<Self> {
        Ok(Self { raw: raw::Constraint::compile(model.raw(), &grammar)? })
    }

    pub(crate) fn raw(&self) -> &raw::Constraint {
        &self.raw
    }
}
