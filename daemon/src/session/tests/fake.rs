use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use tokio_util::sync::CancellationToken;
use trellis_engine::account::{Account, ActorId, SessionId};
use trellis_wire::{
    ComponentHash, DaemonInfo, ErrorBody, ErrorCode, GuestInfo, GuestUsage, ModelInfo, Program, Stage,
};

use crate::accounts::Accounts;
use crate::config::Budgets;
use crate::guest::{GuestIo, GuestOutput};
use crate::session::{
    Actor, GuestEnd, ProgressSink, RunningGuest, Service, StartRequest, StopHandle, StopReason,
};

/// A service whose guests do what their program's name says.
#[derive(Debug, Default)]
pub(crate) struct Fake {
    pub(crate) components: Mutex<HashMap<ComponentHash, Bytes>>,
    pub(crate) n_stored: AtomicUsize,
    /// Whether it never finds out who may upload.
    pub(crate) is_at_a_loss: AtomicBool,
    pub(crate) stop_reasons: Arc<Mutex<Vec<StopReason>>>,
    /// What a request to shut down cancels; without it, no client may.
    pub(crate) shutdown: OnceLock<CancellationToken>,
    /// What sessions and users may use; as much as they like without.
    pub(crate) accounts: OnceLock<Arc<Accounts>>,
    guests: Mutex<HashMap<u64, CancellationToken>>,
    n_guests: AtomicU64,
    n_alive: Arc<AtomicUsize>,
}

impl Fake {
    pub(crate) fn n_alive(&self) -> usize {
        self.n_alive.load(Ordering::SeqCst)
    }
}

/// What a guest holds; counted until it is torn down.
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

async fn text(io: &GuestIo, text: impl Into<String>) -> Result<(), ErrorBody> {
    let gone = |_| ErrorBody::new(ErrorCode::Cancelled, "the client is gone");
    io.output.send(GuestOutput::Text(text.into())).await.map_err(gone)
}

async fn script(name: String, arguments: Vec<String>, mut io: GuestIo) -> Result<(), ErrorBody> {
    let argument = arguments.first().cloned().unwrap_or_default();
    let number = argument.parse::<u64>().unwrap_or_default();
    match name.as_str() {
        "count" => {
            for n in 0..number {
                text(&io, format!("{n} ")).await?;
            }
            Ok(())
        }
        "flood" => loop {
            text(&io, "x".repeat(1024)).await?;
        },
        "drops" => loop {
            text(&io, "x").await?;
        },
        "echo" => {
            while let Some(message) = io.input.recv().await {
                text(&io, message).await?;
            }
            Ok(())
        }
        // It ends well whatever becomes of what it says.
        "last word" => {
            while text(&io, "bye").await.is_ok() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            Ok(())
        }
        "large" => text(&io, "y".repeat(usize::try_from(number).unwrap())).await,
        "json" => {
            let json = "1".repeat(usize::try_from(number).unwrap());
            io.output
                .send(GuestOutput::Json(json))
                .await
                .map_err(|_| ErrorBody::new(ErrorCode::Cancelled, "gone"))
        }
        "fail" => Err(ErrorBody::new(ErrorCode::GuestFailed, argument)),
        "fail at length" => {
            let text = "é".repeat(usize::try_from(number).unwrap());
            Err(ErrorBody::new(ErrorCode::GuestFailed, text.clone()).about("n").with_value(text))
        }
        "panic" => panic!("a guest that panics"),
        _ => std::future::pending().await,
    }
}

impl Service for Fake {
    async fn start(
        &self,
        request: StartRequest,
        io: GuestIo,
        progress: ProgressSink,
    ) -> Result<RunningGuest, ErrorBody> {
        let alive = Alive::new(&self.n_alive);
        let name = match request.program {
            Program::Named { name } => name,
            Program::Component { hash } => {
                if !self.components.lock().unwrap().contains_key(&hash) {
                    return Err(ErrorBody::new(ErrorCode::UnknownComponent, "upload it"));
                }
                progress.report(Stage::Compile, 3, 3);
                "count".to_owned()
            }
            Program::Unknown => unreachable!("refused by the session"),
        };
        match name.as_str() {
            "nowhere" => {
                return Err(
                    ErrorBody::new(ErrorCode::UnknownProgram, "nothing of that name").about("nowhere")
                );
            }
            "slow start" => tokio::time::sleep(Duration::from_secs(3600)).await,
            // A guest that is begun in spite of a cancel: such a start is over at its next await, and has none.
            "late start" => std::thread::sleep(Duration::from_millis(100)),
            "panic at start" => panic!("a service that panics"),
            _ => {}
        }
        let guest_id = self.n_guests.fetch_add(1, Ordering::SeqCst) + 1;
        let token = CancellationToken::new();
        self.guests.lock().unwrap().insert(guest_id, token.clone());
        let (reason_sender, stopped) = tokio::sync::oneshot::channel::<StopReason>();
        let is_stubborn = matches!(name.as_str(), "stubborn" | "last word");
        let task = tokio::spawn(async move {
            let _alive = alive;
            let result = tokio::select! {
                result = script(name, request.arguments, io) => result,
                // As the service: it does not tell by whom.
                Ok(_) = stopped, if !is_stubborn => Err(ErrorBody::new(ErrorCode::Stopped, "stopped")),
                () = token.cancelled() => Err(ErrorBody::new(ErrorCode::Stopped, "stopped by hand")),
            };
            GuestEnd { result, usage: GuestUsage { n_tokens: 1, ..GuestUsage::default() } }
        });
        let end = async move { task.await.expect("the guest panicked") }.boxed();
        let stop_reasons = self.stop_reasons.clone();
        let stop = StopHandle::new(move |reason| {
            stop_reasons.lock().unwrap().push(reason);
            let _ = reason_sender.send(reason);
        });
        Ok(RunningGuest { guest_id, end, stop })
    }

    async fn may_upload(&self, _: Actor) -> Result<(), ErrorBody> {
        match self.is_at_a_loss.load(Ordering::SeqCst) {
            true => std::future::pending().await,
            false => Ok(()),
        }
    }

    async fn store_component(&self, _: Actor, hash: ComponentHash, bytes: Bytes) -> Result<(), ErrorBody> {
        // Others go on meanwhile.
        tokio::time::sleep(Duration::from_millis(5)).await;
        self.n_stored.fetch_add(1, Ordering::SeqCst);
        self.components.lock().unwrap().insert(hash, bytes);
        Ok(())
    }

    fn has_component(&self, _: Actor, hash: &ComponentHash) -> bool {
        self.components.lock().unwrap().contains_key(hash)
    }

    async fn models(&self, _: Actor) -> Result<Vec<ModelInfo>, ErrorBody> {
        Ok(vec![ModelInfo { name: "tiny".into(), n_vocab: 512, ..ModelInfo::default() }])
    }

    async fn guests(&self, actor: Actor) -> Result<Vec<GuestInfo>, ErrorBody> {
        let mut ids: Vec<_> = self.guests.lock().unwrap().keys().copied().collect();
        ids.sort_unstable();
        let info = |guest_id| GuestInfo { guest_id, uid: actor.uid, ..GuestInfo::default() };
        Ok(ids.into_iter().map(info).collect())
    }

    async fn info(&self, _: Actor) -> Result<DaemonInfo, ErrorBody> {
        Ok(DaemonInfo { build: "x".repeat(2 << 20), ..DaemonInfo::default() })
    }

    async fn stop(&self, _: Actor, guest_id: u64) -> Result<(), ErrorBody> {
        let unknown = || ErrorBody::new(ErrorCode::UnknownGuest, "no such guest").with_value(guest_id);
        self.guests.lock().unwrap().get(&guest_id).ok_or_else(unknown)?.cancel();
        Ok(())
    }

    async fn session_began(&self, actor: Actor, session_id: u64) -> Arc<Account> {
        let accounts = self.accounts.get_or_init(|| Accounts::new(&Budgets::default(), 1 << 50));
        accounts.begin_session(ActorId(actor.uid), SessionId(session_id), accounts.class_of(actor).await)
    }

    fn limit_of(&self, actor: Actor, name: &'static str, most: usize) -> usize {
        let limit = |accounts: &Arc<Accounts>| accounts.limit_of(ActorId(actor.uid), name, most as u64);
        self.accounts.get().map_or(most, |accounts| limit(accounts) as usize)
    }

    async fn shutdown(&self, _: Actor) -> Result<(), ErrorBody> {
        let denied = || ErrorBody::new(ErrorCode::PermissionDenied, "not you");
        self.shutdown.get().ok_or_else(denied)?.cancel();
        // Its own session sees the end before the answer.
        tokio::time::sleep(Duration::from_millis(20)).await;
        Ok(())
    }
}
