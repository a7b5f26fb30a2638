//! The guide: its code runs, its transcripts are what the commands say, and its site is whole.

mod transcripts;

use std::collections::BTreeSet;
use std::fs;
use std::process::{Command, Stdio};

use serde_json::Value;
use trellis::config::Config;
use trellis::guest::GuestLimits;
use trellis_tests::daemons;
use trellis_tests::guests;
use trellis_tests::guide;

use crate::exe;

/// A chapter's file name and text.
struct Chapter {
    name: String,
    text: String,
}

/// A fenced block: what stands behind the fence, and its lines.
struct Block<'a> {
    kind: &'a str,
    lines: Vec<&'a str>,
}

fn chapters() -> Vec<Chapter> {
    let files = fs::read_dir(guide::folder().join("src")).expect("the guide is there");
    let paths = files.map(|entry| entry.expect("the folder can be read").path());
    let mut chapters: Vec<Chapter> = paths
        .filter(|path| path.extension().is_some_and(|ending| ending == "md"))
        .map(|path| Chapter {
            name: path.file_name().expect("it has a name").to_string_lossy().into_owned(),
            text: fs::read_to_string(&path).expect("it is text"),
        })
        .collect();
    chapters.sort_by(|a, b| a.name.cmp(&b.name));
    chapters
}

impl Chapter {
    /// The transcripts in it.
    fn transcripts(&self) -> impl Iterator<Item = Vec<&str>> {
        self.blocks().into_iter().filter(|block| block.kind == "console").map(|block| block.lines)
    }

    fn blocks(&self) -> Vec<Block<'_>> {
        let mut blocks = Vec::new();
        let mut open: Option<Block<'_>> = None;
        for line in self.text.lines() {
            match (line.strip_prefix("```"), &mut open) {
                (Some(_), Some(_)) => blocks.extend(open.take()),
                (Some(kind), None) => open = Some(Block { kind, lines: Vec::new() }),
                (None, Some(block)) => block.lines.push(line),
                (None, None) => {}
            }
        }
        assert!(open.is_none(), "{} has a block without an end", self.name);
        blocks
    }
}

#[test]
fn all_code_is_included_and_every_chapter_is_listed() {
    let summary = fs::read_to_string(guide::folder().join("src/SUMMARY.md")).expect("there is one");
    for chapter in chapters().iter().filter(|chapter| chapter.name != "SUMMARY.md") {
        let name = &chapter.name;
        assert!(summary.contains(&format!("]({name})")), "{name} is not in the summary");
        for Block { kind, lines } in chapter.blocks() {
            match kind {
                "rust" => {
                    let is_include = |line: &&str| line.starts_with("{{#include ../") && line.ends_with("}}");
                    assert!(!lines.is_empty() && lines.iter().all(is_include), "{name}: {lines:?}");
                }
                "console" => assert!(lines[0].starts_with("$ "), "{name}: {lines:?}"),
                // A screen, as `tests/terminal` sees it.
                "text" => assert!(lines.iter().all(|line| line.chars().count() <= 80), "{name}: {lines:?}"),
                "toml" => {
                    let read = toml::from_str::<Config>(&lines.join("\n"));
                    assert!(read.is_ok(), "{name}: {read:?}");
                }
                // What `chat.rs` sees on a terminal.
                "screen" => assert!(lines[0].starts_with("$ trellis chat"), "{name}: {lines:?}"),
                other => panic!("{name} has a block of {other:?}"),
            }
        }
    }
}

#[test]
fn what_is_included_is_there_and_what_is_there_is_included() {
    let mut included = BTreeSet::new();
    for chapter in chapters() {
        for (at, _) in chapter.text.match_indices("{{#include ../") {
            let target = chapter.text[at + "{{#include ../".len()..].split("}}").next().expect("it ends");
            if target.starts_with("tables/") {
                continue;
            }
            let (path, anchor) = target.split_once(':').unwrap_or((target, ""));
            let source = fs::read_to_string(guide::folder().join(path))
                .unwrap_or_else(|error| panic!("{}: {path}: {error}", chapter.name));
            let marks = ["ANCHOR: ", "ANCHOR_END: "].map(|mark| format!("// {mark}{anchor}\n"));
            let is_whole = anchor.is_empty() || marks.iter().all(|mark| source.contains(mark));
            assert!(is_whole, "{}: {path} has no anchor {anchor}", chapter.name);
            included.insert(target.to_owned());
        }
    }
    let files = fs::read_dir(guide::folder().join("code/src")).expect("the code is there");
    for path in files.map(|entry| entry.expect("the folder can be read").path()) {
        let name = path.file_name().expect("it has a name").to_string_lossy().into_owned();
        let source = fs::read_to_string(&path).expect("it is text");
        for (at, mark) in source.match_indices("// ANCHOR: ") {
            let anchor = source[at + mark.len()..].lines().next().expect("a line");
            let target = format!("code/src/{name}:{anchor}");
            assert!(included.contains(&target), "no chapter includes {target}");
        }
    }
}

#[test]
fn the_first_guest_is_what_is_written_for_authors() {
    let read = |path: &str| {
        let path = trellis_tests::pack::root().join(path);
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    };
    let template = read("daemon/templates/generate.rs").replace("{guest}", "asks");
    assert!(read("sdk/guide/code/src/first_guest.rs") == template);
}

#[test]
fn the_code_of_the_guide_passes_its_tests() {
    let Some(mut trellis) = guests::for_building(daemons::trellis(exe())) else { return };
    let code = guide::folder().join("code");
    trellis.args(["--json", "test", "--timeout", "300"]).arg(&code);
    let ran = trellis.stdout(Stdio::piped()).stderr(Stdio::piped()).output().expect("it runs");
    let said = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success(), "{said}{}", String::from_utf8_lossy(&ran.stderr));
    let done: Vec<Value> = said.lines().map(|line| serde_json::from_str(line).expect("JSON alone")).collect();
    assert!(done.len() > 30, "{said}");
    assert!(done.iter().all(|test| test["outcome"] == "passed"), "{said}");
}

#[test]
fn what_the_chapters_show_of_commands_is_what_they_say() {
    let Some(_) = guests::for_building(Command::new("cargo")) else { return };
    let events = guests::guide_component("events");
    for chapter in chapters() {
        transcripts::run(&chapter.name, chapter.transcripts(), &events);
    }
    let text = fs::read_to_string(trellis_tests::pack::root().join("README.md")).expect("it is text");
    let readme = Chapter { name: "README.md".to_owned(), text };
    assert!(readme.transcripts().count() > 0);
    transcripts::run(&readme.name, readme.transcripts(), &events);
}

#[test]
fn the_site_is_whole() {
    let site = tempfile::tempdir().expect("a folder");
    guide::build(site.path());
    let read =
        |path: &str| fs::read_to_string(site.path().join(path)).unwrap_or_else(|_| panic!("no {path}"));
    assert!(read("reference/decoding.html").contains("speculate-tree"));
    assert!(read("reference/guest.html").contains("trellis:host"));
    let limits = read("limits.html");
    let default = GuestLimits::default();
    for (name, number) in [("n_handles", default.n_handles), ("n_messages", default.n_messages)] {
        let row = limits.split("<tr>").find(|row| row.contains(&format!("<code>limits.{name}</code>")));
        let number = if number == 1024 { "1,024".to_owned() } else { number.to_string() };
        assert!(row.expect("a row").contains(&format!(">{number}<")), "{row:?}");
    }
    // Pages that are opened from a disk get their search from a script.
    let files = fs::read_dir(site.path()).expect("the site can be read").flatten();
    let names: Vec<String> = files.map(|file| file.file_name().to_string_lossy().into_owned()).collect();
    assert!(names.iter().any(|name| name.starts_with("searchindex") && name.ends_with(".js")), "{names:?}");
}
