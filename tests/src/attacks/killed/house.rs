//! Where one daemon after the other lives: their folder and socket, and what a life leaves there and among processes.

use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant, SystemTime};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tokio::time::timeout;
use trellis::config::Config;
use trellis_client::Client;

use crate::attacks::saved::{self, Kind};

/// How long a daemon may take to start, or to end by itself.
const START_TIME_MAX: Duration = Duration::from_secs(60);

/// How long one try to reach a daemon may take: another looks whether it has ended.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(5);

/// Within this after a daemon, its children are gone.
pub(super) const GONE_TIME_MAX: Duration = Duration::from_secs(1);

/// The folder of all lives.
#[derive(Debug)]
pub(super) struct House {
    folder: TempDir,
    /// The executable under a name of its own, by which the processes of this house are known.
    trellis: PathBuf,
}

/// One daemon's life.
#[derive(Debug)]
pub(super) struct Life {
    child: Child,
    pub(super) begun: Instant,
    began: SystemTime,
}

/// What lies in the folder.
#[derive(Debug, Default)]
pub(super) struct Left {
    /// Compiled components, whole ones.
    pub(super) n_components: usize,
    /// Files that were being written.
    pub(super) n_half_written: usize,
    /// Of those, the files of earlier daemons.
    pub(super) n_of_others: usize,
    /// What should not be there.
    pub(super) complaints: Vec<String>,
}

impl House {
    pub(super) fn open(trellis: &Path, config: &Config) -> io::Result<Self> {
        let folder = tempfile::Builder::new().prefix("trellis-killed").tempdir()?;
        let house = Self { trellis: folder.path().canonicalize()?.join("trellis"), folder };
        if fs::hard_link(trellis, &house.trellis).is_err() {
            fs::copy(trellis, &house.trellis)?;
        }
        fs::create_dir(house.place("tmp"))?;
        let config = Config {
            cache_dir: Some(house.place("cache")),
            compile_exe: None,
            ..saved::on_disk(config.clone(), house.folder.path())
        };
        fs::write(house.place("trellis.toml"), toml::to_string(&config).map_err(io::Error::other)?)?;
        Ok(house)
    }

    fn place(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.place("trellis.sock")
    }

    /// What all daemons have logged.
    pub(super) fn log(&self) -> String {
        fs::read_to_string(self.place("trellis.log")).unwrap_or_default()
    }

    /// Starts a daemon, and does not wait for it.
    pub(super) fn start(&self) -> io::Result<Life> {
        let mut command = Command::new(&self.trellis);
        crate::guests::clean(&mut command).env_remove("TRELLIS_SOCKET").env("TMPDIR", self.place("tmp"));
        command.args(["serve", "--log", "warn", "--socket"]).arg(self.socket());
        command.arg("--config").arg(self.place("trellis.toml"));
        let log = File::options().create(true).append(true).open(self.place("trellis.log"))?;
        let (begun, began) = (Instant::now(), SystemTime::now());
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn()?;
        Ok(Life { child, begun, began })
    }

    /// Waits until a daemon answers; how long that took from its start. It takes connections before it has opened anything.
    pub(super) fn ready(&self, life: &mut Life, runtime: &Runtime) -> io::Result<Duration> {
        let answers = || async { timeout(ANSWER_TIME_MAX, Client::connect_to(self.socket())).await };
        while !matches!(runtime.block_on(answers()), Ok(Ok(_))) {
            if let Some(status) = life.child.try_wait()? {
                let message = format!("the daemon has not started, {status}: {}", self.log());
                return Err(io::Error::other(message));
            }
            if life.begun.elapsed() > START_TIME_MAX {
                return Err(io::Error::other(format!("the daemon is not ready after {START_TIME_MAX:?}")));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(life.begun.elapsed())
    }

    /// What the processes of this house that live were started as.
    pub(super) fn processes(&self) -> io::Result<Vec<String>> {
        let pids = fs::read_dir("/proc")?
            .flatten()
            .filter(|entry| entry.file_name().as_bytes().first().is_some_and(u8::is_ascii_digit));
        // One that has ended and that its parent has not asked for has an empty command line.
        let commands = pids.filter_map(|entry| fs::read(entry.path().join("cmdline")).ok());
        Ok(commands
            .filter_map(|command| {
                let mut words = command.split(|&byte| byte == 0);
                let is_ours = words.next() == Some(self.trellis.as_os_str().as_bytes());
                is_ours.then(|| String::from_utf8_lossy(words.next().unwrap_or_default()).into_owned())
            })
            .collect())
    }

    /// Waits until no process of this house is there: how long that took, and what is there when its time is over.
    pub(super) fn gone(&self) -> io::Result<(Duration, Vec<String>)> {
        let begun = Instant::now();
        loop {
            let there = self.processes()?;
            if there.is_empty() || begun.elapsed() > GONE_TIME_MAX {
                return Ok((begun.elapsed(), there));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// What lies in the folder; components that an earlier life than this one has written are not read again.
    pub(super) fn left(&self, life: &Life) -> io::Result<Left> {
        let mut left = Left::default();
        let expected = [
            "cache",
            "state",
            "tmp",
            "trellis",
            "trellis.log",
            "trellis.sock",
            "trellis.sock.lock",
            "trellis.toml",
        ];
        for entry in fs::read_dir(self.folder.path())? {
            let name = entry?.file_name();
            if !expected.iter().any(|expected| name == *expected) {
                left.complaints.push(format!("{} is left in the folder", name.display()));
            }
        }
        for entry in fs::read_dir(self.place("tmp"))? {
            left.complaints.push(format!("{} is left among temporary files", entry?.file_name().display()));
        }
        self.look_at_saved(life, &mut left)?;
        // The first daemon may have been killed before it made the folder.
        let cached = match fs::read_dir(self.place("cache")) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(left),
            cached => cached?,
        };
        for entry in cached {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            match path.extension().and_then(|extension| extension.to_str()) {
                Some("tmp") => {
                    left.n_half_written += 1;
                    left.n_of_others += usize::from(!name.contains(&format!("-{}-", life.child.id())));
                }
                Some("cwasm") => {
                    left.n_components += 1;
                    let is_new = fs::metadata(&path)?.modified()? >= life.began;
                    if is_new && !is_whole(&name, &fs::read(&path)?) {
                        left.complaints.push(format!("the compiled component {name} is not whole"));
                    }
                }
                _ => left.complaints.push(format!("{name} is left in the cache")),
            }
        }
        Ok(left)
    }

    /// What lies among saved contexts; whether they are whole is seen when they are opened.
    fn look_at_saved(&self, life: &Life, left: &mut Left) -> io::Result<()> {
        for file in saved::files(self.folder.path())? {
            match file.kind {
                Kind::Temporary => {
                    left.n_half_written += 1;
                    left.n_of_others += usize::from(!file.name.starts_with(&format!("{}-", life.child.id())));
                }
                Kind::Context => {}
                Kind::Other => left.complaints.push(format!("{} is left among saved contexts", file.name)),
            }
        }
        Ok(())
    }
}

/// Whether a file of the cache is what its daemon wrote: the code, and its hash with the one of the name as the key.
fn is_whole(name: &str, bytes: &[u8]) -> bool {
    let component = name.split('-').next().and_then(|hash| blake3::Hash::from_hex(hash).ok());
    let parts = bytes.len().checked_sub(blake3::OUT_LEN).map(|n_code| bytes.split_at(n_code));
    component.zip(parts).is_some_and(|(component, (code, seal))| {
        blake3::keyed_hash(component.as_bytes(), code).as_bytes() == seal
    })
}

impl Life {
    /// Asks it to end.
    pub(super) fn ask_to_end(&self) -> io::Result<()> {
        let pid = Pid::from_raw(self.child.id().cast_signed());
        Ok(kill_process(pid.ok_or_else(|| io::Error::other("a process without a number"))?, Signal::TERM)?)
    }

    /// Kills it, unless it has ended by itself.
    pub(super) fn kill(&mut self) -> io::Result<ExitStatus> {
        self.child.kill()?;
        self.child.wait()
    }

    /// How it ends by itself.
    pub(super) fn end(&mut self) -> io::Result<ExitStatus> {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            if begun.elapsed() > START_TIME_MAX {
                return Err(io::Error::other(format!("the daemon does not end within {START_TIME_MAX:?}")));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
