//! Products of a few rows with a weight matrix, at the speed of memory.

use cudarc::driver::{result, sys};

use super::common::{Dtype, expect, i32_of, type_name};
use crate::driver::{check as check_call, params};
use crate::{CudaError, Gpu, Kernel, Launch, Module, Pointer, Slice, Source, Stream};

/// The most rows of X: the columns of an mma. With more of them cuBLASLt is faster.
pub const N_ROWS_MAX: usize = 8;

/// Warps of a block.
const N_WARPS: usize = 16;
/// Rows of W that a block takes at once.
const TILE: usize = 16;
/// Bytes of W that a warp takes at once: 32 columns of a tile, in 16 bits.
const STEP_BYTES: usize = TILE * 32 * 2;
/// Floats between the partial sums of two tokens.
const PARTIAL_STRIDE: usize = 20;
/// Places for the scales of the norm.
const N_SCALES: usize = 16;

/// The kernels' sources, for a model of type `dtype` on a device of this compute capability: those that take X as it is,
/// those that normalise it.
#[must_use]
pub fn sources(dtype: Dtype, capability: (i32, i32)) -> [Source; 2] {
    [0, 1].map(|with_norm| source(dtype, capability).with("WITH_NORM", with_norm))
}

fn source(dtype: Dtype, capability: (i32, i32)) -> Source {
    let source = match dtype {
        Dtype::F32 => {
            let text =
                concat!(include_str!("common.cuh"), include_str!("gemv.cuh"), include_str!("gemv_exact.cu"));
            Source::new("gemv_exact.cu", text)
        }
        Dtype::F16 | Dtype::Bf16 => {
            let text = concat!(include_str!("common.cuh"), include_str!("gemv.cuh"), include_str!("gemv.cu"));
            Source::new("gemv.cu", text)
                .with("RING", ring_steps(capability))
                .with("STEP_BYTES", STEP_BYTES)
                .with("PARTIAL_STRIDE", PARTIAL_STRIDE)
        }
    };
    source
        .with("MODEL_T", type_name(dtype))
        .with("N_MAX", N_ROWS_MAX)
        .with("N_WARPS", N_WARPS)
        .with("TILE", TILE)
        .with("N_SCALES", N_SCALES)
}

/// As in `gemv.cuh`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct GemvParams {
    x: Pointer,
    norm_weight: Pointer,
    w: Pointer,
    bias: Pointer,
    y: Pointer,
    n: i32,
    n_out: i32,
    n_in: i32,
    x_stride: i32,
    eps: f32,
    unused: i32,
}
params!(GemvParams, 64);

/// `Y[n_rows, n_out]` from `X[n_rows, n_in]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemvShape {
    /// Rows of X, 1 to [`N_ROWS_MAX`]. All are computed; a caller with fewer ignores the rest.
    pub n_rows: usize,
    /// Length of a row of Y.
    pub n_out: usize,
    /// Length of a row of X.
    pub n_in: usize,
}

impl GemvShape {
    /// Values from one row of the normalised X in shared memory to the next: an odd multiple of 64 bytes of 16-bit values,
    /// so that neighbouring rows lie in different banks.
    fn x_stride(self) -> usize {
        self.n_in.next_multiple_of(64) + 32
    }
}

/// X.
#[derive(Clone, Copy, Debug)]
pub enum GemvInput {
    /// X itself.
    Plain(Slice), // T [n_rows, n_in]
    /// X is the RMSNorm of the residual stream.
    RmsNorm {
        /// The residual stream; not where the product goes.
        residual: Slice, // f32 [n_rows, n_in]
        /// Factors.
        weight: Slice, // T [n_in]
        /// Added to the mean square.
        eps: f32,
    },
}

/// W and what is added to the product.
#[derive(Clone, Copy, Debug)]
pub struct GemvWeights {
    /// The matrix; for [`GemvOutput::SwiGlu`] the gate's rows, then the up projection's.
    pub matrix: Slice, // T [n_out, n_in] or [2, n_out, n_in]
    /// Added to every row.
    pub bias: Option<Slice>, // T [n_out] or [2, n_out]
}

/// Y.
#[derive(Clone, Copy, Debug)]
pub enum GemvOutput {
    /// The product.
    Model(Slice), // T [n_rows, n_out]
    /// The product.
    F32(Slice), // f32 [n_rows, n_out]
    /// The product is added to the residual stream. X has to be [`GemvInput::Plain`].
    AddF32(Slice), // f32 [n_rows, n_out]
    /// `silu(gate) · up` of a fused gate and up projection.
    SwiGlu(Slice), // T [n_rows, n_out]
}

/// What the shared memory depends on besides the shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct GemvForm {
    /// Whether X is normalised on the way.
    has_norm: bool,
    /// Whether Y is [`GemvOutput::SwiGlu`].
    has_swiglu: bool,
}

/// Products of few rows; see `gemv.cu`.
#[derive(Clone, Debug)]
pub struct Gemv {
    kernels: Kernels,
    dtype: Dtype,
    n_multiprocessors: usize,
    ring_steps: usize,
    shared_bytes_max: usize,
}

#[derive(Clone, Debug)]
struct Kernels {
    to_model: Kernel<GemvParams>,
    to_f32: Kernel<GemvParams>,
    add_f32: Kernel<GemvParams>,
    swiglu: Kernel<GemvParams>,
    norm_to_model: Kernel<GemvParams>,
    norm_to_f32: Kernel<GemvParams>,
    norm_swiglu: Kernel<GemvParams>,
}

impl Kernels {
    fn of([plain, norm]: &[Module; 2], shared_bytes: usize) -> Result<Self, CudaError> {
        let kernel = |module: &Module, name: &str| {
            let kernel = module.kernel(&format!("gemv_{name}"))?;
            kernel.allow_shared_bytes(shared_bytes)?;
            Ok::<_, CudaError>(kernel)
        };
        Ok(Self {
            to_model: kernel(plain, "to_model")?,
            to_f32: kernel(plain, "to_f32")?,
            add_f32: kernel(plain, "add_f32")?,
            swiglu: kernel(plain, "swiglu")?,
            norm_to_model: kernel(norm, "norm_to_model")?,
            norm_to_f32: kernel(norm, "norm_to_f32")?,
            norm_swiglu: kernel(norm, "norm_swiglu")?,
        })
    }
}

/// Steps under way in a warp: as many as leave room for rows of X in shared memory.
fn ring_steps((major, _minor): (i32, i32)) -> usize {
    if (9..12).contains(&major) { 8 } else { 4 }
}

/// The most shared memory that a block can ask for.
fn shared_bytes_max(gpu: &Gpu) -> Result<usize, CudaError> {
    use sys::CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN as ATTRIBUTE;
    gpu.make_current()?;
    let mut device = 0;
    // SAFETY: the pointer is valid for the call.
    check_call("cuCtxGetDevice", || unsafe { sys::cuCtxGetDevice(&mut device) }.result())?;
    // SAFETY: the device is that of the current context.
    let n_bytes =
        check_call("cuDeviceGetAttribute", || unsafe { result::device::get_attribute(device, ATTRIBUTE) })?;
    Ok(n_bytes as usize)
}

impl Gemv {
    /// Finds the kernels in the modules of [`sources`] for the same type and device.
    ///
    /// # Errors
    /// The driver refused.
    pub fn new(gpu: &Gpu, modules: &[Module; 2], dtype: Dtype) -> Result<Self, CudaError> {
        let shared_bytes_max = shared_bytes_max(gpu)?;
        Ok(Self {
            kernels: Kernels::of(modules, shared_bytes_max)?,
            dtype,
            n_multiprocessors: gpu.n_multiprocessors(),
            ring_steps: ring_steps(gpu.compute_capability()),
            shared_bytes_max,
        })
    }

    /// Whether the shared memory has room for the normalised rows, so that X may be [`GemvInput::RmsNorm`].
    #[must_use]
    pub fn has_room_for_norm(&self, shape: GemvShape, output: GemvOutput) -> bool {
        let has_swiglu = matches!(output, GemvOutput::SwiGlu(_));
        self.fits(shape, GemvForm { has_norm: true, has_swiglu })
    }

    /// Whether a shape is one for these kernels: few rows, columns in groups of 16 bytes, and room in shared memory.
    fn fits(&self, shape: GemvShape, form: GemvForm) -> bool {
        (1..=N_ROWS_MAX).contains(&shape.n_rows)
            && (shape.n_in * self.dtype.n_bytes()).is_multiple_of(16)
            && self.shared_bytes(shape, form) <= self.shared_bytes_max
    }

    /// As the kernels lay it out.
    fn shared_bytes(&self, shape: GemvShape, form: GemvForm) -> usize {
        let scales_bytes = N_SCALES * 4;
        if self.dtype == Dtype::F32 {
            return shape.n_rows * N_WARPS * 4 + scales_bytes;
        }
        let n_matrices = if form.has_swiglu { 2 } else { 1 };
        let ring_bytes = N_WARPS * self.ring_steps * STEP_BYTES;
        let partial_bytes = n_matrices * N_WARPS * shape.n_rows * PARTIAL_STRIDE * 4;
        let x_bytes = if form.has_norm { shape.n_rows * shape.x_stride() * self.dtype.n_bytes() } else { 0 };
        ring_bytes + partial_bytes + scales_bytes + x_bytes
    }

    /// Computes the product.
    ///
    /// # Errors
    /// The driver refused the launch.
    ///
    /// # Panics
    /// A slice is too short, there are more than [`N_ROWS_MAX`] rows or none, they are not a multiple of 16 bytes, there
    /// is no [room](Self::has_room_for_norm) to normalise them, or a normalised residual is also the output.
    pub fn run(
        &self,
        stream: &Stream,
        shape: GemvShape,
        input: GemvInput,
        weights: GemvWeights,
        output: GemvOutput,
    ) -> Result<(), CudaError> {
        let form = GemvForm {
            has_norm: matches!(input, GemvInput::RmsNorm { .. }),
            has_swiglu: matches!(output, GemvOutput::SwiGlu(_)),
        };
        assert!(self.fits(shape, form), "{shape:?} with {form:?} in {:?}", self.dtype);
        self.check(shape, form, input, weights, output);
        let GemvShape { n_rows, n_out, n_in } = shape;
        let kernels = &self.kernels;
        let kernel = match (input, output) {
            (GemvInput::Plain(_), GemvOutput::Model(_)) => &kernels.to_model,
            (GemvInput::Plain(_), GemvOutput::F32(_)) => &kernels.to_f32,
            (GemvInput::Plain(_), GemvOutput::AddF32(_)) => &kernels.add_f32,
            (GemvInput::Plain(_), GemvOutput::SwiGlu(_)) => &kernels.swiglu,
            (GemvInput::RmsNorm { .. }, GemvOutput::Model(_)) => &kernels.norm_to_model,
            (GemvInput::RmsNorm { .. }, GemvOutput::F32(_)) => &kernels.norm_to_f32,
            (GemvInput::RmsNorm { .. }, GemvOutput::SwiGlu(_)) => &kernels.norm_swiglu,
            (GemvInput::RmsNorm { .. }, GemvOutput::AddF32(_)) => {
                panic!("blocks would add to a residual that others still normalise")
            }
        };
        let (x, norm_weight, eps) = match input {
            GemvInput::Plain(x) => (x, None, 0.0),
            GemvInput::RmsNorm { residual, weight, eps } => (residual, Some(weight), eps),
        };
        let (GemvOutput::Model(y) | GemvOutput::F32(y) | GemvOutput::AddF32(y) | GemvOutput::SwiGlu(y)) =
            output;
        let params = GemvParams {
            x: x.into(),
            norm_weight: norm_weight.into(),
            w: weights.matrix.into(),
            bias: weights.bias.into(),
            y: y.into(),
            n: i32_of(n_rows),
            n_out: i32_of(n_out),
            n_in: i32_of(n_in),
            x_stride: i32_of(shape.x_stride()),
            eps,
            unused: 0,
        };
        let n_blocks = n_out.div_ceil(TILE).min(self.n_multiprocessors);
        let launch = Launch {
            grid: (n_blocks as u32, 1, 1),
            block: (32 * N_WARPS as u32, 1, 1),
            shared_bytes: self.shared_bytes(shape, form) as u32,
        };
        // SAFETY: lengths and shared memory were checked above.
        unsafe { launch.run(stream, kernel, &params) }
    }

    fn check(
        &self,
        shape: GemvShape,
        form: GemvForm,
        input: GemvInput,
        weights: GemvWeights,
        output: GemvOutput,
    ) {
        let GemvShape { n_rows, n_out, n_in } = shape;
        let element_bytes = self.dtype.n_bytes();
        let n_matrices = if form.has_swiglu { 2 } else { 1 };
        assert!(n_out > 0 && n_in > 0, "{shape:?}");
        expect("the matrix", weights.matrix, n_matrices * n_out * n_in, element_bytes);
        if let Some(bias) = weights.bias {
            expect("the bias", bias, n_matrices * n_out, element_bytes);
        }
        match input {
            GemvInput::Plain(x) => expect("x", x, n_rows * n_in, element_bytes),
            GemvInput::RmsNorm { residual, weight, .. } => {
                expect("the residual", residual, n_rows * n_in, 4);
                expect("the norm's weight", weight, n_in, element_bytes);
            }
        }
        match output {
            GemvOutput::Model(y) | GemvOutput::SwiGlu(y) => expect("y", y, n_rows * n_out, element_bytes),
            GemvOutput::F32(y) | GemvOutput::AddF32(y) => expect("y", y, n_rows * n_out, 4),
        }
    }
}

#[cfg(test)]
#[path = "gemv_tests.rs"]
mod tests;
