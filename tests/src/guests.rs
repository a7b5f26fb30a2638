//! Guests, built from source as their authors would build them, or packed.

use std::collections::BTreeMap;
use std::env;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::pack::{self, root};

const TARGET: &str = "wasm32-wasip2";

/// What one cargo hands to the programs that it runs and another must not see. The rest of `CARGO_*`, such as
/// `CARGO_HOME` or the settings of the network, is the user's.
const OF_THIS_BUILD: [&str; 9] = [
    "CARGO_BIN_EXE_",
    "CARGO_BUILD_",
    "CARGO_CFG_",
    "CARGO_CRATE_NAME",
    "CARGO_ENCODED_",
    "CARGO_MANIFEST_",
    "CARGO_PKG_",
    "CARGO_PROFILE_",
    "CARGO_TARGET_",
];

/// The examples' names, which are those of their folders.
///
/// # Panics
/// The folder cannot be read.
#[must_use]
pub fn example_names() -> Vec<String> {
    let folder = root().join("guest-examples");
    let mut names: Vec<String> = fs::read_dir(folder)
        .expect("the examples are there")
        .map(|entry| entry.expect("the folder can be read").path())
        .filter(|path| path.join("Cargo.toml").is_file())
        .map(|path| path.file_name().expect("it has a name").to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// The component of an example.
///
/// # Panics
/// It does not build, or the pack has none of that name.
#[must_use]
pub fn example(name: &str) -> Vec<u8> {
    static BUILT: OnceLock<BTreeMap<String, Vec<u8>>> = OnceLock::new();
    let built = BUILT.get_or_init(|| build(&root().join("guest-examples")));
    built.get(name).unwrap_or_else(|| panic!("no example is called {name}: {:?}", built.keys())).clone()
}

/// The component that the tests send against a daemon.
///
/// # Panics
/// It does not build, or the pack has none.
#[must_use]
pub fn hostile() -> Vec<u8> {
    of_tests("hostile")
}

/// The policy that does wrong what its settings say.
///
/// # Panics
/// As [`hostile`].
#[must_use]
pub fn faulty_policy() -> Vec<u8> {
    of_tests("faulty-policy")
}

fn of_tests(name: &str) -> Vec<u8> {
    static BUILT: OnceLock<BTreeMap<String, Vec<u8>>> = OnceLock::new();
    let built = BUILT.get_or_init(|| build(&root().join("tests/guests")));
    built[name].clone()
}

/// A component of the guide's workspace.
///
/// # Panics
/// It does not build, or there is none of that name.
#[must_use]
pub fn guide_component(name: &str) -> Vec<u8> {
    build(&crate::guide::folder()).remove(name).unwrap_or_else(|| panic!("the guide has no {name}"))
}

/// The same component with a hash of its own, and larger: with a number in it that changes its hash, and bytes that
/// change nothing else.
///
/// # Panics
/// As [`hostile`].
#[must_use]
pub fn hostile_anew(number: u64) -> Vec<u8> {
    anew(&hostile(), number)
}

/// The same of any component.
#[must_use]
pub fn anew(wasm: &[u8], number: u64) -> Vec<u8> {
    const N_BYTES: usize = 2 << 20;
    // A custom section: its kind, its length in groups of seven bits, the length of its name, its name, its bytes.
    let n = 1 + 4 + N_BYTES;
    let length =
        [n & 0x7f | 0x80, n >> 7 & 0x7f | 0x80, n >> 14 & 0x7f | 0x80, n >> 21].map(|group| group as u8);
    let mut bytes = number.to_le_bytes().to_vec();
    bytes.resize(N_BYTES, 0);
    [wasm, &[0], &length, &[4], b"test", &bytes].concat()
}

/// Takes from a command what belongs to the build that runs the tests.
pub fn clean(command: &mut Command) -> &mut Command {
    for name in ["RUSTC", "RUSTC_WRAPPER", "RUSTC_WORKSPACE_WRAPPER", "RUSTDOCFLAGS", "RUSTFLAGS"] {
        command.env_remove(name);
    }
    for (name, _) in env::vars_os() {
        if OF_THIS_BUILD.iter().any(|prefix| name.to_string_lossy().starts_with(prefix)) {
            command.env_remove(name);
        }
    }
    command
}

/// A command that builds guests' crates where all are built, without what cargo has told this process; none where all are
/// packed, as there is no compiler then.
pub fn for_building(mut command: Command) -> Option<Command> {
    pack::folder().is_none().then(|| {
        clean(&mut command).env("CARGO_TARGET_DIR", root().join("guest-examples/target"));
        command
    })
}

/// Builds all crates of a workspace, unless they are packed; their components by the crates' names.
fn build(workspace: &Path) -> BTreeMap<String, Vec<u8>> {
    if let Some(folder) = pack::folder() {
        return components(&folder.join("guests"));
    }
    // One for all workspaces: most of what guests are made of is the same.
    let target_dir = root().join("guest-examples/target");
    fs::create_dir_all(&target_dir).expect("the target folder can be made");
    // Test binaries may run side by side; the first one builds, the others find it done.
    let turn = File::create(target_dir.join("tests.lock")).expect("the lock file can be made");
    turn.lock().expect("the lock can be taken");
    ensure_target(workspace);
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command
        .args(["build", "--release", "--locked", "--workspace", "--quiet", "--target", TARGET])
        .arg("--manifest-path")
        .arg(workspace.join("Cargo.toml"))
        .arg("--target-dir")
        .arg(&target_dir)
        .current_dir(workspace);
    let output = clean(&mut command).output().expect("cargo runs");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{} does not build:\n{errors}", workspace.display());
    components(&target_dir.join(TARGET).join("release"))
}

fn components(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let paths = fs::read_dir(folder)
        .expect("the folder of the components is there")
        .flatten()
        .map(|entry| entry.path());
    paths
        .filter(|path| path.extension() == Some(OsStr::new("wasm")))
        .map(|path| {
            let stem = path.file_stem().expect("it has a name").to_string_lossy();
            (stem.replace('_', "-"), fs::read(&path).expect("the component can be read"))
        })
        .collect()
}

/// Adds the target to the toolchain that builds there, if it is missing.
fn ensure_target(folder: &Path) {
    let mut rustc = Command::new("rustc");
    let output = clean(rustc.args(["--print", "sysroot"]).current_dir(folder)).output().expect("rustc runs");
    let sysroot = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
    if sysroot.join("lib/rustlib").join(TARGET).is_dir() {
        return;
    }
    eprintln!("the Rust target {TARGET} is missing; adding it with rustup");
    let mut rustup = Command::new("rustup");
    let status = clean(rustup.args(["target", "add", TARGET]).current_dir(folder)).status();
    let added = status.as_ref().is_ok_and(|status| status.success());
    assert!(added, "rustup target add {TARGET}: {status:?}");
}
