//! Parameters of kernels, as the launchers and as the kernels' sources declare them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// A structure: its fields in order, each with the bytes of an element, and how many it has.
type Fields = Vec<(String, usize, usize)>;

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("the folder can be read") {
        let path = entry.expect("the folder can be read").path();
        if path.is_dir() {
            files(&path, found);
        } else if !path.ends_with("launch_tests.rs") {
            found.push(path);
        }
    }
}

/// The structures of a text whose names end in `Params`: name, fields, and what comes behind them.
fn structures(
    text: &str,
    field: impl Fn(&str) -> (String, usize, usize),
) -> impl Iterator<Item = (String, Fields, &str)> {
    text.match_indices("struct ").filter_map(move |(at, _)| {
        let (name, rest) = text[at + "struct ".len()..].split_once(" {\n")?;
        let is_params = name.ends_with("Params") && name.chars().all(char::is_alphanumeric);
        let (body, rest) = is_params.then(|| rest.split_once('}'))??;
        let lines = body.lines().map(|line| line.split("//").next().unwrap_or_default().trim());
        let fields = lines.filter(|line| !line.is_empty()).map(&field).collect();
        Some((name.to_owned(), fields, rest))
    })
}

fn rust_field(line: &str) -> (String, usize, usize) {
    let (name, kind) = line
        .trim_end_matches(',')
        .trim_start_matches("pub(super) ")
        .split_once(": ")
        .expect("a name and a type");
    let list =
        kind.strip_prefix('[').and_then(|kind| kind.strip_suffix(']')).and_then(|kind| kind.split_once("; "));
    let (kind, n) = list.map_or((kind, 1), |(kind, n)| (kind, n.parse().expect("a number")));
    let n_bytes = match kind {
        "Pointer" | "u64" => 8,
        "i32" | "u32" | "f32" => 4,
        _ => panic!("a kernel takes no {kind}"),
    };
    (name.to_owned(), n_bytes, n)
}

fn cuda_field(line: &str) -> (String, usize, usize) {
    let (kind, name) = line.trim_end_matches(';').rsplit_once(' ').expect("a type and a name");
    let list = name.strip_suffix(']').and_then(|name| name.split_once('['));
    let (name, n) = list.map_or((name, 1), |(name, n)| (name, n.parse().expect("a number")));
    let n_bytes = match kind.trim_start_matches("const ") {
        "int" | "unsigned" | "float" => 4,
        "u64" | "unsigned long long" => 8,
        pointer if pointer.ends_with('*') => 8,
        _ => panic!("a launcher has no {kind}"),
    };
    (name.to_owned(), n_bytes, n)
}

fn n_bytes_without_padding(name: &str, fields: &Fields) -> usize {
    let end = fields.iter().fold(0, |at, (field, n_bytes, n)| {
        assert_eq!(at % n_bytes, 0, "padding before {field} of {name}");
        at + n_bytes * n
    });
    assert_eq!(end % 8, 0, "padding at the end of {name}");
    end
}

#[test]
fn launchers_and_kernels_declare_the_same_parameters() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    if !folder.is_dir() {
        eprintln!("skipped: the sources are on another machine");
        return;
    }
    let mut found = Vec::new();
    files(&folder, &mut found);
    let (mut rust, mut cuda) = (BTreeMap::new(), BTreeMap::new());
    for path in found {
        let text = fs::read_to_string(&path).expect("it is text");
        if path.extension().is_some_and(|ending| ending == "rs") {
            for (name, fields, rest) in structures(&text, rust_field) {
                let said = format!("\nparams!({name}, {});\n", n_bytes_without_padding(&name, &fields));
                assert!(rest.starts_with(&said), "{} does not say {said}", path.display());
                assert!(rust.insert(name.clone(), fields).is_none(), "{name} is declared twice");
            }
        } else {
            for (name, fields, rest) in structures(&text, cuda_field) {
                let n_bytes = n_bytes_without_padding(&name, &fields);
                let said = format!(";\nstatic_assert(sizeof({name}) == {n_bytes}, \"as in ");
                assert!(rest.starts_with(&said), "{} does not say {said}", path.display());
                assert!(cuda.insert(name.clone(), fields).is_none(), "{name} is declared twice");
            }
        }
    }
    assert_eq!(rust, cuda);
    assert!(!rust.is_empty());
}
