//! What else the machine is doing.

use std::time::Duration;

/// Long enough for many ticks of the system's counters.
const WINDOW: Duration = Duration::from_millis(500);

/// How busy the processors are while this process waits, in percent; `None` where the system does not tell.
pub(crate) async fn busy_percent() -> Option<f64> {
    let before = Ticks::now()?;
    tokio::time::sleep(WINDOW).await;
    let after = Ticks::now()?;
    let (idle, total) = (after.idle.checked_sub(before.idle)?, after.total.checked_sub(before.total)?);
    (total > 0).then(|| 100.0 * (1.0 - idle as f64 / total as f64))
}

/// Time of all processors since the start of the system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ticks {
    idle: u64,
    total: u64,
}

impl Ticks {
    fn now() -> Option<Self> {
        Self::parse(&std::fs::read_to_string("/proc/stat").ok()?)
    }

    /// The first line of `/proc/stat`: `cpu user nice system idle iowait irq softirq steal ...`. What guests of
    /// this machine use is part of `user` and `nice` already.
    fn parse(stat: &str) -> Option<Self> {
        let fields = stat.lines().next()?.strip_prefix("cpu ")?;
        let ticks: Vec<u64> =
            fields.split_whitespace().take(8).map(str::parse).collect::<Result<_, _>>().ok()?;
        let idle = ticks.get(3)? + ticks.get(4)?;
        Some(Self { idle, total: ticks.iter().sum() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_is_idle() {
        let stat = "cpu  100 5 50 800 20 1 2 22 90 0\ncpu0 1 2 3 4\n";
        assert_eq!(Ticks::parse(stat), Some(Ticks { idle: 820, total: 1000 }));
        assert_eq!(Ticks::parse(""), None);
        assert_eq!(Ticks::parse("cpu  1 2"), None);
    }
}
