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
    old -> new: decoding::StepRequest { context, sampler }
    old -> new: models::ChatMessage { role, content }
    old -> new: streams::GenerateRequest { context, sampler, max_tokens, stop_tokens, stop_strings, emit }
    old -> new: streams::StreamOptions { max_tokens, stop_tokens }
    new -> old: decoding::Distribution { candidates, entropy }
    new -> old: models::ModelInfo {
        name, architecture, vocab_size, n_positions, hidden_size, bos_token, stop_tokens, device, dtype,
    }
    new -> old: session::Meter { used, limit }
    new -> old: session::Usage { tokens, pages, contexts, tokens_in_vain, tokens_cached }
    new -> old: streams::Completion { tokens, text, logprob, finish }
    new -> old: types::Argument { name, value, expected }
    new -> old: types::BudgetLimit { what, used, requested, limit }
    new -> old: types::Candidate { token, logprob }
    new -> old: types::ContextLimit { n_tokens, n_positions }
    new -> old: types::ModelPair { left, right }
    new -> old: types::TokenRange { token, vocab_size }
    new -> old: types::UnknownName { name, known }
}

/// Enums and variants with the same cases.
macro_rules! cases {
    ($(
        $from:ident -> $to:ident: $interface:ident::$name:ident { $($plain:ident),* $(; $($full:ident),+)? }
    )+) => {$(
        impl Convert<$to::$interface::$name> for $from::$interface::$name {
            fn convert(self) -> $to::$interface::$name {
                match self {
                    $(Self::$plain => $to::$interface::$name::$plain,)*
                    $($(Self::$full(value) => $to::$interface::$name::$full(value.convert()),)+)?
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
    new -> old: streams::FinishReason { Stop, MaxTokens, ContextFull }
    new -> old: types::Error {
        EmptyContext, Cancelled;
        UnknownModel, TokenOutOfRange, ContextFull, InvalidArgument, BudgetExceeded, NotFound, ModelMismatch,
        NoChatTemplate, ChatTemplate, NoToken, EngineFailed
    }
}
