//! What a request takes of the daemon beside its guest: host memory, which is on its user's account, and processors while much is
//! read or written.

use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use trellis_engine::account::{Account, ActorId, HostCharge};

use super::failure::Failure;
use crate::service::over_host_bytes;
use crate::session::Actor;
use crate::tasks::blocking;
use crate::user_places::UserPlaces;

/// Memory up to which a request is read and written where it stands: it holds up nobody for longer than a message of the daemon's own
/// sockets does.
const IN_PLACE_BYTES: u64 = 256 << 10;

/// A body while it comes, in a list that grows, what is read of it, and what is said of it to the guest and to the client.
const COPIES: u64 = 4;

/// What a value takes in a tree of JSON, with its key, its place in a list that grows, and a copy that the answer repeats.
const NODE_BYTES: u64 = 256;

/// Places of users for work on what is large.
pub(super) fn places() -> UserPlaces {
    UserPlaces::new(2, 1)
}

/// The part of one request.
#[derive(Debug)]
pub(super) struct Share {
    charge: HostCharge,
    n_bytes: u64,
    user: ActorId,
    places: UserPlaces,
}

impl Share {
    /// Nothing yet.
    pub(super) fn new(account: &Arc<Account>, actor: Actor, places: &UserPlaces) -> Self {
        let charge = HostCharge::none(account);
        Self { charge, n_bytes: 0, user: ActorId(actor.uid), places: places.clone() }
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

    /// Does what may take long as more memory is held, where it holds up nobody. One user has few at work at a time.
    pub(super) async fn work<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        if self.n_bytes <= IN_PLACE_BYTES {
            return work();
        }
        let place = self.places.take(self.user).await;
        blocking(move || {
            let _place = place;
            work()
        })
        .await
    }

    /// An answer in JSON, which stays on the account until it is sent.
    pub(super) async fn answer(self, write: impl FnOnce() -> String + Send + 'static) -> Response {
        let text = self.work(write).await;
        ([(CONTENT_TYPE, "application/json")], self.body(text)).into_response()
    }

    /// As [`Self::answer`], where what is to be written may turn out wrong.
    ///
    /// # Errors
    /// Those of `write`.
    pub(super) async fn try_answer(
        self,
        write: impl FnOnce() -> Result<String, Failure> + Send + 'static,
    ) -> Result<Response, Failure> {
        let text = self.work(write).await?;
        Ok(([(CONTENT_TYPE, "application/json")], self.body(text)).into_response())
    }

    fn body(self, text: String) -> Body {
        Body::from(Bytes::from_owner(Sent { text, _share: self }))
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

/// What a body of JSON comes to at most when it is read.
pub(super) fn bytes_of_json(body: &[u8]) -> u64 {
    COPIES * body.len() as u64 + NODE_BYTES * n_nodes(body)
}

/// No fewer than there are values in a text of JSON: those of a list or an object are parted by commas, and keys have colons.
fn n_nodes(body: &[u8]) -> u64 {
    let (mut n, mut is_text, mut is_escaped) = (1, false, false);
    for &byte in body {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' if is_text => is_escaped = true,
            b'"' => is_text = !is_text,
            b',' | b':' | b'[' | b'{' if !is_text => n += 1,
            _ => {}
        }
    }
    n
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;
    use trellis_engine::account::{Budget, Resource};

    use super::*;

    fn share(host_bytes: u64) -> (Arc<Account>, Share) {
        let account = Account::new("session", Budget { host_bytes, ..Budget::UNLIMITED }, None);
        let share = Share::new(&account, Actor { uid: 7, gid: 7 }, &places());
        (account, share)
    }

    #[test]
    fn values_are_counted_outside_of_texts() {
        assert_eq!(n_nodes(br#"{"a": "b, [\\\": {", "c": [1, 2]}"#), 1 + 1 + 2 + 1 + 2);
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
        let response = share.answer(|| "{}".to_owned()).await;
        let bytes = response.into_body().collect().await.expect("it cannot fail").to_bytes();
        assert_eq!((&bytes[..], account.used(Resource::HostBytes)), (&b"{}"[..], 600));
        drop(bytes);
        assert_eq!(account.used(Resource::HostBytes), 0);
    }

    #[tokio::test]
    async fn what_is_large_is_worked_on_elsewhere_and_by_turns() {
        let (_account, mut share) = share(u64::MAX);
        let here = std::thread::current().id();
        assert_eq!(share.work(|| std::thread::current().id()).await, here);
        share.set(IN_PLACE_BYTES + 1).expect("there is room");
        assert_ne!(share.work(|| std::thread::current().id()).await, here);
        let user = ActorId(7);
        let taken = [share.places.take(user).await, share.places.take(user).await];
        let mut third = Box::pin(share.work(|| ()));
        assert!(futures_util::FutureExt::now_or_never(&mut third).is_none(), "two are at work");
        drop(taken);
        third.await;
    }
}
