//! Scenes by their seeds: one, or many on several threads.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::time::Duration;

use super::mutation::Mutation;
use super::notes::{Fault, Notes, Tally};
use super::scene::Scene;
use super::world;

thread_local! {
    static N_PANICS: Cell<u64> = const { Cell::new(0) };
}

/// What came of one scene.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The digest of the trace.
    pub digest: blake3::Hash,
    /// Events in it.
    pub n_events: u64,
    /// Virtual time.
    pub elapsed: Duration,
    /// Faults by kind.
    pub tally: Tally,
    /// The first thing that must not be.
    pub violation: Option<String>,
    /// The trace, if it was wanted.
    pub lines: Vec<String>,
}

/// Plays the scene of a seed, with a mistake of the simulated parts if one is named.
///
/// # Panics
/// There is no runtime to be had.
#[must_use]
pub fn run(seed: u64, mutation: Option<Mutation>, keeps_lines: bool) -> Outcome {
    count_panics();
    let n_panics = N_PANICS.get();
    let scene = Scene::of(seed);
    let head = keeps_lines.then(|| format!("{scene:#?}\n"));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime of one thread");
    let notes = runtime.block_on(async { Arc::new(Notes::new(mutation, keeps_lines)) });
    let played = catch_unwind(AssertUnwindSafe(|| runtime.block_on(world::play(seed, scene, notes.clone()))));
    let elapsed = runtime.block_on(async { notes.elapsed() });
    drop(runtime);
    let mut violation = notes.first_violation();
    if let Err(panic) = played {
        violation = violation.or_else(|| Some(format!("a panic: {}", message(panic.as_ref()))));
    }
    if N_PANICS.get() > n_panics {
        violation = violation.or_else(|| Some("a panic in a task".to_owned()));
    }
    let (digest, n_events, lines) = notes.finish();
    let lines = head.into_iter().chain(lines).collect();
    Outcome { digest, n_events, elapsed, tally: notes.tally(), violation, lines }
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("without a message").to_owned()
}

/// Has panics counted by thread: a runtime keeps those of its tasks.
fn count_panics() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            N_PANICS.set(N_PANICS.get() + 1);
            before(panic);
        }));
    });
}

/// What came of many scenes.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// Scenes.
    pub n_seeds: u64,
    /// Events in their traces.
    pub n_events: u64,
    /// Virtual time of all of them.
    pub elapsed: Duration,
    /// That of the longest.
    pub longest: Duration,
    /// Of the digests of all traces, whatever the order in which scenes were played.
    pub digest: u64,
    /// Faults by kind.
    pub tally: Tally,
    /// Seeds in whose scenes something must not be, in their order.
    pub failures: Vec<(u64, String)>,
}

impl Summary {
    fn add(&mut self, seed: u64, outcome: Outcome) {
        self.n_seeds += 1;
        self.n_events += outcome.n_events;
        self.elapsed += outcome.elapsed;
        self.longest = self.longest.max(outcome.elapsed);
        let of_seed =
            blake3::Hasher::new().update(&seed.to_le_bytes()).update(outcome.digest.as_bytes()).finalize();
        self.digest ^= u64::from_le_bytes(of_seed.as_bytes()[..8].try_into().expect("there are eight"));
        self.tally.iter_mut().zip(outcome.tally).for_each(|(sum, n)| *sum += n);
        self.failures.extend(outcome.violation.map(|violation| (seed, violation)));
    }

    /// Faults with their names.
    pub fn faults(&self) -> impl Iterator<Item = (&'static str, u64)> {
        Fault::ALL.iter().map(|fault| (fault.name(), self.tally[*fault as usize]))
    }
}

/// Plays the scenes of these seeds on so many threads, up to so many failures; tells after each scene what has come of all so
/// far.
///
/// # Panics
/// A thread panics beside its scenes.
pub fn run_all(
    seeds: std::ops::Range<u64>,
    n_threads: usize,
    n_failures_max: usize,
    mutation: Option<Mutation>,
    progress: impl Fn(&Summary) + Sync,
) -> Summary {
    let (next, is_over) = (AtomicU64::new(seeds.start), AtomicBool::new(false));
    let summary = Mutex::new(Summary::default());
    std::thread::scope(|scope| {
        for _ in 0..n_threads.max(1) {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end {
                        break;
                    }
                    let outcome = run(seed, mutation, false);
                    let mut summary = summary.lock().unwrap_or_else(PoisonError::into_inner);
                    summary.add(seed, outcome);
                    if summary.failures.len() >= n_failures_max {
                        is_over.store(true, Ordering::Relaxed);
                    }
                    progress(&summary);
                }
            });
        }
    });
    let mut summary = summary.into_inner().unwrap_or_else(PoisonError::into_inner);
    summary.failures.sort();
    summary
}
