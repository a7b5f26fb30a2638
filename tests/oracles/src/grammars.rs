//! Grammars of strangers: refused or compiled within their limits, and what a mask allows is what is read.

use std::sync::{Arc, LazyLock};

use arbitrary::Unstructured;
use serde_json::{Value, json};
use trellis_engine::account::{Account, Budget, Resource};
use trellis_engine::constraint::{Constraint, ConstraintError, ConstraintLimits, Grammar, Whitespace};
use trellis_engine::fuzzing::{Allowed, Grammars, Matcher};

use crate::{bundled, json};

/// So small that a grammar which needs all of them takes tens of milliseconds.
const LIMITS: ConstraintLimits =
    ConstraintLimits { grammar_bytes: 4 << 10, n_symbols: 5_000, n_states: 2_000, mask_ms: 20 };

/// What a guest may hold of them.
const HOST_BYTES: u64 = 64 << 20;

/// The longest walk, in tokens.
const N_TOKENS_MAX: usize = 24;

/// Keywords of schemas, and what stands in them.
const WORDS: [&str; 32] = [
    "type",
    "object",
    "array",
    "string",
    "integer",
    "number",
    "boolean",
    "null",
    "properties",
    "required",
    "additionalProperties",
    "items",
    "prefixItems",
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "minimum",
    "maximum",
    "multipleOf",
    "pattern",
    "format",
    "date-time",
    "uuid",
    "enum",
    "const",
    "anyOf",
    "oneOf",
    "allOf",
    "$ref",
    "#/$defs/leaf",
    "patternProperties",
];

static GRAMMARS: LazyLock<Grammars> =
    LazyLock::new(|| Grammars::new(bundled::model("tiny")).expect("a small vocabulary"));

/// Compiles a grammar and walks through it: the first byte says its kind, what comes before the next byte of 0 is its text,
/// or what changes a schema, and the rest says which tokens are taken.
///
/// # Panics
/// A token that a mask allows is not read, or one that it refuses is; a walk depends on the way it came; memory is not given
/// back.
pub fn check(input: &[u8]) {
    let Some((&kind, rest)) = input.split_first() else { return };
    let at = rest.iter().position(|&byte| byte == 0).unwrap_or(rest.len());
    let (text, choices) = rest.split_at(at);
    let grammar = grammar(kind, text);
    let account = Account::new("guest", Budget { host_bytes: HOST_BYTES, ..Budget::UNLIMITED }, None);
    match GRAMMARS.compile(&grammar, LIMITS, &account) {
        Ok(constraint) => {
            walk(&constraint, choices.get(1..).unwrap_or_default());
            assert_eq!(Arc::strong_count(&constraint), 1, "nothing holds on to it");
        }
        Err(error) => is_told(&error),
    }
    assert_eq!(account.used(Resource::HostBytes), 0, "all is given back: {grammar:?}");
}

fn grammar(kind: u8, text: &[u8]) -> Grammar {
    let whitespace = if kind & 8 == 0 { Whitespace::Compact } else { Whitespace::Free };
    let of_text = || String::from_utf8_lossy(text).into_owned();
    match kind % 5 {
        0 => Grammar::Lark(of_text()),
        1 => Grammar::Regex(of_text()),
        2 => Grammar::Choice(of_text().split('\n').map(str::to_owned).collect()),
        3 => Grammar::JsonSchema { schema: of_text(), whitespace },
        _ => {
            let changed = json::changed(&schema(), &WORDS, &mut Unstructured::new(text));
            let schema = changed.expect("zeros make a schema").to_string();
            Grammar::JsonSchema { schema, whitespace }
        }
    }
}

/// A schema in which most keywords stand.
fn schema() -> Value {
    json!({
        "$defs": {"leaf": {"type": "string", "pattern": "^[a-z]{1,4}$"}},
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"$ref": "#/$defs/leaf"}, "minItems": 1, "maxItems": 3},
            "kind": {"enum": ["a", 1, null, true]},
            "when": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
            "size": {"type": "number", "multipleOf": 0.5},
        },
        "required": ["name", "age"],
        "additionalProperties": false,
    })
}

fn is_told(error: &ConstraintError) {
    match error {
        ConstraintError::Refused { place, reason } => {
            assert!(!place.is_empty() && !reason.is_empty(), "{error:?}");
        }
        ConstraintError::TooComplex { reason } => assert!(!reason.is_empty(), "{error:?}"),
        ConstraintError::TooLong { n_bytes, n_bytes_max } => assert!(n_bytes > n_bytes_max, "{error:?}"),
        ConstraintError::Budget(_) => {}
        ConstraintError::Vocabulary { .. } | ConstraintError::Left { .. } => panic!("{error:?}"),
    }
}

/// Takes tokens that are allowed, as the bytes say.
fn walk(constraint: &Arc<Constraint>, choices: &[u8]) {
    let matcher = Matcher::new(constraint.clone());
    let mut tokens = Vec::new();
    for &[high, low] in choices.as_chunks().0.iter().take(N_TOKENS_MAX) {
        let mask = match matcher.next(&tokens) {
            Ok(Allowed::Mask(mask)) => mask,
            Ok(_) => break,
            Err(error) => return is_told(&error),
        };
        let choice = usize::from(high) << 8 | usize::from(low);
        let refused = (0..mask.vocab_size()).map(|n| ((n + choice) % mask.vocab_size()) as u32);
        if let Some(refused) = refused.into_iter().find(|&token| !mask.allows(token)) {
            let with_it = [&tokens[..], &[refused]].concat();
            match constraint.read(&with_it) {
                Ok(reading) => assert_eq!(reading.n_tokens, tokens.len(), "{with_it:?}"),
                Err(error) => return is_told(&error),
            }
        }
        let n_allowed = mask.n_allowed();
        if n_allowed == 0 {
            break;
        }
        tokens.push(mask.allowed().nth(choice % n_allowed).expect("there are so many"));
    }
    match constraint.read(&tokens) {
        Ok(reading) => assert_eq!(reading.n_tokens, tokens.len(), "{tokens:?}"),
        Err(error) => return is_told(&error),
    }
    // Where it has been before is nothing to a walk, unless its limits come into it.
    let last = matcher.next(&tokens);
    let half = matcher.next(&tokens[..tokens.len() / 2]);
    let anew = Matcher::new(constraint.clone());
    if let (Ok(last), Ok(half), Ok(of_half), Ok(of_last)) =
        (last, half, anew.next(&tokens[..tokens.len() / 2]), anew.next(&tokens))
    {
        assert!(last == of_last && half == of_half, "{tokens:?}");
    }
}
