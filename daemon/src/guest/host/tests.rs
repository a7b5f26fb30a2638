//! The host API called as the generated bindings call it.

mod calls;
mod events;
mod forced;
mod generations;
mod held;
mod parts;
mod refusals;
mod speculation;
mod streams;
mod v0_1;

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use trellis_engine::account::{Account, ActorId, Budget, GuestId, Owner, Resource as Metered, SessionId};
use trellis_engine::cpu::{CpuBackend, CpuOptions};
use trellis_engine::model::Model;
use trellis_engine::{EngineSettings, OneModel};
use trellis_wire::OUTPUT_OVERHEAD_BYTES;
use wasmtime::component::{Resource, ResourceTable};

use super::types::{GuestContext, GuestModel, GuestSampler, GuestStream, HostError};
use crate::guest::beside::Beside;
use crate::guest::bindings::trellis::host::contexts::{Host as _, HostContext};
use crate::guest::bindings::trellis::host::decoding::{
    Host as DecodingHost, LogprobsRequest, ScoreRequest, SpeculateRequest, StepRequest,
};
use crate::guest::bindings::trellis::host::models::{ChatEnd, ChatMessage, HostModel, SpecialTokens};
use crate::guest::bindings::trellis::host::samplers::{HostSampler, HostTokenMask};
use crate::guest::bindings::trellis::host::session::Host as _;
use crate::guest::bindings::trellis::host::streams::{
    Completion, Emit, FinishReason, GenerateRequest, Host as _, HostStream, Keep, StreamOptions,
};
use crate::guest::bindings::trellis::host::types::Error as ApiError;
use crate::guest::deadline::Deadline;
use crate::guest::drain::Drain;
use crate::guest::guest_models::GuestModels;
use crate::guest::inbox::inbox;
use crate::guest::io::{GuestOutput, OutputReceiver, output_channel};
use crate::guest::limits::GuestLimits;
use crate::guest::log::LogSink;
use crate::guest::memory::{MemoryGauge, MemoryLimiter};
use crate::guest::store::GuestState;
use crate::guest::wasi;
use crate::models::Models;

struct Guest {
    state: GuestState,
    client: OutputReceiver,
    drain: Drain,
    _engines: Vec<OneModel>,
}

fn engine(name: &str, settings: EngineSettings) -> OneModel {
    let source = crate::bundled::source(name).expect("bundled");
    let model = Arc::new(Model::open(name, &source).expect("a whole model"));
    let options =
        CpuOptions { n_pages: 1024, n_host_pages: 64, n_threads: None, n_rows_max: 64, n_tokens_max: 512 };
    let backend = CpuBackend::new(&model, &options).expect("a backend");
    OneModel::start(model, Box::new(backend), settings)
}

fn guest_with(limits: GuestLimits) -> Guest {
    guest_of(limits, EngineSettings::default())
}

fn guest_of(limits: GuestLimits, settings: EngineSettings) -> Guest {
    let engines = vec![engine("tiny", settings.clone()), engine("draft", settings)];
    let (limits, drain) = (Arc::new(limits), Drain::default());
    let (output, client) = output_channel(limits.output_bytes_in_flight);
    let log = Arc::new(LogSink::new(output.clone(), limits.log_bytes));
    let session = Account::new("session", Budget::UNLIMITED, None);
    let owner = Owner {
        actor: ActorId(1),
        session: SessionId(1),
        guest: GuestId(1),
        account: Account::new("guest", limits.budget(), Some(session)),
    };
    let state = GuestState {
        table: ResourceTable::new(),
        wasi: wasi::context(1, None, &log, &limits, None),
        memory: MemoryLimiter::new(&limits, Arc::new(MemoryGauge::default()), &owner.account),
        models: Arc::new(GuestModels::new(
            Models::new(engines.iter().map(|engine| engine.handle().clone()).collect(), Vec::new()),
            None,
        )),
        owner,
        output,
        input: inbox(1, 1).1,
        log,
        arguments: Vec::new(),
        seed: 1,
        deadline: Arc::new(Deadline::new(Instant::now(), None, &limits)),
        drain: drain.watch(),
        date: None,
        n_run_keys: 0,
        answer: Vec::new(),
        tape: None,
        profile: None,
        limits,
        cpu: Arc::default(),
        beside: Beside::new(),
        trials: None,
    };
    Guest { state, client, drain, _engines: engines }
}

fn guest() -> Guest {
    guest_with(GuestLimits::default())
}

/// A stream that nothing ends, and that looks at nothing.
fn plain() -> StreamOptions {
    StreamOptions {
        max_tokens: None,
        stop_tokens: Vec::new(),
        top: 0,
        hidden: Vec::new(),
        speculation: None,
        others: Vec::new(),
    }
}

/// Another name for a handle, as the guest has it each time that it passes a borrow.
fn again<T: 'static>(handle: &Resource<T>) -> Resource<T> {
    Resource::new_borrow(handle.rep())
}

#[track_caller]
fn refused<T: std::fmt::Debug>(result: Result<T, HostError>) -> ApiError {
    match result.expect_err("refused") {
        HostError::Refused(error) => error,
        HostError::Fault(fault) => panic!("a fault: {fault}"),
    }
}

impl Guest {
    fn model(&mut self, name: &str) -> Resource<GuestModel> {
        let opening = HostModel::open(&mut self.state, Some(name.to_owned()));
        opening.now_or_never().expect("it is there").expect("loaded")
    }

    async fn text(&mut self, request: GenerateRequest) -> Completion {
        self.state.generate(vec![request]).await.expect("a text").remove(0)
    }

    async fn context(&mut self, text: &str) -> Resource<GuestContext> {
        let model = self.model("tiny");
        let bos = self.state.info(again(&model)).expect("a model").bos_token;
        let context = self.state.create(model).await.expect("a context");
        self.state.append(again(&context), bos.into_iter().collect()).await.expect("appended");
        self.state
            .append_text(again(&context), text.to_owned(), SpecialTokens::AsText)
            .await
            .expect("appended");
        context
    }

    fn sampler(&mut self, seed: u64, temperature: f32) -> Resource<GuestSampler> {
        let sampler = HostSampler::new(&mut self.state, seed).expect("room");
        self.state.set_temperature(again(&sampler), temperature).expect("in range");
        sampler
    }

    fn stream(
        &mut self,
        context: &Resource<GuestContext>,
        sampler: &Resource<GuestSampler>,
        max_tokens: Option<u32>,
    ) -> Resource<GuestStream> {
        let options = StreamOptions { max_tokens, ..plain() };
        HostStream::open(&mut self.state, again(context), again(sampler), options).expect("a stream")
    }

    async fn next(&mut self, stream: &Resource<GuestStream>) -> Option<u32> {
        self.state.next(again(stream)).await.expect("a token or the end").map(|token| token.token)
    }

    async fn step(&mut self, context: &Resource<GuestContext>, sampler: &Resource<GuestSampler>) -> u32 {
        let request = StepRequest { context: again(context), sampler: again(sampler), others: Vec::new() };
        self.state.step(vec![request]).await.expect("a token")[0].token
    }

    fn tokens(&mut self, context: &Resource<GuestContext>) -> Vec<u32> {
        self.state.tokens(again(context), 0, u32::MAX).expect("a context")
    }

    fn request(&self, context: &Resource<GuestContext>, sampler: &Resource<GuestSampler>) -> GenerateRequest {
        GenerateRequest {
            context: again(context),
            sampler: again(sampler),
            seed: None,
            max_tokens: Some(40),
            stop_tokens: Vec::new(),
            stop_texts: Vec::new(),
            keep: Keep::Tokens,
            emit: Emit::Nothing,
            top: 0,
            speculation: None,
            others: Vec::new(),
        }
    }
}

impl PartialEq for FinishReason {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::StopToken(a), Self::StopToken(b)) | (Self::StopText(a), Self::StopText(b)) => a == b,
            _ => std::mem::discriminant(self) == std::mem::discriminant(other),
        }
    }
}

/// What a guest can do between two tokens of a stream.
#[derive(Clone, Copy, Debug)]
enum Meanwhile {
    Nothing,
    Append,
    Truncate,
    Fork,
    Ask,
    ChangeSampler,
    OtherStream,
}

#[tokio::test]
async fn a_stream_gives_what_steps_give_whatever_happens_meanwhile() {
    let mut guest = guest();
    follow_steps(&mut guest, 12, |guest, context, sampler| guest.stream(context, sampler, None)).await;
}

/// Compares streams of so many tokens with steps, beside which a guest does all that it can.
async fn follow_steps(
    guest: &mut Guest,
    n_tokens: usize,
    open: impl Fn(&mut Guest, &Resource<GuestContext>, &Resource<GuestSampler>) -> Resource<GuestStream>,
) {
    for meanwhile in [
        Meanwhile::Nothing,
        Meanwhile::Append,
        Meanwhile::Truncate,
        Meanwhile::Fork,
        Meanwhile::Ask,
        Meanwhile::ChangeSampler,
        Meanwhile::OtherStream,
    ] {
        let streamed = guest.context("Once upon a time").await;
        let stepped = guest.context("Once upon a time").await;
        let mut sampler = guest.sampler(3, 1.0);
        let stream = open(guest, &streamed, &sampler);
        for idx in 0..n_tokens {
            let token = guest.next(&stream).await.expect("no end yet");
            assert_eq!(token, guest.step(&stepped, &sampler).await, "{meanwhile:?}, token {idx}");
            if idx % 3 != 2 {
                continue;
            }
            let length = guest.state.length(again(&streamed)).expect("a context");
            for context in [&streamed, &stepped] {
                match meanwhile {
                    Meanwhile::Nothing | Meanwhile::ChangeSampler => {}
                    Meanwhile::Append => {
                        guest.state.append(again(context), vec![40, 41]).await.expect("appended");
                    }
                    Meanwhile::Truncate => {
                        guest.state.truncate(again(context), length - 2).await.expect("shorter");
                    }
                    Meanwhile::Fork => {
                        let fork = guest.state.fork(again(context)).await.expect("a fork");
                        guest.step(&fork, &sampler).await;
                        HostContext::drop(&mut guest.state, fork).expect("there");
                    }
                    Meanwhile::Ask => {
                        DecodingHost::top(&mut guest.state, vec![again(context)], 3)
                            .await
                            .expect("a distribution");
                    }
                    Meanwhile::OtherStream => {
                        let other = guest.stream(context, &sampler, Some(2));
                        while guest.next(&other).await.is_some() {}
                        let finish = HostStream::finish(&mut guest.state, again(&other)).expect("a stream");
                        assert_eq!(finish, Some(FinishReason::MaxTokens));
                    }
                }
            }
            if matches!(meanwhile, Meanwhile::ChangeSampler) {
                sampler = guest.sampler(100 + idx as u64, 0.7);
                guest.state.set_sampler(again(&stream), again(&sampler)).expect("changed");
            }
        }
        assert_eq!(guest.tokens(&streamed), guest.tokens(&stepped), "{meanwhile:?}");
    }
}

#[tokio::test]
async fn speculate_draws_what_steps_draw_for_many_contexts_at_once() {
    let mut guest = guest();
    let sampler = guest.sampler(3, 1.0);
    let stepped = guest.context("Once upon a time").await;
    let mut tokens = Vec::new();
    for _ in 0..6 {
        tokens.push(guest.step(&stepped, &sampler).await);
    }
    let wrong = |idx: usize| tokens.iter().enumerate().map(|(i, &t)| t ^ u32::from(i == idx)).collect();
    // Nothing guessed, all right, wrong at the first, wrong at the third.
    let guesses: [Vec<u32>; 4] = [Vec::new(), tokens.clone(), wrong(0), wrong(2)];
    let mut contexts = Vec::new();
    for _ in &guesses {
        contexts.push(guest.context("Once upon a time").await);
    }
    let before = guest.state.get_usage().expect("usage");
    let requests = contexts.iter().zip(&guesses).map(|(context, guess)| SpeculateRequest {
        context: again(context),
        sampler: again(&sampler),
        guess: guess.clone(),
    });
    let drawn = guest.state.speculate(requests.collect()).await.expect("tokens");
    for ((drawn, context), n) in drawn.iter().zip(&contexts).zip([1, 7, 1, 3]) {
        assert_eq!(drawn.len(), n);
        let drawn: Vec<u32> = drawn.iter().map(|drawn| drawn.token).collect();
        assert_eq!(drawn[..n.min(6)], tokens[..n.min(6)]);
        assert!(guest.tokens(context).ends_with(&drawn));
    }
    let after = guest.state.get_usage().expect("usage");
    assert_eq!(after.tokens_in_vain - before.tokens_in_vain, 6 + 4);
    assert_eq!(after.causes.tokens_guessed_wrong - before.causes.tokens_guessed_wrong, 6 + 4);
    assert_eq!(after.causes.tokens_given_up, before.causes.tokens_given_up);
}

#[tokio::test]
async fn long_texts_have_the_tokens_of_their_parts_and_are_paid_for() {
    let mut guest = guest();
    let model = guest.model("tiny");
    let line = "Once upon a time there was a token.\n";
    let mut encode = async |text: String| {
        guest.state.encode(again(&model), text, SpecialTokens::AsText).await.expect("a text")
    };
    let part = encode(line.to_owned()).await;
    let before = encode(line.repeat(2)).await.len() - part.len();
    let long = encode(line.repeat(5_000)).await;
    assert_eq!(long.len(), part.len() + 4_999 * before);
    let used = guest.state.cpu.used();
    assert!(used > Duration::ZERO, "nothing meters this test but the thread of the long text");
    let text = guest.state.decode(again(&model), long).await.expect("tokens of the model");
    assert_eq!(text, line.repeat(5_000));
    assert!(guest.state.cpu.used() > used);

    let message = ChatMessage { role: "user".to_owned(), content: line.repeat(500) };
    let used = guest.state.cpu.used();
    let encoded = guest.state.encode_chat(again(&model), vec![message], ChatEnd::Assistant).await;
    assert!(encoded.expect("a chat model").len() > 500 * before - before);
    assert!(guest.state.cpu.used() > used);
}
