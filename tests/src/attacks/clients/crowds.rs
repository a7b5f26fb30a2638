//! More connections and guests than there may be.

use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use trellis_wire::{FRAME_BYTES_MAX, Hello, ServerMessage};

use super::{clients, ready};
use crate::attacks::raw::{Raw, is_closed};
use crate::attacks::{Ending, Site};

/// Connects so often, and keeps all; how those that were refused were refused.
async fn connect(site: &Site, n: usize) -> std::io::Result<Ending> {
    let (mut all, mut last) = (Vec::new(), Ending::well());
    for _ in 0..n {
        match Raw::connect(&site.socket).await {
            Ok(raw) => all.push(raw),
            // Some that are refused are closed before they have said hello, and on a busy machine that may be all of them.
            Err(error) if is_closed(&error) => last = Ending::closed(),
            Err(error) => return Err(error),
        }
    }
    site.hold().await;
    for raw in &mut all {
        raw.finish().await.or_else(|error| if is_closed(&error) { Ok(()) } else { Err(error) })?;
    }
    for raw in &mut all {
        if let Some(ServerMessage::Fault { error }) = raw.next().await? {
            last = error.into();
        }
    }
    Ok(last)
}

clients! {
    /// 250 that never come to the end of their hello.
    slow_hellos(site) {
        let mut all = Vec::new();
        for _ in 0..250 {
            let mut stream = UnixStream::connect(&site.socket).await?;
            stream.write_all(&Hello::ours().encode()[..5]).await?;
            all.push(stream);
        }
        site.hold().await;
        Ok(Ending::well())
    }
    /// 200 frames of a megabyte, of which the second half does not come.
    half_frames(site) {
        let mut all = Vec::new();
        for _ in 0..200 {
            let mut raw = Raw::connect(&site.socket).await?;
            let half = FRAME_BYTES_MAX as usize / 2;
            raw.send_bytes(&[&FRAME_BYTES_MAX.to_le_bytes()[..], &vec![0xc0; half]].concat()).await?;
            all.push(raw);
        }
        site.hold().await;
        Ok(Ending::well())
    }
    connections(site) { connect(&site, 1000).await }
    connections_by_turns(site) {
        while site.goes_on() {
            // Most are turned away, some before they have said anything, and some find no room to wait in.
            if let Ok(mut stream) = UnixStream::connect(&site.socket).await {
                let _ = Hello::ours().write(&mut stream).await;
            }
            tokio::task::yield_now().await;
        }
        Ok(Ending::well())
    }
    /// 200 guests that sleep, on one connection and the next.
    guests(site) {
        let mut all = Vec::new();
        let mut refused = Ending::well();
        for _ in 0..4 {
            let mut raw = ready!(&site);
            for _ in 0..50 {
                let id = raw.start(&site.hostile, &["sleep"]).await?;
                if let Err(ending) = raw.started(id).await? {
                    refused = ending;
                }
            }
            all.push(raw);
        }
        site.hold().await;
        Ok(refused)
    }
    starts_in_a_row(site) {
        let mut raw = ready!(&site);
        while site.goes_on() {
            let id = raw.start(&site.hostile, &["exit-well"]).await?;
            let ending = raw.end(id).await?;
            if !ending.is_well() {
                return Ok(ending);
            }
        }
        Ok(Ending::well())
    }
    /// 200 requests before the first is answered.
    starts_at_once(site) {
        let mut raw = ready!(&site);
        let mut last = Ending::well();
        while site.goes_on() {
            for _ in 0..200 {
                raw.start(&site.hostile, &["error"]).await?;
            }
            let mut n_left = 200;
            while n_left > 0 {
                match raw.next().await? {
                    Some(ServerMessage::End { outcome, .. }) => {
                        n_left -= 1;
                        let ending = Ending::from(outcome);
                        if ending.code != "guest_failed" {
                            last = ending;
                        }
                    }
                    Some(ServerMessage::Fault { error }) => return Ok(error.into()),
                    Some(_) => {}
                    None => return Ok(Ending::closed()),
                }
            }
        }
        Ok(last)
    }
}
