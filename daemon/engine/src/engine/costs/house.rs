//! An engine and its guests, one after the other on one thread.

use std::path::PathBuf;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context as TaskContext, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::allocations;
use super::device::{Device, Stock};
use crate::account::{Account, ActorId, Budget, GuestId, Owner, SessionId};
use crate::backend::{Limits, PAGE_LEN};
use crate::batch::Token;
use crate::command::{Ahead, Ask, MaskSource, ModelId, RunSettings};
use crate::context::{Context, Pull, RunKey};
use crate::engine::KvBounds;
use crate::engine::core::{Core, Newcomer, Next};
use crate::engine::inbox::Inbox;
use crate::engine::post::Post;
use crate::error::EngineError;
use crate::handle::{EngineState, Link, Message, Served};
use crate::kv::SegmentLengths;
use crate::model::{Model, ModelSource};
use crate::model_handle::ModelHandle;
use crate::port::Port;
use crate::sampling::Sampler;
use crate::scheduler::SchedulerSettings;

/// What comes at once.
pub(super) fn now<T>(future: impl Future<Output = Result<T, EngineError>>) -> T {
    match pin!(future).poll(&mut TaskContext::from_waker(Waker::noop())) {
        Poll::Ready(result) => result.expect("nothing is wrong"),
        Poll::Pending => panic!("nothing is waited for"),
    }
}

/// The text of a guest; no two have the same first page.
pub(super) fn text(idx: usize, n_tokens: usize) -> impl Iterator<Item = Token> {
    (0..n_tokens).map(move |n| (if n < 4 { idx >> (6 * n) & 63 } else { n % 97 }) as Token)
}

/// Runs of so many tokens each, after a few of which the context is as it was at the beginning.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ends {
    pub(super) n_tokens: usize,
    pub(super) n_runs: usize,
    /// Tokens of the very first run, so that not all end at once.
    pub(super) n_first: usize,
}

/// Whether a guest has something to do.
struct Alarm(AtomicBool);

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

struct Guest {
    pulls: Pin<Box<dyn Future<Output = ()>>>,
    alarm: Arc<Alarm>,
    waker: Waker,
}

/// What a step was.
pub(super) struct Step {
    /// What the engine's thread was busy for.
    pub(super) time: Duration,
    /// How often it asked for memory.
    pub(super) n_allocations: u64,
}

pub(super) struct House {
    core: Core,
    inbox: Inbox,
    post: Post,
    model: ModelHandle,
    guests: Vec<Guest>,
    user: Arc<Account>,
    stock: Stock,
    n_rows: usize,
    // The engine has failed once no receiver is left.
    _state: watch::Sender<EngineState>,
}

impl House {
    /// An engine whose steps have so many rows, with room for so many tokens.
    pub(super) fn new(n_rows: usize, n_tokens: usize, n_under_way: usize) -> Self {
        let limits =
            Limits { n_steps_under_way: n_under_way, ..Limits::of_nothing(n_rows, n_tokens / PAGE_LEN) };
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models/tiny");
        let model = Model::open("tiny", &ModelSource::Folder(folder)).expect("the bundled model opens");
        let stock = Stock::default();
        let device = Device::new(limits, stock.clone());
        let (link, Served { messages, state, desk }) = Link::new(Port::Direct);
        let (failure, failed) = watch::channel(None);
        let model =
            ModelHandle::new(link.clone(), ModelId::default(), Arc::new(model), &device, None, failed);
        let settings =
            SchedulerSettings { segments: SegmentLengths::default(), ..SchedulerSettings::alone(usize::MAX) };
        let (id, bounds) = (ModelId::default(), KvBounds::of(&device));
        let newcomer = Newcomer { id, settings, bounds, backend: Box::new(device), archive: None };
        link.post_message(Message::Add { newcomer, failure }).expect("the engine is there");
        let mut house = Self {
            core: Core::default(),
            inbox: Inbox::new(messages, desk),
            post: Post::default(),
            model,
            guests: Vec::new(),
            user: Account::new("user", Budget::UNLIMITED, None),
            stock,
            n_rows,
            _state: state,
        };
        house.idle_turn();
        house
    }

    fn turn(&mut self) -> Next {
        self.post.turn(&mut self.core, &mut self.inbox, Instant::now(), Port::Direct).expect("nothing fails")
    }

    /// A turn in which nothing is to be computed.
    pub(super) fn idle_turn(&mut self) {
        assert_eq!(self.turn(), Next::Input);
    }

    /// A context of so many tokens, all computed, of a guest in a session of its own.
    pub(super) fn context(&mut self, idx: usize, n_tokens: usize) -> Context {
        let session = Account::new("session", Budget::UNLIMITED, Some(self.user.clone()));
        let account = Account::new("guest", Budget::UNLIMITED, Some(session));
        let (session, guest) = (SessionId(idx as u64), GuestId(idx as u64));
        let owner = Owner { actor: ActorId(0), session, guest, account };
        let mut context = now(Context::create(&self.model, owner));
        now(context.append(&text(idx, n_tokens).collect::<Vec<_>>()));
        let answer = now(context.ask(Ask::Prefill));
        while self.turn() != Next::Input {
            if self.core.has_steps_under_way() {
                self.core.wait();
            }
        }
        now(answer.answer());
        context
    }

    /// A guest that pulls tokens from a context for ever: in one run, or in runs that end.
    pub(super) fn pull(&mut self, context: Context, ends: Option<Ends>) {
        let alarm = Arc::new(Alarm(AtomicBool::new(true)));
        let waker = Waker::from(alarm.clone());
        self.guests.push(Guest { pulls: Box::pin(pull(context, ends)), alarm, waker });
    }

    /// Lets guests take what is there, and ask for more.
    fn let_guests(&mut self) {
        for guest in &mut self.guests {
            if guest.alarm.0.swap(false, Ordering::Relaxed) {
                let polled = guest.pulls.as_mut().poll(&mut TaskContext::from_waker(&guest.waker));
                assert!(polled.is_pending(), "guests pull for ever");
            }
        }
    }

    /// Steps before those that count.
    pub(super) fn warm_up(&mut self, n_steps: usize) {
        for _ in 0..n_steps {
            self.step();
        }
    }

    /// One step of all guests' contexts: from the end of one to when the device has the next, or the next but one.
    pub(super) fn step(&mut self) -> Step {
        self.let_guests();
        self.stock.fill(self.n_rows);
        let mut time = Duration::ZERO;
        let n_allocations = allocations::count(|| {
            let begun = Instant::now();
            if self.core.has_steps_under_way() {
                self.core.wait();
                assert_eq!(self.turn(), Next::Turn);
            }
            assert_eq!(self.turn(), Next::Device);
            time = begun.elapsed();
        });
        Step { time, n_allocations }
    }
}

async fn pull(mut context: Context, ends: Option<Ends>) {
    let (sampler, stop_tokens): (_, Arc<[Token]>) = (Arc::new(Sampler::greedy()), Arc::new([]));
    let n_base = context.tokens().len();
    let mut n_tokens_max = ends.map(|ends| ends.n_first);
    for run in 0.. {
        let settings = || RunSettings {
            sampler: sampler.clone(),
            stop_tokens: stop_tokens.clone(),
            n_tokens_max,
            ahead: Ahead::Adaptive,
            masks: MaskSource::Sampler,
        };
        while let Pull::Token(_) = context.pull(RunKey(run), settings).await.expect("it goes on") {}
        let ends = ends.expect("without an end it does not get here");
        n_tokens_max = Some(ends.n_tokens);
        if run as usize % ends.n_runs == ends.n_runs - 1 {
            context.truncate(n_base).await.expect("it is longer");
        }
    }
}
