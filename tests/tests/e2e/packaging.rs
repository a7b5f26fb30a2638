//! What packages, the container and `trellis completions` are made of.

use std::fs;
use std::io::Write as _;
use std::process::{Command, Stdio};

use toml::Table;
use trellis_tests::daemons::{self, output};
use trellis_tests::pack::root;

use crate::exe;

#[test]
fn completions_are_scripts_that_shells_take() {
    for (shell, at_least) in [("bash", true), ("zsh", false), ("fish", false)] {
        let made = output(daemons::trellis(exe()).args(["completions", shell]));
        assert!(made.status.success(), "{made:?}");
        assert!(made.stdout.len() > 1000 && made.stdout.windows(7).any(|word| word == b"upgrade"), "{shell}");
        let parsed = Command::new(shell).arg("-n").stdin(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut parsed = match parsed {
            Err(error) if !at_least => {
                eprintln!("{shell} is not looked at: {error}");
                continue;
            }
            parsed => parsed.expect("the shell runs"),
        };
        parsed.stdin.take().expect("piped").write_all(&made.stdout).expect("it reads");
        let parsed = parsed.wait_with_output().expect("it ends");
        assert!(parsed.status.success() && parsed.stderr.is_empty(), "{shell}: {parsed:?}");
    }
    // What bash is told to complete is what there is.
    let script = output(daemons::trellis(exe()).args(["completions", "bash"])).stdout;
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("trellis");
    fs::write(&path, script).expect("written");
    let ask = "source \"$0\"; COMP_WORDS=(trellis se); COMP_CWORD=1; _trellis trellis se trellis; \
               echo \"${COMPREPLY[*]}\"";
    let said = output(Command::new("bash").args(["-c", ask]).arg(&path));
    assert_eq!(String::from_utf8_lossy(&said.stdout).trim(), "serve service", "{said:?}");
}

#[test]
fn what_a_package_brings_is_there() {
    let manifest: Table =
        fs::read_to_string(root().join("daemon/Cargo.toml")).expect("there is one").parse().expect("TOML");
    let deb = &manifest["package"]["metadata"]["deb"];
    let script = fs::read_to_string(root().join("daemon/packaging/deb.sh")).expect("there is one");
    for asset in deb["assets"].as_array().expect("a list") {
        let from = asset[0].as_str().expect("a path");
        match from.strip_prefix("target/release/packaging/") {
            // What `deb.sh` makes.
            Some(made) => {
                let made = made.split('/').next().expect("a name");
                assert!(
                    script.contains(&format!("$made/{made}"))
                        || script.contains(&format!("\"$made\"/{made}")),
                    "{from}"
                );
            }
            None if from == "target/release/trellis" => {}
            None => assert!(root().join("daemon").join(from).is_file(), "{from}"),
        }
    }
}

#[test]
fn the_container_is_made_of_what_there_is() {
    let text = fs::read_to_string(root().join("daemon/packaging/Containerfile")).expect("there is one");
    let text = text.replace("\\\n", " ");
    let workspace = |manifest: &str| {
        let listed = output(
            Command::new("cargo")
                .args(["metadata", "--no-deps", "--format-version", "1", "--offline"])
                .arg("--manifest-path")
                .arg(root().join(manifest)),
        );
        String::from_utf8(listed.stdout).expect("JSON")
    };
    let (mut n_builds, mut n_copies) = (0, 0);
    for line in text.lines().flat_map(|line| line.split("&&")).map(str::trim) {
        let words: Vec<&str> = line.split_whitespace().collect();
        if let Some(place) = words.windows(2).position(|pair| pair == ["cargo", "build"]) {
            n_builds += 1;
            let after = |flag: &'static str| {
                words[place..].windows(2).filter(move |pair| pair[0] == flag).map(|pair| pair[1])
            };
            let manifest = after("--manifest-path").next().unwrap_or("Cargo.toml");
            let metadata = workspace(manifest);
            for package in after("-p") {
                assert!(metadata.contains(&format!("\"name\":\"{package}\"")), "{package} of {manifest}");
            }
        }
        if let ["COPY", "--from=build", from, _] = words[..] {
            n_copies += 1;
            let built = from.strip_prefix("/src/").expect("of the sources");
            let workspace = built.split_once("target/").expect("of a target folder").0;
            assert!(root().join(workspace).join("Cargo.toml").is_file(), "{from}");
        }
    }
    assert_eq!((n_builds, n_copies), (2, 2), "each is looked at");
}
