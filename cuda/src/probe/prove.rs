//! The proof that CUDA works here: one kernel compiled, loaded and run.

use half::bf16;

use crate::{Arg, Card, CudaError, Launch, Module, Source};

const SOURCE: Source =
    Source { file: "fill.cu", text: concat!(include_str!("../ops/common.cuh"), include_str!("fill.cu")) };

/// Several blocks, the last one partly filled; bf16 holds every number up to 256.
const N: usize = 250;
const BLOCK: u32 = 64;

/// Compiles a kernel, runs it on the card and looks at what it wrote.
///
/// # Errors
/// One of these does not work.
pub fn prove(card: &Card) -> Result<(), CudaError> {
    let gpu = card.gpu();
    let module = Module::load(gpu, &card.compiler().cubin(SOURCE)?)?;
    let kernel = module.kernel("fill")?;
    let stream = gpu.stream()?;
    let buffer = gpu.allocate("a proof", N * size_of::<bf16>())?;
    let args = [buffer.slice().into(), Arg::I32(N as i32)];
    let launch = Launch { grid: ((N as u32).div_ceil(BLOCK), 1, 1), block: (BLOCK, 1, 1), shared_bytes: 0 };
    // SAFETY: a pointer to N elements and N, as the kernel declares them; the buffer outlives the stream's work, which
    // the download waits for.
    unsafe { launch.run(&stream, &kernel, &args) }?;
    let mut seen = vec![0u16; N];
    buffer.slice().download(&stream, &mut seen)?;
    let wrong = seen.iter().enumerate().find(|(i, bits)| bf16::from_bits(**bits).to_f32() != *i as f32);
    match wrong {
        None => Ok(()),
        Some((i, bits)) => {
            let reason = format!("wrote {} where {i} was expected", bf16::from_bits(*bits));
            Err(CudaError::Call { call: "fill", reason })
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
        crate::ops::common::check::assert_compiles(SOURCE);
    }
}
