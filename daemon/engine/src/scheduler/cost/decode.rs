//! How long a step of nothing but decode rows lasts, by how many there are.
//!
//! Numbers of rows are told apart by powers of two; of each there is a running mean of rows and time, and between two of
//! them time is taken to grow evenly.

use super::WEIGHT;

const N_BUCKETS: usize = 16;

/// Steps after which what was seen of a number of rows that has not come up since says little of what it takes by now.
const N_STEPS_KNOWN: u64 = 64;

/// Where nothing hangs on it, the time until it is seen anew grows to so many times that.
const N_TIMES_KNOWN: u64 = 16;

/// When a number of rows is to be seen anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::scheduler) enum Look {
    /// Rows are left out because of what was seen.
    Often,
    /// None are.
    Rarely,
}

/// What was seen of some numbers of rows.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    n_rows: f64,
    ns: f64,
    n_times: u64,
    /// The step when it was seen last.
    at: u64,
}

/// How long steps of decode rows take.
#[derive(Debug, Default)]
pub(in crate::scheduler) struct DecodeTimes {
    seen: [Option<Seen>; N_BUCKETS],
    /// The steps when each was to be seen anew.
    looked_at: [Option<u64>; N_BUCKETS],
    n_steps: u64,
}

impl DecodeTimes {
    /// A step of so many decode rows took so long.
    pub(super) fn learn(&mut self, n_rows: usize, ns: f64) {
        self.n_steps += 1;
        let seen = &mut self.seen[bucket(n_rows)];
        let weight = match seen {
            Some(seen) if self.n_steps - seen.at <= N_STEPS_KNOWN => WEIGHT,
            _ => 1.0,
        };
        let seen = seen.get_or_insert_default();
        seen.n_rows += weight * (n_rows as f64 - seen.n_rows);
        seen.ns += weight * (ns - seen.ns);
        (seen.n_times, seen.at) = (seen.n_times + 1, self.n_steps);
    }

    /// A step of so many decode rows. Beyond what was seen it takes as long as the nearest that was.
    pub(in crate::scheduler) fn ns(&self, n_rows: usize) -> Option<f64> {
        let n_rows = n_rows as f64;
        let mut below: Option<Seen> = None;
        for seen in self.seen.iter().flatten() {
            if seen.n_rows >= n_rows {
                let Some(below) = below else { return Some(seen.ns) };
                let share = (n_rows - below.n_rows) / (seen.n_rows - below.n_rows);
                return Some(below.ns + share * (seen.ns - below.ns));
            }
            below = Some(*seen);
        }
        below.map(|below| below.ns)
    }

    /// Whether a step of about so many rows was seen.
    pub(in crate::scheduler) fn is_known(&self, n_rows: usize) -> bool {
        self.seen[bucket(n_rows)].is_some()
    }

    /// The most decode rows of a step that lasts no longer than this. Beyond what was seen, each row is taken to cost what
    /// the others do.
    pub(in crate::scheduler) fn n_rows_within(&self, ns: f64) -> usize {
        let mut below = Seen::default();
        for seen in self.seen.iter().flatten() {
            if seen.ns > ns {
                let share = (ns - below.ns).max(0.0) / (seen.ns - below.ns);
                return (below.n_rows + share * (seen.n_rows - below.n_rows)) as usize;
            }
            below = *seen;
        }
        let first = self.seen.iter().flatten().next();
        let from = first.filter(|first| first.n_rows < below.n_rows);
        let (n_rows, from_ns) = from.map_or((0.0, 0.0), |from| (from.n_rows, from.ns));
        let row_ns = (below.ns - from_ns) / (below.n_rows - n_rows);
        if row_ns > 0.0 { (below.n_rows + (ns - below.ns) / row_ns) as usize } else { usize::MAX }
    }

    /// Whether a step of about so many rows is to be seen anew; if so, the next one is taken to be.
    pub(in crate::scheduler) fn takes_look(&mut self, n_rows: usize, look: Look) -> bool {
        let idx = bucket(n_rows);
        let n_steps = match (look, self.seen[idx]) {
            (Look::Rarely, Some(seen)) => N_STEPS_KNOWN * seen.n_times.min(N_TIMES_KNOWN),
            _ => N_STEPS_KNOWN,
        };
        let last = self.seen[idx].map(|seen| seen.at).max(self.looked_at[idx]);
        let is_due = last.is_none_or(|last| self.n_steps - last >= n_steps);
        if is_due {
            self.looked_at[idx] = Some(self.n_steps);
        }
        is_due
    }
}

/// The least number of rows that is told apart from this one and greater.
pub(in crate::scheduler) fn next_told_apart(n_rows: usize) -> usize {
    2 << n_rows.max(1).ilog2()
}

fn bucket(n_rows: usize) -> usize {
    (n_rows.max(1).ilog2() as usize).min(N_BUCKETS - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(points: &[(usize, f64)]) -> DecodeTimes {
        let mut times = DecodeTimes::default();
        points.iter().for_each(|&(n_rows, ns)| times.learn(n_rows, ns));
        times
    }

    #[test]
    fn time_grows_evenly_between_what_was_seen() {
        assert_eq!(DecodeTimes::default().ns(1), None);
        let times = seen(&[(1, 100.0), (33, 420.0)]);
        let between = [1, 2, 17, 33, 500].map(|n_rows| times.ns(n_rows));
        assert_eq!(between, [100.0, 110.0, 260.0, 420.0, 420.0].map(Some));
        assert_eq!([100.0, 200.0, 420.0].map(|ns| times.n_rows_within(ns)), [1, 11, 33]);
        assert_eq!(times.n_rows_within(1000.0), 91, "as before");
        assert_eq!(times.n_rows_within(50.0), 0);
    }

    #[test]
    fn before_anything_else_was_seen_each_row_may_cost_as_much_as_the_first() {
        let mut times = seen(&[(1, 100.0)]);
        assert_eq!(times.n_rows_within(200.0), 2);
        // They do not, and so more are tried.
        times.learn(2, 101.0);
        assert_eq!(times.n_rows_within(200.0), 101);
        times.learn(101, 99.0);
        assert_eq!(times.n_rows_within(200.0), usize::MAX);
    }

    #[test]
    fn what_was_seen_long_ago_is_seen_anew_and_replaced() {
        let mut times = seen(&[(1, 9_000.0)]);
        assert!(!times.takes_look(1, Look::Often) && !times.is_known(2));
        assert!(times.takes_look(2, Look::Often) && !times.takes_look(2, Look::Often), "once is enough");
        (0..64).for_each(|_| times.learn(100, 1_000.0));
        assert!(times.takes_look(1, Look::Rarely), "it was seen a single time");
        times.learn(1, 10.0);
        assert_eq!(times.ns(1), Some(10.0));
        times.learn(1, 18.0);
        assert_eq!(times.ns(1), Some(11.0));
        (0..64).for_each(|_| times.learn(100, 1_000.0));
        assert!(!times.takes_look(1, Look::Rarely), "it was seen three times");
        assert!(times.takes_look(1, Look::Often));
    }
}
