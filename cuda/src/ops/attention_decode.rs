//! Attention of single queries over pages: decoded tokens.

use super::attention::{AttentionInputs, AttentionShape, PAGE_LEN, Texts, Tiles};
use super::common::{expect, expect_i32};
use crate::{Arg, CudaError, Kernel, Launch, Module, Slice, Source, Stream};

/// Softmax attention of one query a tile; see `attention_decode.cu`.
#[derive(Clone, Debug)]
pub struct AttentionDecode {
    kernel: Kernel,
    shape: AttentionShape,
}

/// What shares of one item are put together in. Layers may use the same one after the other.
#[derive(Clone, Copy, Debug)]
pub struct DecodeWorkspace {
    /// [`AttentionDecode::arrivals_bytes`] of zeros; zeros again after each launch.
    pub arrivals: Slice,
    /// [`AttentionDecode::partial_bytes`]; never read before it is written.
    pub partial: Slice,
}

const THREADS: u32 = 128;
/// Query heads of a block.
const BLOCK_HEADS: usize = 8;
/// As in the kernel.
const N_SPLITS_MAX: usize = 64;
/// Blocks that are worth having for each multiprocessor: with more, putting shares together costs more than it gains.
const BLOCKS_PER_MULTIPROCESSOR: usize = 2;

impl AttentionDecode {
    /// The source that holds the kernel for a shape.
    ///
    /// # Panics
    /// The shape is none that the kernel takes.
    #[must_use]
    pub fn source(shape: &AttentionShape) -> Source {
        static TEXTS: Texts = Texts::new();
        let file = "attention_decode.cu";
        Source { file, text: TEXTS.get(shape, file, include_str!("attention_decode.cu")) }
    }

    /// Finds the kernel in the module of [`AttentionDecode::source`] for the same shape.
    ///
    /// # Errors
    /// The driver refused.
    pub fn new(module: &Module, shape: AttentionShape) -> Result<Self, CudaError> {
        Ok(Self { kernel: module.kernel("attention_decode")?, shape })
    }

    /// Into how many shares at most a launch cuts each context, so that few items fill the device too.
    ///
    /// # Panics
    /// There are no items.
    #[must_use]
    pub fn n_splits(&self, n_multiprocessors: usize, n_items_max: usize, context_len_max: usize) -> usize {
        n_splits(&self.shape, n_multiprocessors, n_items_max, context_len_max)
    }

    /// Bytes of [`DecodeWorkspace::arrivals`].
    #[must_use]
    pub fn arrivals_bytes(&self, n_items_max: usize) -> usize {
        4 * n_items_max * blocks_of_item(&self.shape)
    }

    /// Bytes of [`DecodeWorkspace::partial`]. More than needed is fine; launches with one split need none.
    #[must_use]
    pub fn partial_bytes(&self, n_items_max: usize, n_splits: usize) -> usize {
        match n_splits {
            1 => 0,
            _ => 4 * n_items_max * self.shape.n_heads * n_splits * (self.shape.head_dim + 2),
        }
    }

    /// Writes the outputs of the items, tiles of one query, and no others. With the same `n_splits` the result has
    /// the same bits, whatever else is in the step.
    ///
    /// # Errors
    /// The driver refused the launch.
    ///
    /// # Panics
    /// A slice is too short, there are no splits or more than 64, or more than 65,535 items.
    pub fn run(
        &self,
        stream: &Stream,
        inputs: &AttentionInputs,
        items: Tiles,
        n_splits: usize,
        workspace: DecodeWorkspace,
    ) -> Result<(), CudaError> {
        let n_items_max = items.count.n_max;
        assert!((1..=N_SPLITS_MAX).contains(&n_splits), "{n_splits} splits");
        let n_maxima_bytes = 8 * n_items_max * self.shape.n_heads * n_splits;
        let partial = [workspace.partial.address + n_maxima_bytes as u64, workspace.partial.address];
        if n_splits > 1 {
            expect("partial", workspace.partial, self.partial_bytes(n_items_max, n_splits), 1);
            expect_i32("arrivals", workspace.arrivals, n_items_max * blocks_of_item(&self.shape));
        }
        let [acc, maxima] = partial.map(Arg::Pointer);
        self.launch(stream, inputs, items, n_splits, [acc, maxima, workspace.arrivals.into()])
    }

    /// As [`AttentionDecode::run`] with one split, which needs no workspace.
    ///
    /// # Errors
    /// The driver refused the launch.
    ///
    /// # Panics
    /// A slice is too short, or there are more than 65,535 items.
    pub fn run_unsplit(
        &self,
        stream: &Stream,
        inputs: &AttentionInputs,
        items: Tiles,
    ) -> Result<(), CudaError> {
        self.launch(stream, inputs, items, 1, [Arg::Pointer(0); 3])
    }

    fn launch(
        &self,
        stream: &Stream,
        inputs: &AttentionInputs,
        items: Tiles,
        n_splits: usize,
        workspace: [Arg; 3],
    ) -> Result<(), CudaError> {
        if items.count.n_max == 0 {
            return Ok(());
        }
        let n_items = u16::try_from(items.count.n_max).expect("a grid has up to 65,535 items");
        let mut args = inputs.args(&self.shape, items);
        args.extend(workspace);
        args.extend(inputs.last_args(&self.shape));
        let grid = (blocks_of_item(&self.shape) as u32, n_splits as u32, u32::from(n_items));
        // SAFETY: the kernel's arguments in order. Lengths were checked; with one split the kernel does not touch the
        // workspace. The caller keeps items, rows and page ids inside what they index.
        unsafe { Launch { grid, block: (THREADS, 1, 1), shared_bytes: 0 }.run(stream, &self.kernel, &args) }
    }
}

fn n_splits(
    shape: &AttentionShape,
    n_multiprocessors: usize,
    n_items_max: usize,
    context_len_max: usize,
) -> usize {
    // A smaller share leaves warps of a block without a page.
    let share_len_min = PAGE_LEN * if shape.head_dim <= 64 { 8 } else { 4 };
    let n_wanted = n_multiprocessors * BLOCKS_PER_MULTIPROCESSOR / (n_items_max * blocks_of_item(shape));
    n_wanted.min(context_len_max.div_ceil(share_len_min)).clamp(1, N_SPLITS_MAX)
}

/// Blocks of one share of an item.
fn blocks_of_item(shape: &AttentionShape) -> usize {
    shape.n_kv_heads * shape.group_len().div_ceil(BLOCK_HEADS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::attention_case::{Case, Modules, Uploaded, shape};
    use crate::ops::common::Dtype;
    use crate::ops::common::check::{DTYPES, assert_compiles, download, upload};
    use crate::testing::{TestGpu, gpu};

    #[test]
    fn compiles() {
        for (dtype, head_dim) in [(Dtype::Bf16, 128), (Dtype::F16, 64), (Dtype::F32, 64), (Dtype::Bf16, 256)]
        {
            assert_compiles(AttentionDecode::source(&shape(dtype, 8, 2, head_dim)));
        }
    }

    fn run(test: &TestGpu, decode: &AttentionDecode, device: &Uploaded, n_splits: usize) {
        let n_items = device.tiles().count.n_max;
        let arrivals = upload(test, &vec![0u8; decode.arrivals_bytes(n_items)]);
        let partial =
            test.gpu.allocate("a test", decode.partial_bytes(n_items, n_splits).max(16)).expect("memory");
        partial.slice().fill(&test.stream, 0xff).expect("a fill");
        let workspace = DecodeWorkspace { arrivals: arrivals.slice(), partial: partial.slice() };
        decode.run(&test.stream, &device.inputs(), device.tiles(), n_splits, workspace).expect("a launch");
        let arrived = download(test, arrivals.slice(), decode.arrivals_bytes(n_items), 1u8);
        assert!(arrived.iter().all(|&byte| byte == 0), "the counts are zero again");
    }

    fn kernel(modules: &mut Modules, shape: AttentionShape) -> AttentionDecode {
        AttentionDecode::new(modules.get(AttentionDecode::source(&shape)), shape).expect("the kernel")
    }

    fn check(
        modules: &mut Modules,
        shape: AttentionShape,
        rows: &[(usize, usize)],
        window: Option<usize>,
        splits: &[usize],
    ) {
        let decode = kernel(modules, shape);
        let case = Case::new(shape, rows, window);
        for &n_splits in splits {
            let device = case.upload(&modules.test, 1);
            run(&modules.test, &decode, &device, n_splits);
            case.assert_outputs(&modules.test, &device);
        }
    }

    /// (tokens, position of the first) of each row: contexts of 1, 15, 16, 17, 63, 64, 65 and 1000 positions, and rows
    /// of a few tokens.
    const MIXED: [(usize, usize); 10] =
        [(1, 0), (1, 14), (1, 15), (1, 16), (1, 62), (1, 63), (1, 64), (1, 999), (5, 125), (2, 0)];

    #[test]
    fn agrees_with_the_reference() {
        let Some(mut modules) = gpu().map(Modules::new) else { return };
        for dtype in DTYPES {
            for (n_heads, n_kv_heads, head_dim) in
                [(4, 4, 64), (8, 2, 128), (8, 1, 64), (6, 2, 80), (12, 1, 128), (5, 1, 256), (2, 1, 8)]
            {
                let shape = shape(dtype, n_heads, n_kv_heads, head_dim);
                check(&mut modules, shape, &MIXED, None, &[1, 2, 7, 64]);
            }
        }
    }

    #[test]
    fn every_group_agrees() {
        let Some(mut modules) = gpu().map(Modules::new) else { return };
        for group in (1..=9).chain([16]) {
            let shape = shape(Dtype::Bf16, 2 * group, 2, 64);
            check(&mut modules, shape, &[(1, 200), (1, 0)], None, &[3]);
        }
    }

    #[test]
    fn a_window_hides_what_lies_before_it() {
        let Some(mut modules) = gpu().map(Modules::new) else { return };
        for dtype in DTYPES {
            for window in [1, 16, 50, 64, 333, 5000] {
                for head_dim in [64, 128] {
                    check(&mut modules, shape(dtype, 4, 1, head_dim), &MIXED, Some(window), &[1, 3]);
                }
            }
        }
    }

    #[test]
    fn long_contexts_agree() {
        let Some(mut modules) = gpu().map(Modules::new) else { return };
        for dtype in DTYPES {
            for head_dim in [64, 128] {
                let rows = [(1, 8191), (1, 3000), (1, 1)];
                check(&mut modules, shape(dtype, 8, 2, head_dim), &rows, None, &[1, 33, 64]);
            }
        }
    }

    #[test]
    fn many_launches_give_the_same_bits() {
        let Some(mut modules) = gpu().map(Modules::new) else { return };
        let shape = shape(Dtype::Bf16, 8, 2, 128);
        let decode = kernel(&mut modules, shape);
        let test = &modules.test;
        let case = Case::new(shape, &[(1, 4000), (1, 900), (3, 2000)], None);
        let device = case.upload(test, 1);
        let n_splits = 20;
        run(test, &decode, &device, n_splits);
        let first = device.out_bits(test);
        for _ in 0..50 {
            run(test, &decode, &device, n_splits);
            assert_eq!(device.out_bits(test), first);
        }
    }

    #[test]
    fn splits_fill_the_device_and_no_more() {
        let shape = shape(Dtype::Bf16, 32, 8, 128);
        assert_eq!(n_splits(&shape, 132, 1, 1 << 20), 33);
        assert_eq!(n_splits(&shape, 132, 1, 1280), 20);
        assert_eq!(n_splits(&shape, 132, 4, 1 << 20), 8);
        assert_eq!(n_splits(&shape, 132, 32, 1280), 1);
        assert_eq!(n_splits(&shape, 132, 256, 1280), 1);
        assert_eq!(n_splits(&shape, 132, 1, 1), 1);
    }

    /// Prints, with `--ignored --nocapture`, bytes a second for the 8B and 1B shapes.
    #[test]
    #[ignore = "measures"]
    fn speed() {
        let Some(mut modules) = gpu().map(Modules::new) else { return };
        for (head_dim, n_rows, len) in [
            (128, 256, 1280),
            (64, 256, 1280),
            (128, 32, 1280),
            (64, 32, 1280),
            (128, 1, 1280),
            (64, 1, 8192),
        ] {
            let shape = shape(Dtype::Bf16, 32, 8, head_dim);
            let decode = kernel(&mut modules, shape);
            let test = &modules.test;
            let rows = vec![(1, len - 1); n_rows];
            let device = Case::random_on_device(test, shape, &rows, 1);
            let wanted = decode.n_splits(test.gpu.n_multiprocessors(), n_rows, len);
            let n_items = device.tiles().count.n_max;
            for n_splits in [1, 2, 4, 8, 16, 32, 64, wanted] {
                let arrivals = upload(test, &vec![0u8; decode.arrivals_bytes(n_items)]);
                let partial = test
                    .gpu
                    .allocate("a test", decode.partial_bytes(n_items, n_splits).max(16))
                    .expect("memory");
                let workspace = DecodeWorkspace { arrivals: arrivals.slice(), partial: partial.slice() };
                let seconds = device.seconds(test, || {
                    let (inputs, items) = (device.inputs(), device.tiles());
                    decode.run(&test.stream, &inputs, items, n_splits, workspace).expect("a launch");
                });
                let n_bytes = 2.0 * (n_rows * len * 8 * head_dim * 2) as f64;
                let chosen = if n_splits == wanted { " (chosen)" } else { "" };
                println!(
                    "decode, 32/8 heads of {head_dim}, {n_rows} × {len}, {n_splits} splits{chosen}: {:.1} µs, {:.0} GB/s",
                    seconds * 1e6,
                    n_bytes / seconds * 1e-9
                );
            }
        }
    }
}
