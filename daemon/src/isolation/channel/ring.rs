//! The shared memory's layout: two rings of words and what the ends tell each other about them.
//!
//! Positions count the words since the beginning, so that they never wrap. A word that two processes write to lies on
//! cache lines of its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::error::ChannelError;
use super::memory::SharedMemory;

/// Bytes of a word.
pub(super) const WORD_BYTES: usize = size_of::<AtomicU64>();

/// Words from one shared variable to the next: two cache lines, which processors fetch together.
const LINE_WORDS: usize = 16;

/// Where the rings begin: after a page of variables.
const HEADER_WORDS: usize = 512;

const RING_BYTES_MIN: usize = 4 << 10;
const RING_BYTES_MAX: usize = 1 << 30;

/// One of the two processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// Who made the memory.
    Maker,
    /// Who was given it.
    Taker,
}

impl Side {
    pub(super) fn other(self) -> Self {
        match self {
            Self::Maker => Self::Taker,
            Self::Taker => Self::Maker,
        }
    }
}

/// One of the two ends of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Writer,
    Reader,
}

impl Role {
    pub(super) fn other(self) -> Self {
        match self {
            Self::Writer => Self::Reader,
            Self::Reader => Self::Writer,
        }
    }
}

/// The memory with both rings in it.
#[derive(Debug)]
pub(super) struct Layout {
    memory: SharedMemory,
    ring_words: usize,
}

impl Layout {
    pub(super) fn create(ring_bytes: usize) -> Result<(Self, std::os::fd::OwnedFd), ChannelError> {
        if !ring_bytes.is_power_of_two() || !(RING_BYTES_MIN..=RING_BYTES_MAX).contains(&ring_bytes) {
            return Err(ChannelError::RingSize {
                bytes: ring_bytes,
                least: RING_BYTES_MIN,
                most: RING_BYTES_MAX,
            });
        }
        let ring_words = ring_bytes / WORD_BYTES;
        let (memory, fd) = SharedMemory::create(HEADER_WORDS + 2 * ring_words)?;
        Ok((Self { memory, ring_words }, fd))
    }

    pub(super) fn map(fd: &std::os::fd::OwnedFd) -> Result<Self, ChannelError> {
        let memory = SharedMemory::map(fd)?;
        let n_words = memory.words().len();
        let ring_words = n_words.saturating_sub(HEADER_WORDS) / 2;
        let ring_bytes = ring_words * WORD_BYTES;
        let is_ring = ring_words.is_power_of_two() && (RING_BYTES_MIN..=RING_BYTES_MAX).contains(&ring_bytes);
        if !is_ring || n_words != HEADER_WORDS + 2 * ring_words {
            return Err(ChannelError::Memory { n_bytes: (n_words * WORD_BYTES) as u64, is_sealed: true });
        }
        Ok(Self { memory, ring_words })
    }

    /// All words of the memory.
    pub(super) fn words(&self) -> &[AtomicU64] {
        self.memory.words()
    }

    /// Not 0 once this side has closed the channel.
    pub(super) fn closed(&self, side: Side) -> &AtomicU64 {
        &self.words()[(8 + side as usize) * LINE_WORDS]
    }
}

/// The ring that one side writes to and the other reads from.
#[derive(Clone, Debug)]
pub(super) struct Ring {
    layout: Arc<Layout>,
    writer: Side,
}

impl Ring {
    pub(super) fn new(layout: Arc<Layout>, writer: Side) -> Self {
        Self { layout, writer }
    }

    /// Its length in words, a power of two.
    pub(super) fn n_words(&self) -> u64 {
        self.layout.ring_words as u64
    }

    fn variable(&self, idx: usize) -> &AtomicU64 {
        &self.layout.words()[(4 * self.writer as usize + idx) * LINE_WORDS]
    }

    /// The position of an end, which it alone writes.
    pub(super) fn position(&self, role: Role) -> &AtomicU64 {
        self.variable(role as usize)
    }

    /// The position of the other end at which an end that sleeps wants to be woken; 0 while it does not sleep.
    pub(super) fn wakes_at(&self, role: Role) -> &AtomicU64 {
        self.variable(2 + role as usize)
    }

    /// The words from a position on: up to the end of the ring, and from its beginning.
    fn from(&self, position: u64) -> (&[AtomicU64], &[AtomicU64]) {
        let n_words = self.layout.ring_words;
        let start = HEADER_WORDS + self.writer as usize * n_words;
        let data = &self.layout.words()[start..start + n_words];
        // The length is a power of two: the rest of a division, in range whatever the position is.
        let (before, after) = data.split_at((position & (n_words as u64 - 1)) as usize);
        (after, before)
    }

    /// Writes bytes from a position on, filled up with zeros to a whole word. No more than the ring holds.
    ///
    /// The order of these writes does not matter: the writer's position, which is stored after them, is what makes the reader
    /// look.
    pub(super) fn write(&self, position: u64, bytes: &[u8]) {
        let (first, second) = self.from(position);
        let (now, then) = bytes.split_at(bytes.len().min(first.len() * WORD_BYTES));
        for (words, bytes) in [(first, now), (second, then)] {
            let (whole, rest) = bytes.as_chunks::<WORD_BYTES>();
            for (word, bytes) in words.iter().zip(whole) {
                word.store(u64::from_ne_bytes(*bytes), Ordering::Relaxed);
            }
            if let (false, Some(word)) = (rest.is_empty(), words.get(whole.len())) {
                let mut filled = [0; WORD_BYTES];
                filled[..rest.len()].copy_from_slice(rest);
                word.store(u64::from_ne_bytes(filled), Ordering::Relaxed);
            }
        }
    }

    /// Reads bytes from a position on. No more than the ring holds.
    pub(super) fn read(&self, position: u64, bytes: &mut [u8]) {
        let (first, second) = self.from(position);
        let n_now = bytes.len().min(first.len() * WORD_BYTES);
        let (now, then) = bytes.split_at_mut(n_now);
        for (words, bytes) in [(first, now), (second, then)] {
            let (whole, rest) = bytes.as_chunks_mut::<WORD_BYTES>();
            for (word, bytes) in words.iter().zip(whole.iter_mut()) {
                *bytes = word.load(Ordering::Relaxed).to_ne_bytes();
            }
            if let (false, Some(word)) = (rest.is_empty(), words.get(whole.len())) {
                let filled = word.load(Ordering::Relaxed).to_ne_bytes();
                rest.copy_from_slice(&filled[..rest.len()]);
            }
        }
    }
}
