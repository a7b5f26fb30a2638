use std::num::NonZeroU32;

use super::*;
use crate::account::{Account, Budget, GuestId, Priority, SessionId};

const MS: Duration = Duration::from_millis(1);

fn owner(user: u32, share: u32) -> Owner {
    let priority = Priority { share: NonZeroU32::new(share).expect("above 0"), rank: 0 };
    let account = Account::with_priority("guest", Budget::UNLIMITED, None, priority);
    Owner { actor: ActorId(user), session: SessionId(1), guest: GuestId(u64::from(user)), account }
}

/// A device with a user that decodes, whose row takes a millisecond alone, and one with prompts.
struct Device {
    arrears: Arrears,
    owners: Vec<Owner>,
    now: Duration,
    step: u64,
    kept: Duration,
}

impl Device {
    fn new(shares: [u32; 2]) -> Self {
        Self::of(&shares)
    }

    fn of(shares: &[u32]) -> Self {
        let owners = (1..).zip(shares).map(|(user, &share)| owner(user, share)).collect();
        let (arrears, now, kept) = (Arrears::default(), Duration::ZERO, Duration::ZERO);
        let mut device = Self { arrears, owners, now, step: 0, kept };
        (0..100).for_each(|_| device.step(MS, &[0]));
        device
    }

    /// A step of so long with rows of some users.
    fn step(&mut self, time: Duration, users: &[usize]) {
        let rows: Vec<_> = users.iter().map(|&user| (user, 1 - user)).collect();
        self.step_of(time, &rows);
    }

    /// The same, with so many decode rows of each.
    fn step_of(&mut self, time: Duration, rows: &[(usize, usize)]) {
        let latest = self.arrears.latest(|user| user == ActorId(1));
        let is_kept = rows == [(0, 1)] && latest.is_some_and(|latest| latest.is_very_late);
        self.ride(time, rows, latest, is_kept);
    }

    /// The same, planned for whoever was the latest.
    fn ride(&mut self, time: Duration, rows: &[(usize, usize)], latest: Option<Latest>, is_kept: bool) {
        self.step += 1;
        let mut riders = Vec::new();
        for &(user, n_decode_rows) in rows {
            self.arrears.note_row(self.step, &self.owners[user], n_decode_rows, &mut riders);
        }
        self.now += time;
        self.kept += if is_kept { time } else { Duration::ZERO };
        let ride = Ride { now: self.now, elapsed: time, riders: &riders, latest, is_kept };
        self.arrears.note_step(ride, |_| Some(1_000_000));
    }

    /// What part of the time each user has whose row takes so long, while all want one all the time.
    fn parts(&mut self, times: &[Duration]) -> Vec<f64> {
        let (mut had, begun) = (vec![Duration::ZERO; times.len()], self.now);
        for _ in 0..10_000 {
            let latest = self.arrears.latest(|_| true);
            let kept = latest.filter(|latest| latest.is_very_late).map(|latest| latest.user.0 as usize - 1);
            let riders = kept.map_or((0..times.len()).collect(), |user| vec![user]);
            let rows: Vec<_> = riders.iter().map(|&user| (user, 1)).collect();
            riders.iter().for_each(|&user| had[user] += times[user]);
            self.ride(riders.iter().map(|&user| times[user]).sum(), &rows, latest, kept.is_some());
        }
        had.iter().map(|had| had.as_secs_f64() / (self.now - begun).as_secs_f64()).collect()
    }

    /// Steps beside prompts that make each last so long; how long the user's rows take in the mean.
    fn beside_prompts(&mut self, time: Duration, n_steps: u32) -> f64 {
        let begun = self.now;
        for _ in 0..n_steps {
            match self.arrears.latest(|user| user == ActorId(1)) {
                Some(latest) if latest.is_very_late => self.step(MS, &[0]),
                _ => self.step(time, &[0, 1]),
            }
        }
        (self.now - begun).as_secs_f64() * 1000.0 / f64::from(n_steps)
    }
}

#[test]
fn however_many_users_have_short_steps_they_have_their_parts_beside_one_with_long_ones() {
    let mut device = Device::of(&[1; 10]);
    let times = [[MS; 9].as_slice(), &[40 * MS]].concat();
    (0..20).for_each(|_| device.ride(times[9], &[(9, 1)], None, false));
    let parts = device.parts(&times);
    assert!(parts.iter().all(|&part| part > 0.08), "{parts:?}");
}

#[test]
fn who_has_prompts_alone_has_its_part_beside_users_who_are_late_all_the_time() {
    for n_decoding in [2, 6, 9] {
        let mut device = Device::of(&vec![1; n_decoding + 1]);
        let all: Vec<_> = (0..n_decoding).map(|user| (user, 1)).chain([(n_decoding, 0)]).collect();
        let (begun, mut open) = (device.now, Duration::ZERO);
        for _ in 0..10_000 {
            match device.arrears.latest(|user| user.0 as usize <= n_decoding) {
                // Others keep the machine busy: it lasts twice as long as alone.
                Some(Latest { user, is_very_late: true }) => {
                    let latest = Some(Latest { user, is_very_late: true });
                    device.ride(2 * MS, &[(user.0 as usize - 1, 1)], latest, true);
                }
                latest => {
                    open += 20 * MS;
                    device.ride(20 * MS, &all, latest, false);
                }
            }
        }
        let part = open.as_secs_f64() / (device.now - begun).as_secs_f64();
        assert!(part > 0.9 / (n_decoding + 1) as f64, "{n_decoding}: {part}");
    }
}

#[test]
fn users_who_were_late_together_decode_together_again() {
    let mut device = Device::of(&[1; 9]);
    let all: Vec<_> = (0..9).map(|user| (user, 1)).collect();
    device.ride(20 * MS, &all, None, false);
    let mut kept_last = 0;
    for step in 0..2_000 {
        let latest = device.arrears.latest(|_| true);
        match latest.filter(|latest| latest.is_very_late) {
            Some(Latest { user, .. }) => {
                kept_last = step;
                device.ride(MS, &[(user.0 as usize - 1, 1)], latest, true);
            }
            None => device.ride(MS, &all, latest, false),
        }
    }
    assert!(kept_last < 1_000, "{kept_last}");
}

#[test]
fn a_user_that_decodes_has_its_part_of_its_pace_however_long_steps_are() {
    for (shares, n_parts) in [([1, 1], 2.0), ([3, 3], 2.0)] {
        for time in [2, 5, 20, 60] {
            let mut device = Device::new(shares);
            let (begun, mean_ms) = (device.now, device.beside_prompts(time * MS, 4000));
            let due_ms = f64::max(PART_OF_DUE * n_parts, 1.0).min(f64::from(time));
            // What may be kept in a row comes on top of what the others are due.
            let least_ms = 0.95 * due_ms;
            assert!(
                mean_ms > least_ms && mean_ms < 1.25 * due_ms,
                "{shares:?}, {time} ms: {mean_ms} for {due_ms}"
            );
            let kept = device.kept.as_secs_f64() / (device.now - begun).as_secs_f64();
            assert!(kept < 1.05 / n_parts, "{shares:?}, {time} ms: {kept}");
        }
    }
}

#[test]
fn nobody_is_late_who_is_alone_or_has_what_it_is_due() {
    let mut device = Device::new([1, 1]);
    (0..100).for_each(|_| device.step(10 * MS, &[0]));
    assert_eq!(device.arrears.latest(|_| true), None, "steps take longer by now, and nobody else is there");
    let mut device = Device::new([1, 1]);
    device.beside_prompts(Duration::from_micros(1600), 1000);
    assert_eq!((device.arrears.latest(|_| true), device.kept), (None, Duration::ZERO));
}

#[test]
fn nobody_is_late_beside_users_with_other_shares() {
    for shares in [[1, 3], [3, 1]] {
        let mut device = Device::new(shares);
        assert!((device.beside_prompts(20 * MS, 100) - 20.0).abs() < 0.001);
        assert_eq!(device.arrears.latest(|_| true), None);
    }
}

#[test]
fn what_nobody_asked_for_is_no_waiting() {
    let mut device = Device::new([1, 1]);
    device.step(MS, &[0, 1]);
    device.now += 5000 * MS;
    device.arrears.rested = Some(device.now);
    [1, 2].into_iter().for_each(|user| device.arrears.note_waits(ActorId(user)));
    device.step(MS, &[0]);
    assert_eq!(device.arrears.latest(|_| true), None);
    let alone = device.arrears.users[&ActorId(1)].alone.expect("it was seen");
    assert!((alone.ns - 1e6).abs() < 1e4, "{alone:?}");
}

#[test]
fn who_waited_all_along_is_late_however_long_that_was() {
    let mut device = Device::new([1, 1]);
    device.arrears.note_waits(ActorId(1));
    device.step(400 * MS, &[1]);
    device.step(MS, &[0, 1]);
    assert!(device.arrears.latest(|_| true).is_some_and(|latest| latest.is_very_late));
}

#[test]
fn who_has_prompts_computed_is_not_late_with_its_next_token() {
    let mut device = Device::new([1, 1]);
    for _ in 0..20 {
        device.step_of(MS, &[(0, 1), (1, 1)]);
        (0..10).for_each(|_| device.step(MS, &[1]));
        assert_eq!(device.arrears.latest(|user| user == ActorId(2)), None);
    }
    // Nothing of it is computed while it waits.
    device.step_of(MS, &[(0, 1), (1, 1)]);
    (0..10).for_each(|_| device.step(MS, &[0]));
    assert!(device.arrears.latest(|user| user == ActorId(2)).is_some());
}

#[test]
fn who_was_away_is_late_from_its_return_on() {
    let mut device = Device::new([1, 1]);
    (0..20).for_each(|_| device.step(2 * MS, &[1]));
    device.arrears.note_waits(ActorId(1));
    assert_eq!(device.arrears.latest(|_| true), None);
    device.step(2 * MS, &[1]);
    assert_eq!(device.arrears.latest(|_| true), None);
    device.step(2 * MS, &[1]);
    let latest = device.arrears.latest(|_| true).expect("it waits for 4 ms");
    assert_eq!((latest.user, latest.is_very_late), (ActorId(1), false));
    (0..4).for_each(|_| device.step(2 * MS, &[1]));
    assert!(device.arrears.latest(|_| true).is_some_and(|latest| latest.is_very_late));
    assert_eq!(device.arrears.latest(|user| user == ActorId(2)), None, "it has no row to wait for");
}

#[test]
fn users_with_short_and_with_long_steps_have_the_same_part_of_their_pace() {
    let mut device = Device::new([1, 1]);
    let times = [MS, MS / 10];
    (0..20).for_each(|_| device.ride(times[1], &[(1, 1)], None, false));
    let parts = device.parts(&times);
    assert!(parts.iter().all(|part| (part - 0.5).abs() < 0.05), "{parts:?}");
}

#[test]
fn whose_commands_kept_the_engine_busy_is_not_late_by_that() {
    let mut device = Device::new([1, 1]);
    let late = |device: &Device| device.arrears.latest(|user| user == ActorId(1)).map(|it| it.is_very_late);
    // Nine parts in ten of the time before its steps went into what it asked.
    for _ in 0..20 {
        device.arrears.note_commands(ActorId(1), 9_000_000);
        device.step_of(10 * MS, &[(0, 1), (1, 0)]);
    }
    assert_eq!(late(&device), None);
    (0..20).for_each(|_| device.step_of(10 * MS, &[(0, 1), (1, 0)]));
    assert_eq!(late(&device), Some(true));
}

#[test]
fn who_was_away_for_long_is_late_with_the_row_after_its_first() {
    for n_steps in [200, 5_000] {
        let mut device = Device::new([1, 1]);
        (0..n_steps).for_each(|_| device.step(2 * MS, &[1]));
        device.arrears.note_waits(ActorId(1));
        device.step_of(2 * MS, &[(0, 1), (1, 0)]);
        (0..10).for_each(|_| device.step(2 * MS, &[1]));
        let latest = device.arrears.latest(|user| user == ActorId(1));
        assert!(latest.is_some_and(|latest| latest.is_very_late), "{n_steps}: {latest:?}");
    }
}
