//! Attacks by output and input: floods, and what nobody takes.

use super::Attacker::{Client, Component, Guest};
use super::clients::{frames, messages, outputs, starts};
use super::ends::{BUSY, BUSY_OR_TRAPPED, IDLE, INBOX, LATE, MESSAGE, NO_GUEST, UNREAD_OR_LATE, WELL};
use super::{Attack, Category, ClientFn, End, components};

const fn guest(name: &'static str, arguments: &'static [&'static str], ends: &'static [End]) -> Attack {
    Attack::new(Category::Io, name, Guest(arguments), ends)
}

const fn component(name: &'static str, make: fn() -> Vec<u8>, ends: &'static [End]) -> Attack {
    Attack::new(Category::Io, name, Component(make), ends)
}

const fn client(name: &'static str, client: ClientFn, ends: &'static [End]) -> Attack {
    Attack::new(Category::Io, name, Client(client), ends)
}

pub(super) const ATTACKS: &[Attack] = &[
    guest("text-flood", &["flood-text"], BUSY),
    guest("text-of-a-byte", &["drip"], BUSY),
    guest("text-of-a-byte-crowd", &["drip"], BUSY).copies(30),
    guest("text-of-nothing", &["emit-empty"], BUSY),
    guest("text-of-a-megabyte", &["emit-of", "1000000"], BUSY),
    guest("tokens-flood", &["flood-tokens"], BUSY),
    guest("tokens-of-none", &["emit-no-tokens"], BUSY),
    guest("json-of-a-byte", &["emit-json"], BUSY),
    guest("generations-emitted", &["generate-and-emit"], BUSY),
    guest("log-flood", &["flood-log"], BUSY),
    guest("log-of-line-feeds", &["log-lines", "900000"], BUSY),
    guest("log-of-line-feeds-crowd", &["log-lines", "900000"], BUSY).copies(30),
    guest("log-of-a-line", &["log-long", "1000000"], BUSY),
    guest("stderr-flood", &["flood-stderr"], BUSY),
    guest("stderr-without-lines", &["flood-stderr-without-lines"], BUSY),
    guest("stdout-flood", &["stdout", "60000"], BUSY),
    guest("stdout-of-line-feeds", &["stdout-lines", "60000"], BUSY),
    guest("stdout-of-a-byte", &["stdout-bytes"], BUSY),
    guest("stdout-crowd", &["stdout", "60000"], BUSY).copies(30),
    component("stdout-zeroes", components::stdout_zeroes, BUSY_OR_TRAPPED),
    component("splice-of-2-64", components::splice_of_2_64, BUSY_OR_TRAPPED),
    component("stdin-read", components::stdin_read, BUSY_OR_TRAPPED),
    guest("receive-without-wait", &["poll"], BUSY),
    guest("receive-for-ever", &["wait-for-messages"], IDLE),
    client("output-unread", outputs::unread, UNREAD_OR_LATE),
    client("output-unread-by-many", outputs::unread_by_many, UNREAD_OR_LATE),
    client("output-read-slowly", outputs::read_slowly, UNREAD_OR_LATE),
    client("recording-unread", outputs::recording_unread, UNREAD_OR_LATE),
    client("profile-unread", outputs::profile_unread, UNREAD_OR_LATE),
    client("recording-of-a-flood", outputs::recording_of_a_flood, ORDERLY_RECORDING),
    client("requests-unread", outputs::requests_unread, WELL),
    client("starts-unread", starts::starts_unread, WELL).alone().copies(1),
    client("surplus-fields", frames::surplus_fields, WELL).alone().copies(1),
    client("infos", outputs::infos, WELL),
    client("lists", outputs::lists, WELL),
    client("message-too-long", messages::too_long, MESSAGE).brief(),
    client("message-to-nobody", messages::to_nobody, NO_GUEST).brief(),
    client("message-after-the-end", messages::after_the_end, AFTER_THE_END).brief(),
    client("inbox-flood", messages::inbox_flood, INBOX).copies(1),
    client("inbox-of-empty-messages", messages::empty_messages, WELL_OR_FULL).copies(1),
    client("answers-unread", messages::answers_unread, LATE),
];

/// Its output, or the recording of it, waits.
const ORDERLY_RECORDING: &[End] = &[
    End { code: "budget_exceeded", name: None },
    End { code: "deadline_exceeded", name: Some("deadline_ms") },
];

const AFTER_THE_END: &[End] =
    &[End { code: "invalid_argument", name: None }, End { code: "unknown_guest", name: None }];

const WELL_OR_FULL: &[End] = &[
    End { code: "ok", name: None },
    End { code: "limit_exceeded", name: None },
    End { code: "deadline_exceeded", name: Some("deadline_ms") },
];
