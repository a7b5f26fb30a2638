//! `trellis metrics`: what monitoring is told of the daemon.

use clap::Args;
use serde::Serialize;

use super::connect::SocketArgs;
use super::error::CliError;
use super::output::{self, Format};
use crate::metrics::METRICS;

const EXAMPLES: &str = "\
Examples:
  trellis metrics
  trellis metrics | grep ^trellis_guests
  trellis metrics > trellis.prom.new && mv trellis.prom.new trellis.prom
                                   in the folder of the node exporter's textfile collector, which never sees half a file
  trellis metrics --list                                     what there is, and what it means; no daemon is asked

The text is Prometheus's text format 0.0.4. With metrics_listen = \"127.0.0.1:9464\" in its configuration the daemon also answers Prometheus, at
http://127.0.0.1:9464/metrics. Names of vLLM and of OpenTelemetry's conventions
stand where what they mean is what is measured; what is not measured is not there. All numbers are of all users together.

Exit status: 0 printed; 2 no daemon is running.";

/// Print the daemon's metrics for Prometheus
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct MetricsArgs {
    /// List all metrics, and what they mean, instead of their numbers
    #[arg(long, conflicts_with = "socket")]
    list: bool,
    #[command(flatten)]
    socket: SocketArgs,
}

/// A metric, for programs.
#[derive(Serialize)]
struct Listed {
    name: String,
    kind: &'static str,
    unit: Option<&'static str>,
    labels: &'static [&'static str],
    about: &'static str,
}

/// The text, for programs that take nothing but JSON.
#[derive(Serialize)]
struct Told {
    text: String,
}

pub(crate) async fn metrics(args: MetricsArgs, format: Format) -> Result<(), CliError> {
    if args.list {
        return output::print(format, &listed(), |metrics| metrics.iter().map(line).collect());
    }
    let told = Told { text: args.socket.connect(format).await?.metrics().await? };
    output::print(format, &told, |told| told.text.clone())
}

fn listed() -> Vec<Listed> {
    let listed = METRICS.iter().map(|metric| Listed {
        name: metric.sample_name(),
        kind: metric.kind.name(),
        unit: metric.unit(),
        labels: metric.labels,
        about: metric.about,
    });
    listed.collect()
}

/// `trellis_guests{state} gauge: Guests by what they are doing`
fn line(metric: &Listed) -> String {
    let labels =
        if metric.labels.is_empty() { String::new() } else { format!("{{{}}}", metric.labels.join(", ")) };
    format!("{}{labels} {}: {}\n", metric.name, metric.kind, metric.about)
}
