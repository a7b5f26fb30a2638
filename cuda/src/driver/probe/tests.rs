use super::*;

fn library(name: &'static str, version: Option<(u32, u32)>) -> Library {
    let version = version.map(|(major, minor)| Version { major, minor });
    let loaded = version.map(|version| Loaded {
        name: format!("{name}.so"),
        path: None,
        version: Some(version),
        found_by: FoundBy::Loader,
    });
    Library { name, looked_for: vec![], loaded, refused: vec![], missing_functions: vec![] }
}

/// A machine on which everything is there.
fn healthy() -> Probe {
    let device = Device { name: "a card".to_owned(), compute_capability: (9, 0), total_bytes: 80 << 30 };
    Probe {
        driver: Driver {
            library: library("the NVIDIA driver", Some((13, 0))),
            release: Some("580.159.04".to_owned()),
            devices: vec![device],
            failure: None,
            device_files: vec![PathBuf::from("/dev/nvidia0")],
            visible_devices: None,
        },
        nvrtc: library("NVRTC", Some((13, 0))),
        nvrtc_builtins: Some(library("NVRTC's builtins", Some((13, 0)))),
        cublas_lt: library("cuBLASLt", Some((13, 1))),
        include_dir: Some(PathBuf::from("/usr/include")),
        library_places: vec![],
        header_places: vec![],
    }
}

fn only(probe: &Probe) -> Problem {
    let mut problems = probe.problems();
    assert_eq!(problems.len(), 1, "{problems:?}");
    problems.remove(0)
}

#[test]
fn a_machine_with_everything_is_usable() {
    assert_eq!(healthy().problems(), []);
    assert!(healthy().is_usable() && healthy().driver.has_gpu());
    let mut older = healthy();
    older.cublas_lt = library("cuBLASLt", Some((12, 8)));
    assert!(older.is_usable(), "a driver runs the libraries of older versions");
}

#[test]
fn each_thing_that_is_missing_is_a_problem_of_its_own() {
    let mut probe = healthy();
    probe.driver.library = library("the NVIDIA driver", None);
    probe.driver.devices.clear();
    assert!(matches!(only(&probe), Problem::NoDriver { device_files, .. } if device_files.len() == 1));
    assert!(probe.driver.has_gpu(), "a GPU is there, though its driver is not");

    let mut probe = healthy();
    probe.driver.devices.clear();
    assert_eq!(only(&probe), Problem::NoDevice { visible_devices: None });
    assert!(probe.driver.has_gpu(), "a GPU is there, though the driver does not show it");

    probe.driver.device_files.clear();
    probe.driver.failure =
        Some(Failure { call: "cuInit", code: 34, reason: "CUDA_ERROR_STUB_LIBRARY".to_owned() });
    assert!(only(&probe).remedy().contains("stubs") && probe.driver.has_gpu());

    let mut probe = healthy();
    probe.driver.devices[0].compute_capability = (7, 5);
    assert!(matches!(only(&probe), Problem::DeviceTooOld { major: 7, minor: 5, .. }));

    let mut probe = healthy();
    probe.nvrtc = library("NVRTC", None);
    probe.nvrtc_builtins = None;
    assert!(matches!(only(&probe), Problem::NoLibrary { library: "NVRTC", .. }));

    let mut probe = healthy();
    probe.cublas_lt = library("cuBLASLt", Some((14, 0)));
    assert!(matches!(only(&probe), Problem::TooNew { library: "cuBLASLt", .. }));

    let mut probe = healthy();
    probe.driver.library.missing_functions.push("cuEventElapsedTime_v2");
    assert!(only(&probe).remedy().contains("580"));

    let mut probe = healthy();
    probe.include_dir = None;
    assert!(matches!(only(&probe), Problem::NoHeader { header: "cuda_fp16.h", .. }));
}

#[test]
fn a_gpu_is_hidden_by_an_empty_list_or_by_minus_one_alone() {
    for hiding in ["", "-1", "-1,0", " -1"] {
        let mut probe = healthy();
        probe.driver.devices.clear();
        probe.driver.visible_devices = Some(hiding.to_owned());
        assert!(probe.driver.is_hidden() && !probe.driver.has_gpu(), "{hiding:?}");
        assert!(only(&probe).to_string().contains("CUDA_VISIBLE_DEVICES hides it"), "{hiding:?}");
        // The first problem is the reason that is named.
        probe.driver.library = library("the NVIDIA driver", None);
        assert!(!probe.driver.has_gpu(), "{hiding:?}");
        assert_eq!(probe.problems()[0], Problem::Hidden, "{hiding:?}");
    }
}

#[test]
fn a_list_that_shows_no_device_is_named_as_the_problem() {
    for wrong in ["0", "7", "0,-1", "GPU-nowhere", ",", " "] {
        let mut probe = healthy();
        probe.driver.devices.clear();
        probe.driver.device_files.clear();
        probe.driver.visible_devices = Some(wrong.to_owned());
        let named = format!("CUDA_VISIBLE_DEVICES is {wrong:?}");
        assert!(probe.driver.has_gpu(), "{wrong:?} is not a reason to use the processor in silence");
        let problem = only(&probe);
        assert!(problem.to_string().contains(&named), "{problem}");
        assert!(problem.remedy().contains("unset CUDA_VISIBLE_DEVICES"), "{problem}");
        probe.driver.library = library("the NVIDIA driver", None);
        assert!(probe.driver.has_gpu() && only(&probe).to_string().contains(&named), "{wrong:?}");
    }
    let mut probe = healthy();
    probe.driver.visible_devices = Some("0".to_owned());
    assert!(probe.is_usable() && probe.driver.has_gpu());
}

#[test]
fn a_driver_from_before_cuda_13_is_too_old_and_nothing_else_is_said_of_it() {
    let mut probe = healthy();
    probe.driver.library = library("the NVIDIA driver", Some((12, 9)));
    probe.driver.library.missing_functions.push("cuEventElapsedTime_v2");
    let problem = only(&probe);
    let (found, needed) = (Version { major: 12, minor: 9 }, Version { major: 13, minor: 0 });
    assert_eq!(problem, Problem::DriverTooOld { found, needed });
    assert!(problem.to_string().contains("12.9") && problem.to_string().contains("13.0"), "{problem}");
    assert!(problem.remedy().contains("nvidia-driver-580 or newer"), "{}", problem.remedy());

    probe.nvrtc = library("NVRTC", None);
    let remedy = probe.problems()[1].remedy();
    assert!(remedy.contains("'nvidia-cuda-nvrtc==13.*'"), "{remedy}");

    probe.driver.devices.clear();
    assert_eq!(
        probe.problems()[0],
        Problem::DriverTooOld { found, needed },
        "before the device it cannot show"
    );
}

#[test]
fn libraries_of_the_drivers_version_come_first() {
    assert_eq!(names("nvrtc", 13), ["libnvrtc.so.13", "libnvrtc.so.12"]);
    assert!(major() >= CUDA_MIN.major);
    // A name that cudarc does not try would be loaded for nothing.
    for stem in ["nvrtc", "cublasLt", "cuda"] {
        let candidates = cudarc::get_lib_name_candidates(stem);
        let names =
            if stem == "cuda" { vec!["libcuda.so.1".to_owned()] } else { names(stem, CUDA_MIN.major) };
        names.iter().for_each(|name| assert!(candidates.contains(name), "{name}: {candidates:?}"));
    }
}

#[test]
fn this_machine_can_be_probed() {
    let first = probe();
    assert_eq!(first.include_dir, include_dir());
    assert!(first.driver.library.loaded.is_some() || !first.is_usable());
    let has_gpu = crate::Gpu::open(0).is_ok();
    assert!(!has_gpu || first.driver.has_gpu());
    // What was loaded here is what cudarc gets, from wherever it lies.
    // SAFETY: loads the library, nothing else.
    assert_eq!(first.nvrtc.loaded.is_some(), unsafe { cudarc::nvrtc::sys::is_culib_present() });
}
