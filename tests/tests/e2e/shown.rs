//! What users are shown of a daemon: counters that never shrink, KV memory in bytes, which guests use which model.

use std::time::Duration;

use trellis::config::Config;
use trellis_client::{Client, DaemonInfo, Event, Program, StartOptions};
use trellis_engine::EngineStats;
use trellis_tests::daemons::{self, collect, run, until, with};
use trellis_tests::engines::block_on;
use trellis_tests::guests;

use crate::exe;

fn config() -> Config {
    Config { models: vec!["tiny".to_owned(), "draft".to_owned()], ..daemons::config(exe()) }
}

async fn complete(client: &Client, model: &str) {
    let arguments = ["--max-tokens", "20", "--temperature=0.8", "Once upon a time"];
    let options = StartOptions { model: Some(model.to_owned()), ..with(&arguments) };
    let _ = run(client, &guests::example("complete"), options).await.well();
}

async fn info(client: &Client) -> DaemonInfo {
    client.info().await.expect("it answers")
}

#[test]
fn what_was_computed_stays_counted_when_a_model_goes() {
    block_on(async {
        let daemon = daemons::start(&config());
        let client = daemon.connect().await.expect("connected");
        complete(&client, "draft").await;
        let first = info(&client).await.computed;
        assert!(first.n_tokens > 0 && first.n_rows > 0 && first.n_steps > 0, "{first:?}");
        // Nothing is asked of the daemon between this and the end of the model.
        complete(&client, "draft").await;
        client.unload_model("draft", Some(Duration::ZERO)).await.expect("it goes");
        let second = info(&client).await.computed;
        assert!(second.n_tokens > first.n_tokens && second.n_rows > first.n_rows, "{second:?}, {first:?}");
        assert_eq!(info(&client).await.computed, second, "nothing is counted twice");
        // Loaded again it begins anew, the daemon does not.
        client.load_model("draft", None, |_, _| {}).await.expect("it loads");
        complete(&client, "draft").await;
        let third = info(&client).await.computed;
        assert!(third.n_tokens > second.n_tokens && third.n_steps > second.n_steps, "{third:?}, {second:?}");
    });
}

#[test]
fn kv_memory_is_shown_in_bytes() {
    block_on(async {
        let daemon = daemons::start(&config());
        let client = daemon.connect().await.expect("connected");
        let info = info(&client).await;
        let (mut all, mut free) = (0, 0);
        for name in ["tiny", "draft"] {
            let model = daemon.model(Some(name)).expect("it is loaded");
            let EngineStats { n_pages, n_pages_free, n_pages_cached, .. } =
                model.stats().await.expect("it lives");
            all += n_pages * model.limits().page_bytes;
            free += (n_pages_free + n_pages_cached) * model.limits().page_bytes;
        }
        assert_eq!((info.kv_bytes, info.kv_bytes_free), (all as u64, free as u64));
        assert!(all > 0);
    });
}

#[test]
fn guests_are_shown_with_the_models_that_they_hold() {
    block_on(async {
        let daemon = daemons::start(&config());
        let client = daemon.connect().await.expect("connected");
        let start = async |mode: &str| {
            let program = Program::wasm(guests::hostile());
            client.start(program, with(&[mode, "draft"])).await.expect("the connection stands")
        };
        let (mut puppet, mut visitor) = (start("puppet").await, start("visitor").await);
        let (holder, looker) = (daemons::started(&mut puppet).await, daemons::started(&mut visitor).await);
        while !matches!(visitor.next().await.expect("it looks"), Ok(Event::Text { .. })) {}
        let models = async |guest_id: u64| {
            let guests = client.ps().await.expect("it answers");
            guests.into_iter().find(|guest| guest.guest_id == guest_id).expect("it runs").models
        };
        until("it has a context", async || models(holder).await == ["draft"]).await;
        until("it has looked and no more", async || models(looker).await.is_empty()).await;
        for guest in [puppet, visitor] {
            guest.send("go").await.expect("it reads");
            let _ = collect(guest).await.well();
        }
    });
}
