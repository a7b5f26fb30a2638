//! Users with few streams beside users with many.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tokio::sync::Barrier;
use trellis::config::Device;
use trellis_engine::sampling::Sampler;
use trellis_engine::{Ahead, Context, MaskSource, ModelHandle, Pull, RunKey, RunSettings};
use trellis_tests::device::device;
use trellis_tests::engines::{Random, Sizes, block_on, engine, owner};

/// Streams of the one user.
const N_MANY: usize = 60;

/// Tokens that the other user's stream pulls beside them.
const N_TOKENS: u64 = 300;

/// A user's stream.
struct Stream {
    model: ModelHandle,
    user: u32,
    seed: u64,
    n_tokens: Arc<AtomicU64>,
}

/// Pulls from a stream and counts its tokens. After the first it waits until all streams have theirs, and goes on until it
/// has enough or is told to stop.
async fn pull(stream: Stream, n_enough: u64, begun: Option<&Barrier>, is_over: &AtomicBool) {
    let Stream { model, user, seed, n_tokens } = stream;
    let mut context = Context::create(&model, owner(user)).await.expect("it is open");
    let prompt = Random(seed).tokens(4, model.limits().vocab_size);
    context.append(&prompt).await.expect("there is room");
    let settings = || RunSettings {
        sampler: Arc::new(Sampler::greedy()),
        stop_tokens: Arc::new([]),
        n_tokens_max: None,
        ahead: Ahead::Adaptive,
        masks: MaskSource::Sampler,
    };
    while n_tokens.load(Ordering::Relaxed) < n_enough && !is_over.load(Ordering::Relaxed) {
        let pulled = context.pull(RunKey(1), settings).await.expect("pulled");
        assert!(matches!(pulled, Pull::Token(_)), "{pulled:?}");
        if n_tokens.fetch_add(1, Ordering::Relaxed) == 0
            && let Some(begun) = begun
        {
            begun.wait().await;
        }
    }
}

/// Where each row costs its time. On a GPU that would have to be a larger model than the tests have.
#[test]
fn a_stream_of_one_user_is_not_starved_by_many_of_another() {
    if !matches!(device(), Device::Auto | Device::Cpu) {
        return;
    }
    block_on(async {
        let engine = engine("tiny", Sizes { n_pages: 2048, ..Sizes::default() });
        let stream = |user, seed| {
            let n_tokens = Arc::<AtomicU64>::default();
            (Stream { model: engine.handle().clone(), user, seed, n_tokens: n_tokens.clone() }, n_tokens)
        };
        let (is_over, begun) = (Arc::new(AtomicBool::new(false)), Arc::new(Barrier::new(N_MANY + 1)));
        let (mut many, mut counts) = (Vec::new(), Vec::new());
        for seed in 1..=N_MANY {
            let (stream, n_tokens) = stream(2, seed as u64);
            let (begun, is_over) = (begun.clone(), is_over.clone());
            many.push(tokio::spawn(async move { pull(stream, u64::MAX, Some(&begun), &is_over).await }));
            counts.push(n_tokens);
        }
        let all = || counts.iter().map(|n_tokens| n_tokens.load(Ordering::Relaxed)).collect::<Vec<u64>>();
        begun.wait().await;
        let before = all();
        pull(stream(1, 0).0, N_TOKENS, None, &AtomicBool::new(false)).await;
        let after = all();
        is_over.store(true, Ordering::Relaxed);
        for stream in many {
            stream.await.expect("no panic");
        }
        let gained: Vec<u64> = before.iter().zip(&after).map(|(before, after)| after - before).collect();
        let n_gained: u64 = gained.iter().sum();
        println!("{n_gained} tokens of {N_MANY} streams beside {N_TOKENS} of one: {gained:?}");
        // In full steps that would be as many as there are streams.
        assert!(n_gained < N_MANY as u64 / 2 * N_TOKENS, "{n_gained} tokens for {N_TOKENS}");
        // The rest of the device is theirs, in equal parts.
        assert!(n_gained > N_TOKENS, "{n_gained} tokens for {N_TOKENS}");
        let (least, most) = (gained.iter().min(), gained.iter().max());
        assert!(least.zip(most).is_some_and(|(least, most)| *most <= 2 * least + 4), "{gained:?}");
    });
}
