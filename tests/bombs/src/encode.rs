//! The binary format, as far as the bombs need it.

/// First bytes of a component.
pub(crate) const COMPONENT: [u8; 8] = *b"\0asm\x0d\0\x01\0";
/// First bytes of a core module.
pub(crate) const MODULE: [u8; 8] = *b"\0asm\x01\0\0\0";

/// Sections of a component.
#[derive(Clone, Copy)]
pub(crate) enum Section {
    CoreModule = 1,
    CoreInstance = 2,
    Component = 4,
    Instance = 5,
    Alias = 6,
    Type = 7,
}

/// An unsigned number in LEB128.
pub(crate) fn leb(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    loop {
        let byte = u8::try_from(value & 0x7f).unwrap_or_default();
        value >>= 7;
        bytes.push(if value == 0 { byte } else { byte | 0x80 });
        if value == 0 {
            return bytes;
        }
    }
}

pub(crate) fn section(id: Section, content: &[u8]) -> Vec<u8> {
    core_section(id as u8, content)
}

pub(crate) fn core_section(id: u8, content: &[u8]) -> Vec<u8> {
    [&[id][..], &leb(content.len() as u64), content].concat()
}

/// Adds a core module to a component. The host compiles it although nothing instantiates it.
#[must_use]
pub fn with_module(component: &[u8], module: &[u8]) -> Vec<u8> {
    [component, &section(Section::CoreModule, module)].concat()
}

/// Adds a core module without imports to a component, and instantiates it `count` times.
#[must_use]
pub fn with_instances(component: &[u8], module: &[u8], count: u32) -> Vec<u8> {
    let index = leb(sections(component, Section::CoreModule));
    let mut instances = leb(u64::from(count));
    for _ in 0..count {
        instances.push(0);
        instances.extend(&index);
        instances.push(0);
    }
    [with_module(component, module), section(Section::CoreInstance, &instances)].concat()
}

/// Adds a component without imports to a component, and instantiates it.
#[must_use]
pub fn with_component(component: &[u8], inner: &[u8]) -> Vec<u8> {
    let index = leb(sections(component, Section::Component));
    let instance = [&[1, 0][..], &index, &[0]].concat();
    [component, &section(Section::Component, inner), &section(Section::Instance, &instance)].concat()
}

/// Number of sections of a kind at the top level of a component.
fn sections(component: &[u8], wanted: Section) -> u64 {
    let (mut rest, mut count) = (component.get(COMPONENT.len()..).unwrap_or_default(), 0);
    while let Some((id, after)) = rest.split_first() {
        let (mut size, mut shift, mut after) = (0_usize, 0, after);
        while let Some((byte, tail)) = after.split_first() {
            size |= usize::from(byte & 0x7f) << shift;
            (shift, after) = (shift + 7, tail);
            if byte & 0x80 == 0 {
                break;
            }
        }
        count += u64::from(*id == wanted as u8);
        rest = after.get(size..).unwrap_or_default();
    }
    count
}
