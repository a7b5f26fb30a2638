//! `trellis bench --isolation`: what guests in processes of their own cost, beside guests in threads of the daemon.
//!
//! One daemon of each kind runs, and every measure is taken of one after the other: what else the machine does disturbs both
//! alike. How long a host call takes is noted where its guest runs; launches and streams are seen from outside.

mod report;

use self::report::{IsolationReport, Quantity};
use super::guest::Probe;
use super::server::{Scratch, Server};
use super::targets::{check_length, device, micros};
use super::{BenchArgs, BenchError, compare, engine, load, probe_component};
use crate::cli::connect;
use crate::cli::error::CliError;
use crate::cli::output::{self, Format};
use crate::cli::progress::{ProgressDisplay, Unit};
use crate::config::{Config, Isolation};
use crate::profile::Entry;

const N_TOKENS: u32 = 400;
const N_ROUNDS: u32 = 9;

/// What each daemon has for KV: more than its guests need.
const KV_BYTES: u64 = 256 << 20;

/// In each round, of each kind.
const N_LAUNCHES: usize = 40;
const N_ASKS: &str = "1000";
const N_STEPS: &str = "100";
const N_SLOW_TOKENS: &str = "60";

/// Measures and prints.
///
/// # Errors
/// A daemon or a guest fails, they give different tokens, or a target is missed that was to be checked.
pub(super) async fn bench(args: &BenchArgs, format: Format) -> Result<(), CliError> {
    let report = measure(args, format).await?;
    output::print(format, &report, IsolationReport::render)?;
    let names = report.missed();
    if args.check && !names.is_empty() {
        return Err(BenchError::Missed { names }.into());
    }
    Ok(())
}

async fn measure(args: &BenchArgs, format: Format) -> Result<IsolationReport, CliError> {
    let component = probe_component(args.guest_wasm.as_deref(), format).await?;
    let progress = ProgressDisplay::of_long_work(format);
    let n_tokens = args.tokens.unwrap_or(N_TOKENS) as usize;
    let n_rounds = args.repeat.unwrap_or(N_ROUNDS);
    progress.update("looking at what else runs", Unit::Items, 0, 0);
    let busy_percent = load::busy_percent().await;
    let scratch = Scratch::new()?;
    let config = |name: &str, isolation| Config {
        models: vec![args.model.clone()],
        device: device(args),
        socket: Some(scratch.path().join(format!("{name}.sock"))),
        cache_dir: Some(scratch.path().join("cache")),
        isolation,
        // Both are on one device, and either would take all of it.
        kv_bytes: Some(KV_BYTES),
        ..Config::default()
    };
    let of_threads = config("thread", Isolation::Thread);
    let inside = connect::start(&of_threads, format).await?;
    let model = inside.model(None).expect("a daemon has a model");
    check_length(&model, engine::prompt(&model)?.len(), n_tokens)?;
    let mut report = IsolationReport::new(model.device(), &model.model().name, n_tokens, busy_percent);
    drop((model, inside));

    progress.update("starting daemons", Unit::Items, 0, 0);
    let servers = [
        Server::start(&of_threads, &scratch).await?,
        Server::start(&config("process", Isolation::Process), &scratch).await?,
    ];
    let mut probes = Vec::new();
    for server in &servers {
        probes.push(Probe::prepare(server.client.clone(), component.clone()).await?);
    }
    let expected = probes[0].stream(n_tokens).await?.tokens;
    compare("in a process of its own", &expected, &probes[1].stream(n_tokens).await?.tokens)?;
    for round in 0..n_rounds {
        progress.update("measuring", Unit::Items, u64::from(round), u64::from(n_rounds));
        // Either one first.
        for idx in if round % 2 == 0 { [0, 1] } else { [1, 0] } {
            measure_one(&probes[idx], n_tokens, |quantity, sample_us| report.push(quantity, idx, sample_us))
                .await?;
        }
    }
    for server in servers {
        server.stop().await?;
    }
    Ok(report)
}

/// One round, of one kind.
async fn measure_one(
    probe: &Probe,
    n_tokens: usize,
    mut note: impl FnMut(Quantity, f64),
) -> Result<(), CliError> {
    for _ in 0..N_LAUNCHES {
        let launch = probe.launch().await?;
        note(Quantity::LaunchInHost, micros(launch.in_host));
        note(Quantity::LaunchToOutput, micros(launch.to_output));
    }
    let asks = probe.profile(&["asks", N_ASKS]).await?;
    calls_of(&asks, "decoding.top").for_each(|us| note(Quantity::Ask, us));
    calls_of(&asks, "context.length").for_each(|us| note(Quantity::NearCall, us));
    let steps = probe.profile(&["steps", N_STEPS]).await?;
    calls_of(&steps, "decoding.step").for_each(|us| note(Quantity::Step, us));
    let slow = probe.profile(&["slow", N_SLOW_TOKENS]).await?;
    calls_of(&slow, "stream.next").for_each(|us| note(Quantity::AheadToken, us));
    if let Some(Entry::End { end, .. }) = slow.last() {
        note(Quantity::SlowStream, end.at_ns as f64 / 1e3);
    }
    note(Quantity::Stream, 1e6 / probe.stream(n_tokens).await?.rate());
    Ok(())
}

/// How long the calls of a function took, in microseconds, the first one aside: what is made ready in it stays.
fn calls_of<'a>(entries: &'a [Entry], name: &'a str) -> impl Iterator<Item = f64> + 'a {
    let mut texts = entries.iter().filter_map(|entry| match entry {
        Entry::Text(text) => Some(text),
        _ => None,
    });
    let wanted = texts.position(|text| text == name).map(|idx| idx as u32);
    let calls = entries.iter().filter_map(move |entry| match entry {
        Entry::Call { name, begin, end } if Some(*name) == wanted => Some(end.at_ns - begin.at_ns),
        _ => None,
    });
    calls.skip(1).map(|ns| ns as f64 / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::Moment;

    #[test]
    fn calls_are_told_apart_by_name() {
        let call = |name, from_ns, to_ns| Entry::Call {
            name,
            begin: Moment { at_ns: from_ns, cpu_ns: 0 },
            end: Moment { at_ns: to_ns, cpu_ns: 0 },
        };
        let text = |text: &str| Entry::Text(text.to_owned());
        let entries =
            [text("a"), call(0, 0, 9_000), text("b"), call(1, 9_000, 10_000), call(0, 10_000, 12_500)];
        assert_eq!(calls_of(&entries, "a").collect::<Vec<_>>(), [2.5]);
        assert_eq!(calls_of(&entries, "b").count() + calls_of(&entries, "c").count(), 0);
    }
}
