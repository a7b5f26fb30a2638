use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};

use crate::payer::{Held, Payer};
use crate::{DEPTH_MAX, WireError, validate};

/// Bytes of the length before each frame.
const HEADER_BYTES: usize = 4;
/// Buffers grow by this much at a time while a frame comes in, so that a length alone costs the reader nothing.
const GROW_BYTES: usize = 64 * 1024;
/// An empty buffer above this is given back.
const KEEP_BYTES: usize = 256 * 1024;

/// Decodes one message from the bytes of one frame.
///
/// # Errors
/// The bytes are not valid, or not such a message.
pub fn decode<T: DeserializeOwned>(frame: &[u8]) -> Result<T, WireError> {
    validate(frame)?;
    let mut deserializer = rmp_serde::Deserializer::from_read_ref(frame);
    // Enums count as a level of their own.
    deserializer.set_max_depth(2 * DEPTH_MAX);
    Ok(T::deserialize(&mut deserializer)?)
}

/// Reads frames; one read from the socket may bring several.
#[derive(Debug)]
pub struct FrameReader<R> {
    reader: R,
    buffer: BytesMut,
    frame_bytes_max: usize,
    held: Held,
}

impl<R: AsyncRead + Unpin> FrameReader<R> {
    /// A reader of frames of at most `frame_bytes_max`.
    pub fn new(reader: R, frame_bytes_max: u32) -> Self {
        let frame_bytes_max = frame_bytes_max as usize;
        Self { reader, buffer: BytesMut::new(), frame_bytes_max, held: Held::default() }
    }

    /// The same, with the memory for frames that are on their way in paid for.
    #[must_use]
    pub fn paid_by(self, payer: Box<dyn Payer>) -> Self {
        Self { held: Held::by(payer), ..self }
    }

    /// The next message; `None` when the connection ends between two frames. Dropping the future loses nothing.
    ///
    /// # Errors
    /// The connection failed or ended inside a frame, the frame is too large, or it is not such a message.
    pub async fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, WireError> {
        if self.arrive().await?.is_none() {
            return Ok(None);
        }
        let message = self.peek();
        self.consume()?;
        message
    }

    /// Waits until a whole frame is there, and says how many bytes it has; `None` when the connection ends between two
    /// frames. The frame stays there, undecoded. Dropping the future loses nothing.
    ///
    /// # Errors
    /// The connection failed or ended inside a frame, or the frame is too large.
    pub async fn arrive(&mut self) -> Result<Option<usize>, WireError> {
        loop {
            let length = self.length()?;
            let expected = HEADER_BYTES + length.unwrap_or(0);
            if length.is_some() && self.buffer.len() >= expected {
                return Ok(length);
            }
            let n_missing = expected - self.buffer.len();
            let n_more = n_missing.clamp(GROW_BYTES / 4, GROW_BYTES);
            self.held.resize(self.buffer.capacity().max(self.buffer.len() + n_more))?;
            self.buffer.reserve(n_more);
            if self.reader.read_buf(&mut self.buffer).await? == 0 {
                return match self.buffer.len() {
                    0 => Ok(None),
                    n_bytes => Err(WireError::Truncated { n_bytes, expected }),
                };
            }
        }
    }

    /// Decodes the frame in front and leaves it there; `None` where no whole frame is there.
    ///
    /// # Errors
    /// It is not such a message.
    pub fn peek<T: DeserializeOwned>(&self) -> Result<Option<T>, WireError> {
        let Some(n_bytes) = self.length()? else { return Ok(None) };
        let Some(frame) = self.buffer.get(HEADER_BYTES..HEADER_BYTES + n_bytes) else { return Ok(None) };
        decode(frame).map(Some)
    }

    /// Drops the frame in front; nothing where no whole frame is there.
    ///
    /// # Errors
    /// Nobody pays for the buffer.
    pub fn consume(&mut self) -> Result<(), WireError> {
        let Some(n_bytes) = self.length()? else { return Ok(()) };
        if self.buffer.len() < HEADER_BYTES + n_bytes {
            return Ok(());
        }
        self.buffer.advance(HEADER_BYTES + n_bytes);
        if self.buffer.is_empty() && self.buffer.capacity() > KEEP_BYTES {
            self.buffer = BytesMut::new();
            self.held.resize(0)?;
        }
        Ok(())
    }

    /// Bytes of the frame in front, once its header is there.
    fn length(&self) -> Result<Option<usize>, WireError> {
        let Some(header) = self.buffer.first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        let n_bytes = u32::from_le_bytes(*header) as usize;
        if n_bytes > self.frame_bytes_max {
            return Err(WireError::FrameTooLarge { n_bytes, limit: self.frame_bytes_max });
        }
        Ok(Some(n_bytes))
    }
}

/// Frames on their way out, one after the other in one buffer, so that one write takes as many as there are.
#[derive(Debug)]
pub struct FrameBuffer {
    bytes: Vec<u8>,
    n_written: usize,
    frame_bytes_max: usize,
    held: Held,
}

impl FrameBuffer {
    /// A buffer of frames of at most `frame_bytes_max`.
    #[must_use]
    pub fn new(frame_bytes_max: u32) -> Self {
        let frame_bytes_max = frame_bytes_max as usize;
        Self { bytes: Vec::new(), n_written: 0, frame_bytes_max, held: Held::default() }
    }

    /// The same, with the memory for frames that wait paid for.
    #[must_use]
    pub fn paid_by(self, payer: Box<dyn Payer>) -> Self {
        Self { held: Held::by(payer), ..self }
    }

    /// Adds one message as a frame.
    ///
    /// # Errors
    /// The frame would be too large, or nobody pays for it; the buffer is as before.
    pub fn push<T: Serialize>(&mut self, message: &T) -> Result<(), WireError> {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&[0; HEADER_BYTES]);
        let mut serializer = rmp_serde::Serializer::new(&mut self.bytes).with_struct_map();
        let result = message.serialize(&mut serializer).map_err(WireError::from).and_then(|()| {
            let n_bytes = self.bytes.len() - start - HEADER_BYTES;
            if n_bytes > self.frame_bytes_max {
                return Err(WireError::FrameTooLarge { n_bytes, limit: self.frame_bytes_max });
            }
            self.held.resize(self.bytes.capacity())?;
            Ok(u32::try_from(n_bytes).expect("at most frame_bytes_max, a u32"))
        });
        match result {
            Ok(n_bytes) => {
                self.bytes[start..start + HEADER_BYTES].copy_from_slice(&n_bytes.to_le_bytes());
                Ok(())
            }
            Err(error) => {
                self.bytes.truncate(start);
                Err(error)
            }
        }
    }

    /// Bytes not yet written.
    #[must_use]
    pub fn n_bytes(&self) -> usize {
        self.bytes.len() - self.n_written
    }

    /// Bytes of memory that the buffer holds.
    #[must_use]
    pub fn n_bytes_held(&self) -> usize {
        self.bytes.capacity()
    }

    /// Writes until the buffer is empty; what was written is never written again, however often this is polled
    /// or given up.
    ///
    /// # Errors
    /// The connection failed.
    pub fn poll_write<W: AsyncWrite + Unpin>(
        &mut self,
        cx: &mut Context<'_>,
        writer: &mut W,
    ) -> Poll<io::Result<()>> {
        while self.n_written < self.bytes.len() {
            match ready!(Pin::new(&mut *writer).poll_write(cx, &self.bytes[self.n_written..]))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                n => self.n_written += n,
            }
            self.forget_written();
        }
        self.n_written = 0;
        self.bytes.clear();
        self.bytes.shrink_to(KEEP_BYTES);
        // What becomes less is paid for.
        let _ = self.held.resize(self.bytes.capacity());
        Pin::new(writer).poll_flush(cx)
    }

    /// Makes the room of what is written free again, even if the buffer is never empty because its reader is slow. A
    /// byte moves at most once for each byte that was written.
    fn forget_written(&mut self) {
        if self.n_written >= KEEP_BYTES && self.n_written >= self.n_bytes() {
            self.bytes.drain(..self.n_written);
            self.n_written = 0;
        }
    }

    /// Writes everything.
    ///
    /// # Errors
    /// The connection failed.
    pub async fn write<W: AsyncWrite + Unpin>(&mut self, writer: &mut W) -> Result<(), WireError> {
        Ok(std::future::poll_fn(|cx| self.poll_write(cx, writer)).await?)
    }
}
