//! Matrices of a model, in copies that no cache holds together, and the products with them.

use trellis_engine::model::ModelConfig;

use super::OpSpeed;
use super::ops::{Bench, Work};
use crate::blas::{Blas, MatmulShape, Update, fill_with_numbers};
use crate::ops::common::{Dtype, Element};
use crate::ops::gemv::{GemvInput, GemvOutput, GemvShape, GemvWeights, N_ROWS_MAX};
use crate::{Buffer, Card, CudaError, Slice, Stream};

/// Copies of a matrix that are used in turn; together at least this long, four times the largest L2.
const COLD_BYTES: usize = 512 << 20;

/// Memory for the copies, and the library.
pub(super) struct Products {
    matrices: Buffer,
    blas: Blas,
}

/// A projection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Projection {
    pub(super) name: &'static str,
    pub(super) n_out: usize,
    pub(super) n_in: usize,
}

/// Where the norm before a product is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NormPlace {
    /// On the way.
    Inside,
    /// In a launch of its own.
    Apart,
}

/// What becomes of the product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    /// It is stored.
    Model(Slice),
    /// It is stored.
    F32(Slice),
    /// It is added to the residual stream.
    Residual(Slice),
}

impl Target {
    fn element(self) -> Element {
        match self {
            Self::Model(_) => Element::Model,
            Self::F32(_) | Self::Residual(_) => Element::F32,
        }
    }

    fn update(self) -> Update {
        match self {
            Self::Model(_) | Self::F32(_) => Update::Replace,
            Self::Residual(_) => Update::Add,
        }
    }

    fn gemv_output(self) -> GemvOutput {
        match self {
            Self::Model(y) => GemvOutput::Model(y),
            Self::F32(y) => GemvOutput::F32(y),
            Self::Residual(y) => GemvOutput::AddF32(y),
        }
    }

    fn slice(self) -> Slice {
        let (Self::Model(slice) | Self::F32(slice) | Self::Residual(slice)) = self;
        slice
    }
}

impl Projection {
    fn shape(self, n_rows: usize) -> GemvShape {
        GemvShape { n_rows, n_out: self.n_out, n_in: self.n_in }
    }
}

impl Products {
    pub(super) fn new(
        card: &Card,
        stream: &Stream,
        config: &ModelConfig,
        dtype: Dtype,
    ) -> Result<Self, CudaError> {
        let ModelConfig { vocab_size, hidden_size, intermediate_size, .. } = *config;
        let largest = vocab_size.max(2 * intermediate_size) * hidden_size * dtype.n_bytes();
        let matrices = card.gpu().allocate("measuring kernels", largest.max(COLD_BYTES))?;
        fill_with_numbers(stream, matrices.slice(), dtype)?;
        let blas = card.blas()?;
        Ok(Self { matrices, blas })
    }

    /// The matrix for a launch, each copy in its turn.
    pub(super) fn matrix(&self, n_bytes: usize, launch_idx: usize) -> Slice {
        let all = self.matrices.slice();
        let stride = n_bytes.next_multiple_of(256);
        let n_copies = 1 + (all.n_bytes - n_bytes) / stride;
        all.part(launch_idx % n_copies * stride, n_bytes)
    }
}

impl Bench<'_> {
    /// `target = RMSNorm(residual) W^T`, as the decoder computes it: in one launch where there are few rows.
    pub(super) fn normed_product(
        &self,
        speeds: &mut Vec<OpSpeed>,
        projection: Projection,
        n_rows: usize,
        normed: Slice,
        target: Target,
        n_a_step: usize,
    ) -> Result<NormPlace, CudaError> {
        let shape = projection.shape(n_rows);
        if self.kernels.gemv.has_room_for_norm(shape, target.gemv_output()) {
            let names = (projection.name, "gemv, norm inside");
            self.gemv(speeds, names, shape, self.residual(), target, n_a_step)?;
            return Ok(NormPlace::Inside);
        }
        self.product(speeds, projection, n_rows, normed, target, n_a_step)?;
        Ok(NormPlace::Apart)
    }

    /// `target = x W^T`.
    pub(super) fn product(
        &self,
        speeds: &mut Vec<OpSpeed>,
        projection: Projection,
        n_rows: usize,
        x: Slice,
        target: Target,
        n_a_step: usize,
    ) -> Result<(), CudaError> {
        if n_rows > N_ROWS_MAX {
            return self.matmul(speeds, projection, n_rows, x, target, n_a_step);
        }
        let (names, x) = ((projection.name, "gemv"), GemvInput::Plain(x));
        self.gemv(speeds, names, projection.shape(n_rows), x, target, n_a_step)
    }

    /// Gate and up projection of a few rows with the activation, in one launch.
    pub(super) fn gated_product(
        &self,
        speeds: &mut Vec<OpSpeed>,
        projection: Projection,
        n_rows: usize,
        n_a_step: usize,
    ) -> Result<NormPlace, CudaError> {
        let Projection { name, n_out, n_in } = projection;
        let shape = GemvShape { n_rows, n_out: n_out / 2, n_in };
        let output = GemvOutput::SwiGlu(self.activations.inner);
        let (input, kernel, x_bytes, place) = if self.kernels.gemv.has_room_for_norm(shape, output) {
            (self.residual(), "gemv, norm and SwiGLU inside", 4, NormPlace::Inside)
        } else {
            let input = GemvInput::Plain(self.activations.mlp_normed);
            (input, "gemv, SwiGLU inside", self.dtype.n_bytes(), NormPlace::Apart)
        };
        let matrix_bytes = n_out * n_in * self.dtype.n_bytes();
        let work = Work {
            n_bytes: matrix_bytes + n_rows * (x_bytes * n_in + n_out / 2 * self.dtype.n_bytes()),
            n_operations: 2 * n_rows * n_out * n_in,
        };
        self.time(speeds, (name, kernel), n_a_step, work, |idx| {
            let weights = GemvWeights { matrix: self.products.matrix(matrix_bytes, idx), bias: None };
            self.kernels.gemv.run(self.stream, shape, input, weights, output)
        })?;
        Ok(place)
    }

    /// The RMSNorm of the residual stream, on the way.
    fn residual(&self) -> GemvInput {
        GemvInput::RmsNorm {
            residual: self.activations.residual,
            weight: self.numbers.slice(),
            eps: self.config.rms_norm_eps,
        }
    }

    fn gemv(
        &self,
        speeds: &mut Vec<OpSpeed>,
        names: (&'static str, &'static str),
        shape: GemvShape,
        input: GemvInput,
        target: Target,
        n_a_step: usize,
    ) -> Result<(), CudaError> {
        let matrix_bytes = shape.n_out * shape.n_in * self.dtype.n_bytes();
        let x_element = match input {
            GemvInput::Plain(_) => Element::Model,
            GemvInput::RmsNorm { .. } => Element::F32,
        };
        let work = self.product_work(shape.n_rows, shape.n_out, shape.n_in, x_element, target);
        let output = target.gemv_output();
        self.time(speeds, names, n_a_step, work, |idx| {
            let weights = GemvWeights { matrix: self.products.matrix(matrix_bytes, idx), bias: None };
            self.kernels.gemv.run(self.stream, shape, input, weights, output)
        })
    }

    fn matmul(
        &self,
        speeds: &mut Vec<OpSpeed>,
        projection: Projection,
        n_rows: usize,
        x: Slice,
        target: Target,
        n_a_step: usize,
    ) -> Result<(), CudaError> {
        let Projection { name, n_out, n_in } = projection;
        let shape = MatmulShape {
            n_tokens: n_rows,
            n_out,
            n_in,
            dtype: self.dtype,
            out: target.element(),
            update: target.update(),
        };
        self.products.blas.tune(self.stream, &[shape], &|| false)?;
        let matrix_bytes = n_out * n_in * self.dtype.n_bytes();
        let work = self.product_work(n_rows, n_out, n_in, Element::Model, target);
        self.time(speeds, (name, "cuBLASLt"), n_a_step, work, |idx| {
            let matrix = self.products.matrix(matrix_bytes, idx);
            self.products.blas.matmul(self.stream, shape, x, matrix, target.slice())
        })
    }

    fn product_work(&self, n_rows: usize, n_out: usize, n_in: usize, x: Element, y: Target) -> Work {
        let y_bytes = y.element().n_bytes(self.dtype) * if y.update() == Update::Add { 2 } else { 1 };
        Work {
            n_bytes: n_out * n_in * self.dtype.n_bytes()
                + n_rows * (n_in * x.n_bytes(self.dtype) + n_out * y_bytes),
            n_operations: 2 * n_rows * n_out * n_in,
        }
    }
}
