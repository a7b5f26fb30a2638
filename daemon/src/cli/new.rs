//! `trellis new`: a guest to begin with.

mod lang;
mod sdk;

use std::fs;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use serde::Serialize;

use super::error::CliError;
use super::output::{self, Format};
use lang::Lang;

const EXAMPLES: &str = "\
Examples:
  trellis new my-guest                      a crate in the folder my-guest
  trellis new my-sampler --template sampler one with a logit program
  trellis new my-guest --lang python        one in Python, with what builds it
  trellis test my-guest                     then: its tests, with the model `tiny`
  trellis run my-guest \"What is 37 + 48?\"   and the guest itself";

/// Write a new guest: a crate with a test, or a folder in another language
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct NewArgs {
    /// The folder to make, whose last part is the crate's name
    #[arg(value_name = "NAME")]
    folder: PathBuf,
    /// The language
    #[arg(long, value_enum, default_value_t = Lang::Rust)]
    lang: Lang,
    /// What a guest in Rust does to begin with; the others draw by a sampler of their own
    #[arg(long, value_enum, default_value_t = Template::Generate)]
    template: Template,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Template {
    /// Several answers in one batch, of which it keeps one
    Generate,
    /// Each token as it comes
    Stream,
    /// A sampler of its own, as a logit program
    Sampler,
}

impl Template {
    fn source(self) -> &'static str {
        match self {
            Self::Generate => include_str!("../../templates/generate.rs"),
            Self::Stream => include_str!("../../templates/stream.rs"),
            Self::Sampler => include_str!("../../templates/sampler.rs"),
        }
    }
}

/// The crate's manifest. Its own workspace, so that it may lie in the folder of another; small, as it is sent to the daemon and
/// compiled there; a library too, for tests in files of their own.
const MANIFEST: &str = r#"[package]
name = "{name}"
version = "0.1.0"
edition = "2024"

[lib]
crate-type = ["cdylib", "rlib"]

[dependencies]
trellis-guest = { path = {sdk} }

[profile.dev]
debug = "line-tables-only"

[profile.release]
opt-level = "s"
lto = true
codegen-units = 1
panic = "abort"
strip = "debuginfo"

[workspace]
"#;

/// What a library of Rust cannot be called.
const KEYWORDS: [&str; 51] = [
    "abstract", "as", "async", "await", "become", "box", "break", "const", "continue", "crate", "do", "dyn",
    "else", "enum", "extern", "false", "final", "fn", "for", "gen", "if", "impl", "in", "let", "loop",
    "macro", "match", "mod", "move", "mut", "override", "priv", "pub", "ref", "return", "self", "static",
    "struct", "super", "trait", "true", "try", "type", "typeof", "unsafe", "unsized", "use", "virtual",
    "where", "while", "yield",
];

const TOOLCHAIN: &str = "[toolchain]\nchannel = \"stable\"\ntargets = [\"wasm32-wasip2\"]\n";

#[derive(Serialize)]
struct Written {
    folder: PathBuf,
    name: String,
}

pub(crate) fn new(args: &NewArgs, format: Format) -> Result<(), CliError> {
    let folder = &args.folder;
    let name = crate_name(folder).map_err(|reason| CliError::NoCrateName { path: folder.clone(), reason })?;
    let files = match args.lang {
        Lang::Rust => crate_files(args.template, &name)?,
        lang => lang::files(lang, &name),
    };
    // Whatever is there is somebody's.
    fs::create_dir(folder).map_err(CliError::io(format!("make {}", folder.display())))?;
    for (path, text) in files {
        if let Err(error) = write(&folder.join(path), &text) {
            // Half a guest would be in the way of the next try.
            let _ = fs::remove_dir_all(folder);
            return Err(error);
        }
    }
    output::print(format, &Written { folder: folder.clone(), name }, |written| {
        lang::next(args.lang, &output::escaped_line(&written.folder.display().to_string()))
    })
}

/// The files of a crate, by their paths in its folder.
fn crate_files(template: Template, name: &str) -> Result<Vec<(String, String)>, CliError> {
    let sdk = sdk::guest_crate()?;
    let sdk = toml::Value::String(sdk.display().to_string()).to_string();
    let files = [
        ("Cargo.toml", MANIFEST.replace("{sdk}", &sdk).replace("{name}", name)),
        ("rust-toolchain.toml", TOOLCHAIN.to_owned()),
        (".gitignore", "/target\n".to_owned()),
        ("src/lib.rs", template.source().replace("{guest}", name)),
    ];
    Ok(files.map(|(path, text)| (path.to_owned(), text)).into())
}

/// The name of a crate in this folder.
fn crate_name(folder: &Path) -> Result<String, &'static str> {
    let name = folder.file_name().and_then(|name| name.to_str()).ok_or("it has no name")?;
    if !name.starts_with(|first: char| first.is_ascii_alphabetic()) {
        return Err("a crate's name begins with a letter of ASCII");
    }
    if !name.chars().all(|letter| letter.is_ascii_alphanumeric() || matches!(letter, '-' | '_')) {
        return Err("a crate's name has letters of ASCII, digits, - and _");
    }
    let library = name.replace('-', "_");
    if ["test", "core", "std", "alloc", "proc_macro", "trellis_guest"].contains(&library.as_str()) {
        return Err("another crate has that name");
    }
    if KEYWORDS.contains(&library.as_str()) {
        return Err("it is a keyword of Rust");
    }
    Ok(name.to_owned())
}

fn write(path: &Path, text: &str) -> Result<(), CliError> {
    let write = || {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        fs::write(path, text)
    };
    write().map_err(CliError::io(format!("write {}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_cargo_refuses_are_refused() {
        assert_eq!(crate_name(Path::new("guests/my-guest_2")), Ok("my-guest_2".to_owned()));
        for name in ["..", "", "2guests", "my guest", "a\"b", "grüße", "test", "match", "trellis_guest"] {
            assert!(crate_name(Path::new(name)).is_err(), "{name}");
        }
    }

    #[test]
    fn what_is_there_is_left_alone() {
        let folder = tempfile::tempdir().expect("a folder");
        let args = |name: &str| NewArgs {
            folder: folder.path().join(name),
            lang: Lang::Rust,
            template: Template::Sampler,
        };
        for name in ["mine", "NAME-of-SDK"] {
            new(&args(name), Format::Json).expect("it is written");
            let manifest = folder.path().join(name).join("Cargo.toml");
            let manifest: toml::Table =
                toml::from_str(&fs::read_to_string(manifest).expect("written")).expect("TOML");
            assert_eq!(manifest["package"]["name"].as_str(), Some(name));
        }
        let manifest = fs::read_to_string(folder.path().join("mine/Cargo.toml")).expect("written");
        let manifest: toml::Table = toml::from_str(&manifest).expect("TOML");
        let sdk = manifest["dependencies"]["trellis-guest"]["path"].as_str().expect("a path");
        assert!(Path::new(sdk).join("Cargo.toml").is_file());
        let source = fs::read_to_string(folder.path().join("mine/src/lib.rs")).expect("written");
        assert!(source.contains("\"mine [--width N] QUESTION\""), "{source}");
        let again = new(&args("mine"), Format::Json);
        assert!(matches!(again, Err(CliError::Io { .. })), "{again:?}");
    }

    #[test]
    fn other_languages_bring_what_builds_them_and_name_the_component() {
        let root = tempfile::tempdir().expect("a folder");
        for (lang, recipe, sources) in [
            (Lang::Python, "README.md", ["app.py", "trellis_guest.py"]),
            (Lang::Javascript, "build.js", ["app.js", "trellis-guest.js"]),
        ] {
            let folder = root.path().join(format!("{lang:?}"));
            let args = NewArgs { folder: folder.clone(), lang, template: Template::Generate };
            new(&args, Format::Json).expect("it is written");
            for file in sources.iter().copied().chain(["wit/world.wit", "wit/session.wit", ".gitignore"]) {
                assert!(folder.join(file).is_file(), "{lang:?}: {file}");
            }
            assert!(!folder.join("Cargo.toml").exists() && !folder.join("wit/0.1").exists());
            let recipe = fs::read_to_string(folder.join(recipe)).expect("written");
            assert!(recipe.contains(&format!("{lang:?}.wasm")), "{recipe}");
            assert!(!recipe.contains("min-p.wasm"), "{recipe}");
        }
    }
}
