//! What fuzzers and simulations run beside the public API. Nothing else uses it, and without the feature `fuzzing` it is not there.

mod accounts;

use std::io::Cursor;

use trellis_engine::account::{ActorId, Resource};

pub use self::accounts::Accounts;
use crate::guest::{GuestError, GuestHost};
use crate::recording::{Answer, Broken, Call, Entry, FrameWriter, Head, MAGIC, Reader, write_head};
use crate::service::HostService;

/// Makes a component of this user ready to start, as [`GuestHost::compile`] does, but that it is compiled in this process.
///
/// # Errors
/// As [`GuestHost::compile`].
pub fn compile(host: &GuestHost, actor: ActorId, wasm: &[u8]) -> Result<(), GuestError> {
    host.compile_here(actor, wasm)
}

/// What all users together hold of pages, contexts and bytes of host memory.
#[must_use]
pub fn held(service: &HostService) -> [u64; 3] {
    [Resource::Pages, Resource::Contexts, Resource::HostBytes]
        .map(|resource| service.accounts().used(resource))
}

/// Characters that are shown of a value at most, and how long it is.
const N_SHOWN_MAX: usize = 430;

/// A recording that was read.
#[derive(Debug, PartialEq)]
pub struct Recording {
    head: Head,
    entries: Vec<Entry>,
}

impl Recording {
    /// A file of these payloads, the head's first, with seals that are right: what a forger would write.
    #[must_use]
    pub fn forge(payloads: &[&[u8]]) -> Vec<u8> {
        let mut file = MAGIC.to_vec();
        let Some((head, entries)) = payloads.split_first() else { return file };
        FrameWriter::default().write_payload(head, &mut file);
        let mut writer = FrameWriter::default();
        entries.iter().for_each(|payload| writer.write_payload(payload, &mut file));
        file
    }

    /// Reads a file to its end.
    ///
    /// # Errors
    /// What is wrong with it, for people.
    pub fn read(file: &[u8]) -> Result<Self, String> {
        let read = || -> Result<Self, Broken> {
            let (head, mut reader) = Reader::open(Cursor::new(file.to_vec()))?;
            let mut entries = Vec::new();
            while !matches!(entries.last(), Some(Entry::End(_))) {
                let entry = reader.entry()?;
                show(&entry);
                entries.push(entry);
            }
            Ok(Self { head, entries })
        };
        read().map_err(|broken| broken.to_string())
    }

    /// The file that says the same.
    #[must_use]
    pub fn write(&self) -> Vec<u8> {
        let mut file = write_head(&self.head);
        let mut writer = FrameWriter::default();
        self.entries.iter().for_each(|entry| writer.write(entry, &mut file));
        file
    }
}

/// Says what a call was, and where it differs from another, as a replay does that goes another way.
fn show(entry: &Entry) {
    let Entry::Call(Call { arguments, answer, .. }) = entry else { return };
    let answer = match answer {
        Some(Answer::Value(value)) => Some(value),
        _ => None,
    };
    for value in arguments.iter().chain(answer) {
        let n_shown = value.to_string().chars().count();
        assert!(n_shown <= N_SHOWN_MAX, "{n_shown} characters");
        for other in arguments {
            assert_eq!(value.difference(other).is_some(), value != other, "{value:?} {other:?}");
        }
    }
}
