//! What can go wrong between us and the card.

use cudarc::driver::sys::CUresult;

/// A failure of the driver or one of its libraries.
#[derive(Clone, Debug, thiserror::Error)]
pub enum CudaError {
    /// A library is missing.
    #[error("{library} is not to be found; looked for {}", looked_for.join(", "))]
    NoLibrary {
        /// What it is called.
        library: &'static str,
        /// File names that were tried.
        looked_for: Vec<String>,
    },
    /// There is no such device.
    #[error("no CUDA device {ordinal}: the driver has {n_devices}")]
    NoDevice {
        /// The device asked for.
        ordinal: usize,
        /// Devices there are.
        n_devices: usize,
    },
    /// The device is too old for the kernels.
    #[error("{device} has compute capability {major}.{minor}, 8.0 is needed")]
    TooOld {
        /// The device's name.
        device: String,
        /// Compute capability.
        major: i32,
        /// Compute capability.
        minor: i32,
    },
    /// The driver refused a call.
    #[error("{call}: {reason}")]
    Call {
        /// The call.
        call: &'static str,
        /// The driver's code; absent for a call of a library above it.
        code: Option<CUresult>,
        /// What the driver said.
        reason: String,
    },
    /// The device's memory is used up.
    #[error("{needed_bytes} bytes of device memory needed for {what}, {free_bytes} of {total_bytes} free")]
    OutOfMemory {
        /// What for.
        what: &'static str,
        /// Bytes asked for.
        needed_bytes: u64,
        /// Bytes free.
        free_bytes: u64,
        /// Bytes of the device.
        total_bytes: u64,
    },
    /// A kernel does not compile.
    #[error("{file} does not compile for {arch}:\n{log}")]
    Compile {
        /// The source.
        file: &'static str,
        /// The architecture.
        arch: String,
        /// What the compiler said.
        log: String,
    },
}
