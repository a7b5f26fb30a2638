//! What the daemon and a process of guests say to each other.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use trellis_engine::EngineFailure;
use trellis_engine::account::{ActorId, BudgetExceeded, Counted, GuestId, Resource, SessionId};
use trellis_engine::model::ModelCard;
use trellis_engine::remote::{Answered, Asked, ModelFacts, Numbers};

use trellis_wire::{Shape, WireError, validate_within};

use super::budgets::UserBudgets;
use crate::guest::{Amounts, GuestEnd, GuestLimits, GuestOutput, REASON_BYTES_MAX, cut};
use crate::on_demand::{Declared, NotLoaded};

/// An engine of the daemon, by the order in which the process heard of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct EngineNumber(pub(crate) u32);

/// A model of the daemon, likewise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct ModelNumber(pub(crate) u32);

/// From the daemon.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum ToGuests {
    /// The first of all.
    Begin(Box<Begin>),
    /// There is an engine; the name is that of its device as the settings have it.
    Engine { engine: EngineNumber, device: String },
    /// An engine has come to its end.
    EngineEnded { engine: EngineNumber, failure: Option<EngineFailure> },
    /// A model was loaded.
    Model { model: ModelNumber, engine: EngineNumber, facts: Box<ModelFacts>, card: Box<ModelCard> },
    /// A model has failed.
    ModelFailed { model: ModelNumber, failure: EngineFailure },
    /// Nothing more is computed for a model.
    ModelUnloaded { model: ModelNumber },
    /// What is loaded, the default first, what is on its way out, and the engines in use.
    Listing { loaded: Vec<ModelNumber>, leaving: Vec<ModelNumber>, engines: Vec<EngineNumber> },
    /// The compiled code of a component.
    Program {
        hash: [u8; 32],
        #[serde(with = "shared_bytes")]
        code: Arc<[u8]>,
    },
    /// A component is not started any more.
    ForgetProgram { hash: [u8; 32] },
    /// A guest begins.
    Start(Box<Start>),
    /// A guest may send so many bytes more.
    Credit { guest: GuestId, n_bytes: usize },
    /// The client of a guest is gone.
    ClientGone { guest: GuestId },
    /// A message of the client.
    Message { guest: GuestId, text: String },
    /// The daemon is on its way out, and goes on for so long.
    Drain { left_ms: u64 },
    /// There will be no more messages.
    InputClosed { guest: GuestId },
    /// A guest is to end.
    Stop { guest: GuestId },
    /// What an engine gives back.
    Answer { engine: EngineNumber, answered: Answered },
    /// What engines have counted for a guest.
    Counted { guest: GuestId, counted: Box<Counted> },
    /// Steps of the device that had rows of a guest that is profiled, the time since its start in nanoseconds.
    Steps { guest: GuestId, steps: Vec<Step> },
    /// What came of [`FromGuests::Open`].
    Opened { guest: GuestId, opened: Result<ModelNumber, NotLoaded> },
    /// What came of [`FromGuests::Forget`]: whether anything was saved.
    Forgotten { guest: GuestId, was_there: bool },
    /// What came of [`FromGuests::Borrow`].
    Lent { ticket: u64, lent: Result<(), BudgetExceeded> },
}

/// A step of the device.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Step {
    pub(crate) end_ns: u64,
    pub(crate) elapsed_ns: u64,
    pub(crate) n_rows: u32,
    pub(crate) n_tokens: u32,
}

/// What a process of guests has to know before anything else.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Begin {
    pub(crate) actor: ActorId,
    pub(crate) numbers: Numbers,
    pub(crate) limits: GuestLimits,
    pub(crate) budgets: UserBudgets,
    /// Models that are loaded on demand.
    pub(crate) declared: Declared,
}

/// A guest that begins.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Start {
    pub(crate) guest: GuestId,
    pub(crate) hash: [u8; 32],
    pub(crate) name: String,
    pub(crate) session: SessionId,
    pub(crate) arguments: Vec<String>,
    pub(crate) model: Option<String>,
    pub(crate) seed: u64,
    pub(crate) deadline_ms: Option<u64>,
    pub(crate) is_recorded: bool,
    pub(crate) is_profiled: bool,
    /// What is lent to all guests together before they ask.
    pub(crate) lent: Vec<(Resource, u64)>,
}

/// To the daemon.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum FromGuests {
    /// What guests ask of an engine.
    Asked { engine: EngineNumber, asked: Box<Asked> },
    /// More of a resource: for a guest by itself, or for all guests together.
    Borrow { ticket: u64, guest: Option<GuestId>, resource: Resource, n: u64 },
    /// Less of it.
    GiveBack { resource: Resource, n: u64 },
    /// A guest asks for a model that is loaded on demand; one at a time.
    Open { guest: GuestId, name: String },
    /// A guest forgets what its user has saved under a name of models that are not loaded; as it asks for a model, one at a time.
    Forget { guest: GuestId, name: String },
    /// A guest has nothing more of a model that it got so.
    LetGo { guest: GuestId, model: ModelNumber },
    /// Whether any guest has anything of a model.
    Holds { model: ModelNumber, is_held: bool },
    /// What a guest sends.
    Output { guest: GuestId, output: GuestOutput },
    /// A message is in the guest's inbox.
    Taken { guest: GuestId },
    /// What a guest uses at this moment.
    Seen { guest: GuestId, seen: Box<Seen> },
    /// A guest has ended, and all that it held is free.
    Ended { guest: GuestId, end: GuestEnd },
}

/// What is seen of a guest from outside.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Seen {
    pub(crate) amounts: Amounts,
    pub(crate) is_running: bool,
    pub(crate) models: Vec<String>,
}

/// What one side says that the other does not understand.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotUnderstood {
    /// More in a message than any has.
    #[error("a message of {n_bytes} bytes that has too much in it: {source}")]
    Shape {
        /// Its length.
        n_bytes: usize,
        /// What is too much.
        source: WireError,
    },
    /// No such message.
    #[error("a message of {n_bytes} bytes that says nothing: {reason}")]
    Frame {
        /// Its length.
        n_bytes: usize,
        /// What is wrong with it: the beginning, since it may quote the message.
        reason: String,
    },
    /// Something was named that is not there.
    #[error("{what} {number} is not there")]
    NotThere {
        /// What.
        what: &'static str,
        /// By which number.
        number: u64,
    },
    /// What no guest of ours would ask.
    #[error(transparent)]
    Violation(#[from] trellis_engine::remote::Violation),
    /// More was sent than the client had given credit for.
    #[error("guest {guest} has sent {n_bytes} bytes more than its client takes")]
    Overdrawn {
        /// The guest.
        guest: u64,
        /// How many.
        n_bytes: usize,
    },
    /// A guest has asked for a model before it was answered.
    #[error("guest {guest} asks for a model while it waits for one")]
    AskedAgain {
        /// The guest.
        guest: u64,
    },
    /// A recording or a profile came that nobody has asked for.
    #[error("a {what} of guest {guest}, which nobody has asked for")]
    NotWanted {
        /// The guest.
        guest: u64,
        /// Which of the two.
        what: &'static str,
    },
    /// More was given back than was lent.
    #[error("{n} {resource} given back, {lent} were lent")]
    NotLent {
        /// How much.
        n: u64,
        /// Of what.
        resource: &'static str,
        /// What was lent.
        lent: u64,
    },
    /// Answers wait that the process does not read.
    #[error("{n_bytes} bytes wait for the process, the limit is {limit_bytes}")]
    ReadsNothing {
        /// Bytes that wait.
        n_bytes: usize,
        /// The most.
        limit_bytes: usize,
    },
}

/// Bytes that the daemon has anyway.
mod shared_bytes {
    use std::sync::Arc;

    use serde::{Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(bytes: &Arc<[u8]>, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(bytes)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Arc<[u8]>, D::Error> {
        serde_bytes::deserialize::<Vec<u8>, _>(deserializer).map(Arc::from)
    }
}

/// A message as bytes.
pub(crate) fn encode<T: Serialize>(message: &T) -> Vec<u8> {
    rmp_serde::to_vec(message).expect("messages are plain data")
}

/// How large a message may be inside: the longest lists are those of tokens.
const SHAPE_MAX: Shape = Shape { depth: 64, n_values: 4 << 20 };

/// The message of these bytes, from a process that may say anything.
pub(crate) fn decode_of_guests(frame: &[u8]) -> Result<FromGuests, NotUnderstood> {
    validate_within(frame, SHAPE_MAX)
        .map_err(|source| NotUnderstood::Shape { n_bytes: frame.len(), source })?;
    decode(frame)
}

/// The message of these bytes.
pub(crate) fn decode<'a, T: Deserialize<'a>>(frame: &'a [u8]) -> Result<T, NotUnderstood> {
    rmp_serde::from_slice(frame).map_err(|error| {
        let reason = cut(&error.to_string(), REASON_BYTES_MAX);
        NotUnderstood::Frame { n_bytes: frame.len(), reason }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_process_says_is_quoted_in_part_only() {
        let nonsense = std::collections::HashMap::from([("x".repeat(1 << 20), ())]);
        let error = decode_of_guests(&encode(&nonsense)).expect_err("it says nothing").to_string();
        assert!(error.contains("xxx") && error.len() < 2 * REASON_BYTES_MAX, "{} bytes", error.len());
        let exceeded = BudgetExceeded { what: "tokens", level: "user", used: 1, requested: 2, limit: 3 };
        let told = encode(&exceeded);
        assert_eq!(decode::<BudgetExceeded>(&told).expect("it was written so"), exceeded);
        let of_its_own = encode(&("secret words", "user", 1, 2, 3));
        let told = decode::<BudgetExceeded>(&of_its_own).expect("the names are texts").to_string();
        assert!(told.starts_with("something without a name of the user"), "{told}");
        let end = GuestEnd::Failed { message: "x".repeat(1 << 20) };
        assert!(end.with_texts_cut().to_string().len() < 1 << 16);
        let end = GuestEnd::Failed { message: "its own words".to_owned() };
        assert_eq!(end.with_texts_cut().to_string(), "its own words");
    }
}
