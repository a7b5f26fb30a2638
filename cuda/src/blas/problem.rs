//! One product in the library's terms.

use std::ffi::c_void;
use std::ptr::from_ref;

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys as lt;
use lt::cublasStatus_t as Status;

use super::handle::Handle;
use super::{MatmulShape, Update};
use crate::ops::common::{Dtype, Element};
use crate::{CudaError, Slice, Stream};

/// The library's choice of kernel and its settings: 64 bytes that it can read back.
pub(super) type Algorithm = lt::cublasLtMatmulAlgo_t;

/// Every slice starts at a multiple of this.
const ALIGNMENT_BYTES: u32 = 16;

/// What a launch works on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operands {
    pub(super) x: Slice,
    pub(super) w: Slice,
    pub(super) y: Slice,
    pub(super) workspace: Slice,
}

/// The descriptors of a shape.
///
/// The library thinks in columns. A row-major matrix `[rows, columns]` is to it a matrix of `columns` by `rows`,
/// so it computes `Y^T = W X^T`: its A is W, transposed back, its B is X^T as it lies, its D is Y^T as it lies.
#[derive(Debug)]
pub(super) struct Problem {
    shape: MatmulShape,
    product: Descriptor,
    a: Layout,
    b: Layout,
    d: Layout,
}

#[derive(Debug)]
struct Descriptor(lt::cublasLtMatmulDesc_t);
#[derive(Debug)]
struct Layout(lt::cublasLtMatrixLayout_t);
#[derive(Debug)]
struct Preference(lt::cublasLtMatmulPreference_t);

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: created by us and destroyed once; it fails for null alone.
        let _ = unsafe { result::destroy_matmul_desc(self.0) };
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: as above.
        let _ = unsafe { result::destroy_matrix_layout(self.0) };
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: as above.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}

/// A status as our error.
pub(super) fn error(call: &'static str, shape: MatmulShape, error: CublasError) -> CudaError {
    CudaError::Call { call, code: None, reason: format!("{error} for {shape:?}") }
}

/// Whether the library found, before it launched anything, that the algorithm is not one for the problem.
pub(super) fn is_refusal(error: CublasError) -> bool {
    matches!(error.0, Status::CUBLAS_STATUS_NOT_SUPPORTED | Status::CUBLAS_STATUS_INVALID_VALUE)
}

fn data_type(dtype: Dtype) -> lt::cudaDataType {
    match dtype {
        Dtype::F32 => lt::cudaDataType::CUDA_R_32F,
        Dtype::F16 => lt::cudaDataType::CUDA_R_16F,
        Dtype::Bf16 => lt::cudaDataType::CUDA_R_16BF,
    }
}

impl Problem {
    pub(super) fn new(shape: MatmulShape) -> Result<Self, CudaError> {
        let MatmulShape { n_tokens, n_out, n_in, dtype, out, .. } = shape;
        let compute = lt::cublasComputeType_t::CUBLAS_COMPUTE_32F; // exact products: TF32 is a type of its own
        let product = result::create_matmul_desc(compute, lt::cudaDataType::CUDA_R_32F)
            .map(Descriptor)
            .map_err(|status| error("cublasLtMatmulDescCreate", shape, status))?;
        let transposed: i32 = 1; // CUBLAS_OP_T
        // SAFETY: the descriptor exists, and the attribute is an enum of 32 bits.
        unsafe {
            result::set_matmul_desc_attribute(
                product.0,
                lt::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
                from_ref(&transposed).cast(),
                size_of_val(&transposed),
            )
        }
        .map_err(|status| error("cublasLtMatmulDescSetAttribute", shape, status))?;
        let layout = |data_type, n_rows: usize, n_columns: usize| {
            result::create_matrix_layout(data_type, n_rows as u64, n_columns as u64, n_rows as i64)
                .map(Layout)
                .map_err(|status| error("cublasLtMatrixLayoutCreate", shape, status))
        };
        let out_type = match out {
            Element::Model => data_type(dtype),
            Element::F32 => lt::cudaDataType::CUDA_R_32F,
        };
        Ok(Self {
            shape,
            product,
            a: layout(data_type(dtype), n_in, n_out)?,
            b: layout(data_type(dtype), n_in, n_tokens)?,
            d: layout(out_type, n_out, n_tokens)?,
        })
    }

    pub(super) fn shape(&self) -> MatmulShape {
        self.shape
    }

    /// Up to `n_max` algorithms, the most promising first; at least one.
    pub(super) fn candidates(
        &self,
        handle: Handle,
        workspace_bytes: usize,
        n_max: usize,
    ) -> Result<Vec<Algorithm>, CudaError> {
        let preference = self.preference(workspace_bytes)?;
        let empty = lt::cublasLtMatmulHeuristicResult_t {
            algo: Algorithm { data: [0; 8] },
            workspaceSize: 0,
            state: Status::CUBLAS_STATUS_NOT_SUPPORTED,
            wavesCount: 0.0,
            reserved: [0; 4],
        };
        let mut results = vec![empty; n_max];
        let mut n_results = 0;
        // SAFETY: all descriptors exist, and there is room for n_max results.
        unsafe {
            lt::cublasLtMatmulAlgoGetHeuristic(
                handle.raw(),
                self.product.0,
                self.a.0,
                self.b.0,
                self.d.0,
                self.d.0,
                preference.0,
                n_max as i32,
                results.as_mut_ptr(),
                &mut n_results,
            )
        }
        .result()
        .map_err(|status| error("cublasLtMatmulAlgoGetHeuristic", self.shape, status))?;
        results.truncate(n_results as usize);
        results.retain(|result| result.state == Status::CUBLAS_STATUS_SUCCESS);
        if results.is_empty() {
            let none = CublasError(Status::CUBLAS_STATUS_NOT_SUPPORTED);
            return Err(error("cublasLtMatmulAlgoGetHeuristic", self.shape, none));
        }
        Ok(results.into_iter().map(|result| result.algo).collect())
    }

    fn preference(&self, workspace_bytes: usize) -> Result<Preference, CudaError> {
        use lt::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let failed = |status| error("cublasLtMatmulPreferenceSetAttribute", self.shape, status);
        let preference = result::create_matmul_pref().map(Preference).map_err(failed)?;
        let set = |attribute, value: *const c_void, n_bytes| {
            // SAFETY: the preference exists, and the value has the attribute's width.
            unsafe { result::set_matmul_pref_attribute(preference.0, attribute, value, n_bytes) }
                .map_err(failed)
        };
        let workspace_bytes = workspace_bytes as u64;
        set(Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, from_ref(&workspace_bytes).cast(), 8)?;
        // Partial sums meet in f32 in the workspace, never in place in the order in which blocks happen to end.
        let scheme = lt::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        set(Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, from_ref(&scheme).cast(), 4)?;
        for attribute in [
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ] {
            set(attribute, from_ref(&ALIGNMENT_BYTES).cast(), 4)?;
        }
        Ok(preference)
    }

    /// The bytes of workspace that an algorithm from elsewhere needs here.
    pub(super) fn accepts(&self, handle: Handle, algorithm: &Algorithm) -> Result<usize, CudaError> {
        let mut result = std::mem::MaybeUninit::<lt::cublasLtMatmulHeuristicResult_t>::zeroed();
        // SAFETY: all descriptors exist, and the result has room.
        unsafe {
            lt::cublasLtMatmulAlgoCheck(
                handle.raw(),
                self.product.0,
                self.a.0,
                self.b.0,
                self.d.0,
                self.d.0,
                algorithm,
                result.as_mut_ptr(),
            )
        }
        .result()
        .map_err(|status| error("cublasLtMatmulAlgoCheck", self.shape, status))?;
        // SAFETY: the library filled it in; zeros are a valid value of every field as well.
        Ok(unsafe { result.assume_init() }.workspaceSize)
    }

    /// Puts the product into the stream.
    pub(super) fn run(
        &self,
        handle: Handle,
        stream: &Stream,
        algorithm: &Algorithm,
        operands: Operands,
    ) -> Result<(), CublasError> {
        let Operands { x, w, y, workspace } = operands;
        let alpha = 1f32;
        let beta = match self.shape.update {
            Update::Replace => 0f32,
            Update::Add => 1f32,
        };
        // SAFETY: the descriptors belong to the shape that the operands were checked against; the library reads
        // alpha and beta before it returns.
        unsafe {
            result::matmul(
                handle.raw(),
                self.product.0,
                from_ref(&alpha).cast(),
                from_ref(&beta).cast(),
                w.address as *const c_void,
                self.a.0,
                x.address as *const c_void,
                self.b.0,
                y.address as *const c_void,
                self.d.0,
                y.address as *mut c_void,
                self.d.0,
                algorithm,
                workspace.address as *mut c_void,
                workspace.n_bytes,
                stream.raw().cast(),
            )
        }
    }
}
