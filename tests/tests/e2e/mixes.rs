//! Mixed loads of `trellis bench --mix`, guests and clients over a socket among them.

use std::fs;

use serde_json::Value;
use tempfile::TempDir;
use trellis_client::Program;
use trellis_tests::daemons::{self, collect, with};
use trellis_tests::engines::block_on;
use trellis_tests::guests;

use crate::exe;

const MIX: &str = r#"
warm_up_s = 0.2
windows = 4

[[load]]
kind = "streams"
count = 2
prompt = 20
wrap_tokens = 64

[[load]]
kind = "clients"
count = 3
prompt = 20
wrap_tokens = 64
against = "streams"
"#;

/// Runs the mix for so many seconds; the loads of its last phase, in which all are together. `None` where one of them
/// gave nothing.
fn together(measure_s: u32) -> Option<Vec<Value>> {
    let folder = TempDir::new().expect("a folder");
    let (mix, wasm, cache) =
        (folder.path().join("mix.toml"), folder.path().join("probe.wasm"), folder.path().join("cache"));
    fs::write(&mix, format!("measure_s = {measure_s}{MIX}")).expect("written");
    fs::write(&wasm, guests::example("probe")).expect("written");
    let mut command = daemons::trellis(exe());
    command.args(["bench", "--json", "--model", "tiny", "--device", "cpu", "--mix"]).arg(&mix);
    command.arg("--guest-wasm").arg(&wasm).env("XDG_CACHE_HOME", &cache);
    let output = daemons::output(&mut command);
    let said = String::from_utf8_lossy(&output.stderr);
    if said.contains("gave no token in ") {
        return None;
    }
    assert!(output.status.success(), "{said}");
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let phases = report["phases"].as_array().expect("phases");
    assert_eq!(phases.len(), 3);
    let loads = phases[2]["loads"].as_array().expect("loads");
    assert_eq!([&loads[0]["name"], &loads[1]["name"]], ["streams", "clients"]);
    let is_seen = |load: &Value| {
        let (rate, gap) = (load["tokens_per_s"].as_f64(), load["gaps"]["p50_ms"].as_f64());
        rate > Some(0.0) && gap > Some(0.0) && load["share"].as_f64() > Some(0.0)
    };
    loads.iter().all(is_seen).then(|| loads.clone())
}

#[test]
fn guests_and_clients_beside_streams() {
    // What a second shows on one machine takes a minute on another that is slow, or stands still in between.
    let loads = [1, 10, 60].into_iter().find_map(together);
    println!("{:?}", loads.expect("each load gives tokens"));
}

#[test]
fn probe_sends_each_token_by_itself_once_it_is_told_to() {
    block_on(async {
        let daemon = daemons::start(&daemons::config(exe()));
        let client = daemon.connect().await.expect("connected");
        let probe = guests::example("probe");
        let tokens = async |seed| {
            let options = trellis_client::StartOptions { seed: Some(seed), ..with(&["tokens", "20", "30"]) };
            let guest = client.start(Program::wasm(probe.clone()), options).await.expect("it starts");
            guest.send("go").await.expect("it listens");
            let ended = collect(guest).await.well();
            assert_eq!((ended.text.as_str(), ended.tokens.len()), (".", 20));
            ended.tokens
        };
        assert_eq!(tokens(1).await, tokens(1).await);
        assert_ne!(tokens(1).await, tokens(2).await, "another seed is another prompt");
        drop(client);
        daemons::nothing_is_held(&daemon).await;
    });
}
