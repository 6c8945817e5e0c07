//! Walks through a policy file before any other parser sees it, and refuses what would cost that parser much.
//!
//! wit-parser, wit-component and wasmtime descend by recursion, allocate by the counts that a file claims,
//! and expand instances of instances. This walk does none of that: it keeps its own stack, reads only bytes
//! that exist, and counts. It does not validate; it knows no types and no worlds.

use std::ops::Range;

use wasmparser::{
    BinaryReader, BinaryReaderError, Chunk, ComponentAlias, ComponentExternalKind, ComponentInstance,
    ComponentOuterAliasKind, ComponentTypeRef, Encoding, FromReader, Parser, Payload, SectionLimited,
};

use crate::refusal::Refusal;

mod bounds;
mod function;
mod types;

use bounds::{Bound, Counts};

/// Why the walk ended early.
#[derive(Debug)]
pub(crate) enum Stopped {
    /// The bytes are not WebAssembly, or not all of it.
    Malformed(String),
    /// A bound is exceeded.
    Exceeded(Refusal),
}

impl From<BinaryReaderError> for Stopped {
    fn from(error: BinaryReaderError) -> Self {
        Self::Malformed(error.to_string())
    }
}

/// Checks a component or a core module, and the WIT metadata in its custom sections. `memory_bytes` is the
/// limit of all memories that it declares.
pub(crate) fn check(bytes: &[u8], memory_bytes: usize) -> Result<(), Stopped> {
    let mut walk = Walk { counts: Counts::new(memory_bytes), most_instances: 0, metadata: vec![bytes] };
    // A custom section may hold a component that is parsed on its own.
    while let Some(item) = walk.metadata.pop() {
        walk.item(item)?;
    }
    Ok(())
}

struct Walk<'a> {
    counts: Counts,
    /// Largest number of instances that one of the components creates when it is instantiated.
    most_instances: u64,
    /// Components that are still to be walked.
    metadata: Vec<&'a [u8]>,
}

/// A component or module whose sections are being read.
#[derive(Default)]
struct Scope {
    /// For each component in its index space: the instances that instantiating it makes.
    components: Vec<u64>,
    /// Instances that instantiating this scope makes.
    instances: u64,
    is_component: bool,
}

impl<'a> Walk<'a> {
    /// Walks through one component or module, and those in it.
    fn item(&mut self, bytes: &'a [u8]) -> Result<(), Stopped> {
        let (mut parser, mut outer) = (Parser::new(0), Vec::new());
        let (mut scope, mut rest) = (Scope::default(), bytes);
        loop {
            let (payload, consumed) = match parser.parse(rest, true)? {
                Chunk::Parsed { payload, consumed } => (payload, consumed),
                Chunk::NeedMoreData(_) => return Err(Stopped::Malformed("unexpected end".to_owned())),
            };
            rest = rest.get(consumed..).unwrap_or_default();
            match payload {
                Payload::ModuleSection { parser: inner, unchecked_range }
                | Payload::ComponentSection { parser: inner, unchecked_range } => {
                    check_range(&unchecked_range, bytes)?;
                    self.counts.add(Bound::Nested, 1)?;
                    outer.push((std::mem::replace(&mut parser, inner), std::mem::take(&mut scope)));
                    self.counts.check(Bound::Depth, outer.len() as u64)?;
                }
                Payload::End(_) => {
                    let Some((parent, around)) = outer.pop() else { return Ok(()) };
                    let inner = std::mem::replace(&mut scope, around);
                    parser = parent;
                    if inner.is_component {
                        self.define(&mut scope, inner.instances);
                    }
                }
                payload => self.section(payload, bytes, &mut scope)?,
            }
        }
    }

    fn section(&mut self, payload: Payload<'a>, bytes: &'a [u8], scope: &mut Scope) -> Result<(), Stopped> {
        match payload {
            Payload::Version { encoding, .. } => scope.is_component = encoding == Encoding::Component,
            Payload::CodeSectionEntry(body) => function::check(&body, &self.counts)?,
            Payload::CodeSectionStart { count, .. } => self.counts.add(Bound::Functions, count.into())?,
            Payload::CustomSection(custom) if custom.name().starts_with("component-type") => {
                self.counts.add(Bound::Sections, 1)?;
                self.metadata.push(custom.data());
            }
            Payload::TypeSection(types) => self.counted(Bound::Types, &types)?,
            Payload::CoreTypeSection(types) => self.counted(Bound::Types, &types)?,
            Payload::ImportSection(imports) => self.counted(Bound::Imports, &imports)?,
            Payload::FunctionSection(functions) => self.counted(Bound::Functions, &functions)?,
            Payload::GlobalSection(globals) => self.counted(Bound::Globals, &globals)?,
            Payload::TagSection(tags) => self.counted(Bound::Globals, &tags)?,
            Payload::ExportSection(exports) => self.counted(Bound::Exports, &exports)?,
            Payload::ElementSection(elements) => self.counted(Bound::Segments, &elements)?,
            Payload::DataSection(data) => self.counted(Bound::Segments, &data)?,
            Payload::ComponentCanonicalSection(functions) => self.counted(Bound::Aliases, &functions)?,
            Payload::TableSection(tables) => {
                for table in self.items(Bound::Tables, tables)? {
                    self.counts.add(Bound::TableElements, table.ty.initial)?;
                }
            }
            Payload::MemorySection(memories) => {
                for memory in self.items(Bound::Memories, memories)? {
                    let page_bytes =
                        1_u64.checked_shl(memory.page_size_log2.unwrap_or(16)).unwrap_or(u64::MAX);
                    self.counts.add(Bound::MemoryBytes, memory.initial.saturating_mul(page_bytes))?;
                }
            }
            Payload::ComponentTypeSection(types) => {
                self.counts.add(Bound::Sections, 1)?;
                let range = types.range();
                let content = bytes.get(range.clone()).unwrap_or_default();
                types::check(&mut BinaryReader::new(content, range.start), &mut self.counts)?;
            }
            _ => self.component_section(payload, scope)?,
        }
        Ok(())
    }

    /// Sections that define components and instances.
    fn component_section(&mut self, payload: Payload<'a>, scope: &mut Scope) -> Result<(), Stopped> {
        match payload {
            Payload::InstanceSection(instances) => {
                let count = self.items(Bound::Instances, instances)?.len();
                self.instantiate(scope, count as u64)?;
            }
            Payload::ComponentInstanceSection(instances) => {
                for instance in self.items(Bound::Instances, instances)? {
                    let made = match instance {
                        ComponentInstance::Instantiate { component_index, .. } => {
                            let known = scope.components.get(component_index as usize).copied();
                            known.unwrap_or(self.most_instances)
                        }
                        ComponentInstance::FromExports(_) => 0,
                    };
                    self.instantiate(scope, made.saturating_add(1))?;
                }
            }
            Payload::ComponentAliasSection(aliases) => {
                for alias in self.items(Bound::Aliases, aliases)? {
                    if is_component(&alias) {
                        self.define(scope, self.most_instances);
                    }
                }
            }
            Payload::ComponentImportSection(imports) => {
                for import in self.items(Bound::Imports, imports)? {
                    if matches!(import.ty, ComponentTypeRef::Component(_)) {
                        self.define(scope, self.most_instances);
                    }
                }
            }
            Payload::ComponentExportSection(exports) => {
                for export in self.items(Bound::Exports, exports)? {
                    // An export is one more item of its index space.
                    if export.kind == ComponentExternalKind::Component {
                        self.define(scope, self.most_instances);
                    }
                }
            }
            _ => self.counts.add(Bound::Sections, 1)?,
        }
        Ok(())
    }

    /// Adds a component to the index space of `scope`. `instances`: those that instantiating it makes. For a
    /// component that is not known, callers take the most of any in the file.
    fn define(&mut self, scope: &mut Scope, instances: u64) {
        scope.components.push(instances);
        self.most_instances = self.most_instances.max(instances);
    }

    fn instantiate(&mut self, scope: &mut Scope, made: u64) -> Result<(), Stopped> {
        scope.instances = scope.instances.saturating_add(made);
        self.counts.check(Bound::Instances, scope.instances)
    }

    /// Counts the items that a section claims. Each has a byte at least.
    fn counted<T>(&mut self, bound: Bound, section: &SectionLimited<'a, T>) -> Result<(), Stopped> {
        let (count, size) = (section.count() as usize, section.range().len());
        if count > size {
            let text = format!("a section claims {count} items in {size} bytes");
            return Err(Stopped::Malformed(text));
        }
        self.counts.add(Bound::Sections, 1)?;
        self.counts.add(bound, count as u64)
    }

    /// Counts the items of a section and reads them. A bound on their number precedes the allocation.
    fn items<T: FromReader<'a>>(
        &mut self,
        bound: Bound,
        section: SectionLimited<'a, T>,
    ) -> Result<Vec<T>, Stopped> {
        self.counted(bound, &section)?;
        Ok(section.into_iter().collect::<Result<_, _>>()?)
    }
}

/// Checks that a nested part does not claim more bytes than the file has.
fn check_range(range: &Range<usize>, bytes: &[u8]) -> Result<(), Stopped> {
    if range.end <= bytes.len() {
        return Ok(());
    }
    let text =
        format!("a section claims {} bytes; {} remain", range.len(), bytes.len().saturating_sub(range.start));
    Err(Stopped::Malformed(text))
}

fn is_component(alias: &ComponentAlias<'_>) -> bool {
    match alias {
        ComponentAlias::InstanceExport { kind, .. } => *kind == ComponentExternalKind::Component,
        ComponentAlias::Outer { kind, .. } => *kind == ComponentOuterAliasKind::Component,
        ComponentAlias::CoreInstanceExport { .. } => false,
    }
}

#[cfg(test)]
mod tests;
