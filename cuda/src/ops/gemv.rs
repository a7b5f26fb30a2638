//! Products of a few rows with a weight matrix, at the speed of memory.

use cudarc::driver::{result, sys};

use super::common::{Dtype, address_or_null, expect, i32_of, suffix};
use crate::device::check as check_call;
use crate::{Arg, CudaError, Gpu, Kernel, Launch, Module, Slice, Source, Stream};

/// The kernels' source.
pub const SOURCE: Source =
    Source { file: "gemv.cu", text: concat!(include_str!("common.cuh"), include_str!("gemv.cu")) };

/// The most rows of X: the columns of an mma. With more of them cuBLASLt is faster.
pub const N_ROWS_MAX: usize = 8;

// As in gemv.cu.
const N_WARPS: usize = 16;
const TILE: usize = 16;
const PARTIAL_STRIDE: usize = 20;

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

/// What [`Gemv::fits`] has to know of an input and an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemvForm {
    /// Whether X is normalised on the way.
    pub has_norm: bool,
    /// Whether Y is [`GemvOutput::SwiGlu`].
    pub has_swiglu: bool,
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
    to_model: Kernel,
    to_f32: Kernel,
    add_f32: Kernel,
    swiglu: Kernel,
    norm_to_model: Kernel,
    norm_to_f32: Kernel,
    norm_swiglu: Kernel,
}

impl Kernels {
    fn of(module: &Module, dtype: Dtype, shared_bytes: usize) -> Result<Self, CudaError> {
        let kernel = |name: &str| {
            let kernel = module.kernel(&format!("gemv_{name}_{}", suffix(dtype)))?;
            kernel.allow_shared_bytes(shared_bytes)?;
            Ok::<_, CudaError>(kernel)
        };
        Ok(Self {
            to_model: kernel("to_model")?,
            to_f32: kernel("to_f32")?,
            add_f32: kernel("add_f32")?,
            swiglu: kernel("swiglu")?,
            norm_to_model: kernel("norm_to_model")?,
            norm_to_f32: kernel("norm_to_f32")?,
            norm_swiglu: kernel("norm_swiglu")?,
        })
    }
}

/// Steps under way in a warp; `RING` of gemv.cu.
fn ring_steps((major, _minor): (i32, i32)) -> usize {
    if (9..12).contains(&major) { 8 } else { 4 }
}

/// The most shared memory that a block can ask for.
fn shared_bytes_max(gpu: &Gpu) -> Result<usize, CudaError> {
    use sys::CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN as ATTRIBUTE;
    gpu.make_current()?;
    let mut device = 0;
    // SAFETY: the pointer is valid for the call.
    check_call("cuCtxGetDevice", unsafe { sys::cuCtxGetDevice(&mut device) }.result())?;
    // SAFETY: the device is that of the current context.
    let n_bytes = unsafe { result::device::get_attribute(device, ATTRIBUTE) };
    n_bytes
        .map(|n_bytes| n_bytes as usize)
        .map_err(|error| CudaError::Call { call: "cuDeviceGetAttribute", reason: error.to_string() })
}

impl Gemv {
    /// Finds the kernels for a model of type `dtype` in the module of [`SOURCE`].
    ///
    /// # Errors
    /// The driver refused.
    pub fn new(gpu: &Gpu, module: &Module, dtype: Dtype) -> Result<Self, CudaError> {
        let shared_bytes_max = shared_bytes_max(gpu)?;
        Ok(Self {
            kernels: Kernels::of(module, dtype, shared_bytes_max)?,
            dtype,
            n_multiprocessors: gpu.n_multiprocessors(),
            ring_steps: ring_steps(gpu.compute_capability()),
            shared_bytes_max,
        })
    }

    /// Whether a shape is one for these kernels: few rows, columns in groups of 16 bytes, and room for the
    /// normalised rows in shared memory.
    #[must_use]
    pub fn fits(&self, shape: GemvShape, form: GemvForm) -> bool {
        (1..=N_ROWS_MAX).contains(&shape.n_rows)
            && (shape.n_in * self.dtype.n_bytes()).is_multiple_of(16)
            && self.shared_bytes(shape, form) <= self.shared_bytes_max
    }

    /// As the kernels lay it out.
    fn shared_bytes(&self, shape: GemvShape, form: GemvForm) -> usize {
        let scales_bytes = 16 * 4;
        if self.dtype == Dtype::F32 {
            return shape.n_rows * N_WARPS * 4 + scales_bytes;
        }
        let n_matrices = if form.has_swiglu { 2 } else { 1 };
        let ring_bytes = N_WARPS * self.ring_steps * 1024;
        let partial_bytes = n_matrices * N_WARPS * shape.n_rows * PARTIAL_STRIDE * 4;
        let x_stride = shape.n_in.next_multiple_of(64) + 32;
        let x_bytes = if form.has_norm { shape.n_rows * x_stride * self.dtype.n_bytes() } else { 0 };
        ring_bytes + partial_bytes + scales_bytes + x_bytes
    }

    /// Computes the product.
    ///
    /// # Errors
    /// The driver refused the launch.
    ///
    /// # Panics
    /// A slice is too short, the shape does not fit ([`Self::fits`]), or a normalised residual is also the output.
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
        let args = [
            x.into(),
            address_or_null(norm_weight),
            Arg::F32(eps),
            weights.matrix.into(),
            address_or_null(weights.bias),
            y.into(),
            Arg::I32(i32_of(n_rows)),
            Arg::I32(i32_of(n_out)),
            Arg::I32(i32_of(n_in)),
        ];
        let n_blocks = n_out.div_ceil(TILE).min(self.n_multiprocessors);
        let launch = Launch {
            grid: (n_blocks as u32, 1, 1),
            block: (32 * N_WARPS as u32, 1, 1),
            shared_bytes: self.shared_bytes(shape, form) as u32,
        };
        // SAFETY: the kernel's arguments in order, lengths and shared memory checked above.
        unsafe { launch.run(stream, kernel, &args) }
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
