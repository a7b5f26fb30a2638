//! The reference of the host API: a chapter for each interface of the WIT package, out of its doc comments.

use std::fmt::Write as _;
use std::path::Path;

use wit_parser::{
    Docs, Function, FunctionKind, Handle, Interface, PackageId, Resolve, Type, TypeDef, TypeDefKind, TypeId,
    WorldId, WorldItem, WorldKey,
};

/// A chapter.
#[derive(Debug)]
pub(super) struct Chapter {
    /// The name of its interface or world, and of its file.
    pub(super) name: String,
    /// Its text.
    pub(super) markdown: String,
}

/// A chapter for the world of the package in this folder, then one for each interface, in the order of their names.
///
/// # Panics
/// The package is not whole, or something in it lacks its doc comment.
#[must_use]
pub(super) fn chapters(folder: &Path) -> Vec<Chapter> {
    let mut resolve = Resolve::new();
    let (package, _) = resolve.push_dir(folder).unwrap_or_else(|error| panic!("{error:?}"));
    let reference = Reference { resolve, package };
    let package = &reference.resolve.packages[package];
    let worlds = package.worlds.iter().map(|(name, &id)| (name, reference.world(id)));
    let mut interfaces: Vec<_> = package.interfaces.iter().collect();
    interfaces.sort();
    let interfaces = interfaces.into_iter().map(|(name, &id)| (name, reference.interface(name, id)));
    worlds.chain(interfaces).map(|(name, markdown)| Chapter { name: name.clone(), markdown }).collect()
}

struct Reference {
    resolve: Resolve,
    package: PackageId,
}

impl Reference {
    fn world(&self, id: WorldId) -> String {
        let world = &self.resolve.worlds[id];
        let package = &self.resolve.packages[self.package].name;
        let mut text = format!("# The world `{}`\n\nPackage `{package}`.\n\n", world.name);
        text.push_str(&prose(&world.docs, &world.name));
        text.push_str("It imports:\n\n");
        for (key, item) in &world.imports {
            let (WorldKey::Interface(_), WorldItem::Interface { id, .. }) = (key, item) else {
                panic!("the world imports interfaces alone")
            };
            let interface = &self.resolve.interfaces[*id];
            let name = interface.name.as_deref().expect("it has a name");
            let docs = prose(&interface.docs, name);
            let first = docs.split("\n\n").next().unwrap_or_default();
            writeln!(text, "- [`{name}`]({name}.md): {first}").expect("a string takes all");
        }
        text.push_str("\nIt exports:\n\n");
        for item in world.exports.values() {
            match item {
                WorldItem::Function(function) => text.push_str(&self.function(function, "##")),
                WorldItem::Interface { id, .. } => {
                    let name = self.resolve.interfaces[*id].name.as_deref().expect("it has a name");
                    writeln!(text, "- [`{name}`]({name}.md)").expect("a string takes all");
                }
                WorldItem::Type { .. } => panic!("the world exports functions and interfaces alone"),
            }
        }
        text
    }

    fn interface(&self, name: &str, id: wit_parser::InterfaceId) -> String {
        let interface = &self.resolve.interfaces[id];
        let mut text = format!("# `{name}`\n\n{}", prose(&interface.docs, name));
        let of_no_type = |function: &&Function| function.kind.resource().is_none();
        for function in interface.functions.values().filter(of_no_type) {
            text.push_str(&self.function(function, "##"));
        }
        for (name, &id) in &interface.types {
            text.push_str(&self.definition(interface, name, id));
        }
        text
    }

    /// A type, unless it is another interface's.
    fn definition(&self, interface: &Interface, name: &str, id: TypeId) -> String {
        let TypeDef { kind, docs, .. } = &self.resolve.types[id];
        let (keyword, items) = match kind {
            TypeDefKind::Type(Type::Id(_)) => return String::new(),
            TypeDefKind::Type(other) => {
                return alias(name, &self.type_name(other), docs);
            }
            TypeDefKind::Tuple(_) => return alias(name, &self.shape(kind), docs),
            TypeDefKind::Record(record) => {
                let item = |field: &wit_parser::Field| {
                    (format!("{}: {}", field.name, self.type_name(&field.ty)), field.docs.clone())
                };
                ("record", record.fields.iter().map(item).collect())
            }
            TypeDefKind::Variant(variant) => {
                let item = |case: &wit_parser::Case| {
                    let payload = case.ty.as_ref().map(|ty| format!("({})", self.type_name(ty)));
                    (format!("{}{}", case.name, payload.unwrap_or_default()), case.docs.clone())
                };
                ("variant", variant.cases.iter().map(item).collect())
            }
            TypeDefKind::Enum(cases) => {
                ("enum", cases.cases.iter().map(|case| (case.name.clone(), case.docs.clone())).collect())
            }
            TypeDefKind::Resource => {
                let mut text = format!("## resource `{name}`\n\n{}", prose(docs, name));
                let own =
                    interface.functions.values().filter(|function| function.kind.resource() == Some(id));
                own.for_each(|function| text.push_str(&self.function(function, "###")));
                return text;
            }
            other => panic!("{name} is a {}, of which the reference has none", other.as_str()),
        };
        let items: Vec<(String, Docs)> = items;
        let mut text = format!("## {keyword} `{name}`\n\n{}", prose(docs, name));
        for (item, docs) in items {
            let docs = docs.contents.map(|docs| format!(": {}", one_line(&docs))).unwrap_or_default();
            writeln!(text, "- `{item}`{docs}").expect("a string takes all");
        }
        text.push('\n');
        text
    }

    fn function(&self, function: &Function, heading: &str) -> String {
        let name = match &function.kind {
            FunctionKind::Constructor(_) => "constructor",
            _ => function.item_name(),
        };
        let is_static = matches!(function.kind, FunctionKind::Static(_));
        let of_a_value = matches!(function.kind, FunctionKind::Method(_) | FunctionKind::Constructor(_));
        let own = usize::from(matches!(function.kind, FunctionKind::Method(_)));
        let parameters: Vec<String> = function.params[own..]
            .iter()
            .map(|parameter| format!("{}: {}", parameter.name, self.type_name(&parameter.ty)))
            .collect();
        let result = function.result.as_ref().filter(|_| name != "constructor");
        let result = result.map(|ty| format!(" -> {}", self.type_name(ty))).unwrap_or_default();
        let keyword = if is_static && !of_a_value { "static func" } else { "func" };
        let shape = match name {
            "constructor" => format!("constructor({})", parameters.join(", ")),
            name => format!("{name}: {keyword}({}){result}", parameters.join(", ")),
        };
        format!("{heading} `{name}`\n\n```wit\n{shape};\n```\n\n{}", prose(&function.docs, name))
    }

    fn type_name(&self, ty: &Type) -> String {
        let plain = match ty {
            Type::Bool => "bool",
            Type::U8 => "u8",
            Type::U16 => "u16",
            Type::U32 => "u32",
            Type::U64 => "u64",
            Type::S8 => "s8",
            Type::S16 => "s16",
            Type::S32 => "s32",
            Type::S64 => "s64",
            Type::F32 => "f32",
            Type::F64 => "f64",
            Type::Char => "char",
            Type::String => "string",
            Type::ErrorContext => "error-context",
            Type::Id(id) => return self.named(*id),
        };
        plain.to_owned()
    }

    fn named(&self, id: TypeId) -> String {
        let TypeDef { name, kind, .. } = &self.resolve.types[id];
        if let Some(name) = name {
            return name.clone();
        }
        self.shape(kind)
    }

    /// What a type is made of.
    fn shape(&self, kind: &TypeDefKind) -> String {
        let some = |ty: &Option<Type>| ty.as_ref().map_or("_".to_owned(), |ty| self.type_name(ty));
        match kind {
            TypeDefKind::Handle(Handle::Borrow(id)) => format!("borrow<{}>", self.named(*id)),
            TypeDefKind::Handle(Handle::Own(id)) => self.named(*id),
            TypeDefKind::List(ty) => format!("list<{}>", self.type_name(ty)),
            TypeDefKind::Option(ty) => format!("option<{}>", self.type_name(ty)),
            TypeDefKind::Result(result) => match (&result.ok, &result.err) {
                (None, None) => "result".to_owned(),
                (ok, None) => format!("result<{}>", some(ok)),
                (ok, err) => format!("result<{}, {}>", some(ok), some(err)),
            },
            TypeDefKind::Tuple(tuple) => {
                let types: Vec<String> = tuple.types.iter().map(|ty| self.type_name(ty)).collect();
                format!("tuple<{}>", types.join(", "))
            }
            other => panic!("a {} without a name", other.as_str()),
        }
    }
}

fn alias(name: &str, shape: &str, docs: &Docs) -> String {
    format!("## type `{name}`\n\n```wit\ntype {name} = {shape};\n```\n\n{}", prose(docs, name))
}

/// A doc comment as paragraphs.
fn prose(docs: &Docs, name: &str) -> String {
    let text = docs.contents.as_deref().unwrap_or_else(|| panic!("{name} has no doc comment"));
    format!("{}\n\n", text.trim())
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
