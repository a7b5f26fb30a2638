//! Attacks by values: what crosses from a guest or a client to the host, and is not what it should be.

use super::Attacker::{Client, Component, Guest};
use super::clients::{frames, starts};
use super::ends::{
    ARGUMENTS, CREDIT, FAILED, FRAME, ID, LATE, NO_COMPONENT, NO_MODEL, NO_PROGRAM, PROTOCOL, TRAPPED,
    UNSUPPORTED, WELL, WELL_OR_FAILED,
};
use super::{Attack, Category, ClientFn, End, components};

const fn guest(name: &'static str, arguments: &'static [&'static str], ends: &'static [End]) -> Attack {
    Attack::new(Category::Boundary, name, Guest(arguments), ends).brief()
}

const fn component(name: &'static str, make: fn() -> Vec<u8>, ends: &'static [End]) -> Attack {
    Attack::new(Category::Boundary, name, Component(make), ends).brief()
}

const fn client(name: &'static str, client: ClientFn, ends: &'static [End]) -> Attack {
    Attack::new(Category::Boundary, name, Client(client), ends).brief()
}

pub(super) const ATTACKS: &[Attack] = &[
    guest("json-deep", &["json", "deep"], WELL),
    guest("json-deep-open", &["json", "deep-open"], WELL),
    guest("json-wide", &["json", "wide"], WELL),
    guest("json-number", &["json", "number"], WELL),
    guest("json-exponent", &["json", "exponent"], WELL),
    guest("json-surrogate", &["json", "surrogate"], WELL),
    guest("json-nul", &["json", "nul"], WELL),
    guest("json-mark", &["json", "mark"], WELL),
    guest("json-rubbish", &["json", "rubbish"], WELL),
    guest("json-empty", &["json", "empty"], WELL),
    guest("role-empty", &["role", "empty"], WELL),
    guest("role-code", &["role", "code"], WELL),
    guest("role-bidi", &["role", "bidi"], WELL),
    guest("role-long", &["role", "long"], WELL),
    guest("save-as-nothing", &["save-as", "empty"], WELL),
    // Of several of one user that save, open and forget under one name, some find it forgotten.
    guest("save-as-path", &["save-as", "path"], WELL_OR_FAILED),
    guest("save-as-nul", &["save-as", "nul"], WELL_OR_FAILED),
    guest("save-as-long", &["save-as", "long"], WELL),
    guest("open-nothing", &["open-as", "empty"], WELL),
    guest("open-path", &["open-as", "other-path"], WELL),
    guest("open-long", &["open-as", "long"], WELL),
    guest("token-4096", &["token", "4096"], WELL),
    guest("token-of-32-bits", &["token", "4294967295"], WELL),
    guest("settings", &["settings"], WELL),
    guest("beams-of-none", &["beams-of", "0"], WELL),
    guest("beams-of-many", &["beams-of", "4000000000"], WELL),
    guest("masks-of-rubbish", &["masks-of-rubbish"], WELL),
    guest("call-of-2-mb", &["long-call"], WELL_OR_FAILED),
    guest("look-around", &["world"], WELL),
    component("pointer-out-of-bounds", components::pointer_out_of_bounds, TRAPPED),
    component("length-out-of-bounds", components::length_out_of_bounds, TRAPPED),
    component("text-not-utf-8", components::text_not_utf_8, TRAPPED),
    component("enum-out-of-range", components::enum_out_of_range, TRAPPED),
    component("result-out-of-bounds", components::result_out_of_bounds, TRAPPED),
    component("result-unaligned", components::result_unaligned, TRAPPED),
    component("result-of-no-case", components::result_of_no_case, TRAPPED),
    component("realloc-out-of-bounds", components::realloc_out_of_bounds, TRAPPED),
    component("handle-that-is-none", components::handle_that_is_none, TRAPPED),
    component("handle-dropped-twice", components::handle_dropped_twice, TRAPPED),
    component("log-of-4-gib", components::log_of_4_gib, TRAPPED),
    component("zeroes-of-2-40", components::zeroes_of_2_40, TRAPPED),
    component("message-of-16-mb", components::message_of_16_mb, FAILED),
    component("call-out-of-a-call", components::call_out_of_a_call, TRAPPED),
    client("frame-too-long", frames::too_long, FRAME),
    client("frame-empty", frames::empty, PROTOCOL),
    client("frame-of-rubbish", frames::rubbish, PROTOCOL),
    client("frame-deep", frames::deep, PROTOCOL),
    client("frame-of-a-huge-list", frames::huge_list, PROTOCOL),
    client("frame-of-many-values", frames::many_values, PROTOCOL),
    client("frame-not-utf-8", frames::not_utf_8, PROTOCOL),
    client("frame-cut", frames::cut, PROTOCOL),
    client("frame-with-more", frames::with_more, PROTOCOL),
    client("id-twice", frames::id_twice, ID),
    client("id-that-goes-back", frames::id_back, ID),
    client("id-of-64-bits", frames::id_of_64_bits, WELL),
    client("hello-of-http", frames::hello_of_http, PROTOCOL),
    client("hello-of-nobody", frames::hello_of_old, PROTOCOL),
    client("hello-of-small-frames", frames::hello_of_small_frames, PROTOCOL),
    client("unknown-call", frames::unknown_call, UNSUPPORTED),
    client("unknown-messages", frames::unknown_messages, WELL),
    client("arguments-too-long", starts::arguments_too_long, ARGUMENTS),
    client("arguments-too-many", starts::arguments_too_many, WELL_OR_FAILED_OR_REFUSED),
    client("label-too-long", starts::label_too_long, WELL),
    client("label-of-escapes", starts::label_of_escapes, WELL),
    client("program-of-no-name", starts::no_program, NO_PROGRAM),
    client("program-of-a-path", starts::program_of_a_path, NO_PROGRAM),
    client("component-of-nobody", starts::no_component, NO_COMPONENT),
    client("model-of-no-name", starts::no_model, NO_MODEL),
    client("deadline-of-0", starts::deadline_of_0, LATE),
    client("deadline-of-2-64", starts::deadline_of_2_64, WELL),
    client("credit-of-0", starts::credit_of_0, LATE),
    client("credit-of-2-64", starts::credit_of_2_64, CREDIT),
    client("grant-of-2-64", starts::grant_of_2_64, CREDIT),
    client("grants-of-0", starts::grants_of_0, WELL),
];

/// Many arguments are few bytes, and may be too many values for a frame.
const WELL_OR_FAILED_OR_REFUSED: &[End] = &[
    End { code: "guest_failed", name: None },
    End { code: "limit_exceeded", name: Some("argument_bytes") },
    End { code: "protocol", name: None },
];
