//! Clients that do not do what clients do.

pub(super) mod crowds;
pub(super) mod frames;
pub(super) mod leaving;
pub(super) mod messages;
pub(super) mod outputs;
pub(super) mod rights;
pub(super) mod saving;
pub(super) mod starts;
pub(super) mod uploads;

use std::future::Future;
use std::io;
use std::pin::Pin;

use super::raw::Raw;
use super::{Component, Ending, Site};

/// What a client of the table is.
type Attacking = Pin<Box<dyn Future<Output = io::Result<Ending>> + Send>>;

/// Bytes that change the hash of a component and nothing else: a custom section of its name.
pub(super) fn salted(component: &Component, salt: u64) -> Component {
    let mut section = vec![0, 13, 4];
    section.extend_from_slice(b"salt");
    section.extend_from_slice(&salt.to_le_bytes());
    Component::new([&component.wasm[..], &section].concat())
}

/// A number that no other client of this machine has.
pub(super) fn fresh() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |since| since.as_nanos() as u64) ^ u64::from(std::process::id()).rotate_left(40)
}

/// A connection on which the hostile guest is known; how its upload ended where it is not.
pub(super) async fn prepared(site: &Site) -> io::Result<Result<Raw, Ending>> {
    let mut raw = Raw::connect(&site.socket).await?;
    let uploaded = raw.upload(&site.hostile).await?;
    Ok(if uploaded.is_well() { Ok(raw) } else { Err(uploaded) })
}

/// What [`prepared`] has, or back to the caller with what came of it instead.
macro_rules! ready {
    ($site:expr) => {
        match $crate::attacks::clients::prepared($site).await? {
            Ok(raw) => raw,
            Err(ending) => return Ok(ending),
        }
    };
}
use ready;

/// Defines clients as functions that box what they do.
macro_rules! clients {
    ($($(#[$doc:meta])* $name:ident($site:ident) $body:block)*) => {
        $($(#[$doc])*
        pub(in super::super) fn $name($site: $crate::attacks::Site) -> $crate::attacks::clients::Attacking {
            Box::pin(async move { $body })
        })*
    };
}
use clients;
