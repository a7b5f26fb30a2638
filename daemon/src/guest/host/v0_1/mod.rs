//! The host API as it was in 0.1, for components that were made for it.
//!
//! A thin layer: every function converts what it was given ([`convert`]), calls the function of today with it, past the
//! guest's tape, and converts what that answers. There are no other objects and no other rules than today's; a recording
//! holds today's calls.

pub(crate) mod bindings;
mod convert;

use trellis_engine::EngineError;
use wasmtime::component::Resource;

use self::bindings::trellis::host as old;
use self::convert::Convert;
use super::taped::Taped;
use super::types::{GuestContext, GuestDecoder, GuestMask, GuestModel, GuestSampler, GuestStream, HostError};
use crate::guest::bindings::trellis::host as new;
use crate::guest::bindings::trellis::host::session::Inbox;
use crate::guest::bindings::trellis::host::types::{Argument, Error as ApiError};

/// Implements a trait of 0.1 by the trait and the functions of the same names; those that have another shape today stand
/// after them.
macro_rules! forward {
    ($interface:ident::$trait:ident { $($functions:tt)* } $({ $($others:item)* })?) => {
        impl old::$interface::$trait for Taped<'_> {
            forward!(@functions $interface::$trait, $($functions)*);
            $($($others)*)?
        }
    };
    (@functions $interface:ident::$trait:ident,) => {};
    (
        @functions $interface:ident::$trait:ident,
        fn $name:ident($($argument:ident: $type:ty),*) -> $reply:ty; $($rest:tt)*
    ) => {
        fn $name(&mut self, $($argument: $type),*) -> $reply {
            <Self as new::$interface::$trait>::$name(self, $($argument.convert()),*).convert()
        }

        forward!(@functions $interface::$trait, $($rest)*);
    };
    (
        @functions $interface:ident::$trait:ident,
        async fn $name:ident($($argument:ident: $type:ty),*) -> $reply:ty; $($rest:tt)*
    ) => {
        async fn $name(&mut self, $($argument: $type),*) -> $reply {
            <Self as new::$interface::$trait>::$name(self, $($argument.convert()),*).await.convert()
        }

        forward!(@functions $interface::$trait, $($rest)*);
    };
}

impl old::types::Host for Taped<'_> {
    fn convert_error(&mut self, error: HostError) -> wasmtime::Result<old::types::Error> {
        <Self as new::types::Host>::convert_error(self, error).convert()
    }
}

forward!(models::Host {
    fn names() -> wasmtime::Result<Vec<String>>;
});

forward!(models::HostModel {
    async fn open(name: Option<String>) -> Result<Resource<GuestModel>, HostError>;
    fn info(model: Resource<GuestModel>) -> wasmtime::Result<old::models::ModelInfo>;
    async fn encode(
        model: Resource<GuestModel>, text: String, special: old::models::SpecialTokens
    ) -> Result<Vec<u32>, HostError>;
    async fn decode(model: Resource<GuestModel>, tokens: Vec<u32>) -> Result<String, HostError>;
    fn token_bytes(model: Resource<GuestModel>, token: u32) -> Result<Vec<u8>, HostError>;
    async fn encode_chat(
        model: Resource<GuestModel>, messages: Vec<old::models::ChatMessage>, end: old::models::ChatEnd
    ) -> Result<Vec<u32>, HostError>;
    fn drop(model: Resource<GuestModel>) -> wasmtime::Result<()>;
});

forward!(models::HostTextDecoder {
    fn new(model: Resource<GuestModel>) -> wasmtime::Result<Resource<GuestDecoder>>;
    fn push(decoder: Resource<GuestDecoder>, token: u32) -> Result<String, HostError>;
    fn finish(decoder: Resource<GuestDecoder>) -> wasmtime::Result<String>;
    fn drop(decoder: Resource<GuestDecoder>) -> wasmtime::Result<()>;
});

forward!(contexts::Host {
    async fn forget(name: String) -> Result<(), HostError>;
});

forward!(contexts::HostContext {
    async fn append(context: Resource<GuestContext>, tokens: Vec<u32>) -> Result<(), HostError>;
    async fn append_text(
        context: Resource<GuestContext>, text: String, special: old::models::SpecialTokens
    ) -> Result<u32, HostError>;
    async fn fork(context: Resource<GuestContext>) -> Result<Resource<GuestContext>, HostError>;
    async fn truncate(context: Resource<GuestContext>, n_tokens: u32) -> Result<(), HostError>;
    fn length(context: Resource<GuestContext>) -> wasmtime::Result<u32>;
    fn capacity(context: Resource<GuestContext>) -> wasmtime::Result<u32>;
    fn tokens(context: Resource<GuestContext>, start: u32, end: u32) -> wasmtime::Result<Vec<u32>>;
    async fn prefill(context: Resource<GuestContext>) -> Result<(), HostError>;
    async fn save(context: Resource<GuestContext>, name: String) -> Result<(), HostError>;
    fn drop(context: Resource<GuestContext>) -> wasmtime::Result<()>;
} {
    async fn create(&mut self, model: Resource<GuestModel>) -> Result<Resource<GuestContext>, HostError> {
        new::contexts::HostContext::create(self, model).await.map_err(unloaded)
    }

    async fn open(
        &mut self,
        model: Resource<GuestModel>,
        name: String,
    ) -> Result<Resource<GuestContext>, HostError> {
        new::contexts::HostContext::open(self, model, name).await.map_err(unloaded)
    }
});

impl old::samplers::Host for Taped<'_> {}

forward!(samplers::HostTokenMask {
    fn allow(model: Resource<GuestModel>, tokens: Vec<u32>) -> Result<Resource<GuestMask>, HostError>;
    fn forbid(model: Resource<GuestModel>, tokens: Vec<u32>) -> Result<Resource<GuestMask>, HostError>;
    fn drop(mask: Resource<GuestMask>) -> wasmtime::Result<()>;
});

forward!(samplers::HostSampler {
    fn new(seed: u64) -> wasmtime::Result<Resource<GuestSampler>>;
    fn with_seed(sampler: Resource<GuestSampler>, seed: u64) -> wasmtime::Result<Resource<GuestSampler>>;
    fn set_temperature(sampler: Resource<GuestSampler>, temperature: f32) -> Result<(), HostError>;
    fn set_top_k(sampler: Resource<GuestSampler>, k: Option<u32>) -> Result<(), HostError>;
    fn set_top_p(sampler: Resource<GuestSampler>, p: Option<f32>) -> Result<(), HostError>;
    fn set_min_p(sampler: Resource<GuestSampler>, p: Option<f32>) -> Result<(), HostError>;
    fn set_repetition_penalty(sampler: Resource<GuestSampler>, penalty: f32) -> Result<(), HostError>;
    fn set_frequency_penalty(sampler: Resource<GuestSampler>, penalty: f32) -> Result<(), HostError>;
    fn set_presence_penalty(sampler: Resource<GuestSampler>, penalty: f32) -> Result<(), HostError>;
    fn set_penalty_last_n(sampler: Resource<GuestSampler>, n: Option<u32>) -> Result<(), HostError>;
    fn set_bias(sampler: Resource<GuestSampler>, bias: Vec<(u32, f32)>) -> Result<(), HostError>;
    fn set_mask(
        sampler: Resource<GuestSampler>, mask: Option<Resource<GuestMask>>
    ) -> Result<(), HostError>;
    fn drop(sampler: Resource<GuestSampler>) -> wasmtime::Result<()>;
});

forward!(decoding::Host {
    async fn top(contexts: Vec<Resource<GuestContext>>, n: u32) -> Result<Vec<old::decoding::Distribution>, HostError>;
    async fn step(requests: Vec<old::decoding::StepRequest>) -> Result<Vec<old::types::Candidate>, HostError>;
    async fn speculate(requests: Vec<old::decoding::SpeculateRequest>) -> Result<Vec<Vec<old::types::Candidate>>, HostError>;
    async fn score(requests: Vec<old::decoding::ScoreRequest>) -> Result<Vec<Vec<f32>>, HostError>;
} {
    async fn logprobs(
        &mut self,
        context: Resource<GuestContext>,
        tokens: Vec<u32>,
    ) -> Result<Vec<f32>, HostError> {
        let request = new::decoding::LogprobsRequest { context, tokens };
        new::decoding::Host::logprobs(self, vec![request]).await.and_then(|answers| only(self, answers))
    }

    async fn full(&mut self, context: Resource<GuestContext>) -> Result<Vec<f32>, HostError> {
        new::decoding::Host::full(self, vec![context]).await.and_then(|answers| only(self, answers))
    }

    async fn embedding(&mut self, context: Resource<GuestContext>) -> Result<Vec<f32>, HostError> {
        new::decoding::Host::embedding(self, vec![context]).await.and_then(|answers| only(self, answers))
    }
});

forward!(streams::Host {} {
    async fn generate(
        &mut self,
        requests: Vec<old::streams::GenerateRequest>,
    ) -> Result<Vec<old::streams::Completion>, HostError> {
        new::streams::Host::generate(self, requests.convert()).await.map_err(stop_strings).convert()
    }
});

forward!(streams::HostStream {
    fn open(
        context: Resource<GuestContext>, sampler: Resource<GuestSampler>, options: old::streams::StreamOptions
    ) -> Result<Resource<GuestStream>, HostError>;
    async fn next(stream: Resource<GuestStream>) -> Result<Option<old::types::Candidate>, HostError>;
    fn set_sampler(
        stream: Resource<GuestStream>, sampler: Resource<GuestSampler>
    ) -> Result<(), HostError>;
    fn finish(stream: Resource<GuestStream>) -> wasmtime::Result<Option<old::streams::FinishReason>>;
    fn drop(stream: Resource<GuestStream>) -> wasmtime::Result<()>;
});

forward!(session::Host {
    fn arguments() -> wasmtime::Result<Vec<String>>;
    async fn emit_text(text: String) -> Result<(), HostError>;
    async fn emit_tokens(tokens: Vec<u32>) -> Result<(), HostError>;
    async fn emit_json(json: String) -> Result<(), HostError>;
    fn log(level: old::session::LogLevel, line: String) -> wasmtime::Result<()>;
    fn get_usage() -> wasmtime::Result<old::session::Usage>;
    fn deadline_ms() -> wasmtime::Result<u64>;
    fn seed() -> wasmtime::Result<u64>;
} {
    async fn receive(&mut self) -> Result<Option<String>, HostError> {
        match new::session::Host::receive(self, None).await? {
            Inbox::Message(message) => Ok(Some(message)),
            Inbox::Closed => Ok(None),
            // It waits as long as it takes.
            Inbox::NothingYet => Err(never_answered(self)),
        }
    }
});

/// What a context of a model that is on its way out is refused with: 0.1 does not tell it from one that is gone.
fn unloaded(error: HostError) -> HostError {
    match error {
        HostError::Refused(ApiError::ModelLeaving(_)) => {
            ApiError::EngineFailed(EngineError::Unloaded.to_string()).into()
        }
        other => other,
    }
}

/// What 0.1 calls the texts that end a generation.
fn stop_strings(error: HostError) -> HostError {
    match error {
        HostError::Refused(ApiError::InvalidArgument(argument)) if argument.name == "stop-texts" => {
            let name = "stop-strings".to_owned();
            ApiError::InvalidArgument(Argument { name, ..argument }).into()
        }
        other => other,
    }
}

/// The answer to a call about one context.
fn only<T>(taped: &Taped<'_>, answers: Vec<T>) -> Result<T, HostError> {
    match <[T; 1]>::try_from(answers) {
        Ok([answer]) => Ok(answer),
        Err(_) => Err(never_answered(taped)),
    }
}

/// An answer of a shape that the function does not give to what it was asked: it is from a recording that was changed.
fn never_answered(taped: &Taped<'_>) -> HostError {
    match &taped.0.tape {
        Some(tape) => HostError::Fault(tape.refuse_answer()),
        None => {
            unreachable!("each context has one answer, and whoever waits for a message gets one or the end")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_what_the_package_knows() {
        let refused = |name: &str| {
            let (value, expected) = ("17".to_owned(), "at most 16".to_owned());
            stop_strings(
                ApiError::InvalidArgument(Argument { name: name.to_owned(), value, expected }).into(),
            )
        };
        for (name, shown) in [("stop-texts", "stop-strings"), ("stop-tokens", "stop-tokens")] {
            let HostError::Refused(ApiError::InvalidArgument(argument)) = refused(name) else {
                panic!("it is refused all the same")
            };
            assert_eq!((argument.name.as_str(), argument.value.as_str()), (shown, "17"));
        }
    }
}
