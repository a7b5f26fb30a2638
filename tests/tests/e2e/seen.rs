//! What operators and their monitoring see: metrics over the socket and over HTTP, and the log.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use trellis::config::{Config, LogFormat, SavedContexts};
use trellis::metrics::METRICS;
use trellis::session::{Actor, Service as _};
use trellis_client::ErrorCode;
use trellis_tests::daemons::{self, PATIENCE, Served, config, output, wait};
use trellis_tests::guests;
use trellis_wire::LogsAsked;

use crate::exe;
use crate::exposition;

/// Asserts that a command did what it was asked to; its standard output.
fn done(served: &Served, arguments: &[&str]) -> String {
    let output = output(&mut served.trellis(arguments));
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("it is text")
}

/// Asserts that a command failed with this status; its standard error.
fn failed(served: &Served, arguments: &[&str], status: i32) -> String {
    let output = output(&mut served.trellis(arguments));
    assert_eq!(output.status.code(), Some(status), "{arguments:?}");
    String::from_utf8(output.stderr).expect("it is text")
}

/// Where metrics are over HTTP, of a daemon that has logged it.
fn endpoint(served: &Served) -> String {
    let begun = Instant::now();
    loop {
        let log = served.log();
        if let Some((_, rest)) = log.split_once("address=") {
            return rest.split_whitespace().next().expect("an address").to_owned();
        }
        assert!(begun.elapsed() < PATIENCE, "no endpoint: {log}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The body of an answer to a scrape.
fn scraped(address: &str, accept: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("it listens");
    write!(stream, "GET /metrics HTTP/1.1\r\nHost: {address}\r\n{accept}Connection: close\r\n\r\n")
        .expect("it reads");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("it answers");
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    answer.split_once("\r\n\r\n").expect("a body").1.to_owned()
}

/// The kinds of metrics by their names, as a text has them.
fn told(text: &str) -> BTreeMap<&str, &str> {
    text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' ')).collect()
}

/// The names of metrics that a text of the format 0.0.4 has.
fn names(text: &str) -> BTreeSet<&str> {
    let named = told(text).into_iter();
    named.map(|(name, kind)| if kind == "counter" { name.trim_end_matches("_total") } else { name }).collect()
}

/// The number of the sample that begins so.
fn number(text: &str, sample: &str) -> f64 {
    let line = text.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {sample} in {text}")).parse().expect("a number")
}

#[test]
fn every_metric_is_told_and_no_other() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = Config {
        metrics_listen: Some("127.0.0.1:0".parse().expect("an address")),
        saved_contexts: SavedContexts::Disk,
        state_dir: Some(folder.path().to_owned()),
        ..config(exe())
    };
    let served = Served::start_with(exe(), &config, &[]);
    let before = done(&served, &["metrics"]);
    assert!(!before.contains("trellis_guests_ended"), "no guest has run: {before}");
    assert_eq!(number(&before, "trellis_steps_total"), 0.0);

    let component = folder.path().join("chat.wasm");
    fs::write(&component, guests::example("chat")).expect("written");
    let component = component.to_str().expect("UTF-8");
    assert_eq!(done(&served, &["run", component, "What is 37 + 48?"]), "85\n");
    done(&served, &["load", "draft"]);
    let text = done(&served, &["metrics"]);
    let expected: BTreeMap<&str, &str> =
        METRICS.iter().map(|metric| (metric.name, metric.kind.name())).collect();
    assert_eq!(names(&text), expected.keys().copied().collect());
    assert_eq!(number(&text, "trellis_guests_ended_total{reason=\"finished\"}"), 1.0);
    assert_eq!(number(&text, "trellis_guests{state=\"running\"}"), 0.0);
    assert!(number(&text, "trellis_tokens_total") > 3.0);
    assert!(number(&text, "trellis_steps_total") > 1.0);
    assert_eq!(number(&text, "trellis_model_load_duration_seconds_count{outcome=\"loaded\"}"), 1.0);
    let usage = number(&text, "vllm:kv_cache_usage_perc{model_name=\"tiny\"}");
    assert!((0.0..=1.0).contains(&usage), "{usage}");

    exposition::samples(&text);
    exposition::samples(&before);

    // Of the same kinds over HTTP, in both formats, but for what is not for everybody.
    let mut open_to_all = expected.clone();
    for name in ["trellis_host_memory_charged_bytes", "trellis_saved_contexts_bytes"] {
        open_to_all.remove(name);
    }
    let address = endpoint(&served);
    let open = scraped(&address, "Accept: application/openmetrics-text; version=1.0.0\r\n");
    assert_eq!(told(&open), open_to_all);
    let plain = scraped(&address, "");
    assert_eq!(names(&plain), open_to_all.keys().copied().collect());
    let json: Value = serde_json::from_str(&done(&served, &["metrics", "--json"])).expect("JSON");
    assert_eq!(names(json["text"].as_str().expect("a text")), expected.keys().copied().collect());
}

#[test]
fn requests_are_counted_under_the_names_of_vllm_and_opentelemetry() {
    let served = Served::start(exe());
    let folder = tempfile::tempdir().expect("a folder");
    let guest = |name: &str| {
        let path = folder.path().join(name).with_extension("wasm");
        fs::write(&path, guests::example(name)).expect("written");
        path.to_str().expect("UTF-8").to_owned()
    };
    done(&served, &["load", "draft"]);
    done(&served, &["run", &guest("best-of-n"), "What is 37 + 48?"]);
    let told = exposition::samples(&done(&served, &["metrics"]));
    let of = |name: &str| told.get(name).copied().unwrap_or_else(|| panic!("no {name}: {told:?}"));
    let vllm = |name: &str| of(&format!("vllm:{name}{{model_name=\"tiny\"}}"));
    let ended = |reason: &str| {
        of(&format!("vllm:request_success_total{{model_name=\"tiny\",finished_reason=\"{reason}\"}}"))
    };
    let n_ended: f64 = ["stop", "length", "abort"].map(ended).iter().sum();
    assert!(n_ended >= 2.0, "it samples several answers: {told:?}");
    assert_eq!(ended("error"), 0.0);
    for histogram in ["e2e_request_latency_seconds", "request_prompt_tokens", "request_generation_tokens"] {
        assert_eq!(vllm(&format!("{histogram}_count")), n_ended, "{histogram}");
    }
    let n_drawn = vllm("generation_tokens_total");
    assert_eq!(vllm("request_generation_tokens_sum"), n_drawn);
    assert_eq!(vllm("time_to_first_token_seconds_count"), n_ended, "each drew something");
    assert!(n_drawn > n_ended, "{n_drawn} of {n_ended}");
    let n_of_prompts = vllm("prompt_tokens_total");
    assert!(n_of_prompts > 3.0 && vllm("request_prompt_tokens_sum") >= n_of_prompts, "forks share a prompt");
    assert!(vllm("prefix_cache_hits_total") <= vllm("prefix_cache_queries_total"), "{told:?}");
    assert_eq!(vllm("iteration_tokens_total_sum"), of("trellis_tokens_total"), "one model has computed");
    for gauge in ["num_requests_running", "num_requests_waiting", "num_preemptions_total"] {
        assert_eq!(vllm(gauge), 0.0, "{gauge}");
    }
    let labels = |model: &str, more: &str| {
        format!(
            "{{gen_ai_operation_name=\"text_completion\",gen_ai_provider_name=\"trellis\",gen_ai_request_model=\"{model}\"{more}}}"
        )
    };
    let duration = "gen_ai_server_request_duration_seconds_count";
    assert_eq!(of(&format!("{duration}{}", labels("tiny", ""))), ended("stop") + ended("length"));
    assert_eq!(of(&format!("{duration}{}", labels("tiny", ",error_type=\"cancelled\""))), ended("abort"));
    assert_eq!(of(&format!("{duration}{}", labels("draft", ""))), 0.0, "nothing ran there");
    let output = labels("tiny", ",gen_ai_token_type=\"output\"");
    assert_eq!(of(&format!("gen_ai_client_token_usage_sum{output}")), n_drawn);

    // What is guessed is counted by the model that verifies.
    done(&served, &["run", &guest("speculative"), "--guesses", "5", "Tell me a short story."]);
    let guessed = exposition::samples(&done(&served, &["metrics"]));
    let of = |name: &str| guessed[&format!("vllm:spec_decode_{name}_total{{model_name=\"tiny\"}}")];
    let (n_drafts, n_tokens, n_right) = (of("num_drafts"), of("num_draft_tokens"), of("num_accepted_tokens"));
    assert!(
        n_drafts >= 1.0 && n_tokens >= n_drafts && n_right <= n_tokens,
        "{n_drafts} {n_tokens} {n_right}"
    );
}

#[test]
fn an_address_that_others_reach_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("trellis.toml");
    fs::write(&path, "metrics_listen = '0.0.0.0:9464'").expect("written");
    let mut command = daemons::trellis(exe());
    command.args(["serve", "--socket"]).arg(folder.path().join("t.sock")).arg("--config").arg(&path);
    let refused = output(&mut command);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{said}");
    assert!(said.contains("metrics_listen is 0.0.0.0:9464, which other machines reach"), "{said}");
}

#[test]
fn the_log_is_read_and_followed_until_an_interrupt() {
    let served = Served::start(exe());
    done(&served, &["load", "draft"]);
    let lines = done(&served, &["logs"]);
    assert!(
        lines.contains("trellis: ready in") && lines.contains("a model is being loaded model=\"draft\""),
        "{lines}"
    );
    let last = done(&served, &["logs", "-n", "1"]);
    assert_eq!(last.lines().count(), 1, "{last}");
    assert!(lines.ends_with(&last), "{lines}");
    let json = done(&served, &["logs", "-n", "1", "--json"]);
    let json: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(json["line"], last.trim_end());

    let mut follower = served.trellis(&["logs", "-f", "-n", "0"]);
    let mut follower = follower.stdout(Stdio::piped()).spawn().expect("it runs");
    // It is told of what comes once it listens.
    let begun = Instant::now();
    let mut out = follower.stdout.take().expect("piped");
    let (sender, heard) = std::sync::mpsc::channel();
    let reader = std::thread::spawn(move || {
        let mut bytes = [0; 4096];
        while let Ok(n) = out.read(&mut bytes) {
            if n == 0 || sender.send(bytes[..n].to_vec()).is_err() {
                return;
            }
        }
    });
    let heard = loop {
        done(&served, &["unload", "draft"]);
        done(&served, &["load", "draft"]);
        if let Ok(bytes) = heard.recv_timeout(Duration::from_secs(2)) {
            break String::from_utf8_lossy(&bytes).into_owned();
        }
        assert!(begun.elapsed() < PATIENCE, "nothing is followed");
    };
    assert!(heard.contains("draft") && !heard.contains("ready in"), "{heard}");
    let pid = Pid::from_raw(i32::try_from(follower.id()).expect("a process")).expect("not 0");
    kill_process(pid, Signal::INT).expect("it runs");
    assert_eq!(wait(&mut follower).code(), Some(130));
    reader.join().expect("no panic");

    // One that is followed to its end.
    let mut follower = served.trellis(&["logs", "-f"]).stdout(Stdio::piped()).spawn().expect("it runs");
    let mut out = follower.stdout.take().expect("a pipe");
    // It is there once it shows what was said before.
    out.read_exact(&mut [0]).expect("the log has begun");
    done(&served, &["stop", "--daemon"]);
    assert_eq!(wait(&mut follower).code(), Some(0));
    assert!(failed(&served, &["logs"], 2).contains("no daemon is running"));
}

#[test]
fn a_log_of_json_is_nothing_but_lines_of_json() {
    let mut served = Served::start_with(exe(), &Config { log_format: LogFormat::Json, ..config(exe()) }, &[]);
    done(&served, &["load", "draft"]);
    let kept = done(&served, &["logs"]);
    done(&served, &["stop", "--daemon"]);
    assert_eq!(served.wait().code(), Some(0));
    let log = served.log();
    for line in log.lines().chain(kept.lines()) {
        let line: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}"));
        assert!(line["timestamp"].is_string() && line["level"].is_string(), "{line}");
    }
    let messages: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let load =
        messages.iter().find(|line| line["message"] == "a model is being loaded").expect("it is there");
    assert_eq!((&load["model"], &load["level"]), (&"draft".into(), &"INFO".into()));
    let is_ready = |line: &Value| line["message"].as_str().is_some_and(|text| text.starts_with("ready in"));
    assert!(messages.iter().any(is_ready), "{log}");
}

#[tokio::test]
async fn the_log_and_only_that_is_for_the_operator() {
    let daemon = daemons::start(&config(exe()));
    let own = Actor::this_process();
    let other = Actor { uid: own.uid + 1, gid: own.gid };
    let asked = LogsAsked::default();
    let refused = daemon.service().logs(other, asked.clone()).await.expect_err("not for everybody");
    assert_eq!(refused.code, ErrorCode::PermissionDenied);
    assert!(refused.message.contains("or read its log: that is for"), "{refused}");
    // This process has no log of its own.
    let none = daemon.service().logs(own, asked).await.expect_err("there is none");
    assert_eq!(none.code, ErrorCode::Unsupported);
    assert!(daemon.sessions().metrics(None).await.is_ok());
}
