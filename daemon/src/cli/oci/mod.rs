//! Guests as OCI artifacts: from registries and folders, and to them.
//!
//! - Comes in: a reference, what a registry or a folder answers, docker's configuration for passwords.
//! - Goes out: a component that is what its digest says and that a daemon would take by its imports and exports; artifacts that
//!   `wkg` and `oci-wasm` read.
//! - The command's process talks to registries; a daemon has no network.
//! - Must not happen: a byte of a component kept or run whose digest was not worked out here; more read than a descriptor says or a
//!   limit lets; a password or a request sent without TLS to another machine unasked; a link followed in a folder.

mod artifact;
mod auth;
mod blobs;
mod cache;
mod digest;
mod error;
mod http;
mod layout;
mod reference;
mod registry;

use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;

pub(crate) use self::artifact::Said;
use self::artifact::{Artifact, MANIFEST_BYTES_MAX, Parts, check_config, parts};
pub(super) use self::blobs::write_whole;
pub(crate) use self::cache::Cache;
pub(crate) use self::digest::Digest;
use self::error::COMPONENT;
pub(crate) use self::error::OciError;
use self::http::{Tell, untold};
use self::layout::Layout;
pub(crate) use self::reference::Reference;
use self::reference::Store;
use self::registry::{Purpose, Registry};
use super::progress::{ProgressDisplay, Unit};
use crate::config::Config;
use crate::daemon::cache_dir;
use crate::guest::{GuestLimits, World, make_private};

/// How artifacts are fetched.
#[derive(Clone, Debug)]
pub(crate) struct Terms {
    /// Whether registries on other machines are asked without TLS.
    pub(crate) plain_http: bool,
    /// The most of a component.
    pub(crate) component_bytes: u64,
    /// The cache folder, in which they are kept; nowhere if none.
    pub(crate) cache: Option<PathBuf>,
}

impl Default for Terms {
    fn default() -> Self {
        let component_bytes = GuestLimits::default().component_bytes as u64;
        Self { plain_http: false, component_bytes, cache: cache_dir(&Config::default()) }
    }
}

/// A guest that came, with everything about it looked at.
#[derive(Debug)]
pub(crate) struct Pulled {
    pub(crate) component: Bytes,
    /// Of its manifest.
    pub(crate) digest: Digest,
    pub(crate) title: Option<String>,
    pub(crate) world: World,
    /// Whether the component was in the cache.
    pub(crate) was_kept: bool,
    /// Where it is in the cache, or why it is not.
    pub(crate) kept: Result<Option<PathBuf>, OciError>,
}

enum Opened {
    Registry(Registry),
    Folder(Layout),
}

impl Opened {
    fn new(store: &Store, plain_http: bool, purpose: Purpose) -> Result<Self, OciError> {
        Ok(match store {
            Store::Registry { host, repository } => {
                Self::Registry(Registry::new(host, repository, plain_http, purpose)?)
            }
            Store::Folder(folder) => Self::Folder(Layout::new(folder)),
        })
    }

    async fn manifest(&self, reference: &Reference) -> Result<Vec<u8>, OciError> {
        match self {
            Self::Registry(registry) => registry.manifest(reference).await,
            Self::Folder(layout) => layout.manifest(reference),
        }
    }

    async fn blob(
        &self,
        what: &str,
        descriptor: &artifact::Descriptor,
        tell: &Tell,
    ) -> Result<Vec<u8>, OciError> {
        match self {
            Self::Registry(registry) => registry.blob(what, descriptor, tell).await,
            Self::Folder(layout) => layout.blob(what, descriptor),
        }
    }
}

/// Fetches a guest, from the cache what is there. What a digest names needs no registry then.
///
/// # Errors
/// It does not come, is not what was asked for, or is no guest.
pub(crate) async fn pull(
    reference: &Reference,
    terms: &Terms,
    progress: &Arc<ProgressDisplay>,
) -> Result<Pulled, OciError> {
    let cache = terms.cache.as_deref().map(Cache::within);
    let opened = Opened::new(&reference.store, terms.plain_http, Purpose::Pull)?;
    // What is kept and is no longer what its name says is fetched anew.
    let kept_manifest = cache
        .as_ref()
        .zip(reference.digest)
        .and_then(|(cache, digest)| cache.read_any(&digest, MANIFEST_BYTES_MAX));
    let manifest = match kept_manifest {
        Some(manifest) => manifest,
        None => opened.manifest(reference).await?,
    };
    let digest = Digest::of(&manifest);
    if let Some(expected) = reference.digest.filter(|expected| *expected != digest) {
        let what = format!("the manifest of {reference}");
        return Err(OciError::Digest { what, expected, actual: digest });
    }
    let Parts { config, layer, title } = parts(&manifest, terms.component_bytes)?;
    let kept = |descriptor: &artifact::Descriptor| cache.as_ref()?.read(&descriptor.digest, descriptor.size);
    let config_bytes = match kept(&config) {
        Some(bytes) => bytes,
        None => opened.blob("the configuration", &config, &untold()).await?,
    };
    check_config(&config_bytes, &layer)?;
    let (component, was_kept) = match kept(&layer) {
        Some(bytes) => (bytes, true),
        None => {
            let tell = tell(progress, format!("pulling {}", reference.label()), layer.size);
            (opened.blob(COMPONENT, &layer, &tell).await?, false)
        }
    };
    progress.finish();
    let no_guest = |source| OciError::NoGuest { what: reference.to_string(), source };
    let world = World::of(&component).map_err(no_guest)?;
    world.check().map_err(no_guest)?;
    let kept = cache.zip(terms.cache.as_ref()).map(|(cache, folder)| {
        // A daemon of this user keeps what it compiles there, and refuses a folder that others may come to.
        make_private(folder).map_err(OciError::Cache)?;
        // The manifest last: where it is, the rest is.
        cache.write(&config.digest, &config_bytes)?;
        if !was_kept {
            cache.write(&layer.digest, &component)?;
        }
        cache.write(&digest, &manifest)?;
        cache.trim(&[config.digest, layer.digest, digest]);
        Ok(cache.path(&layer.digest))
    });
    Ok(Pulled { component: component.into(), digest, title, world, was_kept, kept: kept.transpose() })
}

/// Brings a guest to a registry or a folder, and tells its digest.
///
/// # Errors
/// It is no guest, or is not taken.
pub(crate) async fn push(
    component: Bytes,
    reference: &Reference,
    said: &Said,
    plain_http: bool,
    progress: &Arc<ProgressDisplay>,
) -> Result<Digest, OciError> {
    let no_guest = |source| OciError::NoGuest { what: COMPONENT.to_owned(), source };
    let world = World::of(&component).map_err(no_guest)?;
    world.check().map_err(no_guest)?;
    let tell = tell(progress, format!("pushing {}", reference.label()), component.len() as u64);
    let artifact = Artifact::new(component, &world, said);
    if let Some(expected) = reference.digest.filter(|expected| *expected != artifact.digest) {
        let what = format!("to push it as {reference}");
        return Err(OciError::Digest { what, expected, actual: artifact.digest });
    }
    let tag = reference.tag.as_deref();
    match Opened::new(&reference.store, plain_http, Purpose::Push)? {
        Opened::Registry(registry) => registry.push(&artifact, tag, &tell).await?,
        Opened::Folder(layout) => layout.push(&artifact, tag).await?,
    }
    progress.finish();
    Ok(artifact.digest)
}

fn tell(progress: &Arc<ProgressDisplay>, title: String, total: u64) -> Tell {
    let progress = progress.clone();
    Arc::new(move |done| progress.update(&title, Unit::Bytes, done, total))
}
