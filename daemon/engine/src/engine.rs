//! The engine thread: owns the backend; everything else sends it messages.

use std::sync::Arc;
use std::thread::JoinHandle;

use tokio::sync::mpsc;

use crate::backend::{Backend, BackendError};
use crate::command::Command;
use crate::error::EngineError;
use crate::handle::{EngineHandle, Posted};
use crate::model::Model;
use crate::prefix::PrefixScope;
use crate::scheduler::{Flow, Move, Plan, Scheduler, SchedulerSettings};

/// How an engine schedules.
#[derive(Clone, Debug)]
pub struct EngineSettings {
    /// Who may find whose prompts in the prefix cache.
    pub prefix_scope: PrefixScope,
    /// Tokens in one step at most. Longer steps compute prompts faster and make everybody's next token wait
    /// longer.
    pub n_step_tokens: usize,
}

impl Default for EngineSettings {
    fn default() -> Self {
        Self { prefix_scope: PrefixScope::default(), n_step_tokens: 512 }
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
        };
        let scheduler = Scheduler::new(limits.clone(), settings);
        let (handle, commands) =
            EngineHandle::new(model, limits, backend.weights(), backend.device().to_owned());
        let thread = std::thread::Builder::new()
            .name("engine".to_owned())
            .spawn(move || serve(scheduler, backend, commands))
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

fn serve(
    mut scheduler: Scheduler,
    mut backend: Box<dyn Backend>,
    mut commands: mpsc::UnboundedReceiver<Posted>,
) {
    loop {
        // Only an idle engine waits.
        if !scheduler.has_work() {
            let Some(posted) = commands.blocking_recv() else { return };
            if scheduler.apply(posted.command) == Flow::Stop {
                return;
            }
        }
        // What has come in by now is taken before the next step, and no more: guests that send commands faster than
        // they are carried out would keep everybody from being computed.
        for _ in 0..commands.len() {
            let Ok(posted) = commands.try_recv() else { break };
            if scheduler.apply(posted.command) == Flow::Stop {
                return;
            }
        }
        let plan = scheduler.plan();
        if let Err(error) = execute(&mut scheduler, backend.as_mut(), plan) {
            tracing::error!(%error, "the engine stops");
            scheduler.fail_all(&EngineError::Backend(error));
            return;
        }
    }
}

fn execute(scheduler: &mut Scheduler, backend: &mut dyn Backend, plan: Plan) -> Result<(), BackendError> {
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
    }
    if plan.has_rows() {
        let outputs = backend.forward(&scheduler.batch(&plan))?;
        scheduler.complete(plan, outputs);
    }
    Ok(())
}
