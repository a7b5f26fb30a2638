//! JSON that is nearly right: a document with a few changes.

use arbitrary::{Result, Unstructured};
use serde_json::{Map, Number, Value};

/// The most changes of one document.
const N_CHANGES_MAX: usize = 8;
/// The most levels that are stepped down to a change.
const DEPTH_MAX: usize = 8;

/// Numbers at the ends of somebody's range.
const NUMBERS: [i64; 14] = [0, 1, 2, 3, 4, 7, 16, 64, 1 << 16, 1 << 18, 1 << 31, 1 << 53, i64::MAX, -1];

/// A document with changes, by these bytes: `words` are strings and names that mean something in it.
///
/// # Errors
/// None: bytes that are used up are zeros.
pub(crate) fn changed(base: &Value, words: &[&str], bytes: &mut Unstructured<'_>) -> Result<Value> {
    let mut document = base.clone();
    for _ in 0..bytes.int_in_range(0..=N_CHANGES_MAX)? {
        change(&mut document, base, words, bytes)?;
    }
    Ok(document)
}

fn change(document: &mut Value, base: &Value, words: &[&str], bytes: &mut Unstructured<'_>) -> Result<()> {
    let node = somewhere(document, bytes)?;
    match (bytes.int_in_range(0..=3)?, node) {
        (0, Value::Object(map)) if !map.is_empty() => {
            let name = nth_name(map, bytes)?;
            map.remove(&name);
        }
        (0, Value::Array(list)) if !list.is_empty() => {
            list.remove(bytes.choose_index(list.len())?);
        }
        (1, Value::Object(map)) => {
            map.insert(word(words, bytes)?, value(base, words, bytes)?);
        }
        (1, Value::Array(list)) => list.push(value(base, words, bytes)?),
        (_, node) => *node = value(base, words, bytes)?,
    }
    Ok(())
}

/// Any node of a document.
fn somewhere<'a>(document: &'a mut Value, bytes: &mut Unstructured<'_>) -> Result<&'a mut Value> {
    let mut node = document;
    for _ in 0..bytes.int_in_range(0..=DEPTH_MAX)? {
        let n_children = match node {
            Value::Object(map) => map.len(),
            Value::Array(list) => list.len(),
            _ => 0,
        };
        if n_children == 0 {
            break;
        }
        let idx = bytes.choose_index(n_children)?;
        node = match node {
            Value::Object(map) => map.values_mut().nth(idx).expect("it has so many"),
            Value::Array(list) => &mut list[idx],
            _ => unreachable!("it has children"),
        };
    }
    Ok(node)
}

fn nth_name(map: &Map<String, Value>, bytes: &mut Unstructured<'_>) -> Result<String> {
    let idx = bytes.choose_index(map.len())?;
    Ok(map.keys().nth(idx).expect("it has so many").clone())
}

fn word(words: &[&str], bytes: &mut Unstructured<'_>) -> Result<String> {
    if words.is_empty() || bytes.ratio(1, 4)? {
        return bytes.arbitrary();
    }
    Ok((*bytes.choose(words)?).to_owned())
}

fn value(base: &Value, words: &[&str], bytes: &mut Unstructured<'_>) -> Result<Value> {
    Ok(match bytes.int_in_range(0..=9)? {
        0 => Value::Null,
        1 => Value::Bool(bytes.arbitrary()?),
        2 | 3 => Value::from(*bytes.choose(&NUMBERS)?),
        4 => Value::from(bytes.arbitrary::<u64>()?),
        5 => Number::from_f64(bytes.arbitrary()?).map_or(Value::Null, Value::Number),
        6 => Value::String(word(words, bytes)?),
        7 => Value::Array(vec![Value::from(bytes.arbitrary::<u8>()?); bytes.int_in_range(0..=4)?]),
        8 => Value::Object(Map::from_iter([(word(words, bytes)?, Value::from(bytes.arbitrary::<i32>()?))])),
        _ => somewhere(&mut base.clone(), bytes)?.clone(),
    })
}
