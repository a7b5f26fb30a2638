//! Beam searches among random operations.

use std::sync::Arc;

use super::hash_backend::{Chain, VOCAB, ranked};
use super::mixture::by_program;
use super::verify::House;
use super::{Random, World};
use crate::backend::AskLimits;
use crate::batch::{Candidate, Token};
use crate::command::{Answer, ContextId, Edit, Operation, SearchBeams};
use crate::completion::{CallerId, Done};
use crate::error::EngineError;
use crate::mailbox::Ticket;
use crate::sampling::beams::{BeamSettings, EarlyStopping, Finished, Search};

/// A search that its caller waits for.
pub(super) struct Searched {
    base: ContextId,
    caller: CallerId,
    /// In the order of the last answer.
    contexts: Vec<ContextId>,
    place: Ticket,
    /// As it was when it was asked for.
    search: Search,
    n_steps: Option<usize>,
    expected: Vec<Finished>,
    is_disturbed: bool,
}

impl Searched {
    pub(super) fn is_disturbed(&self) -> bool {
        self.is_disturbed
    }
}

/// What became of searches.
#[derive(Debug, Default)]
pub(super) struct Seen {
    n_found: usize,
    /// Of those, from contexts out of which tokens were evicted.
    pub(super) n_found_holed: usize,
    n_stepped: usize,
    n_disturbed: usize,
    n_too_large: usize,
    n_refused: usize,
    pub(super) n_tried_again: usize,
}

impl Seen {
    pub(super) fn add(&mut self, other: &Self) {
        self.n_found += other.n_found;
        self.n_found_holed += other.n_found_holed;
        self.n_stepped += other.n_stepped;
        self.n_disturbed += other.n_disturbed;
        self.n_too_large += other.n_too_large;
        self.n_refused += other.n_refused;
        self.n_tried_again += other.n_tried_again;
    }

    /// Tests are worth nothing if they never come here.
    pub(super) fn check(&self) {
        let Self { n_found, n_stepped, n_disturbed, n_too_large, n_refused, .. } = *self;
        assert!(n_found > 200 && n_stepped > 200 && n_disturbed > 20, "{self:?}");
        assert!(n_too_large > 20 && n_refused > 20, "{self:?}");
    }
}

fn settings(random: &mut Random, n_tokens_max: usize) -> BeamSettings {
    let (n_groups, n_group_beams) = (1 + random.below(2), 1 + random.below(3));
    BeamSettings {
        n_beams: n_groups * n_group_beams,
        n_groups,
        diversity_penalty: random.below(3) as f32,
        length_penalty: random.below(3) as f64 * 0.7,
        early_stopping: [EarlyStopping::Heuristic, EarlyStopping::AtOnce, EarlyStopping::Never]
            [random.below(3)],
        n_tokens_max,
        stop_tokens: (0..random.below(4) as Token).collect(),
    }
}

/// What a search finds that knows no contexts.
fn found(mut search: Search, prompt: Chain) -> Vec<Finished> {
    let mut rows: Vec<Chain> = Vec::new();
    while !search.is_over() {
        let of_row = |row: &&crate::sampling::beams::Row| {
            let before = row.parent.map_or(prompt, |parent| rows[parent]);
            row.appended.iter().fold(before, |chain, &token| chain.extend(token))
        };
        rows = search.rows().iter().map(of_row).collect();
        let n = search.n_top(VOCAB as usize);
        let tops: Vec<Vec<Candidate>> = rows.iter().map(|chain| ranked(chain.last, n)).collect();
        search.advance(&tops.iter().map(Vec::as_slice).collect::<Vec<_>>());
    }
    search.best(usize::MAX)
}

impl World {
    /// Searches for what comes after a context.
    pub(super) fn search(&mut self, idx: usize) {
        let n_free = self.contexts[idx].1.n_free();
        if n_free == 0 || self.searches.len() == 3 {
            return;
        }
        let n_tokens_max = 1 + self.random.below(n_free.min(24));
        let settings = settings(&mut self.random, n_tokens_max);
        let n_steps = [None, Some(1), Some(3)][self.random.below(3)];
        let (base, contexts) =
            (self.new_id(), (0..settings.n_beams).map(|_| self.new_id()).collect::<Vec<_>>());
        let (id, model) = &mut self.contexts[idx];
        let (id, caller, edit) = (*id, model.caller, Self::edit(model, &mut self.n_mixed));
        let (prompt, n_prompt) = (model.chain(), model.tokens.len());
        self.apply(Operation::Fork { id, edit, child: base });
        for &id in &contexts {
            self.apply(Operation::Create { id, caller });
        }
        let search = Search::new(settings);
        let expected = found(search.clone(), prompt);
        let (place, is_disturbed) = (self.guests.ticket(caller), false);
        let searched = Searched { base, caller, contexts, place, search, n_steps, expected, is_disturbed };
        self.go_on(searched, n_prompt);
    }

    fn go_on(&mut self, mut searched: Searched, n_prompt: usize) {
        searched.place = self.guests.ticket(searched.caller);
        let Searched { base, contexts, search, n_steps, .. } = &searched;
        let (base, tag) = (*base, searched.place.tag());
        let edit = Edit { n_kept: n_prompt, ..Edit::default() };
        let (contexts, search, n_steps) = (contexts.clone(), search.clone(), *n_steps);
        let asked =
            SearchBeams { base, edit, contexts, search, n_steps, sampler: None, masks: Vec::new(), tag };
        self.apply(Operation::SearchBeams(Box::new(asked)));
        // The caller loses interest before the engine begins.
        if self.random.below(24) == 0 {
            self.apply(Operation::Cancel { id: base, tag });
            searched.is_disturbed = true;
        }
        self.searches.push(searched);
    }

    fn release_search(&mut self, searched: &Searched) {
        for &id in searched.contexts.iter().chain([&searched.base]) {
            self.apply(Operation::Release { id, n_pulled: 0 });
        }
    }

    pub(super) fn take_found(&mut self) {
        for mut searched in std::mem::take(&mut self.searches) {
            let Some(done) = searched.place.try_take() else {
                assert!(!searched.is_disturbed, "whoever waits for a search that has ended is told");
                self.searches.push(searched);
                continue;
            };
            let n_prompt = self.scheduler.contexts[&searched.base].kv.n_kept();
            let Done::Answer(answer) = done else { panic!("{done:?}") };
            match answer {
                Ok(Answer::Beams { search, order }) => {
                    searched.contexts = order.iter().map(|&place| searched.contexts[place]).collect();
                    searched.search = *search;
                    if !searched.search.is_over() {
                        self.n_searches.n_stepped += 1;
                        self.go_on(searched, n_prompt);
                        continue;
                    }
                    assert_eq!(searched.search.best(usize::MAX), searched.expected);
                    self.n_searches.n_found += 1;
                    let is_holed = self.scheduler.contexts[&searched.base].kv.is_holed();
                    self.n_searches.n_found_holed += usize::from(is_holed);
                }
                Err(EngineError::Step(_)) => {
                    self.n_searches.n_tried_again += 1;
                    searched.search.forget_rows();
                    self.go_on(searched, n_prompt);
                    continue;
                }
                Err(EngineError::JobDisturbed) => {
                    assert!(searched.is_disturbed, "nobody did anything with its contexts");
                    self.n_searches.n_disturbed += 1;
                }
                Err(EngineError::TooManyBeams { n_beams, n_beams_max }) => {
                    assert!(n_beams == searched.contexts.len() && n_beams > n_beams_max);
                    self.n_searches.n_too_large += 1;
                }
                Err(EngineError::NoPages { n_needed, n_pages }) => {
                    assert!(n_needed > n_pages, "{n_needed} of {n_pages}");
                    self.n_searches.n_refused += 1;
                }
                Err(EngineError::Budget(_)) => self.n_searches.n_refused += 1,
                other => panic!("{other:?}"),
            }
            self.release_search(&searched);
        }
    }
}

/// What does not come back with a step all others would wait for.
#[test]
fn a_search_by_a_program_has_no_more_beams_than_rows_come_back() {
    let mut house = House::new(64, u64::MAX);
    house.scheduler.limits.asks =
        AskLimits { whole_bytes: 2 * size_of::<f32>() * VOCAB as usize, ..AskLimits::NONE };
    let (base, contexts) = (house.create(), vec![house.create(), house.create(), house.create()]);
    let place = house.guests.ticket(house.caller);
    let asked = SearchBeams {
        base,
        edit: Edit { appended: vec![1, 2], ..Edit::default() },
        contexts,
        search: Search::new(BeamSettings::of(3, 4)),
        n_steps: None,
        sampler: Some(Arc::new(by_program(8))),
        masks: Vec::new(),
        tag: place.tag(),
    };
    house.scheduler.apply(Operation::SearchBeams(Box::new(asked)));
    let refused = house.try_answer(&place).expect("at once");
    assert!(matches!(refused, Err(EngineError::TooManyBeams { n_beams: 3, n_beams_max: 2 })), "{refused:?}");
}
