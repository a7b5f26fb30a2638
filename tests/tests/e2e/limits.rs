//! The table of limits, as the daemon, its guests, the list of guests and the log show it: one name and one figure for each.

use std::fs;
use std::process::Output;
use std::time::{Duration, Instant};

use serde_json::Value;
use trellis::config::Config;
use trellis::guest::GuestLimits;
use trellis_client::{Client, Event, GuestAmounts, Program};
use trellis_tests::daemons::{self, Served, output, with};
use trellis_tests::engines::block_on;
use trellis_tests::guests;

use crate::exe;

const MEMORY_BYTES: usize = 24 << 20;

/// A file that sets a few things, the usual device and folders aside.
fn settings() -> String {
    let Config { cache_dir, compile_exe, device, .. } = daemons::config(exe());
    let path = |path: Option<std::path::PathBuf>| path.expect("the tests have one").display().to_string();
    let (cache_dir, compile_exe, device) = (path(cache_dir), path(compile_exe), String::from(device));
    format!(
        "cache_dir = {cache_dir:?}\ncompile_exe = {compile_exe:?}\ndevice = {device:?}\nisolation = 'thread'\n\
         [limits]\ncpu_ms = 600000\ndeadline_ms = 1200000\ncompile_ms = 600000\nmemory_bytes = {MEMORY_BYTES}\nn_handles = 1024\n\
         [sessions]\nn_connections = 5\n"
    )
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

fn table(served: &Served) -> Vec<Value> {
    let ran = output(&mut served.trellis(&["limits", "--json"]));
    assert!(ran.status.success(), "{}", said(&ran));
    serde_json::from_slice(&ran.stdout).expect("JSON")
}

fn row<'a>(table: &'a [Value], name: &str) -> &'a Value {
    table.iter().find(|row| row["name"] == name).unwrap_or_else(|| panic!("no {name} in {table:?}"))
}

#[test]
fn a_daemon_says_what_bounds_its_users_who_set_it_and_what_is_in_use() {
    let served = Served::start_on(exe(), &settings(), &[]);
    let idle = table(&served);
    for (name, value, source, scope, unit) in [
        ("limits.memory_bytes", MEMORY_BYTES as u64, "file", "guest", "bytes"),
        ("limits.n_handles", 1024, "file", "guest", "count"),
        ("limits.n_messages", 64, "default", "guest", "count"),
        ("limits.cpu_ms", 600_000, "file", "guest", "ms"),
        ("budgets.session.n_contexts", 4096, "default", "session", "count"),
        ("budgets.user.n_pages", 65_536, "default", "user", "count"),
        ("sessions.n_connections", 5, "file", "user", "count"),
        ("sessions.hello_ms", 5_000, "default", "session", "ms"),
        ("n_step_rows", 1024, "machine", "daemon", "count"),
        ("limits.n_guests", 256, "default", "daemon", "count"),
    ] {
        let row = row(&idle, name);
        let seen =
            (row["value"].as_u64(), row["source"].as_str(), row["scope"].as_str(), row["unit"].as_str());
        assert_eq!(seen, (Some(value), Some(source), Some(scope), Some(unit)), "{row}");
        assert!(row["about"].as_str().is_some_and(|about| about.ends_with('.')), "{row}");
    }
    assert!(row(&idle, "kv_bytes")["value"].as_u64() > Some(1 << 20));
    // This user runs the daemon, and sees what all have.
    let used = |table: &[Value], name: &str| {
        let row = row(table, name);
        (row["used"].as_u64(), row["used_by_all"].as_u64())
    };
    // A connection that was closed is counted until the daemon has seen it.
    let comes_to = |amounts: &[(&str, u64)]| {
        let begun = Instant::now();
        loop {
            let table = table(&served);
            let seen: Vec<_> = amounts.iter().map(|(name, _)| used(&table, name)).collect();
            if amounts.iter().map(|(_, amount)| (Some(*amount), Some(*amount))).eq(seen.iter().copied()) {
                return table;
            }
            assert!(begun.elapsed() < daemons::PATIENCE, "{seen:?} for {amounts:?}");
        }
    };
    comes_to(&[
        ("limits.n_guests", 0),
        ("budgets.user.n_contexts", 0),
        ("budgets.user.n_tokens", 0),
        ("sessions.n_connections", 1),
        ("sessions.n_uploads", 0),
    ]);
    assert_eq!(used(&idle, "limits.cpu_ms"), (None, None));

    let folder = tempfile::tempdir().expect("a folder");
    let component = folder.path().join("hostile.wasm");
    fs::write(&component, guests::hostile()).expect("written");
    let component = component.to_str().expect("UTF-8");
    let mut guest = served.trellis(&["run", component, "limits"]);
    let mut guest = guest.stdin(std::process::Stdio::piped()).spawn().expect("it runs");
    let busy = comes_to(&[
        ("limits.n_guests", 1),
        ("limits.n_guests_per_user", 1),
        ("budgets.user.n_contexts", 1),
        ("budgets.user.n_pages", 1),
        ("sessions.n_connections", 2),
    ]);
    assert!(used(&busy, "budgets.user.host_bytes").0 > Some(0));
    // The engine is asked before the user's account is read: the first table with the page may be without its KV.
    let (of_user, of_all) = used(&table(&served), "kv_bytes");
    assert!(of_user.is_none() && of_all > Some(0), "{of_user:?} {of_all:?}");
    assert!(used(&busy, "limits.n_programs").1 >= Some(1));

    let ran = output(&mut served.trellis(&["limits"]));
    let text = said(&ran);
    assert!(ran.status.success() && text.lines().all(|line| line.chars().count() <= 100), "{text}");
    assert!(text.contains("ALL USERS") && text.contains("\neach user\n"), "{text}");
    let line = text.lines().find(|line| line.contains(" limits.memory_bytes ")).expect("a row");
    assert_eq!(
        line.split_whitespace().collect::<Vec<_>>(),
        ["limits.memory_bytes", "24", "MiB", "file", "-", "-"]
    );
    let text = said(&output(&mut served.trellis(&["limits", "hello_ms"])));
    assert!(text.contains("sessions.hello_ms: Time that a client may take to say hello."), "{text}");
    assert!(!text.contains("cpu_ms"), "{text}");
    let ran = output(&mut served.trellis(&["limits", "abacus"]));
    assert!(ran.status.code() == Some(2) && said(&ran).contains("no limit has \"abacus\""), "{}", said(&ran));

    let listed = output(&mut served.trellis(&["ps", "--json"]));
    let listed: Value = serde_json::from_slice(&listed.stdout).expect("JSON");
    let names = ["memory_bytes", "cpu_ms", "n_pages", "n_contexts", "n_tokens", "host_bytes"];
    for name in names {
        let (used, limit) = (&listed[0]["used"][name], &listed[0]["limits"][name]);
        assert!(used.as_u64() <= limit.as_u64() && used.is_u64(), "{name}: {used} of {limit}");
    }
    assert_eq!(listed[0]["limits"]["memory_bytes"], MEMORY_BYTES);
    assert_eq!(listed[0]["used"]["n_contexts"], 1);
    drop(guest.stdin.take());
    assert!(daemons::wait(&mut guest).success());

    // The number of connections is that of the file.
    block_on(async {
        let begun = Instant::now();
        let mut clients = Vec::new();
        while clients.len() < 5 {
            clients.extend(Client::connect_to(&served.socket()).await.ok());
            assert!(begun.elapsed() < daemons::PATIENCE, "{} connections", clients.len());
        }
        let refused = match Client::connect_to(&served.socket()).await {
            Ok(client) => client.info().await.expect_err("there are five"),
            Err(error) => error,
        };
        assert!(refused.to_string().contains("more than the limit of 5 connections"), "{refused}");
    });
    comes_to(&[("sessions.n_connections", 1)]);

    // How a guest ended is in the log where a limit did it: by the names of the table.
    assert!(!served.log().contains("has ended a guest"), "{}", served.log());
    assert!(!output(&mut served.trellis(&["run", component, "memory"])).status.success());
    let log = served.log();
    let line = log.lines().find(|line| line.contains("a limit has ended a guest")).expect("it is logged");
    for name in names {
        assert!(line.contains(&format!(" {name}=")), "{name} in {line}");
    }
    assert!(
        line.contains("limit=\"memory_bytes\"") && line.contains(&format!("the limit is {MEMORY_BYTES}")),
        "{line}"
    );
    let memory =
        line.split(" memory_bytes=").nth(1).and_then(|rest| rest.split(' ').next()).expect("a number");
    let memory: usize = memory.parse().expect("a number");
    assert!((MEMORY_BYTES / 2..=MEMORY_BYTES).contains(&memory), "what it held before it was freed: {line}");
}

#[test]
fn a_file_can_be_looked_at_without_a_daemon() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("trellis.toml");
    let path = path.to_str().expect("UTF-8");
    let run = |arguments: &[&str]| {
        output(daemons::trellis(exe()).args(["limits", "--config", path]).args(arguments))
    };
    fs::write(path, settings()).expect("written");
    let ran = run(&["--json"]);
    let table: Vec<Value> = serde_json::from_slice(&ran.stdout).unwrap_or_else(|_| panic!("{}", said(&ran)));
    let sources = |source: &str| -> Vec<&str> {
        let rows = table.iter().filter(|row| row["source"] == source);
        rows.map(|row| row["name"].as_str().expect("a name")).collect()
    };
    let of_file = [
        "limits.memory_bytes",
        "limits.compile_ms",
        "limits.cpu_ms",
        "limits.deadline_ms",
        "limits.n_handles",
        "sessions.n_connections",
    ];
    assert_eq!(sources("file"), of_file);
    let of_machine = [
        "limits.compile_memory_bytes",
        "budgets.session.host_bytes",
        "limits.process_memory_bytes",
        "budgets.user.host_bytes",
        "budgets.daemon.host_bytes",
        "kv_bytes",
        "model_bytes",
        "kv_host_bytes",
        "n_step_tokens",
        "n_step_rows",
    ];
    assert_eq!(sources("machine"), of_machine);
    assert!(table.iter().all(|row| row.get("used").is_none()), "{table:?}");

    fs::write(path, "[classes.research]\nusers = ['nobody-of-this-name']\n").expect("written");
    let ran = run(&[]);
    let unknown = "classes.research: this machine has no user \"nobody-of-this-name\"";
    assert!(ran.status.code() == Some(2) && said(&ran).contains(unknown), "{}", said(&ran));
    let ran = output(daemons::trellis(exe()).args(["doctor", "--config", path]));
    assert!(ran.status.code() == Some(1) && said(&ran).contains(unknown), "{}", said(&ran));

    fs::write(path, "[sessions]\nn_conections = 7\n").expect("written");
    let ran = run(&[]);
    assert_eq!(ran.status.code(), Some(2));
    let text = said(&ran);
    assert!(
        text.contains("unknown field `n_conections`") && text.contains("did you mean \"n_connections\"?"),
        "{text}"
    );
}

#[test]
fn a_guest_sees_the_figures_that_others_see_of_it() {
    block_on(async {
        let limits = GuestLimits { memory_bytes: MEMORY_BYTES, n_pages: 1 << 20, ..daemons::limits() };
        let daemon = daemons::start(&Config { limits, ..daemons::config(exe()) });
        let client = daemon.connect().await.expect("connected");
        let program = Program::wasm(guests::hostile());
        let mut guest = client.start(program, with(&["limits"])).await.expect("the connection stands");
        let seen: Vec<(String, u64, Option<u64>)> = loop {
            match guest.next().await.expect("it sends its limits").expect("it goes on") {
                Event::Json { json } => break serde_json::from_str(&json).expect("a list"),
                Event::Progress { .. } | Event::Started { .. } => {}
                other => panic!("{other:?}"),
            }
        };
        let of = |name: &str| {
            let (_, limit, used) = seen.iter().find(|(other, ..)| other == name).expect("it is bounded");
            (*limit, *used)
        };
        let listed = client.ps().await.expect("the daemon answers").remove(0);
        let used = listed.used.expect("it is said");
        let GuestAmounts { memory_bytes, cpu_ms, n_pages, n_contexts, n_tokens, host_bytes } =
            listed.limits.expect("it is said");
        assert_eq!(of("memory_bytes"), (memory_bytes, Some(used.memory_bytes)));
        assert_eq!(of("n_pages"), (n_pages, Some(used.n_pages)));
        assert_eq!(of("n_contexts"), (n_contexts, Some(used.n_contexts)));
        assert_eq!(of("n_tokens"), (n_tokens, Some(used.n_tokens)));
        assert_eq!(of("host_bytes"), (host_bytes, Some(used.host_bytes)));
        assert_eq!(of("cpu_ms").0, cpu_ms);
        assert!(of("cpu_ms").1 <= Some(used.cpu_ms), "{:?} then, {used:?} now", of("cpu_ms"));
        assert_eq!(n_pages, 65_536, "no more than its user's and its session's");
        assert!(
            (used.n_contexts, used.n_pages) == (1, 1) && used.host_bytes > 0 && used.n_tokens > 1,
            "{used:?}"
        );

        let daemon_wide = client.limits().await.expect("the daemon answers");
        for (name, limit, _) in &seen {
            let row = daemon_wide.iter().find(|row| row.name == format!("limits.{name}")).expect(name);
            assert_eq!(row.scope, "guest");
            let is_narrowed = name == "n_pages";
            assert_eq!(row.value == Some(*limit), !is_narrowed, "{name}: {limit}, {row:?}");
        }
        let sources = |source: &str| daemon_wide.iter().filter(|row| row.source == source).count();
        assert!(sources("program") >= 5 && sources("file") == 0, "the tests start it in their own process");
        drop(guest);
        daemons::nothing_is_held(&daemon).await;
    });
}

/// How long a user waits for its new class who has left: less than a process of guests is kept for the next one (60 s).
const CLASS_TIME: Duration = Duration::from_secs(40);

/// A user has what its class says, in the place of what each user has, and what a class says is read again.
#[test]
fn a_class_says_how_much_each_of_its_users_may_have() {
    user_of_a_class("thread");
}

#[cfg(target_os = "linux")]
#[test]
fn a_class_says_how_much_each_of_its_users_may_have_by_process() {
    user_of_a_class("process");
}

fn user_of_a_class(isolation: &str) {
    let uid = rustix::process::getuid().as_raw();
    let with_class = |n_guests: u32| {
        format!(
            "{}[classes.few]\nusers = [{uid}]\n[classes.few.limits]\nn_guests = {n_guests}\nn_contexts = 3\n\
             n_detached = 1\nn_connections = 9\nsaved_disk_bytes = 5000\n[classes.others.limits]\nn_pages = 7\n",
            settings().replace("isolation = 'thread'", &format!("isolation = '{isolation}'"))
        )
    };
    let served = Served::start_on(exe(), &with_class(1), &[]);
    let seen = |name: &str| {
        let table = table(&served);
        let row = row(&table, name);
        (row["value"].as_u64(), row["source"].as_str().map(str::to_owned))
    };
    assert_eq!(seen("limits.n_guests_per_user"), (Some(1), Some("class".to_owned())));
    assert_eq!(seen("budgets.user.n_contexts"), (Some(3), Some("class".to_owned())));
    assert_eq!(seen("budgets.user.n_pages"), (Some(65_536), Some("default".to_owned())), "of another class");
    let info = said(&output(&mut served.trellis(&["info"])));
    // On lines of 80 columns.
    let info = info.split_whitespace().collect::<Vec<_>>().join(" ");
    let of_class = "n_connections 9, n_contexts 3, n_detached 1, n_guests 1, saved_disk_bytes 5000";
    assert!(info.contains(&format!("few, a share of 1, rank 0, {of_class}")), "{info}");
    let of_class = |most| (Some(most), Some("class".to_owned()));
    assert_eq!(seen("sessions.n_detached"), of_class(1));
    assert_eq!(seen("sessions.n_connections"), of_class(9));
    assert_eq!(seen("saved_disk_bytes_per_user"), of_class(5000));

    block_on(async {
        let client = Client::connect_to(&served.socket()).await.expect("connected");
        let program = || Program::wasm(guests::hostile());
        let body = daemons::run(&client, &guests::hostile(), with(&["contexts"])).await.reason().clone();
        assert!(
            body.message.contains("contexts of the ") && body.message.contains("the limit is 3"),
            "{body:?}"
        );
        let mut first = client.start(program(), with(&["endless"])).await.expect("started");
        daemons::started(&mut first).await;
        let refused = daemons::run(&client, &guests::hostile(), with(&["error"])).await.reason().clone();
        assert_eq!((refused.code.as_str(), refused.limit), ("limit_exceeded", Some(1)), "{refused:?}");
    });

    // Nobody of the class is there any more: what it says now holds for who comes.
    fs::write(served.config(), with_class(2)).expect("written");
    let reloaded = output(&mut served.trellis(&["reload"]));
    assert!(
        reloaded.status.success() && said(&reloaded).contains("classes.few.limits.n_guests"),
        "{}",
        said(&reloaded)
    );
    let begun = Instant::now();
    while seen("limits.n_guests_per_user").0 != Some(2) {
        assert!(begun.elapsed() < CLASS_TIME, "{:?}", seen("limits.n_guests_per_user"));
        // Whoever asks is there as well.
        std::thread::sleep(Duration::from_millis(500));
    }
}
