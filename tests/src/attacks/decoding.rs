//! Attacks on the engine: work that it shares with everybody.

use super::Attacker::{Client, Guest};
use super::clients::saving;
use super::ends::{ANY_ORDERLY, BUSY, HOARD, HOST_MEMORY};
use super::{Attack, Category, ClientFn, End};

const fn guest(name: &'static str, arguments: &'static [&'static str], ends: &'static [End]) -> Attack {
    Attack::new(Category::Decoding, name, Guest(arguments), ends)
}

/// What takes all that a user may have on disk, or says of it that it is too much.
const fn saver(name: &'static str, client: ClientFn) -> Attack {
    Attack::new(Category::Decoding, name, Client(client), BUSY)
        .alone()
        .copies(1)
        .cleaned_by(&["forget-turns"])
}

pub(super) const ATTACKS: &[Attack] = &[
    guest("prefill", &["prefill"], BUSY),
    guest("prefill-crowd", &["prefill"], BUSY).copies(30),
    guest("score-long", &["score", "1"], BUSY),
    guest("score-256", &["score", "256"], BUSY),
    guest("score-crowd", &["score", "1"], BUSY).copies(30),
    guest("step-256", &["step", "256"], BUSY),
    guest("full-1", &["full", "1"], BUSY),
    guest("full-16", &["full", "16"], BUSY),
    guest("full-crowd", &["full", "16"], BUSY).copies(30),
    guest("top-1024-of-256", &["top", "256"], BUSY),
    guest("embedding-256", &["embedding", "256"], BUSY),
    guest("hidden-64", &["hidden", "64"], BUSY),
    guest("attention", &["attention"], BUSY),
    guest("prompt-logprobs", &["prompt-logprobs"], BUSY),
    guest("generate-30", &["generate", "30"], BUSY),
    guest("generate-256", &["generate", "256"], BUSY).copies(1),
    guest("generate-crowd", &["generate", "4"], BUSY).copies(60),
    guest("generations", &["generations"], HOARD),
    guest("generations-of-nothing", &["generations-of-nothing"], HOST_MEMORY),
    guest("generations-of-long-tokens", &["generations-of-long-tokens"], HOST_MEMORY),
    guest("generations-dropped", &["generations-of", "16"], BUSY),
    guest("beams-8", &["beams", "8"], BUSY),
    guest("beams-512", &["beams", "512"], ANY_ORDERLY).copies(1),
    guest("searches", &["searches"], HOARD),
    guest("streams-in-vain", &["streams-in-vain"], BUSY),
    guest("fork-and-drop", &["fork-and-drop", "1"], BUSY),
    guest("fork-and-drop-250", &["fork-and-drop", "250"], BUSY),
    guest("create-and-drop", &["create-and-drop"], BUSY),
    guest("append-and-truncate", &["append-and-truncate"], BUSY),
    guest("evict", &["evict"], BUSY),
    guest("steer", &["steer"], BUSY),
    guest("steerings", &["steerings"], HOARD),
    guest("particles", &["particles"], BUSY),
    guest("wrong-guesses", &["speculate"], BUSY),
    guest("contexts", &["contexts"], HOARD),
    guest("fork-bomb", &["fork-bomb"], HOARD),
    guest("pages", &["pages"], HOARD),
    guest("save-one-name", &["save-one"], BUSY).cleaned_by(&["forget", "one"]),
    guest("save-many-names", &["save-many"], HOARD).cleaned_by(&["forget", "kept"]).copies(1),
    saver("saves-by-turns", saving::by_turns),
    saver("saves-past-the-disk", saving::past_the_disk),
    guest("endless-stream", &["endless"], BUSY),
];
