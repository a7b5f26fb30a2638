//! Attacks on beginnings and ends: guests that do not stop, clients that leave, crowds.

use super::Attacker::{Client, Component, Guest};
use super::clients::{crowds, leaving, rights};
use super::ends::{
    BUSY, CANCELLED, CLOSED, DENIED, FAILED, GUESTS, LATE, NO_GUEST, STOPPED, TRAPPED, WELL, WELL_OR_CLOSED,
};
use super::{Attack, Category, ClientFn, End, components};

const fn guest(name: &'static str, arguments: &'static [&'static str], ends: &'static [End]) -> Attack {
    Attack::new(Category::Life, name, Guest(arguments), ends)
}

const fn client(name: &'static str, client: ClientFn, ends: &'static [End]) -> Attack {
    Attack::new(Category::Life, name, Client(client), ends)
}

pub(super) const ATTACKS: &[Attack] = &[
    guest("abort", &["abort"], TRAPPED),
    guest("panic", &["panic"], TRAPPED),
    guest("panic-of-a-megabyte", &["panic-with", "1000000"], TRAPPED),
    guest("error-of-a-megabyte", &["error-of", "1000000"], FAILED),
    guest("error-flood", &["error"], FAILED),
    guest("exit-flood", &["exit-well"], WELL),
    guest("exit-with-a-status", &["exit"], FAILED).brief(),
    guest("sleep", &["sleep"], LATE),
    guest("work-in-drop", &["late-work"], BUSY),
    guest("unreachable-flood", &["abort"], TRAPPED).copies(30),
    Attack::new(Category::Life, "start-function", Component(components::start_function), BUSY),
    Attack::new(Category::Life, "end-in-post-return", Component(components::post_return), BUSY),
    client("leave-while-it-runs", leaving::while_it_runs, LEFT),
    client("leave-while-it-decodes", leaving::while_it_decodes, LEFT),
    client("leave-while-it-works-in-drop", leaving::while_it_works_in_drop, LEFT),
    client("leave-before-the-start", leaving::before_the_start, LEFT),
    client("leave-while-compiling", leaving::while_compiling, WELL),
    client("leave-in-a-frame", leaving::in_a_frame, WELL),
    client("cancel-ignored", leaving::cancel_ignored, CANCELLED).brief(),
    client("cancel-storm", leaving::cancel_storm, WELL),
    client("cancel-at-once", leaving::cancel_at_once, WELL),
    client("stop-of-a-guest", leaving::stop_of_a_guest, STOPPED).brief(),
    client("stop-of-nobody", rights::stop_of_nobody, NO_GUEST).brief(),
    client("stops-of-nothing", rights::stops_of_nothing, NO_GUEST_OR_MEMORY).alone().copies(1),
    client("stop-of-all", rights::stop_of_all, NO_GUEST).brief().alone().of_a_stranger(),
    client("attach-to-all", rights::attach_to_all, NO_GUEST).brief().alone().of_a_stranger(),
    client("shutdown", rights::shutdown, DENIED).brief().of_a_stranger(),
    client("unload", rights::unload, DENIED).brief().of_a_stranger(),
    client("load", rights::load, DENIED).brief().of_a_stranger(),
    client("cancels-of-nothing", rights::cancels_of_nothing, WELL),
    client("slow-hellos", crowds::slow_hellos, WELL).alone().copies(1),
    client("half-frames", crowds::half_frames, WELL).alone().copies(1),
    client("connections-of-1000", crowds::connections, TURNED_AWAY).alone().copies(1),
    client("connections-by-turns", crowds::connections_by_turns, WELL_OR_CLOSED),
    client("guests-of-200", crowds::guests, GUESTS).alone().copies(1),
    client("starts-in-a-row", crowds::starts_in_a_row, WELL),
    client("starts-at-once", crowds::starts_at_once, CROWDED).alone().copies(1),
];

/// Requests under way are paid for.
const NO_GUEST_OR_MEMORY: &[End] =
    &[End { code: "unknown_guest", name: None }, End { code: "budget_exceeded", name: Some("host_bytes") }];

/// There are more connections than there may be.
const TURNED_AWAY: &[End] =
    &[End { code: "limit_exceeded", name: Some("connections") }, End { code: CLOSED, name: None }];

/// Guests that are left and still end count as they run: who starts others faster is refused.
const LEFT: &[End] =
    &[End { code: "ok", name: None }, End { code: "limit_exceeded", name: Some("n_guests") }];
const CROWDED: &[End] = &[End { code: "ok", name: None }, End { code: "limit_exceeded", name: None }];
