//! The library's state, which the models of a card share.

use cudarc::cublaslt::{result, sys as lt};
use cudarc::driver::sys;

use crate::driver::check;
use crate::{CudaError, Gpu};

/// The library's state on one device, for as long as the process lives: `cublasLtDestroy` waits for the whole context,
/// which must not be while another thread captures a stream in it: the driver may crash. PyTorch never destroys its
/// handles either. A device that is opened again leaves one behind.
#[derive(Clone, Copy, Debug)]
pub struct Handle {
    raw: lt::cublasLtHandle_t,
    versions: Versions,
}

// SAFETY: the library's handle may be used from any thread, and by several at once.
unsafe impl Send for Handle {}

/// As the libraries number them: 130100 is cuBLASLt 13.1, 13010 a driver for CUDA 13.1.
#[derive(Clone, Copy, Debug)]
pub(super) struct Versions {
    pub(super) library: usize,
    pub(super) driver: usize,
}

impl Handle {
    /// Finds the library, which takes a while to begin.
    ///
    /// # Errors
    /// The library is missing, newer than the driver, or refused to start.
    pub fn new(gpu: &Gpu) -> Result<Self, CudaError> {
        // SAFETY: loads the library, nothing else.
        if !unsafe { lt::is_culib_present() } {
            let looked_for = cudarc::get_lib_name_candidates("cublasLt");
            return Err(CudaError::NoLibrary { library: "cuBLASLt", looked_for });
        }
        gpu.make_current()?;
        let versions = Versions::read()?;
        let Versions { library, driver } = versions;
        if library / 10_000 > driver / 1000 {
            let reason = format!(
                "cuBLASLt {library} is for CUDA {}, the driver only for CUDA {}",
                library / 10_000,
                driver / 1000
            );
            return Err(CudaError::Call { call: "cublasLtGetVersion", code: None, reason });
        }
        let raw = result::create_handle().map_err(|error| CudaError::Call {
            call: "cublasLtCreate",
            code: None,
            reason: error.to_string(),
        })?;
        Ok(Self { raw, versions })
    }

    pub(super) fn raw(self) -> lt::cublasLtHandle_t {
        self.raw
    }

    pub(super) fn versions(self) -> Versions {
        self.versions
    }
}

impl Versions {
    /// The library has to be there.
    fn read() -> Result<Self, CudaError> {
        let mut driver = 0;
        // SAFETY: the pointer is valid for the call.
        check("cuDriverGetVersion", || unsafe { sys::cuDriverGetVersion(&mut driver) }.result())?;
        // SAFETY: the library is there.
        Ok(Self { library: unsafe { lt::cublasLtGetVersion() }, driver: driver as usize })
    }
}
