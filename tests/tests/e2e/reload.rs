//! A configuration that is read again while the daemon runs.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::process::{Pid, Signal, kill_process};
use trellis::config::{Config, ConfigError, NameOrId, PermissionSettings, Who};
use trellis::reload::Origin;
use trellis::session::{Actor, SessionLimits};
use trellis_client::{Client, Program, ReloadInfo, SettingChange};
use trellis_tests::daemons::{self, Served, collect, nothing_is_held, run, started, until, with};
use trellis_tests::engines::block_on;
use trellis_tests::guests;
use trellis_tests::terminal::Terminal;

use crate::exe;
use crate::identity::client;

const ALICE: Actor = Actor { uid: 40_001, gid: 40_001 };

struct File(PathBuf);

impl Origin for File {
    fn read(&self) -> Result<Config, ConfigError> {
        Config::load(&self.0)
    }
}

fn text(config: &Config) -> String {
    toml::to_string(config).expect("settings can be written down")
}

fn names(changes: &[SettingChange]) -> Vec<&str> {
    changes.iter().map(|change| change.name.as_str()).collect()
}

fn hang_up(pid: u32) {
    let pid = Pid::from_raw(i32::try_from(pid).expect("a process")).expect("not 0");
    kill_process(pid, Signal::HUP).expect("it runs");
}

async fn limit(client: &Client, name: &str) -> Option<u64> {
    let limits = client.limits().await.expect("it answers");
    limits.into_iter().find(|limit| limit.name == name).expect(name).value
}

#[test]
fn who_may_do_what_changes_for_what_is_asked_next_and_guests_go_on() {
    block_on(async {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("trellis.toml");
        let config = daemons::config(exe());
        let daemon = Arc::new(daemons::start(&config));
        let (alice, operator) = (client(&daemon, ALICE).await, client(&daemon, Actor::this_process()).await);
        let nothing = operator.reload().await.expect_err("it has no file");
        assert_eq!(nothing.code().map(|code| code.as_str()), Some("unsupported"));
        daemon.set_origin(Arc::new(File(path.clone())));
        let wasm = guests::hostile();
        let mut guest = alice.start(Program::wasm(wasm.clone()), with(&["echo"])).await.expect("connected");
        started(&mut guest).await;

        let refused = alice.reload().await.expect_err("that is the operator's");
        assert_eq!(refused.code().map(|code| code.as_str()), Some("permission_denied"));
        let run_by = |run: Vec<Who>| PermissionSettings { run, ..PermissionSettings::default() };
        let permissions = run_by(vec![Who::User(NameOrId::Id(40_002))]);
        let changed = Config { permissions, kv_bytes: Some(300 << 20), ..config.clone() };
        fs::write(&path, text(&changed)).expect("written");
        let ReloadInfo { changed, waiting } = operator.reload().await.expect("it is well");
        assert_eq!((names(&changed), names(&waiting)), (vec!["permissions.run"], vec!["kv_bytes"]));
        assert_eq!(
            (changed[0].before.as_deref(), changed[0].after.as_deref()),
            (Some("[\"*\"]"), Some("[40002]"))
        );
        let ended = run(&alice, &wasm, with(&["exit-well"])).await;
        assert_eq!(ended.reason().code.as_str(), "permission_denied");
        assert_eq!(alice.info().await.expect("it answers").permissions.expect("it says so"), ["upload"]);

        // One that is wrong changes nothing, be it in what is asked last.
        let sessions = SessionLimits { n_requests: 9, ..config.sessions.clone() };
        let permissions =
            run_by(vec![Who::Everybody, Who::Group(NameOrId::Name("no such group".to_owned()))]);
        let wrong = text(&Config { permissions, sessions, ..config.clone() });
        for wrong in [wrong, "[permissions]\nruns = []".to_owned(), "models = ['no-such-model']".to_owned()] {
            fs::write(&path, &wrong).expect("written");
            let refused = operator.reload().await.expect_err("it is wrong");
            assert_eq!(refused.code().map(|code| code.as_str()), Some("invalid_configuration"), "{refused}");
            assert!(refused.to_string().contains("nothing has changed"), "{refused}");
            assert_eq!(limit(&operator, "sessions.n_requests").await, Some(256));
            assert_eq!(alice.info().await.expect("it answers").permissions.expect("it says so"), ["upload"]);
        }

        // What has begun before all that goes on.
        guest.send("still there").await.expect("it runs");
        guest.end_messages().await.expect("it runs");
        assert_eq!(collect(guest).await.well().text, "still there");
        fs::write(&path, text(&config)).expect("written");
        let info = operator.reload().await.expect("it is well");
        assert_eq!((names(&info.changed), names(&info.waiting)), (vec!["permissions.run"], vec![]));
        let _ = run(&alice, &wasm, with(&["exit-well"])).await.well();
        drop((alice, operator));
        nothing_is_held(&daemon).await;
    });
}

fn reload(served: &Served) -> (Option<i32>, String, String) {
    let ended = daemons::output(&mut served.trellis(&["reload"]));
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("UTF-8");
    (ended.status.code(), text(&ended.stdout), text(&ended.stderr))
}

#[test]
fn a_hang_up_and_a_command_have_a_daemon_read_its_file_again() {
    let config = daemons::config(exe());
    let served = Served::start_with(exe(), &config, &[]);
    assert_eq!(reload(&served).1, "nothing has changed\n");
    block_on(async {
        let client = Client::connect_to(&served.socket()).await.expect("connected");
        let program = Program::wasm(guests::hostile());
        let mut guest = client.start(program, with(&["echo"])).await.expect("connected");
        started(&mut guest).await;
        // The socket is that of the command line, whatever the file says.
        let sessions = SessionLimits { message_bytes: 10, ..config.sessions.clone() };
        let socket = Some(PathBuf::from("/nowhere/trellis.sock"));
        let changed = Config { sessions, socket, kv_bytes: Some(300 << 20), ..config.clone() };
        fs::write(served.config(), text(&changed)).expect("written");
        hang_up(served.pid());
        until("it holds", async || limit(&client, "sessions.message_bytes").await == Some(10)).await;
        let refused = guest.send("01234567890").await.expect_err("it is too long now");
        assert_eq!(refused.code().map(|code| code.as_str()), Some("limit_exceeded"), "{refused}");

        let (status, told, _) = reload(&served);
        assert!(
            status == Some(0) && told.starts_with("nothing has changed now; waits for a restart:\n"),
            "{told}"
        );
        assert!(
            told.contains("kv_bytes") && told.contains("314572800") && !told.contains("socket"),
            "{told}"
        );

        fs::write(served.config(), "[sessions]\nmesage_bytes = 20\n").expect("written");
        let (status, _, complaint) = reload(&served);
        assert_eq!(status, Some(2), "{complaint}");
        assert!(complaint.contains("did you mean \"message_bytes\"?"), "{complaint}");
        assert!(complaint.contains("trellis.toml") && complaint.contains("line 2"), "{complaint}");
        hang_up(served.pid());
        until("the log says so", async || {
            served.log().matches("the configuration is wrong, and nothing of it has changed").count() == 2
        })
        .await;
        assert_eq!(limit(&client, "sessions.message_bytes").await, Some(10));
        guest.send("well").await.expect("it runs");
        guest.end_messages().await.expect("it runs");
        assert_eq!(collect(guest).await.well().text, "well");
    });
}

#[test]
fn what_is_logged_is_changed() {
    let config = daemons::config(exe());
    let served = Served::start_with(exe(), &config, &[]);
    let with_log = |log: &str| text(&Config { log: log.parse().expect("a level"), ..config.clone() });
    fs::write(served.config(), with_log("off")).expect("written");
    assert!(reload(&served).1.contains("log"));
    let before = served.log();
    fs::write(served.config(), "models = 7").expect("written");
    assert_eq!(reload(&served).0, Some(2));
    assert_eq!(served.log(), before, "nothing more is logged");
    fs::write(served.config(), with_log("info")).expect("written");
    assert_eq!(reload(&served).0, Some(0));
    assert!(served.log().len() > before.len());
}

#[test]
fn a_daemon_whose_terminal_goes_ends_with_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    fs::write(at("trellis.toml"), text(&daemons::config(exe()))).expect("written");
    let (socket, file) = (at("trellis.sock"), at("trellis.toml"));
    let said = |path: &Path| path.to_str().expect("UTF-8").to_owned();
    let arguments = ["serve", "--socket", &said(&socket), "--config", &said(&file)];
    let Some(terminal) = Terminal::run(exe(), &arguments, &[]) else { return };
    block_on(async {
        let pid = async || Some(Client::connect_to(&socket).await.ok()?.info().await.ok()?.pid);
        until("it serves", async || pid().await.is_some()).await;
        // The terminal is there: this one only has the file read again.
        hang_up(pid().await.expect("it serves"));
        let mut client = Client::connect_to(&socket).await.expect("connected");
        client.info().await.expect("it goes on");
        drop(client);
        tokio::time::sleep(std::time::Duration::from_millis(300)).await;
        client = Client::connect_to(&socket).await.expect("it goes on");
        drop(client);
        drop(terminal);
        until("it has ended", async || !socket.exists()).await;
    });
}
