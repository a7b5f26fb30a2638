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

/// What the policy failed of is the operator's, and in the log: its own words may be of what it keeps back.
pub(super) fn failed(failure: &PolicyFailure) -> ErrorBody {
    tracing::error!(error = %failure, "the policy has failed");
    ErrorBody::new(
        ErrorCode::PolicyFailed,
        format!("the operator's policy failed, and the guest ended with it: {}", failure.told()),
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

/// How the guest ended, in the words that the policy lets through.
async fn told(gate: &Gate, result: Result<(), ErrorBody>) -> Result<(), ErrorBody> {
    let Err(error) = result else { return result };
    if !may_hold_words(&error.code) {
        return Err(error);
    }
    Err(match gate.error(error.message.clone()).await {
        Ok(Some(message)) if message == error.message => error,
        // The value may be in the text that the policy did not let through.
        Ok(message) => {
            let message = message.unwrap_or_else(|| KEPT_BACK.to_owned());
            ErrorBody { message, value: None, ..error }
        }
        Err(ruling) => ruled(ruling),
    })
}

/// Whether the text of such an error may hold words of the guest: those of its own error and of a panic that it has caused, and
/// whatever the process says that it runs in. Of the others the text is the daemon's, around numbers.
fn may_hold_words(code: &ErrorCode) -> bool {
    !matches!(
        code,
        ErrorCode::BudgetExceeded
            | ErrorCode::LimitExceeded
            | ErrorCode::DeadlineExceeded
            | ErrorCode::Stopped
            | ErrorCode::Cancelled
            | ErrorCode::ShuttingDown
    )
}
