//! Why a request is not answered, before an API gives it its form.

use axum::http::StatusCode;
use trellis_client::Error;
use trellis_wire::{ErrorBody, ErrorCode};

use super::exchange::{Refusal, RefusalKind};

/// How long a client is asked to wait before it tries again, in seconds.
const RETRY_SECONDS: u32 = 1;

/// What went wrong, with the status that HTTP has for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    pub(super) status: StatusCode,
    /// A word for programs.
    pub(super) code: String,
    pub(super) message: String,
    /// The field of the request that it is about.
    pub(super) param: Option<String>,
    /// Seconds after which the same may be asked again.
    pub(super) retry_after: Option<u32>,
}

impl Failure {
    pub(super) fn new(status: StatusCode, code: &str, message: impl Into<String>) -> Self {
        let retries = [StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE];
        let retry_after = retries.contains(&status).then_some(RETRY_SECONDS);
        Self { status, code: code.to_owned(), message: message.into(), param: None, retry_after }
    }

    /// A field that is not as it may be.
    pub(super) fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_value", message).about(param)
    }

    /// A field of the API that this front does not do.
    pub(super) fn unsupported(param: impl Into<String>, why: &str) -> Self {
        let param = param.into();
        let message = format!("{param} is not supported: {why}");
        Self::new(StatusCode::BAD_REQUEST, "unsupported_parameter", message).about(param)
    }

    pub(super) fn about(self, param: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..self }
    }

    /// What the guest does not do, with the names that the API has for the parts of a request.
    pub(super) fn refused(refusal: Refusal, name_of: impl Fn(&str) -> String) -> Self {
        let Refusal { kind, param, message } = refusal;
        let (status, code) = match kind {
            RefusalKind::Invalid => (StatusCode::BAD_REQUEST, "invalid_value"),
            RefusalKind::ContextFull => (StatusCode::BAD_REQUEST, "context_length_exceeded"),
            RefusalKind::NotFound => (StatusCode::NOT_FOUND, "not_found"),
            RefusalKind::UnknownModel => (StatusCode::NOT_FOUND, "model_not_found"),
            RefusalKind::Budget => (StatusCode::TOO_MANY_REQUESTS, "budget_exceeded"),
            RefusalKind::Retry => (StatusCode::SERVICE_UNAVAILABLE, "try_again"),
            RefusalKind::Internal => (StatusCode::INTERNAL_SERVER_ERROR, "guest_failed"),
        };
        let failure = Self::new(status, code, message);
        match param {
            Some(param) => failure.about(name_of(&param)),
            None => failure,
        }
    }

    /// What the daemon says.
    pub(super) fn of_body(body: &ErrorBody) -> Self {
        let status = match &body.code {
            ErrorCode::InvalidArgument => StatusCode::BAD_REQUEST,
            ErrorCode::UnknownModel | ErrorCode::UnknownProgram => StatusCode::NOT_FOUND,
            ErrorCode::PermissionDenied | ErrorCode::PolicyEnded => StatusCode::FORBIDDEN,
            ErrorCode::BudgetExceeded | ErrorCode::LimitExceeded => StatusCode::TOO_MANY_REQUESTS,
            ErrorCode::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
            code if code.is_retryable() => StatusCode::SERVICE_UNAVAILABLE,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        let code = match &body.code {
            ErrorCode::UnknownModel => "model_not_found",
            code => code.as_str(),
        };
        let failure = Self::new(status, code, body.to_string());
        match &body.code {
            ErrorCode::UnknownModel => failure.about("model"),
            ErrorCode::UnknownProgram => failure.about("trellis.guest"),
            _ => Self { param: body.name.clone(), ..failure },
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        match &error {
            Error::Daemon(body) | Error::ConnectionLost(trellis_client::Lost::Fault(body)) => {
                Self::of_body(body)
            }
            error if error.is_retryable() => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "try_again", error.to_string())
            }
            error => Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_may_try_again_is_told_when() {
        for (code, status, retry_after) in [
            (ErrorCode::ShuttingDown, 503, Some(1)),
            (ErrorCode::BudgetExceeded, 429, Some(1)),
            (ErrorCode::UnknownModel, 404, None),
            (ErrorCode::PermissionDenied, 403, None),
            (ErrorCode::GuestTrapped, 500, None),
        ] {
            let failure = Failure::from(Error::Daemon(Box::new(ErrorBody::new(code, "no"))));
            assert_eq!((failure.status.as_u16(), failure.retry_after), (status, retry_after), "{failure:?}");
        }
        let body = ErrorBody::new(ErrorCode::UnknownModel, "no model is called \"x\"");
        let failure = Failure::from(Error::Daemon(Box::new(body)));
        assert_eq!((failure.code.as_str(), failure.param.as_deref()), ("model_not_found", Some("model")));
    }

    #[test]
    fn a_refusal_names_the_field_of_the_api() {
        let refusal = Refusal {
            kind: RefusalKind::Invalid,
            param: Some("format".to_owned()),
            message: "the grammar is refused".to_owned(),
        };
        let failure = Failure::refused(refusal, |part| format!("response_{part}"));
        assert_eq!((failure.status.as_u16(), failure.param.as_deref()), (400, Some("response_format")));
    }
}
