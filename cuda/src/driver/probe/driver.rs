//! NVIDIA's driver and the devices it shows.

use std::env;
use std::ffi::{CStr, c_char, c_int, c_uint};
use std::fs;
use std::path::PathBuf;
use std::sync::OnceLock;

use libloading::Library as Opened;
use serde::Serialize;

use super::library::{self, Library, Spec, Version};
use super::{places, symbols};

/// `CUDA_ERROR_NO_DEVICE`
const NO_DEVICE: c_int = 100;

/// What came of looking for the driver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Driver {
    /// Its library.
    pub library: Library,
    /// The driver's own version, such as `580.159.04`, where the kernel tells.
    pub release: Option<String>,
    /// The devices it shows, in its order.
    pub devices: Vec<Device>,
    /// The call that failed, if one did.
    pub failure: Option<Failure>,
    /// Device files of NVIDIA's GPUs.
    pub device_files: Vec<PathBuf>,
    /// What `CUDA_VISIBLE_DEVICES` says: which devices the driver should show.
    pub visible_devices: Option<String>,
}

/// A device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Device {
    /// Its name.
    pub name: String,
    /// Compute capability, major and minor.
    pub compute_capability: (i32, i32),
    /// Bytes of its memory.
    pub total_bytes: u64,
}

/// A call that the driver refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Failure {
    /// The call.
    pub call: &'static str,
    /// The driver's number for what is wrong.
    pub code: i32,
    /// The driver's name for it.
    pub reason: String,
}

impl Driver {
    /// The version of CUDA that it supports.
    #[must_use]
    pub fn version(&self) -> Option<Version> {
        self.library.loaded.as_ref()?.version
    }

    /// Whether `CUDA_VISIBLE_DEVICES` hides every device on purpose: it is empty or begins with -1. Any other value
    /// asks for devices, and if none shows, it is wrong.
    #[must_use]
    pub fn is_hidden(&self) -> bool {
        let hides =
            |value: &String| value.is_empty() || value.split(',').next().is_some_and(|id| id.trim() == "-1");
        self.devices.is_empty() && self.visible_devices.as_ref().is_some_and(hides)
    }

    /// Whether the machine has a GPU of NVIDIA's or is said to have one, be it usable or not. One that the user has
    /// hidden does not count.
    #[must_use]
    pub fn has_gpu(&self) -> bool {
        let is_seen = !self.devices.is_empty() || self.failure.is_some() || !self.device_files.is_empty();
        !self.is_hidden() && (is_seen || self.visible_devices.is_some())
    }
}

/// Looks for the driver and asks it for its devices, once in a process. Quick on a machine without one.
#[must_use]
pub fn driver() -> &'static Driver {
    static DRIVER: OnceLock<Driver> = OnceLock::new();
    DRIVER.get_or_init(find)
}

fn find() -> Driver {
    let candidates = ["cuda", "nvcuda"].into_iter().flat_map(cudarc::get_lib_name_candidates).collect();
    let spec = Spec {
        name: "the NVIDIA driver",
        candidates,
        preferred: vec!["libcuda.so.1".to_owned()],
        functions: &symbols::DRIVER,
        version: library::driver_version,
    };
    let (library, opened) = spec.find(&places::of_libraries());
    let (devices, failure) = match opened {
        Some(opened) => {
            let listed = list(&opened);
            library::keep(opened);
            match listed {
                Ok(devices) => (devices, None),
                Err(failure) if failure.code == NO_DEVICE => (Vec::new(), None),
                Err(failure) => (Vec::new(), Some(failure)),
            }
        }
        None => (Vec::new(), None),
    };
    let visible_devices =
        env::var_os("CUDA_VISIBLE_DEVICES").map(|value| value.to_string_lossy().into_owned());
    let (release, device_files) = (release(), device_files());
    Driver { library, release, devices, failure, device_files, visible_devices }
}

// SAFETY: the signatures are those of cuda.h; what a call needs is said where it is made.
type Init = unsafe extern "C" fn(c_uint) -> c_int;
type GetCount = unsafe extern "C" fn(*mut c_int) -> c_int;
type Get = unsafe extern "C" fn(*mut c_int, c_int) -> c_int;
type GetName = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int;
type GetAttribute = unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int;
type TotalMem = unsafe extern "C" fn(*mut usize, c_int) -> c_int;
type ErrorName = unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int;

/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR` and `..._MINOR`
const CAPABILITY: (c_int, c_int) = (75, 76);

fn list(opened: &Opened) -> Result<Vec<Device>, Failure> {
    let check = |call: &'static str, code: c_int| match code {
        0 => Ok(()),
        code => Err(Failure { call, code, reason: error_name(opened, code) }),
    };
    let missing =
        |call: &'static str| Failure { call, code: -1, reason: "the function is missing".to_owned() };
    macro_rules! function {
        ($name:literal as $type:ty) => {
            // SAFETY: the type is that of cuda.h.
            *unsafe { opened.get::<$type>($name) }.map_err(|_| missing($name))?
        };
    }
    let init = function!("cuInit" as Init);
    let get_count = function!("cuDeviceGetCount" as GetCount);
    let get = function!("cuDeviceGet" as Get);
    let get_name = function!("cuDeviceGetName" as GetName);
    let get_attribute = function!("cuDeviceGetAttribute" as GetAttribute);
    let total_mem = function!("cuDeviceTotalMem_v2" as TotalMem);

    // SAFETY: flags have to be 0; it may be called again later.
    check("cuInit", unsafe { init(0) })?;
    let mut n_devices = 0;
    // SAFETY: the pointer is valid for the call, as are all below.
    check("cuDeviceGetCount", unsafe { get_count(&mut n_devices) })?;
    (0..n_devices)
        .map(|ordinal| {
            let mut device = 0;
            // SAFETY: as above.
            check("cuDeviceGet", unsafe { get(&mut device, ordinal) })?;
            let mut name = [0u8; 256];
            // SAFETY: the buffer is as long as it says, and its last byte stays 0.
            check("cuDeviceGetName", unsafe { get_name(name.as_mut_ptr().cast(), 255, device) })?;
            let (mut major, mut minor, mut total_bytes) = (0, 0, 0);
            // SAFETY: as above.
            check("cuDeviceGetAttribute", unsafe { get_attribute(&mut major, CAPABILITY.0, device) })?;
            // SAFETY: as above.
            check("cuDeviceGetAttribute", unsafe { get_attribute(&mut minor, CAPABILITY.1, device) })?;
            // SAFETY: as above.
            check("cuDeviceTotalMem_v2", unsafe { total_mem(&mut total_bytes, device) })?;
            let name = CStr::from_bytes_until_nul(&name).expect("the last byte is 0");
            Ok(Device {
                name: name.to_string_lossy().into_owned(),
                compute_capability: (major, minor),
                total_bytes: total_bytes as u64,
            })
        })
        .collect()
}

fn error_name(opened: &Opened, code: c_int) -> String {
    let mut name: *const c_char = std::ptr::null();
    // SAFETY: the type is that of cuda.h.
    if let Ok(function) = unsafe { opened.get::<ErrorName>("cuGetErrorName") } {
        // SAFETY: the pointer is valid for the call.
        unsafe { function(code, &mut name) };
    }
    if name.is_null() {
        return format!("error {code}");
    }
    // SAFETY: the driver gave a string of its own, which stays.
    unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
}

/// The version of the kernel's part, which has to be that of the library.
fn release() -> Option<String> {
    let text = fs::read_to_string("/sys/module/nvidia/version").or_else(|_| {
        fs::read_to_string("/proc/driver/nvidia/version").map(|text| release_in(&text).unwrap_or_default())
    });
    text.ok().map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
}

/// `NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 ...`
fn release_in(text: &str) -> Option<String> {
    let is_release =
        |word: &&str| word.contains('.') && word.split('.').all(|part| part.parse::<u32>().is_ok());
    text.lines().next()?.split_whitespace().find(is_release).map(str::to_owned)
}

/// `/dev/nvidia0` and so on.
fn device_files() -> Vec<PathBuf> {
    let is_gpu = |name: &str| name.strip_prefix("nvidia").is_some_and(|number| number.parse::<u32>().is_ok());
    let entries = fs::read_dir("/dev").into_iter().flatten().flatten();
    let mut files: Vec<_> = entries
        .filter(|entry| entry.file_name().to_str().is_some_and(is_gpu))
        .map(|entry| entry.path())
        .collect();
    files.sort();
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_line_names_the_release() {
        let text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC version:";
        assert_eq!(release_in(text).as_deref(), Some("580.159.04"));
        assert_eq!(release_in("nothing here"), None);
    }
}
