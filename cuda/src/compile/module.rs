//! Compiled kernels on the device.

use std::ffi::CString;
use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::{result, sys};

use crate::driver::{CudaError, Gpu, Params, check};

/// A loaded module. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Module(Arc<Loaded>);

#[derive(Debug)]
struct Loaded {
    raw: sys::CUmodule,
    gpu: Gpu,
}

// SAFETY: a CUmodule may be used from any thread.
unsafe impl Send for Loaded {}
// SAFETY: it is never changed after it was loaded.
unsafe impl Sync for Loaded {}

/// A kernel of a module, which takes a `P`.
#[derive(Debug)]
pub struct Kernel<P> {
    raw: sys::CUfunction,
    module: Module,
    params: PhantomData<fn(&P)>,
}

// SAFETY: a CUfunction may be used from any thread.
unsafe impl<P> Send for Kernel<P> {}
// SAFETY: it is never changed; what is set for its launches the driver guards by itself.
unsafe impl<P> Sync for Kernel<P> {}

impl<P> Clone for Kernel<P> {
    fn clone(&self) -> Self {
        Self { raw: self.raw, module: self.module.clone(), params: PhantomData }
    }
}

impl Module {
    /// Loads a cubin onto the device.
    ///
    /// # Errors
    /// The driver refused it.
    pub fn load(gpu: &Gpu, cubin: &[u8]) -> Result<Self, CudaError> {
        gpu.make_current()?;
        // SAFETY: NVRTC made the image, or the cache held it whole; its header says how long it is.
        let raw = check("cuModuleLoadData", || unsafe { result::module::load_data(cubin.as_ptr().cast()) })?;
        Ok(Self(Arc::new(Loaded { raw, gpu: gpu.clone() })))
    }

    /// A kernel by its `extern "C"` name.
    ///
    /// # Errors
    /// There is none of that name.
    ///
    /// # Panics
    /// It does not take one parameter of the length of a `P`.
    pub fn kernel<P: Params>(&self, name: &str) -> Result<Kernel<P>, CudaError> {
        let raw = self.function(name)?;
        assert_eq!(n_param_bytes(raw)?, P::N_BYTES, "bytes of the parameters of {name}");
        Ok(Kernel { raw, module: self.clone(), params: PhantomData })
    }

    fn function(&self, name: &str) -> Result<sys::CUfunction, CudaError> {
        let c_name = CString::new(name).expect("kernel names hold no zero byte");
        // SAFETY: the module is loaded for as long as the kernel holds it.
        let found =
            check("cuModuleGetFunction", || unsafe { result::module::get_function(self.0.raw, c_name) });
        let raw = found.map_err(|error| match error {
            CudaError::Call { call, code, reason } => {
                CudaError::Call { call, code, reason: format!("{name}: {reason}") }
            }
            other => other,
        })?;
        // Before its first launch, which would otherwise load it: on the thread of the steps, and with the whole device
        // standing still for it.
        // SAFETY: the function belongs to a loaded module.
        check("cuFuncLoad", || unsafe { sys::cuFuncLoad(raw) }.result())?;
        Ok(raw)
    }

    /// Registers and bytes of local memory of a thread of a kernel.
    #[cfg(test)]
    pub(crate) fn usage(&self, name: &str) -> Result<(u32, u32), CudaError> {
        use sys::CUfunction_attribute_enum as Attribute;
        let raw = self.function(name)?;
        let attribute = |attribute| {
            check("cuFuncGetAttribute", || {
                // SAFETY: the function belongs to a loaded module.
                unsafe { result::function::get_function_attribute(raw, attribute) }
            })
            .map(|value| value as u32)
        };
        let n_registers = attribute(Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?;
        Ok((n_registers, attribute(Attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?))
    }
}

/// The length of a kernel's first parameter in bytes.
fn n_param_bytes(kernel: sys::CUfunction) -> Result<usize, CudaError> {
    let (mut offset, mut n_bytes) = (0, 0);
    check("cuFuncGetParamInfo", || {
        // SAFETY: the function belongs to a loaded module, and the pointers are valid for the call.
        unsafe { sys::cuFuncGetParamInfo(kernel, 0, &mut offset, &mut n_bytes) }.result()
    })?;
    Ok(n_bytes)
}

impl<P> Kernel<P> {
    pub(crate) fn raw(&self) -> sys::CUfunction {
        self.raw
    }

    /// The module that it is part of.
    #[must_use]
    pub fn module(&self) -> &Module {
        &self.module
    }

    /// Blocks that the whole device has room for at once.
    ///
    /// # Errors
    /// The driver refused.
    pub fn n_resident_blocks(&self, n_threads: usize, shared_bytes: usize) -> Result<usize, CudaError> {
        let mut n_blocks = 0;
        check("cuOccupancyMaxActiveBlocksPerMultiprocessor", || {
            // SAFETY: the function belongs to a loaded module, and the pointer is valid for the call.
            let asked = unsafe {
                sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
                    &mut n_blocks,
                    self.raw,
                    n_threads as i32,
                    shared_bytes,
                )
            };
            asked.result()
        })?;
        Ok(n_blocks.max(0) as usize * self.module.0.gpu.n_multiprocessors())
    }

    /// Allows a block more than 48 KiB of dynamic shared memory.
    ///
    /// # Errors
    /// The device has less.
    pub fn allow_shared_bytes(&self, n_bytes: usize) -> Result<(), CudaError> {
        use sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as ATTRIBUTE;
        // SAFETY: the function belongs to a loaded module.
        check("cuFuncSetAttribute", || unsafe {
            result::function::set_function_attribute(self.raw, ATTRIBUTE, n_bytes as i32)
        })
    }

    /// Allows clusters of more than the eight blocks that every device with clusters takes.
    ///
    /// # Errors
    /// The device knows no such clusters.
    pub fn allow_large_clusters(&self) -> Result<(), CudaError> {
        use sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED as ATTRIBUTE;
        // SAFETY: the function belongs to a loaded module.
        check("cuFuncSetAttribute", || unsafe {
            result::function::set_function_attribute(self.raw, ATTRIBUTE, 1)
        })
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        if self.gpu.make_current().is_ok() {
            // SAFETY: loaded by us and unloaded once.
            if let Err(error) = unsafe { result::module::unload(self.raw) } {
                tracing::warn!(%error, "cuModuleUnload");
            }
        }
    }
}
