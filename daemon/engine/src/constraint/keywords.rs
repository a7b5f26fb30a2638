//! What of JSON Schema is understood. What is not is refused by its name: a keyword that were passed over would be a promise
//! that is not kept.

use serde_json::{Map, Value};

use super::regexes;

/// Keywords whose value is a schema, or a list of schemas.
pub(super) const WITH_SCHEMAS: [&str; 8] = [
    "additionalItems",
    "additionalProperties",
    "allOf",
    "anyOf",
    "contentSchema",
    "items",
    "oneOf",
    "prefixItems",
];

/// Keywords whose value is a map of schemas.
pub(super) const WITH_MAPS: [&str; 4] = ["$defs", "definitions", "patternProperties", "properties"];

/// Other keywords that are kept to.
const PLAIN: [&str; 19] = [
    "$ref",
    "const",
    "enum",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "format",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minItems",
    "minLength",
    "minProperties",
    "minimum",
    "multipleOf",
    "pattern",
    "required",
    "type",
    "$anchor",
];

/// How a schema begins within a Lark grammar.
const LARK_JSON: &str = "%json";

/// Keywords whose value is no schema, and may look like one.
const VALUES: [&str; 4] = ["const", "default", "enum", "examples"];

/// What "multipleOf" may be.
const N_DIGITS_MAX: u32 = 8;
const MULTIPLE_MAX: f64 = 400_000_000.0;
const N_REMAINDERS_MAX: u64 = 20_000;
const PRODUCT_MAX: u128 = 4_000_000_000;

/// Keywords that say nothing about what is valid.
const REMARKS: [&str; 13] = [
    "$comment",
    "$id",
    "$schema",
    "contentEncoding",
    "contentMediaType",
    "default",
    "deprecated",
    "description",
    "examples",
    "id",
    "readOnly",
    "title",
    "writeOnly",
];

/// Of all these, those whose value is a text.
const TEXTS: [&str; 7] = ["$anchor", "$id", "$ref", "$schema", "format", "id", "pattern"];

/// The place and the reason of the first keyword that is not understood.
pub(super) fn check(schema: &Value) -> Result<(), (String, String)> {
    check_at(schema, &mut String::new())?;
    let mut multiples = Multiples::default();
    multiples.look_at(schema);
    match multiples.may_be_wrong() {
        false => Ok(()),
        true => Err((
            "the schema as a whole".to_owned(),
            "values of \"multipleOf\" that may have to be kept to at once are supported as far as the product of the largest with \
             their least common multiple, both without points, is 4000000000"
                .to_owned(),
        )),
    }
}

/// The first schema within a Lark grammar that is refused: where it begins, and the place and the reason within it.
pub(super) fn check_in_lark(text: &str) -> Option<(usize, String)> {
    regexes::places_in_lark(text, LARK_JSON).find_map(|at| {
        let mut values = serde_json::Deserializer::from_str(&text[at + LARK_JSON.len()..]).into_iter();
        // What is no JSON the library refuses by itself.
        let schema: Value = values.next()?.ok()?;
        let (place, reason) = check(&schema).err()?;
        Some((at, format!("{place}: {reason}")))
    })
}

fn check_at(schema: &Value, place: &mut String) -> Result<(), (String, String)> {
    let Value::Object(schema) = schema else {
        return match schema {
            Value::Bool(_) => Ok(()),
            _ => Err((shown(place), "a schema is an object, true or false".to_owned())),
        };
    };
    for (keyword, value) in schema {
        match keyword.as_str() {
            it if WITH_SCHEMAS.contains(&it) => match value {
                Value::Array(list) => {
                    for (idx, schema) in list.iter().enumerate() {
                        within(place, &[keyword, &idx.to_string()], |place| check_at(schema, place))?;
                    }
                }
                schema => within(place, &[keyword], |place| check_at(schema, place))?,
            },
            it if WITH_MAPS.contains(&it) => {
                for (name, schema) in value.as_object().unwrap_or(&Map::new()) {
                    if it == "patternProperties"
                        && let Some(why) = regexes::too_many_classes(name)
                    {
                        return within(place, &[keyword], |place| Err((shown(place), why)));
                    }
                    within(place, &[keyword, name], |place| check_at(schema, place))?;
                }
            }
            it if TEXTS.contains(&it) && !value.is_string() => {
                return refused(place, it, "takes a text");
            }
            "multipleOf" if value.as_f64().is_some_and(|of| !is_counted(of)) => {
                return refused(
                    place,
                    keyword,
                    "is supported up to 400000000, with at most 8 digits behind the point, and up to 20000 without its factors of \
                     2 and 5",
                );
            }
            "$ref" if value.as_str().is_some_and(|to| !is_of_schema(to)) => {
                return refused(place, keyword, "is supported to schemas alone");
            }
            "pattern" => {
                if let Some(why) = value.as_str().and_then(regexes::too_many_classes) {
                    return within(place, &[keyword], |place| Err((shown(place), why)));
                }
            }
            it if PLAIN.contains(&it) || REMARKS.contains(&it) => {}
            unknown => return refused(place, unknown, "is not supported"),
        }
    }
    if may_repeat_keys(schema) {
        return refused(
            place,
            "minProperties",
            "is supported up to one more than \"required\" has where keys are not those of \"properties\" alone: a grammar \
             does not tell a key that comes twice",
        );
    }
    Ok(())
}

/// Whether texts may have the least number of properties by having a key twice, which counts once: keys that are not named are
/// told from those that are, but not from each other.
fn may_repeat_keys(schema: &Map<String, Value>) -> bool {
    let least = schema.get("minProperties").and_then(Value::as_f64).unwrap_or(0.0);
    let n_required = schema.get("required").and_then(Value::as_array).map_or(0, |names| {
        let mut names: Vec<&str> = names.iter().filter_map(Value::as_str).collect();
        names.sort_unstable();
        names.dedup();
        names.len()
    });
    let has_others = schema.get("additionalProperties") != Some(&Value::Bool(false))
        || schema.get("patternProperties").and_then(Value::as_object).is_some_and(|it| !it.is_empty());
    has_others && least > n_required as f64 + 1.0
}

/// Numbers of which values have to be multiples, of all of a schema's parts. Where more than one is for a value, or one twice, the
/// library works out their least common multiple in 32 bits, and multiplies first.
#[derive(Default)]
struct Multiples {
    /// Without their points, and how many digits they had behind it.
    all: Vec<(f64, u32)>,
    /// Whether more than one schema may be for a value.
    are_joined: bool,
}

impl Multiples {
    fn look_at(&mut self, value: &Value) {
        match value {
            Value::Object(map) => {
                self.all.extend(map.get("multipleOf").and_then(Value::as_f64).map(digits));
                self.are_joined |= joins(map);
                let parts = map.iter().filter(|(keyword, _)| !VALUES.contains(&keyword.as_str()));
                parts.for_each(|(_, value)| self.look_at(value));
            }
            Value::Array(list) => list.iter().for_each(|value| self.look_at(value)),
            _ => {}
        }
    }

    fn may_be_wrong(&self) -> bool {
        if !self.are_joined {
            return false;
        }
        let n_digits = self.all.iter().map(|(_, n_digits)| *n_digits).max().unwrap_or(0);
        let whole = |&(of, n): &(f64, u32)| (of * 10_f64.powi((n_digits - n) as i32)).max(1.0) as u128;
        let least_common = |one: u128, other: u128| {
            let (mut a, mut b) = (one, other);
            while b != 0 {
                (a, b) = (b, a % b);
            }
            (one / a).saturating_mul(other).min(u128::from(u64::MAX))
        };
        let together = self.all.iter().map(whole).fold(1, least_common);
        let largest = self.all.iter().map(whole).max().unwrap_or(1);
        together.saturating_mul(largest) > PRODUCT_MAX
    }
}

/// Whether what a schema says itself is for the same values as what others say that it has.
fn joins(schema: &Map<String, Value>) -> bool {
    let is_beside = |keyword: &String| {
        !REMARKS.contains(&keyword.as_str()) && !["$defs", "definitions"].contains(&keyword.as_str())
    };
    let has = |keyword: &str| schema.contains_key(keyword);
    let is_alone = schema.keys().filter(|keyword| is_beside(keyword)).count() < 2;
    has("allOf")
        || has("patternProperties")
        || !is_alone && ["anyOf", "oneOf", "$ref"].iter().any(|keyword| has(keyword))
}

/// Whether a reference is to a whole schema, to a name, or to a place that is looked at as a schema. What is not there at all the
/// library refuses by itself.
fn is_of_schema(to: &str) -> bool {
    let Some((_, path)) = to.split_once("#/") else { return true };
    // The library takes it for a slash.
    if path.to_ascii_lowercase().contains("%2f") {
        return false;
    }
    let mut names = path.split('/').peekable();
    while let Some(name) = names.next() {
        if WITH_MAPS.contains(&name) {
            if names.next().is_none() {
                return false;
            }
        } else if WITH_SCHEMAS.contains(&name) {
            names.next_if(|name| name.bytes().all(|byte| byte.is_ascii_digit()));
        } else {
            // It may be another name, escaped.
            return !PLAIN.contains(&name) && !REMARKS.contains(&name) && !name.contains(['%', '~', '+']);
        }
    }
    true
}

/// A number without its point, and how many digits it had behind it.
fn digits(mut of: f64) -> (f64, u32) {
    let mut n_digits = 0;
    while of.fract() != 0.0 && n_digits <= N_DIGITS_MAX {
        of *= 10.0;
        n_digits += 1;
    }
    (of, n_digits)
}

/// Whether the library finds multiples of it: it has a state for each remainder that its factors of 2 and 5 leave, and reckons
/// with ten times the number in 32 bits.
fn is_counted(of: f64) -> bool {
    let (of, n_digits) = digits(of);
    if n_digits > N_DIGITS_MAX || of > MULTIPLE_MAX {
        return false;
    }
    // What is no number above 0 the library refuses by itself.
    let mut odd = of.max(1.0) as u64;
    for factor in [2, 5_u64] {
        while odd.is_multiple_of(factor) {
            odd /= factor;
        }
    }
    odd <= N_REMAINDERS_MAX
}

fn refused(place: &mut String, keyword: &str, why: &str) -> Result<(), (String, String)> {
    within(place, &[keyword], |place| Err((shown(place), format!("the keyword {keyword:?} {why}"))))
}

/// Does something at a place further in.
fn within<T>(place: &mut String, names: &[&str], act: impl FnOnce(&mut String) -> T) -> T {
    let n_bytes = place.len();
    for name in names {
        place.push('/');
        place.push_str(&name.replace('~', "~0").replace('/', "~1"));
    }
    let result = act(place);
    place.truncate(n_bytes);
    result
}

fn shown(place: &str) -> String {
    if place.is_empty() { "/".to_owned() } else { place.to_owned() }
}

/// A text of the library, the keyword that it is about, and what is told instead where it would be hard to understand.
const COMPLAINTS: [(&str, &str, Option<&str>); 13] = [
    (
        "oneOf constraints are not supported",
        "oneOf",
        Some(
            "the keyword \"oneOf\" is supported only where its schemas exclude each other by their types, or by a constant \
             that each of them requires",
        ),
    ),
    ("retrieving it failed", "$ref", Some("the keyword \"$ref\" is supported only within the schema")),
    (
        "retrieving it failed",
        "$schema",
        Some("the keyword \"$schema\" is supported only for the published drafts"),
    ),
    ("does not exist", "$ref", None),
    ("Unknown format", "format", None),
    ("regex parse error", "pattern", None),
    ("lookarounds not supported", "pattern", None),
    ("patternProperty regexes", "patternProperties", None),
    ("Invalid type", "type", None),
    ("minLength", "minLength", None),
    ("minItems", "minItems", None),
    ("multipleOf", "multipleOf", None),
    ("'required'", "required", None),
];

/// Where in a schema the library's complaint points to, and the complaint with the keyword in it.
pub(super) fn place_of(schema: &str, reason: &str) -> (String, String) {
    let whole = || "the schema as a whole".to_owned();
    if let Some(why) = reason.strip_prefix("Unsatisfiable schema: ") {
        return (whole(), format!("the schema allows nothing: {why}"));
    }
    let schema: Option<Value> = serde_json::from_str(schema).ok();
    let places_of = |keyword: &str| {
        let mut places = Vec::new();
        schema.iter().for_each(|schema| find(schema, keyword, &mut String::new(), &mut places));
        places
    };
    let said = COMPLAINTS.iter().filter(|(said, ..)| reason.contains(said));
    let mut found = said.map(|(_, keyword, told)| (keyword, told, places_of(keyword)));
    let Some((keyword, told, places)) = found.find(|(.., places)| !places.is_empty()) else {
        return (whole(), reason.to_owned());
    };
    // Where it stands more than once, the library does not say which of them it means.
    let place = if let [place] = &places[..] { place.clone() } else { whole() };
    let told = match told {
        Some(told) => (*told).to_owned(),
        None if reason.contains(&format!("{keyword:?}")) => reason.to_owned(),
        None => format!("the keyword {keyword:?}: {reason}"),
    };
    (place, told)
}

fn find(value: &Value, keyword: &str, place: &mut String, found: &mut Vec<String>) {
    match value {
        Value::Object(map) => {
            for (name, value) in map {
                within(place, &[name], |place| {
                    found.extend((name == keyword).then(|| place.clone()));
                    find(value, keyword, place, found);
                });
            }
        }
        Value::Array(list) => {
            for (idx, value) in list.iter().enumerate() {
                within(place, &[&idx.to_string()], |place| find(value, keyword, place, found));
            }
        }
        _ => {}
    }
}
