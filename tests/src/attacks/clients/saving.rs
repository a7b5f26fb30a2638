//! Clients whose guests save, forget and open contexts at once.

use std::io;
use std::time::{Duration, Instant};

use trellis_wire::{Call, ClientMessage, ServerMessage, Value};

use super::super::ends::BUSY;
use super::super::raw::Raw;
use super::super::{Ending, Site};
use super::{clients, ready};

/// Guests at once.
const N_GUESTS: usize = 8;

/// Tokens of contexts that fill a disk budget: of the model `tiny` more than a megabyte each.
const N_TOKENS: &str = "160";

/// Guests at once that fill it.
const N_LONG_GUESTS: usize = 2;

/// The limit of a user's bytes on disk.
const DISK_BYTES: &str = "saved_disk_bytes_per_user";

/// How long it may take until what was saved is on disk, and no more than may be.
const SETTLE_TIME_MAX: Duration = Duration::from_secs(20);

/// Time between two looks.
const LOOK_PERIOD: Duration = Duration::from_millis(50);

clients! {
    /// Guests that share names.
    by_turns(site) {
        let mut raw = ready!(&site);
        let ending = at_once(&mut raw, &site, &["save-by-turns"], N_GUESTS).await?;
        settled(&mut raw, ending).await
    }
    /// Guests that save more than a user may have on disk.
    past_the_disk(site) {
        let mut raw = ready!(&site);
        let ending = at_once(&mut raw, &site, &["save-lengths", N_TOKENS], N_LONG_GUESTS).await?;
        settled(&mut raw, ending).await
    }
}

/// Runs so many guests to their ends: the first end that is not that of a guest that never stops, or the last.
async fn at_once(raw: &mut Raw, site: &Site, arguments: &[&str], n_guests: usize) -> io::Result<Ending> {
    let mut ids = Vec::new();
    for _ in 0..n_guests {
        ids.push(raw.start(&site.hostile, arguments).await?);
    }
    let (mut last, mut odd) = (Ending::well(), None);
    // Until then they are left alone; `None` once they are cancelled, and where their limits are what ends them.
    let mut until = site.patience.map(|patience| site.until + patience);
    while !ids.is_empty() {
        let next = match until {
            None => raw.next().await?,
            Some(time) => match tokio::time::timeout_at(time.into(), raw.next()).await {
                Ok(next) => next?,
                Err(_) => {
                    until = None;
                    for id in &ids {
                        raw.send(&ClientMessage::Cancel { id: *id }).await?;
                    }
                    continue;
                }
            },
        };
        match next {
            Some(ServerMessage::End { id, outcome, .. }) => {
                ids.retain(|other| *other != id);
                last = Ending::from(outcome);
                if site.patience.is_some() && until.is_none() {
                    last = last.of_cancelled();
                }
                if !last.is_cut() && !BUSY.iter().any(|end| end.fits(&last)) {
                    odd.get_or_insert_with(|| last.clone());
                }
            }
            Some(ServerMessage::Fault { error }) => return Ok(error.into()),
            Some(_) => {}
            None => return Ok(Ending::closed()),
        }
    }
    Ok(odd.unwrap_or(last))
}

/// This end, unless what the daemon says to have on disk of its user stays more than may be.
async fn settled(raw: &mut Raw, ending: Ending) -> io::Result<Ending> {
    let begun = Instant::now();
    let mut last = None;
    loop {
        let Value::Limits { limits } = raw.value(Call::Limits).await? else {
            return Ok(Ending::wrong("the answer to limits is none"));
        };
        let Some((used, limit)) = limits
            .iter()
            .find(|limit| limit.name == DISK_BYTES)
            .and_then(|limit| Some((limit.used?, limit.value?)))
        else {
            return Ok(Ending::wrong(format!("{DISK_BYTES} is not told")));
        };
        // What is written comes under its name before others make room for it.
        if used <= limit && last == Some(used) {
            return Ok(ending);
        }
        if begun.elapsed() > SETTLE_TIME_MAX {
            return Ok(Ending::wrong(format!("{used} bytes are on disk of {limit} that may be")));
        }
        last = Some(used);
        tokio::time::sleep(LOOK_PERIOD).await;
    }
}
