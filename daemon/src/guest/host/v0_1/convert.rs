//! The values of 0.1 as those of today, and back.

use wasmtime::component::Resource;

use super::{new, old};
use crate::guest::host::types::HostError;

/// Something that stands for the same in the other version.
pub(super) trait Convert<T> {
    fn convert(self) -> T;
}

impl<T: 'static> Convert<Self> for Resource<T> {
    fn convert(self) -> Self {
        self
    }
}

impl<T: Convert<U>, U> Convert<Vec<U>> for Vec<T> {
    fn convert(self) -> Vec<U> {
        self.into_iter().map(T::convert).collect()
    }
}

impl<T: Convert<U>, U> Convert<Option<U>> for Option<T> {
    fn convert(self) -> Option<U> {
        self.map(T::convert)
    }
}

impl<T: Convert<U>, U> Convert<Result<U, HostError>> for Result<T, HostError> {
    fn convert(self) -> Result<U, HostError> {
        self.map(T::convert)
    }
}

impl<T: Convert<U>, U> Convert<wasmtime::Result<U>> for wasmtime::Result<T> {
    fn convert(self) -> wasmtime::Result<U> {
        self.map(T::convert)
    }
}

impl<A: Convert<C>, B: Convert<D>, C, D> Convert<(C, D)> for (A, B) {
    fn convert(self) -> (C, D) {
        (self.0.convert(), self.1.convert())
    }
}

/// What is the same type in both.
macro_rules! plain {
    ($($type:ty),+) => {$(
        impl Convert<Self> for $type {
            fn convert(self) -> Self {
                self
            }
        }
    )+};
}

plain! { (), u8, u32, u64, f32, String }

/// Records with the same fields.
macro_rules! records {
    ($($from:ident -> $to:ident: $interface:ident::$name:ident { $($field:ident),+ $(,)? })+) => {$(
        impl Convert<$to::$interface::$name> for $from::$interface::$name {
            fn convert(self) -> $to::$interface::$name {
                let Self { $($field),+ } = self;
                $to::$interface::$name { $($field: $field.convert()),+ }
            }
        }
    )+};
}

records! {
    old -> new: decoding::ScoreRequest { context, continuation }
    old -> new: decoding::SpeculateRequest { context, sampler, guess }
    old -> new: models::ChatMessage { role, content }
    new -> old: decoding::Distribution { candidates, entropy }
    new -> old: session::Meter { used, limit }
    new -> old: types::Argument { name, value, expected }
    new -> old: types::BudgetLimit { what, used, requested, limit }
    new -> old: types::Candidate { token, logprob }
    new -> old: types::ContextLimit { n_tokens, n_positions }
    new -> old: types::ModelPair { left, right }
    new -> old: types::TokenRange { token, vocab_size }
    new -> old: types::UnknownName { name, known }
}

/// Enums and variants with the same cases, but for those of today that were one with another in 0.1.
macro_rules! cases {
    ($(
        $from:ident -> $to:ident: $interface:ident::$name:ident {
            $($plain:ident),* $(; $($full:ident),+ $(; $($today:ident => $then:ident),+)?)?
        }
    )+) => {$(
        impl Convert<$to::$interface::$name> for $from::$interface::$name {
            fn convert(self) -> $to::$interface::$name {
                match self {
                    $(Self::$plain => $to::$interface::$name::$plain,)*
                    $(
                        $(Self::$full(value) => $to::$interface::$name::$full(value.convert()),)+
                        $($(Self::$today(value) => $to::$interface::$name::$then(value.convert()),)+)?
                    )?
                }
            }
        }
    )+};
}

cases! {
    old -> new: models::ChatEnd { Assistant, Message }
    old -> new: models::SpecialTokens { Parse, AsText }
    old -> new: session::LogLevel { Debug, Info, Warn, Error }
    old -> new: streams::Emit { Nothing, Text }
    new -> old: types::Error {
        EmptyContext, Cancelled;
        UnknownModel, TokenOutOfRange, ContextFull, InvalidArgument, BudgetExceeded, NotFound, ModelMismatch,
        NoChatTemplate, ChatTemplate, NoToken, EngineFailed;
        ModelLeaving => UnknownModel, NotANumber => NoToken, GrammarRefused => NoToken, GrammarLeft => NoToken,
        GrammarTooComplex => NoToken
    }
}

impl Convert<new::decoding::StepRequest> for old::decoding::StepRequest {
    fn convert(self) -> new::decoding::StepRequest {
        let Self { context, sampler } = self;
        new::decoding::StepRequest { context, sampler, others: Vec::new() }
    }
}

impl Convert<new::streams::GenerateRequest> for old::streams::GenerateRequest {
    fn convert(self) -> new::streams::GenerateRequest {
        let Self { context, sampler, max_tokens, stop_tokens, stop_strings, emit } = self;
        new::streams::GenerateRequest {
            context,
            sampler,
            seed: None,
            max_tokens,
            stop_tokens,
            stop_texts: stop_strings,
            keep: new::streams::Keep::Tokens,
            emit: emit.convert(),
            top: 0,
            speculation: None,
            others: Vec::new(),
        }
    }
}

impl Convert<old::session::Usage> for new::session::Usage {
    fn convert(self) -> old::session::Usage {
        let Self { tokens, pages, contexts, tokens_in_vain, tokens_cached, .. } = self;
        let (tokens, pages, contexts) = (tokens.convert(), pages.convert(), contexts.convert());
        old::session::Usage { tokens, pages, contexts, tokens_in_vain, tokens_cached }
    }
}

impl Convert<new::streams::StreamOptions> for old::streams::StreamOptions {
    fn convert(self) -> new::streams::StreamOptions {
        let Self { max_tokens, stop_tokens } = self;
        let (top, hidden, speculation, others) = (0, Vec::new(), None, Vec::new());
        new::streams::StreamOptions { max_tokens, stop_tokens, top, hidden, speculation, others }
    }
}

impl Convert<old::streams::FinishReason> for new::streams::FinishReason {
    fn convert(self) -> old::streams::FinishReason {
        match self {
            Self::StopToken(_) | Self::StopText(_) => old::streams::FinishReason::Stop,
            // Nothing of that version is cancelled.
            Self::MaxTokens | Self::Cancelled => old::streams::FinishReason::MaxTokens,
            Self::ContextFull => old::streams::FinishReason::ContextFull,
            Self::GrammarComplete => unreachable!("there were no constraints in 0.1"),
        }
    }
}

/// What no guest of 0.1 can bring about: there were no constraints.
impl Convert<String> for new::types::GrammarRefusal {
    fn convert(self) -> String {
        self.reason
    }
}

impl Convert<String> for new::types::GrammarExit {
    fn convert(self) -> String {
        format!("the grammar does not have token {} at position {}", self.token, self.position)
    }
}

impl Convert<old::streams::Completion> for new::streams::Completion {
    fn convert(self) -> old::streams::Completion {
        let Self { tokens, logprobs, tops: _, text, finish } = self;
        let logprob = logprobs.into_iter().map(f64::from).sum::<f64>() as f32;
        old::streams::Completion { tokens, text, logprob, finish: finish.convert() }
    }
}

impl Convert<old::models::ModelInfo> for new::models::ModelInfo {
    fn convert(self) -> old::models::ModelInfo {
        let Self { name, architecture, vocab_size, n_positions, hidden_size, .. } = self;
        let Self { bos_token, stop_tokens, device, dtype, .. } = self;
        old::models::ModelInfo {
            name,
            architecture,
            vocab_size,
            n_positions,
            hidden_size,
            bos_token,
            stop_tokens,
            device,
            dtype,
        }
    }
}
