//! Attacks on the processor's time and on memory.

use super::Attacker::{Component, Guest};
use super::ends::{
    BUSY, BUSY_OR_FAILED, BUSY_OR_TRAPPED, CALL, FAILED, HOARD, LATE, MEMORY, MEMORY_OR_LATE, TRAPPED,
};
use super::{Attack, Category, End, components};

const fn guest(name: &'static str, arguments: &'static [&'static str], ends: &'static [End]) -> Attack {
    Attack::new(Category::Processor, name, Guest(arguments), ends)
}

const fn component(name: &'static str, make: fn() -> Vec<u8>, ends: &'static [End]) -> Attack {
    Attack::new(Category::Processor, name, Component(make), ends)
}

pub(super) const ATTACKS: &[Attack] = &[
    guest("spin", &["loop"], BUSY),
    guest("spin-crowd", &["loop"], BUSY).copies(100),
    guest("softmax", &["softmax"], BUSY),
    guest("clock", &["clock"], BUSY),
    guest("usage", &["usage"], BUSY),
    guest("names", &["names"], BUSY),
    guest("arguments", &["arguments"], BUSY),
    guest("model-info", &["model-info"], BUSY),
    guest("vocabulary", &["vocabulary"], BUSY),
    guest("token-bytes", &["token-bytes"], BUSY),
    guest("encode-spaces", &["encode", "spaces", "1000000"], BUSY),
    guest("encode-letter", &["encode", "letter", "1000000"], BUSY),
    guest("encode-random", &["encode", "random", "1000000"], BUSY),
    guest("encode-digits", &["encode", "digits", "1000000"], BUSY),
    guest("encode-white", &["encode", "white", "1000000"], BUSY),
    guest("encode-specials", &["encode-markup", "specials", "1000000"], BUSY),
    guest("encode-half-specials", &["encode-markup", "half-specials", "1000000"], BUSY),
    guest("encode-combining", &["encode", "combining", "1000000"], BUSY),
    guest("encode-emoji", &["encode", "emoji", "1000000"], BUSY),
    guest("encode-crowd", &["encode", "random", "1000000"], BUSY).copies(30),
    guest("encode-4k-spaces", &["encode", "spaces", "4096"], BUSY),
    guest("encode-4k-letter", &["encode", "letter", "4096"], BUSY),
    guest("encode-4k-random", &["encode", "random", "4096"], BUSY),
    guest("decode-long", &["decode", "250000"], BUSY),
    guest("chat-of-2000", &["chat", "2000"], BUSY),
    guest("chat-crowd", &["chat", "2000"], BUSY).copies(30),
    guest("mask-of-200000", &["mask"], BUSY),
    guest("bias-of-all", &["dense-bias"], BUSY),
    guest("program-check", &["program", "long"], BUSY),
    component("random-bytes", components::random_bytes, BUSY),
    component("random-bytes-crowd", components::random_bytes, BUSY).copies(30),
    component("random-of-2-40", components::random_of_2_40, TRAPPED).brief(),
    component("insecure-random-bytes", components::insecure_random_bytes, BUSY),
    component("sockets", components::sockets, BUSY),
    component("memory-grow-zero", components::memory_grow_zero, BUSY),
    component("memory-copy", components::memory_copy, BUSY),
    component("table-grow", components::table_grow, BUSY),
    component("table-memory", components::table_memory, BUSY),
    component("realloc-without-end", components::realloc_without_end, BUSY),
    component("branch-table", components::branch_table, BUSY),
    component("divide", components::divide, BUSY),
    component("sleep-of-2-64", components::sleep_of_2_64, LATE),
    component("sleep-crowd", components::sleep_of_2_64, LATE).copies(100),
    component("sleep-of-1-ns", components::sleep_of_1_ns, BUSY).copies(100),
    component("poll-many", components::poll_many, BUSY_OR_TRAPPED),
    component("pollables", components::pollables, TABLE_FULL),
    guest("recursion", &["stack"], TRAPPED).brief(),
    guest("recursion-in-memory", &["stack-in-memory"], TRAPPED).brief(),
    guest("memory", &["memory"], MEMORY),
    guest("memory-huge", &["huge-allocation"], MEMORY).brief(),
    guest("memory-grow", &["hog-all"], MEMORY_OR_LATE),
    guest("memory-hog", &["hog", "200"], MEMORY_OR_LATE),
    guest("memory-crowd", &["hog", "200"], MEMORY_OR_LATE).copies(20),
    guest("token-lists", &["token-lists"], HOARD),
    guest("masks", &["masks"], HOARD),
    guest("biases", &["biases"], HOARD),
    guest("grammars", &["grammars"], HOARD),
    guest("programs", &["programs"], HOARD),
    guest("samplers", &["samplers"], HOARD),
    guest("seeded-samplers", &["seeded-samplers"], HOARD),
    guest("decoders", &["decoders"], HOARD),
    guest("models", &["models"], HOARD),
    guest("streams", &["streams"], HOARD),
    guest("call-of-40-mb", &["call-of", "40000000"], CALL).brief(),
    guest("grammar-schema", &["grammar", "schema"], BUSY),
    guest("grammar-deep", &["grammar", "deep-schema"], BUSY_OR_FAILED),
    guest("grammar-regex", &["grammar", "regex"], BUSY_OR_FAILED),
    guest("grammar-blow-up", &["grammar", "regex-blow-up"], BUSY_OR_FAILED),
    guest("grammar-choices", &["grammar", "many-choices"], BUSY_OR_FAILED),
    guest("grammar-ambiguous", &["grammar", "lark"], BUSY_OR_FAILED),
    guest("grammar-left-recursive", &["grammar", "lark-endless"], BUSY_OR_FAILED),
    guest("grammar-optional", &["refused-grammar", "optional"], BUSY),
    guest("grammar-doubled", &["refused-grammar", "doubled"], BUSY),
    guest("grammar-patterns", &["refused-grammar", "patterns"], BUSY),
    guest("grammar-crowd", &["grammar", "schema"], BUSY).copies(30),
    guest("no-such-mode", &["no-such-mode"], FAILED).brief(),
];

/// The host's table of objects is full.
const TABLE_FULL: &[End] =
    &[End { code: "guest_trapped", name: None }, End { code: "budget_exceeded", name: Some("n_handles") }];
