//! Generations under schemas at a high temperature: each is whole, and valid to a validator that is not ours.

use std::collections::BTreeSet;
use std::sync::Arc;

use jsonschema::Validator;
use serde_json::Value;
use trellis_engine::{Ahead, Cause, Finish, ModelHandle, Pull};
use trellis_tests::engines::{Sizes, block_on_for, engine};

use super::{context, hot, pull, rule, schema, text};

/// Objects in objects, enums, bounded lists, patterns, recursion, unions, numbers, formats, maps and tuples. Each bounds its
/// texts to 512 tokens.
const SCHEMAS: [(&str, &str); 10] = [
    (
        "nested objects",
        r#"{"type":"object","properties":{"name":{"type":"string","maxLength":20},"home":{"type":"object","properties":
        {"street":{"type":"string","maxLength":20},"at":{"type":"object","properties":{"x":{"type":"integer","minimum":-99,
        "maximum":99},"y":{"type":"integer","minimum":-99,"maximum":99}},"required":["x","y"],"additionalProperties":false}},
        "required":["street","at"],"additionalProperties":false}},"required":["name","home"],"additionalProperties":false}"#,
    ),
    (
        "enums",
        r#"{"type":"array","minItems":5,"maxItems":9,"items":{"enum":["red","reddish","green","blue",null,true,7,[1],{"a":"b"}]}}"#,
    ),
    (
        "bounded lists",
        r#"{"type":"array","minItems":2,"maxItems":6,"items":{"type":"array","minItems":1,"maxItems":5,
        "items":{"type":"integer","minimum":0,"maximum":999}}}"#,
    ),
    (
        "patterns",
        r#"{"type":"object","properties":{"id":{"type":"string","pattern":"^[A-Z]{2}-[0-9]{4}$"},"tel":{"type":"string",
        "pattern":"^\\+[1-9][0-9]{6,10}$"},"tags":{"type":"array","maxItems":3,"items":{"type":"string","pattern":"^[a-z]{1,8}$"}}},
        "required":["id","tel","tags"],"additionalProperties":false}"#,
    ),
    (
        "recursion",
        r##"{"$defs":{"tree":{"anyOf":[{"type":"integer","minimum":0,"maximum":9999},{"$ref":"#/$defs/node"}]},"node":{"type":
        "object","properties":{"l":{"$ref":"#/$defs/leaf"},"r":{"$ref":"#/$defs/tree"}},"required":["l","r"],
        "additionalProperties":false},"leaf":{"enum":["a","b","c","d"]}},"$ref":"#/$defs/node"}"##,
    ),
    (
        "unions",
        r#"{"type":"array","minItems":2,"maxItems":4,"items":{"oneOf":[{"type":"object","properties":{"kind":{"const":"circle"},
        "r":{"type":"integer","minimum":1,"maximum":500}},"required":["kind","r"],"additionalProperties":false},{"type":"object",
        "properties":{"kind":{"const":"box"},"w":{"type":"integer","minimum":1,"maximum":500},"h":{"type":"integer","minimum":1,
        "maximum":500}},"required":["kind","w","h"],"additionalProperties":false},{"type":"null"}]}}"#,
    ),
    (
        "numbers",
        r#"{"type":"object","properties":{"p":{"type":"number","minimum":0,"maximum":1,"multipleOf":0.01},"n":{"type":"integer",
        "multipleOf":7,"minimum":0,"maximum":7000},"z":{"type":"integer","exclusiveMinimum":-50,"exclusiveMaximum":50}},
        "required":["p","n","z"],"additionalProperties":false}"#,
    ),
    (
        "formats",
        r#"{"type":"object","properties":{"day":{"type":"string","format":"date"},"when":{"type":"string","format":"time",
        "maxLength":20},"who":{"type":"string","format":"uuid"},"from":{"type":"string","format":"ipv4"}},
        "required":["day","when","who","from"],"additionalProperties":false}"#,
    ),
    (
        "maps",
        r#"{"type":"object","patternProperties":{"^k[0-9]{1,3}$":{"type":"boolean"}},"additionalProperties":false,
        "required":["k1","k2"],"minProperties":3,"maxProperties":8}"#,
    ),
    (
        "tuples",
        r#"{"type":"array","prefixItems":[{"type":"string","minLength":3,"maxLength":12},{"type":"boolean"},{"type":["integer",
        "null"],"minimum":0,"maximum":50}],"items":{"type":"string","maxLength":4},"minItems":3,"maxItems":6}"#,
    ),
];

/// The most tokens of a text.
const N_TOKENS_MAX: usize = 512;

/// Streams that decode side by side.
const N_TOGETHER: usize = 64;

struct Outcome {
    n_distinct: usize,
    n_tokens: usize,
    n_tokens_most: usize,
}

/// So many generations under a schema, each whole and valid.
async fn generations(model: &ModelHandle, name: &str, schema_text: &str, n: usize) -> Outcome {
    let schema_value: Value = serde_json::from_str(schema_text).expect("JSON");
    let validator =
        jsonschema::options().should_validate_formats(true).build(&schema_value).expect("a schema");
    let rule = rule(model, &schema(schema_text));
    let (mut texts, mut n_tokens, mut n_tokens_most) = (BTreeSet::new(), 0, 0);
    for first in (0..n).step_by(N_TOGETHER) {
        let mut streams = Vec::new();
        for seed in first..n.min(first + N_TOGETHER) {
            streams.push((Some(context(model, &rule).await), hot(seed as u64)));
        }
        // All of them are started before the first is waited for.
        for (context, sampler) in &mut streams {
            let context = context.as_mut().expect("it was made");
            let settings = || super::settings(sampler, Ahead::Unbounded);
            context.start(trellis_engine::RunKey(1), settings).await.expect("started");
        }
        for (context, sampler) in &mut streams {
            let mut context = context.take().expect("it was made");
            let n_before = context.tokens().len();
            let finish = loop {
                match pull(&mut context, sampler, 1, Ahead::Unbounded).await.expect("pulled") {
                    Pull::Token(_) => {}
                    Pull::Finished(finish) => break finish,
                }
            };
            let (text, n_drawn) = (text(&context, n_before), context.tokens().len() - n_before);
            assert_eq!(finish, Finish::Complete, "{name}: {text:?}");
            assert!(n_drawn <= N_TOKENS_MAX, "{name}: {n_drawn} tokens of {text:?}");
            assert_valid(&validator, name, &text);
            (n_tokens, n_tokens_most) = (n_tokens + n_drawn, n_tokens_most.max(n_drawn));
            texts.insert(text);
        }
    }
    Outcome { n_distinct: texts.len(), n_tokens, n_tokens_most }
}

fn assert_valid(validator: &Validator, name: &str, text: &str) {
    let value: Value =
        serde_json::from_str(text).unwrap_or_else(|error| panic!("{name}: {error} in {text:?}"));
    if let Err(error) = validator.validate(&value) {
        panic!("{name}: {error} in {text:?}");
    }
}

/// The share of different texts that the full count must reach.
fn check(n: usize) {
    let sizes = Sizes { n_pages: 4096, n_host_pages: 512, n_step_rows: 128, n_step_tokens: 1024 };
    let engine = engine("tiny", sizes);
    println!("| schema | generations | distinct | tokens each | longest |");
    println!("|---|---|---|---|---|");
    block_on_for(std::time::Duration::from_secs(7_200), async {
        for (name, text) in SCHEMAS {
            let Outcome { n_distinct, n_tokens, n_tokens_most } =
                generations(engine.handle(), name, text, n).await;
            println!("| {name} | {n} | {n_distinct} | {} | {n_tokens_most} |", n_tokens / n);
            assert!(n_distinct * 1000 >= n * 300, "{name}: {n_distinct} different texts of {n}");
        }
        let stats = engine.handle().stats().await.expect("it runs");
        println!(
            "{} rows, {} sat out, {} in vain",
            stats.n_rows,
            stats.causes[Cause::RowsSatOut],
            stats.causes.n_rows_in_vain()
        );
    });
}

#[test]
fn generations_under_ten_schemas_are_whole_and_valid() {
    check(24);
}

#[test]
#[ignore = "takes a quarter of an hour; prints its table"]
fn a_thousand_generations_under_each_of_ten_schemas() {
    check(1000);
}

/// What a stream costs under a grammar, beside one that is free.
#[test]
#[ignore = "times, which mean something on a quiet machine alone"]
fn of_constrained_streams() {
    use std::time::Instant;
    let engine = engine("tiny", Sizes { n_pages: 4096, ..Sizes::default() });
    let model = engine.handle();
    let long = r#"{"type":"array","minItems":400,"items":{"anyOf":[{"type":"string"},{"type":"integer"}]}}"#;
    block_on_for(std::time::Duration::from_secs(3_600), async {
        let rule = rule(model, &schema(long));
        for n_contexts in [1, 16, 64] {
            let mut times = [Vec::new(), Vec::new()];
            for round in 0..14 {
                let is_constrained = round % 2 == 1;
                let sampler = Arc::new(trellis_engine::sampling::Sampler {
                    // Neither ends by itself.
                    bias: model.model().stop_tokens.iter().map(|&token| (token, f32::NEG_INFINITY)).collect(),
                    ..trellis_engine::sampling::Sampler::clone(&hot(round))
                });
                let mut contexts = Vec::new();
                for _ in 0..n_contexts {
                    let mut context = context(model, &rule).await;
                    context.keep_to(is_constrained.then_some(&rule));
                    contexts.push(context);
                }
                let n_tokens = 200;
                let begun = Instant::now();
                for context in &mut contexts {
                    let settings = || super::settings(&sampler, Ahead::Unbounded);
                    context.start(trellis_engine::RunKey(1), settings).await.expect("started");
                }
                for _ in 0..n_tokens {
                    for context in &mut contexts {
                        let pulled = pull(context, &sampler, 1, Ahead::Unbounded).await.expect("pulled");
                        assert!(matches!(pulled, Pull::Token(_)), "{pulled:?}");
                    }
                }
                let us = begun.elapsed().as_micros() as f64 / f64::from(n_tokens);
                times[usize::from(is_constrained)].push(us);
            }
            let [free, constrained] = times.map(|mut times: Vec<f64>| {
                times.sort_by(f64::total_cmp);
                times[times.len() / 2]
            });
            let share = 100.0 * (constrained / free - 1.0);
            println!(
                "{n_contexts} contexts: free {free:.0} µs a step, constrained {constrained:.0} µs, {share:+.1}%"
            );
        }
        let stats = model.stats().await.expect("it runs");
        println!(
            "{} rows, {} sat out, {} in vain",
            stats.n_rows,
            stats.causes[Cause::RowsSatOut],
            stats.causes.n_rows_in_vain()
        );
    });
}
