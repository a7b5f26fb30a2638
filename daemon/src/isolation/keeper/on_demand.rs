//! Models that are loaded because a guest of the process asks for them, and what is saved of those that are not.

use std::sync::Arc;

use tokio_util::task::AbortOnDropHandle;

use super::Keeper;
use crate::isolation::far_guest::FarGuest;
use crate::isolation::message::{NotUnderstood, ToGuests};
use crate::on_demand::{Again, NotLoaded, Opened};

impl Keeper {
    /// Gets a guest a model that is loaded on demand.
    pub(super) fn open(self: &Arc<Self>, guest: &Arc<FarGuest>, name: &str) -> Result<(), NotUnderstood> {
        let number = guest.id.0;
        let not_there = || NotUnderstood::NotThere { what: "model on demand of guest", number };
        let name = self.models.declared().resolve(name).ok_or_else(not_there)?;
        let opener = self.models.opener().ok_or_else(not_there)?;
        // What is given up may go on for a while: one at a time is all that a guest can cause.
        guest.begin_opening()?;
        let opening = opener.open(name, guest.asker());
        let (keeper, asked) = (self.clone(), guest.clone());
        let opening = self.runtime.spawn(async move {
            let opened = opening.await.and_then(|Opened { model, claim }| {
                // The process hears of it before the guest does.
                keeper.announce();
                let number = keeper.lock().announced.number_of(&model);
                let number = number.ok_or_else(|| NotLoaded {
                    reason: "it was unloaded as soon as it was there".to_owned(),
                    again: Again::Later,
                })?;
                asked.keep(number, claim);
                Ok(number)
            });
            asked.end_opening();
            keeper.outgoing.put(ToGuests::Opened { guest: asked.id, opened });
        });
        guest.note_opening(AbortOnDropHandle::new(opening));
        Ok(())
    }

    /// Forgets for a guest what is saved of models that are not loaded.
    pub(super) fn forget(self: &Arc<Self>, guest: &Arc<FarGuest>, name: &str) -> Result<(), NotUnderstood> {
        let number = guest.id.0;
        let opener = self.models.opener();
        let opener = opener.ok_or(NotUnderstood::NotThere { what: "saved contexts of guest", number })?;
        guest.begin_opening()?;
        let forgetting = opener.forget(name, guest.asker());
        let (keeper, asked) = (self.clone(), guest.clone());
        let forgetting = self.runtime.spawn(async move {
            let was_there = forgetting.await;
            asked.end_opening();
            keeper.outgoing.put(ToGuests::Forgotten { guest: asked.id, was_there });
        });
        guest.note_opening(AbortOnDropHandle::new(forgetting));
        Ok(())
    }
}
