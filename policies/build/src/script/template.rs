//! Components that are made from an earlier one by replacing what is in its memory.

use crate::cache::digest;

/// Bytes of a template's memory that a build overwrites with a source, behind its length.
pub(super) const SLOT_BYTES: usize = 64 * 1024;
/// Placeholder that fills these bytes in the template, repeated.
pub(super) const SLOT_UNIT: &[u8; 32] = b"pointsman-policy-source-is-here:";
/// Digits of the length.
const LENGTH_DIGITS: usize = 16;
/// Maximum size of a source, bytes.
pub(super) const MAX_SOURCE_BYTES: usize = SLOT_BYTES - LENGTH_DIGITS;

/// Kind of the sections of a component that are core modules.
const CORE_MODULE: u8 = 1;
/// Sections of a core module that a snapshot of its memory changes: memory, data and their count. Two
/// snapshots with different globals count as different code: the component has one global more.
const SNAPSHOT: [u8; 3] = [5, 11, 12];
/// Bytes before the first section.
const HEADER_BYTES: usize = 8;

/// Returns the offset of the source's place. `None` unless there is exactly one.
pub(super) fn find_slot(component: &[u8]) -> Option<usize> {
    let slot = SLOT_UNIT.repeat(SLOT_BYTES / SLOT_UNIT.len());
    let mut found = None;
    let mut at = 0;
    while let Some(next) = find(component.get(at..)?, SLOT_UNIT) {
        at += next;
        if component.get(at..)?.starts_with(&slot) {
            if found.replace(at).is_some() {
                return None;
            }
            at += slot.len();
        } else {
            at += 1;
        }
    }
    found
}

fn find(bytes: &[u8], what: &[u8]) -> Option<usize> {
    let first = what.first()?;
    let mut at = 0;
    loop {
        at += bytes.get(at..)?.iter().position(|byte| byte == first)?;
        if bytes.get(at..)?.starts_with(what) {
            return Some(at);
        }
        at += 1;
    }
}

/// Writes a source into the slot. `None`: it is too long.
pub(super) fn with_source(component: &[u8], slot: usize, source: &[u8]) -> Option<Vec<u8>> {
    let mut component = component.to_vec();
    let text = [format!("{:0LENGTH_DIGITS$}", source.len()).as_bytes(), source].concat();
    let place = component.get_mut(slot..)?.get_mut(..SLOT_BYTES)?;
    let (written, rest) = place.split_at_mut_checked(text.len())?;
    written.copy_from_slice(&text);
    rest.fill(0);
    Some(component)
}

/// Returns what identifies the code of a snapshot: the digest of all that the memory does not change.
pub(super) fn code_of(snapshot: &[u8]) -> Option<Vec<u8>> {
    let sections = sections(snapshot)?;
    let code = sections.iter().filter(|section| !SNAPSHOT.contains(&section.id));
    let code: Vec<_> = code.flat_map(|section| [std::slice::from_ref(&section.id), section.body]).collect();
    Some(digest(code.into_iter()).to_vec())
}

/// Replaces the memory in the largest core module of a component by that of a snapshot.
pub(super) fn with_snapshot(component: &[u8], snapshot: &[u8]) -> Option<Vec<u8>> {
    let parts = sections(component)?;
    let modules = parts.iter().filter(|section| section.id == CORE_MODULE);
    let largest = modules.max_by_key(|section| section.body.len())?.body;
    let memory: Vec<_> =
        sections(snapshot)?.into_iter().filter(|section| SNAPSHOT.contains(&section.id)).collect();
    let mut module = largest.get(..HEADER_BYTES)?.to_vec();
    let mut replaced = 0;
    for section in sections(largest)? {
        if SNAPSHOT.contains(&section.id) {
            write_section(&mut module, memory.iter().find(|new| new.id == section.id)?)?;
            replaced += 1;
        } else {
            write_section(&mut module, &section)?;
        }
    }
    if replaced != memory.len() {
        return None;
    }
    let mut out = component.get(..HEADER_BYTES)?.to_vec();
    for section in parts {
        let is_it = std::ptr::eq(section.body, largest);
        write_section(&mut out, &if is_it { Section { id: CORE_MODULE, body: &module } } else { section })?;
    }
    Some(out)
}

/// A section of a module or component.
struct Section<'a> {
    id: u8,
    body: &'a [u8],
}

fn sections(bytes: &[u8]) -> Option<Vec<Section<'_>>> {
    let mut rest = bytes.get(HEADER_BYTES..)?;
    let mut sections = Vec::new();
    while let Some((id, behind)) = rest.split_first() {
        let (length, behind) = read_number(behind)?;
        let (body, behind) = behind.split_at_checked(length)?;
        sections.push(Section { id: *id, body });
        rest = behind;
    }
    Some(sections)
}

/// Reads a number in LEB128, and returns what follows.
fn read_number(mut bytes: &[u8]) -> Option<(usize, &[u8])> {
    let mut number = 0_u32;
    for shift in [0, 7, 14, 21, 28] {
        let (byte, behind) = bytes.split_first()?;
        number |= u32::from(byte & 0x7f).checked_shl(shift)?;
        bytes = behind;
        if byte & 0x80 == 0 {
            return Some((usize::try_from(number).ok()?, bytes));
        }
    }
    None
}

fn write_section(out: &mut Vec<u8>, section: &Section<'_>) -> Option<()> {
    out.push(section.id);
    let mut rest = u32::try_from(section.body.len()).ok()?;
    loop {
        let low = u8::try_from(rest & 0x7f).ok()?;
        rest >>= 7;
        if rest == 0 {
            out.push(low);
            break;
        }
        out.push(low | 0x80);
    }
    out.extend(section.body);
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn module(memory: &[u8], code: u8) -> Vec<u8> {
        let mut module = b"\0asm\x01\0\0\0".to_vec();
        for (id, body) in [(1, &[0][..]), (5, &[1, 0, 17]), (10, &[code; 300]), (11, memory)] {
            write_section(&mut module, &Section { id, body }).expect("short");
        }
        module
    }

    fn component(main: &[u8]) -> Vec<u8> {
        let mut component = b"\0asm\x0d\0\x01\0".to_vec();
        for (id, body) in
            [(1, &module(b"small", 2)[..200]), (1, main), (2, b"instances"), (1, b"\0asm\x01\0\0\0")]
        {
            write_section(&mut component, &Section { id, body }).expect("short");
        }
        component
    }

    #[test]
    fn a_component_takes_the_memory_of_a_snapshot() {
        let (old, new) = (module(b"old", 1), module(&[7; 500], 1));
        assert_eq!(with_snapshot(&component(&old), &old), Some(component(&old)));
        assert_eq!(with_snapshot(&component(&old), &new), Some(component(&new)));
        assert_eq!(code_of(&old), code_of(&new));
        assert_ne!(code_of(&old), code_of(&module(b"old", 2)));
        let mut more = old.clone();
        write_section(&mut more, &Section { id: 12, body: &[1] }).expect("short");
        assert_eq!(with_snapshot(&component(&old), &more), None);
        assert_eq!(with_snapshot(&component(&more), &old), None);
    }

    #[test]
    fn what_is_cut_short_is_no_component() {
        let whole = component(&module(b"old", 1));
        let new = module(b"new", 1);
        for end in 0..whole.len() {
            let made = with_snapshot(&whole[..end], &new);
            assert!(made.is_none_or(|made| made.len() < whole.len()), "{end}");
        }
    }

    #[test]
    fn a_source_is_written_over_the_only_slot() {
        let slot = SLOT_UNIT.repeat(SLOT_BYTES / 32);
        let text = |parts: &[&[u8]]| parts.concat();
        let template = text(&[b"ppp", SLOT_UNIT, b"a", &slot, b"b", SLOT_UNIT]);
        assert_eq!(find_slot(&template), Some(36));
        assert_eq!(find_slot(&text(&[&slot, b"a", &slot])), None);
        assert_eq!(find_slot(&slot[1..]), None);
        let made = with_source(&template, 36, b"import math\n").expect("it fits");
        assert_eq!(made.len(), template.len());
        assert_eq!(&made[36..64], b"0000000000000012import math\n");
        assert_eq!((made[64], made[36 + SLOT_BYTES - 1], made[36 + SLOT_BYTES]), (0, 0, b'b'));
        let longest = vec![b' '; MAX_SOURCE_BYTES];
        assert!(with_source(&template, 36, &longest).is_some());
        assert!(with_source(&template, 36, &[&longest[..], b" "].concat()).is_none());
    }
}
