//! The JSON Schema test suite, draft 2020-12: what is compiled accepts every valid instance token by token, and no invalid
//! one; what is refused is refused by a keyword.

use std::collections::BTreeMap;

use serde_json::Value;
use trellis_engine::ModelHandle;
use trellis_engine::constraint::{Constraint, ConstraintError};
use trellis_tests::engines::{Sizes, encode, engine};

use std::sync::Arc;

use super::{compile, schema};

const SUITE: &str = include_str!("../../../golden/json-schema-test-suite/draft2020-12.json");

/// Orders of keys that are tried for one instance: a grammar has its keys in one order.
const N_ORDERS_MAX: usize = 5_040;

#[derive(serde::Deserialize)]
struct Group {
    file: String,
    description: String,
    schema: Value,
    tests: Vec<(Value, bool)>,
}

/// All texts of a value without whitespace, by the order of its keys; whole numbers are written as such.
fn texts(value: &Value) -> Vec<String> {
    match value {
        Value::Number(number) => match number.as_f64() {
            Some(x) if number.is_f64() && x.fract() == 0.0 && x.abs() < 1e17 => vec![(x as i64).to_string()],
            _ => vec![number.to_string()],
        },
        Value::Array(items) => {
            let all = items.iter().map(texts).fold(vec![Vec::new()], product);
            all.into_iter().map(|items| format!("[{}]", items.join(","))).collect()
        }
        Value::Object(map) => {
            let members: Vec<Vec<String>> = map
                .iter()
                .map(|(key, value)| {
                    let key = Value::String(key.clone()).to_string();
                    texts(value).into_iter().map(|value| format!("{key}:{value}")).collect()
                })
                .collect();
            let all = members.into_iter().fold(vec![Vec::new()], product);
            let orders = all.into_iter().flat_map(|members| permutations(&members));
            orders.take(N_ORDERS_MAX).map(|members| format!("{{{}}}", members.join(","))).collect()
        }
        other => vec![other.to_string()],
    }
}

fn product(so_far: Vec<Vec<String>>, next: Vec<String>) -> Vec<Vec<String>> {
    let longer = |list: &Vec<String>| {
        next.iter().map(|item| [list.as_slice(), std::slice::from_ref(item)].concat()).collect::<Vec<_>>()
    };
    so_far.iter().flat_map(longer).take(N_ORDERS_MAX).collect()
}

fn permutations(items: &[String]) -> Vec<Vec<String>> {
    if items.len() <= 1 || items.len() > 7 {
        return vec![items.to_vec()];
    }
    let from = |idx: usize| {
        let mut rest = items.to_vec();
        let first = rest.remove(idx);
        permutations(&rest).into_iter().map(move |rest| [vec![first.clone()], rest].concat())
    };
    (0..items.len()).flat_map(from).collect()
}

fn accepts(model: &ModelHandle, constraint: &Arc<Constraint>, text: &str) -> bool {
    let tokens = encode(model, text);
    let reading = constraint.read(&tokens).expect("within the limits");
    reading.n_tokens == tokens.len() && reading.may_end
}

/// The keywords of the draft.
const KEYWORDS: [&str; 46] = [
    "$anchor",
    "$defs",
    "$dynamicAnchor",
    "$dynamicRef",
    "$id",
    "$ref",
    "$schema",
    "$vocabulary",
    "additionalProperties",
    "allOf",
    "anyOf",
    "const",
    "contains",
    "contentEncoding",
    "dependentRequired",
    "dependentSchemas",
    "else",
    "enum",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "format",
    "if",
    "items",
    "maxContains",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minContains",
    "minItems",
    "minLength",
    "minProperties",
    "minimum",
    "multipleOf",
    "not",
    "oneOf",
    "pattern",
    "patternProperties",
    "prefixItems",
    "properties",
    "propertyNames",
    "required",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
    "uniqueItems",
];

/// The keyword that a refusal names: one in quotes rather than another.
fn named(reason: &str) -> Option<&'static str> {
    let in_quotes = KEYWORDS.iter().find(|keyword| reason.contains(&format!("\"{keyword}\"")));
    // Those that are words of English have to be in quotes.
    let is_word =
        |keyword: &&&str| keyword.bytes().any(|it| it.is_ascii_uppercase()) || keyword.starts_with('$');
    let plain = KEYWORDS.iter().filter(is_word).filter(|keyword| reason.contains(**keyword));
    in_quotes.or_else(|| plain.max_by_key(|keyword| keyword.len())).copied()
}

#[test]
fn what_compiles_accepts_what_is_valid_and_nothing_else() {
    let engine = engine("tiny", Sizes::default());
    let model = engine.handle();
    let groups: Vec<Group> = serde_json::from_str(SUITE).expect("the suite is read");
    let (mut n_compiled, mut n_instances, mut n_valid, mut n_accepted) = (0, 0, 0, 0);
    let mut refusals: BTreeMap<&str, usize> = BTreeMap::new();
    let mut wrong = Vec::new();
    for Group { file, description, schema: value, tests } in &groups {
        let constraint = match compile(model, &schema(&value.to_string())) {
            Ok(constraint) => constraint,
            Err(ConstraintError::Refused { place, reason }) => {
                match named(&reason) {
                    _ if reason.contains("allows nothing") => {
                        *refusals.entry("nothing is valid").or_default() += 1
                    }
                    Some(keyword) => *refusals.entry(keyword).or_default() += 1,
                    None => {
                        wrong.push(format!("{file}, {description}: no keyword in {reason:?} at {place:?}"))
                    }
                }
                continue;
            }
            Err(error) => panic!("{file}, {description}: {error}"),
        };
        n_compiled += 1;
        for (instance, is_valid) in tests {
            n_instances += 1;
            n_valid += usize::from(*is_valid);
            let is_accepted = texts(instance).iter().any(|text| accepts(model, &constraint, text));
            n_accepted += usize::from(is_accepted);
            if is_accepted != *is_valid {
                let what = if is_accepted { "accepted and invalid" } else { "valid and not accepted" };
                wrong.push(format!("{file}, {description}: {instance} is {what}: {value}"));
            }
        }
    }
    println!(
        "{n_compiled} of {} schemas compile, with {n_instances} instances; of {n_valid} valid ones {n_accepted} are accepted",
        groups.len()
    );
    println!("refused by: {refusals:?}");
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}
