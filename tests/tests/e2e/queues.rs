//! What the daemon holds for clients that do not take it.

use std::time::Duration;

use tokio::net::UnixStream;
use trellis_client::Client;
use trellis_tests::daemons::{self, Served, with};
use trellis_tests::engines::block_on;
use trellis_tests::guests;
use trellis_wire::{Call, ClientMessage, ComponentHash, FRAME_BYTES_MAX, FrameBuffer, Hello, Program, Start};

use crate::exe;

const N_GUESTS: u64 = 4;

/// The most that a client may leave open for one guest.
const CREDIT_BYTES: u64 = 4 << 20;

/// Bytes of the daemon in memory, once they no longer grow.
async fn resident_bytes(client: &Client) -> u64 {
    let (mut most, mut n_still) = (0, 0);
    while n_still < 10 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let now = client.info().await.expect("the daemon answers").resident_bytes;
        n_still = if now > most + (256 << 10) { 0 } else { n_still + 1 };
        most = most.max(now);
    }
    most
}

#[test]
fn outputs_of_a_byte_cost_no_more_than_their_credit() {
    block_on(async {
        let served = Served::start(exe());
        let client = Client::connect_to(served.socket()).await.expect("connected");
        // Whatever a first guest costs is paid for before.
        let wasm = guests::hostile();
        let _ = daemons::run(&client, &wasm, with(&["exit-well"])).await.well();
        let before = resident_bytes(&client).await;

        let mut stream = UnixStream::connect(served.socket()).await.expect("connected");
        Hello::ours().write(&mut stream).await.expect("written");
        Hello::read(&mut stream).await.expect("the daemon says hello");
        let hash = ComponentHash(*blake3::hash(&wasm).as_bytes());
        let mut frames = FrameBuffer::new(FRAME_BYTES_MAX);
        for id in 1..=N_GUESTS {
            let start = Start {
                program: Program::Component { hash },
                arguments: vec!["drip".to_owned()],
                model: None,
                seed: None,
                credit_bytes: CREDIT_BYTES,
                deadline_ms: None,
                label: None,
                is_recorded: false,
                is_profiled: false,
            };
            frames.push(&ClientMessage::Request { id, call: Call::Start(start) }).expect("it fits");
        }
        frames.write(&mut stream).await.expect("written");
        daemons::until("all guests run", async || {
            client.ps().await.expect("the daemon answers").len() as u64 == N_GUESTS
        })
        .await;
        let grown = resident_bytes(&client).await.saturating_sub(before);
        let memory: u64 = client.ps().await.expect("the daemon answers").iter().map(|g| g.memory_bytes).sum();
        println!(
            "{N_GUESTS} guests with {CREDIT_BYTES} bytes of credit each: {grown} bytes, {memory} of them their memory"
        );
        // Blocks of queues, the outbox, stacks, and what an allocator keeps.
        let overhead = 24 << 20;
        let limit = 2 * N_GUESTS * CREDIT_BYTES + memory + overhead;
        assert!(grown < limit, "{grown} bytes are held for {N_GUESTS} x {CREDIT_BYTES} bytes of credit");
    });
}
