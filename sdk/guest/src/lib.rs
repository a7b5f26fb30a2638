//! Write guests for Trellis: small programs that run next to a language model and script its decoding.
//!
//! A whole guest that lets the model think four times and keeps the answer it was surest of:
//!
//! ```no_run
//! use trellis_guest::{Args, Chat, Model, Result, Sampler, emit, generate_all, seed};
//!
//! trellis_guest::main!(run);
//!
//! fn run() -> Result {
//!     let question = Args::of_session("surest QUESTION").text()?; // 1
//!     let prompt = Model::open_default()?.context()?; // 2
//!     prompt.set_chat(&Chat::new().user(&question))?;
//!     prompt.prefill()?; // 3
//!
//!     let sampler = Sampler::seeded(seed()).temperature(0.8).top_p(0.95).build()?; // 4
//!     let forks = prompt.forks(4, &sampler)?; // 5
//!     let tries = forks.iter().map(|(fork, sampler)| fork.generate(sampler).max_tokens(64));
//!     let answers = generate_all(tries)?; // 6
//!
//!     let surest = answers.iter().max_by(|a, b| a.mean_logprob().total_cmp(&b.mean_logprob()));
//!     emit!("{}\n", surest.expect("there are four").text) // 7
//! }
//! # fn main() {}
//! ```
//!
//! 1. The client's arguments arrive through the session; a mistake comes back with the usage line.
//! 2. A [`Context`] is a token sequence in the host with its KV cache. [`Context::set_chat`] fills it by the
//!    model's chat template.
//! 3. The prompt is computed once, now.
//! 4. A [`Sampler`] says how tokens are drawn. The draws depend on the seed alone: same seed, same text.
//! 5. A fork costs next to nothing: it shares the KV cache of the prompt. Each gets a seed of its own.
//! 6. All four are decoded in one batch, without a crossing into the guest for each token.
//! 7. What is emitted streams to the client. `?` works on every call: an [`Error`] names the value and the
//!    limit, and ends up at the client when `run` returns it.
//!
//! # Three speeds
//!
//! | speed | call | when |
//! |---|---|---|
//! | declarative | [`Context::generate`], [`generate_all`], [`generate_each`] | parameters say it all |
//! | scripted | [`Context::stream`], [`step_all`], [`speculate_all`] | the guest looks at each token and may change course |
//! | raw | [`Context::top`], [`top_all`], [`Context::score`], [`Context::full`] | the guest draws, searches or ranks itself |
//!
//! They mix freely on one context.
//!
//! # What a guest need not write itself
//!
//! [`Context::heal`] for prompts that end within a word, [`Thinking`] for thoughts within a budget, [`SamplerBuilder::bias_where`]
//! for a bias over a set, [`SlidingWindow`] for texts without end, [`Particles`] for weighted populations; and for those that draw by
//! themselves [`log_softmax`], [`Random::draw`] and [`Context::emitter`].
//!
//! # Building
//!
//! A guest is a library crate with `crate-type = ["cdylib"]`, built for `wasm32-wasip2`:
//!
//! ```text
//! trellis build my-guest        # or: cargo build --release --target wasm32-wasip2
//! trellis run my-guest ARGS
//! ```
//!
//! `trellis new my-guest` writes such a crate, `trellis test my-guest` runs its tests, each as a guest of its own with the bundled
//! model `tiny`. The crate also compiles for the machine itself, where `cargo test` tests what calls no host; a call to the host API
//! panics there and says so. What this layer does not cover is in [`bindings`].

mod args;
mod beams;
pub mod bindings;
mod chat;
mod constraints;
mod context;
mod decoding;
mod emitter;
mod error;
mod generate;
mod generations;
mod guesses;
mod healing;
mod mixtures;
mod model;
mod panics;
mod particles;
pub mod policy;
pub mod programs;
mod random;
mod rejection;
mod sampler;
mod session;
mod softmax;
mod steering;
mod streams;
mod thinking;
mod window;

pub use args::Args;
pub use beams::{BeamSearch, Beams, EarlyStopping, Finished, Kept, Live};
#[doc(inline)]
pub use bindings::trellis::host::types::Token;
pub use chat::{Chat, ChatMessage};
pub use constraints::{Beginning, Constraint, Whitespace};
pub use context::{Context, Positions, forget};
pub use decoding::{
    Candidate, Distribution, Pooling, attention_all, embedding_all, full_all, hidden_all, logprobs_all,
    score_all, speculate_all, speculate_tree_all, step_all, top_all, tops_all,
};
pub use emitter::Emitter;
pub use error::{Error, Result};
pub use generate::{Completion, Generate, generate_all};
pub use generations::{Ended, GenerationProgress, Generations, generate_each};
pub use guesses::{GuessTree, Guessed, Guesses};
pub use mixtures::{Mixture, step_mixtures};
pub use model::{ChatEnd, Model, ModelInfo, TextDecoder};
#[doc(hidden)]
pub use panics::{Outcome, report_panics};
pub use particles::{Particle, Particles};
pub use random::{Random, fork_seed};
pub use rejection::Passed;
pub use sampler::{Sampler, SamplerBuilder, TokenMask};
pub use session::{
    Causes, Event, Inbox, Limit, LogLevel, Meter, Usage, call_bytes, emit, emit_json, emit_tokens, leaving,
    limits, log, messages, next_event, receive, receive_json, receive_json_until_leaving, receive_within,
    seed, time_left, try_receive, usage,
};
pub use softmax::log_softmax;
pub use steering::Steering;
pub use streams::{FinishReason, StreamOptions, TextStream, TokenStream};
pub use thinking::{Thinking, Thought, ThoughtEnd};
pub use window::SlidingWindow;

/// Makes a function the guest: `trellis_guest::main!(run);`.
///
/// The function takes nothing and returns `Result<(), E>` with any `E` that can be displayed: [`Error`],
/// `Box<dyn std::error::Error>`, or one of the guest's own. The text of an error is shown to the client.
#[macro_export]
macro_rules! main {
    ($run:path) => {
        // A crate's tests have a `main` of their own.
        #[cfg(test)]
        const _: fn() = || drop($crate::Outcome::into_outcome($run()));
        #[cfg(not(test))]
        const _: () = {
            struct Guest;
            impl $crate::bindings::Guest for Guest {
                fn run() -> ::std::result::Result<(), ::std::string::String> {
                    $crate::report_panics();
                    $crate::Outcome::into_outcome($run())
                }
            }
    $crate::bindings::export!(Guest with_types_in $crate::bindings);
        };
    };
}

/// Compiles the guest in the README.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
