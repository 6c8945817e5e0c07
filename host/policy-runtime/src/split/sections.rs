//! Reads and writes sections of modules and components, and the items in them, as bytes.

use wasmparser::{BinaryReader, FromReader, SectionLimited};

/// A section: its kind, and its content.
#[derive(Clone, Copy)]
pub(super) struct Section<'a> {
    pub(super) id: u8,
    pub(super) body: &'a [u8],
}

/// Returns the sections of a module or component, without entering those within it.
pub(super) fn sections(bytes: &[u8]) -> Option<Vec<Section<'_>>> {
    let mut reader = BinaryReader::new(bytes.get(8..)?, 0);
    let mut sections = Vec::new();
    while !reader.eof() {
        let id = reader.read_u8().ok()?;
        let length = usize::try_from(reader.read_var_u32().ok()?).ok()?;
        sections.push(Section { id, body: reader.read_bytes(length).ok()? });
    }
    Some(sections)
}

/// Returns the items of a section with their bytes.
pub(super) fn items<'a, T: FromReader<'a>>(body: &'a [u8]) -> Option<Vec<(&'a [u8], T)>> {
    let section = SectionLimited::<T>::new(BinaryReader::new(body, 0)).ok()?;
    let found: Vec<(usize, T)> = section.into_iter_with_offsets().collect::<Result<_, _>>().ok()?;
    let ends: Vec<usize> =
        found.iter().skip(1).map(|(start, _)| *start).chain(std::iter::once(body.len())).collect();
    found.into_iter().zip(ends).map(|((start, item), end)| Some((body.get(start..end)?, item))).collect()
}

pub(super) fn number(length: usize) -> Option<u32> {
    u32::try_from(length).ok()
}

/// Writes a number as LEB128.
pub(super) fn write_number(out: &mut Vec<u8>, number: u32) {
    let mut rest = number;
    loop {
        let low = u8::try_from(rest & 0x7f).unwrap_or_default();
        rest >>= 7;
        if rest == 0 {
            out.push(low);
            return;
        }
        out.push(low | 0x80);
    }
}

pub(super) fn write_name(out: &mut Vec<u8>, name: &str) -> Option<()> {
    write_number(out, number(name.len())?);
    out.extend(name.as_bytes());
    Some(())
}

/// Writes a section. One that is too long for the format would be refused by its reader.
pub(super) fn write_section(out: &mut Vec<u8>, id: u8, body: &[u8]) {
    out.push(id);
    write_number(out, number(body.len()).unwrap_or(u32::MAX));
    out.extend(body);
}
