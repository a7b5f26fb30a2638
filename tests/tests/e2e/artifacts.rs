//! Guests go to registries and folders and come back, and what does not come back as it went is refused.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;
use trellis_tests::daemons::{self, PATIENCE, Served, config, limits, output};
use trellis_tests::guests;
use trellis_tests::registry::{Lie, Registry, digest};

use crate::exe;

const QUESTION: &str = "What is 37 + 48?";
const LAYER: &str = "application/wasm";
const TAG: &str = "org.opencontainers.image.ref.name";

/// A user with a cache and a configuration of docker's of its own.
pub(crate) struct Desk {
    folder: TempDir,
}

impl Desk {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        fs::create_dir(folder.path().join("docker")).expect("made");
        Self { folder }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn of(&self, mut command: Command) -> Command {
        command.env("XDG_CACHE_HOME", self.path("cache")).env("DOCKER_CONFIG", self.path("docker"));
        command.current_dir(self.folder.path());
        command
    }

    pub(crate) fn trellis(&self, arguments: &[&str]) -> Command {
        let mut command = self.of(daemons::trellis(exe()));
        command.args(arguments);
        command
    }

    /// Asserts that a command did what it was asked to; what it printed.
    pub(crate) fn done(&self, arguments: &[&str]) -> String {
        succeeded(&output(&mut self.trellis(arguments)))
    }

    /// As [`Self::done`], as JSON.
    pub(crate) fn json(&self, arguments: &[&str]) -> Value {
        let arguments = [&["--json"][..], arguments].concat();
        serde_json::from_str(&self.done(&arguments)).expect("JSON")
    }

    /// Asserts that a command failed with this status; what it said.
    pub(crate) fn failed(&self, arguments: &[&str], status: i32) -> String {
        let output = output(&mut self.trellis(arguments));
        let said = String::from_utf8(output.stderr).expect("text");
        assert_eq!(output.status.code(), Some(status), "{arguments:?}: {said}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
        said
    }

    /// Writes a component.
    pub(crate) fn component(&self, wasm: &[u8]) -> String {
        fs::write(self.path("guest.wasm"), wasm).expect("written");
        "guest.wasm".to_owned()
    }

    /// Everything that is kept, by its name.
    pub(crate) fn kept(&self) -> Vec<String> {
        let Ok(names) = fs::read_dir(self.path("cache/trellis/oci/blobs/sha256")) else { return Vec::new() };
        names.map(|entry| entry.expect("readable").file_name().into_string().expect("UTF-8")).collect()
    }
}

pub(crate) fn succeeded(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).expect("text")
}

/// A component that is a guest by its names, and one more for each number.
pub(crate) fn small(number: u32) -> Vec<u8> {
    let text = format!(
        r#"(component
            (core module $m (func (export "run")) (global i32 (i32.const {number})))
            (core instance $i (instantiate $m))
            (func $run (canon lift (core func $i "run")))
            (export "run" (func $run)))"#
    );
    wat::parse_str(text).expect("valid")
}

/// A registry with a guest, and its reference by its digest.
fn with_guest(desk: &Desk, number: u32) -> (Registry, String, String) {
    let registry = Registry::start();
    let name = format!("{}/tools/guest", registry.host());
    let pushed = desk.json(&["push", &desk.component(&small(number)), &format!("{name}:1")]);
    let digest = pushed["digest"].as_str().expect("a digest").to_owned();
    (registry, name, digest)
}

/// The digest of the one layer of a manifest.
pub(crate) fn layer_of(manifest: &[u8]) -> String {
    let manifest: Value = serde_json::from_slice(manifest).expect("JSON");
    manifest["layers"][0]["digest"].as_str().expect("a digest").to_owned()
}

/// A manifest with something else in it.
fn changed(manifest: &[u8], change: impl FnOnce(&mut Value)) -> Vec<u8> {
    let mut value: Value = serde_json::from_slice(manifest).expect("JSON");
    change(&mut value);
    value.to_string().into_bytes()
}

#[test]
fn a_guest_goes_to_a_registry_and_is_run_from_there() {
    let (desk, registry) = (Desk::new(), Registry::start());
    let served = Served::start(exe());
    let wasm = guests::example("chat");
    let guest = desk.component(&wasm);
    let name = format!("{}/tools/chat", registry.host());
    let tagged = format!("{name}:1.0");

    let pushed = desk.json(&["push", &guest, &tagged, "--title", "A chat"]);
    let digest = pushed["digest"].as_str().expect("a digest").to_owned();
    let pinned = format!("{name}@{digest}");
    assert_eq!(pushed["pushed"], pinned.as_str());
    let again = desk.done(&["push", &guest, &tagged, "--title", "A chat"]);
    assert!(again.starts_with(&pinned) && again.contains("tagged 1.0"), "the same is the same: {again}");
    let later = format!("{name}:later");
    let later = desk.json(&["push", &guest, &later, "--created", "2026-11-30T20:48:19Z"]);
    assert_ne!(later["digest"], digest.as_str());
    let manifest = String::from_utf8(registry.manifest("tools/chat", "1.0").to_vec()).expect("JSON");
    assert!(!manifest.contains("created") && manifest.contains("trellis:host@0.2.0"), "{manifest}");

    // By its tag, which says the digest, and by its digest, from the cache.
    let run = |reference: &str| output(&mut desk.of(served.trellis(&["run", reference, QUESTION])));
    let by_tag = run(&tagged);
    assert_eq!(succeeded(&by_tag), "85\n");
    let said = String::from_utf8(by_tag.stderr).expect("text");
    assert!(said.contains(&format!("{tagged} is {pinned}")), "{said}");
    let n_asked = registry.asked().len();
    let by_digest = run(&pinned);
    assert_eq!(succeeded(&by_digest), "85\n");
    assert!(by_digest.stderr.is_empty(), "{}", String::from_utf8_lossy(&by_digest.stderr));
    assert_eq!(registry.asked().len(), n_asked, "it was kept");

    let other = Desk::new();
    let pulled = other.json(&["pull", &pinned, "-o", "chat.wasm"]);
    assert_eq!((&pulled["title"], &pulled["was_kept"]), (&Value::from("A chat"), &Value::from(false)));
    assert_eq!(pulled["world"], "trellis:host@0.2.0");
    assert!(fs::read(other.path("chat.wasm")).expect("written") == wasm);
    assert_eq!(other.kept().len(), 3, "a manifest, a configuration, a component");
    assert_eq!(other.json(&["pull", &tagged])["was_kept"], true);

    // In the cache somebody changed it: it is fetched anew, and right.
    let component = desk.path("cache/trellis/oci/blobs/sha256").join(digest_hex(&wasm));
    fs::write(&component, "something else").expect("written");
    assert_eq!(succeeded(&run(&pinned)), "85\n");
    assert!(fs::read(component).expect("kept") == wasm);
}

pub(crate) fn digest_hex(content: &[u8]) -> String {
    digest(content).trim_start_matches("sha256:").to_owned()
}

#[test]
fn ps_has_it_by_its_name() {
    let (desk, registry) = (Desk::new(), Registry::start());
    let served = Served::start(exe());
    let name = format!("{}/tools/talk:2.1", registry.host());
    desk.done(&["push", &desk.component(&guests::example("conversation")), &name]);
    succeeded(&output(&mut desk.of(served.trellis(&["run", "--detach", &name]))));
    let listed = succeeded(&output(&mut served.trellis(&["ps"])));
    assert!(listed.contains("talk:2.1@"), "{listed}");
}

#[test]
fn what_was_changed_on_the_way_is_refused_with_both_digests() {
    let desk = Desk::new();
    let (registry, name, pinned) = with_guest(&desk, 1);
    let (other, evil) = (Desk::new(), small(666));
    let reference = format!("{name}@{pinned}");
    let reference = reference.as_str();
    let manifest = registry.manifest("tools/guest", "1");
    let value: Value = serde_json::from_slice(&manifest).expect("JSON");
    let config = value["config"]["digest"].as_str().expect("a digest").to_owned();
    for (path, expected) in
        [("/manifests/", pinned.clone()), ("/blobs/", config), ("/blobs/", layer_of(&manifest))]
    {
        let (content, place) = (evil.clone(), expected.clone());
        registry.lie(move |asked| {
            let is_it = asked.path.contains(path) && asked.path.ends_with(&place);
            is_it.then(|| Lie::Content(content.clone().into()))
        });
        for command in [&["pull", reference][..], &["run", "--local", reference]] {
            let said = other.failed(command, 2);
            // Content that is longer than it may be is not read to its end.
            let is_refused = said.contains(&expected) && said.contains(&digest(&evil))
                || said.contains("its descriptor says") && path == "/blobs/";
            assert!(is_refused, "{expected}: {said}");
        }
        assert!(other.kept().is_empty(), "nothing of it is kept");
    }
    // Of the same length.
    let (layer, mut one_bit) = (layer_of(&manifest), small(1));
    *one_bit.last_mut().expect("bytes") ^= 1;
    let (place, content) = (layer.clone(), one_bit.clone());
    registry.lie(move |asked| asked.path.ends_with(&place).then(|| Lie::Content(content.clone().into())));
    let said = other.failed(&["pull", reference], 2);
    assert!(said.contains(&format!("asked for: {layer}")), "{said}");
    assert!(said.contains(&format!("came:      {}", digest(&one_bit))), "{said}");
    let said = other.failed(&["--json", "pull", reference], 2);
    let error: Value = serde_json::from_str(&said).expect("JSON");
    assert_eq!(error["error"]["code"], "hash_mismatch");
    let message = error["error"]["message"].as_str().expect("a message");
    assert!(message.contains(&layer) && message.contains(&digest(&one_bit)), "{said}");
    assert!(other.kept().is_empty(), "nothing of it is kept");

    // What the registry says that it took.
    registry.lie(|asked| {
        let is_it = asked.method == "PUT" && asked.path.contains("/manifests/");
        is_it.then(|| Lie::Header(digest(b"another")))
    });
    let said = desk.failed(&["push", &desk.component(&small(2)), &format!("{name}:2")], 2);
    assert!(said.contains(&digest(b"another")), "{said}");
    registry.lie_no_more();
    other.done(&["pull", reference]);
    assert_eq!(other.kept().len(), 3);
}

#[test]
fn a_tag_that_moves_meanwhile_gives_one_or_the_other() {
    let desk = Desk::new();
    let (registry, name, old) = with_guest(&desk, 1);
    let new = desk.json(&["push", &desk.component(&small(2)), &format!("{name}:2")])["digest"].clone();
    let (first, second) = (registry.manifest("tools/guest", "1"), registry.manifest("tools/guest", "2"));
    let mut n_asked = 0;
    registry.lie(move |asked| {
        let is_tag = asked.path.ends_with("/manifests/1");
        n_asked += usize::from(is_tag);
        is_tag.then(|| Lie::Content(if n_asked == 1 { first.clone() } else { second.clone() }))
    });
    let other = Desk::new();
    let pulled = |into: &str| other.json(&["pull", &format!("{name}:1"), "-o", into])["digest"].clone();
    assert_eq!(pulled("old.wasm"), old.as_str());
    assert!(fs::read(other.path("old.wasm")).expect("written") == small(1));
    assert_eq!(pulled("new.wasm"), new);
    assert!(fs::read(other.path("new.wasm")).expect("written") == small(2));
}

#[test]
fn a_registry_that_lies_is_believed_in_nothing() {
    let desk = Desk::new();
    let (registry, name, _) = with_guest(&desk, 1);
    let (other, manifest) = (Desk::new(), registry.manifest("tools/guest", "1"));
    let refused = |tag: &str, said: &str| {
        let error = other.failed(&["pull", &format!("{name}:{tag}")], 2);
        assert!(error.contains(said), "{tag}: {error}");
        assert!(other.kept().is_empty(), "{tag}");
    };
    let put = |tag: &str, change: &dyn Fn(&mut Value)| {
        registry.put_manifest("tools/guest", tag, &changed(&manifest, change));
    };
    put("short", &|value| value["layers"][0]["size"] = 7.into());
    refused("short", "its descriptor says 7");
    put("long", &|value| value["layers"][0]["size"] = (small(1).len() + 1).into());
    refused("long", "its descriptor says");
    put("huge", &|value| value["layers"][0]["size"] = 1_000_000_000_000_u64.into());
    refused("huge", "1000000000000 bytes, more than the limit of 33554432");
    put("two", &|value| {
        let layer = value["layers"][0].clone();
        value["layers"].as_array_mut().expect("a list").push(layer);
    });
    refused("two", "it has 2 layers");
    put("none", &|value| value["layers"] = Value::Array(Vec::new()));
    refused("none", "it has 0 layers");
    put("tar", &|value| value["layers"][0]["mediaType"] = "application/vnd.oci.image.layer.v1.tar".into());
    refused("tar", "the layer is of the type \"application/vnd.oci.image.layer.v1.tar\"");
    put("image", &|value| value["config"]["mediaType"] = "application/vnd.oci.image.config.v1+json".into());
    refused("image", "the configuration is of the type");
    put("up", &|value| value["layers"][0]["digest"] = "sha256:../../../../etc/passwd".into());
    refused("up", "no digest");
    registry.put_manifest("tools/guest", "noise", b"\x00\xff");
    refused("noise", "the manifest is not a guest's");
    refused("missing", "is not there");

    // Another layer than the configuration is of.
    let stranger = small(9);
    registry.put_blob(&stranger);
    put("other", &|value| {
        value["layers"][0]["digest"] = digest(&stranger).into();
        value["layers"][0]["size"] = stranger.len().into();
    });
    refused("other", "another layer than the manifest's");

    for (part, said) in [("/manifests/", "the manifest does not end"), ("/blobs/", "does not end within")] {
        registry.lie(move |asked| asked.path.contains(part).then_some(Lie::Endless));
        refused("1", said);
    }
    registry.lie(|_| Some(Lie::Status(200)));
    refused("1", "the manifest is not a guest's");
    registry.lie(|_| Some(Lie::Status(503)));
    let error = other.failed(&["pull", &format!("{name}:1")], 75);
    assert!(error.contains("503"), "{error}");
}

#[test]
fn content_may_come_from_elsewhere_and_names_may_not() {
    let desk = Desk::new();
    let (registry, name, _) = with_guest(&desk, 1);
    let elsewhere = Registry::with_password("Basic nobody");
    let (other, reference) = (Desk::new(), format!("{name}:1"));
    let lie = |part: &'static str, place: String| {
        registry.lie(move |asked| asked.path.contains(part).then(|| Lie::Elsewhere(place.clone())));
    };
    lie("/manifests/", format!("http://{}/v2/x/manifests/1", elsewhere.host()));
    let said = other.failed(&["pull", &reference], 2);
    assert!(said.contains("sends elsewhere"), "{said}");
    assert!(elsewhere.asked().is_empty());
    for place in ["http://registry.invalid/x", "http://169.254.169.254/latest/meta-data"] {
        lie("/blobs/", place.to_owned());
        let said = other.failed(&["pull", &reference], 2);
        assert!(said.contains(place) && said.contains("without TLS"), "{said}");
    }
    lie("/blobs/", format!("http://{}/loop/blobs/", registry.host()));
    let said = other.failed(&["pull", &reference], 2);
    assert!(said.contains("sends on and on"), "{said}");
    assert!(other.kept().is_empty());

    // From another place on this machine, which is not told who asks.
    let place = format!("http://{}/elsewhere", elsewhere.host());
    lie("/blobs/", place);
    let said = other.failed(&["pull", &reference], 2);
    assert!(said.contains("does not let this user"), "{said}");
    assert!(elsewhere.asked().iter().all(|asked| !asked.is_authorized));
    let component = small(1);
    let open = Registry::start();
    open.lie(move |_| Some(Lie::Content(component.clone().into())));
    let manifest = registry.manifest("tools/guest", "1");
    let (layer, place) = (layer_of(&manifest), format!("http://{}/elsewhere", open.host()));
    registry.lie(move |asked| asked.path.ends_with(&layer).then(|| Lie::Elsewhere(place.clone())));
    other.done(&["pull", &reference]);
}

#[test]
fn what_is_too_large_or_no_guest_is_not_taken() {
    let desk = Desk::new();
    let (registry, name, _) = with_guest(&desk, 1);
    let config = trellis::config::Config {
        limits: trellis::guest::GuestLimits { component_bytes: 64, ..limits() },
        ..config(exe())
    };
    let served = Served::start_with(exe(), &config, &[]);
    let n_asked = registry.asked().len();
    let other = Desk::new();
    for command in ["pull", "run"] {
        let output = output(&mut other.of(served.trellis(&[command, &format!("{name}:1")])));
        let said = String::from_utf8(output.stderr).expect("text");
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains("more than the limit of 64"), "{said}");
        assert!(said.contains("component_bytes"), "{said}");
    }
    assert!(registry.asked()[n_asked..].iter().all(|asked| asked.path.contains("/manifests/")));

    let push = |wasm: &[u8], said: &str| {
        let error = desk.failed(&["push", &desk.component(wasm), &format!("{name}:x")], 2);
        assert!(error.contains(said), "{error}");
    };
    push(b"root:x:0:0", "not WebAssembly");
    push(&wat::parse_str("(module)").expect("valid"), "not a component");
    push(&wat::parse_str("(component)").expect("valid"), "exports no `run");
    let foreign =
        wat::parse_str(r#"(component (import "wasi:http/types@0.2.0" (instance)))"#).expect("valid");
    push(&foreign, "wasi:http/types@0.2.0");

    // Put there by somebody else.
    registry.put_blob(&foreign);
    let config = format!(
        r#"{{"created":"1970-01-01T00:00:00Z","architecture":"wasm","os":"wasip2","layerDigests":["{}"]}}"#,
        digest(&foreign)
    );
    registry.put_blob(config.as_bytes());
    let manifest = changed(&registry.manifest("tools/guest", "1"), |value| {
        value["layers"][0] =
            serde_json::json!({"mediaType": LAYER, "digest": digest(&foreign), "size": foreign.len()});
        value["config"]["digest"] = digest(config.as_bytes()).into();
        value["config"]["size"] = config.len().into();
    });
    registry.put_manifest("tools/guest", "foreign", &manifest);
    let said = other.failed(&["pull", &format!("{name}:foreign")], 2);
    assert!(said.contains("imports wasi:http/types@0.2.0"), "{said}");
    assert!(other.kept().is_empty());
}

#[test]
fn a_password_is_dockers_and_goes_to_its_registry() {
    let desk = Desk::new();
    // "user:secret".
    let registry = Registry::with_password("Basic dXNlcjpzZWNyZXQ=");
    let reference = format!("{}/tools/guest:1", registry.host());
    let guest = desk.component(&small(1));
    let said = desk.failed(&["push", &guest, &reference], 2);
    assert!(said.contains("does not let this user") && said.contains("docker login"), "{said}");
    let auths = |secret: &str| {
        let text = serde_json::json!({"auths": {registry.host(): {"auth": secret}}}).to_string();
        fs::write(desk.path("docker/config.json"), text).expect("written");
    };
    auths("dXNlcjp3cm9uZw==");
    let said = desk.failed(&["push", &guest, &reference], 2);
    assert!(said.contains("no such password"), "{said}");
    auths("dXNlcjpzZWNyZXQ=");
    desk.done(&["push", &guest, &reference]);
    desk.done(&["pull", &reference]);
    assert!(registry.asked().iter().any(|asked| asked.path == "/token" && asked.is_authorized));
}

#[test]
fn who_interrupts_a_pull_finds_nothing_half_done() {
    let desk = Desk::new();
    let (registry, name, _) = with_guest(&desk, 1);
    let layer = layer_of(&registry.manifest("tools/guest", "1"));
    // Longer than what comes of it.
    registry.put_manifest(
        "tools/guest",
        "slow",
        &changed(&registry.manifest("tools/guest", "1"), |value| {
            value["layers"][0]["size"] = 1_000_000.into()
        }),
    );
    registry.lie(move |asked| asked.path.ends_with(&layer).then_some(Lie::Silent));
    let other = Desk::new();
    let n_asked = registry.asked().len();
    let mut child =
        other.trellis(&["pull", &format!("{name}:slow"), "-o", "out.wasm"]).spawn().expect("it runs");
    let begun = Instant::now();
    while registry.asked().len() < n_asked + 3 {
        assert!(begun.elapsed() < PATIENCE, "{:?}", registry.asked());
        std::thread::sleep(Duration::from_millis(10));
    }
    kill_process(Pid::from_child(&child), Signal::INT).expect("it runs");
    assert_eq!(daemons::wait(&mut child).code(), Some(130));
    assert!(other.kept().is_empty() && !other.path("out.wasm").exists());
}

#[test]
fn a_folder_is_a_registry_too() {
    let desk = Desk::new();
    let guest = desk.component(&small(1));
    let pushed = desk.json(&["push", &guest, "oci:shared:1"]);
    let pinned = pushed["pushed"].as_str().expect("a reference").to_owned();
    assert!(pinned.starts_with("oci:shared@sha256:"), "{pinned}");
    assert_eq!(desk.json(&["push", &guest, "oci:shared:1"]), pushed);
    let registry = Registry::start();
    let there = desk.json(&["push", &guest, &format!("{}/guest:1", registry.host())]);
    assert_eq!(there["digest"], pushed["digest"], "wherever it goes");
    desk.done(&["pull", "oci:shared:1", "-o", "out.wasm"]);
    assert!(fs::read(desk.path("out.wasm")).expect("written") == small(1));
    desk.done(&["pull", &pinned]);
    let said = desk.failed(&["pull", "oci:shared:2"], 2);
    assert!(said.contains("oci:shared:2 is not there"), "{said}");

    let other = Desk::new();
    let shared = desk.path("shared");
    let reference = format!("oci:{}:1", shared.display());
    let blob = shared.join("blobs/sha256").join(digest_hex(&small(1)));
    let refused = |said: &str| {
        let error = other.failed(&["pull", &reference], 2);
        assert!(error.contains(said), "{error}");
        assert!(other.kept().is_empty());
    };
    let mut one_bit = small(1);
    *one_bit.last_mut().expect("bytes") ^= 1;
    fs::write(&blob, &one_bit).expect("written");
    refused(&digest(&one_bit));
    refused(&digest(&small(1)));
    fs::remove_file(&blob).expect("it was there");
    refused("is not there");
    symlink(desk.path("guest.wasm"), &blob).expect("made");
    refused("is a link");
    fs::remove_file(&blob).expect("it was there");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &blob,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o644),
        0,
    )
    .expect("made");
    refused("is a link, or not a file");
    fs::remove_file(&blob).expect("it was there");
    fs::write(&blob, small(1)).expect("written");
    other.done(&["pull", &reference]);

    let index = shared.join("index.json");
    let text = fs::read_to_string(&index).expect("there");
    assert!(text.contains(TAG), "{text}");
    let hex = text.split("sha256:").nth(1).and_then(|rest| rest.get(..64)).expect("a digest");
    fs::write(&index, text.replace(hex, "../../../../../../etc/passwd")).expect("written");
    let third = Desk::new();
    let said = third.failed(&["pull", &reference], 2);
    assert!(said.contains("is no OCI image layout"), "{said}");
    assert!(third.kept().is_empty());
    is_left_alone(&desk, Path::new("thesis"));
}

/// A folder of something else is not made a layout.
fn is_left_alone(desk: &Desk, folder: &Path) {
    let folder = desk.path(folder.to_str().expect("UTF-8"));
    fs::create_dir(&folder).expect("made");
    fs::write(folder.join("thesis.tex"), "x").expect("written");
    let said = desk.failed(&["push", "guest.wasm", "oci:thesis:1"], 2);
    assert!(said.contains("it is a folder of something else"), "{said}");
    assert_eq!(fs::read_dir(folder).expect("readable").count(), 1);
}
