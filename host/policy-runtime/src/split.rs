//! Takes the large code modules out of a component, so that they are compiled once for all policies of one
//! interpreter.
//!
//! Between two builds of a policy in Python or JavaScript, the code of the interpreter is the same, byte for
//! byte, and only the memory's content differs. Each module with much code becomes an import of the
//! component:
//!
//! ```text
//! (core module $python …)         (import "pointsman-code-0" (core module $python …))
//! (core module $js                (core module $js-memory (memory …) (data …))
//!   (memory …) (data …) …)   =>   (import "pointsman-code-1" (core module $js (import memory) …))
//! ```
//!
//! Runs in the compiler process. Reads only files that `precheck` has passed. A component of another shape
//! than componentizers make is left whole.

use wasmparser::{
    ComponentAlias, ComponentExport, ComponentExternalKind, ComponentImport, ComponentInstance,
    ComponentOuterAliasKind, ComponentTypeRef, Instance,
};

mod core_module;
mod sections;

use core_module::CoreModule;
use sections::{Section, items, number, sections, write_name, write_number, write_section};

/// Minimum code of a module that is taken out, bytes. Smaller modules compile fast enough.
const MIN_CODE_BYTES: usize = 200 * 1024;
/// Maximum number of modules that are taken out: each is compiled by a process with the limits of a file.
pub(crate) const MAX_MODULES: usize = 8;
/// Name of the import of the first module. The others follow with their numbers.
const NAME: &str = "pointsman-code-";
/// Kinds of sections of a component.
mod kind {
    pub(super) const MODULE: u8 = 1;
    pub(super) const CORE_INSTANCE: u8 = 2;
    pub(super) const CORE_TYPE: u8 = 3;
    pub(super) const COMPONENT: u8 = 4;
    pub(super) const INSTANCE: u8 = 5;
    pub(super) const ALIAS: u8 = 6;
    pub(super) const IMPORT: u8 = 10;
    pub(super) const EXPORT: u8 = 11;
}
/// Sort of a core instance in an argument, and of a core module in an import.
const SORT_INSTANCE: u8 = 0x12;
const SORT_MODULE: u8 = 0x11;

/// A component without its large modules.
#[derive(Debug)]
pub(crate) struct Split {
    /// The component, which imports the modules by [`import_name`].
    pub(crate) remainder: Vec<u8>,
    /// The modules, in the order of their numbers.
    pub(crate) modules: Vec<Vec<u8>>,
    /// Memories and tables of all core instances together.
    pub(crate) memories: u32,
    pub(crate) tables: u32,
}

/// Returns the name by which a remainder imports a module.
pub(crate) fn import_name(number: usize) -> String {
    format!("{NAME}{number}")
}

/// Splits a component. `None`: it has no large module, or not the shape that this can split.
pub(crate) fn split(component: &[u8]) -> Option<Split> {
    let sections = sections(component)?;
    if !sections.iter().any(|section| section.id == kind::MODULE && is_large(section)) {
        return None;
    }
    let mut splitter = Splitter::default();
    splitter.out.extend(component.get(..8)?);
    for section in &sections {
        splitter.section(section)?;
    }
    let Splitter { out, shared, memories, tables, .. } = splitter;
    (!shared.is_empty()).then_some(Split { remainder: out, modules: shared, memories, tables })
}

fn is_large(section: &Section<'_>) -> bool {
    CoreModule::read(section.body).is_some_and(|module| module.code_bytes() >= MIN_CODE_BYTES)
}

/// A core module in the new component.
struct Place {
    index: u32,
    /// Module that has its memory.
    memory: Option<u32>,
    memories: u32,
    tables: u32,
    is_taken: bool,
    is_instantiated: bool,
}

#[derive(Default)]
struct Splitter {
    out: Vec<u8>,
    shared: Vec<Vec<u8>>,
    /// Core modules by their index in the file.
    modules: Vec<Place>,
    next_module: u32,
    /// New indices of core instances, by those in the file.
    instances: Vec<u32>,
    next_instance: u32,
    memories: u32,
    tables: u32,
}

impl Splitter {
    /// Copies a section, changed where it has to be. `None`: the component cannot be split.
    fn section(&mut self, section: &Section<'_>) -> Option<()> {
        match section.id {
            kind::MODULE => return self.module(section),
            kind::CORE_INSTANCE => return self.core_instances(section),
            kind::ALIAS => return self.aliases(section),
            kind::CORE_TYPE => return None,
            kind::COMPONENT if !is_plain(section.body) => return None,
            kind::INSTANCE => {
                for (_, instance) in items::<ComponentInstance<'_>>(section.body)? {
                    let passes_module = match instance {
                        ComponentInstance::Instantiate { args, .. } => {
                            args.iter().any(|arg| arg.kind == ComponentExternalKind::Module)
                        }
                        ComponentInstance::FromExports(exports) => {
                            exports.iter().any(|export| export.kind == ComponentExternalKind::Module)
                        }
                    };
                    if passes_module {
                        return None;
                    }
                }
            }
            kind::IMPORT => {
                let mut imports = items::<ComponentImport<'_>>(section.body)?.into_iter();
                if imports.any(|(_, import)| matches!(import.ty, ComponentTypeRef::Module(_))) {
                    return None;
                }
            }
            kind::EXPORT => {
                let mut exports = items::<ComponentExport<'_>>(section.body)?.into_iter();
                if exports.any(|(_, export)| export.kind == ComponentExternalKind::Module) {
                    return None;
                }
            }
            _ => {}
        }
        write_section(&mut self.out, section.id, section.body);
        Some(())
    }

    fn module(&mut self, section: &Section<'_>) -> Option<()> {
        let module = CoreModule::read(section.body)?;
        let (memories, tables) = (module.memories()?, module.tables()?);
        let is_taken = self.shared.len() < MAX_MODULES && module.code_bytes() >= MIN_CODE_BYTES;
        let parts = is_taken.then(|| module.take_apart()).flatten();
        let is_taken = parts.is_some();
        let memory = parts.as_ref().and_then(|parts| parts.memory.as_ref()).map(|memory| {
            write_section(&mut self.out, kind::MODULE, memory);
            self.next_module += 1;
            self.next_module - 1
        });
        match parts {
            Some(parts) => {
                self.import(&parts.ty)?;
                self.shared.push(parts.code);
            }
            None => write_section(&mut self.out, kind::MODULE, section.body),
        }
        let index = self.next_module;
        self.modules.push(Place { index, memory, memories, tables, is_taken, is_instantiated: false });
        self.next_module += 1;
        Some(())
    }

    /// Writes the type of a module, and the import of a module of that type.
    fn import(&mut self, ty: &[u8]) -> Option<()> {
        let index = number(self.shared.len())?;
        let (mut types, mut imports) = (Vec::new(), Vec::new());
        write_number(&mut types, 1);
        types.extend(ty);
        write_section(&mut self.out, kind::CORE_TYPE, &types);
        write_number(&mut imports, 1);
        imports.push(0);
        write_name(&mut imports, &import_name(self.shared.len()))?;
        imports.extend([0, SORT_MODULE]);
        write_number(&mut imports, index);
        write_section(&mut self.out, kind::IMPORT, &imports);
        Some(())
    }

    fn core_instances(&mut self, section: &Section<'_>) -> Option<()> {
        let (mut body, mut count) = (Vec::new(), 0);
        for (raw, instance) in items::<Instance<'_>>(section.body)? {
            if let Instance::Instantiate { module_index, args } = instance {
                let place = self.modules.get_mut(usize::try_from(module_index).ok()?)?;
                // wasmtime bounds the globals and functions of all core instances together, but not those of
                // modules that a component imports.
                if std::mem::replace(&mut place.is_instantiated, true) && place.is_taken {
                    return None;
                }
                self.memories = self.memories.saturating_add(place.memories);
                self.tables = self.tables.saturating_add(place.tables);
                let mut arguments: Vec<(&str, u32)> = Vec::new();
                for arg in &args {
                    let instance = self.instances.get(usize::try_from(arg.index).ok()?)?;
                    arguments.push((arg.name, *instance));
                }
                if let Some(memory) = place.memory {
                    instantiate(&mut body, memory, &[])?;
                    arguments.push((core_module::MEMORY_MODULE, self.next_instance));
                    self.next_instance += 1;
                    count += 1;
                }
                instantiate(&mut body, place.index, &arguments)?;
            } else {
                body.extend(raw);
            }
            self.instances.push(self.next_instance);
            self.next_instance += 1;
            count += 1;
        }
        self.counted(kind::CORE_INSTANCE, count, &body);
        Some(())
    }

    fn aliases(&mut self, section: &Section<'_>) -> Option<()> {
        let (mut body, mut count) = (Vec::new(), 0);
        for (raw, alias) in items::<ComponentAlias<'_>>(section.body)? {
            match alias {
                ComponentAlias::CoreInstanceExport { instance_index, name, .. } => {
                    // Two bytes of sort, and one that says of what it is an alias.
                    body.extend(raw.get(..3)?);
                    write_number(&mut body, *self.instances.get(usize::try_from(instance_index).ok()?)?);
                    write_name(&mut body, name)?;
                }
                ComponentAlias::InstanceExport { kind: ComponentExternalKind::Module, .. }
                | ComponentAlias::Outer {
                    kind: ComponentOuterAliasKind::CoreModule | ComponentOuterAliasKind::CoreType,
                    ..
                } => return None,
                _ => body.extend(raw),
            }
            count += 1;
        }
        self.counted(kind::ALIAS, count, &body);
        Some(())
    }

    fn counted(&mut self, id: u8, count: u32, items: &[u8]) {
        let mut body = Vec::with_capacity(items.len() + 5);
        write_number(&mut body, count);
        body.extend(items);
        write_section(&mut self.out, id, &body);
    }
}

fn instantiate(body: &mut Vec<u8>, module: u32, arguments: &[(&str, u32)]) -> Option<()> {
    body.push(0);
    write_number(body, module);
    write_number(body, number(arguments.len())?);
    for (name, instance) in arguments {
        write_name(body, name)?;
        body.push(SORT_INSTANCE);
        write_number(body, *instance);
    }
    Some(())
}

/// Returns whether a nested component has no core modules, instances or types, and refers to none outside.
fn is_plain(component: &[u8]) -> bool {
    let Some(sections) = sections(component) else { return false };
    sections.iter().all(|section| match section.id {
        kind::MODULE | kind::CORE_INSTANCE | kind::CORE_TYPE => false,
        kind::COMPONENT => is_plain(section.body),
        kind::ALIAS => items::<ComponentAlias<'_>>(section.body).is_some_and(|aliases| {
            aliases.iter().all(|(_, alias)| {
                !matches!(
                    alias,
                    ComponentAlias::CoreInstanceExport { .. }
                        | ComponentAlias::Outer {
                            kind: ComponentOuterAliasKind::CoreModule | ComponentOuterAliasKind::CoreType,
                            ..
                        }
                )
            })
        }),
        _ => true,
    })
}

#[cfg(test)]
mod tests;
