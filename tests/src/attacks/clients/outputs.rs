//! Output, recordings and answers that are not taken, or slowly.

use std::time::Duration;

use trellis_wire::{Call, Start};

use super::{clients, ready};
use crate::attacks::raw::start_of;
use crate::attacks::{Ending, Site};

/// The most credit that a client may give.
const CREDIT_BYTES_MAX: u64 = 4 << 20;

/// Starts so many guests of this mode with all the credit there is, and reads nothing until the attack is over; how the first
/// one ends.
async fn unread_of(
    site: &Site,
    n: usize,
    mode: &str,
    change: impl Fn(&mut Start) + Send + Sync,
) -> std::io::Result<Ending> {
    let mut raw = ready!(site);
    let mut ids = Vec::new();
    for _ in 0..n {
        let mut start = Start { credit_bytes: CREDIT_BYTES_MAX, ..start_of(&site.hostile, &[mode]) };
        change(&mut start);
        ids.push(raw.request(Call::Start(start)).await?);
    }
    site.hold().await;
    // It ends for its time, however much is still unread.
    match tokio::time::timeout(Duration::from_secs(20), raw.end(ids[0])).await {
        Ok(ending) => ending,
        Err(_) => Ok(Ending::well()),
    }
}

clients! {
    unread(site) { unread_of(&site, 1, "drip", |_| {}).await }
    unread_by_many(site) { unread_of(&site, 16, "drip", |_| {}).await }
    recording_unread(site) { unread_of(&site, 1, "endless", |start| start.is_recorded = true).await }
    profile_unread(site) { unread_of(&site, 1, "endless", |start| start.is_profiled = true).await }
    /// A message every few milliseconds, and credit for each.
    read_slowly(site) {
        let mut raw = ready!(&site);
        let id = raw.request(Call::Start(Start { credit_bytes: 300_000, ..start_of(&site.hostile, &["drip"]) })).await?;
        while site.goes_on() {
            tokio::time::sleep(Duration::from_millis(5)).await;
            if raw.next().await?.is_none() {
                return Ok(Ending::closed());
            }
        }
        drop(raw);
        let _ = id;
        Ok(Ending::well())
    }
    /// All that the guest is told and says is written down, and read.
    recording_of_a_flood(site) {
        let mut raw = ready!(&site);
        let start = Start { is_recorded: true, ..start_of(&site.hostile, &["encode", "random", "1000000"]) };
        let id = raw.request(Call::Start(start)).await?;
        raw.follow(id).await
    }
    /// More answers than a socket holds.
    requests_unread(site) {
        let mut raw = ready!(&site);
        let ask = async {
            loop {
                raw.request(Call::Info).await?;
            }
        };
        match tokio::time::timeout_at(site.until.into(), ask).await {
            Ok(outcome) => outcome,
            Err(_) => Ok(Ending::well()),
        }
    }
    infos(site) {
        let mut raw = ready!(&site);
        while site.goes_on() {
            let mut last = 0;
            for _ in 0..100 {
                last = raw.request(Call::Info).await?;
            }
            let ending = raw.end(last).await?;
            if !ending.is_well() {
                return Ok(ending);
            }
        }
        Ok(Ending::well())
    }
    lists(site) {
        let mut raw = ready!(&site);
        while site.goes_on() {
            let mut last = 0;
            for _ in 0..50 {
                raw.request(Call::Guests).await?;
                last = raw.request(Call::Models).await?;
            }
            let ending = raw.end(last).await?;
            if !ending.is_well() {
                return Ok(ending);
            }
        }
        Ok(Ending::well())
    }
}
