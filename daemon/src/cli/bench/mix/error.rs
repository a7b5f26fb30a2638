//! What can be wrong with a mix file, and with running it here.

use std::io;
use std::path::PathBuf;

use crate::nearest::Hint;

/// Why a mix cannot be run.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MixError {
    #[error("no mix is named {name:?}, nor is there such a file (`--mix list` lists all){hint}")]
    UnknownMix { name: String, hint: Hint },
    #[error("{path}: {source}", path = .path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{source}")]
    Parse { source: Box<toml::de::Error> },
    #[error("{place} has a field {key:?} that nothing is known about{hint}")]
    UnknownKey { place: String, key: String, hint: Hint },
    #[error("{place}: {key} is {found}, expected {expected}")]
    Value { place: String, key: &'static str, expected: String, found: String },
    #[error("{place} lacks the field {key:?}")]
    Missing { place: String, key: &'static str },
    #[error("{place}: no kind of load is named {kind:?}{hint}")]
    UnknownKind { place: String, kind: String, hint: Hint },
    #[error(
        "{place}: program is {name:?}, expected one of {known}, or a table of operations and reductions{hint}"
    )]
    UnknownProgram { place: String, name: String, known: String, hint: Hint },
    #[error("{place}: {field} says how tokens are drawn, and so does program: leave one of them out")]
    DrawsTwice { place: String, field: &'static str },
    #[error("load {load:?}: {source}")]
    Program { load: String, source: trellis_engine::sampling::program::ProgramError },
    #[error("a mix needs a load: add a table [[load]]")]
    NoLoads,
    #[error("two loads are named {name:?}: give each a name of its own")]
    SameName { name: String },
    #[error("{place} names the load {name:?}, which there is not{hint}")]
    UnknownLoad { place: String, name: String, hint: Hint },
    #[error("{place} names the load {name:?} twice")]
    LoadTwice { place: String, name: String },
    #[error("{second:?} is the second model of the mix, beside which there is no room for {other:?}")]
    ThreeModels { second: String, other: String },
    #[error("{field} says which loads run together, and so do the tables [[phase]]: leave one of them out")]
    PhasesTwice { field: &'static str },
    #[error("alone and together are both false: nothing would be measured")]
    NothingMeasured,
    #[error("{place}: stagger spreads the ends of runs, which only run_tokens gives an end")]
    StaggerWithoutRuns { place: String },
    #[error(
        "{place}: a run of {run_tokens} tokens does not fit before the context goes back to its prompt, after {wrap_tokens}"
    )]
    RunPastWrap { place: String, run_tokens: usize, wrap_tokens: usize },
    #[error(
        "load {load:?}: a prompt of {n_prompt} and {n_tokens} tokens do not fit in a context of {n_positions}"
    )]
    TooLong { load: String, n_prompt: usize, n_tokens: usize, n_positions: usize },
    #[error("phase {phase:?} needs {needed} pages of KV cache, the engine has {n_pages}")]
    TooFewPages { phase: String, needed: usize, n_pages: usize },
    #[error("load {load:?}: {source}")]
    Sampler { load: String, source: trellis_engine::sampling::SamplerError },
    #[error("load {load:?} gave no token in {seconds:.0} s: measure for longer, or look why it starves")]
    Silent { load: String, seconds: f64 },
}
