//! What a request takes of the daemon beside its guest: host memory, which is on its user's account, and processor time while it is
//! read and its answer is written.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use trellis_engine::account::{Account, ActorId, GuestId, HostCharge, Owner, SessionId};
use trellis_engine::model::YieldPoint;

use super::failure::Failure;
use crate::guest::{Beside, CpuClock, Need};
use crate::service::over_host_bytes;
use crate::session::Actor;

/// Memory of what is read or written up to which that is done where it stands: it holds up nobody for longer than a message of the
/// daemon's own sockets does.
const IN_PLACE_BYTES: u64 = 256 << 10;

/// A body while it comes, in a list that grows, what is read of it, and what is said of it to the guest and to the client.
const COPIES: u64 = 4;

/// What a value takes in a tree of JSON, with its key, its place in a list that grows, and a copy that the answer repeats.
const NODE_BYTES: u64 = 256;

/// The session of all requests of a user where long work is shared out, which no connection has.
const SESSION: SessionId = SessionId(u64::MAX);

/// Where work on what is large is done.
#[derive(Debug)]
pub(super) struct Work {
    beside: Beside,
    /// The most processor time of one request.
    cpu_max: Duration,
    n_requests: AtomicU64,
}

impl Work {
    /// Beside guests, and for as long at most as one of them may compute.
    pub(super) fn new(beside: Beside, cpu_max: Duration) -> Arc<Self> {
        Arc::new(Self { beside, cpu_max, n_requests: AtomicU64::new(0) })
    }
}

/// The part of one request.
#[derive(Debug)]
pub(super) struct Share {
    charge: HostCharge,
    n_bytes: u64,
    /// Those of them that are neither read nor written.
    n_bytes_held: u64,
    owner: Owner,
    clock: Arc<CpuClock>,
    work: Arc<Work>,
}

impl Share {
    /// Nothing yet.
    pub(super) fn new(account: &Arc<Account>, actor: Actor, work: &Arc<Work>) -> Self {
        let number = work.n_requests.fetch_add(1, Ordering::Relaxed);
        let owner = Owner {
            actor: ActorId(actor.uid),
            session: SESSION,
            guest: GuestId(number),
            account: account.clone(),
        };
        Self {
            charge: HostCharge::none(account),
            n_bytes: 0,
            n_bytes_held: 0,
            owner,
            clock: Arc::default(),
            work: work.clone(),
        }
    }

    /// So many bytes in the place of those before.
    ///
    /// # Errors
    /// The user has not so much left; it is as before then.
    pub(super) fn set(&mut self, n_bytes: u64) -> Result<(), Failure> {
        self.charge.resize(n_bytes).map_err(|exceeded| Failure::of_body(&over_host_bytes(&exceeded)))?;
        self.n_bytes = n_bytes;
        Ok(())
    }

    /// So many bytes beside those before.
    ///
    /// # Errors
    /// As for [`Self::set`].
    pub(super) fn add(&mut self, n_bytes: u64) -> Result<(), Failure> {
        self.set(self.n_bytes.saturating_add(n_bytes))
    }

    /// So many bytes beside those before, which are neither read nor written.
    ///
    /// # Errors
    /// As for [`Self::set`].
    pub(super) fn hold(&mut self, n_bytes: u64) -> Result<(), Failure> {
        self.add(n_bytes)?;
        self.n_bytes_held += n_bytes;
        Ok(())
    }

    /// The bytes that it has.
    pub(super) fn n_bytes(&self) -> u64 {
        self.n_bytes
    }

    /// Those of them that are read or written.
    pub(super) fn n_bytes_worked_on(&self) -> u64 {
        self.n_bytes.saturating_sub(self.n_bytes_held)
    }

    /// Works on what takes so much memory: where that is much, beside guests, by the shares of users. What is cut by yield points is
    /// given up when nobody waits for it any more, or when the request has had its processor time, as [`Self::has_time`] says then.
    ///
    /// # Errors
    /// The request has had its processor time before.
    pub(super) async fn work<T: Send + 'static>(
        &self,
        n_bytes: u64,
        work: impl FnOnce(&YieldPoint) -> T + Send + 'static,
    ) -> Result<T, Failure> {
        self.has_time()?;
        if n_bytes <= IN_PLACE_BYTES {
            let _counted = self.clock.begin();
            return Ok(work(&YieldPoint::NONE));
        }
        let Work { beside, cpu_max, .. } = &*self.work;
        Ok(beside.run_in_parts(&self.owner, &self.clock, *cpu_max, Need::NOTHING, work).await)
    }

    /// That the request may be worked on.
    ///
    /// # Errors
    /// It has had its processor time.
    pub(super) fn has_time(&self) -> Result<(), Failure> {
        let (used, most) = (self.clock.used(), self.work.cpu_max);
        if used <= most {
            return Ok(());
        }
        let message = format!(
            "to read this request and to write its answer took {} ms of processor time, more than limits.cpu_ms, which is {}",
            used.as_millis(),
            most.as_millis()
        );
        Err(Failure::new(StatusCode::TOO_MANY_REQUESTS, "limit_exceeded", message))
    }

    /// An answer in JSON, which stays on the account until it is sent.
    ///
    /// # Errors
    /// As for [`Self::work`], and those of `write`.
    pub(super) async fn answer(
        self,
        write: impl FnOnce() -> Result<String, Failure> + Send + 'static,
    ) -> Result<Response, Failure> {
        let text = self.work(self.n_bytes_worked_on(), move |_| write()).await??;
        let body = Body::from(Bytes::from_owner(Sent { text, _share: self }));
        Ok(([(CONTENT_TYPE, "application/json")], body).into_response())
    }
}

/// A text that is on an account for as long as its bytes are held.
struct Sent {
    text: String,
    _share: Share,
}

impl AsRef<[u8]> for Sent {
    fn as_ref(&self) -> &[u8] {
        self.text.as_bytes()
    }
}

/// What a text of JSON comes to at most when it is read.
pub(super) fn bytes_of_json(text: &[u8]) -> u64 {
    let mut size = JsonSize::default();
    size.add(text);
    size.n_bytes()
}

/// What a text of JSON comes to at most when it is read, as it comes in pieces.
#[derive(Debug, Default)]
pub(super) struct JsonSize {
    n_bytes: u64,
    /// No fewer than there are values but for the first: those of a list or an object are parted by commas, and keys have colons.
    n_nodes: u64,
    is_text: bool,
    is_escaped: bool,
}

impl JsonSize {
    /// One more piece.
    pub(super) fn add(&mut self, piece: &[u8]) {
        self.n_bytes += piece.len() as u64;
        for &byte in piece {
            match byte {
                _ if self.is_escaped => self.is_escaped = false,
                b'\\' if self.is_text => self.is_escaped = true,
                b'"' => self.is_text = !self.is_text,
                b',' | b':' | b'[' | b'{' if !self.is_text => self.n_nodes += 1,
                _ => {}
            }
        }
    }

    pub(super) fn n_bytes(&self) -> u64 {
        COPIES * self.n_bytes + NODE_BYTES * (1 + self.n_nodes)
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;
    use trellis_engine::account::{Budget, Resource};

    use super::*;
    use crate::thread_time::thread_time;

    const PATIENCE: Duration = Duration::from_secs(60);
    const LARGE: u64 = IN_PLACE_BYTES + 1;

    fn share_for(host_bytes: u64, cpu_max: Duration) -> (Arc<Account>, Share) {
        let account = Account::new("session", Budget { host_bytes, ..Budget::UNLIMITED }, None);
        let share = Share::new(&account, Actor { uid: 7, gid: 7 }, &Work::new(Beside::new(), cpu_max));
        (account, share)
    }

    fn share(host_bytes: u64) -> (Arc<Account>, Share) {
        share_for(host_bytes, Duration::MAX)
    }

    /// Computes for so long, unless it is given up.
    fn compute(time: Duration, yields: &YieldPoint) {
        let begun = thread_time();
        while thread_time() - begun < time && yields.reach().is_ok() {}
    }

    #[test]
    fn values_are_counted_outside_of_texts_also_in_pieces() {
        let text = br#"{"a": "b, [\\\": {", "c": [1, 2]}"#;
        let n_bytes = bytes_of_json(text);
        assert_eq!(n_bytes, COPIES * text.len() as u64 + NODE_BYTES * (1 + 1 + 2 + 1 + 2));
        let mut in_pieces = JsonSize::default();
        text.chunks(1).for_each(|piece| in_pieces.add(piece));
        assert_eq!(in_pieces.n_bytes(), n_bytes);
        let many = format!("[{}0]", "{\"\":0},".repeat(1000));
        assert!(
            bytes_of_json(many.as_bytes()) > 1000 * 600,
            "an object of one number has more than 500 bytes"
        );
    }

    #[tokio::test]
    async fn an_answer_is_on_the_account_until_it_is_sent() {
        let (account, mut share) = share(1000);
        share.set(600).expect("there is room");
        let failure = share.add(600).expect_err("there is not so much");
        assert_eq!((failure.status.as_u16(), failure.code.as_str()), (429, "budget_exceeded"));
        share.hold(400).expect("there is room");
        assert_eq!((share.n_bytes(), share.n_bytes_worked_on()), (1000, 600));
        let response = share.answer(|| Ok("{}".to_owned())).await.expect("it is written");
        let bytes = response.into_body().collect().await.expect("it cannot fail").to_bytes();
        assert_eq!((&bytes[..], account.used(Resource::HostBytes)), (&b"{}"[..], 1000));
        drop(bytes);
        assert_eq!(account.used(Resource::HostBytes), 0);
    }

    #[tokio::test]
    async fn what_is_large_is_worked_on_elsewhere_and_keeps_no_other_user_waiting() {
        let (_account, share) = share(u64::MAX);
        let here = std::thread::current().id();
        let place = |_: &YieldPoint| std::thread::current().id();
        assert_eq!(share.work(IN_PLACE_BYTES, place).await, Ok(here));
        assert_ne!(share.work(LARGE, place).await, Ok(here));
        // As many of one user as may be at work at once, and more.
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let ended = Arc::new(std::sync::Mutex::new(ended));
        let mut busy: Vec<_> = (0..64)
            .map(|_| {
                let ended = ended.clone();
                let wait = move |_: &YieldPoint| {
                    let _ = ended.lock().expect("it is whole").recv();
                };
                Box::pin(share.work(LARGE, wait))
            })
            .collect();
        for one in &mut busy {
            assert!(futures_util::FutureExt::now_or_never(one).is_none());
        }
        let other = Share::new(&share.owner.account, Actor { uid: 8, gid: 8 }, &share.work);
        assert_eq!(other.work(LARGE, |_| 1).await, Ok(1));
        drop(end);
        futures_util::future::join_all(busy).await;
    }

    #[tokio::test]
    async fn the_time_of_processors_is_counted_wherever_it_is_spent_and_has_an_end() {
        let (piece, most) = (Duration::from_millis(20), Duration::from_millis(50));
        let (_account, share) = share_for(u64::MAX, most);
        share.work(1, move |yields| compute(piece, yields)).await.expect("it has more");
        share.work(LARGE, move |yields| compute(piece, yields)).await.expect("it has more");
        assert!(share.clock.used() >= piece * 2, "{:?}", share.clock.used());
        let endless =
            tokio::time::timeout(PATIENCE, share.work(LARGE, |yields| compute(Duration::MAX, yields)));
        endless.await.expect("it is given up").expect("it had some left");
        let failure = share.has_time().expect_err("it had all");
        assert_eq!((failure.status.as_u16(), failure.code.as_str()), (429, "limit_exceeded"));
        assert!(failure.message.contains("limits.cpu_ms, which is 50"), "{failure:?}");
        assert!(share.work(1, |_| ()).await.is_err(), "and has none left");
    }
}
