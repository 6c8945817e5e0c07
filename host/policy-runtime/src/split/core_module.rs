//! A core module, taken apart into its code and its memory, and the type that an import of it has.

use wasmparser::{
    BinaryReader, Data, DataKind, Export, ExternalKind, Global, Import, Imports, MemoryType, Operator,
    RecGroup, Table, TableInit, TagType,
};

use super::sections::{Section, items, sections, write_name, write_number, write_section};

/// Name of the module that a code module imports its memory from.
pub(super) const MEMORY_MODULE: &str = "pointsman-memory";
/// Name of the memory there.
const MEMORY: &str = "memory";

/// Kinds of sections of a module.
mod kind {
    pub(super) const CUSTOM: u8 = 0;
    pub(super) const TYPE: u8 = 1;
    pub(super) const IMPORT: u8 = 2;
    pub(super) const FUNCTION: u8 = 3;
    pub(super) const TABLE: u8 = 4;
    pub(super) const MEMORY: u8 = 5;
    pub(super) const GLOBAL: u8 = 6;
    pub(super) const EXPORT: u8 = 7;
    pub(super) const CODE: u8 = 10;
    pub(super) const DATA: u8 = 11;
    pub(super) const DATA_COUNT: u8 = 12;
    pub(super) const TAG: u8 = 13;
}
/// First byte of a function type.
const FUNCTION_TYPE: u8 = 0x60;
/// First byte of a module type in a component.
const MODULE_TYPE: u8 = 0x50;
const HEADER: &[u8] = b"\0asm\x01\0\0\0";

pub(super) struct CoreModule<'a> {
    sections: Vec<Section<'a>>,
}

/// A module taken apart.
pub(super) struct Parts {
    /// The module without custom sections, and without memory and data where these are in `memory`.
    pub(super) code: Vec<u8>,
    /// A module with the memory and its content.
    pub(super) memory: Option<Vec<u8>>,
    /// Type of `code`, as components write it.
    pub(super) ty: Vec<u8>,
}

impl<'a> CoreModule<'a> {
    pub(super) fn read(bytes: &'a [u8]) -> Option<Self> {
        bytes.starts_with(HEADER).then_some(())?;
        Some(Self { sections: sections(bytes)? })
    }

    fn section(&self, id: u8) -> Option<&'a [u8]> {
        self.sections.iter().find(|section| section.id == id).map(|section| section.body)
    }

    pub(super) fn code_bytes(&self) -> usize {
        self.section(kind::CODE).map_or(0, <[u8]>::len)
    }

    /// Number of memories that it defines.
    pub(super) fn memories(&self) -> Option<u32> {
        self.defined(kind::MEMORY)
    }

    /// Number of tables that it defines.
    pub(super) fn tables(&self) -> Option<u32> {
        self.defined(kind::TABLE)
    }

    fn defined(&self, id: u8) -> Option<u32> {
        self.section(id).map_or(Some(0), |body| BinaryReader::new(body, 0).read_var_u32().ok())
    }

    /// `None`: its memory cannot be separated, or it uses types that are not written here.
    pub(super) fn take_apart(&self) -> Option<Parts> {
        let memory = match self.memories()? {
            0 => None,
            1 => Some(self.memory_module()?),
            _ => return None,
        };
        let import = memory.is_some().then(|| self.memory_import()).flatten();
        (import.is_some() == memory.is_some()).then_some(())?;
        let ty = self.ty(import.as_deref())?;
        Some(Parts { code: self.code_module(import.as_deref())?, memory, ty })
    }

    /// Returns a module that defines the memory with its content, when all of that is known before it runs.
    fn memory_module(&self) -> Option<Vec<u8>> {
        let memory = self.section(kind::MEMORY)?;
        let data = self.section(kind::DATA);
        for (_, segment) in data.map_or(Some(Vec::new()), items::<Data<'_>>)? {
            let DataKind::Active { memory_index: 0, offset_expr } = segment.kind else { return None };
            let mut operators = offset_expr.get_operators_reader();
            let constant =
                matches!(operators.read().ok()?, Operator::I32Const { .. } | Operator::I64Const { .. });
            (constant && matches!(operators.read().ok()?, Operator::End) && operators.eof()).then_some(())?;
        }
        (!self.names_segments()?).then_some(())?;
        let mut module = HEADER.to_vec();
        write_section(&mut module, kind::MEMORY, memory);
        let mut exports = Vec::new();
        write_number(&mut exports, 1);
        write_name(&mut exports, MEMORY)?;
        exports.extend([2, 0]);
        write_section(&mut module, kind::EXPORT, &exports);
        if let Some(data) = data {
            write_section(&mut module, kind::DATA, data);
        }
        Some(module)
    }

    /// Returns whether an instruction names a data segment (`memory.init`, `data.drop`, `array.new_data`…).
    fn names_segments(&self) -> Option<bool> {
        let Some(code) = self.section(kind::CODE).filter(|_| self.section(kind::DATA_COUNT).is_some()) else {
            // Such an instruction needs a count of segments.
            return Some(false);
        };
        // Nearly no code has these bytes. Where it has them, they may be part of a number.
        let suspect = |pair: &[u8]| {
            matches!(pair, [0xfc, second] if matches!(second & 0x7f, 8 | 9)) || matches!(pair, [0xfb, _])
        };
        if !code.windows(2).any(suspect) {
            return Some(false);
        }
        for (_, body) in items::<wasmparser::FunctionBody<'_>>(code)? {
            let mut operators = body.get_operators_reader().ok()?;
            while !operators.eof() {
                let names = matches!(
                    operators.read().ok()?,
                    Operator::MemoryInit { .. }
                        | Operator::DataDrop { .. }
                        | Operator::ArrayNewData { .. }
                        | Operator::ArrayInitData { .. }
                );
                if names {
                    return Some(true);
                }
            }
        }
        Some(false)
    }

    /// Returns the import of the memory that `memory_module` exports. `None`: the name is taken, or there are
    /// other memories.
    fn memory_import(&self) -> Option<Vec<u8>> {
        for (_, import) in self.imports()? {
            let other = matches!(import.ty, wasmparser::TypeRef::Memory(_)) || import.module == MEMORY_MODULE;
            (!other).then_some(())?;
        }
        let memories = items::<MemoryType>(self.section(kind::MEMORY)?)?;
        let (ty, _) = memories.first()?;
        let mut import = Vec::new();
        write_name(&mut import, MEMORY_MODULE)?;
        write_name(&mut import, MEMORY)?;
        import.push(2);
        import.extend(*ty);
        Some(import)
    }

    fn imports(&self) -> Option<Vec<(&'a [u8], Import<'a>)>> {
        let groups = self.section(kind::IMPORT).map_or(Some(Vec::new()), items::<Imports<'_>>)?;
        let single = |(raw, group)| match group {
            Imports::Single(_, import) => Some((raw, import)),
            _ => None,
        };
        groups.into_iter().map(single).collect()
    }

    fn code_module(&self, memory: Option<&[u8]>) -> Option<Vec<u8>> {
        let mut module = HEADER.to_vec();
        let mut missing = memory;
        for Section { id, body } in &self.sections {
            let moved = memory.is_some() && [kind::MEMORY, kind::DATA, kind::DATA_COUNT].contains(id);
            if *id == kind::CUSTOM || moved {
                continue;
            }
            match missing.filter(|_| *id != kind::TYPE) {
                Some(memory) if *id == kind::IMPORT => {
                    self.write_imports(&mut module, body, memory)?;
                    missing = None;
                    continue;
                }
                Some(memory) => {
                    self.write_imports(&mut module, &[0], memory)?;
                    missing = None;
                }
                None => {}
            }
            write_section(&mut module, *id, body);
        }
        Some(module)
    }

    /// Writes the section of imports with one more.
    fn write_imports(&self, module: &mut Vec<u8>, body: &[u8], one_more: &[u8]) -> Option<()> {
        let mut reader = BinaryReader::new(body, 0);
        let count = reader.read_var_u32().ok()?;
        let mut imports = Vec::with_capacity(body.len() + one_more.len() + 5);
        write_number(&mut imports, count.checked_add(1)?);
        imports.extend(body.get(reader.original_position()..)?);
        imports.extend(one_more);
        write_section(module, kind::IMPORT, &imports);
        Some(())
    }

    /// Returns the type of the module, with the import of its memory.
    fn ty(&self, memory: Option<&[u8]>) -> Option<Vec<u8>> {
        let (mut declarations, mut count) = (Vec::new(), 0_u32);
        let mut declare = |tag: u8, parts: &[&[u8]]| {
            declarations.push(tag);
            declarations.extend(parts.concat());
            count += 1;
        };
        for (raw, _) in items::<RecGroup>(self.section(kind::TYPE).unwrap_or(&[0]))? {
            (raw.first() == Some(&FUNCTION_TYPE)).then_some(())?;
            declare(1, &[raw]);
        }
        for (raw, _) in self.imports()? {
            declare(0, &[raw]);
        }
        if let Some(memory) = memory {
            declare(0, &[memory]);
        }
        let entities = self.entities()?;
        for (_, export) in items::<Export<'_>>(self.section(kind::EXPORT).unwrap_or(&[0]))? {
            let mut name = Vec::new();
            write_name(&mut name, export.name)?;
            declare(3, &[&name, &entities.get(export.kind, export.index)?]);
        }
        let mut ty = vec![MODULE_TYPE];
        write_number(&mut ty, count);
        ty.extend(declarations);
        Some(ty)
    }

    /// Returns the types of all that the module may export, imports first.
    fn entities(&self) -> Option<Entities> {
        let mut entities = Entities::default();
        for (raw, _) in self.imports()? {
            let mut reader = BinaryReader::new(raw, 0);
            reader.read_string().ok()?;
            reader.read_string().ok()?;
            let ty = raw.get(reader.original_position()..)?;
            entities.0.get_mut(usize::from(*ty.first()?))?.push(ty.to_vec());
        }
        let mut define = |sort: u8, raw: &[u8]| -> Option<()> {
            entities.0.get_mut(usize::from(sort))?.push([&[sort], raw].concat());
            Some(())
        };
        let body = |id: u8| self.section(id).unwrap_or(&[0]);
        for (raw, _) in items::<u32>(body(kind::FUNCTION))? {
            define(0, raw)?;
        }
        for (raw, table) in items::<Table<'_>>(body(kind::TABLE))? {
            matches!(table.init, TableInit::RefNull).then_some(())?;
            // A type that begins with 0x40 has an initializer.
            (raw.first() != Some(&0x40)).then_some(())?;
            define(1, raw)?;
        }
        for (raw, _) in items::<MemoryType>(body(kind::MEMORY))? {
            define(2, raw)?;
        }
        for (raw, global) in items::<Global<'_>>(body(kind::GLOBAL))? {
            let initializer = global.init_expr.get_binary_reader().bytes_remaining();
            define(3, raw.get(..raw.len().checked_sub(initializer)?)?)?;
        }
        for (raw, _) in items::<TagType>(body(kind::TAG))? {
            define(4, raw)?;
        }
        Some(entities)
    }
}

/// Types of functions, tables, memories, globals and tags, as imports and exports write them.
#[derive(Default)]
struct Entities([Vec<Vec<u8>>; 5]);

impl Entities {
    fn get(&self, kind: ExternalKind, index: u32) -> Option<Vec<u8>> {
        let sort = match kind {
            ExternalKind::Func => 0,
            ExternalKind::Table => 1,
            ExternalKind::Memory => 2,
            ExternalKind::Global => 3,
            ExternalKind::Tag => 4,
            _ => return None,
        };
        self.0.get::<usize>(sort)?.get(usize::try_from(index).ok()?).cloned()
    }
}
