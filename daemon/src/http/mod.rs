//! Requests in the form of HTTP APIs, for clients that were written for others.
//!
//! - Comes in: connections on a Unix socket, where the kernel says who asks, or on a loopback address, where a token does (`listen`,
//!   `places`, `connection`, `tokens`); their requests (`front`, `fields`), in the form of OpenAI's API (`openai`) or of Anthropic's (`anthropic`).
//! - Goes out: answers in the same form, whole or as events (`sse`); mistakes with the field that they are about (`failure`).
//! - Each request is a guest of whoever asks, over a session of its own like that of any client (`run`): budgets, permissions, the
//!   operator's policy, `ps`, `stop` and drains hold by themselves. The guest does the decoding ([`GUEST`], or one that the request
//!   names); here requests and replies are translated (`exchange` has their form). A client that goes away drops its session, and so
//!   ends its guest.
//! - Must not happen: a field of a request that is passed over in silence; a request whose user is not known.

mod anthropic;
mod connection;
mod exchange;
mod failure;
mod fields;
mod front;
mod listen;
mod openai;
mod places;
mod run;
mod share;
mod sse;
mod tokens;
mod whole;
mod write_timeout;

pub(crate) use front::Front;
pub(crate) use listen::{HandedHttp, HttpSocket, LeftHttp};

/// The example that answers requests, unless they name another guest.
pub(crate) const GUEST: &str = "http-chat";
