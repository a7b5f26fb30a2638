//! Every attack over HTTP once, many at a time, beside a stream: each is answered as the table says, the stream is what it is alone, and
//! nothing is held afterwards.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures_util::{StreamExt, stream};
use trellis::config::Config;
use trellis::guest::GuestLimits;
use trellis_client::{Client, StartOptions};
use trellis_tests::attacks::front::Front;
use trellis_tests::attacks::raw::Raw;
use trellis_tests::attacks::state::State;
use trellis_tests::attacks::{Attack, Category, Component, Site, table};
use trellis_tests::daemons::{self, run, until, with};
use trellis_tests::engines::block_on;
use trellis_tests::guests;

use super::client::Fronted;

/// Attacks at a time: no more connections than a user may have.
const N_AT_ONCE: usize = 12;

/// How long those go on that could go on for ever.
const TIME: Duration = Duration::from_millis(300);

/// What a client may take to send something, or to take something: attacks wait for the end of it.
const PATIENCE_MS: u64 = 3_000;

fn short(config: &mut Config) {
    (config.http.read_ms, config.http.write_ms) = (PATIENCE_MS, PATIENCE_MS);
    config.limits = GuestLimits { cpu_ms: 1_000, deadline_ms: 20_000, ..config.limits.clone() };
}

fn streamed() -> StartOptions {
    with(&["tokens", "24", "<|begin_of_text|>Once upon a time"])
}

/// What attacks could leave.
fn held(state: State) -> [u64; 4] {
    [state.n_guests, state.n_sessions, state.n_contexts, state.n_pages]
}

/// Lets one attack loose; what is wrong with how it ended.
async fn attack(attack: Attack, site: &Site) -> Option<String> {
    let site = Site { until: Instant::now() + TIME, ..site.clone() };
    let wrong = match tokio::time::timeout(daemons::PATIENCE, attack.run(&site)).await {
        Err(_) => "it does not end".to_owned(),
        Ok(Err(error)) => format!("the connection failed: {error}"),
        Ok(Ok(ending)) if attack.allows(&ending) => return None,
        Ok(Ok(ending)) => format!("it ended with {ending:?}, and may with {:?}", attack.ends),
    };
    Some(format!("{}: {wrong}", attack.name))
}

fn attack_by_all(fronted: &Fronted, front: Front) {
    block_on(async {
        let socket = fronted.served.socket();
        let (wasm, place) = (guests::hostile(), front.place());
        let client = Client::connect_to(&socket).await.expect("it listens");
        let alone = run(&client, &wasm, streamed()).await.well().tokens;
        assert_eq!(alone.len(), 24);
        let mut raw = Raw::connect(&socket).await.expect("it listens");
        let mut now = async || held(State::of(&mut raw, fronted.served.pid()).await.expect("it is there"));
        let before = now().await;

        // There is one user here.
        let is_meant = |attack: &Attack| {
            attack.category == Category::Http && attack.is_for(Some(place)) && !attack.is_of_a_stranger
        };
        let attacks: Vec<Attack> = table().into_iter().filter(is_meant).collect();
        assert!(attacks.len() > 50, "{}", attacks.len());
        let (greedy, others): (Vec<Attack>, Vec<Attack>) = attacks.iter().partition(|attack| attack.is_alone);
        let hostile = Component::new(wasm.clone());
        let (socket, front) = (socket.into(), Some(front));
        let site = Site { socket, front, hostile, until: Instant::now(), patience: None };
        let (site, is_over, begun) = (&site, AtomicBool::new(false), Instant::now());
        let attacked = async {
            let at_once = stream::iter(others).map(|one| attack(one, site)).buffer_unordered(N_AT_ONCE);
            let mut wrong: Vec<String> = at_once.filter_map(|wrong| async { wrong }).collect().await;
            for one in greedy {
                wrong.extend(attack(one, site).await);
            }
            is_over.store(true, Ordering::Relaxed);
            wrong
        };
        let neighbour = async {
            let mut n_rounds = 0;
            while n_rounds < 2 || !is_over.load(Ordering::Relaxed) {
                assert_eq!(run(&client, &wasm, streamed()).await.well().tokens, alone, "round {n_rounds}");
                n_rounds += 1;
            }
            n_rounds
        };
        let (wrong, n_rounds) = tokio::join!(attacked, neighbour);
        let (n, name) = (attacks.len(), place.name());
        println!("{n} attacks at {name}, {n_rounds} rounds, {:?}", begun.elapsed());
        assert!(wrong.is_empty(), "{} of {n}:\n{}", wrong.len(), wrong.join("\n"));
        until("nothing is held that was not before", async || now().await == before).await;
    });
}

#[test]
fn on_a_socket() {
    let fronted = Fronted::on_socket_with(short);
    attack_by_all(&fronted, Front::at_socket(fronted.place().into()));
}

#[test]
fn on_a_port() {
    let fronted = Fronted::on_port_with(short);
    let address = fronted.place().parse().expect("an address");
    attack_by_all(&fronted, Front::at_port(address, fronted.token()));
}
