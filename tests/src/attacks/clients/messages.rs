//! Messages to guests that nobody takes.

use trellis_wire::{Call, ClientMessage, ServerMessage};

use super::clients;
use crate::attacks::raw::Raw;
use crate::attacks::{Ending, Site};

/// Starts the hostile guest and waits until it runs.
async fn with_guest(site: &Site, mode: &str) -> std::io::Result<Result<(Raw, u64), Ending>> {
    let mut raw = match super::prepared(site).await? {
        Ok(raw) => raw,
        Err(ending) => return Ok(Err(ending)),
    };
    let id = raw.start(&site.hostile, &[mode]).await?;
    Ok(raw.started(id).await?.map(|_| (raw, id)))
}

/// Sends messages until one is refused, the attack is over, or enough were sent; how the last one ended.
async fn flood(site: &Site, text: &str, n: usize) -> std::io::Result<Ending> {
    let (mut raw, to) = match with_guest(site, "sleep").await? {
        Ok(ready) => ready,
        Err(ending) => return Ok(ending),
    };
    for _ in 0..n {
        raw.request(Call::Message { to, text: text.to_owned() }).await?;
    }
    // Those that wait for room in the inbox are not over before the guest is.
    loop {
        match raw.next().await? {
            Some(ServerMessage::End { id, outcome, .. }) => {
                let ending = Ending::from(outcome);
                if id == to || ending.code == "limit_exceeded" {
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
    too_long(site) {
        let (mut raw, to) = match with_guest(&site, "sleep").await? {
            Ok(ready) => ready,
            Err(ending) => return Ok(ending),
        };
        raw.ask(Call::Message { to, text: "x".repeat(300 << 10) }).await
    }
    to_nobody(site) {
        let mut raw = Raw::connect(&site.socket).await?;
        raw.ask(Call::Message { to: 7, text: "hello".to_owned() }).await
    }
    after_the_end(site) {
        let (mut raw, to) = match with_guest(&site, "sleep").await? {
            Ok(ready) => ready,
            Err(ending) => return Ok(ending),
        };
        raw.send(&ClientMessage::EndMessages { id: to }).await?;
        raw.ask(Call::Message { to, text: "hello".to_owned() }).await
    }
    inbox_flood(site) { flood(&site, &"x".repeat(256 << 10), 200).await }
    empty_messages(site) { flood(&site, "", 255).await }
    /// What it answers is not taken either.
    answers_unread(site) {
        let (mut raw, to) = match with_guest(&site, "answer-late").await? {
            Ok(ready) => ready,
            Err(ending) => return Ok(ending),
        };
        for _ in 0..100 {
            raw.request(Call::Message { to, text: "x".repeat(1000) }).await?;
        }
        raw.end(to).await
    }
}
