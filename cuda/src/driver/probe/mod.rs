//! What CUDA needs on this machine, looked for before any of it is called.
//!
//! cudarc panics where a library or one of its functions is missing, and takes the first file that has one of its
//! names, whatever its version. So each library is opened here first, and preferably one of the driver's major
//! version: what is loaded once is what cudarc gets afterwards.

mod driver;
mod library;
mod places;
mod problem;
mod prove;
mod symbols;

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde::Serialize;

pub use driver::{Device, Driver, Failure, driver};
pub use library::{FoundBy, Library, Loaded, Refused, Version};
pub use places::ProbedFolder;
pub use problem::Problem;
pub use prove::prove;

use library::Spec;

/// The oldest version of CUDA whose drivers are used, and the one whose libraries are recommended.
const CUDA_MIN: Version = Version { major: 13, minor: 0 };

/// The oldest major version of libraries that is looked for: a driver runs those of versions before its own.
const LIBRARY_MAJOR_MIN: u32 = 12;

/// The least compute capability, as major number: the kernels copy asynchronously and multiply bf16.
const CAPABILITY_MIN: i32 = 8;

/// Headers that kernels include.
const HEADERS: [&str; 2] = ["cuda_fp16.h", "cuda_bf16.h"];

/// What was looked for and what was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Probe {
    /// The driver and its devices.
    pub driver: Driver,
    /// The compiler.
    pub nvrtc: Library,
    /// The part of the compiler that it loads by itself, by a name with the full version.
    pub nvrtc_builtins: Option<Library>,
    /// Matrix products.
    pub cublas_lt: Library,
    /// The folder of the headers that kernels include.
    pub include_dir: Option<PathBuf>,
    /// Where libraries were looked for besides the system's loader.
    pub library_places: Vec<ProbedFolder>,
    /// Where headers were looked for.
    pub header_places: Vec<ProbedFolder>,
}

/// Looks for everything, once in a process, and leaves loaded what it finds.
#[must_use]
pub fn probe() -> &'static Probe {
    static PROBE: OnceLock<Probe> = OnceLock::new();
    PROBE.get_or_init(|| {
        let library_places = places::of_libraries();
        let (nvrtc, nvrtc_builtins) = nvrtc().clone();
        let cublas_lt = Spec {
            name: "cuBLASLt",
            candidates: cudarc::get_lib_name_candidates("cublasLt"),
            preferred: names("cublasLt", major()),
            functions: &symbols::CUBLAS_LT,
            version: library::cublas_lt_version,
        };
        let (cublas_lt, opened) = cublas_lt.find(&library_places);
        opened.into_iter().for_each(library::keep);
        let header_places = places::of_headers(path_of(&nvrtc));
        Probe {
            driver: driver().clone(),
            include_dir: headers_in(&header_places),
            nvrtc,
            nvrtc_builtins,
            cublas_lt,
            library_places,
            header_places,
        }
    })
}

/// The folder of the headers that kernels include, for [`crate::Compiler`]. Leaves NVRTC loaded.
#[must_use]
pub fn include_dir() -> Option<PathBuf> {
    let (nvrtc, _) = nvrtc();
    headers_in(&places::of_headers(path_of(nvrtc)))
}

/// The major version of CUDA that libraries should have.
fn major() -> u32 {
    driver().version().map_or(CUDA_MIN, |version| version.max(CUDA_MIN)).major
}

/// Names of a library for a driver of this major version: the newest that the driver supports comes first.
fn names(stem: &str, major: u32) -> Vec<String> {
    (LIBRARY_MAJOR_MIN..=major).rev().map(|major| format!("lib{stem}.so.{major}")).collect()
}

/// The compiler and its builtins.
fn nvrtc() -> &'static (Library, Option<Library>) {
    static NVRTC: OnceLock<(Library, Option<Library>)> = OnceLock::new();
    NVRTC.get_or_init(|| find_nvrtc(&places::of_libraries()))
}

fn find_nvrtc(places: &[ProbedFolder]) -> (Library, Option<Library>) {
    let spec = Spec {
        name: "NVRTC",
        candidates: cudarc::get_lib_name_candidates("nvrtc"),
        preferred: names("nvrtc", major()),
        functions: &symbols::NVRTC,
        version: library::nvrtc_version,
    };
    let (nvrtc, opened) = spec.find(places);
    opened.into_iter().for_each(library::keep);
    let builtins = nvrtc.loaded.as_ref().and_then(|loaded| loaded.version).map(|version| {
        // NVRTC asks the loader for this very name.
        let name = format!("libnvrtc-builtins.so.{version}");
        let beside = path_of(&nvrtc).and_then(Path::parent).map(|path| ProbedFolder {
            path: path.to_owned(),
            named_by: "the folder of NVRTC",
            is_there: true,
        });
        let places: Vec<ProbedFolder> = beside.into_iter().chain(places.iter().cloned()).collect();
        let spec = Spec {
            name: "NVRTC's builtins",
            candidates: vec![name.clone()],
            preferred: vec![name],
            functions: &[],
            version: |_| None,
        };
        let (library, opened) = spec.find(&places);
        opened.into_iter().for_each(library::keep);
        library
    });
    (nvrtc, builtins)
}

fn path_of(library: &Library) -> Option<&Path> {
    library.loaded.as_ref()?.path.as_deref()
}

fn headers_in(places: &[ProbedFolder]) -> Option<PathBuf> {
    let has_all = |folder: &&ProbedFolder| HEADERS.iter().all(|header| folder.path.join(header).is_file());
    places.iter().find(has_all).map(|place| place.path.clone())
}

impl Probe {
    /// Everything that keeps CUDA from being used; the first one is the reason to name.
    #[must_use]
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        self.driver_problems(&mut problems);
        // Libraries are not held against a driver that has to be replaced.
        let driver = self.driver.version().filter(|&version| version >= CUDA_MIN);
        let libraries = [Some(&self.nvrtc), self.nvrtc_builtins.as_ref(), Some(&self.cublas_lt)];
        for library in libraries.into_iter().flatten() {
            let Some(loaded) = &library.loaded else {
                let refused = library.refused.iter().map(|refused| refused.reason.clone()).collect();
                problems.push(Problem::NoLibrary { library: library.name, refused });
                continue;
            };
            if let (Some(found), Some(driver)) = (loaded.version, driver)
                && found.major > driver.major
            {
                let (library, file) = (library.name, loaded.file());
                problems.push(Problem::TooNew { library, found, driver, file });
            }
            lacking(library, loaded, &mut problems);
        }
        if self.include_dir.is_none() {
            problems.push(Problem::NoHeader { header: HEADERS[0] });
        }
        problems
    }

    fn driver_problems(&self, problems: &mut Vec<Problem>) {
        let Driver { library, devices, failure, device_files, visible_devices, .. } = &self.driver;
        let is_hidden = self.driver.is_hidden();
        if is_hidden {
            problems.push(Problem::Hidden);
        }
        let visible_devices = visible_devices.clone().filter(|_| !is_hidden);
        let Some(loaded) = &library.loaded else {
            problems.push(Problem::NoDriver { device_files: device_files.clone(), visible_devices });
            return;
        };
        let too_old = loaded.version.filter(|&version| version < CUDA_MIN);
        // Before the devices: a driver does not show those that came after it.
        if let Some(found) = too_old {
            problems.push(Problem::DriverTooOld { found, needed: CUDA_MIN });
        }
        match (failure, devices.first()) {
            (Some(Failure { call, reason, .. }), _) => {
                problems.push(Problem::DriverFailed { call, reason: reason.clone(), visible_devices });
            }
            (None, None) if is_hidden => {}
            (None, None) => problems.push(Problem::NoDevice { visible_devices }),
            (None, Some(Device { name, compute_capability: (major, minor), .. })) => {
                if *major < CAPABILITY_MIN {
                    let (name, major, minor) = (name.clone(), *major, *minor);
                    problems.push(Problem::DeviceTooOld { name, major, minor });
                }
            }
        }
        if too_old.is_none() {
            lacking(library, loaded, problems);
        }
    }

    /// Whether CUDA can be used.
    #[must_use]
    pub fn is_usable(&self) -> bool {
        self.problems().is_empty()
    }
}

fn lacking(library: &Library, loaded: &Loaded, problems: &mut Vec<Problem>) {
    if !library.missing_functions.is_empty() {
        let functions = library.missing_functions.clone();
        problems.push(Problem::TooOld { library: library.name, file: loaded.file(), functions });
    }
}

impl Loaded {
    /// The file, or at least the name by which it was found.
    #[must_use]
    pub fn file(&self) -> String {
        self.path.as_ref().map_or_else(|| self.name.clone(), |path| path.display().to_string())
    }
}

#[cfg(test)]
mod tests;
