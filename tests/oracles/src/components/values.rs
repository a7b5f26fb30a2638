//! Arguments: values of the types of the host API, right ones mostly, as they lie in a guest's memory or on its stack.

use arbitrary::{Result, Unstructured};
use wit_parser::abi::{FlatTypes, WasmType};
use wit_parser::{Int, Type, TypeDefKind};

use super::wit::World;

/// The memory of a generated guest: first a page for what calls return, then one of what arguments are made of, then the heap. What
/// the host writes, be it where a wrong address says, is far from what arguments are made of.
pub(super) const RETURNED: u32 = 1024;
pub(super) const IMAGE: u32 = 64 << 10;
pub(super) const IMAGE_BYTES_MAX: u32 = 48 << 10;
pub(super) const HEAP: u32 = 128 << 10;
pub(super) const MEMORY_PAGES: u32 = 4;

/// Objects of a kind that a guest has at hand.
pub(super) const N_SLOTS: u32 = 2;

/// Names under which contexts are saved: no others, so that they can be forgotten.
pub(super) const SAVED_NAMES: [&str; 3] = ["a", "b", "c"];

/// The longest list that is made.
const N_ITEMS_MAX: u8 = 4;

const TEXTS: [&[u8]; 16] = [
    b"",
    b"tiny",
    b"draft",
    b"The capital of France is",
    b"user",
    b"assistant",
    b"system",
    b"What is 37 + 48?",
    b"{\"type\": \"integer\"}",
    b"{\"enum\": [\"yes\", \"no\"]}",
    b"[0-9]{1,4}",
    b"start: \"a\" start | \"b\"",
    b"<|end|>",
    b"{\"a\": [1, 2.5, null]}",
    b"\xf0\x9f\x90\x94 \xc3\xa9",
    b"broken \xff\xc0 text",
];

const NUMBERS: [f32; 10] =
    [0.0, 1.0, 0.5, 0.9, -1.0, 2.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MIN_POSITIVE];

/// 32 bits.
#[derive(Clone, Copy, Debug)]
pub(super) enum Word {
    Const(u32),
    /// The handle in this variable.
    Slot(u32),
    /// What lies here when the call is made.
    Load(u32),
}

/// A value of a type.
#[derive(Debug)]
pub(super) enum Value {
    Word(Word),
    /// An integer of another width.
    Bits(u64),
    Float(u32),
    /// A list or a text: where it begins and how long it is.
    Span(Word, Word),
    /// A record or a tuple.
    Fields(Vec<Self>),
    /// A case of a variant, an option, a result or an enum.
    Case(u32, Option<Box<Self>>),
}

/// A value on the stack.
#[derive(Clone, Copy, Debug)]
pub(super) enum Flat {
    I32(Word),
    I64(u64),
    /// 32 bits where others of the type have 64.
    Wide(Word),
    F32(u32),
    F64(u64),
}

/// What arguments are made of.
pub(super) struct Maker<'a, 'b> {
    pub(super) world: &'a World,
    pub(super) bytes: &'a mut Unstructured<'b>,
    /// What lies at [`IMAGE`].
    pub(super) image: Vec<u8>,
    /// Words that are stored before the call: what is only known then.
    pub(super) pokes: Vec<(u32, Word)>,
    /// Variables whose handles the call is made with.
    pub(super) needs: Vec<u32>,
    /// Of 256 things that could be wrong, how many are.
    pub(super) n_wrong: u8,
}

impl Maker<'_, '_> {
    pub(super) fn byte(&mut self) -> Result<u8> {
        self.bytes.arbitrary()
    }

    fn below(&mut self, n: usize) -> Result<usize> {
        Ok(usize::from(self.byte()?) % n)
    }

    pub(super) fn is_wrong(&mut self) -> Result<bool> {
        Ok(self.n_wrong > 0 && self.byte()? > u8::MAX - self.n_wrong)
    }

    fn number(&mut self) -> Result<u32> {
        Ok(match self.byte()? {
            byte @ 0..200 => u32::from(byte % 12),
            byte @ 200..232 => 8 * u32::from(byte - 200),
            232..248 => self.bytes.arbitrary::<u16>()?.into(),
            248..254 => self.bytes.arbitrary()?,
            _ => u32::MAX,
        })
    }

    /// A number, or one of those that the last call has returned.
    fn word(&mut self) -> Result<Word> {
        Ok(match self.byte()? {
            byte @ 0..24 => Word::Load(RETURNED + 4 * u32::from(byte % 6)),
            _ => Word::Const(self.number()?),
        })
    }

    /// Room for so many bytes in the image; where there is none, its beginning, at which nothing else lies.
    pub(super) fn room(&mut self, n_bytes: u32, boundary: u32) -> u32 {
        let start = (self.image.len() as u32).next_multiple_of(boundary);
        if start + n_bytes > IMAGE_BYTES_MAX {
            return IMAGE;
        }
        self.image.resize((start + n_bytes) as usize, 0);
        IMAGE + start
    }

    fn put(&mut self, address: u32, bytes: &[u8]) {
        self.image[(address - IMAGE) as usize..][..bytes.len()].copy_from_slice(bytes);
    }

    fn put_word(&mut self, address: u32, word: Word) {
        match word {
            Word::Const(number) => self.put(address, &number.to_le_bytes()),
            Word::Slot(_) | Word::Load(_) => self.pokes.push((address, word)),
        }
    }

    pub(super) fn text_of(&mut self, text: &[u8]) -> Value {
        let start = self.room(text.len() as u32, 1);
        if start == IMAGE {
            return Value::Span(Word::Const(start), Word::Const(0));
        }
        self.put(start, text);
        Value::Span(Word::Const(start), Word::Const(text.len() as u32))
    }

    /// A value of a type.
    pub(super) fn value(&mut self, ty: &Type) -> Result<Value> {
        Ok(match ty {
            Type::Bool => Value::Bits(u64::from(self.byte()? & 1)),
            Type::U8 | Type::S8 => Value::Bits((self.number()? & 0xff).into()),
            Type::U16 | Type::S16 => Value::Bits((self.number()? & 0xffff).into()),
            Type::U32 | Type::S32 => Value::Word(self.word()?),
            Type::Char => Value::Word(Word::Const(self.bytes.arbitrary::<u16>()?.into())),
            Type::U64 | Type::S64 if self.is_wrong()? => Value::Bits(self.bytes.arbitrary()?),
            Type::U64 | Type::S64 => Value::Bits(self.number()?.into()),
            Type::F32 if self.is_wrong()? => Value::Float(self.bytes.arbitrary()?),
            Type::F32 => Value::Float(NUMBERS[self.below(NUMBERS.len())?].to_bits()),
            Type::F64 => Value::Bits(self.bytes.arbitrary()?),
            Type::String if self.is_wrong()? => self.wrong_span()?,
            Type::String => {
                let text = TEXTS[self.below(TEXTS.len())?];
                self.text_of(text)
            }
            Type::Id(id) => {
                let world = self.world;
                let (kind, name) = world.definition(*id);
                match name {
                    Some("definition") if self.byte()? >= 64 => self.program(),
                    _ => self.defined(kind)?,
                }
            }
            Type::ErrorContext => unreachable!("the host API has none"),
        })
    }

    fn defined(&mut self, kind: &TypeDefKind) -> Result<Value> {
        Ok(match kind {
            TypeDefKind::Type(ty) => self.value(ty)?,
            TypeDefKind::Record(record) => {
                Value::Fields(record.fields.iter().map(|field| self.value(&field.ty)).collect::<Result<_>>()?)
            }
            TypeDefKind::Tuple(tuple) => {
                Value::Fields(tuple.types.iter().map(|ty| self.value(ty)).collect::<Result<_>>()?)
            }
            TypeDefKind::Enum(cases) => self.case(&vec![None; cases.cases.len()])?,
            TypeDefKind::Variant(variant) => {
                let cases: Vec<Option<Type>> = variant.cases.iter().map(|case| case.ty).collect();
                self.case(&cases)?
            }
            TypeDefKind::Option(ty) => self.case(&[None, Some(*ty)])?,
            TypeDefKind::Result(result) => self.case(&[result.ok, result.err])?,
            TypeDefKind::List(_) if self.is_wrong()? => self.wrong_span()?,
            TypeDefKind::List(ty) => self.list(ty)?,
            TypeDefKind::Handle(handle) => Value::Word(self.handle(self.world.kind(*handle))?),
            other => unreachable!("the host API has no {other:?}"),
        })
    }

    fn case(&mut self, cases: &[Option<Type>]) -> Result<Value> {
        if self.is_wrong()? {
            return Ok(Value::Case(cases.len() as u32 + u32::from(self.byte()?), None));
        }
        let case = self.below(cases.len())?;
        let payload = cases[case].as_ref().map(|ty| self.value(ty)).transpose()?;
        Ok(Value::Case(case as u32, payload.map(Box::new)))
    }

    fn list(&mut self, ty: &Type) -> Result<Value> {
        let n = match self.byte()? {
            // What the last call returned, if it was a list: of whatever it is.
            0..12 => return Ok(Value::Span(Word::Load(RETURNED + 4), Word::Load(RETURNED + 8))),
            byte => byte % (N_ITEMS_MAX + 1),
        };
        let values: Vec<Value> = (0..n).map(|_| self.value(ty)).collect::<Result<_>>()?;
        Ok(self.list_of(ty, &values))
    }

    fn list_of(&mut self, ty: &Type, values: &[Value]) -> Value {
        let (n_bytes, boundary) = self.world.layout(ty);
        let start = self.room(n_bytes * values.len() as u32, boundary);
        if start == IMAGE {
            return Value::Span(Word::Const(start), Word::Const(0));
        }
        for (idx, value) in values.iter().enumerate() {
            self.store(ty, value, start + n_bytes * idx as u32);
        }
        Value::Span(Word::Const(start), Word::Const(values.len() as u32))
    }

    /// An object of the kind, of another one, or none.
    fn handle(&mut self, kind: usize) -> Result<Word> {
        if self.is_wrong()? {
            return Ok(match self.byte()? % 3 {
                0 => Word::Slot(self.below(N_SLOTS as usize * self.world.kinds.len())? as u32),
                _ => Word::Const(self.number()?),
            });
        }
        let slot = N_SLOTS * kind as u32 + u32::from(self.byte()?) % N_SLOTS;
        self.needs.push(slot);
        Ok(Word::Slot(slot))
    }

    /// A list or a text that lies beyond the memory, across its end, or on no boundary.
    pub(super) fn wrong_span(&mut self) -> Result<Value> {
        let end = MEMORY_PAGES << 16;
        let (start, len) = match self.byte()? % 6 {
            0 => (self.bytes.arbitrary()?, self.number()?),
            1 => (end - 3, 9),
            2 => (IMAGE + 1, 3),
            3 => (IMAGE, u32::MAX >> (self.byte()? % 16)),
            4 => (u32::MAX - 3, 8),
            // Long, within the memory.
            _ => (HEAP, 100_000),
        };
        Ok(Value::Span(Word::Const(start), Word::Const(len)))
    }

    /// A logit program that is right: the most probable token.
    fn program(&mut self) -> Value {
        let definition =
            self.world.resolve.types.iter().find(|(_, ty)| ty.name.as_deref() == Some("operation"));
        let (id, ty) = definition.expect("where there are definitions there are operations");
        let TypeDefKind::Variant(operation) = &ty.kind else { unreachable!("operations are cases") };
        let case = |name: &str| operation.cases.iter().position(|case| case.name == name).expect(name) as u32;
        let operations =
            [Value::Case(case("logits"), None), Value::Case(case("argmax"), Some(Box::new(Value::Bits(0))))];
        let operations = self.list_of(&Type::Id(id), &operations);
        let nothing = || Value::Span(Word::Const(IMAGE), Word::Const(0));
        Value::Fields(vec![operations, Value::Bits(1), nothing(), nothing(), nothing()])
    }

    /// Puts a value into the image.
    pub(super) fn store(&mut self, ty: &Type, value: &Value, address: u32) {
        let world = self.world;
        match value {
            Value::Word(word) => self.put_word(address, *word),
            Value::Float(bits) => self.put(address, &bits.to_le_bytes()),
            Value::Bits(bits) => {
                let (n_bytes, _) = world.layout(ty);
                self.put(address, &bits.to_le_bytes()[..n_bytes as usize]);
            }
            Value::Span(start, len) => {
                self.put_word(address, *start);
                self.put_word(address + 4, *len);
            }
            Value::Fields(values) => {
                let types = parts(world, ty);
                for ((offset, ty), value) in world.offsets(&types).into_iter().zip(values) {
                    self.store(ty, value, address + offset);
                }
            }
            Value::Case(case, payload) => {
                let (tag, cases) = cases(world, ty);
                let n_bytes = match tag {
                    Int::U8 => 1,
                    Int::U16 => 2,
                    Int::U32 | Int::U64 => 4,
                };
                self.put(address, &case.to_le_bytes()[..n_bytes]);
                if let Some(payload) = payload {
                    let offset = world.sizes.payload_offset(tag, cases.iter().map(Option::as_ref));
                    let ty = cases[*case as usize].expect("what has a value has a type");
                    self.store(&ty, payload, address + offset.size_wasm32() as u32);
                }
            }
        }
    }

    /// A value on the stack.
    pub(super) fn flatten(&self, ty: &Type, value: &Value, flat: &mut Vec<Flat>) {
        match value {
            Value::Word(word) => flat.push(Flat::I32(*word)),
            Value::Float(bits) => flat.push(Flat::F32(*bits)),
            Value::Bits(bits) => flat.push(match ty {
                Type::U64 | Type::S64 => Flat::I64(*bits),
                Type::F64 => Flat::F64(*bits),
                Type::Id(id) => return self.flatten(&named(self.world.definition(*id).0), value, flat),
                _ => Flat::I32(Word::Const(*bits as u32)),
            }),
            Value::Span(start, len) => flat.extend([Flat::I32(*start), Flat::I32(*len)]),
            Value::Fields(values) => {
                let types = parts(self.world, ty);
                types.iter().zip(values).for_each(|(ty, value)| self.flatten(ty, value, flat));
            }
            Value::Case(case, payload) => {
                let mut storage = [WasmType::I32; 64];
                let mut wanted = FlatTypes::new(&mut storage);
                assert!(self.world.resolve.push_flat(ty, &mut wanted), "a variant has few numbers");
                flat.push(Flat::I32(Word::Const(*case)));
                let mut of_case = Vec::new();
                if let Some(payload) = payload {
                    let ty = cases(self.world, ty).1[*case as usize].expect("what has a value has a type");
                    self.flatten(&ty, payload, &mut of_case);
                }
                let padded = of_case.into_iter().map(Some).chain(std::iter::repeat(None));
                let wanted = wanted.to_vec();
                flat.extend(wanted[1..].iter().zip(padded).map(|(&ty, flat)| joined(flat, ty)));
            }
        }
    }
}

/// The type that a name stands for, where that is no record and the like.
fn named(kind: &TypeDefKind) -> Type {
    match kind {
        TypeDefKind::Type(ty) => *ty,
        other => unreachable!("{other:?} is no integer"),
    }
}

/// The types of a record's or a tuple's parts.
fn parts(world: &World, ty: &Type) -> Vec<Type> {
    let Type::Id(id) = ty else { unreachable!("{ty:?} has no parts") };
    match world.definition(*id).0 {
        TypeDefKind::Record(record) => record.fields.iter().map(|field| field.ty).collect(),
        TypeDefKind::Tuple(tuple) => tuple.types.clone(),
        other => unreachable!("{other:?} has no parts"),
    }
}

/// The tag and the types of a variant's cases, or of what is one.
fn cases(world: &World, ty: &Type) -> (Int, Vec<Option<Type>>) {
    let Type::Id(id) = ty else { unreachable!("{ty:?} has no cases") };
    match world.definition(*id).0 {
        TypeDefKind::Variant(variant) => (variant.tag(), variant.cases.iter().map(|case| case.ty).collect()),
        TypeDefKind::Enum(cases) => (cases.tag(), vec![None; cases.cases.len()]),
        TypeDefKind::Option(ty) => (Int::U8, vec![None, Some(*ty)]),
        TypeDefKind::Result(result) => (Int::U8, vec![result.ok, result.err]),
        other => unreachable!("{other:?} has no cases"),
    }
}

/// A number of a case where those of other cases may be of another type.
fn joined(flat: Option<Flat>, wanted: WasmType) -> Flat {
    let is_wide = matches!(wanted, WasmType::I64 | WasmType::PointerOrI64);
    match (flat, wanted) {
        (None, WasmType::F32) => Flat::F32(0),
        (None, WasmType::F64) => Flat::F64(0),
        (None, _) if is_wide => Flat::I64(0),
        (None, _) => Flat::I32(Word::Const(0)),
        (Some(Flat::I32(Word::Const(number))), _) if is_wide => Flat::I64(number.into()),
        (Some(Flat::I32(word)), _) if is_wide => Flat::Wide(word),
        (Some(Flat::F32(bits)), _) if is_wide => Flat::I64(bits.into()),
        (Some(Flat::F64(bits)), _) if is_wide => Flat::I64(bits),
        (Some(Flat::F32(bits)), WasmType::I32 | WasmType::Pointer | WasmType::Length) => {
            Flat::I32(Word::Const(bits))
        }
        (Some(flat), _) => flat,
    }
}
