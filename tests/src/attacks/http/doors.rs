//! Who asks: tokens that are nobody's, crowds before the door, and names of what is another user's.

use serde_json::json;

use super::{CHAT, MODELS, RESPONSES, chat, in_a_row, over_time, with};
use crate::attacks::Ending;
use crate::attacks::clients::{clients, fresh};
use crate::attacks::front::Front;

/// Connections of one client that says nothing: more than a user may have, and all together whom nobody knows.
const N_IDLE: usize = 300;

/// Whether what is answered with is that the token is nobody's.
fn is_nobodys(ending: &Ending) -> bool {
    ending.code == "401"
}

/// Asks with this in the place of a token.
async fn with_token(front: &Front, header: &str) -> std::io::Result<Ending> {
    front.ask(format!("GET {MODELS} HTTP/1.1\r\nHost: localhost\r\n{header}\r\n").as_bytes()).await
}

/// Asks for a response that goes on with this one, and then that it is kept no longer; how that ends which does not end so.
async fn named(front: &Front, id: &str) -> std::io::Result<Ending> {
    let on = json!({ "model": "tiny", "input": "Hello", "previous_response_id": id, "store": false });
    let gone_on = front.ask(&front.post(RESPONSES, on.to_string().as_bytes())).await?;
    if gone_on.code != "404" && gone_on.code != "400" {
        return Ok(Ending::wrong(format!(
            "{id} can be gone on with: {} {}",
            gone_on.short(),
            gone_on.message
        )));
    }
    front.ask(&front.head("DELETE", &format!("{RESPONSES}/{id}"), "")).await
}

clients! {
    tokens_of_nobody(site) {
        let (front, mut salt) = (site.front()?, fresh());
        loop {
            salt = salt.wrapping_add(1);
            let token = blake3::hash(&salt.to_le_bytes());
            let ending = with_token(front, &format!("Authorization: Bearer {token}\r\n")).await?;
            if !is_nobodys(&ending) || !site.goes_on() {
                return Ok(ending);
            }
        }
    }
    tokens_of_every_length(site) {
        let front = site.front()?;
        let mut last = Ending::well();
        for n in (0..80).chain([127, 128, 4_095, 4_096, 4_097, 60_000]) {
            let token = "a".repeat(n);
            for header in [format!("Authorization: Bearer {token}\r\n"), format!("X-Api-Key: {token}\r\n")] {
                last = with_token(front, &header).await?;
                if !is_nobodys(&last) {
                    return Ok(last);
                }
            }
        }
        Ok(last)
    }
    /// The right one, but not quite, and two at once.
    tokens_almost_right(site) {
        let front = site.front()?;
        let header = front.user_header();
        let token = header.trim_end().rsplit(' ').next().unwrap_or_default();
        let mut last = Ending::well();
        for header in [
            format!("Authorization: Bearer {}\r\n", &token[1..]),
            format!("Authorization: Bearer {token}a\r\n"),
            format!("Authorization: Bearer {}\r\n", token.to_ascii_uppercase()),
            format!("Authorization: Basic {token}\r\n"),
            format!("Authorization: Bearer {token},{token}\r\n"),
            format!("Cookie: token={token}\r\n"),
            String::new(),
        ] {
            last = with_token(front, &header).await?;
            if !is_nobodys(&last) {
                return Ok(Ending::wrong(format!("{} with {header:?}", last.short())));
            }
        }
        Ok(last)
    }
    /// Those beyond the places are closed, and so are the others when they have said nothing for long enough; then whoever asks is
    /// answered.
    idle_lines(site) {
        let front = site.front()?;
        let mut lines = Vec::new();
        for _ in 0..N_IDLE {
            // There may be no room even to wait.
            if let Ok(line) = front.line().await {
                lines.push(line);
            }
        }
        for line in &mut lines {
            let ending = line.reader.ending().await?;
            if ending != Ending::closed() {
                return Ok(ending);
            }
        }
        drop(lines);
        front.ask(&front.get(MODELS)).await
    }
    /// A connection for each.
    short_requests(site) {
        let front = site.front()?;
        let request = front.get(MODELS);
        over_time(&site, || front.ask(&request)).await
    }
    /// All on one connection.
    short_requests_in_a_row(site) { in_a_row(&site, &site.front()?.get(MODELS)).await }
    /// One after the other, of which none says anything.
    lines_by_turns(site) {
        let front = site.front()?;
        while site.goes_on() {
            let _ = front.line().await;
            tokio::task::yield_now().await;
        }
        Ok(Ending::well())
    }
    ids_of_nobody(site) {
        let front = site.front()?;
        let mut last = Ending::well();
        for id in [
            format!("resp_{:032x}", fresh()),
            "resp_".to_owned(),
            "resp_..".to_owned(),
            "resp_%2e%2e%2f%2e%2e%2fetc%2fpasswd".to_owned(),
            format!("resp_{}", "x".repeat(10_000)),
            "turn%200".to_owned(),
            "one".to_owned(),
        ] {
            last = named(front, &id).await?;
            if last.code != "404" && last.code != "400" {
                return Ok(Ending::wrong(format!("{id}: {} {}", last.short(), last.message)));
            }
        }
        Ok(last)
    }
    /// Another user's, which is there: it can be gone on with by its user before and after.
    ids_of_another(site) {
        let front = site.front()?;
        let Some(other) = front.of_other() else { return Ok(Ending::wrong("nobody is attacked")) };
        let kept = json!({ "model": "tiny", "input": "Hello", "max_output_tokens": 1, "temperature": 0 });
        let mut line = other.line().await?;
        line.writer.send(&other.post(RESPONSES, kept.to_string().as_bytes())).await?;
        let Some(answer) = line.reader.answer().await? else { return Ok(Ending::closed()) };
        let id = match (answer.ending(), answer.json()?["id"].as_str()) {
            (ending, Some(id)) if ending.is_well() => id.to_owned(),
            (ending, _) => return Ok(ending),
        };
        let refused = named(front, &id).await?;
        let on = with(&kept, json!({ "previous_response_id": id, "store": false })).to_string();
        let gone_on = line.ask(&other.post(RESPONSES, on.as_bytes())).await?;
        let deleted = line.ask(&other.head("DELETE", &format!("{RESPONSES}/{id}"), "")).await?;
        match [gone_on, deleted].into_iter().find(|ending| !ending.is_well()) {
            Some(lost) => Ok(Ending::wrong(format!("its user has it no more: {} {}", lost.short(), lost.message))),
            None => Ok(refused),
        }
    }
    /// What would lead out of the folder of guests, or is in it and no guest that answers.
    guests_of_a_path(site) {
        let front = site.front()?;
        let mut last = Ending::well();
        for name in ["../hostile", "", ".", "..", "/etc/passwd", "http-chat.wasm", "http-chat\0", "http-chat/", &"x".repeat(900_000)] {
            let body = with(&chat("Hello"), json!({ "trellis": { "guest": name } }));
            last = front.ask(&front.post(CHAT, body.to_string().as_bytes())).await?;
            if last.code != "404" {
                return Ok(Ending::wrong(format!("{name:.40}: {} {}", last.short(), last.message)));
            }
        }
        Ok(last)
    }
}
