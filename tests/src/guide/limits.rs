//! The tables of the limits, out of the code that sets them: names and meanings from the sources, numbers from the
//! defaults themselves.

use std::fmt::Write as _;
use std::fs;

use serde_json::Value;
use trellis::config::Budgets;
use trellis::guest::GuestLimits;

use crate::pack::root;

/// What no configuration changes: a heading, and the constants under it by their files.
const FIXED: [(&str, &[(&str, &str)]); 6] = [
    (
        "Looking",
        &[
            ("daemon/src/guest/host/decoding.rs", "N_TOP_MAX"),
            ("daemon/src/guest/host/decoding.rs", "N_TOPS_MAX"),
            ("daemon/src/guest/host/decoding.rs", "N_LOGPROBS_MAX"),
            ("daemon/src/guest/host/decoding.rs", "N_FULL_MAX"),
            ("daemon/src/guest/host/decoding.rs", "N_STATES_MAX"),
            ("daemon/src/guest/host/looks.rs", "N_TOP_MAX"),
            ("daemon/src/guest/host/looks.rs", "N_LAYERS_MAX"),
            ("daemon/engine/src/command.rs", "N_ATTENTION_TOKENS_MAX"),
            ("daemon/engine/src/command.rs", "N_ENTRIES_PER_TOKEN"),
        ],
    ),
    (
        "Streams and generations",
        &[
            ("daemon/src/guest/host/convert.rs", "N_STOP_TOKENS_MAX"),
            ("daemon/src/guest/host/generate.rs", "N_STOP_TEXTS_MAX"),
            ("daemon/src/guest/host/generate.rs", "STOP_TEXT_BYTES_MAX"),
            ("daemon/engine/src/run.rs", "N_AHEAD_DEFAULT"),
            ("daemon/engine/src/run.rs", "N_AHEAD_MAX"),
        ],
    ),
    (
        "Samplers and logit programs",
        &[
            ("daemon/src/guest/host/samplers.rs", "N_BIAS_MAX"),
            ("daemon/engine/src/sampling/program/mod.rs", "N_OPERATIONS_MAX"),
            ("daemon/engine/src/sampling/program/mod.rs", "N_PARAMETERS_MAX"),
            ("daemon/engine/src/sampling/program/mod.rs", "N_STATE_MAX"),
            ("daemon/engine/src/sampling/program/mod.rs", "N_REPORTS_MAX"),
            ("daemon/engine/src/sampling/program/mod.rs", "N_HANDLES_MAX"),
            ("daemon/engine/src/sampling/program/mod.rs", "N_MEMBERS_MAX"),
            ("daemon/engine/src/sampling/program/mod.rs", "DEPTH_MAX"),
            ("daemon/engine/src/sampling/program/mod.rs", "N_APART_MAX"),
            ("daemon/engine/src/sampling/program/mod.rs", "N_ALIVE_MAX"),
            ("daemon/engine/src/sampling/program/mod.rs", "COST_MAX"),
        ],
    ),
    (
        "Guesses",
        &[
            ("daemon/engine/src/guess.rs", "N_GUESS_MAX"),
            ("daemon/engine/src/guess.rs", "N_TREE_NODES_MAX"),
            ("daemon/src/guest/host/speculation/mod.rs", "N_TEXT_TOKENS_MAX"),
            ("daemon/src/guest/host/speculation/lookup.rs", "N_MATCH_MIN"),
            ("daemon/src/guest/host/speculation/lookup.rs", "N_BACK_MAX"),
        ],
    ),
    (
        "Beams, evictions and constraints",
        &[
            ("daemon/engine/src/sampling/beams/mod.rs", "N_BEAMS_MAX"),
            ("daemon/engine/src/sampling/beams/mod.rs", "N_STOP_TOKENS_MAX"),
            ("daemon/engine/src/kv/evictions.rs", "N_STRETCHES_MAX"),
            ("daemon/src/guest/host/constraints.rs", "BEGINNING_BYTES_MAX"),
        ],
    ),
    (
        "The session",
        &[
            ("daemon/src/guest/host/contexts.rs", "NAME_BYTES_MAX"),
            ("daemon/src/guest/log.rs", "LINE_BYTES_MAX"),
            ("daemon/src/guest/run.rs", "MESSAGE_BYTES_MAX"),
            ("sdk/wire/src/lib.rs", "OUTPUT_BYTES_MAX"),
        ],
    ),
];

/// The tables, as a piece of Markdown.
///
/// # Panics
/// A field or a constant is not where this looks for it, or has no doc comment.
#[must_use]
pub(super) fn tables() -> String {
    let mut text = String::new();
    let limits = serde_json::to_value(GuestLimits::default()).expect("it serialises");
    settings(&mut text, "A guest", "limits", "daemon/src/guest/limits.rs", &limits);
    let budgets = serde_json::to_value(Budgets::default()).expect("it serialises");
    for (level, heading) in [("session", "A session"), ("user", "A user"), ("daemon", "The daemon")] {
        let section = format!("budgets.{level}");
        settings(&mut text, heading, &section, "daemon/src/config/budgets.rs", &budgets[level]);
    }
    for (heading, constants) in FIXED {
        writeln!(text, "## {heading}\n\n| limit | what it bounds | where it is set |\n|---:|---|---|")
            .expect("a string takes all");
        for (file, name) in constants {
            let source = read(file);
            let (docs, expression) =
                constant(&source, name).unwrap_or_else(|| panic!("{file} has no {name}"));
            let number = shown(name, number(expression));
            writeln!(text, "| {number} | {docs} | `{name}` in `{file}` |").expect("a string takes all");
        }
        text.push('\n');
    }
    text
}

/// A table of the fields of a struct that a configuration can set.
fn settings(text: &mut String, heading: &str, section: &str, file: &str, values: &Value) {
    writeln!(text, "## {heading}\n\nIn the section `[{section}]` of the configuration, in `{file}`.\n")
        .expect("a string takes all");
    text.push_str("| setting | default | what it bounds |\n|---|---:|---|\n");
    let source = read(file);
    let fields: Vec<(String, &str)> = source
        .lines()
        .enumerate()
        .filter_map(|(idx, line)| {
            let name = line.trim().strip_prefix("pub ")?.split_once(':')?.0;
            values.get(name).map(|_| (docs_before(&source, idx), name))
        })
        .collect();
    let n_fields = values.as_object().expect("a struct").len();
    assert_eq!(fields.len(), n_fields, "{file} says what each of {heading} is, and once");
    for (docs, name) in fields {
        let number = values[name].as_u64().expect("a number");
        // The largest that TOML has.
        let number = if number == i64::MAX as u64 { "none".to_owned() } else { shown(name, number as f64) };
        writeln!(text, "| `{name}` | {number} | {docs} |").expect("a string takes all");
    }
    text.push('\n');
}

fn read(file: &str) -> String {
    fs::read_to_string(root().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

/// The doc comment and the value of a constant.
fn constant<'a>(source: &'a str, name: &str) -> Option<(String, &'a str)> {
    let declares = format!("const {name}: ");
    let (idx, line) = source.lines().enumerate().find(|(_, line)| line.contains(&declares))?;
    let expression = line.split_once(" = ")?.1.strip_suffix(';')?;
    Some((docs_before(source, idx), expression))
}

/// The doc comment above a line, attributes between them aside.
fn docs_before(source: &str, idx: usize) -> String {
    let above: Vec<&str> = source.lines().take(idx).collect();
    let above = above.iter().rev().skip_while(|line| line.trim().starts_with("#["));
    let mut docs: Vec<&str> = above.map_while(|line| line.trim().strip_prefix("/// ")).collect();
    assert!(!docs.is_empty(), "line {} has no doc comment", idx + 1);
    docs.reverse();
    docs.join(" ").replace('|', "\\|")
}

/// What `1 << 16`, `256 * 1024`, `16.0` and `1_024` come to.
fn number(expression: &str) -> f64 {
    let one = |text: &str| text.replace('_', "").parse::<f64>().unwrap_or_else(|_| panic!("{expression}"));
    if let Some((left, right)) = expression.split_once(" << ") {
        return one(left) * one(right).exp2();
    }
    expression.split(" * ").map(one).product()
}

/// `256 KiB`, `60,000 ms`, `1,024`.
fn shown(name: &str, number: f64) -> String {
    let name = name.to_lowercase();
    let number = number as u64;
    if !name.contains("bytes") {
        let unit = if name.ends_with("_ms") { " ms" } else { "" };
        return format!("{}{unit}", grouped(number));
    }
    let units = [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    let unit = units.iter().find(|(bytes, _)| number >= *bytes && number.is_multiple_of(*bytes));
    unit.map_or(format!("{} bytes", grouped(number)), |(bytes, unit)| format!("{} {unit}", number / bytes))
}

fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let groups = digits.as_bytes().rchunks(3).rev().map(|group| String::from_utf8_lossy(group).into_owned());
    groups.collect::<Vec<_>>().join(",")
}
