//! Errors in OpenAI's form.

use axum::http::StatusCode;
use axum::http::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::super::failure::Failure;

/// A request that is not answered.
#[derive(Debug)]
pub(in crate::http) struct Refused(pub(in crate::http) Failure);

impl From<Failure> for Refused {
    fn from(failure: Failure) -> Self {
        Self(failure)
    }
}

/// The body of an error.
pub(super) fn body(failure: &Failure) -> Value {
    let kind = match failure.status {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        status if status.is_client_error() => "invalid_request_error",
        _ => "server_error",
    };
    json!({ "error": {
        "message": failure.message,
        "type": kind,
        "param": failure.param,
        "code": failure.code,
    } })
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        let Self(failure) = self;
        let mut response = (failure.status, body(&failure).to_string()).into_response();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(seconds) = failure.retry_after {
            headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        if failure.status == StatusCode::UNAUTHORIZED {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_has_the_form_that_clients_of_the_api_read() {
        let failure = Failure::invalid("n", "n is 0, expected 1 to 8");
        let expected = json!({ "error": {
            "message": "n is 0, expected 1 to 8", "type": "invalid_request_error", "param": "n", "code": "invalid_value",
        } });
        assert_eq!(body(&failure), expected);
        let busy = Failure::new(StatusCode::TOO_MANY_REQUESTS, "budget_exceeded", "no pages");
        assert_eq!(body(&busy)["error"]["type"], "rate_limit_error");
        assert_eq!(Refused(busy).into_response().headers()[RETRY_AFTER], "1");
        let nobody = Failure::new(StatusCode::UNAUTHORIZED, "invalid_api_key", "whose?");
        assert_eq!(Refused(nobody).into_response().headers()[WWW_AUTHENTICATE], "Bearer");
    }
}
