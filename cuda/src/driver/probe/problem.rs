//! What stands between a machine and CUDA, and what to install.

use std::path::PathBuf;

use serde::Serialize;

use super::{CUDA_MIN, Version};

/// One thing that is missing or does not fit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Problem {
    /// The user has hidden all devices.
    #[error("no NVIDIA GPU: CUDA_VISIBLE_DEVICES hides it")]
    Hidden,
    /// The driver's library is not there.
    #[error("no NVIDIA driver: libcuda.so.1 is not to be found{}{}", although(.device_files), under(.visible_devices))]
    NoDriver {
        /// Device files of GPUs that are there all the same.
        device_files: Vec<PathBuf>,
        /// `CUDA_VISIBLE_DEVICES`, where it asks for devices.
        visible_devices: Option<String>,
    },
    /// The driver is too old for the libraries that are recommended.
    #[error("the NVIDIA driver is for CUDA {found}, one for {needed} is needed")]
    DriverTooOld {
        /// The version of CUDA that it supports.
        found: Version,
        /// The least that it should support.
        needed: Version,
    },
    /// The driver does not start.
    #[error("the NVIDIA driver does not start: {call}: {reason}{}", under(.visible_devices))]
    DriverFailed {
        /// The call that failed.
        call: &'static str,
        /// What the driver said.
        reason: String,
        /// `CUDA_VISIBLE_DEVICES`, where it asks for devices.
        visible_devices: Option<String>,
    },
    /// The driver shows no device.
    #[error("the NVIDIA driver shows no device{}", under(.visible_devices))]
    NoDevice {
        /// `CUDA_VISIBLE_DEVICES`, where it asks for devices.
        visible_devices: Option<String>,
    },
    /// The first device is too old for the kernels.
    #[error("{name} has compute capability {major}.{minor}, 8.0 is needed")]
    DeviceTooOld {
        /// The device.
        name: String,
        /// Its compute capability.
        major: i32,
        /// Its compute capability.
        minor: i32,
    },
    /// A library is not there.
    #[error("{library} for CUDA {} is not to be found{}", CUDA_MIN.major, in_brackets(.refused))]
    NoLibrary {
        /// What it is called.
        library: &'static str,
        /// What the loader said of files that are there.
        refused: Vec<String>,
    },
    /// A library needs a newer driver.
    #[error("{library} {found} needs a driver for CUDA {}, this one is for CUDA {driver}; it was loaded as {file}", .found.major)]
    TooNew {
        /// What it is called.
        library: &'static str,
        /// Its version.
        found: Version,
        /// The driver's.
        driver: Version,
        /// The file.
        file: String,
    },
    /// A library lacks functions.
    #[error("{library} ({file}) lacks {}", some(.functions))]
    TooOld {
        /// What it is called.
        library: &'static str,
        /// The file.
        file: String,
        /// What it lacks.
        functions: Vec<&'static str>,
    },
    /// The headers that kernels include are not there.
    #[error("the CUDA header {header} is not to be found")]
    NoHeader {
        /// The header.
        header: &'static str,
    },
}

fn although(device_files: &[PathBuf]) -> String {
    let files: Vec<_> = device_files.iter().map(|file| file.display().to_string()).collect();
    if files.is_empty() { String::new() } else { format!(", although {} is there", files.join(", ")) }
}

fn under(visible_devices: &Option<String>) -> String {
    visible_devices.as_ref().map_or_else(String::new, |value| format!("; CUDA_VISIBLE_DEVICES is {value:?}"))
}

fn in_brackets(reasons: &[String]) -> String {
    if reasons.is_empty() { String::new() } else { format!(" ({})", reasons.join("; ")) }
}

/// The first few; a library of the wrong kind lacks them all.
fn some(functions: &[&str]) -> String {
    const N_SHOWN: usize = 3;
    let shown = functions[..functions.len().min(N_SHOWN)].join(", ");
    match functions.len().saturating_sub(N_SHOWN) {
        0 => shown,
        n_more => format!("{shown} and {n_more} more"),
    }
}

impl Problem {
    /// What to install or to do, as one line.
    #[must_use]
    pub fn remedy(&self) -> String {
        match self {
            Self::Hidden => {
                "unset CUDA_VISIBLE_DEVICES, or name devices in it: `nvidia-smi -L` lists them".to_owned()
            }
            Self::NoDriver { device_files, .. } if device_files.is_empty() => {
                "for an NVIDIA GPU install the driver, 580 or newer: `sudo apt-get install nvidia-driver-580`, \
                 or https://www.nvidia.com/drivers"
                    .to_owned()
            }
            Self::NoDriver { .. } => "in a container, start it with `--gpus all`; otherwise install the driver's \
                                      libraries: `sudo apt-get install libnvidia-compute-580`"
                .to_owned(),
            Self::DriverFailed { reason, .. } if reason == "CUDA_ERROR_STUB_LIBRARY" => {
                "take the folder `stubs` out of LD_LIBRARY_PATH: its libcuda.so is for linking only".to_owned()
            }
            Self::DriverFailed { .. } => {
                "`nvidia-smi` should work first; after an update of the driver the machine has to be started anew"
                    .to_owned()
            }
            Self::NoDevice { visible_devices: Some(_) } => {
                "unset CUDA_VISIBLE_DEVICES, or name devices in it that `nvidia-smi -L` lists; a container needs \
                 `--gpus all`"
                    .to_owned()
            }
            Self::NoDevice { visible_devices: None } => {
                "`nvidia-smi -L` should list it; a container needs `--gpus all`".to_owned()
            }
            Self::DeviceTooOld { .. } => {
                "an Ampere or newer GPU is needed; CUDA_VISIBLE_DEVICES chooses among several".to_owned()
            }
            Self::NoLibrary { library, .. } => package(library).install(),
            Self::TooNew { library, .. } => {
                format!("update the driver, or {}", package(library).install())
            }
            Self::DriverTooOld { .. } | Self::TooOld { library: "the NVIDIA driver", .. } => {
                "install nvidia-driver-580 or newer, for a container on its host: \
                 `sudo apt-get install nvidia-driver-580`, or https://www.nvidia.com/drivers"
                    .to_owned()
            }
            Self::TooOld { library, .. } => package(library).install(),
            Self::NoHeader { .. } => HEADERS.install(),
        }
    }
}

/// Names of a package in NVIDIA's wheels and in NVIDIA's apt repository.
struct Package {
    wheel: &'static str,
    apt: &'static str,
}

const HEADERS: Package = Package { wheel: "nvidia-cuda-runtime", apt: "cuda-cudart-dev" };

fn package(library: &str) -> Package {
    match library {
        "cuBLASLt" => Package { wheel: "nvidia-cublas", apt: "libcublas" },
        _ => Package { wheel: "nvidia-cuda-nvrtc", apt: "cuda-nvrtc" },
    }
}

impl Package {
    fn install(&self) -> String {
        let (Self { wheel, apt }, Version { major, minor }) = (self, CUDA_MIN);
        format!("`pip install '{wheel}=={major}.*'` or `sudo apt-get install {apt}-{major}-{minor}`")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_name_the_value_and_remedies_the_command() {
        let versions = |major| Version { major, minor: 1 };
        let problem = Problem::TooNew {
            library: "cuBLASLt",
            found: versions(14),
            driver: versions(13),
            file: "libcublasLt.so".to_owned(),
        };
        let said = problem.to_string();
        assert!(said.contains("14.1") && said.contains("13.1") && said.contains("libcublasLt.so"), "{said}");
        assert!(problem.remedy().contains("pip install 'nvidia-cublas==13.*'"), "{}", problem.remedy());
        let problem = Problem::NoLibrary { library: "NVRTC", refused: vec![] };
        let remedy = problem.remedy();
        assert!(
            remedy.contains("'nvidia-cuda-nvrtc==13.*'") && remedy.contains("cuda-nvrtc-13-0"),
            "{remedy}"
        );
        let functions = vec!["a", "b", "c", "d", "e"];
        let problem = Problem::TooOld { library: "NVRTC", file: "libnvrtc.so".to_owned(), functions };
        assert_eq!(problem.to_string(), "NVRTC (libnvrtc.so) lacks a, b, c and 2 more");
        let problem = Problem::NoDriver {
            device_files: vec![PathBuf::from("/dev/nvidia0")],
            visible_devices: Some("7".to_owned()),
        };
        assert!(problem.to_string().ends_with("; CUDA_VISIBLE_DEVICES is \"7\""), "{problem}");
        assert!(problem.to_string().contains("/dev/nvidia0") && problem.remedy().contains("--gpus all"));
    }
}
