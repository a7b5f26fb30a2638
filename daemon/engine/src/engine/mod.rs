//! The engine: a value that takes commands and answers them, and the thread that drives it and owns its backend.
//! Everything else sends it messages.

mod core;
mod thread;

use std::sync::Arc;
use std::thread::JoinHandle;

use self::core::Core;
use crate::backend::{Backend, Limits};
use crate::handle::{EngineHandle, Message};
use crate::kv::PrefixScope;
use crate::model::Model;
use crate::port::Port;
use crate::scheduler::{Scheduler, SchedulerSettings};

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
    /// How what guests ask, and are answered, travels.
    pub port: Port,
}

impl Default for EngineSettings {
    fn default() -> Self {
        Self {
            prefix_scope: PrefixScope::default(),
            n_step_tokens: 512,
            latency_multiple: 1.6,
            port: Port::Direct,
        }
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
        let limits = Limits { n_pages: backend.n_pages(), ..backend.limits().clone() };
        let port = settings.port;
        let settings = SchedulerSettings {
            model_fingerprint: model.fingerprint,
            prefix_scope: settings.prefix_scope,
            n_step_tokens: settings.n_step_tokens,
            latency_multiple: settings.latency_multiple,
        };
        let scheduler = Scheduler::new(limits.clone(), settings);
        let name = model.name.clone();
        let (handle, served) =
            EngineHandle::new(model, limits, backend.weights(), backend.device().to_owned(), port);
        let core = Core::new(scheduler, backend);
        let thread = std::thread::Builder::new()
            .name("engine".to_owned())
            .spawn(move || thread::live(&name, core, served, port))
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
        let _ = self.handle.post_message(Message::Shutdown);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the engine thread panicked");
        }
    }
}
