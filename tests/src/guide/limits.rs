//! The tables of the limits: those that can be set as the daemon's own table has them, those that cannot out of the sources.

use std::fmt::Write as _;
use std::fs;

use trellis::config::Config;
use trellis::limits::{Limit, Scope, UNLIMITED, Unit, table};

use crate::pack::root;

/// What no configuration changes: a heading, and the constants under it by their files.
const FIXED: [(&str, &[(&str, &str)]); 6] = [
    (
        "Looking",
        &[
            ("daemon/engine/src/asked.rs", "N_TOP_MAX"),
            ("daemon/engine/src/asked.rs", "N_TOPS_MAX"),
            ("daemon/engine/src/asked.rs", "N_LOGPROBS_MAX"),
            ("daemon/src/guest/host/decoding.rs", "N_FULL_MAX"),
            ("daemon/engine/src/asked.rs", "N_STATES_MAX"),
            ("daemon/engine/src/asked.rs", "N_TOP_LOOKED_AT_MAX"),
            ("daemon/engine/src/asked.rs", "N_LAYERS_LOOKED_AT_MAX"),
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
            ("daemon/engine/src/asked.rs", "N_BIAS_MAX"),
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
            ("daemon/engine/src/sampling/operator/mod.rs", "N_FRONT_OPERATIONS_MAX"),
            ("daemon/engine/src/sampling/operator/mod.rs", "N_FRONT_OVER_LOGITS_MAX"),
            ("daemon/engine/src/sampling/operator/mod.rs", "FRONT_COST_MAX"),
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
    let limits = table(&Config::default());
    for (scope, heading) in [
        (Scope::Guest, "A guest"),
        (Scope::Session, "A session"),
        (Scope::User, "A user"),
        (Scope::Daemon, "The daemon"),
    ] {
        settings(&mut text, heading, limits.iter().filter(|limit| limit.scope == scope));
    }
    for (heading, constants) in FIXED {
        writeln!(text, "## {heading}\n\n| limit | what it bounds | where it is set |\n|---:|---|---|")
            .expect("a string takes all");
        for (file, name) in constants {
            let source = read(file);
            let (docs, expression) =
                constant(&source, name).unwrap_or_else(|| panic!("{file} has no {name}"));
            let number = Unit::of(&name.to_lowercase()).shown(number(expression) as u64);
            writeln!(text, "| {number} | {docs} | `{name}` in `{file}` |").expect("a string takes all");
        }
        text.push('\n');
    }
    text
}

/// A table of what a configuration can set.
fn settings<'a>(text: &mut String, heading: &str, limits: impl Iterator<Item = &'a Limit>) {
    writeln!(text, "## {heading}\n\n| setting | default | what it bounds |\n|---|---:|---|")
        .expect("a string takes all");
    for Limit { name, about, unit, value, .. } in limits {
        let number = match *value {
            None => "by the machine".to_owned(),
            Some(UNLIMITED) => "none".to_owned(),
            Some(value) => unit.shown(value),
        };
        writeln!(text, "| `{name}` | {number} | {} |", about.replace('|', "\\|"))
            .expect("a string takes all");
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
