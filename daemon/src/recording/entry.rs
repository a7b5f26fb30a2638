//! What a recording holds.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use super::value::Value;
use crate::guest::{GuestEnd, GuestLimits, GuestOutput};

/// What was recorded, as the client knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Head {
    /// What the user called the guest.
    pub(crate) guest: String,
    /// The component, where the client had it.
    #[serde(with = "serde_bytes", default, skip_serializing_if = "Option::is_none")]
    pub(crate) component: Option<Vec<u8>>,
}

/// One thing that happened between a guest and its host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Entry {
    /// The guest was started: the first entry.
    Begin(Box<Begin>),
    /// It called the host.
    Call(Call),
    /// It ended: the last entry.
    End(Box<End>),
}

/// With what a guest was started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Begin {
    /// The BLAKE3 hash of the component.
    #[serde(with = "serde_bytes")]
    pub(crate) hash: [u8; 32],
    /// What it might use.
    pub(crate) limits: GuestLimits,
}

/// A call of a host function.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Call {
    /// The function.
    pub(crate) name: Cow<'static, str>,
    pub(crate) arguments: Vec<Value>,
    /// What the call sent to the client.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) sent: Vec<Sent>,
    /// None when the guest was ended before it.
    pub(crate) answer: Option<Answer>,
}

/// What came of a call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Answer {
    /// The function returned.
    Value(Value),
    /// It ended the guest, for having too many host objects.
    Handles,
    /// It ended the guest, for this reason.
    Fault(String),
}

/// Something that a guest sent to its client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Sent(pub(crate) GuestOutput);

/// How a guest ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct End {
    /// The call that it was in.
    pub(crate) call: Option<Call>,
    /// What it had sent after its last call.
    pub(crate) sent: Vec<Sent>,
    pub(crate) end: GuestEnd,
}
