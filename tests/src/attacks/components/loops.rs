//! Guests that go on without end, in their own code and in the host's.

use super::*;

/// The body of a `run` that does this again and again.
fn again(before: &str, act: &str) -> String {
    format!("{before} (loop $again {act} (br $again)) (i32.const 16)")
}

fn repeated(imports: &str, lowered: &[Lowered], before: &str, act: &str) -> Vec<u8> {
    guest(imports, lowered, SAME_PLACE, &again(before, act))
}

/// As many as a call may ask for.
pub(in super::super) fn random_bytes() -> Vec<u8> {
    repeated(RANDOM, &[RANDOM_BYTES], "", "(call $random (i64.const 65536) (i32.const 32))")
}

/// The same of those that need not be good.
pub(in super::super) fn insecure_random_bytes() -> Vec<u8> {
    let imports = r#"(import "wasi:random/insecure@0.2.0" (instance $random
        (export "get-insecure-random-bytes" (func (param "len" u64) (result (list u8))))))"#;
    let lowered = Lowered {
        name: "random",
        canon: with_memory!(r#"(func $random "get-insecure-random-bytes")"#),
        ty: "(param i64 i32)",
    };
    repeated(imports, &[lowered], "", "(call $random (i64.const 65536) (i32.const 32))")
}

/// 2^40 in one call.
pub(in super::super) fn random_of_2_40() -> Vec<u8> {
    repeated(RANDOM, &[RANDOM_BYTES], "", "(call $random (i64.const 1099511627776) (i32.const 32))")
}

pub(in super::super) fn memory_grow_zero() -> Vec<u8> {
    repeated("", &[], "", "(drop (memory.grow (i32.const 0)))")
}

pub(in super::super) fn memory_copy() -> Vec<u8> {
    repeated("", &[], "", "(memory.copy (i32.const 0) (i32.const 8) (i32.const 4194000))")
}

/// The host denies it from some size on; it asks again.
pub(in super::super) fn table_grow() -> Vec<u8> {
    repeated("", &[], "", "(drop (table.grow $table (ref.null func) (i32.const 1000)))")
}

/// Asks for sockets of each kind, and traps if it is given one.
pub(in super::super) fn sockets() -> Vec<u8> {
    let labels = [
        "unknown",
        "access-denied",
        "not-supported",
        "invalid-argument",
        "out-of-memory",
        "timeout",
        "concurrency-conflict",
        "not-in-progress",
        "would-block",
        "invalid-state",
        "new-socket-limit",
        "address-not-bindable",
        "address-in-use",
        "remote-unreachable",
        "connection-refused",
        "connection-reset",
        "connection-aborted",
        "datagram-too-large",
        "name-unresolvable",
        "temporary-resolver-failure",
        "permanent-resolver-failure",
    ];
    let labels = labels.map(|label| format!("\"{label}\"")).join(" ");
    let of_kind = |kind: &str| {
        format!(
            r#"(import "wasi:sockets/{kind}@0.2.0" (instance ${kind}
                (export "{kind}-socket" (type (sub resource)))))
            (alias export ${kind} "{kind}-socket" (type ${kind}-socket))
            (import "wasi:sockets/{kind}-create-socket@0.2.0" (instance $create-{kind}
                (alias outer 1 $error-code (type $e))
                (export "error-code" (type $error (eq $e)))
                (alias outer 1 $ip-address-family (type $f))
                (export "ip-address-family" (type $family (eq $f)))
                (alias outer 1 ${kind}-socket (type $s))
                (export "{kind}-socket" (type $socket (eq $s)))
                (export "create-{kind}-socket"
                    (func (param "address-family" $family) (result (result (own $socket) (error $error)))))))"#
        )
    };
    let imports = format!(
        r#"(import "wasi:sockets/network@0.2.0" (instance $network
                (type $errors (enum {labels}))
                (export "error-code" (type (eq $errors)))
                (type $families (enum "ipv4" "ipv6"))
                (export "ip-address-family" (type (eq $families)))))
            (alias export $network "error-code" (type $error-code))
            (alias export $network "ip-address-family" (type $ip-address-family))
            {} {}"#,
        of_kind("tcp"),
        of_kind("udp")
    );
    let (tcp, udp) = (
        with_memory!(r#"(func $create-tcp "create-tcp-socket")"#),
        with_memory!(r#"(func $create-udp "create-udp-socket")"#),
    );
    let lowered =
        [("tcp", tcp), ("udp", udp)].map(|(name, canon)| Lowered { name, canon, ty: "(param i32 i32)" });
    // The first byte of the result is 1 where it is an error.
    let act = |name: &str, family: u32| {
        format!(
            "(call ${name} (i32.const {family}) (i32.const 64))
            (if (i32.ne (i32.load8_u (i32.const 64)) (i32.const 1)) (then (unreachable)))"
        )
    };
    let acts = [act("tcp", 0), act("tcp", 1), act("udp", 0), act("udp", 1)].concat();
    repeated(&imports, &lowered, "", &acts)
}

/// As large as it may be, and written from end to end.
pub(in super::super) fn table_memory() -> Vec<u8> {
    repeated(
        "",
        &[],
        "(drop (table.grow $table (ref.null func) (i32.const 9000)))",
        "(table.fill $table (i32.const 0) (ref.null func) (i32.const 9000))",
    )
}

pub(in super::super) fn branch_table() -> Vec<u8> {
    repeated("", &[], "", "(br_table $again $again $again (i32.const 1))")
}

pub(in super::super) fn divide() -> Vec<u8> {
    repeated("", &[], "", "(drop (f64.sqrt (f64.div (f64.const 1e-310) (f64.const 3))))")
}

/// The host asks for memory to return a list, and waits for it.
pub(in super::super) fn realloc_without_end() -> Vec<u8> {
    let realloc = "(loop $again (br $again)) (i32.const 0)";
    guest(RANDOM, &[RANDOM_BYTES], realloc, "(call $random (i64.const 8) (i32.const 32)) (i32.const 16)")
}

pub(in super::super) fn sleep_of_2_64() -> Vec<u8> {
    repeated(POLL, &[SUBSCRIBE, BLOCK], "", "(call $block (call $subscribe (i64.const -1)))")
}

pub(in super::super) fn sleep_of_1_ns() -> Vec<u8> {
    repeated(
        POLL,
        &[SUBSCRIBE, BLOCK, DROP],
        "",
        "(local.set $handle (call $subscribe (i64.const 1)))
         (call $block (local.get $handle)) (call $drop (local.get $handle))",
    )
}

/// One handle, 200,000 times in a list.
pub(in super::super) fn poll_many() -> Vec<u8> {
    repeated(
        POLL,
        &[SUBSCRIBE, POLL_ALL],
        "(local.set $handle (i32.const 2000000))
         (i32.store (local.get $handle) (call $subscribe (i64.const 1)))
         (memory.copy (i32.const 2000004) (i32.const 2000000) (i32.const 4))
         (loop $fill
            (i32.store offset=4 (local.get $handle) (i32.load (local.get $handle)))
            (local.set $handle (i32.add (local.get $handle) (i32.const 4)))
            (br_if $fill (i32.lt_u (local.get $handle) (i32.const 2800000))))",
        "(call $poll (i32.const 2000000) (i32.const 200000) (i32.const 32))",
    )
}

/// One after the other, kept.
pub(in super::super) fn pollables() -> Vec<u8> {
    repeated(POLL, &[SUBSCRIBE], "", "(drop (call $subscribe (i64.const -1)))")
}

fn streams(method: Lowered, act: &str) -> Vec<u8> {
    repeated(STREAMS, &[GET_STDIN, GET_STDOUT, method], "(local.set $handle (call $stdout))", act)
}

pub(in super::super) fn stdout_zeroes() -> Vec<u8> {
    let method = Lowered {
        name: "zeroes",
        canon: with_memory!(r#"(func $streams "[method]output-stream.blocking-write-zeroes-and-flush")"#),
        ty: "(param i32 i64 i32)",
    };
    streams(method, "(call $zeroes (local.get $handle) (i64.const 4096) (i32.const 32))")
}

/// 2^40 zeroes in one call.
pub(in super::super) fn zeroes_of_2_40() -> Vec<u8> {
    let method = Lowered {
        name: "zeroes",
        canon: with_memory!(r#"(func $streams "[method]output-stream.write-zeroes")"#),
        ty: "(param i32 i64 i32)",
    };
    streams(method, "(call $zeroes (local.get $handle) (i64.const 1099511627776) (i32.const 32))")
}

/// All that comes in goes out.
pub(in super::super) fn splice_of_2_64() -> Vec<u8> {
    let method = Lowered {
        name: "splice",
        canon: with_memory!(r#"(func $streams "[method]output-stream.blocking-splice")"#),
        ty: "(param i32 i32 i64 i32)",
    };
    streams(method, "(call $splice (local.get $handle) (call $stdin) (i64.const -1) (i32.const 32))")
}

pub(in super::super) fn stdin_read() -> Vec<u8> {
    let method = Lowered {
        name: "read",
        canon: with_memory!(r#"(func $streams "[method]input-stream.blocking-read")"#),
        ty: "(param i32 i64 i32)",
    };
    streams(method, "(call $read (call $stdin) (i64.const -1) (i32.const 32))")
}

/// Before `run`, when the component is instantiated.
pub(in super::super) fn start_function() -> Vec<u8> {
    plain("(func $start (loop $again (br $again))) (start $start)", "")
}

pub(in super::super) fn start_that_traps() -> Vec<u8> {
    plain("(func $start unreachable) (start $start)", "")
}

/// After `run`, when its result has been read.
pub(in super::super) fn post_return() -> Vec<u8> {
    wat(r#"(component
        (core module $main
            (memory (export "memory") 1)
            (func (export "run") (result i32) (i32.const 16))
            (func (export "post") (param i32) (loop $again (br $again))))
        (core instance $main (instantiate $main))
        (func (export "run") (result (result (error string)))
            (canon lift (core func $main "run") (memory (core memory $main "memory")) (post-return (core func $main "post")))))"#)
}
