//! Clients that leave, and cancels.

use std::time::Duration;

use trellis_wire::{Call, ClientMessage};

use super::{clients, fresh, ready, salted};
use crate::attacks::raw::{Raw, frame};
use crate::attacks::{Ending, Site};

/// Starts the hostile guest, lets it run for so long, and leaves without a word; again and again.
async fn leave(site: &Site, mode: &str, after: Duration) -> std::io::Result<Ending> {
    while site.goes_on() {
        let mut raw = ready!(site);
        let id = raw.start(&site.hostile, &[mode]).await?;
        if let Err(ending) = raw.started(id).await? {
            return Ok(ending);
        }
        tokio::time::sleep(after).await;
    }
    Ok(Ending::well())
}

clients! {
    while_it_runs(site) { leave(&site, "loop", Duration::from_millis(5)).await }
    while_it_decodes(site) { leave(&site, "endless", Duration::from_millis(20)).await }
    while_it_works_in_drop(site) { leave(&site, "late-work", Duration::from_millis(10)).await }
    before_the_start(site) {
        while site.goes_on() {
            let mut raw = ready!(&site);
            raw.start(&site.hostile, &["loop"]).await?;
        }
        Ok(Ending::well())
    }
    /// The compiler is not needed any more.
    while_compiling(site) {
        while site.goes_on() {
            let mut raw = Raw::connect(&site.socket).await?;
            let component = salted(&site.hostile, fresh());
            let uploaded = raw.upload(&component).await?;
            if !uploaded.is_well() {
                return Ok(uploaded);
            }
            raw.start(&component, &["loop"]).await?;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(Ending::well())
    }
    in_a_frame(site) {
        let bytes = frame(&ClientMessage::Request { id: 1, call: Call::Info });
        let mut n = 0;
        while site.goes_on() {
            n += 1;
            let mut raw = Raw::connect(&site.socket).await?;
            raw.send_bytes(&bytes[..1 + n % (bytes.len() - 1)]).await?;
        }
        Ok(Ending::well())
    }
    cancel_ignored(site) {
        let mut raw = ready!(&site);
        let id = raw.start(&site.hostile, &["loop"]).await?;
        if let Err(ending) = raw.started(id).await? {
            return Ok(ending);
        }
        raw.send(&ClientMessage::Cancel { id }).await?;
        raw.end(id).await
    }
    /// Sixteen starts at once, each cancelled five times.
    cancel_storm(site) {
        let mut raw = ready!(&site);
        while site.goes_on() {
            let mut ids = Vec::new();
            for i in 0..16 {
                ids.push(raw.start(&site.hostile, &[["loop", "sleep", "endless", "flood-text"][i % 4]]).await?);
            }
            for id in ids.iter().cycle().take(5 * ids.len()) {
                raw.send(&ClientMessage::Cancel { id: *id }).await?;
            }
            let last = raw.request(Call::Info).await?;
            // The ends come in any order; the connection goes on once the last one asked for is there.
            let ending = raw.end(last).await?;
            if !ending.is_well() {
                return Ok(ending);
            }
        }
        Ok(Ending::well())
    }
    cancel_at_once(site) {
        let mut raw = ready!(&site);
        while site.goes_on() {
            let id = raw.start(&site.hostile, &["loop"]).await?;
            raw.send(&ClientMessage::Cancel { id }).await?;
            let ending = raw.end(id).await?;
            if ending.code != "cancelled" {
                return Ok(ending);
            }
        }
        Ok(Ending::well())
    }
    stop_of_a_guest(site) {
        let mut raw = ready!(&site);
        let id = raw.start(&site.hostile, &["loop"]).await?;
        let guest_id = match raw.started(id).await? {
            Ok(guest_id) => guest_id,
            Err(ending) => return Ok(ending),
        };
        let mut other = Raw::connect(&site.socket).await?;
        let stopped = other.ask(Call::Stop { guest_id }).await?;
        if !stopped.is_well() {
            return Ok(stopped);
        }
        raw.end(id).await
    }
}
