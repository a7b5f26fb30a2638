//! Starts with arguments, names, deadlines and credit that are not what they should be.

use trellis_wire::{Call, ClientMessage, ComponentHash, Program, Start};

use super::{clients, ready};
use crate::attacks::raw::{Raw, start_of};
use crate::attacks::{Ending, Site};

/// Starts the hostile guest with this mode and these changes; how it ends.
async fn start(site: &Site, mode: &str, change: impl FnOnce(&mut Start) + Send) -> std::io::Result<Ending> {
    let mut raw = ready!(site);
    let mut start = start_of(&site.hostile, &[mode]);
    change(&mut start);
    let id = raw.request(Call::Start(start)).await?;
    raw.follow(id).await
}

/// So much credit to begin with, then nothing is granted.
async fn with_credit(site: &Site, mode: &str, credit_bytes: u64) -> std::io::Result<Ending> {
    let mut raw = ready!(site);
    let call = Call::Start(Start { credit_bytes, ..start_of(&site.hostile, &[mode]) });
    raw.ask(call).await
}

/// Asks and starts without reading the answers, until the attack is over.
async fn unread(site: Site, start: Start) -> std::io::Result<Ending> {
    let mut raw = Raw::connect(&site.socket).await?;
    let ask = async {
        // Most of what there is room for.
        for _ in 0..300 {
            raw.request(Call::Limits).await?;
        }
        loop {
            raw.request(Call::Limits).await?;
            raw.request(Call::Start(start.clone())).await?;
        }
    };
    match tokio::time::timeout_at(site.until.into(), ask).await {
        Ok(outcome) => outcome,
        Err(_) => Ok(Ending::well()),
    }
}

clients! {
    arguments_too_long(site) { start(&site, "exit-well", |start| start.arguments.push("x".repeat(300 << 10))).await }
    arguments_too_many(site) {
        start(&site, "no-such-mode", |start| start.arguments.extend(vec![String::new(); 100_000])).await
    }
    /// As many arguments as a frame holds, each empty, on 16 connections whose answers nobody takes: the last ones find no room
    /// for an answer.
    starts_unread(site) {
        let start = Start { arguments: vec![String::new(); 130_000], ..start_of(&site.hostile, &[]) };
        let mut all = tokio::task::JoinSet::new();
        for _ in 0..16 {
            all.spawn(unread(site.clone(), start.clone()));
        }
        let mut last = Ending::well();
        while let Some(ended) = all.join_next().await {
            let ending = ended.map_err(std::io::Error::other)??;
            if !ending.is_well() {
                last = ending;
            }
        }
        Ok(last)
    }
    label_too_long(site) { start(&site, "exit-well", |start| start.label = Some("x".repeat(500_000))).await }
    label_of_escapes(site) {
        start(&site, "exit-well", |start| start.label = Some("\u{1b}[2J\u{202e}\0\r\n".repeat(20))).await
    }
    no_program(site) {
        start(&site, "x", |start| start.program = Program::Named { name: "oracle".to_owned() }).await
    }
    program_of_a_path(site) {
        start(&site, "x", |start| start.program = Program::Named { name: "../../../etc/passwd".to_owned() }).await
    }
    no_component(site) {
        start(&site, "x", |start| start.program = Program::Component { hash: ComponentHash([7; 32]) }).await
    }
    no_model(site) { start(&site, "exit-well", |start| start.model = Some("x".repeat(10_000))).await }
    deadline_of_0(site) { start(&site, "sleep", |start| start.deadline_ms = Some(0)).await }
    deadline_of_2_64(site) { start(&site, "exit-well", |start| start.deadline_ms = Some(u64::MAX)).await }
    credit_of_0(site) { with_credit(&site, "flood-text", 0).await }
    credit_of_2_64(site) { with_credit(&site, "exit-well", u64::MAX).await }
    grant_of_2_64(site) {
        let mut raw = ready!(&site);
        let id = raw.start(&site.hostile, &["sleep"]).await?;
        if let Err(ending) = raw.started(id).await? {
            return Ok(ending);
        }
        raw.send(&ClientMessage::Credit { id, n_bytes: u64::MAX }).await?;
        raw.end(id).await
    }
    grants_of_0(site) {
        let mut raw = Raw::connect(&site.socket).await?;
        for id in 0..50_000 {
            raw.send(&ClientMessage::Credit { id, n_bytes: 0 }).await?;
        }
        raw.ask(Call::Info).await
    }
}
