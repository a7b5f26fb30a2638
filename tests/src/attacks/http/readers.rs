//! Clients that do not take their answers, or do not wait for them.

use std::time::Duration;

use serde_json::{Value, json};

use super::line::Line;
use super::{CHAT, MODELS, chat, in_a_row, over_time, with};
use crate::attacks::Ending;
use crate::attacks::clients::clients;
use crate::attacks::front::Front;

/// How long nothing of an answer is taken: longer than a daemon waits.
const UNREAD_TIME: Duration = Duration::from_secs(5);

/// Requests on one connection before the first is answered.
const N_PIPELINED: usize = 50;

/// Chats at once, each on a connection of its own: as many as a user may have, nearly.
const N_CROWD: usize = 60;

/// A long answer, in events with all that there is to say of each token.
fn stream() -> Value {
    let much = json!({ "stream": true, "n": 32, "max_tokens": 900, "temperature": 1, "logprobs": true, "top_logprobs": 20 });
    with(&chat("Tell me a long story."), much)
}

fn post(front: &Front, body: &Value) -> Vec<u8> {
    front.post(CHAT, body.to_string().as_bytes())
}

/// Sends a whole request and says that no more comes. Whether it is answered, or taken for one that has gone, is well.
async fn whole_and_half_closed(front: &Front, request: &[u8]) -> std::io::Result<Ending> {
    let Line { mut reader, mut writer } = front.line().await?;
    writer.send(request).await?;
    writer.finish().await?;
    let ending = reader.ending().await?;
    Ok(if ending == Ending::closed() { Ending::well() } else { ending })
}

clients! {
    answer_unread(site) {
        let front = site.front()?;
        let mut line = front.line().await?;
        line.writer.send(&post(front, &stream())).await?;
        // The answer has begun.
        if !line.reader.has(1).await? {
            return Ok(Ending::closed());
        }
        tokio::time::sleep(UNREAD_TIME).await;
        line.reader.ending().await
    }
    /// A little now and then, and never nothing.
    answer_read_slowly(site) {
        let front = site.front()?;
        let mut line = front.line().await?;
        line.writer.send(&post(front, &stream())).await?;
        let mut n = 0;
        while site.goes_on() {
            n += 1_000;
            if !line.reader.has(n).await? {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(Ending::well())
    }
    /// After more of the answer each time.
    leave_in_an_answer(site) {
        let front = site.front()?;
        let request = post(front, &stream());
        let mut n = 1;
        while site.goes_on() {
            let mut line = front.line().await?;
            let _ = line.writer.send(&request).await;
            let _ = line.reader.has(n).await?;
            n += 997;
        }
        Ok(Ending::well())
    }
    /// After more of the request each time, or as soon as it is sent.
    leave_in_a_request(site) {
        let front = site.front()?;
        let request = post(front, &stream());
        let mut n = 1;
        while site.goes_on() {
            let mut line = front.line().await?;
            let _ = line.writer.send(&request[..n]).await;
            n = if n == request.len() { 1 } else { (n + 7).min(request.len()) };
        }
        Ok(Ending::well())
    }
    /// What is asked is whole, and nothing more comes.
    half_closed(site) {
        let front = site.front()?;
        let request = post(front, &chat("Hello"));
        over_time(&site, || whole_and_half_closed(front, &request)).await
    }
    half_closed_in_a_body(site) {
        let front = site.front()?;
        let request = post(front, &stream());
        let Line { mut reader, mut writer } = front.line().await?;
        writer.send(&request[..request.len() - 10]).await?;
        writer.finish().await?;
        reader.ending().await
    }
    pipelined(site) {
        let front = site.front()?;
        let request = front.get(MODELS);
        let Line { mut reader, mut writer } = front.line().await?;
        while site.goes_on() {
            writer.send(&request.repeat(N_PIPELINED)).await?;
            for _ in 0..N_PIPELINED {
                let ending = reader.ending().await?;
                if !ending.is_well() {
                    return Ok(ending);
                }
            }
        }
        Ok(Ending::well())
    }
    /// Of which nobody waits for more than the first.
    pipelined_and_left(site) {
        let front = site.front()?;
        let request = post(front, &chat("Hello"));
        while site.goes_on() {
            let mut line = front.line().await?;
            let _ = line.writer.send(&request.repeat(N_PIPELINED)).await;
            line.reader.answer().await?;
        }
        Ok(Ending::well())
    }
    pipelined_unread(site) {
        let front = site.front()?;
        let request = front.get(MODELS);
        let Line { reader, mut writer } = front.line().await?;
        let send = async { while writer.send(&request.repeat(N_PIPELINED)).await.is_ok() {} };
        // It stops to read, and then hangs up, or is left.
        let _ = tokio::time::timeout_at((site.until + UNREAD_TIME).into(), send).await;
        drop(reader);
        Ok(Ending::well())
    }
    crowd(site) {
        let mut chats = tokio::task::JoinSet::new();
        for _ in 0..N_CROWD {
            let front = site.front()?.clone();
            chats.spawn(async move { front.ask(&post(&front, &with(&chat("Hello"), json!({ "max_tokens": 64 })))).await });
        }
        let mut last = Ending::well();
        while let Some(ended) = chats.join_next().await {
            let ending = ended.map_err(std::io::Error::other)??;
            if !ending.is_well() {
                last = ending;
            }
        }
        Ok(last)
    }
    chats_in_a_row(site) { in_a_row(&site, &post(site.front()?, &chat("Hello"))).await }
}
