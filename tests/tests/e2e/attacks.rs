//! Every attack of the table once, many at a time, by a user beside whom another one streams: each comes to an end that the table
//! has, the stream is what it is alone, and nothing is held afterwards.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use futures_util::{StreamExt, stream};
use tempfile::TempDir;
use tokio::net::{UnixListener, UnixStream};
use trellis::config::{Config, Isolation};
use trellis::daemon::Daemon;
use trellis::guest::GuestLimits;
use trellis::session::Actor;
use trellis_client::{Client, Event, Program, StartOptions};
use trellis_tests::attacks::{Attack, Category, Component, Site, saved, suite, table};
use trellis_tests::daemons::{self, nothing_is_held, run, until, with};
use trellis_tests::engines::block_on;
use trellis_tests::guests;

use crate::exe;

/// Attacks at a time.
const N_AT_ONCE: usize = 12;

/// How long those go on that could go on for ever.
const TIME: Duration = Duration::from_millis(1_000);

/// What nobody else on the machine is: the attackers, those of attacks that take all that a user may have, and the neighbour.
const USERS: [u32; 3] = [60_101, 60_102, 60_103];

const NEIGHBOUR: Actor = Actor { uid: USERS[2], gid: USERS[2] };

/// Attacks that run out of processor time do so in this.
const CPU_MS: u64 = 300;

/// Attacks that wait run out of time in this.
const DEADLINE_MS: u64 = 2_500;

/// Components that may wait to be compiled: more than there are attacks, so that none is refused for another.
const N_COMPILES_QUEUED: usize = 1_000;

fn config(isolation: Isolation, folder: &Path) -> Config {
    let config = saved::on_disk(suite::config(daemons::config(exe())), folder);
    let config = Config { isolation, ..config };
    let limits = GuestLimits {
        cpu_ms: CPU_MS,
        deadline_ms: DEADLINE_MS,
        idle_ms: 1_000,
        memory_bytes: 64 << 20,
        compile_ms: 120_000,
        n_compiles_queued: N_COMPILES_QUEUED,
        n_programs: GuestLimits::default().n_programs,
        ..config.limits
    };
    Config { limits, ..config }
}

/// What the neighbour streams. It fits into the time that a guest has here, on a machine that has much else to do.
fn streamed() -> StartOptions {
    with(&["tokens", "24", "<|begin_of_text|>Once upon a time"])
}

/// A daemon with a socket for each of the attacking users, and the neighbour's connection.
struct Place {
    daemon: Arc<Daemon>,
    folder: TempDir,
}

impl Place {
    fn open(isolation: Isolation) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let place = Self { daemon: Arc::new(daemons::start(&config(isolation, folder.path()))), folder };
        for uid in &USERS[..2] {
            let listener = UnixListener::bind(place.socket(*uid)).expect("the place is free");
            let (daemon, actor) = (place.daemon.clone(), Actor { uid: *uid, gid: *uid });
            tokio::spawn(async move {
                while let Ok((stream, _)) = listener.accept().await {
                    let daemon = daemon.clone();
                    // How a connection ends is its client's to see.
                    tokio::spawn(async move {
                        let _ = daemon.sessions().serve(stream, actor, daemon.shutdown().clone()).await;
                    });
                }
            });
        }
        place
    }

    fn socket(&self, uid: u32) -> std::path::PathBuf {
        self.folder.path().join(format!("{uid}.sock"))
    }

    /// A connection of the neighbour.
    async fn neighbour(&self) -> Client {
        let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
        let daemon = self.daemon.clone();
        tokio::spawn(async move {
            let _ = daemon.sessions().serve(theirs, NEIGHBOUR, daemon.shutdown().clone()).await;
        });
        Client::over(ours).await.expect("the daemon says hello")
    }

    /// Lets one attack loose; what is wrong with how it ended.
    async fn attack(&self, attack: Attack, uid: u32) -> Option<String> {
        let (socket, until) = (self.socket(uid).into(), Instant::now() + TIME);
        let site = Site { socket, hostile: hostile(), until, patience: None };
        let ended = tokio::time::timeout(daemons::PATIENCE, attack.run(&site)).await;
        let wrong = match ended {
            Err(_) => Some("it does not end".to_owned()),
            Ok(Err(error)) => Some(format!("the connection failed: {error}")),
            Ok(Ok(ending)) if attack.allows(&ending) => None,
            Ok(Ok(ending)) => Some(format!("it ended with {ending:?}, and may with {:?}", attack.ends)),
        };
        let cleaned = attack.clean_up(&site).await.err().map(|error| error.to_string());
        wrong.or(cleaned).map(|wrong| format!("{}: {wrong}", attack.name))
    }
}

fn hostile() -> Component {
    static HOSTILE: OnceLock<Component> = OnceLock::new();
    HOSTILE.get_or_init(|| Component::new(guests::hostile())).clone()
}

/// Lets all attacks of a category loose, those that take all that a user may have one after the other.
fn attack_by_all(category: Category, isolation: Isolation) {
    block_on(async {
        let place = Place::open(isolation);
        let client = place.neighbour().await;
        let wasm = guests::hostile();
        let alone = run(&client, &wasm, streamed()).await.well().tokens;
        assert_eq!(alone.len(), 24);
        for uid in &USERS[..2] {
            // Each user has it compiled: what follows is about guests that run.
            let attacker = Client::connect_to(&place.socket(*uid)).await.expect("it listens");
            let _ = run(&attacker, &wasm, with(&["exit-well"])).await.well();
        }
        let aside = async |mode: &'static str| run(&client, &wasm, with(&[mode, suite::ASIDE])).await.well();
        aside("set-aside").await;
        // What another user's guest has sent and nobody has read yet.
        let detached = client.start_detached(Program::wasm(wasm.clone()), streamed(), |_| {}).await;
        let detached = detached.expect("it starts");
        let kept = || place.daemon.sessions().used(NEIGHBOUR).user;
        until("it has ended", async || (kept().n_detached, kept().n_detached_ended) == (0, 1)).await;

        let attacks: Vec<Attack> = table().into_iter().filter(|attack| attack.category == category).collect();
        let (greedy, others): (Vec<Attack>, Vec<Attack>) = attacks.iter().partition(|attack| attack.is_alone);
        let is_over = AtomicBool::new(false);
        let begun = Instant::now();
        let attacked = async {
            let at_once = stream::iter(others).map(|attack| place.attack(attack, USERS[0]));
            let at_once = at_once.buffer_unordered(N_AT_ONCE).filter_map(|wrong| async move { wrong });
            let one_by_one = stream::iter(greedy).then(|attack| place.attack(attack, USERS[1]));
            let one_by_one = one_by_one.filter_map(|wrong| async move { wrong });
            let (some, others): (Vec<String>, Vec<String>) =
                tokio::join!(at_once.collect(), one_by_one.collect());
            is_over.store(true, Ordering::Relaxed);
            [some, others].concat()
        };
        let neighbour = async {
            let mut n_rounds = 0;
            while n_rounds < 2 || !is_over.load(Ordering::Relaxed) {
                let ended = run(&client, &wasm, streamed()).await;
                // It has no more time than the attackers have; what it has streamed until then is what counts.
                let is_late = ended.error.is_some() && ended.reason().name.as_deref() == Some("deadline_ms");
                assert!(ended.error.is_none() || is_late, "round {n_rounds}: {ended:?}");
                assert!(
                    alone.starts_with(&ended.tokens),
                    "round {n_rounds}: {:?} for {alone:?}",
                    ended.tokens
                );
                n_rounds += usize::from(!is_late);
            }
            n_rounds
        };
        let (wrong, n_rounds) = tokio::join!(attacked, neighbour);
        println!(
            "{} ({isolation:?}): {} attacks, {n_rounds} rounds, {:?}",
            category.name(),
            attacks.len(),
            begun.elapsed()
        );
        assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), attacks.len(), wrong.join("\n"));
        aside("is-aside").await;
        until("on disk is what is saved, no more than may be, and nothing half written", async || {
            let files = saved::files(place.folder.path()).expect("the folder is read");
            let users: Vec<String> = saved::bytes(&files).into_keys().collect();
            saved::beyond(&files, suite::SAVED_BYTES_MAX).is_empty() && users == [USERS[2].to_string()]
        })
        .await;
        aside("forget-one").await;
        let mut attached = client.attach(detached, Some(0)).await.expect("all of it is kept");
        let mut tokens = Vec::new();
        while let Some(event) = attached.next().await {
            if let Event::Tokens { tokens: more } = event.expect("it ended well") {
                tokens.extend(more);
            }
        }
        assert_eq!(tokens, alone, "what the neighbour's detached guest sent");
        drop((attached, client));
        nothing_is_held(&place.daemon).await;
    });
}

#[test]
fn there_are_many_and_each_has_a_name() {
    let attacks = table();
    let mut names: Vec<&str> = attacks.iter().map(|attack| attack.name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), attacks.len(), "a name is used twice");
    assert!(names.len() >= 150, "{}", names.len());
    assert!(attacks.iter().all(|attack| !attack.ends.is_empty()));
}

#[test]
fn load_and_compile() {
    attack_by_all(Category::Load, Isolation::Thread);
}

#[test]
fn processor_and_memory() {
    attack_by_all(Category::Processor, Isolation::Thread);
}

#[test]
fn boundary() {
    attack_by_all(Category::Boundary, Isolation::Thread);
}

#[test]
fn decoding() {
    attack_by_all(Category::Decoding, Isolation::Thread);
}

#[test]
fn input_and_output() {
    attack_by_all(Category::Io, Isolation::Thread);
}

#[test]
fn life_cycle() {
    attack_by_all(Category::Life, Isolation::Thread);
}

/// The same while the guests of each user have a process of their own.
#[cfg(target_os = "linux")]
mod by_process {
    use super::*;

    #[test]
    fn load_and_compile() {
        attack_by_all(Category::Load, Isolation::Process);
    }

    #[test]
    fn processor_and_memory() {
        attack_by_all(Category::Processor, Isolation::Process);
    }

    #[test]
    fn boundary() {
        attack_by_all(Category::Boundary, Isolation::Process);
    }

    #[test]
    fn decoding() {
        attack_by_all(Category::Decoding, Isolation::Process);
    }

    #[test]
    fn input_and_output() {
        attack_by_all(Category::Io, Isolation::Process);
    }

    #[test]
    fn life_cycle() {
        attack_by_all(Category::Life, Isolation::Process);
    }
}
