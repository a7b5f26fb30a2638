//! The daemon's service in a simulation: guests follow scripts, models lie on simulated devices. Accounts are the daemon's.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use trellis::fuzzing::Accounts;
use trellis::guest::GuestIo;
use trellis::session::{
    Actor, GuestEnd, LoadRequest, ProgressSink, RunningGuest, Service, SessionsUsed, StartRequest,
    StopHandle, StopReason,
};
use trellis_engine::account::{Account, ActorId, GuestId, HostCharge, Owner, Resource, SessionId};
use trellis_engine::model::Model;
use trellis_engine::{Engine, KvBounds, ModelHandle};
use trellis_wire::{
    ComponentHash, DaemonInfo, ErrorBody, ErrorCode, GuestInfo, GuestUsage, LimitInfo, ModelInfo, Program,
    Stage,
};

use super::device::{Clock, Device};
use super::draws::Draws;
use super::guest::{Guest, until_killed};
use super::mutation::Mutation;
use super::notes::{Fault, Notes};
use super::scene::{MODELS, Scene, salt};
use super::script::Script;

/// The user that loads and unloads models, and shuts down.
pub(super) const OPERATOR: Actor = Actor { uid: 0, gid: 0 };

/// The service.
pub(super) struct SimService {
    pub(super) scene: Scene,
    pub(super) engine: Engine,
    pub(super) notes: Arc<Notes>,
    pub(super) shutdown: CancellationToken,
    pub(super) accounts: Accounts,
    model: Arc<Model>,
    clock: Clock,
    draws: Mutex<Draws>,
    models: Mutex<Vec<Option<ModelHandle>>>,
    users: Mutex<BTreeSet<u32>>,
    /// All that ever began.
    sessions: Mutex<BTreeSet<u64>>,
    components: Mutex<BTreeSet<[u8; 32]>>,
    guests: Mutex<BTreeMap<u64, (Actor, CancellationToken)>>,
    n_guests: AtomicU64,
    n_alive: Arc<AtomicUsize>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SimService {
    pub(super) fn new(
        scene: Scene,
        engine: Engine,
        model: Arc<Model>,
        clock: Clock,
        draws: Draws,
        notes: Arc<Notes>,
    ) -> Arc<Self> {
        let service = Arc::new(Self {
            engine,
            notes,
            shutdown: CancellationToken::new(),
            accounts: Accounts::new(&scene.budgets.around, u64::MAX),
            model,
            clock,
            draws: Mutex::new(draws),
            models: Mutex::new(vec![None; scene.models.len()]),
            users: Mutex::default(),
            sessions: Mutex::default(),
            components: Mutex::default(),
            guests: Mutex::default(),
            n_guests: AtomicU64::new(0),
            n_alive: Arc::default(),
            scene,
        });
        for idx in 0..service.scene.models.len() {
            service.put_on(idx).expect("an engine that has just begun takes models");
        }
        service
    }

    fn put_on(&self, idx: usize) -> Result<(), ErrorBody> {
        let draws = locked(&self.draws).fork();
        let scene = self.scene.models[idx];
        let device =
            Device::new(MODELS[idx], salt(idx), scene, self.clock.clone(), draws, self.notes.clone());
        let bounds = KvBounds { n_pages_max: scene.n_pages_max, ..KvBounds::of(&device) };
        let handle = self
            .engine
            .add(self.model.clone(), Box::new(device), bounds)
            .map_err(|error| ErrorBody::new(ErrorCode::LoadFailed, error.to_string()))?;
        locked(&self.models)[idx] = Some(handle);
        Ok(())
    }

    /// The models that are there.
    pub(super) fn handles(&self) -> Vec<ModelHandle> {
        locked(&self.models).iter().flatten().cloned().collect()
    }

    /// Guests that have not ended.
    pub(super) fn n_alive(&self) -> usize {
        self.n_alive.load(Ordering::SeqCst)
    }

    /// Sessions that have not ended.
    pub(super) fn n_sessions(&self) -> usize {
        locked(&self.sessions).iter().filter(|&&id| self.accounts.session(id).is_some()).count()
    }

    /// Users that were ever here.
    pub(super) fn uids(&self) -> Vec<u32> {
        locked(&self.users).iter().copied().collect()
    }

    /// Someone of the user, to let go of what it saved.
    pub(super) async fn owner_of(&self, uid: u32) -> Owner {
        let session = u64::from(uid) + (1 << 32);
        let account = self.accounts.begin_session(Actor { uid, gid: uid }, session).await;
        self.accounts.end_session(session);
        Owner { actor: ActorId(uid), session: SessionId(session), guest: GuestId(0), account }
    }

    /// What is charged to users, and to the daemon, that is in use.
    pub(super) fn charged(&self) -> Vec<(String, u64)> {
        let mut charged = Vec::new();
        for resource in [Resource::Pages, Resource::Contexts, Resource::HostBytes] {
            let users = self.uids().into_iter().map(|uid| self.accounts.used_by(uid, resource));
            for (whose, used) in
                users.map(|used| ("a user", used)).chain([("the daemon", self.accounts.used(resource))])
            {
                if used > 0 {
                    charged.push((format!("{} of {whose}", resource.name()), used));
                }
            }
        }
        charged
    }

    fn model(&self, name: Option<&str>) -> Result<(usize, ModelHandle), ErrorBody> {
        let name = name.unwrap_or(MODELS[0]);
        let idx = MODELS.iter().position(|known| *known == name);
        let found = idx.and_then(|idx| Some((idx, locked(&self.models).get(idx)?.clone()?)));
        found.ok_or_else(|| ErrorBody::new(ErrorCode::UnknownModel, format!("no model {name:?}")))
    }

    fn nap(&self) -> Duration {
        let mut draws = locked(&self.draws);
        match draws.happens(600) {
            true => Duration::ZERO,
            false => Duration::from_millis(draws.below(20) as u64),
        }
    }
}

/// Counted until its guest has ended.
struct Alive(Arc<AtomicUsize>);

impl Alive {
    fn new(n_alive: &Arc<AtomicUsize>) -> Self {
        n_alive.fetch_add(1, Ordering::SeqCst);
        Self(n_alive.clone())
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Service for SimService {
    async fn start(
        &self,
        request: StartRequest,
        io: GuestIo,
        progress: ProgressSink,
    ) -> Result<RunningGuest, ErrorBody> {
        let alive = Alive::new(&self.n_alive);
        if let Program::Component { hash } = &request.program
            && !locked(&self.components).contains(&hash.0)
        {
            return Err(ErrorBody::new(ErrorCode::UnknownComponent, "upload it"));
        }
        for done in 0..2 {
            progress.report(Stage::Compile, done, 2);
            tokio::time::sleep(self.nap()).await;
        }
        let (model_idx, model) = self.model(request.model.as_deref())?;
        let script = Script::told(&request.arguments, model_idx);
        let script = script.ok_or_else(|| ErrorBody::new(ErrorCode::InvalidArgument, "a script's seed"))?;
        let session = self.accounts.session(request.session_id);
        let session = session.ok_or_else(|| ErrorBody::new(ErrorCode::Cancelled, "the session has ended"))?;
        let account = Account::new("guest", self.scene.budgets.guest, Some(session.clone()));
        if self.notes.makes(Mutation::LostBytesOfHost) && locked(&self.draws).happens(50) {
            std::mem::forget(HostCharge::new(&session, 1));
        }
        let number = self.n_guests.fetch_add(1, Ordering::SeqCst) + 1;
        let owner = Owner {
            actor: ActorId(request.actor.uid),
            session: SessionId(request.session_id),
            guest: GuestId(number),
            account,
        };
        self.notes.event(format_args!(
            "guest {number} of user {} begins on {}: script {:?}, of {} ops",
            request.actor.uid,
            MODELS[model_idx],
            request.arguments,
            script.ops.len()
        ));
        let killed_after = script.killed_after;
        let (notes, draws) = (self.notes.clone(), locked(&self.draws).fork());
        let guest = Guest { number, script, model, owner, io, draws, notes, contexts: Vec::new() };
        let by_hand = CancellationToken::new();
        locked(&self.guests).insert(number, (request.actor, by_hand.clone()));
        let (stopper, stopped) = oneshot::channel::<StopReason>();
        let notes = self.notes.clone();
        let task = tokio::spawn(async move {
            let stopped = async {
                match stopped.await {
                    Ok(reason) => reason,
                    Err(_) => std::future::pending().await,
                }
            };
            let result = tokio::select! {
                biased;
                reason = stopped => {
                    notes.event(format_args!("guest {number} is stopped: {reason:?}"));
                    if notes.makes(Mutation::LostEnd) {
                        std::future::pending::<()>().await;
                    }
                    Err(ErrorBody::new(ErrorCode::Stopped, "stopped"))
                }
                () = by_hand.cancelled() => Err(ErrorBody::new(ErrorCode::Stopped, "stopped by hand")),
                result = until_killed(killed_after, guest.run()) => result.unwrap_or_else(|| {
                    notes.fault(Fault::Kill);
                    Err(ErrorBody::new(ErrorCode::GuestTrapped, "killed"))
                }),
            };
            notes.event(format_args!(
                "guest {number} has ended: {:?}",
                result.as_ref().map_err(|it| &it.code)
            ));
            drop(alive);
            GuestEnd { result, usage: GuestUsage::default() }
        });
        let end = async move {
            let panicked = || GuestEnd {
                result: Err(ErrorBody::new(ErrorCode::Internal, "the guest panicked")),
                usage: GuestUsage::default(),
            };
            task.await.unwrap_or_else(|_| panicked())
        };
        let stop = StopHandle::new(move |reason| {
            // One that has ended is not there to be stopped.
            let _ = stopper.send(reason);
        });
        Ok(RunningGuest { guest_id: number, end: end.boxed(), stop })
    }

    async fn store_component(&self, _: Actor, hash: ComponentHash, bytes: Bytes) -> Result<(), ErrorBody> {
        tokio::time::sleep(self.nap()).await;
        let is_whole = *blake3::hash(&bytes).as_bytes() == hash.0;
        self.notes.expect(is_whole, || format!("{} bytes stored that are not those of {hash}", bytes.len()));
        locked(&self.components).insert(hash.0);
        Ok(())
    }

    fn has_component(&self, _: Actor, hash: &ComponentHash) -> bool {
        locked(&self.components).contains(&hash.0)
    }

    async fn models(&self, _: Actor) -> Result<Vec<ModelInfo>, ErrorBody> {
        let mut models = Vec::new();
        for handle in self.handles() {
            let info = ModelInfo { name: handle.device().to_owned(), ..ModelInfo::default() };
            models.push(match handle.stats().await {
                Ok(stats) => ModelInfo { n_contexts: stats.n_contexts as u64, ..info },
                Err(error) => ModelInfo { failure: Some(error.to_string()), ..info },
            });
        }
        Ok(models)
    }

    async fn guests(&self, actor: Actor) -> Result<Vec<GuestInfo>, ErrorBody> {
        let guests = locked(&self.guests);
        let own = guests.iter().filter(|(_, (of, _))| of.uid == actor.uid);
        Ok(own.map(|(&guest_id, _)| GuestInfo { guest_id, ..GuestInfo::default() }).collect())
    }

    async fn info(&self, _: Actor) -> Result<DaemonInfo, ErrorBody> {
        Ok(DaemonInfo::default())
    }

    async fn limits(&self, _: Actor, used: SessionsUsed) -> Result<Vec<LimitInfo>, ErrorBody> {
        let (value, name) = (Some(used.user.n_connections), "sessions.n_connections".to_owned());
        Ok(vec![LimitInfo { name, value, ..LimitInfo::default() }])
    }

    async fn load(
        &self,
        _: Actor,
        request: LoadRequest,
        progress: ProgressSink,
    ) -> Result<String, ErrorBody> {
        let idx = MODELS.iter().position(|name| *name == request.model);
        let idx = idx.ok_or_else(|| ErrorBody::new(ErrorCode::LoadFailed, "no such model"))?;
        progress.report(Stage::Load, 1, 2);
        tokio::time::sleep(self.nap()).await;
        if locked(&self.models)[idx].is_some() {
            return Err(ErrorBody::new(ErrorCode::ModelLoaded, "it is there"));
        }
        self.put_on(idx)?;
        Ok(request.model)
    }

    async fn unload(
        &self,
        _: Actor,
        model: String,
        drain: Option<Duration>,
    ) -> Result<Option<String>, ErrorBody> {
        let (idx, handle) = self.model(Some(&model))?;
        handle.close();
        let _ = tokio::time::timeout(drain.unwrap_or_default(), handle.idle()).await;
        let removed = self.engine.remove(&handle).await;
        locked(&self.models)[idx] = None;
        match removed {
            Ok(backend) => drop(backend),
            Err(error) => return Err(ErrorBody::new(ErrorCode::EngineFailed, error.to_string())),
        }
        Ok(None)
    }

    async fn stop(&self, actor: Actor, guest_id: u64) -> Result<(), ErrorBody> {
        let guests = locked(&self.guests);
        let found = guests.get(&guest_id).filter(|(of, _)| of.uid == actor.uid);
        let (_, by_hand) = found.ok_or_else(|| ErrorBody::new(ErrorCode::UnknownGuest, "no such guest"))?;
        self.notes.fault(Fault::Stop);
        by_hand.cancel();
        Ok(())
    }

    async fn shutdown(&self, _: Actor) -> Result<(), ErrorBody> {
        self.notes.fault(Fault::Shutdown);
        self.shutdown.cancel();
        Ok(())
    }

    async fn session_began(&self, actor: Actor, session_id: u64) -> Arc<Account> {
        locked(&self.users).insert(actor.uid);
        locked(&self.sessions).insert(session_id);
        self.accounts.begin_session(actor, session_id).await
    }

    fn session_ended(&self, session_id: u64) {
        if self.notes.makes(Mutation::ForgottenSession) && locked(&self.draws).happens(100) {
            return;
        }
        self.accounts.end_session(session_id);
    }
}
