use bytes::Bytes;
use trellis_wire::{CHUNK_BYTES_MAX, ComponentHash, ErrorBody, ErrorCode};

use super::actor::Share;

/// A component on its way in.
#[derive(Debug)]
pub(crate) struct Upload {
    hash: ComponentHash,
    n_bytes: u64,
    bytes: Vec<u8>,
    hasher: Box<blake3::Hasher>,
    share: Share,
}

/// A component that has arrived whole, with the hash that was announced.
#[derive(Debug)]
pub(crate) struct Uploaded {
    pub(crate) hash: ComponentHash,
    pub(crate) bytes: Bytes,
    /// Held until the component is stored, because its bytes are.
    pub(crate) share: Share,
}

impl Upload {
    pub(crate) fn begin(
        hash: ComponentHash,
        n_bytes: u64,
        component_bytes_max: u64,
        share: Share,
    ) -> Result<Self, ErrorBody> {
        if n_bytes > component_bytes_max {
            return Err(ErrorBody::over_limit("component bytes", n_bytes, component_bytes_max));
        }
        if n_bytes == 0 {
            let error = ErrorBody::new(ErrorCode::InvalidComponent, "a component has at least one byte");
            return Err(error.about("component bytes").with_value(0));
        }
        // The memory grows with the bytes that come, not with the bytes that are promised.
        Ok(Self { hash, n_bytes, bytes: Vec::new(), hasher: Box::default(), share })
    }

    /// Adds a chunk.
    pub(crate) fn add(mut self, chunk: &[u8]) -> Result<Arrival, ErrorBody> {
        if chunk.len() > CHUNK_BYTES_MAX {
            return Err(ErrorBody::over_limit("chunk bytes", chunk.len() as u64, CHUNK_BYTES_MAX as u64));
        }
        let n_bytes = (self.bytes.len() + chunk.len()) as u64;
        if n_bytes > self.n_bytes {
            return Err(ErrorBody::over_limit("uploaded bytes", n_bytes, self.n_bytes));
        }
        self.hasher.update(chunk);
        self.bytes.extend_from_slice(chunk);
        if n_bytes < self.n_bytes {
            return Ok(Arrival::Partial(self));
        }
        let found = ComponentHash(*self.hasher.finalize().as_bytes());
        if found != self.hash {
            let message = format!("the component was announced as {} and is {found}", self.hash);
            return Err(ErrorBody::new(ErrorCode::HashMismatch, message).about("hash").with_value(found));
        }
        Ok(Arrival::Whole(Uploaded { hash: self.hash, bytes: self.bytes.into(), share: self.share }))
    }
}

#[derive(Debug)]
pub(crate) enum Arrival {
    Partial(Upload),
    Whole(Uploaded),
}
