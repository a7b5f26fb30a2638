//! Folders in which CUDA's libraries and headers usually lie.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;

/// A folder that was looked into, or would have been were it there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ProbedFolder {
    /// The folder; a `*` stands in a path that matched nothing.
    pub path: PathBuf,
    /// What names it: an environment variable, or the habit of an installer.
    pub named_by: &'static str,
    /// Whether there is such a folder.
    pub is_there: bool,
}

/// Debian's and NVIDIA's name of this kind of processor.
#[cfg(target_arch = "aarch64")]
const MULTIARCH: (&str, &str) = ("/usr/lib/aarch64-linux-gnu", "targets/sbsa-linux");
#[cfg(not(target_arch = "aarch64"))]
const MULTIARCH: (&str, &str) = ("/usr/lib/x86_64-linux-gnu", "targets/x86_64-linux");

/// Where pip puts things below an environment.
const SITES: [&str; 2] = ["lib/python3*/site-packages", "lib/python3*/dist-packages"];

/// What the wheels of CUDA 13 and of CUDA 12 hold, in `site-packages`.
const WHEEL_LIBRARIES: [&str; 3] = ["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib", "nvidia/cublas/lib"];
const WHEEL_HEADERS: [&str; 2] = ["nvidia/cu13/include", "nvidia/cuda_runtime/include"];

/// Where libraries are looked for, in this order, when the system's loader does not find them.
#[must_use]
pub(super) fn of_libraries() -> Vec<ProbedFolder> {
    let mut places = ProbedFolders::default();
    for folder in env::var_os("LD_LIBRARY_PATH").iter().flat_map(env::split_paths) {
        places.add("LD_LIBRARY_PATH", folder);
    }
    places.toolkits(&["lib64", "lib"]);
    places.environments(&WHEEL_LIBRARIES, &["lib", &format!("{}/lib", MULTIARCH.1)]);
    places.add("the system's packages", MULTIARCH.0);
    places.add("the system's packages", "/usr/lib64");
    places.add("NVIDIA's container images", "/usr/local/nvidia/lib64");
    places.add("WSL", "/usr/lib/wsl/lib");
    places.add("NixOS", "/run/opengl-driver/lib");
    places.0
}

/// Where headers are looked for, in this order; first beside the NVRTC that was loaded, whose version they have.
#[must_use]
pub(super) fn of_headers(nvrtc: Option<&Path>) -> Vec<ProbedFolder> {
    let mut places = ProbedFolders::default();
    // `lib/libnvrtc.so.13` beside `include`.
    if let Some(root) = nvrtc.and_then(Path::parent).and_then(Path::parent) {
        places.add("the folder of NVRTC", root.join("include"));
    }
    places.toolkits(&["include"]);
    places.environments(&WHEEL_HEADERS, &["include", &format!("{}/include", MULTIARCH.1)]);
    places.add("the system's packages", "/usr/include");
    places.0
}

/// Folders, each once.
#[derive(Default)]
struct ProbedFolders(Vec<ProbedFolder>);

impl ProbedFolders {
    /// A path whose components may end in `*`.
    fn add(&mut self, named_by: &'static str, pattern: impl AsRef<Path>) {
        let pattern = pattern.as_ref();
        // Relative folders would depend on where the program is started.
        if !pattern.is_absolute() {
            return;
        }
        let matched = matches(pattern);
        let is_there = !matched.is_empty();
        let paths = if is_there { matched } else { vec![pattern.to_owned()] };
        for path in paths {
            if !self.0.iter().any(|place| place.path == path) {
                self.0.push(ProbedFolder { path, named_by, is_there });
            }
        }
    }

    fn toolkits(&mut self, below: &[&str]) {
        for variable in ["CUDA_PATH", "CUDA_HOME"] {
            if let Some(root) = env::var_os(variable) {
                below.iter().for_each(|below| self.add(variable, Path::new(&root).join(below)));
            }
        }
        for root in ["/usr/local/cuda", "/usr/local/cuda-*"] {
            self.add("NVIDIA's toolkit", Path::new(root).join(below[0]));
        }
    }

    fn environments(&mut self, in_wheels: &[&str], in_conda: &[&str]) {
        let mut wheels = |named_by, root: &Path| {
            for site in SITES {
                in_wheels.iter().for_each(|below| self.add(named_by, root.join(site).join(below)));
            }
        };
        for variable in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
            if let Some(root) = env::var_os(variable) {
                wheels(variable, Path::new(&root));
            }
        }
        if let Some(home) = env::var_os("HOME") {
            wheels("pip install --user", &Path::new(&home).join(".local"));
        }
        wheels("pip", Path::new("/usr/local"));
        wheels("pip", Path::new("/usr"));
        if let Some(root) = env::var_os("CONDA_PREFIX") {
            in_conda.iter().for_each(|below| self.add("CONDA_PREFIX", Path::new(&root).join(below)));
        }
    }
}

/// The folders that a pattern matches, later versions first.
fn matches(pattern: &Path) -> Vec<PathBuf> {
    let mut found = vec![PathBuf::new()];
    for component in pattern.components() {
        let name = component.as_os_str();
        found = match name.to_str().and_then(|name| name.strip_suffix('*')) {
            Some(prefix) => found.iter().flat_map(|folder| children(folder, prefix)).collect(),
            None => found.into_iter().map(|folder| folder.join(name)).collect(),
        };
    }
    found.retain(|path| path.is_dir());
    found
}

fn children(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let named = |name: &OsStr| name.to_str().is_some_and(|name| name.starts_with(prefix));
    let mut paths: Vec<_> =
        entries.filter(|entry| named(&entry.file_name())).map(|entry| entry.path()).collect();
    // `cuda-13.0` before `cuda-12.9`, and `cuda-12.10` before `cuda-12.9`.
    paths.sort_by_cached_key(|path| std::cmp::Reverse(numbers(path)));
    paths
}

/// The numbers in a folder's name.
fn numbers(path: &Path) -> Vec<u32> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.split(|c: char| !c.is_ascii_digit()).filter_map(|digits| digits.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_folders_and_the_latest_comes_first() {
        let root = tempfile::tempdir().expect("a folder");
        for name in ["cuda-12.9/lib64", "cuda-12.10/lib64", "cuda-13.0/lib64", "cuda-14.0/bin", "other/lib64"]
        {
            fs::create_dir_all(root.path().join(name)).expect("made");
        }
        let found = matches(&root.path().join("cuda-*/lib64"));
        let names: Vec<_> = found.iter().map(|path| path.strip_prefix(root.path()).expect("below")).collect();
        assert_eq!(names, ["cuda-13.0/lib64", "cuda-12.10/lib64", "cuda-12.9/lib64"].map(Path::new));
        assert!(matches(&root.path().join("none-*/lib64")).is_empty());
    }

    #[test]
    fn headers_are_looked_for_beside_nvrtc_first() {
        let places = of_headers(Some(Path::new("/opt/env/nvidia/cu13/lib/libnvrtc.so.13")));
        assert_eq!(places[0].path, Path::new("/opt/env/nvidia/cu13/include"));
        assert!(places.iter().any(|place| place.path == Path::new("/usr/include")));
        let once: std::collections::BTreeSet<_> = places.iter().map(|place| &place.path).collect();
        assert_eq!(once.len(), places.len());
    }
}
