//! What changes from one answer of the daemon to the next.

use rustc_hash::FxHashMap;
use trellis_client::{DeviceInfo, GuestInfo};

use super::samples::Sample;

/// Of guests and devices, in the time between two answers.
#[derive(Debug, Default)]
pub(super) struct Rates {
    guests: FxHashMap<u64, GuestRates>,
    devices: FxHashMap<String, DeviceRates>,
}

/// Of a guest.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct GuestRates {
    pub(super) tokens_per_s: f64,
    /// The part of a processor that it takes.
    pub(super) cpu: f64,
}

/// Of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct DeviceRates {
    pub(super) tokens_per_s: f64,
    /// The part of the time in which it computed.
    pub(super) busy: f64,
    /// Of its steps, if there were some.
    pub(super) steps: Option<StepRates>,
}

/// Means over steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct StepRates {
    pub(super) n_rows: f64,
    pub(super) ms: f64,
}

impl Rates {
    /// From one answer to the next; from the beginning of what the first does not have, and of everything where another daemon
    /// gave it.
    pub(super) fn between(before: Option<&Sample>, now: &Sample) -> Self {
        let is_same = |before: &&Sample| {
            before.daemon.pid == now.daemon.pid && before.daemon.uptime_ms <= now.daemon.uptime_ms
        };
        let before = before.filter(is_same);
        let guests = now.guests.iter().map(|guest| {
            let earlier = before
                .and_then(|before| before.guests.iter().find(|earlier| earlier.guest_id == guest.guest_id));
            (guest.guest_id, of_guest(earlier, guest))
        });
        let devices = now.daemon.devices.iter().map(|device| {
            let is_it =
                |earlier: &&DeviceInfo| earlier.name == device.name && earlier.open_ms <= device.open_ms;
            let earlier = before.and_then(|before| before.daemon.devices.iter().find(is_it));
            (device.name.clone(), of_device(earlier, device))
        });
        Self { guests: guests.collect(), devices: devices.collect() }
    }

    /// Those of a guest.
    pub(super) fn guest(&self, guest_id: u64) -> GuestRates {
        self.guests.get(&guest_id).copied().unwrap_or_default()
    }

    /// Those of a device.
    pub(super) fn device(&self, name: &str) -> DeviceRates {
        self.devices.get(name).copied().unwrap_or_default()
    }
}

/// How much more there is now, in each unit of something; nothing where a counter began again.
fn per(now: u64, before: u64, n_units: u64) -> f64 {
    if n_units == 0 { 0.0 } else { now.saturating_sub(before) as f64 / n_units as f64 }
}

fn of_guest(before: Option<&GuestInfo>, now: &GuestInfo) -> GuestRates {
    let cpu_ms = |guest: &GuestInfo| guest.used.map_or(0, |used| used.cpu_ms);
    let (n_tokens, cpu, elapsed_ms) =
        before.map_or((0, 0, 0), |before| (before.usage.n_tokens, cpu_ms(before), before.elapsed_ms));
    let ms = now.elapsed_ms.saturating_sub(elapsed_ms);
    GuestRates {
        tokens_per_s: 1000.0 * per(now.usage.n_tokens, n_tokens, ms),
        cpu: per(cpu_ms(now), cpu, ms),
    }
}

fn of_device(before: Option<&DeviceInfo>, now: &DeviceInfo) -> DeviceRates {
    let beginning = DeviceInfo::default();
    let before = before.unwrap_or(&beginning);
    let (ms, n_steps) = (now.open_ms - before.open_ms, now.n_steps.saturating_sub(before.n_steps));
    let steps = || StepRates {
        n_rows: per(now.n_rows, before.n_rows, n_steps),
        ms: per(now.busy_ms, before.busy_ms, n_steps),
    };
    DeviceRates {
        tokens_per_s: 1000.0 * per(now.n_tokens, before.n_tokens, ms),
        busy: per(now.busy_ms, before.busy_ms, ms).min(1.0),
        steps: (n_steps > 0).then(steps),
    }
}

#[cfg(test)]
mod tests {
    use trellis_client::{DaemonInfo, GuestAmounts, GuestUsage};

    use super::*;

    fn sample(pid: u32, ms: u64, n_tokens: u64) -> Sample {
        let used = Some(GuestAmounts { cpu_ms: ms / 4, ..GuestAmounts::default() });
        let usage = GuestUsage { n_tokens, ..GuestUsage::default() };
        let guest = GuestInfo { guest_id: 7, elapsed_ms: ms, usage, used, ..GuestInfo::default() };
        let device = DeviceInfo {
            name: "cpu".to_owned(),
            open_ms: ms,
            busy_ms: ms / 2,
            n_steps: n_tokens / 10,
            n_rows: n_tokens / 2,
            n_tokens,
            ..DeviceInfo::default()
        };
        let daemon = DaemonInfo { pid, uptime_ms: ms, devices: vec![device], ..DaemonInfo::default() };
        Sample { daemon, guests: vec![guest] }
    }

    #[test]
    fn rates_are_of_the_time_between_two_answers_of_one_daemon() {
        let (before, now) = (sample(1, 1000, 100), sample(1, 3000, 500));
        let rates = Rates::between(Some(&before), &now);
        assert_eq!(rates.guest(7), GuestRates { tokens_per_s: 200.0, cpu: 0.25 });
        let steps = Some(StepRates { n_rows: 5.0, ms: 25.0 });
        assert_eq!(rates.device("cpu"), DeviceRates { tokens_per_s: 200.0, busy: 0.5, steps });
        // Another daemon has counters of its own, and a guest that has just come counts from its start.
        for other in [Some(&sample(2, 1000, 100)), Some(&sample(1, 9000, 100)), None] {
            assert_eq!(Rates::between(other, &now).guest(7).tokens_per_s, 500.0 / 3.0);
        }
    }

    #[test]
    fn nothing_is_divided_by_nothing_and_a_counter_that_begins_again_is_no_rate() {
        let rates = Rates::between(None, &sample(1, 0, 0));
        assert_eq!((rates.guest(7), rates.device("cpu")), (GuestRates::default(), DeviceRates::default()));
        let rates = Rates::between(Some(&sample(1, 1000, 500)), &sample(1, 2000, 100));
        assert_eq!((rates.guest(7).tokens_per_s, rates.device("cpu").tokens_per_s), (0.0, 0.0));
        assert_eq!((rates.guest(8), rates.device("cuda")), (GuestRates::default(), DeviceRates::default()));
    }
}
