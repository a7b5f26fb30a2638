//! Components that do not come as they were announced.

use std::time::Duration;

use trellis_wire::{CHUNK_BYTES_MAX, Call, ClientMessage, ComponentHash, Event, ServerMessage};

use super::{clients, fresh, salted};
use crate::attacks::raw::Raw;
use crate::attacks::{Component, Ending, Site, components};

/// Announces so many bytes of this hash and sends these chunks once they are wanted; how that ends.
async fn upload(
    raw: &mut Raw,
    hash: ComponentHash,
    n_bytes: u64,
    chunks: impl IntoIterator<Item = Vec<u8>> + Send,
) -> std::io::Result<Ending> {
    let id = raw.request(Call::Upload { hash, n_bytes }).await?;
    match wanted(raw, id).await? {
        Ok(()) => {}
        Err(ending) => return Ok(ending),
    }
    let chunks: Vec<Vec<u8>> = chunks.into_iter().collect();
    for bytes in chunks {
        raw.send(&ClientMessage::Chunk { id, bytes }).await?;
    }
    raw.end(id).await
}

/// Waits until the bytes are wanted; how the upload ended where they are not.
async fn wanted(raw: &mut Raw, id: u64) -> std::io::Result<Result<(), Ending>> {
    loop {
        match raw.next().await? {
            Some(ServerMessage::Event { id: of, event: Event::Wanted }) if of == id => return Ok(Ok(())),
            Some(ServerMessage::End { id: of, outcome, .. }) if of == id => return Ok(Err(outcome.into())),
            Some(ServerMessage::Fault { error }) => return Ok(Err(error.into())),
            Some(_) => {}
            None => return Ok(Err(Ending::closed())),
        }
    }
}

/// A hash that nothing has.
fn no_hash() -> ComponentHash {
    Component::new(fresh().to_le_bytes().to_vec()).hash
}

/// Uploads a component and starts it; how it ends.
async fn run(site: &Site, component: &Component) -> std::io::Result<Ending> {
    let mut raw = Raw::connect(&site.socket).await?;
    let uploaded = raw.upload(component).await?;
    if !uploaded.is_well() {
        return Ok(uploaded);
    }
    let id = raw.start(component, &["exit-well"]).await?;
    raw.follow(id).await
}

/// The worst of several ends: the first that is not well.
fn worst(endings: impl IntoIterator<Item = std::io::Result<Ending>>) -> std::io::Result<Ending> {
    let endings = endings.into_iter().collect::<std::io::Result<Vec<_>>>()?;
    Ok(endings.into_iter().find(|ending| !ending.is_well()).unwrap_or_else(Ending::well))
}

clients! {
    component_too_long(site) {
        let mut raw = Raw::connect(&site.socket).await?;
        upload(&mut raw, no_hash(), 100 << 20, []).await
    }
    component_of_2_63(site) {
        let mut raw = Raw::connect(&site.socket).await?;
        upload(&mut raw, no_hash(), 1 << 63, []).await
    }
    component_of_none(site) {
        let mut raw = Raw::connect(&site.socket).await?;
        upload(&mut raw, no_hash(), 0, []).await
    }
    wrong_hash(site) {
        let mut raw = Raw::connect(&site.socket).await?;
        upload(&mut raw, no_hash(), 1000, [vec![7; 1000]]).await
    }
    more_than_announced(site) {
        let mut raw = Raw::connect(&site.socket).await?;
        upload(&mut raw, no_hash(), 1000, [vec![7; 1001]]).await
    }
    chunk_too_long(site) {
        let mut raw = Raw::connect(&site.socket).await?;
        upload(&mut raw, no_hash(), 1 << 20, [vec![7; CHUNK_BYTES_MAX + 1]]).await
    }
    /// Before the daemon has said that it wants them.
    chunks_unasked(site) {
        let mut raw = Raw::connect(&site.socket).await?;
        // While as many others of this user wait, this one has no place yet.
        let hash = no_hash();
        let mut first = Raw::connect(&site.socket).await?;
        let id = first.request(Call::Upload { hash, n_bytes: 1000 }).await?;
        if let Err(ending) = wanted(&mut first, id).await? {
            return Ok(ending);
        }
        let id = raw.request(Call::Upload { hash, n_bytes: 1000 }).await?;
        raw.send(&ClientMessage::Chunk { id, bytes: vec![7; 10] }).await?;
        raw.end(id).await
    }
    chunks_for_nobody(site) {
        let mut raw = Raw::connect(&site.socket).await?;
        for id in 0..200 {
            raw.send(&ClientMessage::Chunk { id, bytes: vec![7; 50_000] }).await?;
        }
        raw.ask(Call::Info).await
    }
    chunks_of_nothing(site) {
        let mut raw = Raw::connect(&site.socket).await?;
        let component = salted(&site.hostile, fresh());
        let id = raw.request(Call::Upload { hash: component.hash, n_bytes: component.wasm.len() as u64 }).await?;
        if let Err(ending) = wanted(&mut raw, id).await? {
            return Ok(ending);
        }
        for _ in 0..20_000 {
            raw.send(&ClientMessage::Chunk { id, bytes: Vec::new() }).await?;
        }
        for chunk in component.wasm.chunks(CHUNK_BYTES_MAX) {
            raw.send(&ClientMessage::Chunk { id, bytes: chunk.to_vec() }).await?;
        }
        raw.end(id).await
    }
    twice_at_once(site) {
        let component = salted(&site.hostile, fresh());
        let [a, b] = [run(&site, &component), run(&site, &component)];
        let (a, b) = tokio::join!(a, b);
        worst([a, b])
    }
    /// In the middle of it.
    leave(site) {
        while site.goes_on() {
            let mut raw = Raw::connect(&site.socket).await?;
            let id = raw.request(Call::Upload { hash: no_hash(), n_bytes: 1 << 20 }).await?;
            if let Err(ending) = wanted(&mut raw, id).await? {
                return Ok(ending);
            }
            raw.send(&ClientMessage::Chunk { id, bytes: vec![7; CHUNK_BYTES_MAX] }).await?;
        }
        Ok(Ending::well())
    }
    /// Components of their own, small ones, none of which is ever started.
    again_and_again(site) {
        let small = Component::new(components::empty_component());
        while site.goes_on() {
            let mut raw = Raw::connect(&site.socket).await?;
            let uploaded = raw.upload(&salted(&small, fresh())).await?;
            if !uploaded.is_well() {
                return Ok(uploaded);
            }
        }
        Ok(Ending::well())
    }
    /// As many as the user has places; another of the user's gets its turn once they are over.
    never_go_on(site) {
        let mut idle = Vec::new();
        for _ in 0..4 {
            let mut raw = Raw::connect(&site.socket).await?;
            raw.request(Call::Upload { hash: no_hash(), n_bytes: 1000 }).await?;
            idle.push(raw);
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
        site.hold().await;
        drop(idle);
        run(&site, &salted(&site.hostile, fresh())).await
    }
    cut(site) {
        let wasm = &site.hostile.wasm;
        run(&site, &Component::new(wasm[..wasm.len() / 2].to_vec())).await
    }
    flipped(site) {
        let mut wasm = site.hostile.wasm.to_vec();
        let (salt, n) = (fresh() as usize, wasm.len());
        for i in 0..8 {
            wasm[(salt.wrapping_mul(i + 1) ^ (salt >> 20)) % n] ^= 1 << (i % 8);
        }
        run(&site, &Component::new(wasm)).await
    }
    /// Twenty components at once that nobody has compiled.
    compile_crowd(site) {
        let base = Component::new(components::functions(1_000));
        let salt = fresh();
        let all = (0..20).map(|i| {
            let component = salted(&base, salt.wrapping_add(i));
            let site = site.clone();
            tokio::spawn(async move { run(&site, &component).await })
        });
        let all: Vec<_> = all.collect();
        let mut endings = Vec::new();
        for one in all {
            endings.push(one.await.map_err(std::io::Error::other)?);
        }
        worst(endings)
    }
    /// Sixty-four starts of one component that is not compiled.
    compile_one_by_many(site) {
        let component = salted(&site.hostile, fresh());
        let all: Vec<_> = (0..64)
            .map(|_| {
                let (site, component) = (site.clone(), component.clone());
                tokio::spawn(async move { run(&site, &component).await })
            })
            .collect();
        let mut endings = Vec::new();
        for one in all {
            endings.push(one.await.map_err(std::io::Error::other)?);
        }
        worst(endings)
    }
}
