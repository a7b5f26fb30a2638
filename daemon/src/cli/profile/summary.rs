//! What a profile comes to: the parts of a guest's time, and its calls by function.

use std::collections::BTreeMap;

use serde::Serialize;

use super::super::table::{Align, Table};
use crate::profile::{Entry, Moment};

/// The parts of a guest's time, which together are all of it, in nanoseconds.
#[derive(Debug, Default, PartialEq, Serialize)]
#[serde(tag = "type", rename = "profile")]
pub(super) struct Summary {
    /// From its start to its end.
    wall_ns: u64,
    /// Before its first instruction.
    starting_ns: u64,
    /// It computed.
    guest_ns: u64,
    /// It could have computed, and others did.
    turns_ns: u64,
    /// The host computed, in calls.
    host_ns: u64,
    /// It waited in a call, while the device was at a step with rows of it.
    device_ns: u64,
    /// It waited in a call for something else: a message, its client, or the steps of others.
    waiting_ns: u64,
    /// Steps with rows of it, how long the device was at them, and its tokens in them.
    n_steps: u64,
    steps_ns: u64,
    n_tokens: u64,
    n_calls: u64,
    /// By function, the longest first.
    calls: Vec<Calls>,
    /// Whether its end came: a client that does not read finds it cut short.
    is_whole: bool,
    /// What was not noted for want of room.
    #[serde(skip_serializing_if = "is_zero")]
    n_lost: u64,
}

/// The calls of one function.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
struct Calls {
    name: String,
    n: u64,
    /// From call to return.
    total_ns: u64,
    /// Of which the host computed.
    host_ns: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks so")]
fn is_zero(n: &u64) -> bool {
    *n == 0
}

impl Summary {
    pub(super) fn of(entries: &[Entry]) -> Self {
        let steps = Spans::of(entries);
        let (mut texts, mut by_name) = (Vec::new(), BTreeMap::<&str, Calls>::new());
        let mut summary = Self { steps_ns: steps.n_ns, ..Self::default() };
        let mut last = Moment::default();
        for entry in entries {
            match entry {
                Entry::Text(text) => texts.push(text.as_str()),
                Entry::Begin(moment) => {
                    summary.starting_ns = moment.at_ns;
                    last = *moment;
                }
                Entry::Call { name, begin, end } => {
                    summary.computed(last, *begin);
                    let total_ns = end.at_ns.saturating_sub(begin.at_ns);
                    let host_ns = end.cpu_ns.saturating_sub(begin.cpu_ns).min(total_ns);
                    let device_ns = steps.within(begin.at_ns, end.at_ns).min(total_ns - host_ns);
                    summary.n_calls += 1;
                    summary.host_ns += host_ns;
                    summary.device_ns += device_ns;
                    summary.waiting_ns += total_ns - host_ns - device_ns;
                    let calls = by_name.entry(texts.get(*name as usize).unwrap_or(&"?")).or_default();
                    calls.n += 1;
                    calls.total_ns += total_ns;
                    calls.host_ns += host_ns;
                    last = *end;
                }
                Entry::Step { n_tokens, .. } => {
                    summary.n_steps += 1;
                    summary.n_tokens += u64::from(*n_tokens);
                }
                Entry::Sample { .. } => {}
                Entry::End { end, n_lost } => {
                    summary.computed(last, *end);
                    summary.wall_ns = end.at_ns;
                    (summary.n_lost, summary.is_whole) = (*n_lost, true);
                }
            }
        }
        if !summary.is_whole {
            // As far as it goes.
            summary.wall_ns = summary.starting_ns
                + summary.guest_ns
                + summary.turns_ns
                + summary.host_ns
                + summary.device_ns
                + summary.waiting_ns;
        }
        let named = |(name, calls): (&str, Calls)| Calls { name: name.to_owned(), ..calls };
        summary.calls = by_name.into_iter().map(named).collect();
        summary.calls.sort_by_key(|calls| std::cmp::Reverse(calls.total_ns));
        summary
    }

    /// Between two calls.
    fn computed(&mut self, from: Moment, to: Moment) {
        let total_ns = to.at_ns.saturating_sub(from.at_ns);
        let guest_ns = to.cpu_ns.saturating_sub(from.cpu_ns).min(total_ns);
        self.guest_ns += guest_ns;
        self.turns_ns += total_ns - guest_ns;
    }

    pub(super) fn to_text(&self) -> String {
        let mut parts = Table::new([("TIME", Align::Left), ("MS", Align::Right), ("%", Align::Right)]);
        for (name, part_ns) in [
            ("starting", self.starting_ns),
            ("guest", self.guest_ns),
            ("host, in calls", self.host_ns),
            ("waiting, device at its steps", self.device_ns),
            ("waiting for something else", self.waiting_ns),
            ("others had their turn", self.turns_ns),
            ("in all", self.wall_ns),
        ] {
            let share = 100.0 * part_ns as f64 / self.wall_ns.max(1) as f64;
            parts.push([name.to_owned(), ms(part_ns), format!("{share:.1}")]);
        }
        let mut calls = Table::new([
            ("CALL", Align::Left),
            ("TIMES", Align::Right),
            ("MS", Align::Right),
            ("HOST MS", Align::Right),
        ]);
        for Calls { name, n, total_ns, host_ns } in &self.calls {
            calls.push([name.clone(), n.to_string(), ms(*total_ns), ms(*host_ns)]);
        }
        let lost = match self.n_lost {
            _ if !self.is_whole => "\nthe profile was cut short: it was not read in time".to_owned(),
            0 => String::new(),
            n => format!("\n{n} events were not noted for want of room"),
        };
        format!(
            "{}\n{}\n{} steps with {} tokens of it, {} ms{lost}",
            parts.render(),
            calls.render(),
            self.n_steps,
            self.n_tokens,
            ms(self.steps_ns)
        )
    }
}

fn ms(ns: u64) -> String {
    format!("{:.3}", ns as f64 / 1e6)
}

/// When the device was at steps, the earliest first, none overlapping another.
struct Spans {
    spans: Vec<(u64, u64)>,
    n_ns: u64,
}

impl Spans {
    fn of(entries: &[Entry]) -> Self {
        let mut spans: Vec<(u64, u64)> = entries
            .iter()
            .filter_map(|entry| match entry {
                Entry::Step { end_ns, elapsed_ns, .. } => Some((end_ns.saturating_sub(*elapsed_ns), *end_ns)),
                _ => None,
            })
            .collect();
        let n_ns = spans.iter().map(|(start, end)| end - start).sum();
        spans.sort_unstable();
        let mut apart: Vec<(u64, u64)> = Vec::with_capacity(spans.len());
        for (start, end) in spans {
            match apart.last_mut() {
                Some(last) if start <= last.1 => last.1 = last.1.max(end),
                _ => apart.push((start, end)),
            }
        }
        Self { spans: apart, n_ns }
    }

    /// How long of a time the device was at them.
    fn within(&self, start: u64, end: u64) -> u64 {
        let first = self.spans.partition_point(|span| span.1 <= start);
        let inside = self.spans[first..].iter().take_while(|span| span.0 < end);
        inside.map(|span| span.1.min(end) - span.0.max(start)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(at_us: u64, cpu_us: u64) -> Moment {
        Moment { at_ns: at_us * 1000, cpu_ns: cpu_us * 1000 }
    }

    fn step(start_us: u64, end_us: u64) -> Entry {
        let elapsed_ns = (end_us - start_us) * 1000;
        Entry::Step { end_ns: end_us * 1000, elapsed_ns, n_rows: 1, n_tokens: 3 }
    }

    #[test]
    fn the_parts_are_the_whole() {
        let entries = [
            Entry::Begin(at(10, 5)),
            Entry::Text("a".to_owned()),
            // Computes for 20, waits for its turn for 10.
            Entry::Call { name: 0, begin: at(40, 25), end: at(140, 35) },
            step(30, 60),
            step(50, 90),
            step(120, 200),
            Entry::Call { name: 0, begin: at(145, 40), end: at(150, 45) },
            Entry::End { end: at(160, 55), n_lost: 2 },
        ];
        let summary = Summary::of(&entries);
        let Summary { starting_ns, guest_ns, turns_ns, host_ns, device_ns, waiting_ns, wall_ns, .. } =
            summary;
        assert_eq!((starting_ns, guest_ns, turns_ns), (10_000, 35_000, 10_000));
        // The second call computes all the time.
        assert_eq!((host_ns, device_ns, waiting_ns), (15_000, 70_000, 20_000));
        assert_eq!(starting_ns + guest_ns + turns_ns + host_ns + device_ns + waiting_ns, wall_ns);
        assert_eq!((summary.n_steps, summary.n_tokens, summary.steps_ns), (3, 9, 150_000));
        let calls = Calls { name: "a".to_owned(), n: 2, total_ns: 105_000, host_ns: 15_000 };
        assert_eq!((summary.calls, summary.n_lost), (vec![calls], 2));
    }

    #[test]
    fn a_profile_that_was_cut_short_is_told_as_far_as_it_goes() {
        let summary = Summary::of(&[Entry::Call { name: 9, begin: at(0, 0), end: at(10, 20) }]);
        assert_eq!((summary.host_ns, summary.wall_ns, summary.is_whole), (10_000, 10_000, false));
        assert_eq!(summary.calls[0].name, "?");
        assert!(summary.to_text().contains("in all") && summary.to_text().contains("cut short"));
    }
}
