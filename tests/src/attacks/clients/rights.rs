//! What is not this user's to do.

use trellis_wire::{Attach, Call, ClientMessage, ServerMessage};

use super::clients;
use crate::attacks::raw::Raw;
use crate::attacks::{Ending, Site};

async fn ask(site: &Site, call: Call) -> std::io::Result<Ending> {
    Raw::connect(&site.socket).await?.ask(call).await
}

/// Waits for the ends of so many stops of nobody's guest; the last one, or one that ended otherwise.
async fn ends_of_stops(raw: &mut Raw, n: usize) -> std::io::Result<Ending> {
    let mut n_ended = 0;
    loop {
        match raw.next().await? {
            Some(ServerMessage::End { outcome, .. }) => {
                n_ended += 1;
                let ending = Ending::from(outcome);
                if n_ended == n || ending.code != "unknown_guest" {
                    return Ok(ending);
                }
            }
            Some(ServerMessage::Fault { error }) => return Ok(error.into()),
            Some(_) => {}
            None => return Ok(Ending::closed()),
        }
    }
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
    /// As there, to read what they send, or to have the daemon forget it.
    attach_to_all(site) {
        let mut raw = Raw::connect(&site.socket).await?;
        let attach = |guest_id| Call::Attach(Attach { guest_id, credit_bytes: 1 << 16, ..Attach::default() });
        for guest_id in 0..2000 {
            raw.send(&ClientMessage::Acknowledge { guest_id, until: u64::MAX }).await?;
            let ending = raw.ask(attach(guest_id)).await?;
            if ending.code != "unknown_guest" {
                return Ok(ending);
            }
        }
        raw.ask(attach(u64::MAX)).await
    }
    /// As many at once as there may be, on 64 connections.
    stops_of_nothing(site) {
        const N_REQUESTS: usize = 256;
        let mut all = Vec::new();
        for _ in 0..64 {
            all.push(Raw::connect(&site.socket).await?);
        }
        while site.goes_on() {
            for raw in &mut all {
                for _ in 0..N_REQUESTS {
                    raw.request(Call::Stop { guest_id: 0 }).await?;
                }
            }
            for raw in &mut all {
                let ending = ends_of_stops(raw, N_REQUESTS).await?;
                if ending.code != "unknown_guest" {
                    return Ok(ending);
                }
            }
        }
        all[0].ask(Call::Stop { guest_id: 0 }).await
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
