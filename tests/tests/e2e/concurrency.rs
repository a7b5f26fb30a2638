//! Many guests at once: each gets what it would have alone, all are seen, and nothing of them is left.

use trellis::config::Config;
use trellis_client::{Client, Event, Guest, Program, StartOptions};
use trellis_tests::daemons::{self, collect, is_listed, nothing_is_held, started, until, with};
use trellis_tests::engines::block_on;
use trellis_tests::guests;

use crate::exe;

const N_GUESTS: usize = 64;
const N_FORKS: usize = 4;
const N_TOKENS: usize = 24;

const PROMPTS: [&str; 4] = [
    "<|begin_of_text|>Once upon a time",
    "<|begin_of_text|><|user|>\nTell me a short story.<|end|>\n<|assistant|>\n",
    "<|begin_of_text|>Ownership is a set of rules that govern how a program manages memory. All programs have to",
    "<|begin_of_text|>",
];

fn forks(idx: usize) -> StartOptions {
    let (n_forks, n_tokens) = (N_FORKS.to_string(), N_TOKENS.to_string());
    let options = with(&["forks", &n_forks, &n_tokens, PROMPTS[idx % PROMPTS.len()]]);
    // Every prompt with every seed: two guests differ in the one or in the other.
    StartOptions { seed: Some(1000 * (idx / PROMPTS.len()) as u64), ..options }
}

async fn start(client: &Client, wasm: &[u8], options: StartOptions) -> Guest {
    client.start(Program::wasm(wasm.to_vec()), options).await.expect("the connection stands")
}

/// Passes over events until the guest has sent something.
async fn first_output(guest: &mut Guest) {
    loop {
        match guest.next().await {
            Some(Ok(Event::Text { .. } | Event::Tokens { .. })) => return,
            Some(Ok(_)) => {}
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn sixty_four_guests_of_four_forks_have_what_they_have_alone() {
    block_on(async {
        let wasm = guests::hostile();
        let daemon = daemons::start(&daemons::config(exe()));
        let client = daemon.connect().await.expect("connected");
        let mut alone = Vec::new();
        for idx in 0..N_GUESTS {
            let guest = start(&client, &wasm, forks(idx)).await;
            guest.end_messages().await.expect("it runs");
            alone.push(collect(guest).await.well().tokens);
            assert_eq!(alone[idx].len(), N_FORKS * N_TOKENS);
        }
        nothing_is_held(&daemon).await;

        // Eight connections, eight guests each.
        let mut clients = Vec::new();
        for _ in 0..8 {
            clients.push(daemon.connect().await.expect("connected"));
        }
        let mut guests = Vec::new();
        for idx in 0..N_GUESTS {
            guests.push(start(&clients[idx % clients.len()], &wasm, forks(idx)).await);
        }
        // Half of the tokens are drawn; then each waits for a word.
        for guest in &mut guests {
            first_output(guest).await;
        }
        let listed = client.ps().await.expect("the daemon answers");
        assert_eq!(listed.len(), N_GUESTS);
        for guest in &listed {
            assert_eq!(guest.n_contexts, 1 + N_FORKS as u64, "{guest:?}");
            assert!(guest.n_pages > 0 && guest.memory_bytes > 0 && guest.usage.n_tokens > 0, "{guest:?}");
            assert!(["running", "waiting"].contains(&guest.state.as_str()), "{guest:?}");
        }
        let info = client.info().await.expect("the daemon answers");
        // The connection that asks is one, too.
        assert_eq!((info.n_guests, info.n_sessions), (64, 9));

        for guest in &guests {
            guest.end_messages().await.expect("it runs");
        }
        let ends: Vec<_> = guests.into_iter().map(|guest| tokio::spawn(collect(guest))).collect();
        for (idx, end) in ends.into_iter().enumerate() {
            let ended = end.await.expect("no panic").well();
            assert_eq!(ended.tokens, alone[idx], "guest {idx}");
        }
        drop((client, clients));
        nothing_is_held(&daemon).await;
    });
}

#[test]
fn a_client_that_leaves_in_mid_generation_leaves_no_page_behind() {
    block_on(async {
        let wasm = guests::hostile();
        // Few pages, so that some of what is dropped lies in host memory.
        let config =
            Config { kv_bytes: Some(12 << 20), kv_host_bytes: Some(16 << 20), ..daemons::config(exe()) };
        let daemon = daemons::start(&config);
        // Compiled once before many ask for it.
        let client = daemon.connect().await.expect("connected");
        first_output(&mut start(&client, &wasm, with(&["endless"])).await).await;
        for round in 0..3 {
            let client = daemon.connect().await.expect("connected");
            let mut guests = Vec::new();
            for seed in 0..24 {
                let options = StartOptions { seed: Some(seed), ..with(&["endless"]) };
                guests.push(start(&client, &wasm, options).await);
            }
            for guest in &mut guests {
                first_output(guest).await;
            }
            let stats = daemon.model(None).expect("a model").stats().await.expect("the engine lives");
            assert!(stats.n_contexts >= 24, "{stats:?}");
            assert!(stats.n_pages_free + stats.n_pages_cached < stats.n_pages, "{stats:?}");
            match round {
                // All at once.
                0 => drop((client, guests)),
                // One by one, the connection stays.
                1 => {
                    for guest in guests {
                        drop(guest);
                        tokio::task::yield_now().await;
                    }
                    until("the guests are gone", async || client.ps().await.expect("it answers").is_empty())
                        .await;
                }
                // Cancelled and read to the end.
                _ => {
                    for guest in &guests {
                        guest.cancel();
                    }
                    for guest in guests {
                        let ended = collect(guest).await;
                        assert_eq!(ended.reason().code.as_str(), "cancelled", "{ended:?}");
                    }
                }
            }
            nothing_is_held(&daemon).await;
        }
    });
}

#[test]
fn a_stop_ends_one_guest_and_no_other() {
    block_on(async {
        let wasm = guests::hostile();
        let daemon = daemons::start(&daemons::config(exe()));
        let client = daemon.connect().await.expect("connected");
        let mut first = start(&client, &wasm, with(&["endless"])).await;
        let mut second = start(&client, &wasm, with(&["endless"])).await;
        let (id, other_id) = (started(&mut first).await, started(&mut second).await);
        assert!(is_listed(&client, id).await && is_listed(&client, other_id).await);
        client.stop(id).await.expect("it runs");
        let ended = collect(first).await;
        assert_eq!(ended.reason().code.as_str(), "stopped");
        assert!(ended.usage.is_some(), "{ended:?}");
        assert!(!is_listed(&client, id).await && is_listed(&client, other_id).await);
        first_output(&mut second).await;

        let gone = client.stop(id).await.expect_err("it has ended");
        assert_eq!(gone.code().map(trellis_client::ErrorCode::as_str), Some("unknown_guest"));
        drop((client, second));
        nothing_is_held(&daemon).await;
    });
}
