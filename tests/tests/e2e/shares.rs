//! KV memory goes to the model whose guests need it.

use trellis::config::Config;
use trellis::daemon::Daemon;
use trellis_client::Client;
use trellis_engine::backend::PAGE_LEN;
use trellis_engine::{Answer, Ask, Context, ModelHandle};
use trellis_tests::daemons::{self, nothing_is_held};
use trellis_tests::engines::{Random, block_on, owner};

use crate::exe;

const KV_BYTES: u64 = 48 << 20;

/// Tokens of a context; `tiny` and `draft` have room for 1,024.
const N_TOKENS: usize = 1_000;

/// What the busy model leaves to the other, which has to keep pages for one context, and to parts of granules.
const LEFT_BYTES: u64 = 6 << 20;

fn context_bytes(model: &ModelHandle) -> u64 {
    (N_TOKENS.div_ceil(PAGE_LEN) * model.limits().page_bytes) as u64
}

/// Users whose contexts fill so many bytes.
fn n_users_of(model: &ModelHandle, n_bytes: u64) -> u32 {
    u32::try_from(n_bytes / context_bytes(model)).expect("few")
}

fn model(daemon: &Daemon, name: &str) -> ModelHandle {
    daemon.model(Some(name)).expect("it is loaded")
}

/// A context of a user of its own, and what comes after its text.
async fn read(model: ModelHandle, user: u32) -> (Context, Answer) {
    let mut context = Context::create(&model, owner(user)).await.expect("it is open");
    let tokens = Random(user.into()).tokens(N_TOKENS, model.limits().vocab_size);
    context.append(&tokens).await.expect("there is room");
    let top = top(&mut context).await;
    (context, top)
}

async fn top(context: &mut Context) -> Answer {
    context.ask(Ask::Top { n: 3 }).await.expect("asked").answer().await.expect("computed")
}

/// Contexts of many users, all at once.
async fn read_all(model: &ModelHandle, users: std::ops::Range<u32>) -> Vec<(Context, Answer)> {
    let readers: Vec<_> = users.map(|user| tokio::spawn(read(model.clone(), user))).collect();
    let mut read = Vec::new();
    for reader in readers {
        read.push(reader.await.expect("no panic"));
    }
    read
}

/// Bytes of the pages of each model, as the daemon shows them.
async fn shown_bytes(client: &Client) -> [u64; 2] {
    let models = client.models().await.expect("it answers");
    ["tiny", "draft"].map(|name| {
        let model = models.iter().find(|model| model.name == name).expect("it is loaded");
        model.n_pages * model.page_bytes
    })
}

#[test]
fn guests_of_one_model_get_the_memory_that_another_has_no_use_for_until_it_wakes() {
    block_on(async {
        let models = vec!["tiny".to_owned(), "draft".to_owned()];
        let config = Config { models, kv_bytes: Some(KV_BYTES), ..daemons::config(exe()) };
        let daemon = daemons::start(&config);
        let client = daemon.connect().await.expect("connected");
        let (tiny, draft) = (model(&daemon, "tiny"), model(&daemon, "draft"));
        let even = shown_bytes(&client).await;
        assert!(even.iter().all(|&bytes| bytes <= KV_BYTES / 2), "{even:?}");

        // More than half of it, while the other model has nothing to do.
        let n_busy = n_users_of(&tiny, KV_BYTES - LEFT_BYTES);
        let mut busy = read_all(&tiny, 0..n_busy).await;
        let own = shown_bytes(&client).await;
        let stats = tiny.stats().await.expect("it lives");
        let held_bytes = u64::from(n_busy) * context_bytes(&tiny);
        assert!(own[0] >= held_bytes && held_bytes > KV_BYTES / 2, "{own:?} for {held_bytes}");
        assert!(own.iter().sum::<u64>() <= KV_BYTES, "{own:?}");
        assert_eq!((stats.n_swaps_out, stats.n_tokens_again, stats.n_pages_on_host), (0, 0, 0), "{stats:?}");

        // The other wakes: what waits for nothing makes room, and nothing is lost.
        // The first keeps what it got for some steps of the device.
        let (mut woken, mut shared, mut user) = (Vec::new(), own, 100);
        while shared[1] <= own[1] && woken.len() < 500 {
            let n_users = n_users_of(&draft, KV_BYTES * 2 / 3);
            woken.extend(read_all(&draft, user..user + n_users).await);
            user += n_users;
            shared = shown_bytes(&client).await;
        }
        assert!(shared[1] > own[1] && shared[0] < own[0], "{shared:?} after {own:?}");
        assert!(shared.iter().sum::<u64>() <= KV_BYTES, "{shared:?}");
        for (context, before) in busy.iter_mut().chain(&mut woken) {
            assert_eq!(&top(context).await, before);
        }
        drop((busy, woken));
        nothing_is_held(&daemon).await;
    });
}
