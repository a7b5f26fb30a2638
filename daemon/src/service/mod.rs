//! What sessions ask for, done by the house of guests and the engines.
//!
//! - Comes in: what a client asks, as calls of [`Service`] with the actor that asks; the ends of sessions.
//! - Goes out: guests that run, with their output in the hands of the session; lists of guests, models and the daemon's
//!   state as one actor may see them; errors with a code and with the value and limit that they are about (`errors`).
//! - Behind it are the [`GuestHost`], which compiles and runs, and the loader, which loads and unloads. The service itself
//!   keeps what lies between: components that were uploaded and are not compiled yet, and by whom (`components`), the files of
//!   guests that have names (`registry`); `catalog` says what is known of models that are loaded on demand; `limits` adds up what is in use of each limit, `metrics` reads off what monitoring is told, `told` has what clients are told. The accounts of users and sessions,
//!   in which those of guests lie, are in `crate::accounts`.
//! - A call is dropped when its client cancels or leaves, at any await; what it had begun is undone by what is dropped with it.
//! - Must not happen: a call that is answered before `crate::permissions` was asked whether its actor may make it; a path on the disk of
//!   the machine that leaves it to another actor than the operator; a wait for the device in [`Service::has_component`]; bytes or frames of the wire, which are the session's.

mod beside;
mod catalog;
mod components;
mod errors;
mod limits;
mod metrics;
mod policed;
mod registry;
mod relief;
mod told;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use tokio_util::sync::CancellationToken;
use trellis_engine::account::{Account, ActorId, GuestId, HostCharge, SessionId};
use trellis_wire::{
    ComponentHash, DaemonInfo, DeviceInfo, ErrorBody, ErrorCode, FitInfo, GuestInfo, GuestUsage,
    LABEL_BYTES_MAX, LimitInfo, LogLines, LogsAsked, ModelInfo, Program as ProgramName, ReloadInfo, Stage,
    UpgradeInfo,
};

use self::catalog::Catalog;
use self::components::Components;
pub(crate) use self::errors::{ended, over_host_bytes, refused};
use self::limits::{InUse, KvUsed, Share};
use self::registry::Registry;
use self::relief::Reliefs;
use self::told::{
    add_model, amounts, device_info, device_names, model_info, n_pages_free, resident_bytes, usage, whole_ms,
};
use crate::accounts::Accounts;
use crate::config::{Device, Sizes};
use crate::guest::{
    BroughtBy, CompileProgress, GuestActivity, GuestEnd as Ending, GuestHost, GuestIo, Launch, LoadListener,
    PolicedGuest, Program, RunningGuest as Started, Used,
};
use crate::live::Live;
use crate::loader::Loader;
use crate::machine;
use crate::metrics::{BusySeen, Exposition, SessionCounts};
use crate::models::{self, names};
use crate::permissions::{Permission, Permissions, is_operator};
use crate::reload::Reload;
use crate::session::{
    Actor, GuestEnd, LoadRequest, ProgressSink, RunningGuest, Service, SessionsUsed, StartRequest, StopHandle,
};
use crate::tasks::blocking;
use crate::upgrade::Upgrade;

/// How long the guests of a model that is unloaded have to come to their ends, unless the request says.
const DRAIN: Duration = Duration::from_secs(30);
/// No drain lasts longer: an operator that wants to wait for ever can ask later.
const DRAIN_MAX: Duration = Duration::from_secs(24 * 3600);

/// The service of a whole daemon.
pub struct HostService {
    host: Arc<GuestHost>,
    loader: Arc<Loader>,
    registry: Registry,
    catalog: Catalog,
    busy_seen: BusySeen,
    reliefs: Reliefs,
    components: Arc<Components>,
    accounts: Arc<Accounts>,
    permissions: Arc<Live<Permissions>>,
    reload: Arc<Reload>,
    upgrade: Arc<Upgrade>,
    n_sessions: AtomicU64,
    shutdown: CancellationToken,
    started: Instant,
}

/// What a service is made of.
pub(crate) struct Parts {
    pub(crate) host: Arc<GuestHost>,
    pub(crate) loader: Arc<Loader>,
    pub(crate) guests_dir: Option<PathBuf>,
    pub(crate) accounts: Arc<Accounts>,
    pub(crate) permissions: Arc<Live<Permissions>>,
    pub(crate) reload: Arc<Reload>,
    pub(crate) upgrade: Arc<Upgrade>,
    pub(crate) shutdown: CancellationToken,
    pub(crate) started: Instant,
}

impl HostService {
    pub(crate) fn new(parts: Parts) -> Self {
        let Parts { host, loader, guests_dir, accounts, permissions, reload, upgrade, shutdown, started } =
            parts;
        host.set_accounts(&accounts);
        if let Some(keepers) = loader.keepers() {
            keepers.set_accounts(&accounts);
        }
        Self {
            components: Arc::new(Components::new(4 * host.limits().component_bytes)),
            registry: Registry::new(guests_dir, host.limits().component_bytes as u64),
            catalog: Catalog::new(loader.clone(), permissions.clone()),
            accounts,
            permissions,
            reload,
            upgrade,
            n_sessions: AtomicU64::new(0),
            host,
            loader,
            shutdown,
            started,
            busy_seen: BusySeen::default(),
            reliefs: Reliefs::default(),
        }
    }

    /// The wasm side of the service.
    #[must_use]
    pub fn host(&self) -> &Arc<GuestHost> {
        &self.host
    }

    /// What users and sessions hold.
    #[cfg(feature = "fuzzing")]
    pub(crate) fn accounts(&self) -> &Accounts {
        &self.accounts
    }

    async fn check(&self, actor: Actor, permission: Permission) -> Result<(), ErrorBody> {
        self.permissions.get().check(actor, permission).await
    }

    /// What a client wants to run, if it may: who brings no components runs those that are registered, by their names or by
    /// their hashes.
    async fn allowed(&self, actor: Actor, program: ProgramName) -> Result<ProgramName, ErrorBody> {
        self.check(actor, Permission::Run).await?;
        let ProgramName::Component { hash } = &program else { return Ok(program) };
        let Err(error) = self.check(actor, Permission::Upload).await else { return Ok(program) };
        match self.registry.name_of(&blake3::Hash::from_bytes(hash.0)).await {
            Some(name) => Ok(ProgramName::Named { name }),
            None => Err(error),
        }
    }

    /// The component that a client names, compiled; and what people call it.
    async fn program(
        &self,
        (actor, session): (Actor, SessionId),
        name: ProgramName,
        progress: &ProgressSink,
    ) -> Result<(Program, String), ErrorBody> {
        // What is read for this start is its session's as long as it is held.
        let _read;
        let (wasm, name, uploaded) = match name {
            ProgramName::Component { hash } => {
                let known = blake3::Hash::from_bytes(hash.0);
                let short = hash.to_string()[..12].to_owned();
                // The operator could look into the cache as well; what he has not had compiled himself is not found here.
                let may_know = is_operator(actor) || self.components.is_known(actor.uid, &hash);
                if may_know
                    && let Some(program) = self.host.find(ActorId(actor.uid), BroughtBy::User, known).await
                {
                    self.components.let_go(actor.uid, &hash);
                    return Ok((program, short));
                }
                let unknown = || {
                    ErrorBody::new(
                        ErrorCode::UnknownComponent,
                        format!("component {hash} has to be uploaded"),
                    )
                    .with_value(hash)
                };
                match self.components.get(actor.uid, &hash) {
                    Some(wasm) => (wasm, short, Some(hash)),
                    // It may have been compiled meanwhile.
                    None if may_know => {
                        let found = self.host.find(ActorId(actor.uid), BroughtBy::User, known).await;
                        return Ok((found.ok_or_else(unknown)?, short));
                    }
                    None => return Err(unknown()),
                }
            }
            ProgramName::Named { name } => {
                let named = self.registry.find(&name).await?;
                if let Some(hash) = named.hash
                    && let Some(program) = self.host.find(ActorId(actor.uid), BroughtBy::Operator, hash).await
                {
                    return Ok((program, name));
                }
                let account = self.accounts.session(session).ok_or_else(errors::session_ended)?;
                let charge = HostCharge::new(&account, named.n_bytes());
                _read = charge.map_err(|exceeded| over_host_bytes(&exceeded))?;
                (self.registry.read(&named).await?, name, None)
            }
            ProgramName::Unknown => {
                let message = "this daemon does not know that kind of program";
                return Err(ErrorBody::new(ErrorCode::Unsupported, message));
            }
        };
        let n_elapsed_ms = AtomicU64::new(0);
        let report = |state| match state {
            CompileProgress::Queued => progress.report(Stage::Compile, 0, 0),
            CompileProgress::Compiling { elapsed_ms } => {
                n_elapsed_ms.store(elapsed_ms, Ordering::Relaxed);
                progress.report(Stage::Compile, elapsed_ms, 0);
            }
            CompileProgress::Done { .. } => {
                let elapsed_ms = n_elapsed_ms.load(Ordering::Relaxed).max(1);
                progress.report(Stage::Compile, elapsed_ms, elapsed_ms);
            }
        };
        let brought = if uploaded.is_some() { BroughtBy::User } else { BroughtBy::Operator };
        let compiled = self.host.compile(ActorId(actor.uid), brought, wasm, report).await;
        if let (Some(hash), Ok(_)) = (uploaded, &compiled) {
            self.components.let_go(actor.uid, &hash);
        }
        Ok((compiled.map_err(|error| errors::refused(&error))?, name))
    }
}

impl Service for HostService {
    async fn start(
        &self,
        request: StartRequest,
        io: GuestIo,
        progress: ProgressSink,
    ) -> Result<RunningGuest, ErrorBody> {
        let (actor, session) = (ActorId(request.actor.uid), SessionId(request.session_id));
        let program = self.allowed(request.actor, request.program).await?;
        let is_component = matches!(program, ProgramName::Component { .. });
        let (program, name) = self.program((request.actor, session), program, &progress).await?;
        let name = match &request.label {
            // Anybody may call a component anything: its hash stays beside that.
            Some(label) if is_component => {
                format!("{}@{name}", &label[..label.floor_char_boundary(LABEL_BYTES_MAX)])
            }
            _ => name,
        };
        if let Some(failure) = models::failure(self.loader.models().listing().devices()) {
            return Err(errors::device_failed(&failure));
        }
        if let Some(name) = &request.model {
            errors::check_known(name, self.loader.models())?;
        }
        let account = self.accounts.session(session).ok_or_else(errors::session_ended)?;
        let n_guests_per_user = self.host.limits().n_guests_per_user;
        let class = self.accounts.class(actor);
        let n_guests_of_user = class.map_or(n_guests_per_user, |class| class.n_guests(n_guests_per_user));
        let id = self.host.next_id();
        let gate = match self.loader.policy() {
            None => None,
            Some(policy) => {
                if !policy.settings().allows_recordings && (request.is_recorded || request.is_profiled) {
                    return Err(policed::not_recorded());
                }
                let about = PolicedGuest {
                    number: id.0,
                    uid: actor.0,
                    session: session.0,
                    program: name.clone(),
                    component: program.hash().to_hex().to_string(),
                    model: request.model.clone(),
                };
                let gate = policy.gate(about, &account).await.map_err(|failure| policed::failed(&failure))?;
                Some(Arc::new(gate))
            }
        };
        let arguments = match &gate {
            None => request.arguments,
            Some(gate) => gate.arguments(request.arguments).await.map_err(policed::ruled)?,
        };
        let (io, passage) = match &gate {
            None => (io, None),
            Some(gate) => {
                let (io, passage) = gate.between(io);
                (io, Some((gate.clone(), passage)))
            }
        };
        let launch = Launch {
            program,
            name,
            actor,
            session,
            account,
            n_guests_of_user,
            arguments,
            model: request.model,
            loads: LoadListener::new(move |model, done, total| progress.report_load(model, done, total)),
            seed: request.seed.map_or_else(random_seed, Ok)?,
            deadline_ms: request.deadline.map(|time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX)),
            is_recorded: request.is_recorded,
            is_profiled: request.is_profiled,
        };
        let Started { id, mut end, stop, account, models: opened } =
            self.host.start_as(id, launch, io).map_err(|error| errors::refused(&error))?;
        let begun = Instant::now();
        let stopped = stop.clone();
        let end = Box::pin(async move {
            let ending = tokio::select! {
                biased;
                ending = &mut end => ending,
                () = opened.wait_for_loss() => {
                    stopped.stop();
                    (&mut end).await
                }
            };
            let result = match ending {
                Ending::Finished => Ok(()),
                ending => Err(errors::ended(&ending)),
            };
            let elapsed_us = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
            GuestEnd { result, usage: GuestUsage { elapsed_us, ..usage(&Used::of(&account)) } }
        });
        let end: BoxFuture<'static, GuestEnd> = match passage {
            None => end,
            Some((gate, passage)) => {
                let stopped = stop.clone();
                let ended = policed::see_to_its_end(gate, passage, move || stopped.stop(), end);
                Box::pin(async move {
                    ended.await.unwrap_or_else(|_| {
                        let result = Err(errors::internal(&"the guest was lost beside its policy"));
                        GuestEnd { result, usage: GuestUsage::default() }
                    })
                })
            }
        };
        Ok(RunningGuest { guest_id: id.0, end, stop: StopHandle::new(move |_| stop.stop()) })
    }

    async fn may_upload(&self, actor: Actor) -> Result<(), ErrorBody> {
        self.check(actor, Permission::Upload).await
    }

    async fn store_component(
        &self,
        actor: Actor,
        hash: ComponentHash,
        bytes: Bytes,
    ) -> Result<(), ErrorBody> {
        if self.components.keep(actor.uid, hash, bytes)? {
            tokio::spawn(self.components.clone().let_go_when_unused(actor.uid));
        }
        Ok(())
    }

    fn has_component(&self, actor: Actor, hash: &ComponentHash) -> bool {
        self.components.get(actor.uid, hash).is_some()
    }

    async fn models(&self, actor: Actor) -> Result<Vec<ModelInfo>, ErrorBody> {
        let listing = self.loader.models().listing();
        let loaded = listing.loaded();
        let mut models = Vec::new();
        for model in loaded.iter().chain(listing.leaving()) {
            let stats = model.stats().await.unwrap_or_default();
            models.push(self.catalog.about(model_info(model, &stats, actor), Some(model)));
        }
        models.extend(self.catalog.not_loaded(&models));
        let first = loaded.first().map(|model| model.model().name.clone());
        let default = self.loader.models().declared().default_model().map(str::to_owned).or(first);
        if let Some(model) = models.iter_mut().find(|model| Some(&model.name) == default.as_ref()) {
            model.is_default = model.state != "draining" || model.is_on_demand;
        }
        Ok(models)
    }

    async fn fit(&self, actor: Actor, request: LoadRequest) -> Result<FitInfo, ErrorBody> {
        self.catalog.fit(actor, request).await
    }

    async fn load(
        &self,
        actor: Actor,
        request: LoadRequest,
        progress: ProgressSink,
    ) -> Result<String, ErrorBody> {
        self.check(actor, Permission::Load).await?;
        let LoadRequest { model, device } = request;
        let (model, device) = (self.catalog.name_of(model), catalog::device(device)?);
        let report = move |done, total| progress.report(Stage::Load, done, total);
        let loaded = self.loader.load(model, device, report).await;
        loaded.map(|model| model.model().name.clone()).map_err(|error| errors::not_loaded(&error))
    }

    async fn unload(
        &self,
        actor: Actor,
        model: String,
        drain: Option<Duration>,
    ) -> Result<Option<String>, ErrorBody> {
        self.check(actor, Permission::Load).await?;
        let drain = drain.unwrap_or(DRAIN).min(DRAIN_MAX);
        let model = self.catalog.name_of(model);
        self.loader.unload(&model, drain).await.map_err(|error| errors::not_loaded(&error))
    }

    async fn guests(&self, actor: Actor) -> Result<Vec<GuestInfo>, ErrorBody> {
        let guests = self.host.guests();
        let are_of_others = guests.iter().any(|guest| guest.actor != ActorId(actor.uid));
        // Only where it matters: it may take a look-up.
        let sees_others = are_of_others && self.permissions.get().has(actor, Permission::SeeOthers).await?;
        let guests = guests.into_iter();
        let guests = guests.filter(|guest| sees_others || guest.actor == ActorId(actor.uid));
        let info = guests.map(|guest| GuestInfo {
            guest_id: guest.id.0,
            session_id: guest.session.0,
            uid: guest.actor.0,
            class: self.accounts.class(guest.actor).map(|class| class.name().to_owned()),
            program: guest.name,
            state: match guest.activity {
                GuestActivity::Running => "running".to_owned(),
                GuestActivity::Waiting => "waiting".to_owned(),
            },
            models: guest.models,
            n_contexts: guest.amounts.n_contexts,
            n_pages: guest.amounts.n_pages,
            n_pages_on_host: guest.n_pages_on_host,
            memory_bytes: guest.amounts.memory_bytes,
            elapsed_ms: guest.elapsed_ms,
            n_prompt_tokens: guest.n_prompt_tokens.0,
            n_prompt_tokens_left: guest.n_prompt_tokens.1,
            usage: GuestUsage { elapsed_us: guest.elapsed_ms * 1000, ..usage(&guest.used) },
            used: Some(amounts(&guest.amounts)),
            limits: Some(amounts(&guest.limits)),
            // The session knows.
            is_detached: false,
            is_attached: false,
        });
        Ok(info.collect())
    }

    async fn info(&self, actor: Actor) -> Result<DaemonInfo, ErrorBody> {
        let listing = self.loader.models().listing();
        let models = listing.loaded();
        let mut devices: Vec<DeviceInfo> = listing.devices().iter().map(device_info).collect();
        let (mut kv_bytes, mut kv_bytes_free) = (0, 0);
        for model in models.iter().chain(listing.leaving()) {
            let device = listing.devices().iter().position(|device| device.engine.is_of(model));
            // One that has just gone, or whose device has, has no pages any more.
            let (Some(idx), Ok(stats)) = (device, model.stats().await) else { continue };
            add_model(&mut devices[idx], model, &stats);
            self.loader.totals().see(model, &stats);
            let page_bytes = model.limits().page_bytes as u64;
            kv_bytes += stats.n_pages as u64 * page_bytes;
            kv_bytes_free += n_pages_free(&stats) * page_bytes;
        }
        let (news, failure) = (self.loader.news(), self.loader.models().failure());
        Ok(DaemonInfo {
            build: concat!("trellis ", env!("CARGO_PKG_VERSION")).to_owned(),
            pid: std::process::id(),
            device: device_names(&models),
            devices,
            models: names(&models),
            programs: self.registry.names().await,
            uptime_ms: whole_ms(self.started.elapsed()),
            resident_bytes: resident_bytes().unwrap_or_default(),
            kv_bytes,
            kv_bytes_free,
            computed: self.loader.totals().all(),
            n_guests: self.host.guests().len() as u64,
            n_sessions: self.n_sessions.load(Ordering::Relaxed),
            // The session knows whether it is draining.
            state: Some(if failure.is_some() { "failed" } else { "ready" }.to_owned()),
            loading: news.loading(),
            failure: failure.map(|failure| failure.to_string()),
            // Where files are is for the operator, and may be said there.
            last_failure: news.last_failure().filter(|_| is_operator(actor)),
            class: self.accounts.class(ActorId(actor.uid)).map(|class| class.info()),
            // All else is said also where the machine does not say who is in which group.
            permissions: self.permissions.get().names(actor).await.ok(),
            isolation: Some(self.host.isolation().name().to_owned()),
            file_rules: self.host.file_rules().map(str::to_owned),
            policy: self.loader.policy().map(|policy| match is_operator(actor) {
                true => policy.shown(),
                false => "set".to_owned(),
            }),
        })
    }

    async fn limits(&self, actor: Actor, used: SessionsUsed) -> Result<Vec<LimitInfo>, ErrorBody> {
        let listing = self.loader.models().listing();
        let (mut kv_bytes, mut kv_bytes_held, mut kv_host_bytes) = (0, 0, 0);
        for model in listing.loaded().iter().chain(listing.leaving()) {
            let Ok(stats) = model.stats().await else { continue };
            let page_bytes = model.limits().page_bytes as u64;
            kv_bytes += stats.n_pages as u64 * page_bytes;
            kv_bytes_held += (stats.n_pages as u64 - n_pages_free(&stats)) * page_bytes;
            kv_host_bytes += stats.n_pages_on_host as u64 * page_bytes;
        }
        let kv = KvUsed { bytes: kv_bytes_held, host_bytes: kv_host_bytes };
        let user = ActorId(actor.uid);
        let saved = match self.loader.keepers() {
            Some(keepers) => {
                let keepers = keepers.clone();
                blocking(move || (keepers.n_bytes(Some(user)), keepers.n_bytes(None))).await
            }
            None => (0, 0),
        };
        let in_use = InUse::now(user, &self.accounts, &self.host, used, kv, saved);
        let config = &*self.reload.running();
        let mut limits = crate::limits::table(config);
        crate::limits::set_memory(&mut limits, config, machine::memory_bytes());
        let is_cpu = listing.devices().iter().all(|device| device.device == String::from(Device::Cpu));
        crate::limits::set_sizes(&mut limits, &config.sizes(if is_cpu { Sizes::CPU } else { Sizes::CUDA }));
        let sees_others = self.permissions.get().has(actor, Permission::SeeOthers).await?;
        if let Some(class) = self.accounts.class(user) {
            let host_bytes = config.host_bytes(machine::memory_bytes());
            crate::limits::set_class(&mut limits, host_bytes, |name, most| class.limit(name, most));
        }
        let limits = limits.into_iter().map(|limit| {
            let Share { user, all } = in_use.of(&limit.name);
            let mut info = LimitInfo::from(limit);
            if info.name == "kv_bytes" {
                info.value.get_or_insert(kv_bytes);
            }
            // What others do is not for everybody.
            LimitInfo { used: user, used_by_all: all.filter(|_| sees_others), ..info }
        });
        Ok(limits.collect())
    }

    async fn metrics(&self, actor: Option<Actor>, counts: &SessionCounts) -> Result<Exposition, ErrorBody> {
        // As in `limits`; where that cannot be found out, all else is told.
        let sees_others = match actor {
            Some(actor) => self.permissions.get().has(actor, Permission::SeeOthers).await.unwrap_or(false),
            None => false,
        };
        Ok(self.exposition(sees_others, counts).await)
    }

    async fn logs(&self, actor: Actor, asked: LogsAsked) -> Result<LogLines, ErrorBody> {
        self.check(actor, Permission::Operate).await?;
        told::logs(asked).await
    }

    async fn stop(&self, actor: Actor, guest_id: u64) -> Result<(), ErrorBody> {
        let id = GuestId(guest_id);
        // One's own guests are stopped whatever the machine says of one's groups.
        let Err(error) = self.host.stop(id, Some(ActorId(actor.uid))) else { return Ok(()) };
        if !self.permissions.get().has(actor, Permission::StopOthers).await? {
            return Err(errors::refused(&error));
        }
        self.host.stop(id, None).map_err(|error| errors::refused(&error))
    }

    async fn reload(&self, actor: Actor) -> Result<ReloadInfo, ErrorBody> {
        self.check(actor, Permission::Operate).await?;
        self.reload.reload().await.map_err(|error| errors::not_reloaded(&error))
    }

    async fn upgrade(&self, actor: Actor, program: Option<String>) -> Result<UpgradeInfo, ErrorBody> {
        self.check(actor, Permission::Operate).await?;
        let begun = self.upgrade.begin(program.map(PathBuf::from)).await;
        begun.map_err(|error| errors::not_upgraded(&error))
    }

    async fn shutdown(&self, actor: Actor) -> Result<(), ErrorBody> {
        self.check(actor, Permission::Operate).await?;
        self.upgrade.give_up();
        self.shutdown.cancel();
        Ok(())
    }

    async fn session_began(&self, actor: Actor, session_id: u64) -> Arc<Account> {
        let class = self.accounts.class_of(actor).await;
        self.n_sessions.fetch_add(1, Ordering::Relaxed);
        self.accounts.begin_session(ActorId(actor.uid), SessionId(session_id), class)
    }

    fn limit_of(&self, actor: Actor, name: &'static str, most: usize) -> usize {
        let limit = self.accounts.limit_of(ActorId(actor.uid), name, most as u64);
        usize::try_from(limit).unwrap_or(usize::MAX)
    }

    fn session_ended(&self, session_id: u64) {
        self.n_sessions.fetch_sub(1, Ordering::Relaxed);
        self.accounts.end_session(SessionId(session_id));
    }
}

fn random_seed() -> Result<u64, ErrorBody> {
    let mut bytes = [0; 8];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(|error| errors::internal(&error))?;
    Ok(u64::from_le_bytes(bytes))
}
