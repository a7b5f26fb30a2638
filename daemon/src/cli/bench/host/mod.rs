//! `trellis bench --host`: what a step costs the engine's thread, over a device that computes nothing.
//!
//! The device reads the processor time of the engine's thread when it is called and when it returns. What lies between
//! is the host's: taking in the outputs, waking guests, commands, the plan of the next step.

mod allocations;
mod clock;
mod desk;
mod fork;
mod null;
mod report;
mod rig;

use std::time::Duration;

use self::desk::Between;
use self::report::{Case, Ends, HostReport};
use self::rig::{Rig, Runs};
use super::{BenchArgs, BenchError, load};
use crate::cli::error::CliError;
use crate::cli::output::{self, Format};
use crate::cli::progress::{ProgressDisplay, Unit};

/// Rows of a step: one person, a few, a service, a large one.
const ROWS: [u32; 4] = [1, 32, 256, 1024];
/// A question, and a book.
const CONTEXTS: [u32; 2] = [1_000, 100_000];

const N_STEPS: usize = 2_000;
/// Steps before those that count.
const N_WARM_UP_STEPS: usize = 64;
/// A case is cut short after this, and says how many steps it saw.
const PATIENCE: Duration = Duration::from_secs(90);

/// Rows, tokens of a run, and steps in which runs end and begin all the time.
const N_ENDS_ROWS: usize = 256;
const N_ENDS_RUN_TOKENS: usize = 32;
const N_ENDS_STEPS: usize = 1_000;

/// Beams of a search, and the prompt that it is over.
const SEARCHES: [(usize, usize); 3] = [(4, 128), (16, 128), (128, 2_048)];
/// Tokens of each hypothesis, and steps that count.
const N_SEARCH_TOKENS: usize = 256;
const N_SEARCH_STEPS: usize = 1_000;

/// Contexts that have guesses verified, their guesses, and their length.
const VERIFICATIONS: [(usize, usize, usize); 2] = [(8, 8, 128), (32, 8, 128)];

/// Measures and prints.
///
/// # Errors
/// The engine stopped, or the report cannot be written.
pub(super) async fn bench(args: &BenchArgs, format: Format) -> Result<(), CliError> {
    let report = measure(args, format).await?;
    args.speed.save(&report)?;
    output::print(format, &report, HostReport::render)
}

async fn measure(args: &BenchArgs, format: Format) -> Result<HostReport, CliError> {
    let rows = if args.speed.batch.is_empty() { &ROWS[..] } else { &args.speed.batch };
    let lengths = args.speed.context.map_or(CONTEXTS.to_vec(), |length| vec![length]);
    let n_positions = rig::config().n_positions;
    for &length in &lengths {
        let (n_prompt, n_tokens) = (length as usize, n_tokens_decoded());
        if n_prompt + n_tokens > n_positions {
            return Err(BenchError::TooManyTokens { n_prompt, n_tokens, n_positions }.into());
        }
    }
    let progress = ProgressDisplay::of_long_work(format);
    let mut report = HostReport {
        clock_us: micros(clock::reading_time()),
        busy_percent: load::busy_percent().await,
        cases: Vec::new(),
        searches: Vec::new(),
        verifications: Vec::new(),
        ends: None,
        fork: None,
    };
    for &length in &lengths {
        for &n_rows in rows {
            let case = steps(n_rows as usize, length as usize, &progress).await?;
            report.cases.push(case);
        }
    }
    for (n_beams, length) in SEARCHES {
        report.searches.push(search(n_beams, length, &progress).await?);
    }
    for (n_rows, n_guesses, length) in VERIFICATIONS {
        report.verifications.push(verifications(n_rows, n_guesses, length, &progress).await?);
    }
    report.ends = Some(ends(&progress).await?);
    progress.update("measuring forks", Unit::Items, 0, 0);
    report.fork = Some(fork::measure(&progress).await?);
    Ok(report)
}

/// Tokens of each context past its prompt, at most: one is drawn but not computed, and pages are whole.
fn n_tokens_decoded() -> usize {
    N_WARM_UP_STEPS + N_STEPS + 256
}

/// Plain decoding: contexts of this length and a few more, so that as many cross into a new page in each step as in any
/// other.
async fn steps(n_rows: usize, length: usize, progress: &ProgressDisplay) -> Result<Case, BenchError> {
    let mut rig = Rig::new(n_rows, n_rows * (length + 2 * n_tokens_decoded()))?;
    let contexts = contexts(&rig, n_rows, length, progress).await?;
    let warm = rig.desk.n_steps() + N_WARM_UP_STEPS;
    rig.pull(contexts, Runs::Endless);
    let title = format!("measuring {n_rows} rows of {length}");
    let shown = |done| progress.update(&title, Unit::Items, done as u64, N_STEPS as u64);
    let steps = rig.steps(warm, N_STEPS, PATIENCE, shown).await?;
    end(rig).await;
    let is_whole = |step: &&Between| step.n_rows == n_rows && step.n_tokens == n_rows;
    let whole: Vec<f64> = steps.iter().filter(is_whole).map(|step| micros(step.host)).collect();
    Case::of(n_rows, length, whole, steps.len()).ok_or(BenchError::NoSteps { n_rows, length })
}

/// One search, of which all beams are in every step save the first of each search.
async fn search(n_beams: usize, length: usize, progress: &ProgressDisplay) -> Result<Case, BenchError> {
    // A step has rows left for prompts beside those of a search.
    let mut rig = Rig::new(2 * n_beams, 2 * length + 2 * n_beams * (N_SEARCH_TOKENS + 32))?;
    let context = contexts(&rig, 1, length, progress).await?.remove(0);
    let first = rig.desk.n_steps();
    rig.search(context, n_beams, N_SEARCH_TOKENS);
    let title = format!("measuring {n_beams} beams after {length}");
    let shown = |done| progress.update(&title, Unit::Items, done as u64, N_SEARCH_STEPS as u64);
    let steps = rig.steps(first + N_WARM_UP_STEPS, N_SEARCH_STEPS, PATIENCE, shown).await?;
    end(rig).await;
    let whole: Vec<f64> =
        steps.iter().filter(|step| step.n_rows == n_beams).map(|step| micros(step.host)).collect();
    Case::of(n_beams, length, whole, steps.len()).ok_or(BenchError::NoSteps { n_rows: n_beams, length })
}

/// Guesses that are wrong: every step waits for what guests do with the one before.
async fn verifications(
    n_rows: usize,
    n_guesses: usize,
    length: usize,
    progress: &ProgressDisplay,
) -> Result<Case, BenchError> {
    let mut rig = Rig::new(n_rows, 2 * n_rows * (length + N_SEARCH_TOKENS + 32))?;
    let contexts = contexts(&rig, n_rows, length, progress).await?;
    let first = rig.desk.n_steps();
    rig.verify(contexts, n_guesses, N_SEARCH_TOKENS);
    let title = format!("measuring {n_rows} verifications of {n_guesses}");
    let shown = |done| progress.update(&title, Unit::Items, done as u64, N_SEARCH_STEPS as u64);
    let steps = rig.steps(first + N_WARM_UP_STEPS, N_SEARCH_STEPS, PATIENCE, shown).await?;
    end(rig).await;
    let whole: Vec<f64> =
        steps.iter().filter(|step| step.n_rows == n_rows).map(|step| micros(step.host)).collect();
    Case::of(n_rows, length, whole, steps.len()).ok_or(BenchError::NoSteps { n_rows, length })
}

/// Runs end and begin in every step.
async fn ends(progress: &ProgressDisplay) -> Result<Ends, BenchError> {
    let (n_rows, length) = (N_ENDS_ROWS, CONTEXTS[0] as usize);
    let mut rig = Rig::new(n_rows, n_rows * (length + 2 * n_tokens_decoded()))?;
    let contexts = contexts(&rig, n_rows, length, progress).await?;
    let begin = rig.desk.n_steps();
    rig.pull(contexts, Runs::Of(N_ENDS_RUN_TOKENS));
    let title = format!("measuring {n_rows} rows whose runs end");
    let shown = |done| progress.update(&title, Unit::Items, done as u64, N_ENDS_STEPS as u64);
    rig.steps(begin, N_WARM_UP_STEPS, PATIENCE, |_| ()).await?;
    let (first, before) = (rig.desk.n_steps(), allocations::total());
    let steps = rig.steps(first, N_ENDS_STEPS, PATIENCE, shown).await?;
    let (n_steps, after) = (rig.desk.n_steps() - first, allocations::total());
    end(rig).await;
    let host: Vec<f64> = steps.iter().map(|step| micros(step.host)).collect();
    let n_allocations = after.zip(before).map(|(after, before)| after - before);
    let rows: usize = steps.iter().map(|step| step.n_rows).sum();
    Ok(Ends {
        case: Case::of(n_rows, length, host, steps.len()).ok_or(BenchError::NoSteps { n_rows, length })?,
        run_tokens: N_ENDS_RUN_TOKENS,
        mean_rows: rows as f64 / steps.len() as f64,
        allocations_per_step: n_allocations.map(|n| n as f64 / n_steps as f64),
    })
}

async fn contexts(
    rig: &Rig,
    n_rows: usize,
    length: usize,
    progress: &ProgressDisplay,
) -> Result<Vec<trellis_engine::Context>, BenchError> {
    let title = format!("building {n_rows} contexts of {length}");
    let mut contexts = Vec::with_capacity(n_rows);
    for idx in 0..n_rows {
        progress.update(&title, Unit::Items, idx as u64, n_rows as u64);
        contexts.push(rig.context(idx, length + idx % trellis_engine::backend::PAGE_LEN).await?);
    }
    Ok(contexts)
}

/// Stops engine and guests. The engine's thread is waited for elsewhere than on the runtime's own threads.
async fn end(rig: Rig) {
    tokio::task::spawn_blocking(move || drop(rig)).await.expect("an engine stops without a panic");
}

fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn every_row_is_in_every_step() {
        const N_STEPS: usize = 60;
        let progress = ProgressDisplay::new(Format::Json);
        // However late a guest takes its token, and with room for all steps in which one has not begun yet.
        let mut rig = Rig::with_patience(4, 4 * 100_000, PATIENCE).expect("a rig");
        let contexts = contexts(&rig, 4, 100, &progress).await.expect("contexts");
        let first = rig.desk.n_steps();
        rig.pull(contexts, Runs::Endless);
        let is_whole = |step: &Between| (step.n_rows, step.n_tokens) == (4, 4);
        let mut n_steps = N_STEPS;
        let steps = loop {
            let steps = rig.steps(first, n_steps, PATIENCE, |_| ()).await.expect("steps");
            assert_eq!(steps.len(), n_steps, "the engine stands still");
            let since_all = steps.iter().position(is_whole).map_or(&[][..], |begin| &steps[begin..]);
            if since_all.len() >= N_STEPS {
                break since_all[..N_STEPS].to_vec();
            }
            n_steps *= 2;
        };
        let whole = steps.iter().copied().filter(is_whole).count();
        assert!(whole >= 50, "{whole} of {}", steps.len());
        assert!(steps.iter().all(|step| step.host > Duration::ZERO), "the engine does something");
        end(rig).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn all_beams_of_a_search_are_in_its_steps() {
        let case = search(3, 40, &ProgressDisplay::new(Format::Json)).await.expect("a search");
        assert_eq!((case.n_rows, case.context_len), (3, 40));
        // Those of the prompt, and the step after it where two rows have most of what goes on.
        assert!(case.n_steps * 10 > case.n_steps_seen * 9, "{case:?}");
        assert!(case.median_us > 0.0, "the engine does something");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_fork_is_seen_on_both_sides() {
        let progress = ProgressDisplay::new(Format::Json);
        let fork = fork::of(1_000, 5, &progress).await.expect("forks");
        assert_eq!((fork.n_tokens, fork.n_forks), (1_000, 5));
        assert!(fork.caller_us > 0.0 && fork.engine_us.is_finite(), "{fork:?}");
    }
}
