//! How far users that decode have fallen behind the pace that they are due.
//!
//! A user's pace is the time from one step with its decode rows to the next, whatever that time goes into: rows and prompts of
//! others, their commands, pages that move, waiting. What it takes while nobody else has anything computed is seen, and so is
//! what it takes beside others, of whom each is due a part of the device by its share. What the steps of a user come later
//! than that adds up, as time, so that users whose steps are short and users whose steps are long fall behind alike at the
//! same part of their pace; what its own commands take of the engine meanwhile is taken off. Whoever is furthest behind has
//! steps to itself until that is made up for. Everything that shares the device by what work is expected to cost may be wrong
//! by a part of it: this looks at what came of it.
//!
//! While users share the device whose classes have unlike shares, nobody is late: what they have is what virtual time gives
//! them. The users that are left out meanwhile have at least the parts that they are due.

use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use super::{Commons, ContextState, Plan, Scheduler};
use crate::account::{ActorId, Owner};
use crate::fair::{Class, Lane};

/// A user gets this much of the time that it may take to its next step before that is late, of 1: what its guest, its session
/// and its client take on their way is not seen here.
const PART_OF_DUE: f64 = 0.85;

/// By how many of its steps a user is behind before its rows are in every step, and before it has steps to itself.
const N_STEPS_LATE: f64 = 0.5;
const N_STEPS_VERY_LATE: f64 = 4.0;

/// And by how many at most, of the user whose steps are longest: what is beyond that is forgotten, for all alike.
const N_STEPS_LATE_MAX: f64 = 64.0;

/// How much longer than it is due for the time of others the steps may last that are kept for a user, and how much longer than is
/// due for open steps those that are kept for anybody; and how much of either may be saved up, if no step has lasted longer.
const KEPT_NS_MAX: f64 = 15_000_000.0;

/// A kept step that lasts longer than its rows do alone does so because others keep the machine busy, up to so many times.
const N_TIMES_LONGER: f64 = 2.0;

/// A user that asked for no row for so long begins anew.
const PAUSE: Duration = Duration::from_millis(250);

/// For so long after its last row a user is taken to decode still: the next stream of a guest may be a moment away.
const PAUSE_OF_DECODING: Duration = Duration::from_secs(2);

/// Steps after which who had nothing computed and asked for nothing shares the device no more.
const N_STEPS_ACTIVE: u64 = 16;

/// The share of a new time in what a user's row takes alone, while nobody else shares the device.
const WEIGHT: f64 = 1.0 / 16.0;

/// The same of a shorter one while others do, in a step that is its own. A longer one says nothing then: others may have kept
/// the machine busy for part of it.
const WEIGHT_OF_SHORTER: f64 = 1.0 / 64.0;

/// Steps after which those are forgotten who have not been there for so long: who waits for pages comes back.
const N_STEPS_LOOK: u64 = 1024;
const FORGOTTEN_AFTER: Duration = Duration::from_secs(60);

/// What is known of the users of a device.
#[derive(Debug, Default)]
pub(crate) struct Arrears {
    users: FxHashMap<ActorId, Pace>,
    n_steps: u64,
    /// Steps that were kept for nobody.
    n_open_steps: u64,
    /// How long steps may last that are kept for anybody, for those lately that were not: who has prompts alone is never late.
    left_ns: f64,
    /// When the first step was taken in: times are told from then on.
    begun: Option<Instant>,
    last: Option<Duration>,
    /// When the device was last seen to have nothing to do.
    rested: Option<Duration>,
}

/// A user's pace.
#[derive(Debug)]
struct Pace {
    share: f64,
    /// When it was active last, in steps that were kept for nobody.
    active: u64,
    /// When its last decode row was taken in, and in which step.
    row: Option<(Duration, u64)>,
    /// When its last row was, of whatever kind: who has a part of a prompt computed does not wait meanwhile.
    served: Option<Duration>,
    /// Since when something of it waits, after it had nothing of that kind.
    waits_since: Option<Duration>,
    /// How long the rows of its last step would have taken alone.
    alone_ns: Option<f64>,
    alone: Option<Alone>,
    /// The last step with rows of it, and its place among the riders of that.
    rides: (u64, usize),
    /// By how much it is behind.
    late_ns: f64,
    /// How long steps may last that are kept for it, for what others have had lately.
    left_ns: f64,
    /// Rows that decode of its last steps.
    n_rows: usize,
    /// What its commands have taken of the engine, and so of the device, since the last step.
    commands_ns: f64,
}

/// What it takes from one decode row to the next, or from so many at once to the next, while nobody else has anything
/// computed.
#[derive(Clone, Copy, Debug)]
struct Alone {
    ns: f64,
    n_rows: usize,
    /// Whether nobody else shared the device when that was seen.
    is_certain: bool,
}

/// The user that is furthest behind.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Latest {
    pub(crate) user: ActorId,
    /// Whether the next step is to have its rows alone.
    pub(crate) is_very_late: bool,
}

/// A user with rows in a step that is taken in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rider {
    pub(crate) user: ActorId,
    /// Rows that decode.
    pub(crate) n_decode_rows: usize,
}

/// A step that is taken in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ride<'a> {
    pub(crate) now: Duration,
    /// How long the device was at it.
    pub(crate) elapsed: Duration,
    /// Each user once.
    pub(crate) riders: &'a [Rider],
    /// The user that was furthest behind when it was planned.
    pub(crate) latest: Option<Latest>,
    /// Whether it was kept for that user.
    pub(crate) is_kept: bool,
}

impl Plan {
    /// The user for which it was kept, if it was.
    pub(crate) fn kept_for(&self) -> Option<ActorId> {
        self.latest.filter(|_| self.is_kept).map(|latest| latest.user)
    }
}

impl Scheduler {
    /// A row of a context is planned.
    pub(super) fn note_rider(&mut self, context: &ContextState, n_decode_rows: usize, plan: &mut Plan) {
        self.commons.arrears.note_row(plan.step, &context.owner, n_decode_rows, &mut plan.riders);
    }

    /// A step is about to be taken in.
    pub(crate) fn note_ride(&mut self, now: Instant, elapsed: Duration, plan: &Plan) {
        let Plan { riders, latest, is_kept, .. } = plan;
        let begun = *self.commons.arrears.begun.get_or_insert(now);
        let now = now.saturating_duration_since(begun);
        let ride = Ride { now, elapsed, riders, latest: *latest, is_kept: *is_kept };
        let costs = &self.costs;
        self.commons.arrears.note_step(ride, |n_rows| costs.target_ns(n_rows, 1.0));
    }
}

impl Commons {
    /// The engine was at a command of a user's, and the device had nothing to do meanwhile.
    pub(crate) fn note_commands(&mut self, user: ActorId, ns: u64) {
        self.arrears.note_commands(user, ns);
    }

    /// The device has nothing to do: nobody has waited for it until now.
    pub(crate) fn note_rest(&mut self, now: Instant) {
        let begun = self.arrears.begun;
        self.arrears.rested = begun.map(|begun| now.saturating_duration_since(begun));
    }

    /// The user that is furthest behind at this place, if the next step of the model there has its rows alone, and it waits with
    /// all that it is likely to want.
    pub(crate) fn next_kept_for(&self, place: usize, latest: Latest) -> Option<ActorId> {
        let Latest { user, is_very_late } = latest;
        let n_rows = self.arrears.users.get(&user).map_or(0, |pace| pace.n_rows);
        let wait = || self.queue.len_of(Lane::of(place, Class::Decode), user) >= n_rows.max(1);
        (is_very_late && wait()).then_some(user)
    }

    /// Whether steps would be kept for a user if it waited.
    pub(crate) fn is_very_late(&self, user: ActorId) -> bool {
        self.arrears.latest(|other| other == user).is_some_and(|latest| latest.is_very_late)
    }

    /// The user that is furthest behind among those who wait for the model at this place.
    pub(crate) fn latest_at(&self, place: usize) -> Option<Latest> {
        let lanes = [Class::Decode, Class::Prompt].map(|class| Lane::of(place, class));
        self.arrears.latest(|user| lanes.iter().any(|&lane| self.queue.len_of(lane, user) > 0))
    }
}

impl Alone {
    /// The same for another number of rows: as much longer as such a step is, which may take longer than it did then if others
    /// keep the machine busy by now, as both do.
    fn ns_of(&self, n_rows: usize, expected_ns: &impl Fn(usize) -> Option<u64>) -> f64 {
        match (n_rows == self.n_rows, expected_ns(n_rows), expected_ns(self.n_rows)) {
            (false, Some(ns), Some(of_own)) => self.ns * ns as f64 / of_own.max(1) as f64,
            _ => self.ns,
        }
    }

    fn learn(&mut self, ns: f64, shares_device: bool) {
        let weight = match shares_device && self.is_certain {
            false => WEIGHT,
            true if ns < self.ns => WEIGHT_OF_SHORTER,
            true => 0.0,
        };
        self.ns += weight * (ns - self.ns);
    }
}

/// Who shares the device.
#[derive(Clone, Copy, Debug)]
struct Active {
    shares: f64,
    n_users: f64,
}

impl Active {
    /// A user with this share is due one part in how many.
    fn n_parts(self, share: f64) -> f64 {
        self.shares / share
    }

    /// How long a step of a user with this share may take, in what it takes alone.
    fn n_steps_due(self, share: f64) -> f64 {
        (PART_OF_DUE * self.n_parts(share)).max(1.0)
    }

    /// Whether a user with this share can be late: others share the device, and have as much.
    fn keeps_pace(self, share: f64) -> bool {
        self.n_users > 1.0 && share * self.n_users == self.shares
    }
}

fn ns_between(since: Duration, until: Duration) -> f64 {
    until.saturating_sub(since).as_nanos() as f64
}

impl Arrears {
    /// A user asks something of the engine.
    pub(crate) fn note_active(&mut self, owner: &Owner) {
        let share = f64::from(owner.account.priority().share.get());
        let active = self.n_open_steps;
        let new = || Pace {
            share,
            active,
            row: None,
            served: None,
            waits_since: None,
            alone_ns: None,
            alone: None,
            rides: (0, 0),
            late_ns: 0.0,
            left_ns: 0.0,
            n_rows: 0,
            commands_ns: 0.0,
        };
        let pace = self.users.entry(owner.actor).or_insert_with(new);
        (pace.share, pace.active) = (share, active);
    }

    /// A row of a user's is planned.
    pub(crate) fn note_row(
        &mut self,
        step: u64,
        owner: &Owner,
        n_decode_rows: usize,
        riders: &mut Vec<Rider>,
    ) {
        let user = owner.actor;
        let idx = match riders.last() {
            Some(last) if last.user == user => riders.len() - 1,
            _ => {
                self.note_active(owner);
                let pace = self.users.get_mut(&user).expect("it is active");
                match pace.rides {
                    (of, idx) if of == step && riders.get(idx).is_some_and(|rider| rider.user == user) => idx,
                    _ => {
                        pace.rides = (step, riders.len());
                        riders.push(Rider { user, n_decode_rows: 0 });
                        riders.len() - 1
                    }
                }
            }
        };
        riders[idx].n_decode_rows += n_decode_rows;
    }

    fn active(&self) -> Active {
        let is_active = |pace: &&Pace| self.n_open_steps - pace.active <= N_STEPS_ACTIVE;
        let active = self.users.values().filter(is_active);
        active.fold(Active { shares: 0.0, n_users: 0.0 }, |active, pace| Active {
            shares: active.shares + pace.share,
            n_users: active.n_users + 1.0,
        })
    }

    /// A step was taken in; `expected_ns` is how long one of so many decode rows takes, if that is known.
    pub(crate) fn note_step(&mut self, ride: Ride<'_>, expected_ns: impl Fn(usize) -> Option<u64>) {
        let Ride { now, elapsed, riders, latest, is_kept } = ride;
        self.n_steps += 1;
        self.n_open_steps += u64::from(!is_kept);
        let (n_steps, n_open_steps) = (self.n_steps, self.n_open_steps);
        for rider in riders {
            if let Some(pace) = self.users.get_mut(&rider.user) {
                pace.active = n_open_steps;
            }
        }
        let active = self.active();
        if let Some(last) = self.last.replace(now) {
            match latest.filter(|_| is_kept) {
                Some(Latest { user, .. }) => {
                    let of_commands: f64 = self.users.values().map(|pace| pace.commands_ns).sum();
                    let kept = Some((user, self.kept_ns(user, elapsed)));
                    self.note_time(elapsed.as_nanos() as f64 + of_commands, kept, active);
                }
                // While it rested, nobody had it.
                None => self.note_time(
                    ns_between(self.rested.map_or(last, |rested| rested.max(last)), now),
                    None,
                    active,
                ),
            }
        }
        for rider in riders {
            let Some(pace) = self.users.get_mut(&rider.user) else { continue };
            let since = pace.served.replace(now).max(pace.waits_since);
            if rider.n_decode_rows == 0 {
                continue;
            }
            let n_rows = rider.n_decode_rows;
            pace.n_rows = n_rows.max(pace.n_rows.saturating_sub(1));
            // From its first row on, also after a pause: steps that were kept for it before have put it ahead in virtual time, by
            // which alone it would wait until all others have come as far.
            let alone_ns = |alone: Option<Alone>| match alone {
                Some(alone) => Some(alone.ns_of(n_rows, &expected_ns)),
                None => expected_ns(n_rows).map(|ns| ns as f64),
            };
            let Some((before, step)) = pace.row.replace((now, n_steps)) else {
                pace.alone_ns = alone_ns(pace.alone);
                continue;
            };
            let since = since.map_or(before, |since| since.max(before));
            if since.saturating_sub(before) > PAUSE {
                (pace.late_ns, pace.alone_ns) = (0.0, alone_ns(pace.alone));
                continue;
            }
            let ns = ns_between(since, now).max(1.0);
            let n_parts = active.n_parts(pace.share);
            let shares_device = n_parts > 1.0;
            if riders.len() == 1 && step + 1 == n_steps {
                match &mut pace.alone {
                    Some(alone) if alone.is_certain || shares_device => {
                        let of_others = alone.ns_of(n_rows, &expected_ns);
                        alone.learn(ns * alone.ns / of_others, shares_device);
                    }
                    alone => *alone = Some(Alone { ns, n_rows, is_certain: !shares_device }),
                }
            }
            pace.alone_ns = alone_ns(pace.alone);
            pace.late_ns = match pace.alone_ns.filter(|_| active.keeps_pace(pace.share)) {
                Some(alone_ns) => {
                    // It had the device for its commands too.
                    let had_ns = alone_ns + std::mem::take(&mut pace.commands_ns);
                    (pace.late_ns + ns - active.n_steps_due(pace.share) * had_ns).max(0.0)
                }
                None => 0.0,
            };
        }
        for pace in self.users.values_mut().filter(|pace| pace.commands_ns > 0.0) {
            let due_ns = active.n_steps_due(pace.share) * std::mem::take(&mut pace.commands_ns);
            pace.late_ns = (pace.late_ns - due_ns).max(0.0);
        }
        let most = |of: fn(&Pace) -> f64| self.users.values().map(of).fold(0.0, f64::max);
        let forgotten =
            most(|pace| pace.late_ns) - N_STEPS_LATE_MAX * most(|pace| pace.alone_ns.unwrap_or(0.0));
        if forgotten > 0.0 {
            // Who is later than whom stays.
            let users = self.users.values_mut();
            users.for_each(|pace| pace.late_ns = (pace.late_ns - forgotten).max(0.0));
        }
        if n_steps.is_multiple_of(N_STEPS_LOOK) {
            self.users.retain(|_, pace| {
                n_open_steps - pace.active <= N_STEPS_ACTIVE
                    || pace.row.is_some_and(|(row, _)| now.saturating_sub(row) <= FORGOTTEN_AFTER)
            });
        }
    }

    /// How much of a step that was kept for a user it has had, with its commands. What others asked of the engine meanwhile is
    /// theirs, and how much longer it took beside them.
    fn kept_ns(&self, user: ActorId, elapsed: Duration) -> f64 {
        let ns = elapsed.as_nanos() as f64;
        self.users
            .get(&user)
            .map_or(ns, |pace| pace.alone_ns.unwrap_or(ns).clamp(ns / N_TIMES_LONGER, ns) + pace.commands_ns)
    }

    /// So much time has passed, of which somebody has had a part in a step that was kept for it. Each user is due as much of the
    /// device as it is for what the others have had of the rest, but by how much longer than alone its own step was: otherwise
    /// steps that last twice as long would cost nothing. Open steps have one part in as many as there are users.
    fn note_time(&mut self, ns: f64, kept: Option<(ActorId, f64)>, active: Active) {
        let n_others = (active.n_users - 1.0).max(0.0);
        self.left_ns = match kept {
            Some(_) => self.left_ns - ns,
            None => (self.left_ns + n_others * ns).min(KEPT_NS_MAX.max(n_others * ns).max(self.left_ns)),
        };
        let n_open_steps = self.n_open_steps;
        for (&user, pace) in &mut self.users {
            let n_parts_of_others = active.n_parts(pace.share) - 1.0;
            if n_open_steps - pace.active > N_STEPS_ACTIVE || n_parts_of_others <= 0.0 {
                continue;
            }
            let (own_ns, of_others) = match kept {
                Some((of, own_ns)) if of == user => (own_ns, 0.0),
                _ => (0.0, (ns - pace.commands_ns).max(0.0)),
            };
            let given = of_others / n_parts_of_others;
            let most = KEPT_NS_MAX.max(given).max(pace.left_ns);
            pace.left_ns = (pace.left_ns - own_ns + given).clamp(-KEPT_NS_MAX, most);
        }
    }

    /// What a user's commands took of the engine, and so of the device.
    fn note_commands(&mut self, user: ActorId, ns: u64) {
        if let Some(pace) = self.users.get_mut(&user) {
            pace.commands_ns += ns as f64;
        }
    }

    /// Something of a user waits that had nothing of its kind.
    pub(crate) fn note_waits(&mut self, user: ActorId) {
        if let Some(pace) = self.users.get_mut(&user) {
            // What came while a step was under way may have come at its beginning.
            (pace.waits_since, pace.active) = (self.last.max(self.rested), self.n_open_steps);
        }
    }

    /// How late a user is, with the row that it waits for, when the last step was taken in: in time, and in its steps.
    fn late(&self, pace: &Pace, active: Active) -> (f64, f64) {
        let Some(alone_ns) = pace.alone_ns.map(|ns| ns.max(1.0)) else { return (0.0, 0.0) };
        let mut late_ns = pace.late_ns;
        if let (Some((row, _)), Some(now)) = (pace.row, self.last) {
            let since = pace.waits_since.max(pace.served).map_or(row, |since| since.max(row));
            let late_with_this = ns_between(since, now) - active.n_steps_due(pace.share) * alone_ns;
            late_ns += late_with_this.max(0.0);
        }
        (late_ns, late_ns / alone_ns)
    }

    /// Whether more than one user has decoded lately.
    pub(crate) fn do_several_decode(&self) -> bool {
        let decodes = |pace: &&Pace| match (pace.row, self.last) {
            (Some((row, _)), Some(last)) => last.saturating_sub(row) <= PAUSE_OF_DECODING,
            _ => false,
        };
        self.users.values().filter(decodes).nth(1).is_some()
    }

    /// The user that is furthest behind, if one is. `waits` says who could have a row.
    pub(crate) fn latest(&self, waits: impl Fn(ActorId) -> bool) -> Option<Latest> {
        let active = self.active();
        let keeps_pace = |pace: &Pace| active.keeps_pace(pace.share);
        let mut latest: Option<((bool, f64), Latest)> = None;
        for (&user, pace) in self.users.iter().filter(|(_, pace)| keeps_pace(pace)) {
            let (late_ns, n_steps) = self.late(pace, active);
            let late = (n_steps > N_STEPS_VERY_LATE, late_ns);
            if n_steps > N_STEPS_LATE && latest.is_none_or(|(most, _)| late > most) && waits(user) {
                let is_very_late = late.0 && pace.left_ns.min(self.left_ns) > -KEPT_NS_MAX;
                latest = Some((late, Latest { user, is_very_late }));
            }
        }
        latest.map(|(_, latest)| latest)
    }
}

#[cfg(test)]
mod tests;
