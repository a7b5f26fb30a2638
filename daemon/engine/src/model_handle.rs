//! A loaded model, as guests and the daemon find it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use tokio::sync::{oneshot, watch};

use crate::account::Owner;
use crate::backend::{Backend, Limits, WeightsInfo};
use crate::command::{ContextId, ModelId, N_ATTENTION_TOKENS_MAX, Operation};
use crate::completion::{CallerId, Done, Tag};
use crate::constraint::{ConstraintError, Vocabulary};
use crate::error::{EngineError, EngineFailure};
use crate::handle::{Caller, EngineState, Link, Message, Room};
use crate::mask_threads::MaskThreads;
use crate::model::Model;
use crate::remote::ModelFacts;
use crate::sampling::Operator;
use crate::stats::EngineStats;

/// A way to one model of an engine. Cheap to clone.
#[derive(Clone, Debug)]
pub struct ModelHandle(Arc<Loaded>);

#[derive(Debug)]
struct Loaded {
    engine: Arc<Link>,
    id: ModelId,
    model: Arc<Model>,
    limits: Limits,
    weights: WeightsInfo,
    device: String,
    /// What stands in front of everybody's samplers.
    operator: Option<Arc<Operator>>,
    next_context: AtomicU64,
    /// What constraints need of its tokens, once one was compiled.
    vocabulary: OnceLock<Result<Arc<Vocabulary>, ConstraintError>>,
    /// Contexts that are open, on their guests' side, and leases.
    n_holders: watch::Sender<usize>,
    /// Why nothing more is computed for it while its engine goes on with others.
    failure: watch::Receiver<Option<EngineFailure>>,
    /// Whether it is about to be unloaded.
    is_closed: AtomicBool,
    /// Whether it was, or is gone for all but its engine.
    is_unloaded: watch::Sender<bool>,
    /// Whether its engine was told.
    is_removed: AtomicBool,
}

/// What is known of a model once it is loaded.
struct KnownModel {
    id: ModelId,
    limits: Limits,
    weights: WeightsInfo,
    device: String,
    operator: Option<Arc<Operator>>,
}

/// A holder of an open model, until it is dropped. Unloading the model waits for all of them, if not for ever.
#[derive(Debug)]
pub struct ModelLease(ModelHandle);

impl ModelLease {
    /// The model.
    #[must_use]
    pub fn handle(&self) -> &ModelHandle {
        &self.0
    }
}

impl Drop for ModelLease {
    fn drop(&mut self) {
        self.0.note_dropped();
    }
}

impl ModelHandle {
    pub(crate) fn new(
        engine: Arc<Link>,
        id: ModelId,
        model: Arc<Model>,
        backend: &dyn Backend,
        operator: Option<Arc<Operator>>,
        failure: watch::Receiver<Option<EngineFailure>>,
    ) -> Self {
        let known = KnownModel {
            id,
            limits: Limits { n_pages: backend.n_pages(), ..backend.limits().clone() },
            weights: backend.weights(),
            device: backend.device().to_owned(),
            operator,
        };
        Self::of(engine, known, model, 0, failure)
    }

    /// A way to a model from another process, where contexts have numbers from this one on.
    pub(crate) fn far(
        engine: Arc<Link>,
        facts: ModelFacts,
        model: Arc<Model>,
        first_context: u64,
        failure: watch::Receiver<Option<EngineFailure>>,
    ) -> Self {
        let ModelFacts { id, limits, weights, device, operator } = facts;
        // Without it draws would be free of what the operator forbids.
        let operator = operator.and_then(|data| data.operator().expect("the daemon's is of the same data"));
        let known = KnownModel { id, limits, weights, device, operator: operator.map(Arc::new) };
        Self::of(engine, known, model, first_context, failure)
    }

    fn of(
        engine: Arc<Link>,
        known: KnownModel,
        model: Arc<Model>,
        first_context: u64,
        failure: watch::Receiver<Option<EngineFailure>>,
    ) -> Self {
        let KnownModel { id, limits, weights, device, operator } = known;
        Self(Arc::new(Loaded {
            engine,
            id,
            model,
            limits,
            weights,
            device,
            operator,
            next_context: AtomicU64::new(first_context),
            vocabulary: OnceLock::new(),
            n_holders: watch::Sender::new(0),
            failure,
            is_closed: AtomicBool::new(false),
            is_unloaded: watch::Sender::new(false),
            is_removed: AtomicBool::new(false),
        }))
    }

    /// What another process has to know of it.
    #[must_use]
    pub fn facts(&self) -> ModelFacts {
        let Loaded { id, limits, weights, device, operator, .. } = &*self.0;
        let operator = operator.as_ref().map(|operator| operator.data());
        ModelFacts { id: *id, limits: limits.clone(), weights: *weights, device: device.clone(), operator }
    }

    /// Waits until the model is held, or is not, as said.
    pub async fn held(&self, is_held: bool) {
        let _ = self.0.n_holders.subscribe().wait_for(|&n_holders| (n_holders > 0) == is_held).await;
    }

    /// Whether both are ways to one model, loaded once.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The model.
    #[must_use]
    pub fn model(&self) -> &Arc<Model> {
        &self.0.model
    }

    /// What constraints need of its tokens. The first call works it out.
    pub(crate) fn vocabulary(&self) -> Result<Arc<Vocabulary>, ConstraintError> {
        self.0.vocabulary.get_or_init(|| Vocabulary::of(self.model()).map(Arc::new)).clone()
    }

    /// What its backend can hold, with the pages that it had when it was loaded.
    #[must_use]
    pub fn limits(&self) -> &Limits {
        &self.0.limits
    }

    /// The weights as the device holds them.
    #[must_use]
    pub fn weights(&self) -> WeightsInfo {
        self.0.weights
    }

    /// The device's name for people.
    #[must_use]
    pub fn device(&self) -> &str {
        &self.0.device
    }

    /// What stands in front of everybody's samplers, if anything does.
    #[must_use]
    pub fn operator(&self) -> Option<&Arc<Operator>> {
        self.0.operator.as_ref()
    }

    /// Whether the engine works, and if not, why.
    #[must_use]
    pub fn state(&self) -> EngineState {
        self.0.engine.state()
    }

    /// Why the engine has failed, if it has: then nothing is computed on its device any more.
    #[must_use]
    pub fn device_failure(&self) -> Option<EngineFailure> {
        self.0.engine.failure()
    }

    /// Waits for the engine's failure; for ever, if it is stopped before it fails.
    pub async fn device_failed(&self) -> EngineFailure {
        self.0.engine.failed().await
    }

    /// Why nothing is computed for the model any more, if that is so: it has failed, or the engine has.
    #[must_use]
    pub fn failure(&self) -> Option<EngineFailure> {
        self.device_failure().or_else(|| self.0.failure.borrow().clone())
    }

    /// Waits until the model fails, or the engine does; for ever, if the engine is stopped before.
    pub async fn failed(&self) -> EngineFailure {
        let mut own = self.0.failure.clone();
        let own = async {
            if own.wait_for(Option::is_some).await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            biased;
            failure = self.device_failed() => failure,
            () = own => self.failure().expect("it was seen"),
        }
    }

    /// Whether the model was unloaded.
    #[must_use]
    pub fn is_unloaded(&self) -> bool {
        *self.0.is_unloaded.borrow()
    }

    /// Waits until the model is unloaded.
    pub async fn unloaded(&self) {
        // The sender is held here.
        let _ = self.0.is_unloaded.subscribe().wait_for(|&is_unloaded| is_unloaded).await;
    }

    pub(crate) fn link(&self) -> &Arc<Link> {
        &self.0.engine
    }

    /// Where the masks of its contexts are worked out.
    pub(crate) fn masks(&self) -> &MaskThreads {
        self.0.engine.masks()
    }

    pub(crate) fn id(&self) -> ModelId {
        self.0.id
    }

    /// Refuses new contexts from now on; `false` if it did so before.
    pub fn close(&self) -> bool {
        !self.0.is_closed.swap(true, Ordering::Relaxed)
    }

    /// Whether it refuses new contexts.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.0.is_closed.load(Ordering::Relaxed)
    }

    /// Ends it for all guests: they are told that it was unloaded, and whatever is asked of it is refused. Its memory
    /// comes back with [`crate::Engine::remove`].
    pub fn end(&self) {
        self.close();
        self.0.is_unloaded.send_replace(true);
    }

    /// Holds the model open, so that contexts may be opened.
    #[must_use]
    pub fn lease(&self) -> ModelLease {
        self.0.n_holders.send_modify(|n_holders| *n_holders += 1);
        ModelLease(self.clone())
    }

    /// As [`Self::lease`], unless the model is closed. Neither comes between the look and the deed of the other in
    /// [`Self::close_if_idle`].
    #[must_use]
    pub fn try_lease(&self) -> Option<ModelLease> {
        let is_leased = self.0.n_holders.send_if_modified(|n_holders| {
            let is_open = !self.is_closed();
            *n_holders += usize::from(is_open);
            is_open
        });
        is_leased.then(|| ModelLease(self.clone()))
    }

    /// Closes the model if no context is open and no lease held; says whether it did. Whoever asks for a lease by
    /// [`Self::try_lease`] has it before this, or does not get it.
    #[must_use]
    pub fn close_if_idle(&self) -> bool {
        let mut is_done = false;
        self.0.n_holders.send_if_modified(|n_holders| {
            is_done = *n_holders == 0 && self.close();
            false
        });
        is_done
    }

    /// How many contexts and leases hold it, as that changes.
    #[must_use]
    pub fn holders(&self) -> watch::Receiver<usize> {
        self.0.n_holders.subscribe()
    }

    /// Waits until no context is open and no lease held. Saved contexts do not count.
    pub async fn idle(&self) {
        let _ = self.0.n_holders.subscribe().wait_for(|&n_holders| n_holders == 0).await;
    }

    /// Checks that there are hidden states after so many layers each.
    ///
    /// # Errors
    /// The first that there is not.
    pub fn check_layers(&self, n_layers: &[usize]) -> Result<(), EngineError> {
        let n_layers_max = self.model().config.n_layers;
        match n_layers.iter().find(|&&n_layers| n_layers > n_layers_max) {
            Some(&n_layers) => Err(EngineError::NoSuchLayer { n_layers, n_layers_max }),
            None => Ok(()),
        }
    }

    /// Checks that the attention in these layers can be asked for, over so many tokens.
    ///
    /// # Errors
    /// There is no layer, the first that is not there or there before, or too many tokens.
    pub fn check_attention(&self, layers: &[usize], n_tokens: usize) -> Result<(), EngineError> {
        let n_layers = self.model().config.n_layers;
        if layers.is_empty() {
            return Err(EngineError::NoLayers);
        }
        let mut seen = vec![false; n_layers];
        for &layer in layers {
            match seen.get_mut(layer) {
                None => return Err(EngineError::NoAttentionIn { layer, n_layers }),
                Some(true) => return Err(EngineError::LayerTwice { layer }),
                Some(is_seen) => *is_seen = true,
            }
        }
        let n_tokens_max = N_ATTENTION_TOKENS_MAX;
        if n_tokens > n_tokens_max {
            return Err(EngineError::AttentionTooLong { n_tokens, n_tokens_max });
        }
        Ok(())
    }

    /// As [`crate::Engine::remove`].
    pub(crate) async fn remove(&self) -> Result<Box<dyn Backend>, EngineError> {
        self.end();
        if self.0.is_removed.swap(true, Ordering::Relaxed) {
            return Err(EngineError::Unloaded);
        }
        let (to, backend) = oneshot::channel();
        self.0.engine.post_message(Message::Remove { model: self.0.id, to })?;
        backend.await.map_err(|_| self.0.engine.ended())
    }

    /// Forgets the context that this owner's user saved under a name.
    ///
    /// # Errors
    /// Nothing is saved under the name, the model was unloaded, or the engine has failed or stopped.
    pub async fn forget(&self, owner: &Owner, name: &str) -> Result<(), EngineError> {
        let caller = self.caller(owner)?;
        let place = caller.ticket();
        let (model, caller_id, tag) = (self.0.id, caller.id(), place.tag());
        self.post(&caller, Operation::Forget { model, caller: caller_id, name: name.to_owned(), tag })
            .await?;
        match place.take().await {
            Some(Done::Kept(forgotten)) => forgotten,
            Some(other) => unreachable!("asked to forget, answered with {other:?}"),
            None => Err(self.ended()),
        }
    }

    /// Counters and gauges.
    ///
    /// # Errors
    /// The model was unloaded, or the engine has failed or stopped.
    pub async fn stats(&self) -> Result<EngineStats, EngineError> {
        let model = self.0.id;
        let stats = |tag: Tag| Operation::Stats { model, caller: crate::handle::DESK, tag };
        match self.0.engine.ask(stats).await? {
            Done::Stats(stats) => stats.map(|stats| *stats),
            other => unreachable!("asked for counters, answered with {other:?}"),
        }
    }

    /// Why there is no answer.
    pub(crate) fn ended(&self) -> EngineError {
        match self.failure() {
            Some(failure) => EngineError::Failed(failure),
            None if self.is_unloaded() => EngineError::Unloaded,
            None => EngineError::Stopped,
        }
    }

    /// The guest of this account, as the engine knows it.
    ///
    /// # Errors
    /// The engine has failed or stopped.
    pub(crate) fn caller(&self, owner: &Owner) -> Result<Arc<Caller>, EngineError> {
        self.0.engine.caller(owner)
    }

    /// Whether a guest may open a context.
    ///
    /// # Errors
    /// The model is being unloaded, or was.
    pub(crate) fn check_open(&self) -> Result<(), EngineError> {
        if self.is_closed() { Err(EngineError::Unloaded) } else { Ok(()) }
    }

    /// One context more; its guest says with [`Self::note_dropped`] when it is gone.
    pub(crate) fn note_opened(&self) -> ContextId {
        self.0.n_holders.send_modify(|n_holders| *n_holders += 1);
        ContextId { model: self.0.id, number: self.0.next_context.fetch_add(1, Ordering::Relaxed) }
    }

    pub(crate) fn note_dropped(&self) {
        self.0.n_holders.send_modify(|n_holders| *n_holders -= 1);
    }

    /// As [`Link::room`].
    pub(crate) async fn room(&self, caller: &Caller, n_tokens: usize) -> Result<Room, EngineError> {
        self.0.engine.room(caller, n_tokens).await
    }

    /// As [`Link::post_into`].
    pub(crate) fn post_into(&self, room: Room, operation: Operation) -> Result<(), EngineError> {
        if self.is_unloaded() {
            return Err(self.ended());
        }
        self.0.engine.post_into(room, operation)
    }

    /// Sends an operation of a guest once there is room for it.
    pub(crate) async fn post(&self, caller: &Caller, operation: Operation) -> Result<(), EngineError> {
        let room = self.room(caller, operation.n_tokens()).await?;
        self.post_into(room, operation)
    }

    /// As [`Link::post_unbounded`].
    pub(crate) fn post_unbounded(&self, caller: CallerId, operation: Operation) -> Result<(), EngineError> {
        self.0.engine.post_unbounded(caller, operation)
    }
}
