//! A long run of guests that come and go, fork, truncate, save, cancel and push each other out of memory: each gets
//! what it would have alone, and in the end nothing is held and nothing is lost.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use trellis_cuda::Gpu;
use trellis_engine::account::{Owner, Resource};
use trellis_engine::backend::PAGE_LEN;
use trellis_engine::model::Dtype;
use trellis_engine::sampling::Sampler;
use trellis_engine::{
    Ahead, Answer, Ask, Context, Engine, EngineStats, Guess, KvBounds, MaskSource, ModelHandle, Pull, RunKey,
    RunSettings,
};
use trellis_tests::device::card_alone;
use trellis_tests::engines::{
    Random, Sizes, backend, block_on, block_on_for, cuda_backend, encode, engine, owner, start,
};
use trellis_tests::models;

const N_GUESTS: u32 = 24;
const N_CONTEXTS_MAX: usize = 5;
const N_TOKENS_MAX: usize = 320;

/// So few pages that contexts are moved to host memory, and so few of those that KV is computed again.
const SIZES: Sizes = Sizes { n_pages: 64, n_host_pages: 12, n_step_rows: 16, n_step_tokens: 48 };

const N_STEPS_ON_A_CARD: u64 = 50_000;
const N_STEPS: u64 = 500;

/// Ends a soak that would otherwise never end.
const SOAK_TIME_MAX: Duration = Duration::from_secs(480);

/// How long what a guest held may take to come back once it has left.
const LEAVE_TIME_MAX: Duration = Duration::from_secs(10);

/// What a guest holds while it is there.
struct Guest<'a> {
    engine: &'a ModelHandle,
    owner: Owner,
    random: &'a mut Random,
    contexts: Vec<Context>,
    saved: Vec<String>,
}

fn sampler(random: &mut Random) -> Sampler {
    Sampler {
        temperature: random.below(3) as f32 * 0.6,
        top_k: (random.below(2) == 0).then_some(40),
        top_p: (random.below(3) == 0).then_some(0.9),
        frequency_penalty: random.below(2) as f32 * 0.3,
        seed: random.draw(),
        ..Sampler::greedy()
    }
}

fn settings(sampler: &Arc<Sampler>, ahead: Ahead) -> impl FnOnce() -> RunSettings {
    let sampler = sampler.clone();
    move || RunSettings {
        sampler,
        stop_tokens: Arc::new([]),
        n_tokens_max: None,
        ahead,
        masks: MaskSource::Sampler,
    }
}

impl<'a> Guest<'a> {
    async fn arrive(engine: &'a ModelHandle, owner: Owner, random: &'a mut Random) -> Self {
        let mut context = Context::create(engine, owner.clone()).await.expect("created");
        let n_prompt = 1 + random.below(N_TOKENS_MAX / 2);
        context.append(&random.tokens(n_prompt, engine.limits().vocab_size)).await.expect("fits");
        Self { engine, owner, random, contexts: vec![context], saved: Vec::new() }
    }

    async fn leave(mut self) {
        for name in self.saved.drain(..) {
            self.engine.forget(&self.owner, &name).await.expect("it was saved");
        }
    }

    async fn act(&mut self) {
        let idx = self.random.below(self.contexts.len());
        let n_contexts = self.contexts.len();
        let context = &mut self.contexts[idx];
        // What keeps a context from growing to the end of its memory.
        if context.tokens().len() > N_TOKENS_MAX {
            context.truncate(1 + self.random.below(N_TOKENS_MAX)).await.expect("it is longer");
        }
        match self.random.below(15) {
            0..4 => {
                let (sampler, key) = (Arc::new(sampler(self.random)), RunKey(self.random.draw()));
                for _ in 0..1 + self.random.below(24) {
                    let pulled = context.pull(key, settings(&sampler, Ahead::Adaptive)).await;
                    assert!(matches!(pulled.expect("pulled"), Pull::Token(_)));
                }
            }
            4 => {
                let ask = Ask::Sample(Arc::new(sampler(self.random)));
                context.ask(ask).await.expect("asked").answer().await.expect("drawn");
            }
            5 => {
                let n = self.random.below(48);
                let tokens = self.random.tokens(n, self.engine.limits().vocab_size);
                context.append(&tokens).await.expect("fits");
            }
            6 => {
                let n = 1 + self.random.below(context.tokens().len());
                context.truncate(n).await.expect("it is longer");
            }
            7 | 8 if n_contexts < N_CONTEXTS_MAX => {
                let child = context.fork().await.expect("forked");
                self.contexts.push(child);
            }
            // Dropped while the engine decodes ahead.
            9 if n_contexts > 1 => {
                let sampler = Arc::new(sampler(self.random));
                let pulled = context.pull(RunKey(1), settings(&sampler, Ahead::Unbounded)).await;
                assert!(matches!(pulled.expect("pulled"), Pull::Token(_)));
                drop(self.contexts.swap_remove(idx));
            }
            // Asked, and not waited for.
            10 => drop(context.ask(Ask::Top { n: 3 }).await.expect("asked")),
            11 => {
                let sampler = Arc::new(sampler(self.random));
                let pull = context.pull(RunKey(2), settings(&sampler, Ahead::Adaptive));
                let _ = tokio::time::timeout(Duration::from_micros(200), pull).await;
                let n = self.random.below(context.tokens().len()).max(1);
                context.truncate(n).await.expect("it is longer");
            }
            12 if self.saved.len() < 2 => {
                let name = format!("{}-{}", self.owner.actor.0, self.random.draw());
                context.save(&name).await.expect("saved");
                let opened = Context::open(self.engine, self.owner.clone(), &name).await.expect("opened");
                assert_eq!(opened.tokens(), context.tokens());
                self.contexts[idx] = opened;
                self.saved.push(name);
            }
            // Goes back, and guesses what it drew.
            13 => {
                let (sampler, key) = (Arc::new(sampler(self.random)), RunKey(self.random.draw()));
                let n_base = context.tokens().len();
                for _ in 0..self.random.below(12) {
                    let pulled = context.pull(key, settings(&sampler, Ahead::Adaptive)).await;
                    assert!(matches!(pulled.expect("pulled"), Pull::Token(_)));
                }
                let mut guess = context.tokens().copy_of(n_base..context.tokens().len());
                context.truncate(n_base).await.expect("it is longer");
                let n_right = self.random.below(guess.len() + 1);
                guess[n_right..].fill(19);
                let ask = Ask::Verify { sampler, guess: Guess::Chain(guess) };
                let answer = context.ask(ask).await.expect("asked").answer().await.expect("drawn");
                let Answer::Verified(drawn) = answer else { panic!("{answer:?}") };
                let tokens: Vec<u32> = drawn.iter().map(|drawn| drawn.candidate.token).collect();
                context.append(&tokens).await.expect("fits");
            }
            // Thinks, and may have to make room meanwhile.
            _ => tokio::time::sleep(Duration::from_micros(self.random.below(3000) as u64)).await,
        }
    }
}

/// Guests of one user, one after the other.
async fn live(model: ModelHandle, number: u32, is_over: Arc<AtomicBool>) {
    let owner = owner(number);
    let account = owner.account.clone();
    let mut random = Random(number.into());
    while !is_over.load(Ordering::Relaxed) {
        let mut guest = Guest::arrive(&model, owner.clone(), &mut random).await;
        for _ in 0..5 + guest.random.below(30) {
            guest.act().await;
        }
        guest.leave().await;
        // What a guest's commands take of a turn is bounded: a question of another may be answered before its last ones.
        let begun = Instant::now();
        while account.used(Resource::Pages) > 0 && begun.elapsed() < LEAVE_TIME_MAX {
            model.stats().await.expect("the engine lives");
        }
        assert_eq!(account.used(Resource::Contexts), 0);
        assert_eq!(account.used(Resource::Pages), 0);
    }
}

/// What a neighbour streams with this seed.
async fn witness(model: &ModelHandle, number: u32, seed: u64) -> Vec<u32> {
    let mut context = Context::create(model, owner(number)).await.expect("created");
    context.append(&encode(model, "<|begin_of_text|>Once upon a time")).await.expect("fits");
    let sampler = Arc::new(Sampler { temperature: 1.0, seed, ..Sampler::greedy() });
    for _ in 0..40 {
        let pulled = context.pull(RunKey(0), settings(&sampler, Ahead::Adaptive)).await.expect("pulled");
        assert!(matches!(pulled, Pull::Token(_)));
    }
    context.tokens().to_vec()
}

/// Runs guests for so many steps. `gpu` is that of the engine: once everything has been in use, nothing is
/// allocated on it.
async fn soak(model: &ModelHandle, n_steps: u64, gpu: Option<&Gpu>) -> EngineStats {
    let mut alone = Vec::new();
    for seed in 0..3 {
        alone.push(witness(model, N_GUESTS, seed).await);
    }
    let is_over = Arc::new(AtomicBool::new(false));
    let guests: Vec<_> =
        (0..N_GUESTS).map(|number| tokio::spawn(live(model.clone(), number, is_over.clone()))).collect();
    let neighbour = tokio::spawn({
        let (model, is_over) = (model.clone(), is_over.clone());
        async move {
            let mut n_rounds = 0;
            while n_rounds < alone.len() || !is_over.load(Ordering::Relaxed) {
                let seed = n_rounds % alone.len();
                assert_eq!(witness(&model, N_GUESTS, seed as u64).await, alone[seed], "round {n_rounds}");
                n_rounds += 1;
            }
            n_rounds
        }
    });
    let n_allocations = || gpu.map(|gpu| gpu.memory_stats().n_driver_allocations);
    let mut warm = None;
    loop {
        let stats = model.stats().await.expect("the engine lives");
        let gone = guests.iter().any(tokio::task::JoinHandle::is_finished) || neighbour.is_finished();
        if stats.n_steps >= n_steps || gone {
            break;
        }
        if warm.is_none() && stats.n_steps >= n_steps / 5 {
            warm = Some(n_allocations());
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    if let Some(warm) = warm {
        assert_eq!(n_allocations(), warm, "allocations on the device in a steady state");
    }
    is_over.store(true, Ordering::Relaxed);
    for guest in guests {
        guest.await.expect("every operation is valid");
    }
    let n_rounds = neighbour.await.expect("the neighbour has what it has alone");
    let stats = model.stats().await.expect("the engine lives");
    println!("{}: {n_rounds} rounds of the neighbour, {stats:?}", model.device());
    assert!(stats.n_steps >= n_steps, "{stats:?}");
    assert_eq!((stats.n_contexts, stats.n_saved), (0, 0), "{stats:?}");
    assert_eq!(stats.n_pages_free + stats.n_pages_cached, stats.n_pages, "to the page: {stats:?}");
    assert_eq!(stats.n_pages_on_host, 0, "{stats:?}");
    assert!(stats.causes.n_tokens_in_vain() > 0 && stats.n_tokens_cached > 0, "{stats:?}");
    stats
}

/// Asserts that guests pushed each other out of memory.
fn was_tight(stats: &EngineStats) {
    assert!(stats.n_swaps_out > 0 && stats.n_tokens_again > 0, "there was room for all: {stats:?}");
}

/// What the driver may keep beyond what it kept before, in units of its own: shapes of batches that come seldom.
const DRIVER_BYTES_MAX: usize = 4 << 20;

#[test]
fn nothing_is_held_in_the_end() {
    let engine = engine("draft", SIZES);
    was_tight(&block_on(soak(engine.handle(), N_STEPS, None)));
}

/// Puts a second model on the engine, uses it and takes it off again, and changes the first one's number of pages, until
/// it is over; returns how often.
async fn come_and_go(engine: &Engine, soaked: &ModelHandle, is_over: &AtomicBool) -> usize {
    let mut random = Random(7);
    let mut first = None;
    let bytes_of = |n_pages: usize| (n_pages * soaked.limits().page_bytes) as u64;
    let mut n_rounds = 0;
    while n_rounds < 3 || !is_over.load(Ordering::Relaxed) {
        let model = models::bundled("tiny");
        let loading = tokio::task::spawn_blocking(move || {
            let backend = backend(&model, Sizes { n_pages: 128, ..SIZES });
            (model, backend)
        });
        let (model, backend) = loading.await.expect("it loads");
        let bounds = KvBounds::of(backend.as_ref());
        let own_bytes = (backend.n_pages() * backend.limits().page_bytes) as u64;
        let handle = engine.add(Arc::new(model), backend, bounds).expect("the engine lives");
        let limits = soaked.limits();
        let (granule, all) = (limits.n_granule_pages, limits.n_pages);
        let least = limits.n_positions_max.div_ceil(PAGE_LEN).next_multiple_of(granule);
        let n_pages = (least + random.below(all) / granule * granule).min(all);
        let shared = engine.share(own_bytes + bytes_of(n_pages)).expect("the engine lives");
        let (seen, shared) = tokio::join!(witness(&handle, 0, 3), shared);
        shared.expect("pages that it had before");
        assert_eq!(&seen, first.get_or_insert(seen.clone()), "round {n_rounds}");
        let removed = engine.remove(&handle).await.expect("it was there");
        tokio::task::spawn_blocking(move || drop(removed)).await.expect("it goes");
        n_rounds += 1;
    }
    let shared = engine.share(bytes_of(soaked.limits().n_pages)).expect("the engine lives");
    shared.await.expect("pages that it had before");
    n_rounds
}

#[test]
fn nothing_is_held_beside_models_that_come_and_go() {
    // Three times what one context needs, so that there is something to give up.
    let model = engine("draft", Sizes { n_pages: 3 * SIZES.n_pages, ..SIZES });
    block_on(async {
        let is_over = AtomicBool::new(false);
        let soaked = async {
            let stats = soak(model.handle(), N_STEPS, None).await;
            is_over.store(true, Ordering::Relaxed);
            stats
        };
        let (_, n_rounds) = tokio::join!(soaked, come_and_go(model.engine(), model.handle(), &is_over));
        println!("{n_rounds} times a second model came and went");
        let stats = model.handle().stats().await.expect("the engine lives");
        assert_eq!(stats.n_pages, model.handle().limits().n_pages, "{stats:?}");
        assert_eq!(stats.n_pages_free + stats.n_pages_cached, stats.n_pages, "to the page: {stats:?}");
    });
}

#[test]
fn nothing_is_lost_in_fifty_thousand_steps_on_a_card() {
    let Some(alone) = card_alone() else { return };
    let gpu = alone.card.gpu();
    let run = |n_steps| {
        let model = models::bundled("tiny");
        let backend = cuda_backend(&alone.card, &model, SIZES, Dtype::F32).expect("the model loads");
        let engine = start(model, Box::new(backend), SIZES);
        was_tight(&block_on_for(SOAK_TIME_MAX, soak(engine.handle(), n_steps, Some(gpu))));
        drop(engine);
        gpu.trim().expect("the driver takes memory back");
        (gpu.memory_stats().in_use_bytes, gpu.free_bytes().expect("the driver answers"))
    };
    // The first engine leaves behind what the driver and its libraries keep while the process lives: for kernels, and for
    // captured steps of all the shapes that come.
    let (_, free_first) = run(N_STEPS_ON_A_CARD / 2);
    let (in_use_before, free_before) = run(N_STEPS_ON_A_CARD / 2);
    let (in_use_after, free_after) = run(N_STEPS_ON_A_CARD / 2);
    assert_eq!(in_use_after, in_use_before, "bytes in use");
    let kept = free_before.saturating_sub(free_after);
    println!("the driver keeps {} bytes more, then {kept}", free_first.saturating_sub(free_before));
    assert!(kept <= DRIVER_BYTES_MAX, "{kept} bytes of the device are gone");
}
