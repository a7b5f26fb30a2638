//! Calls whose pointers, lengths, handles and values are not what they should be.

use super::*;

fn logs(level: i64, pointer: i64, length: i64) -> Vec<u8> {
    let run = format!(
        "(i32.store (i32.const 64) (i32.const -1))
         (call $log (i32.const {level}) (i32.const {pointer}) (i32.const {length})) (i32.const 16)"
    );
    guest(SESSION, &[LOG], SAME_PLACE, &run)
}

pub(in super::super) fn pointer_out_of_bounds() -> Vec<u8> {
    logs(0, -16, 8)
}

/// The last four bytes of the memory and four more.
pub(in super::super) fn length_out_of_bounds() -> Vec<u8> {
    logs(0, 64 * 65_536 - 4, 8)
}

pub(in super::super) fn log_of_4_gib() -> Vec<u8> {
    logs(0, 0, -1)
}

pub(in super::super) fn text_not_utf_8() -> Vec<u8> {
    logs(0, 64, 4)
}

pub(in super::super) fn enum_out_of_range() -> Vec<u8> {
    logs(9, 0, 0)
}

fn returns(before: &str, pointer: i64) -> Vec<u8> {
    guest("", &[], SAME_PLACE, &format!("{before} (i32.const {pointer})"))
}

pub(in super::super) fn result_out_of_bounds() -> Vec<u8> {
    returns("", -4)
}

pub(in super::super) fn result_unaligned() -> Vec<u8> {
    returns("", 17)
}

pub(in super::super) fn result_of_no_case() -> Vec<u8> {
    returns("(i32.store (i32.const 16) (i32.const 7))", 16)
}

/// An error whose text is 16 MiB of zeros.
pub(in super::super) fn message_of_16_mb() -> Vec<u8> {
    returns(
        "(drop (memory.grow (i32.const 256)))
         (i32.store (i32.const 16) (i32.const 1))
         (i32.store (i32.const 20) (i32.const 65536))
         (i32.store (i32.const 24) (i32.const 16777216))",
        16,
    )
}

pub(in super::super) fn realloc_out_of_bounds() -> Vec<u8> {
    let run = "(call $random (i64.const 64) (i32.const 32)) (i32.const 16)";
    guest(RANDOM, &[RANDOM_BYTES], "(i32.const -16)", run)
}

pub(in super::super) fn handle_that_is_none() -> Vec<u8> {
    guest(POLL, &[BLOCK], SAME_PLACE, "(call $block (i32.const 99)) (i32.const 16)")
}

pub(in super::super) fn handle_dropped_twice() -> Vec<u8> {
    let run = "(local.set $handle (call $subscribe (i64.const 1)))
        (call $drop (local.get $handle)) (call $drop (local.get $handle)) (i32.const 16)";
    guest(POLL, &[SUBSCRIBE, DROP], SAME_PLACE, run)
}

/// The host asks for memory in the middle of a call, and is called back.
pub(in super::super) fn call_out_of_a_call() -> Vec<u8> {
    wat(&format!(
        r#"(component
            {RANDOM}
            {SESSION}
            (core module $libc (memory (export "memory") 64))
            (core instance $libc (instantiate $libc))
            (core func $log (canon lower (func $session "log") (memory (core memory $libc "memory"))))
            (core module $alloc
                (import "host" "log" (func $log (param i32 i32 i32)))
                (func (export "realloc") (param i32 i32 i32 i32) (result i32)
                    (call $log (i32.const 0) (i32.const 0) (i32.const 1))
                    (i32.const 1024)))
            (core instance $host (export "log" (func $log)))
            (core instance $alloc (instantiate $alloc (with "host" (instance $host))))
            (core func $random (canon lower (func $random "get-random-bytes")
                (memory (core memory $libc "memory")) (realloc (core func $alloc "realloc"))))
            (core module $main
                (import "host" "random" (func $random (param i64 i32)))
                (func (export "run") (result i32)
                    (call $random (i64.const 8) (i32.const 32)) (i32.const 16)))
            (core instance $more (export "random" (func $random)))
            (core instance $main (instantiate $main (with "host" (instance $more))))
            (func (export "run") (result (result (error string)))
                (canon lift (core func $main "run") (memory (core memory $libc "memory")))))"#
    ))
}
