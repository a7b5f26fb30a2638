//! The host API as a component sees it: what can be called, by which names and with which types.

use include_dir::{Dir, include_dir};
use wit_component::{StringEncoding, metadata};
use wit_parser::abi::{AbiVariant, WasmSignature};
use wit_parser::{
    Handle, LiftLowerAbi, ManglingAndAbi, Resolve, ResourceIntrinsic, SizeAlign, SourceMap, Type,
    TypeDefKind, TypeId, WasmImport, WorldId, WorldItem,
};

static TODAYS: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/../../wit");
static FORMER: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/../../wit/0.1");

/// How core functions are named.
const NAMES: ManglingAndAbi = ManglingAndAbi::Legacy(LiftLowerAbi::Sync);

/// A version of the host API.
pub(super) struct World {
    pub(super) resolve: Resolve,
    pub(super) sizes: SizeAlign,
    /// Its functions, those of its objects included.
    pub(super) calls: Vec<Call>,
    /// Its kinds of objects.
    pub(super) kinds: Vec<Kind>,
    /// What tells the encoder of components the types of all that.
    pub(super) metadata: Vec<u8>,
}

/// A function.
pub(super) struct Call {
    pub(super) module: String,
    pub(super) name: String,
    pub(super) params: Vec<Type>,
    pub(super) result: Option<Type>,
    pub(super) signature: WasmSignature,
}

/// A kind of objects, and the function that drops one.
pub(super) struct Kind {
    id: TypeId,
    pub(super) name: String,
    pub(super) module: String,
    pub(super) drop: String,
}

impl World {
    /// Today's version, or the one that guests of before were built against.
    pub(super) fn new(is_former: bool) -> Self {
        let mut sources = SourceMap::new();
        for file in if is_former { &FORMER } else { &TODAYS }.files() {
            let text = file.contents_utf8().expect("WIT is text");
            sources.push_str(&file.path().display().to_string(), text);
        }
        let group = sources.parse().unwrap_or_else(|(_, error)| panic!("{error}"));
        let mut resolve = Resolve::new();
        let package = resolve.push_group(group).unwrap_or_else(|error| panic!("{error}"));
        let id = resolve.select_world(&[package], Some("guest")).expect("the package has the world");
        let mut sizes = SizeAlign::default();
        sizes.fill(&resolve);
        let (calls, kinds) = imports(&resolve, id);
        let metadata =
            metadata::encode(&resolve, id, StringEncoding::UTF8, None).expect("the world is in order");
        Self { resolve, sizes, calls, kinds, metadata }
    }

    /// Where a function is among all.
    pub(super) fn call(&self, name: &str) -> usize {
        self.calls.iter().position(|call| call.name == name).unwrap_or_else(|| panic!("there is no {name}"))
    }

    /// The kind of objects that a handle is of, by its place among all.
    pub(super) fn kind(&self, handle: Handle) -> usize {
        let (Handle::Own(mut id) | Handle::Borrow(mut id)) = handle;
        while let TypeDefKind::Type(Type::Id(named)) = self.resolve.types[id].kind {
            id = named;
        }
        self.kinds.iter().position(|kind| kind.id == id).expect("a handle is of an object")
    }

    /// A kind of objects by its name.
    pub(super) fn kind_named(&self, name: &str) -> usize {
        self.kinds.iter().position(|kind| kind.name == name).unwrap_or_else(|| panic!("there is no {name}"))
    }

    /// What stands behind a name of a type.
    pub(super) fn definition(&self, mut id: TypeId) -> (&TypeDefKind, Option<&str>) {
        while let TypeDefKind::Type(Type::Id(named)) = self.resolve.types[id].kind {
            id = named;
        }
        let found = &self.resolve.types[id];
        (&found.kind, found.name.as_deref())
    }

    /// Bytes of a value and the boundary that it lies on.
    pub(super) fn layout(&self, ty: &Type) -> (u32, u32) {
        (self.sizes.size(ty).size_wasm32() as u32, self.sizes.align(ty).align_wasm32() as u32)
    }

    /// Where the parts of a record or a tuple lie in it.
    pub(super) fn offsets<'a>(&self, types: impl IntoIterator<Item = &'a Type>) -> Vec<(u32, &'a Type)> {
        let offsets = self.sizes.field_offsets(types);
        offsets.into_iter().map(|(offset, ty)| (offset.size_wasm32() as u32, ty)).collect()
    }
}

fn imports(resolve: &Resolve, world: WorldId) -> (Vec<Call>, Vec<Kind>) {
    let (mut calls, mut kinds) = (Vec::new(), Vec::new());
    for (key, item) in &resolve.worlds[world].imports {
        let WorldItem::Interface { id, .. } = item else { continue };
        let interface = &resolve.interfaces[*id];
        for func in interface.functions.values() {
            let import = WasmImport::Func { interface: Some(key), func };
            let (module, name) = resolve.wasm_import_name(NAMES, import);
            calls.push(Call {
                module,
                name,
                params: func.params.iter().map(|param| param.ty).collect(),
                result: func.result,
                signature: resolve.wasm_signature(AbiVariant::GuestImport, func),
            });
        }
        for (name, &id) in &interface.types {
            if !matches!(resolve.types[id].kind, TypeDefKind::Resource) {
                continue;
            }
            let intrinsic = ResourceIntrinsic::ImportedDrop;
            let import = WasmImport::ResourceIntrinsic { interface: Some(key), resource: id, intrinsic };
            let (module, drop) = resolve.wasm_import_name(NAMES, import);
            kinds.push(Kind { id, name: name.clone(), module, drop });
        }
    }
    (calls, kinds)
}
