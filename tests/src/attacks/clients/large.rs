//! Components as large as they may be, brought, compiled and started over and over.

use std::io;

use super::{clients, fresh, salted};
use crate::attacks::raw::Raw;
use crate::attacks::{Component, Ending, Site, components, made_once};

/// Starts of one component before it is compiled.
const N_STARTS: usize = 60;

/// The largest component, which is made once.
async fn largest() -> io::Result<Component> {
    let made = tokio::task::spawn_blocking(|| made_once("largest", components::largest));
    made.await.map_err(io::Error::other)
}

/// The largest component with a hash that nothing has.
async fn another() -> io::Result<Component> {
    let largest = largest().await?;
    let made = tokio::task::spawn_blocking(move || salted(&largest, fresh()));
    made.await.map_err(io::Error::other)
}

clients! {
    /// Each another one, none of which is ever started.
    uploads(site) {
        while site.goes_on() {
            let uploaded = Raw::connect(&site.socket).await?.upload(&another().await?).await?;
            if !uploaded.is_well() {
                return Ok(uploaded);
            }
        }
        Ok(Ending::well())
    }
    /// All the same.
    launches(site) {
        let largest = largest().await?;
        let mut raw = Raw::connect(&site.socket).await?;
        let uploaded = raw.upload(&largest).await?;
        if !uploaded.is_well() {
            return Ok(uploaded);
        }
        loop {
            let id = raw.start(&largest, &[]).await?;
            let ending = raw.follow(id).await?;
            if !ending.is_well() || !site.goes_on() {
                return Ok(ending);
            }
        }
    }
    /// Each another one, which is compiled.
    compilations(site) {
        loop {
            let ending = run(&site, &another().await?).await?;
            if !ending.is_well() || !site.goes_on() {
                return Ok(ending);
            }
        }
    }
    /// Of one that is not compiled.
    starts_at_once(site) {
        let component = another().await?;
        let mut raw = Raw::connect(&site.socket).await?;
        let uploaded = raw.upload(&component).await?;
        if !uploaded.is_well() {
            return Ok(uploaded);
        }
        let mut ids = Vec::new();
        for _ in 0..N_STARTS {
            ids.push(raw.start(&component, &[]).await?);
        }
        let mut last = Ending::well();
        while !ids.is_empty() {
            match raw.next().await? {
                Some(trellis_wire::ServerMessage::End { id, outcome, .. }) => {
                    ids.retain(|other| *other != id);
                    let ending = Ending::from(outcome);
                    if !ending.is_well() {
                        last = ending;
                    }
                }
                Some(trellis_wire::ServerMessage::Fault { error }) => return Ok(error.into()),
                Some(_) => {}
                None => return Ok(Ending::closed()),
            }
        }
        Ok(last)
    }
}

/// Uploads a component and starts it; how it ends.
async fn run(site: &Site, component: &Component) -> io::Result<Ending> {
    let mut raw = Raw::connect(&site.socket).await?;
    let uploaded = raw.upload(component).await?;
    if !uploaded.is_well() {
        return Ok(uploaded);
    }
    let id = raw.start(component, &[]).await?;
    raw.follow(id).await
}
