//! A guest whose client it reaches through the operator's policy.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use trellis_wire::{ErrorBody, ErrorCode, GuestUsage};

use crate::guest::{Closed, Gate, Passage, PolicyFailure, Ruling};
use crate::session::GuestEnd;

/// How long a client has to read what is left of a guest that has ended.
const LEFT_FOR_MAX: Duration = Duration::from_secs(60);

/// What a client hears where the policy keeps back why its guest ended.
const KEPT_BACK: &str = "the guest ended with an error, and the operator's policy keeps its text back";

/// Why the policy does not let a guest go on.
pub(super) fn ruled(ruling: Ruling) -> ErrorBody {
    match ruling {
        Ruling::Ended(reason) => {
            ErrorBody::new(ErrorCode::PolicyEnded, format!("the operator's policy ended the guest: {reason}"))
        }
        Ruling::Failed(failure) => failed(&failure),
    }
}

/// What the policy failed of is the operator's, and in the log.
pub(super) fn failed(failure: &PolicyFailure) -> ErrorBody {
    tracing::error!(error = %failure, "the policy has failed");
    ErrorBody::new(
        ErrorCode::PolicyFailed,
        format!("the operator's policy failed, and the guest ended with it: {failure}"),
    )
}

/// Recordings and profiles say what a guest sent before the policy saw it.
pub(super) fn not_recorded() -> ErrorBody {
    let message = "the operator's policy allows neither recordings nor profiles of guests";
    ErrorBody::new(ErrorCode::PermissionDenied, message)
}

/// Sees a guest to its end behind its gate; what comes of that is to be had from the channel. It goes on where nobody waits: the
/// policy hears of every end.
pub(super) fn see_to_its_end(
    gate: Arc<Gate>,
    passage: Passage,
    stop: impl Fn() + Clone + Send + 'static,
    end: impl Future<Output = GuestEnd> + Send + 'static,
) -> oneshot::Receiver<GuestEnd> {
    let (ended, receiver) = oneshot::channel();
    tokio::spawn(async move {
        let passing = tokio::spawn(passage.pass_on(stop));
        let GuestEnd { result, usage } = end.await;
        let (to_client, ruling) = crate::tasks::joined(passing).await;
        let result = match ruling {
            Some(ruling) => Err(ruled(ruling)),
            None => told(&gate, result).await,
        };
        let result = match gate.ended(closed(&result, &usage)).await {
            Ok(left) => {
                let send = async {
                    for output in left {
                        if to_client.send(output).await.is_err() {
                            break;
                        }
                    }
                };
                if tokio::time::timeout(LEFT_FOR_MAX, send).await.is_err() {
                    tracing::warn!("a client did not read what the policy had left for it");
                }
                result
            }
            // The first failure is the reason.
            Err(_) if is_of_policy(&result) => result,
            Err(ruling) => Err(ruled(ruling)),
        };
        drop(to_client);
        // Its session may be gone.
        let _ = ended.send(GuestEnd { result, usage });
    });
    receiver
}

fn is_of_policy(result: &Result<(), ErrorBody>) -> bool {
    matches!(result, Err(error) if matches!(error.code, ErrorCode::PolicyEnded | ErrorCode::PolicyFailed))
}

fn closed<'a>(result: &'a Result<(), ErrorBody>, usage: &GuestUsage) -> Closed<'a> {
    Closed {
        code: result.as_ref().err().map(|error| error.code.as_str()),
        n_tokens: usage.n_tokens,
        n_tokens_in_vain: usage.n_tokens_in_vain,
        n_tokens_cached: usage.n_tokens_cached,
        elapsed_us: usage.elapsed_us,
    }
}

/// How the guest ended, in the words that the policy lets through: those of a guest's own error, or of its panic, are its own.
async fn told(gate: &Gate, result: Result<(), ErrorBody>) -> Result<(), ErrorBody> {
    let Err(error) = result else { return result };
    if !matches!(error.code, ErrorCode::GuestFailed | ErrorCode::GuestTrapped) {
        return Err(error);
    }
    Err(match gate.error(error.message.clone()).await {
        Ok(Some(message)) => ErrorBody { message, ..error },
        Ok(None) => ErrorBody { message: KEPT_BACK.to_owned(), ..error },
        Err(ruling) => ruled(ruling),
    })
}
