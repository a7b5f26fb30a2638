//! What a fork of a long context costs its caller and the engine.

use trellis_engine::Context;

use super::desk::own_time;
use super::micros;
use super::report::Fork;
use super::rig::{self, Rig, Runs};
use crate::cli::bench::BenchError;
use crate::cli::bench::samples::median;
use crate::cli::progress::{ProgressDisplay, Unit};

const N_FORKS: usize = 101;
/// The stream whose steps the forks come between.
const N_TICKER_TOKENS: usize = 1_000;
const N_WARM_UP_STEPS: usize = 64;

/// Forks the longest context.
///
/// # Errors
/// The engine stopped.
pub(super) async fn measure(progress: &ProgressDisplay) -> Result<Fork, BenchError> {
    of(rig::config().n_positions, N_FORKS, progress).await
}

/// Holds the device up, forks, lets it go on: the engine carries the fork out before the next step, which takes so much
/// longer than one without.
pub(super) async fn of(
    n_tokens: usize,
    n_forks: usize,
    progress: &ProgressDisplay,
) -> Result<Fork, BenchError> {
    // Steps go by as long as this task is not awake: the stream has room for all that a context may hold.
    let mut rig = Rig::new(2, n_tokens + rig::config().n_positions)?;
    let ticker = rig.context(0, N_TICKER_TOKENS).await?;
    let mut long = rig.context(1, n_tokens).await?;
    let first = rig.desk.n_steps();
    rig.pull(vec![ticker], Runs::Endless);
    rig.desk.reached(first + N_WARM_UP_STEPS).await;

    let (mut plain, mut forks, mut releases, mut callers) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for done in 0..n_forks {
        progress.update("measuring forks", Unit::Items, done as u64, n_forks as u64);
        plain.push(step_after(&rig, async || Ok(())).await?.1);
        let ((child, caller), step) = step_after(&rig, async || {
            let (child, time) = own_time(long.fork()).await;
            Ok((child?, micros(time)))
        })
        .await?;
        callers.push(caller);
        forks.push(step);
        let drop_it = async || {
            drop::<Context>(child);
            Ok(())
        };
        releases.push(step_after(&rig, drop_it).await?.1);
    }
    super::end(rig).await;
    let plain = median(plain);
    Ok(Fork {
        n_tokens,
        n_forks,
        caller_us: median(callers),
        engine_us: median(forks) - plain,
        release_us: median(releases) - plain,
    })
}

/// Does something while the device waits. Returns the engine's time between that step and the next, in microseconds.
async fn step_after<T>(
    rig: &Rig,
    act: impl AsyncFnOnce() -> Result<T, BenchError>,
) -> Result<(T, f64), BenchError> {
    rig.desk.hold().await;
    let next = rig.desk.n_steps();
    let answer = act().await;
    rig.desk.release();
    let answer = answer?;
    rig.desk.reached(next + 1).await;
    Ok((answer, micros(rig.desk.steps_from(next)[0].host)))
}
