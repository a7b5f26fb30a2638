//! Engine errors and values as the host API has them.

use trellis_engine::account::BudgetExceeded;
use trellis_engine::batch::{Candidate, OutputFault, Token};
use trellis_engine::sampling::SamplerError;
use trellis_engine::{
    EngineError, Finish, Guess, GuessNode, GuessTree, GuessTreeError, ModelHandle, SteeringError,
};

use super::types::HostError;
use crate::guest::bindings::trellis::host::decoding::Guess as GuestGuess;
use crate::guest::bindings::trellis::host::streams::FinishReason;
use crate::guest::bindings::trellis::host::types::{
    Argument, BudgetLimit, Candidate as ApiCandidate, ContextLimit, Error as ApiError, ModelPair, TokenRange,
};
use crate::guest::log::pieces;

/// Bytes of a wrong value that an error repeats.
const VALUE_BYTES_MAX: usize = 100;

/// Tokens that end one stream.
const N_STOP_TOKENS_MAX: usize = 256;

/// The error for an argument outside its range.
pub(super) fn invalid(name: &str, value: impl ToString, expected: impl Into<String>) -> HostError {
    let value = value.to_string();
    let mut shown = pieces(&value, VALUE_BYTES_MAX).next().unwrap_or_default().to_owned();
    if shown.len() < value.len() {
        shown.push('…');
    }
    ApiError::InvalidArgument(Argument { name: name.to_owned(), value: shown, expected: expected.into() })
        .into()
}

/// Checks tokens against a model's vocabulary.
pub(super) fn check_tokens(model: &ModelHandle, tokens: &[Token]) -> Result<(), HostError> {
    let vocab_size = model.limits().vocab_size;
    match tokens.iter().find(|&&token| token as usize >= vocab_size) {
        Some(&token) => Err(token_out_of_range(token, vocab_size).into()),
        None => Ok(()),
    }
}

/// Checks the tokens that end a stream; each token drawn is looked up among them.
pub(super) fn check_stop_tokens(model: &ModelHandle, tokens: &[Token]) -> Result<(), HostError> {
    if tokens.len() > N_STOP_TOKENS_MAX {
        return Err(invalid("stop-tokens", tokens.len(), format!("at most {N_STOP_TOKENS_MAX}")));
    }
    check_tokens(model, tokens)
}

/// Checks that two arguments belong to the same model.
pub(super) fn check_same_model(left: &ModelHandle, right: &ModelHandle) -> Result<(), HostError> {
    if std::sync::Arc::ptr_eq(left.model(), right.model()) {
        return Ok(());
    }
    Err(model_mismatch(left, right))
}

/// That the tokens of one model mean the same to another.
pub(super) fn check_same_vocabulary(left: &ModelHandle, right: &ModelHandle) -> Result<(), HostError> {
    let of =
        |model: &ModelHandle| (model.model().tokenizer.fingerprint().to_owned(), model.limits().vocab_size);
    if of(left) == of(right) { Ok(()) } else { Err(model_mismatch(left, right)) }
}

fn model_mismatch(left: &ModelHandle, right: &ModelHandle) -> HostError {
    let pair = ModelPair { left: left.model().name.clone(), right: right.model().name.clone() };
    ApiError::ModelMismatch(pair).into()
}

/// Why decoding ended, where the engine ended it.
pub(super) fn finish_reason(finish: Finish) -> FinishReason {
    match finish {
        Finish::Stop => unreachable!("the stop token was given before, and ended it"),
        Finish::MaxTokens => FinishReason::MaxTokens,
        Finish::ContextFull => FinishReason::ContextFull,
        Finish::Complete => FinishReason::GrammarComplete,
    }
}

pub(super) fn candidate(Candidate { token, logprob }: Candidate) -> ApiCandidate {
    ApiCandidate { token, logprob }
}

/// A length as the host API counts it.
pub(super) fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

fn token_out_of_range(token: Token, vocab_size: usize) -> ApiError {
    ApiError::TokenOutOfRange(TokenRange { token, vocab_size: count(vocab_size) })
}

impl From<EngineError> for HostError {
    fn from(error: EngineError) -> Self {
        let text = error.to_string();
        let refused = match error {
            EngineError::TokenOutOfRange { token, vocab_size } => token_out_of_range(token, vocab_size),
            EngineError::ContextFull { n_tokens, n_positions } => ApiError::ContextFull(ContextLimit {
                n_tokens: count(n_tokens),
                n_positions: count(n_positions),
            }),
            EngineError::TooLong { n_tokens, length } => {
                return invalid("n-tokens", n_tokens, format!("at most {length}, the length of the context"));
            }
            EngineError::NotThere { start, end, length } => {
                return invalid(
                    "end",
                    format!("{start}..{end}"),
                    format!("tokens within the {length} there are"),
                );
            }
            EngineError::CannotEvict => {
                return invalid("context", text, "one of a model whose layers see all positions");
            }
            EngineError::TooManyStretches { n_stretches, n_stretches_max } => {
                let stretches = format!("{n_stretches} stretches of tokens");
                return invalid(
                    "positions",
                    stretches,
                    format!("at most {n_stretches_max} between closed holes"),
                );
            }
            EngineError::EvictsConstrained { start, end, first } => {
                let expected =
                    format!("tokens before {first}, from where on the context keeps to a constraint");
                return invalid("end", format!("{start}..{end}"), expected);
            }
            EngineError::NoSuchLayer { n_layers, n_layers_max } => {
                return invalid("layers", n_layers, format!("at most {n_layers_max}"));
            }
            EngineError::NoLayers => return invalid("layers", "none", "at least one"),
            EngineError::NoAttentionIn { layer, n_layers } => {
                return invalid("layers", layer, format!("less than {n_layers}"));
            }
            EngineError::LayerTwice { layer } => {
                return invalid("layers", format!("{layer} again"), "each layer once");
            }
            EngineError::AttentionTooLong { n_tokens, n_tokens_max } => {
                return invalid("contexts", format!("{n_tokens} tokens"), format!("at most {n_tokens_max}"));
            }
            EngineError::LooksAtEvicted { n_evicted } => {
                let found = format!("one out of which {n_evicted} tokens were evicted");
                return invalid("context", found, "one with all its tokens".to_owned());
            }
            EngineError::GuessTooLong { n_tokens, n_tokens_max } => {
                return invalid("guess", format!("{n_tokens} tokens"), format!("at most {n_tokens_max}"));
            }
            EngineError::GuessTree(error) => return no_tree(error),
            EngineError::JobTooLarge { n_rows, n_rows_max } => {
                return invalid("contexts", n_rows, format!("at most {n_rows_max} at once"));
            }
            EngineError::TooManyBeams { n_beams, n_beams_max } => {
                return invalid("n-beams", n_beams, format!("at most {n_beams_max} in one step"));
            }
            EngineError::MixtureTooLarge { n_others, n_others_max } => {
                return invalid("others", n_others, format!("at most {n_others_max}"));
            }
            EngineError::MixtureWithoutProgram => {
                return invalid(
                    "sampler",
                    "one that draws by the chain",
                    "a program, which alone sees the others",
                );
            }
            EngineError::JobMixed | EngineError::JobDisturbed => {
                return invalid("contexts", "a job over several", text);
            }
            EngineError::EmptyContext => ApiError::EmptyContext,
            EngineError::Budget(exceeded) => over_budget(&exceeded, ""),
            EngineError::BeamsOverBudget { n_beams, exceeded } => {
                over_budget(&exceeded, &format!(", for a search of {n_beams} beams"))
            }
            EngineError::NoPages { n_needed, n_pages } => ApiError::BudgetExceeded(BudgetLimit {
                what: "pages of the device".to_owned(),
                used: 0,
                requested: n_needed as u64,
                limit: n_pages as u64,
            }),
            EngineError::Sampler(error) => return error.into(),
            EngineError::Steering(error) => return error.into(),
            EngineError::Constraint(error) => return error.into(),
            EngineError::Output(OutputFault::NothingToDraw) => ApiError::NoToken(text),
            EngineError::Output(OutputFault::NotANumber) => ApiError::NotANumber(text),
            EngineError::NotSaved { name } => ApiError::NotFound(name),
            EngineError::Step(_)
            | EngineError::Memory(_)
            | EngineError::KvTooSmall { .. }
            | EngineError::Unloaded
            | EngineError::Failed(_)
            | EngineError::Stopped => ApiError::EngineFailed(text),
        };
        refused.into()
    }
}

fn over_budget(exceeded: &BudgetExceeded, for_what: &str) -> ApiError {
    ApiError::BudgetExceeded(BudgetLimit {
        what: format!("{} of the {}{for_what}", exceeded.what, exceeded.level),
        used: exceeded.used,
        requested: exceeded.requested,
        limit: exceeded.limit,
    })
}

impl From<BudgetExceeded> for HostError {
    fn from(exceeded: BudgetExceeded) -> Self {
        EngineError::from(exceeded).into()
    }
}

impl From<SteeringError> for HostError {
    fn from(error: SteeringError) -> Self {
        match error {
            SteeringError::NoSuchLayer { n_layers, n_layers_max } => {
                invalid("layer", n_layers, format!("at most {n_layers_max}"))
            }
            SteeringError::LayerTwice { n_layers } => {
                invalid("layer", format!("{n_layers} again"), "each layer once")
            }
            SteeringError::Length { n_layers, length, hidden_size } => {
                let found = format!("{length} numbers for layer {n_layers}");
                invalid("values", found, format!("{hidden_size}, as a hidden state has"))
            }
            SteeringError::NotFinite { n_layers, idx, value } => {
                invalid("values", format!("{value} at {idx} for layer {n_layers}"), "finite numbers")
            }
            SteeringError::TooLarge { n_bytes, n_bytes_max } => {
                let (what, used) = ("bytes that a step brings to the device".to_owned(), 0);
                let (requested, limit) = (n_bytes as u64, n_bytes_max as u64);
                ApiError::BudgetExceeded(BudgetLimit { what, used, requested, limit }).into()
            }
            SteeringError::PastEnd { from, length } => {
                invalid("start", from, format!("at most {length}, the length of the context"))
            }
            SteeringError::Evicted { n_evicted } => {
                let found = format!("one out of which {n_evicted} tokens were evicted");
                invalid("context", found, "one with all its tokens")
            }
        }
    }
}

impl From<SamplerError> for HostError {
    fn from(error: SamplerError) -> Self {
        match error {
            SamplerError::OutOfRange { name, value, expected } => invalid(name, value, expected),
            SamplerError::Parameter { idx, value } => {
                invalid("parameters", format!("{value} at {idx}"), "finite numbers")
            }
            SamplerError::Groups { n_groups, n_beams } => {
                invalid("n-groups", n_groups, format!("a divisor of n-beams, which is {n_beams}"))
            }
            SamplerError::TokenOutOfRange { token, vocab_size } => {
                token_out_of_range(token, vocab_size).into()
            }
            SamplerError::EndsInARow => {
                invalid("program", "one that ends in a row", "one that ends in a token")
            }
            SamplerError::EndsInNoRow => {
                let expected = "one that ends in a row and keeps nothing from token to token";
                invalid("program", "another", expected)
            }
            SamplerError::TooMany { what, n, max } => invalid(what, n, format!("at most {max}")),
            SamplerError::MaskSize { n_tokens, vocab_size } => {
                invalid("mask", format!("of {n_tokens} tokens"), format!("one of {vocab_size} tokens"))
            }
        }
    }
}

/// A guest's tree of guesses.
///
/// # Errors
/// The list is no tree.
pub(super) fn guess_tree(guesses: &[GuestGuess]) -> Result<Guess, HostError> {
    let node = |guess: &GuestGuess| GuessNode { token: guess.token, parent: guess.parent };
    let nodes: Vec<GuessNode> = guesses.iter().map(node).collect();
    GuessTree::new(&nodes).map(Guess::from).map_err(no_tree)
}

fn no_tree(error: GuessTreeError) -> HostError {
    match error {
        GuessTreeError::TooLarge { n_nodes, n_nodes_max } => {
            invalid("guesses", n_nodes, format!("at most {n_nodes_max}"))
        }
        GuessTreeError::TooDeep { node, depth, depth_max } => {
            let found = format!("number {node}, {depth} tokens behind the context");
            invalid("guesses", found, format!("at most {depth_max} tokens behind it"))
        }
        GuessTreeError::NotBefore { node, parent } => {
            invalid("guesses", format!("number {node} behind number {parent}"), "behind one before it")
        }
        GuessTreeError::Twice { first, second, token } => {
            let found = format!("token {token} twice in one place, as number {first} and {second}");
            invalid("guesses", found, "each token once")
        }
    }
}
