//! How long a step of nothing but decode rows lasts, by how many there are.
//!
//! Numbers of rows are told apart by powers of two; of each there is a running mean of rows and time, and between two of
//! them time is taken to grow evenly. Where a guest is due more than half of a device, what it gets alone and what it gets with
//! others lie closer together than that: then they are told apart by quarters of it.

use super::WEIGHT;

const N_OCTAVES: usize = 16;

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

/// How finely numbers of rows are told apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::scheduler) enum Grain {
    /// By powers of two.
    #[default]
    Coarse,
    /// By quarters of them.
    Fine,
}

impl Grain {
    /// Numbers of rows between a power of two and the next that are told apart.
    fn n_in_octave(self) -> usize {
        match self {
            Self::Coarse => 1,
            Self::Fine => 4,
        }
    }

    /// The least number of rows that is told apart from this one and greater.
    pub(in crate::scheduler) fn next_told_apart(self, n_rows: usize) -> usize {
        let (octave, part) = self.place(n_rows);
        let n = self.n_in_octave();
        ((n + part + 1) << octave).div_ceil(n)
    }

    /// The power of two, and the part of the way to the next.
    fn place(self, n_rows: usize) -> (usize, usize) {
        let (n_rows, n) = (n_rows.clamp(1, 1 << N_OCTAVES), self.n_in_octave());
        let octave = n_rows.ilog2() as usize;
        (octave, ((n_rows * n) >> octave) - n)
    }

    fn bucket(self, n_rows: usize) -> usize {
        let (octave, part) = self.place(n_rows);
        (octave * self.n_in_octave() + part).min(N_OCTAVES * self.n_in_octave() - 1)
    }
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
#[derive(Debug)]
pub(in crate::scheduler) struct DecodeTimes {
    grain: Grain,
    seen: Vec<Option<Seen>>,
    /// The steps when each was to be seen anew.
    looked_at: Vec<Option<u64>>,
    n_steps: u64,
}

impl DecodeTimes {
    pub(super) fn new(grain: Grain) -> Self {
        let n_buckets = N_OCTAVES * grain.n_in_octave();
        Self { grain, seen: vec![None; n_buckets], looked_at: vec![None; n_buckets], n_steps: 0 }
    }

    /// A step of so many decode rows took so long.
    pub(super) fn learn(&mut self, n_rows: usize, ns: f64) {
        self.n_steps += 1;
        let seen = &mut self.seen[self.grain.bucket(n_rows)];
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
        self.seen[self.grain.bucket(n_rows)].is_some()
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
        let idx = self.grain.bucket(n_rows);
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

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(points: &[(usize, f64)]) -> DecodeTimes {
        let mut times = DecodeTimes::new(Grain::Coarse);
        points.iter().for_each(|&(n_rows, ns)| times.learn(n_rows, ns));
        times
    }

    #[test]
    fn numbers_of_rows_are_told_apart_by_powers_of_two_or_quarters_of_them() {
        for (grain, expected) in [
            (Grain::Coarse, vec![2, 4, 8, 16, 32, 64, 128]),
            (Grain::Fine, vec![2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80]),
        ] {
            let mut n_rows = 1;
            for next in expected {
                assert_eq!(grain.next_told_apart(n_rows), next, "{grain:?}, {n_rows}");
                assert_eq!(grain.next_told_apart(next - 1), next, "{grain:?}");
                let buckets = [n_rows, next - 1, next].map(|n_rows| grain.bucket(n_rows));
                assert!(
                    buckets[0] == buckets[1] && buckets[1] < buckets[2],
                    "{grain:?}, {n_rows}: {buckets:?}"
                );
                n_rows = next;
            }
            assert_eq!(grain.bucket(usize::MAX), N_OCTAVES * grain.n_in_octave() - 1);
        }
    }

    #[test]
    fn time_grows_evenly_between_what_was_seen() {
        assert_eq!(DecodeTimes::new(Grain::Coarse).ns(1), None);
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
