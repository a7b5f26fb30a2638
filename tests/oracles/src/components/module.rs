//! Components made of bytes: calls of the host API in an order, and with arguments, that the bytes say.

use std::collections::BTreeMap;

use arbitrary::{Result, Unstructured};
use wasm_encoder::{
    CodeSection, ConstExpr, CustomSection, DataSection, EntityType, ExportKind, ExportSection, Function,
    FunctionSection, GlobalSection, GlobalType, ImportSection, MemorySection, MemoryType, Module,
    TypeSection, ValType,
};
use wit_component::ComponentEncoder;
use wit_parser::abi::WasmType;
use wit_parser::{Type, TypeDefKind};

use super::code;
use super::values::{Flat, HEAP, IMAGE, MEMORY_PAGES, Maker, N_SLOTS, RETURNED, SAVED_NAMES, Value, Word};
use super::wit::World;

/// The most that a guest does.
const N_DEEDS_MAX: usize = 40;

/// How many of 256 things are wrong.
const N_WRONG: [u8; 4] = [0, 2, 8, 48];

/// The function that leaves something behind.
const SAVE: &str = "[method]context.save";

/// Bytes that are changed of a component that is broken.
const N_CHANGED: usize = 3;

/// Something that a guest does.
#[derive(Debug)]
pub(super) enum Deed {
    Call(Calling),
    /// Drops what is in a variable, if anything is; where it forgets that, the handle is used again.
    Drop {
        kind: usize,
        slot: u32,
        is_guarded: bool,
        is_forgotten: bool,
    },
    /// Asks for so many pages of memory.
    Grow(u32),
    /// Writes to memory.
    Poke(u32, u32),
    End(Fault),
}

/// A call.
#[derive(Debug)]
pub(super) struct Calling {
    pub(super) call: usize,
    pub(super) arguments: Vec<Flat>,
    pub(super) pokes: Vec<(u32, Word)>,
    /// Variables that have to hold something, or the call is left out.
    pub(super) needs: Vec<u32>,
    pub(super) n_times: u8,
    pub(super) kept: Option<Kept>,
}

/// Where the object that a call returns is, and the variable that it goes to.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kept {
    /// The call returns its handle.
    Returned { slot: u32 },
    /// The handle lies in memory, where the result is no error.
    InResult { offset: u32, slot: u32 },
}

/// What a guest does wrong beside calls.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fault {
    Unreachable,
    Division,
    OutOfBounds,
    Recursion,
    Loop,
}

/// How the guest's allocator, which the host calls, behaves after so many calls.
#[derive(Clone, Copy, Debug)]
pub(super) struct Allocator {
    pub(super) n_honest: u32,
    pub(super) then: Manner,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Manner {
    Null,
    Beyond,
    Misaligned,
    Again,
    Trap,
    /// Calls the host, which waits for its answer.
    Call,
}

/// How `run` ends: where its result lies, and what that is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Return {
    pub(super) address: u32,
    pub(super) tag: u32,
    pub(super) start: u32,
    pub(super) len: u32,
}

/// The parameters and results of a core function.
type CoreSignature = (Vec<ValType>, Vec<ValType>);

/// What a guest is made of.
pub(super) struct Plan<'a> {
    pub(super) world: &'a World,
    pub(super) deeds: Vec<Deed>,
    pub(super) allocator: Allocator,
    pub(super) returned: Return,
    image: Vec<u8>,
}

/// A component, and whether all of it is as it has to be.
pub(super) struct Made {
    pub(super) wasm: Vec<u8>,
    pub(super) is_whole: bool,
    /// Names of what it calls.
    #[cfg(test)]
    pub(super) names: Vec<String>,
}

/// Makes a component of bytes.
pub(super) fn make(worlds: [&World; 2], input: &[u8]) -> Made {
    let mut bytes = Unstructured::new(input);
    // Of its bits: the API of before or today's, how much is wrong, whether it begins with nothing, whether it is broken.
    let kind: u8 = bytes.arbitrary().expect("zeros do");
    let world = worlds[usize::from(kind % 8 == 7)];
    let mut plan = plan(world, kind, &mut bytes).expect("zeros make a guest");
    let is_whole = kind < 240;
    if !is_whole {
        // What is broken may have other names in it than those that are forgotten.
        let saves =
            |deed: &Deed| matches!(deed, Deed::Call(calling) if world.calls[calling.call].name == SAVE);
        plan.deeds.retain(|deed| !saves(deed));
    }
    let mut wasm = component(&plan);
    if !is_whole {
        for _ in 0..N_CHANGED {
            let (place, by): (u16, u8) = bytes.arbitrary().expect("zeros do");
            let n = wasm.len();
            wasm[usize::from(place) % n] ^= by;
        }
    }
    Made {
        wasm,
        is_whole,
        #[cfg(test)]
        names: plan.called().map(|call| world.calls[call].name.clone()).collect(),
    }
}

fn plan<'a>(world: &'a World, kind: u8, bytes: &mut Unstructured<'_>) -> Result<Plan<'a>> {
    let n_wrong = N_WRONG[usize::from(kind / 8 % 4)];
    let manners =
        [Manner::Null, Manner::Beyond, Manner::Misaligned, Manner::Again, Manner::Trap, Manner::Call];
    let manner: u8 = bytes.arbitrary()?;
    let allocator = Allocator {
        n_honest: if n_wrong == 0 { u32::MAX } else { u32::from(manner / 6) },
        then: manners[usize::from(manner) % manners.len()],
    };
    let image = vec![0; 16];
    let mut maker = Maker { world, bytes, image, pokes: Vec::new(), needs: Vec::new(), n_wrong };
    let mut deeds = if kind & 96 != 96 { beginning(&mut maker) } else { Vec::new() };
    while deeds.len() < N_DEEDS_MAX && !maker.bytes.is_empty() {
        deeds.push(deed(&mut maker)?);
    }
    let returned = returned(&mut maker)?;
    let image = maker.image;
    Ok(Plan { world, deeds, allocator, returned, image })
}

/// What most of the host API is about: a model, a context with some tokens, a sampler.
fn beginning(maker: &mut Maker<'_, '_>) -> Vec<Deed> {
    let world = maker.world;
    let slot = |kind: &str| N_SLOTS * world.kind_named(kind) as u32;
    let Value::Span(start, len) = maker.text_of(b"The capital of France is") else {
        unreachable!("a text is a span")
    };
    let (model, context, sampler) = (slot("model"), slot("context"), slot("sampler"));
    let nothing = Flat::I32(Word::Const(0));
    let result = Flat::I32(Word::Const(RETURNED));
    let calls: [(&str, Vec<Flat>, Option<u32>); 4] = [
        ("[static]model.open", vec![nothing, nothing, nothing, result], Some(model)),
        ("[static]context.create", vec![Flat::I32(Word::Slot(model)), result], Some(context)),
        (
            "[method]context.append-text",
            vec![Flat::I32(Word::Slot(context)), Flat::I32(start), Flat::I32(len), nothing, result],
            None,
        ),
        ("[constructor]sampler", vec![Flat::I64(7)], Some(sampler)),
    ];
    let deed = |(name, arguments, slot): (&str, Vec<Flat>, Option<u32>)| {
        let call = world.call(name);
        let kept = slot.and_then(|slot| kept(world, call, slot % N_SLOTS));
        let needs = arguments.iter().filter_map(|flat| match flat {
            Flat::I32(Word::Slot(slot)) => Some(*slot),
            _ => None,
        });
        let needs = needs.collect();
        Deed::Call(Calling { call, arguments, pokes: Vec::new(), needs, n_times: 1, kept })
    };
    calls.map(deed).into()
}

fn deed(maker: &mut Maker<'_, '_>) -> Result<Deed> {
    let world = maker.world;
    Ok(match maker.byte()? {
        0..228 => Deed::Call(calling(maker)?),
        228..244 => {
            let kind = usize::from(maker.byte()?) % world.kinds.len();
            let slot = N_SLOTS * kind as u32 + u32::from(maker.byte()?) % N_SLOTS;
            // Of another kind than it is dropped as.
            let other = u32::from(maker.byte()?) % (N_SLOTS * world.kinds.len() as u32);
            let slot = if maker.is_wrong()? { other } else { slot };
            let (is_guarded, is_forgotten) = (!maker.is_wrong()?, !maker.is_wrong()?);
            Deed::Drop { kind, slot, is_guarded, is_forgotten }
        }
        244..249 => match maker.is_wrong()? {
            true => Deed::Grow(maker.bytes.arbitrary()?),
            false => Deed::Grow(u32::from(maker.byte()?) % 64),
        },
        249..253 => Deed::Poke(HEAP + u32::from(maker.bytes.arbitrary::<u16>()?), maker.bytes.arbitrary()?),
        _ if !maker.is_wrong()? => Deed::Grow(0),
        _ => {
            use Fault::{Division, Loop, OutOfBounds, Recursion, Unreachable};
            let faults = [Unreachable, Division, OutOfBounds, Recursion, Loop];
            Deed::End(faults[usize::from(maker.byte()?) % faults.len()])
        }
    })
}

fn calling(maker: &mut Maker<'_, '_>) -> Result<Calling> {
    let world = maker.world;
    let idx = usize::from(maker.byte()?) % world.calls.len();
    let call = &world.calls[idx];
    maker.pokes.clear();
    maker.needs.clear();
    let mut values = call.params.iter().map(|ty| maker.value(ty)).collect::<Result<Vec<_>>>()?;
    if call.name == SAVE {
        let name = SAVED_NAMES[usize::from(maker.byte()?) % SAVED_NAMES.len()];
        values[1] = maker.text_of(name.as_bytes());
    }
    let mut arguments = Vec::new();
    if call.signature.indirect_params {
        let (n_bytes, boundary) = {
            let layout = world.sizes.params(&call.params);
            (layout.size.size_wasm32() as u32, layout.align.align_wasm32() as u32)
        };
        let address = maker.room(n_bytes, boundary);
        if address != IMAGE {
            for ((offset, ty), value) in world.offsets(&call.params).into_iter().zip(&values) {
                maker.store(ty, value, address + offset);
            }
        }
        arguments.push(Flat::I32(Word::Const(address)));
    } else {
        call.params.iter().zip(&values).for_each(|(ty, value)| maker.flatten(ty, value, &mut arguments));
    }
    if call.signature.retptr {
        let address = match maker.is_wrong()? {
            true => [3, RETURNED + 1, (MEMORY_PAGES << 16) - 2, u32::MAX - 7][usize::from(maker.byte()?) % 4],
            false => RETURNED,
        };
        arguments.push(Flat::I32(Word::Const(address)));
    }
    // Also where there is nothing to make it with.
    if maker.is_wrong()? {
        maker.needs.clear();
    }
    let n_times = match maker.byte()? {
        byte @ 240.. => byte - 238,
        _ => 1,
    };
    let which = u32::from(maker.byte()?) % N_SLOTS;
    let kept = kept(world, idx, which);
    let (pokes, needs) = (maker.pokes.clone(), maker.needs.clone());
    Ok(Calling { call: idx, arguments, pokes, needs, n_times, kept })
}

/// Where the object is that a call returns, if it returns one; it goes to this variable of its kind.
fn kept(world: &World, call: usize, which: u32) -> Option<Kept> {
    let handle = |ty: &Type| {
        let Type::Id(id) = ty else { return None };
        let TypeDefKind::Handle(handle) = world.definition(*id).0 else { return None };
        Some(N_SLOTS * world.kind(*handle) as u32 + which)
    };
    let result = world.calls[call].result?;
    if let Some(slot) = handle(&result) {
        return Some(Kept::Returned { slot });
    }
    let Type::Id(id) = result else { return None };
    let TypeDefKind::Result(result) = world.definition(id).0 else { return None };
    let slot = handle(result.ok.as_ref()?)?;
    let cases = [result.ok.as_ref(), result.err.as_ref()];
    let offset = world.sizes.payload_offset(wit_parser::Int::U8, cases).size_wasm32() as u32;
    Some(Kept::InResult { offset, slot })
}

fn returned(maker: &mut Maker<'_, '_>) -> Result<Return> {
    let (tag, text) = match maker.byte()? {
        0..200 => (0, maker.text_of(b"")),
        200..250 => (1, maker.text_of(b"it has failed")),
        _ => (u32::from(maker.byte()?), maker.wrong_span()?),
    };
    let Value::Span(Word::Const(start), Word::Const(len)) = text else {
        unreachable!("a text is a span that is known")
    };
    let address = if maker.is_wrong()? { RETURNED + 2 } else { RETURNED };
    Ok(Return { address, tag, start, len })
}

impl Plan<'_> {
    fn called(&self) -> impl Iterator<Item = usize> {
        self.deeds.iter().filter_map(|deed| match deed {
            Deed::Call(calling) => Some(calling.call),
            _ => None,
        })
    }

    /// Names and types of what it imports, each once, in order.
    fn imports(&self) -> BTreeMap<(&str, &str), CoreSignature> {
        let mut imports = BTreeMap::new();
        for call in self.called().map(|call| &self.world.calls[call]) {
            let types = |types: &[WasmType]| types.iter().map(core_type).collect::<Vec<_>>();
            let signature = (types(&call.signature.params), types(&call.signature.results));
            imports.insert((call.module.as_str(), call.name.as_str()), signature);
        }
        for deed in &self.deeds {
            if let Deed::Drop { kind, .. } = deed {
                let kind = &self.world.kinds[*kind];
                imports.insert((&kind.module, &kind.drop), (vec![ValType::I32], Vec::new()));
            }
        }
        imports
    }
}

fn core_type(ty: &WasmType) -> ValType {
    match ty {
        WasmType::I32 | WasmType::Pointer | WasmType::Length => ValType::I32,
        WasmType::I64 | WasmType::PointerOrI64 => ValType::I64,
        WasmType::F32 => ValType::F32,
        WasmType::F64 => ValType::F64,
    }
}

/// The component of a plan.
fn component(plan: &Plan<'_>) -> Vec<u8> {
    let imported = plan.imports();
    let (mut types, mut imports) = (TypeSection::new(), ImportSection::new());
    for (idx, ((module, name), (params, results))) in imported.iter().enumerate() {
        types.ty().function(params.iter().copied(), results.iter().copied());
        imports.import(module, name, EntityType::Function(idx as u32));
    }
    let n = imported.len() as u32;
    let at: BTreeMap<(&str, &str), u32> = imported.keys().copied().zip(0..).collect();

    // The guest's own functions: what the host allocates with, `run`, and one that calls itself.
    types.ty().function([ValType::I32; 4], [ValType::I32]);
    types.ty().function([], [ValType::I32]);
    types.ty().function([ValType::I32], [ValType::I32]);
    let mut functions = FunctionSection::new();
    (n..n + 3).for_each(|ty| _ = functions.function(ty));
    let names = code::Names { imports: &at, recursion: n + 2 };
    let (mut own, mut recursion) = (CodeSection::new(), Function::new([]));
    own.function(&code::allocator(plan, &names)).function(&code::run(plan, &names));
    recursion.instructions().local_get(0).call(n + 2).local_get(0).i32_add().end();
    own.function(&recursion);

    let mut exports = ExportSection::new();
    exports.export("memory", ExportKind::Memory, 0);
    exports.export("cabi_realloc", ExportKind::Func, n);
    exports.export("run", ExportKind::Func, n + 1);
    let mut memories = MemorySection::new();
    memories.memory(MemoryType {
        minimum: MEMORY_PAGES.into(),
        maximum: None,
        memory64: false,
        shared: false,
        page_size_log2: None,
    });
    let mut globals = GlobalSection::new();
    // Where the heap ends, and how often the host has asked for memory.
    for start in [HEAP, 0] {
        let ty = GlobalType { val_type: ValType::I32, mutable: true, shared: false };
        globals.global(ty, &ConstExpr::i32_const(start.cast_signed()));
    }
    let mut data = DataSection::new();
    data.active(0, &ConstExpr::i32_const(IMAGE.cast_signed()), plan.image.iter().copied());

    let mut module = Module::new();
    module.section(&types).section(&imports).section(&functions).section(&memories).section(&globals);
    module.section(&exports).section(&own).section(&data);
    module.section(&CustomSection {
        name: "component-type".into(),
        data: plan.world.metadata.as_slice().into(),
    });
    let encoder = ComponentEncoder::default().validate(cfg!(test)).module(&module.finish());
    encoder.and_then(|mut encoder| encoder.encode()).unwrap_or_else(|error| panic!("{error:#}"))
}
