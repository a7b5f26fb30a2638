//! Addresses on the device, of which the beginning has memory: more or less of it as time goes on.
//!
//! What lies there keeps its address, so that page ids and captured launches stay valid when memory comes and goes.
//! Memory that is mapped also goes back without a word to the work of others, where the driver waits for the whole
//! device before it frees an allocation.

use cudarc::driver::sys;

use super::{Buffer, Slice};
use crate::driver::{CudaError, Gpu, check};

/// As long as granules are made where as much is wanted at a time.
const GRANULE_BYTES: usize = 64 << 20;

/// Granules of a long range; each costs about 100 µs when it gets its memory, and no less when it loses it.
const N_GRANULES: usize = 512;

/// As long as they are made so that there are not more.
const GRANULE_BYTES_MAX: usize = 256 << 20;

/// What one call gives memory to, or takes it from: the driver's locks are held meanwhile, which others want too.
const CALL_BYTES_MAX: usize = 1 << 30;

/// Bytes that get their memory together, in a range of so many: whole items in whole units of the driver, not much more
/// than are wanted at a time, and a small part of the range.
pub(crate) fn granule_bytes(
    item_bytes: usize,
    unit_bytes: usize,
    wanted_bytes: usize,
    range_bytes: usize,
) -> usize {
    let least = item_bytes / greatest_common_divisor(item_bytes, unit_bytes) * unit_bytes;
    let of_range = (range_bytes / N_GRANULES).min(GRANULE_BYTES_MAX);
    least * (wanted_bytes.min(GRANULE_BYTES).max(of_range) / least).max(1)
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

/// Puts memory behind addresses, and takes it away.
pub(crate) trait Mapper {
    /// Puts memory behind addresses that have none, all of it in one piece.
    fn map(&mut self, at: Slice) -> Result<(), CudaError>;

    /// Lets mapped addresses be read and written, over any number of pieces.
    fn allow(&mut self, at: Slice) -> Result<(), CudaError>;

    /// Takes the memory of whole pieces.
    fn unmap(&mut self, at: Slice) -> Result<(), CudaError>;
}

/// Which granules of a range have memory: the first ones.
#[derive(Debug)]
pub(crate) struct Granules<M: Mapper> {
    mapper: M,
    range: Slice,
    granule_bytes: usize,
    /// From the start of the range, what can be read and written.
    usable_bytes: usize,
    /// What has memory: more than is usable only after a call that was to take it back failed.
    mapped_bytes: usize,
}

impl<M: Mapper> Granules<M> {
    pub(crate) fn new(mapper: M, range: Slice, granule_bytes: usize) -> Self {
        Self { mapper, range, granule_bytes, usable_bytes: 0, mapped_bytes: 0 }
    }

    /// The end of the granule that ends with or after `n_bytes`; the last one ends with the range.
    fn end(&self, n_bytes: usize) -> usize {
        n_bytes.next_multiple_of(self.granule_bytes).min(self.range.n_bytes)
    }

    /// Gives memory to the granules of the first `n_bytes`, and takes it from the others. Memory that cannot be had
    /// leaves all as it was.
    fn resize(&mut self, n_bytes: usize) -> Result<(), CudaError> {
        let end = self.end(n_bytes);
        if end > self.usable_bytes { self.grow(end) } else { self.shrink(end) }
    }

    fn grow(&mut self, end: usize) -> Result<(), CudaError> {
        let start = self.usable_bytes;
        let added = self.range.part(start, end - start);
        let grown = self.map(end).and_then(|()| self.mapper.allow(added));
        match grown {
            Ok(()) => self.usable_bytes = end,
            Err(_) => {
                if let Err(error) = self.shrink(start) {
                    let n_bytes = self.mapped_bytes - start;
                    tracing::warn!(%error, n_bytes, "device memory is not given back");
                }
            }
        }
        grown
    }

    fn map(&mut self, end: usize) -> Result<(), CudaError> {
        while self.mapped_bytes < end {
            let next = self.end(self.mapped_bytes + 1);
            self.mapper.map(self.range.part(self.mapped_bytes, next - self.mapped_bytes))?;
            self.mapped_bytes = next;
        }
        Ok(())
    }

    fn shrink(&mut self, end: usize) -> Result<(), CudaError> {
        let step = (CALL_BYTES_MAX / self.granule_bytes).max(1) * self.granule_bytes;
        while self.mapped_bytes > end {
            // Back to a granule's end, also from the last one, which may be shorter.
            let start = end.max((self.mapped_bytes - 1) / step * step);
            self.mapper.unmap(self.range.part(start, self.mapped_bytes - start))?;
            self.mapped_bytes = start;
            self.usable_bytes = self.usable_bytes.min(start);
        }
        Ok(())
    }
}

/// Addresses on the device. Given back, with their memory, when dropped, which waits for all streams as dropping a
/// [`Buffer`] does.
#[derive(Debug)]
pub(crate) struct Reserved {
    what: &'static str,
    n_bytes: usize,
    memory: Memory,
    gpu: Gpu,
}

#[derive(Debug)]
enum Memory {
    Granules(Granules<Mapped>),
    /// The device maps nothing: all of it has memory for ever.
    Whole(Buffer),
}

impl Gpu {
    /// Reserves addresses; none has memory before [`Reserved::resize`]. Those of a device that cannot map all have
    /// memory at once.
    ///
    /// # Errors
    /// The driver refused; on a device that cannot map, there is not enough memory.
    ///
    /// # Panics
    /// The granule is no multiple of the driver's unit.
    pub(crate) fn reserve(
        &self,
        what: &'static str,
        n_bytes: usize,
        granule_bytes: usize,
    ) -> Result<Reserved, CudaError> {
        let memory = match self.map_unit_bytes() {
            None => Memory::Whole(self.allocate(what, n_bytes)?),
            Some(unit_bytes) => {
                assert!(granule_bytes.is_multiple_of(unit_bytes), "{granule_bytes} by {unit_bytes}");
                self.make_current()?;
                let reserved_bytes = n_bytes.max(1).next_multiple_of(unit_bytes);
                let mut address = 0;
                check("cuMemAddressReserve", || {
                    // SAFETY: the pointer is valid for the call, and the length a multiple of the unit. No wish for an
                    // alignment beyond the unit's, or for a place.
                    unsafe { sys::cuMemAddressReserve(&mut address, reserved_bytes, 0, 0, 0) }.result()
                })?;
                let range = Slice { address, n_bytes: reserved_bytes };
                Memory::Granules(Granules::new(Mapped(self.clone()), range, granule_bytes))
            }
        };
        Ok(Reserved { what, n_bytes, memory, gpu: self.clone() })
    }

    /// Takes memory that will neither grow nor shrink: as [`Gpu::allocate`], outside of the cache.
    ///
    /// # Errors
    /// There is not enough; the numbers are in the error.
    pub(crate) fn take(&self, what: &'static str, n_bytes: usize) -> Result<Reserved, CudaError> {
        let unit_bytes = self.map_unit_bytes().unwrap_or(1);
        let granule_bytes = n_bytes.clamp(1, CALL_BYTES_MAX).next_multiple_of(unit_bytes);
        let mut reserved = self.reserve(what, n_bytes, granule_bytes)?;
        reserved.resize(n_bytes)?;
        Ok(reserved)
    }

    /// What [`Gpu::take`] takes of the device for so many bytes.
    pub(crate) fn taken_bytes(&self, n_bytes: usize) -> usize {
        n_bytes.next_multiple_of(self.map_unit_bytes().unwrap_or(1))
    }
}

impl Reserved {
    /// All addresses, with memory or without.
    pub(crate) fn slice(&self) -> Slice {
        match &self.memory {
            Memory::Granules(granules) => granules.range.part(0, self.n_bytes),
            Memory::Whole(buffer) => buffer.slice(),
        }
    }

    /// Bytes from the start that have memory.
    pub(crate) fn mapped_bytes(&self) -> usize {
        match &self.memory {
            Memory::Granules(granules) => granules.usable_bytes.min(self.n_bytes),
            Memory::Whole(_) => self.n_bytes,
        }
    }

    /// Gives memory to the granules of the first `n_bytes` and takes it from all others; what lies in granules that keep
    /// theirs stays. No work that is in a stream or will come may touch those that lose it: nothing is waited for.
    ///
    /// # Errors
    /// There is not enough memory: the numbers are in the error, and nothing has changed. Or the driver refused; or the
    /// device cannot map, and not all are to have memory.
    ///
    /// # Panics
    /// So many have no addresses.
    pub(crate) fn resize(&mut self, n_bytes: usize) -> Result<(), CudaError> {
        assert!(n_bytes <= self.n_bytes, "{n_bytes} of {}", self.n_bytes);
        let Memory::Granules(granules) = &mut self.memory else {
            if n_bytes == self.n_bytes {
                return Ok(());
            }
            let reason = format!("{} cannot take memory from the {}", self.gpu.name(), self.what);
            return Err(CudaError::Call { call: "cuMemUnmap", code: None, reason });
        };
        self.gpu.make_current()?;
        let needed_bytes = granules.end(n_bytes).saturating_sub(granules.mapped_bytes);
        let mut resized = granules.resize(n_bytes);
        if resized.as_ref().is_err_and(CudaError::is_out_of_memory) && self.gpu.pool().idle_bytes() > 0 {
            self.gpu.trim()?;
            resized = granules.resize(n_bytes);
        }
        match resized {
            Err(error) if error.is_out_of_memory() => Err(CudaError::OutOfMemory {
                what: self.what,
                needed_bytes: needed_bytes as u64,
                free_bytes: self.gpu.free_bytes().unwrap_or(0) as u64,
                total_bytes: self.gpu.total_bytes() as u64,
            }),
            resized => resized,
        }
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let Memory::Granules(granules) = &mut self.memory else { return };
        let taken = self.gpu.wait_for_streams().and_then(|()| granules.shrink(0));
        if let Err(error) = taken {
            // Lost: better than taken from under work that is left.
            tracing::warn!(%error, n_bytes = granules.mapped_bytes, "device memory is not given back");
            return;
        }
        let Slice { address, n_bytes } = granules.range;
        // SAFETY: reserved by us, given back once, and nothing is mapped there any more.
        if let Err(error) = unsafe { sys::cuMemAddressFree(address, n_bytes) }.result() {
            tracing::warn!(%error, "cuMemAddressFree");
        }
    }
}

/// Memory of a device, mapped by the driver; its context has to be current. The cache is locked for each call: while one
/// thread measures what something takes of the device, no other takes or gives memory.
#[derive(Debug)]
struct Mapped(Gpu);

impl Mapper for Mapped {
    fn map(&mut self, at: Slice) -> Result<(), CudaError> {
        let _pool = self.0.pool();
        let properties = properties(self.0.device());
        let mut handle = 0;
        check("cuMemCreate", || {
            // SAFETY: both pointers are valid for the call, and the length is a multiple of the unit.
            unsafe { sys::cuMemCreate(&mut handle, at.n_bytes, &properties, 0) }.result()
        })?;
        let mapped = check("cuMemMap", || {
            // SAFETY: the addresses are reserved by the owner of this value and have no memory; the handle is of their
            // length.
            unsafe { sys::cuMemMap(at.address, at.n_bytes, 0, handle, 0) }.result()
        });
        // SAFETY: created above and released once. Where it is mapped the mapping keeps the memory from here on, so that
        // unmapping it gives it back; where it is not, this does.
        if let Err(error) = unsafe { sys::cuMemRelease(handle) }.result() {
            tracing::warn!(%error, "cuMemRelease");
        }
        mapped
    }

    fn allow(&mut self, at: Slice) -> Result<(), CudaError> {
        let access = sys::CUmemAccessDesc {
            location: location(self.0.device()),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        check("cuMemSetAccess", || {
            // SAFETY: all of it was mapped just now, and one description is given.
            unsafe { sys::cuMemSetAccess(at.address, at.n_bytes, &access, 1) }.result()
        })
    }

    fn unmap(&mut self, at: Slice) -> Result<(), CudaError> {
        let _pool = self.0.pool();
        // SAFETY: whole pieces that were mapped and not unmapped since; the caller of `Reserved::resize` promises that no
        // work touches them, and `Reserved` waits for all streams before it goes.
        check("cuMemUnmap", || unsafe { sys::cuMemUnmap(at.address, at.n_bytes) }.result())
    }
}

fn location(device: sys::CUdevice) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device }
}

/// Memory of a device, for this process alone.
fn properties(device: sys::CUdevice) -> sys::CUmemAllocationProp {
    sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        location: location(device),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    }
}

/// What memory of a device is mapped by; `None` when it cannot be mapped. The device's context has to be current.
///
/// # Errors
/// The driver refused.
pub(crate) fn map_unit_bytes(device: sys::CUdevice) -> Result<Option<usize>, CudaError> {
    use sys::CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED as ATTRIBUTE;
    // SAFETY: the device came from the driver.
    let can_map = check("cuDeviceGetAttribute", || unsafe {
        cudarc::driver::result::device::get_attribute(device, ATTRIBUTE)
    })?;
    if can_map == 0 {
        return Ok(None);
    }
    let properties = properties(device);
    let mut unit_bytes = 0;
    check("cuMemGetAllocationGranularity", || {
        let least = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: both pointers are valid for the call.
        unsafe { sys::cuMemGetAllocationGranularity(&mut unit_bytes, &properties, least) }.result()
    })?;
    // Between driver and device there may be something that passes on less than the device can do.
    let mut handle = 0;
    let created = check("cuMemCreate", || {
        // SAFETY: both pointers are valid for the call, and the length is the unit.
        unsafe { sys::cuMemCreate(&mut handle, unit_bytes, &properties, 0) }.result()
    });
    use sys::CUresult::{CUDA_ERROR_NOT_PERMITTED, CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_OPERATING_SYSTEM};
    match created {
        Ok(()) => {
            // SAFETY: created above, released once, and mapped nowhere.
            if let Err(error) = unsafe { sys::cuMemRelease(handle) }.result() {
                tracing::warn!(%error, "cuMemRelease");
            }
        }
        Err(CudaError::Call {
            code: Some(CUDA_ERROR_NOT_PERMITTED | CUDA_ERROR_NOT_SUPPORTED | CUDA_ERROR_OPERATING_SYSTEM),
            reason,
            ..
        }) => {
            tracing::warn!(
                reason,
                "the device cannot map memory: models keep what they get when they are loaded"
            );
            return Ok(None);
        }
        // There is none left at this moment, or worse: the next call that takes some will say so.
        Err(_) => {}
    }
    Ok(Some(unit_bytes))
}

#[cfg(test)]
#[path = "reserved_tests.rs"]
mod tests;
