//! The guide: what of it is made from the code, and the site that mdBook makes of it.

mod limits;
mod links;
mod metrics;
mod wit;

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use mdbook_driver::MDBook;

use crate::pack::root;

/// The line of `SUMMARY.md` in the place of which the chapters of the reference stand.
const REFERENCE: &str = "{{reference}}\n";

/// The guide's folder.
#[must_use]
pub fn folder() -> PathBuf {
    root().join("sdk/guide")
}

/// Writes the site into a folder, and looks whether its links lead anywhere.
///
/// # Panics
/// The book is not whole, the folder cannot be written, or a link leads nowhere.
pub fn build(out: &Path) {
    let book = tempfile::tempdir().expect("a folder");
    lay_out(book.path());
    let mut book = MDBook::load(book.path()).unwrap_or_else(|error| panic!("{error:?}"));
    book.config.build.build_dir = std::path::absolute(out).expect("there is a current folder");
    book.build().unwrap_or_else(|error| panic!("{error:?}"));
    links::check(out);
}

/// The book as mdBook takes it: the chapters, the code that they include, and what is made from the code.
fn lay_out(book: &Path) {
    let folder = folder();
    for part in ["src", "code/src", "events/src"] {
        fs::create_dir_all(book.join(part)).expect("a folder");
        for entry in fs::read_dir(folder.join(part)).expect("the guide has it") {
            let path = entry.expect("the folder can be read").path();
            let name = path.file_name().expect("it has a name");
            fs::copy(&path, book.join(part).join(name)).expect("copied");
        }
    }
    fs::copy(folder.join("book.toml"), book.join("book.toml")).expect("copied");
    let write = |path: &str, text: &str| fs::write(book.join("src").join(path), text).expect("written");
    fs::create_dir(book.join("src/reference")).expect("a folder");
    let mut summary = String::new();
    for wit::Chapter { name, markdown } in wit::chapters(&root().join("wit")) {
        let path = format!("reference/{name}.md");
        write(&path, &markdown);
        writeln!(summary, "- [`{name}`]({path})").expect("a string takes all");
    }
    let text = fs::read_to_string(folder.join("src/SUMMARY.md")).expect("the guide has one");
    assert!(text.contains(REFERENCE), "SUMMARY.md has no place for the reference");
    write("SUMMARY.md", &text.replace(REFERENCE, &summary));
    fs::create_dir(book.join("tables")).expect("a folder");
    fs::write(book.join("tables/limits.md"), limits::tables()).expect("written");
    fs::write(book.join("tables/metrics.md"), metrics::table()).expect("written");
}
