//! What is wrong, in Anthropic's form.

use axum::http::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::{REQUEST_ID, THREAD, new_request_id};
use crate::http::failure::Failure;

/// A request that is not answered.
#[derive(Debug)]
pub(in crate::http) struct Refused(pub(in crate::http) Failure);

impl From<Failure> for Refused {
    fn from(failure: Failure) -> Self {
        Self(failure)
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        let Self(failure) = self;
        let id = new_request_id();
        let mut response = (failure.status, body(&failure, Some(&id)).to_string()).into_response();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Ok(id) = HeaderValue::from_str(&id) {
            headers.insert(REQUEST_ID, id);
        }
        if let Some(seconds) = failure.retry_after {
            headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

/// The body that tells of a failure. In a stream the request's id has been told before.
pub(super) fn body(failure: &Failure, request_id: Option<&str>) -> Value {
    let kind = match failure.status.as_u16() {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        504 => "timeout_error",
        500.. => "api_error",
        _ => "invalid_request_error",
    };
    let mut body = json!({ "type": "error", "error": { "type": kind, "message": message(failure) } });
    // By this, clients send the conversation whole.
    if failure.param.as_deref() == Some(THREAD) {
        body["error"]["details"] =
            json!({ "error_code": "thread_unsupported_request", "unsupported": [THREAD] });
    }
    if let Some(id) = request_id {
        body["request_id"] = id.into();
    }
    body
}

/// This form has no place for the field but the text.
fn message(failure: &Failure) -> String {
    match &failure.param {
        Some(param) if !failure.message.contains(param.as_str()) => format!("{param}: {}", failure.message),
        _ => failure.message.clone(),
    }
}

#[cfg(test)]
mod tests {
    use axum::http::StatusCode;

    use super::*;

    #[test]
    fn a_client_is_told_that_it_sends_the_conversation_whole() {
        let body = body(&Failure::unsupported(THREAD, "no"), None);
        let expected = json!({ "error_code": "thread_unsupported_request", "unsupported": ["thread"] });
        assert_eq!(body["error"]["details"], expected);
    }

    #[test]
    fn an_error_is_of_its_status_and_names_its_field() {
        let missing =
            Failure::new(StatusCode::NOT_FOUND, "model_not_found", "there is no \"x\"").about("model");
        let expected = json!({
            "type": "error",
            "error": { "type": "not_found_error", "message": "model: there is no \"x\"" },
            "request_id": "req_1",
        });
        assert_eq!(body(&missing, Some("req_1")), expected);
        for (status, kind) in
            [(400, "invalid_request_error"), (429, "rate_limit_error"), (503, "overloaded_error")]
        {
            let status = StatusCode::from_u16(status).expect("a status");
            let body = body(&Failure::new(status, "code", "no"), None);
            assert_eq!((&body["error"]["type"], body.get("request_id")), (&json!(kind), None));
        }
    }
}
