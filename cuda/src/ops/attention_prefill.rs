//! Attention of tiles of queries over pages: prompts and their chunks.

use super::attention::{AttentionInputs, AttentionShape, Texts, Tiles};
use super::attention_decode::AttentionDecode;
use super::common::Dtype;
use crate::{CudaError, Kernel, Launch, Module, Source, Stream};

/// Softmax attention of many queries of a row; see `attention_prefill.cu`. Shapes that the tensor cores do not take
/// (f32, or a head that 16 does not divide) go through the kernel for single queries.
#[derive(Clone, Debug)]
pub struct AttentionPrefill {
    kernel: Way,
    shape: AttentionShape,
}

#[derive(Clone, Debug)]
enum Way {
    Tiles(Kernel),
    Singles(AttentionDecode),
}

const THREADS: usize = 128;

fn is_for_tensor_cores(shape: &AttentionShape) -> bool {
    shape.dtype != Dtype::F32 && shape.head_dim.is_multiple_of(16)
}

/// Tiles of queries and of keys in shared memory, as in the kernel.
fn tile_lens(head_dim: usize) -> (usize, usize) {
    if head_dim <= 128 { (128, 64) } else { (64, 32) }
}

/// `struct Shared` of the kernel.
fn shared_bytes(head_dim: usize) -> usize {
    let (n_queries, n_keys) = tile_lens(head_dim);
    (n_queries + 2 * n_keys) * (head_dim + 8) * 2 + 2 * (n_keys / super::attention::PAGE_LEN) * 4
}

impl AttentionPrefill {
    /// The source that holds the kernel for a shape.
    ///
    /// # Panics
    /// The shape is none that the kernels take.
    #[must_use]
    pub fn source(shape: &AttentionShape) -> Source {
        static TEXTS: Texts = Texts::new();
        if !is_for_tensor_cores(shape) {
            return AttentionDecode::source(shape);
        }
        let file = "attention_prefill.cu";
        Source { file, text: TEXTS.get(shape, file, include_str!("attention_prefill.cu")) }
    }

    /// Finds the kernel in the module of [`AttentionPrefill::source`] for the same shape.
    ///
    /// # Errors
    /// The driver refused, or the device has too little shared memory.
    pub fn new(module: &Module, shape: AttentionShape) -> Result<Self, CudaError> {
        let kernel = if is_for_tensor_cores(&shape) {
            let kernel = module.kernel("attention_prefill")?;
            kernel.allow_shared_bytes(shared_bytes(shape.head_dim))?;
            Way::Tiles(kernel)
        } else {
            Way::Singles(AttentionDecode::new(module, shape)?)
        };
        Ok(Self { kernel, shape })
    }

    /// Queries of a tile, to plan with.
    #[must_use]
    pub fn tile_len(&self) -> usize {
        match self.kernel {
            Way::Tiles(_) => tile_lens(self.shape.head_dim).0,
            Way::Singles(_) => 1,
        }
    }

    /// Writes the outputs of the tiles' queries, and no others.
    ///
    /// # Errors
    /// The driver refused the launch.
    ///
    /// # Panics
    /// A slice is too short, or there are more than 65,535 tiles.
    pub fn run(&self, stream: &Stream, inputs: &AttentionInputs, tiles: Tiles) -> Result<(), CudaError> {
        let kernel = match &self.kernel {
            Way::Tiles(kernel) => kernel,
            Way::Singles(decode) => return decode.run_unsplit(stream, inputs, tiles),
        };
        if tiles.count.n_max == 0 {
            return Ok(());
        }
        let shape = &self.shape;
        let n_tiles = u16::try_from(tiles.count.n_max).expect("a grid has up to 65,535 tiles");
        let mut args = inputs.args(shape, tiles);
        args.extend(inputs.last_args(shape));
        let launch = Launch {
            grid: (shape.n_heads as u32, u32::from(n_tiles), 1),
            block: (THREADS as u32, 1, 1),
            shared_bytes: shared_bytes(shape.head_dim) as u32,
        };
        // SAFETY: the kernel's arguments in order. Lengths were checked; the caller keeps tiles, rows and page ids
        // inside what they index.
        unsafe { launch.run(stream, kernel, &args) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::attention_case::{Case, Modules, shape};
    use crate::ops::common::check::{DTYPES, assert_compiles};
    use crate::testing::gpu;

    #[test]
    fn compiles() {
        for (dtype, head_dim) in [(Dtype::Bf16, 128), (Dtype::F16, 64), (Dtype::Bf16, 80), (Dtype::Bf16, 256)]
        {
            assert_compiles(AttentionPrefill::source(&shape(dtype, 8, 2, head_dim)));
        }
    }

    /// Query heads, KV heads, length of a head.
    type Heads = (usize, usize, usize);

    fn check(
        modules: &mut Modules,
        dtype: Dtype,
        heads: Heads,
        rows: &[(usize, usize)],
        window: Option<usize>,
    ) {
        let shape = shape(dtype, heads.0, heads.1, heads.2);
        let module = modules.get(AttentionPrefill::source(&shape));
        let prefill = AttentionPrefill::new(module, shape).expect("the kernel");
        let test = &modules.test;
        let case = Case::new(shape, rows, window);
        let device = case.upload(test, prefill.tile_len());
        prefill.run(&test.stream, &device.inputs(), device.tiles()).expect("a launch");
        case.assert_outputs(test, &device);
    }

    /// (tokens, position of the first) of each row: lengths around the tiles' and pages' edges, chunks that begin
    /// anywhere, rows of one token.
    const MIXED: [(usize, usize); 9] =
        [(1, 0), (15, 0), (16, 0), (17, 0), (63, 5), (64, 64), (65, 1000), (1, 700), (129, 127)];

    #[test]
    fn agrees_with_the_reference() {
        let Some(mut modules) = gpu().map(Modules::new) else { return };
        for dtype in DTYPES {
            for heads in
                [(4, 4, 64), (8, 2, 128), (8, 1, 64), (6, 2, 80), (2, 1, 16), (4, 2, 256), (3, 1, 72)]
            {
                check(&mut modules, dtype, heads, &MIXED, None);
            }
        }
    }

    #[test]
    fn a_window_hides_what_lies_before_it() {
        let Some(mut modules) = gpu().map(Modules::new) else { return };
        for dtype in DTYPES {
            for window in [1, 16, 50, 64, 333, 5000] {
                check(&mut modules, dtype, (4, 1, 64), &MIXED, Some(window));
            }
            check(&mut modules, dtype, (4, 1, 256), &MIXED, Some(40));
        }
    }

    #[test]
    fn long_rows_agree() {
        let Some(mut modules) = gpu().map(Modules::new) else { return };
        for dtype in [Dtype::Bf16, Dtype::F16] {
            for head_dim in [64, 128] {
                check(&mut modules, dtype, (4, 1, head_dim), &[(1000, 0), (100, 8092), (8192, 0)], None);
                check(&mut modules, dtype, (2, 2, head_dim), &[(2000, 3000)], Some(1024));
            }
        }
        check(&mut modules, Dtype::F32, (2, 1, 128), &[(1000, 0), (20, 8172)], None);
    }

    /// Prints, with `--ignored --nocapture`, operations a second for whole prompts of the 8B and 1B shapes.
    #[test]
    #[ignore = "measures"]
    fn speed() {
        let Some(test) = gpu() else { return };
        for (heads, head_dim, len) in [(32, 128, 2048), (32, 128, 8192), (32, 64, 2048), (32, 64, 8192)] {
            let shape = shape(Dtype::Bf16, heads, 8, head_dim);
            let module = test.module(AttentionPrefill::source(&shape));
            let prefill = AttentionPrefill::new(&module, shape).expect("the kernel");
            let device = Case::random_on_device(&test, shape, &[(len, 0)], prefill.tile_len());
            let seconds = device.seconds(&test, || {
                prefill.run(&test.stream, &device.inputs(), device.tiles()).expect("a launch");
            });
            let n_operations = 4.0 * (heads * head_dim) as f64 * (len * (len + 1) / 2) as f64;
            println!(
                "prefill, {heads} heads of {head_dim}, {len} tokens: {:.0} µs, {:.0} TFLOP/s",
                seconds * 1e6,
                n_operations / seconds * 1e-12
            );
        }
    }
}
