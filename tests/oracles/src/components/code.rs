//! The functions of a generated guest.

use std::collections::BTreeMap;

use wasm_encoder::{BlockType, Function, InstructionSink, MemArg, ValType};

use super::module::{Allocator, Calling, Deed, Fault, Kept, Manner, Plan};
use super::values::{Flat, HEAP, N_SLOTS, RETURNED, Word};
use super::wit::World;
use wit_parser::abi::WasmType;

/// Globals: where the heap ends, and how often the host has asked for memory.
const HEAP_END: u32 = 0;
const N_ASKED: u32 = 1;

/// Functions by their numbers.
pub(super) struct Names<'a> {
    pub(super) imports: &'a BTreeMap<(&'a str, &'a str), u32>,
    pub(super) recursion: u32,
}

fn at(offset: u32, align: u32) -> MemArg {
    MemArg { offset: offset.into(), align, memory_index: 0 }
}

fn push(word: Word, code: &mut InstructionSink<'_>) {
    match word {
        Word::Const(number) => code.i32_const(number.cast_signed()),
        Word::Slot(slot) => code.local_get(slot),
        Word::Load(address) => code.i32_const(address.cast_signed()).i32_load(at(0, 2)),
    };
}

fn push_flat(flat: Flat, code: &mut InstructionSink<'_>) {
    match flat {
        Flat::I32(word) => push(word, code),
        Flat::Wide(word) => {
            push(word, code);
            code.i64_extend_i32_u();
        }
        Flat::I64(bits) => _ = code.i64_const(bits.cast_signed()),
        Flat::F32(bits) => _ = code.f32_const(f32::from_bits(bits).into()),
        Flat::F64(bits) => _ = code.f64_const(f64::from_bits(bits).into()),
    }
}

/// Memory for the host: what lies behind the heap, as long as the allocator is honest.
pub(super) fn allocator(plan: &Plan<'_>, names: &Names<'_>) -> Function {
    let Allocator { n_honest, then } = plan.allocator;
    // The old address and length, the boundary, the new length; and a variable.
    let (boundary, n_bytes, start) = (2, 3, 4);
    let mut function = Function::new([(1, ValType::I32)]);
    let mut code = function.instructions();
    code.global_get(N_ASKED).i32_const(n_honest.cast_signed()).i32_ge_u().if_(BlockType::Empty);
    match then {
        Manner::Null => _ = code.i32_const(0).return_(),
        Manner::Beyond => _ = code.i32_const(-16).return_(),
        Manner::Misaligned => _ = code.i32_const((HEAP + 1).cast_signed()).return_(),
        Manner::Again => _ = code.i32_const(HEAP.cast_signed()).return_(),
        Manner::Trap => _ = code.unreachable(),
        Manner::Call => {
            // What it imports that takes nothing, or one that calls itself.
            let calls = plan
                .world
                .calls
                .iter()
                .filter(|call| call.signature.params.is_empty() && !call.signature.results.is_empty());
            let mut calls = calls.filter_map(|call| {
                let idx = names.imports.get(&(call.module.as_str(), call.name.as_str()))?;
                Some(*idx)
            });
            match calls.next() {
                Some(idx) => _ = code.call(idx).drop(),
                None => _ = code.i32_const(1).call(names.recursion).drop(),
            }
        }
    }
    code.end();
    code.global_get(N_ASKED).i32_const(1).i32_add().global_set(N_ASKED);
    // Rounded up to the boundary.
    code.global_get(HEAP_END).local_get(boundary).i32_add().i32_const(1).i32_sub();
    code.i32_const(0).local_get(boundary).i32_sub().i32_and().local_tee(start);
    code.local_get(n_bytes).i32_add().global_set(HEAP_END);
    code.global_get(HEAP_END).memory_size(0).i32_const(16).i32_shl().i32_gt_u().if_(BlockType::Empty);
    code.local_get(n_bytes).i32_const(16).i32_shr_u().i32_const(1).i32_add().memory_grow(0);
    code.i32_const(-1).i32_eq().if_(BlockType::Empty).unreachable().end();
    code.end();
    code.local_get(start).end();
    function
}

/// Variables of `run` beside those of handles.
struct Variables {
    n_left: u32,
    word: u32,
    long: u32,
}

/// All that the guest does.
pub(super) fn run(plan: &Plan<'_>, names: &Names<'_>) -> Function {
    let n_slots = N_SLOTS * plan.world.kinds.len() as u32;
    let variables = Variables { n_left: n_slots, word: n_slots + 1, long: n_slots + 2 };
    let mut function = Function::new([(n_slots + 2, ValType::I32), (1, ValType::I64)]);
    let mut code = function.instructions();
    for deed in &plan.deeds {
        match deed {
            Deed::Call(calling) => call(calling, plan.world, names, &variables, &mut code),
            Deed::Drop { kind, slot, is_guarded, is_forgotten } => {
                let kind = &plan.world.kinds[*kind];
                let idx = names.imports[&(kind.module.as_str(), kind.drop.as_str())];
                code.block(BlockType::Empty);
                if *is_guarded {
                    code.local_get(*slot).i32_eqz().br_if(0);
                }
                code.local_get(*slot).call(idx);
                if *is_forgotten {
                    code.i32_const(0).local_set(*slot);
                }
                code.end();
            }
            Deed::Grow(n_pages) => _ = code.i32_const(n_pages.cast_signed()).memory_grow(0).drop(),
            Deed::Poke(address, word) => {
                code.i32_const(address.cast_signed()).i32_const(word.cast_signed()).i32_store(at(0, 0));
            }
            Deed::End(fault) => end(*fault, names, &mut code),
        }
    }
    let returned = plan.returned;
    let mut put = |offset: u32, number: u32| {
        code.i32_const((RETURNED + offset).cast_signed()).i32_const(number.cast_signed()).i32_store(at(0, 0));
    };
    put(0, returned.tag);
    put(4, returned.start);
    put(8, returned.len);
    code.i32_const(returned.address.cast_signed()).end();
    function
}

fn call(
    calling: &Calling,
    world: &World,
    names: &Names<'_>,
    variables: &Variables,
    code: &mut InstructionSink<'_>,
) {
    let Calling { call, arguments, pokes, needs, n_times, kept } = calling;
    let call = &world.calls[*call];
    code.block(BlockType::Empty);
    for slot in needs {
        code.local_get(*slot).i32_eqz().br_if(0);
    }
    code.i32_const((*n_times).into()).local_set(variables.n_left).loop_(BlockType::Empty);
    for (address, word) in pokes {
        code.i32_const(address.cast_signed());
        push(*word, code);
        code.i32_store(at(0, 0));
    }
    arguments.iter().for_each(|flat| push_flat(*flat, code));
    code.call(names.imports[&(call.module.as_str(), call.name.as_str())]);
    match (kept, call.signature.results.as_slice()) {
        (Some(Kept::Returned { slot }), _) => _ = code.local_set(*slot),
        (Some(Kept::InResult { offset, slot }), _) => {
            code.i32_const(RETURNED.cast_signed()).i32_load8_u(at(0, 0)).i32_eqz().if_(BlockType::Empty);
            code.i32_const(RETURNED.cast_signed()).i32_load(at(*offset, 2)).local_set(*slot).end();
        }
        (None, []) => {}
        // Where later calls find it.
        (None, [WasmType::I64 | WasmType::PointerOrI64]) => {
            code.local_set(variables.long).i32_const(RETURNED.cast_signed());
            code.local_get(variables.long).i64_store(at(8, 3));
        }
        (None, [WasmType::F32 | WasmType::F64]) => _ = code.drop(),
        (None, _) => {
            code.local_set(variables.word).i32_const(RETURNED.cast_signed());
            code.local_get(variables.word).i32_store(at(4, 2));
        }
    }
    code.local_get(variables.n_left).i32_const(1).i32_sub().local_tee(variables.n_left).br_if(0);
    code.end().end();
}

fn end(fault: Fault, names: &Names<'_>, code: &mut InstructionSink<'_>) {
    match fault {
        Fault::Unreachable => _ = code.unreachable(),
        Fault::Division => _ = code.i32_const(1).i32_const(0).i32_div_u().drop(),
        Fault::OutOfBounds => _ = code.i32_const(-1).i32_load(at(0, 0)).drop(),
        Fault::Recursion => _ = code.i32_const(1).call(names.recursion).drop(),
        Fault::Loop => _ = code.loop_(BlockType::Empty).br(0).end(),
    }
}
