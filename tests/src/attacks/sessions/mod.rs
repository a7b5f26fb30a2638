//! Sessions that are opened, used and dropped, at every moment of a session, many of them.
//!
//! [`MOMENTS`] has the moments by name; a seed says which comes when. [`visit`] is one client after the other, several at once, and
//! [`run`] is that by processes of several users, with a look at all that the daemon holds before and afterwards.

mod moments;
mod run;
mod visit;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde::{Deserialize, Serialize};

use self::visit::Visit;
use super::processes::Tally;
use super::{Ending, Site};
use crate::engines::Random;

pub use moments::{MOMENTS, Moment};
pub use run::{Report, be_visitors, config, run};

/// How the sessions of each moment ended: well where the moment was reached.
pub type ByMoment = BTreeMap<String, Tally>;

/// Sessions of one user.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Visits {
    /// How many.
    pub n_sessions: usize,
    /// How many at once.
    pub n_at_once: usize,
    /// What says which moment comes when.
    pub seed: u64,
}

/// Opens, uses and drops these sessions. `done` counts those that are over.
///
/// # Errors
/// A session panics.
pub async fn visit(site: &Site, visits: Visits, done: Arc<AtomicUsize>) -> std::io::Result<ByMoment> {
    let next = Arc::new(AtomicUsize::new(0));
    let clients: Vec<_> = (0..visits.n_at_once)
        .map(|_| tokio::spawn(visit_by_turns(site.clone(), visits, next.clone(), done.clone())))
        .collect();
    let mut all = ByMoment::new();
    for client in clients {
        for (moment, tally) in client.await.map_err(std::io::Error::other)? {
            all.entry(moment).or_default().add(tally);
        }
    }
    Ok(all)
}

async fn visit_by_turns(
    site: Site,
    visits: Visits,
    next: Arc<AtomicUsize>,
    done: Arc<AtomicUsize>,
) -> ByMoment {
    let mut seen = ByMoment::new();
    loop {
        let number = next.fetch_add(1, Ordering::Relaxed);
        if number >= visits.n_sessions {
            return seen;
        }
        let chance = Random(visits.seed ^ (number as u64).rotate_left(32)).draw();
        let moment = moment_of(visits.seed, number);
        let ending = (moment.reach)(Visit { site: site.clone(), chance }).await;
        let ending = ending.unwrap_or_else(|error| Ending::wrong(error.to_string()));
        seen.entry(moment.name.to_owned()).or_default().note(ending, 1);
        done.fetch_add(1, Ordering::Relaxed);
    }
}

/// The moment of the session of this number: each once, in an order that the seed says, before any comes again.
fn moment_of(seed: u64, number: usize) -> Moment {
    let (round, place) = (number / MOMENTS.len(), number % MOMENTS.len());
    let mut random = Random(seed.wrapping_mul(31).wrapping_add(round as u64));
    let mut order: Vec<usize> = (0..MOMENTS.len()).collect();
    for idx in (1..order.len()).rev() {
        order.swap(idx, random.below(idx + 1));
    }
    MOMENTS[order[place]]
}

/// What is wrong with how they ended.
#[must_use]
pub fn complaints(seen: &ByMoment) -> Vec<String> {
    let not_well = seen.iter().flat_map(|(moment, tally)| {
        let ends = tally.by_end.values().filter(|(ending, _)| !ending.is_well());
        ends.map(move |(ending, n)| format!("{moment}: {n} x {}: {}", ending.short(), ending.message))
    });
    not_well.collect()
}
