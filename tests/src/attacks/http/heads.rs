//! Heads of requests that are none, or never end.

use std::time::Duration;

use super::line::Line;
use super::{MODELS, over_time};
use crate::attacks::clients::clients;
use crate::attacks::front::Front;
use crate::attacks::{Ending, Site};

/// Connections of one client that sends bytes one by one.
const N_LINES: usize = 8;

/// Between two bytes.
const PAUSE: Duration = Duration::from_millis(20);

/// What follows the head of a request that is answered well.
const NOTHING: &[u8] = b"\r\n";

/// Sends `at_once`, and then a byte now and then for as long as the daemon takes them; how it answers.
async fn by_bytes(front: &Front, at_once: &[u8], then: u8) -> std::io::Result<Ending> {
    let Line { mut reader, mut writer } = front.line().await?;
    let send = async {
        let _ = writer.send(at_once).await;
        while writer.send(&[then]).await.is_ok() {
            tokio::time::sleep(PAUSE).await;
        }
        std::future::pending().await
    };
    tokio::select! {
        biased;
        ending = reader.ending() => ending,
        never = send => never,
    }
}

/// The same on several connections; how the last one ends, or one that ends otherwise.
pub(super) async fn all_by_bytes(site: &Site, at_once: &[u8], then: u8) -> std::io::Result<Ending> {
    let mut lines = tokio::task::JoinSet::new();
    for _ in 0..N_LINES {
        let (front, at_once) = (site.front()?.clone(), at_once.to_vec());
        lines.spawn(async move { by_bytes(&front, &at_once, then).await });
    }
    let mut endings = Vec::new();
    while let Some(ended) = lines.join_next().await {
        endings.push(ended.map_err(std::io::Error::other)??);
    }
    let odd = endings.iter().position(|ending| ending.short() != endings[0].short()).unwrap_or(0);
    Ok(endings.swap_remove(odd))
}

/// A request for models with these headers; how it is answered.
async fn with_headers(site: &Site, headers: &str) -> std::io::Result<Ending> {
    let front = site.front()?;
    front.ask(&front.head("GET", MODELS, headers)).await
}

/// These bytes in the place of a request.
async fn instead(site: &Site, bytes: &[u8]) -> std::io::Result<Ending> {
    site.front()?.ask(bytes).await
}

clients! {
    by_bytes_of_head(site) { all_by_bytes(&site, b"GET /v1/models HTTP/1.1\r\nX: ", b'x').await }
    /// Nothing is ever said.
    silent(site) {
        let mut line = site.front()?.line().await?;
        line.reader.ending().await
    }
    headers_of_200(site) {
        let headers: String = (0..200).map(|i| format!("X-{i}: {i}\r\n")).collect();
        with_headers(&site, &headers).await
    }
    header_of_200_kb(site) { with_headers(&site, &format!("X: {}\r\n", "x".repeat(200_000))).await }
    header_of_no_name(site) { with_headers(&site, ": nobody\r\n").await }
    header_of_nul(site) { with_headers(&site, "X: a\0b\r\n").await }
    /// The body of one is the head of the other, where they are not agreed upon.
    lengths_of_two(site) { with_headers(&site, "Content-Length: 3\r\nContent-Length: 4\r\n").await }
    length_of_no_number(site) { with_headers(&site, "Content-Length: -1\r\n").await }
    version_1_0(site) {
        let front = site.front()?;
        let request = String::from_utf8(front.get(MODELS)).map_err(std::io::Error::other)?;
        let request = request.replace("HTTP/1.1", "HTTP/1.0");
        over_time(&site, || front.ask(request.as_bytes())).await
    }
    version_2(site) { instead(&site, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\x12\x04\0\0\0\0\0").await }
    version_3(site) { instead(&site, b"GET / HTTP/3.9\r\n\r\n").await }
    /// The first bytes of a client that wants TLS.
    encrypted(site) { instead(&site, b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03abcdefgh\r\n\r\n").await }
    rubbish(site) { instead(&site, &[&[0xa7; 4096][..], NOTHING].concat()).await }
    path_of_60_kb(site) {
        let front = site.front()?;
        front.ask(&front.get(&format!("/{}", "x".repeat(60_000)))).await
    }
    path_of_nobody(site) {
        let front = site.front()?;
        front.ask(&front.get("/v1/../../etc/passwd")).await
    }
    method_of_nobody(site) {
        let front = site.front()?;
        front.ask(&front.head("BREW", "/v1/chat/completions", "")).await
    }
    /// Names of models with what leads elsewhere, or ends texts.
    model_of_a_path(site) {
        let front = site.front()?;
        let mut last = Ending::well();
        for name in ["..%2f..%2fetc%2fpasswd", "%00", "a/../../b", "%e2%80%ae", "tiny%0d%0aX:%20y"] {
            last = front.ask(&front.get(&format!("{MODELS}/{name}"))).await?;
            if last.code != "404" {
                return Ok(Ending { message: format!("{name}: {}", last.message), ..last });
            }
        }
        Ok(last)
    }
}
