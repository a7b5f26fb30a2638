//! What `trellis doctor` finds, each thing made for real.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use rustix::process::{Pid, Signal, geteuid, kill_process};
use serde_json::{Map, Value, json};
use tempfile::TempDir;
use trellis_engine::model::{ModelConfig, tensors};
use trellis_tests::daemons::{self, Served, output};
use trellis_tests::pack;

use crate::exe;

/// A user without rights.
const NOBODY: u32 = 65534;

/// A folder that is the user's runtime directory, with the cache of the tests.
struct Place(TempDir);

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).expect("it is ours");
        Self(folder)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// The doctor of a machine whose GPU is hidden: one without.
    fn doctor(&self, arguments: &[&str]) -> Command {
        let mut command = daemons::trellis(exe());
        command.arg("doctor").args(arguments);
        command.env("CUDA_VISIBLE_DEVICES", "").env("XDG_RUNTIME_DIR", self.path());
        command.env("XDG_CACHE_HOME", self.path());
        command
    }

    /// What it finds, with a file of settings.
    fn with_settings(&self, text: &str) -> Report {
        let file = self.path().join("trellis.toml");
        fs::write(&file, text).expect("written");
        report(&mut self.doctor(&["--json", "--config", file.to_str().expect("UTF-8")]))
    }
}

/// What was found, and the exit status.
#[derive(Debug)]
struct Report {
    json: Value,
    status: Option<i32>,
}

fn report(command: &mut Command) -> Report {
    let ran = output(command);
    let json = serde_json::from_slice(&ran.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&ran.stderr)));
    let report = Report { json, status: ran.status.code() };
    assert_eq!(report.json["healthy"], report.status == Some(0), "{report:?}");
    report
}

impl Report {
    /// The finding with this code; it has a remedy.
    fn find(&self, code: &str) -> &Value {
        let found =
            self.json["findings"].as_array().expect("a list").iter().find(|found| found["code"] == code);
        let found = found.unwrap_or_else(|| panic!("no {code}: {:#}", self.json["findings"]));
        assert!(found["remedy"].as_str().expect("a text").len() > 10, "{found}");
        found
    }

    /// As [`Self::find`], of what keeps a daemon from working; what it says.
    fn problem(&self, code: &str) -> &str {
        let found = self.find(code);
        assert_eq!((&found["weight"], self.status), (&"problem".into(), Some(1)), "{found}");
        found["said"].as_str().expect("a text")
    }
}

fn remedy(found: &Value) -> &str {
    found["remedy"].as_str().expect("a text")
}

#[test]
fn the_verdict_comes_first_and_places_where_they_are_asked_for() {
    let place = Place::new();
    let said = |arguments: &[&str]| {
        let ran = output(&mut place.doctor(arguments));
        assert_eq!(ran.status.code(), Some(0), "{ran:?}");
        String::from_utf8(ran.stdout).expect("it is text")
    };
    let short = said(&[]);
    assert_eq!(short.lines().next(), Some("Trellis works here, on the CPU"), "{short}");
    assert!(short.contains("gpu-hidden") && short.contains("-> unset CUDA_VISIBLE_DEVICES"), "{short}");
    let folder = place.path().to_str().expect("UTF-8");
    assert!(!short.contains(folder) && !short.contains("libcuda"), "{short}");
    let long = said(&["--verbose"]);
    assert!(long.starts_with("Trellis works here, on the CPU\n"), "{long}");
    for part in [folder, "libcuda", "bundled models: tiny, draft", "no daemon is running"] {
        assert!(long.contains(part), "{part}: {long}");
    }
    let report = report(&mut place.doctor(&["--json"]));
    assert_eq!((&report.json["healthy"], report.status), (&true.into(), Some(0)));
    assert_eq!(report.find("gpu-hidden")["weight"], "note");
    assert!(!report.json["cuda"]["driver"]["library"]["looked_for"].as_array().expect("a list").is_empty());
}

#[test]
fn a_missing_driver_is_a_problem_where_a_gpu_is_asked_for() {
    let place = Place::new();
    let found = report(place.doctor(&["--json"]).env("CUDA_VISIBLE_DEVICES", "4096"));
    let has_driver = trellis_cuda::probe::driver().library.loaded.is_some();
    found.problem(if has_driver { "no-device" } else { "no-driver" });
    let found = place.with_settings("device = \"cuda\"");
    assert_eq!(found.problem("gpu-hidden"), "no NVIDIA GPU: CUDA_VISIBLE_DEVICES hides it");
}

/// A library with these functions, under a name by which the loader finds it.
fn library(folder: &Path, name: &str, source: &str) {
    let path = folder.join(format!("{name}.c"));
    fs::write(&path, source).expect("written");
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-o"]).arg(folder.join(name)).arg(format!("-Wl,-soname,{name}")).arg(&path);
    let ran = output(&mut cc);
    assert!(ran.status.success(), "{ran:?}");
}

fn driver(version: i32) -> String {
    format!(
        "int cuInit(unsigned flags) {{ return 100; }}
         int cuDeviceGetCount(int *n) {{ return 100; }}
         int cuDeviceGet(int *device, int ordinal) {{ return 101; }}
         int cuDeviceGetName(char *name, int length, int device) {{ return 101; }}
         int cuDeviceGetAttribute(int *value, int attribute, int device) {{ return 101; }}
         int cuDeviceTotalMem_v2(unsigned long *n_bytes, int device) {{ return 101; }}
         int cuDriverGetVersion(int *version) {{ *version = {version}; return 0; }}"
    )
}

#[test]
fn libraries_that_do_not_go_together_are_found() {
    if pack::folder().is_some() {
        // Where there is no compiler.
        return;
    }
    let place = Place::new();
    let found = |version| {
        library(place.path(), "libcuda.so.1", &driver(version));
        let mut doctor = place.doctor(&["--json"]);
        for variable in ["CUDA_PATH", "CUDA_HOME", "VIRTUAL_ENV", "CONDA_PREFIX"] {
            doctor.env_remove(variable);
        }
        report(doctor.env("CUDA_VISIBLE_DEVICES", "0").env("LD_LIBRARY_PATH", place.path()))
    };
    let old = found(12080);
    assert_eq!(old.problem("driver-too-old"), "the NVIDIA driver is for CUDA 12.8, one for 13.0 is needed");
    assert!(remedy(old.find("driver-too-old")).contains("`sudo apt-get install nvidia-driver-580`"));

    let nvrtc = "int nvrtcVersion(int *major, int *minor) { *major = 14; *minor = 1; return 0; }";
    library(place.path(), "libnvrtc.so.13", nvrtc);
    library(place.path(), "libcublasLt.so.13", "unsigned long cublasLtGetVersion(void) { return 130000; }");
    let new = found(13000);
    let said = new.problem("library-wrong-version");
    assert_eq!(said, "NVRTC is of CUDA 14.1, and the driver is for CUDA 13.0");
    assert!(remedy(new.find("library-wrong-version")).contains("pip install 'nvidia-cuda-nvrtc==13.*'"));
    new.problem("library-too-old");
    new.problem("no-device");
}

fn send(served: &Served, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(served.pid()).expect("a process")).expect("not 0");
    kill_process(pid, signal).expect("it runs");
}

#[test]
fn a_daemon_is_found_alive_silent_and_gone() {
    let mut served = Served::start(exe());
    let pid = served.pid();
    let socket = served.socket();
    let place = Place::new();
    let look = || report(place.doctor(&["--json"]).env("TRELLIS_SOCKET", &socket));
    let check = |report: &Report| {
        let checks = report.json["checks"].as_array().expect("a list").iter();
        checks.filter(|check| check["name"] == "socket").map(|check| check["said"].clone()).next()
    };
    let alive = look();
    assert_eq!((check(&alive), alive.status), (Some("a daemon is running".into()), Some(0)));

    send(&served, Signal::STOP);
    let silent = look();
    assert!(silent.problem("daemon-silent").starts_with(&format!("process {pid} listens on the socket")));
    assert!(remedy(silent.find("daemon-silent")).contains(&format!("`kill {pid}`")));

    // It was ready: it does not start.
    let status = |arguments: &[&str]| {
        let ran = output(&mut served.trellis(arguments));
        assert_eq!(ran.status.code(), Some(3), "{ran:?}");
        String::from_utf8(ran.stdout).expect("it is text")
    };
    let said = status(&["status"]);
    assert!(
        said.starts_with("state        silent: it does not answer") && said.contains(&pid.to_string()),
        "{said}"
    );
    let json: Value = serde_json::from_str(&status(&["status", "--json"])).expect("JSON");
    assert_eq!((&json["state"], &json["pid"]), (&"silent".into(), &pid.into()));

    // Whoever loses the file of the socket and stands still cannot make it anew.
    fs::rename(&socket, socket.with_extension("aside")).expect("it is ours");
    let lost = look();
    assert!(lost.problem("lock-held").starts_with(&format!("process {pid} holds the lock")));
    fs::rename(socket.with_extension("aside"), &socket).expect("it is ours");

    send(&served, Signal::KILL);
    served.wait();
    let gone = look();
    let found = gone.find("stale-lock");
    assert_eq!((&found["weight"], gone.status), (&"note".into(), Some(0)));
    assert!(
        found["said"].as_str().expect("a text").contains(&format!("process {pid}, which is gone")),
        "{found}"
    );
}

#[test]
fn a_socket_that_is_not_for_this_user_is_found_with_its_group() {
    let place = Place::new();
    let (socket, cache) = (place.path().join("t.sock"), place.path().join("cache"));
    let _listener = UnixListener::bind(&socket).expect("bound");
    fs::create_dir(&cache).expect("made");
    fs::set_permissions(&cache, Permissions::from_mode(0o777)).expect("it is ours");
    let is_root = geteuid().is_root();
    fs::set_permissions(&socket, Permissions::from_mode(if is_root { 0o660 } else { 0 }))
        .expect("it is ours");
    let mut doctor = place.doctor(&["--json"]);
    doctor.env("TRELLIS_SOCKET", &socket).env("XDG_CACHE_HOME", &cache).env("XDG_RUNTIME_DIR", &cache);
    doctor.current_dir("/");
    if is_root {
        doctor.uid(NOBODY).gid(NOBODY);
    }
    let found = report(&mut doctor);
    assert!(found.problem("socket-no-permission").contains("may not use the socket"));
    let details = found.find("socket-no-permission")["details"].to_string();
    assert!(details.contains("t.sock: mode") && details.contains("owner"), "{details}");
}

/// A bundled model in a folder.
fn model() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for entry in fs::read_dir(pack::root().join("daemon/models/draft")).expect("it is there") {
        let entry = entry.expect("it can be read");
        fs::copy(entry.path(), folder.path().join(entry.file_name())).expect("copied");
    }
    folder
}

#[test]
fn a_broken_model_folder_is_found_with_the_file_and_the_reason() {
    let place = Place::new();
    let found = |folder: &Path| place.with_settings(&format!("models = [{:?}]\ndevice = \"cpu\"", folder));
    let whole = model();
    assert_eq!(found(whole.path()).status, Some(0));
    let without = model();
    fs::remove_file(without.path().join("tokenizer.json")).expect("it is there");
    let report = found(without.path());
    assert!(report.problem("model-file-missing").contains("tokenizer.json: no such file"), "{report:?}");
    let cut = model();
    let weights =
        File::options().write(true).open(cut.path().join("model.safetensors")).expect("it is there");
    weights.set_len(65_536).expect("cut");
    let report = found(cut.path());
    let said = report.problem("model-file-cut-off");
    assert!(said.contains("model.safetensors: 65536 bytes long; its header expects"), "{said}");
    let report = found(&place.path().join("nowhere"));
    assert!(report.problem("model-missing").ends_with("there is no such folder or file"), "{report:?}");
}

/// A model whose weights no machine holds. Its file has a head, and no bytes on the disk for the rest.
fn huge() -> TempDir {
    let folder = model();
    let path = folder.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).expect("it is there")).expect("JSON");
    for (field, value) in [("hidden_size", 1024), ("intermediate_size", 1 << 20), ("num_hidden_layers", 256)]
    {
        config[field] = value.into();
    }
    fs::write(&path, config.to_string()).expect("written");
    let config = ModelConfig::from_json("config.json", config.to_string().as_bytes()).expect("a decoder");
    let mut head = Map::new();
    let mut end = 0;
    for tensor in tensors::expected(&config) {
        let begin = end;
        end += 2 * tensor.shape.iter().product::<usize>() as u64;
        head.insert(
            tensor.name,
            json!({ "dtype": "BF16", "shape": tensor.shape, "data_offsets": [begin, end] }),
        );
    }
    let head = Value::Object(head).to_string();
    let file = File::create(folder.path().join("model.safetensors")).expect("made");
    file.write_all_at(&(head.len() as u64).to_le_bytes(), 0).expect("written");
    file.write_all_at(head.as_bytes(), 8).expect("written");
    file.set_len(8 + head.len() as u64 + end).expect("the file system has files with holes");
    folder
}

#[test]
fn a_model_that_is_too_large_is_found_before_it_is_loaded() {
    let (place, model) = (Place::new(), huge());
    let report = place.with_settings(&format!("models = [{:?}]\ndevice = \"cpu\"", model.path()));
    let said = report.problem("memory-too-small");
    assert!(said.starts_with("the models need 3.") && said.contains("of weights and for steps"), "{said}");
    let bound = place.with_settings("model_bytes = 4096\ndevice = \"cpu\"");
    assert!(bound.problem("model-bytes-too-small").contains("model_bytes is 4.1 kB"), "{bound:?}");
    assert!(remedy(bound.find("model-bytes-too-small")).starts_with("set `model_bytes = "), "{bound:?}");
    let small = place.with_settings("kv_bytes = 4096\ndevice = \"cpu\"");
    assert!(remedy(small.find("kv-too-small")).starts_with("set `kv_bytes = "), "{small:?}");
}

#[test]
fn folders_that_a_daemon_could_not_use_are_found() {
    let place = Place::new();
    let file = place.path().join("file");
    fs::write(&file, "").expect("written");
    let at = |name: &str| place.path().join(name);
    let text = |guests: &Path, state: &Path| {
        format!("device = \"cpu\"\nguests_dir = {guests:?}\nstate_dir = {state:?}\n")
    };
    let well = place.with_settings(&text(place.path(), &at("state")));
    assert_eq!(well.status, Some(0), "{well:?}");
    let wrong = place.with_settings(&text(&at("nowhere"), &file));
    assert!(wrong.problem("guests-dir-unusable").contains("nowhere"), "{wrong:?}");
    assert!(remedy(wrong.find("guests-dir-unusable")).contains("NAME.wasm"), "{wrong:?}");
    assert!(wrong.problem("state-dir-unusable").contains("what guests save cannot be kept"), "{wrong:?}");
    assert!(remedy(wrong.find("state-dir-unusable")).contains("`state_dir`"), "{wrong:?}");
    assert!(!at("state").exists(), "it looks, and makes nothing");
}
