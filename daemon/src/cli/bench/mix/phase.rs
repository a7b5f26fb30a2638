//! One phase: its loads side by side, for as long as the mix says.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use trellis_engine::account::{Account, ActorId, Budget, GuestId, Owner, Resource, SessionId};
use trellis_engine::batch::Token;
use trellis_engine::{EngineStats, ModelHandle};

use super::clients::{Clients, Does};
use super::error::MixError;
use super::file::{Mix, Phase};
use super::load::{Kind, Load};
use super::loads::Operator;
use super::member::{Member, Seat};
use super::programs;
use super::tally::{Gaps, Mark, Marks, counter_rates, pace, rates};
use crate::cli::bench::speed::{Tolerance, check_streams};
use crate::cli::bench::{BenchError, engine};
use crate::cli::error::CliError;
use crate::cli::progress::{ProgressDisplay, Unit};

/// How often progress is shown.
const TICK: Duration = Duration::from_millis(100);
/// How long contexts of a phase that is over may take to be gone.
const PATIENCE: Duration = Duration::from_secs(60);

/// What all phases share.
pub(super) struct Stage<'a> {
    pub(super) model: &'a ModelHandle,
    /// If the mix has one.
    pub(super) second: Option<&'a ModelHandle>,
    pub(super) mix: &'a Mix,
    /// The client that loads and unloads models, if the mix wants that.
    pub(super) operator: Option<&'a Operator>,
    pub(super) clients: Option<&'a Clients>,
    pub(super) progress: &'a ProgressDisplay,
    pub(super) reference: &'a Reference,
}

/// A greedy stream that was decoded alone.
pub(super) struct Reference {
    pub(super) prompt: Vec<Token>,
    pub(super) tokens: Vec<Token>,
    pub(super) tolerance: Tolerance,
}

/// What was seen of a phase.
pub(super) struct Seen {
    pub(super) loads: Vec<LoadSeen>,
    pub(super) stats: EngineDelta,
    /// Tokens of the greedy stream that came out the same beside the loads.
    pub(super) n_equal: usize,
}

/// What was seen of a load.
pub(super) struct LoadSeen {
    /// Its place in the mix.
    pub(super) idx: usize,
    /// Tokens a second of all members, in each window and over all.
    pub(super) rates: Vec<f64>,
    pub(super) tokens_per_s: f64,
    /// Tokens that were pulled in the measured time; of prompts nothing.
    pub(super) n_pulled: Option<usize>,
    pub(super) gaps: Option<Gaps>,
}

/// What the engine did in the measured time.
pub(super) struct EngineDelta {
    pub(super) elapsed: Duration,
    pub(super) begin: EngineStats,
    pub(super) end: EngineStats,
}

/// A load that runs.
struct Running {
    idx: usize,
    marks: Vec<Arc<Marks>>,
    account: Arc<Account>,
}

type Tasks = JoinSet<Result<Infallible, CliError>>;

impl Stage<'_> {
    /// Whether all contexts of a phase fit the engine at once, and their programs the models.
    ///
    /// # Errors
    /// They do not; with the numbers.
    pub(super) fn check(&self, phase: &Phase) -> Result<(), MixError> {
        let limits = self.model.limits();
        let mut needed = 0;
        for &idx in &phase.loads {
            let load = &self.mix.loads[idx];
            needed += load.n_pages(load.n_growth(limits.n_positions_max)?);
            if let Kind::Streams(streams) = &load.kind
                && let Some(program) = streams.draws_by()
            {
                let second = streams.second.as_ref().and(self.second);
                for model in [self.model].into_iter().chain(second) {
                    programs::sampler(program.clone(), 0, model)
                        .map_err(|source| MixError::Program { load: load.name.clone(), source })?;
                }
            }
        }
        if needed > limits.n_pages {
            return Err(MixError::TooFewPages { phase: phase.name.clone(), needed, n_pages: limits.n_pages });
        }
        Ok(())
    }

    /// Runs a phase from the first prompt to the end of the last window.
    ///
    /// # Errors
    /// A member failed, a load was silent, or the greedy stream differs beside the loads.
    pub(super) async fn run(&self, phase: &Phase) -> Result<Seen, CliError> {
        let mut tasks = Tasks::new();
        let (ready, mut readies) = mpsc::unbounded_channel();
        let (go, going) = watch::channel(false);
        let running: Vec<Running> = phase
            .loads
            .iter()
            .map(|&idx| self.start(idx, &mut tasks, &ready, &going))
            .collect::<Result<_, _>>()?;
        let n_members = tasks.len();
        for n_ready in 0..n_members {
            let title = format!("{}: computing prompts", phase.name);
            self.progress.update(&title, Unit::Items, n_ready as u64, n_members as u64);
            tokio::select! {
                _ = readies.recv() => {}
                error = failure(&mut tasks) => return Err(error),
            }
        }
        let _ = go.send(true);
        self.wait(&format!("{}: warming up", phase.name), self.mix.warm_up, &mut tasks).await?;
        let n_equal = tokio::select! {
            n_equal = self.verify(phase) => n_equal?,
            error = failure(&mut tasks) => return Err(error),
        };

        let title = format!("{}: measuring", phase.name);
        let begin = self.model.stats().await.map_err(BenchError::from)?;
        let mut bounds = vec![Instant::now()];
        let mut computed = vec![read(&running)];
        for window in 1..=self.mix.n_windows {
            let until = self.mix.measure * window as u32 / self.mix.n_windows as u32;
            let left = (bounds[0] + until).saturating_duration_since(Instant::now());
            self.wait(&title, left, &mut tasks).await?;
            bounds.push(Instant::now());
            computed.push(read(&running));
        }
        let end = self.model.stats().await.map_err(BenchError::from)?;
        let elapsed = bounds[self.mix.n_windows] - bounds[0];
        self.end(tasks).await?;
        let loads = running.iter().enumerate().map(|(place, running)| {
            let computed: Vec<u64> = computed.iter().map(|reading| reading[place]).collect();
            self.seen(running, &bounds, &computed)
        });
        let loads = loads.collect::<Result<_, _>>()?;
        Ok(Seen { loads, stats: EngineDelta { elapsed, begin, end }, n_equal })
    }

    fn start(
        &self,
        idx: usize,
        tasks: &mut Tasks,
        ready: &mpsc::UnboundedSender<()>,
        go: &watch::Receiver<bool>,
    ) -> Result<Running, CliError> {
        let load = &self.mix.loads[idx];
        let n_growth = load.n_growth(self.model.limits().n_positions_max).map_err(BenchError::from)?;
        let account = Account::new("user", Budget::UNLIMITED, None);
        let n_sent = Arc::new(AtomicUsize::new(0));
        let mut marks = Vec::with_capacity(load.count);
        for member_idx in 0..load.count {
            let seat = Seat { marks: Arc::new(Marks::default()), ready: ready.clone(), go: go.clone() };
            marks.push(seat.marks.clone());
            // Loads that follow one another may share prompts in the cache, members of a phase must not.
            let run = (idx << 16) | member_idx;
            let member = |user| Member {
                model: self.model.clone(),
                owner: owner(user, run, &account),
                seat: seat.clone(),
                run,
                idx: member_idx,
                n_prompt: load.n_prompt,
                n_growth,
            };
            match &load.kind {
                Kind::Streams(streams) => {
                    let (mut member, streams) = (member(streams.user), streams.clone());
                    let second = streams.second.as_ref().and(self.second).cloned();
                    if let Some(second) = second.clone()
                        && streams.n_others == 0
                        && member_idx % 2 == 1
                    {
                        member.model = second;
                    }
                    tasks.spawn(async move { Ok(member.stream(streams, second).await?) });
                }
                Kind::Stepping(stepping) => {
                    let (member, n_top) = (member(stepping.user), stepping.n_top);
                    tasks.spawn(async move { Ok(member.step(n_top).await?) });
                }
                Kind::Speculation(load) => {
                    let (member, load) = (member(load.user), load.clone());
                    tasks.spawn(async move { Ok(member.speculate(load).await?) });
                }
                Kind::Beams(beams) => {
                    let (member, beams) = (member(beams.user), beams.clone());
                    tasks.spawn(async move { Ok(member.search(beams).await?) });
                }
                Kind::Prompts(prompts) => {
                    let (member, n_sent) = (member(prompts.user), n_sent.clone());
                    tasks.spawn(async move { Ok(member.prompts(n_sent).await?) });
                }
                Kind::Loads(load) => {
                    let operator = self.operator.expect("a mix with loads has somebody who loads").clone();
                    tasks.spawn(operator.run(member(0), load.clone()));
                }
                Kind::Clients(of) => {
                    let clients = self.clients.expect("a mix with clients has a guest for them");
                    let (n_beams, draws) = (of.n_beams, of.draws);
                    let does = Does { n_beams, draws, n_tokens: n_growth, n_prompt: load.n_prompt };
                    tasks.spawn(clients.member(member_idx, does, seat));
                }
            }
        }
        Ok(Running { idx, marks, account })
    }

    /// Lets time pass, unless a member fails.
    async fn wait(&self, title: &str, time: Duration, tasks: &mut Tasks) -> Result<(), CliError> {
        let begun = Instant::now();
        while begun.elapsed() < time {
            let done = begun.elapsed().as_millis() as u64;
            self.progress.update(title, Unit::Items, done, time.as_millis() as u64);
            tokio::select! {
                () = tokio::time::sleep(TICK.min(time.saturating_sub(begun.elapsed()))) => {}
                error = failure(tasks) => return Err(error),
            }
        }
        Ok(())
    }

    /// Decodes the reference's stream beside the loads.
    async fn verify(&self, phase: &Phase) -> Result<usize, CliError> {
        let Reference { prompt, tokens, tolerance } = self.reference;
        let found = engine::stream(self.model, prompt, tokens.len()).await?.tokens;
        let place = format!("in the phase {:?}", phase.name);
        Ok(check_streams(self.model, prompt, tokens, &[found], &place, *tolerance).await?)
    }

    /// Ends all members and waits until the engine has forgotten them.
    async fn end(&self, mut tasks: Tasks) -> Result<(), CliError> {
        tasks.shutdown().await;
        if let Some(operator) = self.operator {
            operator.end().await?;
        }
        let begun = Instant::now();
        while begun.elapsed() < PATIENCE {
            if self.model.stats().await.map_err(BenchError::from)?.n_contexts == 0 {
                return Ok(());
            }
            tokio::time::sleep(TICK).await;
        }
        Err(BenchError::Lingering { seconds: PATIENCE.as_secs() }.into())
    }

    fn seen(&self, running: &Running, bounds: &[Instant], computed: &[u64]) -> Result<LoadSeen, CliError> {
        let load = &self.mix.loads[running.idx];
        let marks: Vec<Mark> = running.marks.iter().flat_map(|marks| marks.all()).collect();
        // A mark of a guest's search stands for a step of all its beams.
        let n_of_mark = if let Kind::Clients(of) = &load.kind { of.n_beams.unwrap_or(1) } else { 1 };
        let rates: Vec<f64> = match load.is_pulled() {
            true => rates(&marks, bounds).into_iter().map(|rate| rate * n_of_mark as f64).collect(),
            false => counter_rates(computed, bounds),
        };
        let tokens_per_s = pace(&rates, load.is_decoding());
        let (begin, end) = (bounds[0], bounds[bounds.len() - 1]);
        if rates.iter().sum::<f64>() <= 0.0 {
            let seconds = (end - begin).as_secs_f64();
            return Err(BenchError::from(MixError::Silent { load: load.name.clone(), seconds }).into());
        }
        let n_pulled = n_of_mark * marks.iter().filter(|mark| mark.at >= begin && mark.at < end).count();
        Ok(LoadSeen {
            idx: running.idx,
            rates,
            tokens_per_s,
            n_pulled: load.is_pulled().then_some(n_pulled),
            gaps: Gaps::of(&marks, bounds),
        })
    }
}

/// Why a member ended: none does by itself. Pending as long as none has.
async fn failure(tasks: &mut Tasks) -> CliError {
    match tasks.join_next().await {
        Some(Ok(Err(error))) => error,
        Some(Err(error)) => std::panic::resume_unwind(error.into_panic()),
        None => std::future::pending().await,
    }
}

/// A guest of this user in a session of its own, charged to the account of its load.
fn owner(user: u32, run: usize, account: &Arc<Account>) -> Owner {
    Owner {
        actor: ActorId(user),
        session: SessionId(run as u64),
        guest: GuestId(run as u64),
        account: Account::new("guest", Budget::UNLIMITED, Some(account.clone())),
    }
}

/// Tokens that were computed for each load.
fn read(running: &[Running]) -> Vec<u64> {
    running.iter().map(|load| load.account.used(Resource::Tokens)).collect()
}

/// Whether a mix has models that come and go.
pub(super) fn needs_operator(loads: &[Load]) -> bool {
    loads.iter().any(|load| matches!(load.kind, Kind::Loads(_)))
}

/// Loads of a mix that need guests.
pub(super) fn needs_guests(loads: &[Load]) -> bool {
    loads.iter().any(|load| load.n_guests() > 0)
}
