//! The way of a component that the daemon does not hold yet.

use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::mpsc;
use trellis_wire::{CHUNK_BYTES_MAX, ClientMessage, ComponentHash, Event, Room, Stage};

use crate::calls::{Reply, done};
use crate::connection::{Connection, News, Recipient, cancelled, end};
use crate::error::Error;
use crate::launch::Launch;

/// A component's bytes and their hash.
#[derive(Debug)]
pub(crate) struct Component {
    pub(crate) hash: ComponentHash,
    pub(crate) bytes: Bytes,
}

impl Component {
    pub(crate) fn new(bytes: Bytes) -> Self {
        Self { hash: ComponentHash(*blake3::hash(&bytes).as_bytes()), bytes }
    }
}

/// Uploads a component and asks for its guest again; gives up when the guest's handle is dropped.
pub(crate) async fn upload_and_start(
    connection: Arc<Connection>,
    component: Component,
    news: mpsc::UnboundedSender<News>,
    launch: Arc<Launch>,
) {
    let result = tokio::select! {
        biased;
        () = news.closed() => return,
        () = launch.cancelled() => Err(cancelled()),
        result = upload(&connection, &component, &news) => result,
    };
    let result = result.and_then(|()| launch.start(&connection, &news));
    if let Err(error) = result {
        end(Recipient::Guest { news, launch }, Err(error), None);
    }
}

/// Sends the bytes once the daemon wants them, which it does not if another client of this user sends the same
/// component meanwhile.
async fn upload(
    connection: &Arc<Connection>,
    component: &Component,
    news: &mpsc::UnboundedSender<News>,
) -> Result<(), Error> {
    let total = component.bytes.len() as u64;
    let report = |done| {
        let _ = news.send(News::Event(Event::Progress { stage: Stage::Upload, name: None, done, total }));
    };
    report(0);
    let (mut reply, wanted) = Reply::to_upload(connection, component.hash, total)?;
    let id = reply.id;
    tokio::select! {
        biased;
        answer = reply.await_end() => return done(answer?),
        () = wanted.notified() => {}
    }
    let mut n_sent = 0;
    for chunk in component.bytes.chunks(CHUNK_BYTES_MAX) {
        tokio::select! {
            biased;
            answer = reply.await_end() => return done(answer?),
            () = connection.outbox.room(Room::Bulk) => {}
        }
        connection.send(&ClientMessage::Chunk { id, bytes: chunk.to_vec() });
        n_sent += chunk.len() as u64;
        report(n_sent);
    }
    done(reply.await_end().await?)
}
