//! Components that are none, or want what there is not.

use super::*;

pub(in super::super) fn not_webassembly() -> Vec<u8> {
    b"#!/bin/sh\nrm -rf /\n".to_vec()
}

pub(in super::super) fn core_module() -> Vec<u8> {
    wat("(module)")
}

pub(in super::super) fn empty_component() -> Vec<u8> {
    wat("(component)")
}

pub(in super::super) fn header_and_rubbish() -> Vec<u8> {
    [&b"\0asm\x0d\0\x01\0"[..], &[0xa7; 100_000]].concat()
}

pub(in super::super) fn run_of_another_type() -> Vec<u8> {
    wat(r#"(component
        (core module $m (func (export "run") (result i32) (i32.const 1)))
        (core instance $i (instantiate $m))
        (func (export "run") (result u32) (canon lift (core func $i "run"))))"#)
}

pub(in super::super) fn many_exports() -> Vec<u8> {
    let exports: String = (0..90_000).map(|i| format!("(export \"walk{i}\" (func $f))")).collect();
    wat(&format!(
        r#"(component
            (core module $m (func (export "walk")))
            (core instance $i (instantiate $m))
            (func $f (canon lift (core func $i "walk")))
            {exports})"#
    ))
}

pub(in super::super) fn long_import() -> Vec<u8> {
    plain("", &format!("(import \"{}\" (instance))", "a".repeat(90_000)))
}

pub(in super::super) fn imports_of_processes() -> Vec<u8> {
    plain("", r#"(import "wasi:process/spawn@0.2.0" (instance))"#)
}

pub(in super::super) fn import_of_another_type() -> Vec<u8> {
    let seed = r#"(export "seed" (func (result string)))"#;
    plain("", &format!("(import \"trellis:host/session@0.2.0\" (instance {seed}))"))
}

/// What a terminal would obey.
pub(in super::super) fn names_of_escapes() -> Vec<u8> {
    plain("", r#"(import "\1b[2J\e2\80\ae:evil/name@0.2.0" (instance))"#)
}

pub(in super::super) fn many_instances() -> Vec<u8> {
    let instances: String = (0..40).map(|_| "(core instance (instantiate $small))".to_owned()).collect();
    plain("", &format!("(core module $small (func (export \"f\"))) {instances}"))
}

pub(in super::super) fn three_memories() -> Vec<u8> {
    let instances = "(core instance (instantiate $small))".repeat(3);
    plain("", &format!("(core module $small (memory (export \"m\") 1)) {instances}"))
}

pub(in super::super) fn memory_of_4_gib() -> Vec<u8> {
    plain("", r#"(core module $large (memory (export "m") 65536)) (core instance (instantiate $large))"#)
}

pub(in super::super) fn huge_table() -> Vec<u8> {
    plain("(table 9000000 funcref)", "")
}

pub(in super::super) fn memory_of_64_bits() -> Vec<u8> {
    plain("", r#"(core module $m (memory (export "m") i64 1)) (core instance (instantiate $m))"#)
}

pub(in super::super) fn shared_memory() -> Vec<u8> {
    plain("", r#"(core module $m (memory (export "m") 1 1 shared)) (core instance (instantiate $m))"#)
}
