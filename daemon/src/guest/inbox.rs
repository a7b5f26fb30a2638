//! What a client sends to a guest, bounded in messages and in bytes.

use std::sync::Arc;

use tokio::sync::{Mutex, Semaphore, mpsc};
use trellis_engine::account::{Account, BudgetExceeded, HostCharge};

/// What a message costs beside its bytes.
const OVERHEAD_BYTES: usize = 64;

/// Charges what a message takes until its guest has received it.
///
/// # Errors
/// The innermost budget that would be passed.
pub fn message_charge(session: &Arc<Account>, text: &str) -> Result<HostCharge, BudgetExceeded> {
    HostCharge::new(session, cost(text) as u64)
}

fn cost(text: &str) -> usize {
    text.len().saturating_add(OVERHEAD_BYTES)
}

#[derive(Debug)]
struct Message {
    text: String,
    /// Of the inbox's bytes.
    n_permits: u32,
    _charge: HostCharge,
}

/// The client's end of a guest's inbox; the inbox is closed when the last clone is dropped.
#[derive(Clone, Debug)]
pub struct InboxSender {
    /// Keeps messages in the order in which they were sent while one of them waits for room.
    turn: Arc<Mutex<()>>,
    room: Arc<Semaphore>,
    n_permits_max: u32,
    queue: mpsc::Sender<Message>,
}

/// The guest's end of its inbox.
#[derive(Debug)]
pub struct InboxReceiver {
    room: Arc<Semaphore>,
    queue: mpsc::Receiver<Message>,
}

/// What looking for a message came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Received {
    /// A message.
    Message(String),
    /// There is none yet.
    NothingYet,
    /// There will be no more.
    Closed,
}

/// The guest takes no more messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the guest is gone")]
pub struct InboxClosed;

/// An inbox with room for so many messages and so many bytes. A message larger than that takes all of it.
#[must_use]
pub fn inbox(n_messages: usize, n_bytes: usize) -> (InboxSender, InboxReceiver) {
    let n_permits_max = u32::try_from(n_bytes.clamp(1, Semaphore::MAX_PERMITS)).unwrap_or(u32::MAX);
    let room = Arc::new(Semaphore::new(n_permits_max as usize));
    let (tx, rx) = mpsc::channel(n_messages.max(1));
    let sender = InboxSender { turn: Arc::default(), room: room.clone(), n_permits_max, queue: tx };
    (sender, InboxReceiver { room, queue: rx })
}

impl InboxSender {
    /// Puts a message into the inbox once there is room for it.
    ///
    /// # Errors
    /// The guest is gone.
    pub async fn send(&self, text: String, charge: HostCharge) -> Result<(), InboxClosed> {
        let _turn = self.turn.lock().await;
        let n_permits = u32::try_from(cost(&text)).unwrap_or(u32::MAX).min(self.n_permits_max);
        // Nothing is taken for good before both are there: the wait may be given up.
        let slot = self.queue.reserve().await.map_err(|_| InboxClosed)?;
        let bytes = self.room.acquire_many(n_permits).await.map_err(|_| InboxClosed)?;
        bytes.forget();
        slot.send(Message { text, n_permits, _charge: charge });
        Ok(())
    }
}

impl InboxReceiver {
    /// The next message; `None` when there will be no more.
    pub async fn recv(&mut self) -> Option<String> {
        let message = self.queue.recv().await?;
        Some(self.taken(message))
    }

    /// The next message, if it is there.
    pub fn try_recv(&mut self) -> Received {
        match self.queue.try_recv() {
            Ok(message) => Received::Message(self.taken(message)),
            Err(mpsc::error::TryRecvError::Empty) => Received::NothingYet,
            Err(mpsc::error::TryRecvError::Disconnected) => Received::Closed,
        }
    }

    fn taken(&self, message: Message) -> String {
        self.room.add_permits(message.n_permits as usize);
        message.text
    }
}

impl Drop for InboxReceiver {
    fn drop(&mut self) {
        self.room.close();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use trellis_engine::account::{Budget, Resource};

    use super::*;

    fn session() -> Arc<Account> {
        Account::new("session", Budget::UNLIMITED, None)
    }

    fn charge(text: &str) -> HostCharge {
        message_charge(&session(), text).expect("no limit")
    }

    async fn has_room(sender: &InboxSender, text: &str) -> bool {
        let sent = sender.send(text.to_owned(), charge(text));
        tokio::time::timeout(Duration::from_millis(20), sent).await.is_ok()
    }

    #[tokio::test]
    async fn bytes_and_messages_are_bounded_and_keep_their_order() {
        let (sender, mut receiver) = inbox(3, 2 * OVERHEAD_BYTES + 10);
        assert!(has_room(&sender, "123456").await);
        assert!(!has_room(&sender, "12345").await, "11 of 10 bytes");
        assert!(has_room(&sender, "1234").await, "a wait that is given up takes nothing");
        let later = {
            let (sender, charge) = (sender.clone(), charge(""));
            tokio::spawn(async move {
                let _turn = sender.turn.clone();
                sender.send("x".repeat(1000), charge).await
            })
        };
        tokio::task::yield_now().await;
        assert!(!has_room(&sender, "").await, "a small message does not overtake a large one");
        assert_eq!(receiver.recv().await.as_deref(), Some("123456"));
        assert_eq!(receiver.try_recv(), Received::Message("1234".to_owned()));
        assert_eq!(receiver.recv().await.map(|text| text.len()), Some(1000), "larger than all of the inbox");
        later.await.expect("no panic").expect("received");
        assert_eq!(receiver.try_recv(), Received::NothingYet);
        for _ in 0..2 {
            assert!(has_room(&sender, "").await);
        }
        assert!(!has_room(&sender, "").await);
        drop(receiver);
        assert_eq!(sender.send(String::new(), charge("")).await, Err(InboxClosed));
        let (sender, mut receiver) = inbox(1, 100);
        drop(sender);
        assert_eq!(receiver.try_recv(), Received::Closed);
    }

    #[tokio::test]
    async fn a_message_is_paid_for_until_it_is_received_or_lost() {
        let session = session();
        let (sender, mut receiver) = inbox(8, 1 << 20);
        for text in ["", "abc"] {
            let charge = message_charge(&session, text).expect("no limit");
            sender.send(text.to_owned(), charge).await.expect("received");
        }
        assert_eq!(session.used(Resource::HostBytes), 131);
        receiver.recv().await.expect("a message");
        assert_eq!(session.used(Resource::HostBytes), 67);
        drop((receiver, sender));
        assert_eq!(session.used(Resource::HostBytes), 0);
    }
}
