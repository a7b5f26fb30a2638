//! `contexts`

use std::sync::Arc;

use tokio::sync::{Mutex, OwnedMutexGuard};
use trellis_engine::{Ask, Context, EngineError, ModelHandle};
use wasmtime::component::Resource;

use super::convert::{count, invalid};
use super::types::{GuestContext, GuestModel, HostError};
use crate::guest::bindings::trellis::host::contexts::{Host, HostContext, Positions, SteeringVector};
use crate::guest::bindings::trellis::host::models::SpecialTokens;
use crate::guest::bindings::trellis::host::types::{Error as ApiError, UnknownName};
use crate::guest::store::GuestState;
use crate::models::names;

/// The longest name of a saved context.
const NAME_BYTES_MAX: usize = 256;

impl GuestState {
    /// A context of the guest, for as long as a call takes.
    pub(super) fn lock_context(
        &self,
        context: &Resource<GuestContext>,
    ) -> Result<OwnedMutexGuard<Context>, HostError> {
        Ok(lock(&self.table.get(context)?.cell))
    }

    /// Why a guest does not get a context of a model.
    fn refusal(&self, model: &ModelHandle, error: EngineError) -> HostError {
        if !matches!(error, EngineError::Unloaded) {
            return error.into();
        }
        let name = &model.model().name;
        self.models.note_refused(name);
        if model.is_unloaded() {
            return error.into();
        }
        let known = names(&self.models.now());
        ApiError::ModelLeaving(UnknownName { name: name.clone(), known }).into()
    }
}

/// Locks a context that no other call can hold.
pub(super) fn lock(cell: &Arc<Mutex<Context>>) -> OwnedMutexGuard<Context> {
    cell.clone().try_lock_owned().expect("a guest is in one host call at a time")
}

fn check_name(name: &str) -> Result<(), HostError> {
    if name.is_empty() || name.len() > NAME_BYTES_MAX {
        return Err(invalid("name", name, format!("1 to {NAME_BYTES_MAX} bytes")));
    }
    Ok(())
}

impl Host for GuestState {
    async fn forget(&mut self, name: String) -> Result<(), HostError> {
        check_name(&name)?;
        let (mut was_there, mut is_asked) = (false, false);
        for model in self.models.now() {
            match model.forget(&self.owner, &name).await {
                Ok(()) => (was_there, is_asked) = (true, true),
                Err(EngineError::NotSaved { .. }) => is_asked = true,
                // With a model goes all that was saved of it in memory; what is on disk, of all models, is any other's to forget.
                Err(EngineError::Unloaded | EngineError::Failed(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        if !is_asked {
            was_there = self.models.forget(&name).await;
        }
        if was_there { Ok(()) } else { Err(ApiError::NotFound(name).into()) }
    }
}

impl HostContext for GuestState {
    async fn create(&mut self, model: Resource<GuestModel>) -> Result<Resource<GuestContext>, HostError> {
        let model = self.table.get(&model)?.model.clone();
        let context = Context::create(&model, self.owner.clone()).await;
        let context = context.map_err(|error| self.refusal(&model, error))?;
        self.give(GuestContext::new(context, model))
    }

    async fn open(
        &mut self,
        model: Resource<GuestModel>,
        name: String,
    ) -> Result<Resource<GuestContext>, HostError> {
        check_name(&name)?;
        let model = self.table.get(&model)?.model.clone();
        let context = Context::open(&model, self.owner.clone(), &name).await;
        let context = context.map_err(|error| self.refusal(&model, error))?;
        self.give(GuestContext::new(context, model))
    }

    async fn append(&mut self, context: Resource<GuestContext>, tokens: Vec<u32>) -> Result<(), HostError> {
        Ok(self.lock_context(&context)?.append(&tokens).await?)
    }

    async fn append_text(
        &mut self,
        context: Resource<GuestContext>,
        text: String,
        special: SpecialTokens,
    ) -> Result<u32, HostError> {
        let mut context = self.lock_context(&context)?;
        let tokens = self.encode_text(context.model().clone(), text, special).await?;
        context.append(&tokens).await?;
        Ok(count(tokens.len()))
    }

    async fn fork(&mut self, context: Resource<GuestContext>) -> Result<Resource<GuestContext>, HostError> {
        let model = self.table.get(&context)?.model.clone();
        let child = self.lock_context(&context)?.fork().await?;
        self.give(GuestContext::new(child, model))
    }

    async fn truncate(&mut self, context: Resource<GuestContext>, n_tokens: u32) -> Result<(), HostError> {
        Ok(self.lock_context(&context)?.truncate(n_tokens as usize).await?)
    }

    async fn evict(
        &mut self,
        context: Resource<GuestContext>,
        start: u32,
        end: u32,
        positions: Positions,
    ) -> Result<(), HostError> {
        let positions = match positions {
            Positions::Keep => trellis_engine::Positions::Keep,
            Positions::CloseUp => trellis_engine::Positions::CloseUp,
        };
        Ok(self.lock_context(&context)?.evict(start as usize, end as usize, positions).await?)
    }

    async fn steer(
        &mut self,
        context: Resource<GuestContext>,
        vectors: Vec<SteeringVector>,
        start: u32,
    ) -> Result<(), HostError> {
        let vectors = vectors.into_iter().map(|SteeringVector { layer, values }| (layer as usize, values));
        Ok(self.lock_context(&context)?.steer(vectors.collect(), start as usize).await?)
    }

    fn length(&mut self, context: Resource<GuestContext>) -> wasmtime::Result<u32> {
        Ok(count(self.table.get(&context)?.lock().tokens().len()))
    }

    fn capacity(&mut self, context: Resource<GuestContext>) -> wasmtime::Result<u32> {
        Ok(count(self.table.get(&context)?.lock().capacity()))
    }

    fn tokens(
        &mut self,
        context: Resource<GuestContext>,
        start: u32,
        end: u32,
    ) -> wasmtime::Result<Vec<u32>> {
        let context = self.table.get(&context)?.lock();
        let end = (end as usize).min(context.tokens().len());
        Ok(context.tokens().copy_of((start as usize).min(end)..end))
    }

    fn reports(&mut self, context: Resource<GuestContext>) -> wasmtime::Result<Vec<f32>> {
        Ok(self.table.get(&context)?.lock().reports().to_vec())
    }

    async fn prefill(&mut self, context: Resource<GuestContext>) -> Result<(), HostError> {
        self.lock_context(&context)?.ask(Ask::Prefill).await?.answer().await?;
        Ok(())
    }

    async fn save(&mut self, context: Resource<GuestContext>, name: String) -> Result<(), HostError> {
        check_name(&name)?;
        Ok(self.lock_context(&context)?.save(&name).await?)
    }

    fn drop(&mut self, context: Resource<GuestContext>) -> wasmtime::Result<()> {
        self.table.delete(context)?;
        Ok(())
    }
}
