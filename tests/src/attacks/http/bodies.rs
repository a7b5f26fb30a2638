//! Bodies that are too much, too little, or not what they should be.

use super::heads::all_by_bytes;
use super::line::Line;
use super::{CHAT, chat};
use crate::attacks::clients::clients;
use crate::attacks::front::Front;
use crate::attacks::{Ending, Site};

/// Bytes of a body that a daemon takes, unless its settings say otherwise.
const BODY_BYTES: usize = 1 << 20;

/// Bytes of one piece of what goes on for ever.
const PIECE_BYTES: usize = 64 << 10;

/// A chat with so many bytes in all, of which most mean nothing.
fn padded(n_bytes: usize) -> Vec<u8> {
    let mut body = chat("Hello").to_string().into_bytes();
    body.resize(n_bytes, b' ');
    body
}

/// A chat of these bytes; how it is answered.
async fn post(site: &Site, body: &[u8]) -> std::io::Result<Ending> {
    let front = site.front()?;
    front.ask(&front.post(CHAT, body)).await
}

/// A chat whose head has these headers, and then these bytes; how it is answered.
async fn post_with(site: &Site, headers: &str, bytes: &[u8]) -> std::io::Result<Ending> {
    let front = site.front()?;
    front.ask(&[&front.head("POST", CHAT, headers)[..], bytes].concat()).await
}

/// The head of a chat in chunks.
fn in_chunks(front: &Front) -> Vec<u8> {
    front.head("POST", CHAT, "Transfer-Encoding: chunked\r\n")
}

clients! {
    by_bytes_of_body(site) {
        let head = site.front()?.head("POST", CHAT, "Content-Length: 100000\r\n");
        all_by_bytes(&site, &[&head[..], b"{\"model\": \""].concat(), b'x').await
    }
    of_the_limit(site) { post(&site, &padded(BODY_BYTES)).await }
    of_the_limit_and_one(site) { post(&site, &padded(BODY_BYTES + 1)).await }
    shorter_than_announced(site) { post_with(&site, "Content-Length: 1000\r\n", b"{}").await }
    of_2_63(site) { post_with(&site, "Content-Length: 9223372036854775807\r\n", b"{}").await }
    of_nothing(site) { post(&site, b"").await }
    /// Whoever waits to be told to go on, and then does not.
    never_goes_on(site) { post_with(&site, "Expect: 100-continue\r\nContent-Length: 1000\r\n", b"").await }
    deep(site) { post(&site, "[".repeat(500_000).as_bytes()).await }
    deep_inside(site) {
        let deep = format!("{}{}", "[".repeat(400_000), "]".repeat(400_000));
        post(&site, format!("{{\"metadata\":{deep}}}").as_bytes()).await
    }
    /// Many values in few bytes, in a field that changes nothing.
    wide(site) {
        let text = chat("Hello").to_string();
        let many = "{\"\":0},".repeat(140_000);
        post(&site, text.replacen('{', &format!("{{\"metadata\":[{many}0],"), 1).as_bytes()).await
    }
    names_of_one(site) {
        let many: String = (0..60_000).map(|_| "\"model\":\"tiny\",").collect();
        post(&site, format!("{{{many}\"messages\":[]}}").as_bytes()).await
    }
    number_of_many_digits(site) {
        let text = chat("Hello").to_string();
        post(&site, text.replacen('{', &format!("{{\"n\":{},", "9".repeat(900_000)), 1).as_bytes()).await
    }
    not_utf_8(site) { post(&site, b"{\"model\": \"\xff\xfe\"}").await }
    surrogate(site) { post(&site, br#"{"model": "\ud800", "messages": []}"#).await }
    /// As many chunks as bytes.
    chunks_of_a_byte(site) {
        let front = site.front()?;
        let mut bytes = in_chunks(front);
        for byte in padded(20_000) {
            bytes.extend_from_slice(&[b'1', b'\r', b'\n', byte, b'\r', b'\n']);
        }
        bytes.extend_from_slice(b"0\r\n\r\n");
        front.ask(&bytes).await
    }
    chunk_of_no_length(site) { post_with(&site, "Transfer-Encoding: chunked\r\n", b"xyz\r\n{}\r\n0\r\n\r\n").await }
    chunk_of_2_64(site) {
        post_with(&site, "Transfer-Encoding: chunked\r\n", b"ffffffffffffffff0\r\n{}\r\n").await
    }
    /// Words behind the length of a chunk, which nobody reads.
    chunk_of_many_words(site) {
        let bytes = format!("2;{}\r\n{{}}\r\n0\r\n\r\n", "x".repeat(100_000));
        post_with(&site, "Transfer-Encoding: chunked\r\n", bytes.as_bytes()).await
    }
    chunks_without_end(site) {
        let front = site.front()?;
        let Line { mut reader, mut writer } = front.line().await?;
        let chunk = format!("{PIECE_BYTES:x}\r\n{}\r\n", " ".repeat(PIECE_BYTES));
        let send = async {
            let _ = writer.send(&in_chunks(front)).await;
            while writer.send(chunk.as_bytes()).await.is_ok() {}
            std::future::pending().await
        };
        tokio::select! {
            biased;
            ending = reader.ending() => ending,
            never = send => never,
        }
    }
}
