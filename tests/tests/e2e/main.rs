//! Everything that is tested end to end, in one program: one link instead of a dozen, and one file to carry to a
//! machine with a GPU.

mod agents;
mod aligned;
mod attacks;
mod authors;
mod bad_input;
mod beams;
mod cancels;
mod card;
mod chat;
mod cli;
mod code;
mod concurrency;
mod constraints;
mod descriptors;
mod detached;
mod doctor;
mod drains;
mod dropped;
mod dtypes;
mod evictions;
mod failing;
mod forks;
mod full;
mod fuzz;
mod goldens;
mod guesses;
mod guests;
mod guide;
mod hidden;
mod hostile;
mod identity;
mod isolation;
mod killed;
mod late;
mod leaving;
mod limits;
mod loads;
mod looks;
mod managed;
mod mixes;
mod mixtures;
mod old;
mod on_demand;
mod paces;
mod parity;
mod particles;
mod permissions;
mod policies;
mod policy;
mod posteriors;
mod pressure;
mod priority;
mod profiles;
mod programs;
mod queues;
mod recordings;
mod reload;
mod saved;
mod schedules;
mod searches;
mod seen;
mod shares;
mod shown;
mod signals;
mod simulation;
mod soak;
mod speculation;
mod start_check;
mod steering;
mod steering_goldens;
mod streams;
mod swaps;
mod tidy;
mod top;
mod tour;
mod upgrade;
mod watermarks;

/// The `trellis` binary under test.
fn exe() -> &'static str {
    trellis_tests::pack::exe(env!("CARGO_BIN_EXE_trellis-under-test"))
}
