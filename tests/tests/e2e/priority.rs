//! Classes of users: what each has of the device, whose pages make room for whom, and that nobody's tokens change by it.

use std::sync::Arc;

use trellis::config::{ClassSettings, Config, Isolation, NameOrId};
use trellis::daemon::Daemon;
use trellis::session::Actor;
use trellis_client::{ClassInfo, Client, Event, Guest, GuestInfo, Program, StartOptions};
use trellis_tests::daemons::{self, Served, collect, nothing_is_held, output, trellis, until, with};
use trellis_tests::engines::block_on;
use trellis_tests::guests;

use crate::exe;

/// Of the class `batch`, by their number.
const ALICE: Actor = Actor { uid: 40_001, gid: 40_001 };
/// Of the class `live`, by his number.
const BOB: Actor = Actor { uid: 40_002, gid: 40_002 };
/// A group whose members are of the class `live`.
const LIVE: u32 = 40_009;
/// Of no class: the machine does not know her, and the group of her connection counts for nothing.
const CAROL: Actor = Actor { uid: 40_003, gid: LIVE };

const N_FORKS: usize = 4;
const N_TOKENS: usize = 160;

fn of_class(share: u32, rank: u8) -> ClassSettings {
    ClassSettings { share, rank, ..ClassSettings::default() }
}

fn with_classes(config: Config) -> Config {
    let batch = ClassSettings { users: vec![NameOrId::Id(ALICE.uid)], ..of_class(1, 0) };
    let (users, groups) = (vec![NameOrId::Id(BOB.uid)], vec![NameOrId::Id(LIVE)]);
    let live = ClassSettings { users, groups, ..of_class(3, 2) };
    Config { classes: [("batch".to_owned(), batch), ("live".to_owned(), live)].into(), ..config }
}

async fn client(daemon: &Arc<Daemon>, actor: Actor) -> Client {
    let (near, far) = tokio::io::duplex(64 << 10);
    let daemon = daemon.clone();
    tokio::spawn(async move { daemon.sessions().serve(far, actor, daemon.shutdown().clone()).await });
    Client::over(near).await.expect("connected")
}

async fn start(client: &Client, options: StartOptions) -> Guest {
    client.start(Program::wasm(guests::hostile()), options).await.expect("the connection stands")
}

/// A guest of some forks, which waits for a word when half of their tokens are drawn.
async fn forks(client: &Client, seed: u64) -> Guest {
    let (n_forks, n_tokens) = (N_FORKS.to_string(), N_TOKENS.to_string());
    let options = with(&["forks", &n_forks, &n_tokens, "<|begin_of_text|>Once upon a time"]);
    start(client, StartOptions { seed: Some(seed), ..options }).await
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

async fn listed(client: &Client) -> Vec<GuestInfo> {
    client.ps().await.expect("the daemon answers")
}

async fn n_on_host(client: &Client) -> u64 {
    listed(client).await.iter().map(|guest| guest.n_pages_on_host).sum()
}

#[test]
fn what_makes_room_for_a_higher_class_draws_the_tokens_that_it_would_have_drawn() {
    room_is_made(daemons::isolation());
}

fn room_is_made(isolation: Isolation) {
    block_on(async {
        let (n_of_alice, n_of_bob) = (6, 2);
        // Of the pages of one context and few more, each guest needs a third.
        let small = Config {
            kv_bytes: Some(12 << 20),
            kv_host_bytes: Some(64 << 20),
            isolation,
            ..daemons::config(exe())
        };
        let daemon = Arc::new(daemons::start(&with_classes(small)));
        let (alice, bob) = (client(&daemon, ALICE).await, client(&daemon, BOB).await);
        let mut alone = Vec::new();
        for seed in 0..n_of_alice + n_of_bob {
            let guest = forks(&alice, seed).await;
            guest.end_messages().await.expect("it runs");
            alone.push(collect(guest).await.well().tokens);
        }
        nothing_is_held(&daemon).await;
        let model = daemon.model(None).expect("a model");
        let n_swaps_before = model.stats().await.expect("the engine lives").n_swaps_out;

        let mut guests = Vec::new();
        for seed in 0..n_of_alice {
            guests.push(forks(&alice, seed).await);
        }
        for guest in &mut guests {
            first_output(guest).await;
        }
        let n_before = n_on_host(&alice).await;
        let mut of_bob = Vec::new();
        for seed in n_of_alice..n_of_alice + n_of_bob {
            of_bob.push(forks(&bob, seed).await);
        }
        for guest in &mut of_bob {
            first_output(guest).await;
        }
        // All wait for a word. His are on the device, and some of hers made room.
        let (hers, his) = (n_on_host(&alice).await, n_on_host(&bob).await);
        assert!(
            hers > n_before && his == 0,
            "{n_before} and then {hers} pages of hers on the host, {his} of his"
        );
        for (client, class) in [(&alice, "batch"), (&bob, "live")] {
            let guests = listed(client).await;
            assert!(guests.iter().all(|guest| guest.class.as_deref() == Some(class)), "{guests:?}");
            assert!(guests.iter().all(|guest| guest.n_pages_on_host <= guest.n_pages), "{guests:?}");
        }

        guests.extend(of_bob);
        for guest in &guests {
            guest.end_messages().await.expect("it runs");
        }
        let ends: Vec<_> = guests.into_iter().map(|guest| tokio::spawn(collect(guest))).collect();
        for (idx, end) in ends.into_iter().enumerate() {
            let ended = end.await.expect("no panic").well();
            assert_eq!(ended.tokens.len(), N_FORKS * N_TOKENS);
            assert_eq!(ended.tokens, alone[idx], "guest {idx}");
        }
        let stats = model.stats().await.expect("the engine lives");
        assert!(stats.n_swaps_out > n_swaps_before + hers, "{stats:?}");
        assert_eq!(stats.n_tokens_again, 0, "the host had room for all: {stats:?}");
        drop((alice, bob));
        nothing_is_held(&daemon).await;
    });
}

/// Tokens that the guests of a user were computed so far.
async fn n_tokens(client: &Client) -> u64 {
    listed(client).await.iter().map(|guest| guest.usage.n_tokens).sum()
}

#[test]
fn users_have_the_device_by_the_shares_of_their_classes() {
    shares_hold(daemons::isolation());
}

fn shares_hold(isolation: Isolation) {
    block_on(async {
        // Steps of few rows: all of them are wanted by both.
        let narrow = Config { n_step_rows: Some(4), isolation, ..daemons::config(exe()) };
        let daemon = Arc::new(daemons::start(&with_classes(narrow)));
        let clients = [client(&daemon, CAROL).await, client(&daemon, BOB).await];
        let mut readers = Vec::new();
        for client in &clients {
            for _ in 0..8 {
                let mut guest = start(client, with(&["endless"])).await;
                first_output(&mut guest).await;
                readers.push(tokio::spawn(collect(guest)));
            }
        }
        let counted = async || [n_tokens(&clients[0]).await, n_tokens(&clients[1]).await];
        let before = counted().await;
        until("they have decoded some", async || counted().await[1] > before[1] + 3_000).await;
        let after = counted().await;
        let [of_carol, of_bob] = [0, 1].map(|idx| (after[idx] - before[idx]) as f64);
        let ratio = of_bob / of_carol;
        assert!((2.4..3.6).contains(&ratio), "{of_bob} tokens of his for {of_carol} of hers");

        let class = async |client: &Client| client.info().await.expect("it answers").class;
        let info = |name: &str, share, rank| {
            Some(ClassInfo { name: name.to_owned(), share, rank, ..ClassInfo::default() })
        };
        assert_eq!(class(&clients[0]).await, info("default", 1, 0));
        assert_eq!(class(&clients[1]).await, info("live", 3, 2));
        // Who reads a guest keeps its connection.
        readers.iter().for_each(tokio::task::JoinHandle::abort);
        drop(clients);
        nothing_is_held(&daemon).await;
    });
}

#[test]
fn a_class_of_nobody_keeps_the_daemon_from_starting_and_ones_own_is_shown() {
    let uid = Actor::this_process().uid;
    let config = |text: &str| {
        let settings = toml::to_string(&daemons::config(exe())).expect("settings can be written down");
        format!("{settings}\n{text}")
    };
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("trellis.toml");
    for (text, message) in [
        ("[classes.ops]\nusers = ['roott']", "this machine has no user \"roott\"; did you mean \"root\"?"),
        ("[classes.ops]\nshare = 1000", "classes.ops.share is 1000, expected 1 to 100"),
        ("[classes.ops]\nusers = [7]\n[classes.dev]\nusers = [7]", "the user 7 is in classes.dev already"),
    ] {
        std::fs::write(&path, config(text)).expect("written");
        let mut serve = trellis(exe());
        serve.arg("serve").arg("--socket").arg(folder.path().join("trellis.sock"));
        let refused = output(serve.arg("--config").arg(&path));
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && said.contains(message), "{text}: {said}");
    }
    let ops = format!("[classes.ops]\nusers = [{uid}]\nshare = 3\nrank = 2");
    let served = Served::start_on(exe(), &config(&ops), &[]);
    for (command, line) in [
        (&["info"][..], "class     ops, a share of 3, rank 2\n"),
        (&["limits"], "your class: ops, a share of 3, rank 2\n"),
        (&["ps", "--wide"], "CLASS"),
    ] {
        let said = output(&mut served.trellis(command));
        let said = String::from_utf8_lossy(&said.stdout).into_owned();
        assert!(said.contains(line), "{command:?}: {said}");
    }
}

/// The same where guests ask for the device from other processes.
#[cfg(target_os = "linux")]
mod by_process {
    use super::*;

    #[test]
    fn what_makes_room_for_a_higher_class_draws_the_tokens_that_it_would_have_drawn() {
        room_is_made(Isolation::Process);
    }

    #[test]
    fn users_have_the_device_by_the_shares_of_their_classes() {
        shares_hold(Isolation::Process);
    }
}
