//! What a device can do at most, measured on itself.

use cudarc::driver::result;

use super::timer::Timer;
use crate::blas::{MatmulShape, Update, fill_with_numbers};
use crate::driver::check;
use crate::ops::common::{Dtype, Element};
use crate::ops::stream::{self, StreamRead};
use crate::{Buffer, Card, CudaError, Module, Slice, Stream};

/// Memory that is read or copied: many times any cache, if there is so much.
const MEMORY_BYTES: usize = 4 << 30;
/// Lengths stay round.
const GRANULE_BYTES: usize = 1 << 20;
/// Long enough that the start of a copy over the bus does not show.
const HOST_BYTES: usize = 256 << 20;
/// Rows and columns of the matrices.
const PRODUCT_LEN: usize = 8192;

/// Rates that no kernel passes by much. Medians.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceLimits {
    /// Of a kernel that only reads.
    pub read_bytes_per_s: f64,
    /// Of a copy within the device, bytes read and bytes written.
    pub copy_bytes_per_s: f64,
    /// Operations a second of a product of two bf16 matrices of 8,192 rows and columns, accumulated in f32.
    pub product_flops: f64,
    /// From page-locked memory of the host.
    pub host_to_device_bytes_per_s: f64,
}

impl DeviceLimits {
    /// Measures, in a few seconds in which no model on the card computes; takes up to 8 GiB of the device's memory, and gives it back.
    ///
    /// # Errors
    /// Less than 1 GiB of memory is free, a library is missing, or the device failed.
    pub fn measure(card: &Card) -> Result<Self, CudaError> {
        card.gpu().make_current()?;
        let limits = measure(card, &card.stream());
        card.gpu().trim()?;
        limits
    }
}

fn measure(card: &Card, stream: &Stream) -> Result<DeviceLimits, CudaError> {
    let gpu = card.gpu();
    let timer = Timer::new(gpu, stream)?;
    let n_bytes = (gpu.free_bytes()? / 4).clamp(HOST_BYTES, MEMORY_BYTES) / GRANULE_BYTES * GRANULE_BYTES;
    let what = "measuring limits";
    let (source, copy) = (gpu.allocate(what, n_bytes)?, gpu.allocate(what, n_bytes)?);
    fill_with_numbers(stream, source.slice(), Dtype::Bf16)?;

    let module = Module::load(gpu, &card.compiler().cubin(&stream::source())?)?;
    let read = StreamRead::new(&module, gpu.n_multiprocessors())?;
    let out = gpu.allocate(what, 4 * read.n_blocks())?;
    let read_s = timer.seconds(4, |_| read.run(stream, source.slice(), out.slice()))?;
    let copy_s = timer.seconds(4, |_| copy_within(stream, source.slice(), copy.slice()))?;

    let mut host = gpu.pinned::<u8>(HOST_BYTES)?;
    source.slice().download(stream, &mut host)?;
    let to_device = |_| copy.slice().upload(stream, &host[..]);
    let host_s = timer.seconds(1, to_device)?;
    stream.synchronize()?;
    drop(copy);

    Ok(DeviceLimits {
        read_bytes_per_s: n_bytes as f64 / read_s,
        copy_bytes_per_s: 2.0 * n_bytes as f64 / copy_s,
        product_flops: 2.0 * (PRODUCT_LEN as f64).powi(3) / product_s(card, stream, &timer, &source)?,
        host_to_device_bytes_per_s: HOST_BYTES as f64 / host_s,
    })
}

fn copy_within(stream: &Stream, from: Slice, to: Slice) -> Result<(), CudaError> {
    assert!(from.n_bytes <= to.n_bytes, "room for the copy");
    // SAFETY: both ranges are slices of live buffers that do not meet.
    check("cuMemcpyDtoDAsync", || unsafe {
        result::memcpy_dtod_async(to.address, from.address, from.n_bytes, stream.raw())
    })
}

/// Seconds of the product of two matrices that lie at the start of `memory`.
fn product_s(card: &Card, stream: &Stream, timer: &Timer<'_>, memory: &Buffer) -> Result<f64, CudaError> {
    let matrix_bytes = PRODUCT_LEN * PRODUCT_LEN * Dtype::Bf16.n_bytes();
    let y = card.gpu().allocate("measuring limits", matrix_bytes)?;
    let blas = card.blas()?;
    let shape = MatmulShape {
        n_tokens: PRODUCT_LEN,
        n_out: PRODUCT_LEN,
        n_in: PRODUCT_LEN,
        dtype: Dtype::Bf16,
        out: Element::Model,
        update: Update::Replace,
    };
    blas.tune(stream, &[shape], &|| false)?;
    let [x, w] = [0, 1].map(|idx| memory.slice().part(idx * matrix_bytes, matrix_bytes));
    timer.seconds(10, |_| blas.matmul(stream, shape, x, w, y.slice()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every sm_80 or newer has more than this, and none ten times of what there is today.
    #[test]
    fn limits_are_plausible() {
        if crate::testing::gpu().is_none() {
            return;
        }
        let card = Card::open(0, None).expect("a card");
        let limits = DeviceLimits::measure(&card).expect("limits");
        println!("{limits:?}");
        assert!((1e11..8e13).contains(&limits.read_bytes_per_s), "{limits:?}");
        assert!((1e11..8e13).contains(&limits.copy_bytes_per_s), "{limits:?}");
        assert!((1e13..2e16).contains(&limits.product_flops), "{limits:?}");
        assert!((1e9..1e12).contains(&limits.host_to_device_bytes_per_s), "{limits:?}");
    }
}
