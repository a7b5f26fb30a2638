//! The driver, the libraries, and whether a kernel runs.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use serde::Serialize;
use trellis_cuda::Card;
use trellis_cuda::probe::{self, FoundBy, Library, Probe, ProbedFolder, Problem};

use super::finding::{Check, Code, Finding, Weight};
use crate::cli::output;
use crate::config::Device;
use crate::device;

/// What there is of CUDA.
#[derive(Debug, Serialize)]
pub(super) struct Gpus {
    #[serde(flatten)]
    probe: &'static Probe,
    /// The devices that the driver shows, by their ordinals; empty where something is wrong with all of them.
    gpus: Vec<Gpu>,
    /// The one that the settings choose.
    ordinal: usize,
    /// Whether the settings or the machine ask for one.
    wanted: bool,
    /// Whether that one works.
    usable: bool,
}

/// A device that was tried.
#[derive(Debug, Serialize)]
struct Gpu {
    /// As `--device cuda:N` names it.
    ordinal: usize,
    /// What it is, with its driver.
    name: String,
    /// Why no kernel was compiled, loaded and run, if none was.
    failure: Option<String>,
}

impl Gpus {
    /// Looks for the libraries, and tries the devices. Kernels are kept in the folder.
    pub(super) fn look(device: Device, kernels: Option<&Path>) -> Self {
        let probe = probe::probe();
        let n_gpus = if probe.is_usable() { probe.driver.devices.len() } else { 0 };
        let gpus: Vec<Gpu> = (0..n_gpus)
            .map(|ordinal| {
                let proved = Card::open(ordinal, kernels).and_then(|card| probe::prove(&card));
                let failure = proved.err().map(|error| error.to_string());
                Gpu { ordinal, name: device::describe(&probe.driver, ordinal), failure }
            })
            .collect();
        let wanted = match device {
            Device::Auto => probe.driver.has_gpu(),
            device => !device.is_cpu(),
        };
        let ordinal = device.ordinal();
        let usable = wanted && gpus.get(ordinal).is_some_and(|gpu| gpu.failure.is_none());
        Self { probe, gpus, ordinal, wanted, usable }
    }

    /// The device that models run on, unless that is the processor.
    pub(super) fn usable(&self) -> Option<&str> {
        self.usable.then(|| self.gpus[self.ordinal].name.as_str())
    }

    /// Whether models are to run on a GPU.
    pub(super) fn is_wanted(&self) -> bool {
        self.wanted
    }

    pub(super) fn check(&self) -> Check {
        let of_libraries = self.probe.problems();
        let mut findings: Vec<Finding> =
            of_libraries.iter().map(|problem| finding_of(problem, &self.probe.library_places)).collect();
        for gpu in &self.gpus {
            let Some(failure) = &gpu.failure else { continue };
            let said = format!("no kernel runs on cuda:{}: {}", gpu.ordinal, failure.replace('\n', " "));
            let remedy = "`nvidia-smi` should work first; `--device cpu` computes on the processor meanwhile";
            let finding = Finding::problem(Code::GpuFailed, said, remedy).with(gpu.name.clone());
            let weight = if gpu.ordinal == self.ordinal { Weight::Problem } else { Weight::Note };
            findings.push(Finding { weight, ..finding });
        }
        if self.wanted && self.gpus.len() <= self.ordinal && findings.is_empty() {
            let said = format!("there is no cuda:{}: the driver shows {}", self.ordinal, self.gpus.len());
            findings.push(Finding::problem(
                Code::NoDevice,
                said,
                "`nvidia-smi -L` lists those that there are",
            ));
        }
        let mut details = self.details();
        if !self.wanted {
            // The first one is the reason, and the others are wanting only where that is not.
            findings.iter_mut().for_each(|finding| finding.weight = Weight::Note);
            let rest = findings.split_off(findings.len().min(1));
            details.extend(rest.into_iter().map(|finding| format!("{}: {}", finding.code, finding.said)));
        }
        let said = match (self.usable(), self.wanted) {
            (Some(name), _) => format!("{name}: a kernel was compiled, loaded and run"),
            (None, true) => String::new(),
            (None, false) => "no GPU is used".to_owned(),
        };
        Check { details, findings, ..Check::new("gpu", said) }
    }

    fn details(&self) -> Vec<String> {
        let Probe { driver, nvrtc, nvrtc_builtins, cublas_lt, include_dir, library_places, header_places } =
            self.probe;
        let mut lines = Vec::new();
        library(&mut lines, &driver.library, driver.release.as_deref());
        for (ordinal, device) in driver.devices.iter().enumerate() {
            let (major, minor) = device.compute_capability;
            let memory = output::bytes(device.total_bytes);
            lines.push(format!(
                "cuda:{ordinal} is {}, compute capability {major}.{minor}, {memory}",
                device.name
            ));
        }
        let libraries = [Some(nvrtc), nvrtc_builtins.as_ref(), Some(cublas_lt)];
        libraries.into_iter().flatten().for_each(|found| library(&mut lines, found, None));
        match include_dir {
            Some(dir) => lines.push(format!("headers in {}", dir.display())),
            None => looked_in(&mut lines, "cuda_fp16.h and cuda_bf16.h", header_places),
        }
        let all = libraries.into_iter().chain([Some(&driver.library)]).flatten();
        if all.into_iter().any(|library| library.loaded.is_none()) {
            lines.push("the system's loader was asked first (LD_LIBRARY_PATH, /etc/ld.so.cache)".to_owned());
            looked_in(&mut lines, "libraries", library_places);
        }
        lines
    }
}

fn library(lines: &mut Vec<String>, library: &Library, release: Option<&str>) {
    let name = library.name;
    match &library.loaded {
        Some(loaded) => {
            let version = loaded.version.map(|version| format!(", CUDA {version}")).unwrap_or_default();
            let release = release.map(|release| format!(", driver {release}")).unwrap_or_default();
            let how = match &loaded.found_by {
                FoundBy::Loader => format!("found as {}", loaded.name),
                FoundBy::Folder(_) => "found in a folder that the system's loader does not search".to_owned(),
            };
            lines.push(format!("{name}: {}{release}{version} ({how})", loaded.file()));
        }
        None => lines.push(format!("{name}: looked for {}", library.looked_for.join(" "))),
    }
    for refused in &library.refused {
        lines.push(format!("{} cannot be loaded: {}", refused.path.display(), refused.reason));
    }
}

fn looked_in(lines: &mut Vec<String>, what: &str, places: &[ProbedFolder]) {
    for place in places {
        let absent = if place.is_there { "" } else { ", not there" };
        lines.push(format!("looked for {what} in {} ({}{absent})", place.path.display(), place.named_by));
    }
}

fn finding_of(problem: &Problem, places: &[ProbedFolder]) -> Finding {
    let (code, said) = match problem {
        Problem::Hidden => (Code::GpuHidden, problem.to_string()),
        Problem::NoDriver { device_files, .. } => {
            let there = if device_files.is_empty() { "" } else { ", although the devices are there" };
            (Code::NoDriver, format!("no NVIDIA driver was found{there}"))
        }
        Problem::DriverTooOld { .. } => (Code::DriverTooOld, problem.to_string()),
        Problem::DriverFailed { .. } => (Code::DriverFailed, problem.to_string()),
        Problem::NoDevice { .. } => (Code::NoDevice, problem.to_string()),
        Problem::DeviceTooOld { .. } => (Code::DeviceTooOld, problem.to_string()),
        Problem::NoLibrary { library, refused } => match others(library, places) {
            _ if !refused.is_empty() => {
                (Code::LibraryBroken, format!("{library} is there and cannot be loaded"))
            }
            found if found.is_empty() => (Code::LibraryMissing, format!("{library} was not found")),
            found => {
                let found: Vec<String> = found.iter().map(u32::to_string).collect();
                (Code::LibraryWrongVersion, format!("{library} is there for CUDA {} alone", found.join(", ")))
            }
        },
        Problem::TooNew { library, found, driver, .. } => (
            Code::LibraryWrongVersion,
            format!("{library} is of CUDA {found}, and the driver is for CUDA {driver}"),
        ),
        Problem::TooOld { library, functions, .. } => {
            let n = functions.len();
            (Code::LibraryTooOld, format!("{library} lacks {n} of the functions that are called"))
        }
        Problem::NoHeader { .. } => (Code::HeadersMissing, "the headers of CUDA were not found".to_owned()),
    };
    Finding::problem(code, said, problem.remedy()).with(problem.to_string())
}

/// Major versions of a library whose files lie where it is looked for.
fn others(library: &str, places: &[ProbedFolder]) -> BTreeSet<u32> {
    let begin = match library {
        "NVRTC" => "libnvrtc.so.",
        "cuBLASLt" => "libcublasLt.so.",
        _ => return BTreeSet::new(),
    };
    let names = places.iter().filter_map(|place| fs::read_dir(&place.path).ok()).flatten().flatten();
    let names = names.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter_map(|name| name.strip_prefix(begin)?.split('.').next()?.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_of_another_version_is_told_from_none_at_all() {
        let folder = tempfile::tempdir().expect("a folder");
        let place = ProbedFolder { path: folder.path().to_owned(), named_by: "the test", is_there: true };
        let find = |refused: Vec<String>| {
            let problem = Problem::NoLibrary { library: "cuBLASLt", refused };
            finding_of(&problem, std::slice::from_ref(&place))
        };
        assert_eq!(find(vec![]).code, Code::LibraryMissing);
        fs::write(folder.path().join("libcublasLt.so.11.5.2"), "").expect("written");
        fs::write(folder.path().join("libcublasLt.so.9"), "").expect("written");
        let found = find(vec![]);
        assert_eq!(found.code, Code::LibraryWrongVersion);
        assert_eq!(found.said, "cuBLASLt is there for CUDA 9, 11 alone");
        assert!(found.remedy.contains("nvidia-cublas==13.*"), "{found:?}");
        assert_eq!(find(vec!["cut off".to_owned()]).code, Code::LibraryBroken);
    }

    #[test]
    fn without_a_gpu_nothing_of_it_is_a_problem_and_one_thing_is_said() {
        let gpus = Gpus::look(Device::Cpu, None);
        assert!(!gpus.is_wanted() && gpus.usable().is_none());
        let check = gpus.check();
        assert!(
            check.findings.len() <= 1 && check.findings.iter().all(|found| !found.is_problem()),
            "{check:?}"
        );
        assert_eq!(check.said, "no GPU is used");
    }

    #[test]
    fn a_gpu_that_is_asked_for_and_is_not_there_is_a_problem() {
        // More than any machine has.
        let gpus = Gpus::look(Device::Ordinal(4096), None);
        assert!(gpus.is_wanted() && gpus.usable().is_none());
        assert!(gpus.check().findings.iter().any(Finding::is_problem));
    }
}
