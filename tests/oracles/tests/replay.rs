//! What the fuzzers keep, and inputs by chance, through the oracles: no fuzzer and no nightly toolchain are needed.

use std::collections::BTreeSet;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use trellis_oracles::{TARGETS, Target, fresh_seed, mutated_input, random_input};

/// Inputs by chance for each target, the same each time.
const N_RANDOM: u64 = 300;

/// How long each target is given inputs that nobody has tried yet.
const FRESH_TIME: Duration = Duration::from_secs(2);

/// The most that is kept for a target: a fresh clone and a run of the tests are to stay small.
const CORPUS_BYTES_MAX: u64 = 128 << 10;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz")
}

fn target(name: &str) -> &'static Target {
    TARGETS.iter().find(|target| target.name == name).expect("it is a target")
}

/// The files of a folder, in the order of their names.
fn files(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.expect("it can be read").path()).collect();
    files.sort();
    files
}

fn holds(target: &Target, input: &[u8], what: &str) {
    let held = catch_unwind(AssertUnwindSafe(|| (target.check)(input)));
    if held.is_err() {
        let hex: String = input.iter().map(|byte| format!("{byte:02x}")).collect();
        panic!("{} fails for {what}: {hex}", target.name);
    }
}

fn replay(name: &str) {
    let target = target(name);
    let kept = files(&folder().join("corpus").join(name));
    assert!(!kept.is_empty(), "nothing is kept for {name}");
    let mut inputs = Vec::new();
    for path in kept.into_iter().chain(files(&folder().join("regressions").join(name))) {
        let input = fs::read(&path).expect("it can be read");
        holds(target, &input, &path.display().to_string());
        inputs.push(input);
    }
    for seed in 0..N_RANDOM {
        holds(target, &random_input(seed, target.input_bytes_max), &format!("random_input({seed}, ..)"));
    }
    let (first, begun, mut n) = (fresh_seed(), Instant::now(), 0);
    while begun.elapsed() < FRESH_TIME {
        let seed = first.wrapping_add(n);
        let input = mutated_input(&inputs, seed, target.input_bytes_max);
        holds(target, &input, &format!("TRELLIS_FUZZ_SEED={seed}"));
        n += 1;
    }
    println!("{name}: {n} fresh inputs from TRELLIS_FUZZ_SEED={first} on");
}

macro_rules! replayed {
    ($($(#[$only:meta])? $name:ident),+ $(,)?) => {
        const REPLAYED: &[&str] = &[$($(#[$only])? stringify!($name)),+];
        $(
            $(#[$only])?
            #[test]
            fn $name() {
                replay(stringify!($name));
            }
        )+
    };
}

replayed!(
    frames,
    #[cfg(feature = "daemon")]
    recordings,
    safetensors,
    gguf,
    config,
    tokenizer,
    chat,
    programs,
    grammars,
    scheduler,
    operations,
);

#[test]
fn every_target_is_replayed_and_fuzzed() {
    let names: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
    // What needs the program `trellis` is replayed end to end.
    let is_here = |name: &&str| !["host", "components"].contains(name);
    let of_tests: Vec<&str> = names.iter().copied().filter(is_here).collect();
    assert_eq!(of_tests, REPLAYED);
    let sources: BTreeSet<String> = files(&folder().join("fuzz_targets"))
        .iter()
        .map(|path| path.file_stem().expect("it has a name").to_string_lossy().into_owned())
        .collect();
    // Each file is a target of both builds, and each target a file.
    let known: BTreeSet<String> = names.iter().map(|name| (*name).to_owned()).collect();
    assert!(known.is_subset(&sources) && (cfg!(not(feature = "daemon")) || known == sources), "{sources:?}");
    // Each of which does nothing but call its target, as the tests do: they are compiled by cargo-fuzz alone.
    let _: fn() = trellis_oracles::prepare;
    for name in &known {
        let path = folder().join("fuzz_targets").join(name).with_extension("rs");
        let text = fs::read_to_string(&path).expect("it can be read");
        let expected = format!(
            "//! See `trellis_oracles::{name}`.\n#![no_main]\n\n\
             libfuzzer_sys::fuzz_target!(init: trellis_oracles::prepare(), |input: &[u8]| {{\n    \
             trellis_oracles::{name}::check(input);\n}});\n"
        );
        assert_eq!(text, expected, "{}", path.display());
        let bin = format!("[[bin]]\nname = \"{name}\"\npath = \"fuzz_targets/{name}.rs\"\n");
        let manifest = fs::read_to_string(folder().join("Cargo.toml")).expect("it can be read");
        assert!(manifest.contains(&bin), "tests/fuzz/Cargo.toml has no target {name}");
    }
    for kind in ["corpus", "regressions"] {
        for path in files(&folder().join(kind)) {
            let name = path.file_name().expect("it has a name").to_string_lossy().into_owned();
            assert!(sources.contains(&name), "{} is of no target", path.display());
        }
    }
}

#[test]
fn little_is_kept() {
    for path in files(&folder().join("corpus")) {
        let n_bytes: u64 =
            files(&path).iter().map(|path| fs::metadata(path).expect("it is there").len()).sum();
        assert!(n_bytes <= CORPUS_BYTES_MAX, "{}: {n_bytes} bytes", path.display());
    }
}
