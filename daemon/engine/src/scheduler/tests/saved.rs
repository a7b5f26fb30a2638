//! Contexts that are kept under names, among random operations.

use super::*;

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
                let save = |place: &Ticket| Operation::Save { id, edit, name, tag: place.tag() };
                let done = guests.ask_at_once(scheduler, caller, save);
                assert!(matches!(done, Done::Kept(Ok(()))), "within every budget: {done:?}");
            }
            1 if self.contexts.len() < 12 => {
                self.next_id += 1;
                let id = context_id(self.next_id);
                let open = |place: &Ticket| Operation::Open { id, caller, name, tag: place.tag() };
                let done = guests.ask_at_once(scheduler, caller, open);
                let Done::Opened(found) = done else { panic!("{done:?}") };
                let found = found.ok().map(|opened| (opened.tokens, opened.evictions.unwrap_or_default()));
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
