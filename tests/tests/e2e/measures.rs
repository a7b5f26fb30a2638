//! What the command `attacks` measures, and what it takes for too little: each of its rules with figures on both sides of it, and one
//! measurement of a real daemon.

use std::io;
use std::process::Command;

use serde_json::Value;
use trellis::config::Config;
use trellis_tests::attacks::alone;
use trellis_tests::attacks::neighbour::Window;
use trellis_tests::attacks::pace::{ENCODE_MS_MAX, MS_MAX, PACE_MIN, Row};
use trellis_tests::attacks::processes::Tally;
use trellis_tests::attacks::state::{State, of_child};
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
        encode_ms: ENCODE_MS_MAX,
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
        (Window { encode_ms: ENCODE_MS_MAX + 1.0, ..window(900) }, "encode"),
        (Window { n_infos: 0, ..window(900) }, "no info"),
        (Window { n_stops: 0, ..window(900) }, "no stop"),
        (Window { n_encodes: 0, ..window(900) }, "no encode"),
        (Window { n_wrong: 2, ..window(900) }, "2 wrong tokens"),
    ] {
        assert_eq!(row(attacked).over(), [over]);
    }
    assert_eq!(row(window(0)).over(), ["pace", "no tokens"]);
    assert_eq!(Row { alone: window(0), ..row(window(900)) }.over(), ["no tokens alone"]);
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
fn a_child_that_is_not_shown_is_no_error_and_one_that_has_ended_holds_nothing() {
    let denied = || Err::<u64, _>(io::Error::from(io::ErrorKind::PermissionDenied));
    assert_eq!(of_child(denied(), || false).expect("it is there"), None);
    assert_eq!(of_child(denied(), || true).expect("it has ended"), Some(0));
    let gone = || Err::<u64, _>(io::Error::from(rustix::io::Errno::SRCH));
    assert_eq!(of_child(gone(), || true).expect("it has ended"), Some(0));
    assert_eq!(of_child(Ok(7), || false).expect("it is there"), Some(7));
    assert!(of_child::<u64>(Err(io::Error::other("broken")), || false).is_err());
}

#[test]
fn what_the_system_does_not_show_of_processes_is_not_compared() {
    let before = State {
        n_descriptors: 40,
        n_children: 1,
        n_children_descriptors: 20,
        held_kb: 100_000,
        ..State::default()
    };
    let after = State { n_children_descriptors: 60, held_kb: 200_000, ..before };
    assert_eq!(after.beyond(&before).len(), 2);
    let hidden = State { n_hidden: 1, ..before };
    assert_eq!(after.beyond(&hidden), [""; 0]);
    assert_eq!(State { n_hidden: 1, ..after }.beyond(&before), [""; 0]);
    let more = State { n_children: 2, n_children_threads: 9, ..after };
    assert_eq!(more.beyond(&hidden).len(), 2, "all else is");
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
    assert!(alone::Row { of: 0.0, ..had(1.0) }.is_missed(), "there was nothing to have");
}

#[test]
fn a_machine_that_others_keep_busy_is_none_to_measure_a_lone_user_on() {
    for (left, n_processors) in [(0.5, 1), (1.0, 2), (1.0, 64)] {
        assert_eq!(alone::too_busy(left, n_processors), None);
        assert!(alone::too_busy(left - 0.01, n_processors).is_some());
    }
    assert!(alone::too_busy(-0.2, 2).is_some_and(|error| error.contains("-0.20 processors of 2")));
}

#[test]
fn a_lone_user_may_run_as_many_guests_as_keep_all_processors_busy() {
    let config = |n_processors| alone::config_for(Config::default(), n_processors);
    let (few, many) = (config(1), config(192));
    assert_eq!(few.limits.n_guests_per_user, Config::default().limits.n_guests_per_user);
    assert_eq!((many.limits.n_guests_per_user, many.limits.n_guests), (8 * 192, 16 * 192));
    assert!(many.sessions.n_connections > 8 * 192 && many.sessions.n_connections_per_s > 8 * 192);
}

#[test]
fn the_command_measures_an_attack_that_is_over_at_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("pace.json");
    let mut command = Command::new(env!("CARGO_BIN_EXE_attacks"));
    command
        .args(["--pace", "--only", "exit-with-a-status", "--seconds", "3", "--rounds", "1", "--json"])
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
    // On a busy machine a window may be too short for one of those.
    for what in ["n_infos", "n_stops"] {
        assert!(
            ["alone", "attacked"].iter().any(|window| row[window][what].as_u64() > Some(0)),
            "{what}: {row}"
        );
    }
    for window in ["alone", "attacked"] {
        assert!(row[window]["n_tokens"].as_u64().is_some_and(|n| n > 0), "{row}");
        assert_eq!((&row[window]["n_wrong"], &row[window]["errors"]), (&0.into(), &Value::Array(Vec::new())));
    }
}
