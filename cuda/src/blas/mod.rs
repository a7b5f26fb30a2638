//! Matrix products: the only caller of cuBLASLt.
//!
//! - Comes in: shapes as the model has them, row by row; slices of the operands.
//! - Goes out: products in the stream, each with the algorithm that was fastest on its shape, timed here or by an
//!   earlier process.
//! - Must not happen: column-major order beyond this folder; TF32 in a model of type f32; an algorithm whose workspace
//!   is larger than the one there is.

mod cache;
mod handle;
mod matmul;
mod problem;
mod tune;

pub use handle::Handle;
pub use matmul::{BLOCK_TOKENS, Blas, MatmulShape, Update, all_tuned, bucket};
pub(crate) use tune::fill_with_numbers;
