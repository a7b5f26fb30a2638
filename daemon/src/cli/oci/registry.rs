//! A registry, by the OCI distribution specification: manifests and content pulled, and pushed.

use std::sync::{Mutex, PoisonError};

use bytes::Bytes;
use futures_util::stream;
use http_body_util::StreamBody;
use hyper::body::Frame;
use reqwest::header::{ACCEPT, CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, LOCATION};
use reqwest::{Body, Client, Method, RequestBuilder, Response, StatusCode, Url};

use super::artifact::{Artifact, Descriptor, MANIFEST, MANIFEST_BYTES_MAX};
use super::auth::{self, Authorization};
use super::digest::Digest;
use super::error::OciError;
use super::http::{Http, Tell, content, refusal, shown, untold};
use super::reference::Reference;

/// What a registry says that it gave or took.
const DIGEST: &str = "docker-content-digest";
const N_REDIRECTS_MAX: usize = 5;
/// What an upload is told of at once.
const CHUNK_BYTES: usize = 64 << 10;

/// A repository of a registry.
#[derive(Debug)]
pub(super) struct Registry {
    http: Http,
    repository: String,
    authorization: Mutex<Authorization>,
    /// What is asked for the right to do.
    scope: String,
}

/// What is to be done there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    Pull,
    Push,
}

impl Registry {
    /// Asks nothing yet.
    ///
    /// # Errors
    /// No client can be made.
    pub(super) fn new(
        host: &str,
        repository: &str,
        plain_http: bool,
        purpose: Purpose,
    ) -> Result<Self, OciError> {
        // Docker's has another host than its name, and names of its own without a slash.
        let (host, repository) = match host {
            "docker.io" | "index.docker.io" if !repository.contains('/') => {
                ("registry-1.docker.io", format!("library/{repository}"))
            }
            "docker.io" | "index.docker.io" => ("registry-1.docker.io", repository.to_owned()),
            _ => (host, repository.to_owned()),
        };
        let actions = if purpose == Purpose::Push { "pull,push" } else { "pull" };
        Ok(Self {
            http: Http::new(host, plain_http)?,
            scope: format!("repository:{repository}:{actions}"),
            repository,
            authorization: Mutex::new(Authorization::Nobody),
        })
    }

    /// The manifest that a tag or a digest names. What a digest names is not compared here.
    ///
    /// # Errors
    /// It does not come, or is not what the registry itself says it is.
    pub(super) async fn manifest(&self, reference: &Reference) -> Result<Vec<u8>, OciError> {
        let name = reference.tag_or_digest().unwrap_or_else(|| "latest".to_owned());
        let url = self.url(&format!("manifests/{name}"))?;
        let answer = self.ask(|client| client.get(url.clone()).header(ACCEPT, MANIFEST), 0).await?;
        if answer.status().is_redirection() {
            return Err(OciError::Redirected {
                from: url.to_string(),
                to: place(&answer).map(|to| without_query(&to)).unwrap_or_default(),
            });
        }
        if answer.status() != StatusCode::OK {
            return Err(refusal(answer, self.http.host(), &reference.to_string()).await);
        }
        let said = said_digest(answer.headers());
        let manifest = content(answer, "the manifest", MANIFEST_BYTES_MAX, &untold()).await?;
        // Of a digest, the caller knows more.
        if let (Some(expected), None) = (said, reference.digest) {
            let actual = Digest::of(&manifest);
            if actual != expected {
                let what = format!("the manifest of {reference}");
                return Err(OciError::Digest { what, expected, actual });
            }
        }
        Ok(manifest)
    }

    /// The content of a descriptor, which may come from elsewhere: its digest says whether it is that.
    ///
    /// # Errors
    /// It does not come, is longer or shorter, or is something else.
    pub(super) async fn blob(
        &self,
        what: &str,
        descriptor: &Descriptor,
        tell: &Tell,
    ) -> Result<Vec<u8>, OciError> {
        let Descriptor { digest, size, .. } = descriptor;
        let mut url = self.url(&format!("blobs/{digest}"))?;
        let mut answer = self.ask(|client| client.get(url.clone()), 0).await?;
        for _ in 0..N_REDIRECTS_MAX {
            if !answer.status().is_redirection() {
                break;
            }
            let to =
                place(&answer).ok_or_else(|| self.protocol(&url, "it sends elsewhere, and not where"))?;
            url = self.http.follow(&url, &to)?;
            answer = if self.http.is_own(&url) {
                self.ask(|client| client.get(url.clone()), 0).await?
            } else {
                self.http.send(self.http.client().get(url.clone()), 0).await?
            };
        }
        if answer.status().is_redirection() {
            return Err(self.protocol(&url, "it sends on and on"));
        }
        if answer.status() != StatusCode::OK {
            return Err(
                refusal(answer, url.host_str().unwrap_or_default(), &format!("{what}, {digest},")).await
            );
        }
        let bytes = match content(answer, what, *size, tell).await {
            Err(OciError::TooLarge { what, n_bytes, .. }) => {
                return Err(OciError::Length { what, n_bytes, said_bytes: *size });
            }
            bytes => bytes?,
        };
        let actual = Digest::of(&bytes);
        if actual != *digest {
            let what = format!("{what} from {}", shown(&url));
            return Err(OciError::Digest { what, expected: *digest, actual });
        }
        let n_bytes = bytes.len() as u64;
        match n_bytes == *size {
            true => Ok(bytes),
            false => Err(OciError::Length { what: what.to_owned(), n_bytes, said_bytes: *size }),
        }
    }

    /// Puts an artifact there, its manifest last. Without a tag it has its digest alone.
    ///
    /// # Errors
    /// It is not taken, or the registry says that it took something else.
    pub(super) async fn push(
        &self,
        artifact: &Artifact,
        tag: Option<&str>,
        tell: &Tell,
    ) -> Result<(), OciError> {
        self.push_blob(&artifact.config.0, &artifact.config.1, &untold()).await?;
        self.push_blob(&artifact.layer.0, &artifact.layer.1, tell).await?;
        let name = tag.map_or_else(|| artifact.digest.to_string(), str::to_owned);
        let url = self.url(&format!("manifests/{name}"))?;
        let put = |client: &Client| {
            client.put(url.clone()).header(CONTENT_TYPE, MANIFEST).body(artifact.manifest.clone())
        };
        let answer = self.ask(put, artifact.manifest.len() as u64).await?;
        if answer.status() != StatusCode::CREATED {
            return Err(refusal(
                answer,
                self.http.host(),
                &format!("{}/{}", self.http.host(), self.repository),
            )
            .await);
        }
        match said_digest(answer.headers()) {
            Some(actual) if actual != artifact.digest => {
                let what = "the manifest that was pushed".to_owned();
                Err(OciError::Digest { what, expected: artifact.digest, actual })
            }
            _ => Ok(()),
        }
    }

    async fn push_blob(&self, descriptor: &Descriptor, content: &Bytes, tell: &Tell) -> Result<(), OciError> {
        let repository = || format!("{}/{}", self.http.host(), self.repository);
        let url = self.url(&format!("blobs/{}", descriptor.digest))?;
        let there = self.ask(|client| client.head(url.clone()), 0).await?;
        if there.status() == StatusCode::OK {
            return Ok(());
        }
        let url = self.url("blobs/uploads/")?;
        let begun = self.ask(|client| client.post(url.clone()).header(CONTENT_LENGTH, 0), 0).await?;
        if begun.status() != StatusCode::ACCEPTED {
            return Err(refusal(begun, self.http.host(), &repository()).await);
        }
        let to = place(&begun).ok_or_else(|| self.protocol(&url, "an upload has no place"))?;
        let mut url = self.http.follow(&url, &to)?;
        url.query_pairs_mut().append_pair("digest", &descriptor.digest.to_string());
        let put = |client: &Client| {
            let request = client.request(Method::PUT, url.clone());
            let request = request.header(CONTENT_TYPE, "application/octet-stream");
            request.header(CONTENT_LENGTH, content.len()).body(in_chunks(content, tell))
        };
        let taken = if self.http.is_own(&url) {
            self.ask(put, descriptor.size).await?
        } else {
            self.http.send(put(self.http.client()), descriptor.size).await?
        };
        match taken.status() {
            StatusCode::CREATED => Ok(()),
            _ => Err(refusal(taken, self.http.host(), &repository()).await),
        }
    }

    /// Asks the registry itself, as who it wants to know if it wants to.
    async fn ask(
        &self,
        request: impl Fn(&Client) -> RequestBuilder,
        n_bytes: u64,
    ) -> Result<Response, OciError> {
        let shown = self.authorization.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let answer = self.http.send(shown.put_on(request(self.http.client())), n_bytes).await?;
        // A token that it was shown may have run out.
        if answer.status() != StatusCode::UNAUTHORIZED {
            return Ok(answer);
        }
        let shown = auth::answer(&self.http, answer.headers(), &self.scope).await?;
        *self.authorization.lock().unwrap_or_else(PoisonError::into_inner) = shown.clone();
        self.http.send(shown.put_on(request(self.http.client())), n_bytes).await
    }

    fn url(&self, path: &str) -> Result<Url, OciError> {
        self.http.url(&format!("/v2/{}/{path}", self.repository))
    }

    fn protocol(&self, url: &Url, reason: &str) -> OciError {
        OciError::Protocol { url: shown(url), reason: reason.to_owned() }
    }
}

/// Content as a body that tells how much of it has been taken.
fn in_chunks(content: &Bytes, tell: &Tell) -> Body {
    let (content, tell) = (content.clone(), tell.clone());
    let starts = (0..content.len()).step_by(CHUNK_BYTES);
    let chunks = starts.map(move |start| {
        let end = content.len().min(start + CHUNK_BYTES);
        tell(end as u64);
        Ok::<_, std::convert::Infallible>(Frame::data(content.slice(start..end)))
    });
    Body::wrap(StreamBody::new(stream::iter(chunks)))
}

fn without_query(place: &str) -> String {
    place.split(['?', '#']).next().unwrap_or_default().to_owned()
}

fn place(answer: &Response) -> Option<String> {
    Some(answer.headers().get(LOCATION)?.to_str().ok()?.to_owned())
}

/// What a registry says the digest is; one of another algorithm says nothing.
fn said_digest(headers: &HeaderMap) -> Option<Digest> {
    headers.get(DIGEST)?.to_str().ok()?.parse().ok()
}
