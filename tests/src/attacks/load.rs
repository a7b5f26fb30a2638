//! Attacks by components: what they are, how they come, and what it takes to compile them.

use super::Attacker::{Client, Component};
use super::clients::uploads;
use super::ends::{
    CHUNK, COMPONENT, FOREIGN, HASH, INVALID, REFUSED, UNASKED, UPLOADED, WELL, WELL_OR_REFUSED,
};
use super::{Attack, Category, ClientFn, End, components};

const fn component(name: &'static str, make: fn() -> Vec<u8>, ends: &'static [End]) -> Attack {
    Attack::new(Category::Load, name, Component(make), ends).brief()
}

const fn client(name: &'static str, client: ClientFn, ends: &'static [End]) -> Attack {
    Attack::new(Category::Load, name, Client(client), ends).brief()
}

pub(super) const ATTACKS: &[Attack] = &[
    component("not-webassembly", components::not_webassembly, INVALID),
    component("core-module", components::core_module, INVALID),
    component("empty-component", components::empty_component, INVALID),
    component("header-and-rubbish", components::header_and_rubbish, INVALID),
    component("run-of-another-type", components::run_of_another_type, INVALID),
    component("exports-of-90000", components::many_exports, INVALID),
    component("import-of-90-kb", components::long_import, REFUSED_OR_FOREIGN),
    component("imports-of-files", components::imports_of_processes, FOREIGN),
    component("import-of-another-type", components::import_of_another_type, INVALID),
    component("functions-of-30000", components::many_functions, WELL_OR_REFUSED),
    component("function-of-60000", components::long_function, WELL_OR_REFUSED),
    component("branch-tables", components::branch_tables, WELL_OR_REFUSED),
    component("locals-of-40000", components::many_locals, WELL_OR_REFUSED),
    component("blocks-in-blocks", components::deep_blocks, WELL_OR_REFUSED),
    component("components-in-components", components::nested_components, WELL_OR_REFUSED),
    component("components-too-deep", components::nested_too_deep, REFUSED),
    component("types-that-double", components::doubling_types, WELL_OR_REFUSED),
    component("types-of-100000", components::many_types, WELL_OR_REFUSED),
    component("segments-of-90000", components::many_segments, WELL_OR_REFUSED),
    component("data-of-12-mb", components::much_data, WELL_OR_REFUSED),
    component("instances-of-40", components::many_instances, REFUSED),
    component("memories-of-3", components::three_memories, REFUSED),
    component("memory-of-4-gib", components::memory_of_4_gib, MEMORY_OR_REFUSED),
    component("table-of-all", components::huge_table, MEMORY_OR_REFUSED),
    component("memory-of-64-bits", components::memory_of_64_bits, REFUSED),
    component("shared-memory", components::shared_memory, REFUSED),
    component("start-that-traps", components::start_that_traps, TRAPPED_AT_START),
    component("component-of-many-aliases", components::many_aliases, WELL_OR_REFUSED),
    component("names-of-escapes", components::names_of_escapes, INVALID_OR_FOREIGN),
    client("component-too-long", uploads::component_too_long, COMPONENT),
    client("component-of-2-63", uploads::component_of_2_63, COMPONENT),
    client("component-of-none", uploads::component_of_none, INVALID),
    client("wrong-hash", uploads::wrong_hash, HASH),
    client("more-than-announced", uploads::more_than_announced, UPLOADED),
    client("chunk-too-long", uploads::chunk_too_long, CHUNK),
    client("chunks-unasked", uploads::chunks_unasked, UNASKED),
    client("chunks-for-nobody", uploads::chunks_for_nobody, WELL),
    client("chunks-of-nothing", uploads::chunks_of_nothing, WELL),
    client("upload-twice-at-once", uploads::twice_at_once, WELL),
    client("upload-and-leave", uploads::leave, WELL).copies(super::N_COPIES),
    client("upload-again-and-again", uploads::again_and_again, WELL).copies(super::N_COPIES),
    client("uploads-that-never-go-on", uploads::never_go_on, WELL).alone().copies(1),
    client("component-cut", uploads::cut, INVALID),
    client("component-flipped", uploads::flipped, FLIPPED),
    client("compile-crowd", uploads::compile_crowd, COMPILED).alone().copies(1),
    client("compile-one-by-many", uploads::compile_one_by_many, WELL).alone().copies(1),
    component("compile-bomb", components::many_functions, WELL_OR_REFUSED).copies(2),
];

const REFUSED_OR_FOREIGN: &[End] = &[
    End { code: "invalid_component", name: None },
    End { code: "incompatible_host", name: None },
    End { code: "limit_exceeded", name: None },
];

const INVALID_OR_FOREIGN: &[End] =
    &[End { code: "invalid_component", name: None }, End { code: "incompatible_host", name: None }];

/// Refused when it is looked at, or when it wants the memory.
const MEMORY_OR_REFUSED: &[End] = &[
    End { code: "invalid_component", name: None },
    End { code: "limit_exceeded", name: None },
    End { code: "compile_failed", name: None },
    End { code: "budget_exceeded", name: None },
    End { code: "guest_trapped", name: None },
];

const TRAPPED_AT_START: &[End] = &[End { code: "guest_trapped", name: None }];

/// One byte of a component that is another may be a byte of a text, or of an instruction.
const FLIPPED: &[End] = &[
    End { code: "invalid_component", name: None },
    End { code: "compile_failed", name: None },
    End { code: "incompatible_host", name: None },
    End { code: "guest_trapped", name: None },
    End { code: "guest_failed", name: None },
    End { code: "ok", name: None },
    End { code: "budget_exceeded", name: None },
    End { code: "deadline_exceeded", name: None },
];

/// Some are compiled, the rest is refused by its number.
const COMPILED: &[End] = &[End { code: "ok", name: None }, End { code: "limit_exceeded", name: None }];
