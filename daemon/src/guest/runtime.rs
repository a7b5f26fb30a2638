//! The wasm runtime: what is switched on, and the caps of its pools.

use std::num::NonZeroUsize;

use wasmtime::component::Linker;
use wasmtime::{
    Config, Engine, InstanceAllocationStrategy, OptLevel, PoolingAllocationConfig, Strategy,
    WasmBacktraceDetails,
};

use super::bindings::Guest;
use super::error::GuestError;
use super::host::{GuestV0_1, HasTape, Taped};
use super::limits::GuestLimits;
use super::store::GuestState;
use super::ticker::Ticker;
use super::wasi;

/// Stack of wasm code.
const WASM_STACK_BYTES: usize = 512 << 10;

/// Stack of a guest's fiber; what wasm leaves of it is for host functions, of which the tokenizer's regular
/// expressions and the chat template recurse deepest.
const FIBER_STACK_BYTES: usize = 2 << 20;

/// Address space of one linear memory: all that 32 bits reach, so that compiled code needs no bounds checks.
const MEMORY_RESERVATION_BYTES: u64 = 4 << 30;

/// Unmapped bytes after a memory, so that constant offsets need no bounds checks either.
const MEMORY_GUARD_BYTES: u64 = 32 << 20;

/// Frames of a backtrace, of a trap or of a sample of a profile, from the innermost out.
const N_BACKTRACE_FRAMES: usize = 32;

/// Memory slots that stay mapped for components that may come again.
const N_WARM_SLOTS: u32 = 64;

/// A page of the system, by which tables are laid out. Where pages are larger, tables take more; the margin behind has room.
const PAGE_BYTES: usize = 4 << 10;

/// Metadata of one component instance, its core instances included.
const INSTANCE_BYTES: usize = 1 << 20;

/// Everything that decides what compiled code looks like. The compiling process and the daemon both build
/// their engine from this.
fn code_config() -> Result<Config, GuestError> {
    let mut config = Config::new();
    config
        .strategy(Strategy::Cranelift)
        .cranelift_opt_level(OptLevel::Speed)
        .parallel_compilation(true)
        .native_unwind_info(cfg!(windows))
        .wasm_backtrace_max_frames(NonZeroUsize::new(N_BACKTRACE_FRAMES))
        .wasm_backtrace_details(WasmBacktraceDetails::Disable)
        .epoch_interruption(true)
        .max_wasm_stack(WASM_STACK_BYTES)
        .async_stack_size(FIBER_STACK_BYTES)
        .async_stack_zeroing(true)
        .memory_reservation(MEMORY_RESERVATION_BYTES)
        .memory_guard_size(MEMORY_GUARD_BYTES)
        .memory_init_cow(true)
        .table_lazy_init(true)
        .concurrency_support(false)
        .gc_support(false)
        .shared_memory(false)
        .wasm_component_model(true)
        .wasm_gc(false)
        .wasm_memory64(false)
        .wasm_multi_memory(false)
        .wasm_tail_call(false)
        .wasm_relaxed_simd(false)
        .wasm_custom_page_sizes(false)
        .wasm_wide_arithmetic(false);
    Ok(config)
}

/// The engine of the compiling process: the same code, no pools.
pub(crate) fn compiling_engine() -> Result<Engine, GuestError> {
    Engine::new(&code_config()?).map_err(runtime_error)
}

/// The daemon's engine, its pools capped so that all guests together fit.
fn running_engine(limits: &GuestLimits) -> Result<Engine, GuestError> {
    let mut pool = PoolingAllocationConfig::new();
    let total = |n_each: u32| limits.n_guests.saturating_mul(n_each);
    pool.total_component_instances(limits.n_guests)
        .max_component_instance_size(INSTANCE_BYTES)
        .max_core_instances_per_component(limits.n_instances)
        .max_memories_per_component(limits.n_memories)
        .max_tables_per_component(limits.n_tables)
        .total_core_instances(total(limits.n_instances))
        .max_core_instance_size(INSTANCE_BYTES)
        .total_memories(total(limits.n_memories))
        .max_memories_per_module(1)
        .max_memory_size(limits.memory_bytes.min(MEMORY_RESERVATION_BYTES as usize))
        .total_tables(total(limits.n_tables))
        .max_tables_per_module(limits.n_tables)
        .table_elements(limits.n_table_elements)
        .total_stacks(limits.n_guests)
        .max_unused_warm_slots(N_WARM_SLOTS)
        // What is kept of memories, tables and stacks that ended is kept of as many as there ever were at once: nothing but a page
        // of a table, which is less than most guests have.
        .linear_memory_keep_resident(0)
        .table_keep_resident(PAGE_BYTES)
        .async_stack_keep_resident(0);
    let mut config = code_config()?;
    config.allocation_strategy(InstanceAllocationStrategy::Pooling(pool));
    Engine::new(&config).map_err(runtime_error)
}

/// Bytes of data that the pools set aside before the first guest: stacks and tables, which can be written to from the start.
/// Memories are reserved without that.
pub(crate) fn pool_bytes(limits: &GuestLimits) -> u64 {
    let table = limits.n_table_elements.saturating_mul(size_of::<usize>());
    let table = table.checked_next_multiple_of(PAGE_BYTES).unwrap_or(usize::MAX) as u64;
    let of_guest = table.saturating_mul(limits.n_tables.into()).saturating_add(FIBER_STACK_BYTES as u64);
    of_guest.saturating_mul(limits.n_guests.into())
}

/// The engine, what guests are linked to, and the ticker that interrupts them.
pub(crate) struct Runtime {
    pub(crate) engine: Engine,
    pub(crate) linker: Linker<GuestState>,
    pub(crate) ticker: Ticker,
}

impl Runtime {
    /// `look` is called with each epoch.
    pub(crate) fn new(limits: &GuestLimits, look: impl Fn() + Send + 'static) -> Result<Self, GuestError> {
        let engine = running_engine(limits)?;
        let mut linker = Linker::new(&engine);
        Guest::add_to_linker::<GuestState, HasTape>(&mut linker, |state| Taped(state))
            .map_err(runtime_error)?;
        GuestV0_1::add_to_linker::<GuestState, HasTape>(&mut linker, |state| Taped(state))
            .map_err(runtime_error)?;
        wasi::add_to_linker(&mut linker).map_err(runtime_error)?;
        let ticker = Ticker::start(&engine, look)?;
        Ok(Self { engine, linker, ticker })
    }
}

fn runtime_error(error: wasmtime::Error) -> GuestError {
    GuestError::Runtime { reason: format!("{error:#}") }
}
