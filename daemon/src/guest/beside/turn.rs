//! The turn of a piece of work that is under way, and the next one where it has had its time.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use trellis_engine::model::GivenUp;

use super::super::cpu::CpuClock;
use super::super::rooms::Need;
use super::{NO_ROWS, Place, Running, Waiting};
use crate::thread_time::thread_time;

/// Processor time after which a piece lets others have their turn.
const TURN: Duration = Duration::from_millis(4);

/// How often a piece looks whether its guest is still there.
const LOOK: Duration = Duration::from_millis(1);

/// Pieces of one user that wait for their next turn, each with a thread and what it has done so far. Beside so many a piece goes on.
const N_PAUSED_MAX: usize = 32;

/// What a piece has while it is under way. The room is given back before the place.
pub(super) struct Held {
    running: Running,
    place: Place,
    looked: Instant,
    /// Processor time of its thread that is charged.
    charged: Duration,
}

/// What the yield points of a piece come to.
pub(super) struct Turn {
    /// None once it has ended.
    held: Mutex<Option<Held>>,
    clock: Arc<CpuClock>,
    cpu_max: Duration,
    /// Nobody waits for it any more.
    gone: CancellationToken,
    runtime: Handle,
}

impl Held {
    pub(super) fn new(running: Running, place: Place) -> Self {
        Self { running, place, looked: Instant::now(), charged: Duration::ZERO }
    }

    /// Charges what its thread has used up to now.
    fn charge(&mut self, used: Duration) {
        self.place.charge(used.saturating_sub(self.charged));
        self.charged = used;
    }

    /// Stands in line again, with its room, until it comes next: at once if nobody comes before it.
    fn give_way(&mut self, gone: &CancellationToken, runtime: &Handle) -> Result<(), GivenUp> {
        let beside = self.running.beside.clone();
        let (begin, mut turn) = oneshot::channel();
        let seat = self.place.seat.as_ref().expect("it is given back at the end");
        {
            let mut pieces = beside.lock();
            let user = pieces.user(self.running.actor);
            if user.n_paused == N_PAUSED_MAX {
                return Ok(());
            }
            let need = Need::NOTHING;
            user.waiting.push(seat, need.kind().lane(), Waiting { begin, need }, NO_ROWS);
            user.n_waiting += 1;
            user.n_paused += 1;
            user.n_running -= 1;
            pieces.n_running -= 1;
            self.running.is_paused = true;
        }
        beside.serve();
        let next = match turn.try_recv() {
            Ok(next) => Some(next),
            Err(_) => runtime.block_on(async {
                tokio::select! {
                    biased;
                    () = gone.cancelled() => None,
                    next = turn => next.ok(),
                }
            }),
        };
        beside.lock().user(self.running.actor).n_paused -= 1;
        let Some(mut next) = next else { return Err(GivenUp) };
        // From here on it is counted by what it had before.
        next.is_back = true;
        self.running.is_paused = false;
        Ok(())
    }
}

impl Turn {
    pub(super) fn new(
        held: Held,
        clock: Arc<CpuClock>,
        cpu_max: Duration,
        gone: CancellationToken,
        runtime: Handle,
    ) -> Self {
        Self { held: Mutex::new(Some(held)), clock, cpu_max, gone, runtime }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its thread begins.
    pub(super) fn begin(&self) {
        if let Some(held) = &mut *self.lock() {
            (held.looked, held.charged) = (Instant::now(), thread_time());
        }
    }

    /// Its thread has come to a yield point.
    pub(super) fn reach(&self) -> Result<(), GivenUp> {
        let mut held = self.lock();
        let Some(held) = &mut *held else { return Ok(()) };
        if held.looked.elapsed() < LOOK {
            return Ok(());
        }
        held.looked = Instant::now();
        if self.gone.is_cancelled() || self.clock.used_now() > self.cpu_max {
            return Err(GivenUp);
        }
        let used = thread_time();
        if used.saturating_sub(held.charged) < TURN {
            return Ok(());
        }
        held.charge(used);
        held.give_way(&self.gone, &self.runtime)
    }

    /// Its thread ends. What it had is given back when it is dropped.
    pub(super) fn end(&self) -> Option<Held> {
        let mut held = self.lock().take();
        if let Some(held) = &mut held {
            held.charge(thread_time());
        }
        held
    }
}
