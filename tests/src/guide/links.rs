//! Whether the pages of a site lead to what is there, and need nothing that is elsewhere.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

/// The ids of a page, and what it links to.
struct Page {
    ids: BTreeSet<String>,
    /// Attributes and their values.
    targets: Vec<(&'static str, String)>,
}

/// Looks at all pages of a site.
///
/// # Panics
/// A link leads to a file or a place in a page that there is not, or a page takes something from elsewhere.
pub(super) fn check(site: &Path) {
    let mut pages = BTreeMap::new();
    read(site, site, &mut pages);
    assert!(pages.len() > 10, "{} pages", pages.len());
    for (place, page) in &pages {
        for (attribute, target) in &page.targets {
            let is_elsewhere = target.contains("://") || target.starts_with("//");
            assert!(
                !is_elsewhere || *attribute == "href",
                "{} needs {target}, which is elsewhere",
                place.display()
            );
            if is_elsewhere || target.starts_with("data:") {
                continue;
            }
            let (path, id) = target.split_once('#').unwrap_or((target, ""));
            let to = if path.is_empty() { place.clone() } else { joined(place, path) };
            assert!(site.join(&to).is_file(), "{} leads to {target}", place.display());
            if let (Some(to), false) = (pages.get(&to), id.is_empty()) {
                assert!(to.ids.contains(id), "{} leads to {target}", place.display());
            }
        }
    }
}

fn read(site: &Path, folder: &Path, pages: &mut BTreeMap<PathBuf, Page>) {
    for entry in fs::read_dir(folder).expect("the site can be read") {
        let path = entry.expect("the site can be read").path();
        if path.is_dir() {
            read(site, &path, pages);
        } else if path.extension().is_some_and(|ending| ending == "html") {
            let html = fs::read_to_string(&path).expect("it is text");
            let place = path.strip_prefix(site).expect("below the site").to_owned();
            pages.insert(place, page(&html));
        }
    }
}

fn page(html: &str) -> Page {
    let values = |attribute: &str| -> Vec<String> {
        let begins = format!(" {attribute}=\"");
        let pieces = html.split(&begins).skip(1);
        pieces.filter_map(|piece| Some(piece.split_once('"')?.0.replace("&amp;", "&"))).collect()
    };
    let targets = ["href", "src"].map(|name| values(name).into_iter().map(move |value| (name, value)));
    Page { ids: values("id").into_iter().collect(), targets: targets.into_iter().flatten().collect() }
}

/// A path as seen from a page.
fn joined(page: &Path, path: &str) -> PathBuf {
    let mut joined = page.parent().unwrap_or(Path::new("")).to_owned();
    for part in Path::new(path).components() {
        match part {
            Component::ParentDir => _ = joined.pop(),
            Component::Normal(name) => joined.push(name),
            _ => {}
        }
    }
    joined
}
