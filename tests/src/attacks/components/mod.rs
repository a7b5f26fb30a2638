//! Components written by hand, for what no compiler would write.

mod bombs;
mod calls;
mod loops;
mod refused;

pub(super) use bombs::*;
pub(super) use calls::*;
pub(super) use loops::*;
pub(super) use refused::*;

/// WebAssembly of this text.
///
/// # Panics
/// It is no WebAssembly text.
fn wat(text: &str) -> Vec<u8> {
    wat::parse_str(text).unwrap_or_else(|error| panic!("{error}\n{}", &text[..text.len().min(4000)]))
}

/// A function of the host, as the core module of a guest sees it.
struct Lowered {
    /// Its name there.
    name: &'static str,
    /// What it is: the operands of `canon`.
    canon: &'static str,
    /// Its core type.
    ty: &'static str,
}

/// The host's memory options of a call that passes or returns more than numbers.
macro_rules! with_memory {
    ($function:literal) => {
        concat!(
            "lower ",
            $function,
            r#" (memory (core memory $libc "memory")) (realloc (core func $libc "realloc"))"#
        )
    };
}
use with_memory;

/// What answers every request for memory with the same place, in the middle of it.
const SAME_PLACE: &str = "(i32.const 1048576)";

/// A guest: imports, the host's functions that it calls, what its `realloc` does, and the body of `run`, which leaves a pointer
/// to its result. Its memory has 4 MiB, and a result that is well at 16.
fn guest(imports: &str, lowered: &[Lowered], realloc: &str, run: &str) -> Vec<u8> {
    let mut canons = String::new();
    let mut core_imports = String::new();
    let mut exports = String::new();
    for Lowered { name, canon, ty } in lowered {
        canons += &format!("(core func ${name} (canon {canon}))\n");
        core_imports += &format!("(import \"host\" \"{name}\" (func ${name} {ty}))\n");
        exports += &format!("(export \"{name}\" (func ${name}))");
    }
    wat(&format!(
        r#"(component
            {imports}
            (core module $libc
                (memory (export "memory") 64)
                (func (export "realloc") (param i32 i32 i32 i32) (result i32) {realloc}))
            (core instance $libc (instantiate $libc))
            {canons}
            (core module $main
                (import "libc" "memory" (memory 64))
                {core_imports}
                (table $table 10 funcref)
                (func (export "run") (result i32) (local $handle i32) {run}))
            (core instance $host {exports})
            (core instance $main (instantiate $main (with "libc" (instance $libc)) (with "host" (instance $host))))
            (func (export "run") (result (result (error string)))
                (canon lift (core func $main "run") (memory (core memory $libc "memory")))))"#
    ))
}

/// A guest without imports: what its core module has beside `run`, and what the component has beside that module.
fn plain(module: &str, beside: &str) -> Vec<u8> {
    wat(&format!(
        r#"(component
            {beside}
            (core module $main
                (memory (export "memory") 1)
                {module}
                (func (export "run") (result i32) (i32.const 16)))
            (core instance $main (instantiate $main))
            (func (export "run") (result (result (error string)))
                (canon lift (core func $main "run") (memory (core memory $main "memory")))))"#
    ))
}

const RANDOM: &str = r#"(import "wasi:random/random@0.2.0" (instance $random
    (export "get-random-bytes" (func (param "len" u64) (result (list u8))))))"#;

const RANDOM_BYTES: Lowered = Lowered {
    name: "random",
    canon: with_memory!(r#"(func $random "get-random-bytes")"#),
    ty: "(param i64 i32)",
};

const SESSION: &str = r#"(import "trellis:host/session@0.2.0" (instance $session
    (type $level (enum "debug" "info" "warn" "error"))
    (export "log-level" (type $log-level (eq $level)))
    (export "log" (func (param "level" $log-level) (param "line" string)))))"#;

const LOG: Lowered =
    Lowered { name: "log", canon: with_memory!(r#"(func $session "log")"#), ty: "(param i32 i32 i32)" };

const POLL: &str = r#"(import "wasi:io/poll@0.2.0" (instance $poll
        (export "pollable" (type $p (sub resource)))
        (export "[method]pollable.block" (func (param "self" (borrow $p))))
        (export "poll" (func (param "in" (list (borrow $p))) (result (list u32))))))
    (alias export $poll "pollable" (type $pollable))
    (import "wasi:clocks/monotonic-clock@0.2.0" (instance $clock
        (alias outer 1 $pollable (type $o))
        (export "pollable" (type $q (eq $o)))
        (export "subscribe-duration" (func (param "when" u64) (result (own $q))))))"#;

const SUBSCRIBE: Lowered = Lowered {
    name: "subscribe",
    canon: r#"lower (func $clock "subscribe-duration")"#,
    ty: "(param i64) (result i32)",
};
const BLOCK: Lowered =
    Lowered { name: "block", canon: r#"lower (func $poll "[method]pollable.block")"#, ty: "(param i32)" };
const DROP: Lowered = Lowered { name: "drop", canon: "resource.drop $pollable", ty: "(param i32)" };
const POLL_ALL: Lowered =
    Lowered { name: "poll", canon: with_memory!(r#"(func $poll "poll")"#), ty: "(param i32 i32 i32)" };

const STREAMS: &str = r#"(import "wasi:io/error@0.2.0" (instance $errors (export "error" (type (sub resource)))))
    (alias export $errors "error" (type $error))
    (import "wasi:io/streams@0.2.0" (instance $streams
        (alias outer 1 $error (type $o))
        (export "error" (type $e (eq $o)))
        (export "input-stream" (type $is (sub resource)))
        (export "output-stream" (type $os (sub resource)))
        (type $variant (variant (case "last-operation-failed" (own $e)) (case "closed")))
        (export "stream-error" (type $se (eq $variant)))
        (export "[method]output-stream.write-zeroes"
            (func (param "self" (borrow $os)) (param "len" u64) (result (result (error $se)))))
        (export "[method]output-stream.blocking-write-zeroes-and-flush"
            (func (param "self" (borrow $os)) (param "len" u64) (result (result (error $se)))))
        (export "[method]output-stream.blocking-splice"
            (func (param "self" (borrow $os)) (param "src" (borrow $is)) (param "len" u64)
                (result (result u64 (error $se)))))
        (export "[method]input-stream.blocking-read"
            (func (param "self" (borrow $is)) (param "len" u64) (result (result (list u8) (error $se)))))))
    (alias export $streams "input-stream" (type $in))
    (alias export $streams "output-stream" (type $out))
    (import "wasi:cli/stdin@0.2.0" (instance $stdin
        (alias outer 1 $in (type $o))
        (export "input-stream" (type $i (eq $o)))
        (export "get-stdin" (func (result (own $i))))))
    (import "wasi:cli/stdout@0.2.0" (instance $stdout
        (alias outer 1 $out (type $o))
        (export "output-stream" (type $i (eq $o)))
        (export "get-stdout" (func (result (own $i))))))"#;

const GET_STDIN: Lowered =
    Lowered { name: "stdin", canon: r#"lower (func $stdin "get-stdin")"#, ty: "(result i32)" };
const GET_STDOUT: Lowered =
    Lowered { name: "stdout", canon: r#"lower (func $stdout "get-stdout")"#, ty: "(result i32)" };
