//! Every call of a guest, past its tape: the one place where calls are recorded, and where they are answered from a
//! recording instead.

use wasmtime::component::{HasData, Resource};

use super::types::{
    GuestBeamSearch, GuestBias, GuestConstraint, GuestContext, GuestDecoder, GuestGenerations, GuestMask,
    GuestModel, GuestProgram, GuestSampler, GuestStream, HostError,
};
use super::values::{Data, Reply};
use crate::guest::bindings::trellis::host::beams::{
    BeamSettings, FinishedHypothesis, KeptHypothesis, LiveHypothesis,
};
use crate::guest::bindings::trellis::host::constraints::{Beginning, Grammar};
use crate::guest::bindings::trellis::host::contexts::{Positions, SteeringVector};
use crate::guest::bindings::trellis::host::decoding::{
    Distribution, Guess, LogprobsRequest, Pooling, ScoreRequest, SpeculateRequest, SpeculateTreeRequest,
    StepRequest,
};
use crate::guest::bindings::trellis::host::models::{ChatEnd, ChatMessage, ModelInfo, SpecialTokens};
use crate::guest::bindings::trellis::host::programs::Definition;
use crate::guest::bindings::trellis::host::session::{Event, Inbox, Limit, LogLevel, Usage};
use crate::guest::bindings::trellis::host::streams::{
    Completion, EndedGeneration, FinishReason, GenerateRequest, GenerationProgress, StreamOptions,
};
use crate::guest::bindings::trellis::host::types::{Candidate, Error as ApiError};
use crate::guest::bindings::trellis::host::{
    beams, constraints, contexts, decoding, models, programs, samplers, session, streams, types,
};
use crate::guest::error::GuestFault;
use crate::guest::profile::Calling;
use crate::guest::store::GuestState;
use crate::guest::tape::Tape;
use crate::recording::Answer;

/// The host API of one guest, with its tape in front.
pub(crate) struct Taped<'a>(pub(crate) &'a mut GuestState);

/// What the linker is told of [`Taped`].
pub(crate) struct HasTape;

impl HasData for HasTape {
    type Data<'a> = Taped<'a>;
}

/// What a recording answered, as the function returns it.
fn recorded<R: Reply>(tape: &Tape, answer: Answer) -> R {
    match answer {
        Answer::Value(value) => R::from_value(value).unwrap_or_else(|_| R::fault(tape.refuse_answer())),
        Answer::Handles => R::fault(GuestFault::Handles.into()),
        Answer::Fault(reason) => R::fault(wasmtime::Error::msg(reason)),
    }
}

/// An answer that is paid for until the guest calls again, by the function that made it or here: the guest takes it as slowly as
/// it likes.
fn paid<R: Reply>(state: &mut GuestState, reply: R) -> R {
    if !state.answer.is_empty() {
        return reply;
    }
    match state.pay_for_answer(reply.n_bytes()) {
        Ok(()) => reply,
        Err(exceeded) => R::unpaid(exceeded),
    }
}

/// Implements a trait of the host API for [`Taped`]. On the tape, a function is called by the prefix and its name.
macro_rules! taped {
    ($trait:path, $prefix:literal { $($functions:tt)* }) => {
        impl $trait for Taped<'_> {
            taped!(@functions $trait, $prefix, $($functions)*);
        }
    };
    (@functions $trait:path, $prefix:literal,) => {};
    (
        @functions $trait:path, $prefix:literal,
        fn $name:ident($($argument:ident: $type:ty),*) -> $reply:ty; $($rest:tt)*
    ) => {
        fn $name(&mut self, $($argument: $type),*) -> $reply {
            self.0.let_go_of_answer();
            let _calling = Calling::begin(self.0.profile.as_ref(), concat!($prefix, stringify!($name)));
            let parts: &[usize] = &[$($argument.n_bytes()),*];
            let n_bytes = parts.iter().sum();
            if n_bytes > self.0.limits.call_bytes {
                return Reply::too_long(n_bytes, self.0.limits.call_bytes);
            }
            let Some(tape) = self.0.tape.clone() else {
                let reply = <GuestState as $trait>::$name(self.0, $($argument),*);
                return paid(self.0, reply);
            };
            // The tape has the arguments once more until the answer is there.
            let _copied = match self.0.pay_for_call(n_bytes) {
                Ok(charge) => charge,
                Err(exceeded) => return Reply::unpaid(exceeded),
            };
            match tape.begin(concat!($prefix, stringify!($name)), vec![$($argument.to_value()),*]) {
                Ok(None) => {
                    let reply = <GuestState as $trait>::$name(self.0, $($argument),*);
                    let reply = paid(self.0, reply);
                    match tape.note_answer(reply.to_answer()) {
                        Ok(()) => reply,
                        Err(fault) => Reply::fault(fault.into()),
                    }
                }
                Ok(Some(answer)) => recorded(&tape, answer),
                Err(fault) => Reply::fault(fault),
            }
        }

        taped!(@functions $trait, $prefix, $($rest)*);
    };
    (
        @functions $trait:path, $prefix:literal,
        async fn $name:ident($($argument:ident: $type:ty),*) -> $reply:ty; $($rest:tt)*
    ) => {
        async fn $name(&mut self, $($argument: $type),*) -> $reply {
            self.0.let_go_of_answer();
            let _calling = Calling::begin(self.0.profile.as_ref(), concat!($prefix, stringify!($name)));
            if let Some(profile) = &self.0.profile {
                profile.flush(&self.0.output, self.0.limits.output_piece_bytes());
            }
            let parts: &[usize] = &[$($argument.n_bytes()),*];
            let n_bytes = parts.iter().sum();
            if n_bytes > self.0.limits.call_bytes {
                return Reply::too_long(n_bytes, self.0.limits.call_bytes);
            }
            let Some(tape) = self.0.tape.clone() else {
                let reply = <GuestState as $trait>::$name(self.0, $($argument),*).await;
                return paid(self.0, reply);
            };
            // The tape has the arguments once more until the answer is there.
            let _copied = match self.0.pay_for_call(n_bytes) {
                Ok(charge) => charge,
                Err(exceeded) => return Reply::unpaid(exceeded),
            };
            match tape.begin(concat!($prefix, stringify!($name)), vec![$($argument.to_value()),*]) {
                Ok(None) => {
                    let reply = <GuestState as $trait>::$name(self.0, $($argument),*).await;
                    let reply = paid(self.0, reply);
                    if let Err(fault) = tape.note_answer(reply.to_answer()).and_then(|()| tape.pay()) {
                        return Reply::fault(fault.into());
                    }
                    tape.flush(&self.0.output, self.0.limits.output_piece_bytes()).await;
                    reply
                }
                Ok(Some(answer)) => recorded(&tape, answer),
                Err(fault) => Reply::fault(fault),
            }
        }

        taped!(@functions $trait, $prefix, $($rest)*);
    };
}

impl types::Host for Taped<'_> {
    fn convert_error(&mut self, error: HostError) -> wasmtime::Result<ApiError> {
        self.0.convert_error(error)
    }
}

taped!(models::Host, "models." {
    fn names() -> wasmtime::Result<Vec<String>>;
});

taped!(models::HostModel, "model." {
    async fn open(name: Option<String>) -> Result<Resource<GuestModel>, HostError>;
    fn info(model: Resource<GuestModel>) -> wasmtime::Result<ModelInfo>;
    async fn encode(
        model: Resource<GuestModel>, text: String, special: SpecialTokens
    ) -> Result<Vec<u32>, HostError>;
    async fn decode(model: Resource<GuestModel>, tokens: Vec<u32>) -> Result<String, HostError>;
    fn token_bytes(model: Resource<GuestModel>, token: u32) -> Result<Vec<u8>, HostError>;
    async fn vocabulary(model: Resource<GuestModel>) -> Result<Vec<Vec<u8>>, HostError>;
    async fn encode_chat(
        model: Resource<GuestModel>, messages: Vec<ChatMessage>, end: ChatEnd
    ) -> Result<Vec<u32>, HostError>;
    fn drop(model: Resource<GuestModel>) -> wasmtime::Result<()>;
});

taped!(models::HostTextDecoder, "text_decoder." {
    fn new(model: Resource<GuestModel>) -> wasmtime::Result<Resource<GuestDecoder>>;
    fn push(decoder: Resource<GuestDecoder>, token: u32) -> Result<String, HostError>;
    fn finish(decoder: Resource<GuestDecoder>) -> wasmtime::Result<String>;
    fn drop(decoder: Resource<GuestDecoder>) -> wasmtime::Result<()>;
});

taped!(contexts::Host, "contexts." {
    async fn forget(name: String) -> Result<(), HostError>;
});

taped!(contexts::HostContext, "context." {
    async fn create(model: Resource<GuestModel>) -> Result<Resource<GuestContext>, HostError>;
    async fn open(model: Resource<GuestModel>, name: String) -> Result<Resource<GuestContext>, HostError>;
    async fn append(context: Resource<GuestContext>, tokens: Vec<u32>) -> Result<(), HostError>;
    async fn append_text(
        context: Resource<GuestContext>, text: String, special: SpecialTokens
    ) -> Result<u32, HostError>;
    async fn fork(context: Resource<GuestContext>) -> Result<Resource<GuestContext>, HostError>;
    async fn truncate(context: Resource<GuestContext>, n_tokens: u32) -> Result<(), HostError>;
    async fn evict(
        context: Resource<GuestContext>, start: u32, end: u32, positions: Positions
    ) -> Result<(), HostError>;
    async fn steer(
        context: Resource<GuestContext>, vectors: Vec<SteeringVector>, start: u32
    ) -> Result<(), HostError>;
    fn length(context: Resource<GuestContext>) -> wasmtime::Result<u32>;
    fn capacity(context: Resource<GuestContext>) -> wasmtime::Result<u32>;
    fn tokens(context: Resource<GuestContext>, start: u32, end: u32) -> wasmtime::Result<Vec<u32>>;
    fn reports(context: Resource<GuestContext>) -> wasmtime::Result<Vec<f32>>;
    async fn prefill(context: Resource<GuestContext>) -> Result<(), HostError>;
    async fn save(context: Resource<GuestContext>, name: String) -> Result<(), HostError>;
    fn drop(context: Resource<GuestContext>) -> wasmtime::Result<()>;
});

impl samplers::Host for Taped<'_> {}

taped!(samplers::HostTokenMask, "token_mask." {
    fn allow(model: Resource<GuestModel>, tokens: Vec<u32>) -> Result<Resource<GuestMask>, HostError>;
    fn forbid(model: Resource<GuestModel>, tokens: Vec<u32>) -> Result<Resource<GuestMask>, HostError>;
    fn from_bits(model: Resource<GuestModel>, bits: Vec<u64>) -> Result<Resource<GuestMask>, HostError>;
    fn drop(mask: Resource<GuestMask>) -> wasmtime::Result<()>;
});

taped!(samplers::HostSampler, "sampler." {
    fn new(seed: u64) -> wasmtime::Result<Resource<GuestSampler>>;
    fn by_program(program: Resource<GuestProgram>, seed: u64) -> Result<Resource<GuestSampler>, HostError>;
    fn set_parameters(sampler: Resource<GuestSampler>, parameters: Vec<f32>) -> Result<(), HostError>;
    fn set_program_masks(
        sampler: Resource<GuestSampler>, masks: Vec<Resource<GuestMask>>
    ) -> Result<(), HostError>;
    fn set_program_biases(
        sampler: Resource<GuestSampler>, biases: Vec<Resource<GuestBias>>
    ) -> Result<(), HostError>;
    fn set_constraint(
        sampler: Resource<GuestSampler>, constraint: Option<Resource<GuestConstraint>>, begins: Beginning
    ) -> Result<(), HostError>;
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

impl programs::Host for Taped<'_> {}

taped!(programs::HostProgram, "program." {
    fn check(model: Resource<GuestModel>, definition: Definition) -> Result<Resource<GuestProgram>, HostError>;
    fn cost(program: Resource<GuestProgram>) -> wasmtime::Result<f32>;
    fn drop(program: Resource<GuestProgram>) -> wasmtime::Result<()>;
});

taped!(programs::HostTokenBias, "token_bias." {
    fn sparse(model: Resource<GuestModel>, entries: Vec<(u32, f32)>) -> Result<Resource<GuestBias>, HostError>;
    fn dense(model: Resource<GuestModel>, values: Vec<f32>) -> Result<Resource<GuestBias>, HostError>;
    fn drop(bias: Resource<GuestBias>) -> wasmtime::Result<()>;
});

impl constraints::Host for Taped<'_> {}

taped!(constraints::HostConstraint, "constraint." {
    async fn compile(
        model: Resource<GuestModel>, grammar: Grammar
    ) -> Result<Resource<GuestConstraint>, HostError>;
    fn drop(constraint: Resource<GuestConstraint>) -> wasmtime::Result<()>;
});

taped!(decoding::Host, "decoding." {
    async fn top(contexts: Vec<Resource<GuestContext>>, n: u32) -> Result<Vec<Distribution>, HostError>;
    async fn tops(requests: Vec<ScoreRequest>, n: u32) -> Result<Vec<Vec<Distribution>>, HostError>;
    async fn step(requests: Vec<StepRequest>) -> Result<Vec<Candidate>, HostError>;
    async fn speculate(requests: Vec<SpeculateRequest>) -> Result<Vec<Vec<Candidate>>, HostError>;
    async fn speculate_tree(requests: Vec<SpeculateTreeRequest>) -> Result<Vec<Vec<Candidate>>, HostError>;
    async fn score(requests: Vec<ScoreRequest>) -> Result<Vec<Vec<f32>>, HostError>;
    async fn logprobs(requests: Vec<LogprobsRequest>) -> Result<Vec<Vec<f32>>, HostError>;
    async fn full(contexts: Vec<Resource<GuestContext>>) -> Result<Vec<Vec<f32>>, HostError>;
    async fn embedding(contexts: Vec<Resource<GuestContext>>) -> Result<Vec<Vec<f32>>, HostError>;
    async fn hidden(
        contexts: Vec<Resource<GuestContext>>, layers: Vec<u32>, pooling: Pooling
    ) -> Result<Vec<Vec<Vec<f32>>>, HostError>;
    async fn attention(
        contexts: Vec<Resource<GuestContext>>, layers: Vec<u32>
    ) -> Result<Vec<Vec<f32>>, HostError>;
});

taped!(streams::Host, "streams." {
    async fn generate(requests: Vec<GenerateRequest>) -> Result<Vec<Completion>, HostError>;
});

taped!(streams::HostGenerations, "generations." {
    async fn start(requests: Vec<GenerateRequest>) -> Result<Resource<GuestGenerations>, HostError>;
    async fn next(generations: Resource<GuestGenerations>) -> wasmtime::Result<Option<EndedGeneration>>;
    async fn reach(
        generations: Resource<GuestGenerations>, n_tokens: u32
    ) -> wasmtime::Result<Vec<EndedGeneration>>;
    async fn cancel(generations: Resource<GuestGenerations>, idx: u32) -> Result<Completion, HostError>;
    fn progress(generations: Resource<GuestGenerations>) -> wasmtime::Result<Vec<GenerationProgress>>;
    async fn drop(generations: Resource<GuestGenerations>) -> wasmtime::Result<()>;
});

taped!(streams::HostStream, "stream." {
    fn open(
        context: Resource<GuestContext>, sampler: Resource<GuestSampler>, options: StreamOptions
    ) -> Result<Resource<GuestStream>, HostError>;
    async fn next(stream: Resource<GuestStream>) -> Result<Option<Candidate>, HostError>;
    fn set_sampler(
        stream: Resource<GuestStream>, sampler: Resource<GuestSampler>
    ) -> Result<(), HostError>;
    fn guess(stream: Resource<GuestStream>, tokens: Vec<u32>) -> Result<(), HostError>;
    fn guess_tree(stream: Resource<GuestStream>, guesses: Vec<Guess>) -> Result<(), HostError>;
    fn top(stream: Resource<GuestStream>) -> wasmtime::Result<Option<Distribution>>;
    fn hidden(stream: Resource<GuestStream>) -> wasmtime::Result<Vec<Vec<f32>>>;
    fn finish(stream: Resource<GuestStream>) -> wasmtime::Result<Option<FinishReason>>;
    fn drop(stream: Resource<GuestStream>) -> wasmtime::Result<()>;
});

impl beams::Host for Taped<'_> {}

taped!(beams::HostBeamSearch, "beam_search." {
    async fn open(
        context: Resource<GuestContext>, settings: BeamSettings, sampler: Option<Resource<GuestSampler>>
    ) -> Result<Resource<GuestBeamSearch>, HostError>;
    async fn run(search: Resource<GuestBeamSearch>) -> Result<(), HostError>;
    async fn step(search: Resource<GuestBeamSearch>) -> Result<Vec<LiveHypothesis>, HostError>;
    fn live(search: Resource<GuestBeamSearch>) -> wasmtime::Result<Vec<LiveHypothesis>>;
    fn tokens(search: Resource<GuestBeamSearch>, idx: u32) -> Result<Vec<u32>, HostError>;
    fn keep(search: Resource<GuestBeamSearch>, hypotheses: Vec<KeptHypothesis>) -> Result<(), HostError>;
    fn settled(search: Resource<GuestBeamSearch>) -> wasmtime::Result<Vec<u32>>;
    fn best(search: Resource<GuestBeamSearch>, n: u32) -> wasmtime::Result<Vec<FinishedHypothesis>>;
    async fn take(search: Resource<GuestBeamSearch>, idx: u32) -> Result<Resource<GuestContext>, HostError>;
    fn drop(search: Resource<GuestBeamSearch>) -> wasmtime::Result<()>;
});

taped!(session::Host, "session." {
    fn arguments() -> wasmtime::Result<Vec<String>>;
    async fn emit_text(text: String) -> Result<(), HostError>;
    async fn emit_tokens(tokens: Vec<u32>) -> Result<(), HostError>;
    async fn emit_json(json: String) -> Result<(), HostError>;
    async fn receive(wait_ms: Option<u64>) -> Result<Inbox, HostError>;
    async fn next_event(wait_ms: Option<u64>) -> Result<Event, HostError>;
    fn log(level: LogLevel, line: String) -> wasmtime::Result<()>;
    fn get_usage() -> wasmtime::Result<Usage>;
    fn limits() -> wasmtime::Result<Vec<Limit>>;
    fn call_bytes() -> wasmtime::Result<u64>;
    fn deadline_ms() -> wasmtime::Result<u64>;
    fn leaving_ms() -> wasmtime::Result<Option<u64>>;
    fn seed() -> wasmtime::Result<u64>;
});
