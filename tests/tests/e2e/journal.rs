//! The log as systemd's journal takes it: its socket is one of the test's, over which a mount of the daemon's own lies.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::net::UnixDatagram;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use trellis::config::{Config, LogFormat};
use trellis_tests::daemons::{self, PATIENCE, output};

use crate::exe;

const SCRIPT: &str = "mount -t tmpfs none /run && mkdir -p /run/systemd/journal \
                      && mount --bind \"$0\" /run/systemd/journal && exec \"$@\"";

/// A daemon that is killed when dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The fields of an entry in the journal's native protocol.
fn fields(entry: &[u8]) -> BTreeMap<String, String> {
    let mut fields = BTreeMap::new();
    let mut rest = entry;
    while let Some(end) = rest.iter().position(|&byte| byte == b'\n') {
        let line = std::str::from_utf8(&rest[..end]).expect("a name is text");
        let (name, value) = match line.split_once('=') {
            Some((name, value)) => {
                rest = &rest[end + 1..];
                (name, value.to_owned())
            }
            // With its length in 64 bits before it.
            None => {
                let (length, after) = rest[end + 1..].split_first_chunk::<8>().expect("a length");
                let n_bytes = usize::try_from(u64::from_le_bytes(*length)).expect("it fits");
                rest = &after[n_bytes + 1..];
                (line, String::from_utf8(after[..n_bytes].to_vec()).expect("text"))
            }
        };
        fields.insert(name.to_owned(), value);
    }
    assert!(rest.is_empty(), "an entry ends with a line: {entry:?}");
    fields
}

#[test]
fn the_journal_is_given_entries_with_their_fields() {
    // Not everybody may mount something.
    if !Command::new("unshare").args(["--mount", "true"]).status().is_ok_and(|status| status.success()) {
        eprintln!("not tried: this user may make no mounts of its own");
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(at("journal")).expect("made");
    let journal = UnixDatagram::bind(at("journal/socket")).expect("bound");
    journal.set_read_timeout(Some(Duration::from_secs(1))).expect("set");
    let config = Config { log_format: LogFormat::Journald, ..daemons::config(exe()) };
    fs::write(at("trellis.toml"), toml::to_string(&config).expect("settings")).expect("written");
    let mut daemon = daemons::trellis("unshare");
    daemon.args(["--mount", "sh", "-c", SCRIPT]).arg(at("journal")).args([exe(), "serve", "--socket"]);
    daemon.arg(at("t.sock")).arg("--config").arg(at("trellis.toml"));
    daemon.stderr(fs::File::create(at("log")).expect("made"));
    let _daemon = Running(daemon.spawn().expect("it starts"));

    let begun = Instant::now();
    let (mut bytes, mut is_asked) = (vec![0; 1 << 18], false);
    let loaded = loop {
        assert!(begun.elapsed() < PATIENCE, "{}", fs::read_to_string(at("log")).unwrap_or_default());
        if !is_asked {
            let mut load = daemons::trellis(exe());
            is_asked = output(load.args(["load", "draft", "--socket"]).arg(at("t.sock"))).status.success();
        }
        let Ok(n_bytes) = journal.recv(&mut bytes) else { continue };
        let entry = fields(&bytes[..n_bytes]);
        for name in ["PRIORITY", "MESSAGE", "SYSLOG_IDENTIFIER", "TARGET"] {
            assert!(entry.contains_key(name), "{name}: {entry:?}");
        }
        assert_eq!(entry["SYSLOG_IDENTIFIER"], "trellis");
        if entry.get("F_MODEL").is_some_and(|model| model == "draft") {
            break entry;
        }
    };
    assert_eq!(loaded["PRIORITY"], "6", "what is said all the time is information: {loaded:?}");
    assert!(loaded["MESSAGE"].contains("model"), "{loaded:?}");
}
