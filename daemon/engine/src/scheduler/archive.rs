//! Saved contexts that leave the engine, and come back.
//!
//! One that leaves stays as it is: what is read of it is given to the archive only if it is still saved when the last page was
//! read. One that comes back gets pages of host memory, from which it comes to the device as what had to make room does, when a
//! guest asks about it. Where there is no such page, the rest of it is computed again.

use std::sync::Arc;
use std::time::Duration;

use super::holders::Listing;
use super::{Saved, Scheduler};
use crate::account::{Owner, Resource};
use crate::archive::{Restored, SavedHead, SavedName};
use crate::backend::{KvPlace, PAGE_LEN};
use crate::batch::HostPageId;
use crate::error::EngineError;
use crate::history::History;
use crate::kv::{BlockId, Evictions, Footprint, Sequence};
use crate::steering::Steering;

/// Tokens of a context that is kept, those included that were evicted, for each position of the model; and its evictions. All of
/// them are written down, and gone through when it comes back, between steps.
const N_TOKENS_PER_POSITION: usize = 4;
const N_EVICTIONS_MAX: usize = 1024;

/// What comes back, until its pages are filled.
#[derive(Debug)]
pub(crate) struct Restoring {
    kv: Sequence,
    blocks: Vec<BlockId>,
    /// Where its blocks are.
    pub(crate) pages: Vec<HostPageId>,
    n_computed: usize,
    tokens: Arc<History>,
    footprint: Footprint,
    owner: Owner,
}

impl Scheduler {
    /// Whether anything is saved under a name.
    pub(crate) fn has_saved(&self, name: &SavedName) -> bool {
        self.saved.contains_key(&key_of(name))
    }

    /// Forgets what is saved under a name; returns whether anything was.
    pub(crate) fn forget_saved(&mut self, name: &SavedName) -> bool {
        self.forget(name.actor, name.name.clone()).is_ok()
    }

    /// What was saved since this was asked last, and which of all that was saved under its name.
    pub(crate) fn take_newly_saved(&mut self) -> Option<(SavedName, u64)> {
        let (actor, name) = self.newly_saved.take()?;
        let version = self.saved.get(&(actor, name.clone()))?.version;
        Some((SavedName { actor, name }, version))
    }

    fn saved_of(&self, name: &SavedName, version: u64) -> Option<&Saved> {
        self.saved.get(&key_of(name)).filter(|saved| saved.version == version)
    }

    /// Whose a saved context is.
    pub(crate) fn owner_of_saved(&self, name: &SavedName, version: u64) -> Option<&Owner> {
        Some(&self.saved_of(name, version)?.owner)
    }

    /// How many pages of a saved context can be kept; none where it is not saved any more.
    pub(crate) fn n_pages_to_keep(&self, name: &SavedName, version: u64) -> Option<usize> {
        Some(self.saved_of(name, version)?.kv.n_to_keep().0)
    }

    /// Whether it is no more than may be kept.
    pub(crate) fn may_be_kept(&self, name: &SavedName, version: u64) -> bool {
        let saved = self.saved_of(name, version);
        saved.is_some_and(|saved| self.is_within(saved.kv.tokens.len(), saved.kv.n_evictions()))
    }

    fn is_within(&self, n_tokens: usize, n_evictions: usize) -> bool {
        let n_tokens_max = N_TOKENS_PER_POSITION.saturating_mul(self.limits.n_positions_max);
        n_tokens <= n_tokens_max && n_evictions <= N_EVICTIONS_MAX
    }

    /// Where those pages are, of the ones from `start` on the first `n`.
    pub(crate) fn pages_to_keep(
        &self,
        name: &SavedName,
        version: u64,
        start: usize,
        n: usize,
    ) -> Option<Vec<KvPlace>> {
        let kv = &self.saved_of(name, version)?.kv;
        let end = kv.n_to_keep().0.min(start + n);
        let blocks = kv.blocks().get(start..end).unwrap_or_default();
        Some(blocks.iter().map(|&block| self.pages.place(block)).collect())
    }

    /// All but the KV of a saved context of which so many pages were read.
    pub(crate) fn head_to_keep(&self, name: &SavedName, version: u64, n_pages: usize) -> Option<SavedHead> {
        let kv = &self.saved_of(name, version)?.kv;
        let (n_kept, n_computed) = kv.n_to_keep();
        // It may have lost some meanwhile.
        let n_computed = if n_pages < n_kept { n_pages * PAGE_LEN } else { n_computed };
        Some(SavedHead {
            tokens: kv.view(&self.pages).to_vec(),
            n_computed,
            evictions: kv.evictions().cloned(),
            steering: kv.steering_from().map(|(steering, start)| (Steering::clone(&steering), start)),
        })
    }

    /// Makes a place for what was kept of a user's, on behalf of a guest of it: tokens, and as many host pages for its KV as
    /// there are.
    ///
    /// # Errors
    /// It is none of this model, as far as the engine knows, or a budget is used up.
    pub(crate) fn begin_restoring(
        &mut self,
        name: &SavedName,
        head: SavedHead,
        owner: &Owner,
    ) -> Result<Restoring, EngineError> {
        let n_evictions = head.evictions.as_ref().map_or(0, |evictions| evictions.list().len());
        if !self.is_within(head.tokens.len(), n_evictions) || !self.is_sound(&head) {
            return Err(EngineError::NotSaved { name: name.name.clone() });
        }
        let SavedHead { tokens, n_computed, evictions, steering } = head;
        let owner = Owner { account: owner.account.user().clone(), ..owner.clone() };
        // Before anything is filled; it is taken when all is there.
        owner.account.charge(Resource::Contexts, 1)?;
        owner.account.release(Resource::Contexts, 1);
        let steering = steering.map(|(steering, start)| (Arc::new(steering), start));
        let n_evicted = evictions.as_ref().map_or(0, Evictions::n_evicted);
        let of_evictions = evictions.as_ref().map_or(0, Evictions::n_bytes_held);
        let of_steering = steering.as_ref().map_or(0, |(steering, _)| steering.n_bytes() as u64);
        let mut footprint = Footprint::new(&owner.account, 0)?;
        footprint.set_with(tokens.len() - n_evicted, of_evictions + of_steering)?;
        let root = self.root_key(owner.actor);
        let kv =
            Sequence::restored(root, owner.account.clone(), &tokens, steering, evictions, &mut self.pages);
        let kept: Vec<_> = match kv.is_holed() {
            true => kv.kept_tokens(&self.pages).collect(),
            false => tokens,
        };
        let (mut blocks, mut pages) = (Vec::new(), Vec::new());
        for _ in 0..n_computed.div_ceil(PAGE_LEN) {
            let Some((block, page)) = self.pages.allocate_on_host(&owner.account) else { break };
            blocks.push(block);
            pages.push(page);
        }
        let n_computed = n_computed.min(blocks.len() * PAGE_LEN);
        let tokens = Arc::new(History::from(kept));
        Ok(Restoring { kv, blocks, pages, n_computed, tokens, footprint, owner })
    }

    /// Whether a guest's operations could have led to it.
    fn is_sound(&self, head: &SavedHead) -> bool {
        let SavedHead { tokens, n_computed, evictions, steering } = head;
        let limits = &self.limits;
        let n_positions = limits.n_positions_max;
        let is_steered_well = |(steering, start): &(Steering, usize)| {
            let vectors = steering.vectors().map(|(n_layers, vector)| (n_layers, vector.to_vec())).collect();
            let made = Steering::new(vectors, limits.n_layers, limits.hidden_size);
            *start <= tokens.len()
                && steering.n_bytes() <= limits.asks.given_bytes
                && made.is_ok_and(|made| made.as_ref() == Some(steering))
        };
        let are_positions_there = match evictions {
            Some(evictions) => {
                (evictions.is_empty() || limits.n_stretches_max > 0)
                    && evictions.are_of(tokens.len(), n_positions)
            }
            None => tokens.len() <= n_positions,
        };
        let n_before_holes = evictions.as_ref().and_then(Evictions::first_hole).unwrap_or(usize::MAX);
        tokens.iter().all(|&token| (token as usize) < limits.vocab_size)
            && *n_computed <= tokens.len().min(n_before_holes)
            && are_positions_there
            && steering.as_ref().is_none_or(is_steered_well)
    }

    /// What has come back is saved again; its pages are filled. `n_bytes` of KV took so much time. Returns what
    /// came back, and how many tokens there are; none where something else was saved under the name meanwhile.
    ///
    /// # Errors
    /// A budget is used up.
    pub(crate) fn end_restoring(
        &mut self,
        name: &SavedName,
        mut restoring: Restoring,
        (n_bytes, time): (u64, Duration),
    ) -> Result<Option<(Restored, usize)>, EngineError> {
        if self.has_saved(name) {
            self.give_up_restoring(restoring);
            return Ok(None);
        }
        if let Err(exceeded) = restoring.owner.account.charge(Resource::Contexts, 1) {
            self.give_up_restoring(restoring);
            return Err(exceeded.into());
        }
        restoring.kv.take_restored(&restoring.blocks, restoring.n_computed, &mut self.pages);
        let Restoring { kv, n_computed, tokens, footprint, owner, .. } = restoring;
        let restored = Restored { n_tokens: n_computed, n_bytes, time };
        let counts = (restored, tokens.len());
        let key = key_of(name);
        let mut listing = Listing::default();
        self.holders.note_saved(&key, &mut listing);
        let (last_step, version) = (self.commons.step, self.next_version());
        let saved = Saved { kv, tokens, _footprint: footprint, owner, last_step, listing, version, restored };
        self.saved.insert(key, saved);
        Ok(Some(counts))
    }

    /// Lets go of what was coming back.
    pub(crate) fn give_up_restoring(&mut self, restoring: Restoring) {
        let Restoring { mut kv, blocks, owner, .. } = restoring;
        kv.forget(&mut self.pages);
        blocks.into_iter().for_each(|block| self.pages.release(block, &owner.account));
    }

    /// Tells what is saved from what was saved under its name before.
    pub(super) fn next_version(&mut self) -> u64 {
        self.n_versions += 1;
        self.n_versions
    }
}

fn key_of(SavedName { actor, name }: &SavedName) -> super::SavedKey {
    (*actor, name.clone())
}
