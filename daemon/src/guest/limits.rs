//! What a guest may use.

use documented::DocumentedFields;
use serde::{Deserialize, Serialize};
use trellis_engine::account::{BESIDE_OTHERS, Budget, USER, most_beside_others};
use trellis_wire::{OUTPUT_BYTES_MAX, OUTPUT_OVERHEAD_BYTES};

use super::error::GuestError;
use super::runtime::pool_bytes;

/// Every limit of a guest and of the daemon's house for guests, each enforced.
///
/// The bounds on tokens, pages and contexts are those of one guest; they lie inside those of its session and
/// its user, which come with the accounts that a guest is started with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, DocumentedFields)]
#[serde(default, deny_unknown_fields)]
pub struct GuestLimits {
    /// Bytes of linear memory, summed over all memories of a guest.
    pub memory_bytes: usize,
    /// Linear memories of a guest.
    pub n_memories: u32,
    /// Tables of a guest.
    pub n_tables: u32,
    /// Elements of tables, summed over all tables of a guest.
    pub n_table_elements: usize,
    /// Core module instances of a guest.
    pub n_instances: u32,
    /// Bytes of a component. Those of Python and JavaScript have nearly 20 MB, most of which is the language's own.
    pub component_bytes: usize,
    /// Processor time to compile one component, of all threads that compile it, in whole seconds upwards; by the clock it may be three
    /// times that, and ten seconds.
    pub compile_ms: u64,
    /// Bytes of memory that the process that compiles may write to. When absent 2 GiB, or where that is more than a quarter of the machine's
    /// memory, or of what the daemon's control group may have, for all that compile at once, a part of that quarter: `n_compiles` and the one
    /// more for a user that has none make `n_compiles` + 1 parts. In a file 128 MiB at least.
    pub compile_memory_bytes: Option<u64>,
    /// Bytes of compiled code that one component may become.
    pub compiled_bytes: usize,
    /// Components compiled at once; those of one user take all of these places, and there is one more for a user that has none.
    pub n_compiles: usize,
    /// Components that wait to be compiled; those of one user take half of these places at most, and beside others no more than
    /// are left. A user with none there finds a place, also where all are taken.
    pub n_compiles_queued: usize,
    /// Compiled components kept ready in memory. Of the user who has most, the least recently used goes first.
    pub n_programs: usize,
    /// Bytes of memory of all components kept ready: of each twice the length of its compiled code, and where guests have processes
    /// of their own three times in the daemon, which keeps what it sends them. Of the user whose components take
    /// most, the least recently used goes first.
    pub program_bytes: usize,
    /// Bytes of compiled components kept on disk; the least recently used go first.
    pub cache_bytes: u64,
    /// Processor time of a guest: its own code, and host functions while they do not wait.
    pub cpu_ms: u64,
    /// Time of a guest in which it does not wait for a message. A launch may bound its time by the clock.
    pub deadline_ms: u64,
    /// Time in which a guest waits for messages, of all its waits together.
    pub idle_ms: u64,
    /// Bytes of memory of a process of guests, its code and what it keeps of models included, where `isolation` gives each user
    /// a process: what it has in memory, not what it has set aside and never used. When absent 4 GiB, or a third of the machine's
    /// memory, or of what the daemon's control group may have, where that is less; in a file 512 MiB at least. All of them together
    /// may have half of it: beyond that the one that has most is ended.
    pub process_memory_bytes: Option<u64>,
    /// Host objects (models, contexts, samplers, streams, ...) that a guest holds at once.
    pub n_handles: usize,
    /// Bytes that a guest passes to the host in one call. More is refused; sixteen times as much ends the guest. A dense bias
    /// goes in one call, with four bytes for each token of the vocabulary.
    pub call_bytes: usize,
    /// Bytes of the arguments of a launch.
    pub argument_bytes: usize,
    /// Contexts that a guest has open; a beam search has one for each beam and one besides.
    pub n_contexts: u64,
    /// Bytes of host memory for the token lists of its contexts, ten a token, for its masks, an eighth for each token of the
    /// vocabulary, for its grammars, for what generations have drawn that it has not taken, and for long arguments and answers of
    /// the call under way.
    pub host_bytes: u64,
    /// Bytes of a grammar.
    pub constraint_bytes: usize,
    /// Symbols in the rules of a grammar, once they are written out.
    pub constraint_symbols: usize,
    /// States of a grammar's lexer, over all masks.
    pub constraint_states: usize,
    /// Time to work out the mask of one draw: counted in steps that take so long on a processor of 2020, not measured.
    pub constraint_mask_ms: u64,
    /// Processor time to compile a grammar, in whole seconds upwards. Grammars of guests that run in the daemon are tried out first, in a
    /// process of their own that has no more; by the clock it may be ten times that, and ten seconds.
    pub constraint_compile_ms: u64,
    /// Bytes of memory to compile a grammar, in such a process.
    pub constraint_memory_bytes: u64,
    /// KV pages that a guest's contexts hold.
    pub n_pages: u64,
    /// Tokens computed for a guest.
    pub n_tokens: u64,
    /// Bytes sent to the client and not yet read by it: the most credit that a client may give.
    pub output_bytes_in_flight: usize,
    /// Bytes of log lines; what comes after is dropped and counted.
    pub log_bytes: u64,
    /// Bytes of a guest's recording that wait: for the client to read them, or for the end of the call in which they were
    /// sent. A guest waits for its client long before that, where its calls can wait; past it the guest is ended.
    pub recording_bytes: usize,
    /// Messages of the client that wait for the guest to receive them.
    pub n_messages: usize,
    /// Bytes of those messages.
    pub inbox_bytes: usize,
    /// Guests that run at once.
    pub n_guests: u32,
    /// Guests of one user that run at once. Beside others a user has no more than are left for the next one.
    pub n_guests_per_user: u32,
}

impl Default for GuestLimits {
    fn default() -> Self {
        Self {
            memory_bytes: 256 << 20,
            n_memories: 2,
            n_tables: 8,
            n_table_elements: 20_000,
            n_instances: 16,
            component_bytes: 32 << 20,
            compile_ms: 60_000,
            compile_memory_bytes: None,
            compiled_bytes: 64 << 20,
            n_compiles: 2,
            n_compiles_queued: 16,
            n_programs: 64,
            program_bytes: 256 << 20,
            cache_bytes: 1 << 30,
            cpu_ms: 60_000,
            deadline_ms: 600_000,
            idle_ms: 14_400_000,
            process_memory_bytes: None,
            n_handles: 1024,
            call_bytes: 2 << 20,
            argument_bytes: 256 << 10,
            n_contexts: 1024,
            host_bytes: 64 << 20,
            constraint_bytes: 256 << 10,
            constraint_symbols: 100_000,
            constraint_states: 20_000,
            constraint_mask_ms: 100,
            constraint_compile_ms: 4_000,
            constraint_memory_bytes: 256 << 20,
            n_pages: 65_536,
            n_tokens: 10_000_000,
            output_bytes_in_flight: 4 << 20,
            log_bytes: 256 << 10,
            recording_bytes: 8 << 20,
            n_messages: 64,
            inbox_bytes: 1 << 20,
            n_guests: 256,
            n_guests_per_user: 128,
        }
    }
}

/// What the daemon's other processes may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ProcessBytes {
    /// One that compiles.
    pub(crate) compile: u64,
    /// One of a user's guests.
    pub(crate) guests: u64,
    /// Those of all users' guests together.
    pub(crate) all_guests: u64,
}

impl ProcessBytes {
    /// What the budget of a user may promise of the process of its guests, so that a guest hears of the budget before the process
    /// is ended with all of them.
    pub(crate) fn for_budgets(self) -> u64 {
        self.guests.saturating_sub(OWN_BYTES).max(self.guests / 2)
    }
}

/// What one that compiles needs at most, and what one of guests has where there is plenty.
const COMPILE_BYTES: u64 = 2 << 30;
const PROCESS_BYTES: u64 = 4 << 30;

/// The least that one that compiles is given: a component of one megabyte needs 96 MiB, one without code 16 MiB.
pub(crate) const COMPILE_BYTES_LEAST: u64 = 128 << 20;

/// What a process of guests needs for itself, and the least that one is given. It is in no budget: programs
/// (`program_bytes`), tokenizers, threads, and the runtime, of which an idle one has 20 MiB in memory, and 40 MiB set aside beside
/// its pools.
pub(crate) const OWN_BYTES: u64 = 512 << 20;

/// What of the machine's memory those have that compile at once, one process of guests, and all of them.
const COMPILES_PART: u64 = 4;
const PROCESS_PART: u64 = 3;
const PROCESSES_PART: u64 = 2;

impl GuestLimits {
    /// What the daemon's other processes may have on a machine, or in a control group, with so much memory.
    pub(crate) fn process_bytes(&self, memory_bytes: u64) -> ProcessBytes {
        let n_compiles = self.n_compiles.max(1) as u64 + 1;
        let compile = memory_bytes / COMPILES_PART / n_compiles;
        let guests = self.process_memory_bytes.unwrap_or((memory_bytes / PROCESS_PART).min(PROCESS_BYTES));
        ProcessBytes {
            compile: self.compile_memory_bytes.unwrap_or(compile.min(COMPILE_BYTES)),
            guests,
            // An operator that gives one more than that means it.
            all_guests: (memory_bytes / PROCESSES_PART).max(guests),
        }
    }

    /// Whether a user who may have `of_user` guests, and has `n_user` of all `n_all` that run, may have another one: beside others no
    /// more than would then be left for the next user.
    ///
    /// # Errors
    /// There are too many.
    pub(crate) fn check_numbers(&self, of_user: u32, n_user: u32, n_all: u32) -> Result<(), GuestError> {
        let of_all = self.n_guests;
        // The last place is for who has none.
        let most = (most_beside_others(of_user.into(), n_all.into(), of_all.into(), 1) as u32).max(1);
        let checks = [(USER, n_user, of_user), ("daemon", n_all, of_all), (BESIDE_OTHERS, n_user, most)];
        match checks.into_iter().find(|&(_, running, limit)| running >= limit) {
            Some((level, running, limit)) => Err(GuestError::TooManyGuests { level, running, limit }),
            None => Ok(()),
        }
    }

    /// What holds in the process of one user's guests: nothing is laid out for more than those.
    pub(crate) fn of_one_user(&self) -> Self {
        Self { n_guests: self.n_guests.min(self.n_guests_per_user), ..self.clone() }
    }

    /// Bytes of data at which the system refuses more to a process of guests that is ended when it has `memory_bytes` in memory.
    ///
    /// The system counts what is set aside, used or not: the pools, and memories of guests that have ended until their places are
    /// taken again. So this lies well behind: as far as `memory_bytes` again, within bounds. What takes memory faster than anybody
    /// looks comes no further than this.
    pub(crate) fn process_data_bytes(&self, memory_bytes: u64) -> u64 {
        let margin = memory_bytes.clamp(OWN_BYTES, PROCESS_BYTES);
        pool_bytes(&self.of_one_user()).saturating_add(memory_bytes).saturating_add(margin)
    }

    /// Bytes that the arguments of a launch take, those of the list included.
    ///
    /// # Errors
    /// They are too many.
    pub(crate) fn check_arguments(&self, arguments: &[String]) -> Result<usize, GuestError> {
        let n_bytes = arguments.iter().map(String::len).sum();
        if n_bytes > self.argument_bytes {
            return Err(GuestError::ArgumentsTooLarge { n_bytes, limit_bytes: self.argument_bytes });
        }
        // Empty ones take room in a list as well.
        Ok(n_bytes + size_of_val(arguments))
    }

    /// The guest's own account.
    #[must_use]
    pub fn budget(&self) -> Budget {
        let Self { n_tokens, n_pages, n_contexts, host_bytes, .. } = *self;
        Budget { n_tokens, n_pages, n_contexts, host_bytes }
    }

    /// Components of one user that wait to be compiled.
    pub(crate) fn n_compiles_queued_per_user(&self) -> usize {
        self.n_compiles_queued.div_ceil(2)
    }

    /// The most bytes of one piece of a text or a token list. A quarter of what may be in flight, so that a
    /// client which grants credit in halves never starves its guest.
    pub(crate) fn output_piece_bytes(&self) -> usize {
        (self.output_bytes_in_flight / 4).saturating_sub(OUTPUT_OVERHEAD_BYTES).clamp(4, 16 << 10)
    }

    /// The most bytes of an output that cannot be cut into pieces.
    pub(crate) fn output_whole_bytes(&self) -> usize {
        self.output_bytes_in_flight.saturating_sub(OUTPUT_OVERHEAD_BYTES).min(OUTPUT_BYTES_MAX)
    }
}

#[cfg(test)]
mod tests {
    use trellis_engine::sampling::beams::N_BEAMS_MAX;

    use super::*;

    #[test]
    fn the_widest_search_fits_beside_other_contexts() {
        let GuestLimits { n_contexts, host_bytes, .. } = GuestLimits::default();
        let n_beams = N_BEAMS_MAX as u64;
        assert!(n_contexts > 1 + n_beams + 256);
        // With 1,000 tokens each, and what the search writes down of them.
        assert!(n_beams * 1_000 * (36 + 10) < host_bytes);
    }

    #[test]
    fn a_user_has_no_more_guests_than_are_left_for_the_next() {
        let limits = GuestLimits { n_guests: 12, n_guests_per_user: 6, ..GuestLimits::default() };
        let most = |n_others: u32| (0..).find(|&n| limits.check_numbers(6, n, n_others + n).is_err());
        assert_eq!([0, 6, 9, 11, 12].map(most), [Some(6), Some(3), Some(1), Some(1), Some(0)]);
        let of_one_user = limits.of_one_user();
        let fewer = (0..).find(|&n| limits.check_numbers(2, n, n).is_err());
        assert_eq!(fewer, Some(2), "as its class says");
        assert_eq!((0..).find(|&n| of_one_user.check_numbers(6, n, n).is_err()), Some(6));
    }

    fn of(limits: &GuestLimits, n_gib: u64) -> ProcessBytes {
        limits.process_bytes(n_gib << 30)
    }

    #[test]
    fn other_processes_have_parts_of_the_memory_there_is() {
        let gib = 1 << 30;
        let limits = GuestLimits::default();
        let plenty = ProcessBytes { compile: 2 * gib, guests: 4 * gib, all_guests: 32 * gib };
        assert_eq!(of(&limits, 64), plenty);
        let little = ProcessBytes { compile: gib / 4, guests: gib, all_guests: 3 * gib / 2 };
        assert_eq!(of(&limits, 3), little);
        let said =
            GuestLimits { compile_memory_bytes: Some(7), process_memory_bytes: Some(9 * gib), ..limits };
        let as_said = ProcessBytes { compile: 7, guests: 9 * gib, all_guests: 9 * gib };
        assert_eq!(of(&said, 3), as_said);
    }

    #[test]
    fn budgets_refuse_before_a_process_is_ended_and_the_system_after_that() {
        let (mib, gib) = (1 << 20, 1 << 30);
        let limits = GuestLimits::default();
        for (n_bytes, for_budgets, margin) in [
            (512 * mib, 256 * mib, 512 * mib),
            (gib, 512 * mib, gib),
            (4 * gib, 3584 * mib, 4 * gib),
            (64 * gib, 64 * gib - 512 * mib, 4 * gib),
        ] {
            let said = GuestLimits { process_memory_bytes: Some(n_bytes), ..limits.clone() };
            assert_eq!(of(&said, 8).for_budgets(), for_budgets);
            let set_aside = said.process_data_bytes(n_bytes) - pool_bytes(&said.of_one_user());
            assert_eq!(set_aside, n_bytes + margin);
        }
    }

    #[test]
    fn a_number_for_each_token_of_a_large_vocabulary_fits_a_call() {
        let GuestLimits { call_bytes, recording_bytes, .. } = GuestLimits::default();
        // Of Gemma; with what goes along.
        let n_bytes = 262_144 * size_of::<f32>() + 64;
        assert!(n_bytes <= call_bytes && 4 * n_bytes <= recording_bytes);
    }
}
