//! Every call of the driver that a step makes goes through here: an error gets its name and its damage.

use cudarc::driver::result::DriverError;
use cudarc::driver::sys::CUresult;
use trellis_engine::backend::Damage;

use super::CudaError;

/// Makes a call and turns its error into ours.
///
/// # Errors
/// The driver refused the call, or reports what went wrong in earlier work.
pub(crate) fn check<T>(
    name: &'static str,
    call: impl FnOnce() -> Result<T, DriverError>,
) -> Result<T, CudaError> {
    #[cfg(test)]
    if let Some(code) = super::faults::next(name) {
        return Err(CudaError::Call { call: name, code: Some(code), reason: format!("{code:?}, injected") });
    }
    call().map_err(|error| CudaError::refused(name, error))
}

impl CudaError {
    /// The error of a call that the driver refused.
    pub(crate) fn refused(call: &'static str, error: DriverError) -> Self {
        Self::Call { call, code: Some(error.0), reason: error.to_string() }
    }

    /// How far the damage goes.
    #[must_use]
    pub fn damage(&self) -> Damage {
        match self {
            Self::Call { code: Some(code), .. } => damage(*code),
            // Of a library: if the device is lost, the next call of the driver says so.
            Self::Call { code: None, .. } | Self::OutOfMemory { .. } => Damage::Call,
            Self::NoLibrary { .. } | Self::NoDevice { .. } | Self::TooOld { .. } | Self::Compile { .. } => {
                Damage::Call
            }
        }
    }

    /// Whether memory of the device lacked.
    pub(crate) fn is_out_of_memory(&self) -> bool {
        match self {
            Self::OutOfMemory { .. } => true,
            Self::Call { code, .. } => *code == Some(CUresult::CUDA_ERROR_OUT_OF_MEMORY),
            _ => false,
        }
    }
}

/// How far the damage of an error goes, from the driver's description of each: those after which it asks that the
/// process be started again, those of hardware that does not come back by itself, and those of a context that is gone.
fn damage(code: CUresult) -> Damage {
    match code {
        // In the work of this process.
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
        | CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
        | CUresult::CUDA_ERROR_ASSERT
        | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR
        | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
        | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
        | CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE
        | CUresult::CUDA_ERROR_INVALID_PC
        | CUresult::CUDA_ERROR_LAUNCH_FAILED
        | CUresult::CUDA_ERROR_TENSOR_MEMORY_LEAK
        | CUresult::CUDA_ERROR_EXTERNAL_DEVICE
        // In the hardware, or in work of others that took this process with it.
        | CUresult::CUDA_ERROR_ECC_UNCORRECTABLE
        | CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE
        | CUresult::CUDA_ERROR_CONTAINED
        // The device or its context is not there any more.
        | CUresult::CUDA_ERROR_NOT_INITIALIZED
        | CUresult::CUDA_ERROR_DEINITIALIZED
        | CUresult::CUDA_ERROR_NO_DEVICE
        | CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE
        | CUresult::CUDA_ERROR_INVALID_CONTEXT
        | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED
        | CUresult::CUDA_ERROR_SYSTEM_NOT_READY
        | CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
        | CUresult::CUDA_ERROR_MPS_CONNECTION_FAILED
        | CUresult::CUDA_ERROR_MPS_RPC_FAILURE
        | CUresult::CUDA_ERROR_MPS_SERVER_NOT_READY
        | CUresult::CUDA_ERROR_MPS_CLIENT_TERMINATED
        // The driver does not know what is the matter, so there is no reason to trust it.
        | CUresult::CUDA_ERROR_UNKNOWN => Damage::Device,
        _ => Damage::Call,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_process_does_not_survive_is_told_from_what_it_does() {
        use CUresult::*;
        let lost = [
            CUDA_ERROR_ILLEGAL_ADDRESS,
            CUDA_ERROR_LAUNCH_FAILED,
            CUDA_ERROR_ECC_UNCORRECTABLE,
            CUDA_ERROR_ASSERT,
            CUDA_ERROR_CONTEXT_IS_DESTROYED,
            CUDA_ERROR_UNKNOWN,
        ];
        assert!(lost.into_iter().all(|code| damage(code) == Damage::Device));
        let refused = [
            CUDA_ERROR_OUT_OF_MEMORY,
            CUDA_ERROR_INVALID_VALUE,
            CUDA_ERROR_NOT_SUPPORTED,
            CUDA_ERROR_NOT_READY,
            CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
            CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
            CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
            CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
            CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE,
        ];
        assert!(refused.into_iter().all(|code| damage(code) == Damage::Call));
    }
}
