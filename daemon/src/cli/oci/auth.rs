//! Who asks a registry: what docker's configuration has for it, or nobody.

use std::env;
use std::fs::File;
use std::io::{self, BufReader};
use std::path::PathBuf;

use docker_credential::{CredentialRetrievalError, DockerCredential};
use http_auth::parse_challenges;
use reqwest::header::{CONTENT_TYPE, HeaderMap, WWW_AUTHENTICATE};
use reqwest::{RequestBuilder, StatusCode, Url};
use serde::Deserialize;

use super::error::OciError;
use super::http::{Http, content, refusal, shown, untold};

const TOKEN_BYTES_MAX: u64 = 1 << 20;
/// What docker's configuration has the registry of Docker under.
const DOCKER: (&str, &str) = ("registry-1.docker.io", "https://index.docker.io/v1/");

/// What a request shows.
#[derive(Clone)]
pub(super) enum Authorization {
    Nobody,
    Basic(String, String),
    Bearer(String),
}

impl std::fmt::Debug for Authorization {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Authorization")
    }
}

impl Authorization {
    pub(super) fn put_on(&self, request: RequestBuilder) -> RequestBuilder {
        match self {
            Self::Nobody => request,
            Self::Basic(user, password) => request.basic_auth(user, Some(password)),
            Self::Bearer(token) => request.bearer_auth(token),
        }
    }
}

/// How a registry wants to be asked.
#[derive(Debug, PartialEq, Eq)]
enum Challenge {
    Basic,
    Bearer { realm: String, service: Option<String> },
}

/// Works out what to show a registry that has refused a request with these headers.
///
/// # Errors
/// It wants something unknown, or does not take what this user has.
pub(super) async fn answer(http: &Http, headers: &HeaderMap, scope: &str) -> Result<Authorization, OciError> {
    let refused =
        |reason: &str| OciError::Unauthorised { host: http.host().to_owned(), reason: reason.to_owned() };
    let challenge = challenge(headers).ok_or_else(|| refused("it does not say how"))?;
    let credential = credential(http.host()).await?;
    match (challenge, credential) {
        (Challenge::Basic, Some(DockerCredential::UsernamePassword(user, password))) => {
            Ok(Authorization::Basic(user, password))
        }
        (Challenge::Basic, None) => Err(refused("it wants a password, and docker's configuration has none")),
        (Challenge::Basic, Some(DockerCredential::IdentityToken(_))) => {
            Err(refused("it wants a password, and docker's configuration has a token"))
        }
        // What is asked for is all that is to be done: a registry names what the one request would have needed.
        (Challenge::Bearer { realm, service }, credential) => {
            token(http, &realm, service.as_deref(), scope, credential).await.map(Authorization::Bearer)
        }
    }
}

/// The best that is offered.
fn challenge(headers: &HeaderMap) -> Option<Challenge> {
    let mut best = None;
    for value in headers.get_all(WWW_AUTHENTICATE) {
        let Ok(challenges) = parse_challenges(value.to_str().unwrap_or_default()) else { continue };
        for one in challenges {
            let parameter = |name: &str| {
                let (_, value) = one.params.iter().find(|(key, _)| key.eq_ignore_ascii_case(name))?;
                Some(value.to_unescaped())
            };
            if one.scheme.eq_ignore_ascii_case("bearer")
                && let Some(realm) = parameter("realm")
            {
                return Some(Challenge::Bearer { realm, service: parameter("service") });
            }
            if one.scheme.eq_ignore_ascii_case("basic") {
                best = Some(Challenge::Basic);
            }
        }
    }
    best
}

/// What docker's configuration has, or a helper that it names. That a user has none is no error.
async fn credential(host: &str) -> Result<Option<DockerCredential>, OciError> {
    let host = host.to_owned();
    let looked = tokio::task::spawn_blocking(move || {
        let failed = |reason: String| OciError::Credentials { host: host.clone(), reason };
        let Some(path) = docker_config() else { return Ok(None) };
        let file = match File::open(&path) {
            Ok(file) => BufReader::new(file),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(format!("{}: {error}", path.display()))),
        };
        let key = if host == DOCKER.0 { DOCKER.1 } else { &host };
        match docker_credential::get_credential_from_reader(file, key) {
            Ok(credential) => Ok(Some(credential)),
            Err(CredentialRetrievalError::NoCredentialConfigured) => Ok(None),
            // Of a helper that has none for this registry.
            Err(CredentialRetrievalError::HelperFailure { stdout, .. }) if stdout.contains("not found") => {
                Ok(None)
            }
            Err(error) => Err(failed(format!("{}: {error}", path.display()))),
        }
    });
    looked.await.expect("reading a configuration does not panic")
}

/// Where docker and others that log in keep it.
fn docker_config() -> Option<PathBuf> {
    let named = env::var_os("DOCKER_CONFIG").filter(|folder| !folder.is_empty()).map(PathBuf::from);
    let folder = named.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".docker")))?;
    Some(folder.join("config.json"))
}

/// Fetches a token from where the registry says, which is told the password, and so is asked over TLS or not at all.
async fn token(
    http: &Http,
    realm: &str,
    service: Option<&str>,
    scope: &str,
    credential: Option<DockerCredential>,
) -> Result<String, OciError> {
    #[derive(Deserialize)]
    struct Tokens {
        token: Option<String>,
        access_token: Option<String>,
    }
    let mut url = http.follow(&http.url("/v2/")?, realm)?;
    let asked = || service.map(|service| ("service", service)).into_iter().chain([("scope", scope)]);
    let request = match credential {
        Some(DockerCredential::IdentityToken(refresh)) => {
            let mut form = Url::parse("form:").expect("a URL");
            form.query_pairs_mut().extend_pairs(asked()).extend_pairs([
                ("grant_type", "refresh_token"),
                ("client_id", "trellis"),
                ("refresh_token", &refresh),
            ]);
            let form = form.query().unwrap_or_default().to_owned();
            http.client()
                .post(url.clone())
                .header(CONTENT_TYPE, "application/x-www-form-urlencoded")
                .body(form)
        }
        credential => {
            url.query_pairs_mut().extend_pairs(asked());
            let request = http.client().get(url.clone());
            match credential {
                Some(DockerCredential::UsernamePassword(user, password)) => {
                    request.basic_auth(user, Some(password))
                }
                _ => request,
            }
        }
    };
    let answer = http.send(request, 0).await?;
    if answer.status() != StatusCode::OK {
        let what = format!("the token service {}", shown(&url));
        return Err(refusal(answer, url.host_str().unwrap_or_default(), &what).await);
    }
    let said = content(answer, "the token", TOKEN_BYTES_MAX, &untold()).await?;
    let protocol = |reason: String| OciError::Protocol { url: shown(&url), reason };
    let tokens: Tokens = serde_json::from_slice(&said).map_err(|error| protocol(error.to_string()))?;
    tokens.token.or(tokens.access_token).ok_or_else(|| protocol("there is no token in its answer".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_preferred_to_a_password() {
        let of = |values: &[&'static str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(WWW_AUTHENTICATE, value.parse().expect("a value"));
            }
            challenge(&headers)
        };
        assert_eq!(of(&[]), None);
        assert_eq!(of(&["Basic realm=\"x\""]), Some(Challenge::Basic));
        assert_eq!(of(&["Bearer service=\"x\""]), None, "without a realm");
        let bearer = Challenge::Bearer {
            realm: "https://auth.docker.io/token".to_owned(),
            service: Some("registry.docker.io".to_owned()),
        };
        let offered = "Bearer realm=\"https://auth.docker.io/token\",service=\"registry.docker.io\"";
        assert_eq!(of(&["Basic realm=\"x\"", offered]), Some(bearer));
    }
}
