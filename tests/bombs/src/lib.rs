//! Policy files that are small and cost their reader much time, memory or stack. Built byte by byte, so that
//! a tool that tests the host needs no encoder.
//!
//! Files that have to reach the compiler are a good policy with one more part: [`with_module`],
//! [`with_instances`] and [`with_component`].

mod encode;
mod modules;

use encode::{COMPONENT, Section, leb, section};
pub use encode::{with_component, with_instances, with_module};
pub use modules::{large_function, many_locals, many_tables, memories, nested_blocks, nested_loops};

/// A component whose only type is an instance type in an instance type and so on. Parsers that descend by
/// recursion overflow their stack.
#[must_use]
pub fn nested_instance_types(depth: usize) -> Vec<u8> {
    let mut content = vec![1];
    for _ in 1..depth {
        // An instance type with one declaration: a type.
        content.extend([0x42, 1, 1]);
    }
    content.extend([0x42, 0]);
    [COMPONENT.to_vec(), section(Section::Type, &content)].concat()
}

/// A file of 14 bytes whose only section claims 4 GiB.
#[must_use]
pub fn claims_4_gib() -> Vec<u8> {
    [&COMPONENT[..], &[Section::Type as u8, 0xff, 0xff, 0xff, 0xff, 0x0f]].concat()
}

/// A section that claims four billion types and holds none.
#[must_use]
pub fn claims_many_types() -> Vec<u8> {
    [COMPONENT.to_vec(), section(Section::Type, &[0xff, 0xff, 0xff, 0xff, 0x0f])].concat()
}

/// Components that each instantiate the one before twice: two to the power of `levels` instances.
#[must_use]
pub fn doubling_instances(levels: u32) -> Vec<u8> {
    let mut bytes = COMPONENT.to_vec();
    bytes.extend(section(Section::Component, &COMPONENT));
    for level in 0..levels {
        let mut inner = COMPONENT.to_vec();
        // Alias of the component before, of the component around this one.
        let alias = [&[1, 4, 2, 1][..], &leb(u64::from(level))].concat();
        inner.extend(section(Section::Alias, &alias));
        // Two instances of component 0, without arguments.
        inner.extend(section(Section::Instance, &[2, 0, 0, 0, 0, 0, 0]));
        bytes.extend(section(Section::Component, &inner));
    }
    let last = [&[1, 0][..], &leb(u64::from(levels)), &[0]].concat();
    bytes.extend(section(Section::Instance, &last));
    bytes
}

/// A component in a component and so on.
#[must_use]
pub fn nested_components(depth: usize) -> Vec<u8> {
    let mut sizes = vec![COMPONENT.len()];
    for _ in 1..depth {
        let inner = sizes.last().copied().unwrap_or_default();
        sizes.push(COMPONENT.len() + 1 + leb(inner as u64).len() + inner);
    }
    sizes.pop();
    let mut bytes = COMPONENT.to_vec();
    for size in sizes.into_iter().rev() {
        bytes.push(Section::Component as u8);
        bytes.extend(leb(size as u64));
        bytes.extend(COMPONENT);
    }
    bytes
}

/// A chain of types: a list of lists of lists.
#[must_use]
pub fn nested_lists(depth: u32) -> Vec<u8> {
    let mut content = leb(u64::from(depth));
    // A list of u8, then lists of the type before.
    content.extend([0x70, 0x7d]);
    for index in 1..depth {
        content.push(0x70);
        content.extend(signed_leb(i64::from(index) - 1));
    }
    [COMPONENT.to_vec(), section(Section::Type, &content)].concat()
}

fn signed_leb(mut value: i64) -> Vec<u8> {
    let mut bytes = Vec::new();
    loop {
        let byte = u8::try_from(value & 0x7f).unwrap_or_default();
        value >>= 7;
        let last = (value == 0 && byte & 0x40 == 0) || (value == -1 && byte & 0x40 != 0);
        bytes.push(if last { byte } else { byte | 0x80 });
        if last {
            return bytes;
        }
    }
}
