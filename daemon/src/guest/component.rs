//! From compiled code to a program that can be started: loading, and checking what it wants of the host.

use std::sync::Arc;

use serde::Serialize;
use wasmparser::{Parser, Payload};
use wasmtime::Store;
use wasmtime::component::types::Component as ComponentType;
use wasmtime::component::{Component, InstancePre};
use wasmtime_wasi::p2::bindings::CommandPre;

use super::bindings::GuestPre;
use super::error::GuestError;
use super::limits::GuestLimits;
use super::names;
use super::runtime::Runtime;
use super::store::GuestState;
use super::wasi;
use crate::descriptors;

/// The WIT package that guests are written against.
const PACKAGE: &str = "trellis:host";

/// Its versions, today's first, and the interfaces of each.
const VERSIONS: [(&str, &[&str]); 2] = [
    (
        "0.2.0",
        &[
            "beams",
            "constraints",
            "contexts",
            "decoding",
            "models",
            "programs",
            "samplers",
            "session",
            "streams",
            "types",
        ],
    ),
    ("0.1.1", &["contexts", "decoding", "models", "samplers", "session", "streams", "types"]),
];

/// The version of the WASI interfaces.
const WASI_VERSION: &str = "0.2";

/// The function that a guest exports.
const RUN: &str = "run";

/// The interface that a program with a `main` exports, such as one made of a crate's tests. Where there is `run` as well, as in a
/// test in a file of its own, it is not what the program is for.
const WASI_RUN: &str = "wasi:cli/run";

const WASM_MAGIC: &[u8; 4] = b"\0asm";

/// Wasm's page of linear memory.
const WASM_PAGE_BYTES: u64 = 65_536;

/// What a component asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct About {
    /// Interfaces, with their versions.
    pub imports: Vec<String>,
    /// Whether it has a `main` in the place of `run`.
    pub is_command: bool,
    /// The largest of its memories to begin with.
    pub memory_bytes: usize,
    /// Length of the compiled code.
    pub code_bytes: usize,
}

/// What a component takes of memory, in lengths of its compiled code: once that lies there as it came, and what the runtime knows
/// of functions, or what memories begin with, comes to as much again.
pub(crate) const N_COPIES_OF_CODE: usize = 2;

/// A component that is compiled, linked and ready to start. Cheap to clone.
#[derive(Clone)]
pub struct Program(Arc<Inner>);

struct Inner {
    hash: blake3::Hash,
    n_code_bytes: usize,
    /// For processes of guests, where there are such.
    code: Option<Arc<[u8]>>,
    entry: Entry,
}

/// Where a program begins.
enum Entry {
    /// The function `run` of the world.
    Run(GuestPre<GuestState>),
    /// The `main` of a WASI command, which has its arguments as any program has them.
    Main(CommandPre<GuestState>),
}

impl Entry {
    fn new(pre: InstancePre<GuestState>, is_command: bool) -> wasmtime::Result<Self> {
        Ok(if is_command { Self::Main(CommandPre::new(pre)?) } else { Self::Run(GuestPre::new(pre)?) })
    }
}

impl std::fmt::Debug for Program {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Program").field("hash", &self.0.hash).finish_non_exhaustive()
    }
}

impl Program {
    /// The BLAKE3 hash of the component.
    #[must_use]
    pub fn hash(&self) -> blake3::Hash {
        self.0.hash
    }

    /// Length of the compiled code.
    pub(crate) fn n_code_bytes(&self) -> usize {
        self.0.n_code_bytes
    }

    /// Bytes of memory that it takes, with its code where that was kept.
    pub(crate) fn memory_bytes(&self) -> usize {
        let n_kept = usize::from(self.0.code.is_some());
        (N_COPIES_OF_CODE + n_kept) * self.0.n_code_bytes
    }

    /// Whether nothing else has it: no guest runs it, and none is about to.
    pub(crate) fn is_unused(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }

    /// The same, with its code kept.
    pub(crate) fn with_code(mut self, code: Arc<[u8]>) -> Self {
        // It is nobody else's yet.
        if let Some(inner) = Arc::get_mut(&mut self.0) {
            inner.code = Some(code);
        }
        self
    }

    /// Its code, if that was kept.
    pub(crate) fn code(&self) -> Option<&Arc<[u8]>> {
        self.0.code.as_ref()
    }

    /// What it asks for.
    #[must_use]
    pub fn about(&self) -> About {
        let component = match &self.0.entry {
            Entry::Run(pre) => pre.instance_pre().component(),
            Entry::Main(pre) => pre.instance_pre().component(),
        };
        let component_type = component.component_type();
        let imports = component_type.imports(self.engine()).map(|(name, _)| name.to_owned()).collect();
        let memory = component.resources_required().and_then(|needs| needs.max_initial_memory_size);
        About {
            imports,
            is_command: self.is_command(),
            memory_bytes: usize::try_from(memory.unwrap_or(0) * WASM_PAGE_BYTES).unwrap_or(usize::MAX),
            code_bytes: self.n_code_bytes(),
        }
    }

    /// Whether it is a WASI command.
    pub(crate) fn is_command(&self) -> bool {
        matches!(self.0.entry, Entry::Main(_))
    }

    pub(crate) fn engine(&self) -> &wasmtime::Engine {
        match &self.0.entry {
            Entry::Run(pre) => pre.engine(),
            Entry::Main(pre) => pre.engine(),
        }
    }

    /// Runs it to its end.
    ///
    /// # Errors
    /// It trapped, exited, or was ended by the host. The inner error is its own.
    pub(crate) async fn run(&self, store: &mut Store<GuestState>) -> wasmtime::Result<Result<(), String>> {
        match &self.0.entry {
            Entry::Run(pre) => pre.instantiate_async(&mut *store).await?.call_run(store).await,
            Entry::Main(pre) => {
                let command = pre.instantiate_async(&mut *store).await?;
                let ended = command.wasi_cli_run().call_run(store).await?;
                Ok(ended.map_err(|()| "its `main` failed".to_owned()))
            }
        }
    }

    /// Loads code that came from the compiling process or the cache, and links it.
    pub(crate) fn load(
        runtime: &Runtime,
        limits: &GuestLimits,
        hash: blake3::Hash,
        code: &[u8],
    ) -> Result<Self, GuestError> {
        let component = load_trusted(&runtime.engine, code)?;
        let is_command = check_imports_and_exports(&runtime.engine, &component.component_type())?;
        check_needs(&component, limits)?;
        let wrong_type = |error: wasmtime::Error| match descriptors::are_used_up(error.root_cause()) {
            true => GuestError::NoDescriptors,
            false => GuestError::WrongType { reason: reason(&error) },
        };
        let instance_pre = runtime.linker.instantiate_pre(&component).map_err(wrong_type)?;
        let entry = Entry::new(instance_pre, is_command).map_err(wrong_type)?;
        // The first launch should not pay for the image that memories start from.
        component.initialize_copy_on_write_image().map_err(wrong_type)?;
        Ok(Self(Arc::new(Inner { hash, n_code_bytes: code.len(), code: None, entry })))
    }
}

/// Turns compiled code back into a component.
#[expect(unsafe_code, reason = "wasmtime runs the code as it is; there is no safe way to load it")]
pub(crate) fn load_trusted(engine: &wasmtime::Engine, code: &[u8]) -> Result<Component, GuestError> {
    // SAFETY: `deserialize` asks for bytes that `precompile_component` made. These come either straight from
    // the compiling process, which is this executable with `precompile_component` between its pipes, or from a
    // file of `CodeCache` (in a process of guests, from the daemon that has read it there): its folder has mode 0700 and this user as its owner, only `CodeCache::store` writes
    // there, and a hash at the end of the file shows that all of it was written, for this component. In a build for fuzzers
    // they may come from `precompile_component` in this process, too.
    let component = unsafe { Component::deserialize(engine, code) };
    component.map_err(|error| match descriptors::are_used_up(error.root_cause()) {
        true => GuestError::NoDescriptors,
        false => GuestError::Invalid { reason: reason(&error) },
    })
}

/// What the runtime says, which may quote the component.
fn reason(error: &wasmtime::Error) -> String {
    names::cut(&format!("{error:#}"), names::REASON_BYTES_MAX)
}

/// Tells by the length and the first bytes whether something can be a component at all.
pub(crate) fn check_kind(bytes: &[u8], limits: &GuestLimits) -> Result<(), GuestError> {
    let (n_bytes, limit_bytes) = (bytes.len(), limits.component_bytes);
    if n_bytes > limit_bytes {
        return Err(GuestError::TooLarge { n_bytes, limit_bytes });
    }
    check_format(bytes)
}

/// Checks that a component has no more modules than may be made into instances: for each the runtime keeps an image, and with it a
/// file descriptor, also for one that no instance is made of. Takes some milliseconds for the largest.
pub(crate) fn check_modules(bytes: &[u8], limits: &GuestLimits) -> Result<(), GuestError> {
    let limit = u64::from(limits.n_instances);
    match n_modules(bytes, limit) {
        needed if needed > limit => Err(GuestError::NeedsTooMuch { what: "core modules", needed, limit }),
        _ => Ok(()),
    }
}

/// Core modules in a component and in those within it, up to one more than the limit, as far as it can be read; the compiler says
/// what is wrong with the rest.
fn n_modules(bytes: &[u8], limit: u64) -> u64 {
    let payloads = Parser::new(0).parse_all(bytes).map_while(Result::ok);
    let modules = payloads.filter(|payload| matches!(payload, Payload::ModuleSection { .. }));
    modules.take(limit as usize + 1).count() as u64
}

/// Tells a component from other files by its first bytes.
pub(crate) fn check_format(bytes: &[u8]) -> Result<(), GuestError> {
    // Magic, then a 16-bit version, then a 16-bit layer: 0 for modules, 1 for components.
    match bytes {
        [a, b, c, d, _, _, layer, _, ..] if [*a, *b, *c, *d] == *WASM_MAGIC => {
            if *layer == 0 {
                Err(GuestError::CoreModule)
            } else {
                Ok(())
            }
        }
        _ => Err(GuestError::NotWasm { n_bytes: bytes.len() }),
    }
}

/// Tells whether it is a WASI command.
fn check_imports_and_exports(
    engine: &wasmtime::Engine,
    component: &ComponentType,
) -> Result<bool, GuestError> {
    let imports = component.imports(engine).map(|(name, _)| name);
    check_names(imports, component.exports(engine).map(|(name, _)| name.to_owned()).collect())
}

/// Checks by their names alone what a component imports and exports. Tells whether it is a WASI command.
pub(super) fn check_names<'a>(
    mut imports: impl Iterator<Item = &'a str>,
    exports: Vec<String>,
) -> Result<bool, GuestError> {
    imports.try_for_each(check_import)?;
    let is_command = exports.iter().any(|name| name.split('@').next() == Some(WASI_RUN));
    if !is_command && !exports.iter().any(|name| name == RUN) {
        return Err(GuestError::MissingRun { exports });
    }
    Ok(is_command)
}

/// Checks that the host has an interface of that name, in a version that can stand in for the one asked for.
fn check_import(import: &str) -> Result<(), GuestError> {
    let (name, version) = import.split_once('@').unwrap_or((import, ""));
    let interface = name.strip_prefix(PACKAGE).and_then(|rest| rest.strip_prefix('/'));
    let has = |(_, interfaces): &&(&str, &[&str])| interface.is_some_and(|name| interfaces.contains(&name));
    let versions: Vec<&str> = match wasi::INTERFACES.contains(&name) {
        true => vec![WASI_VERSION],
        false => VERSIONS.iter().filter(has).map(|(version, _)| *version).collect(),
    };
    if versions.is_empty() {
        return Err(GuestError::UnknownImport { import: names::name(import), host: host_interfaces() });
    }
    if versions.iter().any(|host| track(version) == track(host)) {
        return Ok(());
    }
    let host: Vec<String> = versions.iter().map(|version| format!("{name}@{version}")).collect();
    Err(GuestError::WrongVersion { import: names::name(import), host: host.join(" and ") })
}

/// The part of a semantic version within which versions are compatible: the first number that is not 0 and
/// what stands before it.
fn track(version: &str) -> Vec<&str> {
    let mut track = Vec::new();
    for part in version.split('.') {
        track.push(part);
        if part != "0" {
            break;
        }
    }
    track
}

fn host_interfaces() -> Vec<String> {
    let ours = VERSIONS.into_iter().flat_map(|(version, interfaces)| {
        interfaces.iter().map(move |name| format!("{PACKAGE}/{name}@{version}"))
    });
    ours.chain(wasi::INTERFACES.iter().map(|name| format!("{name}@{WASI_VERSION}"))).collect()
}

fn check_needs(component: &Component, limits: &GuestLimits) -> Result<(), GuestError> {
    let Some(needs) = component.resources_required() else {
        return Err(GuestError::WrongType { reason: "the component imports a module".to_owned() });
    };
    let memory = needs.max_initial_memory_size.unwrap_or(0).saturating_mul(WASM_PAGE_BYTES);
    let checks = [
        ("linear memories", u64::from(needs.num_memories), u64::from(limits.n_memories)),
        ("bytes of memory", memory, limits.memory_bytes as u64),
        ("tables", u64::from(needs.num_tables), u64::from(limits.n_tables)),
        ("table elements", needs.max_initial_table_size.unwrap_or(0), limits.n_table_elements as u64),
    ];
    match checks.into_iter().find(|&(_, needed, limit)| needed > limit) {
        Some((what, needed, limit)) => Err(GuestError::NeedsTooMuch { what, needed, limit }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn every_interface_of_the_package_is_known() {
        for (folder, (version, expected)) in ["", "0.1"].into_iter().zip(VERSIONS) {
            let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../wit")).join(folder);
            let mut interfaces = Vec::new();
            for file in std::fs::read_dir(folder).expect("the package") {
                let path = file.expect("an entry").path();
                if path.is_dir() {
                    continue;
                }
                let text = std::fs::read_to_string(path).expect("text");
                assert!(text.contains(&format!("package {PACKAGE}@{version};")), "{text}");
                let names =
                    text.lines().filter_map(|line| line.strip_prefix("interface ")?.strip_suffix(" {"));
                interfaces.extend(names.map(str::to_owned));
            }
            // What policies of the operator have, and guests do not.
            interfaces.retain(|name| name != "policies" && name != "policing");
            interfaces.sort();
            assert_eq!(interfaces, expected);
        }
    }

    #[test]
    fn imports_are_refused_by_name_and_version() {
        check_import("trellis:host/contexts@0.1.0").expect("ours");
        check_import("trellis:host/contexts@0.1.7").expect("compatible");
        check_import("trellis:host/contexts@0.2.0").expect("ours");
        check_import("wasi:io/poll@0.2.6").expect("WASI");
        check_import("wasi:sockets/tcp@0.2.9").expect("by name");
        let error = check_import("trellis:host/contexts@0.3.0").expect_err("another version");
        assert!(matches!(error, GuestError::WrongVersion { .. }), "{error}");
        check_import("trellis:host/programs@0.2.0").expect("ours");
        let error = check_import("trellis:host/programs@0.1.1").expect_err("it came later");
        assert!(matches!(error, GuestError::WrongVersion { .. }), "{error}");
        let error = check_import("trellis:host/contexts").expect_err("no version");
        assert!(matches!(error, GuestError::WrongVersion { .. }), "{error}");
        for import in [
            "trellis:host/policies@0.2.0",
            "trellis:host/files@0.1.0",
            "wasi:http/outgoing-handler@0.2.0",
            "run",
            "trellis:hosts@0.1.0",
        ] {
            let error = check_import(import).expect_err("unknown");
            assert!(matches!(error, GuestError::UnknownImport { .. }), "{error}");
        }
    }

    #[test]
    fn a_component_has_no_more_modules_than_it_may_have_instances() {
        let limits = GuestLimits::default();
        let modules = |n: usize| {
            let module = b"\x01\x08\0asm\x01\0\0\0";
            [&b"\0asm\x0d\0\x01\0"[..], &module.repeat(n)].concat()
        };
        check_modules(&modules(16), &limits).expect("as many as instances");
        let error = check_modules(&modules(1_000), &limits).expect_err("each would take a descriptor");
        assert!(matches!(error, GuestError::NeedsTooMuch { needed: 17, limit: 16, .. }), "{error}");
    }

    #[test]
    fn the_first_bytes_tell_what_is_no_component() {
        let limits = GuestLimits { component_bytes: 9, ..GuestLimits::default() };
        check_kind(b"\0asm\x0d\0\x01\0", &limits).expect("a component");
        let kinds = [&b""[..], b"\0as", b"\0asm", b"hello, world", b"\0asm\x01\0\0\0"]
            .map(|bytes| check_kind(bytes, &limits).expect_err("no component"));
        assert!(matches!(
            kinds,
            [
                GuestError::NotWasm { n_bytes: 0 },
                GuestError::NotWasm { n_bytes: 3 },
                GuestError::NotWasm { n_bytes: 4 },
                GuestError::TooLarge { n_bytes: 12, limit_bytes: 9 },
                GuestError::CoreModule
            ]
        ));
    }
}
