//! Saved contexts on a disk that fills, fails, and is left by a daemon that is killed: what is found there is what was saved, or
//! it is gone.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::time::{Instant, sleep};
use trellis::fuzzing::{KnownModel, SavedKeepers, SimulatedDisk};
use trellis_engine::account::{Account, ActorId, Budget};
use trellis_engine::{Archive, SavedName};

use super::device::Device;
use super::draws::Draws;
use super::naive;
use super::notes::{Fault, Notes};
use super::scene::{DiskScene, MODELS, salt};
use super::script::{N_NAMES, saved_name, saved_tokens};
use super::service::{SimService, model};

/// In which all that was asked of the disk is done.
const SETTLING_TIME: Duration = Duration::from_secs(10);

/// An empty disk, and what keeps contexts there.
pub(super) fn begin(scene: DiskScene, mut draws: Draws, notes: Arc<Notes>) -> (SimulatedDisk, SavedKeepers) {
    let fails = move |call: &'static str| {
        let fails = draws.happens(scene.per_mille_failed);
        notes.event(format_args!("disk: {call}{}", if fails { " fails" } else { "" }));
        if fails {
            notes.fault(Fault::Disk);
        }
        fails
    };
    let disk = SimulatedDisk::new(scene.capacity_bytes, scene.killed_at, fails);
    let keepers = SavedKeepers::over(disk.clone(), scene.of_user, scene.of_all);
    (disk, keepers)
}

/// Models as files name them, which is the same on every disk and in every scene.
static KNOWN: [OnceLock<KnownModel>; MODELS.len()] = [const { OnceLock::new() }; MODELS.len()];

/// The archive of a model that is on this device.
pub(super) fn archive(keepers: &SavedKeepers, idx: usize, device: &mut Device) -> Arc<dyn Archive> {
    keepers.of(KNOWN[idx].get_or_init(|| KnownModel::of(&model(idx), device)))
}

/// Does what is asked of the disk, until it is dropped.
pub(super) async fn serve(keepers: SavedKeepers, scene: DiskScene, mut draws: Draws) {
    loop {
        keepers.turn(|| Duration::from_millis(draws.below(scene.takes_ms + 1) as u64)).await;
    }
}

/// Waits until what was asked is done, of a model or of all; says whether it is.
pub(super) async fn settle(keepers: &SavedKeepers, of: Option<&str>) -> bool {
    let until = Instant::now() + SETTLING_TIME;
    while keepers.is_busy(of) {
        if Instant::now() > until {
            return false;
        }
        sleep(Duration::from_millis(1)).await;
    }
    true
}

/// Looks at the disk as the next daemon would, after an orderly end, a kill, and a loss of power.
pub(super) async fn check(service: &SimService, draws: &mut Draws) {
    let Some((disk, keepers)) = &service.disk else { return };
    let notes = &service.notes;
    if !settle(keepers, None).await {
        return notes.violation(format!("what was asked of the disk is not done in {SETTLING_TIME:?}"));
    }
    let reader = Reader { service };
    reader.read(keepers, true);
    let mut n_kept = |n: usize| draws.below(n + 1);
    for left in [disk.killed(None), disk.killed(Some(&mut n_kept))] {
        notes.fault(Fault::Killed);
        reader.read(&SavedKeepers::over(left, u64::MAX, u64::MAX), false);
    }
}

struct Reader<'a> {
    service: &'a SimService,
}

impl Reader<'_> {
    fn read(&self, keepers: &SavedKeepers, is_whole: bool) {
        let Self { service } = self;
        let (scene, notes) = (&service.scene, &service.notes);
        let account = Account::new("user", Budget::UNLIMITED, None);
        for (idx, known) in KNOWN.iter().enumerate().take(scene.models.len()) {
            let known = known.get().expect("it is on its device");
            for (uid, name) in service.uids().into_iter().flat_map(|uid| (0..N_NAMES).map(move |n| (uid, n)))
            {
                let saved = SavedName { actor: ActorId(uid), name: saved_name(name) };
                let found = keepers.look_up(known, &saved, &account);
                let what = || format!("what user {uid} has saved of {} as {name}", MODELS[idx]);
                let Some(found) = found else {
                    let must_be = is_whole && self.has_worked() && notes.was_saved(uid, MODELS[idx], name);
                    notes.expect(!must_be, || format!("{} is not on the disk", what()));
                    continue;
                };
                notes.event(format_args!("disk: {}, {} bytes of KV", what(), found.kv.len()));
                let tokens = saved_tokens(name);
                notes.expect(found.head.tokens() == tokens, || {
                    format!("{} is on the disk as {:?}", what(), found.head.tokens())
                });
                let (cells, rest) = found.kv.as_chunks();
                let mut before = salt(idx);
                let expected = tokens.iter().take(found.head.n_computed()).map(|&token| {
                    before = naive::kv(before, token);
                    before
                });
                let is_right = rest.is_empty()
                    && cells.len() >= found.head.n_computed()
                    && expected.zip(cells).all(|(kv, cell)| kv == u64::from_le_bytes(*cell));
                notes.expect(is_right, || format!("the KV of {} is on the disk as another", what()));
            }
        }
    }

    /// Whether nothing was done to the scene that may have kept a context from the disk.
    fn has_worked(&self) -> bool {
        let notes = &self.service.notes;
        let faults = [Fault::Disk, Fault::Device, Fault::Step, Fault::Memory, Fault::Unload];
        let is_large = self.service.scene.disk.is_some_and(|disk| {
            [disk.capacity_bytes, disk.of_user, disk.of_all].into_iter().all(|n_bytes| n_bytes > 1 << 30)
        });
        is_large && !faults.into_iter().any(|fault| notes.has(fault))
    }
}
