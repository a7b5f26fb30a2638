use std::collections::BTreeSet;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

use super::exposition::{Exposition, TextFormat};
use super::http::{Endpoint, is_loopback};
use super::{Kind, METRICS, SessionCounts};

#[test]
fn each_metric_has_a_name_that_says_its_unit_and_what_it_means() {
    let names: BTreeSet<&str> = METRICS.iter().map(|metric| metric.name).collect();
    assert_eq!(names.len(), METRICS.len(), "each is there once");
    for metric in METRICS {
        assert!(metric.about.ends_with('.') && !metric.about.contains('\n'), "{metric:?}");
        let is_ours = metric.name.starts_with("trellis_");
        let is_of_others =
            ["vllm:", "gen_ai_", "process_"].iter().any(|start| metric.name.starts_with(start));
        assert!(is_ours != is_of_others, "{metric:?}");
        let is_counter = metric.kind == Kind::Counter;
        assert!(!is_counter || !metric.name.ends_with("_total"), "{metric:?}: the format adds it");
        let is_timed = metric.kind != Kind::Histogram || metric.unit() == Some("seconds");
        assert!(is_timed || metric.name.contains("token"), "{metric:?}");
    }
}

#[test]
fn what_is_not_measured_is_not_told() {
    let mut exposition = Exposition::default();
    exposition.add("trellis_device_memory_bytes", Vec::<([&str; 1], f64)>::new());
    assert_eq!(exposition.text(TextFormat::OpenMetrics), "# EOF\n");
    SessionCounts::default().add_to(&mut exposition);
    assert_eq!(exposition.text(TextFormat::OpenMetrics), "# EOF\n", "of no guest there is nothing");
}

#[test]
fn samples_have_their_labels_and_counters_their_ending() {
    let mut exposition = Exposition::default();
    exposition.add("trellis_sessions", [([], 3.0)]);
    exposition.add("trellis_device_busy_seconds", [(["cuda:1"], 0.25)]);
    exposition.add("trellis_contexts", [(["a \"b\"\n\\c"], 1.0)]);
    let text = exposition.text(TextFormat::OpenMetrics);
    assert!(text.contains("\ntrellis_sessions 3.0\n"), "{text}");
    assert!(text.contains("\ntrellis_device_busy_seconds_total{device=\"cuda:1\"} 0.25\n"), "{text}");
    assert!(text.contains("\n# UNIT trellis_device_busy_seconds seconds\n"), "{text}");
    assert!(text.contains("\ntrellis_contexts{model_name=\"a \\\"b\\\"\\n\\\\c\"} 1.0\n"), "{text}");
}

#[test]
fn requests_are_counted_by_their_ends_also_those_that_are_given_up() {
    let counts = SessionCounts::default();
    let mut finished = counts.begin();
    finished.note_run();
    finished.end(None);
    counts.begin().end(Some("unknown_component"));
    let mut dropped = counts.begin();
    dropped.note_run();
    drop(dropped);
    let mut exposition = Exposition::default();
    counts.add_to(&mut exposition);
    let text = exposition.text(TextFormat::OpenMetrics);
    for (reason, n) in [("finished", 1), ("cancelled", 1)] {
        assert!(text.contains(&format!("trellis_guests_ended_total{{reason=\"{reason}\"}} {n}\n")), "{text}");
    }
    assert!(!text.contains("_ended_total{reason=\"unknown_component\"}"), "it never ran: {text}");
    for reason in ["finished", "cancelled", "unknown_component"] {
        let count = format!("trellis_guest_duration_seconds_count{{reason=\"{reason}\"}} 1\n");
        assert!(text.contains(&count), "{text}");
    }
}

#[test]
fn only_this_machine_is_loopback() {
    let is = |text: &str| is_loopback(&text.parse().expect(text));
    for text in ["127.0.0.1:9464", "127.8.8.8:1", "[::1]:9464", "[::ffff:127.0.0.1]:1"] {
        assert!(is(text), "{text}");
    }
    for text in ["0.0.0.0:9464", "[::]:9464", "192.168.0.7:9464", "[::ffff:10.0.0.1]:1"] {
        assert!(!is(text), "{text}");
    }
}

async fn ask(endpoint: std::net::SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(endpoint).await.expect("it listens");
    let request = format!("{request}Host: localhost\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.expect("it reads");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("it answers");
    answer
}

#[tokio::test]
async fn metrics_are_read_over_http_in_the_format_that_is_asked_for() {
    let endpoint = Endpoint::bind("127.0.0.1:0".parse().expect("an address")).await.expect("a port is free");
    let address = endpoint.address().expect("it has one");
    let shutdown = CancellationToken::new();
    let read = || async {
        let mut exposition = Exposition::default();
        exposition.add("trellis_sessions", [([], 3.0)]);
        Some(exposition)
    };
    let serving = tokio::spawn(endpoint.serve(read, shutdown.clone()));
    let plain = ask(address, "GET /metrics HTTP/1.1\r\n").await;
    assert!(plain.starts_with("HTTP/1.1 200 OK\r\n"), "{plain}");
    assert!(plain.contains("content-type: text/plain; version=0.0.4"), "{plain}");
    assert!(plain.ends_with("\ntrellis_sessions 3.0\n"), "{plain}");
    let accept = "Accept: application/openmetrics-text;version=1.0.0,text/plain;q=0.5\r\n";
    let open = ask(address, &format!("GET /metrics HTTP/1.1\r\n{accept}")).await;
    assert!(
        open.contains("content-type: application/openmetrics-text") && open.ends_with("# EOF\n"),
        "{open}"
    );
    assert!(ask(address, "GET / HTTP/1.1\r\n").await.starts_with("HTTP/1.1 404 "));
    assert!(ask(address, "POST /metrics HTTP/1.1\r\n").await.starts_with("HTTP/1.1 405 "));
    assert!(ask(address, "what\r\n").await.starts_with("HTTP/1.1 400 "));
    // A page of another in a browser of this machine.
    assert!(ask(address, "GET /metrics HTTP/1.1\r\nOrigin: http://a\r\n").await.starts_with("HTTP/1.1 403 "));
    // One that says nothing keeps nobody waiting.
    let silent = TcpStream::connect(address).await.expect("it listens");
    assert!(ask(address, "GET /metrics HTTP/1.1\r\n").await.contains("trellis_sessions 3.0"));
    shutdown.cancel();
    serving.await.expect("it ends");
    drop(silent);
    assert!(TcpStream::connect(address).await.is_err());
}
