//! `trellis doctor`: what this machine has for Trellis, what it lacks, and what to install.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;
use trellis_client::Client;
use trellis_client::socket::default_socket;
use trellis_cuda::Card;
use trellis_cuda::probe::{self, FoundBy, Library, Probe, ProbedFolder};
use trellis_engine::model::Model;

use super::connect::{socket_of_environment, socket_told};
use super::error::CliError;
use super::output::{self, Format};
use crate::bundled;
use crate::classes::Classes;
use crate::config::Config;
use crate::daemon::cache_dir;
use crate::device::{self, KERNELS_DIR};
use crate::guest::{Policy, make_private};

const EXAMPLES: &str = "\
Examples:
  trellis doctor                      what was looked for, what was found, what to install
  trellis doctor --json | jq -r '.cuda.problems[].remedy'
  trellis doctor --config trellis.toml    looks at the socket, the cache and the classes of the file, and tries its policy

Exit status: 0 everything works, or there is no NVIDIA GPU and the CPU works; 1 otherwise.";

/// Check the GPU, its libraries, the cache and the socket
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct DoctorArgs {
    /// Look at the socket, the cache and the classes that a daemon with this TOML file would have, and also try its policy
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

#[derive(Debug, Serialize)]
struct Report {
    cuda: Cuda,
    cpu: Check,
    cache: Check,
    socket: Check,
    /// Whether guests can run in processes of their own. Where they cannot, they run in the daemon's, and nothing is wrong.
    isolation: Check,
    /// Of the file that was given: whether the machine knows the users and groups of its classes.
    #[serde(skip_serializing_if = "Option::is_none")]
    classes: Option<Check>,
    /// Of the file that was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    policy: Option<Check>,
}

#[derive(Debug, Serialize)]
struct Cuda {
    #[serde(flatten)]
    probe: &'static Probe,
    problems: Vec<Problem>,
    /// The devices that the driver shows, by their ordinals; empty where something is wrong with all of them.
    gpus: Vec<Gpu>,
    /// Whether the first of them can be used, which is the one that is taken unless another is named.
    usable: bool,
    /// The last line of the report.
    summary: String,
}

/// A device that was tried.
#[derive(Debug, Serialize)]
struct Gpu {
    /// As `--device cuda:N` names it.
    ordinal: usize,
    /// What it is, with its driver.
    name: String,
    /// Whether a kernel was compiled, loaded and run.
    proof: Check,
}

#[derive(Debug, Serialize)]
struct Problem {
    message: String,
    remedy: String,
}

/// One thing that is right or not.
#[derive(Debug, Serialize)]
struct Check {
    ok: bool,
    said: String,
}

impl Check {
    fn of(result: Result<String, String>) -> Self {
        let ok = result.is_ok();
        Self { ok, said: result.unwrap_or_else(|said| said) }
    }
}

pub(crate) async fn doctor(args: DoctorArgs, format: Format) -> Result<(), CliError> {
    let file = args.config.map(|file| Config::load(&file).map(|config| (file, config)));
    // What is wrong with the file is said once, of its policy.
    let config = file.as_ref().and_then(|file| file.as_ref().ok()).map(|(_, config)| config.clone());
    let config = config.unwrap_or_default();
    let told = socket_told(None, socket_of_environment(), &config);
    let socket = check_socket(told.as_deref()).await;
    let isolation = Check::of(check_isolation(&told.or_else(default_socket).unwrap_or_default()).await);
    let report = tokio::task::spawn_blocking(move || {
        // First, so that the cache of kernels is made inside a private folder.
        let cache = check_cache(&config);
        let cache_dir = cache.as_ref().ok().map(PathBuf::as_path);
        let cpu = check_cpu();
        Report {
            cuda: examine(cache_dir, &cpu),
            cpu,
            cache: Check::of(cache.map(|dir| dir.display().to_string())),
            socket,
            isolation,
            // What is wrong with the file itself is said of its policy.
            classes: file
                .as_ref()
                .and_then(|file| file.as_ref().ok())
                .map(|(_, config)| check_classes(config)),
            policy: file.map(|file| {
                let checked = file.map_err(|error| error.to_string());
                Check::of(checked.and_then(|(file, config)| check_policy(&file, &config)))
            }),
        }
    });
    let report = report.await.expect("looking at the machine does not panic");
    output::print(format, &report, Report::render)?;
    if report.is_healthy() { Ok(()) } else { Err(CliError::Unhealthy) }
}

fn examine(cache_dir: Option<&Path>, cpu: &Check) -> Cuda {
    let probe = probe::probe();
    let problems: Vec<Problem> = probe
        .problems()
        .iter()
        .map(|problem| Problem { message: problem.to_string(), remedy: problem.remedy() })
        .collect();
    let n_gpus = if problems.is_empty() { probe.driver.devices.len() } else { 0 };
    let gpus: Vec<Gpu> = (0..n_gpus)
        .map(|ordinal| {
            let proved = Card::open(ordinal, cache_dir.map(|dir| dir.join(KERNELS_DIR)).as_deref())
                .and_then(|card| probe::prove(&card));
            let proof = Check::of(match proved {
                Ok(()) => Ok("a kernel was compiled, loaded and run".to_owned()),
                Err(error) => Err(error.to_string()),
            });
            Gpu { ordinal, name: device::describe(&probe.driver, ordinal), proof }
        })
        .collect();
    let failed = match gpus.first() {
        Some(first) => (!first.proof.ok).then(|| first.proof.said.clone()),
        None => problems.first().map(|problem| problem.message.clone()),
    };
    let summary = match (&failed, &gpus[..]) {
        (Some(reason), _) => {
            let besides = match probe.driver.has_gpu() || !cpu.ok {
                true => "",
                false => "; Trellis works on the CPU",
            };
            format!("CUDA: not usable: {}{besides}", reason.replace('\n', " "))
        }
        (None, [only]) => format!("CUDA: usable: {}", only.name),
        (None, gpus) => {
            let usable: Vec<String> =
                gpus.iter().filter(|gpu| gpu.proof.ok).map(|gpu| format!("cuda:{}", gpu.ordinal)).collect();
            format!("CUDA: usable: {} of {} devices: {}", usable.len(), gpus.len(), usable.join(", "))
        }
    };
    Cuda { probe, problems, gpus, usable: failed.is_none(), summary }
}

fn check_cpu() -> Check {
    let opened = bundled::NAMES.iter().try_for_each(|name| {
        let source = bundled::source(name).expect("it is one of the bundled models");
        Model::open(*name, &source).map(drop).map_err(|error| format!("model {name:?}: {error}"))
    });
    let n_threads = std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
    Check::of(opened.map(|()| format!("{n_threads} threads, bundled models: {}", bundled::NAMES.join(", "))))
}

/// The cache, made if need be and written to.
fn check_cache(config: &Config) -> Result<PathBuf, String> {
    let dir = cache_dir(config)
        .ok_or("there is no place for it: neither XDG_CACHE_HOME nor HOME is set".to_owned())?;
    make_private(&dir).map_err(|error| error.to_string())?;
    let path = dir.join(format!("doctor-{}", std::process::id()));
    let written =
        std::fs::write(&path, "written by `trellis doctor`").and_then(|()| std::fs::remove_file(&path));
    written.map_err(|error| format!("{} cannot be written to: {error}", dir.display()))?;
    Ok(dir)
}

/// Has a guests' process try what it can get at, the daemon's socket among it.
#[cfg(target_os = "linux")]
async fn check_isolation(socket: &Path) -> Result<String, String> {
    use crate::isolation::confine::FileRules;
    use crate::isolation::{GuestProcess, ProcessSettings, probe};

    let exe = std::env::current_exe().map_err(|error| format!("this executable is not found: {error}"))?;
    let settings = ProcessSettings { user: "doctor".to_owned(), ..ProcessSettings::default() };
    let (process, sender, receiver) =
        GuestProcess::spawn_to_probe(&exe, &settings).await.map_err(|error| error.to_string())?;
    let files = process.confinement().files;
    let targets = probe::targets(socket, settings.data_bytes);
    let found = probe::run(process, sender, receiver, &targets).await.map_err(|error| error.to_string())?;
    let problems = found.problems();
    if !problems.is_empty() {
        return Err(problems.join("; "));
    }
    let landlock = match files {
        FileRules::Enforced => {
            "system calls are filtered, and Landlock takes all rights to files and sockets"
        }
        FileRules::PartlyEnforced => {
            "system calls are filtered; this kernel's Landlock knows some of the rules about files and sockets"
        }
        FileRules::Missing => "system calls are filtered; this kernel has no Landlock",
    };
    let n_refused = found.attacks.len();
    Ok(format!(
        "guests can run in processes of their own: {landlock}; {n_refused} of {n_refused} ways out refused"
    ))
}

#[cfg(not(target_os = "linux"))]
async fn check_isolation(_: &Path) -> Result<String, String> {
    Err("guests run in processes of their own on Linux".to_owned())
}

/// Looks for the members of a configuration's classes among the users and groups of this machine.
fn check_classes(config: &Config) -> Check {
    let n_classes = config.classes.len();
    let found = Classes::of(&config.classes).map_err(|error| error.to_string());
    Check::of(found.map(|_| match n_classes {
        0 => "none: all users have the same share".to_owned(),
        1 => "1, and the machine knows its members".to_owned(),
        _ => format!("{n_classes}, and the machine knows their members"),
    }))
}

/// Compiles the policy of a configuration, and has an instance of it begin. What it says of models is for the daemon to see.
fn check_policy(file: &Path, config: &Config) -> Result<String, String> {
    let dir =
        cache_dir(config).ok_or("there is no place for its code: neither XDG_CACHE_HOME nor HOME is set")?;
    make_private(&dir).map_err(|error| error.to_string())?;
    let policy = Policy::open(&config.policy, &config.limits, &dir, config.compile_exe.as_deref());
    let policy = policy.map_err(|error| error.to_string())?;
    Ok(policy.map_or_else(|| format!("none in {}", file.display()), |policy| policy.shown()))
}

/// Looks at the socket that a daemon would listen at: the one that it is told, or the usual one. Where none is told, a daemon of
/// the whole machine does as well, as it does for clients.
async fn check_socket(told: Option<&Path>) -> Check {
    let Some(socket) = told.map(Path::to_owned).or_else(default_socket) else {
        return Check::of(Err(
            "this user has no runtime directory; give `trellis serve` a --socket".to_owned()
        ));
    };
    let socket = std::path::absolute(&socket).unwrap_or(socket);
    let client = match told {
        Some(_) => Client::connect_to(&socket).await,
        None => Client::connect().await,
    };
    let found = client.as_ref().ok().and_then(|client| client.socket().map(Path::to_owned));
    let shown = found.as_ref().unwrap_or(&socket).display();
    Check::of(match client {
        Ok(client) => match client.info().await.map(|info| (info.failure, info.policy)) {
            Ok((None, None)) => Ok(format!("{shown}, a daemon is running")),
            Ok((None, Some(policy))) => Ok(format!("{shown}, a daemon is running, with the policy {policy}")),
            Ok((Some(failure), _)) => {
                Err(format!("{shown}, a daemon is running whose device has failed: {failure}"))
            }
            Err(error) => Err(format!("{shown}, a daemon is running and does not answer: {error}")),
        },
        Err(trellis_client::Error::NotRunning { .. }) => match place_of(&socket) {
            Ok(()) => Ok(format!("{shown}, no daemon is running")),
            Err(reason) => Err(format!("{shown}: {reason}")),
        },
        Err(error) => Err(error.to_string()),
    })
}

/// Whether a socket can be made there: its folder, or what there is of it, can be written to.
fn place_of(socket: &Path) -> Result<(), String> {
    let Some(folder) = socket.ancestors().skip(1).find(|folder| folder.exists()) else {
        return Err("no part of the path exists".to_owned());
    };
    rustix::fs::access(folder, rustix::fs::Access::WRITE_OK)
        .map_err(|error| format!("{} cannot be written to: {error}", folder.display()))
}

impl Report {
    fn is_healthy(&self) -> bool {
        let all_work = self.cuda.gpus.iter().all(|gpu| gpu.proof.ok);
        let gpu = self.cuda.usable && all_work || !self.cuda.probe.driver.has_gpu();
        let of_file = [&self.classes, &self.policy].into_iter().flatten().all(|check| check.ok);
        gpu && self.cpu.ok && self.cache.ok && self.socket.ok && of_file
    }

    fn render(&self) -> String {
        let mut text = String::new();
        self.cuda.render(&mut text);
        let checks = [("CPU", &self.cpu), ("cache", &self.cache), ("socket", &self.socket)];
        let of_file = [("classes", &self.classes), ("policy", &self.policy)];
        let of_file = of_file.into_iter().filter_map(|(name, check)| Some((name, check.as_ref()?)));
        for (name, check) in checks.into_iter().chain(of_file) {
            line(&mut text, name, &format!("{}{}", if check.ok { "" } else { "PROBLEM: " }, check.said));
        }
        let missing = if self.isolation.ok { "" } else { "missing: " };
        line(&mut text, "isolation", &format!("{missing}{}", self.isolation.said));
        text.push_str(&self.cuda.summary);
        text
    }
}

impl Cuda {
    fn render(&self, text: &mut String) {
        let Probe { driver, nvrtc, nvrtc_builtins, cublas_lt, include_dir, library_places, header_places } =
            self.probe;
        library(text, &driver.library, driver.release.as_deref());
        for (ordinal, device) in driver.devices.iter().enumerate() {
            let (major, minor) = device.compute_capability;
            let memory = output::bytes(device.total_bytes);
            let shown = format!("{}, compute capability {major}.{minor}, {memory}", device.name);
            line(text, &format!("device {ordinal}"), &shown);
        }
        if driver.devices.is_empty() && driver.library.loaded.is_some() {
            line(text, "devices", "none");
        }
        for found in [Some(nvrtc), nvrtc_builtins.as_ref(), Some(cublas_lt)].into_iter().flatten() {
            library(text, found, None);
        }
        match include_dir {
            Some(dir) => line(text, "headers", &dir.display().to_string()),
            None => {
                line(text, "headers", "cuda_fp16.h and cuda_bf16.h not found");
                looked_in(text, header_places);
            }
        }
        let libraries = [Some(&driver.library), Some(nvrtc), nvrtc_builtins.as_ref(), Some(cublas_lt)];
        if libraries.into_iter().flatten().any(|library| library.loaded.is_none()) {
            line(
                text,
                "libraries",
                "the system's loader was asked first (LD_LIBRARY_PATH, /etc/ld.so.cache), then",
            );
            looked_in(text, library_places);
        }
        for Gpu { ordinal, proof, .. } in &self.gpus {
            let title = if proof.ok { "" } else { "PROBLEM: " };
            line(text, &format!("proof {ordinal}"), &format!("{title}{}", proof.said));
        }
        // Without a GPU nothing of this is wanting.
        let title = if driver.has_gpu() { "PROBLEM" } else { "missing" };
        for Problem { message, remedy } in &self.problems {
            line(text, title, message);
            line(text, "", &format!("-> {remedy}"));
        }
    }
}

fn line(text: &mut String, name: &str, value: &str) {
    writeln!(text, "{name:<18}{value}").expect("a string takes everything");
}

fn library(text: &mut String, library: &Library, release: Option<&str>) {
    let name = library.name.trim_start_matches("the ");
    match &library.loaded {
        Some(loaded) => {
            let version = loaded.version.map(|version| format!(", CUDA {version}")).unwrap_or_default();
            let release = release.map(|release| format!(", driver {release}")).unwrap_or_default();
            let how = match &loaded.found_by {
                FoundBy::Loader => format!("found as {}", loaded.name),
                FoundBy::Folder(_) => "found in a folder that the system's loader does not search".to_owned(),
            };
            line(text, name, &format!("{}{release}{version} ({how})", loaded.file()));
        }
        None => line(text, name, &format!("not found; looked for {}", library.looked_for.join(" "))),
    }
    for refused in &library.refused {
        line(text, "", &format!("{} cannot be loaded: {}", refused.path.display(), refused.reason));
    }
}

fn looked_in(text: &mut String, places: &[ProbedFolder]) {
    for place in places {
        let absent = if place.is_there { "" } else { ", not there" };
        line(text, "", &format!("looked in {} ({}{absent})", place.path.display(), place.named_by));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_socket_that_is_told_is_the_one_that_is_looked_at() {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("told.sock");
        let said = |check: Check| (check.ok, check.said);
        let none_runs = (true, format!("{}, no daemon is running", socket.display()));
        assert_eq!(said(check_socket(Some(&socket)).await), none_runs);
        drop(std::os::unix::net::UnixListener::bind(&socket).expect("bound"));
        assert_eq!(said(check_socket(Some(&socket)).await), none_runs, "nobody listens any more");
    }

    #[test]
    fn the_report_ends_with_the_verdict_and_json_has_it_too() {
        let check = |ok| Check { ok, said: "said".to_owned() };
        let cuda = examine(None, &check(true));
        let has_gpu = cuda.probe.driver.has_gpu();
        let (is_usable, summary) = (cuda.usable, cuda.summary.clone());
        let mut report = Report {
            cuda,
            cpu: check(true),
            cache: check(true),
            socket: check(true),
            isolation: check(false),
            classes: None,
            policy: None,
        };
        let text = report.render();
        assert_eq!(text.lines().last(), Some(summary.as_str()));
        assert!(
            summary.starts_with(if is_usable { "CUDA: usable: " } else { "CUDA: not usable: " }),
            "{summary}"
        );
        assert_eq!(summary.ends_with("; Trellis works on the CPU"), !has_gpu, "{summary}");
        let all_work = report.cuda.gpus.iter().all(|gpu| gpu.proof.ok);
        assert_eq!(report.is_healthy(), is_usable && all_work || !has_gpu);
        let json: serde_json::Value = serde_json::from_str(&output::to_json(&report)).expect("JSON");
        assert_eq!(json["cuda"]["usable"], is_usable);
        assert!(json["cuda"]["driver"]["library"]["looked_for"][0].is_string(), "{json}");
        assert!(text.contains("missing: said"), "{text}");
        report.policy = Some(check(true));
        assert!(report.render().contains("policy"));
        report.cache = check(false);
        assert!(!report.is_healthy() && report.render().contains("PROBLEM: said"));
    }
}
