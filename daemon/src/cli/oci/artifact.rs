//! The shape of a guest as an OCI artifact: a manifest that names a configuration and one layer, the component. It is that of the
//! CNCF's Wasm OCI Artifact layout, which `wkg` and `oci-wasm` write and read.

use std::collections::BTreeMap;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::digest::Digest;
use super::error::{COMPONENT, OciError};
use crate::guest::World;

/// Of a manifest.
pub(super) const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.wasm.config.v0+json";
const LAYER: &str = "application/wasm";
/// Of several artifacts under one name, as images for several machines have.
const INDEX: &str = "application/vnd.oci.image.index.v1+json";

/// The most that a registry has to take of a manifest, by the distribution specification.
pub(super) const MANIFEST_BYTES_MAX: u64 = 4 << 20;
const CONFIG_BYTES_MAX: u64 = 1 << 20;
/// What is repeated of a text that somebody else wrote: a manifest of 4 MB can be one title.
const N_SHOWN_CHARS: usize = 200;

const ARCHITECTURE: &str = "wasm";
/// What runs components.
const SYSTEM: &str = "wasip2";
/// The time of an artifact of which none was given: the same component is the same artifact whenever it is made.
const NO_TIME: &str = "1970-01-01T00:00:00Z";

const TITLE: &str = "org.opencontainers.image.title";
const CREATED: &str = "org.opencontainers.image.created";
/// The version of the WIT package `trellis:host` that the guest was built against.
const HOST: &str = "dev.trellis.host";

/// Names content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Descriptor {
    pub(super) media_type: String,
    pub(super) digest: Digest,
    pub(super) size: u64,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) annotations: BTreeMap<String, String>,
    /// What others wrote, such as a platform: an index that is written again keeps it.
    #[serde(flatten)]
    pub(super) other: Map<String, Value>,
}

impl Descriptor {
    pub(super) fn of(media_type: &str, content: &[u8]) -> Self {
        Self {
            media_type: media_type.to_owned(),
            digest: Digest::of(content),
            size: content.len() as u64,
            annotations: BTreeMap::new(),
            other: Map::new(),
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Manifest {
    schema_version: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    media_type: Option<String>,
    #[serde(default)]
    config: Option<Descriptor>,
    #[serde(default)]
    layers: Vec<Descriptor>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    annotations: BTreeMap<String, String>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Config {
    #[serde(default)]
    created: String,
    architecture: String,
    os: String,
    layer_digests: Vec<Digest>,
    /// Absent for modules.
    #[serde(default)]
    component: Option<Component>,
}

#[derive(Serialize, Deserialize)]
struct Component {
    exports: Vec<String>,
    imports: Vec<String>,
    /// The world in full, where it has a name.
    #[serde(default)]
    target: Option<String>,
}

/// The descriptors of a manifest that is a guest's.
#[derive(Debug)]
pub(super) struct Parts {
    pub(super) config: Descriptor,
    pub(super) layer: Descriptor,
    pub(super) title: Option<String>,
}

/// Reads a manifest, and looks at everything that it says of a guest.
///
/// # Errors
/// It is no guest's, or its component is larger than may be.
pub(super) fn parts(manifest: &[u8], component_bytes_max: u64) -> Result<Parts, OciError> {
    const WHAT: &str = "the manifest";
    let shape = |reason: String| OciError::Shape { what: WHAT, reason: shortened(&reason) };
    let manifest: Manifest = serde_json::from_slice(manifest).map_err(|error| shape(error.to_string()))?;
    match manifest.media_type.as_deref() {
        Some(INDEX) => return Err(shape("it is an index of several artifacts; name one of them".to_owned())),
        Some(found) if found != MANIFEST => {
            return Err(OciError::MediaType { what: WHAT, found: shortened(found), expected: MANIFEST });
        }
        _ => {}
    }
    if manifest.schema_version != 2 {
        return Err(shape(format!("its schemaVersion is {}, not 2", manifest.schema_version)));
    }
    let config = manifest.config.ok_or_else(|| shape("it names no configuration".to_owned()))?;
    let n_layers = manifest.layers.len();
    let [layer] = <[Descriptor; 1]>::try_from(manifest.layers)
        .map_err(|_| shape(format!("it has {n_layers} layers, a guest has one")))?;
    is_of_type("the configuration", &config, CONFIG)?;
    is_of_type("the layer", &layer, LAYER)?;
    fits("the configuration", config.size, CONFIG_BYTES_MAX)?;
    fits(COMPONENT, layer.size, component_bytes_max)?;
    Ok(Parts { config, layer, title: manifest.annotations.get(TITLE).map(|title| shortened(title)) })
}

fn is_of_type(what: &'static str, descriptor: &Descriptor, expected: &'static str) -> Result<(), OciError> {
    if descriptor.media_type == expected {
        return Ok(());
    }
    Err(OciError::MediaType { what, found: shortened(&descriptor.media_type), expected })
}

fn fits(what: &str, n_bytes: u64, limit_bytes: u64) -> Result<(), OciError> {
    match n_bytes > limit_bytes {
        true => Err(OciError::TooLarge { what: what.to_owned(), n_bytes, limit_bytes }),
        false => Ok(()),
    }
}

/// Whether a configuration is that of a component, and of this one.
///
/// # Errors
/// It is of something else.
pub(super) fn check_config(config: &[u8], layer: &Descriptor) -> Result<(), OciError> {
    let shape = |reason: String| OciError::Shape { what: "the configuration", reason: shortened(&reason) };
    let config: Config = serde_json::from_slice(config).map_err(|error| shape(error.to_string()))?;
    if config.architecture != ARCHITECTURE || config.os != SYSTEM {
        let Config { architecture, os, .. } = config;
        return Err(shape(format!(
            "it is for {architecture:?} and {os:?}, not for {ARCHITECTURE:?} and {SYSTEM:?}"
        )));
    }
    if config.layer_digests != [layer.digest] {
        return Err(shape("it is of another layer than the manifest's".to_owned()));
    }
    Ok(())
}

/// What is said of a guest beside its bytes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Said {
    pub(crate) title: Option<String>,
    /// When it was made, as RFC 3339 has times.
    pub(crate) created: Option<String>,
}

/// A guest, ready to be pushed.
#[derive(Debug)]
pub(super) struct Artifact {
    pub(super) manifest: Bytes,
    pub(super) digest: Digest,
    pub(super) config: (Descriptor, Bytes),
    pub(super) layer: (Descriptor, Bytes),
}

impl Artifact {
    /// The same component of which the same is said gives the same bytes.
    pub(super) fn new(component: Bytes, world: &World, said: &Said) -> Self {
        let layer = Descriptor::of(LAYER, &component);
        let config = Config {
            created: said.created.clone().unwrap_or_else(|| NO_TIME.to_owned()),
            architecture: ARCHITECTURE.to_owned(),
            os: SYSTEM.to_owned(),
            layer_digests: vec![layer.digest],
            component: Some(Component {
                exports: world.exports.clone(),
                imports: world.imports.clone(),
                target: None,
            }),
        };
        let config = Bytes::from(json(&config));
        let config_descriptor = Descriptor::of(CONFIG, &config);
        let annotations =
            [(TITLE, said.title.clone()), (CREATED, said.created.clone()), (HOST, world.host_package())];
        let annotations =
            annotations.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))).collect();
        let manifest = Manifest {
            schema_version: 2,
            media_type: Some(MANIFEST.to_owned()),
            config: Some(config_descriptor.clone()),
            layers: vec![layer.clone()],
            annotations,
        };
        let manifest = Bytes::from(json(&manifest));
        Self {
            digest: Digest::of(&manifest),
            manifest,
            config: (config_descriptor, config),
            layer: (layer, component),
        }
    }
}

/// The beginning of a text.
pub(super) fn shortened(text: &str) -> String {
    match text.char_indices().nth(N_SHOWN_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// In one line, with the keys in the order of the specification.
pub(super) fn json(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("its keys are strings")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guest() -> Artifact {
        let world =
            World { imports: vec!["trellis:host/models@0.2.0".to_owned()], exports: vec!["run".to_owned()] };
        Artifact::new(
            Bytes::from_static(b"component"),
            &world,
            &Said { title: Some("chat".to_owned()), created: None },
        )
    }

    fn refused(from: &str, to: &str) -> OciError {
        let manifest = String::from_utf8(guest().manifest.to_vec()).expect("JSON");
        assert!(manifest.contains(from), "{manifest}");
        parts(manifest.replacen(from, to, 1).as_bytes(), 100).expect_err(to)
    }

    #[test]
    fn what_is_pushed_twice_is_the_same_and_is_taken_back() {
        let (one, two) = (guest(), guest());
        assert_eq!((one.digest, &one.config.1), (two.digest, &two.config.1));
        let parts = parts(&one.manifest, 100).expect("a guest's");
        assert_eq!((&parts.config, &parts.layer), (&one.config.0, &one.layer.0));
        assert_eq!(parts.title.as_deref(), Some("chat"));
        check_config(&one.config.1, &parts.layer).expect("of this layer");
        let config = String::from_utf8(one.config.1.to_vec()).expect("JSON");
        assert!(config.contains(r#""created":"1970-01-01T00:00:00Z""#), "{config}");
        let manifest = String::from_utf8(one.manifest.to_vec()).expect("JSON");
        assert!(manifest.contains(r#""dev.trellis.host":"trellis:host@0.2.0""#), "{manifest}");
        assert!(!manifest.contains("image.created"), "{manifest}");
    }

    /// As `oci-wasm` 0.6.0 writes them.
    #[test]
    fn artifacts_of_others_are_guests_too() {
        let manifest = r#"{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","config":{"mediaType":
            "application/vnd.wasm.config.v0+json","digest":"sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
            "size":383},"layers":[{"mediaType":"application/wasm","digest":
            "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855","size":9}]}"#;
        let parts = parts(manifest.as_bytes(), 9).expect("a guest's");
        let config = r#"{"created":"2026-11-30T20:48:19.123456789Z","author":null,"architecture":"wasm","os":"wasip2","layerDigests":
            ["sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"],"component":{"exports":["run"],"imports":
            ["trellis:host/types@0.2.0"],"target":null}}"#;
        check_config(config.as_bytes(), &parts.layer).expect("of this layer");
        let module = config.replace("wasip2", "wasip1");
        assert!(matches!(check_config(module.as_bytes(), &parts.layer), Err(OciError::Shape { .. })));
    }

    #[test]
    fn what_is_no_guests_manifest_is_refused_for_what_it_is() {
        let is = |error: OciError, words: &str| {
            let said = error.to_string();
            assert!(said.contains(words), "{said}");
        };
        is(refused("image.manifest.v1", "image.index.v1"), "index");
        is(refused(MANIFEST, "application/json"), "application/json");
        is(refused("\"schemaVersion\":2", "\"schemaVersion\":1"), "schemaVersion is 1");
        is(refused(CONFIG, "application/vnd.oci.image.config.v1+json"), "the configuration");
        is(refused(LAYER, "application/vnd.oci.image.layer.v1.tar+gzip"), "the layer");
        is(refused("\"size\":9", "\"size\":101"), "101 bytes, more than the limit of 100");
        is(refused("\"size\":9", "\"size\":-1"), "the manifest is not a guest's");
        is(refused("sha256:", "sha512:"), "no digest");
        is(
            refused(
                "\"layers\":[",
                "\"layers\":[{\"mediaType\":\"application/wasm\",\"digest\":\"sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855\",\"size\":0},",
            ),
            "2 layers",
        );
        is(parts(b"{\"schemaVersion\":2}", 1).expect_err("no more"), "no configuration");
        let long = "x".repeat(100_000);
        assert!(refused(LAYER, &long).to_string().len() < 1000);
        assert!(refused("\"size\":9", &format!("\"size\":\"{long}\"")).to_string().len() < 1000);
        let titled = String::from_utf8(guest().manifest.to_vec())
            .expect("JSON")
            .replace("\"chat\"", &format!("{long:?}"));
        let title = parts(titled.as_bytes(), 100).expect("a guest's").title.expect("it has one");
        assert_eq!(title.chars().count(), N_SHOWN_CHARS + 1);
        let guest = guest();
        let other = Descriptor::of(LAYER, b"another");
        is(check_config(&guest.config.1, &other).expect_err("of another"), "another layer");
    }
}
