//! The proof that CUDA works here: one kernel compiled, loaded and run.

use half::bf16;

use crate::driver::params;
use crate::{Card, CudaError, Launch, Module, Pointer, Source};

fn source() -> Source {
    Source::new("fill.cu", concat!(include_str!("../../ops/common.cuh"), include_str!("fill.cu")))
}

/// As in `fill.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct FillParams {
    y: Pointer,
    n: i32,
    unused: i32,
}
params!(FillParams, 16);

/// Several blocks, the last one partly filled; bf16 holds every number up to 256.
const N: usize = 250;
const BLOCK: u32 = 64;

/// Compiles a kernel, runs it on the card and looks at what it wrote.
///
/// # Errors
/// One of these does not work.
pub fn prove(card: &Card) -> Result<(), CudaError> {
    let gpu = card.gpu();
    let module = Module::load(gpu, &card.compiler().cubin(&source())?)?;
    let kernel = module.kernel("fill")?;
    let stream = gpu.stream()?;
    let buffer = gpu.allocate("a proof", N * size_of::<bf16>())?;
    let params = FillParams { y: buffer.slice().into(), n: N as i32, unused: 0 };
    let launch = Launch { grid: ((N as u32).div_ceil(BLOCK), 1, 1), block: (BLOCK, 1, 1), shared_bytes: 0 };
    // SAFETY: the buffer has N elements and outlives the stream's work, which
    // the download waits for.
    unsafe { launch.run(&stream, &kernel, &params) }?;
    let mut seen = vec![0u16; N];
    buffer.slice().download(&stream, &mut seen)?;
    let wrong = seen.iter().enumerate().find(|(i, bits)| bf16::from_bits(**bits).to_f32() != *i as f32);
    match wrong {
        None => Ok(()),
        Some((i, bits)) => {
            let reason = format!("wrote {} where {i} was expected", bf16::from_bits(*bits));
            Err(CudaError::Call { call: "fill", code: None, reason })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_that_can_be_used_proves_it() {
        if crate::testing::gpu().is_none() {
            return;
        }
        let card = Card::open(0, None).expect("a card");
        prove(&card).expect("it works");
    }

    #[test]
    fn the_kernel_compiles() {
        crate::ops::common::check::assert_compiles(source());
    }
}
