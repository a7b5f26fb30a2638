//! What `format` says: nothing, or more exactly than the library has it.

use serde_json::{Map, Value, json};

use super::keywords::{WITH_MAPS, WITH_SCHEMAS};

/// Drafts by which `format` describes a text and says nothing about what is valid (draft 2020-12, Validation, section 7.2.1).
const DESCRIBING: [&str; 2] =
    ["https://json-schema.org/draft/2020-12/schema", "https://json-schema.org/draft/2019-09/schema"];

/// Dates of RFC 3339: the 29th of February in leap years alone.
const DATE: &str = concat!(
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])",
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)",
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))",
    "|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
);

/// Times of RFC 3339: a leap second where a day ends in UTC, and as UTC has it, since a regular expression cannot reckon with
/// other offsets.
const TIME: &str = concat!(
    "(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])",
    "|23:59:60(?:\\.[0-9]+)?(?:[zZ]|[+-]00:00))"
);

/// Takes `format` out where the schema names a draft by which it says nothing about what is valid. Where no draft is named it is
/// kept to, as by those before; the library takes a few texts for dates and times that are none, so they become patterns.
pub(super) fn make_exact(schema: &mut Value) {
    make_exact_within(schema, false);
}

/// `describes` is what holds around this schema.
fn make_exact_within(schema: &mut Value, describes: bool) {
    let Value::Object(schema) = schema else { return };
    let draft = schema.get("$schema").and_then(Value::as_str).map(|draft| draft.trim_end_matches('#'));
    let describes = draft.map_or(describes, |draft| DESCRIBING.contains(&draft));
    for (keyword, value) in schema.iter_mut() {
        match value {
            Value::Array(list) if WITH_SCHEMAS.contains(&keyword.as_str()) => {
                list.iter_mut().for_each(|schema| make_exact_within(schema, describes));
            }
            schema if WITH_SCHEMAS.contains(&keyword.as_str()) => make_exact_within(schema, describes),
            Value::Object(map) if WITH_MAPS.contains(&keyword.as_str()) => {
                map.values_mut().for_each(|schema| make_exact_within(schema, describes));
            }
            _ => {}
        }
    }
    let pattern = schema.get("format").and_then(Value::as_str).and_then(pattern_of);
    if describes || pattern.is_some() {
        schema.retain(|keyword, _| keyword != "format");
    }
    if let Some(pattern) = pattern.filter(|_| !describes) {
        keep_to(schema, pattern);
    }
}

/// The pattern that stands for a format.
fn pattern_of(format: &str) -> Option<String> {
    match format {
        "date" => Some(format!("^{DATE}$")),
        "time" => Some(format!("^{TIME}$")),
        "date-time" => Some(format!("^{DATE}[tT]{TIME}$")),
        _ => None,
    }
}

/// Adds a pattern to what the schema has.
fn keep_to(schema: &mut Map<String, Value>, pattern: String) {
    if !schema.contains_key("pattern") {
        schema.insert("pattern".to_owned(), pattern.into());
    } else if let Value::Array(list) = schema.entry("allOf").or_insert_with(|| json!([])) {
        list.push(json!({ "pattern": pattern }));
    }
}
