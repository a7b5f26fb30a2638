//! The languages that a guest can be begun in, and the files of those that are not Rust: the examples of the checkout.

use clap::ValueEnum;

use super::sdk;

/// A language for guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Lang {
    /// A crate, built by `trellis build`
    Rust,
    /// CPython in a component, built by componentize-py
    Python,
    /// StarlingMonkey in a component, built by componentize-js
    Javascript,
}

/// What the component of the examples is called; in a new folder it is called as the folder is.
const COMPONENT: &str = "min-p.wasm";

macro_rules! example {
    ($($file:literal),* $(,)?) => {
        &[$(($file, include_str!(concat!("../../../../guest-examples/", $file)))),*]
    };
}

const PYTHON: &[(&str, &str)] =
    example!["python/README.md", "python/app.py", "python/requirements.txt", "python/trellis_guest.py"];

const JAVASCRIPT: &[(&str, &str)] = example![
    "javascript/README.md",
    "javascript/app.js",
    "javascript/build.js",
    "javascript/package-lock.json",
    "javascript/package.json",
    "javascript/trellis-guest.js",
];

/// The files of a guest in a language that has no crates, by their paths in its folder.
pub(super) fn files(lang: Lang, name: &str) -> Vec<(String, String)> {
    let (example, ignored) = match lang {
        Lang::Rust => return Vec::new(),
        Lang::Python => (PYTHON, "/.venv\n__pycache__/\n*.wasm\n"),
        Lang::Javascript => (JAVASCRIPT, "/node_modules\n*.wasm\n"),
    };
    let component = format!("{name}.wasm");
    let own = example.iter().map(|(path, text)| {
        let (_, file) = path.split_once('/').expect("it is in the folder of a language");
        (file.to_owned(), text.replace(COMPONENT, &component))
    });
    let wit = sdk::interfaces().map(|(file, text)| (format!("wit/{file}"), text.to_owned()));
    own.chain(wit).chain([(".gitignore".to_owned(), ignored.to_owned())]).collect()
}

/// What to do with the folder next.
pub(super) fn next(lang: Lang, folder: &str) -> String {
    let (source, build) = match lang {
        Lang::Rust => {
            return format!(
                "{folder} is a guest: src/lib.rs says what it does\n\
                 next: trellis test {folder}\n      trellis run {folder} \"What is 37 + 48?\""
            );
        }
        Lang::Python => ("app.py", "its virtual environment"),
        Lang::Javascript => ("app.js", "npm"),
    };
    format!(
        "{folder} is a guest: {source} says what it does\n\
         next: {folder}/README.md says how {build} makes a component of it, for `trellis run`"
    )
}
