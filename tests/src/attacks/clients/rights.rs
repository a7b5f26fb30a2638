//! What is not this user's to do.

use trellis_wire::{Call, ClientMessage};

use super::clients;
use crate::attacks::raw::Raw;
use crate::attacks::{Ending, Site};

async fn ask(site: &Site, call: Call) -> std::io::Result<Ending> {
    Raw::connect(&site.socket).await?.ask(call).await
}

clients! {
    stop_of_nobody(site) { ask(&site, Call::Stop { guest_id: u64::MAX }).await }
    /// Each number that a guest may have: those of others are as if they were not.
    stop_of_all(site) {
        let mut raw = Raw::connect(&site.socket).await?;
        for guest_id in 0..2000 {
            let ending = raw.ask(Call::Stop { guest_id }).await?;
            if ending.code != "unknown_guest" {
                return Ok(ending);
            }
        }
        raw.ask(Call::Stop { guest_id: 0 }).await
    }
    shutdown(site) { ask(&site, Call::Shutdown).await }
    unload(site) { ask(&site, Call::Unload { model: "tiny".to_owned(), drain_ms: Some(0) }).await }
    load(site) { ask(&site, Call::Load { model: "/etc/passwd".to_owned(), device: None }).await }
    cancels_of_nothing(site) {
        let mut raw = Raw::connect(&site.socket).await?;
        while site.goes_on() {
            for id in 0..1000 {
                raw.send(&ClientMessage::Cancel { id }).await?;
                raw.send(&ClientMessage::EndMessages { id }).await?;
            }
            let ending = raw.ask(Call::Info).await?;
            if !ending.is_well() {
                return Ok(ending);
            }
        }
        Ok(Ending::well())
    }
}
