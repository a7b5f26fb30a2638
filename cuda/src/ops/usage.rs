//! Registers and local memory of every kernel, for tests.

use super::attention::{Attention, AttentionShape};
use super::attention_holes::AttentionHoles;
use super::common::Dtype;
use super::common::check::DTYPES;
use super::masses::Masses;
use super::{bias, embedding, gather, gemv, logits, norm, pages, program, rope, steer, stream, swiglu};
use crate::compile::usage;
use crate::testing::{gpu, include_dir};
use crate::{Compiler, Module, Source};

/// Kernels that may keep values in local memory: their name, bytes of a thread, and why.
const LOCAL_BYTES_MAX: [(&str, u32, &str); 7] = [
    ("attention_decode", 40, "its launch bounds give up registers, so that more blocks are resident"),
    ("attention_holes", 96, "as for decode; besides, the method for the sines of large angles has a list"),
    ("attention_few", 96, "as for decode, and for prompts where a KV head has many query heads"),
    ("attention_prompt", 96, "it takes all the registers that a thread can have; 16 bytes on sm_90"),
    ("logits_scan", 8, "as for decode, on sm_80; none on sm_90"),
    ("masses", 32, "the method for the sines of large angles has a list"),
    ("logit_programs", 88, "what is the same for a block, as its launch bounds give up registers"),
];

/// Panics where a kernel keeps more in local memory than it may.
fn check(kernel: &str, arch: &str, local_bytes: u32) {
    let may = LOCAL_BYTES_MAX.iter().find(|(name, ..)| *name == kernel).map_or(0, |&(_, n_bytes, _)| n_bytes);
    assert!(local_bytes <= may, "{kernel} for {arch} keeps {local_bytes} bytes in local memory, not {may}");
}

/// Panics where a kernel of the cubin keeps more in local memory than it may, or takes several parameters.
pub(super) fn assert_registers_suffice(file: &str, arch: &str, cubin: &[u8]) {
    let kernels = usage(cubin);
    assert!(!kernels.is_empty(), "{file} has a kernel");
    for kernel in kernels {
        println!("{arch}: {kernel:?}");
        check(&kernel.name, arch, kernel.local_bytes);
        assert_eq!(kernel.n_params, 1, "{kernel:?} takes one structure");
    }
}

fn sources(capability: (i32, i32)) -> Vec<Source> {
    let of_type = |dtype: Dtype| {
        let shape = |head_dim| AttentionShape { dtype, n_heads: 8, n_kv_heads: 2, head_dim, scale: 1.0 };
        let attention = [64, 128].map(|head_dim| Attention::sources(&shape(head_dim))).concat();
        let holes = [64, 128].map(|head_dim| AttentionHoles::source(&shape(head_dim)));
        let masses = [64, 128].map(|head_dim| Masses::source(&shape(head_dim)));
        let of_rows = [
            bias::source(dtype),
            embedding::source(dtype),
            norm::source(dtype),
            rope::source(dtype),
            swiglu::source(dtype),
        ];
        of_rows
            .into_iter()
            .chain(gemv::sources(dtype, capability))
            .chain(attention)
            .chain(holes)
            .chain(masses)
    };
    let of_any_type = [gather::source(), pages::source(), steer::source(), stream::source()]
        .into_iter()
        .chain(program::sources(capability));
    DTYPES.into_iter().flat_map(of_type).chain(of_any_type).chain(logits::all_sources()).collect()
}

/// What the driver says of a kernel once it is loaded, which is what counts.
#[test]
fn registers_suffice() {
    let Some(test) = gpu() else { return };
    let capability = test.gpu.compute_capability();
    let compiler = Compiler::new(capability, include_dir(), None);
    for source in sources(capability) {
        let cubin = compiler.cubin(&source).unwrap_or_else(|error| panic!("{error}"));
        let module = Module::load(&test.gpu, &cubin).expect("the module loads");
        for kernel in usage(&cubin) {
            let (n_registers, local_bytes) = module.usage(&kernel.name).expect("its attributes");
            println!("{}: {n_registers} registers, {local_bytes} bytes of local memory", kernel.name);
            assert_eq!(n_registers, kernel.n_registers, "registers of {}", kernel.name);
            check(&kernel.name, "this device", local_bytes);
        }
    }
}
