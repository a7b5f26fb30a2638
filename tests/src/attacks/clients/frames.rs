//! Bytes that are not the protocol.

use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use trellis_wire::{Call, ClientMessage, FRAME_BYTES_MAX, Hello, ServerMessage};

use super::clients;
use crate::attacks::raw::{Raw, frame, framed};
use crate::attacks::{Ending, Site};

/// Sends bytes after the hello; what the daemon says last.
async fn send(site: &Site, bytes: &[u8]) -> std::io::Result<Ending> {
    let mut raw = Raw::connect(&site.socket).await?;
    last_word(&mut raw, bytes).await
}

/// The daemon's last word after these bytes. It may hang up before it has read all.
async fn last_word(raw: &mut Raw, bytes: &[u8]) -> std::io::Result<Ending> {
    let _ = raw.send_bytes(bytes).await;
    let _ = raw.finish().await;
    let mut last = Ending::closed();
    while let Some(message) = raw.next().await? {
        match message {
            ServerMessage::Fault { error } => last = error.into(),
            ServerMessage::End { outcome, .. } => last = outcome.into(),
            _ => {}
        }
    }
    Ok(last)
}

/// Sends bytes in which this request is; how it ends.
async fn answered(site: &Site, bytes: &[u8], id: u64) -> std::io::Result<Ending> {
    let mut raw = Raw::connect(&site.socket).await?;
    raw.send_bytes(bytes).await?;
    raw.end(id).await
}

/// Says this instead of a hello.
async fn hello(site: &Site, bytes: &[u8]) -> std::io::Result<Ending> {
    let mut stream = UnixStream::connect(&site.socket).await?;
    stream.write_all(bytes).await?;
    // Who is turned away learns the versions too.
    Hello::read(&mut stream).await.map_err(std::io::Error::other)?;
    last_word(&mut Raw::over(stream), &[]).await
}

fn info(id: u64) -> Vec<u8> {
    frame(&ClientMessage::Request { id, call: Call::Info })
}

clients! {
    too_long(site) { send(&site, &(FRAME_BYTES_MAX + 1).to_le_bytes()).await }
    empty(site) { send(&site, &framed(&[])).await }
    rubbish(site) { send(&site, &framed(&[0xc1; 4096])).await }
    deep(site) { send(&site, &framed(&[vec![0x91; 500_000], vec![0xc0]].concat())).await }
    huge_list(site) { send(&site, &framed(&[0xdd, 0xff, 0xff, 0xff, 0xff])).await }
    /// More values than a frame may have, a byte each.
    many_values(site) {
        let n: u32 = 900_000;
        send(&site, &framed(&[&[0xdd][..], &n.to_be_bytes(), &vec![0xc0; n as usize]].concat())).await
    }
    not_utf_8(site) {
        let text = "innocent";
        let call = Call::Message { to: 7, text: text.to_owned() };
        let mut bytes = frame(&ClientMessage::Request { id: 1, call });
        let at = bytes.windows(text.len()).position(|window| window == text.as_bytes());
        let at = at.ok_or_else(|| std::io::Error::other("the text is in the frame"))?;
        bytes[at..at + text.len()].fill(0xff);
        send(&site, &bytes).await
    }
    cut(site) { send(&site, &framed(&info(1)[4..12])).await }
    with_more(site) { send(&site, &framed(&[&info(1)[4..], &[0xc0]].concat())).await }
    id_twice(site) { send(&site, &[info(5), info(5)].concat()).await }
    id_back(site) { send(&site, &[info(5), info(4)].concat()).await }
    id_of_64_bits(site) { answered(&site, &info(u64::MAX), u64::MAX).await }
    hello_of_http(site) { hello(&site, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").await }
    hello_of_old(site) {
        hello(&site, &Hello { version_min: 700, version_max: 900, ..Hello::ours() }.encode()).await
    }
    hello_of_small_frames(site) {
        hello(&site, &Hello { frame_bytes_max: 100, ..Hello::ours() }.encode()).await
    }
    unknown_call(site) {
        send(&site, &framed(b"\x83\xa4type\xa7request\xa2id\x01\xa4call\x81\xa4type\xa8teleport")).await
    }
    /// Skipped; what comes after is answered.
    unknown_messages(site) {
        let unknown = framed(b"\x82\xa4type\xa8teleport\xa2id\x09");
        answered(&site, &[unknown.repeat(10_000), info(1)].concat(), 1).await
    }
    /// Cancels of nothing with a field that nobody knows, of nearly as many values as a frame may have, on 128 connections. What
    /// comes after is answered.
    surplus_fields(site) {
        let n: u32 = 131_000;
        let cancel = &b"\x83\xa4type\xa6cancel\xa2id\x09\xa4more\xdd"[..];
        let bytes = framed(&[cancel, &n.to_be_bytes(), &vec![0xc0; n as usize]].concat());
        let mut all = Vec::new();
        for _ in 0..128 {
            all.push(Raw::connect(&site.socket).await?);
        }
        while site.goes_on() {
            for raw in &mut all {
                raw.send_bytes(&bytes).await?;
            }
        }
        all[0].ask(Call::Info).await
    }
}
