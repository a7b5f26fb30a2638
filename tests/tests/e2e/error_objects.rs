//! Errors for programs: with `--json` each is an object that the schema describes, also where the arguments are wrong.

use std::fs;
use std::process::{Command, Output, Stdio};

use jsonschema::Validator;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use trellis_tests::daemons::{self, PATIENCE, Served, output};
use trellis_tests::{guests, pack};
use trellis_wire::ErrorCode;

use crate::exe;

/// The schema of the line on standard error, or of the object in it.
fn schema(of: &str) -> (Value, Validator) {
    let text = fs::read_to_string(pack::root().join("sdk/error.schema.json")).expect("it is there");
    let mut schema: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(schema["$schema"], "https://json-schema.org/draft/2020-12/schema");
    if of == "error" {
        let error = schema["$defs"]["error"].take();
        schema = error;
    }
    let validator = jsonschema::options().build(&schema).expect("a schema");
    (schema, validator)
}

/// Asserts that an error object is as its schema says, and has nothing that the schema does not name.
fn check_object(error: &Value) {
    let (schema, validator) = schema("error");
    assert!(validator.is_valid(error), "{error}: {:?}", validator.iter_errors(error).next());
    for field in error.as_object().expect("an object").keys() {
        assert!(schema["properties"][field].is_object(), "{field}: {error}");
    }
    let code = error["code"].as_str().expect("a text");
    let known = schema["properties"]["code"]["examples"].as_array().expect("a list");
    assert!(known.iter().any(|known| known == code), "the schema names all codes: {code}");
}

/// The error of a command that ended with this status, from its last line on standard error.
fn error(output: &Output, status: i32) -> Value {
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{said}");
    let line: Value =
        serde_json::from_str(said.trim()).unwrap_or_else(|_| panic!("one line of JSON: {said}"));
    let (_, validator) = schema("line");
    assert!(validator.is_valid(&line), "{line}: {:?}", validator.iter_errors(&line).next());
    check_object(&line["error"]);
    assert_eq!(line["error"]["retryable"], status == 75, "{line}");
    line
}

fn alone(arguments: &[&str]) -> Command {
    let mut command = daemons::trellis(exe());
    command.args(arguments);
    command
}

#[test]
fn the_schema_refuses_what_is_no_error() {
    let (_, line) = schema("line");
    let good = r#"{"type":"error","error":{"code":"cli","message":"no","retryable":false}}"#;
    for (part, by) in [
        ("error\",", "end\","),
        (",\"retryable\":false", ""),
        ("\"message\":\"no\",", ""),
        ("\"cli\"", "\"No Code\""),
        ("false", "false,\"limit\":\"3\""),
    ] {
        assert!(good.contains(part), "{part}");
        let bad: Value = serde_json::from_str(&good.replacen(part, by, 1)).expect("JSON");
        assert!(!line.is_valid(&bad), "{bad}");
    }
    assert!(line.is_valid(&serde_json::from_str(good).expect("JSON")));
}

#[test]
fn mistakes_in_the_arguments_are_errors_as_all_others() {
    for arguments in [
        &["--json"][..],
        &["--json", "run"],
        &["ps", "--bogus", "--json"],
        &["--json", "no-such-command"],
        &["stop", "three", "--json"],
        &["serve", "--json", "--device", "tpu"],
        &["metrics", "--list", "--socket", "/tmp/y", "--json"],
    ] {
        let said = error(&output(&mut alone(arguments)), 2);
        assert_eq!(said["error"]["code"], "usage", "{arguments:?}: {said}");
    }
    let device = error(&output(&mut alone(&["serve", "--json", "--device", "tpu"])), 2);
    assert_eq!(device["error"]["value"], "tpu", "{device}");
    // Help is no error, and people are told as ever.
    assert!(output(&mut alone(&["--json", "--help"])).status.success());
    let told = output(&mut alone(&["ps", "--bogus"]));
    assert_eq!(told.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&told.stderr).contains("\n\nUsage: trellis ps"), "{told:?}");
    let of_guest = output(&mut alone(&["run", "--bogus", "--", "--json"]));
    assert!(String::from_utf8_lossy(&of_guest.stderr).starts_with("error: "), "{of_guest:?}");
}

#[test]
fn errors_of_every_kind_are_as_the_schema_says() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    fs::write(at("wrong.toml"), "no_such_setting = 1").expect("written");
    fs::write(at("no.rec"), "no recording").expect("written");
    fs::write(at("hostile.wasm"), guests::hostile()).expect("written");
    fs::write(at("right.toml"), "device = 'cpu'").expect("written");
    let (none, wrong, right) = (at("none"), at("wrong.toml"), at("right.toml"));
    let cases: [(Vec<&str>, &str); 6] = [
        (vec!["info", "--json", "--socket", &none], "connection"),
        (vec!["run", "--json", "--no-stdin", "no-such-guest"], "cli"),
        (vec!["config", "show", "--json", "--config", &wrong], "cli"),
        (vec!["replay", "--json", "no.rec"], "cli"),
        (vec!["limits", "--json", "--config", &right, "no-such-limit"], "cli"),
        (vec!["build", "--json", &none], "cli"),
    ];
    for (arguments, code) in cases {
        let said = error(&output(alone(&arguments).current_dir(folder.path())), 2);
        assert_eq!(said["error"]["code"], code, "{arguments:?}: {said}");
    }

    let served = Served::start(exe());
    for (command, argument, code) in [
        ("stop", "999999", ErrorCode::UnknownGuest),
        ("unload", "no-such-model", ErrorCode::UnknownModel),
        ("load", "tiny", ErrorCode::ModelLoaded),
    ] {
        let said = error(&output(&mut served.trellis(&[command, "--json", argument])), 2);
        assert_eq!(said["error"]["code"], code.as_str(), "{command}: {said}");
    }

    // A guest's last line has the same object.
    let end = |arguments: &[&str], status| {
        let ran = output(&mut served.trellis(arguments));
        assert_eq!(ran.status.code(), Some(status), "{ran:?}");
        let said = String::from_utf8(ran.stdout).expect("text");
        let end: Value = serde_json::from_str(said.lines().last().expect("a line")).expect("JSON");
        check_object(&end["error"]);
        assert_eq!(end["error"]["retryable"], status == 75, "{end}");
        end["error"].clone()
    };
    let path = at("hostile.wasm");
    assert_eq!(end(&["run", "--json", "--no-stdin", &path, "error"], 1)["code"], "guest_failed");
    let late = end(&["run", "--json", "--no-stdin", "--timeout", "0.5", &path, "loop"], 1);
    assert_eq!(late["code"], "deadline_exceeded");
    assert!(late["limit"].is_u64() && late["name"].is_string(), "{late}");

    // A daemon that dies may be there again another time.
    let mut run = served.trellis(&["run", "--json", "--no-stdin", &path, "loop"]);
    let run = run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it runs");
    let begun = std::time::Instant::now();
    while String::from_utf8_lossy(&output(&mut served.trellis(&["ps", "--json"])).stdout).trim() == "[]" {
        assert!(begun.elapsed() < PATIENCE, "the guest does not come up");
    }
    let pid = Pid::from_raw(i32::try_from(served.pid()).expect("a process")).expect("not 0");
    kill_process(pid, Signal::KILL).expect("it runs");
    let ran = run.wait_with_output().expect("it ends");
    let lines = [ran.stdout, ran.stderr].concat();
    let last = String::from_utf8(lines).expect("text").lines().last().expect("a line").to_owned();
    let last: Value = serde_json::from_str(&last).expect("JSON");
    check_object(&last["error"]);
    assert_eq!((ran.status.code(), &last["error"]["retryable"]), (Some(75), &true.into()), "{last}");
}
