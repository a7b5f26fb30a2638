//! What a start would refuse is refused before: by a reload, and by `trellis config check`, in the same words.

use std::fs;
use std::path::Path;

use trellis::config::Config;
use trellis::guest::PolicySettings;
use trellis_tests::daemons::{self, Served, output};
use trellis_tests::guests;

use crate::exe;

fn text(config: &Config) -> String {
    toml::to_string(config).expect("settings can be written down")
}

/// The first line of what a command says that ends with this status.
fn complaint(command: &mut std::process::Command, status: i32) -> String {
    let ran = output(command);
    let said = String::from_utf8(ran.stderr).expect("UTF-8");
    assert_eq!(ran.status.code(), Some(status), "{said}");
    let line = said.lines().find_map(|line| line.strip_prefix("error: "));
    line.unwrap_or_else(|| panic!("{said}")).to_owned()
}

/// Asserts that a start, a check and a reload refuse a file for one reason, and what that is about.
fn is_refused(served: &Served, wrong: &str, about: &str) {
    let before = fs::read_to_string(served.config()).expect("it is there");
    fs::write(served.config(), wrong).expect("written");
    let file = served.config();
    let mut start = daemons::trellis(exe());
    start.arg("serve").arg("--socket").arg(file.with_file_name("other.sock")).arg("--config").arg(&file);
    let reason = complaint(&mut start, 2);
    assert!(reason.contains(about), "{about}: {reason}");
    let mut check = daemons::trellis(exe());
    assert_eq!(complaint(check.args(["config", "check"]).arg(&file), 2), reason);
    let told = output(&mut served.trellis(&["reload"]));
    assert_eq!(told.status.code(), Some(2), "{told:?}");
    let told = String::from_utf8(told.stderr).expect("UTF-8");
    assert!(told.contains(&reason) && told.contains("nothing has changed"), "{told}, and not {reason}");
    // The daemon goes on, and takes what is right.
    fs::write(served.config(), before).expect("written");
    let again = output(&mut served.trellis(&["reload"]));
    assert_eq!(String::from_utf8_lossy(&again.stdout), "nothing has changed\n");
}

#[test]
fn a_file_that_no_daemon_would_start_with_is_refused_by_whoever_looks_at_it() {
    let config = daemons::config(exe());
    let served = Served::start_with(exe(), &config, &[]);
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    fs::write(at("file"), "").expect("written");
    fs::write(at("guest.wasm"), guests::hostile()).expect("written");
    let with_policy = |path: &Path| {
        let policy = PolicySettings { component: Some(path.to_owned()), ..PolicySettings::default() };
        text(&Config { policy, ..config.clone() })
    };
    is_refused(&served, &with_policy(&at("nowhere.wasm")), "nowhere.wasm");
    is_refused(&served, &with_policy(&at("guest.wasm")), "the policy ");
    fs::write(at("faulty.wasm"), guests::faulty_policy()).expect("written");
    for (fault, about) in
        [("begin", "its `begin` failed"), ("front", "for model \"tiny\", its `put-in-front` failed")]
    {
        let settings = [("fault".to_owned(), fault.to_owned())].into();
        let policy =
            PolicySettings { component: Some(at("faulty.wasm")), settings, ..PolicySettings::default() };
        is_refused(&served, &text(&Config { policy, ..config.clone() }), about);
    }
    let guests_dir = Some(at("nowhere"));
    is_refused(&served, &text(&Config { guests_dir, ..config.clone() }), "guests_dir ");
    let cache_dir = Some(at("file"));
    is_refused(&served, &text(&Config { cache_dir, ..config.clone() }), "not a folder");
    let models = vec!["tiny".to_owned(), "tiny".to_owned()];
    is_refused(&served, &text(&Config { models, ..config.clone() }), "is given twice");
    if config.device.is_cpu() {
        is_refused(&served, &text(&Config { model_bytes: Some(1), ..config.clone() }), "has for models");
    }
}

#[test]
fn a_model_on_demand_that_cannot_be_loaded_keeps_no_daemon_from_starting() {
    let config = text(&daemons::config(exe()));
    let broken = format!("{config}\n[catalog.broken]\npath = '/no/such/model'\n");
    let served = Served::start_on(exe(), &config, &[]);
    fs::write(served.config(), &broken).expect("written");
    let mut check = daemons::trellis(exe());
    let checked = output(check.args(["--json", "config", "check"]).arg(served.config()));
    let said = String::from_utf8(checked.stdout).expect("UTF-8");
    assert_eq!(checked.status.code(), Some(0), "{said}");
    let checked: serde_json::Value = serde_json::from_str(&said).expect("JSON");
    let warning = checked["warnings"][0].as_str().expect("a text");
    assert!(warning.starts_with("catalog.broken: whoever asks for it is refused: "), "{warning}");
    let told = String::from_utf8(output(&mut served.trellis(&["reload"])).stdout).expect("UTF-8");
    assert!(told.contains("catalog.broken.path"), "it waits for a restart: {told}");

    // And so it is.
    let served = Served::start_on(exe(), &broken, &[]);
    let ran = output(&mut served.trellis(&["load", "broken"]));
    let said = String::from_utf8(ran.stderr).expect("UTF-8");
    assert!(!ran.status.success() && said.contains("/no/such/model"), "{said}");
}
