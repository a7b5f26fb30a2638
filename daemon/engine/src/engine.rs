//! The engine thread: owns the backend; everything else sends it messages.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use crate::backend::{Backend, BackendError, Collected, Damage};
use crate::batch::{self, Row};
use crate::command::Command;
use crate::error::{EngineError, EngineFailure};
use crate::handle::{EngineHandle, EngineState, Posted, Served};
use crate::kv::PrefixScope;
use crate::model::Model;
use crate::scheduler::{Flow, Move, Plan, Scheduler, SchedulerSettings};

/// So many steps that fail, with none between them that succeeds, are taken for a device that is lost.
const N_STEPS_FAILED_MAX: usize = 3;

/// A step waits for guests that ask again at once for this share of the step before, and for no longer than this.
const LINGER_SHARE: u32 = 100;
const LINGER_MAX: Duration = Duration::from_micros(100);

/// How an engine schedules.
#[derive(Clone, Debug)]
pub struct EngineSettings {
    /// Who may find whose prompts in the prefix cache.
    pub prefix_scope: PrefixScope,
    /// Tokens in one step at most. Longer steps compute prompts faster and make everybody's next token wait
    /// longer.
    pub n_step_tokens: usize,
    /// The latency target: how many times as long a step may last, while anybody decodes, as it would without prompts.
    /// At least 1.
    pub latency_multiple: f64,
}

impl Default for EngineSettings {
    fn default() -> Self {
        Self { prefix_scope: PrefixScope::default(), n_step_tokens: 512, latency_multiple: 1.6 }
    }
}

/// A running engine: one thread that owns one backend. Dropping it stops the thread after the step in hand.
#[derive(Debug)]
pub struct Engine {
    handle: EngineHandle,
    thread: Option<JoinHandle<()>>,
}

impl Engine {
    /// Starts the thread.
    ///
    /// # Panics
    /// The operating system cannot start a thread.
    #[must_use]
    pub fn start(model: Arc<Model>, backend: Box<dyn Backend>, settings: EngineSettings) -> Self {
        let limits = backend.limits().clone();
        let settings = SchedulerSettings {
            model_fingerprint: model.fingerprint,
            prefix_scope: settings.prefix_scope,
            n_step_tokens: settings.n_step_tokens,
            latency_multiple: settings.latency_multiple,
        };
        let scheduler = Scheduler::new(limits.clone(), settings);
        let name = model.name.clone();
        let (handle, served) =
            EngineHandle::new(model, limits, backend.weights(), backend.device().to_owned());
        let thread = std::thread::Builder::new()
            .name("engine".to_owned())
            .spawn(move || live(&name, scheduler, backend, served))
            .expect("a thread can be started");
        Self { handle, thread: Some(thread) }
    }

    /// A way to the engine.
    #[must_use]
    pub fn handle(&self) -> &EngineHandle {
        &self.handle
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // An engine that has stopped by itself no longer reads commands.
        let _ = self.handle.post_unbounded(Command::Shutdown);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the engine thread panicked");
        }
    }
}

/// The thread's whole life. However it ends, that is said before anything is let go of, so that whoever finds it gone
/// finds out why.
fn live(model: &str, mut scheduler: Scheduler, mut backend: Box<dyn Backend>, served: Served) {
    let Served { mut commands, state } = served;
    let ended = catch_unwind(AssertUnwindSafe(|| serve(&mut scheduler, backend.as_mut(), &mut commands)));
    let ended = match ended {
        Ok(Ok(())) => EngineState::Stopped,
        Ok(Err(failure)) => EngineState::Failed(failure),
        Err(panic) => EngineState::Failed(EngineFailure::Panicked { message: message(panic.as_ref()) }),
    };
    if let EngineState::Failed(error) = &ended {
        tracing::error!(model, device = backend.device(), %error, "the engine has failed");
    }
    state.send_replace(ended);
    scheduler.dissolve();
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic without a message").to_owned()
}

fn serve(
    scheduler: &mut Scheduler,
    backend: &mut dyn Backend,
    commands: &mut mpsc::UnboundedReceiver<Posted>,
) -> Result<(), EngineFailure> {
    let n_steps_max = backend.limits().n_steps_under_way;
    let mut under_way: VecDeque<Plan> = VecDeque::new();
    let mut failures = Failures::default();
    let mut rows = Vec::new();
    loop {
        // Only an idle engine waits.
        if under_way.is_empty() && !scheduler.has_work() {
            let Some(posted) = commands.blocking_recv() else { return Ok(()) };
            if scheduler.apply(posted.command) == Flow::Stop {
                return Ok(());
            }
        }
        if take_in(scheduler, commands) == Flow::Stop {
            return Ok(());
        }
        while under_way.len() < n_steps_max && scheduler.has_work() {
            let plan = scheduler.plan();
            if plan.is_empty() {
                break;
            }
            let mut n_moved = 0;
            match submit(scheduler, backend, &plan, &mut n_moved, &mut rows) {
                Ok(()) if plan.has_rows() => under_way.push_back(plan),
                Ok(()) => break,
                Err(error) => failures.note(scheduler, &plan, n_moved, error)?,
            }
            // The next step waits for guests that will have asked again when this one is done.
            if scheduler.has_returning_guests(under_way.back()) {
                break;
            }
        }
        let Some(plan) = under_way.pop_front() else { continue };
        match backend.collect() {
            Ok(Collected { outputs, elapsed }) => {
                failures = Failures::default();
                // Guests that the step before answered have asked again meanwhile, and are in time.
                if take_in(scheduler, commands) == Flow::Stop {
                    return Ok(());
                }
                scheduler.complete(plan, outputs, u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX));
                if under_way.is_empty() && linger(scheduler, commands, elapsed) == Flow::Stop {
                    return Ok(());
                }
            }
            Err(error) => failures.note(scheduler, &plan, plan.moves.len(), error)?,
        }
    }
}

/// Takes what has come in by now and no more: guests that send commands faster than they are carried out would keep
/// everybody from being computed.
fn take_in(scheduler: &mut Scheduler, commands: &mut mpsc::UnboundedReceiver<Posted>) -> Flow {
    for _ in 0..commands.len() {
        let Ok(posted) = commands.try_recv() else { break };
        if scheduler.apply(posted.command) == Flow::Stop {
            return Flow::Stop;
        }
    }
    Flow::Continue
}

/// Waits a moment for guests that were just answered and asked again at once the last times: theirs and everybody's
/// rows then ride in one step.
fn linger(scheduler: &mut Scheduler, commands: &mut mpsc::UnboundedReceiver<Posted>, step: Duration) -> Flow {
    let begun = Instant::now();
    let at_most = (step / LINGER_SHARE).min(LINGER_MAX);
    while scheduler.n_guests_awaited() > 0 && begun.elapsed() < at_most {
        match commands.try_recv() {
            Ok(posted) => {
                if scheduler.apply(posted.command) == Flow::Stop {
                    return Flow::Stop;
                }
            }
            Err(_) => std::hint::spin_loop(),
        }
    }
    scheduler.forget_late_guests();
    Flow::Continue
}

/// Puts a plan into effect; `n_moved` counts the pages whose moves the backend has taken, `rows` is memory for its rows.
fn submit(
    scheduler: &Scheduler,
    backend: &mut dyn Backend,
    plan: &Plan,
    n_moved: &mut usize,
    rows: &mut Vec<Row<'static>>,
) -> Result<(), BackendError> {
    // Moves of one kind that follow each other go to the device together.
    for moves in plan.moves.chunk_by(|a, b| matches!(a, Move::Out(..)) == matches!(b, Move::Out(..))) {
        let out: Vec<_> =
            moves.iter().filter_map(|m| if let Move::Out(a, b) = *m { Some((a, b)) } else { None }).collect();
        let back: Vec<_> =
            moves.iter().filter_map(|m| if let Move::In(a, b) = *m { Some((a, b)) } else { None }).collect();
        if !out.is_empty() {
            backend.swap_out(&out)?;
        }
        if !back.is_empty() {
            backend.swap_in(&back)?;
        }
        *n_moved += moves.len();
    }
    if plan.has_rows() {
        let batch = scheduler.batch(plan, std::mem::take(rows));
        let submitted = backend.submit(&batch);
        *rows = batch::reused(batch.rows);
        submitted?;
    }
    Ok(())
}

/// Steps that failed since one succeeded.
#[derive(Debug, Default)]
struct Failures {
    n_steps: usize,
}

impl Failures {
    /// Takes a failed step back, or ends the engine.
    fn note(
        &mut self,
        scheduler: &mut Scheduler,
        plan: &Plan,
        n_moved: usize,
        error: BackendError,
    ) -> Result<(), EngineFailure> {
        if error.damage() == Damage::Device {
            return Err(EngineFailure::Device(error));
        }
        self.n_steps += 1;
        if self.n_steps == N_STEPS_FAILED_MAX {
            return Err(EngineFailure::Steps { n_steps: self.n_steps, last: error });
        }
        tracing::warn!(%error, n_rows = plan.n_rows(), "a step failed; the engine goes on");
        scheduler.fail_step(plan, n_moved, &EngineError::Step(error));
        Ok(())
    }
}
