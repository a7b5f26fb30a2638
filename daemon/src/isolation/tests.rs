//! Children of this test program: one of its tests, run by itself, is what a child does.

use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::channel::ChannelError;
use super::confine::FileRules;
use super::*;
use crate::guest::{GuestLimits, GuestPool, OWN_BYTES, pool_bytes};
use crate::models::Models;

const MEMORY_BYTES: u64 = 256 << 20;

fn settings() -> ProcessSettings {
    ProcessSettings {
        user: "test".to_owned(),
        memory_bytes: MEMORY_BYTES,
        data_bytes: MEMORY_BYTES,
        start_ms: 60_000,
        ..ProcessSettings::default()
    }
}

fn exe() -> PathBuf {
    std::env::current_exe().expect("it runs")
}

/// Arguments that make this program run one test, on its first thread.
fn only(test: &str) -> Vec<String> {
    let name = format!("isolation::tests::{test}");
    [&name, "--exact", "--ignored", "--nocapture", "--test-threads=1"].map(str::to_owned).to_vec()
}

async fn start(
    child: &str,
    settings: &ProcessSettings,
) -> (GuestProcess, channel::Sender, channel::Receiver) {
    GuestProcess::spawn_as(&exe(), only(child), settings).await.expect("it starts")
}

/// Ends a child without a word of the program of tests.
fn serve(serve: impl FnOnce(channel::Sender, channel::Receiver)) {
    let code = guest_worker_main(serve);
    std::process::exit(i32::from(code != std::process::ExitCode::SUCCESS));
}

#[test]
#[ignore = "a child of other tests"]
fn child_that_probes() {
    serve(probe::serve);
}

#[test]
#[ignore = "a child of other tests"]
fn child_that_calls_the_system() {
    serve(native::serve);
}

#[cfg(target_arch = "x86_64")]
#[test]
#[ignore = "a child of other tests"]
fn child_that_calls_as_32_bits() {
    serve(|mut sender, mut receiver| {
        receiver.recv(&mut Vec::new()).expect("told to begin");
        native::call_as_32_bits();
        sender.send(&[]).expect("the daemon is there");
    });
}

#[test]
#[ignore = "a child of other tests"]
fn child_with_a_thread_too_many() {
    let _other = thread::spawn(thread::park);
    serve(probe::serve);
}

#[test]
#[ignore = "a child of other tests"]
fn child_that_echoes() {
    serve(|mut sender, mut receiver| {
        let mut frame = Vec::new();
        while receiver.recv(&mut frame).is_ok() && sender.send(&frame).is_ok() {}
    });
}

#[test]
#[ignore = "a child of other tests"]
fn child_that_takes_memory() {
    serve(|mut sender, mut receiver| {
        receiver.recv(&mut Vec::new()).expect("told to begin");
        let mut taken = Vec::new();
        loop {
            taken.push(vec![1_u8; 1 << 20]);
            sender.send(&(taken.len() as u64).to_le_bytes()).expect("the daemon is there");
        }
    });
}

#[test]
#[ignore = "a child of other tests"]
fn child_that_hides_memory() {
    serve(|_sender, mut receiver| {
        receiver.recv(&mut Vec::new()).expect("told to begin");
        let mut taken = Vec::new();
        loop {
            // Memory that is filled and then only read is no longer counted as data.
            let mut map = memmap2::MmapMut::map_anon(16 << 20).expect("within the limit");
            map.fill(1);
            taken.push(map.make_read_only().expect("less than before"));
            thread::sleep(Duration::from_millis(5));
        }
    });
}

#[test]
#[ignore = "a child of other tests"]
fn child_that_makes_threads() {
    serve(|_sender, mut receiver| {
        receiver.recv(&mut Vec::new()).expect("told to begin");
        // Where the system has no more of them, it stays with those that it has.
        while thread::Builder::new().stack_size(16 << 10).spawn(thread::park).is_ok() {}
        thread::park();
    });
}

#[test]
#[ignore = "a child of other tests"]
fn child_that_makes_pools() {
    serve(|mut sender, mut receiver| {
        receiver.recv(&mut Vec::new()).expect("told to begin");
        let limits = Arc::new(GuestLimits::default().of_one_user());
        let pool = GuestPool::new(limits, Models::new(Vec::new(), Vec::new()), false, None)
            .expect("within the limit");
        sender.send(&[]).expect("the daemon is there");
        receiver.recv(&mut Vec::new()).expect("told to end");
        drop(pool);
    });
}

#[test]
#[ignore = "a child of other tests"]
fn child_that_is_a_daemon() {
    let runtime = tokio::runtime::Runtime::new().expect("made");
    runtime.block_on(async {
        let (process, _sender, _receiver) = start("child_that_echoes", &settings()).await;
        println!("\npid {}", process.pid().expect("it runs"));
        std::future::pending::<()>().await;
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_in_reach_of_a_child_and_what_it_needs_works() {
    let dir = tempfile::tempdir().expect("a folder");
    let socket = dir.path().join("socket");
    let _listener = UnixListener::bind(&socket).expect("bound");
    let (process, sender, receiver) = start("child_that_probes", &settings()).await;
    println!("{:?}", process.confinement());
    assert!(process.confinement().is_first_to_die);
    if process.confinement().files == FileRules::Missing {
        println!("skipped: this kernel has no Landlock");
    }
    let targets = probe::targets(&socket, MEMORY_BYTES);
    let found = probe::run(process, sender, receiver, &targets).await.expect("found");
    for one in found.attacks.iter().chain(&found.needs) {
        println!("{}: {}", one.what, one.error.as_ref().map_or("done", |error| &error.said));
    }
    assert_eq!(found.problems(), Vec::<String>::new());
    assert!(found.attacks.len() > 30 && found.needs.len() > 6);
}

#[tokio::test(flavor = "multi_thread")]
async fn each_call_of_native_code_is_refused_by_the_kernel() {
    let outside = native::outside();
    assert!(outside.len() == 6 && outside.iter().all(|(_, errno)| *errno == 0), "{outside:?}");

    let (mut process, mut sender, mut receiver) = start("child_that_calls_the_system", &settings()).await;
    let answered = tokio::task::spawn_blocking(move || {
        let mut frame = Vec::new();
        sender.send(&std::process::id().to_le_bytes()).expect("sent");
        receiver.recv(&mut frame).expect("it goes on after all of them");
        frame
    });
    let (wrong, n_calls) = native::wrong(&answered.await.expect("no panic"));
    assert_eq!(wrong, Vec::<String>::new());
    assert!(n_calls > 60, "{n_calls}");
    assert_eq!(process.wait().await.expect("told"), ProcessEnd::Exited { code: 0 });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_child_that_cannot_be_confined_serves_nobody() {
    let spawned = GuestProcess::spawn_as(&exe(), only("child_with_a_thread_too_many"), &settings()).await;
    let error = spawned.map(drop).expect_err("a thread would not be confined");
    assert!(matches!(&error, SpawnError::NotConfined { reason } if reason.contains("threads")), "{error}");
}

#[cfg(target_arch = "x86_64")]
#[tokio::test(flavor = "multi_thread")]
async fn a_child_that_calls_as_32_bits_is_killed() {
    let (mut process, mut sender, _receiver) = start("child_that_calls_as_32_bits", &settings()).await;
    sender.send(&[]).expect("sent");
    let end = process.wait().await.expect("told");
    // By the filter; a kernel without such calls has none to filter.
    assert!(matches!(end, ProcessEnd::Killed { signal: libc::SIGSYS | libc::SIGSEGV }), "{end:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn frames_go_there_and_back_and_the_end_is_told() {
    let (mut process, mut sender, mut receiver) = start("child_that_echoes", &settings()).await;
    let (sender, receiver) = tokio::task::spawn_blocking(move || {
        let mut got = Vec::new();
        for n_bytes in [0, 1, 1000, 3 << 20] {
            let frame: Vec<u8> = (0..n_bytes).map(|at| at as u8).collect();
            sender.send(&frame).expect("sent");
            receiver.recv(&mut got).expect("received");
            assert!(got == frame, "{n_bytes} bytes");
        }
        (sender, receiver)
    })
    .await
    .expect("no panic");
    drop(sender);
    assert_eq!(process.wait().await.expect("told"), ProcessEnd::Exited { code: 0 });
    drop(receiver);

    // Killed from outside, with somebody waiting for a frame.
    let (mut process, _sender, mut receiver) = start("child_that_echoes", &settings()).await;
    let waiting = thread::spawn(move || receiver.recv(&mut Vec::new()));
    let pid = rustix::process::Pid::from_raw(process.pid().expect("it runs").cast_signed()).expect("not 0");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("ours");
    assert_eq!(process.wait().await.expect("told"), ProcessEnd::Killed { signal: 9 });
    assert!(matches!(waiting.join().expect("no panic"), Err(ChannelError::Closed)));

    // Dropped.
    let (process, _sender, mut receiver) = start("child_that_echoes", &settings()).await;
    let pid = process.pid().expect("it runs");
    drop(process);
    assert!(matches!(receiver.recv(&mut Vec::new()), Err(ChannelError::Closed)));
    gone(pid);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_child_that_takes_more_memory_than_it_may_dies_alone() {
    let (mut process, mut sender, mut receiver) = start("child_that_takes_memory", &settings()).await;
    sender.send(&[]).expect("sent");
    let taken = tokio::task::spawn_blocking(move || {
        let (mut frame, mut n) = (Vec::new(), 0);
        while receiver.recv(&mut frame).is_ok() {
            n = u64::from_le_bytes(frame[..].try_into().expect("a number"));
        }
        n << 20
    });
    // It aborts; the allocator, where it finds that out later, touches memory that it has not got.
    let end = process.wait().await.expect("told");
    assert!(matches!(end, ProcessEnd::Killed { signal: libc::SIGABRT | libc::SIGSEGV }), "{end:?}");
    let taken = taken.await.expect("no panic");
    println!("{taken} bytes of {MEMORY_BYTES}; it said {:?}", process.last_complaint());
    if end == (ProcessEnd::Killed { signal: libc::SIGABRT }) {
        assert!(process.refused_memory().is_some_and(|said| said.contains(&MEMORY_BYTES.to_string())));
    }
    assert!((MEMORY_BYTES / 2..MEMORY_BYTES).contains(&taken), "{taken}");

    let (mut process, mut sender, _receiver) = start("child_that_hides_memory", &settings()).await;
    sender.send(&[]).expect("sent");
    let end = process.wait().await.expect("told");
    println!("{end:?}");
    assert!(matches!(end, ProcessEnd::TooMuchMemory { limit_bytes: MEMORY_BYTES, .. }), "{end:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_child_that_makes_threads_without_end_dies() {
    let settings = ProcessSettings { memory_bytes: 4 << 30, data_bytes: 4 << 30, ..settings() };
    let (mut process, mut sender, _receiver) = start("child_that_makes_threads", &settings).await;
    sender.send(&[]).expect("sent");
    let end = process.wait().await.expect("told");
    println!("{end:?}");
    assert!(matches!(end, ProcessEnd::TooManyThreads { .. }), "{end:?}");
}

/// Bytes of data that the system counts for a process, used or set aside.
fn data_of(process: &GuestProcess) -> u64 {
    let pid = process.pid().expect("it runs");
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmData:")).expect("it is counted");
    let n_kib: u64 = line.trim().trim_end_matches(" kB").parse().expect("a number");
    n_kib << 10
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_pools_set_aside_is_known_before() {
    let limits = GuestLimits::default();
    let pools = pool_bytes(&limits.of_one_user());
    let settings =
        ProcessSettings { data_bytes: limits.process_data_bytes(settings().memory_bytes), ..settings() };
    let (process, mut sender, mut receiver) = start("child_that_makes_pools", &settings).await;
    let before = data_of(&process);
    sender.send(&[]).expect("sent");
    let receiving = tokio::task::spawn_blocking(move || {
        receiver.recv(&mut Vec::new()).expect("it has them");
        receiver
    });
    let receiver = receiving.await.expect("no panic");
    let added = data_of(&process) - before;
    println!("{added} bytes set aside, {pools} of them known before, {} bytes used", process.used_bytes());
    assert!((pools..pools + OWN_BYTES).contains(&added), "{added} bytes, pools {pools}");
    assert!(process.used_bytes() < MEMORY_BYTES / 2, "nothing of that is used");
    drop((process, sender, receiver));
}

/// Waits until a process is no longer there.
fn gone(pid: u32) {
    let start = Instant::now();
    let is_there = || {
        let status = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // What has ended and was not asked for is there as a zombie.
        !status.is_empty() && !status.contains(") Z ")
    };
    while is_there() {
        assert!(start.elapsed() < Duration::from_secs(20), "process {pid} goes on");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_child_dies_with_its_daemon() {
    use std::io::{BufRead as _, BufReader};

    let mut daemon = Command::new(exe())
        .args(only("child_that_is_a_daemon"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("it starts");
    let lines = BufReader::new(daemon.stdout.take().expect("piped")).lines();
    let pid =
        lines.map(|line| line.expect("text")).find_map(|line| line.strip_prefix("pid ").map(str::to_owned));
    let pid: u32 = pid.expect("it has a child").parse().expect("a number");
    assert!(std::path::Path::new(&format!("/proc/{pid}")).exists());
    daemon.kill().expect("killed");
    daemon.wait().expect("told");
    gone(pid);
}

#[tokio::test]
async fn what_is_no_guests_process_is_an_error() {
    let spawn = async |exe: &str, start_ms| {
        let settings = ProcessSettings { start_ms, ..settings() };
        GuestProcess::spawn(std::path::Path::new(exe), &settings).await.map(drop).expect_err("it is none")
    };
    let error = spawn("/no/such/file", 60_000).await;
    assert!(matches!(error, SpawnError::Exe { .. }), "{error}");
    let error = spawn("/bin/false", 60_000).await;
    assert!(matches!(&error, SpawnError::Died { status, .. } if status.contains('1')), "{error}");
    let dir = tempfile::tempdir().expect("a folder");
    let script = dir.path().join("script");
    let write = |line: &str| {
        use std::os::unix::fs::PermissionsExt as _;
        std::fs::write(&script, format!("#!/bin/sh\n{line}\n")).expect("written");
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o700)).expect("executable");
        script.to_str().expect("text").to_owned()
    };
    let error = spawn(&write("echo why >&2; exit 3"), 60_000).await;
    assert!(matches!(&error, SpawnError::Died { said: Some(said), .. } if said == "why"), "{error}");
    let error = spawn(&write("exec /bin/sleep 600"), 200).await;
    assert!(matches!(error, SpawnError::Late { limit_ms: 200 }), "{error}");
}
