//! The values of the host API as a recording has them.

use trellis_engine::account::BudgetExceeded;
use wasmtime::component::Resource;

use super::types::HostError;
use crate::guest::bindings::trellis::host::constraints::{Beginning, Grammar, JsonSchema, Whitespace};
use crate::guest::bindings::trellis::host::contexts::{Positions, SteeringVector};
use crate::guest::bindings::trellis::host::decoding::{
    Distribution, Guess, LogprobsRequest, Pooling, ScoreRequest, SpeculateRequest, SpeculateTreeRequest,
    StepRequest,
};
use crate::guest::bindings::trellis::host::models::{ChatEnd, ChatMessage, ModelInfo, SpecialTokens};
use crate::guest::bindings::trellis::host::session::{Causes, Event, Inbox, Limit, LogLevel, Meter, Usage};
use crate::guest::bindings::trellis::host::streams::{
    Completion, Emit, EndedGeneration, FinishReason, GenerateRequest, GenerationProgress, GuessSource, Keep,
    Speculation, StreamOptions,
};
use crate::guest::bindings::trellis::host::types::{
    Argument, BudgetLimit, Candidate, ContextLimit, Error, GrammarExit, GrammarRefusal, ModelPair,
    TokenRange, UnknownName,
};
use crate::guest::error::GuestFault;
use crate::recording::{Answer, Mismatch, Value};

/// An argument or an answer.
pub(super) trait Data: Sized {
    fn to_value(&self) -> Value;

    /// # Errors
    /// It is of another type.
    fn from_value(value: Value) -> Result<Self, Mismatch>;

    /// Bytes that it takes.
    fn n_bytes(&self) -> usize {
        size_of::<Self>()
    }

    fn list_to_value(items: &[Self]) -> Value {
        Value::List(items.iter().map(Self::to_value).collect())
    }

    /// # Errors
    /// It is of another type.
    fn list_from_value(value: Value) -> Result<Vec<Self>, Mismatch> {
        match value {
            Value::List(values) => values.into_iter().map(Self::from_value).collect(),
            other => Err(other.mismatch("a list")),
        }
    }
}

/// What a host function returns, errors included.
pub(super) trait Reply: Sized {
    fn to_answer(&self) -> Answer;

    /// # Errors
    /// It is of another type.
    fn from_value(value: Value) -> Result<Self, Mismatch>;

    /// What ends the guest.
    fn fault(fault: wasmtime::Error) -> Self;

    /// Refuses arguments that are longer than they may be together.
    fn too_long(n_bytes: usize, n_bytes_max: usize) -> Self;

    /// Bytes of what the guest gets.
    fn n_bytes(&self) -> usize;

    /// There is no host memory left for it.
    fn unpaid(exceeded: BudgetExceeded) -> Self;
}

fn fault_answer(fault: &wasmtime::Error) -> Answer {
    match fault.downcast_ref::<GuestFault>() {
        Some(GuestFault::Handles) => Answer::Handles,
        _ => Answer::Fault(fault.root_cause().to_string()),
    }
}

impl<T: Data> Reply for wasmtime::Result<T> {
    fn to_answer(&self) -> Answer {
        match self {
            Ok(value) => Answer::Value(value.to_value()),
            Err(fault) => fault_answer(fault),
        }
    }

    fn from_value(value: Value) -> Result<Self, Mismatch> {
        T::from_value(value).map(Ok)
    }

    fn fault(fault: wasmtime::Error) -> Self {
        Err(fault)
    }

    fn too_long(_: usize, _: usize) -> Self {
        Err(GuestFault::CallBytes.into())
    }

    fn n_bytes(&self) -> usize {
        self.as_ref().map_or(0, T::n_bytes)
    }

    fn unpaid(exceeded: BudgetExceeded) -> Self {
        Err(GuestFault::HostBytes(exceeded).into())
    }
}

impl<T: Data> Reply for Result<T, HostError> {
    fn to_answer(&self) -> Answer {
        match self {
            Ok(value) => Answer::Value(Value::Ok(Box::new(value.to_value()))),
            Err(HostError::Refused(error)) => Answer::Value(Value::Err(Box::new(error.to_value()))),
            Err(HostError::Fault(fault)) => fault_answer(fault),
        }
    }

    fn from_value(value: Value) -> Result<Self, Mismatch> {
        match value {
            Value::Ok(value) => T::from_value(*value).map(Ok),
            Value::Err(error) => Error::from_value(*error).map(|error| Err(error.into())),
            other => Err(other.mismatch("a result")),
        }
    }

    fn fault(fault: wasmtime::Error) -> Self {
        Err(HostError::Fault(fault))
    }

    fn too_long(n_bytes: usize, n_bytes_max: usize) -> Self {
        let (what, used) = ("bytes of one call".to_owned(), 0);
        let (requested, limit) = (n_bytes as u64, n_bytes_max as u64);
        Err(Error::BudgetExceeded(BudgetLimit { what, used, requested, limit }).into())
    }

    fn n_bytes(&self) -> usize {
        self.as_ref().map_or(0, T::n_bytes)
    }

    fn unpaid(exceeded: BudgetExceeded) -> Self {
        Err(exceeded.into())
    }
}

impl Data for () {
    fn to_value(&self) -> Value {
        Value::Unit
    }

    fn from_value(value: Value) -> Result<Self, Mismatch> {
        match value {
            Value::Unit => Ok(()),
            other => Err(other.mismatch("nothing")),
        }
    }
}

impl Data for bool {
    fn to_value(&self) -> Value {
        Value::Number(u64::from(*self))
    }

    fn from_value(value: Value) -> Result<Self, Mismatch> {
        match value {
            Value::Number(0) => Ok(false),
            Value::Number(1) => Ok(true),
            other => Err(other.mismatch("yes or no")),
        }
    }
}

impl Data for u64 {
    fn to_value(&self) -> Value {
        Value::Number(*self)
    }

    fn from_value(value: Value) -> Result<Self, Mismatch> {
        match value {
            Value::Number(number) => Ok(number),
            other => Err(other.mismatch("a number")),
        }
    }
}

impl Data for u32 {
    fn to_value(&self) -> Value {
        Value::Number(u64::from(*self))
    }

    fn from_value(value: Value) -> Result<Self, Mismatch> {
        match value {
            Value::Number(number) if u32::try_from(number).is_ok() => Ok(number as u32),
            other => Err(other.mismatch("a number of 32 bits")),
        }
    }

    fn list_to_value(items: &[Self]) -> Value {
        Value::Numbers(items.to_vec())
    }

    fn list_from_value(value: Value) -> Result<Vec<Self>, Mismatch> {
        match value {
            Value::Numbers(numbers) => Ok(numbers),
            other => Err(other.mismatch("numbers")),
        }
    }
}

impl Data for u16 {
    fn to_value(&self) -> Value {
        Value::Number(u64::from(*self))
    }

    fn from_value(value: Value) -> Result<Self, Mismatch> {
        match value {
            Value::Number(number) if u16::try_from(number).is_ok() => Ok(number as u16),
            other => Err(other.mismatch("a number of 16 bits")),
        }
    }
}

impl Data for u8 {
    fn to_value(&self) -> Value {
        Value::Number(u64::from(*self))
    }

    fn from_value(value: Value) -> Result<Self, Mismatch> {
        match value {
            Value::Number(number) if u8::try_from(number).is_ok() => Ok(number as u8),
            other => Err(other.mismatch("a byte")),
        }
    }

    fn list_to_value(items: &[Self]) -> Value {
        Value::Bytes(items.to_vec())
    }

    fn list_from_value(value: Value) -> Result<Vec<Self>, Mismatch> {
        match value {
            Value::Bytes(bytes) => Ok(bytes),
            other => Err(other.mismatch("bytes")),
        }
    }
}

impl Data for f32 {
    fn to_value(&self) -> Value {
        Value::Float(*self)
    }

    fn from_value(value: Value) -> Result<Self, Mismatch> {
        match value {
            Value::Float(number) => Ok(number),
            other => Err(other.mismatch("a float")),
        }
    }

    fn list_to_value(items: &[Self]) -> Value {
        Value::Floats(items.to_vec())
    }

    fn list_from_value(value: Value) -> Result<Vec<Self>, Mismatch> {
        match value {
            Value::Floats(numbers) => Ok(numbers),
            other => Err(other.mismatch("floats")),
        }
    }
}

impl Data for String {
    fn to_value(&self) -> Value {
        Value::Text(self.clone())
    }

    fn from_value(value: Value) -> Result<Self, Mismatch> {
        match value {
            Value::Text(text) => Ok(text),
            other => Err(other.mismatch("a text")),
        }
    }

    fn n_bytes(&self) -> usize {
        self.len()
    }
}

impl<T: Data> Data for Vec<T> {
    fn to_value(&self) -> Value {
        T::list_to_value(self)
    }

    fn from_value(value: Value) -> Result<Self, Mismatch> {
        T::list_from_value(value)
    }

    fn n_bytes(&self) -> usize {
        self.iter().map(T::n_bytes).sum()
    }
}

impl<T: Data> Data for Option<T> {
    fn to_value(&self) -> Value {
        Value::Option(self.as_ref().map(|value| Box::new(value.to_value())))
    }

    fn from_value(value: Value) -> Result<Self, Mismatch> {
        match value {
            Value::Option(value) => value.map(|value| T::from_value(*value)).transpose(),
            other => Err(other.mismatch("something or none")),
        }
    }

    fn n_bytes(&self) -> usize {
        self.as_ref().map_or(0, T::n_bytes)
    }
}

impl<A: Data, B: Data> Data for (A, B) {
    fn to_value(&self) -> Value {
        Value::List(vec![self.0.to_value(), self.1.to_value()])
    }

    fn from_value(value: Value) -> Result<Self, Mismatch> {
        match value {
            Value::List(values) => match <[Value; 2]>::try_from(values) {
                Ok([first, second]) => Ok((A::from_value(first)?, B::from_value(second)?)),
                Err(values) => Err(Value::List(values).mismatch("a pair")),
            },
            other => Err(other.mismatch("a pair")),
        }
    }

    fn n_bytes(&self) -> usize {
        self.0.n_bytes() + self.1.n_bytes()
    }
}

impl<T: Data, E: Data> Data for Result<T, E> {
    fn to_value(&self) -> Value {
        match self {
            Ok(value) => Value::Ok(Box::new(value.to_value())),
            Err(error) => Value::Err(Box::new(error.to_value())),
        }
    }

    fn from_value(value: Value) -> Result<Self, Mismatch> {
        match value {
            Value::Ok(value) => T::from_value(*value).map(Ok),
            Value::Err(error) => E::from_value(*error).map(Err),
            other => Err(other.mismatch("a result")),
        }
    }

    fn n_bytes(&self) -> usize {
        match self {
            Ok(value) => value.n_bytes(),
            Err(error) => error.n_bytes(),
        }
    }
}

impl<T: 'static> Data for Resource<T> {
    fn to_value(&self) -> Value {
        Value::Handle(self.rep())
    }

    fn from_value(value: Value) -> Result<Self, Mismatch> {
        match value {
            Value::Handle(number) => Ok(Self::new_own(number)),
            other => Err(other.mismatch("a host object")),
        }
    }
}

/// Records, by the names of their fields.
macro_rules! records {
    ($($name:ident { $($field:ident),+ $(,)? })+) => {$(
        impl Data for $name {
            fn to_value(&self) -> Value {
                let Self { $($field),+ } = self;
                Value::Record(vec![$((stringify!($field).into(), $field.to_value())),+])
            }

            fn from_value(value: Value) -> Result<Self, Mismatch> {
                let Value::Record(fields) = value else { return Err(value.mismatch(stringify!($name))) };
                let names = [$(stringify!($field)),+];
                if !fields.iter().map(|(name, _)| name.as_ref()).eq(names) {
                    return Err(Value::Record(fields).mismatch(stringify!($name)));
                }
                let mut values = fields.into_iter().map(|(_, value)| value);
                $(let $field = Data::from_value(values.next().unwrap_or(Value::Unit))?;)+
                Ok(Self { $($field),+ })
            }

            fn n_bytes(&self) -> usize {
                [$(self.$field.n_bytes()),+].into_iter().sum()
            }
        }
    )+};
}

records! {
    Argument { name, value, expected }
    BudgetLimit { what, used, requested, limit }
    Candidate { token, logprob }
    Causes {
        rows_given_up, rows_past_end, rows_failed, rows_sat_out, tokens_given_up, tokens_guessed_wrong,
        steps_waited_to_decode, steps_waited_with_prompt, steps_waited_for_pages, steps_waited_for_masks,
    }
    ChatMessage { role, content }
    Completion { tokens, logprobs, tops, text, finish }
    ContextLimit { n_tokens, n_positions }
    Distribution { candidates, entropy }
    EndedGeneration { idx, outcome }
    GenerationProgress { n_tokens, logprob, is_over }
    Guess { token, parent }
    GenerateRequest {
        context, sampler, seed, max_tokens, stop_tokens, stop_texts, keep, emit, top, speculation, others,
    }
    GrammarExit { position, token }
    GrammarRefusal { place, reason }
    JsonSchema { schema, whitespace }
    Limit { name, limit, used }
    LogprobsRequest { context, tokens }
    Meter { used, limit }
    ModelInfo {
        name, architecture, vocab_size, n_positions, hidden_size, n_layers, bos_token, stop_tokens, special_tokens,
        tokenizer, device, dtype,
    }
    ModelPair { left, right }
    ScoreRequest { context, continuation }
    SpeculateRequest { context, sampler, guess }
    SpeculateTreeRequest { context, sampler, guesses }
    SteeringVector { layer, values }
    Speculation { source, max_guess }
    StepRequest { context, sampler, others }
    StreamOptions { max_tokens, stop_tokens, top, hidden, speculation, others }
    TokenRange { token, vocab_size }
    UnknownName { name, known }
    Usage {
        tokens, pages, contexts, tokens_in_vain, tokens_cached, tokens_guessed, tokens_accepted, tokens_forced, causes,
    }
}

/// Enums and variants, by the names of their cases.
macro_rules! cases {
    ($($name:ident { $($plain:ident),* $(; $($full:ident),+)? })+) => {$(
        impl Data for $name {
            fn to_value(&self) -> Value {
                match self {
                    $(Self::$plain => Value::Case(stringify!($plain).into(), None),)*
                    $($(Self::$full(value) => {
                        Value::Case(stringify!($full).into(), Some(Box::new(value.to_value())))
                    })+)?
                }
            }

            fn from_value(value: Value) -> Result<Self, Mismatch> {
                match value {
                    $(Value::Case(name, None) if name == stringify!($plain) => Ok(Self::$plain),)*
                    $($(Value::Case(name, Some(value)) if name == stringify!($full) => {
                        Data::from_value(*value).map(Self::$full)
                    })+)?
                    other => Err(other.mismatch(stringify!($name))),
                }
            }

            fn n_bytes(&self) -> usize {
                match self {
                    $(Self::$plain => size_of::<Self>(),)*
                    $($(Self::$full(value) => size_of::<Self>() + value.n_bytes(),)+)?
                }
            }
        }
    )+};
}

cases! {
    Beginning { FirstDraw; At, AfterToken, AfterText }
    ChatEnd { Assistant, Message }
    Emit { Nothing, Text }
    Error {
        EmptyContext, Cancelled;
        UnknownModel, ModelLeaving, TokenOutOfRange, ContextFull, InvalidArgument, BudgetExceeded, NotFound,
        ModelMismatch, NoChatTemplate, ChatTemplate, NoToken, GrammarRefused, GrammarLeft, GrammarTooComplex,
        NotANumber, EngineFailed
    }
    Event { NothingYet, Closed; Leaving, Message }
    GuessSource { ; Lookup, Draft }
    FinishReason { MaxTokens, ContextFull, GrammarComplete, Cancelled; StopToken, StopText }
    Grammar { ; JsonSchema, Regex, Lark, Choice }
    Inbox { NothingYet, Closed; Message }
    Keep { Tokens, Text }
    LogLevel { Debug, Info, Warn, Error }
    Pooling { Last; MeanFrom }
    Positions { Keep, CloseUp }
    SpecialTokens { Parse, AsText }
    Whitespace { Compact, Free }
}

mod beams;
mod programs;
