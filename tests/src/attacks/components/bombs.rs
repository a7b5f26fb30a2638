//! Components that take long to compile, or much memory.

use super::*;

pub(in super::super) fn many_functions() -> Vec<u8> {
    functions(30_000)
}

/// So many functions.
pub(in super::super) fn functions(n: usize) -> Vec<u8> {
    let functions: String = (0..n)
        .map(|i| {
            format!("(func (param i32) (result i32) (i32.mul (i32.add (local.get 0) (i32.const {i})) (i32.const 7)))\n")
        })
        .collect();
    plain(&functions, "")
}

pub(in super::super) fn long_function() -> Vec<u8> {
    function_of(60_000)
}

/// One function of so many operations.
pub(in super::super) fn function_of(n: usize) -> Vec<u8> {
    let operations: String =
        (0..n).map(|i| format!("i32.const {i} i32.xor i32.const 3 i32.rotl\n")).collect();
    plain(&format!("(func (param i32) (result i32) local.get 0 {operations})"), "")
}

pub(in super::super) fn branch_tables() -> Vec<u8> {
    let n_blocks = 200;
    let blocks = "(block ".repeat(n_blocks);
    let targets: String = (0..n_blocks).map(|i| format!("{i} ")).collect();
    let ends = ")".repeat(n_blocks);
    let function = format!("(func (param i32) {blocks} (br_table {targets} (local.get 0)) {ends})\n");
    plain(&function.repeat(100), "")
}

pub(in super::super) fn many_locals() -> Vec<u8> {
    let function = format!("(func (local {}) (local.set 39999 (i64.const 7)))\n", "i64 ".repeat(40_000));
    plain(&function.repeat(8), "")
}

pub(in super::super) fn deep_blocks() -> Vec<u8> {
    let n = 20_000;
    plain(&format!("(func {} {})", "block ".repeat(n), "end ".repeat(n)), "")
}

/// A component in a component in a component, so many.
fn nested(n: usize) -> Vec<u8> {
    const HEADER: [u8; 8] = *b"\0asm\x0d\0\x01\0";
    const COMPONENT_SECTION: u8 = 4;
    let mut bytes = HEADER.to_vec();
    for _ in 0..n {
        let mut length = Vec::new();
        let mut rest = bytes.len();
        while rest >= 0x80 {
            length.push(rest as u8 | 0x80);
            rest >>= 7;
        }
        length.push(rest as u8);
        bytes = [&HEADER[..], &[COMPONENT_SECTION], &length, &bytes].concat();
    }
    bytes
}

pub(in super::super) fn nested_components() -> Vec<u8> {
    nested(90)
}

pub(in super::super) fn nested_too_deep() -> Vec<u8> {
    nested(900)
}

pub(in super::super) fn doubling_types() -> Vec<u8> {
    let types: String = (1..60).map(|i| format!("(type $t{i} (tuple $t{0} $t{0}))\n", i - 1)).collect();
    plain("", &format!("(type $t0 (tuple u8 u64))\n{types}"))
}

pub(in super::super) fn many_types() -> Vec<u8> {
    plain("", &"(type (tuple u8 string))\n".repeat(100_000))
}

pub(in super::super) fn many_segments() -> Vec<u8> {
    plain(&"(data (i32.const 0) \"x\")\n".repeat(90_000), "")
}

pub(in super::super) fn much_data() -> Vec<u8> {
    let data = "x".repeat(12 << 20);
    plain(
        "",
        &format!(
            "(core module $m (memory 200) (data (i32.const 0) \"{data}\")) (core instance (instantiate $m))"
        ),
    )
}

pub(in super::super) fn many_aliases() -> Vec<u8> {
    let aliases = "(alias core export $i \"f\" (core func))\n".repeat(50_000);
    plain(
        "",
        &format!("(core module $m (func (export \"f\"))) (core instance $i (instantiate $m)) {aliases}"),
    )
}
