//! The house stays as it was drawn: which crate uses which, how long files are, where `unsafe` stands, what is documented.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use toml::{Table, Value};
use trellis_tests::daemons;
use trellis_tests::guests::example_names;
use trellis_tests::pack::root;

use crate::exe;

/// Each crate and the crates of this house that it may use.
const LAYERS: [(&str, &[&str]); 9] = [
    ("cuda", &["trellis-engine", "trellis-programs"]),
    ("daemon", &["trellis-client", "trellis-cuda", "trellis-engine", "trellis-programs", "trellis-wire"]),
    ("daemon/engine", &["trellis-programs"]),
    ("sdk/client", &["trellis-wire"]),
    ("sdk/guest", &["trellis-programs"]),
    ("sdk/programs", &[]),
    ("sdk/wire", &[]),
    (
        "tests",
        &[
            "trellis",
            "trellis-client",
            "trellis-cuda",
            "trellis-engine",
            "trellis-oracles",
            "trellis-programs",
            "trellis-wire",
        ],
    ),
    ("tests/oracles", &["trellis", "trellis-client", "trellis-engine", "trellis-programs", "trellis-wire"]),
];

/// When a file is longer than this, it holds two ideas.
const N_LINES_MAX: usize = 600;

/// An example with more lines of code than this is no page that one reads at a glance.
const N_PAGE_LINES_MAX: usize = 80;

/// The places outside of `cuda` that cannot do without: the allocator finds its settings by their name, compiled code is
/// loaded, memory is shared with a guest's process, and a test makes system calls that no safe function makes.
const UNSAFE_PLACES: [&str; 7] = [
    "daemon/src/allocator.rs",
    "daemon/src/bundled.rs",
    "daemon/src/guest/component.rs",
    "daemon/src/ipc/listener.rs",
    "daemon/src/isolation/channel/memory.rs",
    "daemon/src/isolation/native.rs",
    "daemon/src/isolation/native.rs",
];

/// What is told the time and given randomness, and reads and writes nothing.
const PURE: [&str; 4] = [
    "daemon/engine/src/engine/core.rs",
    "daemon/engine/src/kv/",
    "daemon/engine/src/sampling/",
    "daemon/engine/src/scheduler/",
];

/// A source file, its path from the root, and its text.
struct Source {
    path: String,
    text: String,
}

/// All files of the house with one of these endings.
fn sources(extensions: &[&str]) -> Vec<Source> {
    let mut found = Vec::new();
    let mut folders = vec![root().to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("the folder can be read") {
            let path = entry.expect("the folder can be read").path();
            let name = path.file_name().expect("it has a name").to_string_lossy();
            if path.is_dir() {
                if name != "target" && !name.starts_with('.') && name != "__pycache__" {
                    folders.push(path);
                }
            } else if path.extension().is_some_and(|ending| extensions.iter().any(|known| ending == *known)) {
                let text = fs::read_to_string(&path).expect("it is text");
                let path = path.strip_prefix(root()).expect("it is below the root");
                found.push(Source { path: path.to_str().expect("UTF-8").to_owned(), text });
            }
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    assert!(!found.is_empty(), "{extensions:?}");
    found
}

/// As [`sources`], without this file, which has to name what it looks for.
fn sources_but_this(extensions: &[&str]) -> Vec<Source> {
    let mut found = sources(extensions);
    found.retain(|source| source.path != file!());
    found
}

fn manifest(folder: &Path) -> Table {
    let path = folder.join("Cargo.toml");
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    text.parse().unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The dependencies of a manifest: what they are called and what is said of them. Those of tests may be left out.
fn dependencies(manifest: &Table, with_tests: bool) -> Vec<(String, Value)> {
    let mut sections = vec!["dependencies", "build-dependencies"];
    if with_tests {
        sections.push("dev-dependencies");
    }
    let platforms = manifest.get("target").and_then(Value::as_table);
    let tables = platforms.into_iter().flat_map(|platforms| platforms.values().filter_map(Value::as_table));
    tables
        .chain([manifest])
        .flat_map(|table| sections.iter().filter_map(move |section| table.get(*section)?.as_table()))
        .flat_map(|dependencies| dependencies.iter().map(|(name, value)| (name.clone(), value.clone())))
        .collect()
}

fn is_ours(name: &str) -> bool {
    name == "trellis" || name.starts_with("trellis-")
}

fn members(workspace: &Path) -> Vec<PathBuf> {
    let manifest = manifest(workspace);
    let members = manifest["workspace"]["members"].as_array().expect("a list");
    members.iter().map(|member| workspace.join(member.as_str().expect("a path"))).collect()
}

#[test]
fn crates_know_only_whom_they_may_know() {
    let here = root();
    for folder in members(here) {
        let name = folder.strip_prefix(here).expect("below the root").to_str().expect("UTF-8");
        let layer = LAYERS.iter().find(|(layer, _)| *layer == name);
        let (_, allowed) = layer.unwrap_or_else(|| panic!("{name} has no place in the house"));
        let ours = dependencies(&manifest(&folder), true).into_iter().filter(|(name, _)| is_ours(name));
        for (dependency, _) in ours {
            assert!(allowed.contains(&dependency.as_str()), "{name} may not use {dependency}");
        }
    }
    for workspace in ["guest-examples", "sdk/guide", "tests/guests"] {
        for folder in members(&here.join(workspace)) {
            let ours = dependencies(&manifest(&folder), true).into_iter().map(|(name, _)| name);
            let ours: Vec<_> = ours.filter(|name| is_ours(name)).collect();
            assert_eq!(ours, ["trellis-guest"], "{}", folder.display());
        }
    }
}

#[test]
fn the_engine_knows_neither_wasm_nor_sockets_and_wasm_stays_in_one_folder() {
    for (name, _) in dependencies(&manifest(&root().join("daemon/engine")), false) {
        for stranger in ["wasm", "interprocess", "clap", "rustix"] {
            assert!(!name.contains(stranger), "the engine may not use {name}");
        }
    }
    for Source { path, text } in sources_but_this(&["rs"]) {
        let is_home = path.starts_with("daemon/src/guest/");
        assert!(is_home || !text.contains("wasmtime::"), "{path} has to do with wasm");
        let is_test = path.ends_with("tests.rs") || path.contains("/tests/");
        if PURE.iter().any(|pure| path.starts_with(pure)) && !is_test {
            for impure in ["std::fs", "std::net", "std::env", "Instant::now", "SystemTime", "thread_rng"] {
                assert!(!text.contains(impure), "{path} uses {impure}");
            }
        }
    }
}

#[test]
fn every_crate_takes_versions_and_lints_from_its_workspace() {
    for workspace in
        ["", "guest-examples", "sdk/guide", "tests/fuzz", "tests/guests"].map(|name| root().join(name))
    {
        let lints = &manifest(&workspace)["workspace"]["lints"];
        assert_eq!(lints["rust"]["unsafe_code"].as_str(), Some("deny"), "{}", workspace.display());
        assert!(!lints.to_string().contains("\"allow\""), "{}: {lints}", workspace.display());
        for folder in members(&workspace) {
            let manifest = manifest(&folder);
            let name = folder.display();
            let lints = manifest.get("lints").unwrap_or_else(|| panic!("{name} has no lints"));
            if folder.ends_with("cuda") {
                let clippy = &lints["clippy"];
                assert_eq!(clippy["undocumented_unsafe_blocks"].as_str(), Some("deny"), "{name}");
                assert_eq!(clippy["all"]["level"].as_str(), Some("deny"), "{name}");
            } else {
                assert_eq!(lints.get("workspace").and_then(Value::as_bool), Some(true), "{name}");
            }
            for (dependency, value) in dependencies(&manifest, true) {
                let is_shared = value.get("workspace").and_then(Value::as_bool);
                assert_eq!(is_shared, Some(true), "{name} has a version of {dependency} of its own");
            }
        }
    }
}

/// The versions of each package that a lock file has.
fn locked(folder: &Path) -> BTreeMap<String, BTreeSet<String>> {
    let path = folder.join("Cargo.lock");
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let lock: Table = text.parse().unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut versions: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for package in lock["package"].as_array().expect("a list") {
        let text = |field: &str| package[field].as_str().expect("a text").to_owned();
        versions.entry(text("name")).or_default().insert(text("version"));
    }
    versions
}

#[test]
fn what_is_fuzzed_is_what_ships() {
    let shipped = locked(root());
    for (name, versions) in locked(&root().join("tests/fuzz")) {
        // What the fuzzer alone needs is in its own lock alone.
        let Some(shipped) = shipped.get(&name) else { continue };
        assert!(
            versions.is_subset(shipped),
            "{name} is fuzzed as {versions:?} and ships as {shipped:?}; copy Cargo.lock to tests/fuzz"
        );
    }
}

#[test]
fn no_file_holds_two_ideas() {
    for Source { path, text } in sources(&["rs", "cu", "wit", "py"]) {
        let n_lines = text.lines().count();
        assert!(n_lines <= N_LINES_MAX, "{path} has {n_lines} lines, more than {N_LINES_MAX}");
    }
}

#[test]
fn unsafe_stands_where_it_may_and_says_why() {
    let promised = ["unsafe {", "unsafe impl ", "unsafe extern ", "#[unsafe("];
    let demanded = ["unsafe fn ", "unsafe trait "];
    let has_one = |line: &str, openings: &[&str]| openings.iter().any(|opening| line.contains(opening));
    let mut places = Vec::new();
    for Source { path, text } in sources_but_this(&["rs"]) {
        let lines: Vec<&str> = text.lines().collect();
        let code = lines.iter().enumerate().filter(|(_, line)| !line.trim_start().starts_with("//"));
        for (idx, line) in code {
            // An unsafe block says why it holds; an unsafe function says what its caller has to see to.
            let why = match (has_one(line, &promised), has_one(line, &demanded)) {
                (true, _) => "SAFETY:",
                (_, true) => "# Safety",
                (false, false) => continue,
            };
            let before = &lines[idx.saturating_sub(12)..idx];
            assert!(before.iter().any(|line| line.contains(why)), "{path}:{} has no {why:?}", idx + 1);
            if !path.starts_with("cuda/") {
                places.push(path.clone());
            }
        }
    }
    assert_eq!(places, UNSAFE_PLACES);
}

#[test]
fn nothing_is_left_undone_or_waved_through() {
    for Source { path, text } in sources_but_this(&["rs", "cu", "wit", "py"]) {
        for left in ["todo!(", "unimplemented!(", "dbg!(", "TODO", "FIXME", "XXX"] {
            assert!(!text.contains(left), "{path} has {left}");
        }
        for (at, _) in text.match_indices("[allow(") {
            let attribute = &text[at..][..text[at..].find(")]").expect("an attribute ends")];
            // `expect` says when it is no longer needed; an `allow` has to say why it is not one.
            assert!(attribute.contains("reason = "), "{path}: {attribute}");
            for blanket in ["warnings", "clippy::all", "unused", "dead_code"] {
                assert!(!attribute.contains(&format!("{blanket},")), "{path}: {attribute}");
            }
        }
    }
}

#[test]
fn every_example_says_what_it_is() {
    for name in example_names() {
        let folder = root().join("guest-examples").join(&name);
        let manifest = manifest(&folder);
        let description = manifest["package"].get("description").and_then(Value::as_str).unwrap_or_default();
        assert!(description.len() > 10, "{name} has no description");
        assert_eq!(manifest["package"]["name"].as_str(), Some(name.as_str()));
        let text = fs::read_to_string(folder.join("src/lib.rs")).expect("it has a source");
        assert!(text.starts_with("//! "), "{name} does not begin with what it is");
        // Options of `trellis run`, such as the models, stand before the name.
        let header = text.lines().take_while(|line| line.starts_with("//!"));
        let mut runs = header.filter_map(|line| line.strip_prefix("//! trellis run "));
        let is_of_it = |words: &str| words.split_whitespace().any(|word| word == name);
        assert!(runs.any(is_of_it), "{name} does not show how it is run");
    }
}

#[test]
fn every_example_is_a_page() {
    let mut n_lines_of: BTreeMap<String, usize> = BTreeMap::new();
    for Source { path, text } in sources(&["rs"]) {
        let Some(path) = path.strip_prefix("guest-examples/") else { continue };
        // Policies of the operator are no guests, and as short.
        let path = path.strip_prefix("policies/").unwrap_or(path);
        let (name, _) = path.split_once('/').expect("it is in the folder of an example");
        let is_code = |line: &&str| !line.trim().is_empty() && !line.trim_start().starts_with("//");
        let page = text.lines().take_while(|line| *line != "#[cfg(test)]");
        *n_lines_of.entry(name.to_owned()).or_default() += page.filter(is_code).count();
    }
    let policies = ["house-rules", "redact"].map(str::to_owned);
    let names: BTreeSet<String> = example_names().into_iter().chain(policies).collect();
    assert!(n_lines_of.keys().eq(&names), "{n_lines_of:?}");
    // What the benchmark measures is in one guest, so that all of it starts alike.
    n_lines_of.remove("probe").expect("it is there");
    // What answers whole APIs has a file for each idea.
    n_lines_of.remove("http-chat").expect("it is there");
    for (name, n_lines) in n_lines_of {
        assert!(n_lines <= N_PAGE_LINES_MAX, "{name} has {n_lines} lines, more than {N_PAGE_LINES_MAX}");
    }
}

#[test]
fn the_readme_lists_the_examples() {
    let readme = fs::read_to_string(root().join("README.md")).expect("there is one");
    let (_, table) = readme.split_once("\n| example | idea | source |\n").expect("it has a table");
    let rows = table.lines().skip(1).map_while(|line| line.strip_prefix("| "));
    let names = rows.flat_map(|row| row.split(" | ").next().expect("a cell").split(", "));
    let mut names: Vec<&str> = names.map(|name| name.trim_matches('`')).collect();
    names.sort_unstable();
    assert_eq!(names, example_names());
}

#[test]
fn the_readme_knows_every_command_and_every_place() {
    let readme = fs::read_to_string(root().join("README.md")).expect("there is one");
    let mut help = daemons::trellis(exe());
    let help = daemons::output(help.arg("--help"));
    let help = String::from_utf8(help.stdout).expect("it is text");
    let (_, commands) = help.split_once("Commands:\n").expect("the help lists the commands");
    let (commands, _) = commands.split_once("\n\n").expect("a list ends");
    let commands: BTreeSet<&str> =
        commands.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert!(commands.contains("serve") && commands.contains("run"), "{commands:?}");
    for command in commands.into_iter().filter(|command| *command != "help") {
        assert!(readme.contains(&format!("trellis {command}")), "the README does not know {command}");
    }
    for (at, _) in readme.match_indices("](") {
        let target = readme[at + 2..].split(')').next().expect("a link ends");
        if !target.contains("://") && !target.starts_with('#') {
            let (file, _) = target.split_once('#').unwrap_or((target, ""));
            assert!(root().join(file).exists(), "the README links to {target}");
        }
    }
}

#[test]
fn the_promises_name_tests_that_there_are() {
    let promises = fs::read_to_string(root().join("SECURITY.md")).expect("there is one");
    let named = promises.split('`').filter_map(|word| word.split_once("::"));
    let named: Vec<(&str, &str)> = named.filter(|(file, _)| file.ends_with(".rs")).collect();
    assert!(named.len() > 20, "{named:?}");
    for (file, test) in named {
        let source = fs::read_to_string(root().join("tests/tests/e2e").join(file)).expect(file);
        assert!(source.contains(&format!("#[test]\nfn {test}(")), "{file} has no test {test}");
    }
}

#[test]
fn the_bundled_models_share_their_tokenizer() {
    // A draft model is of use only to a model that counts its tokens alike.
    let read = |model: &str, file: &str| {
        fs::read(root().join("daemon/models").join(model).join(file)).expect("the file is there")
    };
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        assert!(read("tiny", file) == read("draft", file), "{file}");
    }
}
