//! What the command `attacks` measures, and what it takes for too little: each of its rules with figures on both sides of it, and one
//! measurement of a real daemon.

use std::process::Command;

use serde_json::Value;
use trellis_tests::attacks::alone;
use trellis_tests::attacks::neighbour::Window;
use trellis_tests::attacks::pace::{MS_MAX, PACE_MIN, Row};
use trellis_tests::attacks::processes::Tally;
use trellis_tests::attacks::state::State;
use trellis_tests::attacks::{Attack, Ending, table};
use trellis_tests::{daemons, pack};

fn attack(name: &str) -> Attack {
    table().into_iter().find(|attack| attack.name == name).expect(name)
}

fn ending(code: &str, name: Option<&str>) -> Ending {
    Ending { code: code.to_owned(), name: name.map(str::to_owned), message: "so it was".to_owned() }
}

fn tally(endings: &[Ending]) -> Tally {
    let by_end = endings.iter().map(|ending| (ending.short(), (ending.clone(), 1)));
    Tally { by_end: by_end.collect() }
}

#[test]
fn an_attack_ends_as_it_has_to_also_where_copies_of_it_are_made_over_and_over() {
    let called_off = ending("cancelled", None).of_cancelled();
    assert!(called_off.is_cut() && !ending("cancelled", None).is_cut());
    assert!(!ending("internal", None).of_cancelled().is_cut(), "that is no answer to a cancel");

    // It goes on for ever, and is ended when the time is over; all copies are on one user's budget.
    let spin = attack("spin");
    let of_user = ending("budget_exceeded", Some("host_bytes"));
    assert_eq!(spin.wrong_ends(&tally(&[called_off.clone(), of_user])), [""; 0]);
    // A guest that somebody else has cancelled was not to be.
    for other in [ending("internal", None), ending("cancelled", None), ending("guest_trapped", None)] {
        let wrong = spin.wrong_ends(&tally(&[called_off.clone(), other.clone()]));
        assert_eq!(wrong, [format!("it ended with {}: so it was", other.code)]);
    }

    // It ends by itself, so one has to have come to that.
    let abort = attack("abort");
    let trapped = ending("guest_trapped", None);
    assert_eq!(abort.wrong_ends(&tally(&[trapped, called_off.clone()])), [""; 0]);
    let crowded = ending("limit_exceeded", Some("n_guests"));
    for none in [called_off, Ending::left(), crowded] {
        assert_eq!(abort.wrong_ends(&tally(&[none])), ["none came to its end"]);
    }
}

#[test]
fn who_cancels_and_who_stops_a_guest_are_told_apart() {
    let (cancelled, stopped) = (ending("cancelled", None), ending("stopped", None));
    let (cancel, stop) = (attack("cancel-ignored"), attack("stop-of-a-guest"));
    assert!(cancel.allows(&cancelled) && !cancel.allows(&stopped));
    assert!(stop.allows(&stopped) && !stop.allows(&cancelled));
}

#[test]
fn what_is_over_at_once_is_made_by_many_beside_a_measured_neighbour() {
    let brief: Vec<Attack> = table().into_iter().filter(|attack| attack.is_brief).collect();
    assert!(brief.len() > 100, "{}", brief.len());
    for attack in brief {
        assert!(attack.n_copies > 1, "{}", attack.name);
        assert_eq!(attack.n_at_once(), 1, "{}: one is over at once", attack.name);
    }
}

/// A window of a second with all that a neighbour has, and each question as slow as it may be.
fn window(n_tokens: u64) -> Window {
    Window {
        seconds: 1.0,
        n_tokens,
        silence_ms: MS_MAX,
        info_ms: MS_MAX,
        n_infos: 1,
        stop_ms: MS_MAX,
        n_stops: 1,
        encode_ms: MS_MAX,
        n_encodes: 1,
        ..Window::default()
    }
}

fn row(attacked: Window) -> Row {
    Row {
        name: "spin",
        n_copies: 4,
        alone: window(1000),
        attacked,
        first_silence_ms: 0.0,
        ends: Tally::default(),
        wrong_ends: Vec::new(),
        foreign: 0.0,
    }
}

#[test]
fn a_pace_is_over_its_limits_beyond_them_and_where_nothing_was_measured() {
    let least = (1000.0 * PACE_MIN) as u64;
    assert_eq!(row(window(least)).over(), [""; 0], "at its limits it is within them");
    let beyond = MS_MAX + 1.0;
    for (attacked, over) in [
        (window(least - 1), "pace"),
        (Window { silence_ms: beyond, ..window(900) }, "silence"),
        (Window { info_ms: beyond, ..window(900) }, "info"),
        (Window { stop_ms: beyond, ..window(900) }, "stop"),
        (Window { encode_ms: beyond, ..window(900) }, "encode"),
        (Window { n_infos: 0, ..window(900) }, "no info"),
        (Window { n_stops: 0, ..window(900) }, "no stop"),
        (Window { n_encodes: 0, ..window(900) }, "no encode"),
        (Window { n_wrong: 2, ..window(900) }, "2 wrong tokens"),
    ] {
        assert_eq!(row(attacked).over(), [over]);
    }
    assert_eq!(row(window(0)).over(), ["pace", "no tokens"]);
    let wrong_ends = vec!["it ended with internal: so it was".to_owned()];
    assert_eq!(Row { wrong_ends: wrong_ends.clone(), ..row(window(900)) }.over(), wrong_ends);
}

#[test]
fn what_processes_of_guests_keep_is_not_back() {
    let before = State {
        n_threads: 20,
        n_descriptors: 40,
        n_children: 2,
        n_children_threads: 20,
        n_children_descriptors: 20,
        resident_kb: 100_000,
        held_kb: 100_000,
        ..State::default()
    };
    assert_eq!(before.beyond(&before), [""; 0]);
    let near = State { held_kb: 105_000, n_children_threads: 22, n_children_descriptors: 23, ..before };
    assert_eq!(near.beyond(&before), [""; 0], "within 5 %");
    for (after, what) in [
        (State { n_children: 3, ..before }, "3 children, before 2"),
        (State { n_children_threads: 23, ..before }, "43 threads with its processes, before 40"),
        (State { n_children_descriptors: 24, ..before }, "64 descriptors with its processes, before 60"),
        (
            State { held_kb: 105_100, ..before },
            "105100 kB held with its processes beside programs, before 100000",
        ),
    ] {
        assert_eq!(after.beyond(&before), [what]);
        // What one attack has left is no complaint about the next one.
        let mut raised = before;
        raised.raise_to(&after);
        assert_eq!(after.beyond(&raised), [""; 0]);
        assert!(before.beyond(&raised).is_empty());
    }
}

#[test]
fn a_lone_user_has_too_little_below_the_least_share() {
    let had = |had: f64| alone::Row {
        what: "spin".to_owned(),
        unit: "processors",
        had,
        of: 2.0,
        least: 0.9,
        errors: Vec::new(),
    };
    assert!(!had(1.8).is_missed());
    assert!(had(1.79).is_missed() && had(f64::NAN).is_missed());
    assert!(alone::Row { errors: vec!["it ended".to_owned()], ..had(2.0) }.is_missed());
}

#[test]
fn the_command_measures_an_attack_that_is_over_at_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("pace.json");
    let mut command = Command::new(env!("CARGO_BIN_EXE_attacks"));
    command
        .args(["--pace", "--only", "exit-with-a-status", "--seconds", "1", "--rounds", "1", "--json"])
        .arg(&path);
    if pack::folder().is_some() {
        return println!("skipped: packed, without the command");
    }
    let output = daemons::output(&mut command);
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    // How fast a busy machine is says nothing here.
    let is_root = rustix::process::geteuid().is_root();
    let may_be: &[i32] = if is_root { &[0, 1] } else { &[77, 1] };
    assert!(output.status.code().is_some_and(|code| may_be.contains(&code)), "{}: {text:?}", output.status);
    assert_eq!(text[1].contains("not shown"), !is_root, "{text:?}");
    let rows = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{error}: {text:?}"));
    let rows: Value = serde_json::from_str(&rows).expect("it is JSON");
    let row = &rows[0];
    assert_eq!((&row["name"], &row["wrong_ends"]), (&"exit-with-a-status".into(), &Value::Array(Vec::new())));
    let n_ended = row["ends"]["by_end"]["guest_failed status"][1].as_u64().expect("some ended so");
    assert!(n_ended > 1, "one after the other: {row}");
    for window in ["alone", "attacked"] {
        for what in ["n_tokens", "n_infos", "n_stops"] {
            assert!(row[window][what].as_u64().is_some_and(|n| n > 0), "{what}: {row}");
        }
        assert_eq!((&row[window]["n_wrong"], &row[window]["errors"]), (&0.into(), &Value::Array(Vec::new())));
    }
}
