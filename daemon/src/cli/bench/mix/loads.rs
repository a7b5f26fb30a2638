//! A model that is loaded, used and unloaded, again and again, beside the one that is measured.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use trellis_client::Client;
use trellis_engine::{Context, MaskSource, ModelHandle, Pull, RunKey, RunSettings};

use super::load::Loads;
use super::member::Member;
use crate::cli::bench::{BenchError, engine};
use crate::cli::error::CliError;
use crate::daemon::Daemon;

/// The client that loads and unloads.
#[derive(Clone)]
pub(super) struct Operator {
    client: Client,
    daemon: Arc<Daemon>,
    /// The model that is measured, and stays.
    measured: ModelHandle,
}

impl Operator {
    /// # Errors
    /// The daemon takes no client.
    pub(super) async fn new(daemon: &Arc<Daemon>, measured: ModelHandle) -> Result<Self, CliError> {
        Ok(Self { client: daemon.connect().await?, daemon: daemon.clone(), measured })
    }

    /// Loads a model that stays as long as the daemon.
    pub(super) async fn load_second(&self, name: &str) -> Result<ModelHandle, CliError> {
        self.client.load_model(name, None, |_, _| {}).await?;
        Ok(self.other().ok_or(BenchError::NoOtherModel)?)
    }

    fn other(&self) -> Option<ModelHandle> {
        let models = self.daemon.service().host().models();
        models.iter().find(|model| !model.is_same(&self.measured)).cloned()
    }

    /// Unloads what the members have left.
    pub(super) async fn end(&self) -> Result<(), CliError> {
        // A load that was given up is taken back by the daemon.
        while let Some(other) = self.other() {
            let _ = self.client.unload_model(&other.model().name, Some(Duration::ZERO)).await;
        }
        Ok(())
    }

    /// Loads the model, decodes with it, and unloads it, without end. What is timed is from asking for the model to its
    /// first token.
    pub(super) async fn run(self, mut member: Member, load: Loads) -> Result<Infallible, CliError> {
        member.seat.wait_for_all().await;
        loop {
            let begun = Instant::now();
            self.client.load_model(&load.model, None, |_, _| {}).await?;
            let other = self.other().ok_or(BenchError::NoOtherModel)?;
            member.model = other.clone();
            decode(&member, load.n_tokens, || member.seat.marks.done_since(begun)).await?;
            self.client.unload_model(&other.model().name, Some(Duration::ZERO)).await?;
        }
    }
}

async fn decode(member: &Member, n_tokens: usize, at_first: impl FnOnce()) -> Result<(), BenchError> {
    let mut context = Context::create(&member.model, member.owner.clone()).await?;
    context.append(&engine::unseen(&member.model, member.n_prompt, member.run)).await?;
    let settings = || RunSettings {
        sampler: Arc::new(trellis_engine::sampling::Sampler::greedy()),
        stop_tokens: [].into(),
        n_tokens_max: Some(n_tokens),
        ahead: trellis_engine::Ahead::Adaptive,
        masks: MaskSource::Sampler,
    };
    let mut at_first = Some(at_first);
    while let Pull::Token(_) = context.pull(RunKey(0), settings).await? {
        if let Some(at_first) = at_first.take() {
            at_first();
        }
    }
    Ok(())
}
