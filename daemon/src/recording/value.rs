//! Arguments and answers of host calls, as data that can be written down, read back, compared and shown.

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Serialize};

/// How much of a long value is shown.
const SHOWN_CHARS_MAX: usize = 400;

/// A value of the component model. Floats are equal when their bits are.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Value {
    #[serde(rename = "()")]
    Unit,
    #[serde(rename = "u")]
    Number(u64),
    #[serde(rename = "f")]
    Float(f32),
    #[serde(rename = "t")]
    Text(String),
    #[serde(rename = "b")]
    Bytes(#[serde(with = "serde_bytes")] Vec<u8>),
    /// Most often tokens.
    #[serde(rename = "us")]
    Numbers(Vec<u32>),
    #[serde(rename = "fs")]
    Floats(Vec<f32>),
    #[serde(rename = "l")]
    List(Vec<Value>),
    /// A host object, by its number.
    #[serde(rename = "h")]
    Handle(u32),
    #[serde(rename = "r")]
    Record(Vec<(Cow<'static, str>, Value)>),
    /// An enum or variant, and what it carries.
    #[serde(rename = "c")]
    Case(Cow<'static, str>, Option<Box<Value>>),
    #[serde(rename = "o")]
    Option(Option<Box<Value>>),
    #[serde(rename = "ok")]
    Ok(Box<Value>),
    #[serde(rename = "err")]
    Err(Box<Value>),
}

/// A value of another kind than was asked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{found} where {expected} was expected")]
pub(crate) struct Mismatch {
    pub(crate) expected: &'static str,
    pub(crate) found: String,
}

impl Value {
    pub(crate) fn mismatch(&self, expected: &'static str) -> Mismatch {
        Mismatch { expected, found: self.to_string() }
    }

    /// Where two values differ first, as a path into them.
    pub(crate) fn difference(&self, other: &Self) -> Option<String> {
        match (self, other) {
            (Self::List(left), Self::List(right)) => in_lists(left, right, Self::difference),
            (Self::Numbers(left), Self::Numbers(right)) => {
                in_lists(left, right, |left, right| (left != right).then(String::new))
            }
            (Self::Floats(left), Self::Floats(right)) => {
                in_lists(left, right, |left, right| (left.to_bits() != right.to_bits()).then(String::new))
            }
            (Self::Record(left), Self::Record(right)) => {
                let mut fields = left.iter().zip(right);
                let found = fields.find_map(|((name, left), (other, right))| match name == other {
                    true => left.difference(right).map(|path| format!(".{name}{path}")),
                    false => Some(format!(".{name} and .{other}")),
                });
                found.or_else(|| {
                    (left.len() != right.len())
                        .then(|| format!(", {} fields and {}", left.len(), right.len()))
                })
            }
            (Self::Text(left), Self::Text(right)) => (left != right).then(|| {
                let n_same = left.bytes().zip(right.bytes()).take_while(|(left, right)| left == right);
                format!(", byte {}", n_same.count())
            }),
            _ => (self != other).then(String::new),
        }
    }
}

fn in_lists<T>(left: &[T], right: &[T], difference: impl Fn(&T, &T) -> Option<String>) -> Option<String> {
    let mut pairs = left.iter().zip(right).enumerate();
    let found =
        pairs.find_map(|(idx, (left, right))| difference(left, right).map(|path| format!("[{idx}]{path}")));
    found.or_else(|| {
        (left.len() != right.len()).then(|| format!(", {} entries and {}", left.len(), right.len()))
    })
}

impl PartialEq for Value {
    fn eq(&self, other: &Self) -> bool {
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        match (self, other) {
            (Self::Unit, Self::Unit) => true,
            (Self::Number(left), Self::Number(right)) => left == right,
            (Self::Float(left), Self::Float(right)) => left.to_bits() == right.to_bits(),
            (Self::Text(left), Self::Text(right)) => left == right,
            (Self::Bytes(left), Self::Bytes(right)) => left == right,
            (Self::Numbers(left), Self::Numbers(right)) => left == right,
            (Self::Floats(left), Self::Floats(right)) => bits(left) == bits(right),
            (Self::List(left), Self::List(right)) => left == right,
            (Self::Handle(left), Self::Handle(right)) => left == right,
            (Self::Record(left), Self::Record(right)) => left == right,
            (Self::Case(left, a), Self::Case(right, b)) => left == right && a == b,
            (Self::Option(left), Self::Option(right)) => left == right,
            (Self::Ok(left), Self::Ok(right)) | (Self::Err(left), Self::Err(right)) => left == right,
            _ => false,
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = String::new();
        self.show(&mut text);
        match text.char_indices().nth(SHOWN_CHARS_MAX) {
            Some((cut, _)) => write!(f, "{}… ({} bytes)", &text[..cut], text.len()),
            None => f.write_str(&text),
        }
    }
}

impl Value {
    fn show(&self, to: &mut String) {
        use fmt::Write as _;
        // What is cut off need not be made, but for how long it would be.
        match self {
            Self::Unit => to.push_str("()"),
            Self::Number(number) => {
                let _ = write!(to, "{number}");
            }
            Self::Float(number) => {
                let _ = write!(to, "{number:?}");
            }
            Self::Text(text) => {
                let _ = write!(to, "{text:?}");
            }
            Self::Bytes(bytes) => {
                let _ = write!(to, "b\"{}\"", bytes.escape_ascii());
            }
            Self::Numbers(numbers) => {
                let _ = write!(to, "{numbers:?}");
            }
            Self::Floats(numbers) => {
                let _ = write!(to, "{numbers:?}");
            }
            Self::List(values) => {
                to.push('[');
                list(values, to);
                to.push(']');
            }
            Self::Handle(number) => {
                let _ = write!(to, "#{number}");
            }
            Self::Record(fields) => {
                to.push_str("{ ");
                for (idx, (name, value)) in fields.iter().enumerate() {
                    to.push_str(if idx > 0 { ", " } else { "" });
                    to.push_str(name);
                    to.push_str(": ");
                    value.show(to);
                }
                to.push_str(" }");
            }
            Self::Case(name, None) => to.push_str(name),
            Self::Case(name, Some(value)) => wrapped(name, value, to),
            Self::Option(None) => to.push_str("none"),
            Self::Option(Some(value)) => value.show(to),
            Self::Ok(value) if matches!(**value, Self::Unit) => to.push_str("ok"),
            Self::Ok(value) => wrapped("ok", value, to),
            Self::Err(value) => wrapped("error", value, to),
        }
    }
}

fn list(values: &[Value], to: &mut String) {
    for (idx, value) in values.iter().enumerate() {
        to.push_str(if idx > 0 { ", " } else { "" });
        value.show(to);
    }
}

fn wrapped(name: &str, value: &Value, to: &mut String) {
    to.push_str(name);
    to.push('(');
    value.show(to);
    to.push(')');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_found_where_they_are() {
        let record = |tokens: &[u32], text: &str| {
            Value::Record(vec![
                ("tokens".into(), Value::Numbers(tokens.to_vec())),
                ("texts".into(), Value::List(vec![Value::Text(text.to_owned())])),
            ])
        };
        let left = record(&[1, 2, 3], "a text");
        assert_eq!(left.difference(&left), None);
        assert_eq!(left.difference(&record(&[1, 9, 3], "a text")).as_deref(), Some(".tokens[1]"));
        assert_eq!(left.difference(&record(&[1, 2], "a text")).as_deref(), Some(".tokens, 3 entries and 2"));
        assert_eq!(left.difference(&record(&[1, 2, 3], "a test")).as_deref(), Some(".texts[0], byte 4"));
        assert_eq!(left.to_string(), r#"{ tokens: [1, 2, 3], texts: ["a text"] }"#);
        let of = |names: &[&'static str]| {
            Value::Record(names.iter().map(|&name| (name.into(), Value::Unit)).collect())
        };
        assert_eq!(of(&["a"]).difference(&of(&["a", "b"])).as_deref(), Some(", 1 fields and 2"));
        assert_eq!(of(&["a", "b"]).difference(&of(&["a", "c"])).as_deref(), Some(".b and .c"));
    }

    #[test]
    fn floats_are_equal_to_the_bit() {
        assert_eq!(Value::Floats(vec![f32::NAN, -0.0]), Value::Floats(vec![f32::NAN, -0.0]));
        assert_ne!(Value::Float(-0.0), Value::Float(0.0));
        for value in [Value::Float(f32::NAN), Value::Floats(vec![f32::NEG_INFINITY, 0.1])] {
            let bytes = rmp_serde::to_vec_named(&value).expect("it is plain data");
            assert_eq!(rmp_serde::from_slice::<Value>(&bytes).expect("it was written so"), value);
        }
    }
}
