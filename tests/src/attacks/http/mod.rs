//! Attacks over HTTP: on a Unix socket, where the kernel says who asks, and on a port, where a token does.
//!
//! An answer ends an attack by its status, with the error's code as what it is about; whatever has no error's form, or the type of
//! another status, is wrong.

mod bodies;
mod doors;
mod fields;
mod heads;
mod line;
mod readers;

use std::io;

use serde_json::{Value, json};

use super::Attacker::Client;
use super::ends::{CLOSED, OK};
use super::front::Place;
use super::{Attack, Category, ClientFn, End, Ending, Site};

const MODELS: &str = "/v1/models";
const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const EMBEDDINGS: &str = "/v1/embeddings";
const RESPONSES: &str = "/v1/responses";

/// A conversation of one question, whose answer is short.
fn chat(text: &str) -> Value {
    json!({ "model": "tiny", "temperature": 0, "max_tokens": 1, "messages": [{ "role": "user", "content": text }] })
}

/// The same with more in it.
fn with(body: &Value, more: Value) -> Value {
    let mut body = body.clone();
    if let (Some(body), Value::Object(more)) = (body.as_object_mut(), more) {
        body.extend(more);
    }
    body
}

/// Does it again and again until the attack is over, or it does not end well.
async fn over_time<F: Future<Output = io::Result<Ending>>>(
    site: &Site,
    act: impl Fn() -> F,
) -> io::Result<Ending> {
    loop {
        let ending = act().await?;
        if !ending.is_well() || !site.goes_on() {
            return Ok(ending);
        }
    }
}

/// The same request on one connection.
async fn in_a_row(site: &Site, request: &[u8]) -> io::Result<Ending> {
    let mut line = site.front()?.line().await?;
    loop {
        let ending = line.ask(request).await?;
        if !ending.is_well() || !site.goes_on() {
            return Ok(ending);
        }
    }
}

const fn brief(name: &'static str, client: ClientFn, ends: &'static [End]) -> Attack {
    lasting(name, client, ends).brief()
}

const fn lasting(name: &'static str, client: ClientFn, ends: &'static [End]) -> Attack {
    Attack::new(Category::Http, name, Client(client), ends)
}

pub(super) const ATTACKS: &[Attack] = &[
    lasting("http-head-by-bytes", heads::by_bytes_of_head, HUNG_UP),
    lasting("http-silence", heads::silent, HUNG_UP),
    brief("http-headers-of-200", heads::headers_of_200, HEADERS),
    brief("http-header-of-200-kb", heads::header_of_200_kb, HEADERS),
    brief("http-header-of-no-name", heads::header_of_no_name, NO_HTTP),
    brief("http-header-of-nul", heads::header_of_nul, NO_HTTP),
    brief("http-lengths-of-two", heads::lengths_of_two, NO_HTTP),
    brief("http-length-of-no-number", heads::length_of_no_number, NO_HTTP),
    lasting("http-version-1-0", heads::version_1_0, WELL),
    brief("http-version-2", heads::version_2, HUNG_UP),
    brief("http-version-3", heads::version_3, NO_HTTP),
    brief("http-encrypted", heads::encrypted, NO_HTTP),
    brief("http-rubbish", heads::rubbish, NO_HTTP),
    brief("http-path-of-60-kb", heads::path_of_60_kb, NO_PATH),
    brief("http-path-of-nobody", heads::path_of_nobody, NO_PATH),
    brief("http-method-of-nobody", heads::method_of_nobody, NO_METHOD),
    brief("http-models-of-paths", heads::model_of_a_path, NO_MODEL),
    lasting("http-body-by-bytes", bodies::by_bytes_of_body, LATE),
    brief("http-body-of-the-limit", bodies::of_the_limit, WELL_OR_LATE),
    brief("http-body-of-the-limit-and-one", bodies::of_the_limit_and_one, TOO_LARGE),
    lasting("http-body-shorter-than-announced", bodies::shorter_than_announced, LATE),
    lasting("http-body-of-2-63", bodies::of_2_63, LATE),
    brief("http-body-of-nothing", bodies::of_nothing, NO_JSON),
    lasting("http-body-that-never-goes-on", bodies::never_goes_on, LATE),
    brief("http-json-deep", bodies::deep, NO_JSON_OR_BUDGET),
    brief("http-json-deep-inside", bodies::deep_inside, NO_JSON_OR_BUDGET),
    brief("http-json-wide", bodies::wide, WELL_OR_LATE),
    brief("http-json-of-one-name", bodies::names_of_one, INVALID_OR_BUDGET),
    brief("http-json-of-many-digits", bodies::number_of_many_digits, NO_JSON_OR_INVALID),
    brief("http-json-not-utf-8", bodies::not_utf_8, NO_JSON),
    brief("http-json-surrogate", bodies::surrogate, NO_JSON),
    brief("http-chunks-of-a-byte", bodies::chunks_of_a_byte, WELL),
    brief("http-chunk-of-no-length", bodies::chunk_of_no_length, NO_BODY),
    brief("http-chunk-of-2-64", bodies::chunk_of_2_64, NO_BODY),
    brief("http-chunk-of-many-words", bodies::chunk_of_many_words, NO_BODY),
    brief("http-chunks-without-end", bodies::chunks_without_end, TOO_LARGE_OR_HUNG_UP),
    lasting("http-tokens-of-nobody", doors::tokens_of_nobody, NOBODY).at(Place::Port),
    brief("http-tokens-of-every-length", doors::tokens_of_every_length, NOBODY).at(Place::Port),
    brief("http-tokens-almost-right", doors::tokens_almost_right, NOBODY).at(Place::Port),
    lasting("http-idle-lines", doors::idle_lines, WELL).alone().copies(1),
    lasting("http-short-requests", doors::short_requests, WELL),
    lasting("http-short-requests-in-a-row", doors::short_requests_in_a_row, WELL),
    lasting("http-lines-by-turns", doors::lines_by_turns, WELL).alone(),
    brief("http-ids-of-nobody", doors::ids_of_nobody, NOT_FOUND),
    brief("http-ids-of-another", doors::ids_of_another, NOT_FOUND).at(Place::Port).of_a_stranger(),
    brief("http-guests-of-paths", doors::guests_of_a_path, NO_GUEST),
    lasting("http-most-choices", fields::most_choices, WELL_OR_BUSY),
    brief("http-numbers-beyond", fields::numbers_beyond, REFUSED),
    lasting("http-stops-of-200-kb", fields::stops_of_200_kb, WELL_OR_BUSY),
    brief("http-biases-of-all", fields::biases_of_all, WELL_OR_BUSY),
    lasting("http-schema-of-patterns", fields::schema_of_patterns, REFUSED_OR_BUSY),
    brief("http-schemas-of-nothing", fields::schemas_of_nothing, REFUSED),
    lasting("http-schema-deep", fields::schema_deep, ANY_ORDERLY),
    lasting("http-messages-of-20000", fields::messages_of_20000, REFUSED_OR_BUSY),
    lasting("http-tools-of-1000", fields::tools_of_1000, REFUSED_OR_BUSY),
    brief("http-prompts-of-129", fields::prompts_of_129, REFUSED),
    lasting("http-prompts-of-128", fields::prompts_of_128, WELL_OR_BUSY),
    lasting("http-embeddings-of-500", fields::embeddings_of_500, WELL_OR_BUSY),
    brief("http-model-of-900-kb", fields::model_of_900_kb, NO_MODEL),
    lasting("http-answer-unread", readers::answer_unread, HUNG_UP_OR_ANY),
    lasting("http-answer-read-slowly", readers::answer_read_slowly, WELL),
    lasting("http-leave-in-an-answer", readers::leave_in_an_answer, WELL),
    lasting("http-leave-in-a-request", readers::leave_in_a_request, WELL),
    lasting("http-half-closed", readers::half_closed, WELL_OR_BUDGET),
    brief("http-half-closed-in-a-body", readers::half_closed_in_a_body, HUNG_UP_OR_NO_BODY),
    lasting("http-pipelined", readers::pipelined, WELL),
    lasting("http-pipelined-and-left", readers::pipelined_and_left, WELL),
    lasting("http-pipelined-unread", readers::pipelined_unread, WELL),
    lasting("http-crowd", readers::crowd, WELL_OR_BUSY).alone().copies(1),
    lasting("http-chats-in-a-row", readers::chats_in_a_row, WELL),
];

const fn end(code: &'static str) -> End {
    End { code, name: None }
}

const fn about(code: &'static str, name: &'static str) -> End {
    End { code, name: Some(name) }
}

const ANSWERED: End = end(OK);
const LEFT_ALONE: End = end(CLOSED);
const OF_BUDGET: End = about("429", "budget_exceeded");
/// More guests or compilations than a user may have at once.
const OF_LIMIT: End = about("429", "limit_exceeded");
const OF_TIME: End = about("504", "deadline_exceeded");
const INVALID: End = about("400", "invalid_value");
const TOO_LONG: End = about("413", "request_too_large");
const NO_BODY_END: End = about("400", "invalid_body");
const TIMED_OUT: End = about("408", "timeout");
const NO_JSON_END: End = about("400", "invalid_json");

/// It is answered.
const WELL: &[End] = &[ANSWERED];
/// The daemon hangs up without a word.
const HUNG_UP: &[End] = &[LEFT_ALONE];
/// The library that reads HTTP finds too much in a head, which has no form of an API.
const HEADERS: &[End] = &[end("431")];
/// The library finds no HTTP.
const NO_HTTP: &[End] = &[end("400")];
const NO_PATH: &[End] = &[about("404", "unknown_url")];
const NO_METHOD: &[End] = &[about("405", "method_not_allowed")];
const NO_MODEL: &[End] = &[about("404", "model_not_found")];
const NO_GUEST: &[End] = &[about("404", "unknown_program")];
const NOT_FOUND: &[End] = &[about("404", "not_found")];
/// It did not come in time.
const LATE: &[End] = &[TIMED_OUT];
const TOO_LARGE: &[End] = &[TOO_LONG, TIMED_OUT];
/// What goes on coming after the answer may lose that answer on the way.
const TOO_LARGE_OR_HUNG_UP: &[End] = &[TOO_LONG, LEFT_ALONE, TIMED_OUT];
const NO_JSON: &[End] = &[NO_JSON_END];
const NO_JSON_OR_BUDGET: &[End] = &[NO_JSON_END, OF_BUDGET, TIMED_OUT];
const NO_JSON_OR_INVALID: &[End] = &[NO_JSON_END, INVALID, OF_BUDGET, TIMED_OUT];
const NO_BODY: &[End] = &[NO_BODY_END];
const HUNG_UP_OR_NO_BODY: &[End] = &[LEFT_ALONE, NO_BODY_END];
/// Nobody has that token.
const NOBODY: &[End] = &[about("401", "invalid_api_key")];
const WELL_OR_BUDGET: &[End] = &[ANSWERED, OF_BUDGET, OF_LIMIT];
/// A large body is answered, or refused; on a slow machine it may be late.
const WELL_OR_LATE: &[End] = &[ANSWERED, OF_BUDGET, OF_LIMIT, TIMED_OUT];
const INVALID_OR_BUDGET: &[End] = &[INVALID, OF_BUDGET, TIMED_OUT];
/// The fields of a request are wrong, each in its way.
const REFUSED: &[End] = &[end("400")];
const REFUSED_OR_BUSY: &[End] = &[end("400"), OF_BUDGET, OF_LIMIT, OF_TIME];
/// It is answered, or its guest has no more time, processor time or memory.
const WELL_OR_BUSY: &[End] = &[ANSWERED, OF_BUDGET, OF_LIMIT, OF_TIME];
const ANY_ORDERLY: &[End] = &[ANSWERED, end("400"), OF_BUDGET, OF_LIMIT, OF_TIME];
/// The daemon hangs up on whoever takes nothing, if its guest has not ended before.
const HUNG_UP_OR_ANY: &[End] = &[LEFT_ALONE, ANSWERED, OF_BUDGET, OF_LIMIT, OF_TIME, end("in events")];
