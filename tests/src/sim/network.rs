//! Connections in memory that bring bytes late, in pieces, and not always to the end.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

use super::draws::Draws;
use super::mutation::Mutation;
use super::notes::{Fault, Notes};
use super::scene::{CutKind, LinkScene};

/// One end of a connection.
pub(super) struct End {
    link: Link,
    /// 0 for the client's.
    side: usize,
    sleep: Option<Pin<Box<Sleep>>>,
}

/// A connection, as it can be looked at from outside.
#[derive(Clone)]
pub(super) struct Link(Arc<Mutex<Wires>>);

struct Wires {
    number: usize,
    scene: LinkScene,
    pipes: [Pipe; 2],
    cut: Option<CutKind>,
    draws: Draws,
    notes: Arc<Notes>,
}

/// What one end sends to the other.
#[derive(Default)]
struct Pipe {
    pieces: VecDeque<(Instant, Vec<u8>)>,
    n_bytes: usize,
    /// Of the bytes that were taken from the sender.
    tape: Vec<u8>,
    is_closed: bool,
    has_no_reader: bool,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

impl Pipe {
    fn wake(&mut self) {
        [self.reader.take(), self.writer.take()].into_iter().flatten().for_each(Waker::wake);
    }
}

impl Link {
    /// A connection: what can be looked at, the client's end and the daemon's.
    pub(super) fn new(number: usize, scene: LinkScene, draws: Draws, notes: Arc<Notes>) -> (Self, End, End) {
        let wires = Wires { number, scene, pipes: Default::default(), cut: None, draws, notes };
        let link = Self(Arc::new(Mutex::new(wires)));
        let end = |side| End { link: link.clone(), side, sleep: None };
        let (client, daemon) = (end(0), end(1));
        (link, client, daemon)
    }

    fn lock(&self) -> MutexGuard<'_, Wires> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it ended before either end wanted it to.
    pub(super) fn is_cut(&self) -> bool {
        self.lock().cut.is_some()
    }

    /// What the client sent and what the daemon sent, as far as they were taken.
    pub(super) fn tapes(&self) -> [Vec<u8>; 2] {
        let wires = self.lock();
        [wires.pipes[0].tape.clone(), wires.pipes[1].tape.clone()]
    }
}

impl Wires {
    fn cut(&mut self, kind: CutKind) {
        self.notes.event(format_args!("connection {} is cut: {kind:?}", self.number));
        self.notes.fault(if kind == CutKind::Silence { Fault::Silence } else { Fault::Cut });
        self.cut = Some(kind);
        self.pipes.iter_mut().for_each(Pipe::wake);
    }

    /// How many of so many bytes are taken now.
    fn n_taken(&mut self, direction: usize, n_bytes: usize) -> usize {
        let pipe = &self.pipes[direction];
        let room = self.scene.capacity.saturating_sub(pipe.n_bytes);
        let n_most = n_bytes.min(room).min(self.scene.split_max);
        if n_most == 0 { 0 } else { self.draws.between(1, n_most) }
    }

    fn send(&mut self, direction: usize, bytes: &[u8]) {
        let delay = Duration::from_millis(self.draws.below(self.scene.delay_ms + 1) as u64);
        let pipe = &mut self.pipes[direction];
        let last = pipe.pieces.back().map(|(at, _)| *at);
        let at = (Instant::now() + delay).max(last.unwrap_or_else(Instant::now));
        pipe.tape.extend_from_slice(bytes);
        pipe.n_bytes += bytes.len();
        let mut carried = bytes.to_vec();
        if bytes.len() > 1 && direction == 1 && self.draws.happens(50) {
            if self.notes.makes(Mutation::DoubledBytes) {
                carried.extend_from_slice(&bytes[bytes.len() / 2..]);
            }
            if self.notes.makes(Mutation::LostBytes) {
                carried.truncate(bytes.len() / 2);
            }
        }
        let pipe = &mut self.pipes[direction];
        pipe.pieces.push_back((at, carried));
        if let Some(reader) = pipe.reader.take() {
            reader.wake();
        }
    }
}

impl AsyncRead for End {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            let link = self.link.clone();
            let mut wires = link.lock();
            let (number, direction, cut) = (wires.number, 1 - self.side, wires.cut);
            let pipe = &mut wires.pipes[direction];
            let at = match (pipe.pieces.front_mut(), cut) {
                (_, Some(CutKind::Silence)) => return Poll::Pending,
                (Some((at, piece)), _) if *at <= Instant::now() => {
                    let n = piece.len().min(buf.remaining());
                    buf.put_slice(&piece[..n]);
                    piece.drain(..n);
                    if piece.is_empty() {
                        pipe.pieces.pop_front();
                    }
                    pipe.n_bytes = pipe.n_bytes.saturating_sub(n);
                    if let Some(writer) = pipe.writer.take() {
                        writer.wake();
                    }
                    let to = if self.side == 0 { "client" } else { "daemon" };
                    wires.notes.event(format_args!("connection {number}: {n} bytes to the {to}"));
                    return Poll::Ready(Ok(()));
                }
                (Some((at, _)), _) => *at,
                (None, Some(CutKind::Reset)) => return Poll::Ready(Err(ErrorKind::ConnectionReset.into())),
                (None, Some(CutKind::Eof)) => return Poll::Ready(Ok(())),
                (None, None) if pipe.is_closed => return Poll::Ready(Ok(())),
                (None, None) => {
                    pipe.reader = Some(cx.waker().clone());
                    return Poll::Pending;
                }
            };
            pipe.reader = Some(cx.waker().clone());
            drop(wires);
            let mut sleep = Box::pin(tokio::time::sleep_until(at));
            let slept = sleep.as_mut().poll(cx);
            self.sleep = Some(sleep);
            ready!(slept);
        }
    }
}

impl AsyncWrite for End {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let mut wires = self.link.lock();
        let direction = self.side;
        match wires.cut {
            Some(CutKind::Silence) => return Poll::Ready(Ok(buf.len())),
            Some(_) => return Poll::Ready(Err(ErrorKind::BrokenPipe.into())),
            None if wires.pipes[direction].has_no_reader => {
                return Poll::Ready(Err(ErrorKind::BrokenPipe.into()));
            }
            None => {}
        }
        let n = wires.n_taken(direction, buf.len());
        if n == 0 {
            wires.pipes[direction].writer = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let n_before = wires.pipes[direction].tape.len();
        let cut = wires.scene.cut.filter(|cut| cut.direction == direction && n_before + n > cut.at_byte);
        let Some(cut) = cut else {
            wires.send(direction, &buf[..n]);
            return Poll::Ready(Ok(n));
        };
        let n = cut.at_byte.saturating_sub(n_before);
        wires.send(direction, &buf[..n]);
        wires.cut(cut.kind);
        match n {
            0 => {
                drop(wires);
                self.poll_write(cx, buf)
            }
            _ => Poll::Ready(Ok(n)),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        let pipe = &mut self.link.lock().pipes[self.side];
        pipe.is_closed = true;
        pipe.wake();
        Poll::Ready(Ok(()))
    }
}

impl Drop for End {
    fn drop(&mut self) {
        let mut wires = self.link.lock();
        let side = self.side;
        wires.pipes[side].is_closed = true;
        wires.pipes[1 - side].has_no_reader = true;
        wires.pipes.iter_mut().for_each(Pipe::wake);
    }
}
