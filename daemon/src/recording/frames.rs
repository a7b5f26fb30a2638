//! Frames: how entries lie in a file, and what shows that they are the ones that were written.

use std::io::{self, Read};

use bytes::BufMut;
use serde::Serialize;
use serde::de::DeserializeOwned;

use trellis_wire::{Shape, validate_within};

use super::MAGIC;
use super::entry::{Entry, Head};

/// Bytes of a seal.
const SEAL_BYTES: usize = 8;

/// The longest payload. No call passes more than this to its host or back.
const PAYLOAD_BYTES_MAX: usize = 256 << 20;

/// Bounds for the nesting and the number of values in a payload: a forged recording has a valid seal as well.
const SHAPE_MAX: Shape = Shape { depth: 64, n_values: 16 << 20 };

type Seal = [u8; SEAL_BYTES];

fn seal(before: Seal, payload: &[u8]) -> Seal {
    let hash = blake3::Hasher::new().update(&before).update(payload).finalize();
    hash.as_bytes()[..SEAL_BYTES].try_into().expect("a hash is longer than a seal")
}

/// Turns entries into frames, which may be cut and joined at will on their way.
#[derive(Debug, Default)]
pub(crate) struct FrameWriter {
    seal: Seal,
}

impl FrameWriter {
    pub(crate) fn write<T: Serialize>(&mut self, value: &T, to: &mut impl BufMut) {
        let payload = rmp_serde::to_vec_named(value).expect("what is recorded is plain data");
        self.write_payload(&payload, to);
    }

    /// As [`Self::write`], of what is MessagePack already.
    pub(crate) fn write_payload(&mut self, payload: &[u8], to: &mut impl BufMut) {
        self.seal = seal(self.seal, payload);
        let length = u32::try_from(payload.len()).expect("a call passes less than 4 GiB");
        to.put_slice(&length.to_le_bytes());
        to.put_slice(payload);
        to.put_slice(&self.seal);
    }
}

/// The beginning of a recording, before the entries.
pub(crate) fn write_head(head: &Head) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    FrameWriter::default().write(head, &mut bytes);
    bytes
}

/// Why a recording cannot be read, or not to its end.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Broken {
    #[error("it does not begin like a recording of this version")]
    NotARecording,
    #[error("it was cut short after entry {n_entries}, at byte {offset}")]
    Cut { n_entries: u64, offset: u64 },
    #[error("entry {number}, at byte {offset}, is not what was written there")]
    Changed { number: u64, offset: u64 },
    #[error("something follows the end, at byte {offset}")]
    TooLong { offset: u64 },
    #[error("{0}")]
    Io(io::Error),
}

/// Reads a recording, entry by entry.
pub(crate) struct Reader {
    source: Box<dyn Read + Send>,
    seal: Seal,
    /// Of the next frame.
    offset: u64,
    /// Entries read.
    n_entries: u64,
    /// Of the last of them.
    entry_offset: u64,
}

impl Reader {
    /// Reads the head.
    ///
    /// # Errors
    /// It is no recording, or broken from the beginning.
    pub(crate) fn open(source: impl Read + Send + 'static) -> Result<(Head, Self), Broken> {
        let mut reader = Self {
            source: Box::new(source),
            seal: Seal::default(),
            offset: 0,
            n_entries: 0,
            entry_offset: 0,
        };
        let mut magic = vec![0; MAGIC.len()];
        if reader.fill(&mut magic)? < MAGIC.len() || magic != MAGIC {
            return Err(Broken::NotARecording);
        }
        reader.offset = MAGIC.len() as u64;
        let head = reader.frame()?;
        reader.seal = Seal::default();
        Ok((head, reader))
    }

    /// The next entry; there is one until [`Entry::End`] has been read.
    ///
    /// # Errors
    /// The recording is broken here.
    pub(crate) fn entry(&mut self) -> Result<Entry, Broken> {
        self.n_entries += 1;
        self.entry_offset = self.offset;
        let entry = self.frame()?;
        if let Entry::End(_) = entry
            && self.fill(&mut [0])? > 0
        {
            return Err(Broken::TooLong { offset: self.offset });
        }
        Ok(entry)
    }

    /// The number of the entry that was read last, counted from 1.
    pub(crate) fn n_entries(&self) -> u64 {
        self.n_entries
    }

    /// Where it begins.
    pub(crate) fn entry_offset(&self) -> u64 {
        self.entry_offset
    }

    fn frame<T: DeserializeOwned>(&mut self) -> Result<T, Broken> {
        let (offset, number) = (self.offset, self.n_entries);
        let changed = || Broken::Changed { number, offset };
        let mut length = [0; 4];
        self.fill_or_cut(&mut length)?;
        let length = u32::from_le_bytes(length) as usize;
        if length > PAYLOAD_BYTES_MAX {
            return Err(changed());
        }
        // Not before it is known to be there: the length may be wrong.
        let mut rest = Vec::new();
        let n_bytes = length + SEAL_BYTES;
        let mut source = self.source.by_ref().take(n_bytes as u64);
        if source.read_to_end(&mut rest).map_err(Broken::Io)? < n_bytes {
            return Err(self.cut());
        }
        let (payload, found) = rest.split_at(length);
        self.seal = seal(self.seal, payload);
        if found != self.seal {
            return Err(changed());
        }
        self.offset += (4 + n_bytes) as u64;
        // Decoding goes as deep as the payload does.
        validate_within(payload, SHAPE_MAX).map_err(|_| changed())?;
        rmp_serde::from_slice(payload).map_err(|_| changed())
    }

    fn fill_or_cut(&mut self, bytes: &mut [u8]) -> Result<(), Broken> {
        if self.fill(bytes)? < bytes.len() { Err(self.cut()) } else { Ok(()) }
    }

    fn cut(&self) -> Broken {
        Broken::Cut { n_entries: self.n_entries.saturating_sub(1), offset: self.offset }
    }

    /// Reads as many bytes as there are.
    fn fill(&mut self, bytes: &mut [u8]) -> Result<usize, Broken> {
        let mut n_read = 0;
        while n_read < bytes.len() {
            match self.source.read(&mut bytes[n_read..]) {
                Ok(0) => break,
                Ok(n) => n_read += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Broken::Io(error)),
            }
        }
        Ok(n_read)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::super::{Answer, Call, End, Value};
    use super::*;
    use crate::guest::GuestEnd;

    fn recording() -> (Vec<u8>, Vec<Entry>) {
        let call = |number: u32| {
            Entry::Call(Call {
                name: "context.append".into(),
                arguments: vec![Value::Handle(number), Value::Numbers(vec![1, 2, number])],
                sent: Vec::new(),
                answer: Some(Answer::Value(Value::Ok(Box::new(Value::Unit)))),
            })
        };
        let end = End { call: None, sent: Vec::new(), end: GuestEnd::Finished };
        let entries = vec![call(1), call(2), Entry::End(Box::new(end))];
        let mut bytes = write_head(&Head { guest: "chat".to_owned(), component: Some(vec![0, 1, 2]) });
        let mut writer = FrameWriter::default();
        entries.iter().for_each(|entry| writer.write(entry, &mut bytes));
        (bytes, entries)
    }

    fn read(bytes: &[u8]) -> Result<Vec<Entry>, Broken> {
        let (_, mut reader) = Reader::open(Cursor::new(bytes.to_vec()))?;
        let mut entries = Vec::new();
        while !matches!(entries.last(), Some(Entry::End(_))) {
            entries.push(reader.entry()?);
        }
        Ok(entries)
    }

    #[test]
    fn what_was_written_is_read() {
        let (bytes, entries) = recording();
        assert_eq!(read(&bytes).expect("it is whole"), entries);
        let (head, _) = Reader::open(Cursor::new(bytes)).expect("it is whole");
        assert_eq!((head.guest.as_str(), head.component.as_deref()), ("chat", Some(&[0, 1, 2][..])));
    }

    #[test]
    fn a_recording_that_was_cut_or_changed_says_where() {
        let (bytes, _) = recording();
        for n_bytes in 0..bytes.len() {
            let error = read(&bytes[..n_bytes]).expect_err("it is cut");
            assert!(matches!(error, Broken::NotARecording | Broken::Cut { .. }), "{n_bytes}: {error}");
        }
        for idx in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[idx] ^= 1;
            let error = read(&changed).expect_err("it is changed");
            match error {
                Broken::NotARecording => assert!(idx < MAGIC.len()),
                Broken::Cut { offset, .. } | Broken::Changed { offset, .. } => {
                    assert!(offset as usize <= idx, "{idx}: {error}");
                }
                error => panic!("{idx}: {error}"),
            }
        }
        let error = read(&[&bytes[..], &[0]].concat()).expect_err("it is too long");
        assert!(matches!(error, Broken::TooLong { offset } if offset as usize == bytes.len()), "{error}");
    }
}
