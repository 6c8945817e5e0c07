//! Counts the types of a component and how deep they are nested. wasmparser reads a nested type by recursion,
//! so this walk opens component and instance types itself and leaves only flat ones to it.

use wasmparser::{BinaryReader, ComponentAlias, ComponentExternName, ComponentImport, ComponentType};
use wasmparser::{ComponentTypeRef, CoreType};

use super::{
    Stopped,
    bounds::{Bound, Counts},
};

const COMPONENT_TYPE: u8 = 0x41;
const INSTANCE_TYPE: u8 = 0x42;

/// Reads the content of a component's type section.
pub(super) fn check(reader: &mut BinaryReader<'_>, counts: &mut Counts) -> Result<(), Stopped> {
    // Items that are left in the section, and in each type that is open.
    let mut left = vec![claimed(reader)?];
    while let Some(items) = left.last_mut() {
        let Some(fewer) = items.checked_sub(1) else {
            left.pop();
            continue;
        };
        *items = fewer;
        counts.add(Bound::Types, 1)?;
        // The section holds types, a type holds declarations.
        if left.len() > 1 && !is_type(reader)? {
            continue;
        }
        if matches!(reader.clone().read_u8()?, COMPONENT_TYPE | INSTANCE_TYPE) {
            reader.read_u8()?;
            left.push(claimed(reader)?);
            counts.check(Bound::TypeDepth, left.len() as u64)?;
        } else {
            reader.read::<ComponentType<'_>>()?;
        }
    }
    Ok(())
}

/// Reads the head of a declaration, and all of it unless it is a type.
fn is_type(reader: &mut BinaryReader<'_>) -> Result<bool, Stopped> {
    match reader.read_u8()? {
        0x00 => drop(reader.read::<CoreType<'_>>()?),
        0x01 => return Ok(true),
        0x02 => {
            reader.read::<ComponentAlias<'_>>()?;
        }
        0x03 => {
            reader.read::<ComponentImport<'_>>()?;
        }
        0x04 => {
            reader.read::<ComponentExternName<'_>>()?;
            reader.read::<ComponentTypeRef>()?;
        }
        byte => return Err(Stopped::Malformed(format!("0x{byte:02x} is not a declaration in a type"))),
    }
    Ok(false)
}

/// Reads a number of items, each of which has a byte at least.
fn claimed(reader: &mut BinaryReader<'_>) -> Result<u32, Stopped> {
    let (count, remaining) = (reader.read_var_u32()?, reader.bytes_remaining());
    if count as usize > remaining {
        return Err(Stopped::Malformed(format!("a type claims {count} items in {remaining} bytes")));
    }
    Ok(count)
}
