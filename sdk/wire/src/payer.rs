use std::fmt;

use crate::WireError;

/// Bytes of each buffer that nobody pays for: a connection at rest costs no more.
const FREE_BYTES: usize = 64 * 1024;

/// Pays for the memory that one buffer of a connection holds; it is given back when this is dropped.
pub trait Payer: fmt::Debug + Send {
    /// Pays for so many bytes in the place of those before.
    ///
    /// # Errors
    /// Why not; it is as before then.
    fn hold(&mut self, n_bytes: usize) -> Result<(), String>;
}

/// What a buffer holds, and who pays for it, if anybody does.
#[derive(Debug, Default)]
pub(crate) struct Held {
    payer: Option<Box<dyn Payer>>,
    n_bytes: usize,
}

impl Held {
    pub(crate) fn by(payer: Box<dyn Payer>) -> Self {
        Self { payer: Some(payer), n_bytes: 0 }
    }

    /// The buffer has, or is to have, room for so many bytes.
    pub(crate) fn resize(&mut self, n_bytes: usize) -> Result<(), WireError> {
        let Some(payer) = &mut self.payer else { return Ok(()) };
        let n_bytes = n_bytes.saturating_sub(FREE_BYTES);
        if n_bytes != self.n_bytes {
            payer.hold(n_bytes).map_err(|reason| WireError::Unpaid { reason })?;
            self.n_bytes = n_bytes;
        }
        Ok(())
    }
}
