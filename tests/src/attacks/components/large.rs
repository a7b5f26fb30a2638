//! Components as large as they may be: most of one is what memories begin with, as in those of Python and JavaScript, or code.

use super::plain;

/// Bytes of the largest component that a daemon takes, unless its settings say otherwise.
const COMPONENT_BYTES: usize = 32 << 20;

/// Bytes that are left for what a component has beside data and code, and for what changes its hash.
const REST_BYTES: usize = 64 << 10;

/// Bytes of a function that a runtime reads, at most, and functions of a module.
const FUNCTION_BYTES_MAX: usize = 7_600_000;
const N_FUNCTIONS_MAX: usize = 990_000;

/// Bytes of one piece of what a memory begins with.
const SEGMENT_BYTES: usize = 64 << 10;

/// Functions of a component that is data mostly.
const N_FUNCTIONS: usize = 20_000;

/// Sections of a module, by their numbers, and that of a component that is a module.
const TYPES: u8 = 1;
const FUNCTIONS: u8 = 3;
const MEMORIES: u8 = 5;
const EXPORTS: u8 = 7;
const CODE: u8 = 10;
const DATA: u8 = 11;
const MODULE_OF_COMPONENT: u8 = 1;

const HEADER_BYTES: usize = 8;
const MODULE_HEADER: [u8; HEADER_BYTES] = *b"\0asm\x01\0\0\0";

const I32_CONST: u8 = 0x41;
const END: u8 = 0x0b;

/// A number in groups of seven bits.
pub(super) fn number(n: usize) -> Vec<u8> {
    let (mut bytes, mut rest) = (Vec::new(), n);
    while rest >= 0x80 {
        bytes.push(rest as u8 | 0x80);
        rest >>= 7;
    }
    bytes.push(rest as u8);
    bytes
}

/// As an operand of `i32.const`, which has a sign.
fn signed(n: usize) -> Vec<u8> {
    let mut bytes = number(n);
    if let Some(last) = bytes.last_mut().filter(|last| **last & 0x40 != 0) {
        *last |= 0x80;
        bytes.push(0);
    }
    bytes
}

fn sized(bytes: &[u8]) -> Vec<u8> {
    [&number(bytes.len())[..], bytes].concat()
}

fn section(id: u8, bytes: &[u8]) -> Vec<u8> {
    [&[id][..], &sized(bytes)].concat()
}

/// A list of so many parts.
fn list(n: usize, parts: &[u8]) -> Vec<u8> {
    [&number(n)[..], parts].concat()
}

/// A guest that does nothing, with these functions from a number to a number, and a memory that begins with so many bytes by chance.
fn guest(n_functions: usize, bodies: &[u8], n_data_bytes: usize) -> Vec<u8> {
    let n_pages = 2 + n_data_bytes / (64 << 10);
    let run = [&[0, I32_CONST][..], &signed(16), &[END]].concat();
    let module = [
        MODULE_HEADER.to_vec(),
        section(TYPES, b"\x02\x60\x00\x01\x7f\x60\x01\x7f\x01\x7f"),
        section(FUNCTIONS, &list(1 + n_functions, &[&[0][..], &vec![1; n_functions]].concat())),
        section(MEMORIES, &[&[1, 0][..], &number(n_pages)].concat()),
        section(EXPORTS, b"\x02\x06memory\x02\x00\x03run\x00\x00"),
        section(CODE, &list(1 + n_functions, &[&sized(&run)[..], bodies].concat())),
        section(DATA, &data(n_data_bytes)),
    ]
    .concat();
    of_module(&module)
}

/// A component that is [`plain`] but for its module, which has to export the same.
fn of_module(module: &[u8]) -> Vec<u8> {
    let small = plain("", "");
    assert_eq!(small[HEADER_BYTES], MODULE_OF_COMPONENT, "its module comes first");
    let length = &small[HEADER_BYTES + 1..];
    let n_length = 1 + length.iter().take_while(|&&byte| byte & 0x80 != 0).count();
    let n_bytes = length[..n_length].iter().rev().fold(0, |n, &byte| n << 7 | usize::from(byte & 0x7f));
    let rest = &length[n_length + n_bytes..];
    [&small[..HEADER_BYTES], &section(MODULE_OF_COMPONENT, module), rest].concat()
}

/// Pieces of a memory, the first behind where the guest's result is. None of it is a page of zeros, which nobody would keep.
fn data(n_bytes: usize) -> Vec<u8> {
    let (mut segments, mut n_segments, mut state) = (Vec::new(), 0, 0x9e37_79b9_7f4a_7c15_u64);
    let mut at = SEGMENT_BYTES;
    while at < SEGMENT_BYTES + n_bytes {
        let n = SEGMENT_BYTES.min(SEGMENT_BYTES + n_bytes - at);
        segments.extend_from_slice(&[0, I32_CONST]);
        segments.extend_from_slice(&signed(at));
        segments.push(END);
        segments.extend_from_slice(&number(n));
        let end = segments.len() + n;
        while segments.len() < end {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            segments.extend_from_slice(&state.to_le_bytes());
        }
        segments.truncate(end);
        n_segments += 1;
        at += n;
    }
    list(n_segments, &segments)
}

/// A function of so many operations, each of which needs what the last one has.
fn function(n_operations: usize) -> Vec<u8> {
    // One local, which is the argument: `local.get 0`, and then `i32.const 3`, `i32.rotl`, `local.get 0`, `i32.xor` again and again.
    let body =
        [&[0, 0x20, 0][..], &[I32_CONST, 3, 0x77, 0x20, 0, 0x73].repeat(n_operations), &[END]].concat();
    sized(&body)
}

/// Bytes of an operation of [`function`].
const OPERATION_BYTES: usize = 6;

/// Of the size of an interpreter with its library, and as large as it may be: data, and many functions.
pub(in super::super) fn largest() -> Vec<u8> {
    let functions = function(2).repeat(N_FUNCTIONS);
    guest(N_FUNCTIONS, &functions, COMPONENT_BYTES - REST_BYTES - 2 * functions.len())
}

/// As many functions as a module may have.
pub(in super::super) fn most_functions() -> Vec<u8> {
    guest(N_FUNCTIONS_MAX, &function(2).repeat(N_FUNCTIONS_MAX), 0)
}

/// Functions as long as they may be, as many as there is room for.
pub(in super::super) fn longest_functions() -> Vec<u8> {
    let longest = function(FUNCTION_BYTES_MAX / OPERATION_BYTES);
    let n_functions = (COMPONENT_BYTES - REST_BYTES) / longest.len();
    guest(n_functions, &longest.repeat(n_functions), 0)
}
