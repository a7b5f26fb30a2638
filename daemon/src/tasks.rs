//! Tasks whose ends are awaited.

use std::panic::resume_unwind;

use tokio::task::JoinHandle;

/// What comes of a task that is not aborted. A panic in it goes on here. The end of the runtime cancels tasks, and then
/// the waiting task is dropped as well: this waits for that.
pub(crate) async fn joined<T>(task: JoinHandle<T>) -> T {
    match task.await {
        Ok(result) => result,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => resume_unwind(panic),
            Err(_) => std::future::pending().await,
        },
    }
}

/// Does what blocks where it holds up no task. A panic in it goes on here.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    joined(tokio::task::spawn_blocking(work)).await
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn a_panic_goes_on_and_the_end_of_the_runtime_is_none() {
        assert_eq!(blocking(|| 7).await, 7);
        let panicking = std::panic::AssertUnwindSafe(blocking(|| panic!("an injected panic")));
        let panic = panicking.catch_unwind().await.expect_err("it goes on");
        assert_eq!(panic.downcast_ref(), Some(&"an injected panic"));
        let other = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().expect("a runtime");
        let task = other.spawn(std::future::pending::<()>());
        other.shutdown_background();
        while !task.is_finished() {
            tokio::task::yield_now().await;
        }
        assert!(joined(task).now_or_never().is_none(), "there is no result");
    }
}
