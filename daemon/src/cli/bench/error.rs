//! Why there is nothing to report, or nothing good.

use std::path::PathBuf;

use trellis_engine::batch::Token;
use trellis_engine::model::EncodeError;

use super::GUEST;
use super::mix::MixError;

/// Why there is nothing to report, or nothing good.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BenchError {
    #[error(
        "the guest {GUEST:?} is not in ./guest-examples, nor in the checkout that this program was built from"
    )]
    NoProbe,
    #[error("a prompt of {n_prompt} and {n_tokens} tokens do not fit in a context of {n_positions}")]
    TooManyTokens { n_prompt: usize, n_tokens: usize, n_positions: usize },
    #[error("{wanted} tokens were asked for and {got} came")]
    Short { wanted: usize, got: usize },
    #[error("greedy decoding differs {place}: token {idx} is {found}, alone it is {expected}")]
    Mismatch { place: String, idx: usize, expected: Token, found: Token },
    #[error("the daemon did not do as asked: {said}")]
    Server { said: String },
    #[error("targets missed: {}", .names.join(", "))]
    Missed { names: Vec<&'static str> },
    #[error(
        "{n_contexts} contexts of {n_positions} positions need {needed} pages of KV cache, the engine has {n_pages}"
    )]
    TooFewPages { n_contexts: usize, n_positions: usize, needed: usize, n_pages: usize },
    #[error("a batch of {n_contexts} contexts: a step of this engine takes {n_rows_max}")]
    TooManyContexts { n_contexts: usize, n_rows_max: usize },
    #[error(
        "{n_contexts} contexts of {n_tokens} tokens were never decoded together: ask for more tokens with --tokens"
    )]
    NeverTogether { n_contexts: usize, n_tokens: usize },
    #[error(
        "in a batch of {n_contexts} log-probabilities differ from those alone by {mean} nat in the mean, {p99} at the \
         99th percentile, {regret} for a token that one of them did not choose; {mean_max}, {tail_max} and {tail_max} \
         are allowed"
    )]
    Disagreement { n_contexts: usize, mean: f64, p99: f64, regret: f64, mean_max: f64, tail_max: f64 },
    #[error(
        "greedy decoding differs {place}: token {idx} is {found}, {regret} nat less probable than {expected}, which \
         it is alone; {regret_max} are allowed"
    )]
    Regret { place: String, idx: usize, expected: Token, found: Token, regret: f64, regret_max: f64 },
    #[error("slower than {limit} times the best peer: {}", .rows.join(", "))]
    SlowerThanPeers { rows: Vec<String>, limit: f64 },
    #[error("{path}, line {line}: expected {{\"what\": NAME, \"ms\": NUMBER}}: {source}", path = .path.display())]
    Peers { path: PathBuf, line: usize, source: serde_json::Error },
    #[error("{path} has none of the rows that are measured: {}", .rows.join(", "), path = .path.display())]
    NoPeers { path: PathBuf, rows: Vec<String> },
    #[error("the times of others are for 16 bits, and this would compute in f32: use --dtype bf16 on a GPU")]
    PeersOfOtherDtype,
    #[error(
        "{what}: the peer reads contexts of {needed}, this would read {context_len}: rerun with --context {needed}"
    )]
    ShorterThanPeer { what: String, context_len: usize, needed: usize },
    #[error("--contexts is for the measures of the CPU: use --batch {n_contexts} on a GPU")]
    ContextsOfGpu { n_contexts: u32 },
    #[error("--ops measures the kernels of a GPU, and this would run on the CPU")]
    NoGpu,
    #[error("no step had all of {n_rows} rows, of contexts of {length}: this machine is too busy to tell")]
    NoSteps { n_rows: usize, length: usize },
    #[error("contexts of a phase that is over were still there {seconds} s later")]
    Lingering { seconds: u64 },
    #[error("the tokenizer that comes with the program: {source}")]
    Tokenizer { source: Box<trellis_engine::model::ModelError> },
    #[error("the model that was loaded is not among those of the daemon")]
    NoOtherModel,
    #[error(transparent)]
    Mix(#[from] MixError),
    #[error(transparent)]
    Cuda(#[from] trellis_cuda::CudaError),
    #[error(transparent)]
    Engine(#[from] trellis_engine::EngineError),
    #[error(transparent)]
    Constraint(#[from] trellis_engine::constraint::ConstraintError),
    #[error(transparent)]
    Encode(#[from] EncodeError),
}

impl BenchError {
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Mismatch { .. }
            | Self::Missed { .. }
            | Self::Short { .. }
            | Self::Disagreement { .. }
            | Self::Regret { .. }
            | Self::SlowerThanPeers { .. } => 1,
            _ => 2,
        }
    }
}
