//! A saved context as a file.
//!
//! ```text
//! magic, version, length of the head     16 + 4 + 8 bytes
//! head                                   MessagePack
//! BLAKE3 of all before                   32 bytes
//! pages                                  as many as the head has tokens computed
//! BLAKE3 of the pages                    32 bytes, keyed by the one before
//! ```
//!
//! Numbers are little-endian. What is cut short, rotten, of another version or under another name is none.

use std::fs::File;
use std::io::{self, Read, Seek as _, SeekFrom};

use serde::{Deserialize, Serialize};
use trellis_engine::backend::PAGE_LEN;
use trellis_engine::{SavedHead, SavedName};

const MAGIC: &[u8; 16] = b"trellis context\n";
const VERSION: u32 = 1;
const PREFIX_BYTES: usize = MAGIC.len() + size_of::<u32>() + size_of::<u64>();

/// The longest head: tokens, and the steering vectors of the widest model.
pub(super) const HEAD_BYTES_MAX: u64 = 256 << 20;

/// What a file says of its context.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Head {
    pub(super) uid: u32,
    pub(super) name: String,
    pub(super) of: ModelKind,
    pub(super) context: SavedHead,
}

/// What a model is to a saved context: of the same name and tokenizer its tokens are of use, and where all is the same, its KV.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ModelKind {
    pub(super) model: String,
    pub(super) tokenizer: String,
    /// Of its weights.
    pub(super) identity: [u8; 32],
    /// Of its pages, and the type of the weights as they were computed with.
    pub(super) format: String,
    pub(super) page_bytes: u64,
}

/// Why a file is not read.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReadError {
    /// It is none of ours, or no longer.
    #[error("it is {0}")]
    Broken(&'static str),
    /// The disk.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl Head {
    /// The name that it was saved under.
    pub(super) fn saved_name(&self) -> SavedName {
        SavedName { actor: trellis_engine::account::ActorId(self.uid), name: self.name.clone() }
    }

    /// Bytes of its pages; none where there can be no such file.
    pub(super) fn kv_bytes(&self) -> Option<u64> {
        (self.context.n_computed().div_ceil(PAGE_LEN) as u64).checked_mul(self.of.page_bytes)
    }

    /// What comes before the pages.
    pub(super) fn encode(&self) -> Vec<u8> {
        let head = rmp_serde::to_vec_named(self).expect("a head is plain data");
        let mut bytes = Vec::with_capacity(PREFIX_BYTES + head.len() + blake3::OUT_LEN);
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&(head.len() as u64).to_le_bytes());
        bytes.extend_from_slice(&head);
        let hash = blake3::hash(&bytes);
        bytes.extend_from_slice(hash.as_bytes());
        bytes
    }

    /// Reads what comes before the pages.
    pub(super) fn read(file: &mut impl Read) -> Result<(Self, Seal), ReadError> {
        let mut bytes = vec![0; PREFIX_BYTES];
        fill(file, &mut bytes)?;
        let (magic, rest) = bytes.split_at(MAGIC.len());
        let (version, length) = rest.split_at(size_of::<u32>());
        if magic != MAGIC {
            return Err(ReadError::Broken("no saved context"));
        }
        if version != VERSION.to_le_bytes() {
            return Err(ReadError::Broken("of another version"));
        }
        let length = u64::from_le_bytes(length.try_into().expect("the rest of the prefix"));
        if length > HEAD_BYTES_MAX {
            return Err(ReadError::Broken("longer than any"));
        }
        // As much memory as there are bytes, whatever the length says.
        Read::by_ref(file).take(length).read_to_end(&mut bytes)?;
        if (bytes.len() - PREFIX_BYTES) as u64 != length {
            return Err(ReadError::Broken("cut short"));
        }
        let hash = blake3::hash(&bytes);
        let mut stored = [0; blake3::OUT_LEN];
        fill(file, &mut stored)?;
        if hash != stored {
            return Err(ReadError::Broken("not as it was written"));
        }
        let head: Self = rmp_serde::from_slice(&bytes[PREFIX_BYTES..])
            .map_err(|_| ReadError::Broken("of another make"))?;
        Ok((head, Seal(hash)))
    }
}

/// What the pages behind a head are sealed with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seal(blake3::Hash);

impl Seal {
    /// That of a head as it was encoded.
    pub(super) fn of(encoded: &[u8]) -> Self {
        let hash = encoded.last_chunk().expect("a head ends with its hash");
        Self(blake3::Hash::from_bytes(*hash))
    }

    /// What stands behind these pages.
    pub(super) fn over(self, kv: &[u8]) -> blake3::Hash {
        blake3::keyed_hash(self.0.as_bytes(), kv)
    }

    /// Reads so many bytes of pages, and that nothing follows them.
    pub(super) fn read(self, file: &mut File, n_bytes: u64) -> Result<Vec<u8>, ReadError> {
        let (at, length) = (file.stream_position()?, file.metadata()?.len());
        if length.checked_sub(at) != n_bytes.checked_add(blake3::OUT_LEN as u64) {
            return Err(ReadError::Broken("not as long as it should be"));
        }
        let mut kv = Vec::with_capacity(usize::try_from(n_bytes).unwrap_or_default());
        Read::by_ref(file).take(n_bytes).read_to_end(&mut kv)?;
        let mut stored = [0; blake3::OUT_LEN];
        fill(file, &mut stored)?;
        match self.over(&kv) == stored {
            true => Ok(kv),
            false => Err(ReadError::Broken("not as it was written")),
        }
    }

    /// As [`Self::read`], of pages that nobody wants.
    pub(super) fn skip(file: &mut File, n_bytes: u64) -> Result<(), ReadError> {
        let end = file.seek(SeekFrom::End(0))?;
        match end >= n_bytes {
            true => Ok(()),
            false => Err(ReadError::Broken("cut short")),
        }
    }
}

fn fill(file: &mut impl Read, bytes: &mut [u8]) -> Result<(), ReadError> {
    file.read_exact(bytes).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => ReadError::Broken("cut short"),
        _ => error.into(),
    })
}
