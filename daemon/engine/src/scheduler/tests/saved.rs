//! Contexts that are kept under names, among random operations.

use super::progress::{House, text};
use super::*;
use crate::completion::Opened;
use crate::history::History;

fn listed(opened: &Opened) -> Vec<Token> {
    opened.tokens.iter().copied().collect()
}

impl World {
    /// Saves a context under a name, opens what is kept under it, or forgets that.
    pub(super) fn save_or_open(&mut self, idx: usize) {
        let name = format!("n{}", self.random.below(2));
        let (caller, actor) = (self.contexts[idx].1.caller, self.contexts[idx].1.actor);
        let key = (actor, name.clone());
        let (guests, scheduler) = (&self.guests, &mut self.scheduler);
        match self.random.below(3) {
            0 => {
                let (id, model) = &mut self.contexts[idx];
                let (id, edit) = (*id, Self::edit(model, &mut self.n_mixed));
                self.saved.insert(key, (model.tokens.clone(), model.past.clone()));
                let tokens = Arc::new(History::from(model.tokens.clone()));
                let save = |place: &Ticket| Operation::Save { id, edit, name, tokens, tag: place.tag() };
                let done = guests.ask_at_once(scheduler, caller, save);
                assert!(matches!(done, Done::Kept(Ok(()))), "within every budget: {done:?}");
            }
            1 if self.contexts.len() < 12 => {
                self.next_id += 1;
                let id = context_id(self.next_id);
                let open = |place: &Ticket| Operation::Open { id, caller, name, tag: place.tag() };
                let done = guests.ask_at_once(scheduler, caller, open);
                let Done::Opened(found) = done else { panic!("{done:?}") };
                let found = found.ok().map(|opened| (listed(&opened), opened.evictions.unwrap_or_default()));
                let saved = self.saved.get(&key).cloned();
                let expected = saved.as_ref().map(|(tokens, past)| (tokens.clone(), past.evictions.clone()));
                assert_eq!(found, expected);
                if let Some((tokens, past)) = saved {
                    let n_synced = tokens.len();
                    let (stream, question, mixed, is_member) = (None, None, None, false);
                    let model =
                        Model { tokens, past, n_synced, stream, question, mixed, is_member, caller, actor };
                    self.contexts.push((id, model));
                }
            }
            _ => {
                let forget = |place: &Ticket| Operation::Forget {
                    model: ModelId::default(),
                    caller,
                    name,
                    tag: place.tag(),
                };
                let done = guests.ask_at_once(scheduler, caller, forget);
                let Done::Kept(forgotten) = done else { panic!("{done:?}") };
                assert_eq!(forgotten.is_ok(), self.saved.remove(&key).is_some());
            }
        }
    }
}

/// What saving and opening touch is counted, not timed.
#[test]
fn saving_and_opening_copy_no_token_and_are_priced_by_the_page() {
    const N_PAGES: usize = 100;
    for n_pages in [N_PAGES / 10, N_PAGES] {
        let n_tokens = n_pages * PAGE_LEN;
        let mut house = House::new(N_PAGES + 2, 0, 512);
        let create = |house: &mut House, number: u64| {
            let (id, account) = (context_id(number), Account::new("guest", Budget::UNLIMITED, None));
            let (actor, session, guest) = (ActorId(1), SessionId(number), GuestId(number));
            house.create_for(id, Owner { actor, session, guest, account });
            id
        };
        let id = create(&mut house, 100);
        let tokens = text(&mut Random::new(3), n_tokens);
        let question = house.ask(id, tokens.clone());
        house.wait_for(question);
        let stats = house.scheduler.stats();
        let edit = || Edit { n_kept: n_tokens, ..Edit::default() };
        let tokens = Arc::new(History::from(tokens));
        let of_pages = 50 * n_pages as u64;
        let price = house.save(id, edit(), "a", tokens.clone());
        assert!((of_pages..of_pages + 1_000).contains(&price), "{price} ns to save {n_pages} pages");
        let again = house.save(id, edit(), "a", tokens.clone());
        assert_eq!(again - price, of_pages, "what is replaced lets go of its pages");
        // Another guest of the user, so that who pays for a page may change.
        let caller = create(&mut house, 101);
        for number in 102..110 {
            let (opened, price) = house.open(context_id(number), caller, "a");
            assert!(Arc::ptr_eq(&opened.tokens, &tokens), "its tokens are those that were saved");
            assert!((of_pages..of_pages + 1_000).contains(&price), "{price} ns to open {n_pages} pages");
        }
        let store = &house.scheduler.pages.tokens;
        let n_segments = n_tokens.div_ceil(SegmentLengths::default().n_tokens);
        assert_eq!(store.n_shared(), n_segments, "all hold the same tokens on the engine's side as well");
        assert_eq!(house.scheduler.stats().n_pages_free, stats.n_pages_free, "and the same pages");
    }
}
