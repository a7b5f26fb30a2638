//! Operations that are made up.

use std::sync::Arc;

use super::super::hash_backend::VOCAB;
use super::super::mixture::by_program;
use super::super::{N_POSITIONS, Random};
use crate::batch::Token;
use crate::command::{
    Ahead, Ask, ContextId, Edit, MaskSource, ModelId, Operation, Pooling, RunSettings, SearchBeams,
};
use crate::completion::{CallerId, Tag};
use crate::error::EngineError;
use crate::guess::{Guess, GuessNode, GuessTree};
use crate::history::History;
use crate::kept::RowName;
use crate::kv::Positions;
use crate::run::Finish;
use crate::sampling::beams::{BeamSettings, EarlyStopping, Search};
use crate::sampling::{Looks, Sampler, TokenMask};
use crate::steering::Steering;

/// Makes operations up, most of them nearly right.
pub(super) struct Forger {
    pub(super) random: Random,
    /// The number of the next context.
    next: u64,
    /// Contexts of the process, whose they are, and how many tokens each has.
    pub(super) own: Vec<(ContextId, CallerId, usize)>,
    /// Of honest guests.
    pub(super) others: Vec<(ContextId, CallerId)>,
    pub(super) callers: Vec<CallerId>,
}

impl Forger {
    pub(super) fn new(random: Random, next: u64) -> Self {
        Self { random, next, own: Vec::new(), others: Vec::new(), callers: Vec::new() }
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.random.below(n) == 0
    }

    /// Mostly a number near this one.
    pub(super) fn number(&mut self, near: usize) -> usize {
        match self.random.below(16) {
            0 => usize::MAX,
            1 => N_POSITIONS + self.random.below(3),
            2 => near + 1 + self.random.below(3),
            3..6 => self.random.below(8),
            6..9 => near.saturating_sub(self.random.below(20)),
            _ => near,
        }
    }

    pub(super) fn token(&mut self) -> Token {
        match self.random.below(256) {
            0 => VOCAB as Token,
            1 => Token::MAX,
            n => n as Token % VOCAB as Token,
        }
    }

    fn tokens(&mut self, n_max: usize) -> Vec<Token> {
        let n = self.random.below(n_max);
        (0..n).map(|_| self.random.below(VOCAB as usize) as Token).collect()
    }

    pub(super) fn new_id(&mut self) -> ContextId {
        self.next += 1;
        let number = match self.random.below(32) {
            0 => self.next - 2,
            1 => self.next + 40,
            _ => self.next,
        };
        ContextId { model: ModelId::default(), number }
    }

    /// A context, mostly the sender's.
    pub(super) fn id(&mut self, from: CallerId) -> ContextId {
        if self.one_in(32) && !self.others.is_empty() {
            return self.others[self.random.below(self.others.len())].0;
        }
        let own: Vec<ContextId> =
            self.own.iter().filter(|(_, owner, _)| *owner == from).map(|own| own.0).collect();
        match own.is_empty() {
            true => self.new_id(),
            false => own[self.random.below(own.len())],
        }
    }

    fn ids(&mut self, from: CallerId, n_max: usize) -> Vec<ContextId> {
        let n = 1 + self.random.below(n_max);
        let mut ids: Vec<ContextId> = (0..n).map(|_| self.id(from)).collect();
        if !self.one_in(8) {
            ids.sort_unstable();
            ids.dedup();
        }
        ids
    }

    pub(super) fn caller(&mut self, from: CallerId) -> CallerId {
        match self.random.below(32) {
            0 => CallerId(self.random.below(6) as u64),
            1 => self.callers[self.random.below(self.callers.len())],
            _ => from,
        }
    }

    /// So few that questions, runs and what is said of them have the same.
    pub(super) fn tag(&mut self) -> Tag {
        Tag::new(self.random.below(3) as u32, 0)
    }

    pub(super) fn length(&self, id: ContextId) -> usize {
        self.own.iter().find(|(own, ..)| *own == id).map_or(0, |&(.., n_tokens)| n_tokens)
    }

    pub(super) fn edit(&mut self, id: ContextId) -> Edit {
        let n_tokens = self.length(id);
        let n_kept = match self.random.below(4) {
            0 => self.number(n_tokens),
            1 => n_tokens.saturating_sub(self.random.below(40)),
            _ => n_tokens,
        };
        let n_appended_max = if self.one_in(12) { 250 } else { 20 };
        let mut appended = self.tokens(n_appended_max);
        if self.one_in(16) {
            appended.push(self.token());
        }
        let n_pulled = self.number(2);
        Edit { n_kept, appended, n_pulled }
    }

    pub(super) fn mask(&mut self) -> Arc<TokenMask> {
        let vocab_size = if self.one_in(64) { 64 } else { VOCAB as usize };
        let mut mask = TokenMask::none(vocab_size);
        let n = self.random.below(40);
        (0..n).for_each(|_| mask.set(self.random.below(VOCAB as usize) as Token, true));
        Arc::new(mask)
    }

    fn layers(&mut self) -> Vec<usize> {
        (0..self.random.below(4)).map(|_| self.random.below(8)).filter(|&layer| layer < 7).collect()
    }

    pub(super) fn sampler(&mut self) -> Arc<Sampler> {
        let seed = self.random.below(64) as u64;
        let mut sampler = match self.random.below(4) {
            0 => by_program(seed),
            _ => Sampler { seed, ..Sampler::greedy() },
        };
        if self.one_in(4) {
            sampler.looks = Looks { n_top: self.random.below(24), hidden: self.layers() };
        }
        if self.one_in(4) {
            let mask = self.mask();
            match &mut sampler.program {
                Some(put_on) => put_on.within = Some(mask),
                None => sampler.mask = Some(mask),
            }
        }
        if self.one_in(32) {
            sampler.temperature = [f32::NAN, -1.0, f32::INFINITY][self.random.below(3)];
        }
        if let (true, Some(put_on)) = (self.one_in(16), &mut sampler.program) {
            put_on.start.numbers[0] = f32::NAN;
        }
        Arc::new(sampler)
    }

    fn guess(&mut self) -> Guess {
        let tokens = self.tokens(18);
        match self.random.below(4) {
            0 => Guess::Chain(tokens),
            1 => {
                let n_masks = tokens.len() + usize::from(!self.one_in(8));
                Guess::Masked { tokens, masks: (0..n_masks).map(|_| self.mask()).collect() }
            }
            _ => {
                let n_nodes = self.random.below(12);
                let node = |idx: usize, forger: &mut Self| GuessNode {
                    token: forger.random.below(VOCAB as usize) as Token,
                    parent: forger.random.below(idx + 1).checked_sub(1).map(|parent| parent as u32),
                };
                let nodes: Vec<GuessNode> = (0..n_nodes).map(|idx| node(idx, self)).collect();
                let Ok(tree) = GuessTree::new(&nodes) else { return Guess::Chain(tokens) };
                let n_masks = if self.one_in(2) { 0 } else { tree.n_nodes() + 1 };
                Guess::Tree { tree, masks: (0..n_masks).map(|_| self.mask()).collect() }
            }
        }
    }

    fn row(&mut self, from: CallerId) -> RowName {
        RowName { caller: self.caller(from), tag: self.tag() }
    }

    pub(super) fn ask(&mut self, from: CallerId, n_tokens: usize) -> Ask {
        match self.random.below(18) {
            0 => Ask::Prefill,
            1 | 2 => Ask::Sample(self.sampler()),
            3 => Ask::Top { n: self.number(5) },
            4 => Ask::Scores(self.tokens(10)),
            5 | 6 => Ask::Continuation(self.tokens(40)),
            7 => Ask::Tops { continuation: self.tokens(40), n: self.number(3) },
            8..11 => Ask::Verify { sampler: self.sampler(), guess: self.guess() },
            11 => Ask::Full,
            12 => Ask::Logits,
            13 => Ask::Keep,
            14 => {
                let n_rows = self.random.below(3);
                Ask::Mix { sampler: self.sampler(), rows: (0..n_rows).map(|_| self.row(from)).collect() }
            }
            15 => Ask::Embedding,
            16 => {
                let pooling = match self.random.below(2) {
                    0 => Pooling::Last,
                    _ => Pooling::MeanFrom(self.number(n_tokens)),
                };
                Ask::Hidden { n_layers: self.layers(), pooling }
            }
            _ => Ask::Attention { layers: self.layers() },
        }
    }

    fn settings(&mut self) -> RunSettings {
        RunSettings {
            sampler: self.sampler(),
            stop_tokens: Arc::from(self.tokens(4)),
            n_tokens_max: if self.one_in(4) { None } else { Some(self.random.below(30)) },
            ahead: if self.one_in(2) { Ahead::Unbounded } else { Ahead::Adaptive },
            masks: if self.one_in(3) { MaskSource::Caller } else { MaskSource::Sampler },
        }
    }

    fn search(&mut self, from: CallerId) -> Operation {
        let n_groups = 1 + self.random.below(2);
        let settings = BeamSettings {
            n_beams: n_groups * (1 + self.random.below(2)),
            n_groups,
            diversity_penalty: self.random.below(2) as f32,
            length_penalty: [0.0, 1.0, -300.0, 1e300][self.random.below(4)],
            early_stopping: [EarlyStopping::Heuristic, EarlyStopping::AtOnce, EarlyStopping::Never]
                [self.random.below(3)],
            n_tokens_max: self.number(9),
            stop_tokens: self.tokens(3),
        };
        let base = self.id(from);
        let own = self.own.iter().filter(|(id, owner, _)| *owner == from && *id != base);
        let mut contexts: Vec<ContextId> = own.map(|&(id, ..)| id).take(settings.n_beams).collect();
        if self.one_in(8) {
            contexts.push(self.id(from));
        }
        Operation::SearchBeams(Box::new(SearchBeams {
            base,
            edit: self.edit(base),
            contexts,
            search: Search::new(settings),
            n_steps: if self.one_in(2) { None } else { Some(self.random.below(4)) },
            sampler: None,
            masks: (0..self.random.below(3)).map(|_| self.mask()).collect(),
            tag: self.tag(),
        }))
    }

    fn members(&mut self, from: CallerId) -> Vec<(ContextId, Edit)> {
        let n_most = if self.one_in(8) { 12 } else { 3 };
        self.ids(from, n_most).into_iter().map(|id| (id, self.edit(id))).collect()
    }

    fn name(&mut self) -> String {
        match self.random.below(64) {
            0 => "n".repeat(1 << 17),
            // Guests of one user know each other's: these are not those of the honest ones.
            n => format!("m{}", n % 2),
        }
    }

    /// Tokens for a context that holds `n` of them; what they are it does not know.
    fn history(&mut self, n: usize) -> Arc<History> {
        let n = self.number(n).min(2 * N_POSITIONS);
        Arc::new(History::from(vec![self.random.below(VOCAB as usize) as Token; n]))
    }

    pub(super) fn steering(&mut self) -> Option<Arc<Steering>> {
        let value = [0.0, 1.0, 2.0, f32::NAN][self.random.below(4)];
        let vectors = vec![(self.random.below(8), vec![value; if self.one_in(16) { 2 } else { 1 }])];
        // As bytes say it, unchecked.
        Some(Arc::new(Steering::from(vectors))).filter(|_| !self.one_in(4))
    }

    fn end(&mut self) -> Result<Finish, EngineError> {
        if self.one_in(2) { Ok(Finish::Complete) } else { Err(EngineError::JobDisturbed) }
    }

    /// One operation.
    pub(super) fn forge(&mut self, from: CallerId) -> Operation {
        let (id, tag) = (self.id(from), self.tag());
        let n_tokens = self.length(id);
        let model = ModelId::default();
        match self.random.below(32) {
            0 | 1 => Operation::Create { id: self.new_id(), caller: self.caller(from) },
            2 => Operation::Open { id: self.new_id(), caller: self.caller(from), name: self.name(), tag },
            3 | 4 => Operation::Edit { id, edit: self.edit(id) },
            5 | 6 => {
                let start = self.number(n_tokens / 2);
                let end = start.saturating_add(self.number(3));
                let positions = [Positions::Keep, Positions::CloseUp][self.random.below(2)];
                Operation::Evict { id, edit: self.edit(id), start, end, positions }
            }
            7 => {
                let (edit, steering) = (self.edit(id), self.steering());
                Operation::Steer { id, edit, steering, from: self.number(n_tokens) }
            }
            8 | 9 => Operation::Fork { id, edit: self.edit(id), child: self.new_id() },
            10..16 => Operation::Ask { id, edit: self.edit(id), ask: self.ask(from, n_tokens), tag },
            16 => Operation::DrawTogether { members: self.members(from), sampler: self.sampler(), tag },
            17 | 18 => self.search(from),
            19 => {
                let mut settings = self.settings();
                if !self.one_in(4) {
                    settings.sampler = Arc::new(by_program(3));
                }
                Operation::Mix { members: self.members(from), settings, tag }
            }
            20 => Operation::Cancel { id, tag },
            21 | 22 => Operation::Run { id, edit: self.edit(id), settings: self.settings(), tag },
            23 => {
                let (n_tokens, is_waiting) = (self.number(3), self.one_in(2));
                Operation::Pulled { id, tag, n_tokens, is_waiting }
            }
            24..27 => {
                let (position, turn) = (self.number(n_tokens), self.random.below(2) as u32);
                let expected = if self.one_in(2) { None } else { Some(self.token()) };
                Operation::Mask { id, tag, position, turn, mask: self.mask(), expected }
            }
            27 => {
                let (position, turn) = (self.number(n_tokens), self.random.below(2) as u32);
                Operation::EndRun { id, tag, position, turn, end: self.end() }
            }
            28 => {
                let (edit, tokens) = (self.edit(id), self.history(n_tokens));
                Operation::Save { id, edit, name: self.name(), tokens, tag }
            }
            29 => match self.random.below(4) {
                0 => Operation::Stats { model, caller: self.caller(from), tag },
                _ => Operation::Forget { model, caller: self.caller(from), name: self.name(), tag },
            },
            30 => Operation::LetGo { row: self.row(from) },
            _ => Operation::Release { id, n_pulled: self.number(2) },
        }
    }
}
