//! A daemon with few file descriptors keeps some for its work, whoever connects.

use std::time::{Duration, Instant};

use trellis_client::{Client, Error, Event, Program, StartOptions};
use trellis_tests::daemons::{self, Served, run, until, with};
use trellis_tests::engines::block_on;
use trellis_tests::guests;

use crate::exe;
use crate::signals::after;

const N_FILES: usize = 64;
const N_CONNECTIONS: usize = 100;

/// The next token of a guest that sends them without end.
async fn token(guest: &mut trellis_client::Guest) {
    loop {
        let event = guest.next().await.expect("it goes on").expect("nothing happens to it");
        if let Event::Tokens { .. } = event {
            return;
        }
    }
}

/// Asserts that an error says to try again later, or that a limit was passed.
fn is_told(error: &Error) {
    let code = error.code().map(|code| code.as_str().to_owned());
    let is_typed = matches!(code.as_deref(), Some("overloaded" | "limit_exceeded"));
    assert!(is_typed || error.is_retryable(), "{error:?}");
}

#[test]
fn many_connections_do_not_take_what_guests_need() {
    let folder = tempfile::tempdir().expect("a folder");
    let log = folder.path().join("log");
    let lines = format!("ulimit -n {N_FILES}; exec 2>>'{}'", log.display());
    let config = daemons::config(exe());
    let served = Served::start_with(&after(folder.path(), &lines), &config, &[]);
    block_on(async {
        let connect = || async { Client::connect_to(&served.socket()).await };
        let neighbour = connect().await.expect("connected");
        let endless = StartOptions { seed: Some(7), ..with(&["endless"]) };
        let mut stream = neighbour.start(Program::wasm(guests::hostile()), endless).await.expect("connected");
        token(&mut stream).await;

        let (mut kept, mut n_refused) = (Vec::new(), 0);
        for _ in 0..N_CONNECTIONS {
            let client = match connect().await {
                Ok(client) => client,
                Err(_) => {
                    n_refused += 1;
                    continue;
                }
            };
            match client.ps().await {
                Ok(_) => kept.push(client),
                Err(error) => {
                    is_told(&error);
                    n_refused += 1;
                }
            }
        }
        assert!((4..N_FILES / 2).contains(&kept.len()) && n_refused > N_CONNECTIONS / 2, "{}", kept.len());

        // Components that have to be compiled, while every connection is taken.
        let mut n_well = 0;
        for (number, client) in kept.iter().take(2).enumerate() {
            let wasm = guests::hostile_anew(number as u64 + 1_000_000);
            let ended = run(client, &wasm, with(&["exit-well"])).await;
            match &ended.error {
                None => n_well += 1,
                Some(error) => is_told(error),
            }
            token(&mut stream).await;
        }
        assert!(n_well > 0, "the reserve is there to be used");

        // One after the other is turned away for a while, and the log stays as it is.
        let begun = Instant::now();
        let n_bytes = std::fs::metadata(&log).expect("a log").len();
        while begun.elapsed() < Duration::from_secs(1) {
            drop(connect().await);
        }
        let n_bytes = std::fs::metadata(&log).expect("a log").len() - n_bytes;
        assert!(n_bytes < 1_000, "{n_bytes} bytes in a second");

        drop(kept);
        until("places are free again", async || match connect().await {
            Ok(client) => client.ps().await.is_ok(),
            Err(_) => false,
        })
        .await;
        let ended = run(&connect().await.expect("connected"), &guests::hostile(), with(&["exit-well"])).await;
        assert!(ended.error.is_none(), "{ended:?}");
        token(&mut stream).await;
    });
}
