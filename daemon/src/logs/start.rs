//! Where the log goes.

use std::io::{self, IsTerminal};
use std::sync::{Arc, OnceLock};

use tracing::Subscriber;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer, Registry, fmt, reload};

use super::ring::{LogRing, RingWriter};
use crate::config::{LogFilter, LogFormat};

/// Has something else logged from then on.
pub(crate) type SetLog = Box<dyn Fn(&LogFilter) + Send + Sync>;

type AnyLayer = Box<dyn Layer<Registry> + Send + Sync>;

/// What this process keeps of its log, as the log is one of the whole process.
static RING: OnceLock<Arc<LogRing>> = OnceLock::new();

/// What is kept of the log; nothing in a process that has none.
pub(crate) fn ring() -> Option<&'static Arc<LogRing>> {
    RING.get()
}

/// Keeps a line that was said beside the log.
pub(crate) fn keep(line: &str) {
    if let Some(ring) = ring() {
        ring.push(line);
    }
}

/// Starts the log of this process, once, and keeps so many bytes of its newest lines; returns how something else is logged from
/// then on.
///
/// # Errors
/// The journal cannot be reached.
pub(crate) fn start(filter: EnvFilter, format: LogFormat, n_bytes_kept: usize) -> io::Result<SetLog> {
    let ring = RING.get_or_init(|| Arc::new(LogRing::new(n_bytes_kept)));
    let kept = RingWriter { ring: ring.clone(), is_json: format == LogFormat::Json };
    let stderr = fmt::layer().with_writer(io::stderr);
    let layers: Vec<AnyLayer> = match format {
        LogFormat::Text => {
            let stderr = stderr.with_ansi(io::stderr().is_terminal());
            vec![stderr.boxed(), lines(kept)]
        }
        LogFormat::Json => {
            let kept = fmt::layer().json().flatten_event(true).with_writer(kept);
            vec![stderr.json().flatten_event(true).boxed(), kept.boxed()]
        }
        LogFormat::Journald => vec![journal()?, lines(kept)],
    };
    let (filter, filter_handle) = reload::Layer::new(filter);
    tracing_subscriber::registry().with(layers).with(filter).init();
    Ok(Box::new(move |log| {
        // It is there as long as the process is.
        let _ = filter_handle.reload(log.filter());
    }))
}

/// Lines of text without colours.
fn lines<S>(writer: RingWriter) -> Box<dyn Layer<S> + Send + Sync>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    fmt::layer().with_ansi(false).with_writer(writer).boxed()
}

/// Entries of the journal, each field by its name.
#[cfg(target_os = "linux")]
fn journal() -> io::Result<AnyLayer> {
    use tracing_journald::{Priority, PriorityMappings};

    // As syslog means them: what is said all the time is no notice.
    let priorities = PriorityMappings {
        info: Priority::Informational,
        debug: Priority::Debug,
        trace: Priority::Debug,
        ..PriorityMappings::new()
    };
    let journal = tracing_journald::layer()?.with_priority_mappings(priorities);
    Ok(journal.with_syslog_identifier("trellis".to_owned()).boxed())
}

#[cfg(not(target_os = "linux"))]
fn journal() -> io::Result<AnyLayer> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "there is no journal on this system"))
}
