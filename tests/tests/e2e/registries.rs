//! Places that artifacts are in: registries behind TLS, folders that several push to, and the cache.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Child, Command, Stdio};

use serde_json::Value;
use trellis_tests::daemons::{self, output};
use trellis_tests::registry::{Lie, Registry, authority, digest};

use crate::artifacts::{Desk, digest_hex, layer_of, small, succeeded};

/// A command whose registry is this machine by another writing of its address, which is asked over TLS as others are.
fn over_tls(desk: &Desk, arguments: &[&str], trusts: bool) -> Command {
    let mut command = desk.trellis(arguments);
    for name in ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"] {
        command.env_remove(name);
    }
    command.env_remove("SSL_CERT_DIR");
    match trusts {
        true => command.env("SSL_CERT_FILE", authority()),
        false => command.env_remove("SSL_CERT_FILE"),
    };
    command
}

#[test]
fn registries_of_other_machines_are_asked_over_tls_and_have_to_be_trusted() {
    let (desk, registry) = (Desk::new(), Registry::with_tls());
    let name = format!("{}/tools/guest", registry.host().replace("127.0.0.1", "127.1"));
    let (guest, tagged) = (desk.component(&small(1)), format!("{name}:1"));
    let refused = output(&mut over_tls(&desk, &["push", &guest, &tagged], false));
    let said = String::from_utf8(refused.stderr).expect("text");
    assert_eq!(refused.status.code(), Some(2), "{said}");
    assert!(said.contains("cannot be trusted") && said.contains("SSL_CERT_FILE"), "{said}");
    assert!(registry.asked().is_empty(), "nothing is said to a stranger");

    let pushed = succeeded(&output(&mut over_tls(&desk, &["push", &guest, &tagged, "--json"], true)));
    let pushed: Value = serde_json::from_str(&pushed).expect("JSON");
    let pinned = pushed["pushed"].as_str().expect("a reference").to_owned();
    let other = Desk::new();
    succeeded(&output(&mut over_tls(&other, &["pull", &tagged, "-o", "out.wasm"], true)));
    assert!(fs::read(other.path("out.wasm")).expect("written") == small(1));

    let (third, layer) = (Desk::new(), layer_of(&registry.manifest("tools/guest", "1")));
    let mut changed = small(1);
    *changed.last_mut().expect("bytes") ^= 1;
    let (place, content) = (layer.clone(), changed.clone());
    registry.lie(move |asked| asked.path.ends_with(&place).then(|| Lie::Content(content.clone().into())));
    let refused = output(&mut over_tls(&third, &["pull", &pinned], true));
    let said = String::from_utf8(refused.stderr).expect("text");
    assert!(said.contains(&layer) && said.contains(&digest(&changed)), "{said}");
    assert!(third.kept().is_empty());

    // From TLS to none, be it on this machine.
    let open = Registry::start();
    let place = format!("http://{}/elsewhere", open.host());
    registry.lie(move |asked| asked.path.ends_with(&layer).then(|| Lie::Elsewhere(place.clone())));
    let refused = output(&mut over_tls(&third, &["pull", &pinned], true));
    let said = String::from_utf8(refused.stderr).expect("text");
    assert!(said.contains("without TLS"), "{said}");
    assert!(open.asked().is_empty());
}

#[test]
fn of_several_that_push_to_a_folder_at_once_each_is_there() {
    let desk = Desk::new();
    let names: Vec<String> = (0..6).map(|idx| format!("t{idx}")).collect();
    let pushes: Vec<Child> = names
        .iter()
        .enumerate()
        .map(|(idx, name)| {
            let guest = format!("{name}.wasm");
            fs::write(desk.path(&guest), small(idx as u32)).expect("written");
            let reference = format!("oci:me@home/shared:{name}");
            let mut push = desk.trellis(&["push", &guest, &reference]);
            push.stderr(Stdio::inherit()).spawn().expect("it runs")
        })
        .collect();
    for mut push in pushes {
        assert!(daemons::wait(&mut push).success());
    }
    let other = Desk::new();
    for (idx, name) in names.iter().enumerate() {
        let reference = format!("oci:{}:{name}", desk.path("me@home/shared").display());
        let pulled = other.json(&["pull", &reference, "-o", "out.wasm"]);
        assert!(fs::read(other.path("out.wasm")).expect("written") == small(idx as u32), "{name}");
        let pinned = pulled["pulled"].as_str().expect("a reference");
        other.done(&["pull", pinned]);
    }
}

#[test]
fn the_cache_has_a_bound_and_what_was_used_last_stays() {
    let desk = Desk::new();
    let push = |number: u32| {
        let reference = format!("oci:shared:{number}");
        desk.done(&["push", &desk.component(&small(number)), &reference]);
        reference
    };
    let (first, second) = (push(1), push(2));
    desk.done(&["pull", &first]);
    let kept = desk.path("cache/trellis/oci/blobs/sha256");
    // More than may be kept, of holes, and asked for before all else.
    let large = fs::File::create(kept.join("f".repeat(64))).expect("made");
    large.set_len(1_000_000_000).expect("a file may have holes");
    large.set_modified(std::time::SystemTime::UNIX_EPOCH).expect("its owner may");
    let doctor = output(&mut desk.trellis(&["doctor", "--json"]));
    let said = String::from_utf8(doctor.stdout).expect("text");
    assert!(said.contains("guests from registries: 1.0 GB of 1.0 GB at most"), "{said}");
    desk.done(&["pull", &second]);
    assert!(!kept.join("f".repeat(64)).exists());
    assert_eq!(desk.kept().len(), 6, "two manifests, configurations and components");
    assert!(desk.kept().contains(&digest_hex(&small(1))));
}

#[test]
fn a_cache_that_others_can_come_to_is_not_written_to() {
    let desk = Desk::new();
    let guest = desk.component(&small(1));
    desk.done(&["push", &guest, "oci:shared:1"]);
    let cache = desk.path("cache/trellis");
    fs::create_dir_all(cache.join("oci")).expect("made");
    fs::set_permissions(&cache, fs::Permissions::from_mode(0o777)).expect("its owner may");
    let pulled = output(&mut desk.trellis(&["pull", "oci:shared:1", "-o", "out.wasm"]));
    let said = String::from_utf8_lossy(&pulled.stderr).into_owned();
    assert!(pulled.status.success() && said.contains("it is not kept"), "{said}");
    assert!(fs::read(desk.path("out.wasm")).expect("written") == small(1));
    assert_eq!(fs::read_dir(cache.join("oci")).expect("readable").count(), 0);
    let said = desk.failed(&["pull", "oci:shared:1", "-o", "/dev/null"], 2);
    assert!(said.contains("cannot write /dev/null: it is not a file"), "{said}");
}
