//! What happens in a scene, drawn from its seed before it begins: who is there, what they ask, and what goes wrong.

use std::time::Duration;

use trellis::config::{self, SharedBudget};
use trellis_engine::account::Budget;
use trellis_engine::backend::{AskLimits, Limits, PAGE_LEN, SteeringTimes};
use trellis_engine::{Port, PrefixScope};

use super::draws::Draws;
use super::naive;

/// Positions of the longest context.
pub(super) const N_POSITIONS: usize = 96;

/// More connections than the clients of any scene have.
pub(super) const N_CONNECTIONS_ENOUGH: usize = 64;

/// Names of the models.
pub(super) const MODELS: [&str; 2] = ["one", "two"];

/// What tells the answers of the models apart.
pub(super) fn salt(model_idx: usize) -> u64 {
    17 + model_idx as u64
}

/// A scene.
#[derive(Clone, Debug)]
pub(super) struct Scene {
    pub(super) models: Vec<DeviceScene>,
    pub(super) prefix_scope: PrefixScope,
    pub(super) port: Port,
    pub(super) n_step_tokens: usize,
    pub(super) budgets: Budgets,
    /// Connections of one user.
    pub(super) n_connections: usize,
    /// Requests in flight on one connection.
    pub(super) n_requests: usize,
    pub(super) clients: Vec<ClientScene>,
    pub(super) end: End,
    pub(super) unload: Option<Unload>,
    /// How detached guests are kept.
    pub(super) detached: DetachedLimits,
    /// When all models together are to have another number of pages, in parts of a thousand of what they have.
    pub(super) share: Option<(Duration, u64)>,
}

/// Budgets of each guest, and of what lies around it: session, user and daemon.
#[derive(Clone, Copy, Debug)]
pub(super) struct Budgets {
    pub(super) guest: Budget,
    pub(super) around: config::Budgets,
    pub(super) is_limited: bool,
}

/// How detached guests are kept.
#[derive(Clone, Copy, Debug)]
pub(super) struct DetachedLimits {
    /// Of one user.
    pub(super) n_max: usize,
    /// Ends that are kept of one user.
    pub(super) n_ended: usize,
    pub(super) kept_bytes: usize,
    pub(super) idle_ms: u64,
    pub(super) ended_ms: u64,
}

/// A model's device.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeviceScene {
    pub(super) n_pages: usize,
    pub(super) n_pages_max: usize,
    pub(super) n_host_pages: usize,
    pub(super) n_rows_max: usize,
    pub(super) n_tokens_max: usize,
    pub(super) n_steps_under_way: usize,
    /// Whether the thread of the engine computes.
    pub(super) is_by_caller: bool,
    pub(super) has_states: bool,
    pub(super) step_time: Duration,
    pub(super) token_time: Duration,
    pub(super) per_mille_failed: usize,
    pub(super) per_mille_lost: usize,
    pub(super) per_mille_stalled: usize,
}

/// A client.
#[derive(Clone, Debug)]
pub(super) struct ClientScene {
    pub(super) uid: u32,
    pub(super) comes: Duration,
    pub(super) link: LinkScene,
    /// Whether it speaks frames by hand, with little credit.
    pub(super) is_raw: bool,
    pub(super) requests: Vec<RequestScene>,
    /// Whether all requests are made together.
    pub(super) is_at_once: bool,
    /// When it leaves whatever is under way.
    pub(super) leaves: Option<Duration>,
    /// Whether it ends with a message that breaks the protocol.
    pub(super) breaks: bool,
}

/// A request.
#[derive(Clone, Debug)]
pub(super) enum RequestScene {
    Guest(GuestScene),
    Models,
    Guests,
    Limits,
    /// Starts a guest that goes on alone, and reads it.
    Detached(DetachedScene),
    /// Stops the guest of this number, if there is one of this user.
    Stop(u64),
}

/// A guest.
#[derive(Clone, Debug)]
pub(super) struct GuestScene {
    pub(super) script: u64,
    pub(super) model: usize,
    /// The component to upload, or a named program.
    pub(super) component: Option<u8>,
    /// Time after each event.
    pub(super) pause: Duration,
    pub(super) give_up: Option<GiveUp>,
}

/// A detached guest, and how it is read.
#[derive(Clone, Debug)]
pub(super) struct DetachedScene {
    pub(super) guest: GuestScene,
    /// Long texts that it sends at last.
    pub(super) n_texts: usize,
    pub(super) readings: Vec<ReadingScene>,
    /// Whether it is read to its end after those.
    pub(super) is_read_out: bool,
}

/// One connection that reads a detached guest.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReadingScene {
    /// Time before it.
    pub(super) after: Duration,
    pub(super) link: LinkScene,
    /// Events after which the client has enough.
    pub(super) n_events: usize,
    /// Whether it asks for what comes next, and not for the oldest that is kept.
    pub(super) is_from_next: bool,
    /// Whether it says before it goes what it has read.
    pub(super) acknowledges: bool,
    /// Whether it stays and is taken over by the next.
    pub(super) stays: bool,
}

/// When a client gives a guest up, and how.
#[derive(Clone, Copy, Debug)]
pub(super) struct GiveUp {
    pub(super) after: Duration,
    pub(super) is_drop: bool,
}

/// A connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct LinkScene {
    pub(super) capacity: usize,
    pub(super) split_max: usize,
    pub(super) delay_ms: usize,
    pub(super) cut: Option<Cut>,
}

/// The end of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cut {
    /// 0 for what the client sends.
    pub(super) direction: usize,
    pub(super) at_byte: usize,
    pub(super) kind: CutKind,
}

/// How a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CutKind {
    Reset,
    Eof,
    Silence,
}

/// How the scene ends.
#[derive(Clone, Copy, Debug)]
pub(super) enum End {
    /// All clients leave.
    Left,
    /// The daemon goes down.
    Shutdown(Duration),
    /// Its sessions are dropped.
    Crash(Duration),
}

/// The end of a model.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unload {
    pub(super) at: Duration,
    pub(super) model: usize,
    pub(super) drain: Duration,
    pub(super) comes_back: bool,
}

fn ms(n: usize) -> Duration {
    Duration::from_millis(n as u64)
}

impl DeviceScene {
    pub(super) fn limits(&self) -> Limits {
        Limits {
            n_pages: self.n_pages_max,
            n_granule_pages: 2,
            n_host_pages: self.n_host_pages,
            page_bytes: 128,
            n_rows_max: self.n_rows_max,
            n_tokens_max: self.n_tokens_max,
            n_tile_tokens: 1,
            n_block_tokens: 1,
            n_queries_per_key: 1,
            n_positions_max: N_POSITIONS,
            vocab_size: naive::VOCAB,
            hidden_size: 1,
            n_layers: 2,
            n_steps_under_way: self.n_steps_under_way,
            n_slots: 64,
            n_states: if self.has_states { 64 } else { 0 },
            n_stretches_max: 0,
            logits_tokens: 1.0,
            steering: SteeringTimes::NONE,
            asks: AskLimits::NONE,
        }
    }

    fn draw(draws: &mut Draws, is_calm: bool) -> Self {
        let n_longest = N_POSITIONS / PAGE_LEN;
        let n_pages = (n_longest + draws.below(3 * n_longest)).next_multiple_of(2);
        let is_by_caller = draws.happens(250);
        let n_rows_max = draws.between(2, 8);
        let mut rare = |per_mille, least, most| match !is_calm && draws.happens(per_mille) {
            true => draws.between(least, most),
            false => 0,
        };
        let (per_mille_failed, per_mille_lost, per_mille_stalled) =
            (rare(350, 1, 60), rare(80, 1, 8), rare(200, 1, 40));
        Self {
            n_pages,
            n_pages_max: n_pages + 2 * draws.below(6),
            n_host_pages: if draws.happens(300) { 0 } else { draws.between(1, 40) },
            n_rows_max,
            n_tokens_max: n_rows_max + draws.between(8, 64),
            n_steps_under_way: if is_by_caller { 1 } else { draws.between(1, 2) },
            is_by_caller,
            has_states: draws.happens(500),
            step_time: ms(draws.between(1, 6)),
            token_time: Duration::from_micros(draws.below(100) as u64),
            per_mille_failed,
            per_mille_lost,
            per_mille_stalled,
        }
    }
}

impl Budgets {
    fn draw(draws: &mut Draws, is_calm: bool) -> Self {
        let all = SharedBudget::UNLIMITED;
        let around = config::Budgets { session: all, user: all, daemon: all };
        let is_limited = !is_calm && draws.happens(250);
        let mut budgets = Self { guest: Budget::UNLIMITED, around, is_limited };
        if !is_limited {
            return budgets;
        }
        let (resource, magnitude) = (draws.below(4), draws.below(1000));
        let most = |least: usize, most: usize| (least + magnitude * (most - least) / 1000) as u64;
        let of_around = match draws.below(4) {
            0 => {
                let budget = &mut budgets.guest;
                match resource {
                    0 => budget.n_tokens = most(10, 300),
                    1 => budget.n_pages = most(1, 12),
                    2 => budget.n_contexts = most(1, 5),
                    _ => budget.host_bytes = most(2_000, 30_000),
                }
                return budgets;
            }
            1 => &mut budgets.around.session,
            2 => &mut budgets.around.user,
            _ => &mut budgets.around.daemon,
        };
        match resource {
            0 => of_around.n_tokens = most(10, 300),
            1 => of_around.n_pages = most(1, 12),
            2 => of_around.n_contexts = most(1, 5),
            // What a detached guest may be ahead is paid for in one piece.
            _ => {
                of_around.host_bytes =
                    Some(most(2_000, if magnitude.is_multiple_of(2) { 30_000 } else { 900_000 }))
            }
        }
        budgets
    }
}

impl LinkScene {
    fn draw(draws: &mut Draws, is_calm: bool) -> Self {
        let cut = (!is_calm && draws.happens(150)).then(|| Cut {
            direction: draws.below(2),
            at_byte: {
                let magnitude = draws.between(4, 12);
                draws.below(1 << magnitude)
            },
            kind: draws.pick(&[CutKind::Reset, CutKind::Eof, CutKind::Silence]),
        });
        Self {
            capacity: draws.pick(&[64, 600, 4096, 65_536]),
            split_max: draws.pick(&[5, 60, 500, 65_536]),
            delay_ms: draws.pick(&[0, 0, 2, 30]),
            cut,
        }
    }
}

impl GuestScene {
    fn draw(draws: &mut Draws, is_calm: bool, n_models: usize) -> Self {
        Self {
            script: draws.number(),
            model: draws.below(n_models),
            component: draws.happens(200).then(|| draws.below(3) as u8),
            pause: if draws.happens(150) { ms(draws.between(1, 200)) } else { Duration::ZERO },
            give_up: (!is_calm && draws.happens(250))
                .then(|| GiveUp { after: ms(draws.below(150)), is_drop: draws.happens(500) }),
        }
    }
}

impl DetachedLimits {
    fn draw(draws: &mut Draws, is_calm: bool) -> Self {
        let mut is_short = |per_mille| !is_calm && draws.happens(per_mille);
        let (few, few_ended, idle, ended) = (is_short(100), is_short(60), is_short(250), is_short(60));
        Self {
            n_max: if few { 1 } else { 32 },
            n_ended: if few_ended { draws.below(2) } else { 32 },
            kept_bytes: draws.pick(&[0, 0, 300, 64 << 10]),
            idle_ms: if idle { draws.between(1, 300) as u64 } else { 3_600_000 },
            ended_ms: if ended { draws.between(1, 300) as u64 } else { 3_600_000 },
        }
    }

    /// Whether the end of a guest may be forgotten before anybody has read it.
    pub(super) fn may_forget(&self) -> bool {
        self.n_ended < 32 || self.ended_ms < 3_600_000
    }
}

impl DetachedScene {
    fn draw(draws: &mut Draws, is_calm: bool, n_models: usize) -> Self {
        let guest = GuestScene { give_up: None, ..GuestScene::draw(draws, is_calm, n_models) };
        let n_readings = draws.below(4);
        let reading = |draws: &mut Draws| ReadingScene {
            after: ms(draws.pick(&[0, 1, 20, 150])),
            link: LinkScene::draw(draws, is_calm),
            n_events: draws.below(12),
            is_from_next: draws.happens(500),
            acknowledges: draws.happens(500),
            stays: draws.happens(250),
        };
        Self {
            guest,
            // More than a guest may be ahead of its clients, in a few.
            n_texts: if draws.happens(60) { draws.between(40, 70) } else { 0 },
            readings: (0..n_readings).map(|_| reading(draws)).collect(),
            is_read_out: draws.happens(700),
        }
    }
}

impl ClientScene {
    fn draw(draws: &mut Draws, is_calm: bool, n_models: usize, n_users: usize) -> Self {
        let n_requests = draws.between(1, 4);
        let link = LinkScene::draw(draws, is_calm);
        // Nobody tells a client that its connection is silent.
        let is_silent = link.cut.is_some_and(|cut| cut.kind == CutKind::Silence);
        let is_raw = draws.happens(300);
        let request = |draws: &mut Draws| match draws.below(12) {
            0 => RequestScene::Models,
            1 => RequestScene::Guests,
            2 => RequestScene::Limits,
            4 | 5 if !is_raw => RequestScene::Detached(DetachedScene::draw(draws, is_calm, n_models)),
            3 if !is_calm => RequestScene::Stop(draws.between(1, 6) as u64),
            _ => RequestScene::Guest(GuestScene::draw(draws, is_calm, n_models)),
        };
        Self {
            uid: 1000 + draws.below(n_users) as u32,
            comes: ms(draws.below(60)),
            link,
            is_raw,
            requests: (0..n_requests).map(|_| request(draws)).collect(),
            is_at_once: draws.happens(500),
            leaves: (is_silent || !is_calm && draws.happens(150)).then(|| ms(draws.below(200))),
            breaks: !is_calm && draws.happens(150),
        }
    }
}

impl Scene {
    /// The scene of a seed.
    pub(super) fn of(seed: u64) -> Self {
        let draws = &mut Draws::of(seed, 0);
        let is_calm = draws.happens(200);
        let n_models = draws.between(1, MODELS.len());
        let n_users = draws.between(1, 3);
        let end = match draws.below(10) {
            0 | 1 if !is_calm => End::Shutdown(ms(draws.below(200))),
            2 if !is_calm => End::Crash(ms(draws.below(200))),
            _ => End::Left,
        };
        let unload = (!is_calm && draws.happens(150)).then(|| Unload {
            at: ms(draws.below(150)),
            model: draws.below(n_models),
            drain: ms(draws.pick(&[0, 20, 200])),
            comes_back: draws.happens(500),
        });
        let n_clients = draws.between(1, 4);
        let mut models: Vec<DeviceScene> = (0..n_models).map(|_| DeviceScene::draw(draws, is_calm)).collect();
        // They are on one device.
        let DeviceScene { is_by_caller, n_steps_under_way, .. } = models[0];
        models.iter_mut().for_each(|model| {
            (model.is_by_caller, model.n_steps_under_way) = (is_by_caller, n_steps_under_way);
        });
        Self {
            models,
            prefix_scope: draws.pick(&[PrefixScope::Actor, PrefixScope::Shared]),
            port: if draws.happens(100) { Port::Encoded } else { Port::Direct },
            n_step_tokens: draws.between(4, 64),
            budgets: Budgets::draw(draws, is_calm),
            n_connections: if is_calm {
                N_CONNECTIONS_ENOUGH
            } else {
                draws.pick(&[1, 2, 4, 8, N_CONNECTIONS_ENOUGH])
            },
            n_requests: if is_calm { 8 } else { draws.between(1, 8) },
            clients: (0..n_clients).map(|_| ClientScene::draw(draws, is_calm, n_models, n_users)).collect(),
            end,
            unload,
            detached: DetachedLimits::draw(draws, is_calm),
            share: (n_models > 1 && draws.happens(300))
                .then(|| (ms(draws.below(150)), draws.between(700, 1300) as u64)),
        }
    }
}
