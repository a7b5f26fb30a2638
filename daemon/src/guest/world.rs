//! What a component imports and exports, read without compiling it.

use wasmparser::{Parser, Payload};

use super::component::{check_format, check_names};
use super::error::GuestError;
use super::names;

/// The package that guests are written against, as its interfaces begin.
const HOST: &str = "trellis:host/";

/// The names that a component imports and exports, in its own order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct World {
    /// `trellis:host/models@0.2.0`
    pub(crate) imports: Vec<String>,
    /// `run`
    pub(crate) exports: Vec<String>,
}

impl World {
    /// Reads a component of any world. Nothing of its code is checked.
    ///
    /// # Errors
    /// It is no component, or a broken one.
    pub(crate) fn of(component: &[u8]) -> Result<Self, GuestError> {
        check_format(component)?;
        let mut world = Self { imports: Vec::new(), exports: Vec::new() };
        world.read(component).map_err(|error| GuestError::Invalid {
            reason: names::cut(&error.to_string(), names::REASON_BYTES_MAX),
        })?;
        Ok(world)
    }

    fn read(&mut self, component: &[u8]) -> wasmparser::Result<()> {
        let mut n_within: usize = 0;
        for payload in Parser::new(0).parse_all(component) {
            match payload? {
                // What stands in a component within is between the two.
                Payload::ModuleSection { .. } | Payload::ComponentSection { .. } => n_within += 1,
                Payload::End(_) => n_within = n_within.saturating_sub(1),
                Payload::ComponentImportSection(imports) if n_within == 0 => {
                    for import in imports {
                        self.imports.push(import?.name.name.to_owned());
                    }
                }
                Payload::ComponentExportSection(exports) if n_within == 0 => {
                    for export in exports {
                        self.exports.push(export?.name.name.to_owned());
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Whether the host has what is imported, and a guest's entry is exported, as far as names tell: what a daemon finds first.
    ///
    /// # Errors
    /// What is missing.
    pub(crate) fn check(&self) -> Result<(), GuestError> {
        check_names(self.imports.iter().map(String::as_str), self.exports.clone()).map(|_| ())
    }

    /// The package that it was written against, `trellis:host@0.2.0`; none where it imports nothing of it.
    pub(crate) fn host_package(&self) -> Option<String> {
        let ours = self.imports.iter().find_map(|import| import.strip_prefix(HOST)?.split_once('@'));
        ours.map(|(_, version)| format!("trellis:host@{version}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn world(text: &str) -> Result<World, GuestError> {
        World::of(&wat::parse_str(text).expect("valid"))
    }

    #[test]
    fn what_stands_within_is_not_the_components_own() {
        let text = r#"(component
            (import "trellis:host/models@0.2.0" (instance))
            (import "wasi:cli/stdout@0.2.6" (instance))
            (core module (func (export "inner")))
            (component (import "other:host/x@1.0.0" (instance)) (core module))
            (instance $i)
            (export "wasi:cli/run@0.2.6" (instance $i)))"#;
        let world = world(text).expect("a component");
        assert_eq!(world.imports, ["trellis:host/models@0.2.0", "wasi:cli/stdout@0.2.6"]);
        assert_eq!(world.exports, ["wasi:cli/run@0.2.6"]);
        assert_eq!(world.host_package().as_deref(), Some("trellis:host@0.2.0"));
        world.check().expect("a guest");
    }

    #[test]
    fn a_component_of_another_world_is_told_what_is_missing() {
        let other = world(r#"(component (import "wasi:http/types@0.2.0" (instance)))"#).expect("a component");
        assert!(matches!(other.check(), Err(GuestError::UnknownImport { .. })));
        let library = world("(component)").expect("a component");
        assert!(matches!(library.check(), Err(GuestError::MissingRun { .. })));
        assert_eq!(library.host_package(), None);
        assert!(matches!(world("(module)"), Err(GuestError::CoreModule)));
        assert!(matches!(World::of(b"\0asm\x0d\0\x01\0\x0a\xff"), Err(GuestError::Invalid { .. })));
    }
}
